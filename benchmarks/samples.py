"""How long do a sample of strata and a mixture take of many annotated rows, and how much memory?

``python -m benchmarks.samples --help`` lists the options; README.md says what is measured.
"""

import resource
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.annotations import QUIET, in_process, timed
from benchmarks.harness import begin, finish, new_parser, parse
from gpuclassify import (
    AnnotationWriter,
    Mix,
    ParquetReader,
    Pipeline,
    read_files,
    sample,
)

QUESTION = "samples"
FILES, ROWS_OF_A_GROUP, DRAWN = 40, 50_000, 200
WAYS: dict[str, dict[str, Any]] = {
    "14 strata": {"by": ["label", "source"]},
    "2 strata, near a score": {"by": "label", "near": "score", "score": 0.9},
}
MIX: dict[str, Any] = {
    "by": ["label", "source"],
    "weights": [{"label": "High", "weight": 1}, {"label": "Low", "weight": 3}],
}
TOKENS = 750  # of the mixture for each row, which has 500 on average


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--rows", type=int, default=10_000_000, help="annotated (10,000,000)")
    options = parse(parser, arguments, rows=8_000)
    head = begin(options)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), options.rows)
        ways = {
            name: [in_process(draw, folder, settings) for _ in range(options.repeats)]
            for name, settings in WAYS.items()
        }
        mixes = [in_process(mix, folder, options.rows * TOKENS) for _ in range(options.repeats)]
    return finish(QUESTION, head | {"ways": ways, "mixes": mixes}, options, table)


def write(root: Path, rows: int) -> None:
    """Write files of short texts, and annotations of them."""
    (root / "crawl").mkdir()
    for number, ids in enumerate(np.array_split(np.arange(rows), FILES)):
        texts = pa.table({"id": ids, "text": ["text"] * len(ids)})
        path = root / f"crawl/{number:03}.parquet"
        pq.write_table(texts, path, row_group_size=ROWS_OF_A_GROUP)
    writer = AnnotationWriter(str(root / "notes"))
    Pipeline([ParquetReader(str(root / "crawl")), labelled, writer]).run(**QUIET)


def labelled(frame: pd.DataFrame) -> pd.DataFrame:
    """Add a score, a label, a source and tokens that follow from the id."""
    ids = frame["id"].to_numpy(dtype=np.int64)
    scores = (ids * 2_654_435_761 % 2**32 / 2**32).astype(np.float32)
    labels = pd.Series(np.where(scores < 0.9, "Low", "High"), dtype="str")
    return frame.assign(score=scores, label=labels.array, source=ids % 7, tokens=ids % 1000 + 1)


def draw(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Draw a sample in this process, whose threads read: seconds, and most memory of all of it."""
    reader = ParquetReader(f"{folder}/crawl", annotations=f"{folder}/notes")
    frames: list[pd.DataFrame] = []
    seconds = timed(lambda: frames.append(sample(reader, DRAWN, **settings)))
    return {"rows": len(frames[0]), "seconds": seconds, "peak_bytes": peak_bytes()}


def mix(folder: str, tokens: int) -> dict[str, Any]:
    """Plan a mixture in this process."""
    paths, notes = f"{folder}/crawl", f"{folder}/notes"
    found: list[Mix] = []

    def plan() -> None:
        found.append(Mix.plan(read_files(paths, annotations=notes), tokens=tokens, **MIX))

    seconds = {"plan": timed(plan)}
    cells = found[0].cells.values()
    rows = sum(each.rows for each in cells)
    return {"rows": rows, "cells": len(cells), "seconds": seconds, "peak_bytes": peak_bytes()}


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    shown = {
        name: (runs, [run["seconds"] for run in runs]) for name, runs in result["ways"].items()
    }
    mixes = result["mixes"]
    shown["plan of a mixture"] = mixes, [run["seconds"]["plan"] for run in mixes]
    return "\n".join(
        f"{name:24} {runs[0]['rows']:10,} rows in {np.median(seconds):6.1f} s, "
        f"{max(run['peak_bytes'] for run in runs) / 2**20:5.0f} MiB"
        for name, (runs, seconds) in shown.items()
    )


if __name__ == "__main__":
    main()
