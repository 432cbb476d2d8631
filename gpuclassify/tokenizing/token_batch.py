"""Ragged tokens of many texts: flat ids with offsets, nothing padded."""

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
