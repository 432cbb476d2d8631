"""Parts of an input, and functions that read a part, its beginning, or selected rows as a table."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Protocol

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from dask.tokenize import normalize_token

from gpuclassify.jobs.input.annotation_reader import (
    ROW_POSITION,
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
    first_line,
    line_offsets,
    parse_good,
    read_range,
)
from gpuclassify.jobs.input.left_out import report_left_out
from gpuclassify.jobs.input.schema import fill_folder_values, fitted, meta_frame, to_pandas
from gpuclassify.jobs.ledger.arrow_types import changed, restored
from gpuclassify.jobs.ledger.quarantine import FILE, LINE, ROW, Problem, isolate_bad_rows, shortened
from gpuclassify.jobs.provenance import Provenance
from gpuclassify.jobs.stores.names import compression, redacted
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.jobs.stores.store import LINE_BYTES, BrokenContentError

logger = logging.getLogger(__name__)

COUNTED_BYTES = 1 << 20  # read size while counting lines
LARGE_BYTES = 1 << 30  # part size to warn about: a worker needs about three times as much memory
KNOWN_AS_UNREADABLE = "it could not be read when it was annotated"
# Advice in errors for unreadable input, for each value of `on_error` that raises.
CURES = {
    "raise": 'To go on without it: on_error="quarantine".',
    "whole": "An earlier corpus is read whole, whatever on_error= says: mend the file, or leave "
    "it out of against=.",
}


@dataclass(frozen=True)
class Part:
    """Slice of an input that a task reads: row groups of a Parquet file, or a byte range of lines.

    A line belongs to the part in whose byte range it begins, after decompression. A `share` limits
    the part to a fraction of its rows or bytes. Several small files may form one part: each file is
    a piece, and the pieces after the first are `followers`.
    """

    path: str  # path or URL of the file
    row_groups: tuple[int, ...] | None = None  # indices; None for JSON lines
    start: int = 0  # byte offset in the decompressed file
    length: int | None = None  # bytes; None for all from `start` on
    # (first, end, count): if all rows or bytes are divided into `count` equal shares, the part has
    # shares `first` to `end` - 1. None for all.
    share: tuple[int, int, int] | None = None
    problem: str | None = None  # reason why the file cannot be read, if known before reading
    file_bytes: int | None = None  # size of the file, which saves a request for it
    followers: tuple[Part, ...] = ()
    rows: tuple[int, int] | None = None  # first row and end row of the row groups in the file
    # Ranges of the piece's rows, by annotation set. None stands for a set that may lack some.
    annotations: tuple[tuple[AnnotationRange, ...] | None, ...] = ()

    @property
    def pieces(self) -> tuple[Part, ...]:
        """Parts of one file each, without `followers`, that together are this part."""
        return (replace(self, followers=()), *self.followers)

    def bounds(self, count: int) -> tuple[int, int]:
        """Return the start and end of this part's share of `count` rows or bytes."""
        first, end, shares = self.share or (0, 1, 1)
        return count * first // shares, count * end // shares

    @property
    def is_whole_file(self) -> bool:
        """Whether this part is known to be the whole file `path`; `followers` are ignored.

        A Parquet file counts only if it has no rows, because its number of row groups is unknown.
        """
        if self.row_groups is not None:
            return self.rows == (0, 0)
        is_to_end = self.length is None
        if not compression(self.path):
            is_to_end |= self.start + (self.length or 0) == self.file_bytes
        return self.share is None and self.start == 0 and is_to_end

    @property
    def position_range(self) -> tuple[float, float] | None:
        """First position of this part's rows in the file, and end position; None if unknown.

        Positions are row numbers from 0 in Parquet files, and byte offsets in JSON lines, after
        decompression; an unknown end is infinite. `followers` are ignored.
        """
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
        if self.row_groups:
            if self.share and self.position_range:
                first, end = self.position_range
                name += f", rows {first} to {end - 1}"
            return f"{name}, row groups {self.row_groups[0]} to {self.row_groups[-1]}"
        if self.share:
            first, end = (bound / self.share[2] for bound in self.share[:2])
            return f"{name}, its lines from {first:.2%} to {end:.2%}"
        is_range = self.start or self.length is not None
        return f"{name}, from byte {self.start}" if is_range else name


@dataclass(frozen=True)
class InputSchema:
    """Columns and reading settings of an input, common to all of its parts."""

    arrow: pa.Schema  # columns of every part
    storage_options: dict[str, Any] = field(repr=False)  # fsspec's options for stores
    is_projected: bool  # whether columns of files that `arrow` lacks are ignored; else they raise
    folder_fields: tuple[str, ...] = ()  # columns from folder names, which no file holds
    replaces_surrogates: bool = False  # whether halves of surrogate pairs become U+FFFD
    max_line_bytes: int = MOST_LINE_BYTES  # longer lines are problems
    path_field: str | None = None  # column with the path of each row's file
    has_positions: bool = False  # whether `ROW_POSITION` is the last column of tables
    annotations: tuple[AnnotationColumns, ...] = ()  # annotation sets with columns of `arrow`
    # Types of columns in JSON lines, by name, if `arrow` has other types because of Parquet files.
    # None is for columns that lines cannot hold.
    line_types: Mapping[str, pa.DataType | None] = field(default_factory=dict)
    # The reader's paths, to refuse an output that they match.
    paths: tuple[str, ...] = field(default=(), repr=False)

    def __dask_tokenize__(self) -> Any:
        return normalize_token([value for name, value in vars(self).items() if name != "paths"])

    @property
    def file_fields(self) -> list[str]:
        """Names of the columns that input files hold, without folders, paths and annotations."""
        others = (*self.folder_fields, self.path_field, *self.annotation_fields)
        return [name for name in self.arrow.names if name not in others]

    @property
    def annotation_fields(self) -> list[str]:
        """Names of the columns of `arrow` that annotation sets hold."""
        names = (name for columns in self.annotations for name in columns.fields.values())
        return [name for name in names if name in self.arrow.names]

    @property
    def pathless(self) -> pa.Schema:
        """Columns except `path_field`, which holds the path of each row's file."""
        return pa.schema([column for column in self.arrow if column.name != self.path_field])

    @property
    def in_lines(self) -> pa.Schema:
        """Columns to parse from JSON lines, with types from `line_types`, else from `arrow`."""
        types = [self.line_types.get(column.name, column.type) for column in self.pathless]
        pairs = zip(self.pathless.names, types, strict=True)
        return pa.schema([(name, kind) for name, kind in pairs if kind is not None])

    def drop_annotations(self) -> InputSchema:
        """Return the schema without columns from annotation sets; it may have no column left."""
        dropped = {*self.annotation_fields}
        names = [name for name in self.arrow.names if name not in dropped]
        return replace(self.projected(names), is_projected=self.is_projected, annotations=())

    def projected(self, columns: Sequence[str]) -> InputSchema:
        """Return the schema with only these columns of `arrow`, in this order."""
        return replace(
            self,
            arrow=pa.schema([self.arrow.field(name) for name in columns]),
            is_projected=True,
            folder_fields=tuple(name for name in self.folder_fields if name in columns),
        )

    def meta(self) -> pd.DataFrame:
        """Return a pandas frame without rows that has the columns and dtypes of every part."""
        return meta_frame(self.arrow)


@dataclass(frozen=True)
class InputParts:
    """Parts of an input, with their sizes and common schema."""

    parts: tuple[Part, ...]
    sizes: tuple[float, ...]  # estimated bytes of each part, after decompression
    schema: InputSchema
    files: tuple[InputFile, ...]  # all files of the input
    part_bytes: int  # target size of a part
    provenance: Provenance = field(default_factory=Provenance)  # origin of annotations


@dataclass(frozen=True)
class Limit:
    """Limits for reading whole lines from the beginning of a file, up to the first one reached."""

    rows: float = math.inf  # lines that are not blank
    line_bytes: float = math.inf  # decompressed bytes
    stored_bytes: float = math.inf  # compressed bytes


@dataclass(frozen=True)
class Lines:
    """Whole lines read from a JSON lines file, or from a range of it.

    If `part` has a share of the file, `in_share` selects its lines.
    """

    part: Part
    offset: int  # byte offset of `content` in the decompressed file
    content: bytes
    share: float = 1.0  # fraction of the file that was read, if its stored bytes were limited
    long_lines: Sequence[BadLine] = ()  # lines that are too long, and not in `content`
    cut: str | None = None  # message of the error that ended a damaged file

    def parse(self, schema: InputSchema) -> tuple[pa.Table, list[BadLine]]:
        """Return a table of the good lines, a row each, and the bad lines, sorted by offset.

        The table has the columns of `schema`, except the column of paths. If
        `schema.has_positions`, the column `ROW_POSITION` has the byte offset of each line.
        """
        columns = schema.in_lines if schema.line_types else schema.pathless
        form = columns, schema.is_projected, schema.replaces_surrogates
        table, bad = parse_good(self.content, self.offset, *form)
        if schema.line_types:
            table = fitted(table, schema.pathless)
        offsets = np.zeros(0, dtype=np.int64)
        if schema.has_positions:
            offsets = line_offsets(self.content, self.offset)
            offsets = offsets[~np.isin(offsets, [line.offset for line in bad])]
        for long in self.long_lines:
            bad = [
                replace(b, offset=b.offset + long.skipped * (b.offset >= long.offset)) for b in bad
            ]
            offsets = offsets + long.skipped * (offsets >= long.offset)
        if schema.has_positions:
            table = table.append_column(ROW_POSITION, pa.array(offsets))
        # Every share of a file reads the long lines, but only the first share reports them.
        if not self.part.share or not self.part.share[0]:
            bad += self.long_lines
        return table, sorted(bad, key=lambda line: line.offset)

    def in_share(self) -> Lines:
        """Return the lines that begin in the part's share of the file; all if it has no share."""
        if self.part.share is None:
            return self
        ends = self.part.bounds(len(self.content))
        first, end = (first_line(self.content, at) for at in ends)
        cut = self.cut if self.part.share[1] == self.part.share[2] else None
        return replace(self, content=self.content[first:end], offset=self.offset + first, cut=cut)


def read_part(
    part: Part,
    schema: InputSchema,
    columns: Sequence[str] | None = None,
    on_error: str = "raise",
) -> pd.DataFrame:
    """Read a part as a pandas frame with the dtypes of `schema`.

    `columns` are the columns to read, in order; None for all. If `on_error` is "quarantine",
    unreadable files, lines and rows are left out, and counted by `report_left_out`. Otherwise the
    first one raises UnreadableInputError, unless annotation sets list it as left out.
    """
    schema = schema if columns is None else schema.projected(columns)
    annotations, tables = AnnotationReader(part, schema), []
    for piece in part.pieces:
        table, problems, _ = read_table(piece, schema, on_error, annotations=annotations)
        report_left_out(piece, problems)
        tables.append(table)
    return to_pandas(pa.concat_tables(tables))


def read_table(
    part: Part,
    schema: InputSchema,
    on_error: str = "raise",
    limit: Limit | None = None,
    annotations: AnnotationReader | None = None,
) -> tuple[pa.Table, list[Problem], float]:
    """Read a part without `followers`: row groups of a Parquet file, or a range of JSON lines.

    Returns the good rows, the problems, and the fraction of the file that was read, which is below
    1 only if ``limit.stored_bytes`` stopped the reading. The table has the columns of
    `schema.arrow`, and `ROW_POSITION` if `schema.has_positions`. `limit` is ignored for row groups
    and byte ranges. `annotations` is the reader of the whole part's annotations; None makes one if
    needed.

    Unreadable files, lines and rows are problems if `on_error` is "quarantine", or if annotation
    sets list them as unreadable. Otherwise the first one raises UnreadableInputError.
    """
    if not schema.annotations:
        return _read_file(part, schema, on_error, limit)
    annotations = annotations or AnnotationReader(part, schema)
    positions = None if part.problem else annotations.positions(part)
    unread = annotations.unreadable(part)
    plain = schema.drop_annotations()
    if plain.arrow.names or positions is None:
        if not plain.arrow.names:  # Readers need a column to count rows; no file has this one.
            nothing = pa.schema([(ROW_POSITION * 2, pa.string())])
            plain = replace(plain, arrow=nothing, is_projected=True)
        plain = replace(plain, has_positions=True)
        known = {*unread.tolist(), *[None] * annotations.lacks_content(part)}
        table, problems, share = _read_file(part, plain, on_error, limit, known)
        positions = table[ROW_POSITION].to_numpy()
    else:
        table, problems, share = pa.table({ROW_POSITION: positions}), [], 1.0
    if (is_lost := np.isin(positions, unread)).any():
        name = redacted(part.path)
        problems += [
            Problem(LINE, name, KNOWN_AS_UNREADABLE, place=place)
            for place in positions[is_lost].tolist()
        ]
        table, positions = table.filter(pa.array(~is_lost)), positions[~is_lost]
    for name, column in annotations.columns(part, positions):
        table = table.append_column(name, column)
    names = [*schema.arrow.names, *[ROW_POSITION] * schema.has_positions]
    return table.select(names), problems, share


def _read_file(
    part: Part,
    schema: InputSchema,
    on_error: str,
    limit: Limit | None,
    known: Collection[int | None] = (),
) -> tuple[pa.Table, list[Problem], float]:
    """Read one range of a file without annotations, as `read_table` does.

    Problems at the positions `known` (row numbers or byte offsets; None: the file) never raise.
    """
    share = 1.0
    try:
        if part.problem is not None:
            raise BrokenContentError(part.problem)
        if part.row_groups is not None:
            table, problems = _read_parquet(part, schema)
        else:
            lines = read_lines(part, schema.storage_options, limit, schema.max_line_bytes)
            lines = lines.in_share()
            share, name = lines.share, redacted(part.path)
            table, bad = lines.parse(schema)
            problems = [Problem(FILE, str(part), lines.cut)] if lines.cut else []
            for line in bad:
                position = line.offset if schema.has_positions else None
                number = line_number(part.path, line.offset) if line.skipped else None
                reason = line.reason if number is None else f"line {number}: {line.reason}"
                where: Any = {"offset": line.offset, "place": position}
                content = shortened(line.line)
                problems.append(Problem(LINE, name, reason, content=content, **where))
    except BrokenContentError as err:
        table, problems = schema.pathless.empty_table(), [Problem(FILE, str(part), str(err))]
        if schema.has_positions:
            table = table.append_column(ROW_POSITION, pa.array([], pa.int64()))
    table = add_path_columns(table, part.path, schema)
    new = [problem for problem in problems if problem.place not in known]
    if new and on_error != "quarantine":
        raise unreadable(part, new[0], on_error)
    return table, problems, share


def add_path_columns(table: pa.Table, path: str, schema: InputSchema) -> pa.Table:
    """Return a file's table with the columns from its path: `folder_fields` and `path_field`."""
    table = fill_folder_values(table, schema.folder_fields, path)
    if schema.path_field not in schema.arrow.names:
        return table
    paths = pa.array([redacted(path)] * len(table), pa.string())
    names = [*schema.arrow.names, *[ROW_POSITION] * schema.has_positions]
    return table.append_column(schema.path_field, paths).select(names)


class RowChoice(Protocol):
    """Rule that selects rows by some of their columns, such as a condition.

    Several threads may call it at once, each with rows of one file.
    """

    @property
    def read_fields(self) -> tuple[str, ...]:
        """Names of the columns that the rule reads."""

    def choose(self, columns: pa.Table) -> np.ndarray:
        """Return a mask of the selected rows, bool (rows,).

        `columns` has the columns in `read_fields`, and maybe others.
        """


def read_chosen(
    part: Part,
    schema: InputSchema,
    on_error: str,
    annotations: AnnotationReader,
    choice: RowChoice,
) -> tuple[pa.Table, list[Problem], int]:
    """Read the rows that `choice` selects from a part without `followers`.

    Returns these rows, the problems, and the number of rows from which `choice` selected.
    `annotations` is the reader of the whole part's annotations, and `on_error` is as in
    `read_table`. If possible, columns that `choice` does not need are read only if it selects rows.
    """
    names = [name for name in schema.arrow.names if name in choice.read_fields]
    reads_files = not {*names} <= {*schema.annotation_fields} or annotations.positions(part) is None
    whole = replace(schema, has_positions=True)
    if part.problem or (reads_files and (part.row_groups is None or on_error == "quarantine")):
        table, problems, _ = read_table(part, whole, on_error, annotations=annotations)
        rows, tables = len(table), [table.filter(pa.array(choice.choose(table)))]
    else:
        deciding = replace(schema.projected(names), has_positions=True)
        table, problems, _ = read_table(part, deciding, on_error, annotations=annotations)
        rows, positions = len(table), table[ROW_POSITION].to_numpy()[choice.choose(table)]
        tables = [pa.schema([*schema.arrow, (ROW_POSITION, pa.int64())]).empty_table()]
        for piece in _narrow(part, positions, schema.storage_options) if len(positions) else ():
            table, bad, _ = read_table(piece, whole, on_error, annotations=annotations)
            is_chosen = pa.array(np.isin(table[ROW_POSITION].to_numpy(), positions))
            tables.append(table.filter(is_chosen))
            described = {problem.place for problem in bad}
            problems = [p for p in problems if p.place not in described] + bad
    names = [*schema.arrow.names, *[ROW_POSITION] * schema.has_positions]
    return pa.concat_tables(tables).select(names), problems, rows


def _narrow(part: Part, positions: np.ndarray, storage_options: dict[str, Any]) -> Iterator[Part]:
    """Yield parts with only those row groups of `part` that contain rows at `positions`.

    JSON lines, and a part with a `share`, are yielded unchanged.
    """
    if part.row_groups is None or part.share is not None:
        yield part
        return
    with open_store(part.path, storage_options).reading(part.file_bytes) as file:
        metadata = pq.read_metadata(file)
    counts = [metadata.row_group(number).num_rows for number in part.row_groups]
    ends = np.cumsum(counts) + (part.rows or (0, 0))[0]
    is_hit = np.isin(np.arange(len(ends)), np.searchsorted(ends, positions, side="right"))
    for is_read, run in itertools.groupby(range(len(ends)), key=is_hit.__getitem__):
        if is_read:
            numbers = [*run]
            first, end = numbers[0], int(ends[numbers[-1]])
            groups = tuple(part.row_groups[number] for number in numbers)
            yield replace(part, row_groups=groups, rows=(int(ends[first]) - counts[first], end))


def read_lines(
    part: Part,
    storage_options: dict[str, Any],
    limit: Limit | None = None,
    max_line_bytes: int = MOST_LINE_BYTES,
) -> Lines:
    """Read the lines that begin in a part, which is a JSON lines file or a byte range of it.

    Lines of more than `max_line_bytes` are only in `long_lines` of the result. `limit` is ignored
    if the part is a byte range. If the part is a share of its file (``part.share``), all lines of
    the file are returned; see `Lines.in_share`. If a compressed file is truncated, the result has
    the lines before the damage, and `cut`. Raises BrokenContentError if the file cannot be decoded.
    """
    codec, ahead_bytes = compression(part.path), None
    if part.length is not None and codec is None:
        # The first read gets the whole range, and the end of the line before it.
        ahead_bytes = LINE_BYTES + (part.length if part.start else 0)
    elif limit is not None:
        ahead_bytes = LINE_BYTES
    store = open_store(part.path, storage_options)
    opened = functools.partial(store.reading, part.file_bytes, ahead_bytes)
    if part.length is not None and codec is None:
        with opened() as file:
            offset, content = read_range(file, part.start, part.length, max_line_bytes)
        if len(content) <= max_line_bytes:
            return Lines(part, offset, content)
        whole = WholeLines(io.BytesIO(content), max_line_bytes, offset)
        return Lines(part, offset, whole.readall(), long_lines=whole.long_lines)

    @contextlib.contextmanager
    def reopen() -> Iterator[Any]:
        with opened() as file, decompressed(file, codec) as stream:
            yield stream

    with opened() as file, decompressed(file, codec) as stream:

        def check(kept_bytes: int) -> None:
            check_unpacked(kept_bytes, file.tell())

        whole = WholeLines(stream, max_line_bytes, reopen=reopen, check=check)
        if part.start or part.length is not None:
            end = math.inf if part.length is None else part.start + part.length
            return Lines(part, *whole.read_range(part.start, end), 1.0, whole.long_lines, whole.cut)
        if limit is not None:
            content, stored_bytes = first_lines(io.BufferedReader(whole), limit, file.tell)
            share = stored_bytes / (part.file_bytes or 1) if stored_bytes else 1.0
        else:
            content, share = whole.readall(), 1.0
    if codec and len(content) >= LARGE_BYTES:
        logger.warning(
            "%s holds more than %d MiB of lines, all of which are in memory at once, "
            "as a compressed file is one part: cut it into several files",
            redacted(part.path),
            LARGE_BYTES >> 20,
        )
    return Lines(part, 0, content, share, whole.long_lines, whole.cut)


def first_lines(
    stream: BinaryIO, limit: Limit, tell: Callable[[], int] = lambda: 0
) -> tuple[bytes, int]:
    """Return the first lines of a stream up to `limit`, and the number of stored bytes they take.

    The number is 0 unless `limit.stored_bytes` ended the reading. `tell` returns the number of
    stored (compressed) bytes that the stream has read.
    """
    lines: list[bytes] = []
    rows, line_bytes, stored_bytes = 0, 0, 0
    while rows < limit.rows and line_bytes < limit.line_bytes and (line := stream.readline()):
        # The stream reads ahead: it reads more only after using up all bytes before.
        if tell() > stored_bytes >= limit.stored_bytes:
            return b"".join(lines), stored_bytes
        stored_bytes = tell()
        lines.append(line)
        rows += bool(line.strip())
        line_bytes += len(line)
    return b"".join(lines), 0


def _read_parquet(part: Part, schema: InputSchema) -> tuple[pa.Table, list[Problem]]:
    columns = schema.pathless
    with open_store(part.path, schema.storage_options).reading(part.file_bytes) as file:
        first, table = _read_row_groups(open_parquet(file), part, columns.names)
        table = fitted(table, columns)
    if schema.has_positions:
        table = table.append_column(ROW_POSITION, pa.array(np.arange(first, first + len(table))))

    def check(start: int, stop: int) -> pa.Table:
        rows = table.slice(start, stop - start)
        rows.validate(full=True)  # pyarrow reads text that is not UTF-8 without an error
        return rows

    good, problems = [table.slice(0, 0)], []
    for row, result in isolate_bad_rows(check, 0, len(table), (pa.ArrowException,)):
        if isinstance(result, Exception):
            position = first + row if schema.has_positions else None
            problems.append(Problem(ROW, str(part), str(result), row=row, place=position))
        else:
            good.append(result)
    return pa.concat_tables(good), problems


def _read_row_groups(file: pq.ParquetFile, part: Part, names: list[str]) -> tuple[int, pa.Table]:
    """Read columns of a part; return the number of its first row in the file, and a table."""
    first, groups = part.rows[0] if part.rows else 0, list(part.row_groups or ())
    if part.share is None:
        return first, file.read_row_groups(groups, columns=names)
    # Rows behind the share are not decoded.
    start, stop = part.bounds(sum(file.metadata.row_group(n).num_rows for n in groups))
    tables, end = [], 0
    for batch in file.iter_batches(max(1, stop - start), groups, columns=names):
        begin, end = end, end + len(batch)
        if end > start:
            rows = pa.Table.from_batches([batch])
            tables.append(rows.slice(max(0, start - begin), stop - max(begin, start)))
        if end >= stop:
            break
    return first + start, pa.concat_tables(tables)


def first_of_parquet(file: InputFile, storage_options: dict[str, Any], rows: int) -> pa.Table:
    """Return the first `rows` rows of a Parquet file, or all if it has fewer."""
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
    """Return the error for a problem of a part, with the advice of `CURES` for `on_error`."""
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
    """Return the line number, from 1, at an offset after decompression; None for remote files."""
    store = open_store(path)
    if not store.is_near:
        return None
    number, left = 1, offset
    with store.reading() as file, decompressed(file, compression(path)) as stream:
        while left and (piece := stream.read(min(left, COUNTED_BYTES))):
            number, left = number + piece.count(b"\n"), left - len(piece)
    return number
