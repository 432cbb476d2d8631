"""Triton kernels of encoders' layers on a GPU. Importing this module needs triton.

DeBERTa-v2's attention runs in tiles of queries and keys as in FlashAttention (arXiv:2205.14135),
with two relative-position terms added to each score. The term of queries is read along keys, where
positions of neighbouring keys are neighbours in memory. The term of keys is read along queries, for
the same reason, as a transposed tile, and transposed in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["farthest"])
def _attend(
    query,
    key,
    value,
    query_terms,
    key_terms,
    indices,
    blocks,
    output,
    scale,
    tokens,
    positions,
    farthest,
    token_stride,
    head_stride,
    head_size: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    has_query_terms: tl.constexpr,
    has_key_terms: tl.constexpr,
):
    """Compute the attention of one head for one block of a text's queries; see `attend`."""
    block, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(blocks + 3 * block)
    start = tl.load(blocks + 3 * block + 1)
    end = tl.load(blocks + 3 * block + 2)
    rows = first + tl.arange(0, block_rows)
    size = tl.arange(0, head_size)
    is_row = rows < end
    # Offsets exceed 32 bits in large batches.
    states = head.to(tl.int64) * head_stride
    terms = head.to(tl.int64) * tokens
    row_states = states + rows.to(tl.int64) * token_stride
    row_outputs = (rows.to(tl.int64) * tl.num_programs(1) + head) * head_size
    row_terms = (terms + rows) * positions
    queries = tl.load(query + row_states[:, None] + size, mask=is_row[:, None], other=0.0)
    most = tl.full([block_rows], -float("inf"), tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    sums = tl.zeros([block_rows, head_size], tl.float32)
    for column in range(start, end, block_columns):
        columns = column + tl.arange(0, block_columns)
        is_column = columns < end
        column_states = states + columns.to(tl.int64) * token_stride
        keys = tl.load(
            key + column_states[None, :] + size[:, None], mask=is_column[None, :], other=0.0
        )
        scores = tl.dot(queries, keys, input_precision="ieee") * scale
        if has_query_terms:
            distance = rows[:, None] - columns[None, :]
            distance = tl.minimum(tl.maximum(distance, -farthest), farthest)
            position = tl.load(indices + distance + farthest)
            is_pair = is_row[:, None] & is_column[None, :]
            address = query_terms + row_terms[:, None] + position
            scores += tl.load(address, mask=is_pair, other=0.0).to(tl.float32)
        if has_key_terms:
            distance = rows[None, :] - columns[:, None]
            distance = tl.minimum(tl.maximum(distance, -farthest), farthest)
            position = tl.load(indices + distance + farthest)
            is_pair = is_column[:, None] & is_row[None, :]
            column_terms = (terms + columns) * positions
            address = key_terms + column_terms[:, None] + position
            scores += tl.trans(tl.load(address, mask=is_pair, other=0.0).to(tl.float32))
        # Powers of 2 are faster than of e.
        scores = tl.where(is_column[None, :], scores * 1.4426950408889634, -float("inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(most - larger)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(value + column_states[:, None] + size, mask=is_column[:, None], other=0.0)
        sums = sums * shrink[:, None]
        sums += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        most = larger
    kept = (sums / total[:, None]).to(output.dtype.element_ty)
    tl.store(output + row_outputs[:, None] + size, kept, mask=is_row[:, None])


def attend(
    states: Sequence[torch.Tensor],
    terms: Sequence[torch.Tensor | None],
    indices: torch.Tensor,
    blocks: torch.Tensor,
    scale: float,
    tuning: tuple[Any, ...],
) -> torch.Tensor:
    """Compute attention within texts, in the shape of the queries; tokens in no block get zeros.

    Parameters
    ----------
    states : three tensors, shape (1, heads, tokens, head size)
        Queries, keys and values, of concatenated texts, with equal strides, and stride 1 along the
        head size.
    terms : two tensors, shape (heads, tokens, positions), or None
        Relative-position terms of queries and of keys, scaled. None if the layer has no such term.
    indices : tensor of int32, shape (2 * width - 1,)
        Position of each distance from key to query, ``1 - width`` to ``width - 1``, where ``width``
        is the length of the longest text in tokens.
    blocks : tensor of int32, shape (blocks, 3)
        Token offsets: the first query of each block, and the first token and the end of its text.
        A block ends with its text, or after the number of queries in `tuning`.
    scale : float
        Factor of products of queries and keys.
    tuning : tuple
        Queries of a block, keys of a tile, warps and stages; further items are not read.
    """
    query, (rows, columns, warps, stages) = states[0], tuning[:4]
    _, heads, tokens, head_size = query.shape
    output = query.new_zeros(1, tokens, heads, head_size)  # no block writes the padding
    any_term: Any = next((term for term in terms if term is not None), query)
    used = [query if term is None else term for term in terms]
    _attend[len(blocks), heads](
        *states,
        *used,
        indices,
        blocks,
        output,
        scale,
        tokens,
        any_term.shape[2],
        len(indices) // 2,
        query.stride(2),
        query.stride(1),
        head_size=head_size,
        block_rows=rows,
        block_columns=columns,
        has_query_terms=terms[0] is not None,
        has_key_terms=terms[1] is not None,
        num_warps=warps,
        num_stages=stages,
    )
    return output.transpose(1, 2)


@triton.jit
def _add_and_norm(states, residual, weight, bias, output, epsilon, size, columns: tl.constexpr):
    """Compute one row of `add_and_norm`."""
    column = tl.arange(0, columns)
    is_column = column < size
    place = tl.program_id(0).to(tl.int64) * size + column
    values = tl.load(states + place, mask=is_column, other=0.0).to(tl.float32)
    values += tl.load(residual + place, mask=is_column, other=0.0).to(tl.float32)
    centred = tl.where(is_column, values - tl.sum(values) / size, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred) / size + epsilon)
    scale = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
    normed = (normed * scale + shift).to(output.dtype.element_ty)
    tl.store(output + place, normed, mask=is_column)


def add_and_norm(
    states: torch.Tensor, residual: torch.Tensor, norm: torch.nn.LayerNorm
) -> torch.Tensor:
    """Return ``norm(states + residual)``, with a sum that is not rounded to the tensors' dtype.

    `states` and `residual`, (..., size), have equal shapes and dtypes. `norm` has a weight and a
    bias, and normalizes the last dimension.
    """
    states, residual = states.contiguous(), residual.contiguous()
    size, output, parts = states.shape[-1], torch.empty_like(states), (norm.weight, norm.bias)
    columns, grid = triton.next_power_of_2(size), (states.numel() // size,)
    _add_and_norm[grid](states, residual, *parts, output, norm.eps, size, columns)
    return output


@triton.jit
def _round_rows(states, rounded, scales, most, size, columns: tl.constexpr, has_gelu: tl.constexpr):
    """Compute one row of `round_rows`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, columns)
    is_column = column < size
    values = tl.load(states + row * size + column, mask=is_column, other=0.0).to(tl.float32)
    if has_gelu:
        values = 0.5 * values * (1.0 + tl.erf(values * 0.7071067811865476))
    scale = tl.maximum(tl.max(tl.abs(values)), 1e-12) / most
    kept = (values / scale).to(rounded.dtype.element_ty)
    tl.store(rounded + row * size + column, kept, mask=is_column)
    # 8-bit numbers have no infinity, and maxima ignore NaN: the factor becomes NaN for both.
    tl.store(scales + row, scale + tl.sum(values * 0.0))


def round_rows(
    states: torch.Tensor, dtype: torch.dtype, has_gelu: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round `states`, (rows, size), to 8-bit floats, after GELU if `has_gelu`.

    Returns numbers of the type `dtype`, (rows, size), and a factor for each row, float32 (rows, 1):
    multiply the numbers by it to get the values back. A row's largest absolute value becomes the
    largest number of `dtype`. The factor of a row with NaN or infinite values is NaN.
    """
    states = states.contiguous()
    rows, size = states.shape
    rounded = torch.empty_like(states, dtype=dtype)
    scales = states.new_empty(rows, 1, dtype=torch.float32)
    columns, most = triton.next_power_of_2(size), torch.finfo(dtype).max
    _round_rows[(rows,)](states, rounded, scales, most, size, columns, has_gelu)
    return rounded, scales
