"""Pages of tables, each table with notes and bars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuclassify.pages import page_template

Bar = tuple[str, tuple[float, ...], str]  # name, lengths as shares of the width, and value


@dataclass(frozen=True)
class TableSection:
    """Table of a page, with a title, and notes and bars below it."""

    title: str
    rows: Sequence[Sequence[str]] = ()  # the names of columns first
    notes: Sequence[str] = ()
    bars: Sequence[Bar] = ()  # the names of the bars and of their values first
    is_text: bool = False  # whether cells wrap, or are numbers below each other


def table_page(title: str, under: Iterable[str], sections: Iterable[TableSection]) -> str:
    """Render tables as one file of HTML without script, font or picture from elsewhere.

    The lines `under` the title come before the `sections`.
    """
    template = page_template("gpuclassify", "pages", "tables.html.j2")
    return template.render(title=title, under=[*under], sections=[*sections])
