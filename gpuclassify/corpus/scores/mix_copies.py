"""MixCopies: how often each row is in a mixture; RepeatRows: rows, as often as a column says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from dask.utils import format_bytes

from gpuclassify.corpus.scores.mix import MOST_EPOCHS, Mix
from gpuclassify.corpus.statistics.quantiles import ScoreColumns, cells_of, require_columns
from gpuclassify.frames import Frame, backend_of, name_row, to_pandas
from gpuclassify.frames.hashing import id_keys, row_keys, uniform
from gpuclassify.jobs.ledger.encoding import FILE, PLACE
from gpuclassify.mapping.columns import check_are_new
from gpuclassify.mapping.partition_map import PartitionMap, RowWiseMap
from gpuclassify.mapping.stage_counts import COUNT
from gpuclassify.pages import visible
from gpuclassify.settings.checks import check_flag, check_text
from gpuclassify.workers.machine import free_memory


class MixCopies(RowWiseMap):
    """Mapper that adds the number of copies of each row in a mixture; 0 leaves a row out.

    In a cell of 2.3 epochs each row has two copies, and three rows of ten have a third one. These
    are selected by a hash of the seed and the id (or file and row number), so partitions do not
    matter. Rows of cells that the mix does not contain have 0 copies.

    Parameters
    ----------
    mix : Mix, str or Path
        Result of `Mix.plan`, or the file that it was saved to.
    id_field : str, optional
        Column of ids. Default: file and row number, which exist only in annotation jobs.
    copies_field : str
        Column to write.
    overwrite : bool
        Replace a column that the dataset already has.

    Examples
    --------
    >>> MixCopies("mix.json", id_field="id")(ddf)  # doctest: +SKIP
    """

    def __init__(
        self,
        mix: Mix | str | Path,
        *,
        id_field: str | None = None,
        copies_field: str = "copies",
        overwrite: bool = False,
    ) -> None:
        if id_field is not None:
            check_text("id_field", id_field, 'a column name such as "id"')
        check_text("copies_field", copies_field, 'a column name such as "copies"')
        check_flag("overwrite", overwrite)
        self.mix = mix if isinstance(mix, Mix) else Mix.load(mix)
        self.id_field = id_field
        self.copies_field = copies_field
        self.overwrite = overwrite

    def __repr__(self) -> str:
        by = visible(", ".join(self.mix.by), "")
        return f"MixCopies(<mix by {by}>, id_field={self.id_field!r})"

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return ("MixCopies", *self.describe().values(), self.overwrite)

    def with_mix(self, mix: Mix) -> MixCopies:
        """Return a mapper with the same columns and another mix."""
        names: dict[str, Any] = {"id_field": self.id_field, "copies_field": self.copies_field}
        return MixCopies(mix, overwrite=self.overwrite, **names)

    @property
    def read_fields(self) -> tuple[str, ...]:
        """Columns of the cells, and the columns that identify rows."""
        known_by = (FILE, PLACE) if self.id_field is None else (self.id_field,)
        return tuple(dict.fromkeys([*self.mix.by, *known_by]))

    def schema(self) -> pa.Schema:
        """Return the schema of the copies."""
        return pa.schema([pa.field(self.copies_field, pa.int64(), metadata=COUNT)])

    def describe(self) -> dict[str, Any]:
        """Return the settings, and a digest of the mix."""
        return {"mix": self.mix.digest(), "id": self.id_field, "copies_field": self.copies_field}

    def check(self, frame: Frame) -> None:
        """Raise unless the columns of cells and ids exist, and the new column does not."""
        if self.id_field is None and PLACE not in frame.columns:
            raise ValueError(
                "id_field= is missing: without it rows are identified by file and row number, "
                "which exist only in annotation jobs (AnnotationWriter). Name a column of ids"
            )
        for name in self.read_fields:
            ScoreColumns((), by=name).check(frame.iloc[:0])
        columns = [*map(str, frame.columns)]
        check_are_new([self.copies_field], columns, self.read_fields, self.overwrite)

    def meta(self, frame: Frame) -> Any:
        """Return the empty frame with the new column."""
        return self.map_frame(frame.iloc[:0])

    def map_frame(self, frame: Frame, meta_dtypes: object = None) -> Any:
        """Add the copies to a plain frame."""
        codes, cells = cells_of(frame, self.mix.by)
        known = self.mix.cells
        epochs = np.array([known[cell].epochs if cell in known else 0.0 for cell in cells])[codes]
        whole = np.floor(epochs)
        is_once_more = uniform(self._keys(frame)) < epochs - whole
        copies = whole.astype(np.int64) + is_once_more
        new = {self.copies_field: pa.array(copies)}
        return backend_of(frame).with_columns(frame, new, self.schema(), None)

    def _keys(self, frame: Frame) -> np.ndarray:
        """Return the random number of each row, uint64 (rows,)."""
        seed = f"mix {self.mix.seed}"
        if self.id_field is not None:
            return id_keys(seed, frame, self.id_field)
        known = to_pandas(frame[[FILE, PLACE]])
        keys, places = np.zeros(len(known), np.uint64), known[PLACE].to_numpy(dtype=np.int64)
        for file, rows in known.groupby(FILE).indices.items():
            keys[rows] = row_keys(f"{seed} {file}", places[rows])
        return keys


@dataclass(frozen=True)
class RepeatRows(PartitionMap):
    """Mapper that repeats each row as many times as a column of whole numbers says.

    Null counts as 0. A number above 1,000 is refused, as are more copies of a partition's rows than
    memory can hold.

    Parameters
    ----------
    copies_field : str
        Column such as `MixCopies` writes.

    Examples
    --------
    >>> RepeatRows("copies")(ddf)  # doctest: +SKIP
    """

    copies_field: str = "copies"

    def __post_init__(self) -> None:
        check_text("copies_field", self.copies_field, 'a column name such as "copies"')

    @property
    def read_fields(self) -> tuple[str, ...]:
        """Column of the copies."""
        return (self.copies_field,)

    @property
    def is_row_wise(self) -> bool:
        """Always True: a row's copies do not depend on other rows."""
        return True

    def describe(self) -> dict[str, Any]:
        """Return the column."""
        return {"copies_field": self.copies_field}

    def check(self, frame: Frame) -> None:
        """Raise unless the column exists, and holds whole numbers."""
        require_columns(frame, self.read_fields)
        if frame[self.copies_field].dtype.kind not in "iu":
            raise TypeError(
                f"column {self.copies_field!r} holds {frame[self.copies_field].dtype}: copies are "
                "whole numbers"
            )

    def meta(self, frame: Frame) -> Any:
        """Return the empty frame, whose columns stay."""
        return frame.iloc[:0]

    def map_frame(self, frame: Frame, meta_dtypes: object = None) -> Any:
        """Repeat the rows of a plain frame; see the class for the errors."""
        column = to_pandas(frame[[self.copies_field]])[self.copies_field]
        copies = column.to_numpy(dtype=np.int64, na_value=0)
        if (is_wrong := (copies < 0) | (copies > MOST_EPOCHS)).any():
            row = int(is_wrong.argmax())
            raise ValueError(
                f"copies must be from 0 to {MOST_EPOCHS:,}; found {copies[row]} in column "
                f"{self.copies_field!r} of {name_row(frame, row)}"
            )
        self._check_memory(frame, int(copies.sum()))
        backend = backend_of(frame)
        rows = np.repeat(np.arange(len(frame)), copies)
        return backend.with_views(backend.without_views(frame).iloc[rows], frame)

    def _check_memory(self, frame: Any, rows: int) -> None:
        """Raise MemoryError if `rows` rows like the frame's need more memory than is free."""
        needed, free = int(frame.memory_usage().sum()) * rows // max(1, len(frame)), free_memory()
        if needed > free:
            raise MemoryError(
                f"the {rows:,} copies of {len(frame):,} rows need {format_bytes(needed)}, and "
                f"{format_bytes(free)} of memory is free: read smaller parts (part_bytes=), or "
                "plan fewer repeats (max_epochs=)"
            )
