"""Parts of input files, and tables of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
import pyarrow as pa

from gpuclassify.hub.dataset_files import LINE_BYTES
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
from gpuclassify.jobs.input.parquet import good_rows, read_groups
from gpuclassify.jobs.input.schema import to_pandas, with_folder_values
from gpuclassify.jobs.quarantine import FILE, LINE, ROW, Problem, shortened

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
    """A piece of one file.

    Attributes
    ----------
    path : str
        Path or URL.
    row_groups : tuple of int, optional
        For Parquet.
    start, length : int, optional
        Byte range of a JSONL file; lines that begin in it belong to it. None for whole files.
    problem : str, optional
        Why the file cannot be read, as far as it is known beforehand.
    file_bytes : int, optional
        Size of the file, which saves asking for it.
    """

    path: str
    row_groups: tuple[int, ...] | None = None
    start: int = 0
    length: int | None = None
    problem: str | None = None
    file_bytes: int | None = None

    def __repr__(self) -> str:  # schedulers log the arguments of tasks that fail
        return f"Part({self})"

    def __str__(self) -> str:
        name = redacted(self.path)
        if self.row_groups:
            return f"{name}, row groups {self.row_groups[0]} to {self.row_groups[-1]}"
        return name if self.length is None else f"{name}, from byte {self.start}"


@dataclass(frozen=True)
class InputSchema:
    """What all parts of an input have in common.

    Attributes
    ----------
    arrow : pyarrow.Schema
        Columns of every part.
    storage_options : dict
        For fsspec.
    is_projected : bool
        Whether columns beside those of `arrow` are left out on purpose.
    folder_fields : tuple of str
        Those of the columns that names of folders give, and no file holds.
    """

    arrow: pa.Schema
    storage_options: dict[str, Any] = field(repr=False)
    is_projected: bool
    folder_fields: tuple[str, ...] = ()

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


def read_part(part: Part, schema: InputSchema) -> pd.DataFrame:
    """One part as a pandas frame with the dtypes of `schema`.

    Columns that this file lacks are null. Fields that the schema lacks are left out if it is a
    projection, and refused if it stands for all columns, so that no data is lost unseen.

    Raises
    ------
    UnreadableInputError
        Names the file, the part and what is wrong.
    """
    return to_pandas(read_table(part, schema)[0])


def read_table(
    part: Part, schema: InputSchema, on_error: str = "raise"
) -> tuple[pa.Table, list[Problem]]:
    """The rows of one part that can be read, and what cannot.

    `on_error` is one of `CURES`, or "quarantine".

    Raises
    ------
    UnreadableInputError
        Something cannot be read, unless `on_error` is "quarantine".
    """
    try:
        if part.problem is not None:
            raise BrokenContentError(part.problem)
        is_parquet = part.row_groups is not None
        table, problems = (_read_parquet if is_parquet else _read_json)(part, schema)
    except BrokenContentError as err:
        table, problems = schema.arrow.empty_table(), [Problem(FILE, str(part), str(err))]
    if problems and on_error != "quarantine":
        raise unreadable(part, problems[0], on_error)
    return table, problems


def _read_parquet(part: Part, schema: InputSchema) -> tuple[pa.Table, list[Problem]]:
    with reading(part.path, schema.storage_options, part.file_bytes) as file:
        table = read_groups(file, part.row_groups or (), schema.arrow)
        table = with_folder_values(table, schema.folder_fields, part.path)
    good, bad = good_rows(table)
    return good, [Problem(ROW, str(part), str(err), row=row) for row, err in bad.items()]


def _read_json(part: Part, schema: InputSchema) -> tuple[pa.Table, list[Problem]]:
    # What is asked for at first is all lines, or the end of the line before them.
    ahead_bytes = None if part.length is None else LINE_BYTES + (part.length if part.start else 0)
    with reading(part.path, schema.storage_options, part.file_bytes, ahead_bytes) as file:
        codec = compression(part.path)
        if codec is None:
            offset, lines = read_range(file, part.start, part.length)
        else:
            with decompressed(file, codec) as stream:
                offset, lines = 0, stream.read(LARGE_BYTES)
                if len(lines) == LARGE_BYTES:
                    logger.warning(
                        "%s holds more than %d MiB of lines, all of which are in memory at once, "
                        "as a compressed file is one part: cut it into several files",
                        redacted(part.path),
                        LARGE_BYTES >> 20,
                    )
                    lines += stream.read()
    table, bad = parse_good(lines, offset, schema.arrow, schema.is_projected)
    table = with_folder_values(table, schema.folder_fields, part.path)
    name = redacted(part.path)
    problems = [
        Problem(LINE, name, line.reason, offset=line.offset, content=shortened(line.line))
        for line in bad
    ]
    return table, problems


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
