"""The columns of an input, which files and names of folders give, and frames with these columns."""

from __future__ import annotations

import contextlib
import json
import logging
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pyarrow as pa

from gpuclassify.frames import import_cudf
from gpuclassify.hub.dataset_files import SCHEME
from gpuclassify.jobs.arrow_types import changed_schema, inside
from gpuclassify.jobs.files import UnreadableInputError
from gpuclassify.jobs.output.records import JOB
from gpuclassify.jobs.storage import HTTP, open_directory, redacted
from gpuclassify.settings.checks import nearest

logger = logging.getLogger(__name__)

_FIRST_FOLDER = re.compile("/[^/=]+=[^/]*/")  # that gives a column


def common_schema(counts: Mapping[pa.Schema, int]) -> pa.Schema:
    """One schema for data of several, by how many files or lines have each.

    Where they contradict each other, the most frequent wins. A column that is null everywhere may
    hold text further on, and is taken for text.
    """
    types: dict[str, Counter[pa.DataType]] = {}
    for schema, count in counts.items():
        for field in schema:
            types.setdefault(field.name, Counter())[_plain(field.type)] += count
    columns = []
    for name, kinds in types.items():
        common = pa.null()
        for kind, _ in kinds.most_common():
            both = _unified(kind, common)
            common = common if both is None else both  # one without fields is false
        columns.append((name, _nulls_as_text(common)))
    return pa.schema(columns)


def json_schema(schema: pa.Schema) -> pa.Schema:
    """What pyarrow found in JSON, without dates: strings that look like some stay strings."""
    return changed_schema(schema, _without_dates)


def fits(kind: pa.DataType, common: pa.DataType) -> bool:
    """Whether data of one type can be read as that of all files without loss."""
    return _unified(_plain(kind), common) == common


def project(schema: pa.Schema, fields: Sequence[str]) -> pa.Schema:
    """The schema of these columns alone; UnreadableInputError if one is not there."""
    held = set(schema.names)
    for name in fields:
        if name not in held:
            raise UnreadableInputError(
                f"the input has no column {name!r}.{nearest(name, schema.names)} "
                f"Columns are {', '.join(schema.names)}."
            )
    return pa.schema([schema.field(name) for name in fields])


def named_type(column: str, name: str) -> pa.DataType:
    """The Arrow type of this name, for a column; ValueError if there is none."""
    try:
        return pa.type_for_alias(name)
    except (ValueError, TypeError) as err:
        raise ValueError(
            f"types={{{column!r}: {name!r}}}: Arrow has no such type; names are double, int64, "
            "string, bool and the like"
        ) from err


def with_types(schema: pa.Schema, types: Mapping[str, str]) -> pa.Schema:
    """The schema with other types for these columns, which are added where it lacks them."""
    columns = {field.name: field.type for field in schema}
    for name in types:
        if name not in columns:
            logger.warning(
                "types= tells of a column %r that no sample of the input has.%s It is added, and "
                "null where a line lacks it",
                name,
                nearest(name, columns),
            )
    return pa.schema({**columns, **{name: named_type(name, kind) for name, kind in types.items()}})


# Columns that names of folders give, as Hive, pandas and Dask write them: ``lang=de/a.jsonl``.


def folder_schema(paths: Iterable[str]) -> pa.Schema:
    """The columns that names of folders give: text, or integers as pyarrow takes them for."""
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
    """Types of columns that names of folders give, as the job that wrote these files has noted."""
    roots = {path[: found.start()] for path in paths if (found := _FIRST_FOLDER.search(path))}
    types: dict[str, str] = {}
    for root in roots:
        if not root.startswith((*HTTP, SCHEME)):
            with contextlib.suppress(FileNotFoundError, ValueError):
                types |= json.loads(open_directory(root, storage_options).read(JOB))["folders"]
    return types


def folder_values(path: str, schema: pa.Schema) -> dict[str, Any]:
    """What the names of a path's folders give for the columns of `schema`; None for null."""
    from pyarrow import dataset

    try:
        keys = dataset.partitioning(schema, flavor="hive").parse(redacted(path))
    except pa.ArrowInvalid as err:
        raise UnreadableInputError(
            f"folders of {redacted(path)} would be columns, and cannot be read: {err}: rename them"
        ) from err
    return dataset.get_partition_keys(keys)


def missing_column(path: str, held: Iterable[str], common: Iterable[str]) -> str | None:
    """What is wrong with a file whose folders give a column that other files hold and it does not.

    `held` are the file's own columns, `common` those that some file holds.
    """
    given = set(folder_schema([path]).names) - set(held)
    names = [name for name in common if name in given]
    if not names:
        return None
    return (
        f"the names of its folders give {', '.join(names)}, which other files hold as a column: "
        "read them separately, or name the columns to keep without it (fields=)"
    )


def with_folder_values(table: pa.Table, fields: Sequence[str], path: str) -> pa.Table:
    """The table with what a path's folders give for its columns `fields`, where they are null."""
    if fields:
        schema = pa.schema([table.field(name) for name in fields])
        for name, value in folder_values(path, schema).items():
            if value is not None:
                place = table.column_names.index(name)
                filled = table.column(place).fill_null(pa.scalar(value, schema.field(name).type))
                table = table.set_column(place, table.field(place), filled)
    return table


# Frames.


def to_pandas(table: pa.Table) -> pd.DataFrame:
    """A pandas frame with dtypes that do not depend on which values are null."""
    return table.to_pandas(types_mapper=_pandas_dtype)


def to_frame(table: pa.Table, backend: str) -> Any:
    """A plain frame of `backend`, "pandas" or "cudf"."""
    if backend == "pandas":
        return to_pandas(table)
    return import_cudf().DataFrame.from_arrow(table)


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _unified(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """A type that holds both, or None if there is none."""
    try:
        schemas = [pa.schema([("", kind)]) for kind in (one, other)]
        both = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None
    kinds = {
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
        for kind in (one, other)
        if not pa.types.is_null(kind)
    }
    return None if kinds == {True, False} else both  # text does not become bytes


def _without_dates(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_timestamp(kind) else inside(kind, _without_dates)


def _nulls_as_text(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_null(kind) else inside(kind, _nulls_as_text)


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
