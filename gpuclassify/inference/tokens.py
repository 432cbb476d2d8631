"""Texts to ragged tokens: flat ids with offsets, nothing padded, equal texts only once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Encodings of a block are alive together, at over 100 bytes a token: this bounds them.
BLOCK_CHARS = 4_000_000
BLOCK_TEXTS = 2_048


@dataclass(frozen=True)
class TokenBatch:
    """Token ids of many texts, end to end.

    Attributes
    ----------
    ids : ndarray of int32, shape (tokens,)
    offsets : ndarray of int64, shape (texts + 1,)
        Text i has ``ids[offsets[i]:offsets[i + 1]]``.
    type_ids : ndarray of int32, shape (tokens,), optional
        Segment ids, only for tokenizers that give a single text other ids than zero.
    truncated : int
        How many texts were cut to the tokenizer's limit.
    """

    ids: np.ndarray
    offsets: np.ndarray
    type_ids: np.ndarray | None = None
    truncated: int = 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each text, int64 (texts,)."""
        return np.diff(self.offsets)


def fold(texts: Sequence[str | None]) -> tuple[list[str], np.ndarray]:
    """Distinct texts in order of appearance, and where each row's text is among them.

    Returns
    -------
    distinct : list of str
    positions : ndarray of int64, shape (rows,)
        -1 for a null row.
    """
    found: dict[str, int] = {}
    positions = np.fromiter(
        (-1 if text is None else found.setdefault(text, len(found)) for text in texts),
        dtype=np.int64,
        count=len(texts),
    )
    return list(found), positions


class TextTokenizer:
    """A Hugging Face tokenizer that cuts at a fixed length and never pads.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        Is configured here and must not be shared: its truncation is state, and changing it while
        another thread tokenizes is an error in the tokenizers library.
    max_tokens : int
        Most tokens of a text, special tokens included.
    """

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_padding()
            self._backend.enable_truncation(max_tokens, direction=tokenizer.truncation_side)
        self._has_type_ids = self._gives_type_ids()
        self._filler = _first_known(
            tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
        )

    def __call__(self, texts: Sequence[str]) -> TokenBatch:
        """Tokenize `texts`, special tokens included.

        An empty text of a tokenizer without special tokens becomes its first-or-last-of-text token,
        because a model cannot read nothing.
        """
        ids: list[np.ndarray] = []
        type_ids: list[np.ndarray] = []
        lengths = np.zeros(len(texts) + 1, dtype=np.int64)
        truncated = 0
        encoded = itertools.chain.from_iterable(map(self._encode, _blocks(texts)))
        for row, (row_ids, row_types, is_cut) in enumerate(encoded):
            row_ids = row_ids or [self._filler]
            ids.append(np.asarray(row_ids, dtype=np.int32))
            if self._has_type_ids:
                type_ids.append(np.asarray(row_types or [0], dtype=np.int32))
            lengths[row + 1] = len(row_ids)
            truncated += is_cut
        return TokenBatch(
            _flat(ids),
            np.cumsum(lengths),
            _flat(type_ids) if self._has_type_ids else None,
            truncated,
        )

    def _encode(self, texts: Sequence[str]) -> Iterator[tuple[list[int], list[int], bool]]:
        if self._backend is None:
            yield from self._encode_slowly(texts)
            return
        for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=True):
            yield encoding.ids, encoding.type_ids, bool(encoding.overflowing)

    def _encode_slowly(self, texts: Sequence[str]) -> Iterator[tuple[list[int], list[int], bool]]:
        """For the few tokenizers that are written in Python."""
        output = self._tokenizer(
            list(texts),
            truncation=True,
            max_length=self.max_tokens,
            padding=False,
            return_token_type_ids=True,
        )
        encoded = zip(texts, output["input_ids"], output["token_type_ids"], strict=True)
        for text, ids, types in encoded:
            yield ids, types, len(ids) == self.max_tokens and self._is_longer(text)

    def _is_longer(self, text: str) -> bool:
        return len(self._tokenizer(text, verbose=False)["input_ids"]) > self.max_tokens

    def _gives_type_ids(self) -> bool:
        if "token_type_ids" not in self._tokenizer.model_input_names:
            return False
        return any(any(types) for _, types, _ in self._encode(["a probe"]))


def _blocks(texts: Sequence[str]) -> Iterator[list[str]]:
    block: list[str] = []
    chars = 0
    for text in texts:
        if block and (chars + len(text) > BLOCK_CHARS or len(block) == BLOCK_TEXTS):
            yield block
            block, chars = [], 0
        block.append(text)
        chars += len(text)
    if block:
        yield block


def _flat(rows: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int32)


def _first_known(*token_ids: int | None) -> int:
    return next((token_id for token_id in token_ids if token_id is not None), 0)
