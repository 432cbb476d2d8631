"""Parquet and JSONL files that every reader takes without an option."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from typing import Any

from gpuclassify.hub.dataset_files import SCHEME
from gpuclassify.jobs.files import JSONL, PARQUET
from gpuclassify.jobs.output.encoding import Encoding, arrow_table
from gpuclassify.jobs.storage import Directory, open_directory, redacted
from gpuclassify.settings.checks import check_choice, check_text, label_tuple
from gpuclassify.settings.options import NON_FINITE

SUFFIXES = (".parquet", ".jsonl")
PARQUET_COMPRESSIONS = ("zstd", "snappy", "gzip", "lz4", "none")
JSONL_COMPRESSIONS = (None, "gzip", "zstd")


class FileWriter:
    """Files as the output of a `gpuclassify.jobs.pipeline.Pipeline`, one a part.

    With `partition_by`, one a part and folder: ``OUTPUT/bucket=19/part-00007-....parquet``, which
    pyarrow, Dask, DuckDB and `FileReader` read back with the column. A part without rows writes no
    file. Null is the folder ``bucket=__HIVE_DEFAULT_PARTITION__``, which pandas and Dask refuse to
    read, and the others take for null; that text itself, and values whose folder's name would have
    more than 255 bytes, are refused, or left out by ``on_error="quarantine"``. `FileReader` gives
    the column back with the type that it had; others infer it from the names, so that text of
    whole numbers becomes numbers and booleans become text, unless they are given a schema.

    Parameters
    ----------
    path : str
        Directory, or fsspec URL of one.
    compression : str, optional
        See the classes. Default: zstd for Parquet, none for JSON lines.
    partition_by : str or sequence of str, optional
        Columns of text, whole numbers or booleans whose values are names of folders, instead of a
        column of the files; the first one's are outermost. A part may have 1,000 values.
    storage_options : dict, optional
        For fsspec. Never part of a plan, a record or a message.
    non_finite : {"null", "literal", "string"}
        Of JSON lines; see `JsonlWriter`.

    Raises
    ------
    TypeError
        The path is empty.
    """

    file_format: str
    compressions: tuple[str | None, ...]  # the first is the default

    def __init__(
        self,
        path: str,
        *,
        compression: str | None = None,
        partition_by: str | Sequence[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        non_finite: str = NON_FINITE[0],
    ) -> None:
        compression = self.compressions[0] if compression is None else compression
        check_choice("compression", compression, self.compressions)
        check_choice("non_finite", non_finite, NON_FINITE)
        if self.file_format == PARQUET and non_finite != NON_FINITE[0]:
            raise ValueError(
                f"non_finite={non_finite!r} is of JSON lines: Parquet has infinities and NaN itself"
            )
        check_text("path", str(path), "a path: '.' is the current directory")
        if str(path).startswith(SCHEME):
            raise ValueError(
                f"{redacted(str(path))}: on the Hub, each file would be a commit of its own; "
                'HubWriter("OWNER/NAME", staging="out/") makes one of all'
            )
        self.path = str(path)
        names = label_tuple("partition_by", partition_by, keep_order=True) or ()
        folders = tuple(dict.fromkeys(names))
        self.encoding = Encoding(self.file_format, compression, folders, non_finite)
        self.storage_options = dict(storage_options or {})

    def __repr__(self) -> str:
        options = f", compression={self.encoding.compression!r}"
        if self.encoding.partition_by:
            options += f", partition_by={[*self.encoding.partition_by]}"
        if self.encoding.non_finite != NON_FINITE[0]:
            options += f", non_finite={self.encoding.non_finite!r}"
        return f"{type(self).__name__}({redacted(self.path)!r}{options})"

    @property
    def directory(self) -> Directory:
        """Where it writes."""
        return open_directory(self.path, self.storage_options)

    @property
    def keeps_index(self) -> bool:
        """Whether an index that is no plain count becomes a column."""
        return self.file_format == PARQUET

    @property
    def has_report(self) -> bool:
        """Whether people get a report of the job."""
        return True

    def check(self, parts: int) -> None:
        """Raise unless so many parts may be written, as far as can be known beforehand."""

    def is_uploaded(self) -> bool:
        """Whether nothing is left to upload of a finished output."""
        return True

    def upload(self, client: Any, *, restart: bool = False) -> str:
        """Upload a finished output where it has a place to go to; its address, or nothing.

        With `restart`, what is there is asked for, even if an earlier run has uploaded everything.
        """
        return ""


class JsonlWriter(FileWriter):
    """JSON lines; `compression` is None, "gzip" or "zstd". An index is left out.

    JSON has no value for bytes, which become base64, nor for times and decimals, which become text,
    nor for infinities and NaN. By `non_finite`, these become

    * ``"null"`` (default), which every reader takes, and which tells them from nothing no more;
    * ``"literal"``: ``NaN``, ``Infinity`` and ``-Infinity``, which are no JSON. Python, pandas,
      pyarrow, DuckDB, Spark and `JsonlReader` read them as what they were; jq and JavaScript do
      not;
    * ``"string"``: ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, as Spark and protobuf write them.
      pandas, and DuckDB and Spark that are told the column's type, read them as what they were;
      pyarrow and `JsonlReader` refuse a column of numbers and text.

    NaN in a column of numbers of a pandas frame is null there already, and so in every format: it
    is what pandas has for null. Within lists and objects, and in frames of cudf, it is kept.
    """

    file_format = JSONL
    compressions = JSONL_COMPRESSIONS


class ParquetWriter(FileWriter):
    """Parquet files; `compression` is "zstd", "snappy", "gzip", "lz4" or "none".

    Parquet has no object without fields: where all that a column or field holds is ``{}``, files
    have an object whose only field, ``__dummy_field_in_empty_struct`` as Spark calls it, is null.
    `ParquetReader` takes it for ``{}`` again.
    """

    file_format = PARQUET
    compressions = PARQUET_COMPRESSIONS


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
    cannot parse, and reading fails. So it is with Arrow's structs and maps, and in cudf frames with
    columns that came from pandas. Here such a column is declared as object, and everything else in
    the metadata (index, dtypes) is kept.

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
    open_directory(path, storage_options).prepare(overwrite, SUFFIXES)
    parts = dataset.to_delayed() if is_lazy else [dataset]
    digits = max(5, len(str(len(parts) - 1)))
    write = dask.delayed(_write_part, pure=False)
    # Decided once: by the index of each part, a filter would give only some parts the column.
    keep_index = True if is_lazy else None
    written = dask.delayed(list)(
        [
            write(part, path, f"part-{number:0{digits}d}.parquet", storage_options, keep_index)
            for number, part in enumerate(parts)
        ]
    )
    return written.compute() if compute else written


def _write_part(
    frame: Any,
    path: str,
    name: str,
    storage_options: dict[str, Any] | None,
    keep_index: bool | None,
) -> str:
    """Write a plain frame as a file, which appears only when it is whole; returns its path."""
    directory = open_directory(path, storage_options)
    content = Encoding(PARQUET, "zstd").encode(arrow_table(frame, keep_index))
    directory.replace(name, content)
    return directory.path(name)


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
