"""What is wrong with a cluster's workers, as a table to read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

# Off: dask.config.set({"gpuclassify.preflight": False}).
SETTING = "gpuclassify.preflight"


class PreflightError(RuntimeError):
    """Workers cannot do what they are there for; the text is a table of what is wrong."""


class MisfitError(RuntimeError):
    """What a probe raises for something that a row of the table can say.

    Parameters
    ----------
    check, found, expected, cure : str
    """

    def __init__(self, check: str, found: str, expected: str, cure: str) -> None:
        super().__init__(check, found, expected, cure)

    def __str__(self) -> str:
        check, found, expected, cure = self.args
        return f"{check}: {found}, expected {expected}; {cure}"


@dataclass(frozen=True)
class Row:
    """One thing that is wrong with one worker, as the table shows it."""

    worker: str
    host: str
    check: str
    found: str
    expected: str
    cure: str


def render(rows: Iterable[Row], count: int) -> str:
    """The table of what is wrong, as text.

    Parameters
    ----------
    rows : iterable of Row
    count : int
        Workers that were looked at.
    """
    rows = list(rows)
    head = ("worker", "host", "check", "found", "expected", "cure")
    lines = [head, *map(astuple, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    failed = len({row.worker for row in rows})
    table = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
    return (
        f"{failed} of {count} workers cannot do this work:\n{table}\n"
        f"To work without this check: dask.config.set({{{SETTING!r}: False}})"
    )
