"""Pairs of a name and a text, as a reader of a terminal or of a notebook sees them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from html import escape

NAME_WIDTH, LINE_WIDTH = 10, 100  # characters
CELL = "text-align: left; vertical-align: top; white-space: pre"  # spaces align histograms
TEXT = f"{CELL}-wrap; font-family: monospace"


def text_table(rows: Iterable[tuple[str, str]]) -> str:
    """Rows of a name and a text as lines, of which long ones are wrapped."""
    indent = " " * (NAME_WIDTH + 1)
    wrap = textwrap.TextWrapper(
        LINE_WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrap.fill(f"{name:<{NAME_WIDTH}} {text}") for name, text in rows)


def html_table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Rows of a name and a text as HTML, in the colours that the notebook has, light or dark."""
    cells = "".join(
        f'<tr><th scope="row" style="{CELL}">{escape(name)}</th>'
        f'<td style="{TEXT}">{escape(text)}</td></tr>'
        for name, text in rows
    )
    table = f'<table style="color: inherit">{cells}</table>'
    return f"<div><strong>{escape(title)}</strong>{table}</div>"
