"""Job that removes or marks duplicates in files, and continues after an interruption."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import dask
import pandas as pd

from gpuclassify._version import __version__
from gpuclassify.corpus.dedup.corpus import Corpus, by_partition, read_apart
from gpuclassify.corpus.dedup.duplicates import Duplicates
from gpuclassify.corpus.dedup.groups import LENGTH
from gpuclassify.corpus.dedup.marks import DuplicateMarks, marks
from gpuclassify.corpus.dedup.removal import POSITIONS, RepeatedIdsError, drop_rows, removed
from gpuclassify.corpus.dedup.report import COUNTS, FOLDER, DeduplicationReport
from gpuclassify.corpus.dedup.summary import DuplicatesSummary, TooManyDuplicatesError, refuse
from gpuclassify.frames import LazyFrame
from gpuclassify.frames.lazy import from_parts
from gpuclassify.jobs.job import Job
from gpuclassify.jobs.output.writers import FileWriter
from gpuclassify.jobs.recipe import Recipe, RecipeJob
from gpuclassify.jobs.report.summary import JobSummary
from gpuclassify.jobs.stages import describe_settings
from gpuclassify.jobs.steps import PartAction, RowsOfPart, Steps
from gpuclassify.mapping.partition_map import PartitionMap
from gpuclassify.pages import counted
from gpuclassify.pages.sections import ReportPart
from gpuclassify.settings.declared import declared, setting

logger = logging.getLogger(__name__)

# Steps whose results stay. Signatures and edges are not needed after the decisions.
KEPT = ("decisions", "duplicates", "removed", "marks")
# Maximum bytes of files that are read once for all steps, if there is no cluster.
HELD_BYTES = 32 << 20


@dataclass(repr=False)
class DedupSummary:
    """Counts of a finished deduplication.

    Attributes
    ----------
    duplicates : DuplicatesSummary
    removal : JobSummary
        Rows read and rows written, and the files.
    steps : dict of str to dict
        Steps before the removal, by name: ``rows`` of the result, None if it is not a frame, and
        ``seconds`` of the step in the run that finished it.
    """

    duplicates: DuplicatesSummary
    removal: JobSummary
    steps: dict[str, dict[str, Any]]

    def __repr__(self) -> str:
        return f"{self.duplicates}\n{self.removal}"

    def _repr_html_(self) -> str:
        return self.duplicates._repr_html_() + self.removal._repr_html_()

    @property
    def left_out(self) -> dict[str, int]:
        """Numbers of unreadable files, lines and rows in ``_quarantine/``, by kind."""
        return self.removal.left_out

    @property
    def output(self) -> str:
        """Path or URL of the output directory."""
        return self.removal.output

    @property
    def commit_url(self) -> str:
        """Address of the Hub commit, if the output is uploaded, else ""."""
        return self.removal.commit_url

    @property
    def warnings(self) -> list[str]:
        """Sentences about input files without rows or texts; empty if there are none."""
        return self.removal.warnings

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes by name (``duplicates``, ``removal``, ``steps``) as JSON values."""
        return {
            "duplicates": self.duplicates.as_dict(),
            "removal": self.removal.as_dict(),
            "steps": self.steps,
        }


@declared
class Deduplicate(Recipe):
    """Job that removes duplicates: a reader or a Dask frame, settings, and a writer.

    Results of intermediate steps are kept in ``_dedup/`` of the output as long as they are needed,
    so that running the same job again continues an interrupted one, also on another cluster, and
    leaves a finished one as it is. The remaining rows are written part by part, each part of the
    input once. The documents in groups of duplicates are listed in ``_dedup/duplicates/`` as
    Parquet.

    Parameters
    ----------
    source : FileReader or dask.dataframe.DataFrame
        Each step reads only the columns that it needs, but reads the files, or computes the frame,
        again, so write an expensive frame to files first. With pandas and without a client, the
        steps before the removal read files of up to 32 MiB only once.
    duplicates : ExactDuplicates, FuzzyDuplicates or SemanticDuplicates
        Settings that say which documents are duplicates, and which of them stay.
    writer : FileWriter
        Such as a `ParquetWriter`. With an `AnnotationWriter` nothing is removed: each row gets
        ``is_duplicate``, true if it would be removed, ``duplicate_group``, the number of its group
        (null without duplicates), and for fuzzy and semantic duplicates ``duplicate_similarity`` to
        the document that stays.
    against : FileReader or dask.dataframe.DataFrame, optional
        An earlier corpus. Its documents stay, and their duplicates in `source` go. If it cannot be
        read, the job stops, even with ``on_error="quarantine"``.
    backend : {"pandas", "cudf"}
        Library of the frames that files are read into. With "cudf", only workers import cudf.
    on_error : {"raise", "quarantine"}
        Whether a file or row that cannot be read stops the job, or is left out and described in
        ``_quarantine/`` of the output. A job cannot continue with another value, because rows in
        quarantine change the positions of others.

    Raises
    ------
    TooManyDuplicatesError
        When run: a limit of the settings is exceeded. Nothing is removed; the report has the
        largest groups, and the same job continues with higher limits.
    ValueError
        When run: ids in the column `id_field` of `duplicates` are null or occur twice.

    Examples
    --------
    >>> Deduplicate(
    ...     ParquetReader("crawl/"), ExactDuplicates(id_field="id"), ParquetWriter("clean/")
    ... ).run()  # doctest: +SKIP
    """

    source: Any = setting(kw_only=False, is_object=True, changes_results=False)
    duplicates: Duplicates = setting(kw_only=False, is_object=True)
    writer: FileWriter = setting(kw_only=False, is_object=True, changes_results=False)
    against: Any = setting(default=None, is_object=True, changes_results=False)

    folder = FOLDER
    last_step = "removal"
    words: ClassVar[Mapping[str, str]] = {
        "ids": "Checking that ids tell documents apart",
        "signatures": "Computing signatures of texts",
        "edges": "Linking documents with equal signatures, from band",
        "centroids": "Finding clusters of embeddings",
        "components": "Joining documents that may be duplicates",
        "decisions": "Comparing them, and deciding which are duplicates",
        "counts": "Counting",
        "duplicates": "Listing duplicates",
        "removed": "Listing rows to remove",
        "marks": "Listing rows to mark",
        "removal": "Writing documents",
    }

    def check_together(self) -> None:
        """Raise TypeError unless `duplicates` is a `Duplicates`, and `writer` a `FileWriter`."""
        duplicates, writer = self.duplicates, self.writer
        if not isinstance(duplicates, Duplicates) or not isinstance(writer, FileWriter):
            types = f"{type(duplicates).__qualname__} and {type(writer).__qualname__}"
            raise TypeError(
                f"Deduplicate got {types}: pass settings such as ExactDuplicates(), and then a "
                'writer such as ParquetWriter("clean/")'
            )

    @property
    def report_parts(self) -> tuple[ReportPart, ...]:
        """Section about duplicates for the job's HTML report, in a tuple."""
        return (DeduplicationReport(),)

    def parts(self) -> tuple[Any, list[Any], FileWriter]:
        """Return the source, a list with the stage to mark duplicates, if any, and the writer."""
        marks = [DuplicateMarks(self.duplicates.has_similarity)] if self.writer.annotates else []
        return self.source, marks, self.writer

    def other_inputs(self) -> dict[str, Any]:
        """Return the earlier corpus as ``{"against": corpus}``; empty if there is none."""
        return {} if self.against is None else {"against": self.against}

    def step_mappers(self) -> list[PartitionMap]:
        """Return the mappers that `duplicates` needs, such as an `Embedder`; empty if none."""
        return self.duplicates.mappers()

    def job_identity(self) -> dict[str, dict[str, Any]]:
        """Return the settings that change results; a run with other ones is another job.

        `on_error` is one of them, because it changes the positions of rows. Mappers are prepared,
        which looks up their models.
        """
        known = {"method": type(self.duplicates).__name__, "version": __version__}
        identity = describe_settings("duplicates", self.duplicates, self.duplicates.mappers())
        identity["duplicates"] |= {**known, "on_error": self.on_error}
        return identity

    def check_job(self, job: RecipeJob) -> None:
        """Raise ValueError or TypeError unless documents have the columns that settings need."""
        corpus = self.corpus(job, self.duplicates, job.documents())
        self.duplicates.with_ids(corpus.dataset, corpus.earlier)

    def corpus(self, job: RecipeJob, duplicates: Duplicates, documents: LazyFrame) -> Corpus:
        """Return `documents` and the job's earlier corpus, after checking their columns."""
        against = job.others.get("against")
        earlier = None if against is None else against.frame("whole", self.backend)
        return duplicates.corpus(documents, earlier)

    def take_steps(self, job: RecipeJob, steps: Steps, is_done: bool) -> RowsOfPart:
        """Find duplicates, and return a function that removes or marks them in a part of the input.

        The function gets the part's frame and number, and returns the changed frame. It is not
        called if `is_done`. If a limit is exceeded, raises TooManyDuplicatesError after writing the
        report.
        """
        if not is_done:
            steps.check_workers(self.duplicates.mappers(), self.backend)
        # Without a client, shuffle in memory, even if a client is current.
        shuffles = {} if steps.client is not None else {"dataframe.shuffle.method": "tasks"}
        with dask.config.set(shuffles):
            documents = self._held(job) if self._is_small(job, steps) else job.documents()
            corpus = self.corpus(job, self.duplicates, documents)
            duplicates = self._with_ids(corpus, steps)
            self._refuse(job, self._count(steps, corpus, duplicates))
            return self._list(job, steps, corpus, duplicates)

    def last_pass(self, job: RecipeJob, results: RowsOfPart) -> Job:
        """Return the job that removes or marks duplicates while it writes the documents."""
        return replace(job, spec=replace(job.spec, before=results))

    def result(self, job: RecipeJob, steps: Steps, summary: JobSummary) -> DedupSummary:
        """Return the summary of the job, with counts of duplicates and of rows written."""
        counts = DuplicatesSummary.of(steps.ledger[COUNTS])
        return DedupSummary(counts, summary, steps.ledger["steps"])

    def numbers(self, summary: DedupSummary) -> list[str]:
        """Return lines to print at the end: counts, the largest groups, and the list's folder."""
        duplicates, removal = summary.duplicates, summary.removal
        done = "marked" if self.writer.annotates else "removed"
        groups = counted(duplicates.groups, "group")
        groups += f" of {counted(duplicates.in_groups, 'document')}"
        if duplicates.compared:
            groups += f"; {counted(duplicates.compared, 'candidate')} compared, "
            groups += f"{duplicates.rejected:,} rejected"
        found = counted(duplicates.duplicates, "duplicate")
        return [
            f"{removal.rows_read:,} rows read, {found} {done} ({duplicates.duplicate_share:.1%}), "
            f"{removal.rows_written:,} rows written",
            groups,
            *(f"    {line}" for line in duplicates.shown),
            f"Duplicates: {removal.output}/{self.folder}/duplicates",
        ]

    def _is_small(self, job: RecipeJob, steps: Steps) -> bool:
        """Tell whether to hold the input in this process, so that the steps read it only once."""
        is_here = steps.client is None and self.backend == "pandas"
        size_bytes = job.source.size_bytes
        return (
            is_here
            and COUNTS not in steps.ledger
            and size_bytes is not None
            and size_bytes <= HELD_BYTES
        )

    def _held(self, job: RecipeJob) -> LazyFrame:
        """Read the columns of all steps now, once; return a Dask frame of them in this process."""
        documents = job.documents()
        needed = {*self.duplicates.input_fields, LENGTH, *POSITIONS}
        columns = [name for name in documents.columns if name in needed]
        read = read_apart(documents, columns, "held")
        parts = dask.compute(*read, scheduler=dask.get)
        held = [dask.delayed(part, pure=False, traverse=False) for part in parts]
        return from_parts(held, documents._meta[columns])

    def _with_ids(self, corpus: Corpus, steps: Steps) -> Duplicates:
        """Check that ids are unique, and return the settings with their column as `id_field`.

        If the default column ``id`` has nulls or repeats, logs a warning and leaves `id_field`
        unset, so that positions identify documents. If a column that the user named has them,
        raises RepeatedIdsError.
        """
        with_ids = self.duplicates.with_ids(corpus.dataset, corpus.earlier)
        if not steps.is_done("ids"):
            try:
                steps.compute("ids", with_ids.refuse_repeated_ids(corpus))
            except RepeatedIdsError as err:
                if with_ids == self.duplicates:
                    raise
                logger.warning("positions name documents, since the column 'id' does not: %s", err)
                steps.ledger["has_ids"] = False
                steps.compute("ids", [])
        return with_ids if steps.ledger.get("has_ids", True) else self.duplicates

    def _count(self, steps: Steps, corpus: Corpus, duplicates: Duplicates) -> DuplicatesSummary:
        """Decide which documents stay, unless an earlier run did; return counts of duplicates."""
        is_decided = steps.holds("decisions")
        if steps.ledger.get(COUNTS) is None or not is_decided:
            if not is_decided:
                duplicates.decisions(corpus, steps.keep)
            counted = duplicates.count(corpus, steps.read("decisions"))
            (summary,) = steps.compute("counts", [counted])
            steps.note(COUNTS, summary.as_dict())
        steps.remove(but=KEPT)
        return DuplicatesSummary.of(steps.ledger[COUNTS])

    def _refuse(self, job: RecipeJob, counts: DuplicatesSummary) -> None:
        try:
            refuse(counts, self.duplicates.max_removed_share, self.duplicates.max_group_size)
        except TooManyDuplicatesError as err:
            job.write_report()
            err.add_note(
                f"Nothing is removed. {job.directory}/_report/report.html shows the largest "
                "groups; the same job with higher limits goes on from here"
            )
            raise

    def _list(
        self, job: RecipeJob, steps: Steps, corpus: Corpus, duplicates: Duplicates
    ) -> RowsOfPart:
        """Write lists of duplicates and of rows to change; return the function to change a part."""
        decisions = steps.read("decisions")
        steps.keep("duplicates", duplicates.listing(corpus, decisions))
        listed, name = decisions[["document", "keep", "is_earlier"]], "removed"
        change: Callable[[Any], pd.DataFrame] = removed
        act: PartAction = drop_rows
        if self.writer.annotates:
            (marker,) = self.parts()[1]
            listed, name, change, act = decisions, "marks", marks, marker.mark
        rows = listed.map_partitions(change, meta=change(listed._meta))
        steps.keep(name, by_partition(rows, job.source.count).reset_index())
        return steps.rows_of_parts(name, act)
