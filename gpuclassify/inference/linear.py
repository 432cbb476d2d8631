"""Linear layers on CPUs, by oneDNN on weights that it has arranged before.

Torch's layer arranges a weight again in every call, or multiplies without: for BERT-base's
weights that takes 1.1 times as long in float32 (`linear` and `prepacked` of the peaks that
``python -m benchmarks.throughput`` measures).
"""

from __future__ import annotations

import torch
from torch import nn

# The arranged copies of a model's weights, beside the weights themselves. Large encoders stay below
# it in float32; decoders of billions of weights are not to take twice their memory.
MOST_ARRANGED_BYTES = 3 << 29
_DTYPES = (torch.float32, torch.bfloat16)
# Those of torch.compile, which are not documented.
_OPERATORS = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")


class ArrangedWeight:
    """A weight as oneDNN reads it; shared by copies of the layer."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def __deepcopy__(self, memo: dict[int, object]) -> ArrangedWeight:
        return self


class ArrangedLinear(nn.Linear):
    """A linear layer that multiplies with an arranged copy of its weight, which does not change."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.arranged = ArrangedWeight(layer.weight)
        self.train(layer.training)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Compute the layer's output, equal up to rounding."""
        is_elsewhere = states.dtype != self.arranged.tensor.dtype or states.device.type != "cpu"
        if is_elsewhere or states.ndim < 2 or not states.numel():
            return super().forward(states)
        multiply = torch.ops.mkldnn._linear_pointwise
        product: torch.Tensor = multiply(states, self.arranged.tensor, self.bias, "none", [], "")
        return product


@torch.inference_mode()
def arrange_weights(module: nn.Module) -> None:
    """Let oneDNN run the linear layers of a module on a CPU, where that is faster.

    That is known of CPUs with AVX-512; with less, MKL is ahead in float32. Subclasses of
    `torch.nn.Linear` stay, and so do all layers where the copies take `MOST_ARRANGED_BYTES`.
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


def share_arranged(layers: nn.ModuleList, of: nn.ModuleList) -> None:
    """Let layers multiply with the arranged copies of other layers, whose weights are equal."""
    for layer, other in zip(layers.modules(), of.modules(), strict=True):
        if isinstance(layer, ArrangedLinear) and isinstance(other, ArrangedLinear):
            layer.arranged = other.arranged
