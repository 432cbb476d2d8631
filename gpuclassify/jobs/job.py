"""A pipeline that is planned and checked: what its tasks do, and running those that are left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpuclassify.jobs.access import remember_options, share_options_with_workers
from gpuclassify.jobs.files import PARQUET, UnreadableInputError, redacted
from gpuclassify.jobs.input.readers import FileReader
from gpuclassify.jobs.input.sources import FileSource, FrameSource
from gpuclassify.jobs.output.encoding import arrow_table
from gpuclassify.jobs.output.manifest import JobChangedError, Ledger
from gpuclassify.jobs.output.records import Record
from gpuclassify.jobs.output.writers import FileWriter
from gpuclassify.jobs.probe import check_cluster
from gpuclassify.jobs.report.report import write_report
from gpuclassify.jobs.report.summary import JobSummary, Report
from gpuclassify.jobs.stages import describe
from gpuclassify.jobs.task import Work
from gpuclassify.partition_map import Chain

Source = FileSource | FrameSource


@dataclass(frozen=True)
class Job:
    """A pipeline that is planned and checked.

    Attributes
    ----------
    source : FileSource or FrameSource
    work : Work
    ledger : Ledger
    restart : bool
        Whether `run` begins with removing what earlier runs wrote.
    writer : FileWriter, optional
        Publishes the output when it is whole.
    """

    source: Source
    work: Work
    ledger: Ledger
    restart: bool = False
    writer: FileWriter | None = None

    def run(self, client: Any = None, report: Report | None = None) -> JobSummary:
        """Run what is not done yet; see `gpuclassify.jobs.pipeline.Pipeline.run`."""
        summary = JobSummary(output=str(self.ledger.directory))
        with self._current(client):
            done = set()
            for record in self.ledger.begin(self.restart):
                self._add(summary, record, is_resumed=True)
                done.add(record.name)
            _show(report, len(done), self.source.count, summary)
            try:
                self._run_rest(client, done, summary, report)
            except (UnreadableInputError, JobChangedError):  # running again would fail alike
                raise
            except (Exception, KeyboardInterrupt) as err:
                err.add_note(
                    f"{len(summary.files)} of {self.source.count} parts are written to "
                    f"{summary.output}: run the same job again to continue"
                )
                raise
        self.ledger.check_current()
        write_report(self.ledger.directory)
        self.ledger.finish()
        summary.files.sort()
        self._publish(client, summary)
        return summary

    def _publish(self, client: Any, summary: JobSummary) -> None:
        if self.writer is None:
            return
        try:
            summary.published = self.writer.publish(client, restart=self.restart)
        except (Exception, KeyboardInterrupt) as err:
            err.add_note(
                f"all parts are written to {summary.output}: run the same job again to publish them"
            )
            raise

    def _run_rest(
        self, client: Any, done: set[str], summary: JobSummary, report: Report | None
    ) -> None:
        names = self.ledger.names()
        todo = [number for number, name in enumerate(names) if name not in done]
        if client is not None and todo:
            check_cluster(client, self.work.chain.mappers, self.work.backend)
        started = time.perf_counter()
        for record in self.source.run(client, todo, names, self.work):
            self._add(summary, record)
            summary.elapsed_seconds = time.perf_counter() - started
            _show(report, len(summary.files), self.source.count, summary)
        if todo:
            self.source.check_unchanged()

    def _add(self, summary: JobSummary, record: Record, is_resumed: bool = False) -> None:
        summary.add(record, f"{summary.output}/{record.name}", is_resumed)

    @contextlib.contextmanager
    def _current(self, client: Any) -> Iterator[None]:
        """Hand secrets to the workers, which mappers do through the current client."""
        if client is None:
            yield
            return
        from distributed import Client

        if not isinstance(client, Client):
            raise TypeError(
                f"a Pipeline got {client!r} as its client: pass a dask.distributed.Client, such as "
                'Client("tcp://host:8786") of a cluster that is running'
            )
        if client.asynchronous:
            raise TypeError("a Pipeline waits for its parts, and the Client is asynchronous")
        with client.as_current():
            self.work.chain.prepare()
            share_options_with_workers(client, [self.work.input_name, self.work.output_name])
            yield


def plan_work(
    reader: Any, source: Source, chain: Chain, writer: FileWriter, backend: str, on_error: str
) -> Work:
    """What every task of the job does; remembers the storage options that it needs."""
    meta = source.meta()
    keep_index = source.has_index and writer.keeps_index
    directory = writer.directory
    work = Work(
        chain=chain,
        announced=chain.meta_dtypes(meta),
        schema=arrow_table(chain.meta(meta), keep_index).schema,
        output=directory.root if directory.is_local else writer.path,
        encoding=writer.encoding,
        on_error=on_error,
        backend=backend,
        keep_index=keep_index,
        label_fields=chain.label_fields,
        number_fields=chain.number_fields,
        text_fields=chain.text_fields,
        form=source.form,
        input_name=f"input {reader}" if isinstance(reader, FileReader) else "",
        output_name=f"output {redacted(writer.path)}",
    )
    remember_options(work.input_name, getattr(reader, "storage_options", {}))
    remember_options(work.output_name, writer.storage_options)
    return work


def identity_of(source: Source, work: Work) -> dict[str, dict[str, Any]]:
    """What the job is. It may go on with another `on_error`, which is no part of it."""
    stages = {
        f"stage {number} {stage.__name__}": describe(stage)
        for number, stage in enumerate(work.chain.mappers, 1)
    }
    encoding = {"format": work.encoding.file_format, "compression": work.encoding.compression}
    if source.has_index and not work.keep_index and work.encoding.file_format == PARQUET:
        encoding["index"] = "left out"
    return {**source.identity(), **stages, "output": {**encoding, "backend": work.backend}}


def _show(report: Report | None, done: int, total: int, summary: JobSummary) -> None:
    if report is not None:
        report(done, total, summary)
