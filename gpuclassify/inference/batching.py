"""Longest first, cut by a token budget, padded to the batch's longest row, and back in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from gpuclassify.inference.memory import BatchLimits
from gpuclassify.inference.tokens import TokenBatch

# A row shorter than this share of the batch's width begins a new batch, if this one is enough.
MOST_PADDED_SHARE = 0.9
# A packed batch is a rectangle around its layers: at most so many times its tokens.
MOST_RECTANGLE = 2


@dataclass(frozen=True)
class PaddedBatch:
    """Rows of a TokenBatch as a rectangle.

    Attributes
    ----------
    rows : ndarray of int64, shape (rows,)
        Which texts these are.
    ids : ndarray of int64, shape (rows, width)
    mask : ndarray of int64, shape (rows, width)
        1 for a token, 0 for padding. Never derived from ids: the padding id can be a real token.
    type_ids : ndarray of int64, shape (rows, width), optional
    is_packed : bool
        Whether the model's layers run on its tokens alone, without the padding.
    """

    rows: np.ndarray
    ids: np.ndarray
    mask: np.ndarray
    type_ids: np.ndarray | None = None
    is_packed: bool = False

    @property
    def width(self) -> int:
        """Tokens of the longest row."""
        return self.ids.shape[1]

    @property
    def run_tokens(self) -> int:
        """Tokens that layers run: all of the rectangle, unless it is packed."""
        return int(self.mask.sum()) if self.is_packed else self.mask.size

    def part(self, start: int, stop: int) -> PaddedBatch:
        """The rows from start to stop, at the same width."""
        types = None if self.type_ids is None else self.type_ids[start:stop]
        return PaddedBatch(
            self.rows[start:stop],
            self.ids[start:stop],
            self.mask[start:stop],
            types,
            self.is_packed,
        )


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """Order of texts from longest to shortest, int64 (n,); equal lengths keep their order.

    Longest first, so that an out-of-memory shows in the first batch.
    """
    return np.argsort(-lengths, kind="stable")


def cut_batches(
    lengths: np.ndarray, current_limits: Callable[[], BatchLimits]
) -> Iterator[tuple[int, int]]:
    """Consecutive (start, stop) ranges of `lengths` whose sizes stay within the limits.

    Parameters
    ----------
    lengths : ndarray of int, shape (n,)
        Tokens of each text, in the order in which they will run.
    current_limits : callable
        Asked before each batch, so that limits lowered by an out-of-memory hold at once.
    """
    start = 0
    while start < len(lengths):
        limits = current_limits()
        find_stop = _stop_of_packed_batch if limits.is_packed else _stop_of_batch
        stop = find_stop(lengths, start, limits)
        yield start, stop
        start = stop


def pad(
    tokens: TokenBatch, rows: np.ndarray, pad_id: int, side: str = "right", type_pad_id: int = 0
) -> PaddedBatch:
    """The texts `rows` padded to the longest of them.

    Parameters
    ----------
    tokens : TokenBatch
    rows : ndarray of int64, shape (rows,)
    pad_id : int
        Token id that fills the padding.
    side : {"right", "left"}
        Where the padding goes.
    type_pad_id : int
        Segment id that fills the padding.
    """
    lengths = tokens.lengths[rows]
    width = int(lengths.max())
    columns = np.arange(width)
    if side == "right":
        is_token = columns < lengths[:, None]
    else:
        is_token = columns >= width - lengths[:, None]
    # Boolean assignment fills row by row, which is the order of the concatenated source.
    source = np.concatenate(
        [np.arange(tokens.offsets[row], tokens.offsets[row + 1]) for row in rows]
    )
    ids = np.full(is_token.shape, pad_id, dtype=np.int64)
    ids[is_token] = tokens.ids[source]
    type_ids = None
    if tokens.type_ids is not None:
        type_ids = np.full(is_token.shape, type_pad_id, dtype=np.int64)
        type_ids[is_token] = tokens.type_ids[source]
    return PaddedBatch(rows, ids, is_token.astype(np.int64), type_ids)


def _stop_of_batch(lengths: np.ndarray, start: int, limits: BatchLimits) -> int:
    width = int(lengths[start])
    stop = start + 1
    while stop < len(lengths):
        length = int(lengths[stop])
        if limits.is_equal_length and length != width:
            break
        is_enough = (stop - start) * width >= limits.enough_tokens
        if is_enough and length < width * MOST_PADDED_SHARE:
            break
        width = max(width, length)
        if stop + 1 - start > limits.rows(width):
            break
        stop += 1
    return stop


def _stop_of_packed_batch(lengths: np.ndarray, start: int, limits: BatchLimits) -> int:
    rectangle = replace(limits, max_tokens=limits.max_tokens * MOST_RECTANGLE)
    tokens = width = 0
    for stop in range(start, len(lengths)):
        width = max(width, int(lengths[stop]))
        tokens += int(lengths[stop])
        rows = stop + 1 - start
        if rows > 1 and (tokens > limits.max_tokens or rows > rectangle.rows(width)):
            return stop
    return len(lengths)
