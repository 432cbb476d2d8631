"""Read annotations on a worker, and align them with the rows of one part by position.

A row's position in an input file is its row number in Parquet, and the byte offset of its line in
JSON lines. An annotation set is a folder of annotation files; each of their rows names the input
file and the position of the row that it annotates.
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
from gpuclassify.jobs.ledger.encoding import FILE, LEFT_OUT, PLACE
from gpuclassify.jobs.stores.names import redacted
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.jobs.stores.store import UnreadableInputError

_DAMAGE = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError),
    *(FileNotFoundError, pa.ArrowException),
)
# Name of the column of positions while tables are read: input files may have a column `PLACE`.
ROW_POSITION = "\0place"
# Key in `Record.source`: (row count, first position, last position) by input file.
ANNOTATED = "annotated"


class AnnotationError(UnreadableInputError):
    """Error for annotations that are damaged or incomplete, or do not fit the input or new ones."""


@dataclass(frozen=True, slots=True)
class AnnotationRange:
    """Neighbouring rows of an annotation file that annotate one input file, sorted by position."""

    name: str  # annotation file, relative to the set
    first: int  # number of the first row in the annotation file
    count: int
    low: int  # first position
    high: int  # last position
    left_out: tuple[str, ...]  # kinds of failed items in its part: "file", "line", "row"
    total: int  # number of rows of the whole annotation file
    file: str  # input file, as the column `FILE` names it

    @property
    def is_dense(self) -> bool:
        """Whether every position from `low` to `high` has a row."""
        return self.high - self.low + 1 == self.count


@dataclass(frozen=True)
class AnnotationColumns:
    """Columns of an annotation set, and the set's address, for tasks that read parts."""

    address: str
    fields: Mapping[str, str]  # names of columns in frames, by names in annotation files
    key: str  # changes whenever the annotation set changes
    is_complete: bool  # whether every row of the input has its annotations
    labels: tuple[str, ...] = ()  # names in frames of the columns that reports count

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return (self.address, sorted(self.fields.items()), self.key, self.is_complete)


class AnnotationReader:
    """Annotation columns of one part, read by the constructor.

    `part` is a `Part`, and `schema` the `InputSchema`. Methods take a piece of the part (a `Part`
    without `followers`, so of one input file), and positions of rows in that file: row numbers in
    Parquet, or byte offsets of lines in JSON lines, after decompression.
    """

    def __init__(self, part: Any, schema: Any) -> None:
        self._read: dict[tuple[int, AnnotationRange], tuple[np.ndarray, pa.Table]] = {}
        self._sets: list[tuple[int, AnnotationColumns, dict[str, str]]] = []
        self._schema = schema
        for number, columns in enumerate(schema.annotations):
            fields = {n: name for n, name in columns.fields.items() if name in schema.arrow.names}
            if fields:
                self._sets.append((number, columns, fields))
            by_file: dict[str, list[AnnotationRange]] = {}
            for piece in part.pieces:
                for rows in (piece.annotations[number] if piece.annotations else None) or ():
                    if fields or rows.left_out:
                        by_file.setdefault(rows.name, []).append(rows)
            for name, ranges in by_file.items():
                with naming_damage(redacted(columns.address), name):
                    for rows, table in self._read_ranges(columns, name, ranges, fields):
                        self._read[number, rows] = _read_positions(rows, table), table

    def positions(self, piece: Any) -> np.ndarray | None:
        """Return the positions of a piece's rows in its input file, int64 (rows,); None if unknown.

        They are known if a complete set is read, unless the piece is a share of a compressed file.
        """
        complete = next((n for n, columns, _ in self._sets if columns.is_complete), None)
        if complete is None or piece.position_range is None:
            return None
        low, high = piece.position_range
        found = [np.zeros(0, dtype=np.int64)]
        for rows in piece.annotations[complete] or ():
            positions, _ = self._read[complete, rows]
            is_inside = (positions >= low) & (positions < high)
            found.append(positions if is_inside.all() else positions[is_inside])
        return np.concatenate(found)

    def unreadable(self, piece: Any) -> np.ndarray:
        """Return ascending positions of rows that were unreadable when annotated, int64 (rows,).

        For a share of a compressed file, these are rows of the whole file.
        """
        found = [np.zeros(0, dtype=np.int64)]
        for number, ranges in enumerate(piece.annotations):
            for rows in ranges or ():
                if rows.left_out:
                    positions, table = self._read[number, rows]
                    # Rows that were read but not scored are marked "row".
                    unread = pc.fill_null(pc.not_equal(table[LEFT_OUT], "row"), False)
                    found.append(positions[unread.to_numpy()])
        low, high = piece.position_range or (0, np.inf)
        positions = np.unique(np.concatenate(found))
        return positions[(positions >= low) & (positions < high)]

    def lacks_content(self, piece: Any) -> bool:
        """Return whether a piece, or a range of it, may have been unreadable when it was annotated.

        Single lines and rows do not count; `unreadable` returns them.
        """
        return any(
            ranges is not None and (not ranges or any("file" in rows.left_out for rows in ranges))
            for ranges in piece.annotations
        )

    def columns(self, piece: Any, positions: np.ndarray) -> Iterator[tuple[str, pa.ChunkedArray]]:
        """Yield name and values of each annotation column, for the rows of a piece at `positions`.

        Values are null for rows without annotations, which raise AnnotationError in a complete set.
        """
        for number, columns, fields in self._sets:
            pairs = [self._read[number, rows] for rows in piece.annotations[number] or ()]
            annotated = np.concatenate([np.zeros(0, dtype=np.int64), *(read for read, _ in pairs)])
            tables = [table.select([*fields]) for _, table in pairs]
            table = pa.concat_tables([pa.schema(self._types(fields)).empty_table(), *tables])
            rows = _find_rows(annotated, positions)
            if columns.is_complete and (rows < 0).any():
                raise AnnotationError(
                    f"{redacted(piece.path)} has a row at {positions[rows < 0][0]} that "
                    f"{redacted(columns.address)} does not know: annotate the file again "
                    "(redo_changed=True), or take null for what is missing "
                    "(annotations_complete=False)"
                )
            if not np.array_equal(rows, np.arange(len(table))):
                table = table.take(pa.array(rows, mask=rows < 0))
            yield from zip(fields.values(), table.columns, strict=True)

    def _types(self, fields: Mapping[str, str]) -> dict[str, pa.DataType]:
        return {n: self._schema.arrow.field(name).type for n, name in fields.items()}

    def _read_ranges(
        self,
        columns: AnnotationColumns,
        name: str,
        ranges: Sequence[AnnotationRange],
        fields: Mapping[str, str],
    ) -> Iterator[tuple[AnnotationRange, pa.Table]]:
        names = [*fields, FILE]
        names += [PLACE] * any(not rows.is_dense for rows in ranges)
        names += [LEFT_OUT] * any(rows.left_out for rows in ranges)
        start = min(rows.first for rows in ranges)
        stop = max(rows.first + rows.count for rows in ranges)
        # The path is checked again: since the set was opened, a link or a FIFO may have come there.
        store = open_store(columns.address, self._schema.storage_options).below(name)
        with store.reading() as file:
            first, table = _read_row_groups(file, names, start, stop, ranges[0].total)
        types = {**self._types(fields), FILE: pa.string(), PLACE: pa.int64(), LEFT_OUT: pa.string()}
        table = cast(table, pa.schema([(name, types[name]) for name in names]))
        for rows in ranges:
            yield rows, table.slice(rows.first - first, rows.count)


def _read_positions(rows: AnnotationRange, table: pa.Table) -> np.ndarray:
    """Return the positions of a range's rows, int64 (rows,); raise ValueError if they are wrong."""
    if not pc.all(pc.equal(table[FILE], rows.file)).as_py():
        raise ValueError(
            f"its rows {rows.first} to {rows.first + rows.count - 1} are not of {rows.file}"
        )
    if rows.is_dense:
        return np.arange(rows.low, rows.high + 1)
    positions = table[PLACE].to_numpy()
    if (positions[0], positions[-1]) != (rows.low, rows.high) or (np.diff(positions) <= 0).any():
        raise ValueError(f"its column {PLACE!r} does not ascend from {rows.low} to {rows.high}")
    return positions


def _read_row_groups(
    file: Any, names: list[str], start: int, stop: int, total: int
) -> tuple[int, pa.Table]:
    """Read the row groups with rows `start` to `stop` - 1: the first row's number, and a table."""
    parquet = open_parquet(file)
    if parquet.metadata.num_rows != total:
        raise ValueError(f"it has {parquet.metadata.num_rows:,} rows of {total:,}")
    groups, first, begin = [], None, 0
    for number in range(parquet.num_row_groups):
        end = begin + parquet.metadata.row_group(number).num_rows
        if begin < stop and end > start:
            groups.append(number)
            first = begin if first is None else first
        begin = end
    table = parquet.read_row_groups(groups, columns=names)
    return first or 0, changed(table.select(names), restored)


def _find_rows(annotated: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the index of each of `positions` in the ascending array `annotated`; -1 if missing."""
    if len(annotated) == len(positions) and (annotated == positions).all():
        return np.arange(len(annotated))
    if not len(annotated):
        return np.full(len(positions), -1)
    rows = np.searchsorted(annotated, positions)
    rows[rows == len(annotated)] = -1
    rows[annotated[rows] != positions] = -1
    return rows


@contextlib.contextmanager
def naming_damage(folder: str, name: str) -> Iterator[None]:
    """Convert errors from reading a damaged annotation file to AnnotationErrors that name the file.

    `folder` is the address of the set, and `name` the file's path in it. A missing file counts as
    damaged.
    """
    try:
        yield
    except (AnnotationError, PermissionError, TimeoutError):
        raise
    except _DAMAGE as err:
        reason = str(err) if isinstance(err, ValueError) else f"{type(err).__name__}: {err}"
        raise damaged(folder, name, reason) from err


def damaged(folder: str, name: str, reason: str) -> AnnotationError:
    """Return the error for a damaged file `name` in the annotation set at address `folder`."""
    return AnnotationError(
        f"{folder}/{name} is not what was written, {reason}: run the command that wrote it again, "
        "which redoes what is missing or damaged"
    )
