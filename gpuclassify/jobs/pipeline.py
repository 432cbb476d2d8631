"""Pipeline: a job that reads files, runs classifiers, and writes each part exactly once."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from gpuclassify.jobs.input.sources import as_source
from gpuclassify.jobs.output.hub_writer import HubWriter
from gpuclassify.jobs.output.writers import FileWriter
from gpuclassify.jobs.recipe import Recipe
from gpuclassify.jobs.report.summary import JobSummary, Report
from gpuclassify.jobs.stages import as_chain
from gpuclassify.settings.checks import check_count, check_ordered, with_plain_values
from gpuclassify.settings.declared import declared, setting

if TYPE_CHECKING:
    from distributed import Client

    from gpuclassify.frames import LazyFrame
    from gpuclassify.jobs.plan import Plan

OPTIONS = ("backend", "on_error", "source_field", "examples")


def stage_list(stages: Any) -> list[Any]:
    """Return an iterable of stages as a list; raise TypeError for a set, which has no order."""
    check_ordered("stages", stages)
    return list(stages)


@declared
class Pipeline(Recipe):
    """Job of a reader, stages for each part, and a writer.

    The input is cut into parts once; each is read, mapped and written by one task. Each part of the
    output is written whole and exactly once, even if processes die. Running the same job again
    continues it, and does nothing once it is finished.

    Parameters
    ----------
    stages : iterable
        First a `JsonlReader`, `ParquetReader` or Dask DataFrame; last a `JsonlWriter`, a
        `ParquetWriter`, or an `AnnotationWriter` for new columns alone; between them classifiers,
        embedders, `Select`, `ToBackend`, or any callable from a plain frame to a plain frame. A
        stage sees one part: do shuffles before, on a Dask frame. All classifiers run in one pass,
        and those with equal tokenizers tokenize each text once.
    backend : {"pandas", "cudf"}
        Library of the frames that stages get. With "cudf", only workers use cudf. If all stages
        are classifiers or embedders, files are read as pandas frames, because the host tokenizes
        the texts. A Dask frame of cudf is never moved to pandas.
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

    Examples
    --------
    >>> Pipeline([
    ...     JsonlReader("books/*.jsonl", fields=["text", "id"]),
    ...     DomainClassifier(filter_by=["Games", "Sports"]),
    ...     JsonlWriter("out/"),
    ... ]).run()  # doctest: +SKIP
    """

    stages: Any = setting(
        default=(), kw_only=False, is_object=True, convert=stage_list, changes_results=False
    )
    source_field: str | None = setting(default=None, changes_results=False)
    examples: int = setting(default=2, least=0, changes_results=False)

    def add_stage(self, stage: object) -> Pipeline:
        """Append a stage to this pipeline, and return the pipeline, so that calls can be chained.

        `stage` is anything that `stages` may have: a reader, Dask DataFrame, classifier, function
        from frame to frame, or writer. It is checked when the pipeline is planned or run.
        """
        self.stages.append(stage)
        return self

    def parts(self) -> tuple[object, list[Any], FileWriter]:
        """Return the first stage, a list of the middle ones, and the last, which must be a writer.

        Raises TypeError if there are fewer than two stages, or the last is no writer.
        """
        if len(self.stages) < 2 or not isinstance(self.stages[-1], FileWriter):
            last = type(self.stages[-1]).__qualname__ if self.stages else "nothing"
            raise TypeError(
                f"a Pipeline of {len(self.stages)} stages ends with {last}: its first stage must "
                'be a reader and its last one a writer, such as ParquetWriter("out/")'
            )
        return self.stages[0], self.stages[1:-1], self.stages[-1]

    def job_settings(self) -> dict[str, Any]:
        """Return ``source_field`` and ``examples``, this pipeline's arguments for `make_job`."""
        return {"source_field": self.source_field, "examples": self.examples}

    @with_plain_values
    def plan(
        self,
        *,
        sample_rows: int = 1_000,
        seed: int = 0,
        trial_seconds: float | None = 20.0,
    ) -> Plan:
        """Estimate the job from a sample: rows, tokens, time and memory; writes nothing.

        Rows are drawn from all over the input. The tokenizer of each classifier counts the tokens
        of the drawn rows, and the stages are run on some of these rows in this process; functions
        are run on all of them. Rows of files are pandas frames for any `backend`. The pipeline
        needs no writer.

        Parameters
        ----------
        sample_rows : int
            About how many rows to draw.
        seed : int
            An equal seed draws equal rows; other seeds show how far the estimates vary.
        trial_seconds : float, optional
            About how long to run the stages. None times nothing, and needs no weights; functions
            are run all the same.

        Returns
        -------
        Plan
            ``print`` shows it; `as_dict` gives its numbers.

        Raises
        ------
        TypeError, ValueError
            A stage is wrong or does not fit the input, or the input cannot be read or has no rows.
        """
        from gpuclassify.jobs.plan import make_plan

        check_count("sample_rows", sample_rows)
        check_count("seed", seed, 0)
        if not self.stages:
            raise TypeError("a Pipeline of no stages: its first one must be a reader")
        reader, *middle = self.stages
        if middle and isinstance(middle[-1], FileWriter):
            middle.pop()
        stages = as_chain(middle)
        source = as_source(reader, self.on_error, stages.read_fields, is_slow=stages.is_slow)
        chain = self.make_chain(source, middle)
        if trial_seconds is not None:
            chain.prepare()
        return make_plan(source, chain, self.on_error, sample_rows, seed, trial_seconds)


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

    Neighbouring partitions are joined into files. The index is left out.

    Parameters
    ----------
    ddf : dask.dataframe.DataFrame
        The frame to write.
    repo : str
        Repository, ``"OWNER/NAME"``; created if it does not exist.
    staging : str
        Directory that all workers see, or fsspec URL of one. Parts are written there first.
    client : distributed.Client, optional
        Default: the current one; without any, everything runs here.
    restart, verify, report
        See `gpuclassify.Pipeline.run`.
    **options
        Further arguments of `HubWriter`, such as ``split="train"``.

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
        with contextlib.suppress(ValueError):  # no client is current
            client = distributed.default_client()
    return pipeline.run(client, restart=restart, verify=verify, report=report)
