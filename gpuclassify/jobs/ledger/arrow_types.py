"""Convert nested Arrow types, to types that Parquet can store and to common types."""

from __future__ import annotations

import pyarrow as pa

from gpuclassify.frames import Change, cast_views, is_text, map_nested, plain_type

_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
NO_FIELDS = pa.struct([])
# Parquet has no objects without fields. They are stored with one field of nulls, whose name Spark
# uses for empty protobuf messages.
STORED_NO_FIELDS = pa.struct([("__dummy_field_in_empty_struct", pa.null())])


def stored(kind: pa.DataType) -> pa.DataType:
    """Return the type that stores `kind` in a Parquet file.

    At any nesting, a struct without fields gets a field of nulls, because Parquet has no such
    structs. JSON becomes text, because some readers may refuse JSON. Types with views become plain,
    because pyarrow does not write views in dictionaries and in lists of a fixed size.
    """
    if isinstance(kind, pa.JsonType):
        return kind.storage_type
    if "_view" in str(kind):
        kind = plain_type(kind)
    return STORED_NO_FIELDS if kind == NO_FIELDS else map_nested(kind, stored)


def restored(kind: pa.DataType) -> pa.DataType:
    """Reverse `stored` for structs without fields, at any nesting, but not for JSON and views."""
    return NO_FIELDS if kind == STORED_NO_FIELDS else map_nested(kind, restored)


def holds_no_fields(kind: pa.DataType) -> bool:
    """Return whether `stored` would change a type: for structs without fields, JSON and views."""
    return stored(kind) != kind


def changed(table: pa.Table, change: Change) -> pa.Table:
    """Cast each column of a table to the type that `change` returns for the column's type."""
    return cast(table, changed_schema(table.schema, change))


def union(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return the Arrow type that values of both types can be cast to, at any nesting.

    For example, int32 and int64 give int64, and a null type gives the other type. Structs get the
    fields of both. Unequal types must have no dictionaries and views. Raises ArrowTypeError or
    ArrowInvalid if there is no such type.
    """
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        fields = {field.name: field.type for field in one}
        for field in other:
            fields[field.name] = union(fields.get(field.name, pa.null()), field.type)
        if len(fields) < max(one.num_fields, other.num_fields):
            raise pa.ArrowTypeError("several fields of an object have one name")
        return pa.struct(list(fields.items()))
    if pa.types.is_map(one) and pa.types.is_map(other):
        return pa.map_(union(one.key_type, other.key_type), union(one.item_type, other.item_type))
    if all(any(is_kind(kind) for is_kind in _LISTS) for kind in (one, other)):
        is_large = pa.types.is_large_list(one) or pa.types.is_large_list(other)
        make = pa.large_list if is_large else pa.list_
        return make(union(one.value_type, other.value_type))
    if isinstance(one, pa.JsonType) or isinstance(other, pa.JsonType):
        return union(plain_type(one), plain_type(other))
    schemas = [pa.schema([("", kind)]) for kind in (one, other)]
    both = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    if is_text(one) != is_text(other):
        raise pa.ArrowTypeError("text does not become bytes")
    for kind in (one, other):
        pa.nulls(1, kind).cast(both)  # raises for integers that some decimals cannot hold
    return both


def cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Cast the columns of a table, in order, to the types of `schema`, which has the same names.

    Unlike pyarrow, this also casts JSON columns to text, columns of nulls to any type, and structs
    to structs with added, reordered or all-null fields. The result has the schema's metadata.
    """
    columns = [
        _cast(column, field.type) for column, field in zip(table.columns, schema, strict=True)
    ]
    return pa.table(columns, schema=schema)


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    # Arrow 26 corrupts nested lists of objects with nulls in a cast to the same type.
    if column.type == kind:
        return column
    if isinstance(column.type, pa.JsonType):  # has a cast to its storage type only
        column = column.cast(column.type.storage_type)
    if column.null_count == len(column):
        return pa.chunked_array([pa.nulls(len(column), kind)])
    if "_view" in str(column.type) and not is_text(column.type):
        return cast_views(column, kind)
    try:
        return column.cast(kind)
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError):
        # Arrow does not cast all-null fields of objects, nor, before Arrow 21, reorder fields.
        if not pa.types.is_nested(kind) or not pa.types.is_nested(column.type):
            raise
        return pa.chunked_array([pa.array(column.to_pylist(), kind)])


def changed_schema(schema: pa.Schema, change: Change) -> pa.Schema:
    """Return the schema with `change` applied to each field's type."""
    fields = [field.with_type(change(field.type)) for field in schema]
    return pa.schema(fields, metadata=schema.metadata)
