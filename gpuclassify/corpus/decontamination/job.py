"""Decontamination of files as a job: the index beside the output, and a sample for boilerplate."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from gpuclassify.corpus.decontamination.index import ABOUT, is_sound
from gpuclassify.corpus.decontamination.mapper import Decontaminate
from gpuclassify.corpus.decontamination.report import FOLDER, INDEX
from gpuclassify.frames import backend_of
from gpuclassify.jobs.input.sample import sample_files, sample_partitions
from gpuclassify.jobs.input.sources import FileSource, as_source
from gpuclassify.jobs.job import make_job
from gpuclassify.jobs.ledger.manifest import RunOptions
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.report.summary import JobSummary
from gpuclassify.jobs.stages import as_chain, import_lines, shown
from gpuclassify.jobs.steps import SteppedJob, Steps
from gpuclassify.jobs.stores.store import UnreadableInputError
from gpuclassify.mapping.columns import check_is_there
from gpuclassify.settings.checks import check_count, check_share

logger = logging.getLogger(__name__)

LEAST_DOCUMENTS = 10  # documents of the sample with an n-gram that make it boilerplate


class DecontaminateFiles(Pipeline):
    """Job that finds test items in files, one of whose stages is a `Decontaminate`.

    The index is built first, and kept in ``_decontamination/index`` of the output, with a
    digest. N-grams that a share of a sample of the corpus holds are boilerplate: they are left out
    of it, and shown in the report. Then all stages run in one pass, as those of a `Pipeline`.

    Running the same job again continues an interrupted one, and leaves a finished one as it is.

    Parameters
    ----------
    stages : iterable
        As of a `Pipeline`; exactly one of them is a `Decontaminate`, which reads a column of
        the input.
    sample_rows : int
        Documents of the sample. 0 looks at none.
    max_share : float
        Share of the sample's documents, at least ten, that makes an n-gram boilerplate.
    backend, on_error, source_field, examples
        As of `Pipeline`.

    Examples
    --------
    >>> DecontaminateFiles([
    ...     ParquetReader("crawl/"),
    ...     Decontaminate(against="evals/*.jsonl", filter_by=False),
    ...     ParquetWriter("clean/"),
    ... ]).run()  # doctest: +SKIP
    """

    def __init__(
        self,
        stages: Iterable[Any],
        *,
        sample_rows: int = 10_000,
        max_share: float = 0.01,
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
        check_count("sample_rows", sample_rows, 0)
        check_share("max_share", max_share)
        self.sample_rows, self.max_share = sample_rows, float(max_share)

    def __repr__(self) -> str:
        lines = "".join(f"        {shown(stage)},\n" for stage in self.stages)
        settings = {"sample_rows": self.sample_rows, "max_share": self.max_share}
        options = "".join(f"    {k}={v!r},\n" for k, v in {**settings, **self._options()}.items())
        return f"DecontaminateFiles(\n    [\n{lines}    ],\n{options})"

    def _make_job(self, options: RunOptions) -> DecontaminationJob:
        _, writer = self._ends()
        mappers = [stage for stage in self.stages if isinstance(stage, Decontaminate)]
        if len(mappers) != 1:
            raise TypeError(
                f"DecontaminateFiles got {len(mappers)} Decontaminate among its stages: pass one, "
                "with all files of test items as its against="
            )
        writer.directory.refuse_file()
        if mappers[0].saved is None:
            mappers[0].against.check(mappers[0].item_columns)
        else:
            mappers[0].prepare()  # compares the settings
        placed = mappers[0].at(writer.directory.below(INDEX))
        middle = [placed if stage is mappers[0] else stage for stage in self.stages[1:-1]]
        source = as_source(self.stages[0], self.on_error, as_chain(middle).read_fields)
        check_is_there(placed.text_field, [*source.meta.columns], "text_field")
        chain = self._chain(source, middle)
        chain.prepare()
        sample = {"sample_rows": self.sample_rows, "max_share": self.max_share}
        code = f"{import_lines([DecontaminateFiles, *self.stages])}\n\n{self!r}"
        identity: dict[str, Any] = {"boilerplate": sample}
        job = make_job(
            source, chain, writer, options, identity=identity, code=code, **self._options()
        )
        return DecontaminationJob(
            **vars(job),
            mapper=mappers[0],
            sample_rows=self.sample_rows,
            max_share=self.max_share,
        )


@dataclass(frozen=True)
class DecontaminationJob(SteppedJob):
    """A `DecontaminateFiles` that is planned and checked; its index may not be built yet."""

    folder = FOLDER
    ledger = f"{INDEX}/{ABOUT}"
    last_step = "documents"

    mapper: Decontaminate
    sample_rows: int
    max_share: float

    def first_steps(self, steps: Steps, is_done: bool) -> SteppedJob:
        """Build the index, unless it is there as it was written."""
        folder = self.directory.below(INDEX)
        self.directory.sweep(INDEX)
        if not is_sound(folder):
            if folder.has(ABOUT):
                logger.warning("%s is not as it was written, and is built again", folder)
            folder.remove(ABOUT)  # first: half removed, nothing counts
            self.directory.remove_folder(INDEX)
            if (report := steps.report_of("index of test items")) is not None:
                report(0, 1, JobSummary())
            saved = self.mapper.saved
            index = self.mapper.index if saved is not None else self.mapper.build()
            if self.sample_rows:
                counts, sampled = index.document_counts(texts := self._sample()), len(texts)
                least = max(LEAST_DOCUMENTS, self.max_share * sampled)
                reason = f"in {self.max_share:.2%} or more of {sampled:,} documents of the corpus"
                index = index.without(counts >= least, reason)
            self.directory.make(FOLDER)
            index.save(folder)
        return self

    def _sample(self) -> pa.LargeStringArray:
        """Draw texts from all over the input; none from an input that has none."""
        rows, field = self.sample_rows, self.mapper.text_field
        try:
            if isinstance(self.source, FileSource):
                drawn, _ = sample_files(self.source.input, rows, 0, self.spec.on_error)
            else:
                drawn, _ = sample_partitions(self.source.partitions(), rows, 0)
        except UnreadableInputError:
            return pa.array([], pa.large_string())
        return backend_of(drawn.frame).text_array(drawn.frame, field)

    def result(self, steps: Steps, summary: JobSummary) -> JobSummary:
        """Return the summary of the documents."""
        return summary
