"""Pipeline: files in, classifiers, files out; every part of the output exactly once."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gpuclassify.jobs.annotating import annotate_job, with_decisions
from gpuclassify.jobs.input.readers import FileReader
from gpuclassify.jobs.input.sources import FrameSource, Source, as_source
from gpuclassify.jobs.job import Job, JobDeclaration, make_job
from gpuclassify.jobs.ledger.manifest import RunOptions
from gpuclassify.jobs.ledger.quarantine import ON_ERROR
from gpuclassify.jobs.output.hub_writer import HubWriter
from gpuclassify.jobs.output.writers import AnnotationWriter, FileWriter
from gpuclassify.jobs.report.summary import JobSummary, Report
from gpuclassify.jobs.stages import ToBackend, as_chain, import_lines, shown
from gpuclassify.mapping.chain import Chain
from gpuclassify.settings.checks import BACKENDS, check_choice, check_count, with_plain_values

if TYPE_CHECKING:
    from distributed import Client

    from gpuclassify.frames import LazyFrame
    from gpuclassify.jobs.plan import Plan

OPTIONS = ("backend", "on_error", "source_field", "examples")


class Pipeline(JobDeclaration[JobSummary]):
    """A job: a reader, what is done with each part, and a writer.

    The input is cut into parts once; each is read, mapped and written by one task. Each part of the
    output is there whole and once, whatever dies in between; running the same job again continues
    where it stopped, and leaves a finished one as it is.

    Parameters
    ----------
    stages : iterable
        First a `JsonlReader`, `ParquetReader` or Dask DataFrame; last a `JsonlWriter`, a
        `ParquetWriter`, or an `AnnotationWriter` for new columns alone; between them classifiers,
        embedders, `Select`, `ToBackend`, or any callable from a plain frame to a plain frame. A
        stage sees one part: what needs a shuffle is done before, on a Dask frame. All classifiers
        run in one pass, in which each text is tokenized once.
    backend : {"pandas", "cudf"}
        Frames that parts are read as. With "cudf", only workers touch cudf, and only where a stage
        sees the difference: classifiers alone, whose texts the host tokenizes, get pandas frames.
    on_error : {"raise", "quarantine"}
        Whether a broken file, a line that cannot be read or a row that cannot be scored stops the
        job, or is left out and described in ``_quarantine/`` of the output.
    source_field : str, optional
        Column that says where a row is from, such as "url_host": the report counts rows read and
        kept by its values.
    examples : int
        Texts that the report shows of each label and of each reason why rows are dropped: at most
        so many of the most and of the least certain. 0 for none. A job may continue with
        another number.

    Examples
    --------
    >>> Pipeline([
    ...     JsonlReader("books/*.jsonl", fields=["text", "id"]),
    ...     DomainClassifier(filter_by=["Games", "Sports"]),
    ...     JsonlWriter("out/"),
    ... ]).run()  # doctest: +SKIP
    """

    @with_plain_values
    def __init__(
        self,
        stages: Iterable[object] = (),
        *,
        backend: str = "pandas",
        on_error: str = "raise",
        source_field: str | None = None,
        examples: int = 2,
    ) -> None:
        check_choice("backend", backend, BACKENDS)
        check_choice("on_error", on_error, ON_ERROR)
        check_count("examples", examples, 0)
        self.stages: list[Any] = list(stages)
        self.backend = backend
        self.on_error = on_error
        self.source_field = source_field
        self.examples = examples

    def __repr__(self) -> str:
        lines = "".join(f"    {shown(stage)},\n" for stage in self.stages)
        options = "".join(f", {name}={value!r}" for name, value in self._options().items())
        return f"Pipeline([\n{lines}]{options})"

    def add_stage(self, stage: object) -> Pipeline:
        """Append a stage, and return the pipeline."""
        self.stages.append(stage)
        return self

    def _make_job(self, options: RunOptions) -> Job:
        reader, writer = self._ends()
        writer.directory.refuse_file()  # before any model is looked up
        if isinstance(writer, AnnotationWriter) and isinstance(reader, FileReader):
            make = functools.partial(self._job_of, options=options)
            return annotate_job(reader, writer, options, make)
        return self._job_of(reader, writer, options)

    def _job_of(
        self,
        reader: object,
        writer: FileWriter,
        options: RunOptions,
        identity: dict[str, dict[str, Any]] | None = None,
    ) -> Job:
        middle = self.stages[1:-1]
        if writer.annotates:
            middle = with_decisions(as_chain(middle).mappers)
        needed = as_chain(middle).read_fields
        source = as_source(reader, self.on_error, needed, lends_places=writer.annotates)
        chain = self._chain(source, middle)
        chain.prepare()
        code = f"{import_lines([Pipeline, *self.stages])}\n\n{self!r}"
        settings = {"identity": identity, "code": code, **self._options()}
        return make_job(source, chain, writer, options, **settings)

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in OPTIONS}

    @with_plain_values
    def plan(
        self,
        *,
        sample_rows: int = 1_000,
        seed: int = 0,
        trial_seconds: float | None = 20.0,
    ) -> Plan:
        """Estimate the job from a sample: rows, tokens, time and memory; writes nothing.

        Rows are drawn from all over the input. The tokenizer of each classifier counts their
        tokens, and some of them are run here, in this process; rows of files as pandas frames,
        whatever `backend` is. The pipeline needs no writer.

        Parameters
        ----------
        sample_rows : int
            About how many rows to draw.
        seed : int
            The same one draws the same rows; others show how far the estimates vary.
        trial_seconds : float, optional
            About how long to run the stages. None times nothing, and needs no weights.

        Returns
        -------
        Plan
            ``print`` shows it; `as_dict` gives its numbers.

        Raises
        ------
        TypeError, ValueError
            As `prepare` does, and if there are no rows.
        """
        from gpuclassify.jobs.plan import make_plan

        check_count("sample_rows", sample_rows)
        if not self.stages:
            raise TypeError("a Pipeline of no stages: its first one must be a reader")
        reader, *middle = self.stages
        if middle and isinstance(middle[-1], FileWriter):
            middle.pop()
        source = as_source(reader, self.on_error, as_chain(middle).read_fields)
        chain = self._chain(source, middle)
        if trial_seconds is not None:
            chain.prepare()
        return make_plan(source, chain, self.on_error, sample_rows, seed, trial_seconds)

    def _chain(self, source: Source, stages: list[object]) -> Chain:
        """Return the stages between the ends, checked for the source's columns."""
        is_moved = self.backend != "pandas" and isinstance(source, FrameSource)
        chain = as_chain([ToBackend(self.backend), *stages] if is_moved else stages)
        chain.check(source.meta)
        return chain

    def _ends(self) -> tuple[object, FileWriter]:
        if len(self.stages) < 2 or not isinstance(self.stages[-1], FileWriter):
            last = type(self.stages[-1]).__qualname__ if self.stages else "nothing"
            raise TypeError(
                f"a Pipeline of {len(self.stages)} stages ends with {last}: its first stage must "
                'be a reader and its last one a writer, such as ParquetWriter("out/")'
            )
        return self.stages[0], self.stages[-1]


def push_to_hub(
    ddf: LazyFrame,
    repo: str,
    *,
    staging: str,
    client: Client | None = None,
    restart: bool = False,
    verify: str = "digest",
    report: Report | None = None,
    **options: Any,
) -> JobSummary:
    """Write a Dask frame to a dataset repository of the Hugging Face Hub, in one commit.

    Each partition is a file. The index is left out.

    Parameters
    ----------
    ddf : dask.dataframe.DataFrame
    repo : str
    staging : str
        See `HubWriter`, as for all other `options`.
    client : distributed.Client, optional
        Default: the current one; without any, everything runs here.
    restart, verify, report
        See `gpuclassify.Pipeline.run`.

    Returns
    -------
    JobSummary
        Its `commit_url` is the address of the commit.

    Raises
    ------
    Exception
        See `gpuclassify.Pipeline.run`. Run the same again to continue.
    """
    pipeline = Pipeline([ddf, HubWriter(repo, staging=staging, **options)])
    distributed = sys.modules.get("distributed")
    if client is None and distributed is not None:
        with contextlib.suppress(ValueError):  # there is none
            client = distributed.default_client()
    return pipeline.run(client, restart=restart, verify=verify, report=report)
