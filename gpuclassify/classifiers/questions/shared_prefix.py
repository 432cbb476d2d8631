"""Attention over a prompt prefix that many rows share, without copies of it.

Each row attends to the prefix and to its own tokens separately. The two results are merged by their
shares of the softmax's denominator, which is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional as F
from transformers import AttentionInterface

if TYPE_CHECKING:
    from torch import nn

ATTENTION = "gpuclassify_prefix"
SCORE_BYTES = 256 * 2**20  # maximum bytes of scores without a fused kernel

# Tensors passed to attention that do not change its result.
_WITHOUT_EFFECT = {"position_ids", "cache_position"}
_COLUMN_STEP = 16  # minimum columns to allocate for the rows' own tokens

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Prefix:
    """Keys and values, in each layer, of the prompt tokens that all rows have in common."""

    layers: list[Pair]  # keys and values by layer, (1, key heads, tokens, size)

    def __len__(self) -> int:
        return self.layers[0][0].shape[2]

    def crop(self, length: int) -> Prefix:
        """Return keys and values of the first `length` tokens, as views."""
        return Prefix([(key[:, :, :length], value[:, :, :length]) for key, value in self.layers])


class RowState:
    """Keys and values of the tokens after the prefix in each row of a batch, while it runs.

    Column i is for a row's token i after the prefix, which overwrites padding and rejected drafts.
    """

    def __init__(self, prefix: Prefix | None = None) -> None:
        self.prefix = prefix  # shared by all rows
        # Keys and values by layer, (rows, key heads, columns, size).
        self.layers: list[Pair] = []
        # Columns that the new tokens of a forward must not read, bool (rows, new, columns). None in
        # the first forward, whose rows are padded on the right and begin in column 0.
        self.is_later: torch.Tensor | None = None
        self._places: Pair
        self._width = 0  # columns written
        self._masks: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}  # key: window

    @classmethod
    def joined(cls, states: list[RowState]) -> RowState:
        """Join states with the same prefix to one with all rows; do not use `states` afterwards."""
        if len(states) == 1:
            return states[0]
        made = cls(states[0].prefix)
        made._width = max(state._width for state in states)
        while states[0].layers:  # one by one, to save memory
            key, value = zip(*(state.layers.pop(0) for state in states), strict=True)
            made.layers.append((_stacked(key), _stacked(value)))
        return made

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only rows with these ascending indices; call `place` before the next forward."""
        if len(rows) < len(self.layers[0][0]):
            self._change(lambda kept: kept.index_select(0, rows))

    def place(self, columns: torch.Tensor, width: int) -> None:
        """Set the columns, int64 (rows, new), where the next forward stores keys and values.

        `width` is the number of columns in use after it.
        """
        more = width - self.layers[0][0].shape[2]
        if more > 0:
            # Zeros, because a masked column has no effect only if it is finite.
            room = (0, 0, 0, max(more, _COLUMN_STEP))
            self._change(lambda kept: F.pad(kept, room))
        all_columns = torch.arange(self.layers[0][0].shape[2], device=columns.device)
        self.is_later = all_columns > columns[:, :, None]
        self._width = max(self._width, width)
        self._masks.clear()
        self._places = torch.arange(len(columns), device=columns.device)[:, None], columns

    def add(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Pair:
        """Store keys and values of new tokens in a layer; return all tokens' after the prefix.

        New ones are (rows, key heads, new, size), and returned ones (rows, key heads, columns,
        size).
        """
        if self.is_later is None:
            self.layers.append((key, value))
            self._width = key.shape[2]
            return key, value
        rows, columns = self._places
        for kept, new in zip(self.layers[layer], (key, value), strict=True):
            kept[rows, :, columns] = new.transpose(1, 2)
        return self.layers[layer]

    def masks(
        self, window: int | None, new: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return masks of own tokens and of prefix tokens that the `new` tokens must not attend to.

        They are bool (rows or 1, new, columns) and (rows or 1, new, prefix). Own tokens are those
        after the prefix. If the first mask is None, attention to them is causal; if the second is
        None, no prefix token is hidden. `window` is the layer's sliding window in tokens, None for
        full attention.
        """
        shared = len(self.prefix) if self.prefix else 0
        if window is None or shared + self._width <= window:
            return self.is_later, None
        if window not in self._masks:
            device = self.layers[0][0].device
            columns = torch.arange(self.layers[0][0].shape[2], device=device)
            positions = columns[None, :new] if self.is_later is None else self._places[1]
            later = columns > positions[:, :, None] if self.is_later is None else self.is_later
            hidden = later | (positions[:, :, None] - columns >= window)
            indices = torch.arange(shared, device=device)
            is_far = shared + positions[:, :, None] - indices >= window if shared else None
            self._masks[window] = hidden, is_far
        return self._masks[window]

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for layer, (key, value) in enumerate(self.layers):  # one by one, to save memory
            self.layers[layer] = change(key), change(value)


class SingleForward(RowState):
    """State of rows that run in one forward, so that only one layer's tensors are kept."""

    def add(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Pair:
        """Return `key` and `value` as they are, because one forward has all tokens of its rows."""
        self.layers, self._width = [(key, value)], key.shape[2]
        return key, value


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    width = max(part.shape[2] for part in parts)
    return torch.cat([F.pad(part, (0, 0, 0, width - part.shape[2])) for part in parts])


def prefix_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    state: RowState,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Compute attention of new tokens over the prefix and their row's tokens in `state`.

    Registered in transformers as the attention function `ATTENTION`. `query`, `key` and `value` are
    (rows, heads or key heads, new, size); keys and values are added to `state`. Returns the output,
    (rows, new, heads, size), and None instead of attention weights. Raises NotImplementedError for
    other tensors that would change the result.
    """
    tensors = {name for name, value in others.items() if isinstance(value, torch.Tensor)}
    if unknown := tensors - _WITHOUT_EFFECT:  # such as GPT-OSS's sinks
        raise NotImplementedError(f"attention with {', '.join(sorted(unknown))}")
    layer = cast(int, module.layer_idx)
    keys, values = state.add(layer, key, value)
    hidden, is_far = state.masks(sliding_window, query.shape[2])
    output, lse = attend(query, keys, values, scaling, True, hidden, softcap)
    if state.prefix is not None:
        pair = state.prefix.layers[layer]
        shared, shared_lse = _attend_shared(query, *pair, scaling, is_far, softcap)
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
    hidden: torch.Tensor | None = None,
    softcap: float | None = None,
) -> Pair:
    """Compute attention and its log-sum-exp, used to merge it with attention over other keys.

    `query` is (rows, heads, new, size), and `key` and `value` are (rows, key heads, columns, size).
    Scores are multiplied by `scaling`. With `softcap`, they are then capped by
    ``softcap * tanh(scores / softcap)``. `hidden`, bool (rows, new, columns), is true for columns
    that a query does not read. Without it, `is_causal` means that query i reads columns 0 to i.

    Returns the output, in the shape of `query`, and the logarithm of the softmax's denominator,
    float32 (rows, heads, new). For a query that reads no column, it is -inf, but 0 by torch's
    kernel for CPUs, which is used without `softcap`.
    """
    aten = torch.ops.aten
    if hidden is not None and hidden.shape[0] == 1 < query.shape[0]:
        hidden = hidden.expand(query.shape[0], -1, -1)
    if query.device.type == "cpu" and softcap is None:
        mask = None
        if hidden is not None:
            mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, -torch.inf)
            mask = mask.unsqueeze(1)
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal and mask is None, attn_mask=mask, scale=scaling
        )
    if hidden is None and softcap is None:
        has_groups = query.shape[1] != key.shape[1]
        params = SDPAParams(query, key, value, None, 0.0, is_causal, has_groups)
        # The kernel takes no other sizes; torch would pad only without selecting a kernel. ROCm's
        # kernels are others, whose log-sum-exps nobody has compared with these.
        is_usable = query.shape[-1] % 8 == 0 and torch.version.hip is None
        if is_usable and can_use_flash_attention(params):
            return aten._scaled_dot_product_flash_attention(
                query, key, value, 0.0, is_causal, scale=scaling
            )[:2]
    if hidden is None and is_causal:
        order = torch.arange(query.shape[2], device=query.device)
        hidden = (order > order[:, None])[None]
    return attend_plainly(query, key, value, scaling, hidden, softcap)


def attend_plainly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    hidden: torch.Tensor | None = None,
    softcap: float | None = None,
    score_bytes: int = SCORE_BYTES,
) -> Pair:
    """Compute `attend` in float32, without fused kernels, in blocks of about `score_bytes`."""
    rows, heads, new, size = query.shape
    key_heads, width = key.shape[1:3]
    queries = query.reshape(rows, key_heads, -1, size).float()
    key, value = key.float().transpose(2, 3), value.float()
    if hidden is not None:
        hidden = hidden.repeat(1, heads // key_heads, 1).unsqueeze(1)
    step = max(1, score_bytes // (4 * rows * key_heads * width))
    outputs, sums = [], []
    for start in range(0, queries.shape[2], step):
        scores = queries[:, :, start : start + step] @ key * scaling
        if softcap is not None:
            scores = (scores / softcap).tanh_() * softcap
        if hidden is not None:
            scores = scores.masked_fill_(hidden[:, :, start : start + step], -torch.inf)
        sums.append(scores.logsumexp(3))
        # A query without visible columns has the sum -inf, and the output 0.
        finite = sums[-1].clamp(min=torch.finfo(scores.dtype).min)
        outputs.append((scores - finite.unsqueeze(3)).exp() @ value)
    output = torch.cat(outputs, 2).reshape(rows, heads, new, size).to(query.dtype)
    return output, torch.cat(sums, 2).reshape(rows, heads, new)


def _attend_shared(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    hidden: torch.Tensor | None,
    softcap: float | None,
) -> Pair:
    """Compute attention of all rows to the prefix, by one matrix product for all rows' queries."""
    rows, heads, new, size = query.shape
    key_heads = key.shape[1]
    per_row = query.reshape(rows, key_heads, -1, size)  # heads of a key become queries
    as_one = per_row.transpose(0, 1).reshape(1, key_heads, -1, size)
    if hidden is not None:  # (rows, new, prefix), for each head that shares a key
        hidden = hidden.expand(rows, -1, -1)[:, None].expand(-1, heads // key_heads, -1, -1)
        hidden = hidden.reshape(1, -1, hidden.shape[-1])
        output, lse = attend_plainly(as_one, key, value, scaling, hidden, softcap)
    else:
        output, lse = attend(as_one, key, value, scaling, softcap=softcap)
    output = output.reshape(key_heads, rows, -1, size).transpose(0, 1)
    lse = lse.reshape(key_heads, rows, -1).transpose(0, 1)
    return output.reshape(rows, heads, new, size), lse.reshape(rows, heads, new)
