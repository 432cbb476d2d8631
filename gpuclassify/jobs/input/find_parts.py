"""From names of files to the parts of a job, and the columns that all parts have in common."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gpuclassify.jobs.arrow_types import changed_schema, restored
from gpuclassify.jobs.files import (
    BrokenContentError,
    InputFile,
    UnreadableInputError,
    compression,
    delivers_ranges,
    local_problem,
    reading,
)
from gpuclassify.jobs.input.jsonl import exact_integers, line_schemas, parse_good
from gpuclassify.jobs.input.parts import (
    InputParts,
    InputSchema,
    Limit,
    Lines,
    Part,
    read_lines,
    unreadable,
)
from gpuclassify.jobs.input.schema import (
    common_schema,
    declared_types,
    fits,
    folder_schema,
    json_schema,
    missing_column,
    named_type,
    project,
    with_types,
)
from gpuclassify.jobs.quarantine import FILE, LINE, Problem

# Some 200 parts show progress and even out workers; parts this small or large lose speed.
PARTS_AIMED_AT = 200
SMALLEST_PART_BYTES, LARGEST_PART_BYTES = 256 << 10, 64 << 20
COLUMN_BYTES = 1 << 10  # of a part, at least: each column costs time in each part
FOOTERS_AT_A_TIME = 16
FOOTER_BYTES = 64 << 10  # what pyarrow reads of the end at first


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

    with ThreadPoolExecutor(FOOTERS_AT_A_TIME) as pool:
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
            raise UnreadableInputError(
                f"nothing of the input can be read; {part}: {problem.reason}"
            )


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
