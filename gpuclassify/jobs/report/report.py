"""Report of a job from its metadata: JSON for programs, and an HTML page for people."""

from __future__ import annotations

import contextlib
import functools
import json
import posixpath
import time
from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

import numpy as np
from jinja2 import Template
from markupsafe import Markup, escape

from gpuclassify.jobs.ledger.manifest import REPORTS, DamagedMetadataError, manifest_of, read_job
from gpuclassify.jobs.ledger.records import JOB
from gpuclassify.jobs.provenance import Provenance, card
from gpuclassify.jobs.report.summary import (
    LENGTH_EDGES,
    SCORE_BIN_WIDTH,
    JobSummary,
    column_labels,
    fold_rare,
    most_frequent,
)
from gpuclassify.jobs.stores.store import Store
from gpuclassify.mapping.partition_map import CODE
from gpuclassify.mapping.stage_counts import MARKS, REASONS, is_condition
from gpuclassify.pages import page_template
from gpuclassify.pages.sections import MOST_ROWS, ReportPart, annotates
from gpuclassify.workers.run_context import add_counts, advice, shared_layers

MOST_POINTS = 60
MOST_PROBLEMS = 20
READ, OTHERS = "rows read", "other stages, left out"
MOST_BARS, MOST_CROSSED = 40, 12
_TIME_NAMES = {
    "read": "reading",
    "wait_tokens": "waiting for tokens",
    "wait_device": "waiting for the device",
    "write": "writing",
}
GPU_PEAKS = ("peak_device_bytes", "peak_torch_bytes", "peak_planned_bytes")


def write_report(directory: Store, parts: Sequence[ReportPart] = ()) -> dict[str, Any]:
    """Write ``report.json``, ``report.html`` and a dataset card into a job output's ``_report/``.

    A job without provenance gets no card. Returns the content of ``report.json``. Raises
    FileNotFoundError if no job has begun in `directory`, and DamagedMetadataError if its metadata
    cannot be parsed.
    """
    report = report_of(directory, parts)
    directory.make(posixpath.dirname(REPORTS[0]))
    contents = (json.dumps(report, indent=1, ensure_ascii=False), page(report, parts), card(report))
    for name, content in zip(REPORTS, contents, strict=True):
        if content:  # the card of a job without provenance is empty
            directory.replace(name, content.encode("utf-8", "replace"))
    return report


def report_of(directory: Store, parts: Sequence[ReportPart] = ()) -> dict[str, Any]:
    """Return the content of ``report.json``: counts, speeds and settings by name, as JSON values.

    Only finished parts are counted. Raises FileNotFoundError if no job has begun in `directory`.
    """
    job = read_job(directory)
    summary = JobSummary(output=str(directory))
    times: list[tuple[float, float, float, int]] = []
    quarantined: list[str] = []
    for record in manifest_of(directory).records().values():
        if record is None:
            continue
        summary.add(record)
        quarantined += record.quarantined
        for known in record.parts:
            began = known.finished - sum(known.seconds.values())
            times.append((known.run_began or began, began, known.finished, known.rows_in))
    additions: dict[str, Any] = {}
    for part in parts:
        additions |= part.entries(directory, job, summary.stages)
    return {
        "output": str(directory),
        "key": job["key"],
        "created": job["created"],
        "reported": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "parts": job["parts"],
        "parts_done": summary.parts,
        "rows_read": summary.rows_read,
        "rows_written": summary.rows_written,
        "output_bytes": summary.output_bytes,
        "left_out": summary.left_out,
        "problems": _problems(directory, quarantined),
        "labels": {name: most_frequent(counts) for name, counts in summary.columns.items()},
        "labelled": summary.labelled,
        "scores": {
            name: score_bins(counts, summary.largest.get(name))
            for name, counts in summary.numbers.items()
        },
        "text_lengths": {name: _length_bins(c) for name, c in summary.lengths.items()},
        "stages": summary.stages,
        "funnel": _funnel(summary),
        "examples": summary.examples,
        "agreements": summary.agreements,
        "empty_files": sorted(summary.empty_files),
        "textless": summary.textless,
        "warnings": summary.warnings,
        "sources": {name: fold_rare(counts) for name, counts in summary.sources.items()},
        **_speed(summary, times),
        "gpu": _gpu(summary.totals),
        **additions,
        "provenance": read_provenance(directory).as_dict(),
        "settings": _settings(job["identity"]),
        "versions": job["versions"],
        "code": job["code"],
        "command": job.get("command", ""),
    }


def read_provenance(directory: Store) -> Provenance:
    """Read from a job's output which models and data sources made its columns and rows.

    Raises FileNotFoundError if no job has begun there, and DamagedMetadataError for bad metadata.
    """
    job = read_job(directory)
    try:
        return Provenance.parse(job.get("provenance"))
    except (ValueError, RecursionError) as err:
        raise DamagedMetadataError(
            f"{directory.path(JOB)} is damaged, and not what a job wrote, {err}: start over, which "
            "removes the parts that are there (restart=True), or use another directory"
        ) from err


def _throughput(
    times: list[tuple[float, float, float, int]],
) -> tuple[float, list[list[float]]]:
    """Return the working time in seconds, and up to 60 points [seconds, rows per second].

    `times` has (start of the run, start, end, rows) of each finished part, in seconds since 1970.
    Working time excludes the time between runs.
    """
    if not times:
        return 0.0, []
    runs, begins, ends, rows = np.array(sorted(times)).T
    pauses = np.maximum(0, runs[1:] - np.maximum.accumulate(ends)[:-1])
    passed = runs[0] + np.concatenate([[0.0], np.cumsum(pauses)])
    begins, ends = begins - passed, ends - passed
    total = float(ends.max()) or 1e-9
    edges = np.linspace(0, total, min(MOST_POINTS, len(times)) + 1)
    sums = np.zeros(len(edges) - 1)
    for begin, end, count in zip(begins, ends, rows, strict=True):
        within = np.clip(edges, begin, end) - begin
        sums += count * np.diff(within / (end - begin) if end > begin else (edges >= end) * 1.0)
    middles = (edges[1:] + edges[:-1]) / 2
    return total, np.stack([middles, sums / np.diff(edges)], axis=1).round(6).tolist()


def _problems(directory: Store, names: list[str]) -> list[dict[str, Any]]:
    lines = (line for content in directory.read_all(names) for line in content.splitlines())
    problems = []
    for line in islice(lines, MOST_PROBLEMS):
        with contextlib.suppress(ValueError, RecursionError):  # the next run repairs damaged files
            problems.append(json.loads(line))
    return problems


def _speed(summary: JobSummary, times: list[tuple[float, float, float, int]]) -> dict[str, Any]:
    totals, seconds = summary.totals, summary.seconds
    busy_seconds, points = _throughput(times)
    tokens = totals.get("tokens", 0)
    run_tokens = tokens - totals.get("prefix_tokens", 0)
    waits = {name: value for name, value in totals.items() if name.startswith("wait_")}
    model = totals.get("model_seconds", 0.0)
    rest = seconds.get("map", 0.0) - model - sum(waits.values())
    return {
        "busy_seconds": busy_seconds,
        "rows_per_second": summary.rows_read / busy_seconds if busy_seconds else 0.0,
        "tokens": tokens,
        "tokens_per_second": tokens / busy_seconds if busy_seconds else 0.0,
        "padding_share": totals.get("padded_tokens", 0) / run_tokens - 1 if run_tokens else 0.0,
        "texts": totals.get("windows", 0),
        "truncated_texts": totals.get("truncated_texts", 0),
        "throughput": points,
        "worker_seconds": {
            "read": seconds.get("read", 0.0),
            "model": model,
            **{name.removesuffix("_seconds"): value for name, value in waits.items()},
            "other_mapping": max(0.0, rest),
            "write": seconds.get("write", 0.0),
        },
        "tokenize_seconds": totals.get("tokenize_seconds", 0.0),
        "shared_layers": shared_layers(totals),
        "advice": advice(totals),
        "totals": totals,
    }


def _gpu(totals: dict[str, float]) -> dict[str, float | None] | None:
    """Return the share of time that GPUs were busy, and peak memory in bytes; None without GPU.

    ``busy_share`` is None if the driver does not report it, as for MIG slices.
    """
    peaks = {name: totals[name] for name in GPU_PEAKS if name in totals}
    sampled_seconds = totals.get("device_sampled_seconds")
    if not (peaks or sampled_seconds):
        return None
    busy_seconds = totals.get("device_busy_seconds", 0.0)
    busy_share = busy_seconds / sampled_seconds if sampled_seconds else None
    return {"busy_share": busy_share, **peaks}


def score_bins(counts: Mapping[str, int], largest: float | None) -> list[tuple[float, float, int]]:
    """Return a histogram of scores: the lower edge, upper edge and number of rows of each bin.

    `counts` are rows by bin number as text; bins are 0.05 wide, and bin 0 begins at 0. Empty bins
    between others are included. A bin includes its lower edge, and the last bin also its upper
    edge, as in ``numpy.histogram``. So a last bin that would hold only the `largest` score (None if
    unknown) is usually joined to the bin below.
    """
    rows = {int(number): count for number, count in counts.items()}
    first, last = min(rows, default=0), max(rows, default=-1)
    if last > min(first, 0) and largest == round(last * SCORE_BIN_WIDTH, 4):
        rows[last - 1] = rows.get(last - 1, 0) + rows.pop(last)
        first, last = min(first, last - 1), last - 1
    bins = range(first, last + 1)
    edges = [round(number * SCORE_BIN_WIDTH, 4) for number in (*bins, bins.stop)]
    return [(*pair, rows.get(n, 0)) for n, pair in zip(bins, pairwise(edges), strict=True)]


def _length_bins(counts: dict[str, int]) -> list[tuple[int, int, int]]:
    lows = [int(low) for low in counts]
    first, last = min(lows, default=1), max(lows, default=0)
    bins = [(low, high) for low, high in pairwise(LENGTH_EDGES) if first <= low <= last]
    return [(low, high, counts.get(str(low), 0)) for low, high in bins]


def _funnel(summary: JobSummary) -> list[dict[str, Any]]:
    """Return dicts with ``name`` and ``rows`` left, for the rows read and after each stage.

    Stages also have ``dropped`` and ``would_drop``: numbers of rows by reason. Where the number of
    rows changes otherwise, a dict named "other stages, left out" is inserted. Without stages, the
    list is empty.
    """
    if not summary.stages:
        return []
    steps: list[dict[str, Any]] = [{"name": READ, "rows": summary.rows_read}]

    # Between stages, functions may drop or make rows, or rows fail.
    def close_gap(rows: int) -> None:
        if rows != steps[-1]["rows"]:
            steps.append({"name": OTHERS, "rows": rows})

    for name, counts in summary.stages.items():
        close_gap(counts["read"])
        reasons = {kind: counts[kind] for kind in ("dropped", "would_drop")}
        steps.append({"name": name, "rows": counts["kept"], **reasons})
    close_gap(summary.rows_written)
    return steps


def _settings(identity: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return a job's settings by section, with the number of files in place of lists of files."""
    listed = {name: values for name, values in identity.items() if name.endswith(" file")}
    settings = {
        name: {**values, **values.get(CODE, {})}
        for name, values in identity.items()
        if name not in listed
    }
    for values in settings.values():
        values.pop(CODE, None)
    for name, files in listed.items():
        settings[name.removesuffix(" file")] |= {"files": len(files), "such as": next(iter(files))}
    return settings


# The page.


def page(report: dict[str, Any], parts: Sequence[ReportPart] = ()) -> str:
    """Render the content of ``report.json`` as an HTML page that needs no network."""
    steps, stages = report["funnel"], report["stages"]
    rows_before = [step["rows"] for step in (*steps[:1], *steps[:-1])]
    added = [part.page(report) for part in parts]
    known = Provenance.parse(report.get("provenance"))
    reasons = dict(REASONS)
    for part in parts:
        reasons |= part.reasons
    for stage in stages.values():
        names = (*stage["dropped"], *stage["would_drop"])
        reasons |= {name: name for name in names if name not in reasons}
    shown_columns = {name for addition in added for name in addition.columns}
    shown_stages = {name for addition in added for name in addition.stages}
    return _template().render(
        report=report,
        title=_title(report, [addition.title for addition in added if addition.title]),
        tiles=[tile for addition in added for tile in addition.tiles],
        sections=[
            *(section for addition in added for section in addition.sections),
            *([known.section()] if known else []),
        ],
        has_speed=all(addition.has_speed for addition in added),
        funnel=[(s["name"], s["rows"], rows) for s, rows in zip(steps, rows_before, strict=True)],
        columns={
            name: column
            for name, column in column_labels(report["labels"], report["labelled"], stages).items()
            if column.rows and name not in shown_columns
        },
        sources={
            name: [(value, rows["written"], rows["read"]) for value, rows in counts.items()]
            for name, counts in report["sources"].items()
        },
        examples={n: texts for n, texts in report["examples"].items() if n not in shown_stages},
        reasons=reasons,
        dropped_names={reason: f"dropped: {words}" for reason, words in reasons.items()},
        most_labels=MOST_ROWS,
        time_names=_TIME_NAMES,
    )


def _title(report: Mapping[str, Any], titles: Sequence[str]) -> str:
    """Return the first word of the page's title, such as "Annotated" or the first of `titles`."""
    if annotates(report):
        return "Annotated"
    if titles:
        return titles[0]
    if all(is_condition(name) for name in report["stages"]):
        return "Selected" if report["stages"] else "Written"
    return "Classified"


@functools.cache
def _template() -> Template:
    return page_template(
        "gpuclassify.jobs",
        "report",
        "page.html.j2",
        cross=most_crossed,
        joined=join_bins,
        marked=_marked,
    )


def _marked(text: str) -> Markup:
    escaped = str(escape(text))
    for sign, tag in zip(MARKS, ("<mark>", "</mark>"), strict=True):
        escaped = escaped.replace(sign, tag)
    return Markup(escaped)


def join_bins(
    bins: Sequence[tuple[float, float, int]], most: int = MOST_BARS
) -> list[tuple[float, float, int]]:
    """Join neighbouring bins of a histogram, (lower edge, upper edge, count), to at most `most`."""
    joined = -(-len(bins) // most)
    groups = [bins[start : start + joined] for start in range(0, len(bins), joined)]
    return [(group[0][0], group[-1][1], sum(count for *_, count in group)) for group in groups]


def most_crossed(
    counts: Mapping[str, Mapping[str, int]], most: int = MOST_CROSSED
) -> tuple[list[str], list[str], int, int]:
    """Return the most frequent labels of two columns, for a cross table of `most` by `most` cells.

    `counts` are rows by the label in the first column, then by the label in the second column. Also
    returns the number of rows whose two labels are equal, and the number of all rows, both
    including rows with less frequent labels.
    """
    by_row = {name: sum(row.values()) for name, row in counts.items()}
    by_column: dict[str, int] = {}
    for row in counts.values():
        add_counts(by_column, row)
    rows, columns = (sorted(by, key=lambda n: (-by[n], n))[:most] for by in (by_row, by_column))
    equal = sum(row.get(name, 0) for name, row in counts.items())
    return rows, columns, equal, sum(by_row.values())
