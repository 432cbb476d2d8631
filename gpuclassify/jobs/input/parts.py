"""Parts of input files: how files are cut, and tables of them: whole, or up to a limit."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import logging
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from dask.tokenize import normalize_token

from gpuclassify.jobs.input.annotation_reader import (
    ROW_PLACE,
    AnnotationColumns,
    AnnotationRange,
    AnnotationReader,
)
from gpuclassify.jobs.input.files import (
    BrokenInputError,
    InputFile,
    check_unpacked,
    decompressed,
    open_parquet,
)
from gpuclassify.jobs.input.jsonl import (
    MOST_LINE_BYTES,
    BadLine,
    WholeLines,
    exact_integers,
    frequent_columns,
    json_columns,
    line_places,
    line_schemas,
    parse_good,
    read_range,
)
from gpuclassify.jobs.input.schema import (
    common_schema,
    declared_types,
    fitted,
    folder_schema,
    json_schema,
    merged_schema,
    meta_frame,
    misfits,
    missing_column,
    named_type,
    project,
    to_pandas,
    with_folder_values,
    with_types,
    without_maps,
    without_values,
)
from gpuclassify.jobs.ledger.arrow_types import changed, changed_schema, restored
from gpuclassify.jobs.ledger.quarantine import FILE, LINE, ROW, Problem, isolate_bad_rows, shortened
from gpuclassify.jobs.stores.names import compression, redacted
from gpuclassify.jobs.stores.opening import open_store, store_type
from gpuclassify.jobs.stores.store import (
    FILES_AT_A_TIME,
    LINE_BYTES,
    BrokenContentError,
    UnreadableInputError,
)

logger = logging.getLogger(__name__)

# Some 200 parts show progress and even out workers; parts this small or large lose speed.
PARTS_AIMED_AT = 200
SMALLEST_PART_BYTES, LARGEST_PART_BYTES = 64 << 10, 64 << 20
FEW_FILES = 16  # that stay separate parts: each worker has one, and they cost no time
# What cannot be read in pieces is read again for each share of its rows, if all input is small.
MOST_SHARES, SHARED_BYTES, BYTES_PACKED = 16, 32 << 20, 4  # a compressed byte stands for so many
COLUMN_BYTES = 1 << 10  # of a part, at least: each column costs time in each part
FOOTER_BYTES = 64 << 10  # what pyarrow reads of the end at first
COUNTED_BYTES = 1 << 20  # at a time, where lines are counted
LARGE_BYTES = 1 << 30  # of a part; a worker takes some three times as much for it
# Names that pandas and Dask give to what an index that has none becomes in Parquet.
_NAMELESS_INDEX = re.compile(r"__null_dask_index__|__index_level_\d+__")
# What to do about what cannot be read, by the `on_error` that raises it.
CURES = {
    "raise": 'To go on without it: on_error="quarantine".',
    "refuse": "Mend the file, or leave it out of the input.",
    "whole": "An earlier corpus is read whole, whatever on_error= says: mend the file, or leave "
    "it out of against=.",
}


@dataclass(frozen=True)
class Part:
    """A piece of one file: row groups of Parquet, or the lines that begin in a range of bytes.

    Of a small file it is all, and the small ones that follow may be in the same part.
    """

    path: str  # or URL
    row_groups: tuple[int, ...] | None = None
    start: int = 0
    length: int | None = None  # None for a whole file
    share: tuple[int, int] | None = None  # which of how many of its rows, in order
    problem: str | None = None  # why the file cannot be read, as far as it is known beforehand
    file_bytes: int | None = None  # which saves asking for it
    followers: tuple[Part, ...] = ()  # of other files
    rows: tuple[int, int] | None = None  # of Parquet: which of the file's rows, to the end of them
    annotations: tuple[tuple[AnnotationRange, ...], ...] = ()  # by annotation set

    @property
    def pieces(self) -> tuple[Part, ...]:
        """Pieces of the part, one for each file."""
        return (replace(self, followers=()), *self.followers)

    def bounds(self, count: int) -> tuple[int, int]:
        """Return where the part's share of `count` things begins and ends."""
        number, of = self.share or (0, 1)
        return count * number // of, count * (number + 1) // of

    @property
    def places(self) -> tuple[float, float] | None:
        """Places in the file that rows of this piece may have; None if only reading it tells."""
        if self.rows is not None:
            first, end = self.bounds(self.rows[1] - self.rows[0])
            return self.rows[0] + first, self.rows[0] + end
        if self.share is not None:
            return None
        return self.start, math.inf if self.length is None else self.start + self.length

    def __repr__(self) -> str:  # schedulers log the arguments of tasks that fail
        return f"Part({self})"

    def __str__(self) -> str:
        name = redacted(self.path)
        if self.followers:
            return f"{name} and the files behind it up to {self.followers[-1]}"
        if self.share:
            name += f", share {self.share[0] + 1} of {self.share[1]}"
        if self.row_groups:
            return f"{name}, row groups {self.row_groups[0]} to {self.row_groups[-1]}"
        return name if self.length is None else f"{name}, from byte {self.start}"


@dataclass(frozen=True)
class InputSchema:
    """Columns and reading settings that all parts of an input have in common."""

    arrow: pa.Schema  # columns of every part
    storage_options: dict[str, Any] = field(repr=False)  # for fsspec
    is_projected: bool  # whether columns beside those of `arrow` are left out on purpose
    folder_fields: tuple[str, ...] = ()  # that names of folders give, and no file holds
    replaces: bool = False  # whether halves of surrogate pairs become U+FFFD
    most_bytes: int = MOST_LINE_BYTES  # of a line
    path_field: str | None = None  # that tells the file of each row
    has_places: bool = False  # whether tables have the column `ROW_PLACE` behind all others
    annotations: tuple[AnnotationColumns, ...] = ()  # columns of `arrow` that no file holds
    # What named the files, for those who must not write there.
    paths: tuple[str, ...] = field(default=(), repr=False)

    def __dask_tokenize__(self) -> Any:
        return normalize_token([known for name, known in vars(self).items() if name != "paths"])

    @property
    def file_fields(self) -> list[str]:
        """Names of the columns that some file holds."""
        beside = (*self.folder_fields, self.path_field, *self.annotation_fields)
        return [name for name in self.arrow.names if name not in beside]

    @property
    def annotation_fields(self) -> list[str]:
        """Names of the columns that annotation sets hold."""
        names = (name for columns in self.annotations for name in columns.fields.values())
        return [name for name in names if name in self.arrow.names]

    @property
    def without_path(self) -> pa.Schema:
        """Columns without `path_field`."""
        return pa.schema([column for column in self.arrow if column.name != self.path_field])

    def without_annotations(self) -> InputSchema:
        """Return the schema without annotations, as which a file is read to count its rows, too."""
        beside = {*self.annotation_fields}
        names = [name for name in self.arrow.names if name not in beside]
        return replace(self.projected(names), is_projected=self.is_projected, annotations=())

    def projected(self, columns: Sequence[str]) -> InputSchema:
        """Return the schema with only these columns."""
        return replace(
            self,
            arrow=pa.schema([self.arrow.field(name) for name in columns]),
            is_projected=True,
            folder_fields=tuple(name for name in self.folder_fields if name in columns),
        )

    def meta(self) -> pd.DataFrame:
        """Return the empty frame with the dtypes of every part."""
        return meta_frame(self.arrow)


@dataclass(frozen=True)
class InputParts:
    """Parts of an input, what they have in common, and the files that they are from."""

    parts: tuple[Part, ...]
    schema: InputSchema
    files: tuple[InputFile, ...]
    part_bytes: int


@dataclass(frozen=True)
class Limit:
    """Limits on what is read from the beginning of a part: the first one reached counts."""

    rows: float = math.inf  # lines that are not blank
    line_bytes: float = math.inf  # of whole lines, decompressed
    stored_bytes: float = math.inf  # of a compressed file as it is stored


@dataclass(frozen=True)
class Lines:
    """Whole lines of a part, where in the (decompressed) file they begin, and their share of it."""

    part: Part
    offset: int
    content: bytes
    share: float = 1.0
    long: Sequence[BadLine] = ()  # lines that are too long, and not in `content`
    cut: str | None = None  # why there is no more, where the file should go on

    def parse(self, schema: InputSchema) -> tuple[pa.Table, list[BadLine]]:
        """Parse the lines into a table of the good ones, and the bad ones."""
        form = schema.without_path, schema.is_projected, schema.replaces
        table, bad = parse_good(self.content, self.offset, *form)
        places = np.zeros(0, dtype=np.int64)
        if schema.has_places:
            places = line_places(self.content, self.offset)
            places = places[~np.isin(places, [line.offset for line in bad])]
        for long in self.long:
            bad = [
                replace(b, offset=b.offset + long.skipped * (b.offset >= long.offset)) for b in bad
            ]
            places = places + long.skipped * (places >= long.offset)
        if schema.has_places:
            table = table.append_column(ROW_PLACE, pa.array(places))
        if not self.part.share or not self.part.share[0]:  # else the first share tells of them
            bad += self.long
        return table, sorted(bad, key=lambda line: line.offset)

    def in_share(self) -> Lines:
        """Return the lines that begin in the part's share of the bytes; the last keeps `cut`."""
        if self.part.share is None:
            return self
        size, (number, of) = len(self.content), self.part.share
        ends = self.part.bounds(size)
        first, end = (self.content.find(b"\n", at - 1) + 1 or size if at else 0 for at in ends)
        cut = self.cut if number + 1 == of else None
        return replace(self, content=self.content[first:end], offset=self.offset + first, cut=cut)


def read_part(
    part: Part, schema: InputSchema, columns: Sequence[str] | None = None
) -> pd.DataFrame:
    """Read one part as a pandas frame with the dtypes of `schema`, or some of its columns.

    Raises UnreadableInputError if it cannot be read. Columns that this file lacks are null. Fields
    that the schema lacks are left out if it is a projection, and refused if it stands for all
    columns, so that no data is lost unseen.
    """
    chosen = schema if columns is None else schema.projected(columns)
    annotations = AnnotationReader(part, chosen)
    tables = (read_table(piece, chosen, annotations=annotations)[0] for piece in part.pieces)
    return to_pandas(pa.concat_tables(tables))


def read_table(
    part: Part,
    schema: InputSchema,
    on_error: str = "refuse",
    limit: Limit | None = None,
    annotations: AnnotationReader | None = None,
) -> tuple[pa.Table, list[Problem], float]:
    """Read the good rows of one piece, its problems, and the share of the piece that was read.

    What cannot be read raises UnreadableInputError, unless `on_error` is "quarantine"; else it is
    one of `CURES`. Columns of annotations stand beside the rows that have their places; where there
    are no others, the annotations tell which rows there are, and the file stays closed.
    `annotations` are those of the part that the piece is of.
    """
    if not schema.annotations:
        return _read_file(part, schema, on_error, limit)
    annotations = annotations or AnnotationReader(part, schema)
    places, read = None if part.problem else annotations.places(part), schema.without_annotations()
    if read.arrow.names or places is None:
        if not read.arrow.names:  # a column that is in no file still tells of its rows
            read = replace(read, arrow=pa.schema([(ROW_PLACE * 2, pa.string())]), is_projected=True)
        table, problems, share = _read_file(part, replace(read, has_places=True), on_error, limit)
        places = table[ROW_PLACE].to_numpy()
    else:
        table, problems, share = pa.table({ROW_PLACE: places}), [], 1.0
    for name, column in annotations.columns(part, places):
        table = table.append_column(name, column)
    return table.select([*schema.arrow.names, *[ROW_PLACE] * schema.has_places]), problems, share


def _read_file(
    part: Part, schema: InputSchema, on_error: str, limit: Limit | None
) -> tuple[pa.Table, list[Problem], float]:
    share = 1.0
    try:
        if part.problem is not None:
            raise BrokenContentError(part.problem)
        if part.row_groups is not None:
            table, problems = _read_parquet(part, schema)
        else:
            lines = read_lines(part, schema.storage_options, limit, schema.most_bytes).in_share()
            share, name = lines.share, redacted(part.path)
            table, bad = lines.parse(schema)
            table = with_folder_values(table, schema.folder_fields, part.path)
            problems = [Problem(FILE, str(part), lines.cut)] if lines.cut else []
            for line in bad:
                place = line.offset if schema.has_places else None
                number = line_number(part.path, line.offset) if line.skipped else None
                reason = line.reason if number is None else f"line {number}: {line.reason}"
                shown = shortened(line.line)
                where: Any = {"offset": line.offset, "place": place}
                problems.append(Problem(LINE, name, reason, content=shown, **where))
    except BrokenContentError as err:
        table, problems = schema.without_path.empty_table(), [Problem(FILE, str(part), str(err))]
        if schema.has_places:
            table = table.append_column(ROW_PLACE, pa.array([], pa.int64()))
    if schema.path_field in schema.arrow.names:
        paths = pa.array([redacted(part.path)] * len(table), pa.string())
        names = [*schema.arrow.names, *[ROW_PLACE] * schema.has_places]
        table = table.append_column(schema.path_field, paths).select(names)
    if problems and on_error != "quarantine":
        raise unreadable(part, problems[0], on_error)
    return table, problems, share


class RowChoice(Protocol):
    """Choice of rows by some of their columns."""

    @property
    def read_fields(self) -> tuple[str, ...]:
        """Columns that decide."""

    def choose(self, columns: pa.Table) -> np.ndarray:
        """Return a mask of the chosen rows, bool (rows,)."""


def read_chosen(
    part: Part,
    schema: InputSchema,
    on_error: str,
    annotations: AnnotationReader,
    choice: RowChoice,
) -> tuple[pa.Table, list[Problem], float]:
    """Read the rows of a piece that are chosen by some of their columns; see `read_table`.

    Of Parquet nothing else is read of row groups of which no row is taken, nor of JSON lines where
    annotations alone decide and take none. Rows that cannot be read must all be looked at where
    columns of files decide and they are left out.
    """
    names = [name for name in schema.arrow.names if name in choice.read_fields]
    reads_files = not {*names} <= {*schema.annotation_fields} or annotations.places(part) is None
    if part.problem or (reads_files and (part.row_groups is None or on_error == "quarantine")):
        placed = replace(schema, has_places=True)
        table, problems, share = read_table(part, placed, on_error, annotations=annotations)
        chosen = table.filter(pa.array(choice.choose(table)))
        return chosen.drop_columns([ROW_PLACE]), problems, share
    known = replace(schema.projected(names), has_places=True)
    known, _, share = read_table(part, known, on_error, annotations=annotations)
    places = known[ROW_PLACE].to_numpy()[choice.choose(known)]
    tables, problems = [schema.arrow.empty_table()], []
    for piece in _pieces_with(part, places, schema.storage_options) if len(places) else ():
        read = replace(schema, has_places=True)
        table, bad, _ = read_table(piece, read, on_error, annotations=annotations)
        taken = pa.array(np.isin(table[ROW_PLACE].to_numpy(), places))
        tables.append(table.filter(taken).drop_columns([ROW_PLACE]))
        problems += bad
    return pa.concat_tables(tables), problems, share


def _pieces_with(part: Part, places: np.ndarray, storage_options: dict[str, Any]) -> Iterator[Part]:
    """Yield the runs of row groups of a piece that have these places; lines are one piece."""
    if part.row_groups is None or part.share is not None:
        yield part
        return
    with open_store(part.path, storage_options).reading(part.file_bytes) as file:
        metadata = pq.read_metadata(file)
    counts = [metadata.row_group(number).num_rows for number in part.row_groups]
    ends = np.cumsum(counts) + (part.rows or (0, 0))[0]
    has_some = np.isin(np.arange(len(ends)), np.searchsorted(ends, places, side="right"))
    for is_taken, run in itertools.groupby(range(len(ends)), key=has_some.__getitem__):
        if is_taken:
            numbers = [*run]
            first, end = numbers[0], int(ends[numbers[-1]])
            groups = tuple(part.row_groups[number] for number in numbers)
            yield replace(part, row_groups=groups, rows=(int(ends[first]) - counts[first], end))


def read_lines(
    part: Part,
    storage_options: dict[str, Any],
    limit: Limit | None = None,
    most_bytes: int = MOST_LINE_BYTES,
) -> Lines:
    """Read the lines of a part; with a limit those at its beginning, if it is a whole file.

    Lines of more than `most_bytes` are apart.
    """
    codec, ahead_bytes = compression(part.path), None
    if part.length is not None:  # at first all lines are asked for, or the end of the line before
        ahead_bytes = LINE_BYTES + (part.length if part.start else 0)
    elif limit is not None:
        ahead_bytes = LINE_BYTES
    store = open_store(part.path, storage_options)
    opened = functools.partial(store.reading, part.file_bytes, ahead_bytes)
    if part.length is not None:
        with opened() as file:
            offset, content = read_range(file, part.start, part.length, most_bytes)
        if len(content) <= most_bytes:
            return Lines(part, offset, content)
        whole = WholeLines(io.BytesIO(content), most_bytes, offset)
        return Lines(part, offset, whole.readall(), long=whole.long)

    @contextlib.contextmanager
    def again() -> Iterator[Any]:
        with opened() as file, decompressed(file, codec) as stream:
            yield stream

    with opened() as file, decompressed(file, codec) as stream:
        whole = WholeLines(
            stream, most_bytes, again=again, check=lambda kept: check_unpacked(kept, file.tell())
        )
        if limit is not None:
            content, place = first_lines(io.BufferedReader(whole), limit, file.tell)
            share = place / (part.file_bytes or 1) if place else 1.0
        else:
            content, share = whole.readall(), 1.0
    if codec and len(content) >= LARGE_BYTES:
        logger.warning(
            "%s holds more than %d MiB of lines, all of which are in memory at once, "
            "as a compressed file is one part: cut it into several files",
            redacted(part.path),
            LARGE_BYTES >> 20,
        )
    return Lines(part, 0, content, share, whole.long, whole.cut)


def first_lines(
    stream: BinaryIO, limit: Limit, tell: Callable[[], int] = lambda: 0
) -> tuple[bytes, int]:
    """Return the first lines, and where the limit on stored bytes ended them.

    That is the stored byte by which this limit has ended them, or 0. `tell` says how many bytes of
    the compressed file the stream has read.
    """
    lines: list[bytes] = []
    rows, line_bytes, place = 0, 0, 0
    while rows < limit.rows and line_bytes < limit.line_bytes and (line := stream.readline()):
        # Stored bytes are read ahead: when more are asked for, those before are used up.
        if tell() > place >= limit.stored_bytes:
            return b"".join(lines), place
        place = tell()
        lines.append(line)
        rows += bool(line.strip())
        line_bytes += len(line)
    return b"".join(lines), 0


def _read_parquet(part: Part, schema: InputSchema) -> tuple[pa.Table, list[Problem]]:
    """Read row groups with the columns of `schema`; those that the file lacks are null."""
    known = schema.without_path
    names = known.names
    with open_store(part.path, schema.storage_options).reading(part.file_bytes) as file:
        table = open_parquet(file).read_row_groups(list(part.row_groups or ()), columns=names)
        start, stop = part.bounds(len(table))
        first = start + (part.rows[0] if part.rows else 0)
        table = table.slice(start, stop - start)
        table = fitted(table, known)
        table = with_folder_values(table, schema.folder_fields, part.path)
    if schema.has_places:
        table = table.append_column(ROW_PLACE, pa.array(np.arange(first, first + len(table))))

    def check(start: int, stop: int) -> pa.Table:
        rows = table.slice(start, stop - start)
        rows.validate(full=True)  # finds text that is not UTF-8, which reading lets pass
        return rows

    good, problems = [table.slice(0, 0)], []
    for row, result in isolate_bad_rows(check, 0, len(table), (pa.ArrowException,)):
        if isinstance(result, Exception):
            place = first + row if schema.has_places else None
            problems.append(Problem(ROW, str(part), str(result), row=row, place=place))
        else:
            good.append(result)
    return pa.concat_tables(good), problems


def first_of_parquet(file: InputFile, storage_options: dict[str, Any], rows: int) -> pa.Table:
    """Read the first rows of a Parquet file, without the rest of their row group."""
    batches: list[pa.RecordBatch] = []
    with open_store(file.path, storage_options).reading(file.size_bytes, LINE_BYTES) as opened:
        parquet = open_parquet(opened)
        for batch in parquet.iter_batches(batch_size=rows):
            batches.append(batch)
            if sum(map(len, batches)) >= rows:
                break
        table = pa.Table.from_batches(batches, parquet.schema_arrow)
    return changed(table.slice(0, rows), restored)


def unreadable(part: Part, problem: Problem, on_error: str) -> BrokenInputError:
    """Return the error that names the first problem of a part, and what to do about it."""
    where = str(part)
    if problem.offset is not None:
        number = line_number(part.path, problem.offset)
        line = "" if number is None else f" line {number},"
        where = f"{redacted(part.path)},{line} from byte {problem.offset}"
    elif problem.row is not None:
        where = f"{part}, row {problem.row}"
    return BrokenInputError(
        f"{where} cannot be read: {problem.reason.rstrip('.')}. {CURES[on_error]}"
    )


def line_number(path: str, offset: int) -> int | None:
    """Return the number of the line that begins at this byte of a (decompressed) file, from 1.

    None for files elsewhere, of which all up to there would have to be fetched.
    """
    store = open_store(path)
    if not store.is_near:
        return None
    number, left = 1, offset
    with store.reading() as file, decompressed(file, compression(path)) as stream:
        while left and (some := stream.read(min(left, COUNTED_BYTES))):
            number, left = number + some.count(b"\n"), left - len(some)
    return number


# From names of files to the parts of a job, and the columns that all parts have in common.


@dataclass(frozen=True)
class Footer:
    """Columns and row groups of a Parquet file, with their uncompressed sizes; or its problem."""

    schema: pa.Schema
    group_bytes: tuple[int, ...] = ()
    group_rows: tuple[int, ...] = ()
    problem: str | None = None


def read_footers(
    files: Sequence[InputFile],
    storage_options: dict[str, Any],
    change: Callable[[pa.Schema, pq.FileMetaData], pa.Schema] | None = None,
) -> list[Footer]:
    """Read the footers of the files, several at a time: stores answer slowly.

    `change` makes another schema of a file's schema and metadata.
    """
    # Equal schemas are kept once: there may be very many files.
    known: dict[pa.Schema, pa.Schema] = {}

    def read(file: InputFile) -> Footer:
        if file.problem:
            return Footer(pa.schema([]), problem=file.problem)
        try:
            store = open_store(file.path, storage_options)
            with store.reading(file.size_bytes, FOOTER_BYTES) as opened:
                metadata = pq.read_metadata(opened)
                held = metadata.schema.to_arrow_schema().remove_metadata()
                held = change(held, metadata) if change else held
        except BrokenContentError as err:
            return Footer(pa.schema([]), problem=str(err))
        schema = changed_schema(held, restored)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        return Footer(
            known.setdefault(schema, schema),
            tuple(group.total_byte_size for group in groups),
            tuple(group.num_rows for group in groups),
        )

    with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
        return list(pool.map(read, files))


@dataclass(frozen=True)
class PartFinder:
    """Finder of the parts of files of one format, and of their columns.

    Settings are those of a `gpuclassify.jobs.input.readers.FileReader` and its `find_parts`.
    """

    files: Sequence[InputFile]
    reader: Any
    on_error: str
    needed: Collection[str]
    fields: Sequence[str] | None

    def parquet(self) -> InputParts:
        """Find runs of row groups, as the footers of the files list them."""
        footers = read_footers(self.files, self.reader.storage_options)
        held, schemas = self._common(footers)
        if wrong := {name for schema in schemas for name in misfits(schema, held)}:
            change = functools.partial(without_values, names=wrong)
            footers = read_footers(self.files, self.reader.storage_options, change)
            held, _ = self._common(footers)
        ends = list(zip(self.files, footers, strict=True))
        if not held.names:
            broken = [Part(file.path, problem=footer.problem) for file, footer in ends]
            self._check(_problems(broken), is_all=True)
        if self.fields is None:
            kept = [field for field in held if not _NAMELESS_INDEX.fullmatch(field.name)]
            held = pa.schema(kept or held)
        schema = self._schema(held)
        part_bytes = self._bytes_of_part(schema)
        parts: list[Part] = []
        for file, footer in ends:
            problem = footer.problem or _misfit(file, footer, schema, self.needed)
            if problem is not None:
                parts.append(Part(file.path, problem=problem))
                continue
            for run in _group_runs(footer, part_bytes):
                rows = sum(footer.group_rows[: run[0]]) if run else 0
                end = rows + sum(footer.group_rows[number] for number in run)
                part = Part(file.path, row_groups=run, file_bytes=file.size_bytes, rows=(rows, end))
                parts += self._shares(part, sum(footer.group_bytes[n] for n in run), part_bytes)
        self._check(_problems(parts))
        sizes = {file.path: sum(footer.group_bytes) for file, footer in ends}
        return self._joined(parts, sizes, schema, part_bytes)

    def _common(self, footers: Sequence[Footer]) -> tuple[pa.Schema, Collection[pa.Schema]]:
        """Return the columns of all files, and the schemas that they are merged from.

        A file without rows has no value of another type, so that only its further columns count.
        """
        counts = Counter(footer.schema for footer in footers if any(footer.group_rows))
        held = common_schema(counts, self.reader.known)
        beside = {*held.names}
        if counts:
            beside |= {*folder_schema(file.path for file in self.files).names}
        empty = common_schema(Counter(f.schema for f in footers if not any(f.group_rows)))
        return pa.schema([*held, *(f for f in empty if f.name not in beside)]), counts.keys()

    def json_lines(
        self,
        types: Mapping[str, str],
        most_samples: int,
        sample_bytes: int,
        replaces: bool = False,
        most_bytes: int = MOST_LINE_BYTES,
    ) -> InputParts:
        """Find byte ranges, with columns from samples of the lines."""
        pieces = self._byte_ranges(max(sample_bytes, -(-self._total_bytes // most_samples)))
        problems = _problems(pieces)
        self._check(problems)
        pieces = [piece for piece in pieces if piece.problem is None and piece.length != 0]
        samples: list[Lines] = []
        reads_files = self.fields is None or bool(self.fields)  # not for annotations alone
        pieces = pieces if reads_files else []
        for sample in self._samples(pieces, most_samples, sample_bytes, most_bytes):
            if isinstance(sample, Lines):
                samples.append(sample)
            else:
                problems.append(sample)
                self._check(problems)
        known = self.reader.known
        texts = [name for name, kind in types.items() if kind == "json"]
        texts += json_columns(known or ())
        kept = types if self.fields is None else None
        held = sampled_schema([sample.content for sample in samples], texts, known, kept)
        if reads_files and not held.names:
            bad = _bad_lines(samples, InputSchema(held, {}, False))
            self._check([*bad, *problems], is_all=True)
        schema = replace(self._schema(held, types), replaces=replaces, most_bytes=most_bytes)
        for sample in samples:
            # What its lines hold is only looked up if folders give something that they might not.
            if missing_column(sample.part.path, (), schema.file_fields):
                names = sampled_schema([sample.content]).names
                reason = missing_column(sample.part.path, names, schema.file_fields)
                if reason is not None:
                    raise UnreadableInputError(f"{sample.part} does not fit other files: {reason}")
        self._check(_bad_lines(samples, schema))
        part_bytes = self._bytes_of_part(schema)
        sizes = {file.path: file.size_bytes for file in self.files}
        return self._joined(self._byte_ranges(part_bytes, True), sizes, schema, part_bytes)

    def _joined(
        self,
        parts: Sequence[Part],
        sizes: Mapping[str, int | None],
        schema: InputSchema,
        part_bytes: int,
    ) -> InputParts:
        """Join neighbours that are whole files into one part, up to its size or number of files."""
        most, most_bytes = self.reader.files_per_partition, part_bytes
        if self.reader.part_bytes is None and (most or len(self.files) <= FEW_FILES):
            most, most_bytes = most or 1, sys.maxsize
        pieces = Counter(part.path for part in parts)
        groups: list[list[Part]] = []
        room = -1.0
        for part in parts:
            size = sizes[part.path] if pieces[part.path] == 1 else None
            needed = math.inf if size is None else size
            if needed > room or len(groups[-1]) == most:
                groups.append([])
                room = most_bytes
            groups[-1].append(part)
            room -= needed
        joined = tuple(replace(first, followers=tuple(rest)) for first, *rest in groups)
        return InputParts(joined, schema, tuple(self.files), part_bytes)

    def _samples(
        self, pieces: Sequence[Part], most: int, sample_bytes: int, most_bytes: int
    ) -> Iterator[Lines | tuple[Part, Problem]]:
        """Yield up to `most` samples that hold something, or why a piece cannot be read.

        They are from pieces' beginnings, middles and ends in turn.
        """
        last, steps = len(pieces) - 1, max(1, most - 1)
        spread = [round(step * last / steps) for step in range(most)] if pieces else []
        count = total_bytes = 0
        for number in dict.fromkeys([*spread, *range(len(pieces))]):  # all others in case of blanks
            piece = pieces[number]
            limit = Limit(line_bytes=sample_bytes) if piece.length is None else None
            if piece.length is not None:
                start = piece.start + max(0, piece.length - sample_bytes) * (count % 3) // 2
                piece = replace(piece, start=start, length=sample_bytes)
            try:
                lines = read_lines(piece, self.reader.storage_options, limit, most_bytes)
            except BrokenContentError as err:
                yield pieces[number], Problem(FILE, str(pieces[number]), str(err))
                continue
            if lines.cut:
                yield pieces[number], Problem(FILE, str(pieces[number]), lines.cut)
            if lines.content.strip():
                yield lines
                count += 1
                total_bytes += len(lines.content)
            if count == most or total_bytes > MOST_LINE_BYTES:  # of lines that are very long
                return

    @property
    def _total_bytes(self) -> int:
        return sum(file.size_bytes or 0 for file in self.files)

    def _bytes_of_part(self, schema: InputSchema) -> int:
        """Return the bytes of a part: those asked for, or what divides the files evenly."""
        least = max(SMALLEST_PART_BYTES, COLUMN_BYTES * len(schema.arrow))
        aim = max(self._total_bytes // PARTS_AIMED_AT, least)
        return self.reader.part_bytes or min(aim, LARGEST_PART_BYTES)

    @functools.cached_property
    def _whole(self) -> set[str]:
        """Paths of files that cannot be read in pieces."""
        options = self.reader.storage_options
        return {
            file.path
            for file in self.files
            if compression(file.path)
            or not open_store(file.path, options).delivers_ranges(file.size_bytes)
        }

    def _shares(self, part: Part, size: int, part_bytes: int) -> list[Part]:
        """Return the part, or shares of its rows where models take long for its bytes."""
        is_cut_otherwise = self.reader.part_bytes or self.reader.files_per_partition
        is_small = self._total_bytes <= SHARED_BYTES and store_type(part.path).is_near
        if is_cut_otherwise or not self.needed or not is_small:
            return [part]
        count = max(1, min(MOST_SHARES, size // part_bytes))
        return [replace(part, share=(n, count) if count > 1 else None) for n in range(count)]

    def _byte_ranges(self, part_bytes: int, is_shared: bool = False) -> list[Part]:
        parts: list[Part] = []
        for file in self.files:
            path, end = file.path, file.size_bytes
            if file.problem:
                parts.append(Part(path, problem=file.problem, file_bytes=end))
            elif end is None or path in self._whole:
                part = Part(path, file_bytes=end)
                packed = BYTES_PACKED * end if end and compression(path) and is_shared else 0
                parts += self._shares(part, packed, part_bytes)
            else:
                parts += [
                    Part(path, start=at, length=min(part_bytes, end - at), file_bytes=end)
                    for at in range(0, max(1, end), part_bytes)
                ]
        return parts

    def _schema(self, held: pa.Schema, types: Mapping[str, str] | None = None) -> InputSchema:
        """Return the columns of the files and of their folders, or those that are asked for."""
        paths = [file.path for file in self.files]
        declared = declared_types(paths, self.reader.storage_options)
        by_folders = [
            field.with_type(named_type(field.name, declared.get(field.name, str(field.type))))
            for field in folder_schema(paths)
            if field.name not in held.names
        ]
        schema = with_types(pa.schema([*held, *by_folders]), types or {})
        if self.reader.path_field in schema.names:
            raise UnreadableInputError(
                f"path_field={self.reader.path_field!r} is a column of the input: name another one"
            )
        if self.fields is not None:
            schema = project(schema, self.fields)
        folder_fields = tuple(field.name for field in by_folders if field.name in schema.names)
        if self.reader.path_field is not None:
            schema = schema.append(pa.field(self.reader.path_field, pa.string()))
        return InputSchema(
            schema,
            self.reader.storage_options,
            self.fields is not None,
            folder_fields,
            path_field=self.reader.path_field,
        )

    def _check(self, problems: Iterable[tuple[Part, Problem]], is_all: bool = False) -> None:
        """Raise UnreadableInputError for the first problem, if the job cannot go on."""
        if self.on_error == "quarantine" and not is_all:
            return
        for part, problem in problems:
            if self.on_error != "quarantine":
                raise unreadable(part, problem, self.on_error)
            raise BrokenInputError(f"nothing of the input can be read; {part}: {problem.reason}")


def sampled_schema(
    samples: Sequence[bytes],
    texts: Collection[str] = (),
    known: pa.Schema | None = None,
    kept: Collection[str] | None = None,
) -> pa.Schema:
    """Infer the columns of all lines of JSON from samples; columns `texts` hold any JSON.

    `known` has columns that exist in any case; see `common_schema`. With `kept`, columns that few
    lines have are left out, except those in `kept`; see `frequent_columns`.
    """
    counts: Counter[pa.Schema] = Counter()
    for sample in samples:
        for schema, count in line_schemas(sample, texts).items():
            counts[json_schema(schema)] += count
    own = exact_integers(merged_schema(counts), samples)
    if kept is not None:
        own = frequent_columns(own, samples, kept)
    return without_maps(common_schema({own: 1}, known))


def _bad_lines(samples: Iterable[Lines], schema: InputSchema) -> Iterator[tuple[Part, Problem]]:
    for sample in samples:
        for line in sample.parse(schema)[1]:
            yield sample.part, Problem(LINE, str(sample.part), line.reason, line.offset)


def _problems(parts: Iterable[Part]) -> list[tuple[Part, Problem]]:
    return [(p, Problem(FILE, str(p), p.problem)) for p in parts if p.problem is not None]


def _group_runs(footer: Footer, part_bytes: int) -> list[tuple[int, ...]]:
    """Return runs of neighbouring row groups, by number, that reach `part_bytes` together."""
    runs: list[tuple[int, ...]] = []
    run: list[int] = []
    size = 0
    for number, group_bytes in enumerate(footer.group_bytes):
        run.append(number)
        size += group_bytes
        if size >= part_bytes:
            runs.append(tuple(run))
            run, size = [], 0
    return [*runs, tuple(run)] if run or not runs else runs


def _misfit(
    file: InputFile, footer: Footer, common: InputSchema, needed: Collection[str]
) -> str | None:
    """Return why a Parquet file cannot be read with these columns, or None."""
    schema = common.arrow
    known = set(schema.names)
    names = [name for name in footer.schema.names if name in known]
    double = [name for name, count in Counter(names).items() if count > 1]
    if double:
        return (
            f"several columns are called {', '.join(map(repr, double))}: rename them, or read "
            "others alone (fields=)"
        )
    if not any(footer.group_rows):
        return None
    reason = missing_column(file.path, names, common.file_fields)
    if reason is not None:
        return reason
    absent = [name for name in needed if name in common.file_fields and name not in names]
    if absent:
        return f"it has no column {absent[0]!r}, which is read and which other files have"
    wrong = "; ".join(misfits(footer.schema, schema).values())
    return f"the inputs' columns do not fit together: {wrong}" if wrong else None
