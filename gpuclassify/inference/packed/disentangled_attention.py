"""DeBERTa-v2's attention, for texts that lie end to end.

To the product of a query and a key it adds two terms (He et al., 2021, "DeBERTa", section 3.1):
the query with the key's relative position, and the key with the query's. Neither is looked up pair
by pair. A block of tokens is multiplied with the positions in the order of their distances; each
row of the product then holds its scores side by side, one column further left than the row above,
which a view with another stride puts straight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from gpuclassify.inference.packed.layout import Layout

# Scores of so many rows and heads are computed together: a core is fastest where they, and the
# products of a block of tokens, stay in its caches.
CPU_PART_BYTES = 2**20
CPU_BLOCK_TOKENS = 64
GPU_PART_BYTES = 256 * 2**20


@dataclass(frozen=True)
class RelativePositions:
    """Which rows of the position tables the distances within a batch's texts look up.

    Attributes
    ----------
    by_distance : Tensor of int64, shape (2 * width - 1,)
        For each distance from a key to a query, ``1 - width`` to ``width - 1``; width is the
        longest text's.
    first, last : int
        The lowest and the highest of them.
    """

    by_distance: torch.Tensor
    first: int
    last: int


@dataclass(frozen=True)
class PositionTables:
    """A layer's projected relative positions, scaled, each (heads, positions, head size) or None.

    Attributes
    ----------
    keys : Tensor, optional
        What queries are compared with (content to position).
    queries : Tensor, optional
        What keys are compared with (position to content).
    """

    keys: torch.Tensor | None
    queries: torch.Tensor | None

    def ordered(self, positions: RelativePositions) -> PositionTables:
        """The tables by the distance to the token that the table's token is compared with."""
        order = positions.by_distance
        return PositionTables(
            None if self.keys is None else self.keys[:, order.flip(0)],
            None if self.queries is None else self.queries[:, order],
        )

    def part(self, heads: slice, positions: slice = slice(None)) -> PositionTables:
        """Some heads, or some positions, of the tables."""
        return PositionTables(
            None if self.keys is None else self.keys[heads, positions],
            None if self.queries is None else self.queries[heads, positions],
        )


class DisentangledAttention:
    """DeBERTa's attention for the texts of one batch, in any number of layers.

    Parameters
    ----------
    layout : Layout
    positions : RelativePositions
    """

    def __init__(self, layout: Layout, positions: RelativePositions) -> None:
        self.layout = layout
        self.positions = positions

    def pad(self, states: torch.Tensor) -> torch.Tensor:
        """States as the attention wants them, (1, tokens, size): here just as they are."""
        return states

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tables: PositionTables,
        scale: float,
    ) -> torch.Tensor:
        """What each token, or each text's first one, takes from the tokens of its text.

        Parameters
        ----------
        query : Tensor, shape (1, heads, tokens or texts, head size)
            Of all tokens of the layout, or of the first ones alone.
        key, value : Tensor, shape (1, heads, tokens, head size)
        tables : PositionTables
        scale : float
            Of the products of queries and keys; the tables are scaled already.

        Returns
        -------
        Tensor, shape (1, tokens or texts, heads * head size)
        """
        is_first_only = query.shape[2] < key.shape[2]
        tables = tables.ordered(self.positions)
        outputs = []
        text = 0
        for group in self.layout.groups:
            if is_first_only:
                queries = query[0, :, text : text + group.texts].transpose(0, 1)[:, :, None]
            else:
                queries = group.rows(query)
            found = _attend_texts(
                queries, group.rows(key), group.rows(value), tables, scale, group.is_token
            )
            outputs.append(found.flatten(0, 2) if is_first_only else group.tokens(found))
            text += group.texts
        return torch.cat(outputs).reshape(1, query.shape[2], -1)


def _attend_texts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tables: PositionTables,
    scale: float,
    is_token: torch.Tensor | None,
) -> torch.Tensor:
    """Of texts side by side, each (texts, heads, queries or keys, head size), as the queries."""
    context = query.transpose(1, 2).new_empty(query.transpose(1, 2).shape).transpose(1, 2)
    for row, head in _parts(query, key):
        # Heads first: all texts of a head share its tables.
        q, k, v = (states[row, head].transpose(0, 1) for states in (query, key, value))
        bias = _relative_scores(q, k, tables.part(head))
        if is_token is not None:
            bias = bias.masked_fill_(~is_token[row][:, None], -torch.inf)
        found = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
        context[row, head] = found.transpose(0, 1)
    return context


def _parts(query: torch.Tensor, key: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Texts and heads whose scores are computed together, so that they fit into a part's bytes."""
    texts, heads, count, _ = query.shape
    score_bytes = count * key.shape[2] * query.element_size()
    part_bytes = CPU_PART_BYTES if query.device.type == "cpu" else GPU_PART_BYTES
    most = max(1, part_bytes // score_bytes)
    text_step, head_step = max(1, most // heads), min(most, heads)
    for text in range(0, texts, text_step):
        for head in range(0, heads, head_step):
            yield slice(text, text + text_step), slice(head, head + head_step)


def _relative_scores(
    query: torch.Tensor, key: torch.Tensor, tables: PositionTables
) -> torch.Tensor:
    """Both relative terms, (heads, texts, queries, keys)."""
    scores = query.new_empty(*query.shape[:3], key.shape[2])
    write: Callable[..., torch.Tensor] = torch.Tensor.copy_
    for states, table, target in (
        (query, tables.keys, scores),
        (key, tables.queries, scores.mT),
    ):
        if table is None:
            continue
        columns = target.shape[3]
        step = CPU_BLOCK_TOKENS if states.device.type == "cpu" else states.shape[2]
        for start in range(0, states.shape[2], step):
            rows = slice(start, start + step)
            write(target[:, :, rows], _by_distance(states[:, :, rows], start, columns, table))
        write = torch.Tensor.add_
    return scores if write is torch.Tensor.add_ else scores.zero_()


def _by_distance(
    states: torch.Tensor, start: int, columns: int, table: torch.Tensor
) -> torch.Tensor:
    """Products of tokens with the distances from them to the first `columns` tokens of their text.

    Parameters
    ----------
    states : Tensor, shape (heads, texts, rows, head size)
        Of neighbouring tokens, from the `start`-th of each text on.
    start, columns : int
    table : Tensor, shape (heads, 2 * width - 1, head size)

    Returns
    -------
    Tensor, shape (heads, texts, rows, columns)
        A view.
    """
    heads, texts, rows, _ = states.shape
    width = rows + columns - 1
    lowest = (table.shape[1] + 1) // 2 - start - rows  # from the last row to the first column
    products = torch.bmm(states.flatten(1, 2), table[:, lowest : lowest + width].mT)
    strides = (texts * rows * width, rows * width, width - 1, 1)
    return products.as_strided((heads, texts, rows, columns), strides, rows - 1)
