"""The attention function that keeps texts apart which lie end to end in one row of tokens."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

from gpuclassify.inference.packed.layout import Group, Layout

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None  # type: ignore[assignment]

ATTENTION = "gpuclassify_packed"

_VARLEN_ARGUMENTS = {"scale", "window_size"}  # from torch 2.11 on
_SHARED_HEADS = "enable_gqa"  # from torch 2.12 on, which refuses fewer heads of keys without it
_VARLEN_DTYPES = (torch.float16, torch.bfloat16)
_VARLEN_CAPABILITY = (8, 0)
# What transformers may hand to an attention function without changing what is computed.
_WITHOUT_EFFECT = {
    "cache_position",
    "deterministic",
    "output_attentions",
    "output_hidden_states",
    "position_ids",
    "return_dict",
    "use_cache",
}

current_layout: ContextVar[Layout] = ContextVar("current_layout")


@contextlib.contextmanager
def within(layout: Layout) -> Iterator[None]:
    """Make it this thread's `current_layout`."""
    token = current_layout.set(layout)
    try:
        yield
    finally:
        current_layout.reset(token)


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
    """An attention function of transformers, for one row of tokens in the `current_layout`."""
    unknown = {name for name, given in others.items() if given is not None} - _WITHOUT_EFFECT
    if unknown or attention_mask is not None or dropout:
        asked = sorted(unknown) or "a mask or dropout"
        raise NotImplementedError(f"packed attention has no {asked}")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    layout = current_layout.get()
    is_varlen = _is_varlen_usable(query, key, value)
    layout.attention = "varlen_attn" if is_varlen else "scaled_dot_product_attention"
    attend = _varlen if is_varlen else _grouped
    return attend(layout, query, key, value, scaling, is_causal, sliding_window)[None], None


AttentionInterface.register(ATTENTION, packed_attention)


def _grouped(
    layout: Layout,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    is_causal: bool,
    window: int | None,
) -> torch.Tensor:
    outputs = []
    for group in layout.groups:
        rows = group.rows(query)
        mask = _mask(group, rows.shape[2], is_causal, window, query.device)
        output = F.scaled_dot_product_attention(
            rows,
            group.rows(key),
            group.rows(value),
            attn_mask=mask,
            is_causal=is_causal and mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(group.tokens(output))
    return torch.cat(outputs)


def _mask(
    group: Group, width: int, is_causal: bool, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """What queries may read, bool (texts or 1, 1, width or 1, width); None where a flag says it."""
    mask = None
    if group.is_token is not None and not is_causal:  # a causal text never reads what follows it
        mask = group.is_token[:, None, None]
    if window is not None and window < width:
        order = torch.arange(width, device=device)
        distance = order[:, None] - order
        near = (distance < window) & (distance >= (0 if is_causal else 1 - window))
        mask = near if mask is None else mask & near
    return mask


def _varlen(
    layout: Layout,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    is_causal: bool,
    window: int | None,
) -> torch.Tensor:
    before = -1 if window is None else window - 1
    longest = int(layout.lengths[0])
    shared: dict[str, Any] = {_SHARED_HEADS: True} if query.shape[1] != key.shape[1] else {}
    output = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        layout.ends,
        layout.ends,
        longest,
        longest,
        scale=scaling,
        window_size=(before, 0 if is_causal else before),
        **shared,
    )
    return cast(torch.Tensor, output)  # without the sums that it can give


def _is_varlen_usable(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    size = query.shape[-1]
    return (
        query.device.type == "cuda"
        and query.dtype in _VARLEN_DTYPES
        and size % 8 == 0
        and size == value.shape[-1] <= 256
        and _has_varlen(query.device, has_shared_heads=query.shape[1] != key.shape[1])
    )


@functools.cache
def _has_varlen(device: torch.device, *, has_shared_heads: bool) -> bool:
    if varlen_attn is None or torch.cuda.get_device_capability(device) < _VARLEN_CAPABILITY:
        return False
    needed = _VARLEN_ARGUMENTS | ({_SHARED_HEADS} if has_shared_heads else set())
    return set(inspect.signature(varlen_attn).parameters) >= needed
