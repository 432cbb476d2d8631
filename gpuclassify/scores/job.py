"""AssignBuckets: files in, scores cut into buckets of equal weight, files with buckets out."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuclassify.jobs.execution import compute_tasks
from gpuclassify.jobs.input.readers import FileReader, ParquetReader
from gpuclassify.jobs.job import Job, make_job
from gpuclassify.jobs.output.records import QUARANTINE, quarantine_path
from gpuclassify.jobs.output.run_key import JOB, key_in, number_in
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.report.progress import JobProgress
from gpuclassify.jobs.report.report import write_report
from gpuclassify.jobs.report.summary import JobSummary
from gpuclassify.jobs.sources import Source, as_source
from gpuclassify.jobs.stages import import_lines, shown
from gpuclassify.jobs.steps import StepReport, StepWriter
from gpuclassify.jobs.storage import Directory, open_directory
from gpuclassify.jobs.task import TaskSpec
from gpuclassify.mapping.chain import Chain
from gpuclassify.scores.buckets import (
    SETTINGS,
    ScoreBuckets,
    ScoreEdges,
    check_buckets,
    find_edges,
    score_columns,
)
from gpuclassify.scores.quantiles import BYTES, ScoreColumns
from gpuclassify.workers.secrets import recall, remember, share_with_workers

logger = logging.getLogger(__name__)

FOLDER = "_buckets"  # in the output; readers of datasets pass over it
SCORED, EDGES = f"{FOLDER}/scored", f"{FOLDER}/edges.json"
WHOLE_FILE = 1 << 62  # bytes of a part


class AssignBuckets:
    """A job that finds the edges between buckets of equal weight, and writes rows with theirs.

    Its steps: classifiers, if there are any, score each document once, into ``_buckets/scored/``
    of the output; the scores are read to find the edges, as `score_edges` does; and the documents
    are written with the columns of `ScoreBuckets`. What the first step has written, beside its
    report, is removed at the end. The edges stay in ``_buckets/edges.json``, for the next crawl:
    ``Pipeline([reader, *classifiers, ScoreBuckets("out/_buckets/edges.json"), writer])``.

    Running the same job again continues an interrupted one, whichever step it was in, and leaves a
    finished one as it is.

    Parameters
    ----------
    stages : iterable
        As of a `Pipeline`, the first of them a reader.
    scores : str or sequence of str
        Columns of numbers that the input has or a classifier writes.
    n, weight, by, text_field
        As of `score_edges`; by default rows weigh as many bytes as their text has.
    combine, bucket_field, overwrite
        As of `ScoreBuckets`.
    backend, on_error, source_field, examples
        As of `Pipeline`.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong.

    Examples
    --------
    >>> AssignBuckets(
    ...     [ParquetReader("scored/"), ParquetWriter("buckets/", partition_by="bucket")],
    ...     scores=["edu_score", "hq_score"],
    ... ).run()  # doctest: +SKIP
    """

    def __init__(
        self,
        stages: Iterable[Any],
        scores: str | Sequence[str],
        *,
        n: int = 20,
        weight: str | None = BYTES,
        by: str | None = None,
        text_field: str = "text",
        combine: str = "max",
        bucket_field: str = "bucket",
        overwrite: bool = False,
        backend: str = "pandas",
        on_error: str = "raise",
        source_field: str | None = None,
        examples: int = 2,
    ) -> None:
        check_buckets(n)
        self.stages = list(stages)
        self.options: dict[str, Any] = {"backend": backend, "on_error": on_error}
        self.options |= {"source_field": source_field, "examples": examples}
        Pipeline(**self.options)  # which checks them
        self.columns = score_columns(scores, weight, by, text_field)
        unknown = ScoreEdges(n, {name: {} for name in self.columns.names}, by, weight)
        self.buckets = ScoreBuckets(
            unknown, combine=combine, bucket_field=bucket_field, overwrite=overwrite
        )

    def __repr__(self) -> str:
        lines = "".join(f"        {shown(stage)},\n" for stage in self.stages)
        edges, columns = self.buckets.edges, self.columns
        settings = {"scores": [*columns.names], "n": edges.n, "weight": columns.weight}
        settings |= {"by": columns.by, "text_field": columns.text_field}
        settings |= {own: getattr(self.buckets, own) for own in SETTINGS}
        options = "".join(f"    {k}={v!r},\n" for k, v in {**settings, **self.options}.items())
        return f"AssignBuckets(\n    [\n{lines}    ],\n{options})"

    def prepare(
        self,
        *,
        restart: bool = False,
        verify: str = "digest",
        accept_changed_code: bool = False,
        command: str = "",
    ) -> BucketJob:
        """Find the parts and check everything that can be checked without workers; writes nothing.

        Raises
        ------
        TypeError, ValueError, FileExistsError, NotADirectoryError
            As `Pipeline.prepare` does; a column is missing, or its type is wrong.
        """
        reader = self.stages[0] if self.stages else None
        if not isinstance(reader, FileReader):
            raise TypeError(
                f"AssignBuckets begins with a {type(reader).__qualname__}: its first stage must be "
                "a reader of files. For a Dask frame there are score_edges() and add_buckets()"
            )
        stages = [*self.stages[:-1], self.buckets, self.stages[-1]]
        how: dict[str, Any] = {"restart": restart, "accept_changed_code": accept_changed_code}
        pipeline = Pipeline(stages, **self.options)
        job = pipeline.prepare(**how, verify=verify, command=command)
        scored = Chain(job.spec.chain.mappers[:-1])
        self.columns.check(scored.meta(job.source.meta()))
        code = f"{import_lines([AssignBuckets, *self.stages])}\n\n{self!r}"
        last = replace(job, manifest=replace(job.manifest, code=code))
        return BucketJob(last, scored, self.columns)

    def run(
        self,
        client: Any = None,
        *,
        restart: bool = False,
        verify: str = "digest",
        accept_changed_code: bool = False,
        report: StepReport | None = None,
    ) -> JobSummary:
        """Run the job, or continue it.

        Parameters
        ----------
        client, restart, verify, accept_changed_code
            As of `Pipeline.run`.
        report : callable, optional
            ``report(step, done, of, summary)``, at first and after every part of a step. Default:
            as of `Pipeline.run`.

        Returns
        -------
        JobSummary
            Of the last step.

        Raises
        ------
        ValueError
            There is no score, or a weight is negative.
        Exception
            As of `Pipeline.run`.
        """
        job = self.prepare(restart=restart, verify=verify, accept_changed_code=accept_changed_code)
        if report is not None:
            return job.run(client, report)
        with JobProgress("buckets", client=client) as progress:
            return job.run(client, progress.step)


@dataclass(frozen=True)
class BucketJob:
    """An `AssignBuckets` that is planned and checked.

    Attributes
    ----------
    last : Job
        Its last step, whose output is the job's; with buckets whose edges are not known yet.
    scoring : Chain
        The classifiers.
    columns : ScoreColumns
    """

    last: Job
    scoring: Chain
    columns: ScoreColumns

    @property
    def directory(self) -> Directory:
        """The output."""
        return self.last.manifest.directory

    def run(self, client: Any = None, report: StepReport | None = None) -> JobSummary:
        """Run what is not done yet; see `AssignBuckets.run`."""
        last = self.last
        with last.current(client):
            if last.restart or not self.directory.filesystem.exists(self.directory.path(JOB)):
                with contextlib.suppress(FileNotFoundError):
                    self.directory.filesystem.rm(self.directory.path(FOLDER), recursive=True)
            is_done = sum(1 for _ in last.begin(client)) == last.manifest.count
            self.directory.sweep(FOLDER)
            if not is_done or self._kept_edges() is None:
                if is_done and self.scoring.mappers:
                    raise ValueError(
                        f"{self.directory.path(EDGES)} is not what was written, and the scores "
                        "that it was made of are removed: bring back the file as it was, or start "
                        "over (restart=True)"
                    )
                last = self._with_edges(client, report)
            summary = last.run(client, report and functools.partial(report, "buckets"))
        self._clear_up(summary)
        return summary

    def _with_edges(self, client: Any, report: StepReport | None) -> Job:
        """The last step, once those before it are done."""
        source, spec = self.last.source, self.last.spec
        if self.scoring.mappers:
            source, spec = self._score(client, report)
        buckets, edges = self._buckets(), self._kept_edges()
        if edges is None:
            if report is not None:
                report("edges of buckets", 0, 1, JobSummary())
            compute = functools.partial(compute_tasks, client)
            edges = find_edges(source.frame(spec), self.columns, buckets.edges.n, compute)
            self.directory.make(FOLDER)
            self.directory.replace(EDGES, edges.as_json().encode())
        chain = Chain((buckets.with_edges(edges),))
        spec = replace(spec, chain=chain, meta_dtypes=chain.meta_dtypes(source.meta()))
        return replace(self.last, source=source, spec=spec)

    def _kept_edges(self) -> ScoreEdges | None:
        """The edges that an earlier run has found, if they are as it wrote them."""
        try:
            return ScoreEdges.from_json(self.directory.read(EDGES))
        except FileNotFoundError:
            return None
        except ValueError as err:
            logger.warning("%s is not what was written: %s", self.directory.path(EDGES), err)
            return None

    def _buckets(self) -> ScoreBuckets:
        buckets = self.last.spec.chain.mappers[-1]
        assert isinstance(buckets, ScoreBuckets)
        return buckets

    def _score(self, client: Any, report: StepReport | None) -> tuple[Source, TaskSpec]:
        """Classify what is not classified yet.

        Returns
        -------
        Source
            The documents with their scores, in the parts that the input has.
        TaskSpec
            What reads them.
        """
        last, spec = self.last, self.last.spec
        options = recall(spec.output_name, {})
        scoring = make_job(
            last.source,
            self.scoring,
            StepWriter(self._scored, storage_options=options),
            backend=spec.backend,
            on_error=spec.on_error,
            code="",
            verify=last.manifest.verify,
            identity={"job": {"key": last.manifest.key}},
            source_field=spec.source_field,
            examples=spec.examples,
            accept_changed_code=last.manifest.accept_changed_code,
        )
        scoring.run(client, report and functools.partial(report, "scores"))
        reader = ParquetReader(self._scored, part_bytes=WHOLE_FILE, storage_options=options)
        source = as_source(reader, "raise")
        remember(source.options_name, source.storage_options)
        share_with_workers([source.options_name])
        schema, name = source.input_schema, source.options_name
        return source, replace(spec, on_error="raise", input_schema=schema, input_name=name)

    @property
    def _scored(self) -> str:
        """Where the classifiers' output is."""
        return f"{self.last.spec.output.rstrip('/')}/{SCORED}"

    def _clear_up(self, summary: JobSummary) -> None:
        """Remove the copies of documents, and take over what the classifiers left out."""
        scored = open_directory(self._scored, recall(self.last.spec.output_name, {}))
        if not scored.filesystem.exists(scored.path(JOB)):
            return
        summary.left_out = write_report(scored)["left_out"]
        names = self.last.manifest.names()
        for name in scored.sizes(QUARANTINE):
            self.directory.make(QUARANTINE)
            target = quarantine_path(names[number_in(name)])
            self.directory.replace(target, scored.read(f"{QUARANTINE}/{name}"))
        scored.remove(*(name for name in scored.sizes() if key_in(name) is not None))
