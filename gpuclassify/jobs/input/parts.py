"""Parts of input files, and tables of them: whole, or as far as a limit goes."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from gpuclassify.hub.dataset_files import LINE_BYTES
from gpuclassify.jobs.arrow_types import cast, changed, restored
from gpuclassify.jobs.files import (
    BrokenContentError,
    InputFile,
    UnreadableInputError,
    compression,
    decompressed,
    reading,
    redacted,
)
from gpuclassify.jobs.input.jsonl import parse_good, read_range
from gpuclassify.jobs.input.schema import to_pandas, with_folder_values
from gpuclassify.jobs.quarantine import FILE, LINE, ROW, Problem, isolate_bad_rows, shortened

logger = logging.getLogger(__name__)

LARGE_BYTES = 1 << 30  # of a part; a worker takes some three times as much for it
# What to do about what cannot be read, by the `on_error` that raises it.
CURES = {
    "raise": 'To go on without it: on_error="quarantine".',
    "whole": "An earlier corpus is read whole, whatever on_error= says: mend the file, or leave "
    "it out of against=.",
}


@dataclass(frozen=True)
class Part:
    """A piece of one file: row groups of Parquet, or the lines that begin in a range of bytes."""

    path: str  # or URL
    row_groups: tuple[int, ...] | None = None
    start: int = 0
    length: int | None = None  # None for a whole file
    problem: str | None = None  # why the file cannot be read, as far as it is known beforehand
    file_bytes: int | None = None  # which saves asking for it

    def __repr__(self) -> str:  # schedulers log the arguments of tasks that fail
        return f"Part({self})"

    def __str__(self) -> str:
        name = redacted(self.path)
        if self.row_groups:
            return f"{name}, row groups {self.row_groups[0]} to {self.row_groups[-1]}"
        return name if self.length is None else f"{name}, from byte {self.start}"


@dataclass(frozen=True)
class InputSchema:
    """What all parts of an input have in common."""

    arrow: pa.Schema  # columns of every part
    storage_options: dict[str, Any] = field(repr=False)  # for fsspec
    is_projected: bool  # whether columns beside those of `arrow` are left out on purpose
    folder_fields: tuple[str, ...] = ()  # that names of folders give, and no file holds

    @property
    def file_fields(self) -> list[str]:
        """Those of the columns that some file holds."""
        return [name for name in self.arrow.names if name not in self.folder_fields]

    def projected(self, columns: Sequence[str]) -> InputSchema:
        """Of some of the columns only."""
        return replace(
            self,
            arrow=pa.schema([self.arrow.field(name) for name in columns]),
            is_projected=True,
            folder_fields=tuple(name for name in self.folder_fields if name in columns),
        )

    def meta(self) -> pd.DataFrame:
        """The empty frame with the dtypes of every part."""
        return to_pandas(self.arrow.empty_table())


@dataclass(frozen=True)
class InputParts:
    """The parts of an input, what they have in common, and the files that they are from."""

    parts: tuple[Part, ...]
    schema: InputSchema
    files: tuple[InputFile, ...]
    part_bytes: int


@dataclass(frozen=True)
class Limit:
    """How much of a part to read from its beginning: whichever ends first."""

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


def read_part(part: Part, schema: InputSchema) -> pd.DataFrame:
    """One part as a pandas frame with the dtypes of `schema`; else an UnreadableInputError.

    Columns that this file lacks are null. Fields that the schema lacks are left out if it is a
    projection, and refused if it stands for all columns, so that no data is lost unseen.
    """
    return to_pandas(read_table(part, schema)[0])


def read_table(
    part: Part, schema: InputSchema, on_error: str = "raise", limit: Limit | None = None
) -> tuple[pa.Table, list[Problem], float]:
    """The rows of one part that can be read, what cannot, and which share of the part that is.

    What cannot be read raises UnreadableInputError, unless `on_error` is "quarantine"; else it is
    one of `CURES`.
    """
    share = 1.0
    try:
        if part.problem is not None:
            raise BrokenContentError(part.problem)
        if part.row_groups is not None:
            table, problems = _read_parquet(part, schema)
        else:
            lines = read_lines(part, schema.storage_options, limit)
            table, problems = _parse(lines, schema)
            share = lines.share
    except BrokenContentError as err:
        table, problems = schema.arrow.empty_table(), [Problem(FILE, str(part), str(err))]
    if problems and on_error != "quarantine":
        raise unreadable(part, problems[0], on_error)
    return table, problems, share


def read_lines(part: Part, storage_options: dict[str, Any], limit: Limit | None = None) -> Lines:
    """The lines of a part; with a limit those at its beginning, if it is a whole file."""
    codec, ahead_bytes = compression(part.path), None
    if part.length is not None:  # at first all lines are asked for, or the end of the line before
        ahead_bytes = LINE_BYTES + (part.length if part.start else 0)
    elif limit is not None:
        ahead_bytes = LINE_BYTES
    with reading(part.path, storage_options, part.file_bytes, ahead_bytes) as file:
        if part.length is not None or (codec is None and limit is None):
            return Lines(part, *read_range(file, part.start, part.length))
        with decompressed(file, codec) as stream:
            if limit is not None:
                content, place = first_lines(io.BufferedReader(stream), limit, file.tell)
                return Lines(part, 0, content, place / (part.file_bytes or 1) if place else 1.0)
            content = stream.read(LARGE_BYTES)
            if len(content) == LARGE_BYTES:
                logger.warning(
                    "%s holds more than %d MiB of lines, all of which are in memory at once, "
                    "as a compressed file is one part: cut it into several files",
                    redacted(part.path),
                    LARGE_BYTES >> 20,
                )
                content += stream.read()
            return Lines(part, 0, content)


def first_lines(
    stream: BinaryIO, limit: Limit, tell: Callable[[], int] = lambda: 0
) -> tuple[bytes, int]:
    """The first lines, and by which stored byte a limit of these has ended them, or 0.

    `tell` says how many bytes of the compressed file the stream has read.
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


def _parse(lines: Lines, schema: InputSchema) -> tuple[pa.Table, list[Problem]]:
    table, bad = parse_good(lines.content, lines.offset, schema.arrow, schema.is_projected)
    name = redacted(lines.part.path)
    return with_folder_values(table, schema.folder_fields, lines.part.path), [
        Problem(LINE, name, line.reason, offset=line.offset, content=shortened(line.line))
        for line in bad
    ]


def open_parquet(file: Any) -> pq.ParquetFile:
    """A Parquet file whose pages are compared with their checksums, where it has some.

    That costs no time that can be measured. pyarrow and Spark write checksums if they are told to.
    """
    return pq.ParquetFile(file, page_checksum_verification=True)


def _read_parquet(part: Part, schema: InputSchema) -> tuple[pa.Table, list[Problem]]:
    """Row groups with the columns of `schema`; those that the file lacks are null."""
    names = schema.arrow.names
    with reading(part.path, schema.storage_options, part.file_bytes) as file:
        table = open_parquet(file).read_row_groups(list(part.row_groups or ()), columns=names)
        held = {*table.column_names}
        absent = [name for name in names if name not in held]
        nulls = [pa.nulls(len(table), schema.arrow.field(name).type) for name in absent]
        table = pa.table([*table.columns, *nulls], [*table.column_names, *absent])
        table = cast(table.select(names), schema.arrow)
        table = with_folder_values(table, schema.folder_fields, part.path)

    def check(start: int, stop: int) -> pa.Table:
        rows = table.slice(start, stop - start)
        rows.validate(full=True)  # finds text that is not UTF-8, which reading lets pass
        return rows

    good, problems = [table.slice(0, 0)], []
    for row, found in isolate_bad_rows(check, 0, len(table), (pa.ArrowException,)):
        if isinstance(found, Exception):
            problems.append(Problem(ROW, str(part), str(found), row=row))
        else:
            good.append(found)
    return pa.concat_tables(good), problems


def first_of_parquet(file: InputFile, storage_options: dict[str, Any], rows: int) -> pa.Table:
    """The first rows of a Parquet file, without the rest of their row group."""
    batches: list[pa.RecordBatch] = []
    with reading(file.path, storage_options, file.size_bytes, LINE_BYTES) as opened:
        parquet = open_parquet(opened)
        for batch in parquet.iter_batches(batch_size=rows):
            batches.append(batch)
            if sum(map(len, batches)) >= rows:
                break
        table = pa.Table.from_batches(batches, parquet.schema_arrow)
    return changed(table.slice(0, rows), restored)


def unreadable(part: Part, problem: Problem, on_error: str = "raise") -> UnreadableInputError:
    """The error that names the first problem of a part, and what to do about it."""
    where = str(part)
    if problem.offset is not None:
        where = f"{redacted(part.path)}, from byte {problem.offset}"
    elif problem.row is not None:
        where = f"{part}, row {problem.row}"
    return UnreadableInputError(
        f"{where} cannot be read: {problem.reason.rstrip('.')}. {CURES[on_error]}"
    )
