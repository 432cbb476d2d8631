"""Parquet files: their row groups and columns from the footers, and tables of them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gpuclassify.jobs.arrow_types import cast, changed_schema, restored
from gpuclassify.jobs.files import BrokenContentError, InputFile, local_problem, reading
from gpuclassify.jobs.quarantine import isolate_bad_rows

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


def group_runs(footer: Footer, part_bytes: int) -> list[tuple[int, ...]]:
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


def open_checked(file: Any) -> pq.ParquetFile:
    """A Parquet file whose pages are compared with their checksums, where it has some.

    That costs no time that can be measured. pyarrow and Spark write checksums if they are told to.
    """
    return pq.ParquetFile(file, page_checksum_verification=True)


def read_groups(file: Any, groups: Sequence[int], schema: pa.Schema) -> pa.Table:
    """Row groups of an open file with the columns of `schema`; those that the file lacks are null.

    Raises
    ------
    pyarrow.ArrowException, OSError
        The bytes are broken, or of other types than the schema's.
    """
    table = open_checked(file).read_row_groups(list(groups), columns=schema.names)
    held = set(table.column_names)
    if absent := [column for column in schema if column.name not in held]:
        nulls = [pa.nulls(len(table), column.type) for column in absent]
        names = [*table.column_names, *(column.name for column in absent)]
        table = pa.table([*table.columns, *nulls], names)
    return cast(table.select(schema.names), schema)


def good_rows(table: pa.Table) -> tuple[pa.Table, dict[int, Exception]]:
    """The rows whose text is UTF-8, which reading does not check, and what is wrong with others."""

    def check(start: int, stop: int) -> pa.Table:
        rows = table.slice(start, stop - start)
        rows.validate(full=True)
        return rows

    found = dict(isolate_bad_rows(check, 0, len(table), (pa.ArrowException,)))
    good = [rows for rows in found.values() if isinstance(rows, pa.Table)]
    bad = {row: err for row, err in found.items() if isinstance(err, Exception)}
    return pa.concat_tables([table.slice(0, 0), *good]), bad
