"""Normalize text for comparison: Unicode form, case, digits, punctuation, white space, accents.

The stored text is not changed.
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.settings.checks import check_choice, check_ordered
from gpuclassify.settings.signatures import short

# Character classes for RE2, which matches in linear time. White space is as in `str.isspace`.
_BREAKS = r"\t-\r\x1c-\x1f\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}　"
_MARKS = "«´»–—’“”„…∶━►、。〈〉《》「」【】！％（），．１：；？～"  # datatrove's, beyond ASCII
_PUNCTUATION = rf"\x00-\x08\x0b-\x1f\x7f-\x{{9f}}{re.escape(string.punctuation)}{_MARKS}"


def _replace(pattern: str, replacement: str) -> Callable[[pa.Array], pa.Array]:
    return functools.partial(pc.replace_substring_regex, pattern=pattern, replacement=replacement)


def _lower(texts: pa.Array) -> pa.Array:
    # Arrow differs from `str.lower` for a final sigma, and for İ, which becomes two characters.
    is_python = pc.fill_null(pc.match_substring_regex(texts, "[Σİ]"), False)
    lowered = [text.lower() for text in texts.filter(is_python).to_pylist()]
    return pc.replace_with_mask(pc.utf8_lower(texts), is_python, pa.array(lowered, texts.type))


# Normalization steps in the order in which they are applied.
STEPS: dict[str, Callable[[pa.Array], pa.Array]] = {
    "unicode": functools.partial(pc.utf8_normalize, form="NFC"),
    "case": _lower,
    "digits": _replace(r"\p{Nd}+(?:[.,،٫⎖⎗⎘]\p{Nd}+)?", "0"),
    "punctuation": _replace(f"[{_PUNCTUATION}]+", " "),
    # Single spaces are not matched, because replacing them takes four times as long.
    "white_space": _replace(f"[ {_BREAKS}]{{2,}}|[{_BREAKS}]", " "),
    "accents": lambda texts: _replace(r"\p{Mn}+", "")(pc.utf8_normalize(texts, form="NFD")),
}
PRESETS = {
    "basic": ("unicode", "case", "white_space"),
    "datatrove": ("case", "digits", "punctuation", "white_space", "accents"),
}


def as_steps(names: Any) -> Any:
    """Convert names of normalization steps and presets to a tuple of names of steps.

    It has each step once, in the order of `STEPS`. A function and None are returned unchanged, and
    an empty list or tuple gives None.
    """
    if names is None or callable(names):
        return names
    check_ordered("normalize", names)
    selected: set[str] = set()
    for name in names if isinstance(names, list | tuple) else [names]:
        check_choice("normalize", name, (*PRESETS, *STEPS))
        selected |= {*PRESETS.get(name, [name])}
    return tuple(name for name in STEPS if name in selected) or None


def normalized(
    texts: pa.LargeStringArray, steps: Sequence[str] | Callable[[str], str]
) -> pa.LargeStringArray:
    """Normalize texts by named steps or a function from text to text.

    `steps` are keys of `STEPS`, applied in this order; "white_space" also removes spaces at both
    ends. A text that would become empty is unchanged, and null stays null. Raises TypeError if the
    function returns something other than a text, such as bytes or None.
    """
    if callable(steps):
        values = [text and steps(text) for text in texts.to_pylist()]
        others = [value for value in values if not isinstance(value, str)]
        if len(others) > texts.null_count:
            value = next((value for value in others if value is not None), None)
            raise TypeError(
                f"normalize= has to return a text for each text, and returned {short(value)}"
            )
        new = pa.array(values, texts.type)
    else:
        new = functools.reduce(lambda text, name: STEPS[name](text), steps, texts)
        new = pc.utf8_trim(new, " ") if "white_space" in steps else new
    return pc.if_else(pc.equal(pc.binary_length(new), 0), texts, new)
