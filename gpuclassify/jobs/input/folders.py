"""Columns that names of folders tell, as Hive, pandas and Dask write them: ``lang=de/a.jsonl``."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import unquote

import pyarrow as pa

from gpuclassify.jobs.files import UnreadableInputError, redacted

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_TOLD = {b"told by": b"folders"}  # marks the fields of a schema that no file holds


def folder_values(path: str) -> dict[str, str | None]:
    """What the folders of a path or URL tell, the outermost first, which wins as in pyarrow.

    Raises
    ------
    UnreadableInputError
        A name is not UTF-8 where it has percent signs.
    """
    values: dict[str, str | None] = {}
    for folder in redacted(path).split("/")[:-1]:
        name, _, value = folder.partition("=")
        if not name or name == folder:
            continue
        try:
            name, value = unquote(name, errors="strict"), unquote(value, errors="strict")
        except UnicodeDecodeError as err:
            raise UnreadableInputError(
                f"the folder {folder!r} of {redacted(path)} would be a column, and is not UTF-8: "
                "rename it"
            ) from err
        values.setdefault(name, None if value == HIVE_NULL else value)
    return values


def with_folders(schema: pa.Schema, paths: Iterable[str]) -> pa.Schema:
    """The schema with the columns that folders tell and no file holds, as its last ones.

    Text, or integers where all of them are, which is what pyarrow takes them for too.
    """
    told: dict[str, set[str | None]] = {}
    for path in paths:
        for name, value in folder_values(path).items():
            told.setdefault(name, set()).add(value)
    columns = [
        pa.field(name, _type(values), metadata=_TOLD)
        for name, values in told.items()
        if name not in schema.names
    ]
    return pa.schema([*schema, *columns])


def doubtful(path: str, held: Iterable[str], schema: pa.Schema) -> str | None:
    """What is wrong with a file whose folders tell a column that other files hold and it does not.

    Parameters
    ----------
    path : str
    held : iterable of str
        The file's own columns.
    schema : pyarrow.Schema
        Of `with_folders`.
    """
    told = folder_values(path).keys() - set(held)
    names = [field.name for field in schema if field.name in told and field.metadata != _TOLD]
    if not names:
        return None
    return (
        f"the names of its folders tell {', '.join(names)}, which other files hold as a column: "
        "read them separately, or name the columns to keep without it (fields=, --field)"
    )


def with_values(table: pa.Table, schema: pa.Schema, path: str) -> pa.Table:
    """The table with the values of the columns that `with_folders` has added to its schema."""
    values: dict[str, str | None] = {}
    for place, field in enumerate(schema):
        if field.metadata == _TOLD:
            values = values or folder_values(path)
            value = pa.scalar(values.get(field.name), pa.string()).cast(field.type)
            if value.is_valid:
                column = table.column(place).fill_null(value)
                table = table.set_column(place, table.field(place), column)
    return table


def _type(values: set[str | None]) -> pa.DataType:
    known = [value for value in values if value is not None]
    try:
        pa.array(known, pa.string()).cast(pa.int32())
    except pa.ArrowInvalid:
        return pa.string()
    return pa.int64() if known else pa.string()
