"""Part of a job's HTML report about duplicates: steps, similarities, sources and groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpuclassify.corpus.dedup.summary import DuplicatesSummary
from gpuclassify.jobs.ledger.records import read_ledger
from gpuclassify.jobs.stores.store import Store
from gpuclassify.pages import counted, readable_time
from gpuclassify.pages.sections import (
    MOST_ROWS,
    Histogram,
    PagePart,
    ReportPart,
    Section,
    Table,
    Text,
    Tile,
    annotates,
)

FOLDER = "_dedup"  # folder of the steps in the output; dataset readers skip it
COUNTS = "duplicates"  # key of the counts in the log of finished steps


class DeduplicationReport(ReportPart):
    """Section of a job's HTML report about duplicates, from the log of its finished steps."""

    def entries(
        self, directory: Store, job: Mapping[str, Any], stages: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the entry ``deduplication`` for ``report.json``, from the log of finished steps.

        It has ``steps``, with ``rows`` and ``seconds`` by name of the step, and ``duplicates``,
        counts as from `DuplicatesSummary.as_dict`, None until they are counted. The result is empty
        if this job has no log.
        """
        ledger = read_ledger(directory, FOLDER, job["key"])
        return {} if ledger is None else {"deduplication": {COUNTS: None, **ledger}}

    def page(self, report: Mapping[str, Any]) -> PagePart:
        """Return tiles and sections about the entry ``deduplication`` of ``report.json``."""
        ledger = report.get("deduplication")
        if ledger is None:
            return PagePart()
        tiles, sections = [], [_steps(ledger["steps"], report)]
        if ledger[COUNTS] is not None:
            found = DuplicatesSummary.of(ledger[COUNTS])
            done = "removed" if report["parts_done"] else "found"
            if annotates(report):
                done = "marked"
            tiles, sections = [*_tiles(found, done)], [*sections, *_sections(found)]
        return PagePart("Deduplicated", tiles, sections, has_speed=False)


def _tiles(found: DuplicatesSummary, done: str) -> Iterator[Tile]:
    yield Tile(f"{found.documents:,}", "rows read")
    yield Tile(f"{found.duplicates:,}", f"duplicates {done}, {found.duplicate_share:.1%}")
    yield Tile(f"{found.groups:,}", f"groups of {counted(found.in_groups, 'document')}")
    if found.compared:
        yield Tile(f"{found.compared:,}", f"candidates compared, {found.rejected:,} rejected")
    if found.near_border:
        words = "near the border of a cluster, where some are missed"
        yield Tile(f"{found.near_border:,}", words)


def _steps(steps: Mapping[str, Any], report: Mapping[str, Any]) -> Section:
    counts = [
        (name.replace("-", " "), step["rows"], step["seconds"]) for name, step in steps.items()
    ]
    if report["parts_done"]:
        counts.append(("documents", report["rows_written"], report["busy_seconds"]))
    rows = [
        (name.replace("-", " "), None if rows is None else f"{rows:,}", readable_time(seconds))
        for name, rows, seconds in counts
    ]
    note = Text("Rows that a step gave, and the time of the run that finished it.")
    return Section("Steps", (Table(("", "rows", "time"), rows, numbers=(1, 2)), note))


def _sections(found: DuplicatesSummary) -> Iterator[Section]:
    if sum(bins := found.similarities):
        shown = range(next(n for n, count in enumerate(bins) if count), len(bins))
        histogram = Histogram(
            [(n / len(bins), (n + 1) / len(bins), bins[n]) for n in shown],
            *("similarity to the document that is kept", "duplicates"),
            most_names=6,
        )
        note = Text(
            f"Candidates compared: {found.compared:,}, similar enough: {found.accepted:,}, "
            f"rejected: {found.rejected:,}."
        )
        yield Section("Similarity of duplicates", (histogram, note))
    if (count := len(found.sources)) > 1:
        ordered = sorted(found.sources.items(), key=lambda source: -source[1][1])
        rows = [
            (name, f"{documents:,}", f"{gone:,}", f"{gone / (documents or 1):.1%}")
            for name, (documents, gone) in ordered[:MOST_ROWS]
        ]
        table = Table(("source", "rows read", "duplicates", "share"), rows, numbers=(1, 2, 3))
        note = Text(f"{count - MOST_ROWS} more sources are in report.json.")
        yield Section("Duplicates by source", (table, note) if count > MOST_ROWS else (table,))
    if found.largest:
        header = ("documents", "group", "beginning of the text that is kept")
        groups = [(f"{n:,}", str(group), text) for n, group, text in found.largest if text]
        table = Table(header, groups, numbers=(0,), is_wide=True)
        note = Text(f"{found.blank:,} documents are of white space alone.")
        blocks = (table, note) if found.blank else (table,)
        yield Section("Largest groups", blocks, is_wide=True)
