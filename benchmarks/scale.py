"""Does a job over ten million short documents stay as fast, and as small, as over one million?

``python -m benchmarks.scale --help`` lists the options; README.md says what is measured.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.fasttext import (
    by_library,
    held_bytes,
    host_core_seconds,
    host_processes,
    real_model,
)
from benchmarks.harness import begin, finish, new_parser, parse
from benchmarks.inputs import docstrings
from gpuclassify import LanguageIdentifier, ParquetReader, ParquetWriter, Pipeline, get_client
from gpuclassify.jobs.report.summary import JobSummary
from gpuclassify.workers.machine import other_core_seconds

QUESTION = "scale"
PHRASES, PHRASE_WORDS, WORD_CHARS = 20_000, 9, 24
LEVEL_PARTS = 0.1  # of the parts, at the beginning and at the end, whose memory is compared
YARDSTICK_ROWS = 1_000


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    head = begin(options, dtype="float32", model=real_model().name)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        corpus = write_corpus(Path(folder, "in"), options.rows, options.part_rows)
        result = head | corpus | run_job(Path(folder), options)
    return finish(QUESTION, result, options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--rows", type=int, default=10_000_000, help="documents (10 million)")
    parser.add_argument("--part-rows", type=int, default=50_000, help="of a file (50,000)")
    parser.add_argument("--step-rows", type=int, default=1_000_000, help="that are timed together")
    parser.add_argument("--workers", type=int, default=2, help="processes (2)")
    parser.add_argument("--folder", type=Path, help="for 4 GB of files (the system's)")
    return parse(parser, arguments, rows=6_000, part_rows=500, step_rows=1_000)


def write_corpus(folder: Path, rows: int, part_rows: int) -> dict[str, Any]:
    """Write Parquet files of documents, all different: two phrases and a number."""
    folder.mkdir()
    started, text_bytes = time.perf_counter(), 0
    words = [word for word in " ".join(docstrings()).split() if len(word) <= WORD_CHARS]
    starts = np.random.default_rng(0).integers(len(words) - PHRASE_WORDS, size=PHRASES)
    phrases = pa.array([" ".join(words[start : start + PHRASE_WORDS]) for start in starts])
    for number, first in enumerate(range(0, rows, part_rows)):
        count = min(part_rows, rows - first)
        chosen = np.random.default_rng(number).integers(PHRASES, size=(2, count))
        ids = pa.array(np.arange(first, first + count))
        parts = [*(phrases.take(pa.array(own)) for own in chosen), ids.cast(pa.string())]
        texts = pc.binary_join_element_wise(*parts, " ")
        text_bytes += pc.sum(pc.binary_length(texts)).as_py()
        pq.write_table(pa.table({"id": ids, "text": texts}), folder / f"{number:05}.parquet")
    seconds = time.perf_counter() - started
    return {"rows": rows, "mean_text_bytes": text_bytes / rows, "generate_seconds": seconds}


def run_job(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Identify the language of every document, and look at time and memory after each part."""
    classifier = LanguageIdentifier(model=real_model())
    source, target = (
        ParquetReader(f"{folder}/in", part_bytes=1 << 30, files_per_partition=1),
        ParquetWriter(f"{folder}/out"),
    )
    machine_seconds = yardstick(Path(folder, "in"))
    with workers(options.workers) as (client, processes):
        client.run(classifier.setup)
        samples: list[dict[str, Any]] = []
        hosts, others = host_core_seconds(), other_core_seconds()
        started = time.perf_counter()

        def look(done: int, _total: int, summary: JobSummary) -> None:
            if not done:
                return
            samples.append(
                {
                    "rows": min(done * options.part_rows, options.rows),
                    "seconds": summary.elapsed_seconds,  # since the first part was handed out
                    "yardstick_seconds": machine_seconds(),
                    "client_bytes": psutil.Process().memory_info().rss,
                    "workers_bytes": [one.memory_info().rss for one in processes],
                    "model_bytes": sum(map(held_bytes, host_processes())),
                }
            )

        summary = Pipeline([source, classifier, target]).prepare().run(client, look)
        seconds = time.perf_counter() - started
        others = other_core_seconds() - others - (host_core_seconds() - hosts)
    assert (summary.rows_read, summary.rows_written) == (options.rows, options.rows)
    return {
        "seconds": seconds,
        "rows_per_second": options.rows / seconds,
        "other_cores": max(0.0, others / seconds),
        "pace": find_pace(samples, options.step_rows),
        "memory_growth": memory_growth(samples),
        "samples": samples,
    }


@contextlib.contextmanager
def workers(count: int) -> Iterator[tuple[Any, list[psutil.Process]]]:
    """Yield a client of so many workers, and their processes."""
    with get_client("cpu", n_workers=count) as client:
        yield client, [psutil.Process(pid) for pid in client.run(os.getpid).values()]


def yardstick(corpus: Path) -> Callable[[], float]:
    """Return a function that measures the machine's own speed: core seconds of a fixed small task.

    It is the library alone, over the first documents, in this process: a core that its host lends
    to others, or clocks down, is as slow for it as for the job.
    """
    import fasttext

    model = fasttext.load_model(str(real_model()))
    frame = pd.read_parquet(min(corpus.iterdir())).head(YARDSTICK_ROWS)

    def measure() -> float:
        started = time.thread_time()
        by_library(model, frame)
        return time.thread_time() - started

    return measure


def find_pace(samples: Sequence[dict[str, Any]], step_rows: int) -> dict[str, Any]:
    """Return seconds for each `step_rows` rows, as they are and in yardsticks of that time."""
    rows = [0, *(sample["rows"] for sample in samples)]
    clock = [0.0, *(sample["seconds"] for sample in samples)]
    ends = np.arange(0, rows[-1] + 1, step_rows)
    seconds = np.diff(np.interp(ends, rows, clock))
    step = np.ceil(np.array(rows[1:]) / step_rows)
    measured = np.array([sample["yardstick_seconds"] for sample in samples])
    # Medians, because now and then one of the readings is several times the others.
    machine = np.array([np.median(measured[step == n + 1]) for n in range(len(seconds))])
    return {
        "rows": step_rows,
        "seconds": seconds.tolist(),
        "yardstick_seconds": machine.tolist(),
        "largest_deviation": _deviation(seconds),
        "largest_deviation_in_yardsticks": _deviation(seconds / machine),
    }


def _deviation(values: np.ndarray) -> float:
    return float(np.abs(values / np.median(values) - 1).max())


def memory_growth(samples: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the growth of memory in bytes, from medians near the two ends of the job."""
    count = max(1, round(LEVEL_PARTS * len(samples)))
    early, late = samples[count : 2 * count], samples[-count:]
    levels = {
        "client": lambda sample: sample["client_bytes"],
        "workers": lambda sample: sum(sample["workers_bytes"]),
        "model": lambda sample: sample["model_bytes"],
    }
    return {
        name: statistics.median(map(of, late)) - statistics.median(map(of, early))
        for name, of in levels.items()
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    pace, last = result["pace"], result["samples"][-1]
    growth = result["memory_growth"]
    held = {
        "client": last["client_bytes"],
        "workers": sum(last["workers_bytes"]),
        "model": last["model_bytes"],
    }
    lines = [
        f"{result['rows']:,} documents of {result['mean_text_bytes']:.0f} bytes: "
        f"{result['seconds']:.1f} s, {result['rows_per_second']:,.0f} rows/s",
        f"  {pace['rows']:,} rows take {min(pace['seconds']):.2f} to {max(pace['seconds']):.2f} s, "
        f"{pace['largest_deviation']:.1%} from the median at most; "
        f"{pace['largest_deviation_in_yardsticks']:.1%} in yardsticks",
    ]
    for name, size in held.items():
        lines.append(f"  {name:8}{size / 2**20:8.0f} MiB, grown by {growth[name] / 2**20:.1f} MiB")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
