"""The lazy frame of a row-wise mapper, as an expression that Dask's optimizer can see into.

Made of private names of Dask. Where a version of Dask lacks one of them the import of this file
fails, and `PartitionMap` stays with the frame of `map_partitions`, which gives the same rows.
(`jobs/output/writers.py` and recipes ask Dask's expressions which files a frame reads.)
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

Dependents = Mapping[str, Sequence[object]]  # what reads an expression, by its name


def optimizable(mapped: Any) -> Any:
    """Return the lazy frame of a row-wise mapper, open to Dask's optimizer."""
    mapper = mapped.expr.args[1]
    kind = RowMap if mapper.drops_rows else LengthPreservingRowMap
    return new_collection(kind(*mapped.expr.operands))


class RowMap(MapPartitions):
    """Partitions mapped by a row-wise mapper, computed only for the rows and columns asked for.

    Row filters on columns that the mapper leaves alone move below it, and a choice of columns
    becomes a choice of input columns.
    """

    @property
    def mapper(self) -> Any:
        """Mapper that is run on each partition."""
        return self.args[1]

    @property
    def _meta(self) -> Any:
        """Meta as it is: to check it Dask 2026.1 makes the input's graph; a `Head` has none."""
        return self.operand("meta")

    @property
    def _projection_columns(self) -> list[Any]:
        """Columns asked of the input: the output need not have the text."""
        return self.frame.columns

    def _simplify_up(self, parent: Expr, dependents: Dependents) -> Expr | None:
        if isinstance(parent, Filter) and self._filter_passthrough_available(parent, dependents):
            return self._filter_simplification(parent)
        if isinstance(parent, (Projection, Index)):
            return self._narrowed(parent, dependents)
        if isinstance(parent, RowMap) and len(dependents[self._name]) == 1:
            return self._joined(parent)
        return None

    def _joined(self, parent: RowMap) -> Expr | None:
        """Return `parent` and this one as one pass, which shares tokens and leading layers."""
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
        """Return `parent` with only the columns that it and the other dependents ask for.

        All of them ask one and the same expression, so that no row is scored twice.
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
        """Tell whether each row gets the same value of `predicate` from the mapper's input."""
        if isinstance(predicate, (Projection, Index)) and predicate.frame._name == self._name:
            return not set(self.mapper.schema().names).intersection(predicate.columns)
        if not isinstance(predicate, Elemwise):  # a mean, say, which other rows change
            return predicate._name in {expr._name for expr in self.frame.walk()}
        return all(map(self._is_same_below, predicate.dependencies()))


class LengthPreservingRowMap(RowMap, Elemwise):
    """`RowMap` that keeps every row: `len` does without it, and `head` and `tail` move below."""
