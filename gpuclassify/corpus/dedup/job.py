"""Deduplication of files as a job that continues where it stopped."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import dask
import pandas as pd

from gpuclassify._version import __version__
from gpuclassify.corpus.dedup.corpus import Corpus, by_partition
from gpuclassify.corpus.dedup.duplicates import Duplicates
from gpuclassify.corpus.dedup.marks import DuplicateMarks, marks
from gpuclassify.corpus.dedup.removal import RepeatedIdsError, drop_rows, removed
from gpuclassify.corpus.dedup.report import COUNTS, FOLDER, DeduplicationReport
from gpuclassify.corpus.dedup.summary import DuplicatesSummary, TooManyDuplicatesError, refuse
from gpuclassify.frames import Frame
from gpuclassify.jobs.execution import check_cluster
from gpuclassify.jobs.input.sources import FrameSource, Source, as_source
from gpuclassify.jobs.job import JobDeclaration, make_job
from gpuclassify.jobs.ledger.manifest import RunOptions
from gpuclassify.jobs.ledger.quarantine import ON_ERROR
from gpuclassify.jobs.ledger.records import LEDGER, part_name
from gpuclassify.jobs.output.writers import FileWriter
from gpuclassify.jobs.report.report import write_report
from gpuclassify.jobs.report.summary import JobSummary
from gpuclassify.jobs.stages import Function, as_chain, describe, import_lines, shown
from gpuclassify.jobs.steps import SteppedJob, Steps, read_rows
from gpuclassify.mapping.partition_map import PartitionMap
from gpuclassify.pages.sections import ReportPart
from gpuclassify.settings.checks import BACKENDS, check_choice

if TYPE_CHECKING:
    from distributed import Client
from gpuclassify.jobs.stores.store import Store
from gpuclassify.workers.secrets import remember, share_with_workers

logger = logging.getLogger(__name__)

# Settings that can refuse a result but do not change it: a job may continue with other values.
LIMITS = ("max_removed_share", "max_group_size")
# Results of steps that are kept. Signatures and edges are not needed once duplicates are decided.
KEPT = ("decisions", "duplicates", "removed", "marks")


class Deduplicate(JobDeclaration["DedupSummary"]):
    """Job that removes duplicates: a reader or a Dask frame, settings, and a writer.

    What each step finds is kept in ``_dedup/`` of the output, so that running the same job again
    continues an interrupted one, with another cluster as well, and leaves a finished one as it is.
    The rows that stay are written as `Pipeline` writes them: part for part of the input, each once.
    The documents in groups of duplicates are listed in ``_dedup/duplicates/`` as Parquet.

    Parameters
    ----------
    source : FileReader or dask.dataframe.DataFrame
        Each step reads the files again, only the columns that it needs, and computes a frame
        again, so write an expensive frame to files first.
    duplicates : ExactDuplicates, FuzzyDuplicates or SemanticDuplicates
    writer : FileWriter
        As of a `Pipeline`. With an `AnnotationWriter` nothing is removed: each row gets
        ``is_duplicate``, which is true for those that would go, ``duplicate_group``, a number that
        documents of a group share, and ``duplicate_similarity`` to the one that stays.
    against : FileReader or dask.dataframe.DataFrame, optional
        An earlier corpus: documents that have a duplicate there go; nothing there does. What
        cannot be read there stops the job, whatever `on_error` says.
    backend : {"pandas", "cudf"}
        Frames that files are read as. With "cudf", only workers touch cudf.
    on_error : {"raise", "quarantine"}
        As of a `Pipeline`. Another one is another job, because rows that are left out move others.

    Raises
    ------
    TooManyDuplicatesError
        When run: more would go than the settings allow. Nothing is removed; the report has the
        largest groups, and the same job continues with higher limits.
    ValueError
        When run: ids are null or occur twice.

    Examples
    --------
    >>> Deduplicate(
    ...     ParquetReader("crawl/"), ExactDuplicates(id_field="id"), ParquetWriter("clean/")
    ... ).run()  # doctest: +SKIP
    """

    def __init__(
        self,
        source: Any,
        duplicates: Duplicates,
        writer: FileWriter,
        *,
        against: Any = None,
        backend: str = "pandas",
        on_error: str = "raise",
    ) -> None:
        if not isinstance(duplicates, Duplicates) or not isinstance(writer, FileWriter):
            types = f"{type(duplicates).__qualname__} and {type(writer).__qualname__}"
            raise TypeError(
                f"Deduplicate got {types}: pass settings such as ExactDuplicates(), and then a "
                'writer such as ParquetWriter("clean/")'
            )
        check_choice("backend", backend, BACKENDS)
        check_choice("on_error", on_error, ON_ERROR)
        self.source, self.duplicates, self.writer = source, duplicates, writer
        self.against, self.backend, self.on_error = against, backend, on_error

    def __repr__(self) -> str:
        settings = Duplicates.__repr__(self.duplicates)  # code, without what some tell beside it
        arguments = [shown(self.source), settings, shown(self.writer)]
        lines = [f"    {argument},\n" for argument in arguments]
        if self.against is not None:
            lines.append(f"    against={shown(self.against)},\n")
        options = f"    backend={self.backend!r},\n    on_error={self.on_error!r},\n"
        return f"Deduplicate(\n{''.join(lines)}{options})"

    def _make_job(self, options: RunOptions) -> DedupJob:
        source = _source(self.source, self.on_error)
        earlier = None
        known: dict[str, Any] = {"method": type(self.duplicates).__name__, "version": __version__}
        identity: dict[str, Any] = {}
        for setting in fields(self.duplicates):  # settings that the result depends on, no secret
            value = getattr(self.duplicates, setting.name)
            if setting.name in LIMITS or isinstance(value, PartitionMap):
                continue
            if callable(value):
                identity[setting.name] = describe(Function(value))
            else:
                known[setting.name] = list(value) if isinstance(value, tuple) else value
        identity["duplicates"] = {**known, "on_error": self.on_error}
        for mapper in self.duplicates.mappers():
            mapper.prepare()
            identity[mapper.__name__] = describe(mapper)
        parts = [Deduplicate, self.source, self.duplicates, *self.duplicates.mappers(), self.writer]
        parts += vars(self.duplicates).values()
        if self.against is not None:
            parts.append(self.against)
            earlier = _source(self.against, "whole")
            earlier.refuse_output(self.writer.directory, self.writer.sample_name)
            inputs = earlier.identity().items()
            identity |= {name.replace("input", "against", 1): values for name, values in inputs}
            remember(earlier.options_name, earlier.storage_options)
        removal = make_job(
            source,
            as_chain(self._marks()),
            self.writer,
            options,
            backend=self.backend,
            on_error=self.on_error,
            identity=identity,
            code=f"{import_lines(parts)}\n\n{self!r}",
        )
        job = DedupJob(**vars(removal), duplicates=self.duplicates, earlier=earlier)
        corpus = job.corpus()
        self.duplicates.with_ids(corpus.dataset, corpus.earlier)
        return job

    def _marks(self) -> list[PartitionMap]:
        return [DuplicateMarks(self.duplicates.has_similarity)] if self.writer.annotates else []


@dataclass(repr=False)
class DedupSummary:
    """Result of a deduplication, in numbers.

    Attributes
    ----------
    duplicates : DuplicatesSummary
    removal : JobSummary
        Rows read and kept, and the files written.
    steps : dict of str to dict
        Each step before the removal by name: ``rows`` that it gave, None where it gives none, and
        ``seconds`` of the run that finished it.
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
        """Files, lines and rows in quarantine."""
        return self.removal.left_out

    def as_dict(self) -> dict[str, Any]:
        """Return plain values by name, for JSON."""
        return {
            "duplicates": self.duplicates.as_dict(),
            "removal": self.removal.as_dict(),
            "steps": self.steps,
        }


@dataclass(frozen=True)
class DedupJob(SteppedJob):
    """Deduplication that is planned and checked; `earlier` is the earlier corpus."""

    folder = FOLDER
    ledger = f"{folder}/{LEDGER}"
    last_step = "removal"
    words: ClassVar[Mapping[str, str]] = {
        "ids": "Checking that ids tell documents apart",
        "signatures": "Computing signatures of texts",
        "edges": "Linking documents with equal signatures, from band",
        "centroids": "Finding clusters of embeddings",
        "components": "Joining documents that may be duplicates",
        "decisions": "Comparing them, and deciding which stay",
        "counts": "Counting",
        "duplicates": "Listing duplicates",
        "removed": "Listing rows that go",
        "marks": "Listing rows that are marked",
        "removal": "Writing the documents that stay",
    }

    duplicates: Duplicates
    earlier: Source | None

    @property
    def report_parts(self) -> tuple[ReportPart, ...]:
        """Additions of the recipe and the stages to the report."""
        return (DeduplicationReport(), *super().report_parts)

    def corpus(self) -> Corpus:
        """Return the documents, as lazy frames that read them."""
        backend = self.spec.backend
        documents = self.source.frame(self.spec.on_error, backend)
        earlier = None if self.earlier is None else self.earlier.frame("whole", backend)
        return self.duplicates.corpus(documents, earlier)

    @contextlib.contextmanager
    def current(self, client: Client | None) -> Iterator[None]:
        """Prepare as any job; without a client, shuffle in memory, even if there is one."""
        method = {} if client is not None else {"dataframe.shuffle.method": "tasks"}
        with super().current(client), dask.config.set(method):
            if self.earlier is not None:
                share_with_workers([self.earlier.options_name])
            yield

    def first_steps(self, steps: Steps, is_done: bool) -> SteppedJob:
        """Find the duplicates, and list them and the rows that go."""
        if steps.client is not None and not is_done:
            check_cluster(steps.client, self.duplicates.mappers(), self.spec.backend)
        chosen = replace(self, duplicates=self._with_ids(steps))
        self._refuse(chosen._count(steps))
        return replace(self, spec=replace(self.spec, before=chosen._drop(steps)))

    def result(self, steps: Steps, summary: JobSummary) -> DedupSummary:
        """Return the summary of duplicates, and of removed and kept rows."""
        counts = DuplicatesSummary.of(steps.ledger[COUNTS])
        return DedupSummary(counts, summary, steps.ledger["steps"])

    def _with_ids(self, steps: Steps) -> Duplicates:
        """Return the settings once ids are known to identify documents; a column ``id`` may not."""
        corpus = self.corpus()
        chosen = self.duplicates.with_ids(corpus.dataset, corpus.earlier)
        if not steps.is_done("ids"):
            try:
                steps.compute("ids", chosen.refuse_repeated_ids(corpus))
            except RepeatedIdsError as err:
                if chosen == self.duplicates:
                    raise
                logger.warning("positions name documents, since the column 'id' does not: %s", err)
                steps.ledger["has_ids"] = False
                steps.compute("ids", [])
        return chosen if steps.ledger.get("has_ids", True) else self.duplicates

    def _count(self, steps: Steps) -> DuplicatesSummary:
        """Decide which documents are kept, and count them."""
        is_decided = steps.holds("decisions")
        if steps.ledger.get(COUNTS) is None or not is_decided:
            corpus = self.corpus()
            if not is_decided:
                self.duplicates.decisions(corpus, steps.keep)
            counted = self.duplicates.count(corpus, steps.read("decisions"))
            (summary,) = steps.compute("counts", [counted])
            steps.note(COUNTS, summary.as_dict())
        steps.remove(but=KEPT)
        return DuplicatesSummary.of(steps.ledger[COUNTS])

    def _refuse(self, counts: DuplicatesSummary) -> None:
        try:
            refuse(counts, *(getattr(self.duplicates, name) for name in LIMITS))
        except TooManyDuplicatesError as err:
            write_report(self.directory, self.report_parts)
            err.add_note(
                f"Nothing is removed. {self.directory}/_report/report.html shows the largest "
                "groups; the same job with higher limits goes on from here"
            )
            raise

    def _drop(self, steps: Steps) -> RowsOfPart:
        """List the duplicates for people, and the rows that the last step drops or marks."""
        decisions = steps.read("decisions")
        steps.keep("duplicates", self.duplicates.listing(self.corpus(), decisions))
        listed, name = decisions[["document", "keep", "is_earlier"]], "removed"
        change: Callable[[Any], pd.DataFrame] = removed
        act: Callable[[Frame, int, pd.DataFrame], Any] = drop_rows
        if self.spec.annotations is not None:
            marker = self.spec.chain.mappers[0]
            assert isinstance(marker, DuplicateMarks)
            listed, name, change, act = decisions, "marks", marks, marker.mark
        rows = listed.map_partitions(change, meta=change(listed._meta))
        steps.keep(name, by_partition(rows, self.source.count).reset_index())
        manifest = steps.manifest(name)
        return RowsOfPart(steps.folder(name), manifest.key, manifest.count, act)


@dataclass(frozen=True)
class RowsOfPart:
    """Function that does something with the rows of a part that its file of a step lists.

    `key` is in the names of the `count` files in `folder`.
    """

    folder: Store
    key: str
    count: int
    act: Callable[[Frame, int, pd.DataFrame], Any]  # called with a frame, its number and the list

    def __call__(self, frame: Frame, number: int) -> Any:
        """Return the part with this number, changed."""
        name = part_name(number, self.count, self.key, ".parquet")
        return self.act(frame, number, read_rows(name, self.folder).set_index("document"))


def _source(source: Any, on_error: str) -> Source:
    """Return the source of a reader or frame. A frame keeps its partitions."""
    if dask.is_dask_collection(source) and hasattr(source, "npartitions"):
        key = {"Dask key": source._name, "partitions": source.npartitions}
        return FrameSource(source, {"input": key})
    return as_source(source, on_error)
