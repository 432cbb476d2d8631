"""Ragged tokens of many texts: flat ids with offsets, nothing padded; long texts as windows."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TokenBatch:
    """Token ids of many texts, end to end.

    Attributes
    ----------
    ids : ndarray or Tensor of int32, shape (tokens,)
        A Tensor where they were made on a GPU, which everything else is not.
    offsets : ndarray of int64, shape (texts + 1,)
        Text i has ``ids[offsets[i]:offsets[i + 1]]``.
    type_ids : ndarray of int32, shape (tokens,), optional
        Segment ids, only for tokenizers that give a single text other ids than zero.
    whole_lengths : ndarray of int64, shape (texts,), optional
        Tokens that each text had before it was cut, or some number above its length if it was cut
        and they were not counted. ``None``: nothing was cut.
    """

    ids: Any
    offsets: np.ndarray
    type_ids: np.ndarray | None = None
    whole_lengths: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each text, int64 (texts,)."""
        return np.diff(self.offsets)

    @property
    def is_on_host(self) -> bool:
        """Whether the ids can be read without waiting for a GPU."""
        return isinstance(self.ids, np.ndarray)

    def take(self, rows: Sequence[int] | np.ndarray) -> TokenBatch:
        """Some of the texts, on the host."""
        bounds = [slice(self.offsets[row], self.offsets[row + 1]) for row in rows]
        types = () if self.type_ids is None else [self.type_ids[own] for own in bounds]
        whole = None if self.whole_lengths is None else self.whole_lengths[list(rows)]
        ids = [self.ids[own] for own in bounds]
        if not self.is_on_host:
            ids = [own.cpu().numpy() for own in ids]
        return flat_batch(ids, types, whole)

    def digests(self) -> Iterator[bytes]:
        """For each text 16 bytes that only a text of the same tokens has; ids are on the host."""
        parts = [self.ids] if self.type_ids is None else [self.ids, self.type_ids]
        for start, stop in itertools.pairwise(self.offsets.tolist()):
            digest = hashlib.blake2b(digest_size=16)
            for part in parts:
                digest.update(part[start:stop].data)
            yield digest.digest()

    @property
    def seen_share(self) -> np.ndarray:
        """Share of each whole text's tokens that are here, float32 (texts,).

        Below 1 if the text was cut; how far, only if the tokens behind the cut were counted.
        """
        if self.whole_lengths is None:
            return np.ones(len(self), dtype=np.float32)
        return (self.lengths / self.whole_lengths).astype(np.float32)

    @property
    def truncated(self) -> int:
        """How many texts were cut."""
        if self.whole_lengths is None:
            return 0
        return int((self.whole_lengths > self.lengths).sum())


def flat_batch(
    rows: Sequence[np.ndarray],
    type_ids: Sequence[np.ndarray] = (),
    whole_lengths: np.ndarray | None = None,
) -> TokenBatch:
    """Rows of ids end to end."""
    lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    return TokenBatch(_flat(rows), offsets, _flat(type_ids) if type_ids else None, whole_lengths)


def _flat(rows: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(rows) if rows else np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class TextTokens:
    """Tokens of one text: its only window, or all of them.

    Attributes
    ----------
    windows : list of ndarray of int32
        Special tokens included. One, unless the tokenizer was asked for windows.
    type_ids : list of ndarray of int32, optional
        Segment ids of each window.
    whole_length : int
        Tokens of the whole text, special tokens included, those of both windows if it was read at
        its ends. Where only parts were tokenized, more than the windows have.
    """

    windows: list[np.ndarray]
    type_ids: list[np.ndarray] | None
    whole_length: int


@dataclass(frozen=True)
class Windows:
    """The windows of many texts that are run, in the texts' order.

    Attributes
    ----------
    tokens : TokenBatch
        Every window as a text of its own.
    counts : ndarray of int64, shape (texts,)
        How many of them each text has; at least one.
    found : ndarray of int64, shape (texts,)
        How many it would have; more than `counts` where only the first one is run.
    seen_share : ndarray of float32, shape (texts,)
        Share of each text's tokens that is run, as `TokenBatch.seen_share` tells it.
    """

    tokens: TokenBatch
    counts: np.ndarray
    found: np.ndarray
    seen_share: np.ndarray

    @property
    def truncated(self) -> int:
        """How many texts are not run to the full."""
        return int((self.seen_share < 1).sum())


def all_windows(texts: Sequence[TextTokens]) -> Windows:
    """Every window of every text."""
    counts = _window_counts(texts)
    types = [ids for text in texts if text.type_ids is not None for ids in text.type_ids]
    tokens = flat_batch([ids for text in texts for ids in text.windows], types)
    shares = [min(1, sum(map(len, text.windows)) / text.whole_length) for text in texts]
    return Windows(tokens, counts, counts, np.array(shares, dtype=np.float32))


def first_windows(texts: Sequence[TextTokens]) -> Windows:
    """The first window of each text."""
    whole = np.fromiter((text.whole_length for text in texts), dtype=np.int64, count=len(texts))
    types = [text.type_ids[0] for text in texts if text.type_ids is not None]
    tokens = flat_batch([text.windows[0] for text in texts], types, whole)
    ones = np.ones(len(texts), dtype=np.int64)
    return Windows(tokens, ones, _window_counts(texts), tokens.seen_share)


def only_windows(tokens: TokenBatch) -> Windows:
    """The windows of texts that have one each, cut or not."""
    ones = np.ones(len(tokens), dtype=np.int64)
    return Windows(tokens, ones, ones, tokens.seen_share)


def _window_counts(texts: Sequence[TextTokens]) -> np.ndarray:
    return np.fromiter((len(text.windows) for text in texts), dtype=np.int64, count=len(texts))


def aggregate(values: np.ndarray, counts: np.ndarray, lengths: np.ndarray, how: str) -> np.ndarray:
    """One row a text, float32 (texts, outputs), from one row a window.

    Parameters
    ----------
    values : ndarray of float32, shape (windows, outputs)
    counts : ndarray of int64, shape (texts,)
        Windows of each text, at least one.
    lengths : ndarray of int64, shape (windows,)
        The text's own tokens in each window.
    how : {"mean", "max", "tokens"}
        Mean or maximum of each output, or the mean weighted by the text's tokens in the windows,
        which is the plain mean of a text without any. A text with a single window keeps its values
        to the bit.
    """
    if not len(counts):
        return np.zeros((0, values.shape[1]), dtype=values.dtype)
    starts = np.cumsum(counts) - counts
    if how == "max":
        return np.maximum.reduceat(values, starts, axis=0)
    weights = np.ones(len(values))
    if how == "tokens":
        has_any = np.repeat(np.add.reduceat(lengths, starts) > 0, counts)
        weights[has_any] = lengths[has_any]
    sums = np.add.reduceat(values * weights[:, None], starts, axis=0)
    return (sums / np.add.reduceat(weights, starts)[:, None]).astype(np.float32)
