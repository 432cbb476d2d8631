"""What a safety model's answer says, and from which token on nothing can change it."""

from __future__ import annotations

from dataclasses import dataclass

from gpuclassify.questions.template import CATEGORY_CODES

SAFE, UNSAFE, UNKNOWN = "safe", "unsafe", "unknown"
ANSWER_LABELS = (UNKNOWN, SAFE, *CATEGORY_CODES)


@dataclass(frozen=True)
class Verdict:
    """An answer's label, and every category that it names.

    Attributes
    ----------
    label : str
        "safe", the one category named, or "unknown" for an answer in another form, such as one
        that names several.
    categories : tuple of str
        Known categories in the order in which they are named.
    """

    label: str
    categories: tuple[str, ...] = ()


def final_verdict(answer: str) -> Verdict:
    """The verdict of an answer to which nothing is added."""
    verdict = read_answer(answer, is_complete=True)
    assert verdict is not None, "a complete answer is decided"
    return verdict


def read_answer(text: str, is_complete: bool, needs_all_categories: bool = False) -> Verdict | None:
    """The verdict of an answer, or None while more tokens can change it.

    The first line must be ``safe`` or ``unsafe``; after ``unsafe`` the second one lists categories
    from ``O1`` to ``O13`` with commas between them. Further lines are not read. Several categories
    make the label ``unknown``, as in both generations of NeMo Curator (``_parse_response``): a
    filter that lets one category pass lets no text pass that has another one as well.

    Parameters
    ----------
    text : str
        The answer so far.
    is_complete : bool
        Whether no more is to come.
    needs_all_categories : bool
        Whether the rest of the second line matters, or just how many categories it names.
    """
    first, *others = text.split("\n")
    word = first.strip()
    if not others and not is_complete:
        is_open = any(answer.startswith(word) for answer in (SAFE, UNSAFE))
        return None if is_open else Verdict(UNKNOWN)
    if word == SAFE:
        return Verdict(SAFE)
    if word != UNSAFE:
        return Verdict(UNKNOWN)
    is_whole_line = is_complete or len(others) > 1
    return _read_categories(others[0] if others else "", is_whole_line, needs_all_categories)


def _read_categories(line: str, is_whole: bool, needs_all: bool) -> Verdict | None:
    first, *others = (part.strip() for part in line.split(","))
    if not is_whole and not others:
        is_open = any(code.startswith(first) for code in CATEGORY_CODES)
        return None if is_open else Verdict(UNKNOWN)
    if first not in CATEGORY_CODES:
        return Verdict(UNKNOWN)
    if needs_all and not is_whole:
        return None
    named = [code for code in (first, *others) if code in CATEGORY_CODES]
    return Verdict(UNKNOWN if others else first, tuple(dict.fromkeys(named)))
