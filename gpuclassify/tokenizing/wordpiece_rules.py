"""Which tokenizers cuDF's WordPiece can stand in for, and what it has to know of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

# libcudf takes a word of 200 bytes or more for unknown, and a character has up to 4 bytes.
LONGEST_WORD_CHARS = 49


class NotEligibleError(ValueError):
    """The tokenizer follows rules that the GPU does not."""


@dataclass(frozen=True)
class WordPieceRules:
    """What the GPU has to know of a tokenizer.

    Attributes
    ----------
    vocabulary : tuple of str
        The token of each id; something that no text contains where an id has none.
    is_lowercase : bool
        Whether letters lose case and accents.
    prefix, suffix : tuple of int
        Ids around those of a text.
    special : tuple of str
        Tokens that have an id of their own wherever they are spelt out.
    """

    vocabulary: tuple[str, ...]
    is_lowercase: bool
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    special: tuple[str, ...]

    @property
    def added_count(self) -> int:
        """Special tokens that every text gets."""
        return len(self.prefix) + len(self.suffix)


def read_rules(backend: Any) -> WordPieceRules:
    """What a ``tokenizers.Tokenizer`` does with a single text.

    Raises
    ------
    NotEligibleError
        It does something that cuDF's WordPiece does not; the message says what.
    """
    description = json.loads(backend.to_str())
    model = description["model"]
    for name, wanted in (
        ("type", "WordPiece"),
        ("continuing_subword_prefix", "##"),
        ("unk_token", "[UNK]"),
    ):
        _require(model.get(name) == wanted, f"its model's {name} is {model.get(name)!r}")
    longest = model["max_input_chars_per_word"]
    _require(longest >= LONGEST_WORD_CHARS, f"it gives up on words of {longest + 1} characters")
    _require("[UNK]" in model["vocab"], "its vocabulary has no [UNK]")
    splitter = (description["pre_tokenizer"] or {}).get("type")
    _require(splitter == "BertPreTokenizer", f"its pre-tokenizer is {splitter}")
    side = (description["truncation"] or {}).get("direction", "Right")
    _require(side == "Right", "it cuts texts on the left")
    prefix, suffix = _read_added(description["post_processor"] or {})
    return WordPieceRules(
        _rows(model["vocab"]),
        _reads_lowercase(description["normalizer"] or {}),
        prefix,
        suffix,
        tuple(map(_read_special, description["added_tokens"])),
    )


def _require(is_met: bool, reason: str) -> None:
    if not is_met:
        raise NotEligibleError(f"{reason}, which cudf cannot do: tokenize on the host")


def _rows(vocabulary: dict[str, int]) -> tuple[str, ...]:
    tokens = {number: token for token, number in vocabulary.items()}
    _require(len(tokens) == len(vocabulary), "two tokens of its vocabulary have one id")
    # A word has no space, so that none equals the token of an unused id.
    return tuple(tokens.get(number, f" {number}") for number in range(max(tokens) + 1))


def _reads_lowercase(normalizer: dict[str, Any]) -> bool:
    kind = normalizer.get("type")
    _require(kind == "BertNormalizer", f"its normalizer is {kind}")
    for name in ("clean_text", "handle_chinese_chars"):
        _require(normalizer[name], f"its normalizer has {name}={normalizer[name]}")
    is_lowercase, strips = normalizer["lowercase"], normalizer["strip_accents"]
    _require(
        strips in (None, is_lowercase), f"it has lowercase={is_lowercase}, strip_accents={strips}"
    )
    return is_lowercase


def _read_added(processor: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids before and after those of a single text."""
    kind = processor.get("type")
    if kind == "BertProcessing":
        return (processor["cls"][1],), (processor["sep"][1],)
    _require(kind == "TemplateProcessing", f"its post-processor is {kind}")
    sides: list[list[int]] = [[]]
    for piece in processor["single"]:
        [(name, value)] = piece.items()
        _require(value["type_id"] == 0, "it gives a single text segment ids other than 0")
        if name == "Sequence":
            sides.append([])
        else:
            sides[-1] += processor["special_tokens"][value["id"]]["ids"]
    _require(len(sides) == 2 and any(sides), "its template adds no token to a text, or repeats it")
    return tuple(sides[0]), tuple(sides[1])


def _read_special(token: dict[str, Any]) -> str:
    _require(not token["normalized"], f"it finds {token['content']!r} in normalized text")
    return token["content"]
