"""Read annotations on a worker, and lay them next to the rows of one part by place.

The place of a row in a file of the input is its number in Parquet, and in JSON lines the first byte
of its line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.jobs.input.files import open_parquet
from gpuclassify.jobs.ledger.arrow_types import cast, changed, restored
from gpuclassify.jobs.ledger.encoding import LEFT_OUT, PLACE
from gpuclassify.jobs.stores.names import redacted
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.jobs.stores.store import UnreadableInputError

_DAMAGE = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError),
    *(FileNotFoundError, pa.ArrowException),
)
ROW_PLACE = "\0place"  # column of tables while they are read; columns of files may be named `PLACE`
ANNOTATED = "annotated"  # in a record's source: rows, and first and last place, by file


class AnnotationError(UnreadableInputError):
    """Error for annotations that are not those of the input, not whole, or not what was written."""


@dataclass(frozen=True, slots=True)
class AnnotationRange:
    """Annotation rows that belong to one input file, sorted by place, from `low` to `high`."""

    name: str  # of the file in the set
    first: int
    count: int
    low: int
    high: int
    has_unread: bool  # whether some may stand for what could not be read
    total: int  # rows of the file in the set

    @property
    def is_dense(self) -> bool:
        """Whether every place from `low` to `high` has a row."""
        return self.high - self.low + 1 == self.count


@dataclass(frozen=True)
class AnnotationColumns:
    """Columns of a set: where it is, and their names in frames by those in its files."""

    address: str
    fields: Mapping[str, str]
    key: str  # changes whenever the annotation set changes
    is_complete: bool  # whether every row of the input has its annotations
    labels: tuple[str, ...] = ()  # names in frames of those that reports count

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return (self.address, sorted(self.fields.items()), self.key, self.is_complete)


class AnnotationReader:
    """Annotations of one part's rows; each file of a set is read once, and only in part.

    `places` and `columns` take the pieces of the part.
    """

    def __init__(self, part: Any, schema: Any) -> None:
        self._read: dict[tuple[int, AnnotationRange], tuple[np.ndarray, pa.Table]] = {}
        self._sets: list[tuple[int, AnnotationColumns, dict[str, str]]] = []
        self._schema = schema
        for number, columns in enumerate(schema.annotations):
            asked = {n: name for n, name in columns.fields.items() if name in schema.arrow.names}
            if not asked:
                continue
            self._sets.append((number, columns, asked))
            runs: dict[str, list[AnnotationRange]] = {}
            for piece in part.pieces:
                for rows in piece.annotations[number] if piece.annotations else ():
                    runs.setdefault(rows.name, []).append(rows)
            for name, wanted in runs.items():
                with naming_damage(redacted(columns.address), name):
                    for rows, table in self._rows_of(columns, name, wanted, asked):
                        self._read[number, rows] = _places_of(rows, table), table

    def places(self, piece: Any) -> np.ndarray | None:
        """Return the places of a piece's rows, int64 (rows,); None if only its file tells them."""
        whole = next((n for n, columns, _ in self._sets if columns.is_complete), None)
        if whole is None or piece.places is None:
            return None
        low, high = piece.places
        kept = [np.zeros(0, dtype=np.int64)]
        for rows in piece.annotations[whole]:
            places, table = self._read[whole, rows]
            is_there = (places >= low) & (places < high)
            if rows.has_unread:  # as "row" stand those that were read, and could not be scored
                unread = pc.fill_null(pc.not_equal(table[LEFT_OUT], "row"), False)
                is_there &= ~unread.to_numpy()
            kept.append(places if is_there.all() else places[is_there])
        return np.concatenate(kept)

    def columns(self, piece: Any, places: np.ndarray) -> Iterator[tuple[str, pa.ChunkedArray]]:
        """Yield names and values, at these places of a piece's file, of the columns asked for."""
        for number, columns, asked in self._sets:
            pairs = [self._read[number, rows] for rows in piece.annotations[number]]
            held = np.concatenate([np.zeros(0, dtype=np.int64), *(held for held, _ in pairs)])
            tables = [table.select([*asked]) for _, table in pairs]
            table = pa.concat_tables([pa.schema(self._types(asked)).empty_table(), *tables])
            rows = _rows_at(held, places)
            if columns.is_complete and (rows < 0).any():
                place = places[rows < 0][0]
                raise AnnotationError(
                    f"{redacted(piece.path)} has a row at {place} that {redacted(columns.address)} "
                    "does not know: annotate the file again (redo_changed=True), or take null for "
                    "what is missing (annotations_complete=False)"
                )
            if not np.array_equal(rows, np.arange(len(table))):
                table = table.take(pa.array(rows, mask=rows < 0))
            yield from zip(asked.values(), table.columns, strict=True)

    def _types(self, asked: Mapping[str, str]) -> dict[str, pa.DataType]:
        """Return the types of the columns `asked` for, which hold the values of all folders."""
        return {n: self._schema.arrow.field(name).type for n, name in asked.items()}

    def _rows_of(
        self,
        columns: AnnotationColumns,
        name: str,
        wanted: Sequence[AnnotationRange],
        asked: Mapping[str, str],
    ) -> Iterator[tuple[AnnotationRange, pa.Table]]:
        names = [*asked]
        names += [PLACE] * any(not rows.is_dense for rows in wanted)
        names += [LEFT_OUT] * any(rows.has_unread for rows in wanted)
        low = min(rows.first for rows in wanted)
        high = max(rows.first + rows.count for rows in wanted)
        # The path is checked again: since the set was opened, a link or a FIFO may have come there.
        store = open_store(columns.address, self._schema.storage_options).below(name)
        with store.reading() as file:
            first, table = _read_rows(file, names, low, high, wanted[0].total)
        types = {**self._types(asked), PLACE: pa.int64(), LEFT_OUT: pa.string()}
        table = cast(table, pa.schema([(name, types[name]) for name in names]))
        for rows in wanted:
            yield rows, table.slice(rows.first - first, rows.count)


def _places_of(rows: AnnotationRange, table: pa.Table) -> np.ndarray:
    """Return the ascending places of rows; raise ValueError if they are not what was recorded."""
    if rows.is_dense:
        return np.arange(rows.low, rows.high + 1)
    places = table[PLACE].to_numpy()
    if (places[0], places[-1]) != (rows.low, rows.high) or (np.diff(places) <= 0).any():
        raise ValueError(f"its places are not those from {rows.low} to {rows.high}")
    return places


def _read_rows(
    file: Any, names: list[str], low: int, high: int, total: int
) -> tuple[int, pa.Table]:
    """Read the row groups with the rows from `low` to `high`; return the first row, and a table."""
    parquet = open_parquet(file)
    if parquet.metadata.num_rows != total:
        raise ValueError(f"it has {parquet.metadata.num_rows:,} rows of {total:,}")
    groups, first, start = [], None, 0
    for number in range(parquet.num_row_groups):
        end = start + parquet.metadata.row_group(number).num_rows
        if start < high and end > low:
            groups.append(number)
            first = start if first is None else first
        start = end
    table = parquet.read_row_groups(groups, columns=names)
    return first or 0, changed(table.select(names), restored)


def _rows_at(held: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the rows of ascending places `held` that have these `places`; -1 where none has."""
    if len(held) == len(places) and (held == places).all():
        return np.arange(len(held))
    if not len(held):
        return np.full(len(places), -1)
    rows = np.searchsorted(held, places)
    rows[rows == len(held)] = -1
    rows[held[rows] != places] = -1
    return rows


@contextlib.contextmanager
def naming_damage(folder: str, name: str) -> Iterator[None]:
    """Raise AnnotationError for whatever a damaged file of a set makes its readers raise.

    Anybody may have written the file, so that values may be missing or of any type.
    """
    try:
        yield
    except (AnnotationError, PermissionError, TimeoutError):
        raise
    except _DAMAGE as err:
        reason = str(err) if isinstance(err, ValueError) else f"{type(err).__name__}: {err}"
        raise damaged(folder, name, reason) from err


def damaged(folder: str, name: str, reason: str) -> AnnotationError:
    """Return the error for a file of a set that is not what was written."""
    return AnnotationError(
        f"{folder}/{name} is not what was written, {reason}: run the command that wrote it again, "
        "which redoes what is missing or damaged"
    )
