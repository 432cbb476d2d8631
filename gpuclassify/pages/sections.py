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


class Cell(NamedTuple):
    """Text of a table's cell, with a note below it."""

    text: str
    note: str


@dataclass(frozen=True)
class Heading:
    """Heading within a section."""

    text: str
    kind: ClassVar[str] = "heading"


@dataclass(frozen=True)
class Note:
    """Small text of a section."""

    text: str
    kind: ClassVar[str] = "note"


@dataclass(frozen=True)
class Preformatted:
    """Text to be copied."""

    text: str
    kind: ClassVar[str] = "preformatted"


@dataclass(frozen=True)
class Table:
    """Rows of cells: texts, `Cell`s, or None for an empty one."""

    header: Sequence[str]  # empty for a table without one
    rows: Sequence[Sequence[str | Cell | None]]
    numbers: Collection[int] = ()  # indices of the columns of numbers
    is_wide: bool = False  # whether the last column takes most of the width
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Histogram:
    """Vertical bars."""

    bins: Sequence[tuple[float, float, int]]  # lower edge, upper edge and count
    title: str  # below the bars
    side: str  # of the counts
    most_names: int  # number of edges that are named, about
    kind: ClassVar[str] = "histogram"


@dataclass(frozen=True)
class Fold:
    """Blocks that are shown after a click on their summary."""

    summary: str
    blocks: Sequence[Block]
    kind: ClassVar[str] = "fold"


Block = Heading | Note | Preformatted | Table | Histogram | Fold


@dataclass(frozen=True)
class Section:
    """Titled blocks of a page."""

    title: str
    blocks: Sequence[Block]
    is_wide: bool = False  # whether it takes both columns of the page


@dataclass(frozen=True)
class PagePart:
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
