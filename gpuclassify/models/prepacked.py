"""Linear layers whose weights lie in memory as the CPU's matrix kernels read them.

torch hands a linear layer to a matrix library that rearranges the weights on every call. oneDNN,
which comes with torch, can keep them rearranged. Whether its kernels are the faster ones differs
between processors, so they take turns once on the layer's own sizes.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import psutil
import torch
from torch import nn
from torch.nn import functional as F

from gpuclassify.models.reference import is_reference_forward

logger = logging.getLogger(__name__)

LEAST_WEIGHTS = 2**16  # smaller layers cost a call and little else
MOST_MEMORY_SHARE = 0.25  # of what is free, for the second copy of all weights
_TIMED_ROWS = (64, 512)
_TIMED_ROUNDS = 4
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the largest output


def prepack(module: nn.Module) -> int:
    """Make the linear layers within `module` faster where that was measured; returns how many.

    Parameters and their names stay as they are, and each such layer holds its weights twice.
    Layers off the CPU or in other precisions than float32 and bfloat16 are left alone, and so is a
    module of which a second copy would take more than a quarter of the free memory. Moving, casting
    or copying a module loses what was rearranged; call this again to have it back.
    """
    layers = list(_candidates(module))
    wanted_bytes = sum(layer.weight.nbytes for layer in layers)
    if wanted_bytes > psutil.virtual_memory().available * MOST_MEMORY_SHARE:
        logger.info("weights are not prepacked: a copy takes %d bytes", wanted_bytes)
        return 0
    faster = [layer for layer in layers if is_faster(*layer.weight.shape, layer.weight.dtype)]
    for layer in faster:
        layer.__class__ = PrepackedLinear  # only the class: parameters keep names and storage
        cast(PrepackedLinear, layer).pack()
    logger.info("%d of %d linear layers are prepacked", len(faster), len(layers))
    return len(faster)


@dataclass(frozen=True)
class _Packed:
    """Rearranged weights and what they were made of.

    `source` holds on to that memory: freed, it could become the memory of other weights.
    """

    weights: torch.Tensor
    source: torch.Tensor
    version: int

    def is_of(self, weight: torch.Tensor) -> bool:
        """Whether `weight` is what it was then, neither replaced nor written to."""
        return weight.is_set_to(self.source) and weight._version == self.version


class PrepackedLinear(nn.Linear):
    """A linear layer for inference on a CPU; whatever else it is asked for is torch's own.

    Weights that are written to through ``.data`` or numpy, which torch does not notice, have to be
    packed again.
    """

    _packed: _Packed | None = None

    def pack(self) -> None:
        """Rearrange the weights as they are now."""
        with torch.inference_mode():
            weight = self.weight
            self._packed = _Packed(_pack(weight), weight.detach(), weight._version)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As `torch.nn.Linear`."""
        packed = self._packed  # read once: another thread may move the module
        if packed is None or not self._is_plain(input) or not packed.is_of(self.weight):
            return super().forward(input)
        return _multiply(input, packed.weights, self.bias)

    def _is_plain(self, states: torch.Tensor) -> bool:
        """Inference in the weights' own precision, of numbers that oneDNN reads rightly."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or is_reference_forward():
            return False
        if torch.is_autocast_enabled("cpu") or states.dtype != self.weight.dtype:
            return False
        # oneDNN takes any bias for contiguous, and would read beyond the end of others.
        has_plain_bias = self.bias is None or self.bias.is_contiguous()
        return has_plain_bias and states.device.type == "cpu" and states.numel() > 0

    def _apply(self, fn: Any, recurse: bool = True) -> PrepackedLinear:
        self._packed = None  # of no use to what becomes of the weights
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_packed"}


@functools.cache
def is_faster(outputs: int, inputs: int, dtype: torch.dtype) -> bool:
    """Whether prepacked weights of this shape are faster here, by the fastest of a few rounds.

    Without oneDNN, or where its kernels give something else, they are not.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    states = [torch.randn(rows, inputs, generator=generator).to(dtype) for rows in _TIMED_ROWS]
    try:
        with torch.inference_mode():
            packed = _pack(weight)
            if not all(_agree(F.linear(some, weight), _multiply(some, packed)) for some in states):
                return False
            ways = (lambda some: F.linear(some, weight), lambda some: _multiply(some, packed))
            plain, prepacked = map(sum, zip(*_fastest_seconds(ways, states), strict=True))
    except (AttributeError, RuntimeError) as err:  # another torch, or one without oneDNN
        logger.info("weights are not prepacked: %s", err)
        return False
    return prepacked < plain


def _candidates(module: nn.Module) -> Iterator[nn.Linear]:
    for layer in module.modules():
        if type(layer) not in (nn.Linear, PrepackedLinear):
            continue
        weight = cast(nn.Linear, layer).weight
        # Other tensors compute in their own ways, and writes to inference tensors go unnoticed.
        is_plain = type(weight) is nn.Parameter and not weight.is_inference()
        is_plain &= weight.device.type == "cpu" and weight.dtype in _TOLERANCE
        if is_plain and weight.numel() >= LEAST_WEIGHTS:
            yield cast(nn.Linear, layer)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, None)


def _multiply(
    states: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(states, packed, bias, "none", [], "")


def _agree(expected: torch.Tensor, found: torch.Tensor) -> bool:
    most = _TOLERANCE[expected.dtype] * float(expected.abs().max())
    return float((expected - found).abs().max()) <= most


def _fastest_seconds(
    ways: tuple[Callable[[torch.Tensor], torch.Tensor], ...], states: list[torch.Tensor]
) -> Iterator[list[float]]:
    """Of each of `states` the least time of each way; the ways take turns."""
    for some in states:
        seconds: list[list[float]] = [[] for _ in ways]
        for _ in range(_TIMED_ROUNDS):
            for way, times in zip(ways, seconds, strict=True):
                started = time.perf_counter()
                way(some)
                times.append(time.perf_counter() - started)
        yield list(map(min, seconds))
