"""Parts of input files: how they are found, and tables of them: whole, or up to a limit."""

from __future__ import annotations

import functools
import io
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from gpuclassify.hub.dataset_files import LINE_BYTES
from gpuclassify.jobs.arrow_types import cast, changed, changed_schema, restored
from gpuclassify.jobs.files import (
    BrokenContentError,
    BrokenInputError,
    InputFile,
    UnreadableInputError,
    compression,
    decompressed,
    delivers_ranges,
    local_problem,
    reading,
    redacted,
)
from gpuclassify.jobs.input.jsonl import exact_integers, line_schemas, parse_good, read_range
from gpuclassify.jobs.input.schema import (
    common_schema,
    declared_types,
    fits,
    folder_schema,
    json_schema,
    missing_column,
    named_type,
    project,
    to_pandas,
    with_folder_values,
    with_types,
)
from gpuclassify.jobs.quarantine import FILE, LINE, ROW, Problem, isolate_bad_rows, shortened
from gpuclassify.jobs.storage import FILES_AT_A_TIME

logger = logging.getLogger(__name__)

# Some 200 parts show progress and even out workers; parts this small or large lose speed.
PARTS_AIMED_AT = 200
SMALLEST_PART_BYTES, LARGEST_PART_BYTES = 256 << 10, 64 << 20
COLUMN_BYTES = 1 << 10  # of a part, at least: each column costs time in each part
FOOTER_BYTES = 64 << 10  # what pyarrow reads of the end at first
COUNTED_BYTES = 1 << 20  # at a time, where lines are counted
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
            share, name = lines.share, redacted(part.path)
            table, bad = parse_good(lines.content, lines.offset, schema.arrow, schema.is_projected)
            table = with_folder_values(table, schema.folder_fields, part.path)
            problems = [
                Problem(LINE, name, line.reason, offset=line.offset, content=shortened(line.line))
                for line in bad
            ]
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


def unreadable(part: Part, problem: Problem, on_error: str = "raise") -> BrokenInputError:
    """The error that names the first problem of a part, and what to do about it."""
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
    """The number of the line that begins at this byte of a (decompressed) file, from 1.

    None for files elsewhere, of which all up to there would have to be fetched.
    """
    if "://" in path.removeprefix("file://") or "::" in path:
        return None
    number, left = 1, offset
    with reading(path, {}) as file, decompressed(file, compression(path)) as stream:
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


def read_footers(files: Sequence[InputFile], storage_options: dict[str, Any]) -> list[Footer]:
    """The footers of the files, several read at a time: stores answer slowly."""
    # Equal schemas are kept once: there may be very many files.
    known: dict[pa.Schema, pa.Schema] = {}

    def read(file: InputFile) -> Footer:
        if problem := local_problem(file.path):
            return Footer(pa.schema([]), problem=problem)
        try:
            with reading(file.path, storage_options, file.size_bytes, FOOTER_BYTES) as opened:
                metadata = pq.read_metadata(opened)
                held = metadata.schema.to_arrow_schema().remove_metadata()
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
    """Finds the parts of files of one format, and their columns.

    Settings as of `gpuclassify.jobs.input.readers.FileReader` and its `find_parts`; `options` are
    for storage.
    """

    files: Sequence[InputFile]
    fields: Sequence[str] | None
    part_bytes: int | None
    options: dict[str, Any]
    on_error: str
    needed: Collection[str]

    def parquet(self) -> InputParts:
        """Runs of row groups, as the footers of the files list them."""
        footers = read_footers(self.files, self.options)
        ends = list(zip(self.files, footers, strict=True))
        held = common_schema(Counter(footer.schema for footer in footers))
        if not held.names:
            broken = [Part(file.path, problem=footer.problem) for file, footer in ends]
            self._check(_problems(broken), is_all=True)
        schema = self._schema(held)
        part_bytes = self._bytes_of_part(schema)
        parts: list[Part] = []
        for file, footer in ends:
            problem = footer.problem or _misfit(file, footer, schema, self.needed)
            if problem is not None:
                parts.append(Part(file.path, problem=problem))
                continue
            parts += [
                Part(file.path, row_groups=run, file_bytes=file.size_bytes)
                for run in _group_runs(footer, part_bytes)
            ]
        self._check(_problems(parts))
        return InputParts(tuple(parts), schema, tuple(self.files), part_bytes)

    def json_lines(
        self, types: Mapping[str, str], most_samples: int, sample_bytes: int
    ) -> InputParts:
        """Byte ranges, with columns from samples of the lines."""
        pieces = self._byte_ranges(max(sample_bytes, -(-self._total_bytes // most_samples)))
        problems = _problems(pieces)
        self._check(problems)
        pieces = [piece for piece in pieces if piece.problem is None and piece.length != 0]
        samples: list[Lines] = []
        for found in self._samples(pieces, most_samples, sample_bytes):
            if isinstance(found, Lines):
                samples.append(found)
            else:
                problems.append(found)
                self._check(problems)
        held = sampled_schema([sample.content for sample in samples])
        if not held.names:
            self._check([*_bad_lines(samples, held, False), *problems], is_all=True)
        schema = self._schema(held, types)
        for sample in samples:
            # What its lines hold is only looked up if folders give something that they might not.
            if missing_column(sample.part.path, (), schema.file_fields):
                names = sampled_schema([sample.content]).names
                reason = missing_column(sample.part.path, names, schema.file_fields)
                if reason is not None:
                    raise UnreadableInputError(f"{sample.part} does not fit other files: {reason}")
        self._check(_bad_lines(samples, schema.arrow, schema.is_projected))
        part_bytes = self._bytes_of_part(schema)
        parts = tuple(self._byte_ranges(part_bytes))
        return InputParts(parts, schema, tuple(self.files), part_bytes)

    def _samples(
        self, pieces: Sequence[Part], most: int, sample_bytes: int
    ) -> Iterator[Lines | tuple[Part, Problem]]:
        """Up to `most` samples that hold something, or why a piece cannot be read.

        They are from pieces' beginnings, middles and ends in turn.
        """
        last, steps = len(pieces) - 1, max(1, most - 1)
        spread = [round(step * last / steps) for step in range(most)] if pieces else []
        count = 0
        for number in dict.fromkeys([*spread, *range(len(pieces))]):  # all others in case of blanks
            piece = pieces[number]
            limit = Limit(line_bytes=sample_bytes) if piece.length is None else None
            if piece.length is not None:
                start = piece.start + max(0, piece.length - sample_bytes) * (count % 3) // 2
                piece = replace(piece, start=start, length=sample_bytes)
            try:
                lines = read_lines(piece, self.options, limit)
            except BrokenContentError as err:
                yield pieces[number], Problem(FILE, str(pieces[number]), str(err))
                continue
            if lines.content.strip():
                yield lines
                count += 1
            if count == most:
                return

    @property
    def _total_bytes(self) -> int:
        return sum(file.size_bytes or 0 for file in self.files)

    def _bytes_of_part(self, schema: InputSchema) -> int:
        """Bytes of a part: what is asked for, or what divides the files evenly."""
        least = max(SMALLEST_PART_BYTES, COLUMN_BYTES * len(schema.arrow))
        aim = max(self._total_bytes // PARTS_AIMED_AT, least)
        return self.part_bytes or min(aim, LARGEST_PART_BYTES)

    @functools.cached_property
    def _whole(self) -> set[str]:
        """Files that cannot be read in pieces."""
        return {
            file.path
            for file in self.files
            if compression(file.path)
            or not delivers_ranges(file.path, self.options, file.size_bytes)
        }

    def _byte_ranges(self, part_bytes: int) -> list[Part]:
        parts: list[Part] = []
        for file in self.files:
            path, end = file.path, file.size_bytes
            if problem := local_problem(path):
                parts.append(Part(path, problem=problem, file_bytes=end))
            elif end is None or path in self._whole:
                parts.append(Part(path, file_bytes=end))
            else:
                parts += [
                    Part(path, start=at, length=min(part_bytes, end - at), file_bytes=end)
                    for at in range(0, max(1, end), part_bytes)
                ]
        return parts

    def _schema(self, held: pa.Schema, types: Mapping[str, str] | None = None) -> InputSchema:
        """The columns of the files and of their folders, or those of them that are asked for."""
        paths = [file.path for file in self.files]
        declared = declared_types(paths, self.options)
        given = [
            field.with_type(named_type(field.name, declared.get(field.name, str(field.type))))
            for field in folder_schema(paths)
            if field.name not in held.names
        ]
        schema = with_types(pa.schema([*held, *given]), types or {})
        if self.fields is not None:
            schema = project(schema, self.fields)
        folder_fields = tuple(field.name for field in given if field.name in schema.names)
        return InputSchema(schema, self.options, self.fields is not None, folder_fields)

    def _check(self, problems: Iterable[tuple[Part, Problem]], is_all: bool = False) -> None:
        """Raise UnreadableInputError for the first problem, if the job cannot go on."""
        if self.on_error == "quarantine" and not is_all:
            return
        for part, problem in problems:
            if self.on_error != "quarantine":
                raise unreadable(part, problem, self.on_error)
            raise BrokenInputError(f"nothing of the input can be read; {part}: {problem.reason}")


def sampled_schema(samples: Sequence[bytes]) -> pa.Schema:
    """The columns of all lines of JSON, as far as samples show them."""
    counts: Counter[pa.Schema] = Counter()
    for sample in samples:
        for found, count in line_schemas(sample).items():
            counts[json_schema(found)] += count
    return exact_integers(common_schema(counts), samples)


def _bad_lines(
    samples: Iterable[Lines], schema: pa.Schema, is_projected: bool
) -> Iterator[tuple[Part, Problem]]:
    for sample in samples:
        for line in parse_good(sample.content, sample.offset, schema, is_projected)[1]:
            yield sample.part, Problem(LINE, str(sample.part), line.reason, line.offset)


def _problems(parts: Iterable[Part]) -> list[tuple[Part, Problem]]:
    return [(p, Problem(FILE, str(p), p.problem)) for p in parts if p.problem is not None]


def _group_runs(footer: Footer, part_bytes: int) -> list[tuple[int, ...]]:
    """Numbers of neighbouring row groups that reach `part_bytes` together."""
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
    """Why a Parquet file cannot be read with these columns."""
    schema = common.arrow
    known = set(schema.names)
    names = [name for name in footer.schema.names if name in known]
    double = [name for name, count in Counter(names).items() if count > 1]
    if double:
        return (
            f"several columns are called {', '.join(map(repr, double))}: rename them, or read "
            "others alone (fields=)"
        )
    reason = missing_column(file.path, names, common.file_fields)
    if reason is not None:
        return reason
    absent = [name for name in needed if name in common.file_fields and name not in names]
    if absent:
        return f"it has no column {absent[0]!r}, which is read and which other files have"
    wrong = [
        f"{found.name} is {found.type}, and {schema.field(found.name).type} in most"
        for found in footer.schema
        if found.name in known and not fits(found.type, schema.field(found.name).type)
    ]
    return f"the inputs' columns do not fit together: {'; '.join(wrong)}" if wrong else None
