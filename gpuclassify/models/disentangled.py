"""DeBERTa-v2 as transformers computes it, without what depends on the weights alone.

transformers' encoder projects its table of relative positions again in every layer of every
forward, repeats the projections for each row, and holds several copies of all attention scores.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DebertaV2Encoder,
    DebertaV2ForSequenceClassification,
    make_log_bucket_position,
)

logger = logging.getLogger(__name__)

# Scores are computed for as many rows and heads at once as keep one copy of them below this. Parts
# of 1 to 16 MiB are alike on a CPU; four rows of 512 tokens at once took twice as long.
CPU_PART_BYTES = 4 * 2**20
GPU_PART_BYTES = 256 * 2**20

_CHECKED_LENGTHS = (9, 24)
_CHECKED_LAYERS = 2
_TOLERANCE = 1e-6  # of the largest state

_is_reference: ContextVar[bool] = ContextVar("is_reference", default=False)


@contextlib.contextmanager
def reference_forward() -> Iterator[None]:
    """Within it, this thread's forwards are transformers' own, with nothing sped up."""
    token = _is_reference.set(True)
    try:
        yield
    finally:
        _is_reference.reset(token)


def speed_up_deberta(module: nn.Module, is_first_token_enough: bool = False) -> None:
    """Give every DeBERTa-v2 encoder within `module` the forward of `DisentangledEncoder`.

    Weights and their names stay as they are. An encoder whose outputs would differ from those of
    transformers keeps transformers' forward, with a warning in the log.

    Parameters
    ----------
    module : nn.Module
    is_first_token_enough : bool
        Whether the module reads nothing of the last states but each row's first token.
    """
    for encoder in module.modules():
        if type(encoder) is DebertaV2Encoder and encoder.relative_attention:
            # Only the class changes: building another module would rename or copy the weights.
            encoder.__class__ = DisentangledEncoder
            if _agrees_with_transformers(encoder):
                cast(DisentangledEncoder, encoder).is_first_token_enough = is_first_token_enough
            else:
                encoder.__class__ = DebertaV2Encoder
                logger.warning("DeBERTa's own forward is kept: the faster one differs from it")
    for classifier in module.modules():
        if type(classifier) is DebertaV2ForSequenceClassification:
            encoder = cast(Any, classifier.deberta).encoder
            encoder.is_first_token_enough = True  # to the classifier's pooler


def _agrees_with_transformers(encoder: Any) -> bool:
    """Whether the first layers give the same on two ragged rows of random states.

    In float64, where rounding hides no difference, whatever the weights' own precision.
    """
    first = copy.copy(encoder)
    first._modules = {**encoder._modules, "layer": encoder.layer[:_CHECKED_LAYERS]}
    first = copy.deepcopy(first).to("cpu", torch.float64)
    shape = (len(_CHECKED_LENGTHS), max(_CHECKED_LENGTHS), encoder.rel_embeddings.embedding_dim)
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = (torch.arange(shape[1]) < torch.tensor(_CHECKED_LENGTHS)[:, None]).long()
    with torch.inference_mode():
        found = first(states, mask).last_hidden_state[mask.bool()]
        expected = DebertaV2Encoder.forward(first, states, mask).last_hidden_state[mask.bool()]
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())


@dataclass(frozen=True)
class _Tables:
    """A layer's projected relative positions, scaled, each (heads, positions, head size) or None.

    `keys` is what queries are compared with (content to position), `queries` what keys are.
    """

    keys: torch.Tensor | None
    queries: torch.Tensor | None

    def part(self, heads: slice, positions: slice) -> _Tables:
        return _Tables(
            None if self.keys is None else self.keys[heads, positions],
            None if self.queries is None else self.queries[heads, positions],
        )


@dataclass(frozen=True)
class _Pairs:
    """How the queries and the keys of a batch lie to each other.

    `positions` are the rows of the tables that occur at all; `index`, int64 (queries, rows, keys),
    is where among them each pair looks; `mask`, (1, rows, 1, keys), is 0 for tokens and -inf for
    padding, or None.
    """

    positions: slice
    index: torch.Tensor
    mask: torch.Tensor | None

    def rows(self, part: slice) -> _Pairs:
        mask = None if self.mask is None else self.mask[:, part]
        return replace(self, index=self.index[:, part], mask=mask)

    def of_queries(self, columns: torch.Tensor) -> _Pairs:
        """One query a row, which stands at `columns`, int64 (rows,)."""
        rows = torch.arange(len(columns), device=columns.device)
        return replace(self, index=self.index[columns, rows][None])


class DisentangledEncoder(DebertaV2Encoder):
    """DeBERTa-v2's encoder for inference; whatever it does not speed up is left to transformers.

    The relative-position tables are projected once and kept while the weights stay the same. Terms
    are computed for the positions that a width has, and added to the scores as the bias of torch's
    fused attention.
    """

    # Whether the last layer runs each row's first token alone, and gives its state in every column.
    is_first_token_enough = False
    _tables: tuple[object, list[_Tables], list[torch.Tensor]] | None = None

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
        """As transformers' encoder, but for the states of padding, which nothing may read.

        Parameters
        ----------
        hidden_states : Tensor, shape (rows, width, size)
        attention_mask : Tensor, shape (rows, width)
            1 for a token, 0 for padding.
        """
        is_plain = attention_mask.dim() == 2 and not output_attentions
        is_plain &= query_states is None and relative_pos is None
        if not is_plain or not self._is_fast(hidden_states):
            return super().forward(
                hidden_states,
                attention_mask,
                output_hidden_states,
                output_attentions,
                query_states,
                relative_pos,
                return_dict,
            )
        states = self._states(hidden_states, attention_mask)
        kept = tuple(states) if output_hidden_states else None
        if not return_dict:
            return (states[-1],) if kept is None else (states[-1], kept)
        return BaseModelOutput(last_hidden_state=states[-1], hidden_states=kept)

    def _is_fast(self, states: torch.Tensor) -> bool:
        """Neither training nor autocast, for which tables that are kept would be wrong."""
        if self.training or torch.is_grad_enabled() or states.is_meta or _is_reference.get():
            return False
        return not torch.is_autocast_enabled(states.device.type)

    def _states(self, embedded: torch.Tensor, attention_mask: torch.Tensor) -> list[torch.Tensor]:
        """The embedding and every layer's output, each (rows, width, size)."""
        pairs = self._pairs(attention_mask, embedded.dtype)
        states = [embedded]
        for number, (layer, tables) in enumerate(
            zip(self.layer, self._position_tables(), strict=True)
        ):
            if self.is_first_token_enough and 0 < number == len(self.layer) - 1:
                states.append(_first_output(layer, states[-1], tables, pairs, attention_mask))
                break
            output = _layer_output(layer, states[-1], states[-1], tables, pairs)
            if number == 0 and self.conv is not None:
                output = self.conv(embedded, output, attention_mask)
            states.append(output)
        return states

    def _pairs(self, attention_mask: torch.Tensor, dtype: torch.dtype) -> _Pairs:
        rows, width = attention_mask.shape
        distances = torch.arange(1 - width, width)
        if self.position_buckets > 0:
            distances = make_log_bucket_position(
                distances, self.position_buckets, self.max_relative_positions
            ).long()
        size = self.rel_embeddings.num_embeddings
        positions = (distances + size // 2).clamp(0, size - 1)
        first, last = int(positions.min()), int(positions.max())
        columns = torch.arange(width, device=attention_mask.device)
        index = (positions - first).to(columns.device)[columns[:, None] - columns + (width - 1)]
        return _Pairs(
            slice(first, last + 1),
            index[:, None].expand(-1, rows, -1),
            _additive_mask(attention_mask, dtype),
        )

    def _position_tables(self) -> list[_Tables]:
        """Every layer's tables, made anew when a weight was changed, moved or cast."""
        state = self._table_state()
        if self._tables is None or self._tables[0] != state:
            positions = self.get_rel_embedding()
            made = [_project_positions(layer.attention.self, positions) for layer in self.layer]
            # Weights that are held keep their addresses to themselves.
            self._tables = (state, made, [weight.detach() for weight in self._table_weights()])
        return self._tables[1]

    def _table_state(self) -> list[tuple[int, int]]:
        weights = self._table_weights()
        return [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]

    def _table_weights(self) -> list[torch.Tensor]:
        parts: list[nn.Module | None] = [self.rel_embeddings, getattr(self, "LayerNorm", None)]
        for layer in self.layer:
            parts.extend(_position_projections(layer.attention.self))
        return [weight for part in parts if part is not None for weight in part.parameters()]

    def _apply(self, fn: Any, recurse: bool = True) -> DisentangledEncoder:
        self._tables = None  # moving or casting may reuse the addresses of the old weights
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_tables"}


def _position_projections(attention: Any) -> tuple[nn.Module | None, nn.Module | None]:
    """What projects positions as keys and as queries, where the layer uses them so."""
    is_shared, types = attention.share_att_key, attention.pos_att_type
    key, query = (
        getattr(attention, f"{name}_proj" if is_shared else f"pos_{name}_proj", None)
        for name in ("key", "query")
    )
    return key if "c2p" in types else None, query if "p2c" in types else None


def _project_positions(attention: Any, embedded: torch.Tensor) -> _Tables:
    """`embedded` is (positions, size)."""
    keys, queries = (
        None if projection is None else _by_head(projection(embedded)[None], attention)[:, 0]
        for projection in _position_projections(attention)
    )
    scale = _score_scale(attention)
    return _Tables(
        None if keys is None else keys * scale, None if queries is None else queries * scale
    )


def _score_scale(attention: Any) -> float:
    terms = 1 + sum(kind in attention.pos_att_type for kind in ("c2p", "p2c"))
    # transformers takes the root in float32 whatever the precision of the rest.
    return 1 / float(torch.tensor(attention.attention_head_size * terms).float().sqrt())


def _additive_mask(attention_mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """0 for tokens and -inf for padding, (1, rows, 1, width); None if there is no padding."""
    is_token = attention_mask.bool()
    # On a GPU the look would wait for the device, which costs more than adding zeros.
    if attention_mask.device.type == "cpu" and is_token.all():
        return None
    is_token = is_token | ~is_token.any(dim=1, keepdim=True)  # nothing but -inf would give NaN
    mask = torch.zeros(is_token.shape, dtype=dtype, device=is_token.device)
    return mask.masked_fill(~is_token, -torch.inf)[None, :, None, :]


def _layer_output(
    layer: Any, queried: torch.Tensor, states: torch.Tensor, tables: _Tables, pairs: _Pairs
) -> torch.Tensor:
    """The layer's output for the tokens `queried`, (rows, queries, size), that see `states`."""
    context = _context(layer.attention.self, queried, states, tables, pairs)
    attended = layer.attention.output(context, queried)
    return layer.output(layer.intermediate(attended), attended)


def _first_output(
    layer: Any,
    states: torch.Tensor,
    tables: _Tables,
    pairs: _Pairs,
    attention_mask: torch.Tensor,
) -> torch.Tensor:
    """The layer's output for each row's first token, in every column of (rows, width, size)."""
    first = attention_mask.argmax(dim=1)
    queried = states[torch.arange(len(first), device=first.device), first][:, None]
    return _layer_output(layer, queried, states, tables, pairs.of_queries(first)).expand_as(states)


def _context(
    attention: Any, queried: torch.Tensor, states: torch.Tensor, tables: _Tables, pairs: _Pairs
) -> torch.Tensor:
    """What `queried`, (rows, queries, size), take from `states`, (rows, keys, size)."""
    query = _by_head(attention.query_proj(queried), attention)
    key = _by_head(attention.key_proj(states), attention)
    value = _by_head(attention.value_proj(states), attention)
    heads, rows, count, size = query.shape
    context = query.new_empty(rows, count, heads, size)
    for row, head in _parts(query, key, pairs):
        q, k, v = query[head, row], key[head, row], value[head, row]
        bias = _bias(q, k, tables.part(head, pairs.positions), pairs.rows(row))
        found = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=_score_scale(attention))
        context[row, :, head] = found.permute(1, 2, 0, 3)
    return context.flatten(2)


def _by_head(projected: torch.Tensor, attention: Any) -> torch.Tensor:
    """(rows, tokens, size) as (heads, rows, tokens, head size), without a copy."""
    return projected.unflatten(-1, (attention.num_attention_heads, -1)).permute(2, 0, 1, 3)


def _parts(query: torch.Tensor, key: torch.Tensor, pairs: _Pairs) -> Iterator[tuple[slice, slice]]:
    """Rows and heads whose scores are computed together, so that they fit into a part's bytes."""
    heads, rows, count, _ = query.shape
    widest = max(count, pairs.positions.stop - pairs.positions.start)
    score_bytes = widest * key.shape[2] * query.element_size()
    part_bytes = CPU_PART_BYTES if query.device.type == "cpu" else GPU_PART_BYTES
    most = max(1, part_bytes // score_bytes)
    row_step, head_step = max(1, most // heads), min(most, heads)
    for row in range(0, rows, row_step):
        for head in range(0, heads, head_step):
            yield slice(row, row + row_step), slice(head, head + head_step)


def _bias(
    query: torch.Tensor, key: torch.Tensor, tables: _Tables, pairs: _Pairs
) -> torch.Tensor | None:
    """Both relative terms and the mask, (heads, rows, queries, keys) or what expands to it."""
    heads, rows, count, _ = query.shape
    terms = []
    if tables.keys is not None:
        scores = torch.bmm(query.flatten(1, 2), tables.keys.mT).unflatten(1, (rows, count))
        index = pairs.index.transpose(0, 1).expand(heads, -1, -1, -1)
        terms.append(scores.gather(-1, index))
    if tables.queries is not None:
        scores = torch.bmm(tables.queries, key.flatten(1, 2).mT).unflatten(-1, (rows, -1))
        index = pairs.index.expand(heads, -1, -1, -1)
        terms.append(scores.gather(1, index).transpose(1, 2))
    if pairs.mask is not None:
        terms.append(pairs.mask)
    if len(terms) < 2:
        return terms[0] if terms else None
    return functools.reduce(torch.Tensor.add_, terms)
