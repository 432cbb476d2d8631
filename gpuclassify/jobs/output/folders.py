"""Rows in folders that values of columns name, such as ``bucket=19``, in the way of Hive."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.jobs.output.encoding import Encoding
from gpuclassify.jobs.output.exclusive import ensure
from gpuclassify.jobs.output.run_key import check_current, key_in
from gpuclassify.jobs.storage import Directory
from gpuclassify.settings.checks import nearest

NULL = "__HIVE_DEFAULT_PARTITION__"  # what Hive, Spark and pyarrow take for it
MOST_VALUES = 1_000  # of a column, in one part
MOST_NAME_BYTES = 255  # of a folder, on the file systems in use
_NAMES_FOLDERS = (
    *(pa.types.is_string, pa.types.is_large_string, pa.types.is_dictionary),
    *(pa.types.is_integer, pa.types.is_boolean),
)


class UnnamedFolderError(ValueError):
    """No folder can be named by a value, or the name would be read as that of another value."""


def folder_types(names: Sequence[str], schema: pa.Schema) -> dict[str, str]:
    """Arrow types of the columns `names`, whose values name folders of an output.

    Raises
    ------
    ValueError
        There is no such column, or no other one.
    TypeError
        A column holds something else than text, whole numbers or booleans.
    """
    types = {}
    for name in names:
        if name not in schema.names:
            raise ValueError(
                f"partition_by={name!r} is no column of the output; columns are {schema.names}."
                f"{nearest(name, schema.names)}"
            )
        kind = schema.field(name).type
        if not any(is_kind(kind) for is_kind in _NAMES_FOLDERS):
            raise TypeError(
                f"partition_by={name!r} holds {kind}: folders are named by text, whole numbers or "
                "booleans, such as buckets of scores"
            )
        types[name] = str(kind.value_type if pa.types.is_dictionary(kind) else kind)
    if {*names} == {*schema.names}:
        raise ValueError(f"partition_by={[*names]} leaves no column for the files")
    return types


def check_values(table: pa.Table, names: Sequence[str]) -> None:
    """Raise unless folders can be named by the values of the columns `names`.

    Raises
    ------
    UnnamedFolderError
        A name would be too long for a file system, or be read as null.
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
    """All rows of a part, for `folder_files`.

    Raises
    ------
    ValueError
        A column of `names` has more than `MOST_VALUES` values.
    """
    for name in names:
        count = pc.count_distinct(table[name], mode="all").as_py()
        if count > MOST_VALUES:
            raise ValueError(
                f"partition_by={name!r} has {count:,} values in {len(table):,} rows, such as "
                f"{table[name][0].as_py()!r}, and each would be a folder: name a column of at most "
                f"{MOST_VALUES:,} values"
            )
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def folder_files(name: str, content: bytes, encoding: Encoding) -> dict[str, bytes]:
    """The files of a part by their paths, one for each of its folders.

    Parameters
    ----------
    name : str
        Of the part.
    content : bytes
        From `pack_rows`; whoever asks with the same gets the same files.
    encoding : Encoding

    Raises
    ------
    RuntimeError
        The files would have other rows than the part.
    """
    table = pa.ipc.open_stream(content).read_all()
    split = split_by_folder(table, encoding.partition_by)
    files = {f"{folder}/{name}": encoding.encode(rows) for folder, rows in split.items()}
    encoding.check_rows(files.values(), len(table))
    return files


def spread(directory: Directory, files: Mapping[str, bytes], scratch: str) -> None:
    """Create the files of a part in its folders, unless they are there.

    Parameters
    ----------
    directory : Directory
    files : mapping
        From `folder_files`.
    scratch : str
        Folder of the directory for private files.

    Raises
    ------
    JobChangedError
        Another run has started over meanwhile, whose output this would be in.
    """
    for path, content in files.items():
        check_current(directory, key_in(path))
        directory.make(posixpath.dirname(path))
        # Another version of Arrow may have written another file of the same rows.
        ensure(directory, path, content, scratch, is_lasting=True)


def split_by_folder(table: pa.Table, names: Sequence[str]) -> dict[str, pa.Table]:
    """The rows by the folder that the values of columns name; in their order, without the columns.

    Folders are called ``column=value``, percent-encoded; several columns make one in the other.
    Columns hold what `check_values` lets pass.
    """
    if not names:
        return {"": table}
    name, *rest = names
    column = table[name].combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    encoded = column.dictionary_encode(null_encoding="encode")
    values, codes = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
    ordered = _without(table, name).take(np.argsort(codes, kind="stable"))
    counts = np.bincount(codes, minlength=len(values))
    split = {}
    for value, start, rows in zip(values, np.cumsum(counts) - counts, counts, strict=True):
        for below, own in split_by_folder(ordered.slice(start, rows), rest).items():
            split[posixpath.join(_folder(name, value), below).rstrip("/")] = own
    return split


def _folder(name: str, value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"{quote(name, safe='')}={NULL if value is None else quote(text, safe='')}"


def _without(table: pa.Table, name: str) -> pa.Table:
    """The table without a column, which its metadata must not declare then."""
    declared = json.loads(table.schema.metadata[b"pandas"])
    declared["columns"] = [each for each in declared["columns"] if each["name"] != name]
    metadata = {**table.schema.metadata, b"pandas": json.dumps(declared).encode()}
    return table.drop_columns([name]).replace_schema_metadata(metadata)
