"""Write Parquet and JSONL files that every reader reads without options."""

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
OUTPUT_BYTES = 256_000_000  # readers of Parquet are fastest with files of some 100 MB to 1 GB


def _folders(names: Any) -> tuple[str, ...] | None:
    folders = label_tuple("partition_by", names, keep_order=True)
    return None if folders is None else tuple(dict.fromkeys(folders))


@declared
class FileWriter(Declared):
    """Base class of writers of a job's output files, for a `gpuclassify.jobs.pipeline.Pipeline`.

    A job works in parts: slices of the input that are processed and committed as one unit. Each
    part is written once, into the folder ``_gpuclassify``, which readers ignore. When all parts are
    done, neighbouring parts are joined into files of about `output_bytes`, such as
    ``part-00000-00023-....parquet``. While a job is unfinished, readers see only rows of final
    files, and no row twice. ``_SUCCESS`` is written last.

    With `partition_by`, files have a folder: ``OUTPUT/bucket=19/part-00000-00023-....parquet``.
    pyarrow, Dask, DuckDB and `FileReader` read the column back from the folders' names. A part
    without rows writes no file. Null goes to the folder ``bucket=__HIVE_DEFAULT_PARTITION__``,
    which pandas and Dask refuse to read, and other readers read as null. A value that is that text,
    or that needs a folder name of more than 255 bytes, raises an error, or goes to quarantine with
    ``on_error="quarantine"``. `FileReader` restores the column's type. Other readers without a
    schema infer it from the names: text of digits becomes numbers, and booleans become text.

    Parameters
    ----------
    path : str
        Directory, or fsspec URL of one.
    compression : str, optional
        Default: zstd for Parquet, none for JSON lines.
    partition_by : str or sequence of str, optional
        Columns of text, whole numbers or booleans whose values become names of folders, the first
        column outermost. The files do not have them. ValueError is raised if a part
        has more than 1,000 values of a column.
    output_bytes : int
        Size of the files into which neighbouring parts are joined; with `partition_by`, of the
        files in all folders together. A task holds so much in memory. 0 writes a file for each
        part, as soon as it is done.
    storage_options : dict, optional
        For fsspec. Never part of a plan, a record or a message.

    Raises
    ------
    TypeError
        The path is empty.
    ValueError
        The format lacks the compression, or jobs cannot write to such a URL.
    """

    path: Any = setting(kw_only=False, convert=str)
    compression: str | None = None
    partition_by: str | Sequence[str] | None = setting(default=None, convert=_folders)
    output_bytes: int = setting(default=OUTPUT_BYTES, least=0)
    storage_options: dict[str, Any] = setting(default=None, is_secret=True, is_hashed=False)

    def check_together(self) -> None:
        """Check path and compression, and set the defaults of compression and storage options."""
        compressions = PARQUET_COMPRESSIONS if self.file_format == PARQUET else JSONL_COMPRESSIONS
        if self.compression is None:
            self._set("compression", compressions[0])
        check_choice("compression", self.compression, compressions)
        check_text("path", self.address, "a path: '.' is the current directory")
        store_type(self.address).check_output(self.address)
        self._set("storage_options", dict(self.storage_options or {}))

    def settings(self) -> dict[str, Any]:
        """Return the constructor's arguments by name, without storage options and URL secrets."""
        return super().settings() | {"path": redacted(self.path)}

    def __repr__(self) -> str:
        return self.code()

    @property
    def file_format(self) -> str:
        """Format of the files, "parquet" or "jsonl"; every subclass must define it."""
        raise NotImplementedError

    @property
    def annotates(self) -> bool:
        """Whether the output has only the columns that the job adds, one row per input row."""
        return False

    @property
    def address(self) -> str:
        """Path or URL of the output directory."""
        return self.path

    @property
    def encoding(self) -> Encoding:
        """Format, compression, partition columns and size of the output files, as an `Encoding`."""
        folders = tuple(self.partition_by or ())
        return Encoding(self.file_format, self.compression, folders, self.output_bytes)

    @property
    def directory(self) -> Store:
        """Store that reads and writes files in the output directory."""
        name = name_of_options(f"output {redacted(self.address)}", self.storage_options)
        remember(name, self.storage_options)
        return open_store(self.address, self.storage_options, name)

    @property
    def sample_name(self) -> str:
        """Name that an output file could have, to check that the input's paths do not match it."""
        return f"part{self.encoding.suffix}"

    @property
    def keeps_index(self) -> bool:
        """Whether a dataframe's index, unless it is a RangeIndex, is written; True for Parquet."""
        return self.file_format == PARQUET

    @property
    def has_report(self) -> bool:
        """Whether the job writes a report and a card into the output; True here."""
        return True

    def check(self, parts: int) -> None:
        """Raise an error before work begins if a job of `parts` parts cannot be written."""

    def is_uploaded(self) -> bool:
        """Return whether a finished output needs no upload, or is uploaded already; True here."""
        return True

    def upload(self, client: Client | None, *, restart: bool = False) -> str:
        """Upload a finished output by workers of `client`, and return its URL; here, do nothing.

        With `restart`, the destination is asked again even if an earlier run has uploaded
        everything. Without a `client`, this process uploads. An output without upload returns "".
        """
        return ""


@declared
class JsonlWriter(FileWriter):
    """Writer of JSON lines; `compression` is None, "gzip" or "zstd". An index is left out.

    Lines are valid JSON. Bytes become base64, times and decimals become text, and infinities and
    NaN become null. Every line has all columns, and every object all fields of its column; missing
    values are null. Maps with text keys become objects, and other maps become lists of objects with
    ``key`` and ``value``.
    """

    file_format = JSONL


@declared
class ParquetWriter(FileWriter):
    """Writer of Parquet files; `compression` is "zstd", "snappy", "gzip", "lz4" or "none".

    Parquet has no objects without fields. If a column or field has only ``{}``, files have objects
    with one null field, ``__dummy_field_in_empty_struct``, as in Spark. `ParquetReader` reads
    these as ``{}`` again.
    """

    file_format = PARQUET


@declared
class AnnotationWriter(ParquetWriter):
    """Writer of an annotation set: the columns that a job adds, which readers join to its input.

    It ends a `gpuclassify.jobs.pipeline.Pipeline` that begins with a reader of files. The set has
    one row for each input row, in order, with the new columns, ``_file``, ``_place`` (the row's
    number from 0 in a Parquet file, the first byte of its line in a JSON lines file) and
    ``_left_out``. No row is dropped: a filter's decision becomes the column ``keep``, or the column
    that ``keep_field=`` names. Rows in quarantine (unreadable, or failed in a classifier) are null,
    and their ``_left_out`` is "line" or "row"; it is null elsewhere. Texts are not written.
    ``_gpuclassify/job.json`` describes the set: files, settings, and models with their commits.

    Running the same job again annotates only files that are new since then.

    Parameters
    ----------
    path : str
        Directory, or fsspec URL of one.
    compression : {"zstd", "snappy", "gzip", "lz4", "none"}
    redo_changed : bool
        Annotate input files again that have changed since. Default: raise an error for them.
    output_bytes : int
        See `FileWriter`.
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
        """Whether a dataframe's index is written: always False; file and position identify rows."""
        return False

    def below(self, folder: str) -> AnnotationWriter:
        """Return a writer to the subfolder `folder` ("": this path), with `redo_changed` off."""
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

    ``DataFrame.to_parquet`` writes a dtype of list columns (class scores), structs and maps to the
    pandas metadata that a plain ``read_parquet`` cannot parse; so it does for cudf columns that
    came from pandas. This function declares such columns as object, and keeps all other metadata
    (index, dtypes).

    Files get their names after all of them are written, and earlier files are removed last, so that
    a failure before leaves the directory unchanged.

    Parameters
    ----------
    dataset : dask.dataframe.DataFrame, pandas.DataFrame or cudf.DataFrame
    path : str
        Directory, or fsspec URL of one. One file ``part-00000.parquet`` a partition.
    overwrite : bool, default False
        Replace all existing Parquet files, and JSON lines files named ``part-...``, also in folders
        such as ``lang=de``. Other files stay.
    compute : bool, default True
        ``False`` returns one delayed object that writes when computed.
    storage_options : dict, optional
        For fsspec.

    Returns
    -------
    list of str, or dask.delayed.Delayed
        Paths of the files written, or an object that computes them.

    Raises
    ------
    FileExistsError
        `path` has such files and `overwrite` is not set, or has some in other folders or behind
        links.
    NotADirectoryError
        `path`, or on a local disk a folder above it, is a file.
    ValueError
        `dataset` is known to be read from `path` or from a folder above it. Or its columns have
        equal names as text, such as ``1`` and ``"1"``.
    """
    import dask

    is_lazy = dask.is_dask_collection(dataset)
    # None decides by each part's index; after a filter, only some parts would get the column.
    keep_index = True if is_lazy else None
    arrow_table(dataset._meta if is_lazy else dataset.iloc[:0], keep_index)  # raises for bad names
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
    temporary = [f".{name}.{mark}" for name in names]
    write, publish = (dask.delayed(call, pure=False) for call in (_write_part, _publish))
    files = [
        write(part, path, name, storage_options, keep_index)
        for part, name in zip(parts, temporary, strict=True)
    ]
    written = publish(files, path, storage_options, names, earlier)
    if not compute:
        return written
    try:
        return written.compute()
    except BaseException:
        directory.remove(*temporary)
        raise


def _write_part(
    frame: Frame,
    path: str,
    name: str,
    storage_options: dict[str, Any] | None,
    keep_index: bool | None,
) -> tuple[str, str]:
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
    """Rename written temporary files to `names`, remove `earlier` files, and return the new paths.

    `written` has each file's temporary name and SHA-256. The call may be repeated.
    """
    directory = open_store(path, storage_options)

    def move(file: tuple[str, str], name: str) -> str:
        path = directory.path(name)
        try:
            directory.move(directory.path(file[0]), path)
        except FileNotFoundError:
            # An earlier call may have moved the file.
            if directory.digest(name) != file[1]:
                raise
        return path

    with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
        paths = list(pool.map(move, written, names))
    gone = {*earlier} - {*names}
    directory.remove(*gone)
    directory.prune(*{posixpath.dirname(name) for name in gone} - {""})
    return paths


def _earlier_files(directory: Store, overwrite: bool) -> list[str]:
    """List files, by relative path, that readers would take for part of the dataset.

    Raises FileExistsError if there are data files and `overwrite` is false, or if some may not be
    replaced: behind a link, or in a folder not named like ``lang=de``.
    """
    start = len(directory.root) + 1
    earlier: dict[str, bool] = {}  # whether each file may be replaced, by name
    with contextlib.suppress(FileNotFoundError):
        for entry in directory.walk():
            if entry.problem is not None:
                raise entry.problem
            name, is_file = entry.path[start:], entry.info["type"] != "directory"
            is_line = name.rpartition("/")[2].startswith("part-") and JSONL in name
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
