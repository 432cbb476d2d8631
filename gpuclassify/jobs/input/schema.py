"""The columns that all parts of an input have, and frames of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from gpuclassify.checks import nearest
from gpuclassify.jobs.files import UnreadableInputError


def common_schema(counts: Mapping[pa.Schema, int]) -> pa.Schema:
    """One schema for data of several; where they contradict each other, the most frequent wins.

    A column that is null everywhere may hold text further on, and is taken for text.

    Parameters
    ----------
    counts : mapping of pyarrow.Schema to int
        How many files or lines have it.
    """
    types: dict[str, Counter[pa.DataType]] = {}
    for schema, count in counts.items():
        for field in schema:
            types.setdefault(field.name, Counter())[_plain(field.type)] += count
    return pa.schema([(name, _common_type(kinds)) for name, kinds in types.items()])


def json_schema(schema: pa.Schema) -> pa.Schema:
    """What pyarrow found in JSON, without dates: strings that look like some stay strings."""
    return pa.schema([field.with_type(_without_dates(field.type)) for field in schema])


def fits(schema: pa.Schema, common: pa.Schema) -> bool:
    """Whether data of `schema` can be read as `common` without loss."""
    return all(
        _unified(_plain(field.type), common.field(field.name).type) == common.field(field.name).type
        for field in schema
        if field.name in common.names
    )


def project(schema: pa.Schema, fields: Sequence[str]) -> pa.Schema:
    """The schema of these columns alone.

    Raises
    ------
    UnreadableInputError
        One of them is not there.
    """
    for name in fields:
        if name not in schema.names:
            raise UnreadableInputError(
                f"the input has no column {name!r}.{nearest(name, schema.names)} "
                f"Columns are {', '.join(schema.names)}."
            )
    return pa.schema([schema.field(name) for name in fields])


def named_type(column: str, name: str) -> pa.DataType:
    """The Arrow type of this name, for a column.

    Raises
    ------
    ValueError
        There is none.
    """
    try:
        return pa.type_for_alias(name)
    except (ValueError, TypeError) as err:
        raise ValueError(
            f"types={{{column!r}: {name!r}}}: Arrow has no such type; names are double, int64, "
            "string, bool and the like"
        ) from err


def with_types(schema: pa.Schema, types: Mapping[str, str]) -> pa.Schema:
    """The schema with other types for these columns, which are added where it lacks them."""
    columns = {field.name: field for field in schema}
    for name, kind in types.items():
        column = columns.get(name, pa.field(name, pa.null()))
        columns[name] = column.with_type(named_type(name, kind))
    return pa.schema(columns.values())


def to_pandas(table: pa.Table) -> pd.DataFrame:
    """A pandas frame with dtypes that do not depend on which values are null."""
    return table.to_pandas(types_mapper=_pandas_dtype)


def to_frame(table: pa.Table, backend: str) -> Any:
    """A plain frame of `backend`, "pandas" or "cudf"."""
    if backend == "pandas":
        return to_pandas(table)
    import cudf

    return cudf.DataFrame.from_arrow(table)


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _common_type(kinds: Counter[pa.DataType]) -> pa.DataType:
    common = pa.null()
    for kind, _ in kinds.most_common():
        common = _unified(kind, common) or common
    return _nulls_as_text(common)


def _unified(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """A type that holds both, or None if there is none."""
    try:
        schemas = [pa.schema([("", kind)]) for kind in (one, other)]
        both = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None
    kinds = {_is_bytes(kind) for kind in (one, other) if not pa.types.is_null(kind)}
    return None if kinds == {True, False} else both  # text does not become bytes


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _without_dates(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_timestamp(kind) else _inside(kind, _without_dates)


def _nulls_as_text(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_null(kind) else _inside(kind, _nulls_as_text)


def _inside(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """The type with what it consists of changed."""
    if pa.types.is_list(kind):
        return pa.list_(change(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(change(field.type)) for field in kind.fields])
    return kind


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
