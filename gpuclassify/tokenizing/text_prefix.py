"""Where a text can be cut so that what is before the cut has the tokens that it has in the text.

A cut is made in a gap: before a single space between two printable characters of ASCII. Neither
normal forms nor graphemes, letter case or runs of white space reach across it. So whatever works
character by character leaves both sides as they are alone, and what finds words ends one there;
a model sees one word at a time. Tokenizers of other kinds have their texts read whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_GAP = re.compile("[!-~](?= [!-~])")
_PRINTABLE = " ".join(map(chr, range(ord("!"), ord("~") + 1)))

_LOCAL_NORMALIZERS = {
    *("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled"),
    *("Strip", "StripAccents"),
}
# Patterns that match white space only, and no single space.
_WHITE_SPACE_RUNS = {r"\s{2,}|[\n\r\t]", " {2,}"}
_LOCAL_SPLITTERS = {"Digits", "Punctuation"}
_WORD_SPLITTERS = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}
# Of an added token that could be found across a gap.
_ACROSS = re.compile(r"\S[\s▁]")


def prefix_end(text: str, chars: int) -> int:
    """Where to cut `text`: in the first gap behind `chars` characters, or at its end."""
    gap = _GAP.search(text, chars)
    return len(text) if gap is None else gap.end()


def ends_words_in_gaps(backend: Any) -> bool:
    """Whether a ``tokenizers.Tokenizer`` is known to give both sides of a gap tokens of their own.

    The tokens of a text then begin with those of what is before any of its gaps.
    """
    description = json.loads(backend.to_str())
    splitters = list(_steps(description["pre_tokenizer"], "pretokenizers"))
    while splitters and splitters[0]["type"] in _LOCAL_SPLITTERS:
        splitters.pop(0)
    return (
        all(map(_is_local, _steps(description["normalizer"], "normalizers")))
        and _keeps_ascii(backend.normalizer)
        and bool(splitters)
        and _ends_words(splitters[0])
        and not any(_ACROSS.search(token["content"]) for token in description["added_tokens"])
    )


def _steps(step: dict[str, Any] | None, name: str) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, those of sequences too."""
    if step is not None and step["type"] == "Sequence":
        for own in step[name]:
            yield from _steps(own, name)
    elif step is not None:
        yield step


def _is_local(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] != "Replace":
        return normalizer["type"] in _LOCAL_NORMALIZERS
    [(kind, pattern)] = normalizer["pattern"].items()
    if kind == "Regex":
        return pattern in _WHITE_SPACE_RUNS
    replacing = pattern + normalizer["content"]
    return bool(normalizer["content"]) and not re.search(r"[\s▁]", replacing)


def _keeps_ascii(normalizer: Any) -> bool:
    """Whether printable ASCII stays what it is, but for letter case."""
    return normalizer is None or normalizer.normalize_str(_PRINTABLE).lower() == _PRINTABLE.lower()


def _ends_words(splitter: dict[str, Any]) -> bool:
    kind = splitter["type"]
    if kind == "Metaspace":
        return splitter["split"]
    return splitter["use_regex"] if kind == "ByteLevel" else kind in _WORD_SPLITTERS
