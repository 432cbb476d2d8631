"""A pipeline that is planned and checked: what its tasks do, and running those that are left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gpuclassify.jobs.files import PARQUET, UnreadableInputError
from gpuclassify.jobs.output.encoding import arrow_table
from gpuclassify.jobs.output.folders import folder_types
from gpuclassify.jobs.output.manifest import Manifest
from gpuclassify.jobs.output.records import Record
from gpuclassify.jobs.output.run_key import JobChangedError, check_current
from gpuclassify.jobs.output.verify import VERIFY
from gpuclassify.jobs.output.writers import FileWriter
from gpuclassify.jobs.probe import check_cluster
from gpuclassify.jobs.report.report import write_report
from gpuclassify.jobs.report.summary import JobSummary, Report
from gpuclassify.jobs.sources import Source
from gpuclassify.jobs.stages import describe
from gpuclassify.jobs.storage import Place
from gpuclassify.jobs.stores import redacted
from gpuclassify.jobs.task import TaskSpec
from gpuclassify.mapping.chain import Chain
from gpuclassify.settings.checks import check_choice, nearest
from gpuclassify.settings.options import NON_FINITE
from gpuclassify.workers.run_context import RunningParts, heard_by
from gpuclassify.workers.secrets import remember, share_with_workers


@dataclass(frozen=True)
class Job:
    """A pipeline that is planned and checked.

    Attributes
    ----------
    source : Source
    spec : TaskSpec
    manifest : Manifest
    writer : FileWriter
        Uploads the finished output, where it has a place to upload it to.
    """

    source: Source
    spec: TaskSpec
    manifest: Manifest
    writer: FileWriter

    @property
    def restart(self) -> bool:
        """Whether `run` begins with removing what earlier runs wrote."""
        return self.manifest.restart

    def needs_workers(self) -> bool:
        """Whether `run` has parts to do or files to upload; reads the manifest, if there is one."""
        is_done = not self.restart and self.manifest.is_complete()
        return not (is_done and self.writer.is_uploaded())

    def run(self, client: Any = None, report: Report | None = None) -> JobSummary:
        """Run what is not done yet; see `gpuclassify.jobs.pipeline.Pipeline.run`."""
        summary = JobSummary(output=str(self.manifest.directory))
        with self.current(client):
            done = set()
            for record in self.begin(client):
                summary.add(record, summary.output, is_resumed=True)
                done.add(record.name)
            summary.checked = str(self.manifest.checked)
            _show(report, len(done), self.source.count, summary)
            try:
                self._run_rest(client, done, summary, report)
            except (UnreadableInputError, JobChangedError):  # running again would fail alike
                raise
            except (Exception, KeyboardInterrupt) as err:
                err.add_note(
                    f"{summary.parts} of {self.source.count} parts are written to "
                    f"{summary.output}: run the same job again to continue"
                )
                raise
        check_current(self.manifest.directory, self.manifest.key)
        if self.writer.has_report:
            write_report(self.manifest.directory)
        self.manifest.finish()
        summary.files.sort()
        self._upload(client, summary)
        return summary

    def begin(self, client: Any = None) -> Iterator[Record]:
        """Make the output ready, and yield the records of parts that are done and hold."""
        place = Place(self.spec.output, self.spec.output_name)
        return self.manifest.begin(client, place)

    def _upload(self, client: Any, summary: JobSummary) -> None:
        try:
            summary.commit_url = self.writer.upload(client, restart=self.restart)
        except (Exception, KeyboardInterrupt) as err:
            err.add_note(
                f"all parts are written to {summary.output}: run the same job again to upload them"
            )
            raise

    def _run_rest(
        self, client: Any, done: set[str], summary: JobSummary, report: Report | None
    ) -> None:
        names = self.manifest.names()
        todo = [number for number, name in enumerate(names) if name not in done]
        if client is not None and todo:
            check_cluster(client, self.spec.chain.mappers, self.spec.backend)
        summary.running = RunningParts(names[number] for number in todo)
        started = time.perf_counter()
        with heard_by(summary.running.hear, client):
            for record in self.source.run(client, todo, names, self.spec):
                summary.add(record, summary.output)
                summary.elapsed_seconds = time.perf_counter() - started
                _show(report, summary.parts, self.source.count, summary)
        if todo:
            self.source.check_unchanged()

    @contextlib.contextmanager
    def current(self, client: Any) -> Iterator[None]:
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
            self.spec.chain.prepare()
            share_with_workers([self.spec.input_name, self.spec.output_name])
            yield


def make_job(
    source: Source,
    chain: Chain,
    writer: FileWriter,
    *,
    backend: str,
    on_error: str,
    code: str,
    command: str = "",
    restart: bool = False,
    verify: str = "digest",
    identity: dict[str, dict[str, Any]] | None = None,
    source_field: str | None = None,
    examples: int = 0,
    accept_changed_code: bool = False,
) -> Job:
    """A job whose output may be written to; see `gpuclassify.jobs.pipeline.Pipeline.prepare`.

    Parameters
    ----------
    source, chain, writer
        Checked and prepared.
    backend, on_error
        As of `Pipeline`.
    code : str
        Python code that makes the same job again, for people.
    command : str
        The command that does.
    restart : bool
    verify : {"digest", "size"}
        As of `gpuclassify.jobs.pipeline.Pipeline.run`.
    identity : dict, optional
        What the job is beside these.
    source_field, examples
        As of `Pipeline`.
    accept_changed_code : bool
        As of `Pipeline.run`.

    Raises
    ------
    ValueError
        There is no column `source_field`, or a stage takes it away.
    TypeError
        The output's format lacks the type of a column.
    """
    directory = writer.directory
    source.refuse_output(directory, f"part{writer.encoding.suffix}")
    spec = make_task_spec(source, chain, writer, backend, on_error)
    spec.encoding.check(spec.schema)
    folders = folder_types(spec.encoding.partition_by, spec.schema)
    _check_source_field(source_field, [*source.meta().columns], spec.schema.names)
    spec = replace(spec, source_field=source_field, examples=examples)
    whole = {**identity_of(source, spec), **(identity or {})}
    check_choice("verify", verify, VERIFY)
    manifest = Manifest(
        directory,
        whole,
        source.count,
        writer.encoding,
        restart,
        code,
        command,
        verify,
        folders,
        accept_changed_code,
    )
    manifest.check()
    writer.check(source.count)
    return Job(source, spec, manifest, writer)


def make_task_spec(
    source: Source, chain: Chain, writer: FileWriter, backend: str, on_error: str
) -> TaskSpec:
    """What every task of the job does; remembers the storage options that it needs."""
    meta = source.meta()
    keep_index = source.has_index and writer.keeps_index
    directory = writer.directory
    spec = TaskSpec(
        chain=chain,
        meta_dtypes=chain.meta_dtypes(meta),
        schema=arrow_table(chain.meta(meta), keep_index).schema,
        output=directory.root if directory.is_local else writer.path,
        encoding=writer.encoding,
        on_error=on_error,
        backend=backend,
        keep_index=keep_index,
        label_fields=chain.label_fields,
        number_fields=chain.number_fields,
        text_fields=chain.text_fields,
        input_schema=source.input_schema,
        input_name=source.options_name,
        output_name=f"output {redacted(writer.path)}",
    )
    remember(spec.input_name, source.storage_options)
    remember(spec.output_name, writer.storage_options)
    return spec


def identity_of(source: Source, spec: TaskSpec) -> dict[str, dict[str, Any]]:
    """What the job is. It may go on with another `on_error`, which is no part of it."""
    stages = {
        f"stage {number} {stage.__name__}": describe(stage)
        for number, stage in enumerate(spec.chain.mappers, 1)
    }
    encoding = {"format": spec.encoding.file_format, "compression": spec.encoding.compression}
    if spec.encoding.partition_by:
        encoding["partition_by"] = ", ".join(spec.encoding.partition_by)
    if spec.encoding.non_finite != NON_FINITE[0]:
        encoding["non_finite"] = spec.encoding.non_finite
    if source.has_index and not spec.keep_index and spec.encoding.file_format == PARQUET:
        encoding["index"] = "left out"
    return {**source.identity(), **stages, "output": {**encoding, "backend": spec.backend}}


def _check_source_field(name: str | None, before: list[str], after: list[str]) -> None:
    if name is None or (name in before and name in after):
        return
    where, columns = ("input", before) if name not in before else ("output", after)
    raise ValueError(
        f"no column {name!r} in the {where} to count rows by; columns are {columns}."
        f"{nearest(name, map(str, columns))} Pass source_field= to name yours"
    )


def _show(report: Report | None, done: int, total: int, summary: JobSummary) -> None:
    if report is not None:
        report(done, total, summary)
