"""Data classes for sections of HTML pages, and for parts that add sections to a job's report."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from gpuclassify.pages import page_template

MOST_ROWS = 30  # rows of a table of labels or sources


class Tile(NamedTuple):
    """Number at the top of an HTML page, with its name below it."""

    value: str
    name: str


class Text(NamedTuple):
    """Note in small type, a heading within a section, or preformatted text to copy, by `kind`."""

    text: str
    kind: str = "note"  # or "heading" or "preformatted"


class Cell(NamedTuple):
    """Text of a table's cell, with a note below it."""

    text: str
    note: str


class Table(NamedTuple):
    """Table of an HTML page; each cell is a text, a `Cell`, or None if it is empty."""

    header: Sequence[str]  # empty for a table without one
    rows: Sequence[Sequence[str | Cell | None]]
    numbers: Collection[int] = ()  # indices of columns of numbers, without `Cell`
    is_wide: bool = False  # whether the last column takes most of the width
    is_cross: bool = False  # whether the first column names the rows, and the others are numbers
    kind: str = "table"


class Bars(NamedTuple):
    """Bar chart with horizontal bars, each with a name before it and a value after it.

    Shares of the bar's width, from 0 to 1, are drawn over each other: the first pale, others thin.
    """

    header: tuple[str, str]  # titles of the names and of the values
    rows: Sequence[tuple[str, tuple[float, ...], str]]  # name, shares of the width, and value
    kind: str = "bars"


class Histogram(NamedTuple):
    """Histogram with vertical bars; `title` names the horizontal axis, `side` the vertical one."""

    bins: Sequence[tuple[float, float, int]]  # lower edge, upper edge and count
    title: str
    side: str
    most_names: int  # approximate number of bin edges with a label
    kind: str = "histogram"


class Fold(NamedTuple):
    """Blocks of a section that are hidden until a click on their summary."""

    summary: str
    blocks: Sequence[Any]
    kind: str = "fold"


Block = Text | Table | Bars | Histogram | Fold


class Section(NamedTuple):
    """Section of an HTML page: a title, and blocks such as texts, tables and bar charts."""

    title: str
    blocks: Sequence[Block]
    is_wide: bool = False  # whether it takes both columns of the page


def sections_page(title: str, under: Iterable[str], sections: Iterable[Section]) -> str:
    """Return sections as one HTML page that loads nothing; lines `under` stand below the title."""
    template = page_template("gpuclassify", "pages", "sections.html.j2")
    return template.render(title=title, under=[*under], sections=[*sections])


class PagePart(NamedTuple):
    """Sections, tiles and title that a `ReportPart` adds to the HTML page of a job's report.

    Its `columns` of labels, and examples of its `stages`, are not shown elsewhere on the page.
    """

    title: str = ""  # first word of the page's title
    tiles: Sequence[Tile] = ()
    sections: Sequence[Section] = ()
    columns: Collection[str] = ()  # columns of labels that the sections show
    stages: Collection[str] = ()  # stages whose examples the sections show
    has_speed: bool = True  # False if rows read, speed and times leave out a part of the job


def annotates(report: Mapping[str, Any]) -> bool:
    """Return whether a job, by its ``report.json``, only writes new columns and drops no row."""
    return bool(report["settings"]["output"].get("annotations"))


@dataclass(frozen=True)
class ReportPart:
    """Base class of additions to a job's report by a classifier, another stage, or a kind of job.

    A part reads only the metadata in the job's output, so that the report can be written again.
    """

    # Descriptions of reasons to drop rows, added to `gpuclassify.mapping.stage_counts.REASONS`.
    reasons: ClassVar[Mapping[str, str]] = {}

    def entries(
        self, directory: Any, job: Mapping[str, Any], stages: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return values to add to ``report.json``, by name; empty if there is nothing to add.

        `directory` is the `Store` of the output, `job` the content of its ``job.json``, and
        `stages` the row counts by name of a stage, such as a classifier.
        """
        return {}

    def page(self, report: Mapping[str, Any]) -> PagePart:
        """Return additions to the HTML page, from ``report.json`` with the values of `entries`."""
        return PagePart()
