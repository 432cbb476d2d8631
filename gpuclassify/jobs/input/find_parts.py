"""Planning an input: its files, the columns that they have in common, and its parts."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from gpuclassify.hub.dataset_files import is_pinned, with_token
from gpuclassify.jobs.files import (
    PARQUET,
    InputFile,
    UnreadableInputError,
    compression,
    file_format,
    find_files,
    is_denied,
    redacted,
)
from gpuclassify.jobs.input.folders import doubtful, with_folders
from gpuclassify.jobs.input.parquet import Footer, group_runs, read_footers
from gpuclassify.jobs.input.parts import Form, Part, Source, unreadable
from gpuclassify.jobs.input.samples import (
    Sample,
    check_folders,
    piece_bytes,
    read_samples,
    sample_problems,
    sampled_schema,
)
from gpuclassify.jobs.input.schema import common_schema, fits, project, with_types
from gpuclassify.jobs.quarantine import FILE, Problem

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
    types: Mapping[str, str] | None = None,
) -> Source:
    """What `gpuclassify.jobs.input.readers.read_files` reads, with the same parameters and errors.

    With ``on_error="quarantine"``, files that cannot be read become parts that say so. `types` are
    those of `gpuclassify.jobs.input.readers.JsonlReader`.
    """
    options = storage_options or {}
    inputs = list(inputs)
    _check_marks(inputs, options)
    files = find_files(inputs, options)
    _check_marks((file.path for file in files if "::" in file.path), options)
    size = part_bytes or _default_part_bytes(files)
    is_parquet = file_format(files[0].path) == PARQUET
    plan = _plan_parquet if is_parquet else functools.partial(_plan_json, types=types or {})
    schema, parts = plan(files, fields, size, options, on_error)
    form = Form(schema, options, is_projected=fields is not None)
    return Source(tuple(parts), form, tuple(files), size)


def _check_marks(names: Iterable[str], storage_options: dict[str, Any]) -> None:
    """Refuse names that fsspec takes for URLs with protocols that there are not."""
    import fsspec

    for name in names:
        head, is_chain, _ = name.partition("::")
        try:
            if is_chain and "://" not in head:
                fsspec.get_filesystem_class(head)
            fsspec.core.url_to_fs(name, **with_token(name, storage_options))
        except ValueError as err:
            if "Protocol not known" not in str(err):
                raise
            raise UnreadableInputError(
                f'{redacted(name)} is taken for a URL, whose marks are "://" and "::", and there '
                "is no such protocol: rename the file or folder, or correct the URL"
            ) from err


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
    if not schema.names:
        ends = zip(files, footers, strict=True)
        broken = _problems(Part(file.path, problem=end.problem) for file, end in ends)
        _check(broken, on_error, is_all=True)
    schema = _columns(schema, files, fields)
    parts: list[Part] = []
    for file, footer in zip(files, footers, strict=True):
        problem = _footer_problem(file, footer, schema)
        if problem is None:
            parts += [Part(file.path, row_groups=run) for run in group_runs(footer, part_bytes)]
        else:
            parts.append(Part(file.path, problem=problem))
    _check(_problems(parts), on_error)
    return schema, _with_sizes(parts, files)


def _columns(
    schema: pa.Schema,
    files: Sequence[InputFile],
    fields: Sequence[str] | None,
    types: Mapping[str, str] | None = None,
) -> pa.Schema:
    """The columns of the files and of their folders, or those of them that are asked for."""
    schema = with_types(with_folders(schema, (file.path for file in files)), types or {})
    return schema if fields is None else project(schema, fields)


def _problems(parts: Iterable[Part]) -> list[tuple[Part, Problem]]:
    return [(p, Problem(FILE, str(p), p.problem)) for p in parts if p.problem is not None]


def _check(problems: Iterable[tuple[Part, Problem]], on_error: str, is_all: bool = False) -> None:
    """Raise UnreadableInputError for the first problem, if the job cannot go on."""
    if on_error != "raise" and not is_all:
        return
    for part, problem in problems:
        if on_error == "raise":
            raise unreadable(part, problem)
        raise UnreadableInputError(f"nothing of the input can be read; {part}: {problem.reason}")


def _footer_problem(file: InputFile, footer: Footer, schema: pa.Schema) -> str | None:
    if footer.problem is not None:
        return footer.problem
    names = [name for name in footer.schema.names if name in schema.names]
    double = [name for name, count in Counter(names).items() if count > 1]
    if double:
        return (
            f"several columns are called {', '.join(map(repr, double))}: rename them, or read "
            "others alone (fields=, --field)"
        )
    reason = doubtful(file.path, names, schema)
    if reason is not None:
        return reason
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
    types: Mapping[str, str],
) -> tuple[pa.Schema, list[Part]]:
    parts = _json_parts(files, part_bytes)
    problems = _problems(parts)
    _check(problems, on_error)
    total_bytes = sum(file.size_bytes or 0 for file in files)
    pieces = _json_parts(files, piece_bytes(total_bytes))
    pieces = [piece for piece in pieces if piece.problem is None and piece.length != 0]
    samples: list[Sample] = []
    for found in read_samples(pieces, storage_options):
        if isinstance(found, Sample):
            samples.append(found)
        else:
            problems.append(found)
            _check(problems, on_error)
    schema = sampled_schema(samples)
    if not schema.names:
        _check([*sample_problems(samples, schema, False), *problems], on_error, is_all=True)
    schema = _columns(schema, files, fields, types)
    check_folders(samples, schema)
    _check(sample_problems(samples, schema, is_projected=fields is not None), on_error)
    return schema, parts


def _json_parts(files: Sequence[InputFile], part_bytes: int) -> list[Part]:
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
    return _with_sizes(parts, files)
