"""Text for people: HTML pages that open without a network, tables, numbers and times."""

from __future__ import annotations

import json
import re
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template

NAME_WIDTH, LINE_WIDTH = 10, 100  # characters
CELL = "text-align: left; vertical-align: top; white-space: pre"  # aligns histograms by spaces
TEXT = f"{CELL}-wrap; font-family: monospace"


def page_template(package: str, folder: str, name: str, **filters: Callable[..., Any]) -> Template:
    """Load the Jinja template `name` of an HTML page from a folder of an installed package.

    The template escapes all values. It gets filters for numbers and times, and `filters` by name.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=ChoiceLoader(
            [PackageLoader(package, folder), PackageLoader("gpuclassify", "pages")]
        ),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "edge": bin_edge,
        "kinds": counted_kinds,
        "percent": "{:.1%}".format,
        "short": short_number,
        "thousands": "{:,.0f}".format,
        "time": readable_time,
        **filters,
    }
    return environment.get_template(name)


def visible(text: str, kept: str = "\n\t") -> str:
    r"""Escape control and invisible characters as in ``\x1b``, so that no terminal obeys them.

    Spaces and the characters in `kept` stay.
    """
    if text.isprintable():
        return text
    printable = {
        char for char in set(text) if char.isprintable() or unicodedata.category(char) == "Zs"
    }
    return "".join(char if char in printable or char in kept else repr(char)[1:-1] for char in text)


def visible_json(text: str) -> str:
    """Escape control and invisible characters in JSON lines, so that parsed values are equal."""

    def escape(char: str) -> str:
        return json.dumps(char)[1:-1] if char != "\x7f" else r"\u007f"

    return "".join(c if c.isprintable() or c in " \n" else escape(c) for c in text)


# Signs of CommonMark, and of extensions by GitHub and the Hub: links without brackets, mentions,
# emoji, formulas and struck text. Colons in sentences and points in numbers are not matched.
_MARKDOWN = re.compile(r"[\\`*_\[\]|~$@#]|:(?=\S)|(?<=www)\.", re.IGNORECASE)


def markdown(text: str) -> str:
    """Escape signs of Markdown and HTML, and invisible characters, in a line of text.

    Signs of lists at the beginning of a line, "-", "+" and "1.", are not escaped.
    """
    return escape(_MARKDOWN.sub(r"\\\g<0>", visible(text, "")), quote=False)


def short_number(value: float) -> str:
    """Format a number below 1,000T with up to three digits and a unit: ``1.2k``, ``3.4M``."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:  # 999.5 is 1k with three digits
            return f"{_three_digits(value / size)}{unit}"
    return _three_digits(value)


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def counted(number: int, noun: str) -> str:
    """Return a number with a noun in singular or plural (with "s"): ``1 file``, ``2,000 files``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def counted_kinds(counts: Mapping[str, int]) -> str:
    """Join counts by noun, sorted by noun: ``1 file, 3 lines`` for ``{"line": 3, "file": 1}``."""
    return ", ".join(counted(number, kind) for kind, number in sorted(counts.items()))


def bin_edge(value: float) -> str:
    """Format a bin's edge as ``12.3``, as ``1,234`` from 1,000, and as ``12.3k`` from 10,000."""
    if value >= 10_000:
        return short_number(value)
    return _three_digits(value)


def readable_time(seconds: float) -> str:
    """Format a time in seconds, as ``1:02:03`` or ``0:37``, or as ``3.1 s`` below ten seconds."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def text_table(rows: Iterable[tuple[str, str]]) -> str:
    """Format (name, text) pairs as wrapped lines, with texts aligned after `NAME_WIDTH` characters.

    A word longer than a line, such as a path, stays whole. Invisible characters are escaped.
    """
    indent = " " * (NAME_WIDTH + 1)
    wrap = textwrap.TextWrapper(
        LINE_WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrap.fill(visible(f"{name:<{NAME_WIDTH}} {text}")) for name, text in rows)


def text_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line of text for each row of cells, with columns aligned on the left."""
    cells = [[visible(cell, "") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    pairs = (zip(row, widths, strict=True) for row in cells)
    return ["  ".join(f"{cell:<{width}}" for cell, width in row).rstrip() for row in pairs]


def html_table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Format (name, text) pairs as an HTML table with a title, in the notebook's text colour."""
    cells = "".join(
        f'<tr><th scope="row" style="{CELL}">{escape(name)}</th>'
        f'<td style="{TEXT}">{escape(text)}</td></tr>'
        for name, text in rows
    )
    table = f'<table style="color: inherit">{cells}</table>'
    return f"<div><strong>{escape(title)}</strong>{table}</div>"
