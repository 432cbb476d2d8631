"""Linear layers for CPUs that keep their weights in oneDNN's packed layout.

Torch's own layer packs the weight again in every call, or multiplies an unpacked one. For
BERT-base's weights in float32 that takes 1.1 times as long (`linear` and `prepacked` among the
peaks that ``python -m benchmarks.throughput`` measures).
"""

from __future__ import annotations

import torch
from torch import nn

# Maximum size of the packed copies of a model's weights. Large encoders in float32 need less, but
# decoders with billions of weights must not take twice their memory.
MOST_ARRANGED_BYTES = 3 << 29
_DTYPES = (torch.float32, torch.bfloat16)
# Undocumented operators of torch.compile.
_OPERATORS = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")


class ArrangedWeight:
    """Copy of a linear layer's weight in oneDNN's packed layout; copies of the layer share it."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def __deepcopy__(self, memo: dict[int, object]) -> ArrangedWeight:
        return self


class ArrangedLinear(nn.Linear):
    """Linear layer for CPUs that multiplies with a packed copy of its weight.

    It has the parameters of `layer`. The weight must not change, because the copy would not.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.arranged = ArrangedWeight(layer.weight)
        self.train(layer.training)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the output of `torch.nn.Linear` for `states`, (..., inputs), up to rounding."""
        is_elsewhere = states.dtype != self.arranged.tensor.dtype or states.device.type != "cpu"
        if is_elsewhere or states.ndim < 2 or not states.numel():
            return super().forward(states)
        multiply = torch.ops.mkldnn._linear_pointwise
        product: torch.Tensor = multiply(states, self.arranged.tensor, self.bias, "none", [], "")
        return product


@torch.inference_mode()
def arrange_weights(module: nn.Module) -> None:
    """Replace a network's plain linear layers, in place, by ones with packed weights, if faster.

    Packed weights are faster on CPUs with AVX-512; on other CPUs, MKL is faster in float32. All
    layers stay if the packed copies would exceed `MOST_ARRANGED_BYTES`, if a weight is neither
    float32 nor bfloat16, or if operations are missing. The network must be on a CPU.
    """
    layers = {name: part for name, part in module.named_modules() if type(part) is nn.Linear}
    weights = [layer.weight for layer in layers.values()]
    if (
        torch.backends.cpu.get_cpu_capability() != "AVX512"
        or not torch.backends.mkldnn.is_available()
        or not all(hasattr(torch.ops.mkldnn, name) for name in _OPERATORS)
        or not all(weight.dtype in _DTYPES for weight in weights)
        or (
            any(weight.dtype == torch.bfloat16 for weight in weights)
            and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
        or sum(weight.nbytes for weight in weights) > MOST_ARRANGED_BYTES
    ):
        return
    for name, layer in layers.items():
        module.set_submodule(name, ArrangedLinear(layer))


def share_arranged(layers: nn.ModuleList, others: nn.ModuleList) -> None:
    """Make `layers` use the equal packed weights of `others`, a list of equal structure."""
    for layer, other in zip(layers.modules(), others.modules(), strict=True):
        if isinstance(layer, ArrangedLinear) and isinstance(other, ArrangedLinear):
            layer.arranged = other.arranged
