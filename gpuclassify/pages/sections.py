"""Sections of a report as data: heads, mappers and recipes fill them, and a page shows them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

MOST_ROWS = 30  # rows of a table of labels or sources


class Tile(NamedTuple):
    """Number at the top of a page, and its name."""

    value: str
    name: str


class Text(NamedTuple):
    """Small text of a section, a heading within it, or preformatted text to be copied."""

    text: str
    kind: str = "note"  # or "heading" or "preformatted"


class Cell(NamedTuple):
    """Text of a table's cell, with a note below it."""

    text: str
    note: str


class Table(NamedTuple):
    """Rows of cells: texts, `Cell`s, or None for an empty one."""

    header: Sequence[str]  # empty for a table without one
    rows: Sequence[Sequence[str | Cell | None]]
    numbers: Collection[int] = ()  # indices of the columns of numbers
    is_wide: bool = False  # whether the last column takes most of the width
    kind: str = "table"


class Histogram(NamedTuple):
    """Vertical bars with titles below and beside them."""

    bins: Sequence[tuple[float, float, int]]  # lower edge, upper edge and count
    title: str
    side: str
    most_names: int  # number of edges that are named, about
    kind: str = "histogram"


class Fold(NamedTuple):
    """Blocks that are shown after a click on their summary."""

    summary: str
    blocks: Sequence[Any]
    kind: str = "fold"


Block = Text | Table | Histogram | Fold


class Section(NamedTuple):
    """Titled blocks of a page."""

    title: str
    blocks: Sequence[Block]
    is_wide: bool = False  # whether it takes both columns of the page


class PagePart(NamedTuple):
    """Additions to the page of a report."""

    title: str = ""  # first word of the page's title
    tiles: Sequence[Tile] = ()
    sections: Sequence[Section] = ()
    columns: Collection[str] = ()  # columns of labels that the sections show
    stages: Collection[str] = ()  # stages whose examples the sections show
    has_speed: bool = True  # whether the rows read, speed and times are those of the whole job


@dataclass(frozen=True)
class ReportPart:
    """Base class of additions to a job's report, by a head, a mapper or a recipe.

    They are made from the metadata of the output alone, so that a report can be written again.
    """

    # Words by name of a reason to drop rows, beside `gpuclassify.mapping.stage_counts.REASONS`.
    reasons: ClassVar[Mapping[str, str]] = {}

    def entries(
        self, directory: Any, job: Mapping[str, Any], stages: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return entries of ``report.json``; none if the job has nothing of this part.

        `directory` is the `Store` of the output, `job` the content of its ``job.json``, and
        `stages` the counts of all records, by stage.
        """
        return {}

    def page(self, report: Mapping[str, Any]) -> PagePart:
        """Return the additions to the page of a report, which has the `entries`."""
        return PagePart()
