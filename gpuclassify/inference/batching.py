"""Longest first, cut by a token budget, and padded to the longest row on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from gpuclassify.inference.device import to_device
from gpuclassify.inference.memory import BatchLimits
from gpuclassify.tokenizing.token_batch import TokenBatch

# A row shorter than this share of the batch's width begins a new batch, if this one is enough.
MOST_PADDED_SHARE = 0.9
# A packed batch is a rectangle around its layers: at most so many times its tokens.
MOST_RECTANGLE = 2


@dataclass(frozen=True)
class StagedTokens:
    """A TokenBatch on a device; what sizes batches stays on the host.

    Attributes
    ----------
    ids : Tensor of int32, shape (tokens,)
    offsets : ndarray of int64, shape (texts + 1,)
        Text i has ``ids[offsets[i]:offsets[i + 1]]``.
    type_ids : Tensor of int32, shape (tokens,), optional
    """

    ids: torch.Tensor
    offsets: np.ndarray
    type_ids: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each text, int64 (texts,)."""
        return np.diff(self.offsets)


def stage(tokens: TokenBatch, device: torch.device) -> StagedTokens:
    """Bring `tokens` to the device, beside what it is running."""
    if not tokens.is_on_host:
        return StagedTokens(_for_current_stream(tokens.ids).to(device), tokens.offsets)
    types = None if tokens.type_ids is None else to_device(tokens.type_ids, device)
    return StagedTokens(to_device(tokens.ids, device), tokens.offsets, types)


def _for_current_stream(ids: torch.Tensor) -> torch.Tensor:
    """The ids, which the default stream of their device has made or is about to make."""
    if ids.is_cuda:
        current = torch.cuda.current_stream(ids.device)
        current.wait_stream(torch.cuda.default_stream(ids.device))
        ids.record_stream(current)
    return ids


@dataclass(frozen=True)
class PaddedBatch:
    """Rows of tokens as a rectangle, on the device.

    Attributes
    ----------
    rows : ndarray of int64, shape (rows,)
        Which texts these are.
    lengths : ndarray of int64, shape (rows,)
        Their tokens, known on the host so that reading them waits for no device.
    ids : Tensor of int64, shape (rows, width)
    mask : Tensor of int64, shape (rows, width)
        1 for a token, 0 for padding. Never derived from ids: the padding id can be a real token.
    type_ids : Tensor of int64, shape (rows, width), optional
    is_packed : bool
        Whether the model's layers run on its tokens alone, without the padding.
    """

    rows: np.ndarray
    lengths: np.ndarray
    ids: torch.Tensor
    mask: torch.Tensor
    type_ids: torch.Tensor | None = None
    is_packed: bool = False

    @property
    def width(self) -> int:
        """Tokens of the longest row."""
        return self.ids.shape[1]

    @property
    def is_full(self) -> bool:
        """Whether there is no padding."""
        return bool((self.lengths == self.width).all())

    @property
    def run_tokens(self) -> int:
        """Tokens that layers run: all of the rectangle, unless it is packed."""
        return int(self.lengths.sum()) if self.is_packed else self.ids.numel()

    def part(self, start: int, stop: int) -> PaddedBatch:
        """The rows from start to stop, at the same width."""
        return replace(
            self,
            rows=self.rows[start:stop],
            lengths=self.lengths[start:stop],
            ids=self.ids[start:stop],
            mask=self.mask[start:stop],
            type_ids=None if self.type_ids is None else self.type_ids[start:stop],
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
    tokens: StagedTokens, rows: np.ndarray, pad_id: int, side: str = "right", type_pad_id: int = 0
) -> PaddedBatch:
    """The texts `rows` padded to the longest of them, where their tokens are.

    Parameters
    ----------
    tokens : StagedTokens
    rows : ndarray of int64, shape (rows,)
    pad_id : int
        Token id that fills the padding.
    side : {"right", "left"}
        Where the padding goes.
    type_pad_id : int
        Segment id that fills the padding.
    """
    device = tokens.ids.device
    lengths = tokens.lengths[rows]
    width = int(lengths.max())
    bounds = to_device(np.stack([tokens.offsets[rows], lengths]), device)
    starts, counts = bounds[:, :, None]
    places = torch.arange(width, device=device)
    if side == "left":
        places = places - (width - counts)
    is_token = (places >= 0) & (places < counts)
    source = torch.where(is_token, starts + places, 0)

    def fill(values: torch.Tensor, padding: int) -> torch.Tensor:
        return torch.where(is_token, values[source].long(), padding)

    types = None if tokens.type_ids is None else fill(tokens.type_ids, type_pad_id)
    return PaddedBatch(rows, lengths, fill(tokens.ids, pad_id), is_token.long(), types)


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
