"""Parquet and JSONL files that every reader takes without an option."""

from __future__ import annotations

import contextlib
import hashlib
import posixpath
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from gpuclassify.frames import Frame
from gpuclassify.jobs.input.sources import frame_names, refuse_overlap
from gpuclassify.jobs.ledger.encoding import Encoding, arrow_table
from gpuclassify.jobs.stores.names import JSONL, PARQUET, file_format, redacted
from gpuclassify.jobs.stores.opening import open_store, store_type
from gpuclassify.jobs.stores.store import FILES_AT_A_TIME, Store, new_mark
from gpuclassify.settings.checks import check_choice, check_text, label_tuple
from gpuclassify.settings.declared import Declared, declared, setting
from gpuclassify.workers.secrets import name_of_options, remember

if TYPE_CHECKING:
    from distributed import Client

PARQUET_COMPRESSIONS = ("zstd", "snappy", "gzip", "lz4", "none")
JSONL_COMPRESSIONS = (None, "gzip", "zstd")


def _folders(names: Any) -> tuple[str, ...] | None:
    folders = label_tuple("partition_by", names, keep_order=True)
    return None if folders is None else tuple(dict.fromkeys(folders))


@declared
class FileWriter(Declared):
    """Files as the output of a `gpuclassify.jobs.pipeline.Pipeline`, one a part.

    With `partition_by`, one a part and folder: ``OUTPUT/bucket=19/part-00007-....parquet``, which
    pyarrow, Dask, DuckDB and `FileReader` read back with the column. A part without rows writes no
    file. Null is the folder ``bucket=__HIVE_DEFAULT_PARTITION__``, which pandas and Dask refuse to
    read, and the others take for null; that text itself, and values whose folder's name would have
    more than 255 bytes, are refused, or left out by ``on_error="quarantine"``. `FileReader` gives
    the column back with the type that it had; others infer it from the names, so that text of
    whole numbers becomes numbers and booleans become text, unless they get a schema.

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

    Raises
    ------
    TypeError
        The path is empty.
    """

    path: Any = setting(kw_only=False, convert=str)
    compression: str | None = None
    partition_by: str | Sequence[str] | None = setting(default=None, convert=_folders)
    storage_options: dict[str, Any] = setting(default=None, is_secret=True, is_hashed=False)

    def check_together(self) -> None:
        """Raise TypeError or ValueError unless the format has the settings; choose compression."""
        compressions = PARQUET_COMPRESSIONS if self.file_format == PARQUET else JSONL_COMPRESSIONS
        if self.compression is None:
            self._set("compression", compressions[0])
        check_choice("compression", self.compression, compressions)
        check_text("path", self.address, "a path: '.' is the current directory")
        store_type(self.address).check_output(self.address)
        self._set("storage_options", dict(self.storage_options or {}))

    def settings(self) -> dict[str, Any]:
        """Return the settings by name, without secrets in URLs."""
        return super().settings() | {"path": redacted(self.path)}

    def __repr__(self) -> str:
        return self.code()

    @property
    def file_format(self) -> str:
        """Format of the files: "parquet" or "jsonl"."""
        raise NotImplementedError

    @property
    def annotates(self) -> bool:
        """Whether new columns are written beside the input, instead of rows."""
        return False

    @property
    def address(self) -> str:
        """Path or URL of the directory."""
        return self.path

    @property
    def encoding(self) -> Encoding:
        """How files are written."""
        folders = tuple(self.partition_by or ())
        return Encoding(self.file_format, self.compression, folders)

    @property
    def directory(self) -> Store:
        """Directory of the output; workers open it by the storage options shared with them."""
        name = name_of_options(f"output {redacted(self.address)}", self.storage_options)
        remember(name, self.storage_options)
        return open_store(self.address, self.storage_options, name)

    @property
    def sample_name(self) -> str:
        """Example of the names of its files."""
        return f"part{self.encoding.suffix}"

    @property
    def keeps_index(self) -> bool:
        """Whether an index that is not a plain count becomes a column."""
        return self.file_format == PARQUET

    @property
    def has_report(self) -> bool:
        """Whether a report of the job is written."""
        return True

    def check(self, parts: int) -> None:
        """Raise unless `parts` parts may be written, as far as can be known beforehand."""

    def is_uploaded(self) -> bool:
        """Tell whether nothing is left to upload of a finished output."""
        return True

    def upload(self, client: Client | None, *, restart: bool = False) -> str:
        """Upload a finished output, if it has a place to go to; return its address, or nothing.

        With `restart`, what is there is asked for, even if an earlier run has uploaded everything.
        """
        return ""


@declared
class JsonlWriter(FileWriter):
    """JSON lines; `compression` is None, "gzip" or "zstd". An index is left out.

    Lines are valid JSON. Bytes become base64, times and decimals become text, and infinities and
    NaN become null. Every line has all columns, and every object all fields that some object of its
    column has; a missing value is null. Maps with text keys become objects, and other maps become
    lists of objects of ``key`` and ``value``.
    """

    file_format = JSONL


@declared
class ParquetWriter(FileWriter):
    """Parquet files; `compression` is "zstd", "snappy", "gzip", "lz4" or "none".

    Parquet has no object without fields: where all that a column or field holds is ``{}``, files
    have an object whose only field, ``__dummy_field_in_empty_struct`` as Spark calls it, is null.
    `ParquetReader` takes it for ``{}`` again.
    """

    file_format = PARQUET


@declared
class AnnotationWriter(ParquetWriter):
    """Columns beside the rows of files: a set that `read_files` lays next to them again.

    As the writer of a `gpuclassify.jobs.pipeline.Pipeline` that begins with a reader of files. Each
    row of the input has one in the set, in its order, with the columns that stages add, and
    ``_file``, ``_place`` (the row's number in a Parquet file, the first byte of its line in one of
    JSON lines) and ``_left_out``. No row is dropped: a filter's decision becomes the column
    ``keep``, or that of ``keep_field=``. What goes to quarantine is null, and ``_left_out`` tells
    its kind: "line" or "row". Texts are not written. ``_gpuclassify/job.json`` says what the set is
    of: files, settings, and models with their commits.

    Running the same job again annotates files that have come since then, and those alone.

    Parameters
    ----------
    path : str
        Directory, or fsspec URL of one.
    compression : {"zstd", "snappy", "gzip", "lz4", "none"}
    redo_changed : bool
        Annotate files again that have changed since then, which are refused by default.
    storage_options : dict, optional
        For fsspec. Never part of a plan, a record or a message.

    Examples
    --------
    >>> Pipeline([
    ...     ParquetReader("crawl/*.parquet"),
    ...     QualityClassifier(),
    ...     AnnotationWriter("notes/quality/"),
    ... ]).run()  # doctest: +SKIP
    >>> ddf = read_files("crawl/*.parquet", annotations="notes/quality/")  # doctest: +SKIP
    """

    annotates = True

    partition_by: None = field(default=None, init=False)
    redo_changed: bool = False

    @property
    def keeps_index(self) -> bool:
        """Always False: rows are told by their places."""
        return False

    def below(self, folder: str) -> AnnotationWriter:
        """Return the writer of a folder in this one, or this one for no name."""
        path = f"{self.path.rstrip('/')}/{folder}" if folder else self.path
        return replace(self, path=path, redo_changed=False)


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

    Files get their names when all of them are written, and only then are earlier ones removed: what
    fails before leaves the directory as it was.

    Parameters
    ----------
    dataset : dask.dataframe.DataFrame, pandas.DataFrame or cudf.DataFrame
    path : str
        Directory, or fsspec URL of one. One file ``part-00000.parquet`` a partition.
    overwrite : bool, default False
        Replace Parquet files that are there already, whoever wrote them, also in folders such as
        ``lang=de``. Others stay.
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
        `path` holds Parquet files and `overwrite` is not set, or some that lie in other folders or
        behind links.
    ValueError
        `dataset` is read from `path`, as far as can be told, or `path` lies in what it is read
        from. Or its columns have equal names as text, such as ``1`` and ``"1"``.
    """
    import dask

    is_lazy = dask.is_dask_collection(dataset)
    # Decided once: by the index of each part, a filter would give only some parts the column.
    keep_index = True if is_lazy else None
    arrow_table(dataset._meta if is_lazy else dataset.iloc[:0], keep_index)  # which may refuse it
    directory = open_store(path, storage_options)
    directory.refuse_file()
    parts = dataset.to_delayed() if is_lazy else [dataset]
    digits = max(5, len(str(len(parts) - 1)))
    names = [f"part-{number:0{digits}d}.parquet" for number in range(len(parts))]
    if is_lazy:
        refuse_overlap(directory, names[0], *frame_names(dataset), storage_options or {})
    earlier = _earlier_files(directory, overwrite)
    directory.make()
    directory.sweep("")
    mark = new_mark()
    whole = [f".{name}.{mark}" for name in names]
    write, publish = (dask.delayed(call, pure=False) for call in (_write_part, _publish))
    files = [
        write(part, path, name, storage_options, keep_index)
        for part, name in zip(parts, whole, strict=True)
    ]
    written = publish(files, path, storage_options, names, earlier)
    if not compute:
        return written
    try:
        return written.compute()
    except BaseException:
        directory.remove(*whole)
        raise


def _write_part(
    frame: Frame,
    path: str,
    name: str,
    storage_options: dict[str, Any] | None,
    keep_index: bool | None,
) -> tuple[str, str]:
    """Write a plain frame as a file; return its name and its digest."""
    directory = open_store(path, storage_options)
    content = Encoding(PARQUET, "zstd").encode(arrow_table(frame, keep_index))
    directory.filesystem.pipe_file(directory.path(name), content)
    return name, hashlib.sha256(content).hexdigest()


def _publish(
    written: Sequence[tuple[str, str]],
    path: str,
    storage_options: dict[str, Any] | None,
    names: Sequence[str],
    earlier: Sequence[str],
) -> list[str]:
    """Give files that are whole their names, and remove earlier ones; may be done twice."""
    directory = open_store(path, storage_options)

    def move(whole: tuple[str, str], name: str) -> str:
        path = directory.path(name)
        try:
            directory.move(directory.path(whole[0]), path)
        except FileNotFoundError:
            if directory.digest(name) != whole[1]:  # else a try that was cut off has moved it
                raise
        return path

    with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
        paths = list(pool.map(move, written, names))
    gone = {*earlier} - {*names}
    directory.remove(*gone)
    directory.prune(*{posixpath.dirname(name) for name in gone} - {""})
    return paths


def _earlier_files(directory: Store, overwrite: bool) -> list[str]:
    """List the files that readers would take for the directory's rows, or for a list of its files.

    Raises FileExistsError unless it may be replaced: nothing that other folders or links hold.
    """
    start = len(directory.root) + 1
    earlier: dict[str, bool] = {}  # whether it may be replaced
    with contextlib.suppress(FileNotFoundError):
        for entry in directory.walk():
            if entry.problem is not None:
                raise entry.problem
            name, is_file = entry.path[start:], entry.info["type"] != "directory"
            is_line = name.startswith("part-") and JSONL in name
            if is_file and (is_line or file_format(name) == PARQUET):
                folders = name.split("/")[:-1]
                earlier[name] = not entry.linked and all("=" in folder for folder in folders)
    names = sorted(earlier)
    kept = [name for name in names if not earlier[name]]
    if kept:
        raise FileExistsError(
            f"{directory} has {kept[0]}, in another folder or behind a link, which readers would "
            "take for a part of it: choose another directory, or move it away"
        )
    if names and not overwrite:
        raise FileExistsError(
            f"{directory} has {len(names)} part files already, such as {names[0]}: choose "
            "another directory, or overwrite them (overwrite=True)"
        )
    return [*names, *({"_metadata", "_common_metadata"} & directory.sizes().keys())]
