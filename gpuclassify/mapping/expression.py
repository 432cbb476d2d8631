"""Dask expression of a mapper's lazy frame, so that Dask's optimizer skips rows and columns.

Uses private names of Dask. If a version of Dask lacks one of them, importing this file fails, and
`PartitionMap` uses `map_partitions` instead, with the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dask.dataframe.dask_expr import new_collection
from dask.dataframe.dask_expr._expr import (
    Elemwise,
    Expr,
    Filter,
    Index,
    MapPartitions,
    Projection,
    determine_column_projection,
    is_filter_pushdown_available,
)

Dependents = Mapping[str, Sequence[object]]  # dependent expressions, by name of the input


def optimizable(mapped: Any) -> Any:
    """Return a mapped Dask frame with its expression replaced by a `RowMap`, for Dask's optimizer.

    `mapped` is the result of ``map_partitions(function, mapper, ...)``.
    """
    mapper = mapped.expr.args[1]
    kind = RowMap if mapper.drops_rows else LengthPreservingRowMap
    return new_collection(kind(*mapped.expr.operands))


class RowMap(MapPartitions):
    """Dask expression of a row-wise mapper, computed only for rows and columns that are needed.

    Selections of columns, and row filters on unchanged columns, move below the mapper.
    """

    @property
    def mapper(self) -> Any:
        """The `PartitionMap` that is run on each partition."""
        return self.args[1]

    @property
    def _meta(self) -> Any:
        # Not checked, because Dask 2026.1 would build the graph of the input for that.
        return self.operand("meta")

    @property
    def _projection_columns(self) -> list[Any]:
        return self.frame.columns  # columns that Dask's optimizer may select from

    def _simplify_up(self, parent: Expr, dependents: Dependents) -> Expr | None:
        if isinstance(parent, Filter) and self._filter_passthrough_available(parent, dependents):
            return self._filter_simplification(parent)
        if isinstance(parent, (Projection, Index)):
            return self._narrowed(parent, dependents)
        if isinstance(parent, RowMap) and len(dependents[self._name]) == 1:
            return self._joined(parent)
        return None

    def _joined(self, parent: RowMap) -> Expr | None:
        """Return one expression for this mapper and the next, `parent`; None if that is no gain."""
        chain, frame = parent.mapper.after(self.mapper), new_collection(self.frame)
        if chain is None:
            return None
        mapped = frame.map_partitions(
            self.func,
            chain,
            chain.meta_dtypes(frame._meta),
            list(parent.columns),
            meta=parent._meta,
            token=chain.__name__,
        )
        return optimizable(mapped).expr

    def _narrowed(self, parent: Expr, dependents: Dependents) -> Expr | None:
        """Return `parent`, a column selection or index, over a mapper that computes fewer columns.

        None if `dependents`, the expressions that read this one, need all columns.
        """
        asked = determine_column_projection(self, parent, dependents)
        asked = set(asked if isinstance(asked, list) else [asked])
        columns = [name for name in self.columns if name in asked]
        if columns == self.columns:
            return None
        mapper = self.mapper.narrowed(columns)
        if mapper is None:
            return type(parent)(self.frame[columns], *parent.operands[1:])
        read = asked.difference(mapper.schema().names).union(mapper.read_fields)
        frame = new_collection(self.frame[[name for name in self.frame.columns if name in read]])
        mapped = frame.map_partitions(
            self.func,
            mapper,
            mapper.meta_dtypes(frame._meta),
            columns,
            meta=self._meta[columns],
            token=mapper.__name__,
        )
        return type(parent)(optimizable(mapped).expr, *parent.operands[1:])

    def _filter_passthrough_available(self, parent: Expr, dependents: Dependents) -> bool:
        return is_filter_pushdown_available(self, parent, dependents) and self._is_same_below(
            parent.predicate
        )

    def _is_same_below(self, predicate: Expr) -> bool:
        """Return whether a filter's `predicate` has the same values before the mapper runs."""
        if isinstance(predicate, (Projection, Index)) and predicate.frame._name == self._name:
            return not set(self.mapper.schema().names).intersection(predicate.columns)
        if not isinstance(predicate, Elemwise):  # such as a mean, which depends on other rows
            return predicate._name in {expr._name for expr in self.frame.walk()}
        return all(map(self._is_same_below, predicate.dependencies()))


class LengthPreservingRowMap(RowMap, Elemwise):
    """`RowMap` of a mapper that keeps every row, so that Dask computes `len` without running it."""
