"""Mappers that only drop rows, by values of their columns; `Select` does so by a condition."""

from __future__ import annotations

import functools
import time
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.frames import Frame, backend_of
from gpuclassify.mapping.conditions import Condition
from gpuclassify.mapping.partition_map import PartitionMap, RowWiseMap
from gpuclassify.settings.declared import Declared, setting
from gpuclassify.workers.run_context import current_run

WITHOUT_VALUES = "without values"  # key in `attrs` of Dask's meta: text columns with only nulls


class RowFilter(RowWiseMap):
    """Base class of mappers that only drop rows, by column values.

    They run on a frame, or on columns of a file before its texts are read.
    """

    @property
    def drops_rows(self) -> bool:
        """Whether rows may be dropped; True by default."""
        return True

    def row_filter(self) -> RowFilter | None:
        """Return this mapper if it may drop rows, else None."""
        return self if self.drops_rows else None

    @abstractmethod
    def choose(self, columns: pa.Table) -> np.ndarray:
        """Return the mask of rows to keep, bool (rows,), from the columns in `read_fields`.

        Within a job, rows read and dropped are added to the job's counts.
        """

    def meta(self, frame: Frame) -> Any:
        """Return the frame without rows, as Dask's meta; columns do not change."""
        return frame.iloc[:0]

    def map_frame(self, frame: Frame, meta_dtypes: object = None) -> Any:
        """Return a pandas or cudf frame with only the rows that `choose` keeps."""
        kept = self.choose(columns_of(frame, self.read_fields))
        return backend_of(frame).take_rows(frame, kept)


def columns_of(frame: Frame, names: Iterable[str]) -> pa.Table:
    """Convert the columns `names` of a pandas or cudf frame to an Arrow table."""
    array = backend_of(frame).list_array
    return pa.table({name: array(frame, name) for name in names})


@dataclass(frozen=True)
class Select(Declared, RowFilter):
    """Mapper that keeps the rows that meet a condition; columns and the index are unchanged.

    Parameters
    ----------
    where : str
        Condition in the syntax of ``DataFrame.query``: columns, numbers, texts, ``True`` and
        ``False``; ``==``, ``!=``, ``<``, ``<=``, ``>``, ``>=``, ``in``, ``not in``, ``is None``,
        ``is not None``, ``and``, ``or``, ``not``, ``+``, ``-``, ``*``, ``/`` and parentheses. Names
        that are not identifiers of Python are in backquotes. Null is unknown, as in SQL, and NaN is
        null: a row whose condition is null is dropped, and counted separately. Integers are exact.
        Texts are compared with times in the zone of the column. Nothing is run as code.

    Raises
    ------
    ValueError
        The condition is invalid, or names a column that the dataset does not have.
    TypeError
        Types cannot be compared, such as a text with a number.
    OverflowError
        A calculation exceeds 64 bits of integers, or 37 digits of decimals. Raised when rows are
        read; the message names the row.

    Examples
    --------
    >>> Select("quality_pred != 'Low' and `fineweb-edu-score-int` >= 3")
    Select(where="quality_pred != 'Low' and `fineweb-edu-score-int` >= 3")
    """

    where: str = setting(
        kw_only=False, what="a condition such as \"quality_pred != 'Low'\"", least=1
    )

    def check_together(self) -> None:
        """Raise ValueError unless the condition `where` can be parsed and names a column."""
        self.condition  # noqa: B018

    @functools.cached_property
    def condition(self) -> Condition:
        """The parsed condition `where`, cached."""
        return Condition.parse(self.where)

    def __getstate__(self) -> dict[str, Any]:
        return {"where": self.where}

    @property
    def read_fields(self) -> tuple[str, ...]:
        """Names of the columns in the condition `where`."""
        return self.condition.columns

    def describe(self) -> dict[str, Any]:
        """Return ``{"where": condition}``, the only setting."""
        return {"where": self.where}

    def after(self, earlier: PartitionMap) -> PartitionMap:
        """Return one chain that runs `earlier`, then this filter, in one task per partition."""
        from gpuclassify.mapping.chain import joined

        return joined([earlier, self])

    def check(self, frame: Frame) -> None:
        """Raise an error unless the frame has the condition's columns, with comparable types."""
        for name in self.read_fields:
            if [*frame.columns].count(name) > 1:
                raise ValueError(f"several columns are called {name!r}: rename all but one")
        there = [name for name in self.read_fields if name in frame.columns]
        columns = columns_of(frame.iloc[:0], there)
        nulls = getattr(frame, "attrs", {}).get(WITHOUT_VALUES, ())
        types = {str(name): pa.null() for name in frame.columns}
        types |= {field.name: field.type for field in columns.schema if field.name not in nulls}
        self.condition.check(pa.schema(types))

    def choose(self, columns: pa.Table) -> np.ndarray:
        """Return the mask of rows that meet the condition, bool (rows,)."""
        started, stages = time.perf_counter(), current_run().stages
        kept = np.ones(len(columns), dtype=bool)
        for term, met in self.condition.evaluate(columns).items():
            is_met = pc.fill_null(met, False).to_numpy(zero_copy_only=False)
            if stages is not None:
                unknown = int((pc.is_null(met).to_numpy(zero_copy_only=False) & kept).sum())
                seconds = time.perf_counter() - started
                stages.add_condition(term, kept, is_met, unknown, seconds)
            kept &= is_met
        return kept
