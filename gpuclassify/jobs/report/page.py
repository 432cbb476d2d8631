"""A job's report as one HTML file that opens without a network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from gpuclassify.jobs.report.charts import (
    bars,
    histogram,
    line,
    readable_time,
    short_number,
    stack,
)

MOST_LABELS, MOST_BARS = 30, 40
_TIMES = {
    "read": "reading",
    "model": "model",
    "wait_tokens": "waiting for tokens",
    "wait_device": "waiting for the device",
    "other_mapping": "other mapping",
    "write": "writing",
}

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5c6675; --line: #dfe3ea;
  --paper: #ffffff; --back: #f4f6f9; --main: #2f6fde; --pale: #2f6fde22; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7ebf2; --soft: #98a3b3; --line: #333c4a;
  --paper: #1a202a; --back: #12161d; --main: #6ea1ff; --pale: #6ea1ff22; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 16px; margin: 0 0 12px; }
h3 { font-size: 14px; margin: 16px 0 6px; color: var(--soft); font-weight: 600; }
.under { color: var(--soft); margin: 2px 0 20px; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 12px; }
.tile, section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 16px; } .tile b { display: block; font-size: 22px; line-height: 1.3; }
.tile span, .note { color: var(--soft); font-size: 13px; }
.warn b { color: #c4501b; }
.charts { columns: 2 440px; column-gap: 16px; margin: 16px 0; }
section { padding: 18px 20px; margin-bottom: 16px; break-inside: avoid; }
svg { width: 100%; height: auto; display: block; font-size: 12.5px; }
text { fill: var(--ink); } .bar { fill: var(--main); } .area { fill: var(--pale); }
.line { fill: none; stroke: var(--main); stroke-width: 2; stroke-linejoin: round; }
.level { stroke: var(--line); } .axis { stroke: var(--soft); }
.share0 { fill: #7aa6ff; } .share1 { fill: #2f6fde; } .share2 { fill: #f2a73b; }
.share3 { fill: #d9644a; } .share4 { fill: #9aa5b4; } .share5 { fill: #37a97c; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; vertical-align: top; padding: 4px 12px 4px 0;
  border-top: 1px solid var(--line); overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 500; width: 30%; } tr:first-child > * { border-top: 0; }
pre { background: var(--back); border-radius: 8px; padding: 12px; overflow-x: auto; margin: 0;
  font-size: 13px; }
"""


def page(report: dict[str, Any]) -> str:
    """The page of a report, as `gpuclassify.jobs.report.report.report_of` gives it."""
    charts = [
        *(_labels(name, counts, report) for name, counts in report["labels"].items()),
        *(_scores(name, bins) for name, bins in report["scores"].items()),
        *(_lengths(name, bins, report) for name, bins in report["text_lengths"].items()),
        _throughput(report),
        _times(report),
    ]
    tables = [_problems(report), _code(report), _settings(report)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Classified: {escape(report['output'])}</title><style>{_STYLE}</style></head>"
        f"<body><main>{_head(report)}"
        f'<div class="charts">{"".join(filter(None, charts))}</div>'
        f"{''.join(filter(None, tables))}</main></body></html>\n"
    )


def _head(report: dict[str, Any]) -> str:
    rows_in, rows_out = report["rows_in"], report["rows_out"]
    is_whole = report["parts_done"] == report["parts"]
    state = "finished" if is_whole else f"{report['parts_done']} of {report['parts']} parts done"
    tiles = [
        _tile(f"{rows_in:,}", "rows read"),
        _tile(f"{rows_out:,}", f"rows kept, {rows_out / max(1, rows_in):.1%}"),
        _tile(f"{report['rows_per_second']:,.1f}", "rows a second"),
        _tile(readable_time(report["busy_seconds"]), "at work"),
    ]
    if report["tokens"]:
        tiles.append(_tile(short_number(report["tokens_per_second"]), "tokens a second"))
        tiles.append(_tile(f"{max(0.0, report['padding_share']):.1%}", "padding"))
    tiles += _gpu_tiles(report["gpu"] or {})
    if report["left_out"]:
        count = sum(report["left_out"].values())
        tiles.append(_tile(f"{count:,}", "left out, in quarantine", "tile warn"))
    begun = report["created"].replace("T", " ").replace("Z", " UTC")
    return (
        f'<h1>Classified texts</h1><p class="under">{escape(report["output"])}<br>'
        f'begun {begun}, {state}</p><div class="tiles">{"".join(tiles)}</div>'
    )


def _gpu_tiles(gpu: dict[str, Any]) -> list[str]:
    """How busy GPUs were while models ran, and the most memory of one that was taken."""
    tiles = []
    if gpu.get("busy_share") is not None:
        tiles.append(_tile(f"{gpu['busy_share']:.0%}", "GPUs busy in models' time"))
    if "peak_device_bytes" in gpu:
        tiles.append(_tile(f"{gpu['peak_device_bytes'] / 2**30:.1f} GiB", "of a GPU at most"))
    return tiles


def _tile(value: str, name: str, kind: str = "tile") -> str:
    return f'<div class="{kind}"><b>{escape(value)}</b><span>{escape(name)}</span></div>'


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _labels(name: str, counts: dict[str, int], report: dict[str, Any]) -> str:
    total = sum(counts.values())
    if not total:
        return ""
    without = report["rows_out"] - total
    shown = list(counts.items())[:MOST_LABELS]
    rows = [(label, count, f"{count:,} ({count / total:.1%})") for label, count in shown]
    more = len(counts) - len(shown)
    left = total - sum(count for _, count in shown)
    rest = [f"{more} more labels have {left:,} rows."] if more else []
    rest += [f"{without:,} rows without text have none."] if without else []
    return _section(f"Labels: {name}", bars(rows) + (_note(" ".join(rest)) if rest else ""))


def _scores(name: str, bins: Sequence[tuple[float, float, int]]) -> str:
    if not bins:
        return ""
    joined = -(-len(bins) // MOST_BARS)
    groups = [bins[start : start + joined] for start in range(0, len(bins), joined)]
    bins = [(group[0][0], group[-1][1], sum(c for *_, c in group)) for group in groups]
    edges = [low for low, _, _ in bins] + [bins[-1][1]]
    every = -(-len(edges) // 9)
    names = [f"{edge:g}" if n % every == 0 else "" for n, edge in enumerate(edges)]
    return _section(f"Scores: {name}", histogram(edges, [count for *_, count in bins], names))


def _lengths(name: str, bins: Sequence[tuple[float, float, int]], report: dict[str, Any]) -> str:
    if not bins:
        return ""
    edges = [low for low, _, _ in bins] + [bins[-1][1]]
    every = -(-len(edges) // 10)
    names = [f"{edge:,}" if n % every == 0 else "" for n, edge in enumerate(edges)]
    cut, texts = report["truncated_texts"], report["texts"]
    note = _note(
        f"In characters. Models read texts {texts:,.0f} times, and {cut:,.0f} times "
        f"({cut / max(1, texts):.1%}) only in part, because the text was longer than the model."
    )
    chart = histogram(edges, [count for *_, count in bins], names)
    return _section(f"Text lengths: {name}", chart + note)


def _throughput(report: dict[str, Any]) -> str:
    points = report["throughput"]
    if len(points) < 2:
        return ""
    names = ("0:00", readable_time(report["busy_seconds"]))
    note = _note("Rows a second while the job was at work; pauses between runs are left out.")
    return _section("Throughput", line(points, names) + note)


def _times(report: dict[str, Any]) -> str:
    times = report["worker_seconds"]
    total = sum(times.values()) or 1
    shares = [
        (_TIMES.get(name, name.replace("_", " ")), value, f"{value / total:.1%}")
        for name, value in times.items()
    ]
    note = _note(
        f"{readable_time(total)} of all workers together. Tokenizing took "
        f"{readable_time(report['tokenize_seconds'])} on threads of its own, ahead of the models."
    )
    return _section("Where the time went", stack(shares) + note)


def _problems(report: dict[str, Any]) -> str:
    if not report["left_out"]:
        return ""
    counted = ", ".join(f"{count:,} {kind}s" for kind, count in report["left_out"].items())
    rows = [
        (
            f"{problem['source']}{_place(problem)}",
            problem["reason"][:300],
        )
        for problem in report["problems"]
    ]
    note = _note(f"Left out: {counted}. All of them are described in _quarantine/ of the output.")
    return _section("Problems", note + _table(rows))


def _place(problem: dict[str, Any]) -> str:
    if "offset" in problem:
        return f", byte {problem['offset']:,}"
    return f", row {problem['row']:,}" if "row" in problem else ""


def _code(report: dict[str, Any]) -> str:
    note = _note("Run again, it continues or leaves a finished job as it is.")
    return _section("How to reproduce", f"<pre>{escape(report['code'])}.run()</pre>{note}")


def _settings(report: dict[str, Any]) -> str:
    tables = [
        f"<h3>{escape(part)}</h3>{_table((k, v) for k, v in values.items() if v is not None)}"
        for part, values in {**report["settings"], "versions": report["versions"]}.items()
    ]
    return _section("Settings and versions", "".join(tables))


def _table(rows: Iterable[tuple[str, Any]]) -> str:
    lines = (f"<tr><th>{escape(str(k))}</th><td>{escape(str(v))}</td></tr>" for k, v in rows)
    return f"<table>{''.join(lines)}</table>"
