"""Padded batches of tokenized texts on the device, within limits of tokens and memory.

A batch is a rectangle of token ids, padded at least to its longest row. A model's packed layers run
on the batch's real tokens instead, concatenated into one row: see `packed/layout.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from gpuclassify.inference.device import to_device
from gpuclassify.inference.memory import BatchLimits
from gpuclassify.tokenizing.text_tokenizer import TokenBatch

# A row shorter than this share of the batch's width begins a new batch, if the current one is full
# enough (`enough_tokens`).
MOST_PADDED_SHARE = 0.9
# Largest ratio of a packed batch's padded rectangle (its inputs and outputs) to its tokens.
MOST_RECTANGLE = 2


@dataclass(frozen=True)
class StagedTokens:
    """Token ids of tokenized texts, concatenated on a device, before batches are cut and padded."""

    ids: torch.Tensor  # token ids, int32 (tokens,)
    offsets: np.ndarray  # int64 (texts + 1,); text i has `ids[offsets[i]:offsets[i + 1]]`
    type_ids: torch.Tensor | None = None  # segment ids, int32 (tokens,)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each text, int64 (texts,)."""
        return np.diff(self.offsets)


def stage(tokens: TokenBatch, device: torch.device) -> StagedTokens:
    """Convert texts' token ids, and segment ids if any, to tensors by `to_device`."""
    types = None if tokens.type_ids is None else to_device(tokens.type_ids, device)
    return StagedTokens(to_device(tokens.ids, device), tokens.offsets, types)


@dataclass(frozen=True)
class PaddedBatch:
    """Token ids of some texts as a padded rectangle on the device, one row per text."""

    rows: np.ndarray  # index of each row's text among the staged texts, int64 (rows,)
    lengths: np.ndarray  # number of tokens of each text, int64 (rows,), on the host
    ids: torch.Tensor  # token ids, int64 (rows, width)
    # 1 for a token, 0 for padding, int64 (rows, width). Never derived from ids: the padding id can
    # be a real token.
    mask: torch.Tensor
    type_ids: torch.Tensor | None = None  # segment ids, int64 (rows, width)
    is_packed: bool = False  # layers run on the tokens without padding, concatenated in one row

    @property
    def width(self) -> int:
        """Number of columns: at least the number of tokens of the longest row."""
        return self.ids.shape[1]

    @property
    def is_full(self) -> bool:
        """Whether no row has padding."""
        return bool((self.lengths == self.width).all())

    @property
    def run_tokens(self) -> int:
        """Number of tokens that the model's layers compute, with padding unless `is_packed`."""
        return int(self.lengths.sum()) if self.is_packed else self.ids.numel()

    def token_indices(self, side: str) -> np.ndarray:
        """Return each real token's index in the flattened rectangle, int64 (tokens,), row by row.

        Used to drop the outputs of padding. `side` is the padded side, "left" or "right".
        """
        first = np.arange(len(self.lengths)) * self.width
        if side == "left":
            first = first + self.width - self.lengths
        starts = np.cumsum(self.lengths) - self.lengths
        return np.repeat(first - starts, self.lengths) + np.arange(self.lengths.sum())

    def part(self, start: int, stop: int) -> PaddedBatch:
        """Return a batch of the rows from index `start` up to `stop`, without the row `stop`.

        A packed batch becomes as wide as its longest row; the width of others does not change.
        """
        rows = slice(start, stop)
        return self._take(rows, rows)

    def take(self, rows: np.ndarray) -> PaddedBatch:
        """Return a batch of the rows with the indices `rows`, int64 (rows,), in this order.

        A packed batch becomes as wide as its longest row; the width of others does not change.
        """
        return self._take(rows, to_device(rows, self.ids.device))

    def _take(self, rows: slice | np.ndarray, on_device: slice | torch.Tensor) -> PaddedBatch:
        # Packed states would be mistaken for padded ones if their number equalled the width.
        width = int(self.lengths[rows].max(initial=0)) if self.is_packed else self.width
        types = None if self.type_ids is None else self.type_ids[on_device, :width]
        return replace(
            self,
            rows=self.rows[rows],
            lengths=self.lengths[rows],
            ids=self.ids[on_device, :width],
            mask=self.mask[on_device, :width],
            type_ids=types,
        )


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """Return the indices, int64 (texts,), that stably sort texts by `lengths`, longest first."""
    return np.argsort(-lengths, kind="stable")


def cut_batches(
    lengths: np.ndarray, current_limits: Callable[[], BatchLimits]
) -> Iterator[tuple[int, int]]:
    """Divide texts into batches; yield each batch's range of texts, (start, stop), without `stop`.

    `lengths` are the texts' numbers of tokens, int64 (texts,). ``current_limits()`` is called
    before each batch, so that limits lowered by an out-of-memory error apply at once.
    """
    start = 0
    while start < len(lengths):
        limits = current_limits()
        find_stop = _find_packed_stop if limits.is_packed else _find_padded_stop
        stop = find_stop(lengths, start, limits)
        yield start, stop
        start = stop


def pad(
    tokens: StagedTokens, rows: np.ndarray, pad_id: int, side: str = "right", type_pad_id: int = 0
) -> PaddedBatch:
    """Return the texts with the indices `rows`, int64 (rows,), padded on `side`, left or right."""
    device = tokens.ids.device
    lengths = tokens.lengths[rows]
    width = int(lengths.max())
    bounds = to_device(np.stack([tokens.offsets[rows], lengths]), device)
    starts, counts = bounds[:, :, None]
    columns = torch.arange(width, device=device)
    if side == "left":
        columns = columns - (width - counts)
    is_token = (columns >= 0) & (columns < counts)
    source = torch.where(is_token, starts + columns, 0)

    def fill(values: torch.Tensor, padding: int) -> torch.Tensor:
        return torch.where(is_token, values[source].long(), padding)

    types = None if tokens.type_ids is None else fill(tokens.type_ids, type_pad_id)
    return PaddedBatch(rows, lengths, fill(tokens.ids, pad_id), is_token.long(), types)


def _find_padded_stop(lengths: np.ndarray, start: int, limits: BatchLimits) -> int:
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


def _find_packed_stop(lengths: np.ndarray, start: int, limits: BatchLimits) -> int:
    rectangle = replace(limits, max_tokens=limits.max_tokens * MOST_RECTANGLE)
    tokens = width = 0
    for stop in range(start, len(lengths)):
        width = max(width, int(lengths[stop]))
        tokens += int(lengths[stop])
        rows = stop + 1 - start
        if rows > 1 and (tokens > limits.max_tokens or rows > rectangle.rows(width)):
            return stop
    return len(lengths)
