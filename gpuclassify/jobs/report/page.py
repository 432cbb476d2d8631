"""A job's report as one HTML file that opens without a network."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template

from gpuclassify.jobs.report.counts import add_counts
from gpuclassify.pages import page_template
from gpuclassify.pages.readable import short_number

MOST_LABELS, MOST_BARS, MOST_CROSSED = 30, 40, 12
_REASONS = {
    "null": "without text",
    "label": "with another label",
    "confidence": "below the least confidence",
    "score": "below the least score",
}
_TIME_NAMES = {
    "read": "reading",
    "wait_tokens": "waiting for tokens",
    "wait_device": "waiting for the device",
    "write": "writing",
}
_STEP_NAMES = {"ids": "checking ids", "counts": "counting", "removed": "listing rows to remove"}


def page(report: dict[str, Any]) -> str:
    """The HTML page of a report.

    Parameters
    ----------
    report : dict
        As `gpuclassify.jobs.report.report.report_of` returns it. All of its text is escaped.
    """
    return _template().render(
        report=report,
        funnel=_funnel_bars(report["funnel"]),
        labels=_label_bars(report),
        sources={
            name: [(value, rows["kept"], rows["read"]) for value, rows in counts.items()]
            for name, counts in report["sources"].items()
        },
        reasons=_REASONS,
        dropped_names={reason: f"dropped: {words}" for reason, words in _REASONS.items()},
        most_labels=MOST_LABELS,
        time_names=_TIME_NAMES,
        step_names=_STEP_NAMES,
    )


@functools.cache
def _template() -> Template:
    return page_template(
        "gpuclassify.jobs",
        "report",
        "page.html.j2",
        binned=unit_bins,
        cross=most_crossed,
        edge=_edge,
        joined=join_bins,
    )


def join_bins(
    bins: Sequence[tuple[float, float, int]], most: int = MOST_BARS
) -> list[tuple[float, float, int]]:
    """The bins of a histogram, neighbours joined until there are few enough to be seen.

    Parameters
    ----------
    bins : sequence of (float, float, int)
        Lower edge, upper edge and count of each bin, in ascending order.
    most : int
        Number of bins returned at most.
    """
    joined = -(-len(bins) // most)
    groups = [bins[start : start + joined] for start in range(0, len(bins), joined)]
    return [(group[0][0], group[-1][1], sum(count for *_, count in group)) for group in groups]


def most_crossed(
    counts: Mapping[str, Mapping[str, int]], most: int = MOST_CROSSED
) -> tuple[list[str], list[str], int, int]:
    """The most frequent rows and columns of a cross table, equal ones first, and rows counted.

    Returns
    -------
    rows, columns : list of str
        Labels, `most` at most.
    equal, total : int
        Rows of which both labels are the same, and all rows.
    """
    by_row = {name: sum(row.values()) for name, row in counts.items()}
    by_column: dict[str, int] = {}
    for row in counts.values():
        add_counts(by_column, row)
    rows, columns = (sorted(by, key=lambda n: (-by[n], n))[:most] for by in (by_row, by_column))
    equal = sum(row.get(name, 0) for name, row in counts.items())
    return rows, columns, equal, sum(by_row.values())


def _funnel_bars(steps: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, int]]:
    """Each step with the rows that go on, and those that came to it."""
    before = [step["rows"] for step in steps]
    came = [*before[:1], *before[:-1]]
    return [(s["name"], s["rows"], came) for s, came in zip(steps, came, strict=True)]


def _label_bars(report: Mapping[str, Any]) -> dict[str, list[tuple[str, int, int]]]:
    """Labels of each column with the rows written, and those before the filters."""
    before = {
        name: counts
        for stage in report["stages"].values()
        for name, counts in stage["labels"].items()
    }
    bars = {}
    for name, written in report["labels"].items():
        every = {**written, **before.get(name, {})}
        ordered = sorted(every, key=lambda label: (-every[label], label))
        bars[name] = [(label, written.get(label, 0), every[label]) for label in ordered]
    return bars


def _edge(value: float) -> str:
    """The name of a bin's edge, short enough to stand beside others."""
    if value >= 10_000:
        return short_number(value)
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"


def unit_bins(counts: Sequence[int]) -> list[tuple[float, float, int]]:
    """Counts in equal bins from 0 to 1 as a histogram, without empty bins at its beginning."""
    every = [(n / len(counts), (n + 1) / len(counts), count) for n, count in enumerate(counts)]
    first = next((n for n, count in enumerate(counts) if count), 0)
    return every[first:]
