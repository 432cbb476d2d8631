"""Planning an input: its files, the columns that they have in common, and its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from gpuclassify.jobs.files import (
    PARQUET,
    BrokenContentError,
    InputFile,
    UnreadableInputError,
    compression,
    file_format,
    find_files,
    is_denied,
    reading,
)
from gpuclassify.jobs.hub.files import LINE_BYTES, is_pinned
from gpuclassify.jobs.jsonl import exact_integers, line_schemas, parse_good, read_range
from gpuclassify.jobs.parquet import Footer, group_runs, read_footers
from gpuclassify.jobs.parts import Form, Part, Source, unreadable
from gpuclassify.jobs.quarantine import LINE, Problem
from gpuclassify.jobs.schema import common_schema, fits, json_schema, project

SAMPLE_BYTES = 1 << 20
SAMPLE_FILES = 16
# Some 200 parts show progress and even out workers; parts this small or large lose speed.
PARTS_AIMED_AT = 200
SMALLEST_PART_BYTES, LARGEST_PART_BYTES = 256 << 10, 64 << 20


def plan_source(
    inputs: Iterable[str],
    *,
    fields: Sequence[str] | None = None,
    part_bytes: int | None = None,
    storage_options: dict[str, Any] | None = None,
    on_error: str = "raise",
) -> Source:
    """What `gpuclassify.jobs.readers.read_files` reads, with the same parameters and errors.

    With ``on_error="quarantine"``, files that cannot be read become parts that say so.
    """
    options = storage_options or {}
    files = find_files(inputs, options)
    size = part_bytes or _default_part_bytes(files)
    plan = _plan_parquet if file_format(files[0].path) == PARQUET else _plan_json
    schema, parts = plan(files, fields, size, options, on_error)
    form = Form(schema, options, is_projected=fields is not None)
    return Source(tuple(parts), form, tuple(files), size)


def _with_sizes(parts: Sequence[Part], files: Sequence[InputFile]) -> list[Part]:
    """The parts, those of the Hub's files with the sizes that listing has told."""
    sizes = {file.path: file.size_bytes for file in files if is_pinned(file.path)}
    return [
        replace(part, file_bytes=sizes[part.path]) if part.path in sizes else part for part in parts
    ]


def _default_part_bytes(files: Sequence[InputFile]) -> int:
    aim = sum(file.size_bytes or 0 for file in files) // PARTS_AIMED_AT
    return min(max(aim, SMALLEST_PART_BYTES), LARGEST_PART_BYTES)


def _plan_parquet(
    files: Sequence[InputFile],
    fields: Sequence[str] | None,
    part_bytes: int,
    storage_options: dict[str, Any],
    on_error: str,
) -> tuple[pa.Schema, list[Part]]:
    footers = read_footers(files, storage_options)
    schema = common_schema(Counter(footer.schema for footer in footers))
    if fields is not None:
        schema = project(schema, fields)
    parts: list[Part] = []
    for file, footer in zip(files, footers, strict=True):
        problem = _footer_problem(footer, schema)
        if problem is None:
            parts += [Part(file.path, row_groups=run) for run in group_runs(footer, part_bytes)]
            continue
        parts.append(Part(file.path, problem=problem))
        if on_error == "raise":
            raise UnreadableInputError(f"{parts[-1]} cannot be read: {problem}")
    return schema, _with_sizes(parts, files)


def _footer_problem(footer: Footer, schema: pa.Schema) -> str | None:
    if footer.problem is not None:
        return footer.problem
    if fits(footer.schema, schema):
        return None
    wrong = [
        f"{found.name} is {found.type}, and {schema.field(found.name).type} in most"
        for found in footer.schema
        if not fits(pa.schema([found]), schema)
    ]
    return f"the inputs' columns do not fit together: {'; '.join(wrong)}"


def _plan_json(
    files: Sequence[InputFile],
    fields: Sequence[str] | None,
    part_bytes: int,
    storage_options: dict[str, Any],
    on_error: str,
) -> tuple[pa.Schema, list[Part]]:
    parts: list[Part] = []
    for file in files:
        if is_denied(file.path):
            parts.append(Part(file.path, problem="permission denied"))
        elif compression(file.path) or file.size_bytes is None:
            parts.append(Part(file.path))
        else:
            end = file.size_bytes
            parts += [
                Part(file.path, start=start, length=min(part_bytes, end - start))
                for start in range(0, max(1, end), part_bytes)
            ]
    if on_error == "raise":
        for part in parts:
            if part.problem is not None:
                raise UnreadableInputError(f"{part} cannot be read: {part.problem}")
    parts = _with_sizes(parts, files)
    return _sampled_schema(parts, fields, storage_options, on_error), parts


def _sampled_schema(
    parts: Sequence[Part],
    fields: Sequence[str] | None,
    storage_options: dict[str, Any],
    on_error: str,
) -> pa.Schema:
    """The columns of all parts, from the beginnings of the first files that have lines."""
    samples = dict(_samples(parts, storage_options, on_error))
    counts: Counter[pa.Schema] = Counter()
    for lines in samples.values():
        for found, count in line_schemas(lines).items():
            counts[json_schema(found)] += count
    schema = common_schema(counts)
    if fields is not None:
        schema = project(schema, fields)
    schema = exact_integers(schema, samples.values())
    if on_error == "raise":
        for part, lines in samples.items():
            _, bad = parse_good(lines, 0, schema, is_projected=fields is not None)
            if bad:
                raise unreadable(part, Problem(LINE, str(part), bad[0].reason, bad[0].offset))
    return schema


def _samples(
    parts: Sequence[Part], storage_options: dict[str, Any], on_error: str
) -> Iterator[tuple[Part, bytes]]:
    count = 0
    for part in parts:
        if part.start or part.problem is not None:
            continue
        try:
            lines = _sample(part, storage_options)
        except BrokenContentError as err:
            if on_error == "raise":
                raise UnreadableInputError(f"{part} cannot be read: {err}") from err
            continue
        if lines.strip():
            yield part, lines
            count += 1
        if count == SAMPLE_FILES:
            return


def _sample(part: Part, storage_options: dict[str, Any]) -> bytes:
    """Whole lines from a file's beginning, and one at least."""
    with reading(part.path, storage_options, part.file_bytes, LINE_BYTES) as file:
        codec = compression(part.path)
        if codec is None:
            return read_range(file, 0, SAMPLE_BYTES)[1]
        with pa.input_stream(file, compression=codec) as stream:
            lines = stream.read(SAMPLE_BYTES)
            while b"\n" not in lines and (more := stream.read(SAMPLE_BYTES)):
                lines += more
    return lines[: lines.rfind(b"\n") + 1] or lines
