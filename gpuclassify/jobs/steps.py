"""The steps of a deduplication before the removal: what each gives is kept in the output."""

from __future__ import annotations

import contextlib
import functools
import logging
import posixpath
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from gpuclassify.jobs.execution import compute_tasks
from gpuclassify.jobs.job import Job, make_job
from gpuclassify.jobs.ledger import FOLDER, read_ledger, write_ledger
from gpuclassify.jobs.output.manifest import DamagedMetadataError, Manifest, manifest_of
from gpuclassify.jobs.output.run_key import METADATA, JobChangedError
from gpuclassify.jobs.output.writers import ParquetWriter
from gpuclassify.jobs.report.summary import JobSummary
from gpuclassify.jobs.sources import FrameSource
from gpuclassify.jobs.stages import as_chain
from gpuclassify.jobs.storage import Place
from gpuclassify.workers.secrets import recall

logger = logging.getLogger(__name__)

# ``report(step, done, of, summary)``, at first and after every part of a step.
StepReport = Callable[[str, int, int, JobSummary], None]


class StepWriter(ParquetWriter):
    """Files of a step."""

    @property
    def keeps_index(self) -> bool:
        """Never: a row's position in its frame is no data."""
        return False

    @property
    def has_report(self) -> bool:
        """Never: the report of the job tells of its steps."""
        return False


class Steps:
    """Frames and results that one job computes one after another, each of them once.

    A frame is written part by part as the output of a job of its own, and read from there, so that
    nothing stays in memory between two steps, and an interrupted step goes on part by part. What is
    no longer as it was written is computed again.

    Parameters
    ----------
    job : Job
        Whose output has the folder of steps; its key is part of what each step is.
    client : distributed.Client or None
    report : callable, optional
        See `StepReport`.

    Attributes
    ----------
    ledger : dict
        ``steps``, with the rows of each that is done and the seconds of the run that finished it,
        and ``duplicates``, the counts or None.
    """

    def __init__(self, job: Job, client: Any, report: StepReport | None) -> None:
        self._spec, self._key, self._verify = job.spec, job.manifest.key, job.manifest.verify
        self._directory = job.manifest.directory
        self._client, self._report = client, report
        begun = read_ledger(self._directory, self._key)
        self.ledger = begun or {"key": self._key, "steps": {}, "duplicates": None}

    def is_done(self, name: str) -> bool:
        """Whether a step has been noted as done."""
        return name in self.ledger["steps"]

    def holds(self, name: str) -> bool:
        """Whether a step's files are there, and as they were written."""
        try:
            manifest = self.manifest(name)
            recorded, damage = manifest.examine(self._client, self.place(name))
        except (FileNotFoundError, DamagedMetadataError):
            return False
        if manifest.identity.get("step") != self._identity(name, manifest.count):
            return False
        if damage or len(recorded) < manifest.count:
            return False
        if not manifest.is_complete():  # it was cut off behind its last part
            manifest.directory.sweep("", METADATA)
            manifest.finish()
        return True

    def keep(self, name: str, frame: Any) -> Any:
        """Write what is not yet written of a frame.

        Returns
        -------
        dask.dataframe.DataFrame
            The same rows, read from the files.
        """
        options = recall(self._spec.output_name, {})
        make = functools.partial(
            make_job,
            FrameSource(frame, {"step": self._identity(name, frame.npartitions)}),
            as_chain([]),
            StepWriter(self.place(name).path, storage_options=options),
            backend="pandas",
            on_error="raise",
            code="",
            verify=self._verify,
        )
        try:
            job = make()
        except (DamagedMetadataError, JobChangedError) as err:
            logger.warning("the step %s is done again: %s", name, err)
            job = make(restart=True)
        started = time.perf_counter()
        done = job.run(self._client, self._report and functools.partial(self._report, name))
        if not self.is_done(name):
            self._note(name, done.rows_out, time.perf_counter() - started)
        return self._stored(name, job.manifest.names(), frame._meta)

    def read(self, name: str) -> Any:
        """The frame that a finished step has kept, read from its files."""
        names = self.manifest(name).names()
        return self._stored(name, names, read_rows(names[0], self.place(name)).iloc[:0])

    def place(self, name: str) -> Place:
        """Where a step's files are."""
        return Place(f"{self._spec.output.rstrip('/')}/{FOLDER}/{name}", self._spec.output_name)

    def manifest(self, name: str) -> Manifest:
        """What a step has noted of its files."""
        return replace(manifest_of(self.place(name).open()), verify=self._verify)

    def compute(self, name: str, tasks: Sequence[Any]) -> list[Any]:
        """Results of delayed tasks, in any order."""
        results: list[Any] = []
        started = time.perf_counter()
        for result in compute_tasks(self._client, list(tasks)):
            results.append(result)
            if self._report is not None:
                self._report(name, len(results), len(tasks), JobSummary())
        self._note(name, None, time.perf_counter() - started)
        return results

    def count(self, counts: dict[str, Any]) -> None:
        """Note the counts of duplicates."""
        self.ledger["duplicates"] = counts
        write_ledger(self._directory, self.ledger)

    def remove(self, but: Collection[str]) -> None:
        """Remove the files of all steps but some."""
        filesystem = self._directory.filesystem
        with contextlib.suppress(FileNotFoundError):
            for found in filesystem.ls(self._directory.path(FOLDER), detail=True):
                if found["type"] == "directory" and posixpath.basename(found["name"]) not in but:
                    filesystem.rm(found["name"], recursive=True)

    def _identity(self, name: str, partitions: int) -> dict[str, Any]:
        return {"name": name, "partitions": partitions, "job": self._key}

    def _note(self, name: str, rows: int | None, seconds: float) -> None:
        self.ledger["steps"][name] = {"rows": rows, "seconds": round(seconds, 3)}
        write_ledger(self._directory, self.ledger)

    def _stored(self, name: str, names: Sequence[str], meta: pd.DataFrame) -> Any:
        import dask.dataframe as dd

        return dd.from_map(read_rows, names, place=self.place(name), meta=meta, label=name)


def read_rows(name: str, place: Place, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """One file of a step, or some of its columns."""
    content = place.open().read(name)
    chosen = None if columns is None else list(columns)
    return pq.read_table(pa.BufferReader(content), columns=chosen).to_pandas()
