"""From names of files to the parts of a job, and the columns that all parts have in common."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from gpuclassify.jobs.files import (
    InputFile,
    UnreadableInputError,
    compression,
    delivers_ranges,
    local_problem,
)
from gpuclassify.jobs.input.parquet import Footer, group_runs, read_footers
from gpuclassify.jobs.input.parts import InputParts, InputSchema, Part, unreadable
from gpuclassify.jobs.input.samples import (
    SampledLines,
    read_samples,
    sample_problems,
    sampled_schema,
)
from gpuclassify.jobs.input.schema import (
    common_schema,
    declared_types,
    fits,
    folder_schema,
    missing_column,
    named_type,
    project,
    with_types,
)
from gpuclassify.jobs.quarantine import FILE, Problem

# Some 200 parts show progress and even out workers; parts this small or large lose speed.
PARTS_AIMED_AT = 200
SMALLEST_PART_BYTES, LARGEST_PART_BYTES = 256 << 10, 64 << 20
COLUMN_BYTES = 1 << 10  # of a part, at least: each column costs time in each part


@dataclass(frozen=True)
class PartFinder:
    """Finds the parts of files of one format, and their columns.

    Attributes
    ----------
    files : sequence of InputFile
    fields, part_bytes, options
        As of `gpuclassify.jobs.input.readers.FileReader`; `options` are its storage options.
    on_error, needed
        As of `gpuclassify.jobs.input.readers.FileReader.find_parts`.
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
                for run in group_runs(footer, part_bytes)
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
        samples: list[SampledLines] = []
        for found in read_samples(pieces, most_samples, sample_bytes, self.options):
            if isinstance(found, SampledLines):
                samples.append(found)
            else:
                problems.append(found)
                self._check(problems)
        held = sampled_schema(samples)
        if not held.names:
            self._check([*sample_problems(samples, held, False), *problems], is_all=True)
        schema = self._schema(held, types)
        for sample in samples:
            # What its lines hold is only looked up if folders give something that they might not.
            if missing_column(sample.piece.path, (), schema.file_fields):
                own = sampled_schema([sample]).names
                reason = missing_column(sample.piece.path, own, schema.file_fields)
                if reason is not None:
                    raise UnreadableInputError(f"{sample.piece} does not fit other files: {reason}")
        self._check(sample_problems(samples, schema.arrow, schema.is_projected))
        part_bytes = self._bytes_of_part(schema)
        parts = tuple(self._byte_ranges(part_bytes))
        return InputParts(parts, schema, tuple(self.files), part_bytes)

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


def _problems(parts: Iterable[Part]) -> list[tuple[Part, Problem]]:
    return [(p, Problem(FILE, str(p), p.problem)) for p in parts if p.problem is not None]


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
