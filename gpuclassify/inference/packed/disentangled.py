"""DeBERTa-v2's encoder, faster than in transformers: no padding, and no repeated projections.

transformers' encoder projects its table of relative positions again in every layer of every
forward, repeats the projections for each row, and holds several copies of all attention scores.

Disentangled attention adds two terms to the product of a query and a key (He et al., 2021,
"DeBERTa", section 3.1): the query times the key's relative position, and the key times the query's.
They are not gathered pair by pair. A block of tokens is multiplied with the position table sorted
by distance. Each row of the product then holds its scores contiguously, shifted left by one column
relative to the row above; a strided view removes the shift.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DebertaV2Encoder,
    make_log_bucket_position,
)

from gpuclassify.inference.device import is_bfloat16_without_amx, to_device
from gpuclassify.inference.layer_states import current_states
from gpuclassify.inference.packed.layout import Layout, States, current_layout
from gpuclassify.workers.run_context import set_variable

# Bytes of attention scores computed at once. A core is fastest while these, and the products of
# CPU_BLOCK_TOKENS tokens, stay in its caches.
CPU_PART_BYTES = 2**20
CPU_BLOCK_TOKENS = 64
GPU_PART_BYTES = 256 * 2**20
ROW_STEPS = {"cuda": 8}  # alignment of rows for tensor cores and vector loads

is_reference: ContextVar[bool] = ContextVar("is_reference", default=False)


def reference_forward() -> contextlib.AbstractContextManager[None]:
    """Return a context manager in whose block this thread runs transformers' own DeBERTa."""
    return set_variable(is_reference, True)


def fast_encoder(module: nn.Module) -> DisentangledEncoder | None:
    """Return the first `DisentangledEncoder` within `module`; None if there is none."""
    parts = module.modules()
    return next((part for part in parts if isinstance(part, DisentangledEncoder)), None)


@dataclass(frozen=True)
class RelativePositions:
    """Indices in DeBERTa's table of relative positions, for all distances in a batch's texts."""

    # Index for each distance from key to query, `1 - width` to `width - 1`; int64 (2 * width - 1,).
    # `width` is the length of the longest text.
    by_distance: torch.Tensor
    first: int  # lowest index
    last: int  # highest index


@dataclass(frozen=True)
class PositionTables:
    """A layer's projections of relative positions, scaled: (heads, positions, head size) each.

    A table is None if the layer's attention has no such term.
    """

    keys: torch.Tensor | None  # multiplied with queries (content to position)
    queries: torch.Tensor | None  # multiplied with keys (position to content)

    def ordered(self, positions: RelativePositions) -> PositionTables:
        """Return the tables with one row per distance of two tokens, in ascending order.

        In the table `keys`, a distance is the key's position in the text minus the query's; in the
        table `queries`, the query's minus the key's. Distances are ``1 - width`` to ``width - 1``,
        where ``width`` is the length of the longest text.
        """
        order = positions.by_distance
        return PositionTables(
            None if self.keys is None else self.keys[:, order.flip(0)],
            None if self.queries is None else self.queries[:, order],
        )

    def float(self) -> PositionTables:
        """Return these tables, converted to float32."""
        tables = (self.keys, self.queries)
        return PositionTables(*(None if table is None else table.float() for table in tables))

    def part(self, heads: slice, positions: slice = slice(None)) -> PositionTables:
        """Return the tables for the attention heads and the positions in these slices."""
        return PositionTables(
            None if self.keys is None else self.keys[heads, positions],
            None if self.queries is None else self.queries[heads, positions],
        )


class DisentangledAttention:
    """DeBERTa's attention within texts that are concatenated without padding.

    One object serves one batch, in all layers.
    """

    def __init__(self, layout: Layout, positions: RelativePositions) -> None:
        self.layout = layout
        self.positions = positions

    def pad(self, states: torch.Tensor) -> torch.Tensor:
        """Return states, (1, tokens, size), unchanged, because this attention needs no padding."""
        return states

    def __call__(self, states: States, tables: PositionTables, scale: float) -> torch.Tensor:
        """Compute attention within each text, (1, queries, heads * head size).

        `states` are queries, keys and values, each (1, heads, tokens, head size). Queries belong to
        all tokens, or only to the first token of each text. `tables` are the layer's projections of
        relative positions, not ordered by distance, and scaled already. `scale` applies to the
        products of queries and keys.
        """
        dtype = states[0].dtype
        tables = tables.ordered(self.positions)
        # Without AMX, torch's kernel is no faster in bfloat16, strided sums are slower, and
        # products of many small matrices copy their inputs.
        if is_bfloat16_without_amx(states[0].device, dtype):
            states, tables = cast(States, tuple(part.float() for part in states)), tables.float()
        query, key, value = states
        is_first_only = query.shape[2] < key.shape[2]
        outputs = []
        text = 0
        for group in self.layout.groups:
            if is_first_only:
                queries = query[0, :, text : text + group.texts].transpose(0, 1)[:, :, None]
            else:
                queries = group.rows(query)
            rows = (queries, group.rows(key), group.rows(value))
            attended = _attend_texts(rows, tables, scale, group.is_token)
            outputs.append(attended.flatten(0, 2) if is_first_only else group.tokens(attended))
            text += group.texts
        return torch.cat(outputs).reshape(1, query.shape[2], -1).to(dtype)


def _attend_texts(
    states: States, tables: PositionTables, scale: float, is_token: torch.Tensor | None
) -> torch.Tensor:
    """Compute attention within padded texts; return it as (texts, heads, queries, head size).

    `states` are queries, keys and values, each (texts, heads, tokens, head size). Queries may
    belong to each text's first token only. `tables` come from `PositionTables.ordered`. `is_token`,
    (texts, tokens), is False for padding; it is None if there is no padding.
    """
    query, key, _ = states
    context = query.transpose(1, 2).new_empty(query.transpose(1, 2).shape).transpose(1, 2)
    for row, head in _parts(query, key):
        # Heads first: all texts of a head share its tables.
        q, k, v = (part[row, head].transpose(0, 1) for part in states)
        bias = _relative_scores(q, k, tables.part(head))
        if is_token is not None:
            bias = bias.masked_fill_(~is_token[row][:, None], -torch.inf)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        context[row, head] = attended.transpose(0, 1)
    return context


def _parts(query: torch.Tensor, key: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield pairs of a slice of texts and a slice of heads, to bound the memory of scores."""
    texts, heads, count, _ = query.shape
    score_bytes = count * key.shape[2] * query.element_size()
    part_bytes = CPU_PART_BYTES if query.device.type == "cpu" else GPU_PART_BYTES
    most = max(1, part_bytes // score_bytes)
    text_step, head_step = max(1, most // heads), min(most, heads)
    for text in range(0, texts, text_step):
        for head in range(0, heads, head_step):
            yield slice(text, text + text_step), slice(head, head + head_step)


def _relative_scores(
    query: torch.Tensor, key: torch.Tensor, tables: PositionTables
) -> torch.Tensor:
    """Return the sum of the relative-position terms of scores, (heads, texts, queries, keys).

    The caller adds it to the scaled products of queries and keys. It is 0 if both tables are None.
    `query` and `key` are (heads, texts, tokens, head size); queries may belong to each text's first
    token only. `tables` come from `PositionTables.ordered`.
    """
    scores = query.new_empty(*query.shape[:3], key.shape[2])
    write: Callable[..., torch.Tensor] = torch.Tensor.copy_
    for states, table, target in (
        (query, tables.keys, scores),
        (key, tables.queries, scores.mT),
    ):
        if table is None:
            continue
        columns = target.shape[3]
        step = CPU_BLOCK_TOKENS if states.device.type == "cpu" else states.shape[2]
        for start in range(0, states.shape[2], step):
            rows = slice(start, start + step)
            write(target[:, :, rows], _position_scores(states[:, :, rows], start, columns, table))
        write = torch.Tensor.add_
    return scores if write is torch.Tensor.add_ else scores.zero_()


def _position_scores(
    states: torch.Tensor, start: int, columns: int, table: torch.Tensor
) -> torch.Tensor:
    """Return one relative-position term of scores, (heads, texts, rows, columns), as a view.

    It is the product of `states`, (heads, texts, rows, head size), of each text's tokens from
    `start` on, and `table`, (heads, 2 * width - 1, head size), at the distance of tokens: the
    column's index in the text minus the row's. `table` comes from `PositionTables.ordered`.
    """
    heads, texts, rows, _ = states.shape
    width = rows + columns - 1
    lowest = (table.shape[1] + 1) // 2 - start - rows  # distance from the last row to column 0
    table = table[:, lowest : lowest + width]
    if more := -width % ROW_STEPS.get(table.device.type, 1):
        table, width = F.pad(table, (0, 0, 0, more)), width + more
    products = torch.bmm(states.flatten(1, 2), table.mT)
    strides = (texts * rows * width, rows * width, width - 1, 1)
    return products.as_strided((heads, texts, rows, columns), strides, rows - 1)


class DisentangledEncoder(DebertaV2Encoder):
    """DeBERTa-v2's encoder for inference, in place of transformers' class in a loaded model.

    Layers run on the concatenated tokens of all texts. The relative-position tables are projected
    once and cached while the weights stay the same. transformers' own forward runs in training,
    with gradients enabled, under autocast, on the meta device, within `reference_forward`, for
    arguments that it alone knows, and for masks with padding between the tokens of a row.
    """

    # Whether the last layer runs only each text's first token, and returns this token's state for
    # all tokens.
    is_first_enough = False
    attention_type: type[DisentangledAttention] = DisentangledAttention
    _tables: tuple[object, list[PositionTables], list[torch.Tensor]] | None = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor,
        output_hidden_states: bool = True,
        output_attentions: bool = False,
        query_states: torch.Tensor | None = None,
        relative_pos: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> Any:
        """Compute the outputs of transformers' encoder, except for undefined states of padding.

        Arguments and result are those of transformers' class: `hidden_states` are (rows, width,
        size), and the mask, (rows, width), is 1 for a token and 0 for padding on one side of a row.
        With `is_first_enough`, all tokens of a row get its first token's state in the last layer,
        if there are several layers. transformers' own forward may run: see the class.
        """
        is_plain = attention_mask.dim() == 2 and not output_attentions and query_states is None
        is_plain = is_plain and relative_pos is None and not is_reference.get()
        is_plain = is_plain and not (self.training or torch.is_grad_enabled())
        device = hidden_states.device.type
        is_plain = is_plain and device != "meta" and not torch.is_autocast_enabled(device)
        layout = None
        if is_plain:
            layout = current_layout.get(None) or Layout.from_mask(attention_mask)
        if layout is None:
            return super().forward(
                hidden_states,
                attention_mask,
                output_hidden_states,
                output_attentions,
                query_states,
                relative_pos,
                return_dict,
            )
        states = self._states(hidden_states, attention_mask, layout)
        kept = tuple(states) if output_hidden_states else None
        if not return_dict:
            return (states[-1],) if kept is None else (states[-1], kept)
        return BaseModelOutput(last_hidden_state=states[-1], hidden_states=kept)

    @property
    def attention(self) -> str:
        """Class name of `attention_type`, for logs."""
        return self.attention_type.__name__

    @contextlib.contextmanager
    def running(
        self, lengths: np.ndarray, width: int, device: torch.device, side: str = "right"
    ) -> Iterator[None]:
        """Set the offsets of a batch's texts, for runs of `forward` during a ``with`` block.

        Then `forward` need not read the mask, which would wait for a GPU. `lengths` are the texts'
        numbers of tokens, int64 (texts,), `width` is the number of columns, and `side` the padded
        side, "left" or "right".
        """
        with set_variable(
            current_layout,
            Layout(lengths, width, device, width - lengths if side == "left" else None),
        ):
            yield

    def _states(
        self, embedded: torch.Tensor, attention_mask: torch.Tensor, layout: Layout
    ) -> list[torch.Tensor]:
        """Run all layers; return the embedding and each layer's output, (rows, width, size)."""
        # One position has a single distance, for which a compiler would make another kernel.
        width = max(layout.width, 2)
        attention = self.attention_type(layout, self._positions(width, embedded.device))
        packed = attention.pad(layout.pack(embedded))
        states, shared = [embedded], current_states.get()
        for number, (layer, tables) in enumerate(
            zip(self.layer, self._position_tables(), strict=True)
        ):
            if shared is not None and shared.skips(number):
                states.append(embedded)  # a placeholder that is not read
                continue
            is_first_only = self.is_first_enough and 0 < number == len(self.layer) - 1
            queried = layout.first_tokens(packed) if is_first_only else packed
            run = functools.partial(_layer_output, layer, queried, packed, tables, attention)
            output = run() if shared is None else shared.output_of(number, run)
            if is_first_only:
                states.append(layout.spread_first_tokens(output))
                break
            # States injected from another forward may lack this attention's padding.
            packed = output if output.shape == packed.shape else attention.pad(output)
            states.append(layout.unpack(packed))
            if number == 0 and self.conv is not None:
                states[-1] = self.conv(embedded, states[-1], attention_mask)
                packed = attention.pad(layout.pack(states[-1]))
        return states

    def _positions(self, width: int, device: torch.device) -> RelativePositions:
        size = self.rel_embeddings.num_embeddings
        return _relative_positions(
            width, self.position_buckets, self.max_relative_positions, size, device
        )

    def _position_tables(self) -> list[PositionTables]:
        """Return each layer's projections of relative positions, cached until a weight changes."""
        parts: list[nn.Module | None] = [self.rel_embeddings, getattr(self, "LayerNorm", None)]
        for layer in self.layer:
            parts.extend(position_projections(layer.attention.self))
        weights = [weight for part in parts if part is not None for weight in part.parameters()]
        state = [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]
        if self._tables is None or self._tables[0] != state:
            positions = self.get_rel_embedding()
            tables = [_project_positions(layer.attention.self, positions) for layer in self.layer]
            # References to the weights keep their addresses from being reused.
            self._tables = (state, tables, [weight.detach() for weight in weights])
        return self._tables[1]

    def _apply(self, fn: Any, recurse: bool = True) -> DisentangledEncoder:
        self._tables = None  # moving or casting may reuse the addresses of the old weights
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_tables"}


@functools.lru_cache(maxsize=1_024)  # saves a copy to the device in every forward
def _relative_positions(
    width: int, buckets: int, most: int, size: int, device: torch.device
) -> RelativePositions:
    positions = _positions_by_distance(width, buckets, most, size)
    return RelativePositions(
        to_device(positions, device), int(positions.min()), int(positions.max())
    )


@functools.lru_cache(maxsize=1_024)
def _positions_by_distance(width: int, buckets: int, most: int, size: int) -> np.ndarray:
    distances = torch.arange(1 - width, width)
    if buckets > 0:
        distances = make_log_bucket_position(distances, buckets, most).long()
    return (distances + size // 2).clamp(0, size - 1).numpy()


def position_projections(attention: Any) -> tuple[nn.Module | None, nn.Module | None]:
    """Return a DeBERTa layer's linear projections of relative positions, to keys and to queries.

    `attention` is the self-attention module. A projection is None if there is no such term.
    """
    is_shared, types = attention.share_att_key, attention.pos_att_type
    key, query = (
        getattr(attention, f"{name}_proj" if is_shared else f"pos_{name}_proj", None)
        for name in ("key", "query")
    )
    return key if "c2p" in types else None, query if "p2c" in types else None


def _project_positions(attention: Any, embedded: torch.Tensor) -> PositionTables:
    """Make a layer's tables from the embedding of relative positions, (positions, size)."""
    scale = _score_scale(attention)
    keys, queries = (
        None
        if projection is None
        else _split_heads(projection(embedded)[None], attention)[0] * scale
        for projection in position_projections(attention)
    )
    return PositionTables(keys, queries)


def _score_scale(attention: Any) -> float:
    terms = 1 + sum(kind in attention.pos_att_type for kind in ("c2p", "p2c"))
    # transformers computes the square root in float32 in every precision.
    return 1 / float(np.sqrt(np.float32(attention.attention_head_size * terms)))


def _split_heads(projected: torch.Tensor, attention: Any) -> torch.Tensor:
    """Split projected states by head, from (1, tokens, size) to (1, heads, tokens, head size)."""
    return projected.unflatten(-1, (attention.num_attention_heads, -1)).transpose(1, 2)


def _layer_output(
    layer: Any,
    queried: torch.Tensor,
    states: torch.Tensor,
    tables: PositionTables,
    attention: DisentangledAttention,
) -> torch.Tensor:
    """Compute a layer's output for `queried`, (1, queries, size), which attend to all `states`."""
    heads = layer.attention.self
    query, key, value = heads.query_proj(queried), heads.key_proj(states), heads.value_proj(states)
    by_head = (_split_heads(query, heads), _split_heads(key, heads), _split_heads(value, heads))
    context = attention(by_head, tables, _score_scale(heads))
    attended = layer.attention.output(context, queried)
    return layer.output(layer.intermediate(attended), attended)
