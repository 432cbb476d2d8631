"""Attention that also tells how large its softmax's sum is, by the device's fused kernel."""

from __future__ import annotations

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention

Pair = tuple[torch.Tensor, torch.Tensor]

_SCORE_BYTES = 256 * 2**20  # of scores that are in memory at once where no fused kernel serves


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    is_causal: bool = False,
    is_later: torch.Tensor | None = None,
) -> Pair:
    """Attention with what is needed to join it to attention over other keys.

    Parameters
    ----------
    query : Tensor, shape (rows, heads, new, size)
    key, value : Tensor, shape (rows, key heads, columns, size)
        Several heads may share a key head, as many each.
    scaling : float
    is_causal : bool
        Query i reads columns 0 to i.
    is_later : Tensor of bool, shape (rows, new, columns), optional
        What queries do not read, in place of `is_causal`. All read something.

    Returns
    -------
    output : Tensor, shape (rows, heads, new, size)
    lse : Tensor of float32, shape (rows, heads, new)
        The logarithm of the softmax's sum.
    """
    if is_later is None:
        aten = torch.ops.aten
        if query.device.type == "cpu":
            return aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, is_causal, scale=scaling
            )
        if _is_flash_usable(query, key, value, is_causal):
            return aten._scaled_dot_product_flash_attention(
                query, key, value, 0.0, is_causal, scale=scaling
            )[:2]
        if is_causal:
            order = torch.arange(query.shape[2], device=query.device)
            is_later = (order > order[:, None])[None]
    return _attend_plainly(query, key, value, scaling, is_later)


def _is_flash_usable(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> bool:
    has_groups = query.shape[1] != key.shape[1]
    params = SDPAParams(query, key, value, None, 0.0, is_causal, has_groups)
    # The kernel itself takes no other sizes; torch pads for it only where it is not called by name.
    return query.shape[-1] % 8 == 0 and can_use_flash_attention(params)


def _attend_plainly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    is_later: torch.Tensor | None,
) -> Pair:
    """The same as `attend` in plain float32, some queries at a time."""
    rows, heads, new, size = query.shape
    key_heads, width = key.shape[1:3]
    queries = query.reshape(rows, key_heads, -1, size).float()
    key, value = key.float().transpose(2, 3), value.float()
    if is_later is not None:
        is_later = is_later.repeat(1, heads // key_heads, 1).unsqueeze(1)
    step = max(1, _SCORE_BYTES // (4 * rows * key_heads * width))
    outputs, sums = [], []
    for start in range(0, queries.shape[2], step):
        scores = queries[:, :, start : start + step] @ key * scaling
        if is_later is not None:
            scores = scores.masked_fill_(is_later[:, :, start : start + step], -torch.inf)
        sums.append(scores.logsumexp(3))
        outputs.append((scores - sums[-1].unsqueeze(3)).exp() @ value)
    output = torch.cat(outputs, 2).reshape(rows, heads, new, size).to(query.dtype)
    return output, torch.cat(sums, 2).reshape(rows, heads, new)
