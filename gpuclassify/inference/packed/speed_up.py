"""Which DeBERTa encoders get the faster forward, and which attention: what is measured at load."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DebertaV2Encoder,
    DebertaV2ForSequenceClassification,
)

from gpuclassify.inference.packed.disentangled import DisentangledEncoder
from gpuclassify.inference.packed.disentangled_attention import DisentangledAttention
from gpuclassify.inference.packed.fused_attention import FusedAttention

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
    started, compiled = time.perf_counter(), _compilations()
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
        "DeBERTa's attention is %s: %.2g of the time, difference %.1e, tried in %.1f s with %d "
        "compilations",
        "fused" if is_used else "not fused",
        fused_seconds / seconds,
        difference,
        time.perf_counter() - started,
        _compilations() - compiled,
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


def _compilations() -> int:
    """Graphs that torch has compiled in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())
