"""How fast is fuzzy deduplication on one core, what does it find, and how does it grow?

``python -m benchmarks.deduplication --help`` lists the options; README.md says what is measured.
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from benchmarks import SUBJECT
from benchmarks.deduplicators import WAYS, one_thread
from benchmarks.harness import Run, begin, finish, new_parser, parse
from benchmarks.planted import PLANTED, write_corpus
from benchmarks.recall import (
    character_sets,
    is_found,
    lone_pairs,
    precision,
    recall_by_similarity,
    similar_pairs,
    word_sets,
)
from gpuclassify.workers.machine import other_core_seconds

QUESTION = "deduplication"
VERIFIED = f"{SUBJECT}, verified"
OURS = (SUBJECT, VERIFIED)
PEERS = ("datatrove", "text-dedup", "datasketch")
WARM_DOCUMENTS = 200
NEAR_SHARE = 0.45  # where recall is measured: as many pairs as there can be
SAMPLE_SECONDS = 0.1  # between two looks at memory
_ROOT = Path(__file__).parents[1]


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    ways, left_out = available_ways(options)
    result = begin(options, dtype="one core", ways=ways, left_out=left_out)
    result["versions"] |= {"numba": version("numba")} | peer_versions(options.peers)
    parts = {"corpora": measure_speed, "recall": measure_recall, "growth": measure_growth}
    for name in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            result[name] = parts[name](Path(folder), ways, options)
    return finish(QUESTION, result, options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(QUESTION, __doc__)
    add = parser.add_argument
    add("--documents", type=int, default=200_000, help="of the comparison (200000)")
    add("--ways", nargs="+", choices=tuple(WAYS), default=tuple(WAYS), metavar="WAY")
    add("--bands", nargs="+", default=["14x8", "20x13"], help="and rows of each (14x8 20x13)")
    add("--recall-documents", type=int, default=8_000, help="compared pair by pair (8000)")
    add("--growth", type=int, nargs="+", default=[50_000 << n for n in range(5)])
    add("--parts", nargs="+", default=["corpora", "recall", "growth"])
    add("--peers", default=".venv-peers/bin/python", help="their interpreter")
    parser.set_defaults(threads=1)
    small = {"documents": 300, "recall_documents": 300, "growth": [200, 300], "repeats": 1}
    return parse(parser, arguments, bands=["14x8"], **small)


def available_ways(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the ways that can run, and the reason for each that cannot."""
    reason = f"{options.peers} is missing: make bench-deduplication installs the peers"
    there = Path(_ROOT, options.peers).exists()
    ways = [way for way in options.ways if there or way in OURS]
    return ways, {way: reason for way in options.ways if way not in ways}


def peer_versions(python: str) -> dict[str, str]:
    """Return the versions of the peers that are installed in their own environment."""
    if not Path(_ROOT, python).exists():
        return {}
    code = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
    told = subprocess.check_output([python, "-c", code, *PEERS], cwd=_ROOT, text=True)
    return dict(zip(PEERS, told.split(), strict=True))


# One run.


@dataclass(frozen=True)
class Measurement:
    """Time, memory and groups of one run of a way.

    Attributes
    ----------
    seconds, cpu_seconds : float
        From the start of its process to its end; of all its processes.
    other_cores : float
        Kept busy by other programs meanwhile.
    peak_bytes : int
        The most resident memory of all its processes together, shared pages counted in each.
    groups : DataFrame
        id, group and keep of documents that have duplicates.
    """

    seconds: float
    cpu_seconds: float
    other_cores: float
    peak_bytes: int
    groups: pd.DataFrame


def run_way(way: str, documents: Path, bands: str, options: argparse.Namespace) -> Measurement:
    """Deduplicate in a new process.

    Raises
    ------
    RuntimeError
        The process failed; the message has its last words.
    """
    number, rows = map(int, bands.split("x"))
    with tempfile.TemporaryDirectory() as out, tempfile.TemporaryFile("w+") as words:
        request = {"way": way, "documents": str(documents), "out": out}
        request |= {"bands": number, "rows": rows}
        python = sys.executable if way in OURS else options.peers
        command = [python, "-m", "benchmarks.deduplicators", json.dumps(request)]
        others, used, started = other_core_seconds(), _child_seconds(), time.perf_counter()
        process = subprocess.Popen(
            command, cwd=_ROOT, env=os.environ | one_thread(), stdout=words, stderr=words
        )
        peak = _peak_bytes(process)
        seconds, cpu_seconds = time.perf_counter() - started, _child_seconds() - used
        others = other_core_seconds() - others
        if process.returncode:
            words.seek(0)
            last = words.read().strip()[-2_000:]
            raise RuntimeError(f"the process of {way!r} ended with {process.returncode}: {last}")
        groups = pd.read_parquet(Path(out, "groups.parquet"))
    return Measurement(seconds, cpu_seconds, others / seconds, peak, groups)


def _child_seconds() -> float:
    """Return the processor time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _peak_bytes(process: subprocess.Popen) -> int:
    """Wait for a process, and return the peak memory seen in it and its descendants together."""
    root, peak = psutil.Process(process.pid), 0
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):  # one of them has just ended
            tree = [root, *root.children(recursive=True)]
            peak = max(peak, sum(each.memory_info().rss for each in tree))
        time.sleep(SAMPLE_SECONDS)
    return peak


# Speed.


def measure_speed(folder: Path, ways: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Time all ways in turns on the same documents, for each number of bands."""
    documents = write_corpus(folder / "all", options.documents)
    warm_up = write_corpus(folder / "few", WARM_DOCUMENTS)
    planted = pd.read_parquet(documents.parent / PLANTED)
    found = {}
    for bands in options.bands:
        for way in ways:  # compiles, and fills the system's cache of files
            run_way(way, warm_up, bands, options)
        runs: dict[str, list[Measurement]] = {way: [] for way in ways}
        for _ in range(options.repeats):
            for way in ways:
                runs[way].append(run_way(way, documents, bands, options))
        found[bands] = compare(runs, options.documents, planted)
    return found


def compare(
    runs: dict[str, list[Measurement]], documents: int, planted: pd.DataFrame
) -> dict[str, Any]:
    """Return the findings of each way, and the speed-up of gpuclassify over it."""
    seconds = {way: [run.seconds for run in of_way] for way, of_way in runs.items()}
    others = {way: [run.other_cores for run in of_way] for way, of_way in runs.items()}
    times = Run(seconds, others, largest_difference=0.0)
    found: dict[str, Any] = {"documents": documents, "planted": len(planted)}
    found["variants"] = {
        way: times.times(way) | describe(of_way, documents) | recall_of_planted(of_way[0], planted)
        for way, of_way in runs.items()
    }
    if SUBJECT in runs:
        found["speed_up"] = {way: times.speed_up(SUBJECT, way) for way in runs if way != SUBJECT}
    if set(OURS) <= set(runs):
        plain, verified = map(times.median_seconds, OURS)
        found["verification_overhead"] = verified / plain - 1
    return found


def describe(runs: list[Measurement], documents: int) -> dict[str, Any]:
    """Return processor time, rate, peak memory, and the number of documents kept."""
    return {
        "cpu_seconds": [run.cpu_seconds for run in runs],
        "documents_per_second": documents / statistics.median(run.seconds for run in runs),
        "peak_resident_bytes": max(run.peak_bytes for run in runs),
        "kept": documents - int((~runs[0].groups["keep"]).sum()),
    }


def recall_of_planted(run: Measurement, planted: pd.DataFrame) -> dict[str, Any]:
    """Return the share of planted pairs found, by kind and share of edited words."""
    found = is_found(run.groups, planted).groupby([planted["kind"], planted["edit_share"]]).mean()
    return {
        "recall_of_planted": {f"{kind} {share:g}": part for (kind, share), part in found.items()}
    }


# Recall and precision.


def measure_recall(folder: Path, ways: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Measure recall and precision of gpuclassify against the similarity of all pairs."""
    documents = write_corpus(folder, options.recall_documents, near_share=NEAR_SHARE)
    texts = pd.concat(map(pd.read_parquet, sorted(documents.iterdir())))["text"]
    texts = texts[texts.fillna("") != ""]  # ids are places in it: blank texts come last
    sets = {"characters": character_sets(texts), "words": word_sets(texts)}
    pairs = similar_pairs(sets["characters"])
    lone = lone_pairs(pairs)
    found: dict[str, Any] = {"documents": len(texts), "pairs": len(pairs), "lone_pairs": len(lone)}
    for bands in options.bands:
        found[bands] = {}
        for way in filter(OURS.__contains__, ways):
            groups = run_way(way, documents, bands, options).groups
            by_similarity = recall_by_similarity(groups, lone, *map(int, bands.split("x")))
            found[bands][way] = {"recall": by_similarity, "precision": precision(groups, sets)}
    return found


# Growth.


def measure_growth(folder: Path, ways: list[str], options: argparse.Namespace) -> list[Any]:
    """Measure time and memory of gpuclassify for each number of documents."""
    found = []
    for documents in options.growth:
        path = write_corpus(folder / str(documents), documents)
        runs = {way: run_way(way, path, options.bands[0], options) for way in ways if way in OURS}
        found.append(
            {
                "documents": documents,
                "variants": {way: growth_of(run, documents) for way, run in runs.items()},
            }
        )
    return found


def growth_of(run: Measurement, documents: int) -> dict[str, Any]:
    """Return time and memory of one run, and its seconds for each thousand documents."""
    return {
        "seconds": run.seconds,
        "cpu_seconds": run.cpu_seconds,
        "other_cores": run.other_cores,
        "seconds_per_thousand": run.seconds / documents * 1_000,
        "peak_resident_bytes": run.peak_bytes,
    }


# The table.


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    lines = [
        line
        for name, of_part in (
            ("corpora", _speed_lines),
            ("recall", _recall_lines),
            ("growth", _growth_lines),
        )
        if name in result
        for line in of_part(result[name])
    ]
    left_out = result["settings"]["left_out"]
    return "\n".join([*lines, *(f"{way} is left out: {why}" for way, why in left_out.items())])


def _speed_lines(corpora: dict[str, Any]) -> list[str]:
    lines = []
    for bands, corpus in corpora.items():
        lines.append(f"{bands} bands and rows, {corpus['documents']} documents")
        lines.append(
            f"{'median s':>38}{'cpu s':>9}{'docs/s':>9}{'peak MB':>9}{'kept':>9}{'ratio':>8}"
        )
        for way, found in corpus["variants"].items():
            ratio = corpus.get("speed_up", {}).get(way, {}).get("ratio_of_medians")
            lines.append(
                f"  {way:26}{found['median_seconds']:10.1f}"
                f"{statistics.median(found['cpu_seconds']):9.1f}{found['documents_per_second']:9.0f}"
                f"{found['peak_resident_bytes'] / 1e6:9.0f}{found['kept']:9}"
                + (f"{ratio:7.2f}x" if ratio else "")
            )
        if "verification_overhead" in corpus:
            lines.append(f"  verification takes {corpus['verification_overhead']:+.0%}")
    return lines


def _recall_lines(recall: dict[str, Any]) -> list[str]:
    lines = [f"{recall['documents']} documents, {recall['lone_pairs']} lone pairs"]
    for bands, ways in recall.items():
        if not isinstance(ways, dict):
            continue
        for way, found in ways.items():
            bins = "; ".join(
                f"{part['from']:.2f}: {part['found']:.2f} ({part['expected']:.2f})"
                for part in found["recall"]
            )
            lines.append(f"  {bands} {way}, found (expected) by similarity: {bins}")
            removed = found["precision"]
            lines += [
                f"    of {removed['removed']} removed so many are alike to the one kept by {name}: "
                + ", ".join(f"{least}: {share:.1%}" for least, share in removed[name].items())
                for name in ("characters", "words")
            ]
    return lines


def _growth_lines(growth: list[dict[str, Any]]) -> list[str]:
    return [
        f"{step['documents']:>9} documents: "
        + "; ".join(
            f"{way} {found['seconds_per_thousand']:.2f} s a thousand, "
            f"{found['peak_resident_bytes'] / 1e6:.0f} MB"
            for way, found in step["variants"].items()
        )
        for step in growth
    ]


if __name__ == "__main__":
    main()
