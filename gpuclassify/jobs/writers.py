"""Parquet and JSONL files that every reader takes without an option."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gpuclassify.jobs.storage import open_directory

PARQUET, JSONL = "parquet", "jsonl"
FORMATS = (PARQUET, JSONL)


def to_parquet(
    dataset: Any,
    path: str,
    *,
    overwrite: bool = False,
    compute: bool = True,
    storage_options: dict[str, Any] | None = None,
) -> Any:
    """Write a frame as Parquet that pandas, Dask, cudf, pyarrow and DuckDB read without an option.

    List columns (class scores) are the reason for it: in a file that ``DataFrame.to_parquet``
    wrote, the pandas metadata names a dtype of the list column that a plain ``read_parquet``
    cannot parse, and reading fails. Here the column is declared as object, and everything else in
    the metadata (index, dtypes) is kept. In cudf frames the columns are Arrow lists already.

    Parameters
    ----------
    dataset : dask.dataframe.DataFrame, pandas.DataFrame or cudf.DataFrame
    path : str
        Directory, or fsspec URL of one. One file ``part-00000.parquet`` a partition.
    overwrite : bool, default False
        Remove part files that are there already.
    compute : bool, default True
        ``False`` returns one delayed object that writes when computed.
    storage_options : dict, optional
        For fsspec.

    Returns
    -------
    list of str, or dask.delayed.Delayed
        The files written.

    Raises
    ------
    FileExistsError
        `path` holds part files and `overwrite` is not set.
    ValueError
        `dataset` is read from `path`, where overwriting would remove it before it is read.
    """
    import dask

    is_lazy = dask.is_dask_collection(dataset)
    if is_lazy and overwrite:
        _check_is_not_read(dataset, path, storage_options)
    tasks = write_tasks(
        dataset,
        path,
        PARQUET,
        overwrite=overwrite,
        storage_options=storage_options,
        keep_index=True if is_lazy else None,
    )
    written = dask.delayed(list)(tasks)
    return written.compute() if compute else written


def write_tasks(
    dataset: Any,
    path: str,
    file_format: str,
    *,
    overwrite: bool = False,
    storage_options: dict[str, Any] | None = None,
    summarize: Callable[[Any, str], Any] | None = None,
    keep_index: bool | None = None,
) -> list[Any]:
    """One delayed task a partition that writes it and returns its path.

    Parameters
    ----------
    dataset : frame
        Of Dask, pandas or cudf.
    path : str
        Directory or URL.
    file_format : {"parquet", "jsonl"}
    overwrite : bool
    storage_options : dict, optional
    summarize : callable, optional
        ``summarize(frame, path)`` is returned by the task instead of the path.
    keep_index : bool, optional
        Whether Parquet files get the index as a column. None decides by the index of each part, so
        that a filter would give some parts the column and others not.
    """
    import dask

    directory = open_directory(path, storage_options)
    directory.prepare(overwrite, [f".{name}" for name in FORMATS])
    parts = dataset.to_delayed() if dask.is_dask_collection(dataset) else [dataset]
    digits = max(5, len(str(len(parts) - 1)))
    write = dask.delayed(write_part, pure=False)
    return [
        write(
            part,
            path,
            f"part-{number:0{digits}d}",
            file_format,
            storage_options,
            summarize,
            keep_index,
        )
        for number, part in enumerate(parts)
    ]


def write_part(
    frame: Any,
    path: str,
    name: str,
    file_format: str,
    storage_options: dict[str, Any] | None,
    summarize: Callable[[Any, str], Any] | None,
    keep_index: bool | None = None,
) -> Any:
    """Write one plain frame as the file `name` under `path`; returns its path or its summary.

    The file appears under its name only when it is whole.
    """
    directory = open_directory(path, storage_options)
    target = posixpath.join(directory.root, f"{name}.{file_format}")
    with directory.replacing(target) as file:
        if file_format == PARQUET:
            pq.write_table(arrow_table(frame, keep_index), file, compression="zstd")
        else:
            _write_json_lines(frame, file)
    return target if summarize is None else summarize(frame, target)


def arrow_table(frame: Any, keep_index: bool | None = None) -> pa.Table:
    """An Arrow table of a plain pandas or cudf frame, with metadata that plain readers take."""
    import pandas as pd

    if not isinstance(frame, pd.DataFrame):
        return frame.to_arrow(preserve_index=keep_index)
    table = pa.Table.from_pandas(frame, preserve_index=keep_index)
    return table.replace_schema_metadata(_plain_metadata(table.schema.metadata))


def _check_is_not_read(dataset: Any, path: str, storage_options: dict[str, Any] | None) -> None:
    from dask.dataframe.dask_expr.io.parquet import ReadParquet

    directory = open_directory(path, storage_options)
    for read in dataset.expr.find_operations(ReadParquet):
        sources = read.path if isinstance(read.path, list) else [read.path]
        for source in map(str, sources):
            if directory.holds(source) or directory.holds(posixpath.join(source, "part")):
                raise ValueError(
                    f"the dataset is read from {source}, and overwriting {path} would remove it "
                    "first: write to another directory"
                )


def _plain_metadata(metadata: dict[bytes, bytes]) -> dict[bytes, bytes]:
    declared = json.loads(metadata[b"pandas"])
    for column in declared["columns"]:
        if "list<" in str(column["numpy_type"]):
            column["numpy_type"] = "object"
    return {**metadata, b"pandas": json.dumps(declared).encode()}


def _write_json_lines(frame: Any, file: Any) -> None:
    """One JSON object a row; the index is left out, as in pandas' ``orient="records"``."""
    for record in arrow_table(frame.reset_index(drop=True)).to_pylist():
        file.write(json.dumps(record, ensure_ascii=False, default=str).encode("utf-8", "replace"))
        file.write(b"\n")
