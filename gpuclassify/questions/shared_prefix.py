"""Attention over a prefix that many rows share: run once, and read where it lies.

Each row attends to the prefix and to its own tokens apart, and the two results are joined by how
much of the softmax's sum either stands for. That is exact, and the prefix is never copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional as F
from transformers import AttentionInterface

ATTENTION = "gpuclassify_prefix"
SCORE_BYTES = 256 * 2**20  # of scores that are in memory at once where no fused kernel serves

_COLUMN_STEP = 16  # columns, at least, when the rows' own tokens get more room

Pair = tuple[torch.Tensor, torch.Tensor]


class Prefix:
    """Keys and values of tokens that all rows begin with.

    Parameters
    ----------
    layers : list of (Tensor, Tensor)
        Keys and values (1, key heads, tokens, size) of every layer.
    """

    def __init__(self, layers: list[Pair]) -> None:
        self.layers = layers

    def __len__(self) -> int:
        return self.layers[0][0].shape[2]

    def crop(self, length: int) -> Prefix:
        """The first `length` tokens, not copied."""
        return Prefix([(key[:, :, :length], value[:, :, :length]) for key, value in self.layers])


class RowState:
    """Keys and values of the rows' own tokens, while a batch runs.

    A row's token number i after the prefix lies in column i, whatever the padding: a later forward
    writes new tokens over padding and over drafts that were rejected.

    Parameters
    ----------
    prefix : Prefix, optional
        Of all rows.

    Attributes
    ----------
    layers : list of (Tensor, Tensor)
        Keys and values (rows, key heads, columns, size) of every layer.
    is_later : Tensor of bool, shape (rows, new, columns), optional
        What the new tokens of a forward must not read. None in the first forward, whose rows are
        padded on the right and begin in column 0.
    """

    def __init__(self, prefix: Prefix | None = None) -> None:
        self.prefix = prefix
        self.layers: list[Pair] = []
        self.is_later: torch.Tensor | None = None
        self._places: Pair

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all rows but `rows`, int64 (kept,) in rising order."""
        if len(rows) < len(self.layers[0][0]):
            self._change(lambda kept: kept.index_select(0, rows))

    def place(self, columns: torch.Tensor, width: int) -> None:
        """Say in which `columns`, int64 (rows, new), the next forward's tokens belong.

        Columns from `width` on stay free.
        """
        more = width - self.layers[0][0].shape[2]
        if more > 0:
            # Zeros, because a masked column counts nothing only if it is finite.
            room = (0, 0, 0, max(more, _COLUMN_STEP))
            self._change(lambda kept: F.pad(kept, room))
        all_columns = torch.arange(self.layers[0][0].shape[2], device=columns.device)
        self.is_later = all_columns > columns[:, :, None]
        self._places = torch.arange(len(columns), device=columns.device)[:, None], columns

    def add(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Pair:
        """Keys and values of all own tokens, with the new ones (rows, key heads, new, size)."""
        if self.is_later is None:
            self.layers.append((key, value))
            return key, value
        rows, columns = self._places
        for kept, new in zip(self.layers[layer], (key, value), strict=True):
            kept[rows, :, columns] = new.transpose(1, 2)
        return self.layers[layer]

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for layer, (key, value) in enumerate(self.layers):  # one by one, for the memory's sake
            self.layers[layer] = change(key), change(value)


def prefix_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    state: RowState,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers, for forwards that are given ``state=``."""
    layer: int = module.layer_idx
    keys, values = state.add(layer, key, value)
    output, lse = attend(query, keys, values, scaling, is_causal=True, is_later=state.is_later)
    if state.prefix is not None:
        shared, shared_lse = _attend_shared(query, *state.prefix.layers[layer], scaling)
        own_part = torch.sigmoid(lse - shared_lse).unsqueeze(-1)
        shared_part = torch.sigmoid(shared_lse - lse).unsqueeze(-1)
        output = (output * own_part).addcmul_(shared, shared_part).to(query.dtype)
    return output.transpose(1, 2), None


AttentionInterface.register(ATTENTION, prefix_attention)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    is_causal: bool = False,
    is_later: torch.Tensor | None = None,
) -> Pair:
    """Attention and its log-sum-exp, by which it joins attention over other keys.

    Parameters
    ----------
    query : Tensor, shape (rows, heads, new, size)
    key, value : Tensor, shape (rows, key heads, columns, size)
        Several heads may share a key head, as many each.
    scaling : float
    is_causal : bool
        Query i reads columns 0 to i.
    is_later : Tensor of bool, shape (rows, new, columns), optional
        What queries do not read, in place of `is_causal`. All read something.

    Returns
    -------
    output : Tensor, shape (rows, heads, new, size)
    lse : Tensor of float32, shape (rows, heads, new)
        The logarithm of the softmax's sum.
    """
    if is_later is None:
        aten = torch.ops.aten
        if query.device.type == "cpu":
            return aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, is_causal, scale=scaling
            )
        if _is_flash_usable(query, key, value, is_causal):
            return aten._scaled_dot_product_flash_attention(
                query, key, value, 0.0, is_causal, scale=scaling
            )[:2]
        if is_causal:
            order = torch.arange(query.shape[2], device=query.device)
            is_later = (order > order[:, None])[None]
    return attend_plainly(query, key, value, scaling, is_later)


def _is_flash_usable(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> bool:
    has_groups = query.shape[1] != key.shape[1]
    params = SDPAParams(query, key, value, None, 0.0, is_causal, has_groups)
    # The kernel itself takes no other sizes; torch pads for it only where it is not called by name.
    return query.shape[-1] % 8 == 0 and can_use_flash_attention(params)


def attend_plainly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    is_later: torch.Tensor | None = None,
    score_bytes: int = SCORE_BYTES,
) -> Pair:
    """The same as `attend` in plain float32, as many queries at a time as `score_bytes` allow."""
    rows, heads, new, size = query.shape
    key_heads, width = key.shape[1:3]
    queries = query.reshape(rows, key_heads, -1, size).float()
    key, value = key.float().transpose(2, 3), value.float()
    if is_later is not None:
        is_later = is_later.repeat(1, heads // key_heads, 1).unsqueeze(1)
    step = max(1, score_bytes // (4 * rows * key_heads * width))
    outputs, sums = [], []
    for start in range(0, queries.shape[2], step):
        scores = queries[:, :, start : start + step] @ key * scaling
        if is_later is not None:
            scores = scores.masked_fill_(is_later[:, :, start : start + step], -torch.inf)
        sums.append(scores.logsumexp(3))
        outputs.append((scores - sums[-1].unsqueeze(3)).exp() @ value)
    output = torch.cat(outputs, 2).reshape(rows, heads, new, size).to(query.dtype)
    return output, torch.cat(sums, 2).reshape(rows, heads, new)


def _attend_shared(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
) -> Pair:
    """Attention of all rows to keys and values of one row, in one call as if of one row."""
    rows, heads, new, size = query.shape
    key_heads = key.shape[1]
    per_row = query.reshape(rows, key_heads, -1, size)  # heads that share a key are queries too
    as_one = per_row.transpose(0, 1).reshape(1, key_heads, -1, size)
    output, lse = attend(as_one, key, value, scaling)
    output = output.reshape(key_heads, rows, -1, size).transpose(0, 1)
    lse = lse.reshape(key_heads, rows, -1).transpose(0, 1)
    return output.reshape(rows, heads, new, size), lse.reshape(rows, heads, new)
