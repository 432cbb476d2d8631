"""A job's report as one HTML file that opens without a network."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from gpuclassify.jobs.report.readable import readable_time, short_number

MOST_LABELS, MOST_BARS = 30, 40
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
        report=report, most_labels=MOST_LABELS, time_names=_TIME_NAMES, step_names=_STEP_NAMES
    )


@functools.cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("gpuclassify.jobs", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "binned": unit_bins,
        "joined": join_bins,
        "percent": "{:.1%}".format,
        "short": short_number,
        "thousands": "{:,.0f}".format,
        "time": readable_time,
    }
    return environment.get_template("page.html.j2")


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


def unit_bins(counts: Sequence[int]) -> list[tuple[float, float, int]]:
    """Counts in equal bins from 0 to 1 as a histogram, without empty bins at its beginning."""
    every = [(n / len(counts), (n + 1) / len(counts), count) for n, count in enumerate(counts)]
    first = next((n for n, count in enumerate(counts) if count), 0)
    return every[first:]
