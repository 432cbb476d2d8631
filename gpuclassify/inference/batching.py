"""Batches: longest first, cut by a token budget, and laid out on the device.

A batch is a rectangle, padded to its longest row. Where layers run packed, a `Layout` tells how its
texts lie end to end in one row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gpuclassify.inference.device import to_device
from gpuclassify.inference.memory import BatchLimits
from gpuclassify.tokenizing.text_tokenizer import TokenBatch

# A row shorter than this share of the batch's width begins a new batch, if this one is enough.
MOST_PADDED_SHARE = 0.9
# A packed batch is a rectangle around its layers: at most so many times its tokens.
MOST_RECTANGLE = 2
_GPU_SHORTEST_SHARE = 0.75


@dataclass(frozen=True)
class StagedTokens:
    """A TokenBatch on a device; what sizes batches stays on the host."""

    ids: torch.Tensor  # int32 (tokens,)
    offsets: np.ndarray  # int64 (texts + 1,); text i has `ids[offsets[i]:offsets[i + 1]]`
    type_ids: torch.Tensor | None = None  # int32 (tokens,)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each text, int64 (texts,)."""
        return np.diff(self.offsets)


def stage(tokens: TokenBatch, device: torch.device) -> StagedTokens:
    """Bring `tokens` to the device, beside what it is running."""
    if not tokens.is_on_host:
        if tokens.ids.is_cuda:  # made by the default stream of their device, or about to be
            current = torch.cuda.current_stream(tokens.ids.device)
            current.wait_stream(torch.cuda.default_stream(tokens.ids.device))
            tokens.ids.record_stream(current)
        return StagedTokens(tokens.ids.to(device), tokens.offsets)
    types = None if tokens.type_ids is None else to_device(tokens.type_ids, device)
    return StagedTokens(to_device(tokens.ids, device), tokens.offsets, types)


@dataclass(frozen=True)
class PaddedBatch:
    """Rows of tokens as a rectangle, on the device."""

    rows: np.ndarray  # which texts these are, int64 (rows,)
    lengths: np.ndarray  # their tokens, int64 (rows,): reading them waits for no device
    ids: torch.Tensor  # int64 (rows, width)
    # 1 for a token, 0 for padding, int64 (rows, width). Never derived from ids: the padding id can
    # be a real token.
    mask: torch.Tensor
    type_ids: torch.Tensor | None = None  # int64 (rows, width)
    is_packed: bool = False  # the model's layers run on its tokens alone, without the padding

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
        """The rows from start to stop, at the same width unless packed."""
        rows = slice(start, stop)
        return self._take(rows, rows)

    def take(self, rows: np.ndarray) -> PaddedBatch:
        """The rows of these numbers, at the same width unless packed."""
        return self._take(rows, to_device(rows, self.ids.device))

    def _take(self, rows: Any, on_device: Any) -> PaddedBatch:
        # Packed states of as many tokens as the rectangle is wide would be taken for padded ones.
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
    """Order of texts from longest to shortest, int64 (n,); equal lengths keep their order.

    Longest first, so that an out-of-memory shows in the first batch.
    """
    return np.argsort(-lengths, kind="stable")


def cut_batches(
    lengths: np.ndarray, current_limits: Callable[[], BatchLimits]
) -> Iterator[tuple[int, int]]:
    """Consecutive (start, stop) ranges of `lengths` whose sizes stay within the limits.

    The limits are asked before each batch, so that those lowered by an out-of-memory hold at once.
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
    """The texts `rows` padded on one side to the longest of them, where their tokens are."""
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


# Packed: the texts of a batch end to end in one row.

# Queries, keys and values, each (1, heads, tokens, head size); queries may be of fewer tokens.
States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def shortest_share(device: torch.device) -> float:
    """How short a text may be, of the longest one's length, to share a call of attention with it.

    Fewer calls are worth padding within attention only where each call is a kernel launch.
    """
    return 1.0 if device.type == "cpu" else _GPU_SHORTEST_SHARE


@dataclass(frozen=True)
class Group:
    """Neighbouring texts that share one call of the attention kernel."""

    start: int  # first of their tokens
    stop: int
    texts: int  # how many they are
    # Where each text's tokens lie, padding filled with some token, int64 (texts, width); None: all
    # are equally long.
    places: torch.Tensor | None = None
    is_token: torch.Tensor | None = None  # False for that padding, bool (texts, width)
    # Where the tokens are among the places, int64 (tokens,): to find them on a GPU would wait for
    # it.
    kept: torch.Tensor | None = None

    def rows(self, states: torch.Tensor) -> torch.Tensor:
        """The texts' part of (1, heads, tokens, size) as (texts, heads, width, size)."""
        if self.places is not None:
            return states[0][:, self.places].transpose(0, 1)
        own = states[0, :, self.start : self.stop]
        return own.unflatten(1, (self.texts, -1)).transpose(0, 1)

    def tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """(texts, heads, width, size) as (tokens, heads, size) of the texts end to end."""
        by_token = rows.transpose(1, 2).flatten(0, 1)
        return by_token if self.kept is None else by_token[self.kept]


class Layout:
    """Where the tokens of a batch lie in one row of tokens: the longest text first.

    `lengths` are the tokens of texts padded to `width` on the right, int64 (texts,), and in falling
    order from then on; `first_columns`, of that shape, are where texts begin that are padded on the
    left. `calls` counts those of layers that have run on this layout, and `attention` names the
    function of torch by which the texts were last attended to. `is_tried` says that the model is
    only tried, beside transformers' own attention.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        width: int,
        device: torch.device,
        first_columns: np.ndarray | None = None,
    ) -> None:
        order = np.argsort(-lengths, kind="stable")
        self.lengths = lengths[order]
        starts = np.cumsum(self.lengths) - self.lengths
        if first_columns is not None:
            starts = starts - first_columns[order]
        rows = np.repeat(order, self.lengths)
        columns = np.arange(len(rows)) - np.repeat(starts, self.lengths)
        self.calls = 0
        self.attention: str | None = None
        self.is_tried = False
        self._device = device
        self._shape = (len(lengths), width)
        self._rows, self._columns = to_device(np.stack([rows, columns]), device)

    @classmethod
    def of_mask(cls, mask: torch.Tensor) -> Layout | None:
        """The layout of padded texts; None if there is padding within one.

        The mask, (texts, width), is 1 for a token and 0 for padding. A row of padding alone counts
        as one token.
        """
        is_token = mask.cpu().numpy().astype(bool)
        lengths = np.maximum(is_token.sum(1), 1)
        first = is_token.argmax(1)
        last = is_token.shape[1] - 1 - is_token[:, ::-1].argmax(1)
        if (last - first + 1 != lengths)[is_token.any(1)].any():
            return None
        return cls(lengths, is_token.shape[1], mask.device, first)

    @property
    def width(self) -> int:
        """Tokens of the longest text."""
        return int(self.lengths[0])

    def pack(self, value: torch.Tensor) -> torch.Tensor:
        """(texts or 1, width, ...) as (1, tokens, ...); any other shape as it is."""
        texts, width = self._shape
        if value.ndim < 2 or value.shape[1] != width or value.shape[0] not in (1, texts):
            return value
        if value.shape[0] == 1:
            return value[:, self._columns]
        return value[self._rows, self._columns][None]

    def unpack(self, states: torch.Tensor) -> torch.Tensor:
        """(1, tokens, size) as (texts, width, size), with zeros for padding.

        What follows the tokens, as kernels may want it to, is left out.
        """
        padded = states.new_zeros(*self._shape, states.shape[-1])
        padded[self._rows, self._columns] = states[0, : len(self._rows)]
        return padded

    def first_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """(1, tokens, size) as (1, texts, size): each text's first token."""
        return states[:, self.ends[:-1]]

    def spread_first_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """(1, texts, size) as (texts, width, size), the same in every column of a text."""
        by_row = torch.empty_like(states[0])
        by_row[self._rows[self.ends[:-1]]] = states[0]
        return by_row[:, None].expand(-1, self._shape[1], -1)

    def unpack_first_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """(1, texts, size) as (texts, width, size), with NaN for all other tokens."""
        padded = states.new_full((*self._shape, states.shape[-1]), torch.nan)
        first = self.ends[:-1]
        padded[self._rows[first], self._columns[first]] = states[0]
        return padded

    @functools.cached_property
    def ends(self) -> torch.Tensor:
        """Where texts begin and end, int32 (texts + 1,)."""
        ends = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)
        return to_device(ends, self._device)

    @functools.cached_property
    def groups(self) -> list[Group]:
        """All texts: on a CPU those of equal length together, elsewhere those of similar length."""
        share = shortest_share(self._device)
        groups: list[Group] = []
        first = start = 0
        while first < len(self.lengths):
            lengths = self.lengths[first:]
            lengths = lengths[lengths >= lengths[0] * share]
            groups.append(self._group(start, lengths))
            first, start = first + len(lengths), start + int(lengths.sum())
        return groups

    def _group(self, start: int, lengths: np.ndarray) -> Group:
        stop = start + int(lengths.sum())
        if lengths[0] == lengths[-1]:
            return Group(start, stop, len(lengths))
        columns = np.arange(lengths[0])
        starts = start + np.cumsum(lengths) - lengths
        places = np.minimum(starts[:, None] + columns, stop - 1)
        is_token = columns < lengths[:, None]
        arrays = (places, is_token, np.flatnonzero(is_token))
        tensors = (to_device(array, self._device) for array in arrays)
        return Group(start, stop, len(lengths), *tensors)


current_layout: ContextVar[Layout] = ContextVar("current_layout")


# Several models in step: see `gpuclassify.inference.leading_layers`.


class LayerStates:
    """What some layers of a forward gave, for other models' forwards, or what they take of it.

    `noted` has what the layers of these numbers give, as soon as they have run. Layers up to that
    number of which something is `given` are not run: each gives just that.
    """

    def __init__(self, noted: Iterable[int] = (), given: tuple[int, Any] = (-1, None)) -> None:
        self.noted: dict[int, Any] = dict.fromkeys(noted)
        self.calls: list[int] = []  # layers that are done
        self.given = given

    def behind(self, number: int, run: Callable[[], Any]) -> Any:
        """What the layer of this number gives, or would give if it were run."""
        last, output = self.given
        if number > last:
            output = run()
        if number in self.noted:
            self.noted[number] = output
        self.calls.append(number)
        return output


current_states: ContextVar[LayerStates | None] = ContextVar("current_states", default=None)


def behind_layer(number: int, run: Callable[[], Any]) -> Any:
    """What the layer of this number gives, by the `LayerStates` of this thread if it has some."""
    states = current_states.get()
    return run() if states is None else states.behind(number, run)


def is_skipped(number: int) -> bool:
    """Whether the `LayerStates` of this thread have what lies behind a later layer."""
    states = current_states.get()
    return states is not None and number < states.given[0]
