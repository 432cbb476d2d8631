"""Documents of Dask frames, numbered by partition and row, and helpers to shuffle them."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from numbers import Real
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from dask.base import clone_key
from dask.delayed import Delayed
from dask.highlevelgraph import HighLevelGraph
from dask.tokenize import tokenize

from gpuclassify.frames import backend_of, is_text, plain_type, to_pandas
from gpuclassify.frames.lazy import from_parts

# A document's number is ``partition << ROW_BITS | row``: partitions of up to 10^12 rows.
ROW_BITS = 40
# Partitions that are joined into one before keys, or documents with candidates, are shuffled.
KEYS_GATHERED, MEMBERS_GATHERED = 16, 4


@dataclass(frozen=True)
class Corpus:
    """Documents to deduplicate, and an earlier corpus to compare them with, as Dask frames.

    Partitions of ``earlier`` are numbered after the partitions of ``dataset``.
    """

    dataset: Any
    earlier: Any = None

    @property
    def own_partitions(self) -> int:
        """Number of partitions of `dataset`."""
        return self.dataset.npartitions

    @property
    def npartitions(self) -> int:
        """Number of partitions of the dataset and the earlier corpus, if any, together."""
        return self.own_partitions + (0 if self.earlier is None else self.earlier.npartitions)

    def empty(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return an empty pandas frame with these columns of the dataset, for Dask's meta."""
        meta = self.dataset._meta[list(dict.fromkeys(columns))]
        return to_pandas(meta)

    def map(
        self,
        function: Callable[..., pd.DataFrame],
        columns: Sequence[str],
        *values: Sequence[Any],
        meta: pd.DataFrame,
        **options: Any,
    ) -> dd.DataFrame:
        """Call a function on each partition of the dataset and of the earlier corpus, if any.

        The call is ``function(frame, number, *items, **options)``. ``frame``, of pandas or cudf,
        has a partition's `columns`; ``number`` counts partitions through both frames, the dataset
        first; ``items`` has the partition's item of each sequence in `values`. The function returns
        a pandas frame, and `meta` is an empty one. A frame that only reads files is read again for
        each `meta` and `columns`, see `read_apart`.
        """
        call = dask.delayed(function, pure=True)
        frames = [self.dataset] if self.earlier is None else [self.dataset, self.earlier]
        parts = [part for frame in frames for part in read_apart(frame, columns, meta)]
        results = [
            call(part, number, *(items[number] for items in values), **options)
            for number, part in enumerate(parts)
        ]
        return from_parts(results, meta)


def like(dataset: Any, result: dd.DataFrame) -> Any:
    """Convert a lazy result to the type of `dataset`; compute it if that is no Dask frame."""
    is_lazy = isinstance(dataset, dd.DataFrame)
    backend = backend_of(dataset._meta if is_lazy else dataset)
    if backend_of(result._meta) is not backend:
        result = result.to_backend(backend.__name__.rpartition(".")[2])
    return result if is_lazy else backend.with_views(result.compute(scheduler="sync"), dataset)


def document_numbers(partition: int, rows: int) -> np.ndarray:
    """Return the numbers of a partition's documents, ``partition << 40 | row``, int64 (rows,)."""
    return (partition << ROW_BITS) + np.arange(rows, dtype=np.int64)


def partitioning(partitions: int, rows: Any) -> Any:
    """Combine a number of partitions and a partition's number of rows, to recognize both later."""
    return (partitions << ROW_BITS) + rows


def value_texts(values: pd.Series) -> np.ndarray:
    """Return a text for each value, None for null, as an object array.

    NaN is null. Equal numbers have equal texts in all numeric types, such as 5 and 5.0, and so have
    equal times, such as a day in seconds and in nanoseconds. Texts are unchanged, so that "5" and 5
    have equal texts, too.
    """
    codes, distinct = pd.factorize(values)
    return np.array([*map(_text_of, distinct), None], object)[codes]  # null has the code -1


def _text_of(value: object) -> str | None:
    if isinstance(value, date):  # datetimes are dates, and a date is its midnight
        time = pd.Timestamp(value)
        return (time if time.tz is None else time.tz_convert("UTC")).isoformat()
    if isinstance(value, timedelta):
        return pd.Timedelta(value).isoformat()
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real | Decimal):
        return str(value)
    if not math.isfinite(value):
        return None if math.isnan(value) else str(float(value))
    whole = round(value)
    return str(whole) if whole == value else format(Decimal(str(value)), "f").rstrip("0")


def are_rounded(*dtypes: Any) -> bool:
    """Return whether integers of these dtypes become floats if concatenated in one column."""
    together = pd.concat([pd.Series([], dtype=dtype) for dtype in dtypes])
    return together.dtype.kind == "f" and any(map(pd.api.types.is_integer_dtype, dtypes))


def check_comparable(
    name: str, ours: object, theirs: object, here: str, there: str, *, are_ids: bool = False
) -> None:
    """Raise TypeError unless values of the dtypes `ours` and `theirs` can be compared.

    Numbers are comparable with numbers, and texts with texts; categories count as their values.
    With `are_ids`, integers must not become floats if both columns are concatenated. The message
    names the column `name`, and the frames as `here` and `there`.
    """
    kind = _kind_of(ours)
    is_rounded = are_ids and kind[0] == "i" and are_rounded(ours, theirs)
    if kind != _kind_of(theirs) or is_rounded:
        raise TypeError(
            f"column {name!r} holds {ours} {here} and {theirs} {there}: convert one of them"
        )


def _kind_of(dtype: Any) -> tuple[str, bool]:
    """Return NumPy's letter for a dtype's kind ("i" for all numbers), and if it has a time zone."""
    if isinstance(dtype, pd.CategoricalDtype):
        dtype = dtype.categories.dtype
    if isinstance(dtype, pd.ArrowDtype):
        arrow = plain_type(dtype.pyarrow_dtype)  # views have no kind
        dtype = np.dtype(object) if is_text(arrow) else pd.ArrowDtype(arrow)
    kind = getattr(dtype, "kind", "")  # missing if there is no column
    is_zoned = getattr(getattr(dtype, "pyarrow_dtype", dtype), "tz", None) is not None
    return "i" if kind != "b" and pd.api.types.is_numeric_dtype(dtype) else kind, is_zoned


def by_partition(frame: dd.DataFrame, npartitions: int) -> dd.DataFrame:
    """Shuffle rows to the partition of their document, and make ``document`` the index."""
    divisions = [partition << ROW_BITS for partition in range(npartitions + 1)]
    return frame.set_index("document", divisions=divisions, shuffle_method=choose_shuffle())


def shuffle(frame: dd.DataFrame, column: str, gathered: int = KEYS_GATHERED) -> dd.DataFrame:
    """Shuffle rows, so that rows with equal values of `column` are in one partition.

    First, every `gathered` partitions are joined into one: rows of keys are small, and with more
    partitions most of the time would be spent on tasks.
    """
    fewer = frame.repartition(npartitions=-(-frame.npartitions // gathered))
    return fewer.shuffle(column, shuffle_method=choose_shuffle())


def choose_shuffle() -> str | None:
    """Return Dask's shuffle method: None, the default, if a client is connected, else "tasks"."""
    distributed = sys.modules.get("distributed")  # importing it takes longer than a small job
    if distributed is None:
        return "tasks"
    try:
        distributed.get_client()
    except ValueError:
        return "tasks"
    return None


def read_apart(frame: dd.DataFrame, columns: Sequence[str] | None, purpose: object) -> list[Any]:
    """Return a frame's partitions as delayed objects, with only these `columns`; None means all.

    If the frame only reads files, its tasks are copied for this `purpose` (any value that Dask can
    tokenize): files are read again, and no partition stays in memory for another reader. Tasks are
    not optimized, because Dask would join small partitions.
    """
    from dask.dataframe.dask_expr._expr import Projection
    from dask.dataframe.dask_expr.io import FromMap, ReadParquet

    wanted = None if columns is None else list(dict.fromkeys(columns))
    expression = frame.expr
    while isinstance(expression, Projection):
        expression = expression.frame
    if not isinstance(expression, (FromMap, ReadParquet)):
        parts = frame.to_delayed(optimize_graph=False)
        pick = dask.delayed(operator.getitem, pure=True)
        return parts if wanted is None else [pick(part, wanted) for part in parts]
    columns_read = frame if wanted is None else frame[wanted].simplify()
    parts = columns_read.to_delayed(optimize_graph=False)
    graph = dict(parts[0].dask)
    seed = tokenize(purpose, columns)
    names = {key: clone_key(key, seed) for key in graph}
    copies = {names[key]: task.substitute(names, key=names[key]) for key, task in graph.items()}
    copied = HighLevelGraph.from_collections(seed, copies, dependencies=())
    return [Delayed(names[part.key], copied, layer=seed) for part in parts]
