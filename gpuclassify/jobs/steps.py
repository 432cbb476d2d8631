"""The steps of a deduplication before the removal: what each gives is kept in the output."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from gpuclassify.jobs.execution import compute_tasks
from gpuclassify.jobs.job import Job, make_job
from gpuclassify.jobs.ledger import FOLDER, read_ledger, write_ledger
from gpuclassify.jobs.output.writers import ParquetWriter
from gpuclassify.jobs.report.report import report_of
from gpuclassify.jobs.report.summary import JobSummary
from gpuclassify.jobs.sources import FrameSource
from gpuclassify.jobs.stages import as_chain
from gpuclassify.jobs.storage import open_directory
from gpuclassify.workers.secrets import recall

# ``report(step, done, of, summary)``, at first and after every part of a step.
StepReport = Callable[[str, int, int, JobSummary], None]


class StepWriter(ParquetWriter):
    """Files of a step; a row's position in its frame is no data."""

    keeps_index = False  # type: ignore[assignment]


class Steps:
    """Frames and results that one job computes one after another, each of them once.

    A frame is written part by part as the output of a job of its own, and read from there, so that
    nothing stays in memory between two steps, and an interrupted step goes on part by part.

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
        ``steps``, with rows, bytes and seconds of each that is done, and ``duplicates``, the counts
        or None.
    """

    def __init__(self, job: Job, client: Any, report: StepReport | None) -> None:
        assert job.writer is not None
        self._writer = job.writer
        self._directory = job.manifest.directory
        self._key = job.manifest.key
        self._client, self._report = client, report
        known = read_ledger(self._directory) or {}
        is_mine = known.get("key") == self._key
        self.ledger = known if is_mine else {"key": self._key, "steps": {}, "duplicates": None}

    def is_done(self, name: str) -> bool:
        """Whether a step has been noted as done."""
        return name in self.ledger["steps"]

    def keep(self, name: str, frame: Any) -> Any:
        """Write what is not yet written of a frame.

        Returns
        -------
        dask.dataframe.DataFrame
            The same rows, read from the files.
        """
        step = {"step": name, "partitions": frame.npartitions, "job": self._key}
        job = make_job(
            FrameSource(frame, {"step": step}),
            as_chain([]),
            StepWriter(self._path(name), storage_options=self._writer.storage_options),
            backend="pandas",
            on_error="raise",
            code="",
        )
        job.run(self._client, self._report and functools.partial(self._report, name))
        if not self.is_done(name):
            made = report_of(job.manifest.directory)
            self._note(name, made["rows_out"], made["busy_seconds"], made["output_bytes"])
        return _stored(job.spec.output, job.spec.output_name, job.manifest.names(), frame._meta)

    def read(self, name: str) -> Any:
        """The frame that a finished step has kept, read from the files."""
        writer = StepWriter(self._path(name), storage_options=self._writer.storage_options)

    def compute(self, name: str, tasks: Sequence[Any]) -> list[Any]:
        """The results of delayed tasks, in any order."""
        results: list[Any] = []
        started = time.perf_counter()
        for result in compute_tasks(self._client, list(tasks)):
            results.append(result)
            if self._report is not None:
                self._report(name, len(results), len(tasks), JobSummary())
        self._note(name, 0, time.perf_counter() - started, 0)
        return results

    def count(self, counts: dict[str, Any]) -> None:
        """Note the counts of duplicates."""
        self.ledger["duplicates"] = counts
        write_ledger(self._directory, self.ledger)

    def remove(self, but: Collection[str]) -> None:
        """Remove what all steps have kept, but for some: signatures are many bytes."""
