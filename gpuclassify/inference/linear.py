"""Linear layers in other forms than a model's own: packed weights, one product, 8-bit numbers.

On a CPU, weights are kept in oneDNN's packed layout. Torch's own layer packs them again in every
call, or multiplies unpacked ones. For BERT-base's weights in float32 that takes 1.1 times as long
(`linear` and `prepacked` among the peaks that ``python -m benchmarks.throughput`` measures).
`MergedLinear`, `FusedSum` and `Float8Linear` are for GPUs.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import GELUActivation

from gpuclassify.inference.packed.disentangled import is_reference
from gpuclassify.workers.device_errors import is_broken_device, is_out_of_memory

logger = logging.getLogger(__name__)

# Maximum size of the packed copies of a model's weights. Large encoders in float32 need less, but
# decoders with billions of weights must not take twice their memory.
MOST_ARRANGED_BYTES = 3 << 29
_DTYPES = (torch.float32, torch.bfloat16)
# Undocumented operators of torch.compile.
_OPERATORS = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")

FLOAT8 = torch.float8_e4m3fn
_MULTIPLE = 16  # `in_features` and `out_features` of a `Float8Linear` are multiples of it
# Names of the projections to queries, keys and values in transformers' encoders.
_PROJECTIONS = (
    ("query", "key", "value"),
    ("query_proj", "key_proj", "value_proj"),
    ("q_lin", "k_lin", "v_lin"),
)
# Submodules of blocks like BertOutput, which return ``LayerNorm(dense(x) + input_tensor)``.
_SUM_PARTS = {"dense", "LayerNorm", "dropout"}
# Largest root mean square of differences from such a block, relative to its outputs.
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


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


class MergedLinear(nn.Module):
    """Linear layers of the same states, such as queries, keys and values, as one product.

    Each layer becomes a `MergedPart`. The first part that is called for some states computes the
    product, which is freed when all parts have been called, or with the states.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        first, self.sizes = layers[0], [layer.out_features for layer in layers]
        self.product = nn.Linear(first.in_features, sum(self.sizes), device="meta")
        for name in ("weight", "bias"):
            tensors = [getattr(layer, name) for layer in layers]
            merged = None if tensors[0] is None else _frozen(torch.cat(tensors))
            self.product.register_parameter(name, merged)
        self.kept: tuple[weakref.ref, dict[int, torch.Tensor]] | None = None

    def part(self, number: int, states: torch.Tensor) -> torch.Tensor:
        """Return the output of layer `number` for `states`, (..., inputs)."""
        kept = self.kept
        if kept is None or kept[0]() is not states or number not in kept[1]:
            parts = self.product(states).split(self.sizes, dim=-1)
            free = weakref.ref(states, lambda _: setattr(self, "kept", None))
            kept = self.kept = free, dict(enumerate(parts))
        output = kept[1].pop(number)
        if not kept[1]:
            self.kept = None
        return output


class MergedPart(nn.Module):
    """The linear layer with the index `number` of a `MergedLinear`."""

    def __init__(self, merged: MergedLinear, number: int) -> None:
        super().__init__()
        self.merged, self.number = merged, number

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for `states`, (..., inputs)."""
        return self.merged.part(self.number, states)


@torch.no_grad()
def merge_projections(module: nn.Module) -> None:
    """Replace queries', keys' and values' linear layers, in place, by parts of one product."""
    for part in list(module.modules()):
        for names in _PROJECTIONS:
            layers: list[Any] = [getattr(part, name, None) for name in names]
            is_linear = all(type(layer) is nn.Linear for layer in layers)
            if is_linear and len({(one.in_features, one.bias is None) for one in layers}) == 1:
                merged = MergedLinear(layers)
                for number, name in enumerate(names):
                    setattr(part, name, MergedPart(merged, number))


class FusedSum(nn.Module):
    """Block like BertOutput whose sum and LayerNorm are computed by one kernel."""

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        """Return the norm of the sum of ``dense(hidden_states)`` and `input_tensor`."""
        from gpuclassify.inference.kernels import add_and_norm  # needs triton

        states, norm = cast(Any, self).dense(hidden_states), cast(Any, self).LayerNorm
        if is_reference.get():
            return norm(states + input_tensor)
        return add_and_norm(states, input_tensor, norm)


def fuse_sums(module: nn.Module) -> None:
    """Change the class of blocks like BertOutput to `FusedSum`, if their outputs agree.

    They are compared once for each class. If they differ or the kernel fails, the class stays, and
    the reason is logged. Call it within `exclusive_device`.
    """
    kinds: dict[type, list[Any]] = {}
    for part in module.modules():
        if {name for name, _ in part.named_children()} == _SUM_PARTS:
            kinds.setdefault(type(part), []).append(part)
    for kind, parts in kinds.items():
        try:
            weight, random = parts[0].dense.weight, torch.Generator().manual_seed(0)
            shapes = [(64, size) for size in weight.T.shape]
            states = [torch.randn(shape, generator=random).to(weight) for shape in shapes]
            expected = parts[0](*states).float()
            difference = FusedSum.forward(parts[0], *states).float() - expected
            most = _TOLERANCES[weight.dtype] * expected.norm()
            if not bool(difference.norm() <= most):  # also for NaN
                raise ValueError("its outputs differ")
        except Exception as err:  # compilers raise errors of any type
            if is_out_of_memory(err) or is_broken_device(err):
                raise
            reason = str(err).strip().partition("\n")[0]
            logger.info("%s is not fused: %s: %s", kind.__name__, type(err).__name__, reason)
            continue
        for part in parts:
            part.__class__ = FusedSum


class Float8Linear(nn.Module):
    """Linear layer whose product has 8-bit inputs and weights; outputs have the inputs' dtype.

    A factor for each row of inputs, and one for each output, scale the largest absolute value to
    448, the largest number of ``torch.float8_e4m3fn`` (Micikevicius et al., 2022, "FP8 Formats for
    Deep Learning"). So a row's outputs do not depend on other rows. `has_gelu` applies GELU first.
    """

    def __init__(self, layer: nn.Linear, has_gelu: bool = False) -> None:
        super().__init__()
        weight, scale = _round_rows(layer.weight.detach(), has_gelu=False)
        self.weight, self.bias, self.has_gelu = _frozen(weight), layer.bias, has_gelu
        self.scale = _frozen(scale.T.contiguous())

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for `states`, (..., inputs)."""
        rows, scales = _round_rows(states.flatten(0, -2), self.has_gelu)
        product = torch._scaled_mm(
            *(rows, self.weight.t(), scales, self.scale, self.bias),
            out_dtype=states.dtype,
            use_fast_accum=True,  # its error is far below that of rounding to 8 bits
        )
        return product.unflatten(0, states.shape[:-1])


@torch.no_grad()
def round_products(layers: nn.ModuleList) -> None:
    """Replace linear layers within `layers`, in place, by a `Float8Linear` each.

    A layer stays if `in_features` or `out_features` is not a multiple of 16. Raises ValueError if
    all stay.
    """
    for name, part in list(layers.named_modules()):
        if type(part) is nn.Linear and not (part.in_features | part.out_features) % _MULTIPLE:
            # The output of BERT's and similar models' layers reads what the activation returns.
            number, _, place = name.partition(".")
            inner: Any = getattr(layers[int(number)], "intermediate", None)
            activation = getattr(inner, "intermediate_act_fn", None)
            has_gelu = place == "output.dense" and type(activation) is GELUActivation
            if has_gelu:
                inner.intermediate_act_fn = nn.Identity()
            layers.set_submodule(name, Float8Linear(part, has_gelu))
    if not any(isinstance(part, Float8Linear) for part in layers.modules()):
        raise ValueError("no linear layer has sizes that are multiples of 16")


def _round_rows(states: torch.Tensor, has_gelu: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of `kernels.round_rows` for the type `FLOAT8`, on any device."""
    if states.is_cuda:
        from gpuclassify.inference.kernels import round_rows  # needs triton

        return round_rows(states, FLOAT8, has_gelu)
    values = F.gelu(states.float()) if has_gelu else states.float()
    scales = values.abs().amax(1, keepdim=True).clamp(min=1e-12) / torch.finfo(FLOAT8).max
    return (values / scales).to(FLOAT8), scales


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
