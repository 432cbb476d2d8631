"""Parquet and JSONL files that every reader takes without an option."""

from __future__ import annotations

import posixpath
from typing import Any

from gpuclassify.checks import check_choice
from gpuclassify.hub.dataset_files import SCHEME
from gpuclassify.jobs.files import JSONL, PARQUET, redacted
from gpuclassify.jobs.output.encoding import Encoding, arrow_table
from gpuclassify.jobs.storage import Directory, open_directory

SUFFIXES = (".parquet", ".jsonl")
PARQUET_COMPRESSIONS = ("zstd", "snappy", "gzip", "lz4", "none")
JSONL_COMPRESSIONS = (None, "gzip", "zstd")


class FileWriter:
    """Files as the output of a `gpuclassify.jobs.pipeline.Pipeline`, one a part.

    Parameters
    ----------
    path : str
        Directory, or fsspec URL of one.
    compression : str, optional
        See the classes.
    storage_options : dict, optional
        For fsspec. Never part of a plan, a record or a message.
    """

    file_format: str
    compressions: tuple[str | None, ...]

    def __init__(
        self,
        path: str,
        *,
        compression: str | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        check_choice("compression", compression, self.compressions)
        if str(path).startswith(SCHEME):
            raise ValueError(
                f"{redacted(str(path))}: on the Hub, each file would be a commit of its own; "
                'HubWriter("OWNER/NAME", staging="out/") makes one of all'
            )
        self.path = str(path)
        self.encoding = Encoding(self.file_format, compression)
        self.storage_options = dict(storage_options or {})

    def __repr__(self) -> str:
        compression = f", compression={self.encoding.compression!r}"
        return f"{type(self).__name__}({redacted(self.path)!r}{compression})"

    @property
    def directory(self) -> Directory:
        """Where it writes."""
        return open_directory(self.path, self.storage_options)

    @property
    def keeps_index(self) -> bool:
        """Whether an index that is no plain count becomes a column."""
        return self.file_format == PARQUET

    def check(self, parts: int) -> None:
        """Raise unless so many parts may be written, as far as it is known beforehand."""

    def publish(self, client: Any, *, restart: bool = False) -> str:
        """Bring a job's output, once it is whole, to where it belongs.

        Parameters
        ----------
        client : distributed.Client or None
        restart : bool
            Do it again, even if it is done.

        Returns
        -------
        str
            Where it is then; empty if that is where it was written.
        """
        return ""


class JsonlWriter(FileWriter):
    """JSON lines; `compression` is None, "gzip" or "zstd". An index is left out.

    What JSON has no word for: NaN and infinities become null, bytes become base64, times and
    decimals become text.
    """

    file_format = JSONL
    compressions = JSONL_COMPRESSIONS


class ParquetWriter(FileWriter):
    """Parquet files; `compression` is "zstd", "snappy", "gzip", "lz4" or "none"."""

    file_format = PARQUET
    compressions = PARQUET_COMPRESSIONS

    def __init__(
        self,
        path: str,
        *,
        compression: str = "zstd",
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(path, compression=compression, storage_options=storage_options)


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
    write = dask.delayed(write_part, pure=False)
    # Decided once: by the index of each part, a filter would give only some parts the column.
    keep_index = True if is_lazy else None
    written = dask.delayed(list)(
        [
            write(part, path, name, PARQUET, storage_options, keep_index)
            for part, name in zip(parts, part_names(len(parts)), strict=True)
        ]
    )
    return written.compute() if compute else written


def part_names(count: int) -> list[str]:
    """Names of part files, without suffix, that sort in the order of the parts."""
    digits = max(5, len(str(count - 1)))
    return [f"part-{number:0{digits}d}" for number in range(count)]


def write_part(
    frame: Any,
    path: str,
    name: str,
    file_format: str,
    storage_options: dict[str, Any] | None = None,
    keep_index: bool | None = None,
) -> str:
    """Write one plain frame as the file `name` in the directory `path`; returns the file's path.

    The file appears under its name only when it is whole.

    Parameters
    ----------
    frame : pandas.DataFrame or cudf.DataFrame
    path : str
        Directory or URL.
    name : str
        Without suffix.
    file_format : {"parquet", "jsonl"}
    storage_options : dict, optional
        For fsspec.
    keep_index : bool, optional
        Whether a Parquet file gets the index as a column; None leaves out a plain count only.
    """
    directory = open_directory(path, storage_options)
    target = posixpath.join(directory.root, f"{name}.{file_format}")
    encoding = Encoding(file_format, "zstd" if file_format == PARQUET else None)
    if file_format == JSONL:
        frame, keep_index = frame.reset_index(drop=True), None
    with directory.replacing(target) as file:
        file.write(encoding.encode(arrow_table(frame, keep_index)))
    return target


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
