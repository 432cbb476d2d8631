"""MixCopies: how often each row is in a mixture; RepeatRows: rows, as often as a column says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gpuclassify.frames import Frame, backend_of, to_pandas
from gpuclassify.jobs.input.sample import random_keys
from gpuclassify.mapping.partition_map import PartitionMap, RowWiseMap
from gpuclassify.mapping.stage_counts import COUNT
from gpuclassify.scores.mix import Mix, cells_of
from gpuclassify.scores.quantiles import require_columns
from gpuclassify.settings.checks import check_flag, check_text


class MixCopies(RowWiseMap):
    """Mapper that adds how often each row is in a mixture: a whole number, 0 for never.

    A cell of 2.3 epochs has each of its rows twice, and three rows of ten a third time: those whose
    hash of the id and the seed is low, whatever the partitions are. Rows of cells that the mix does
    not know are left out.

    Parameters
    ----------
    mix : Mix, str or Path
        As `Mix.plan` gave it, or the file that it was saved to.
    id_field : str
        Column of texts or whole numbers that tells rows apart.
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
        id_field: str,
        copies_field: str = "copies",
        overwrite: bool = False,
    ) -> None:
        check_text("id_field", id_field, 'a column name such as "id"')
        check_text("copies_field", copies_field, 'a column name such as "copies"')
        check_flag("overwrite", overwrite)
        self.mix = mix if isinstance(mix, Mix) else Mix.load(mix)
        self.id_field = id_field
        self.copies_field = copies_field
        self.overwrite = overwrite

    def __repr__(self) -> str:
        return f"MixCopies(<mix by {', '.join(self.mix.by)}>, id_field={self.id_field!r})"

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return ("MixCopies", *self.describe().values(), self.overwrite)

    @property
    def read_fields(self) -> tuple[str, ...]:
        """Columns of the cells, and of the id."""
        return tuple(dict.fromkeys([*self.mix.by, self.id_field]))

    def schema(self) -> pa.Schema:
        """Return the schema of the copies."""
        return pa.schema([pa.field(self.copies_field, pa.int64(), metadata=COUNT)])

    def describe(self) -> dict[str, Any]:
        """Return the settings, and a digest of the mix."""
        return {"mix": self.mix.digest(), "id": self.id_field, "copies_field": self.copies_field}

    def check(self, frame: Frame) -> None:
        """Raise unless the columns of cells and ids exist, and the new column does not."""
        require_columns(frame, self.read_fields)
        cells_of(frame.iloc[:0], self.mix.by)
        self._ids(frame.iloc[:0])
        if self.copies_field in frame.columns and not self.overwrite:
            raise ValueError(
                f"the dataset already has {self.copies_field!r}: choose another copies_field, or "
                "pass overwrite=True to replace it"
            )

    def meta(self, frame: Frame) -> Any:
        """Return the empty frame with the new column."""
        return self.map_frame(frame.iloc[:0])

    def map_frame(self, frame: Frame, meta_dtypes: object = None) -> Any:
        """Add the copies to a plain frame."""
        codes, cells = cells_of(frame, self.mix.by)
        known = self.mix.cells
        epochs = np.array([known[cell].epochs if cell in known else 0.0 for cell in cells])[codes]
        keys = random_keys(f"mix {self.mix.seed}", self._ids(frame))
        chances = (keys >> np.uint64(11)) * 2.0**-53  # from 0 to 1, each as probable
        whole = np.floor(epochs)
        copies = (whole + (chances < epochs - whole)).astype(np.int64)
        new = {self.copies_field: pa.array(copies)}
        return backend_of(frame).with_columns(frame, new, self.schema(), None)

    def _ids(self, frame: Frame) -> np.ndarray:
        """Return a whole number for each row's id, int64 (rows,)."""
        column = frame[self.id_field]
        if bool(column.isna().any()):
            raise ValueError(f"id_field={self.id_field!r} has null: name a column of ids")
        if column.dtype.kind in "iu":
            return to_pandas(frame[[self.id_field]])[self.id_field].to_numpy(dtype=np.int64)
        backend_of(frame).check_text_column(frame, self.id_field)
        digests, _ = backend_of(frame).text_digests(frame, self.id_field)
        return digests[:, 0]


class RepeatRows(PartitionMap):
    """Mapper that repeats each row as often as a column of whole numbers says; null is never.

    Parameters
    ----------
    copies_field : str
        Column such as `MixCopies` writes.

    Examples
    --------
    >>> RepeatRows("copies")(ddf)  # doctest: +SKIP
    """

    def __init__(self, copies_field: str = "copies") -> None:
        check_text("copies_field", copies_field, 'a column name such as "copies"')
        self.copies_field = copies_field

    def __repr__(self) -> str:
        return f"RepeatRows({self.copies_field!r})"

    @property
    def read_fields(self) -> tuple[str, ...]:
        """Column of the copies."""
        return (self.copies_field,)

    @property
    def is_row_wise(self) -> bool:
        """Whether a row is repeated whatever is beside it: always."""
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
        """Repeat the rows of a plain frame."""
        column = to_pandas(frame[[self.copies_field]])[self.copies_field]
        copies = column.to_numpy(dtype=np.int64, na_value=0)
        if (copies < 0).any():
            raise ValueError(f"column {self.copies_field!r} has {copies.min()}: no row is so often")
        backend = backend_of(frame)
        rows = np.repeat(np.arange(len(frame)), copies)
        return backend.with_views(backend.without_views(frame).iloc[rows], frame)
