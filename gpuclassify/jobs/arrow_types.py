"""Nested Arrow types with something in them changed, such as objects without fields."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

Change = Callable[[pa.DataType], pa.DataType]

NO_FIELDS = pa.struct([])
# Parquet has no object without fields. One field stands for none, by the name that Spark has for it
# in empty messages of protobuf; of the null type, so that nothing can be lost with it.
STORED_NO_FIELDS = pa.struct([("__dummy_field_in_empty_struct", pa.null())])


def stored(kind: pa.DataType) -> pa.DataType:
    """The type that a Parquet file has for it."""
    return STORED_NO_FIELDS if kind == NO_FIELDS else inside(kind, stored)


def restored(kind: pa.DataType) -> pa.DataType:
    """The type that was written as this one; see `stored`."""
    return NO_FIELDS if kind == STORED_NO_FIELDS else inside(kind, restored)


def holds_no_fields(kind: pa.DataType) -> bool:
    """Whether objects without fields are in values of this type."""
    return stored(kind) != kind


def changed(table: pa.Table, change: Change) -> pa.Table:
    """The table with the types of its columns changed."""
    return cast(table, changed_schema(table.schema, change))


def cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table as `schema`, whose names are its own.

    Arrow 26 breaks nested lists of objects with nulls that it casts to the type that they have.
    """
    columns = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(table.columns, schema, strict=True)
    ]
    return pa.table(columns, schema=schema)


def changed_schema(schema: pa.Schema, change: Change) -> pa.Schema:
    """The schema with the types of its columns changed."""
    fields = [field.with_type(change(field.type)) for field in schema]
    return pa.schema(fields, metadata=schema.metadata)


def inside(kind: pa.DataType, change: Change) -> pa.DataType:
    """The type with what it consists of changed."""
    new = kind
    if pa.types.is_list(kind):
        new = pa.list_(change(kind.value_type))
    elif pa.types.is_large_list(kind):
        new = pa.large_list(change(kind.value_type))
    elif pa.types.is_fixed_size_list(kind):
        new = pa.list_(change(kind.value_type), kind.list_size)
    elif pa.types.is_map(kind):
        new = pa.map_(kind.key_type, change(kind.item_type))
    elif pa.types.is_struct(kind):
        new = pa.struct([field.with_type(change(field.type)) for field in kind.fields])
    return kind if new == kind else new
