"""DeBERTa-v2's attention as one compiled kernel, which never writes the scores."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from gpuclassify.inference.packed.disentangled_attention import (
    DisentangledAttention,
    PositionTables,
    RelativePositions,
)
from gpuclassify.inference.packed.layout import Layout
from gpuclassify.inference.to_device import to_device

BLOCK_TOKENS = 128  # of torch's kernels


class FusedAttention(DisentangledAttention):
    """`DisentangledAttention` through torch's flex_attention, for all texts of a batch at once.

    Tokens are filled up to whole blocks, so that one compilation serves batches of every size.
    Blocks in which no text meets itself are skipped.

    Parameters
    ----------
    layout : Layout
    positions : RelativePositions
    """

    def __init__(self, layout: Layout, positions: RelativePositions) -> None:
        super().__init__(layout, positions)
        device = positions.by_distance.device
        numbers, counts, blocks = _text_blocks(layout.lengths)
        self._numbers = to_device(numbers, device)
        self._mask = _block_mask(
            to_device(counts, device), to_device(blocks, device), self._numbers
        )
        # Whole eights, so that rows of products begin where tensor cores and loads are aligned.
        self._occurring = slice(positions.first // 8 * 8, (positions.last // 8 + 1) * 8)
        self._places = (positions.by_distance - self._occurring.start).int()
        # As a tensor: a number would be compiled in, or be an expression that CPU kernels lack.
        self._farthest = to_device(np.array(layout.width - 1, dtype=np.int32), device)

    def pad(self, states: torch.Tensor) -> torch.Tensor:
        """States filled up to whole blocks, (1, tokens, size)."""
        return F.pad(states, (0, 0, 0, -states.shape[1] % BLOCK_TOKENS))

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tables: PositionTables,
        scale: float,
    ) -> torch.Tensor:
        """As `DisentangledAttention`, which does it for the first tokens alone."""
        if query.shape[2] < key.shape[2]:
            return super().__call__(query, key, value, tables, scale)
        tables = tables.part(slice(None), self._occurring)
        terms = [
            None if table is None else torch.bmm(states[0], table.mT)
            for states, table in ((query, tables.keys), (key, tables.queries))
        ]
        compiled = _compiled(query.is_cuda)
        output = compiled(
            query, key, value, *terms, self._places, self._farthest, scale, self._mask
        )
        return output.transpose(1, 2).flatten(2)


@functools.cache
def _compiled(is_dynamic: bool) -> Any:
    """For batches of any size, or for one: torch 2.13 cannot compile the former for a CPU."""
    return torch.compile(_attend, dynamic=is_dynamic)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    of_queries: torch.Tensor | None,
    of_keys: torch.Tensor | None,
    places: torch.Tensor,
    farthest: torch.Tensor,
    scale: float,
    mask: Any,
) -> torch.Tensor:
    """flex_attention with both relative terms, (heads, tokens, positions) each or None."""
    from torch.nn.attention.flex_attention import flex_attention

    def add_terms(score: Any, text: Any, head: Any, row: Any, column: Any) -> Any:
        # Pairs of two texts may be further apart than any place; the mask takes them out.
        distance = torch.minimum(torch.maximum(row - column, -farthest), farthest)
        place = places[distance + farthest]
        if of_queries is not None:
            score = score + of_queries[head, row, place]
        if of_keys is not None:
            score = score + of_keys[head, column, place]
        return score

    return flex_attention(query, key, value, score_mod=add_terms, block_mask=mask, scale=scale)


def _text_blocks(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which text each token is of, and with which blocks each block of tokens shares a text.

    Parameters
    ----------
    lengths : ndarray of int64, shape (texts,)
        In the order of the tokens.

    Returns
    -------
    numbers : ndarray of int32, shape (tokens in whole blocks,)
        What fills the last block is a text of its own.
    counts : ndarray of int32, shape (1, 1, blocks)
    blocks : ndarray of int32, shape (1, 1, blocks, blocks)
        The first `counts` of each row.
    """
    filled = np.append(lengths, -lengths.sum() % BLOCK_TOKENS)
    numbers = np.repeat(np.arange(len(filled), dtype=np.int32), filled)
    ends = np.cumsum(filled)
    starts = ends - filled
    first = starts[numbers[::BLOCK_TOKENS]] // BLOCK_TOKENS
    last = (ends[numbers[BLOCK_TOKENS - 1 :: BLOCK_TOKENS]] - 1) // BLOCK_TOKENS
    columns = np.arange(len(first))
    blocks = np.minimum(first[:, None] + columns, len(first) - 1)
    counts = last - first + 1
    return numbers, counts.astype(np.int32)[None, None], blocks.astype(np.int32)[None, None]


def _block_mask(counts: torch.Tensor, blocks: torch.Tensor, numbers: torch.Tensor) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    def is_same_text(text: Any, head: Any, row: Any, column: Any) -> Any:
        return numbers[row] == numbers[column]

    return BlockMask.from_kv_blocks(counts, blocks, BLOCK_SIZE=BLOCK_TOKENS, mask_mod=is_same_text)
