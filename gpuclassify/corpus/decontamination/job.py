"""Job that decontaminates files: index test items, sample for boilerplate, find the items."""

from __future__ import annotations

import logging
from typing import Any

import pyarrow as pa

from gpuclassify.corpus.decontamination.index import ABOUT, is_sound
from gpuclassify.corpus.decontamination.mapper import Decontaminate
from gpuclassify.corpus.decontamination.report import FOLDER, INDEX
from gpuclassify.frames import backend_of
from gpuclassify.jobs.output.writers import FileWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.recipe import RecipeJob
from gpuclassify.jobs.report.summary import JobSummary
from gpuclassify.jobs.steps import Steps
from gpuclassify.mapping.columns import check_is_there
from gpuclassify.pages import counted
from gpuclassify.settings.declared import declared, setting

logger = logging.getLogger(__name__)

LEAST_DOCUMENTS = 10  # minimum documents of the sample with an n-gram that is boilerplate


@declared
class DecontaminateFiles(Pipeline):
    """Job that finds test items in files; one of its stages is a `Decontaminate`.

    The index is built first, and kept in ``_decontamination/index`` of the output, with a digest.
    N-grams in too many documents of a sample of the corpus are boilerplate: they are left out of
    the index, and the report has their number and up to 20 of them. Then all stages run in one
    pass, as in a `Pipeline`.

    Running the same job again continues an interrupted one, and leaves a finished one as it is.

    Parameters
    ----------
    stages : iterable
        First a reader or a Dask DataFrame, last a writer, and mappers between them. Exactly one
        mapper is a `Decontaminate`, which reads a column of the input.
    sample_rows : int
        Documents of the sample; 0 for no sample.
    max_share : float
        An n-gram is boilerplate if at least this share of the sample's documents, and at least ten
        of them, contain it.
    backend : {"pandas", "cudf"}
        Library of the frames that stages get. With "cudf", only workers use cudf.
    on_error : {"raise", "quarantine"}
        Whether a broken file or row stops the job, or is left out and described in
        ``_quarantine/`` of the output.
    source_field : str, optional
        Column with the origin of rows; the report counts rows read and rows written by its values.
    examples : int
        Number of example texts that the report shows for each label and reason to drop rows.

    Examples
    --------
    >>> DecontaminateFiles([
    ...     ParquetReader("crawl/"),
    ...     Decontaminate(against="evals/*.jsonl", filter_by=False),
    ...     ParquetWriter("clean/"),
    ... ]).run()  # doctest: +SKIP
    """

    sample_rows: int = setting(default=10_000, least=0)
    max_share: float = setting(default=0.01, is_share=True)

    folder = FOLDER
    ledger = f"{INDEX}/{ABOUT}"

    @property
    def mapper(self) -> Decontaminate:
        """The stage that is a `Decontaminate`. Raises TypeError unless there is exactly one."""
        mappers = [stage for stage in self.stages if isinstance(stage, Decontaminate)]
        if len(mappers) != 1:
            raise TypeError(
                f"DecontaminateFiles got {len(mappers)} Decontaminate among its stages: pass one, "
                "with all files of test items as its against="
            )
        return mappers[0]

    def parts(self) -> tuple[Any, list[Any], FileWriter]:
        """Return the job's reader, the stages between, and its writer.

        The stage that finds test items reads its index from the writer's output.
        """
        reader, stages, writer = super().parts()
        mapper = self.mapper
        if mapper.saved is None:
            mapper.against.check(mapper.item_columns)
        else:
            mapper.prepare()  # compares the settings
        indexed = mapper.at(writer.directory.below(INDEX))
        return reader, [indexed if stage is mapper else stage for stage in stages], writer

    def check_job(self, job: RecipeJob) -> None:
        """Raise ValueError unless the input has the text column that the stage reads."""
        check_is_there(self.mapper.text_field, [*job.source.meta.columns], "text_field")

    def take_steps(self, job: RecipeJob, steps: Steps, is_done: bool) -> None:
        """Build and save the index of test items, unless the output has an undamaged one.

        If the mapper's test items are a saved index, its content is used. N-grams in too many
        documents of a sample are left out. A missing index is also built if `is_done`.
        """
        directory = job.directory
        folder = directory.below(INDEX)
        directory.sweep(INDEX)
        if is_sound(folder):
            return
        if folder.has(ABOUT):
            logger.warning("%s is not as it was written, and is built again", folder)
        folder.remove(ABOUT)  # first: without it, a half-removed index is invalid
        directory.remove_folder(INDEX)
        steps.begin("index of test items")
        mapper = self.mapper
        index = mapper.index if mapper.saved is not None else mapper.build()
        if self.sample_rows:
            counts, sampled = index.document_counts(texts := self._sample(job)), len(texts)
            least = max(LEAST_DOCUMENTS, self.max_share * sampled)
            reason = f"in {self.max_share:.2%} or more of {sampled:,} documents of the corpus"
            index = index.without(counts >= least, reason)
        directory.make(FOLDER)
        index.save(folder)

    def numbers(self, summary: JobSummary) -> list[str]:
        """Return lines to print at the end: counts of rows, items found by benchmark, and drops."""
        stage = next(stage for stage in summary.stages.values() if "contamination" in stage)
        counts = stage["contamination"]
        found = counts["documents"][""]
        items = sorted(counts["items"].items())
        return [
            f"{summary.rows_read:,} rows read, {found:,} contaminated "
            f"({found / max(1, stage['read']):.2%}), {summary.rows_written:,} rows written",
            *(f"    {name}: {counted(len(ids), 'item')} found" for name, ids in items),
            *summary.drops,
        ]

    def _sample(self, job: RecipeJob) -> pa.LargeStringArray:
        if (frame := job.sample(self.sample_rows)) is None:
            return pa.array([], pa.large_string())
        return backend_of(frame).text_array(frame, self.mapper.text_field)
