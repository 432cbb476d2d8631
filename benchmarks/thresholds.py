"""How long do thresholds of ten million labelled rows take, and how much memory has the client?

``python -m benchmarks.thresholds`` measures; README.md says what.
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import begin, finish, new_parser, parse
from gpuclassify import Thresholds, read_files
from gpuclassify.workers.machine import other_core_seconds

QUESTION = "thresholds"
FILES = 20
LANGUAGES = ["de", "en", "es", "fr", "it"]


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=10_000_000, help="in all (10,000,000)")
    options = parse(parser, arguments, documents=20_000)
    head = begin(options, files=FILES, precision=0.8)
    with tempfile.TemporaryDirectory() as folder:
        return finish(QUESTION, head | measure(Path(folder), options), options, table)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Time one group and five, of scores as probable as they say, on one thread."""
    rng = np.random.default_rng(0)
    for number in range(FILES):
        scores = rng.uniform(size=options.documents // FILES).astype(np.float32)
        columns = {"score": scores, "language": rng.choice(LANGUAGES, len(scores))}
        labels = rng.uniform(size=len(scores)) < scores
        pq.write_table(pa.table({**columns, "good": labels}), folder / f"{number}.parquet")
    before, variants = _peak_bytes(), {}
    for name, by in (("one group", None), ("five groups", "language")):
        seconds, others, found = [], [], None
        for _ in range(options.repeats):
            other, started = other_core_seconds(), time.perf_counter()
            with dask.config.set(scheduler="synchronous"):
                found = Thresholds.fit(
                    read_files(str(folder)), score="score", label="good", by=by, precision=0.8
                )
            seconds.append(time.perf_counter() - started)
            others.append((other_core_seconds() - other) / seconds[-1])
        assert found is not None
        variants[name] = {
            "seconds": seconds,
            "other_cores": others,
            "median_seconds": float(np.median(seconds)),
            "thresholds": {group: each.threshold for group, each in found.groups.items()},
        }
    return {
        "rows": options.documents,
        "peak_bytes_before": before,
        "peak_bytes": _peak_bytes(),
        "variants": variants,
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    peaks = (result[name] / 1e6 for name in ("peak_bytes", "peak_bytes_before"))
    lines = ["{:,} rows; most memory {:.0f} MB, {:.0f} MB before".format(result["rows"], *peaks)]
    for name, found in result["variants"].items():
        lines.append(f"  {name:12}{found['median_seconds']:8.1f} s")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
