"""Pictures of results: ratios, shares of the machine's peak, recall and growth.

``python -m benchmarks.plots RESULT.json ...`` writes PNG files beside the first result of a kind.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import PercentFormatter

from benchmarks import BASELINE, SUBJECT
from benchmarks.recall import band_probability

WIDTH_INCHES = 9.0
BAR_INCHES = 0.34
PANEL_INCHES = 0.75  # of a panel's title and axis
HEAD_INCHES = 0.8
CURVE_BARS = 8  # as high as so many bars
DPI = 150
# From dark to light, so that a grey print keeps them apart.
SUBJECT_COLOUR, BASELINE_COLOUR, PEER_COLOUR = "#12355b", "#c8692a", "#b9c9d9"
_COLOURS = (SUBJECT_COLOUR, BASELINE_COLOUR, PEER_COLOUR)
_TEXT: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # where a line would cross a value

Panel = tuple[str, dict[str, Any]]  # its title, and the findings of a corpus


def main(arguments: Sequence[str] | None = None) -> list[Path]:
    """Draw what the results hold, and return the pictures' paths."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    parser.add_argument("--output", type=Path, help="folder (that of the first result)")
    options = parser.parse_args(arguments)
    folder = options.output or options.results[0].parent
    folder.mkdir(parents=True, exist_ok=True)
    paths = draw_results(options.results, folder)
    for path in paths:
        print(f"drawn to {path}")
    return paths


def draw_results(results: Sequence[Path], folder: Path) -> list[Path]:
    """Draw all pictures of the results, each named after the first result that it shows."""
    loaded = {path: json.loads(path.read_text(encoding="utf-8")) for path in results}
    paths = []
    matplotlib.use("Agg")  # no display is needed
    with plt.rc_context(_TEXT):
        for question, pictures in PICTURES.items():
            for name, (part, draw) in pictures.items():
                shown = {
                    path.stem: result
                    for path, result in loaded.items()
                    if result["question"] == question and part in result
                }
                if not shown:
                    continue
                path = folder / f"{next(iter(shown))}-{name}.png"
                figure = draw(list(shown.values()))
                figure.savefig(path, dpi=DPI)
                plt.close(figure)
                paths.append(path)
    return paths


def draw_ratios(results: Sequence[dict[str, Any]]) -> Any:
    """Draw how many times as fast gpuclassify is as each other way: medians, and every round."""
    panels = _panels(results)
    bars = [len(corpus["speed_up"]) for _, corpus in panels]
    figure, axes = _figure(bars, "How many times as fast is gpuclassify?", results)
    rounds = [
        {name: found["ratio_by_round"] for name, found in corpus["speed_up"].items()}
        for _, corpus in panels
    ]
    widest = max(max(map(max, of_panel.values())) for of_panel in rounds)
    for axis, (title, corpus), of_panel in zip(axes, panels, rounds, strict=True):
        _bars(axis, _ratios(corpus), lambda ratio: f"{ratio:.2f}×", widest * 1.12, of_panel)
        axis.axvline(1, color="black", linewidth=1)
        axis.set_title(title, loc="left")
    axes[-1].set_xlabel("time of the other way / time of gpuclassify (bar: medians, ticks: rounds)")
    return figure


def draw_engines(results: Sequence[dict[str, Any]]) -> Any:
    """Draw how many times as fast as the recipe each engine is, gpuclassify among them."""
    panels = _panels(results)
    bars = [len(corpus["variants"]) - 1 for _, corpus in panels]
    figure, axes = _figure(bars, "How fast are engines for CPUs?", results)
    for axis, (title, corpus) in zip(axes, panels, strict=True):
        seconds = {name: way["median_seconds"] for name, way in corpus["variants"].items()}
        slowest = seconds.pop(BASELINE)
        times = {name: slowest / median for name, median in seconds.items()}
        _bars(axis, times, lambda ratio: f"{ratio:.1f}×", 1.1 * max(times.values()))
        axis.set_title(title, loc="left")
    axes[-1].set_xlabel("documents a second, over those of the recipe of Hugging Face")
    return figure


def draw_peak_shares(results: Sequence[dict[str, Any]]) -> Any:
    """Draw the share of the machine's matrix-product peak spent on the documents' own tokens."""
    panels = _panels(results)
    bars = [len(corpus["variants"]) for _, corpus in panels]
    figure, axes = _figure(bars, "How much of the machine reaches the documents?", results)
    for axis, (title, corpus) in zip(axes, panels, strict=True):
        shares = {name: found["share_of_peak"] for name, found in corpus["variants"].items()}
        _bars(axis, shares, lambda share: f"{share:.0%}", 1.1 * max(*shares.values(), 1.0))
        axis.set_xticks(np.linspace(0, 1, 6))
        axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axis.set_title(title, loc="left")
    axes[-1].set_xlabel("share of the fastest matrix product measured in the same run")
    return figure


def draw_recall(results: Sequence[dict[str, Any]]) -> Any:
    """Draw the share of similar pairs found, beside the formula, for each number of bands."""
    panels = [
        (bands, found[SUBJECT]["recall"])
        for result in results
        for bands, found in result["recall"].items()
        if "x" in bands and SUBJECT in found
    ]
    figure, axes = _figure([CURVE_BARS] * len(panels), "Which similar pairs are found?", results)
    similarity = np.linspace(0.5, 1, 200)
    for axis, (bands, bins) in zip(axes, panels, strict=True):
        middles = [(each["from"] + each["to"]) / 2 for each in bins]
        low, high = zip(*(each["interval"] for each in bins), strict=True)
        axis.vlines(middles, low, high, color=PEER_COLOUR, linewidth=8)
        expected = band_probability(similarity, *map(int, bands.split("x")))
        axis.plot(similarity, expected, color="black", linewidth=1)
        axis.plot(middles, [each["found"] for each in bins], "o", color=SUBJECT_COLOUR)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axis.set_title(f"{bands} bands and rows", loc="left")
    axes[-1].set_xlabel(
        "Jaccard similarity (points: share found; line: 1-(1-s^rows)^bands; bars: 95% of chance)"
    )
    return figure


def draw_growth(results: Sequence[dict[str, Any]]) -> Any:
    """Draw the seconds for each thousand documents against the number of documents."""
    figure, (axis,) = _figure([CURVE_BARS], "How does time grow with the documents?", results)
    for result in results:
        documents = [step["documents"] for step in result["growth"]]
        for way, colour in ((SUBJECT, SUBJECT_COLOUR), (f"{SUBJECT}, verified", BASELINE_COLOUR)):
            steps = [step["variants"].get(way, {}) for step in result["growth"]]
            rates = [step.get("seconds_per_thousand", np.nan) for step in steps]
            axis.plot(documents, rates, "o-", color=colour, label=way)
        axis.set_xscale("log")
        axis.set_xticks(documents, [f"{count:,}" for count in documents])
    axis.minorticks_off()
    axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
    axis.set_xlabel("documents")
    axis.set_ylabel("seconds for each 1,000")
    axis.legend(frameon=False)
    return figure


def draw_scale(results: Sequence[dict[str, Any]]) -> Any:
    """Draw the time of each step of rows over its median, and the memory meanwhile."""
    panels = [panel for _ in results for panel in (CURVE_BARS, CURVE_BARS)]
    figure, axes = _figure(panels, "Do time and memory stay level in a long job?", results)
    for result, (time, memory) in zip(
        results, zip(axes[::2], axes[1::2], strict=True), strict=True
    ):
        pace, samples = result["pace"], result["samples"]
        ends = pace["rows"] * np.arange(1, len(pace["seconds"]) + 1) / 1e6
        shown = {"seconds": SUBJECT_COLOUR, "yardstick_seconds": BASELINE_COLOUR}
        for (measured, colour), name in zip(
            shown.items(), ("the job", "the library alone, meanwhile"), strict=True
        ):
            values = np.array(pace[measured])
            time.plot(ends, values / np.median(values), "o-", color=colour, label=name)
        time.axhspan(0.9, 1.1, color=PEER_COLOUR, alpha=0.4)
        time.set_ylim(0, 1.4 * time.get_ylim()[1])
        time.set_title(f"time for each {pace['rows']:,} rows, over its median", loc="left")
        time.legend(frameon=False, ncols=2, loc="upper left")
        rows = [sample["rows"] / 1e6 for sample in samples]
        held = {
            "workers together": [sum(sample["workers_bytes"]) for sample in samples],
            "client and scheduler": [sample["client_bytes"] for sample in samples],
            "processes of the model": [sample["model_bytes"] for sample in samples],
        }
        for (name, sizes), colour in zip(held.items(), _COLOURS, strict=True):
            memory.plot(rows, np.array(sizes) / 2**20, color=colour, label=name)
        memory.set_ylim(0, 1.3 * memory.get_ylim()[1])
        memory.set_title("memory in MiB", loc="left")
        memory.legend(frameon=False, ncols=3, loc="upper left")
    axes[-1].set_xlabel("millions of rows done")
    return figure


Draw = Callable[[Sequence[dict[str, Any]]], Any]
# By question and picture: the part of a result that is drawn, and how.
PICTURES: dict[str, dict[str, tuple[str, Draw]]] = {
    "throughput": {"ratios": ("corpora", draw_ratios), "peak": ("corpora", draw_peak_shares)},
    "device": {"ratios": ("corpora", draw_ratios), "peak": ("corpora", draw_peak_shares)},
    "engines": {"ratios": ("corpora", draw_engines)},
    "deduplication": {
        "ratios": ("corpora", draw_ratios),
        "recall": ("recall", draw_recall),
        "growth": ("growth", draw_growth),
    },
    "scale": {"scale": ("pace", draw_scale)},
}


def _panels(results: Iterable[dict[str, Any]]) -> list[Panel]:
    panels = []
    for result in results:
        for kind, corpus in result["corpora"].items():
            panels.append((_title(result, kind, corpus), corpus))
    return panels


def _title(result: dict[str, Any], kind: str, corpus: dict[str, Any]) -> str:
    if result["question"] == "deduplication":
        return f"{kind} bands and rows: {corpus['documents']:,} documents"
    settings = result["settings"]
    return (
        f"{settings['model']}, {settings['shape']['layers']} layers, {kind}: "
        f"{corpus['documents']} documents, {corpus['real_tokens']:,} tokens"
    )


def _ratios(corpus: dict[str, Any]) -> dict[str, float]:
    return {name: found["ratio_of_medians"] for name, found in corpus["speed_up"].items()}


def _figure(
    bars: Sequence[int], title: str, results: Sequence[dict[str, Any]]
) -> tuple[Any, list[Axes]]:
    """Return a figure with one panel below the other, each as high as so many bars need."""
    height = HEAD_INCHES + PANEL_INCHES * len(bars) + BAR_INCHES * sum(bars)
    figure, axes = plt.subplots(
        len(bars),
        figsize=(WIDTH_INCHES, height),
        height_ratios=bars,
        squeeze=False,
        layout=ConstrainedLayoutEngine(rect=(0, 0, 1, 1 - HEAD_INCHES / height), hspace=0.06),
    )
    figure.text(0.012, 1 - 0.12 / height, title, va="top", fontsize=14, fontweight="bold")
    figure.text(0.012, 1 - 0.44 / height, subtitle(results), va="top", fontsize=9)
    return figure, list(axes[:, 0])


def subtitle(results: Sequence[dict[str, Any]]) -> str:
    """Return the results' machines, threads, precisions, dates, and whether one was disturbed."""
    machines = dict.fromkeys(_machine_name(result["machine"]) for result in results)
    dtypes = dict.fromkeys(result["settings"]["dtype"] for result in results)
    dates = sorted({result["finished"][:10] for result in results})
    noisy = ["NOISY"] if any(result["noisy"] for result in results) else []
    return " · ".join([*machines, *dtypes, *dates, *noisy])


def _machine_name(machine: dict[str, Any]) -> str:
    threads = machine["torch_threads"]
    default = f"{machine['processor']}, {threads} thread{'s' if threads > 1 else ''}"
    return machine.get("gpu", default)


def _bars(
    axis: Axes,
    values: dict[str, float],
    label: Callable[[float], str],
    limit: float,
    rounds: dict[str, list[float]] | None = None,
) -> None:
    """Draw horizontal bars from the top down, ticks for rounds, and behind both the value."""
    colours = {BASELINE: BASELINE_COLOUR}
    colours |= {name: SUBJECT_COLOUR for name in values if name.startswith(SUBJECT)}
    axis.barh(
        list(values),
        list(values.values()),
        color=[colours.get(name, PEER_COLOUR) for name in values],
        edgecolor="black",
        linewidth=0.6,
        height=0.7,
    )
    for place, (name, value) in enumerate(values.items()):
        ticks = rounds[name] if rounds else []
        axis.plot(ticks, [place] * len(ticks), "|", color="black", markersize=9)
        end = max([value, *ticks]) + 0.012 * limit
        axis.text(end, place, label(value), va="center", bbox=_WHITE)
    axis.set_xlim(0, limit)
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)


if __name__ == "__main__":
    main()
