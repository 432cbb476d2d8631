"""Select: the rows that meet a condition on columns."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.frames import Frame, backend_of
from gpuclassify.mapping.conditions import Condition
from gpuclassify.mapping.partition_map import PartitionMap
from gpuclassify.settings.checks import check_text
from gpuclassify.workers.run_context import current_run


@dataclass(frozen=True)
class Select(PartitionMap):
    """Rows of which a condition is true; rows, columns and the index of the rest stay as they are.

    Parameters
    ----------
    where : str
        Condition in the words of ``DataFrame.query``: columns, numbers, texts, ``True`` and
        ``False``; ``==``, ``!=``, ``<``, ``<=``, ``>``, ``>=``, ``in``, ``not in``, ``is None``,
        ``is not None``, ``and``, ``or``, ``not``, ``+``, ``-``, ``*``, ``/`` and parentheses. Names
        that are no words of Python stand in backquotes. Null is unknown, as in SQL: a row whose
        condition is null is dropped, and counted as such. Nothing in it is run as code.

    Raises
    ------
    ValueError
        It is no condition, or names a column that the dataset does not have.
    TypeError
        It compares what cannot be compared, such as a text with a number.

    Examples
    --------
    >>> Select("quality_pred != 'Low' and `fineweb-edu-score-int` >= 3")
    Select(where="quality_pred != 'Low' and `fineweb-edu-score-int` >= 3")
    """

    where: str

    def __post_init__(self) -> None:
        check_text("where", self.where, "a condition such as \"quality_pred != 'Low'\"")
        object.__setattr__(self, "where", str(self.where))
        self.condition  # noqa: B018 - parsed, which shows mistakes

    @functools.cached_property
    def condition(self) -> Condition:
        """Condition, parsed."""
        return Condition.parse(self.where)

    def __getstate__(self) -> dict[str, Any]:
        return {"where": self.where}

    def __dask_tokenize__(self) -> tuple[str, str]:
        return ("Select", self.where)

    @property
    def read_fields(self) -> tuple[str, ...]:
        """Columns that the condition names."""
        return self.condition.columns

    @property
    def is_row_wise(self) -> bool:
        """Whether each row stays or goes whatever is beside it: always."""
        return True

    @property
    def drops_rows(self) -> bool:
        """Whether rows may be dropped: they may."""
        return True

    def describe(self) -> dict[str, Any]:
        """Return the condition."""
        return {"where": self.where}

    def after(self, earlier: PartitionMap) -> PartitionMap:
        """Return one chain of both, which runs in one pass."""
        from gpuclassify.mapping.chain import joined

        return joined([earlier, self])

    def check(self, frame: Frame) -> None:
        """Raise unless the columns are there, and can be compared as the condition does."""
        self._refuse_repeated(frame)
        there = [name for name in self.read_fields if name in frame.columns]
        columns = self._columns(frame.iloc[:0], there)
        others = [str(name) for name in frame.columns if name not in there]
        schema = pa.schema([*columns.schema, *((name, pa.null()) for name in others)])
        self.condition.check(schema)

    def meta(self, frame: Frame) -> Frame:
        """Return the empty frame, whose columns stay."""
        return frame.iloc[:0]

    def map_frame(self, frame: Frame, meta_dtypes: object = None) -> Any:
        """Return the rows of a plain frame that meet the condition."""
        kept = self.chosen(self._columns(frame, self.read_fields))
        return backend_of(frame).take_rows(frame, kept)

    def chosen(self, columns: pa.Table) -> np.ndarray:
        """Return which rows of a table meet the condition, bool (rows,); a running job counts."""
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

    def _columns(self, frame: Frame, names: Any) -> pa.Table:
        array = backend_of(frame).list_array
        return pa.table({name: array(frame, name) for name in names})

    def _refuse_repeated(self, frame: Frame) -> None:
        for name in self.read_fields:
            if [*frame.columns].count(name) > 1:
                raise ValueError(f"several columns are called {name!r}: rename all but one")
