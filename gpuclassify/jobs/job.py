"""The engine of jobs: what its tasks do, running those that are left, publishing, reporting."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import pyarrow as pa

from gpuclassify.jobs.execution import check_cluster
from gpuclassify.jobs.files import PARQUET, UnreadableInputError
from gpuclassify.jobs.output.encoding import arrow_table, folder_types
from gpuclassify.jobs.output.manifest import VERIFY, Manifest
from gpuclassify.jobs.output.records import JobChangedError, Record, check_current
from gpuclassify.jobs.output.writers import FileWriter
from gpuclassify.jobs.report.progress import JobProgress
from gpuclassify.jobs.report.report import write_report
from gpuclassify.jobs.report.summary import JobSummary, Report
from gpuclassify.jobs.sources import Source
from gpuclassify.jobs.stages import describe
from gpuclassify.jobs.storage import Directory, Place, redacted
from gpuclassify.jobs.task import TaskSpec
from gpuclassify.mapping.chain import Chain
from gpuclassify.mapping.stage_counts import label_fields
from gpuclassify.settings.checks import check_choice, nearest
from gpuclassify.settings.options import NON_FINITE
from gpuclassify.workers.run_context import RunningParts, heard_by
from gpuclassify.workers.secrets import remember, share_with_workers

Summary = TypeVar("Summary")


class Runnable(ABC, Generic[Summary]):
    """What people describe a job by: `prepare` plans and checks it, and `run` runs it."""

    def prepare(
        self,
        *,
        restart: bool = False,
        verify: str = "digest",
        accept_changed_code: bool = False,
        command: str = "",
    ) -> Job:
        """Find the parts and check everything that can be checked without workers; writes nothing.

        Parameters
        ----------
        restart, verify, accept_changed_code
            See `run`.
        command : str
            The command that makes the same job, for the report.

        Raises
        ------
        TypeError
            The stages do not begin with a reader and end with a writer, or one is none.
        UnreadableInputError
            The input cannot be read.
        JobChangedError
            The output has parts of a job that differs from this one, and `restart` is false.
        DamagedMetadataError
            What says whose parts the output has cannot be read, and `restart` is false.
        FileExistsError, NotADirectoryError
            The output has data files that no job wrote, or is a file.
        ValueError
            The settings do not fit the input, or each other.
        """
        return self._make_job(
            restart=restart,
            verify=verify,
            accept_changed_code=accept_changed_code,
            command=command,
        )

    @abstractmethod
    def _make_job(self, **begin: Any) -> Job:
        """See `prepare`, whose arguments these are."""

    def run(
        self,
        client: Any = None,
        *,
        restart: bool = False,
        verify: str = "digest",
        accept_changed_code: bool = False,
        report: Callable[..., None] | None = None,
    ) -> Summary:
        """Run the job, or continue it.

        Parameters
        ----------
        client : distributed.Client, optional
            Default: everything runs here, one part after another.
        restart : bool
            Start over, and remove what earlier runs wrote; nothing else is ever removed.
        verify : {"digest", "size"}
            How to find out whether parts that earlier runs wrote are still what they wrote: by the
            SHA-256 of their files, which are read at the speed of the disk, by the workers of
            `client` or by threads here; a store that tells the MD5 of its objects is asked for it
            instead. "size" looks at names and sizes alone, and reads nothing. What does not hold
            is done again, and named in Python's log.
        accept_changed_code : bool
            Go on, and keep the parts that are there, although a callable among the stages has other
            code: where you know that it gives the same rows. Nothing else may differ.
        report : callable, optional
            ``report(parts_done, parts, summary_so_far)``, at first and after every part; of
            `AssignBuckets` and `Deduplicate` ``report(step, done, of, summary)``, of every step.
            Default: a live line on a terminal, a widget in a notebook, or a line a minute in
            Python's log.

        Returns
        -------
        JobSummary
            Of `AssignBuckets` that of the last step; of `Deduplicate` a `DedupSummary`.

        Raises
        ------
        TypeError, ValueError, FileExistsError, NotADirectoryError
            See `prepare`. `client` is no Client of Dask, or an asynchronous one.
        ChangedInputError
            A file is not what it was when the job began.
        JobChangedError
            Another run has started over in the output meanwhile.
        Exception
            The first one that a part raises. What is written stays: run the same job again.
        """
        job = self.prepare(restart=restart, verify=verify, accept_changed_code=accept_changed_code)
        if report is not None:
            return job.run(client, report)
        with JobProgress(job.title, client=client) as progress:
            return job.run(client, job.shown_by(progress))


class PartsNote(str):
    """How many parts an error leaves, as a note on it, which can be `counted_again`."""

    manifest: Manifest

    @classmethod
    def of(cls, manifest: Manifest, client: Any = None) -> PartsNote:
        """The note, from what is there now; workers of a client may add to it."""
        parts = "parts that are done"
        with contextlib.suppress(Exception):  # what went wrong may be that nothing can be listed
            parts = f"{manifest.written()} of {manifest.count} parts"
        going_on = ", and workers may end parts that they have begun" if client else ""
        note = cls(
            f"{parts} are written to {manifest.directory}{going_on}: "
            "run the same job again to continue"
        )
        note.manifest = manifest
        return note

    @classmethod
    @contextlib.contextmanager
    def counted_again(cls) -> Iterator[None]:
        """Count anew what errors leave in the block, where workers go on until its end."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as err:
            notes = getattr(err, "__notes__", [])
            notes[:] = [cls.of(n.manifest) if isinstance(n, cls) else n for n in notes]
            raise


@dataclass(frozen=True)
class Job:
    """A job that is planned and checked; `writer` uploads its output, where it has a place to."""

    source: Source
    spec: TaskSpec
    manifest: Manifest
    writer: FileWriter

    @property
    def restart(self) -> bool:
        """Whether `run` begins with removing what earlier runs wrote."""
        return self.manifest.restart

    @property
    def directory(self) -> Directory:
        """The output."""
        return self.manifest.directory

    @property
    def title(self) -> str:
        """What is going on, for people."""
        return self.spec.chain.__name__

    @staticmethod
    def shown_by(progress: JobProgress) -> Callable[..., None]:
        """What `run` reports to, so that it shows this job."""
        return progress.parts

    def needs_workers(self) -> bool:
        """Whether `run` has parts to do or files to upload; reads the manifest, if there is one."""
        is_done = not self.restart and self.manifest.is_complete()
        return not (is_done and self.writer.is_uploaded())

    def run(self, client: Any = None, report: Callable[..., None] | None = None) -> Any:
        """Run what is not done yet; see `Runnable.run`."""
        with self.current(client):
            return self.write(client, report)

    def write(self, client: Any, report: Report | None) -> JobSummary:
        """Write and publish the parts that are not done yet, and what people get of them all."""
        summary = JobSummary(output=str(self.directory))
        done = set()
        for record in self.begin(client):
            summary.add(record, summary.output, is_resumed=True)
            done.add(record.name)
        summary.checked = str(self.manifest.checked)
        _show(report, len(done), self.source.count, summary)
        try:
            self._write_rest(client, done, summary, report)
        except (UnreadableInputError, JobChangedError):  # running again would fail alike
            raise
        except (Exception, KeyboardInterrupt) as err:
            err.add_note(PartsNote.of(self.manifest, client))
            raise
        check_current(self.directory, self.manifest.key)
        if self.writer.has_report:
            write_report(self.directory)
        self.manifest.finish()
        summary.files.sort()
        try:
            summary.commit_url = self.writer.upload(client, restart=self.restart)
        except (Exception, KeyboardInterrupt) as err:
            err.add_note(
                f"all parts are written to {summary.output}: run the same job again to upload them"
            )
            raise
        return summary

    def begin(self, client: Any = None) -> Iterator[Record]:
        """Make the output ready, and yield the records of parts that are done and hold."""
        place = Place(self.spec.output, self.spec.output_name)
        return self.manifest.begin(client, place)

    def _write_rest(
        self, client: Any, done: set[str], summary: JobSummary, report: Report | None
    ) -> None:
        names = self.manifest.names()
        todo = [number for number, name in enumerate(names) if name not in done]
        if client is not None and todo:
            check_cluster(client, self.spec.chain.mappers, self.spec.backend)
        summary.running = RunningParts(names[number] for number in todo)
        spec = replace(self.spec, run_began=time.time())
        with heard_by(summary.running.hear, client):
            for record in self.source.run(client, todo, names, spec):
                summary.add(record, summary.output)
                seconds = record.finished - spec.run_began
                summary.elapsed_seconds = max(summary.elapsed_seconds, seconds)
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
                f"a job got {client!r} as its client: pass a dask.distributed.Client, such as "
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
    identity: dict[str, dict[str, Any]] | None = None,
    source_field: str | None = None,
    examples: int = 0,
    **begin: Any,
) -> Job:
    """A job whose output may be written to, from a source, stages and a writer that are checked.

    `identity` is what the job is beside these; `begin` has the arguments of `Runnable.prepare`, and
    ``code``, Python code that makes the same job, for people.
    """
    directory = writer.directory
    source.refuse_output(directory, f"part{writer.encoding.suffix}")
    settings: dict[str, Any] = {"backend": backend, "on_error": on_error}
    settings |= {"source_field": source_field, "examples": examples}
    spec = make_task_spec(source, chain, writer, **settings)
    spec.encoding.check(spec.schema)
    folders = folder_types(spec.encoding.partition_by, spec.schema)
    for where, columns in (("input", [*source.meta().columns]), ("output", spec.schema.names)):
        if source_field is not None and source_field not in columns:
            raise ValueError(
                f"no column {source_field!r} in the {where} to count rows by; columns are "
                f"{columns}.{nearest(source_field, map(str, columns))} "
                "Pass source_field= to name yours"
            )
    whole = {**identity_of(source, spec), **(identity or {})}
    check_choice("verify", begin.get("verify", VERIFY[0]), VERIFY)
    count, encoding = source.count, writer.encoding
    manifest = Manifest(directory, whole, count, encoding, folders=folders, **begin)
    manifest.check()
    writer.check(count)
    return Job(source, spec, manifest, writer)


def make_task_spec(source: Source, chain: Chain, writer: FileWriter, **settings: Any) -> TaskSpec:
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
        keep_index=keep_index,
        label_fields=label_fields(chain.mappers),
        number_fields=tuple(new.name for new in chain.schema() if new.type == pa.float32()),
        text_fields=chain.text_fields,
        input_schema=source.input_schema,
        input_name=source.options_name,
        output_name=f"output {redacted(writer.path)}",
        **settings,
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


def _show(report: Report | None, done: int, total: int, summary: JobSummary) -> None:
    if report is not None:
        report(done, total, summary)
