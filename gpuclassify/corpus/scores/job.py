"""Job that finds the edges of score buckets of equal weight, and writes rows with their buckets."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from gpuclassify.corpus.scores.saved import Saved
from gpuclassify.corpus.statistics.quantiles import BYTES, ScoreColumns
from gpuclassify.jobs.input.readers import FileReader
from gpuclassify.jobs.input.sources import Source
from gpuclassify.jobs.job import Job
from gpuclassify.jobs.output.writers import FileWriter
from gpuclassify.jobs.pipeline import Pipeline, stage_list
from gpuclassify.jobs.recipe import RecipeJob
from gpuclassify.jobs.report.report import report_of
from gpuclassify.jobs.report.summary import JobSummary
from gpuclassify.jobs.steps import Steps
from gpuclassify.mapping.chain import Chain
from gpuclassify.pages.sections import ReportPart
from gpuclassify.settings.declared import declared, setting

logger = logging.getLogger(__name__)

FOLDER = "_buckets"  # folder in the output that dataset readers skip
SCORED, EDGES = "scored", f"{FOLDER}/edges.json"
# Counts to take from the report of the classifiers, because only they read the input: the last
# pass reads their output.
READ_ONCE = ("rows_read", "left_out", "empty_files", "textless")


class ScoringReport(ReportPart):
    """Part of a job's report: the counts of the step that ran its classifiers."""

    def entries(
        self, directory: Any, job: Mapping[str, Any], stages: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return counts and problems from the report of the classifiers; empty if none ran."""
        try:
            report = report_of(directory.below(f"{FOLDER}/{SCORED}"))
        except FileNotFoundError:  # the scores were in the input
            return {}
        return {name: report[name] for name in (*READ_ONCE, "warnings", "problems")}


@declared
class AssignBuckets(Pipeline):
    """Job that finds the edges of buckets of equal weight, and writes rows with their buckets.

    First, classifiers, if there are any, score each document once, into ``_buckets/scored/`` of the
    output. Then the scores are read to find the edges, as `score_edges` does. Last, the documents
    are written with the columns of `ScoreBuckets`, and the scored copies are removed, except for
    their report. The edges stay in ``_buckets/edges.json``, for the next crawl:
    ``Pipeline([reader, *classifiers, ScoreBuckets("out/_buckets/edges.json"), writer])``.

    Running the same job again continues an interrupted one at its step, and leaves a finished one
    as it is.

    Parameters
    ----------
    stages : iterable
        A reader of files, any classifiers and other mappers, and a writer. With an
        `AnnotationWriter`, only the buckets are written, and the input must have the scores, as a
        column or an annotation.
    scores : str or sequence of str
        Columns of numbers that the input has or a classifier writes.
    n : int
        Number of buckets, 2 to 1,000.
    weight : str, optional
        Column whose sum is equal in all buckets; "bytes" is the number of bytes of the text, and
        None makes buckets of equally many rows.
    by : str, optional
        Column, such as the language; each of its values has its own edges.
    text_field : str
        Column of text, for ``weight="bytes"``.
    combine : {"max", "min"}
        Function that combines the buckets of a row.
    bucket_field : str
        Column of the combined bucket.
    overwrite : bool
        Replace columns that the dataset already has.
    backend : {"pandas", "cudf"}
        Library of the frames that stages get. With "cudf", only workers use cudf. Classifiers
        alone get pandas frames, because the host tokenizes their texts.
    on_error : {"raise", "quarantine"}
        Whether a broken file, a line that cannot be read or a row that cannot be scored stops the
        job, or is left out and described in ``_quarantine/`` of the output.
    source_field : str, optional
        Column with the origin of rows, such as "url_host"; the report counts rows read and rows
        written by its values.
    examples : int
        Number of the most certain texts, and of the least certain, that the report shows for each
        label and each reason why rows are dropped. 0 for none. A job may continue with another
        number.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid. When run: there is no score, or a weight is negative.

    Examples
    --------
    >>> AssignBuckets(
    ...     [ParquetReader("scored/"), ParquetWriter("buckets/", partition_by="bucket")],
    ...     scores=["edu_score", "hq_score"],
    ... ).run()  # doctest: +SKIP
    """

    stages: Any = setting(kw_only=False, is_object=True, convert=stage_list, changes_results=False)
    scores: str | Sequence[str] = setting(kw_only=False, is_tuple=True, metavar="COLUMN")
    n: int = setting(default=20)
    weight: str | None = setting(
        default=BYTES,
        metavar="COLUMN",
        help="Buckets have equal sums of this column; bytes is those of the text, none counts "
        "rows. Default: bytes.",
    )
    by: str | None = setting(default=None)
    text_field: str = setting(default="text")
    combine: Combine = setting(default="max")
    bucket_field: str = setting(default="bucket")
    overwrite: bool = setting(default=False, changes_results=False)

    folder = FOLDER
    ledger = EDGES
    report_parts = (ScoringReport(),)
    last_step = "buckets"

    def check_together(self) -> None:
        """Raise TypeError or ValueError if the number of buckets or a column name is invalid."""
        check_buckets(self.n)
        self.buckets  # noqa: B018 - checks its arguments

    @functools.cached_property
    def columns(self) -> ScoreColumns:
        """Names of the columns that edges are computed from: scores, weight, groups, text."""
        return score_columns(self.scores, self.weight, self.by, self.text_field)

    @functools.cached_property
    def buckets(self) -> ScoreBuckets:
        """Mapper that adds score buckets; without edges, which are computed by the job."""
        unknown: dict[str, Any] = {name: {} for name in self.columns.names}
        edges = ScoreEdges(self.n, unknown, self.by, self.weight)
        return ScoreBuckets(edges, **{name: getattr(self, name) for name in SETTINGS})

    def parts(self) -> tuple[Any, list[Any], FileWriter]:
        """Return the reader, the mappers (classifiers, then `ScoreBuckets`), and the writer."""
        reader = self.stages[0] if self.stages else None
        if not isinstance(reader, FileReader):
            raise TypeError(
                f"AssignBuckets begins with a {type(reader).__qualname__}: its first stage must be "
                "a reader of files. For a Dask frame there are score_edges() and add_buckets()"
            )
        reader, classifiers, writer = super().parts()
        if writer.annotates and classifiers:
            raise ValueError(
                "AnnotationWriter takes buckets of scores that exist already, and the job has "
                "classifiers: annotate the input with them first, and read the scores with the "
                "reader's annotations="
            )
        return reader, [*classifiers, self.buckets], writer

    def check_job(self, job: RecipeJob) -> None:
        """Raise ValueError or TypeError if the input and its classifiers lack one of `columns`."""
        self.columns.check(_scoring(job).meta(job.source.meta))

    def take_steps(
        self, job: RecipeJob, steps: Steps, is_done: bool
    ) -> tuple[Source, ScoreEdges] | None:
        """Score documents by the job's classifiers, if any, and find the edges of buckets.

        Returns the source of scored documents and the edges, or None if `is_done` and the edges are
        saved. Saved results of an earlier run are used again.
        """
        edges = kept_result(job, ScoreEdges)
        if is_done and edges is not None:
            return None
        scoring = _scoring(job)
        # Without the file, a restart was interrupted, so that scores are made again.
        if is_done and scoring.mappers and job.directory.has(EDGES):
            raise ValueError(
                f"{job.directory.path(EDGES)} is not what was written, and the scores that it was "
                "made of are removed: bring back the file as it was, or start over (restart=True)"
            )
        source = self._score(job, steps, scoring) if scoring.mappers else job.source
        if edges is None:
            steps.begin("edges of buckets")
            on_error = "raise" if scoring.mappers else self.on_error
            frame = source.frame(on_error, self.backend)
            edges = find_edges(frame, self.columns, self.n, steps.run_tasks)
            keep_result(job, edges)
        return source, edges

    def _score(self, job: RecipeJob, steps: Steps, scoring: Chain) -> Source:
        """Score documents by the classifiers `scoring`; return a source of the results."""
        scores = steps.job(
            SCORED,
            job.source,
            scoring,
            backend=self.backend,
            on_error=self.on_error,
            identity={"job": {"key": job.manifest.key}},
            **self.job_settings(),
        )
        scores.run(steps.client, steps.report_of("scores"))
        return steps.source(SCORED)

    def last_pass(self, job: RecipeJob, results: tuple[Source, ScoreEdges] | None) -> Job:
        """Return the job that adds buckets to documents; `job` itself if `results` is None."""
        if results is None:
            return job
        source, edges = results
        if source is not job.source:
            schema, name = source.input_schema, source.options_name
            spec = replace(job.spec, on_error="raise", input_schema=schema, input_name=name)
            job = replace(job, source=source, spec=spec)
        return job.with_stages([self.buckets.with_edges(edges)])

    def result(self, job: RecipeJob, steps: Steps, summary: JobSummary) -> JobSummary:
        """Remove scored copies of documents that an earlier step wrote; return the job's summary.

        If that step ran, `summary` gets its counts of rows read and left out.
        """
        report = steps.take_over(SCORED, job, _scoring(job).report_parts)
        if report:
            vars(summary).update({name: report[name] for name in READ_ONCE})
        return summary


def _scoring(job: RecipeJob) -> Chain:
    return Chain(job.spec.chain.mappers[:-1])  # the last one adds buckets


def kept_result(job: RecipeJob, kind: type[Saved]) -> Any:
    """Read a result, such as edges of buckets, that an earlier run of the job saved.

    Returns None if the file is missing or damaged.
    """
    try:
        return kind.from_json(job.directory.read(job.recipe.ledger))
    except FileNotFoundError:
        return None
    except ValueError as err:
        path = job.directory.path(job.recipe.ledger)
        logger.warning("%s is not what was written: %s", path, err)
        return None


def keep_result(job: RecipeJob, result: Saved) -> None:
    """Save a result, such as edges of buckets, in the job's output, for `kept_result`."""
    job.directory.make(job.recipe.folder)
    job.directory.replace(job.recipe.ledger, result.as_json().encode())
