"""Jobs, from their declaration to `_SUCCESS`: checks, tasks, records, report and upload."""

from __future__ import annotations

import contextlib
import functools
import logging
import posixpath
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import dask
import pyarrow as pa

from gpuclassify.frames import is_text
from gpuclassify.jobs.execution import check_cluster, compute_tasks, digest_files, run_tasks
from gpuclassify.jobs.input.annotations import later_folders
from gpuclassify.jobs.input.jsonl import json_columns
from gpuclassify.jobs.input.parts import InputSchema
from gpuclassify.jobs.input.sources import FileSource, Source
from gpuclassify.jobs.ledger.encoding import (
    FILE,
    PLACE,
    arrow_table,
    folder_types,
    plain_folder_types,
)
from gpuclassify.jobs.ledger.manifest import Manifest, RunOptions
from gpuclassify.jobs.ledger.records import JobChangedError, Record, check_current, key_in
from gpuclassify.jobs.output.annotations import BOOKKEEPING, annotation_schema
from gpuclassify.jobs.output.writers import FileWriter
from gpuclassify.jobs.provenance import Provenance, hub_datasets
from gpuclassify.jobs.report.report import write_report
from gpuclassify.jobs.report.summary import JobSummary, Report
from gpuclassify.jobs.stages import describe
from gpuclassify.jobs.stores.names import PARQUET
from gpuclassify.jobs.stores.store import Store, UnreadableInputError
from gpuclassify.jobs.task import TaskSpec, join_parts, run_part, run_partition
from gpuclassify.mapping.chain import Chain
from gpuclassify.mapping.stage_counts import label_fields
from gpuclassify.pages.sections import ReportPart
from gpuclassify.settings.checks import nearest
from gpuclassify.workers.run_context import RunningParts, progress_events
from gpuclassify.workers.secrets import remember, share_with_workers

if TYPE_CHECKING:
    from distributed import Client


logger = logging.getLogger(__name__)


class PartsNote(str):
    """Note that a job adds to an error: the number of parts written, and how to continue."""

    manifest: Manifest

    @classmethod
    def make(cls, manifest: Manifest, client: Client | None = None) -> PartsNote:
        """Make the note. With a `client`, it adds that workers may still finish parts."""
        parts = "parts that are done"
        with contextlib.suppress(Exception):  # listing may fail for the same reason as the job
            parts = f"{manifest.written()} of {manifest.count} parts"
        addition = ", and workers may end parts that they have begun" if client else ""
        note = cls(
            f"{parts} are written to {manifest.directory}{addition}: "
            "run the same job again to continue"
        )
        note.manifest = manifest
        return note

    @classmethod
    @contextlib.contextmanager
    def counted_again(cls) -> Iterator[None]:
        """Update the number of written parts in the notes of an error that leaves the block.

        Put it around the block that ends the workers, which may write parts until then.
        """
        try:
            yield
        except (Exception, KeyboardInterrupt) as err:
            notes = getattr(err, "__notes__", [])
            notes[:] = [cls.make(n.manifest) if isinstance(n, cls) else n for n in notes]
            raise


@dataclass(frozen=True)
class Job:
    """Planned and checked job: source of the parts, settings of the tasks, metadata and writer.

    A part is a slice of the input that one task reads and writes. `earlier` are jobs of the same
    annotation set, which `run` finishes before this job. With `is_skipped`, all files are annotated
    already, and this job writes nothing.
    """

    source: Source
    spec: TaskSpec
    manifest: Manifest
    writer: FileWriter
    earlier: tuple[Job, ...] = ()
    is_skipped: bool = False

    @property
    def restart(self) -> bool:
        """Whether `run` first removes the output of earlier runs."""
        return self.manifest.options.restart

    @property
    def directory(self) -> Store:
        """Output directory."""
        return self.manifest.directory

    @property
    def title(self) -> str:
        """Title of the work in progress: names of the stages joined by ``+``, or "Writing rows"."""
        return self.spec.chain.__name__ if self.spec.chain.mappers else "Writing rows"

    @property
    def report_parts(self) -> tuple[ReportPart, ...]:
        """Numbers and sections that the stages, such as classifiers, add to the report."""
        return self.spec.chain.report_parts

    def needs_workers(self) -> bool:
        """Return whether `run` has parts to do or files to upload, also for `earlier` jobs.

        This may read all files of a finished job's output, to verify them.
        """
        if any(job.needs_workers() for job in self.earlier):
            return True
        if self.is_skipped:
            return False
        is_done = not self.restart and self.manifest.is_complete()
        return not (is_done and self.writer.is_uploaded())

    def run(self, client: Client | None = None, report: Callable[..., None] | None = None) -> Any:
        """Run or continue the `earlier` jobs and this job; return the `JobSummary` of this job.

        Without a `client`, everything runs here. ``report(parts_done, parts, summary_so_far)`` is
        called for each of these jobs, at first, after every part and after every joined file.
        """
        with self.current(client):
            return self.write(client, report)

    def write(self, client: Client | None, report: Report | None) -> JobSummary:
        """Do the same as `Job.run`, in a block of `current` with the same client."""
        for job in self.earlier:
            job.write(client, report)
        summary = JobSummary(output=str(self.directory))
        if self.is_skipped:
            _show(report, self.source.count, self.source.count, summary)
            return summary
        done: dict[str, int | None] = {}  # bytes of each part; None if it is joined
        for record in self.begin(client):
            summary.add(record, is_resumed=True)
            sizes = (None if record.joined else part.file_bytes for part in record.parts)
            done |= zip((part.name for part in record.parts), sizes, strict=True)
        summary.checked = str(self.manifest.checked)
        _show(report, len(done), self.source.count, summary)
        try:
            self._write_rest(client, done, summary, report)
            self._join(client, done, summary, report)
            check_current(self.directory, self.manifest.key)
            if self.writer.has_report:
                self.write_report()
                self.manifest.write_card()
            files = self.manifest.finish()
        except (UnreadableInputError, JobChangedError):  # running the job again would fail, too
            raise
        except (Exception, KeyboardInterrupt) as err:
            err.add_note(PartsNote.make(self.manifest, client))
            raise
        summary.files = sorted(posixpath.join(summary.output, name) for name in files)
        summary.output_bytes = sum(files.values())
        try:
            summary.commit_url = self.writer.upload(client, restart=self.restart)
        except (Exception, KeyboardInterrupt) as err:
            err.add_note(
                f"all parts are written to {summary.output}: run the same job again to upload them"
            )
            raise
        return summary

    def write_report(self) -> None:
        """Write the report of the finished parts into ``_report/`` of the output directory."""
        write_report(self.directory, self.report_parts)

    def begin(self, client: Client | None = None) -> Iterator[Record]:
        """Prepare the output directory, and yield the records of undamaged finished parts.

        A file of several joined parts has one record. The iterator must be exhausted; see
        `Manifest.begin`.
        """
        if self.restart and self.writer.annotates:  # removes the set's later jobs, too
            for folder in later_folders(self.directory):
                # Parts go before job.json: an interrupt would leave a set that cannot be opened.
                later = self.directory.below(folder)
                later.remove(*(name for name in later.sizes() if key_in(name) is not None))
                self.directory.remove_folder(folder)
        return self.manifest.begin(functools.partial(digest_files, client))

    def _write_rest(
        self,
        client: Client | None,
        done: dict[str, int | None],
        summary: JobSummary,
        report: Report | None,
    ) -> None:
        names = self.manifest.names()
        todo = [number for number, name in enumerate(names) if name not in done]
        if client is not None and todo:
            check_cluster(client, self.spec.chain.mappers, self.spec.backend)
        sizes = self.source.part_sizes
        work = sizes and [sizes[number] for number in todo]
        summary.running = RunningParts([names[number] for number in todo], work)
        spec = replace(self.spec, run_began=time.time())
        with progress_events(summary.running.update, client):
            for record in self.run_tasks(client, todo, spec):
                summary.add(record)
                done[record.name] = record.file_bytes
                seconds = record.finished - spec.run_began
                summary.elapsed_seconds = max(summary.elapsed_seconds, seconds)
                _show(report, summary.parts, self.source.count, summary)
        if todo:
            self.source.check_unchanged()

    def _join(
        self,
        client: Client | None,
        sizes: Mapping[str, int | None],
        summary: JobSummary,
        report: Report | None,
    ) -> None:
        """Join neighbouring parts into files of about `output_bytes`, if the writer asks for this.

        `sizes` has the bytes of each part by name, None if it is joined already.
        """
        manifest, encoding = self.manifest, self.manifest.encoding
        if not manifest.joins:
            return
        groups: list[list[str]] = []
        room = -1
        for name in manifest.names():
            size = sizes[name]
            if size is None:
                room = -1
                continue
            if size > room:
                groups.append([])
                room = encoding.output_bytes
            groups[-1].append(name)
            room = max(0, room - size)
        if groups:
            logger.info("joining the parts in %s into %d files", self.directory, len(groups))
        calls = ((self.directory, names, manifest.count, encoding) for names in groups)
        for number, _ in enumerate(run_tasks(client, join_parts, calls), 1):
            summary.running.joining = f"{number:,} of {len(groups):,} files are joined"
            _show(report, summary.parts, self.source.count, summary)
        if groups:
            summary.running.joining = ""
            _show(report, summary.parts, self.source.count, summary)

    def run_tasks(
        self, client: Client | None, todo: Sequence[int], spec: TaskSpec
    ) -> Iterator[Record]:
        """Run tasks with settings `spec` for part numbers `todo`; yield records as they come."""
        names, packed = self.manifest.names(), spec.pack()
        if isinstance(self.source, FileSource):
            self.source.share_tokens()
            inputs = zip(todo, self.source.inputs(todo), strict=True)
            tasks = ((part, n, names[n], packed, files) for n, (part, files) in inputs)
            return run_tasks(client, run_part, tasks)
        partitions, run = self.source.partitions(), dask.delayed(run_partition, pure=False)
        return compute_tasks(client, [run(partitions[n], n, names[n], packed) for n in todo])

    @contextlib.contextmanager
    def current(self, client: Client | None) -> Iterator[None]:
        """Make the client current in the block, and send workers the secrets of the job.

        The stages are prepared again, because they send their secrets through the current client.
        If `client` is None, nothing is done. Raises TypeError unless it is None or a synchronous
        Client.
        """
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
            for job in (*self.earlier, self):
                job.spec.chain.prepare()
                share_with_workers([job.spec.input_name, job.directory.options_name])
            yield


def make_job(
    source: Source,
    chain: Chain,
    writer: FileWriter,
    options: RunOptions,
    *,
    backend: str,
    on_error: str,
    identity: dict[str, dict[str, Any]] | None = None,
    source_field: str | None = None,
    examples: int = 0,
    code: str = "",
    rules: Sequence[str] = (),
) -> Job:
    """Make a job from a source, a chain of stages and a writer, and check its output.

    Nothing is written. `backend` is the library of the frames that stages get, "pandas" or "cudf".
    `on_error` says whether rows that cannot be read or classified stop the job ("raise") or are set
    aside ("quarantine"). `identity` has further settings that identify the job (see `identity_of`),
    and `code` is Python code that makes it, for the report. `source_field` is a column by whose
    values the report counts rows. `examples` is the number of the most certain texts, and of the
    least certain, that the report shows per label. `rules` are sentences on the rows that a recipe
    drops or changes, for the provenance.

    Raises TypeError or ValueError if source, stages and settings do not fit, and the errors of
    `Manifest.check`, such as JobChangedError and FileExistsError.
    """
    directory = writer.directory
    source.refuse_output(directory, writer.sample_name)
    settings: dict[str, Any] = {"backend": backend, "on_error": on_error}
    settings |= {"source_field": source_field, "examples": examples}
    spec = make_task_spec(source, chain, writer, **settings)
    earlier = Provenance()
    if isinstance(source, FileSource):
        read = hub_datasets(file.path for file in source.files)
        earlier = replace(source.input.provenance, inputs=read)
    provenance = Provenance.of_chain(chain, source.meta, earlier, rules).only(spec.schema.names)
    spec = replace(spec, metadata=provenance.metadata())
    spec.encoding.check(spec.schema)
    folders = folder_types(spec.encoding.partition_by, spec.schema)
    written = spec.schema.names if spec.annotations is None else [*source.meta.columns]
    for side, columns in (("input", [*source.meta.columns]), ("output", written)):
        if source_field is not None and source_field not in columns:
            raise ValueError(
                f"no column {source_field!r} in the {side} to count rows by; columns are "
                f"{columns}.{nearest(source_field, map(str, columns))} "
                "Pass source_field= to name yours"
            )
    full_identity = {**identity_of(source, spec), **(identity or {})}
    manifest = Manifest(
        directory,
        full_identity,
        source.count,
        writer.encoding,
        options,
        code=code,
        folders=folders,
        provenance=provenance.as_dict(),
        columns=input_columns(source) if writer.annotates else None,
        keeps_earlier=not source.knows_input,
    )
    manifest.check()
    writer.check(source.count)
    return Job(source, spec, manifest, writer)


def make_task_spec(source: Source, chain: Chain, writer: FileWriter, **settings: Any) -> TaskSpec:
    """Make the settings that all tasks of a job share; `settings` are further fields of `TaskSpec`.

    The storage options of the source are remembered, to be sent to workers as secrets.
    """
    meta = source.meta
    keep_index = source.has_index and writer.keeps_index
    schema = arrow_table(chain.meta(meta), keep_index).schema
    for name in json_columns(source.input_schema.arrow if source.input_schema else ()):
        if name in schema.names and is_text(schema.field(name).type):
            schema = schema.set(schema.names.index(name), pa.field(name, pa.json_()))
    annotations, read = None, source.input_schema
    sets = read.annotations if read else ()
    counted = {*chain.schema().names, *(read.annotation_fields if read else ())}
    if writer.annotates:
        if not isinstance(source, FileSource):
            raise TypeError(
                "annotations are of rows in files, and a job of a Dask frame reads none: "
                "begin with a ParquetReader or JsonlReader"
            )
        schema = _new_columns(schema, source, chain)
        annotations = annotation_schema(schema, label_fields(chain.mappers))
        read = _schema_to_annotate(source, chain, settings["on_error"], settings["source_field"])
    spec = TaskSpec(
        chain=chain,
        meta_dtypes=chain.meta_dtypes(meta),
        schema=plain_folder_types(writer.encoding.partition_by, schema),
        directory=writer.directory,
        encoding=writer.encoding,
        keep_index=keep_index,
        label_fields=(*label_fields(chain.mappers), *(n for known in sets for n in known.labels)),
        number_fields=tuple(f.name for f in schema if f.type == pa.float32() and f.name in counted),
        text_fields=chain.text_fields,
        input_schema=read,
        annotations=annotations,
        input_name=source.options_name,
        **settings,
    )
    remember(spec.input_name, source.storage_options)
    return spec


def input_columns(source: Source) -> pa.Schema | None:
    """Return the columns that are stored in the input files; None if the source is a Dask frame."""
    schema = source.input_schema
    return schema and pa.schema([schema.arrow.field(name) for name in schema.file_fields])


def _new_columns(schema: pa.Schema, source: FileSource, chain: Chain) -> pa.Schema:
    """Return the columns that the stages in `chain` add to the input `source`.

    `schema` has all columns of the stages' result. Raises ValueError if annotations cannot have the
    new ones, or if there are none.
    """
    if source.reader.path_field is not None:
        raise ValueError(
            f"path_field={source.reader.path_field!r} adds a column to the input: leave it out, "
            f"for annotations name the file of each row themselves, in {FILE!r}"
        )
    if replaced := [name for name in chain.schema().names if name in source.meta.columns]:
        raise ValueError(
            f"the input has columns {replaced} already: choose other names for the annotations"
        )
    new = [field for field in schema if field.name not in source.meta.columns]
    if not new:
        raise ValueError("no stage adds a column: annotations would be empty")
    if taken := [field.name for field in new if field.name in BOOKKEEPING.names]:
        raise ValueError(f"annotations have columns {taken} themselves: choose another name")
    return pa.schema(new, metadata=schema.metadata)


def _schema_to_annotate(
    source: FileSource, chain: Chain, on_error: str, source_field: str | None
) -> InputSchema:
    """Return the schema to read the input of a job that annotates: the columns that it needs.

    It has all columns if stages may read any, or if `on_error` is not "raise", because fewer
    columns could change which rows are left out. Tables also get the rows' positions
    (`has_positions`).
    """
    schema = source.input.schema
    if on_error == "raise" and chain.is_row_wise:
        needed = {*chain.read_fields, source_field}
        names = [name for name in schema.arrow.names if name in needed]
        schema = schema.projected(names or schema.file_fields[:1])
    if taken := [name for name in (FILE, PLACE) if name in schema.arrow.names]:
        raise ValueError(
            f"the input has columns {taken}, which annotations have themselves: name the columns "
            "to read without these (fields=), or rename them"
        )
    return replace(schema, storage_options={}, has_positions=True)


def identity_of(source: Source, spec: TaskSpec) -> dict[str, dict[str, Any]]:
    """Return the settings that change a job's results, by heading: input, each stage, output.

    Values are dicts of JSON values by name. A later run with other settings is another job, and may
    not continue this one. `on_error` is not included, so it may change.
    """
    stages = {
        f"stage {number} {stage.__name__}": describe(stage)
        for number, stage in enumerate(spec.chain.mappers, 1)
    }
    known = spec.encoding
    encoding: dict[str, Any] = {"format": known.file_format, "compression": known.compression}
    if spec.encoding.partition_by:
        encoding["partition_by"] = ", ".join(spec.encoding.partition_by)
    if known.output_bytes:
        encoding["output_bytes"] = known.output_bytes
    if spec.annotations is not None:
        encoding["annotations"] = True
    if source.has_index and not spec.keep_index and spec.encoding.file_format == PARQUET:
        encoding["index"] = "left out"
    return {**source.identity(), **stages, "output": {**encoding, "backend": spec.backend}}


def _show(report: Report | None, done: int, total: int, summary: JobSummary) -> None:
    if report is not None:
        report(done, total, summary)
