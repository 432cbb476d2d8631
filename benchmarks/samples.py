"""How long does a sample of strata take over many annotated rows, and how much memory?

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
from gpuclassify import AnnotationWriter, ParquetReader, Pipeline, sample

QUESTION = "samples"
FILES, ROWS_OF_A_GROUP, DRAWN = 40, 50_000, 200
WAYS: dict[str, dict[str, Any]] = {
    "14 strata": {"by": ["label", "source"]},
    "2 strata, near a score": {"by": "label", "near": "score", "score": 0.9},
}


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
    return finish(QUESTION, head | {"ways": ways}, options, table)


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
    """Add a score, a label and a source that follow from the id."""
    ids = frame["id"].to_numpy(dtype=np.int64)
    scores = (ids * 2_654_435_761 % 2**32 / 2**32).astype(np.float32)
    labels = pd.Series(np.where(scores < 0.9, "Low", "High"), dtype="str")
    return frame.assign(score=scores, label=labels.array, source=ids % 7)


def draw(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Draw a sample in this process, whose threads read: seconds, and most memory of all of it."""
    reader = ParquetReader(f"{folder}/crawl", annotations=f"{folder}/notes")
    frames: list[pd.DataFrame] = []
    seconds = timed(lambda: frames.append(sample(reader, DRAWN, **settings)))
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"rows": len(frames[0]), "seconds": seconds, "peak_bytes": peak_bytes}


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    return "\n".join(
        f"{name:24} {runs[0]['rows']:6,} rows in {np.median([r['seconds'] for r in runs]):6.1f} s, "
        f"{max(r['peak_bytes'] for r in runs) / 2**20:5.0f} MiB"
        for name, runs in result["ways"].items()
    )


if __name__ == "__main__":
    main()
