"""Layout of a packed batch: where each text's tokens are in the row of all concatenated tokens."""

from __future__ import annotations

import functools
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import torch

from gpuclassify.inference.device import to_device

_GPU_SHORTEST_SHARE = 0.75

# Attention's queries, keys and values, each (1, heads, tokens, head size). Queries may be those of
# some tokens only.
States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def shortest_share(device: torch.device) -> float:
    """Return the smallest ratio of the shortest to the longest text in one call of attention.

    Lengths are in tokens. On a CPU, the ratio is 1: only equally long texts share a call. On a GPU,
    fewer kernel launches are worth some padding.
    """
    return 1.0 if device.type == "cpu" else _GPU_SHORTEST_SHARE


@dataclass(frozen=True)
class TextGroup:
    """Consecutive texts of a batch, padded to the longest one for a shared call of attention."""

    start: int  # range of the texts' tokens in the row of all tokens, without `stop`
    stop: int
    texts: int  # number of texts
    # Token index of every position, int64 (texts, width); padding has indices of other tokens of
    # the group. None, as are the other two, if all texts have equal lengths.
    indices: torch.Tensor | None = None
    is_token: torch.Tensor | None = None  # False for padding, bool (texts, width)
    # Flat positions that hold tokens, int64 (tokens,). Computing them on a GPU would wait for it.
    token_indices: torch.Tensor | None = None

    def rows(self, states: torch.Tensor) -> torch.Tensor:
        """Select from (1, heads, tokens, size) these texts' states, (texts, heads, width, size).

        Positions of padding, where `is_token` is False, have states of other tokens.
        """
        if self.indices is not None:
            return states[0][:, self.indices].transpose(0, 1)
        rows = states[0, :, self.start : self.stop]
        return rows.unflatten(1, (self.texts, -1)).transpose(0, 1)

    def tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """Remove padding from states, (texts, heads, width, size); return (tokens, heads, size)."""
        by_token = rows.transpose(1, 2).flatten(0, 1)
        return by_token if self.token_indices is None else by_token[self.token_indices]


class Layout:
    """Offsets of a batch's texts in one row of all their tokens, longest text first.

    Converts tensors between this packed form and the padded form, (texts, width, ...).

    Parameters
    ----------
    lengths : ndarray of int64, shape (texts,)
        Number of tokens of each text in the padded batch. The attribute is sorted, longest first.
    width : int
        Width of the padded batch.
    device : torch.device
        Device of the index tensors.
    first_columns : ndarray of int64, shape (texts,), optional
        First column of each text, if texts are padded on the left. Default: column 0.
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
        self.calls = 0  # number of layers that have run on this layout
        self.attention: str | None = None  # name of the attention function that ran last
        self.is_tried = False  # True in a trial run, which is compared with runs of single texts
        self.may_use_varlen = True  # `varlen_attn` is torch's attention over all texts at once
        self._device = device
        self._shape = (len(lengths), width)
        self._rows, self._columns = to_device(np.stack([rows, columns]), device)

    @classmethod
    def from_mask(cls, mask: torch.Tensor) -> Layout | None:
        """Return the layout of a padded batch, or None if there is padding between a row's tokens.

        `mask`, (texts, width), is 1 for a token, 0 for padding. An empty row counts as one token,
        in the first column. Reading the mask waits for a GPU.
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
        """Number of tokens of the longest text; the padded batch may be wider.

        In the shapes of padded tensors, `width` is the padded batch's width instead.
        """
        return int(self.lengths[0])

    def pack(self, value: torch.Tensor) -> torch.Tensor:
        """Return a padded tensor, (texts or 1, width, ...), without padding: (1, tokens, ...).

        Tensors of other shapes are returned unchanged.
        """
        texts, width = self._shape
        if value.ndim < 2 or value.shape[1] != width or value.shape[0] not in (1, texts):
            return value
        if value.shape[0] == 1:
            return value[:, self._columns]
        return value[self._rows, self._columns][None]

    def unpack(self, states: torch.Tensor) -> torch.Tensor:
        """Return states without padding, (1, tokens, size), as padded states, (texts, width, size).

        Texts are in the padded batch's order. Padding is zeros. States after the last token, which
        some kernels need as padding, are dropped.
        """
        padded = states.new_zeros(*self._shape, states.shape[-1])
        padded[self._rows, self._columns] = states[0, : len(self._rows)]
        return padded

    def first_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """Select from (1, tokens, size) the state of each text's first token, (1, texts, size).

        Texts are in the order of `lengths`, longest first.
        """
        return states[:, self.ends[:-1]]

    def spread_first_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """Repeat first tokens' states, (1, texts, size), for all columns: (texts, width, size).

        The result is in the padded batch's order, and is not to be written to.
        """
        by_row = torch.empty_like(states[0])
        by_row[self._rows[self.ends[:-1]]] = states[0]
        return by_row[:, None].expand(-1, self._shape[1], -1)

    def unpack_first_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """Pad first tokens' states, (1, texts, size), with NaN to (texts, width, size).

        The result is in the padded batch's order. All tokens but the first of each text are NaN.
        """
        padded = states.new_full((*self._shape, states.shape[-1]), torch.nan)
        first = self.ends[:-1]
        padded[self._rows[first], self._columns[first]] = states[0]
        return padded

    @functools.cached_property
    def ends(self) -> torch.Tensor:
        """Offset of each text in the row of tokens, and the row's length, int32 (texts + 1,)."""
        ends = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)
        return to_device(ends, self._device)

    @functools.cached_property
    def groups(self) -> list[TextGroup]:
        """Texts that share a call of attention: equally long on a CPU, else of similar length."""
        share = shortest_share(self._device)
        groups: list[TextGroup] = []
        first = start = 0
        while first < len(self.lengths):
            lengths = self.lengths[first:]
            lengths = lengths[lengths >= lengths[0] * share]
            groups.append(self._group(start, lengths))
            first, start = first + len(lengths), start + int(lengths.sum())
        return groups

    def _group(self, start: int, lengths: np.ndarray) -> TextGroup:
        stop = start + int(lengths.sum())
        if lengths[0] == lengths[-1]:
            return TextGroup(start, stop, len(lengths))
        columns = np.arange(lengths[0])
        starts = start + np.cumsum(lengths) - lengths
        indices = np.minimum(starts[:, None] + columns, stop - 1)
        is_token = columns < lengths[:, None]
        arrays = (indices, is_token, np.flatnonzero(is_token))
        tensors = (to_device(array, self._device) for array in arrays)
        return TextGroup(start, stop, len(lengths), *tensors)


current_layout: ContextVar[Layout] = ContextVar("current_layout")
