"""Jobs that first count the whole input: buckets of equal weight, and copies of a mixture."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from gpuclassify.corpus.scores.buckets import (
    SETTINGS,
    Combine,
    ScoreBuckets,
    ScoreEdges,
    check_buckets,
    find_edges,
    score_columns,
)
from gpuclassify.corpus.scores.mix import Mix, MixSettings
from gpuclassify.corpus.scores.mix_copies import MixCopies
from gpuclassify.corpus.scores.quantiles import BYTES, ScoreColumns
from gpuclassify.corpus.scores.saved import Saved, write_file
from gpuclassify.jobs.execution import compute_tasks
from gpuclassify.jobs.input.readers import FileReader, ParquetReader
from gpuclassify.jobs.input.sources import FileSource, Source, as_source
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
MIX = "_mix/mix.json"
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
class CountingJob(SteppedJob):
    """A job whose first step counts the input; `ledger` is the file with the result."""

    counted: ClassVar[type[Saved]]

    def kept(self) -> Any:
        """Read the result that an earlier run counted; None if there is none, or it is damaged."""
        try:
            return self.counted.from_json(self.directory.read(self.ledger))
        except FileNotFoundError:
            return None
        except ValueError as err:
            logger.warning("%s is not what was written: %s", self.directory.path(self.ledger), err)
            return None

    def keep(self, result: Saved) -> None:
        """Write the result, so that no later run counts again."""
        self.directory.make(self.folder)
        self.directory.replace(self.ledger, result.as_json().encode())


@dataclass(frozen=True)
class BucketJob(CountingJob):
    """An `AssignBuckets` that is planned and checked; its edges are not known yet."""

    folder = FOLDER
    ledger = EDGES
    last_step = "buckets"
    counted = ScoreEdges

    scoring: Chain
    columns: ScoreColumns

    def first_steps(self, steps: Steps, is_done: bool) -> SteppedJob:
        """Score documents and find the edges, unless that is done."""
        edges = self.kept()
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
            self.keep(edges)
        chain = Chain((buckets.with_edges(edges),))
        spec = replace(spec, chain=chain, meta_dtypes=chain.meta_dtypes(source.meta))
        return replace(self, source=source, spec=spec)

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
            summary.left_out = write_report(scored, self.scoring.report_parts)["left_out"]
            names = zip(steps.manifest(SCORED).names(), self.manifest.names(), strict=True)
            targets = {quarantine_path(name): quarantine_path(target) for name, target in names}
            for name in scored.sizes(QUARANTINE):
                self.directory.make(QUARANTINE)
                path = f"{QUARANTINE}/{name}"
                self.directory.replace(targets[path], scored.read(path))
            scored.remove(*(name for name in scored.sizes() if key_in(name) is not None))
        return summary


class PlanMix(Pipeline):
    """Job that plans a mixture, and writes the number of copies of each row.

    The first step counts the tokens of each cell, and keeps the mix in ``_mix/mix.json`` of the
    output. The second step writes the column of `MixCopies`. Running the same job again continues
    an interrupted one, and does not count again.

    Parameters
    ----------
    stages : iterable
        A reader and an `AnnotationWriter`.
    settings : MixSettings
    id_field, copies_field
        As of `MixCopies`.
    page : str, optional
        File for the page of the mix.
    **options
        As of `Pipeline`.
    """

    def __init__(
        self,
        stages: Iterable[Any],
        settings: MixSettings,
        *,
        id_field: str | None = None,
        copies_field: str = "copies",
        page: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(stages, **options)
        names: dict[str, Any] = {"id_field": id_field, "copies_field": copies_field}
        self.settings, self.page = settings, page
        self.copies = MixCopies(settings.mix_of({}), **names)

    def _make_job(self, options: RunOptions) -> MixJob:
        reader, writer = self._ends()
        pipeline = Pipeline([reader, self.copies, writer], **self._options())
        plain = json.loads(json.dumps(asdict(self.settings), default=str))  # as of a date in YAML
        identity = {"mix": plain}
        job = pipeline._job_of(reader, writer, options, identity)
        self.settings.check(job.source.meta)
        return MixJob(**vars(job), settings=self.settings, page=self.page)


@dataclass(frozen=True)
class MixJob(CountingJob):
    """A `PlanMix` that is planned and checked; its cells are not counted yet."""

    folder, ledger = MIX.split("/")[0], MIX
    last_step = "copies"
    counted = Mix

    settings: MixSettings
    page: str | None

    def needs_workers(self) -> bool:
        """Tell whether `run` has tokens to count, parts to do or files to upload."""
        return super().needs_workers() or self.kept() is None

    def first_steps(self, steps: Steps, is_done: bool) -> SteppedJob:
        """Count the tokens of each cell, unless an earlier run has counted them."""
        mix = self.kept()
        if mix is None:
            if (report := steps.report_of("tokens of cells")) is not None:
                report(0, 1, JobSummary())
            source = self.source
            if isinstance(source, FileSource):
                source = replace(source, lent=())
            frame = source.frame(self.spec.on_error, self.spec.backend)
            mix = self.settings.find(frame, functools.partial(compute_tasks, steps.client))
            self.keep(mix)
        if self.page:
            write_file(self.page, mix.html().encode())
        (copies,) = self.spec.chain.mappers
        assert isinstance(copies, MixCopies)
        return replace(self, spec=replace(self.spec, chain=Chain((copies.with_mix(mix),))))

    def result(self, steps: Steps, summary: JobSummary) -> JobSummary:
        """Return the summary of the last step."""
        return summary
