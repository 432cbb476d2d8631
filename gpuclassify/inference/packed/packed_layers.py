"""Layers of a transformers model, run on real tokens only, without padding.

Before the first layer, a batch of padded rows is packed: its real tokens are concatenated into one
row. After the last layer it is unpacked. So embeddings, pooling and heads need no change. The
layers are transformers' own, with an attention function that keeps the texts separate. Before the
first use of a model, outputs of packed texts are compared with those of texts that run alone.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from gpuclassify.inference.device import is_bfloat16_without_amx
from gpuclassify.inference.packed.layout import Layout, States, TextGroup, current_layout
from gpuclassify.workers.device_errors import is_broken_device, is_out_of_memory
from gpuclassify.workers.run_context import set_variable
from gpuclassify.workers.shared_context import SharedContext

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

ATTENTION = "gpuclassify_packed"

_VARLEN = "varlen_attn"
_VARLEN_ARGUMENTS = {"scale", "window_size"}  # since torch 2.11
_SHARED_HEADS = "enable_gqa"  # since torch 2.12, which needs it for grouped-query attention
_VARLEN_DTYPES = (torch.float16, torch.bfloat16)
# Arguments of attention functions in transformers that do not affect their results.
_WITHOUT_EFFECT = {
    "cache_position",
    "deterministic",
    "output_attentions",
    "output_hidden_states",
    "position_ids",
    "return_dict",
    "use_cache",
}
# Longest text (in tokens) for attention by matrix products, and most scores in memory at once.
_MOST_BY_PRODUCTS, _MOST_SCORES = 1_024, 1 << 24
# Largest root mean square of differences between packed texts and texts that run alone, relative to
# the outputs and to the spread of token states.
_TOLERANCE = 1e-4
_HALF_PRECISION_TOLERANCE = 0.1
# Largest rounding error relative to the states' size, for tokens whose states hardly differ.
_ROUNDING = 1e-5
_HALF_PRECISION_ROUNDING = 1e-2
FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)

Forward = Callable[[slice], torch.Tensor]


class NotPackableError(ValueError):
    """Error raised when a model cannot run on texts concatenated without padding."""


class PackedLayers:
    """Layers of the transformers model within a network, run on real tokens only.

    `layers` is the first list of modules in the first transformers model. `find_packed_layers`
    makes an object that is ready to use; the constructor makes no trial run. Raises
    NotPackableError if the model has no list of layers.
    """

    def __init__(self, module: nn.Module) -> None:
        models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
        inner = models[0].modules() if models else iter(())
        lists = (part for part in inner if isinstance(part, nn.ModuleList))
        self.layers = next(lists, nn.ModuleList())
        self.calls = 0  # calls of layers in one forward; some layers are called several times
        # The head reads first tokens only. After attention, the last layer then runs no other
        # tokens, whose states become NaN.
        self.is_first_enough = False
        self.is_tried = True  # True in trial runs, which are compared with runs of single texts
        self.may_use_varlen = True  # `varlen_attn` is torch's attention over all texts at once
        self._changed_layers = SharedContext(self._change_layers)
        self.attention: str | None = None  # name of torch's attention function in the last batch
        self._configs: list[Any] = list({id(part.config): part.config for part in models}.values())
        if not len(self.layers):
            raise NotPackableError("it has no list of transformers layers")

    @contextlib.contextmanager
    def running(self, lengths: np.ndarray, width: int, device: torch.device) -> Iterator[None]:
        """Make the network's next forward run its layers without padding, within the block.

        One block serves one batch. The batch's texts have `lengths` tokens, int64 (texts,), and are
        padded on the right to `width`. After the block, the attribute `attention` has the name of
        the attention function that ran.
        """
        layout = Layout(lengths, width, device)
        layout.is_tried, layout.may_use_varlen = self.is_tried, self.may_use_varlen
        with self._changed_layers.active(), set_variable(current_layout, layout):
            try:
                yield
            finally:
                self.attention = layout.attention

    @contextlib.contextmanager
    def _change_layers(self) -> Iterator[None]:
        """Use `packed_attention`, and hooks that pack and unpack tokens, in all threads."""
        with contextlib.ExitStack() as stack:
            for config in self._configs:
                stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
                config._attn_implementation = ATTENTION
            for layer in self.layers:
                stack.callback(layer.register_forward_pre_hook(_pack, with_kwargs=True).remove)
                stack.callback(layer.register_forward_hook(self._unpack).remove)
            if self.is_first_enough:
                for part in self.attention_outputs:
                    hook = part.register_forward_pre_hook(
                        lambda _, given: _change(given, current_layout.get().first_tokens)
                    )
                    stack.callback(hook.remove)
            yield

    def _unpack(self, _: nn.Module, arguments: Any, output: Any) -> Any:
        layout = current_layout.get()
        layout.calls += 1
        if layout.calls < self.calls:
            return output
        unpack = layout.unpack_first_tokens if self.is_first_enough else layout.unpack
        return _change(output, unpack)

    @property
    def attention_outputs(self) -> list[nn.Module]:
        """The last layer's module that adds attention's output to the layer's input, in a list.

        With `is_first_enough`, this module and the rest of the last layer run only each text's
        first token. BERT and similar models have such a module. For other models the list is
        empty, and the last layer always runs all tokens.
        """
        output = getattr(getattr(self.layers[-1], "attention", None), "output", None)
        return [output] if isinstance(output, nn.Module) else []

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[torch.Tensor]]:
        """Yield a list that collects the output of each layer run in the ``with`` block.

        There is one output per call of a layer, in the order of calls; of a tuple, its first item.
        Outputs are padded, (rows, width, size). Within a block of `running`, only the last one is;
        the others are (1, tokens, size).
        """
        seen: list[torch.Tensor] = []

        def note(_: nn.Module, _arguments: object, output: Any) -> None:
            seen.append(output[0] if isinstance(output, tuple) else output)

        with contextlib.ExitStack() as stack:
            for layer in self.layers:
                stack.callback(layer.register_forward_hook(note).remove)
            yield seen


def _pack(_: nn.Module, arguments: Any, named: Any) -> tuple[Any, Any]:
    layout = current_layout.get()
    return _change(arguments, layout.pack), _change(named, layout.pack)


def _change(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(_change(item, change) for item in value)
    if isinstance(value, dict):
        return {name: _change(item, change) for name, item in value.items()}
    return value


# The attention function.


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention within each text, as an attention function of transformers.

    `query`, `key` and `value` are (1, heads, tokens, head size), with the tokens of all texts
    concatenated; the offsets of the texts are in `current_layout`. Keys and values may have fewer
    heads. If `is_causal` is None, `module`, the layer's attention, decides by its attribute of that
    name, or else it is True. `scaling` (default: the head size to the power -0.5) applies to the
    products of queries and keys. With a `sliding_window`, a token only attends to tokens less than
    that many positions away. Returns (1, tokens, heads, head size), and None for the weights.
    Raises NotImplementedError for a mask, dropout, or another argument that is not supported.
    """
    unknown = {name for name, argument in others.items() if argument is not None} - _WITHOUT_EFFECT
    if unknown or attention_mask is not None or dropout:
        unsupported = sorted(unknown) or "a mask or dropout"
        raise NotImplementedError(f"packed attention has no {unsupported}")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    layout = current_layout.get()
    is_varlen = layout.may_use_varlen and _is_varlen_usable(query, key, value)
    layout.attention = _VARLEN if is_varlen else "scaled_dot_product_attention"
    attend = _varlen if is_varlen else _grouped
    return attend(layout, (query, key, value), scaling, is_causal, sliding_window)[None], None


AttentionInterface.register(ATTENTION, packed_attention)


def _grouped(
    layout: Layout, states: States, scale: float | None, is_causal: bool, window: int | None
) -> torch.Tensor:
    outputs = []
    for group in layout.groups:
        query, key, value = map(group.rows, states)
        mask = _mask(group, query.shape[2], is_causal, window, query.device)
        has_shared_heads = query.shape[1] != key.shape[1]
        is_short = query.shape[2] <= _MOST_BY_PRODUCTS and not (is_causal or has_shared_heads)
        # Trial runs use transformers' kernel, so that only packing can make a difference.
        if is_short and not layout.is_tried and is_bfloat16_without_amx(query.device, query.dtype):
            output = _attend_by_products(query, key, value, mask, scale)
        else:
            output = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=is_causal and mask is None,
                scale=scale,
                enable_gqa=has_shared_heads,
            )
        outputs.append(group.tokens(output))
    return torch.cat(outputs)


def _attend_by_products(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Compute attention by matrix products and a softmax, with sums in float32.

    In bfloat16 without AMX it takes half the time of torch's kernel. Scores are rounded to the
    dtype of `query`, as in transformers' eager attention. `mask` comes from `_mask`.
    """
    texts = max(1, _MOST_SCORES // (query.shape[1] * query.shape[2] ** 2))
    if len(query) > texts:
        split = functools.partial(torch.split, split_size_or_sections=texts)
        masks: Iterable[torch.Tensor | None] = itertools.repeat(None)
        if mask is not None:
            masks = split(mask.expand(len(query), 1, *mask.shape[-2:]))
        parts = zip(split(query), split(key), split(value), masks, strict=False)
        return torch.cat([_attend_by_products(*part, scale) for part in parts])
    scores = query * (scale or query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    return torch.softmax(scores, dim=-1) @ value


def _mask(
    group: TextGroup, width: int, is_causal: bool, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """Return a group's attention mask, true where a query may attend to a key.

    It is bool, and broadcasts to (texts, heads, width, width). It is None if no key is excluded, or
    if the attention function itself excludes later keys (`is_causal` without a `window` below
    `width`), which include padding. `window` is `packed_attention`'s ``sliding_window``, or None.
    """
    mask = None
    if group.is_token is not None and not is_causal:  # causal attention never reads later padding
        mask = group.is_token[:, None, None]
    if window is not None and window < width:
        order = torch.arange(width, device=device)
        distance = order[:, None] - order
        near = (distance < window) & (distance >= (0 if is_causal else 1 - window))
        mask = near if mask is None else mask & near
    return mask


def _varlen(
    layout: Layout, states: States, scale: float | None, is_causal: bool, window: int | None
) -> torch.Tensor:
    query, key, value = (part[0].transpose(0, 1) for part in states)
    before = -1 if window is None else window - 1
    shared: dict[str, Any] = {_SHARED_HEADS: True} if query.shape[1] != key.shape[1] else {}
    output = varlen_attn(
        query,
        key,
        value,
        layout.ends,
        layout.ends,
        layout.width,
        layout.width,
        scale=scale,
        window_size=(before, 0 if is_causal else before),
        **shared,
    )
    return cast(torch.Tensor, output)  # it can also return log-sums of scores


def _is_varlen_usable(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    size = query.shape[-1]
    return (
        query.device.type == "cuda"
        and query.dtype in _VARLEN_DTYPES
        and size % 8 == 0
        and size == value.shape[-1] <= 256
        and _has_varlen(has_shared_heads=query.shape[1] != key.shape[1])
    )


@functools.cache
def _has_varlen(*, has_shared_heads: bool) -> bool:
    # Trial runs show whether a GPU supports it: NVIDIA and AMD number capabilities differently.
    if varlen_attn is None:
        return False
    needed = _VARLEN_ARGUMENTS | ({_SHARED_HEADS} if has_shared_heads else set())
    return set(inspect.signature(varlen_attn).parameters) >= needed


# Comparison of packed and padded outputs.


def find_packed_layers(
    module: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    lengths: np.ndarray,
    forward: Forward,
) -> PackedLayers:
    """Return a network's packed layers, if packed texts have the outputs of texts that run alone.

    `lengths` are the numbers of tokens of the trial's texts. ``forward(rows)`` runs a slice of
    these texts, padded on the right to their longest, and returns outputs (texts, outputs) or, of a
    token classifier, (tokens, outputs). Raises NotPackableError if the network has no list of
    layers, if the outputs or the last layer's states differ beyond rounding when texts are packed,
    or if a layer cannot run packed. The result's `is_first_enough` is True if that changes no
    outputs in another trial run.
    """
    packed = PackedLayers(module)
    is_single = dtype == torch.float32
    tolerance = _TOLERANCE if is_single else _HALF_PRECISION_TOLERANCE
    rounding = _ROUNDING if is_single else _HALF_PRECISION_ROUNDING
    outputs, states = _run_alone(packed, len(lengths), forward)

    def compare() -> None:
        with packed.running(lengths, int(lengths.max()), device), packed.watching() as seen:
            together = forward(slice(0, len(lengths)))
        unpadded = [seen[-1][row, :length] for row, length in enumerate(lengths)]
        is_equal = len(seen) == packed.calls and _are_close(together, outputs, tolerance)
        for states_of_text, expected in zip(unpadded, states, strict=True):
            # The mean is subtracted, because dimensions that are large in all tokens hide errors.
            spread = rms(expected.float() - expected.float().mean(0))
            most = max(tolerance * spread, rounding * rms(expected))
            is_equal &= rms(states_of_text - expected) <= most
        if not is_equal:
            raise NotPackableError("its layers let packed texts see each other, or lose positions")

    while True:
        try:
            compare()
            break
        except FAILURES as err:
            if is_out_of_memory(err) or is_broken_device(err):
                raise
            if packed.attention == _VARLEN:
                logger.info("%s is not used on %s: %s", _VARLEN, device, err)
                packed.may_use_varlen = False
            elif isinstance(err, NotPackableError):
                raise
            else:
                raise NotPackableError(f"its layers take no packed texts ({err})") from err
    packed.is_first_enough = bool(packed.attention_outputs)
    packed.is_first_enough &= _is_still_close(packed, lengths, device, forward, outputs, tolerance)
    packed.is_tried = False
    return packed


def _run_alone(
    packed: PackedLayers, texts: int, forward: Forward
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run texts alone; return outputs and the last layer's states, and set ``packed.calls``."""
    outputs, states = [], []
    for row in range(texts):
        with packed.watching() as seen:
            outputs.append(forward(slice(row, row + 1)))
        if not seen:
            raise NotPackableError("it does not call its layers one by one")
        packed.calls = len(seen)
        states.append(seen[-1][0])
    return torch.cat(outputs), states


def _is_still_close(
    packed: PackedLayers,
    lengths: np.ndarray,
    device: torch.device,
    forward: Forward,
    expected: torch.Tensor,
    tolerance: float,
) -> bool:
    try:
        with packed.running(lengths, int(lengths.max()), device):
            return _are_close(forward(slice(0, len(lengths))), expected, tolerance)
    except FAILURES as err:
        if is_out_of_memory(err) or is_broken_device(err):
            raise
        return False


def _are_close(outputs: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return rms(outputs - expected) <= tolerance * (1 + float(expected.abs().max()))


def rms(values: torch.Tensor) -> float:
    """Return the root mean square of all elements of a tensor."""
    return float(values.float().square().mean().sqrt())
