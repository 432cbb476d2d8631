"""Part of a report about duplicates: what each step gave, how similar they are, what goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpuclassify.jobs.ledger.records import read_ledger
from gpuclassify.jobs.stores.store import Store
from gpuclassify.pages import readable_time
from gpuclassify.pages.sections import (
    MOST_ROWS,
    Histogram,
    Note,
    PagePart,
    ReportPart,
    Section,
    Table,
    Tile,
)

FOLDER = "_dedup"  # of the steps, in the output; readers of datasets pass over it
COUNTS = "duplicates"  # name of the counts in the ledger of the steps


class DeduplicationReport(ReportPart):
    """Part of a report about duplicates, from the ledger of the steps."""

    def entries(
        self, directory: Store, job: Mapping[str, Any], stages: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the ledger of the steps, of which the counts may not be there yet."""
        ledger = read_ledger(directory, FOLDER, job["key"])
        return {} if ledger is None else {"deduplication": {COUNTS: None, **ledger}}

    def page(self, report: Mapping[str, Any]) -> PagePart:
        """Return tiles with the counts, and sections of steps, similarities, sources and groups."""
        ledger = report.get("deduplication")
        if ledger is None:
            return PagePart()
        sections, found = [_steps(ledger["steps"], report)], ledger[COUNTS]
        if found is not None:
            sections += _sections(found)
        tiles = [*_tiles(found)] if found is not None else []
        return PagePart("Deduplicated", tiles, sections, has_speed=False)


def _tiles(found: Mapping[str, Any]) -> Iterator[Tile]:
    """Yield the tiles of the counts."""
    yield Tile(f"{found['documents']:,}", "documents")
    share = f"{found['removed_share']:.1%}"
    yield Tile(f"{found['removed']:,}", f"duplicates to remove, {share}")
    yield Tile(f"{found['groups']:,}", f"groups, of {found['in_groups']:,} documents")
    if found["compared"]:
        rejected = f"{found['rejected']:,} rejected"
        yield Tile(f"{found['compared']:,}", f"candidates compared, {rejected}")
    if found.get("near_border"):
        words = "near the border of a cluster, where some are missed"
        yield Tile(f"{found['near_border']:,}", words)


def _steps(steps: Mapping[str, Any], report: Mapping[str, Any]) -> Section:
    """Return the rows that each step gave, and its time."""
    counts = [
        (name.replace("-", " "), step["rows"], step["seconds"]) for name, step in steps.items()
    ]
    if report["parts_done"]:
        counts.append(("removal", report["rows_out"], report["busy_seconds"]))
    rows = [
        (name, None if rows is None else f"{rows:,}", readable_time(seconds))
        for name, rows, seconds in counts
    ]
    note = Note("Rows that a step gave, and the time of the run that finished it.")
    return Section("Steps", (Table(("", "rows", "time"), rows, numbers=(1, 2)), note))


def _sections(found: Mapping[str, Any]) -> Iterator[Section]:
    """Yield the sections of the counts."""
    if sum(found["similarities"]):
        bins = unit_bins(found["similarities"])
        title, side = "similarity to the document that is kept", "removed documents"
        note = Note(
            f"Candidates compared: {found['compared']:,}, similar enough: {found['accepted']:,}, "
            f"rejected: {found['rejected']:,}."
        )
        histogram = Histogram(bins, title, side, most_names=6)
        yield Section("Similarity of removed documents", (histogram, note))
    if len(sources := found["sources"]) > 1:
        ordered = sorted(sources.items(), key=lambda source: -source[1][1])
        rows = [
            (name, f"{documents:,}", f"{gone:,}", f"{gone / (documents or 1):.1%}")
            for name, (documents, gone) in ordered[:MOST_ROWS]
        ]
        header = ("source", "documents", "removed", "share")
        blocks: list[Any] = [Table(header, rows, numbers=(1, 2, 3))]
        if len(sources) > MOST_ROWS:
            blocks.append(Note(f"{len(sources) - MOST_ROWS} more sources are in report.json."))
        yield Section("Removed by source", blocks)
    if found["largest"]:
        groups = [
            (f"{group['size']:,}", str(group["group"]), group["beginning"])
            for group in found["largest"]
            if group["beginning"]
        ]
        names = ("documents", "group", "beginning of the text that is kept")
        blocks = [Table(names, groups, numbers=(0,), is_wide=True)]
        if found["blank"]:
            blocks.append(Note(f"{found['blank']:,} documents are of white space alone."))
        yield Section("Largest groups", blocks, is_wide=True)


def unit_bins(counts: Sequence[int]) -> list[tuple[float, float, int]]:
    """Return counts in equal bins from 0 to 1 as a histogram, without leading empty bins."""
    every = [(n / len(counts), (n + 1) / len(counts), count) for n, count in enumerate(counts)]
    first = next((n for n, count in enumerate(counts) if count), 0)
    return every[first:]
