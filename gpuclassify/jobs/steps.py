"""Steps of a recipe: intermediate results, kept in the output so that later runs continue."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from gpuclassify.jobs.execution import check_cluster, compute_tasks, digest_files
from gpuclassify.jobs.input.readers import ParquetReader
from gpuclassify.jobs.input.sources import FrameSource, Source, as_source
from gpuclassify.jobs.job import Job, make_job
from gpuclassify.jobs.ledger.manifest import DamagedMetadataError, Manifest, manifest_of
from gpuclassify.jobs.ledger.records import (
    JOB,
    LEDGER,
    METADATA,
    QUARANTINE,
    JobChangedError,
    key_in,
    part_name,
    quarantine_path,
    read_ledger,
    sealed,
)
from gpuclassify.jobs.output.writers import ParquetWriter
from gpuclassify.jobs.report.report import write_report
from gpuclassify.jobs.report.summary import JobSummary, Report
from gpuclassify.jobs.stages import as_chain
from gpuclassify.jobs.stores.store import Store
from gpuclassify.mapping.chain import Chain
from gpuclassify.mapping.partition_map import PartitionMap
from gpuclassify.pages.sections import ReportPart
from gpuclassify.workers.secrets import remember, share_with_workers

if TYPE_CHECKING:
    from dask.delayed import Delayed
    from distributed import Client

    from gpuclassify.frames import Frame, LazyFrame

logger = logging.getLogger(__name__)

# Function ``report(step, done, of, summary)``, called at first and after every part of a step.
StepReport = Callable[[str, int, int, JobSummary], None]
# Function of a part's rows, the part's number, and the rows that a step wrote for the part, which
# are indexed by ``document``.
PartAction = Callable[["Frame", int, pd.DataFrame], Any]
WHOLE_FILE = 1 << 62  # part size in bytes that keeps every file in one part


class StepWriter(ParquetWriter):
    """Parquet writer of the intermediate results of a recipe's step."""

    @property
    def keeps_index(self) -> bool:
        """Always False: the index of a step's frame only counts rows."""
        return False

    @property
    def has_report(self) -> bool:
        """Always False: the report of the job includes its steps."""
        return False


class Steps:
    """Frames and results that a job computes before its documents, each of them once.

    Each is a step with a name. A frame is written part by part as the output of a separate job, and
    read from there, so that nothing stays in memory between two steps, and an interrupted step
    continues part by part. `folder` is the path of the steps' folder in the output of `job`.
    """

    def __init__(
        self, job: Job, folder: str, client: Client | None, report: StepReport | None
    ) -> None:
        self._key = job.manifest.key
        self._directory, self._folder = job.directory, folder
        self._options = replace(job.manifest.options, restart=False, command="")
        self.client, self._report = client, report
        begun = read_ledger(self._directory, self._folder, self._key)
        # Finished steps, with their rows and seconds, and results added by `note`.
        self.ledger = begun or {"key": self._key, "steps": {}}

    def report_of(self, name: str) -> Report | None:
        """Return the function that reports progress of the step `name`; None for no reports."""
        return self._report and functools.partial(self._report, name)

    def check_workers(self, mappers: Iterable[PartitionMap], backend: str) -> None:
        """Check the client's workers as `check_cluster` does; nothing without a client."""
        if self.client is not None:
            check_cluster(self.client, mappers, backend)

    def begin(self, name: str) -> None:
        """Report to the user that the step `name`, which has no parts, has begun."""
        if (report := self.report_of(name)) is not None:
            report(0, 1, JobSummary())

    def is_done(self, name: str) -> bool:
        """Return whether the ledger lists the step `name` as finished; files are not checked."""
        return name in self.ledger["steps"]

    def holds(self, name: str) -> bool:
        """Return whether all files of a step exist and are undamaged, so that it can be skipped.

        The files are read, unless the run's option `verify` is "size". A step that was interrupted
        after its last part is marked as finished.
        """
        try:
            manifest = self.manifest(name)
            recorded, damage = manifest.examine(functools.partial(digest_files, self.client))
        except (FileNotFoundError, DamagedMetadataError):
            return False
        if manifest.identity.get("step") != self._identity(name, manifest.count):
            return False
        if damage or len(recorded) < manifest.count:
            return False
        if not manifest.is_complete():  # interrupted after its last part
            manifest.directory.sweep("", METADATA)
            manifest.finish()
        if not self.is_done(name):  # interrupted after its manifest
            self._finish(name, sum(record.rows_out for record in recorded.values() if record), 0.0)
        return True

    def keep(self, name: str, frame: LazyFrame) -> LazyFrame:
        """Write a Dask frame as the files of a step, and return a frame that reads these files.

        There is a file for each partition, without the index. The returned Dask frame is lazy, of
        pandas frames. Partitions that an earlier run of the job wrote are not computed again,
        unless their files or metadata are damaged.
        """
        source = FrameSource(frame, {"step": self._identity(name, frame.npartitions)})
        make = functools.partial(
            self.job, name, source, as_chain([]), backend="pandas", on_error="raise"
        )
        try:
            job = make()
        except (DamagedMetadataError, JobChangedError) as err:
            logger.warning("the step %s is done again: %s", name, err)
            job = make(restart=True)
        started = time.perf_counter()
        done = job.run(self.client, self.report_of(name))
        if not self.is_done(name):
            self._finish(name, done.rows_written, time.perf_counter() - started)
        return self._stored(name, job.manifest.names(), frame._meta)

    def job(
        self, name: str, source: Source, chain: Chain, *, restart: bool = False, **settings: Any
    ) -> Job:
        """Make the job that writes the result of a step, from a source and a chain of stages.

        `settings` are further arguments of `gpuclassify.jobs.job.make_job`. With `restart`, earlier
        files of the step are removed when the job runs. Files without a job.json are removed now.
        """
        folder = self.folder(name)
        secrets = folder.storage_options
        writer = StepWriter(folder.address, output_bytes=0, storage_options=secrets)
        options = replace(self._options, restart=restart)
        make = functools.partial(make_job, source, chain, writer, options, **settings)
        try:
            return make()
        except FileExistsError:
            if folder.has(JOB):
                raise
            logger.warning("the step %s is done again: its files lack %s", name, folder.path(JOB))
            self._directory.remove_folder(f"{self._folder}/{name}")
            return make()

    def read(self, name: str) -> LazyFrame:
        """Return a lazy Dask frame of a finished step's files; the first is read now for dtypes."""
        names = self.manifest(name).names()
        return self._stored(name, names, read_rows(names[0], self.folder(name)).iloc[:0])

    def folder(self, name: str) -> Store:
        """Return the folder of a step's files. Raises ValueError if it is a link."""
        self._directory.path(f"{self._folder}/{name}")  # raises for a link
        return self._directory.below(f"{self._folder}/{name}")

    def manifest(self, name: str) -> Manifest:
        """Return the `Manifest` of a step, from the step's job.json.

        Raises FileNotFoundError if the step has not begun, and DamagedMetadataError for a damaged
        file.
        """
        return replace(manifest_of(self.folder(name)), options=self._options)

    def source(self, name: str) -> Source:
        """Return a source of a finished step's files, one part per file, that workers can read."""
        folder = self.folder(name)
        options: dict[str, Any] = {"part_bytes": WHOLE_FILE, "files_per_partition": 1}
        reader = ParquetReader(folder.address, storage_options=folder.storage_options, **options)
        source = as_source(reader, "raise")
        remember(source.options_name, source.storage_options)
        share_with_workers([source.options_name])
        return source

    def take_over(self, name: str, job: Job, parts: tuple[ReportPart, ...]) -> dict[str, Any]:
        """Copy a step's quarantine files to the output of `job`, and remove the step's data files.

        First writes the report of the step, with sections by `parts`, and returns the content of
        its ``report.json``. Metadata, report and quarantine files of the step stay. Returns {}, and
        does nothing, if the step was never begun. The step must have as many parts as `job`.
        """
        folder = self.folder(name)
        if not folder.has(JOB):
            return {}
        report = write_report(folder, parts)
        names = zip(self.manifest(name).names(), job.manifest.names(), strict=True)
        targets = {quarantine_path(source): quarantine_path(target) for source, target in names}
        for file in folder.sizes(QUARANTINE):
            self._directory.make(QUARANTINE)
            path = f"{QUARANTINE}/{file}"
            self._directory.replace(targets[path], folder.read(path))
        folder.remove(*(file for file in folder.sizes() if key_in(file) is not None))
        return report

    def rows_of_parts(self, name: str, act: PartAction) -> RowsOfPart:
        """Return a function that calls `act` with a part and the rows of the step `name` for it."""
        manifest = self.manifest(name)
        return RowsOfPart(self.folder(name), manifest.key, manifest.count, act)

    def run_tasks(self, tasks: list[Delayed]) -> Iterator[Any]:
        """Yield the results of delayed tasks in order of completion, as `compute_tasks` does."""
        return compute_tasks(self.client, tasks)

    def compute(self, name: str, tasks: Sequence[Delayed]) -> list[Any]:
        """Compute delayed tasks as the step `name`, and return their results in any order.

        Marks the step as finished in the ledger. Does not store the results; `note` can.
        """
        results: list[Any] = []
        started, summary = time.perf_counter(), JobSummary()
        report = self.report_of(name) or (lambda *_: None)
        if tasks:
            report(0, len(tasks), summary)
        for result in compute_tasks(self.client, list(tasks)):
            results.append(result)
            summary.elapsed_seconds = time.perf_counter() - started
            report(len(results), len(tasks), summary)
        self._finish(name, None, time.perf_counter() - started)
        return results

    def note(self, name: str, value: Any) -> None:
        """Store a JSON value in the ledger under `name`, for the runs that continue the job."""
        self.ledger[name] = value
        self._write_ledger()

    def remove(self, but: Collection[str]) -> None:
        """Remove the folders of all steps except the ones named in `but`; the ledger stays."""
        for name in {*self._directory.folders(self._folder)} - {*but}:
            self._directory.remove_folder(f"{self._folder}/{name}")

    def _identity(self, name: str, partitions: int) -> dict[str, Any]:
        return {"name": name, "partitions": partitions, "job": self._key}

    def _finish(self, name: str, rows: int | None, seconds: float) -> None:
        self.ledger["steps"][name] = {"rows": rows, "seconds": round(seconds, 3)}
        self._write_ledger()

    def _write_ledger(self) -> None:
        self._directory.make(self._folder)
        self._directory.replace(f"{self._folder}/{LEDGER}", sealed(self.ledger, indent=1))

    def _stored(self, name: str, names: Sequence[str], meta: Frame) -> LazyFrame:
        import dask.dataframe as dd

        return dd.from_map(read_rows, names, folder=self.folder(name), meta=meta, label=name)


@dataclass(frozen=True)
class RowsOfPart:
    """Function that calls `act` with a part of the input and the rows that a step wrote for it.

    `folder` has the step's `count` files, one for each part, whose names contain `key`.
    """

    folder: Store
    key: str
    count: int
    act: PartAction

    def __call__(self, frame: Frame, number: int) -> Any:
        """Return ``act(frame, number, rows)`` with the step's rows for the part of this number."""
        name = part_name(number, self.count, self.key, ".parquet")
        return self.act(frame, number, read_rows(name, self.folder).set_index("document"))


def read_rows(name: str, folder: Store, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Read the file `name` of a step's folder, or only some of its columns, as a pandas frame."""
    content = folder.read(name)
    names = None if columns is None else list(columns)
    return pq.read_table(pa.BufferReader(content), columns=names).to_pandas()
