"""Find the safety prompt of a guard model in its model card, and check it.

Such a model was trained on one exact prompt, which is published with it. Another wording would
change its answers, so that other prompts need an explicit digest.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from gpuclassify import hub
from gpuclassify.hub.identity import absolute
from gpuclassify.settings.paths import is_file

CATEGORY_CODES = tuple(f"O{number}" for number in range(1, 14))
# Digests of the prompt for an empty document, from the sources of NeMo Curator 1.4 and 0.8.
KNOWN_DIGESTS = frozenset(
    {
        "40a4fda7e599ca53bb8e508f9ed5aa906f39925886de1cbda431b24824d24bce",
        "7a13a196a36a40a83d1fa3526f9b94daea2918e333901f1586af62817cbc7d7f",
    }
)
_MARKERS = (
    "<BEGIN UNSAFE CONTENT CATEGORIES>",
    "<END UNSAFE CONTENT CATEGORIES>",
    "<BEGIN CONVERSATION>",
    "<END CONVERSATION>",
)
_FIRST_ANSWER = "- First line must read 'safe' or 'unsafe'."
_SECOND_ANSWER = (
    "- If unsafe, a second line must include a comma-separated list of violated categories."
)
_PROMPT = re.compile(r"\[INST\] (?:(?!\[/?INST\]).)*\[/INST\]", re.DOTALL)
_CATEGORY = re.compile(r"^[ \t]*(O\d+):", re.MULTILINE)
_TURN = re.compile(
    r"<BEGIN CONVERSATION>\s*User:(?P<document>[ \t]*(?:\S.*)?)(?=\n\s*<END CONVERSATION>)"
)
_END = re.compile(re.escape(_SECOND_ANSWER) + r"\s*\[/INST\]$")
_CURE = "Pass template= with the whole prompt as text, or with the path of a file that holds it"


class TemplateError(ValueError):
    """Error for a prompt that is missing or malformed, or has another digest than expected."""


@dataclass(frozen=True)
class SafetyTemplate:
    """Safety prompt, split at the document: ``head + document + tail``."""

    head: str
    tail: str

    @property
    def text(self) -> str:
        """Prompt for an empty document."""
        return self.head + self.tail

    @property
    def digest(self) -> str:
        """SHA-256 of `text` in UTF-8, 64 hex digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def read_template(
    template: str | None,
    template_digest: str | None,
    identity: hub.Identity,
    cache_dir: hub.Location | None,
) -> SafetyTemplate:
    """Read the safety prompt of the model `identity`, and check its digest.

    A `template` with a line break is the prompt itself. Otherwise it is the path of a file with the
    prompt, or None for the model's ``README.md``. Without `template_digest`, a prompt from a file
    must have a digest in `KNOWN_DIGESTS`, and a prompt passed as text may have any. Raises
    TemplateError if the prompt is missing, incomplete, ambiguous, or has another digest.
    """
    expected = None if template_digest is None else full_digest("template_digest", template_digest)
    is_explicit = template is not None and "\n" in template
    if template is None:
        source, where = _model_card(identity, cache_dir)
    elif is_explicit:
        source, where = template, "the text passed as template="
    else:
        source, where = _file_text(template), f"the file {absolute(template)}"
    safety = parse_template(source, where)
    if expected is not None and safety.digest != expected:
        raise TemplateError(
            f"the safety prompt in {where} has the digest {safety.digest}, not "
            f"template_digest={expected!r}. Read it, then pass the digest found if it is the "
            "prompt that is meant, or pass template= with that prompt"
        )
    if expected is None and not is_explicit and safety.digest not in KNOWN_DIGESTS:
        raise TemplateError(
            f"the safety prompt in {where} is none that is known. Read it, then pass "
            f'template_digest="{safety.digest}" if it is the prompt that the model was tuned on, '
            "or pass template= with that prompt"
        )
    return safety


def parse_template(source_text: str, where: str) -> SafetyTemplate:
    """Find the safety prompt in a text, which may have it several times, or indented as code.

    `where` names the text in messages. Raises TemplateError if no prompt is complete, or if several
    complete prompts differ.
    """
    source_text = source_text.replace("\r\n", "\n")
    prompts = _prompts_in(source_text)
    complete = set()
    for prompt in prompts:
        if not _problems(prompt) and (turn := _TURN.search(prompt)):
            head, tail = prompt[: turn.start("document")], prompt[turn.end("document") :]
            complete.add(SafetyTemplate(f"{head} ", tail))
    if len(complete) == 1:
        return complete.pop()
    if complete:
        raise TemplateError(
            f"{where} holds {len(complete)} different safety prompts, with the digests "
            f"{', '.join(sorted(template.digest for template in complete))}. {_CURE}"
        )
    if prompts:
        problems = min(map(_problems, prompts), key=len)
    else:
        problems = ["it has no text from '[INST] ' to '[/INST]'"]
        if any(marker in source_text for marker in _MARKERS):
            problems += _problems(source_text)
    raise TemplateError(f"{where} holds no complete safety prompt: {'; '.join(problems)}. {_CURE}")


def full_digest(name: str, digest: str) -> str:
    """Return a SHA-256 in lower case; raise ValueError unless it has 64 hex digits."""
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-fA-F]{64}", digest):
        raise ValueError(
            f"{name}={digest!r} is not a digest: give all 64 hex digits of the sha256 of "
            "the prompt for an empty document"
        )
    return digest.lower()


def _model_card(identity: hub.Identity, cache_dir: hub.Location | None) -> tuple[str, str]:
    where = f"README.md of {identity.name}"
    if not identity.is_directory:
        where += f" (https://huggingface.co/{identity.name})"
    text = hub.read_text(identity, "README.md", cache_dir=cache_dir)
    if text is None:
        raise TemplateError(f"there is no {where}, which is to hold its safety prompt. {_CURE}")
    return text, where


def _file_text(path: str) -> str:
    if not is_file(absolute(path)):
        raise TemplateError(
            f"template={path!r} has no line break and so names a file, but there is no file "
            f"{absolute(path)}. {_CURE}"
        )
    try:
        return absolute(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise TemplateError(f"the file {absolute(path)} is not UTF-8 text: {err}") from err


def _prompts_in(text: str) -> list[str]:
    """Return every text from ``[INST]`` to ``[/INST]``, without the indentation of code blocks."""
    prompts = []
    for match in _PROMPT.finditer(text):
        indent = text[: match.start()].rpartition("\n")[2]
        first, *others = match[0].split("\n")
        is_block = not indent.strip() and all(
            line.startswith(indent) for line in others if line.strip()
        )
        if is_block:
            others = [line[len(indent) :] for line in others]
        prompts.append("\n".join([first, *others]))
    return prompts


def _problems(prompt: str) -> list[str]:
    """Return a sentence, for messages, on each required part that `prompt` lacks."""
    counts = {marker: prompt.count(marker) for marker in _MARKERS}
    problems = [f"{marker} occurs {n} times, not once" for marker, n in counts.items() if n != 1]
    parts = re.split("|".join(_MARKERS), prompt)
    if not problems and tuple(sorted(_MARKERS, key=prompt.find)) != _MARKERS:
        problems.append(f"the markers are not in the order {', '.join(_MARKERS)}")
    if problems:
        parts = [prompt] * 5  # unknown parts: search the whole prompt
    opening, categories, _, _, instruction = parts
    codes = _CATEGORY.findall(categories)
    if codes != list(CATEGORY_CODES):
        problems.append(
            f"the category lines are {', '.join(codes) or 'none'}, not O1: to O13: in order"
        )
    if "'User' messages" not in opening.partition("\n")[0]:
        problems.append("its first line does not speak of 'User' messages")
    if not _TURN.search(prompt):
        problems.append("the conversation is not one line of 'User:' and nothing or a placeholder")
    if "for User in" not in instruction:
        problems.append("the instruction does not ask for an assessment 'for User in'")
    if _FIRST_ANSWER not in instruction:
        problems.append(f"the line {_FIRST_ANSWER!r} is missing")
    if not _END.search(prompt):
        problems.append(f"the line {_SECOND_ANSWER!r} is not the last one, before [/INST]")
    return problems
