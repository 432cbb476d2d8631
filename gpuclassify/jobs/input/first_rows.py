"""The first rows of an input, read without looking at the rest of it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from gpuclassify.hub.dataset_files import LINE_BYTES
from gpuclassify.jobs.arrow_types import changed, restored
from gpuclassify.jobs.files import (
    PARQUET,
    BrokenContentError,
    InputFile,
    UnreadableInputError,
    compression,
    decompressed,
    file_format,
    find_files,
    local_problem,
    reading,
    redacted,
)
from gpuclassify.jobs.input.jsonl import parse_good
from gpuclassify.jobs.input.parquet import open_checked
from gpuclassify.jobs.input.parts import Part
from gpuclassify.jobs.input.samples import SampledLines, sampled_schema
from gpuclassify.jobs.input.schema import project, to_pandas

if TYPE_CHECKING:
    import dask.dataframe as dd

PART_ROWS = 1_000  # of a frame of the first rows


def first_rows(
    inputs: Sequence[str], most: int, fields: Sequence[str] | None = None
) -> pd.DataFrame:
    """The first rows of Parquet files or JSON lines.

    Parameters
    ----------
    inputs : sequence of str
        As of `gpuclassify.jobs.input.readers.FileReader`.
    most : int
        How many rows to read.
    fields : sequence of str, optional
        Columns to keep. Default: all.

    Raises
    ------
    UnreadableInputError
        Nothing matches, formats are mixed, a column is not there, or what is read is broken.
    """
    tables: list[pa.Table] = []
    for file in find_files(inputs, {}):
        missing = most - sum(map(len, tables))
        if not missing:
            break
        tables.append(_first_of(file, missing))
    table = pa.concat_tables(tables, promote_options="permissive")
    if fields is not None:
        table = table.select(project(table.schema, list(dict.fromkeys(fields))).names)
    return to_pandas(table)


def first_rows_lazily(
    inputs: Sequence[str], most: int, fields: Sequence[str] | None = None
) -> dd.DataFrame:
    """The first rows as a Dask frame, whose key follows from what they hold.

    Parameters
    ----------
    inputs, most, fields
        As of `first_rows`.

    Raises
    ------
    UnreadableInputError
        As of `first_rows`; or there are no rows.
    """
    import dask.dataframe as dd

    frame = first_rows(inputs, most, fields)
    if frame.empty:
        raise UnreadableInputError("the input has no rows: its files are empty")
    return dd.from_pandas(frame, npartitions=-(-len(frame) // PART_ROWS))


def first_texts(stream: BinaryIO, most: int, columns: Sequence[str]) -> pd.DataFrame:
    """The first rows of a stream of JSON lines, or of plain lines, each of which is a text.

    Parameters
    ----------
    stream : binary file
        Lines are JSON if the first one begins as an object does. Blank lines are none.
    most : int
        How many rows to read.
    columns : sequence of str
        Columns that plain lines become.

    Raises
    ------
    UnreadableInputError
        A line is not UTF-8, or no JSON object where the first one is.
    """
    lines = _first_lines(stream, most)
    texts = [line for line in lines if line.strip()]
    if texts and texts[0].lstrip().startswith(b"{"):
        return to_pandas(_json_table(lines, "standard input"))
    try:
        values = pa.array([line.decode().rstrip("\r\n") for line in texts], pa.string())
    except UnicodeDecodeError as err:
        raise UnreadableInputError(
            f"standard input is not UTF-8 ({err}): convert it, such as with `iconv -f LATIN1 -t "
            "UTF-8`"
        ) from err
    return to_pandas(pa.table(dict.fromkeys(columns, values)))


def _first_of(file: InputFile, most: int) -> pa.Table:
    try:
        if problem := local_problem(file.path):
            raise BrokenContentError(problem)
        return _read_first(file, most)
    except BrokenContentError as err:
        raise UnreadableInputError(f"{redacted(file.path)} cannot be read: {err}") from err


def _read_first(file: InputFile, most: int) -> pa.Table:
    with reading(file.path, {}, file.size_bytes, LINE_BYTES) as opened:
        if file_format(file.path) == PARQUET:
            return _parquet_table(open_checked(opened), most)
        with decompressed(opened, compression(file.path)) as stream:
            return _json_table(_first_lines(io.BufferedReader(stream), most), redacted(file.path))


def _parquet_table(file: pq.ParquetFile, most: int) -> pa.Table:
    """The first rows, without the rest of their row group."""
    batches: list[pa.RecordBatch] = []
    for batch in file.iter_batches(batch_size=most):
        batches.append(batch)
        if sum(map(len, batches)) >= most:
            break
    return changed(pa.Table.from_batches(batches, file.schema_arrow).slice(0, most), restored)


def _json_table(lines: list[bytes], name: str) -> pa.Table:
    content = b"".join(lines)
    schema = sampled_schema([SampledLines(Part(name), 0, content)])
    table, bad = parse_good(content, 0, schema, is_projected=False)
    for line in bad:
        number = content[: line.offset].count(b"\n") + 1
        raise UnreadableInputError(f"{name}, line {number}: {line.reason}")
    return table


def _first_lines(stream: BinaryIO, most: int) -> list[bytes]:
    """The first lines of which `most` are not blank."""
    lines: list[bytes] = []
    missing = most
    while missing and (line := stream.readline()):
        lines.append(line)
        missing -= bool(line.strip())
    return lines
