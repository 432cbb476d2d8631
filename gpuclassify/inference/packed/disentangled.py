"""DeBERTa-v2 as transformers computes it, without padding and what depends on weights alone.

transformers' encoder projects its table of relative positions again in every layer of every
forward, repeats the projections for each row, and holds several copies of all attention scores.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DebertaV2Encoder,
    DebertaV2ForSequenceClassification,
    make_log_bucket_position,
)

from gpuclassify.inference.packed.disentangled_attention import (
    DisentangledAttention,
    PositionTables,
    RelativePositions,
)
from gpuclassify.inference.packed.fused_attention import FusedAttention
from gpuclassify.inference.packed.layout import Layout
from gpuclassify.inference.packed.packed_attention import current_layout, within

logger = logging.getLogger(__name__)

_CHECKED_LENGTHS = (24, 9)
_CHECKED_LAYERS = 2
_TOLERANCE = 1e-6  # of the largest state
# On a CPU the compiled kernel is slower than blocks of matrix products: benchmarks/attention.py.
FUSED_DEVICES = {"cuda"}
FUSED_LENGTHS = (512,) * 16 + (384, 300, 129, 128, 60, 7, 1)
# Root mean squares, in parts of the states' size.
FUSED_TOLERANCE = 1e-5
FUSED_HALF_TOLERANCE = 0.02

_is_reference: ContextVar[bool] = ContextVar("is_reference", default=False)


@contextlib.contextmanager
def reference_forward() -> Iterator[None]:
    """Within it, this thread's forwards are transformers' own, with nothing sped up."""
    token = _is_reference.set(True)
    try:
        yield
    finally:
        _is_reference.reset(token)


def speed_up_deberta(module: nn.Module, is_first_enough: bool = False) -> None:
    """Give every DeBERTa-v2 encoder within `module` the forward of `DisentangledEncoder`.

    Weights and their names stay as they are. An encoder whose outputs would differ from those of
    transformers keeps transformers' forward, with a warning in the log.

    Parameters
    ----------
    module : nn.Module
        On the device where it will run.
    is_first_enough : bool
        Whether the module reads nothing of the last states but each row's first token.
    """
    for encoder in module.modules():
        if type(encoder) is DebertaV2Encoder and encoder.relative_attention:
            # Only the class changes: building another module would rename or copy the weights.
            encoder.__class__ = DisentangledEncoder
            if _agrees_with_transformers(encoder):
                fast = cast(DisentangledEncoder, encoder)
                fast.is_first_enough = is_first_enough
                fast.attention_type = _fastest_attention(fast)
            else:
                encoder.__class__ = DebertaV2Encoder
                logger.warning("DeBERTa's own forward is kept: the faster one differs from it")
    for classifier in module.modules():
        if type(classifier) is DebertaV2ForSequenceClassification:
            encoder = cast(Any, classifier.deberta).encoder
            encoder.is_first_enough = True  # to the classifier's pooler


def fast_encoder(module: nn.Module) -> DisentangledEncoder | None:
    """The encoder within `module` that `speed_up_deberta` has sped up."""
    parts = module.modules()
    return next((part for part in parts if isinstance(part, DisentangledEncoder)), None)


class DisentangledEncoder(DebertaV2Encoder):
    """DeBERTa-v2's encoder for inference; whatever it does not speed up is left to transformers.

    Its layers run on the tokens of the texts end to end. The relative-position tables are projected
    once and kept while the weights stay the same.

    Attributes
    ----------
    is_first_enough : bool
        Whether the last layer runs each text's first token alone, and gives its state for all.
    attention_type : type
        What attention is computed by.
    """

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
        """As transformers' encoder, but for the states of padding, which nothing may read.

        Parameters
        ----------
        hidden_states : Tensor, shape (rows, width, size)
        attention_mask : Tensor, shape (rows, width)
            1 for a token, 0 for padding, which lies on one side of a row.
        """
        is_plain = attention_mask.dim() == 2 and not output_attentions
        is_plain &= query_states is None and relative_pos is None
        layout = None
        if is_plain and self._is_fast(hidden_states):
            layout = current_layout.get(None) or Layout.of_mask(attention_mask)
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

    def _is_fast(self, states: torch.Tensor) -> bool:
        """Neither training nor autocast, for which tables that are kept would be wrong."""
        if self.training or torch.is_grad_enabled() or states.is_meta or _is_reference.get():
            return False
        return not torch.is_autocast_enabled(states.device.type)

    @property
    def attention(self) -> str:
        """What attention is computed by, in words for a log."""
        return self.attention_type.__name__

    @contextlib.contextmanager
    def running(self, lengths: np.ndarray, width: int, device: torch.device) -> Iterator[None]:
        """As `PackedLayers.running`, so that the mask need not be looked at."""
        with within(Layout(lengths, width, device)):
            yield

    def _states(
        self, embedded: torch.Tensor, attention_mask: torch.Tensor, layout: Layout
    ) -> list[torch.Tensor]:
        """The embedding and every layer's output, each (rows, width, size)."""
        attention = self.attention_type(layout, self._positions(layout.width, embedded.device))
        packed = attention.pad(layout.pack(embedded))
        states = [embedded]
        for number, (layer, tables) in enumerate(
            zip(self.layer, self._position_tables(), strict=True)
        ):
            if self.is_first_enough and 0 < number == len(self.layer) - 1:
                first = _layer_output(layer, layout.first_tokens(packed), packed, tables, attention)
                states.append(layout.spread_first_tokens(first))
                break
            packed = _layer_output(layer, packed, packed, tables, attention)
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


@functools.lru_cache(maxsize=1_024)  # else the index would go to the device in every forward
def _relative_positions(
    width: int, buckets: int, most: int, size: int, device: torch.device
) -> RelativePositions:
    distances = torch.arange(1 - width, width)
    if buckets > 0:
        distances = make_log_bucket_position(distances, buckets, most).long()
    positions = (distances + size // 2).clamp(0, size - 1)
    first, last = int(positions.min()), int(positions.max())
    return RelativePositions(positions.to(device), first, last)


def _position_projections(attention: Any) -> tuple[nn.Module | None, nn.Module | None]:
    """What projects positions as keys and as queries, where the layer uses them so."""
    is_shared, types = attention.share_att_key, attention.pos_att_type
    key, query = (
        getattr(attention, f"{name}_proj" if is_shared else f"pos_{name}_proj", None)
        for name in ("key", "query")
    )
    return key if "c2p" in types else None, query if "p2c" in types else None


def _project_positions(attention: Any, embedded: torch.Tensor) -> PositionTables:
    """`embedded` is (positions, size)."""
    scale = _score_scale(attention)
    keys, queries = (
        None if projection is None else _by_head(projection(embedded)[None], attention)[0] * scale
        for projection in _position_projections(attention)
    )
    return PositionTables(keys, queries)


def _score_scale(attention: Any) -> float:
    terms = 1 + sum(kind in attention.pos_att_type for kind in ("c2p", "p2c"))
    # transformers takes the root in float32 whatever the precision of the rest.
    return 1 / float(torch.tensor(attention.attention_head_size * terms).float().sqrt())


def _by_head(projected: torch.Tensor, attention: Any) -> torch.Tensor:
    """(1, tokens, size) as (1, heads, tokens, head size), without a copy."""
    return projected.unflatten(-1, (attention.num_attention_heads, -1)).transpose(1, 2)


def _layer_output(
    layer: Any,
    queried: torch.Tensor,
    states: torch.Tensor,
    tables: PositionTables,
    attention: DisentangledAttention,
) -> torch.Tensor:
    """The layer's output for the tokens `queried`, (1, queries, size), that see `states`."""
    own = layer.attention.self
    query, key, value = (
        _by_head(projection(given), own)
        for projection, given in (
            (own.query_proj, queried),
            (own.key_proj, states),
            (own.value_proj, states),
        )
    )
    context = attention(query, key, value, tables, _score_scale(own))
    attended = layer.attention.output(context, queried)
    return layer.output(layer.intermediate(attended), attended)


def _agrees_with_transformers(encoder: Any) -> bool:
    """Whether the first layers give the same on two ragged rows of random states.

    In float64, where rounding hides no difference, whatever the weights' own precision.
    """
    first = _first_layers(encoder).to("cpu", torch.float64)
    states, mask = _random_rows(first, _CHECKED_LENGTHS)
    with torch.inference_mode():
        found = first(states, mask).last_hidden_state[mask.bool()]
        expected = DebertaV2Encoder.forward(first, states, mask).last_hidden_state[mask.bool()]
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def _first_layers(encoder: Any) -> Any:
    first = copy.copy(encoder)
    first._modules = {**encoder._modules, "layer": encoder.layer[:_CHECKED_LAYERS]}
    return copy.deepcopy(first)


def _random_rows(encoder: Any, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged rows of states (rows, width, size), and their mask (rows, width)."""
    weight = encoder.rel_embeddings.weight
    shape = (len(lengths), max(lengths), weight.shape[1])
    states = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    return states.to(weight), mask.long().to(weight.device)


def _fastest_attention(encoder: DisentangledEncoder) -> type[DisentangledAttention]:
    """The fused attention where it works here, gives the same and is faster; else the other one."""
    if encoder.rel_embeddings.weight.device.type not in FUSED_DEVICES:
        return DisentangledAttention
    started = time.perf_counter()
    try:
        states, mask = _random_rows(encoder, FUSED_LENGTHS)
        expected, seconds = _time_attention(encoder, DisentangledAttention, states, mask)
        found, fused_seconds = _time_attention(encoder, FusedAttention, states, mask)
    except Exception as err:  # whatever a compiler may raise
        reason = str(err).strip().partition("\n")[0]
        logger.info("DeBERTa's attention is not fused: %s: %s", type(err).__name__, reason)
        return DisentangledAttention
    difference = _rms(found - expected) / _rms(expected)
    most = FUSED_TOLERANCE if states.dtype == torch.float32 else FUSED_HALF_TOLERANCE
    is_used = difference <= most and fused_seconds < seconds
    logger.info(
        "DeBERTa's attention is %s: %.2g of the time, difference %.1e, tried in %.1f s",
        "fused" if is_used else "not fused",
        fused_seconds / seconds,
        difference,
        time.perf_counter() - started,
    )
    return FusedAttention if is_used else DisentangledAttention


@torch.inference_mode()
def _time_attention(
    encoder: DisentangledEncoder,
    attention_type: type[DisentangledAttention],
    states: torch.Tensor,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, float]:
    """States of tokens after the first layers, and the least seconds of a few runs."""
    first = _first_layers(encoder)
    first.attention_type = attention_type
    lengths = mask.sum(1).cpu().numpy()
    seconds = []
    for _ in range(4):  # the first compiles
        with first.running(lengths, mask.shape[1], mask.device):
            started = time.perf_counter()
            found = first(states, mask).last_hidden_state[mask.bool()].float()
        float(found[0, 0])  # waits for the device
        seconds.append(time.perf_counter() - started)
    return found, min(seconds)


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())
