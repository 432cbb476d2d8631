"""Parquet and JSONL files as a lazy Dask frame, in parts that are planned here.

A part is a run of row groups of one Parquet file or a byte range of one JSONL file, so that a large
file is several tasks. All parts have the same dtypes, which are read from the files beforehand.
"""

from __future__ import annotations

import glob
import io
import posixpath
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from gpuclassify.checks import nearest

if TYPE_CHECKING:
    import dask.dataframe as dd

PARQUET_SUFFIXES = (".parquet", ".pq")
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
SAMPLE_BYTES = 1 << 20
SAMPLE_FILES = 16
LARGEST_BLOCK_BYTES = (1 << 31) - 2  # what pyarrow's JSON reader takes
# Some 200 parts show progress and even out workers; parts this small or large lose speed.
PARTS_AIMED_AT = 200
SMALLEST_PART_BYTES, LARGEST_PART_BYTES = 256 << 10, 64 << 20


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
    """

    path: str
    row_groups: tuple[int, ...] | None = None
    start: int = 0
    length: int | None = None

    def __str__(self) -> str:
        if self.row_groups:
            return f"{self.path}, row groups {self.row_groups[0]} to {self.row_groups[-1]}"
        return self.path if self.length is None else f"{self.path}, from byte {self.start}"


@dataclass(frozen=True)
class Form:
    """What all parts of an input have in common.

    Attributes
    ----------
    schema : pyarrow.Schema
        Columns of every part.
    storage_options : dict
        For fsspec.
    is_projected : bool
        Whether columns beside those of `schema` are left out on purpose.
    """

    schema: pa.Schema
    storage_options: dict[str, Any]
    is_projected: bool

    def meta(self) -> pd.DataFrame:
        """The empty frame with the dtypes of every part."""
        return _to_pandas(self.schema.empty_table())


@dataclass(frozen=True)
class Source:
    """Planned input: its parts, and what they have in common."""

    parts: tuple[Part, ...]
    form: Form


class UnreadableInputError(ValueError):
    """An input file is missing, broken, or does not fit the others."""


# What pyarrow and fsspec raise for files that are broken or gone.
BROKEN = (pa.ArrowException, ValueError, EOFError, OSError)


def read_files(
    inputs: Iterable[str],
    *,
    fields: Sequence[str] | None = None,
    part_bytes: int | None = None,
    storage_options: dict[str, Any] | None = None,
) -> dd.DataFrame:
    """A lazy frame of all `inputs`, one partition a part.

    Parameters
    ----------
    inputs : iterable of str
        Files, directories, globs or fsspec URLs; Parquet or JSON lines (also .gz, .zst, .bz2),
        not both.
    fields : sequence of str, optional
        Columns to read. Default: all.
    part_bytes : int, optional
        Bytes of a part. Default: a two-hundredth of all input, between 256 KiB and 64 MiB.
    storage_options : dict, optional
        For fsspec.

    Returns
    -------
    dask.dataframe.DataFrame
        On pandas; strings are ``str``, integers Int64, booleans boolean, nested values ArrowDtype.

    Raises
    ------
    UnreadableInputError
        Nothing matches, formats are mixed, a file is broken, or a column is not there.
    """
    import dask.dataframe as dd

    source = plan_source(
        inputs, fields=fields, part_bytes=part_bytes, storage_options=storage_options
    )
    return dd.from_map(
        read_part, source.parts, form=source.form, meta=source.form.meta(), label="read"
    )


def plan_source(
    inputs: Iterable[str],
    *,
    fields: Sequence[str] | None = None,
    part_bytes: int | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Source:
    """What `read_files` reads, with the same parameters and errors."""
    options = storage_options or {}
    paths = find_files(inputs, options)
    form = Form(_read_schema(paths, fields, options), options, is_projected=fields is not None)
    return Source(tuple(plan_parts(paths, part_bytes, options)), form)


def find_files(inputs: Iterable[str], storage_options: dict[str, Any]) -> list[str]:
    """The files that `inputs` name, in sorted order within each input."""
    found: list[str] = []
    for name in map(str, inputs):
        found += _expand(name, storage_options)
    if len(set(map(_format, found))) > 1:
        raise UnreadableInputError(
            f"inputs are of several formats, such as {found[0]} and "
            f"{next(p for p in found if _format(p) != _format(found[0]))}: classify them separately"
        )
    return list(dict.fromkeys(found))


def plan_parts(
    paths: Sequence[str], part_bytes: int | None, storage_options: dict[str, Any]
) -> list[Part]:
    """Parts of about `part_bytes` each, in the order of the files."""
    import fsspec

    filesystem, _ = fsspec.core.url_to_fs(paths[0], **storage_options)
    sizes = {path: filesystem.size(path) or 0 for path in paths}
    if part_bytes is None:
        aim = sum(sizes.values()) // PARTS_AIMED_AT
        part_bytes = min(max(aim, SMALLEST_PART_BYTES), LARGEST_PART_BYTES)
    parts: list[Part] = []
    for path in paths:
        if _format(path) == "parquet":
            parts += _parquet_parts(path, part_bytes, storage_options)
        elif _compression(path):
            parts.append(Part(path))
        else:
            starts = range(0, max(1, sizes[path]), part_bytes)
            parts += [Part(path, start=start, length=part_bytes) for start in starts]
    return parts


def read_part(part: Part, form: Form) -> pd.DataFrame:
    """One part as a pandas frame with the dtypes of `form`.

    Columns that this file lacks are null. Fields that the form lacks are left out if it is a
    projection, and refused if it stands for all columns, so that no data is lost unseen.

    Raises
    ------
    UnreadableInputError
        Names the file, the part and what is wrong.
    """
    schema = form.schema
    try:
        if part.row_groups is not None:
            with _open(part.path, form.storage_options) as file:
                table = pq.ParquetFile(file).read_row_groups(
                    list(part.row_groups), columns=schema.names
                )
        else:
            table = _parse_json(_lines(part, form.storage_options), schema, form.is_projected)
        for column in schema:
            if column.name not in table.column_names:
                table = table.append_column(column, pa.nulls(len(table), column.type))
        table = table.select(schema.names).cast(schema)
        table.validate(full=True)  # finds text that is not UTF-8, which pyarrow's readers let pass
        return _to_pandas(table)
    except BROKEN as err:
        raise UnreadableInputError(f"{part} cannot be read: {err}") from err


def _expand(name: str, storage_options: dict[str, Any]) -> list[str]:
    import fsspec

    filesystem, path = fsspec.core.url_to_fs(name, **storage_options)
    if filesystem.isdir(path):
        found = sorted(filesystem.find(path))
    elif filesystem.exists(path):
        found = [path]
    elif glob.has_magic(path):
        found = sorted(filesystem.glob(path))
    else:
        raise UnreadableInputError(f"no such input: {name}")
    # Names that begin with a dot or underscore are bookkeeping (_SUCCESS, _metadata), not data.
    data = [p for p in found if p == path or not posixpath.basename(p).startswith((".", "_"))]
    readable = [p for p in data if _format(p) is not None]
    if not readable:
        raise UnreadableInputError(
            f"{name} holds no file to read: found {[posixpath.basename(p) for p in found][:8]}, "
            f"wanted names ending in {', '.join((*PARQUET_SUFFIXES, *JSONL_SUFFIXES))} "
            f"(JSON lines also with {', '.join(COMPRESSIONS)})"
        )
    return [filesystem.unstrip_protocol(p) if "://" in name else p for p in readable]


def _format(path: str) -> str | None:
    if path.endswith(PARQUET_SUFFIXES):
        return "parquet"
    stem = posixpath.splitext(path)[0] if _compression(path) else path
    return "jsonl" if stem.endswith(JSONL_SUFFIXES) else None


def _compression(path: str) -> str | None:
    return COMPRESSIONS.get(posixpath.splitext(path)[1])


def _parquet_parts(path: str, part_bytes: int, storage_options: dict[str, Any]) -> list[Part]:
    with _open(path, storage_options) as file:
        metadata = pq.read_metadata(file)
    if metadata.num_row_groups == 0:
        return [Part(path, row_groups=())]
    parts: list[Part] = []
    group: list[int] = []
    size = 0
    for number in range(metadata.num_row_groups):
        group.append(number)
        size += metadata.row_group(number).total_byte_size
        if size >= part_bytes or number == metadata.num_row_groups - 1:
            parts.append(Part(path, row_groups=tuple(group)))
            group, size = [], 0
    return parts


def _read_schema(
    paths: Sequence[str], fields: Sequence[str] | None, storage_options: dict[str, Any]
) -> pa.Schema:
    """The columns of all parts: those of the Parquet files, or of the beginnings of JSONL files."""
    schemas = []
    sampled = paths if _format(paths[0]) == "parquet" else paths[:SAMPLE_FILES]
    for path in sampled:
        try:
            if _format(path) == "parquet":
                with _open(path, storage_options) as file:
                    schemas.append(pq.read_schema(file).remove_metadata())
            else:
                sample = _lines(Part(path, length=SAMPLE_BYTES), storage_options)
                schemas.append(_parse_json(sample, None).schema)
        except BROKEN as err:
            raise UnreadableInputError(f"{path} cannot be read: {err}") from err
    try:
        schema = pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as err:
        raise UnreadableInputError(f"the inputs' columns do not fit together: {err}") from err
    is_json = _format(paths[0]) == "jsonl"
    schema = pa.schema([f.with_type(_readable_type(f.type, is_json)) for f in schema])
    return schema if fields is None else _project(schema, fields)


def _readable_type(kind: pa.DataType, is_json: bool) -> pa.DataType:
    """The type that a column is read as, given the one that was found in files or samples."""
    if pa.types.is_null(kind):  # null all over the sample, but maybe text further on
        return pa.string()
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if not is_json:
        return kind
    if pa.types.is_timestamp(kind):  # JSON has no dates: strings that look like some stay strings
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_readable_type(kind.value_type, is_json))
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(_readable_type(f.type, is_json)) for f in kind.fields])
    return kind


def _project(schema: pa.Schema, fields: Sequence[str]) -> pa.Schema:
    for name in fields:
        if name not in schema.names:
            raise UnreadableInputError(
                f"the input has no column {name!r}.{nearest(name, schema.names)} "
                f"Columns are {', '.join(schema.names)}."
            )
    return pa.schema([schema.field(name) for name in fields])


def _open(path: str, storage_options: dict[str, Any]) -> Any:
    import fsspec

    filesystem, plain = fsspec.core.url_to_fs(path, **storage_options)
    return filesystem.open(plain, "rb")


def _lines(part: Part, storage_options: dict[str, Any]) -> bytes:
    """The lines that begin in the part; the last one is whole."""
    from fsspec.utils import read_block

    compression = _compression(part.path)
    with _open(part.path, storage_options) as file:
        if compression is None:
            return read_block(file, part.start, part.length, delimiter=b"\n")
        with pa.input_stream(file, compression=compression) as stream:
            lines = stream.read(part.length)
            if part.length is None:
                return lines
            # A sample, as ranges need random access: whole lines, and one at least.
            while b"\n" not in lines and (more := stream.read(part.length)):
                lines += more
    return lines[: lines.rfind(b"\n") + 1] or lines


def _parse_json(lines: bytes, schema: pa.Schema | None, is_projected: bool = False) -> pa.Table:
    from pyarrow import json

    if not lines.strip():
        return (schema or pa.schema([])).empty_table()
    if len(lines) > LARGEST_BLOCK_BYTES:
        raise ValueError(
            f"{len(lines):,} bytes in one piece, and {LARGEST_BLOCK_BYTES:,} are the most that can "
            "be read: split the file, or decompress it so that it is read in parts"
        )
    table = json.read_json(
        io.BytesIO(lines),
        # One block holds everything: a line may not cross blocks, and it may be long.
        read_options=json.ReadOptions(block_size=len(lines) + 1),
        parse_options=json.ParseOptions(
            explicit_schema=schema,
            unexpected_field_behavior="ignore" if is_projected else "infer",
        ),
    )
    if schema is not None and not is_projected:
        _check_nothing_is_lost(table.schema, schema)
    return table


def _check_nothing_is_lost(found: pa.Schema, schema: pa.Schema) -> None:
    """Raise ValueError if JSON has fields, other than nulls, that the sampled schema lacks."""
    late = [
        f.name
        for f in found
        if not pa.types.is_null(f.type)
        and (f.name not in schema.names or f.type != schema.field(f.name).type)
    ]
    if late:
        raise ValueError(
            f"{', '.join(late)} has fields that are not in the beginnings of the files, from which "
            "columns are read: name the columns to keep (fields=, --field), which leaves out others"
        )


def _to_pandas(table: pa.Table) -> pd.DataFrame:
    return table.to_pandas(types_mapper=_pandas_dtype)


def _pandas_dtype(kind: pa.DataType) -> Any:
    """Dtypes that a part without nulls and one with nulls have alike."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pd.StringDtype(na_value=np.nan)
    if pa.types.is_integer(kind):
        return pd.Int64Dtype() if kind == pa.int64() else pd.ArrowDtype(kind)
    if pa.types.is_boolean(kind):
        return pd.BooleanDtype()
    if pa.types.is_floating(kind):
        return None
    return pd.ArrowDtype(kind)
