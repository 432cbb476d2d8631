"""The Dask generation's dataset, its sequence of modules and its client."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from gpuclassify import cluster
from gpuclassify.jobs.input.readers import read_files
from gpuclassify.jobs.output.writers import FileWriter, JsonlWriter, ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.stages import ToBackend
from gpuclassify.settings.old_spellings import modern_spellings


class DocumentDataset:
    """A Dask frame of documents, as `df`; what it does not have itself is the frame's.

    Parameters
    ----------
    df : dask.dataframe.DataFrame
    """

    def __init__(self, df: Any) -> None:
        self.df = df

    @classmethod
    def read_json(
        cls, input_files: str | list[str], backend: str = "pandas", **arguments: Any
    ) -> DocumentDataset:
        """Files of JSON lines or Parquet, by what `gpuclassify.read_files` takes.

        Of Curator's arguments, ``columns`` and ``blocksize`` are taken as well, and
        ``files_per_partition`` has no effect; what would change the result is a TypeError.
        """
        arguments = {"input_files": input_files, **arguments}
        given = modern_spellings(cls.__qualname__, "reader", arguments)
        return cls(ToBackend(backend)(read_files(given.pop("paths"), **given)))

    read_parquet = read_json

    @classmethod
    def from_pandas(cls, data: Any, npartitions: int | None = 1, **options: Any) -> DocumentDataset:
        """A dataset of a pandas frame; `options` are those of Dask's ``from_pandas``."""
        import dask.dataframe as dd

        return cls(dd.from_pandas(data, npartitions=npartitions, **options))

    def to_pandas(self) -> Any:
        """Compute a pandas frame."""
        return ToBackend("pandas")(self.df).compute()

    def to_json(self, output_path: str, compression: str | None = None, **arguments: Any) -> None:
        """Write JSON lines, one file a partition, as a job that can be continued."""
        self._write(JsonlWriter, output_path, arguments, compression=compression)

    def to_parquet(self, output_path: str, **arguments: Any) -> None:
        """Write Parquet files, one a partition, as `to_json` does."""
        self._write(ParquetWriter, output_path, arguments)

    def _write(
        self, kind: type[FileWriter], output_path: str, arguments: dict[str, Any], **options: Any
    ) -> None:
        """Run the job, which shows its progress and counts rows."""
        arguments = {"output_path": output_path, **arguments}
        given = modern_spellings(type(self).__qualname__, "writer", arguments)
        client = None
        with contextlib.suppress(ValueError):  # there is none
            from distributed import get_client as current_client

            client = current_client()
        Pipeline([self.df, kind(**given, **options)]).run(client)

    def mapped_by(self, mapper: Any) -> DocumentDataset:
        """What a classifier or `ToBackend` that is called with the dataset gives."""
        return type(self)(mapper(self.df))

    def persist(self) -> DocumentDataset:
        """Compute the frame, and keep it in the workers' memory."""
        return type(self)(self.df.persist())

    def repartition(self, *args: Any, **options: Any) -> DocumentDataset:
        """The same rows in other partitions."""
        return type(self)(self.df.repartition(*args, **options))

    def __len__(self) -> int:
        return len(self.df)

    def __getitem__(self, key: Any) -> Any:
        chosen = self.df[key]
        return type(self)(chosen) if chosen.ndim == 2 else chosen

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "df":  # which pickle asks for before there is a frame
            raise AttributeError(name)
        return getattr(self.df, name)


class Sequential:
    """Modules one after another, each called with what the one before it gives.

    Parameters
    ----------
    modules : iterable of callable
        Classifiers, `ToBackend`, or functions of a dataset.
    """

    def __init__(self, modules: Iterable[Callable[[Any], Any]]) -> None:
        self.modules = list(modules)

    def __call__(self, dataset: Any) -> Any:
        """What the last module gives."""
        for module in self.modules:
            dataset = module(dataset)
        return dataset


def get_client(cluster_type: str = "cpu", **options: Any) -> Any:
    """The client of a cluster: `gpuclassify.get_client` by the Dask generation's options."""
    return cluster.get_client(cluster_type, **modern_spellings("get_client", "cluster", options))
