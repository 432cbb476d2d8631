"""Job that assigns buckets of equal weight, after finding their edges in the whole input."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuclassify.corpus.scores.buckets import (
    SETTINGS,
    Combine,
    ScoreBuckets,
    ScoreEdges,
    check_buckets,
    find_edges,
    score_columns,
)
from gpuclassify.corpus.scores.quantiles import BYTES, ScoreColumns
from gpuclassify.jobs.execution import compute_tasks
from gpuclassify.jobs.input.readers import FileReader, ParquetReader
from gpuclassify.jobs.input.sources import Source, as_source
from gpuclassify.jobs.ledger.manifest import RunOptions
from gpuclassify.jobs.ledger.records import JOB, QUARANTINE, key_in, quarantine_path
from gpuclassify.jobs.output.writers import FileWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.report.report import write_report
from gpuclassify.jobs.report.summary import JobSummary
from gpuclassify.jobs.stages import import_lines, shown
from gpuclassify.jobs.steps import SteppedJob, Steps
from gpuclassify.jobs.task import TaskSpec
from gpuclassify.mapping.chain import Chain
from gpuclassify.workers.secrets import remember, share_with_workers

logger = logging.getLogger(__name__)

FOLDER = "_buckets"  # folder in the output that dataset readers skip
SCORED, EDGES = "scored", f"{FOLDER}/edges.json"
WHOLE_FILE = 1 << 62  # bytes of a part


class AssignBuckets(Pipeline):
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
        With an `AnnotationWriter`, buckets are written beside the input, whose scores are there
        already, as a column or an annotation.
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
        An argument is wrong. When run: there is no score, or a weight is negative.

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
        combine: Combine = "max",
        bucket_field: str = "bucket",
        overwrite: bool = False,
        backend: str = "pandas",
        on_error: str = "raise",
        source_field: str | None = None,
        examples: int = 2,
    ) -> None:
        super().__init__(
            stages,
            backend=backend,
            on_error=on_error,
            source_field=source_field,
            examples=examples,
        )
        check_buckets(n)
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
        settings |= {setting: getattr(self.buckets, setting) for setting in SETTINGS}
        options = "".join(f"    {k}={v!r},\n" for k, v in {**settings, **self._options()}.items())
        return f"AssignBuckets(\n    [\n{lines}    ],\n{options})"

    def _make_job(self, options: RunOptions) -> BucketJob:
        reader = self.stages[0] if self.stages else None
        if not isinstance(reader, FileReader):
            raise TypeError(
                f"AssignBuckets begins with a {type(reader).__qualname__}: its first stage must be "
                "a reader of files. For a Dask frame there are score_edges() and add_buckets()"
            )
        stages = [*self.stages[:-1], self.buckets, self.stages[-1]]
        writer = self.stages[-1]
        is_beside = isinstance(writer, FileWriter) and writer.annotates
        if is_beside and len(stages) > 3:
            raise ValueError(
                "buckets beside the input are cut of scores that are there: annotate it by the "
                "classifiers first, and read the scores by annotations= of the reader"
            )
        pipeline = Pipeline(stages, **self._options())
        # Buckets of all files change when files come: what is new cannot be annotated alone.
        job = (
            pipeline._job_of(reader, writer, options) if is_beside else pipeline._make_job(options)
        )
        code = f"{import_lines([AssignBuckets, *self.stages])}\n\n{self!r}"
        job = replace(job, manifest=replace(job.manifest, code=code))
        scoring = Chain(job.spec.chain.mappers[:-1])
        self.columns.check(scoring.meta(job.source.meta))
        return BucketJob(**vars(job), scoring=scoring, columns=self.columns)


@dataclass(frozen=True)
class BucketJob(SteppedJob):
    """An `AssignBuckets` that is planned and checked; its edges are not known yet."""

    folder = FOLDER
    ledger = EDGES
    last_step = "buckets"

    scoring: Chain
    columns: ScoreColumns

    def first_steps(self, steps: Steps, is_done: bool) -> SteppedJob:
        """Score documents and find the edges, unless that is done."""
        edges = self._kept_edges()
        if is_done and edges is not None:
            return self
        if is_done and self.scoring.mappers:
            raise ValueError(
                f"{self.directory.path(EDGES)} is not what was written, and the scores that it was "
                "made of are removed: bring back the file as it was, or start over (restart=True)"
            )
        source, spec = self._score(steps) if self.scoring.mappers else (self.source, self.spec)
        buckets = self.spec.chain.mappers[-1]
        assert isinstance(buckets, ScoreBuckets)
        if edges is None:
            if (report := steps.report_of("edges of buckets")) is not None:
                report(0, 1, JobSummary())
            compute = functools.partial(compute_tasks, steps.client)
            edges = find_edges(
                source.frame(spec.on_error, spec.backend), self.columns, buckets.edges.n, compute
            )
            self.directory.make(self.folder)
            self.directory.replace(EDGES, edges.as_json().encode())
        chain = Chain((buckets.with_edges(edges),))
        spec = replace(spec, chain=chain, meta_dtypes=chain.meta_dtypes(source.meta))
        return replace(self, source=source, spec=spec)

    def _kept_edges(self) -> ScoreEdges | None:
        """Read the edges that an earlier run found; None if there are none, or they are damaged."""
        try:
            return ScoreEdges.from_json(self.directory.read(EDGES))
        except FileNotFoundError:
            return None
        except ValueError as err:
            logger.warning("%s is not what was written: %s", self.directory.path(EDGES), err)
            return None

    def _score(self, steps: Steps) -> tuple[Source, TaskSpec]:
        """Classify remaining documents; return the scored documents and the spec to read them."""
        spec, manifest = self.spec, self.manifest
        scoring = steps.job(
            SCORED,
            self.source,
            self.scoring,
            backend=spec.backend,
            on_error=spec.on_error,
            identity={"job": {"key": manifest.key}},
            source_field=spec.source_field,
            examples=spec.examples,
        )
        scoring.run(steps.client, steps.report_of("scores"))
        scored = steps.folder(SCORED)
        whole: dict[str, Any] = {"part_bytes": WHOLE_FILE, "files_per_partition": 1}
        reader = ParquetReader(scored.address, storage_options=scored.storage_options, **whole)
        source = as_source(reader, "raise")
        remember(source.options_name, source.storage_options)
        share_with_workers([source.options_name])
        schema, name = source.input_schema, source.options_name
        return source, replace(spec, on_error="raise", input_schema=schema, input_name=name)

    def result(self, steps: Steps, summary: JobSummary) -> JobSummary:
        """Remove the copies of documents, and take over the classifiers' quarantine."""
        scored = steps.folder(SCORED)
        if scored.has(JOB):
            summary.left_out = write_report(scored)["left_out"]
            names = zip(steps.manifest(SCORED).names(), self.manifest.names(), strict=True)
            targets = {quarantine_path(name): quarantine_path(target) for name, target in names}
            for name in scored.sizes(QUARANTINE):
                self.directory.make(QUARANTINE)
                path = f"{QUARANTINE}/{name}"
                self.directory.replace(targets[path], scored.read(path))
            scored.remove(*(name for name in scored.sizes() if key_in(name) is not None))
        return summary
