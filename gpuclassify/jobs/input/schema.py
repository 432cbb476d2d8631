"""Columns of an input, from its files and the names of its folders, and frames with them."""

from __future__ import annotations

import contextlib
import json
import logging
import posixpath
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from gpuclassify.frames import import_cudf, is_text, map_nested, plain_type
from gpuclassify.jobs.ledger.arrow_types import cast, changed, changed_schema, union
from gpuclassify.jobs.ledger.encoding import json_texts
from gpuclassify.jobs.ledger.records import JOB, MALFORMED
from gpuclassify.jobs.stores.names import redacted
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.jobs.stores.store import UnreadableInputError
from gpuclassify.mapping.select import WITHOUT_VALUES
from gpuclassify.settings.checks import nearest

logger = logging.getLogger(__name__)

# Arrow metadata of a column that is text because no value shows another type.
NO_VALUES = {b"values": b"none"}
MOST_FIELDS = 500  # an object with more is read as JSON
_FIRST_FOLDER = re.compile("/[^/=]+=[^/]*/")  # such as /lang=de/


def common_schema(counts: Mapping[pa.Schema, int], known: pa.Schema | None = None) -> pa.Schema:
    """Merge schemas as `merged_schema` does; columns without values become text.

    Such columns get the metadata `NO_VALUES`. Columns of `known` are always in the result, and
    their types have the least weight.
    """
    columns = []
    for field in merged_schema({**counts, known: counts.get(known, 0)} if known else counts):
        mark = NO_VALUES if pa.types.is_null(field.type) else None
        columns.append(pa.field(field.name, _nulls_as_text(field.type), metadata=mark))
    return pa.schema(columns)


def merged_schema(counts: Mapping[pa.Schema, int]) -> pa.Schema:
    """Merge schemas into one with all their columns.

    A column's type holds its values in all schemas, or in the most frequent ones if types conflict.
    `counts` has the number of files or lines with each schema.
    """
    types: dict[str, Counter[pa.DataType]] = {}
    for schema, count in counts.items():
        for field in schema:
            types.setdefault(field.name, Counter())[_plain(field.type)] += count
    columns = []
    for name, kinds in types.items():
        common = pa.null()
        for kind, _ in kinds.most_common():
            with contextlib.suppress(pa.ArrowException):
                common = union(common, kind)
        columns.append((name, common))
    return pa.schema(columns)


def json_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema with text for timestamps, which pyarrow infers from texts in JSON lines."""
    return changed_schema(schema, _without_dates)


def misfits(schema: pa.Schema, common: pa.Schema) -> dict[str, str]:
    """Return the reasons why `common` cannot hold a file's values, by column; {} if it can.

    `schema` has the columns of the file. Columns that `common` lacks are ignored.
    """
    wanted, wrong = {field.name: field.type for field in common}, {}
    for name, kind in zip(schema.names, schema.types, strict=True):
        with contextlib.suppress(pa.ArrowException):
            if isinstance(wanted.get(name), pa.JsonType):  # can hold all values
                continue
            if name not in wanted or union(wanted[name], _plain(kind)) == wanted[name]:
                continue
        wrong[name] = f"{name} is {kind}, and {wanted[name]} in most"
    return wrong


def nulls_untyped(
    schema: pa.Schema, metadata: pq.FileMetaData, names: Collection[str]
) -> pa.Schema:
    """Return a Parquet file's schema with the null type for columns `names` that are all null.

    In nested columns, all-null inner fields get the null type instead. Columns without statistics
    in the file keep their types.
    """
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    leaves = iter(range(metadata.num_columns))

    def untype(kind: pa.DataType) -> pa.DataType:
        if isinstance(kind, pa.BaseExtensionType):
            return kind if untype(kind.storage_type) == kind.storage_type else pa.null()
        if pa.types.is_nested(kind):
            return map_nested(kind, untype)
        chunks = [group.column(leaf) for leaf in [next(leaves)] for group in groups]
        is_null = all(
            chunk.statistics is not None and chunk.statistics.null_count == chunk.num_values
            for chunk in chunks
        )
        return pa.null() if is_null else kind

    pairs = zip(schema, changed_schema(schema, untype), strict=True)
    return pa.schema([new if field.name in names else field for field, new in pairs])


def fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the table with the columns of `schema`, cast to their types.

    Columns that the table lacks are null. A column becomes JSON texts if only `schema` has the type
    JSON for it.
    """
    columns, names = [], {*table.column_names}
    for field in schema:
        is_there = field.name in names
        column = table[field.name] if is_there else pa.nulls(len(table), field.type)
        is_json = [isinstance(kind, pa.JsonType) for kind in (field.type, column.type)]
        columns.append(json_texts(column) if is_json == [True, False] else column)
    return cast(pa.table(columns, schema.names), schema)


def maps_as_json(schema: pa.Schema) -> pa.Schema:
    """Return the schema with JSON in place of columns whose objects have more than 500 fields.

    Names of so many fields are usually data, such as identifiers: later lines would have new ones.
    """
    for index, field in enumerate(schema):
        if _most_fields(field.type) > MOST_FIELDS:
            logger.warning(
                "the objects in column %r have more than %d fields, and are read as texts of JSON",
                field.name,
                MOST_FIELDS,
            )
            schema = schema.set(index, field.with_type(pa.json_()))
    return schema


def _most_fields(kind: pa.DataType) -> int:
    inner = (_most_fields(kind.field(index).type) for index in range(kind.num_fields))
    return max([kind.num_fields, *inner])


def project(schema: pa.Schema, fields: Sequence[str]) -> pa.Schema:
    """Return the schema with only `fields`; raise UnreadableInputError if one is missing."""
    names = set(schema.names)
    for name in fields:
        if name not in names:
            raise UnreadableInputError(
                f"the input has no column {name!r}.{nearest(name, schema.names)} "
                f"Columns are {', '.join(schema.names)}."
            )
    return pa.schema([schema.field(name) for name in fields])


def named_type(column: str, name: str) -> pa.DataType:
    """Return the Arrow type called `name`, such as "double" or "json", or raise ValueError."""
    if name == "json":
        return pa.json_()
    try:
        return pa.type_for_alias(name)
    except (ValueError, TypeError) as err:
        raise ValueError(
            f"types={{{column!r}: {name!r}}}: Arrow has no such type; names are double, int64, "
            "string, bool and the like, and json for values of any kinds"
        ) from err


def set_types(schema: pa.Schema, types: Mapping[str, str]) -> pa.Schema:
    """Return the schema with other types for some columns; columns that it lacks are added.

    `types` maps names of columns to names of types, as for `named_type`.
    """
    columns = {field.name: field for field in schema}
    for name in types:
        if name not in columns:
            logger.warning(
                "types= tells of a column %r that no sample of the input has.%s It is added, and "
                "null where a line lacks it",
                name,
                nearest(name, columns),
            )
    columns |= {name: pa.field(name, named_type(name, kind)) for name, kind in types.items()}
    return pa.schema(columns.values())


# Columns from folder names, as Hive, pandas and Dask write them: ``lang=de/a.jsonl``.


def folder_schema(paths: Iterable[str]) -> pa.Schema:
    """Infer columns from folder names such as ``lang=de``: int64 if all fit int32, else text."""
    folders = dict.fromkeys(f"{posixpath.dirname(redacted(path))}/" for path in paths)
    steps = (step.partition("=") for folder in folders for step in folder.split("/"))
    names = dict.fromkeys(unquote(name) for name, mark, _ in steps if name and mark)
    texts = pa.schema([(name, pa.string()) for name in names])
    rows = [folder_values(folder, texts) for folder in folders] if names else []
    columns = []
    for name in names:
        values = pa.array([row[name] for row in rows if row.get(name) is not None], pa.string())
        try:
            values.cast(pa.int32())
            columns.append((name, pa.int64() if len(values) else pa.string()))
        except pa.ArrowInvalid:
            columns.append((name, pa.string()))
    return pa.schema(columns)


def declared_types(paths: Iterable[str], storage_options: dict[str, Any]) -> dict[str, str]:
    """Return names of Arrow types of columns from folder names such as ``lang=de``, by column.

    They are read from the ``job.json`` of the job that wrote the files, if there is one.
    """
    roots = {path[: match.start()] for path in paths if (match := _FIRST_FOLDER.search(path))}
    types: dict[str, str] = {}
    for root in roots:
        store = open_store(root, storage_options)
        if store.is_writable:
            with contextlib.suppress(FileNotFoundError, *MALFORMED):
                declared = json.loads(store.read(JOB))["folders"]
                types |= {name: kind for name, kind in declared.items() if named_type(name, kind)}
    return types


def folder_values(path: str, schema: pa.Schema) -> dict[str, Any]:
    """Parse the values of columns from a path's folder names, such as ``lang=de``.

    A value is None for null. Raises UnreadableInputError if it does not have the type in `schema`.
    """
    from pyarrow import dataset

    try:
        keys = dataset.partitioning(schema, flavor="hive").parse(redacted(path))
    except pa.ArrowInvalid as err:
        raise UnreadableInputError(
            f"folders of {redacted(path)} would be columns, and cannot be read: {err}: rename them"
        ) from err
    return dataset.get_partition_keys(keys)


def missing_column(path: str, own: Iterable[str], common: Iterable[str]) -> str | None:
    """Return the reason why a file cannot be read together with other files, or None.

    It cannot if a folder name such as ``lang=de`` gives a column that only other files contain.
    `own` are the columns that this file contains, `common` the columns that any file contains.
    """
    by_folders = set(folder_schema([path]).names) - set(own)
    names = [name for name in common if name in by_folders]
    if not names:
        return None
    return (
        f"the names of its folders give {', '.join(names)}, which other files hold as a column: "
        "read them separately, or name the columns to keep without it (fields=)"
    )


def fill_folder_values(table: pa.Table, fields: Sequence[str], path: str) -> pa.Table:
    """Return the table with nulls in the columns `fields` filled from a path's folder names."""
    if fields:
        schema = pa.schema([table.field(name) for name in fields])
        for name, value in folder_values(path, schema).items():
            if value is not None:
                index = table.column_names.index(name)
                filled = table.column(index).fill_null(pa.scalar(value, schema.field(name).type))
                table = table.set_column(index, table.field(index), filled)
    return table


# Frames.


def is_textless(table: pa.Table, text_fields: Iterable[str]) -> bool:
    """Return True if the table has rows, and one of these columns is null in all of them."""
    names = {*text_fields} & {*table.column_names}
    return len(table) > 0 and any(table[name].null_count == len(table) for name in names)


def to_pandas(table: pa.Table) -> pd.DataFrame:
    """Convert an Arrow table to a pandas frame. Dtypes do not depend on the presence of nulls."""
    return table.to_pandas(types_mapper=_pandas_dtype)


def meta_frame(schema: pa.Schema) -> pd.DataFrame:
    """Return the pandas frame without rows that has the columns of a schema, for Dask's meta.

    Its `attrs` list the columns that are text only because no file has a value in them.
    """
    frame = to_pandas(schema.empty_table())
    if names := [field.name for field in schema if field.metadata == NO_VALUES]:
        frame.attrs[WITHOUT_VALUES] = names
    return frame


def to_frame(table: pa.Table, backend: str) -> Any:
    """Convert an Arrow table to a frame of `backend`, "pandas" or "cudf"."""
    if backend == "pandas":
        return to_pandas(table)
    return import_cudf().DataFrame.from_arrow(changed(table, plain_type))


def _plain(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.JsonType):
        return pa.json_()
    return kind if isinstance(kind, pa.BaseExtensionType) else plain_type(kind)


def _without_dates(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_timestamp(kind) else map_nested(kind, _without_dates)


def _nulls_as_text(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_null(kind) else map_nested(kind, _nulls_as_text)


def _pandas_dtype(kind: pa.DataType) -> Any:
    if is_text(plain_type(kind)):
        return pd.StringDtype(na_value=np.nan)
    if pa.types.is_integer(kind):
        return pd.Int64Dtype() if kind == pa.int64() else pd.ArrowDtype(kind)
    if pa.types.is_boolean(kind):
        return pd.BooleanDtype()
    if pa.types.is_floating(kind):
        return None
    return pd.ArrowDtype(kind)
