"""Counterparts of the dataset, module sequence and client of NeMo Curator's Dask generation."""

from __future__ import annotations

import functools
import posixpath
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from gpuclassify import cluster
from gpuclassify.curator.pipeline import current_client
from gpuclassify.frames import Frame, LazyFrame
from gpuclassify.jobs.input.readers import read_files
from gpuclassify.jobs.ledger.records import JOB
from gpuclassify.jobs.output.writers import FileWriter, JsonlWriter, ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.stages import ToBackend
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.settings.checks import check_ordered
from gpuclassify.settings.old_spellings import modern_spellings

_COPY, _PARTS = "copy of file name", "_parts_of_files"  # temporary column and folder
_SUFFIXES = re.compile(r"(\.(jsonl|json|parquet|gz|zst|part|snappy))+$")
_GPU_OPTIONS = (
    *("protocol", "enable_cudf_spill", "rmm_pool_size", "rmm_maximum_pool_size", "rmm_async"),
    *("rmm_managed_memory", "rmm_release_threshold"),
)


class DocumentDataset:
    """Dataset of documents in a Dask frame, whose attributes and methods it also has.

    Parameters
    ----------
    df : dask.dataframe.DataFrame
        Frame with a row for each document.
    """

    def __init__(self, df: Any) -> None:
        self.df = df

    @classmethod
    def read_json(
        cls,
        input_files: str | list[str],
        backend: str = "pandas",
        *,
        add_filename: bool | str = False,
        **arguments: Any,
    ) -> DocumentDataset:
        """Read files of JSON lines or Parquet, with the arguments of `gpuclassify.read_files`.

        They are read lazily, and their names give their formats. Partitions are frames of the
        `backend`, "pandas" or "cudf". Curator's arguments ``columns``, ``blocksize`` and
        `add_filename` are accepted, too. The last adds a column of file names without folders:
        ``file_name`` if it is True, or the column that it names. Other arguments that would change
        the result raise TypeError.
        """
        settings = modern_spellings(cls.__qualname__, "reader", arguments)
        name: Any = "file_name" if add_filename is True else add_filename
        if name:
            settings |= {"files_per_partition": settings.get("files_per_partition") or 1}
        frame = read_files(input_files, path_field=name or None, **settings)
        if name:
            frame[name] = frame[name].str.replace("^.*/", "", regex=True)
        return cls(ToBackend(backend)(frame))

    read_parquet = read_json

    @classmethod
    def from_pandas(
        cls, data: Frame, npartitions: int | None = 1, **options: Any
    ) -> DocumentDataset:
        """Make a dataset from a pandas frame, with the `options` of Dask's ``from_pandas``."""
        import dask.dataframe as dd

        return cls(dd.from_pandas(data, npartitions=npartitions, **options))

    def to_pandas(self) -> Any:
        """Return all rows, computed, as a pandas frame."""
        return ToBackend("pandas")(self.df).compute()

    def _write(
        self,
        kind: type[FileWriter],
        output_path: str,
        write_to_filename: bool | str = False,
        keep_filename_column: bool = False,
        partition_on: str | None = None,
        compression: str | None = None,
    ) -> None:
        """Write a file for each partition, as a job that shows its progress and can be continued.

        Values of the column `partition_on` become folders. With `write_to_filename`, the name of a
        column (True for ``file_name``), one file is written for each value instead, named by the
        last part of the value. `keep_filename_column` keeps this column in the files. Raises
        ValueError if both columns are passed.
        """
        name = "file_name" if write_to_filename is True else write_to_filename
        if not name:
            options: dict[str, Any] = {"partition_by": partition_on, "compression": compression}
            writer = kind(output_path, output_bytes=0, **options)
            Pipeline([self.df, writer]).run(current_client())
            return
        if partition_on is not None:
            raise ValueError("write_to_filename and partition_on both say where rows go: pass one")
        frame, column = self.df, name
        if keep_filename_column:  # the writer moves its column into the names of folders
            frame, column = frame.assign(**{_COPY: frame[name]}), _COPY
        folder, output = posixpath.join(output_path, _PARTS), kind(output_path).directory
        if not output.has(posixpath.join(_PARTS, JOB)):  # parts left by an interrupted removal
            output.remove_folder(_PARTS)
        writer = kind(folder, partition_by=column, compression=compression)
        files: dict[str, list[str]] = {}
        for part in Pipeline([frame, writer]).run(current_client()).files:
            value = unquote(posixpath.basename(posixpath.dirname(part)).partition("=")[2])
            stem = _SUFFIXES.sub("", posixpath.basename(value))
            files.setdefault(stem + writer.encoding.suffix, []).append(part)
        encoding = replace(writer.encoding, partition_by=())
        for file, parts in files.items():
            with output.replacing(output.path(file)) as sink:
                sink.write(encoding.join([*map(_read, parts)]))
        output.remove_folder(_PARTS)

    to_json = functools.partialmethod(_write, JsonlWriter)
    to_parquet = functools.partialmethod(_write, ParquetWriter)

    def mapped_by(self, mapper: Callable[[Frame | LazyFrame], Any]) -> DocumentDataset:
        """Return a dataset of ``mapper(self.df)``.

        A classifier or `ToBackend` that is called with a dataset calls this method.
        """
        return type(self)(mapper(self.df))

    def persist(self) -> DocumentDataset:
        """Return the dataset computed, and kept in the memory of Dask's workers."""
        return type(self)(self.df.persist())

    def repartition(self, *args: Any, **options: Any) -> DocumentDataset:
        """Return the dataset in other partitions, with the arguments of Dask's ``repartition``."""
        return type(self)(self.df.repartition(*args, **options))

    def __len__(self) -> int:
        return len(self.df)

    def __getitem__(self, key: object) -> Any:
        selected = self.df[key]
        return type(self)(selected) if selected.ndim == 2 else selected

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "df":  # pickle asks before there is a frame
            raise AttributeError(name)
        return getattr(self.df, name)


class Sequential:
    """Chain of modules, each called with the previous one's result.

    Parameters
    ----------
    modules : iterable of callable
        Classifiers, `ToBackend`, or functions of a dataset.
    """

    def __init__(self, modules: Iterable[Callable[[Any], Any]]) -> None:
        check_ordered("modules", modules)
        self.modules = list(modules)

    def __call__(self, dataset: Frame | LazyFrame) -> Any:
        """Pass a dataset or a frame through all modules in order, and return the last result."""
        return functools.reduce(lambda frame, module: module(frame), self.modules, dataset)


def get_client(cluster_type: str = "cpu", **options: Any) -> Any:
    """Return a Dask client from the options of `get_client` in NeMo Curator's Dask releases (0.x).

    With ``address`` or ``scheduler_file``, it connects to that cluster, and other options are
    ignored. Otherwise it starts a cluster here; options for GPUs are ignored if `cluster_type` is
    "cpu", and numbers of workers and threads are ignored if it is not.
    """
    settings = modern_spellings("get_client", "cluster", options)
    for name in ("address", "scheduler_file"):
        if (running := settings.pop(name, None)) is not None:
            return cluster.get_client("auto", **{name: running})
    for name in _GPU_OPTIONS if cluster_type == "cpu" else ("n_workers", "threads_per_worker"):
        settings.pop(name, None)
    return cluster.get_client(cluster_type, **settings)


def _read(path: str) -> bytes:
    with open_store(path).reading() as file:
        return file.read()
