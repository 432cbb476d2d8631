"""Convert frames to Arrow tables, and tables to the bytes of files for plain readers.

With `partition_by`, rows go to Hive-style folders such as ``bucket=19``.
"""

from __future__ import annotations

import base64
import functools
import itertools
import json
import math
import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gpuclassify.frames import Frame, is_text, plain_type
from gpuclassify.jobs.ledger.arrow_types import cast, changed, stored, union
from gpuclassify.jobs.stores.names import COMPRESSIONS, PARQUET
from gpuclassify.mapping.select import WITHOUT_VALUES
from gpuclassify.settings.checks import nearest

# Bookkeeping columns of an annotation set, next to its annotations.
FILE, PLACE, LEFT_OUT = "_file", "_place", "_left_out"

JSON_ROWS_AT_A_TIME = 1_000
BLOCK_BYTES = 1 << 20
ROW_GROUP_BYTES = 32 << 20  # size in memory of the row groups of joined Parquet files
LONGEST_TYPE = 100  # characters of a type in a message
NULL = "__HIVE_DEFAULT_PARTITION__"  # name of null in Hive, Spark and pyarrow
MOST_VALUES = 1_000  # values of a column that names folders, in one part
MOST_NAME_BYTES = 255  # limit of common file systems
# Row groups can be read alone, delta encoding keeps positions small, checksums reveal damage.
ANNOTATION_LAYOUT: dict[str, Any] = {
    "row_group_size": 1 << 17,
    "use_dictionary": [FILE],
    "column_encoding": {PLACE: "DELTA_BINARY_PACKED"},
    "write_page_checksum": True,
}
_NAMES_FOLDERS = (
    *(pa.types.is_string, pa.types.is_large_string, pa.types.is_integer, pa.types.is_boolean),
)


@dataclass(frozen=True)
class Encoding:
    """File format, compression, partition columns and file size of a job's output."""

    file_format: str  # "parquet" or "jsonl"
    compression: str | None  # None is none, for JSON lines
    partition_by: tuple[str, ...] = ()  # columns whose values name folders
    output_bytes: int = 0  # size of a file of joined parts; 0 for a file of each part

    @property
    def suffix(self) -> str:
        """Extension of output files, such as ".parquet" or ".jsonl.gz"."""
        if self.file_format == PARQUET or self.compression is None:
            return f".{self.file_format}"
        ending = next(key for key, value in COMPRESSIONS.items() if value == self.compression)
        return f".{self.file_format}{ending}"

    def encode(self, table: pa.Table) -> bytes:
        """Encode an Arrow table as the content of one Parquet or JSON lines file."""
        sink = pa.BufferOutputStream()
        if self.file_format == PARQUET:
            layout = _layout(table.schema)
            pq.write_table(changed(table, stored), sink, compression=self.compression, **layout)
        elif self.compression is None:
            self._write_json_lines(table, sink)
        else:
            with pa.CompressedOutputStream(sink, self.compression) as stream:
                self._write_json_lines(table, stream)
        return sink.getvalue().to_pybytes()

    def join(self, contents: Sequence[bytes]) -> bytes:
        """Join the contents of several files to the content of one file with all rows, in order.

        With `partition_by`, contents and result are as from `pack_rows`. Raises ArrowException if a
        column's types in the files have no common type, as if it was unknown before the job.
        """
        sink = pa.BufferOutputStream()
        if self.partition_by:
            tables = [pa.ipc.open_stream(content).read_all() for content in contents]
            schema = _common_schema([table.schema for table in tables])
            return _pack(pa.concat_tables(cast(table, schema) for table in tables))
        if self.file_format == PARQUET:
            files = [pq.ParquetFile(pa.BufferReader(content)) for content in contents]
            schema = _common_schema([file.schema_arrow for file in files])
            layout = _layout(schema)
            rows = layout.pop("row_group_size", None)
            with pq.ParquetWriter(sink, schema, compression=self.compression, **layout) as writer:
                for table in _row_groups(files, schema):
                    writer.write_table(table, rows)
        elif self.compression == "zstd":  # pandas reads only the first of several zstd frames
            with pa.CompressedOutputStream(sink, self.compression) as stream:
                for block in itertools.chain.from_iterable(map(self._blocks, contents)):
                    stream.write(block)
        else:
            sink.write(b"".join(contents))
        return sink.getvalue().to_pybytes()

    def _write_json_lines(self, table: pa.Table, file: pa.NativeFile) -> None:
        """Write rows as lines of JSON; infinities and NaN become null, bytes become base64."""
        to_json = _converter(pa.field("", pa.struct(table.schema)))
        has_json = any(isinstance(kind, pa.JsonType) for kind in table.schema.types)
        dump = _dump_with_json if has_json else _dump
        for batch in table.to_batches(max_chunksize=JSON_ROWS_AT_A_TIME):
            try:
                records = batch.to_pylist()
            except (OverflowError, ValueError):
                records = map(_python_value, batch.to_struct_array())
            for record in map(to_json, records):
                try:
                    line = dump(record)
                except ValueError:
                    line = dump(_finite(record))
                file.write(line.encode("utf-8", "replace") + b"\n")

    def check_rows(self, files: Iterable[bytes], rows: int) -> None:
        """Raise RuntimeError unless files with these contents have `rows` rows in total."""
        encoded = sum(map(self._count_rows, files))
        if encoded != rows:
            raise RuntimeError(
                f"{rows:,} rows became files of {encoded:,} rows: nothing is published. This is a "
                "defect of gpuclassify or of Arrow; please report it with the columns' types"
            )

    def _count_rows(self, content: bytes) -> int:
        if self.file_format == PARQUET:
            return pq.read_metadata(pa.BufferReader(content)).num_rows
        return sum(block.count(b"\n") for block in self._blocks(content))

    def _blocks(self, content: bytes) -> Iterator[bytes]:
        stream = source = pa.BufferReader(content)
        if self.compression is not None:
            stream = pa.CompressedInputStream(source, self.compression)
        return iter(lambda: stream.read(BLOCK_BYTES), b"")

    def check(self, schema: pa.Schema) -> None:
        """Raise TypeError for the first column whose type files cannot store, or not read back."""
        try:
            if self.file_format == PARQUET:
                pq.read_schema(pa.BufferReader(self.encode(schema.empty_table())))
            else:
                _check_json(pa.struct(schema))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as err:
            if len(schema) == 1:
                is_parquet = self.file_format == PARQUET
                other = "JSON lines (JsonlWriter)" if is_parquet else "Parquet"
                raise TypeError(
                    f"column {schema.names[0]!r} is {str(schema.types[0])[:LONGEST_TYPE]}, which "
                    f"files of {self.file_format} cannot hold ({err}): name the columns to read "
                    f"without it (fields=), convert it in a stage, or write {other}"
                ) from err
            for field in schema:
                self.check(pa.schema([field]))
            raise


def _layout(schema: pa.Schema) -> dict[str, Any]:
    """Return arguments of `pq.write_table`: `ANNOTATION_LAYOUT` for an annotation set, else {}."""
    # A user's columns may have these names, too.
    has_positions = (
        schema.names[:3] == [FILE, PLACE, LEFT_OUT] and schema.field(PLACE).type == pa.int64()
    )
    return {**ANNOTATION_LAYOUT} if has_positions else {}


def _common_schema(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Return the first schema, with types that the types of all schemas can be cast to."""
    fields = [
        functools.reduce(_common_field, (schema.field(name) for schema in schemas))
        for name in schemas[0].names
    ]
    types = [field.type for field in fields]
    described = [schema for schema in schemas if schema.types == types] or schemas
    return pa.schema(fields, metadata=described[0].metadata)


def _common_field(one: pa.Field, other: pa.Field) -> pa.Field:
    return one if one.type == other.type else one.with_type(union(one.type, other.type))


def _row_groups(files: Iterable[pq.ParquetFile], schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield tables of about `ROW_GROUP_BYTES` or less: joined row groups, cast to `schema`."""
    waiting = [schema.empty_table()]
    for file in files:
        for number in range(file.num_row_groups):
            table = cast(file.read_row_group(number), schema)
            if sum(t.nbytes for t in (*waiting, table)) > ROW_GROUP_BYTES and len(waiting) > 1:
                yield pa.concat_tables(waiting).unify_dictionaries()
                waiting = waiting[:1]
            waiting.append(table)
    yield pa.concat_tables(waiting).unify_dictionaries()


def arrow_table(frame: Frame, keep_index: bool | None = None) -> pa.Table:
    """Convert a pandas or cudf frame to an Arrow table whose metadata pandas can parse.

    `keep_index` is ``preserve_index`` of pyarrow. Raises ValueError if two columns or index levels
    have the same name as text, such as ``1`` and ``"1"``.
    """
    import pandas as pd

    if isinstance(frame, pd.DataFrame):
        table = pa.Table.from_pandas(frame, preserve_index=keep_index)
    else:
        table = frame.to_arrow(preserve_index=keep_index)  # type: ignore[attr-defined]
    texts = table.column_names
    if len({*texts}) < len(texts):
        labels = zip([*frame.columns, *frame.index.names], texts, strict=False)
        alike = [repr(label) for label, text in labels if texts.count(text) > 1]
        raise ValueError(
            f"the columns {' and '.join(alike)} have one name as text, and files that have it "
            "twice cannot be read: rename all but one"
        )
    declared = json.loads(table.schema.metadata[b"pandas"])
    declared.get("attributes", {}).pop(WITHOUT_VALUES, None)
    for column in declared["columns"]:
        if "<" in str(column["numpy_type"]):  # pandas cannot parse list<item: float>[pyarrow]
            column["numpy_type"] = "object"
    return _replace_pandas_metadata(table, declared)


def _replace_pandas_metadata(table: pa.Table, declared: dict[str, Any]) -> pa.Table:
    metadata = {**table.schema.metadata, b"pandas": json.dumps(declared).encode()}
    return table.replace_schema_metadata(metadata)


def conform(table: pa.Table, schema: pa.Schema, partition_by: Sequence[str] = ()) -> pa.Table:
    """Cast a table, a part of a job's rows, to the output's `schema`; raise TypeError if it fails.

    The names must be equal, in the same order. A null type in `schema` is unknown: such a column
    keeps its type in the table, or becomes string if it is in `partition_by`. The result has the
    table's metadata, and its fields are nullable.
    """
    if table.column_names != schema.names:
        raise TypeError(
            f"the stages returned columns {table.column_names}, and {schema.names} for a frame "
            "without rows: they must be the same for every part"
        )
    wanted = []
    for field, actual in zip(schema, table.schema, strict=True):
        is_unknown, kind = pa.types.is_null(_value_type(field.type)), _value_type(actual.type)
        if is_unknown and field.name in partition_by:
            if not (is_text(kind) or pa.types.is_null(kind)):
                raise TypeError(
                    f"partition_by={field.name!r} holds {kind}, and no known type in a frame "
                    "without rows: give it one in the stage, such as by astype()"
                )
            field = field.with_type(pa.string())
        elif is_unknown:
            field = actual
        wanted.append(field.with_nullable(True))
    try:
        return cast(table, pa.schema(wanted, metadata=table.schema.metadata))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as err:
        pairs = zip(wanted, table.schema, strict=True)
        others = [field.name for field, actual in pairs if field.type != actual.type]
        raise TypeError(
            f"columns among {others} have another type than a frame without rows has: {err}. Give "
            "the stage's new columns a type, such as by astype()"
        ) from err


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _python_value(value: pa.Scalar) -> Any:
    """Convert an Arrow scalar to a Python value; times outside of Python's years become text."""
    try:
        return value.as_py()
    except (OverflowError, ValueError):
        if pa.types.is_struct(value.type):
            return {name: _python_value(item) for name, item in value.items()}
        if pa.types.is_nested(value.type):
            items = [_python_value(item) for item in value.values]
            return [(*item.values(),) for item in items] if pa.types.is_map(value.type) else items
        return value.cast(pa.string()).as_py()


def _same(value: object) -> object:
    return value


def _converter(field: pa.Field) -> Callable[[Any], Any]:
    """Return a function that converts Python values of an Arrow field to values for `json.dumps`.

    Maps with text keys become dicts, and other maps lists of dicts with ``key`` and ``value``.
    Texts of Arrow's JSON type become `_Json`.
    """
    kind = field.type
    if isinstance(kind, pa.JsonType):
        return lambda text: text if text is None else _checked(text, field.name)
    if pa.types.is_struct(kind):
        converters = {child.name: _converter(child) for child in kind}
        if {*converters.values()} <= {_same}:
            return _same
        return lambda value: value and {n: converters[n](item) for n, item in value.items()}
    if not pa.types.is_nested(kind):
        return _same
    is_map = pa.types.is_map(kind)
    convert = _converter(kind.item_field if is_map else kind.value_field)
    if is_map and is_text(plain_type(kind.key_type)):
        return lambda items: items if items is None else {key: convert(item) for key, item in items}
    if is_map:
        return lambda items: items and [{"key": key, "value": convert(item)} for key, item in items]
    return _same if convert is _same else lambda items: items and [convert(item) for item in items]


def _check_json(kind: pa.DataType) -> None:
    """Raise ArrowInvalid if an Arrow type, or one nested in it, cannot be written as JSON."""
    if pa.types.is_struct(kind) and len({*kind.names}) < kind.num_fields:
        raise pa.ArrowInvalid("several fields of an object have one name")
    if pa.types.is_timestamp(kind):
        pa.scalar(0, kind).as_py()  # raises for an unknown time zone
    if pa.types.is_nested(kind):
        for index in range(kind.num_fields):
            _check_json(kind.field(index).type)


def _dump(record: Any) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False, default=_json_text)


class _Json(str):
    """Valid JSON, as a str. As a column's value, it is written without quotes and escapes."""


def _checked(text: str, column: str) -> _Json:
    """Return a JSON column's value as one line of valid JSON, or raise TypeError."""
    try:
        # int() raises ValueError for NaN.
        json.loads(text, parse_int=_same, parse_float=_same, parse_constant=int)
    except json.JSONDecodeError as err:
        raise TypeError(
            f"column {column!r} has the type JSON, and {text[:LONGEST_TYPE]!r} in it is not JSON: "
            "write what a stage makes of the column to one of another name"
        ) from err
    except ValueError:
        text = _dump(_finite(json.loads(text)))
    return _Json(text.replace("\n", " "))


def _dump_with_json(record: dict[str, Any]) -> str:
    """Serialize a row as a JSON object in one line, with `_Json` values of columns verbatim."""
    texts = (v if isinstance(v, _Json) else _dump(v) for v in record.values())
    return f"{{{', '.join(f'{_dump(n)}: {t}' for n, t in zip(record, texts, strict=True))}}}"


def json_texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Encode the values of a column as JSON texts, of Arrow's JSON type; nulls stay null."""
    to_json, texts = _converter(pa.field("", column.type)), []
    for value in map(to_json, column.to_pylist()):
        try:
            texts.append(None if value is None else _dump(value))
        except ValueError:
            texts.append(_dump(_finite(value)))
    kind = pa.json_()
    storage = pa.array(texts, kind.storage_type)
    return pa.chunked_array([pa.ExtensionArray.from_storage(kind, storage)])


def _json_text(value: object) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _finite(value: Any) -> Any:
    """Return a JSON value with infinities and NaN replaced by None, at any nesting."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Rows in folders.


class UnnamedFolderError(ValueError):
    """Error for a value of a `partition_by` column that cannot name a folder."""


def plain_folder_types(names: Sequence[str], schema: pa.Schema) -> pa.Schema:
    """Change dictionaries and string views in the partition columns `names` to plain types."""
    for index, field in enumerate(schema):
        kind = _value_type(field.type)
        kind = pa.string() if pa.types.is_string_view(kind) else kind
        if field.name in names:
            schema = schema.set(index, field.with_type(kind))
    return schema


def folder_types(names: Sequence[str], schema: pa.Schema) -> dict[str, str]:
    """Return the Arrow type, as text such as "int64", of each partition column in `names`.

    The keys are the names. A null type counts as "string". Raises ValueError or TypeError for
    columns that cannot name folders, or if no other column is left.
    """
    types = {}
    for name in names:
        if name not in schema.names:
            raise ValueError(
                f"partition_by={name!r} is no column of the output; columns are {schema.names}."
                f"{nearest(name, schema.names)}"
            )
        kind = schema.field(name).type
        kind = pa.string() if pa.types.is_null(kind) else kind
        if not any(is_kind(kind) for is_kind in _NAMES_FOLDERS):
            raise TypeError(
                f"partition_by={name!r} holds {kind}: folders are named by text, whole numbers or "
                "booleans, such as labels"
            )
        if (folder := _folder(name, None)).startswith((".", "_")):
            raise ValueError(
                f"partition_by={name!r} would make folders such as {folder}, which readers of "
                "datasets pass over: give the column a name that begins with neither a dot nor an "
                "underscore, such as by a stage that renames it"
            )
        types[name] = str(kind)
    if {*names} == {*schema.names}:
        raise ValueError(f"partition_by={[*names]} leaves no column for the files")
    return types


def check_values(table: pa.Table, names: Sequence[str]) -> None:
    """Raise UnnamedFolderError if a value of the partition columns `names` cannot name a folder.

    Only the first `MOST_VALUES` distinct values of each column are checked.
    """
    for name in names:
        for value in pc.unique(table[name]).slice(0, MOST_VALUES).to_pylist():
            if value == NULL:
                raise UnnamedFolderError(
                    f"partition_by={name!r} has the text {value!r}, which readers of folders take "
                    "for null: make it null before, or another text"
                )
            if len(folder := _folder(name, value)) > MOST_NAME_BYTES:
                raise UnnamedFolderError(
                    f"partition_by={name!r} has the value {value!r}, whose folder would have a "
                    f"name of {len(folder)} bytes, and file systems take {MOST_NAME_BYTES}: name a "
                    'column of shorter values, or leave such rows out (on_error="quarantine")'
                )


def pack_rows(table: pa.Table, names: Sequence[str]) -> bytes:
    """Serialize a table as an Arrow IPC stream, which `folder_files` later splits into folders.

    Raises ValueError if a column in `names` has more than `MOST_VALUES` distinct values.
    """
    for name in names:
        count = pc.count_distinct(table[name], mode="all").as_py()
        if count > MOST_VALUES:
            raise ValueError(
                f"partition_by={name!r} has {count:,} values in {len(table):,} rows, such as "
                f"{table[name][0].as_py()!r}, and each would be a folder: name a column of at most "
                f"{MOST_VALUES:,} values"
            )
    return _pack(table)


def _pack(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def folder_files(name: str, content: bytes, encoding: Encoding) -> dict[str, bytes]:
    """Split packed rows by partition folder, and return the content of each file by path.

    `content` is from `pack_rows`. Paths are ``FOLDER/NAME`` with the file name `name`, such as
    ``bucket=19/part-00000.parquet``.
    """
    table = pa.ipc.open_stream(content).read_all()
    split = split_by_folder(table, encoding.partition_by)
    files = {f"{folder}/{name}": encoding.encode(rows) for folder, rows in split.items()}
    encoding.check_rows(files.values(), len(table))
    return files


def split_by_folder(table: pa.Table, names: Sequence[str]) -> dict[str, pa.Table]:
    """Split the rows by the values of the partition columns `names` into a table per folder.

    Keys are folders such as ``lang=de/bucket=19``, percent-encoded; {"": table} without `names`.
    Rows keep their order, and the tables lack the partition columns. The table must have pandas
    metadata, as from `arrow_table`.
    """
    if not names:
        return {"": table}
    name, *rest = names
    column = table[name].combine_chunks()
    encoded = column.dictionary_encode(null_encoding="encode")
    values, codes = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
    declared = json.loads(table.schema.metadata[b"pandas"])
    declared["columns"] = [entry for entry in declared["columns"] if entry["name"] != name]
    left = _replace_pandas_metadata(table.drop_columns([name]), declared)
    ordered = left.take(np.argsort(codes, kind="stable"))
    counts = np.bincount(codes, minlength=len(values))
    split = {}
    for value, start, rows in zip(values, np.cumsum(counts) - counts, counts, strict=True):
        for subfolder, part in split_by_folder(ordered.slice(start, rows), rest).items():
            split[posixpath.join(_folder(name, value), subfolder).rstrip("/")] = part
    return split


def _folder(name: str, value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"{quote(name, safe='')}={NULL if value is None else quote(text, safe='')}"
