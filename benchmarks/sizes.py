"""How many files do jobs on a small input write, and what do later commands pay for them?

``python -m benchmarks.sizes --help`` lists the options; README.md says what is measured.
"""

import argparse
import functools
import gzip
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import begin, finish, new_parser, parse
from gpuclassify import (
    AnnotationWriter,
    FileReader,
    ParquetWriter,
    PatternSpans,
    Pipeline,
    Select,
    get_client,
    read_files,
)

QUESTION = "sizes"
WORDS, WORD_BYTES = 450, 7  # of a document
BROKEN_LINES = 3  # of a file
QUIET = {"report": lambda *_: None}


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    head = begin(options)
    with tempfile.TemporaryDirectory() as folder, get_client(n_workers=2) as client:
        root = Path(folder)
        write_crawl(root / "crawl", options.documents, options.files)
        stored = sum(path.stat().st_size for path in (root / "crawl").iterdir())
        rounds = [measure(root, client) for _ in range(options.repeats)]
    commands = {
        name: {
            "seconds": [steps[name]["seconds"] for steps in rounds],
            **{key: value for key, value in rounds[0][name].items() if key != "seconds"},
        }
        for name in rounds[0]
    }
    return finish(QUESTION, head | {"stored_bytes": stored, "commands": commands}, options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=14_640, help="of the crawl (14,640)")
    parser.add_argument("--files", type=int, default=28, help="that hold it (28)")
    return parse(parser, arguments, documents=60, files=3)


def write_crawl(folder: Path, documents: int, files: int) -> None:
    """Write compressed lines of random words with addresses, some of them broken."""
    folder.mkdir()
    random = np.random.default_rng(0)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
    words = [bytes(random.choice(letters, WORD_BYTES - 1)).decode() for _ in range(20_000)]
    for number, ids in enumerate(np.array_split(np.arange(documents), files)):
        lines = []
        for row in ids:
            drawn = random.zipf(1.3, WORDS) % len(words)
            text = f"{' '.join(words[word] for word in drawn)} reader{row}@example.org"
            lines.append(json.dumps({"id": int(row), "text": text}))
        lines += ['{"id": 5, "text": "hal'] * BROKEN_LINES
        (folder / f"{number:03}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))


def with_length(frame: Any) -> Any:
    """Add a column, as a callable that might as well run a model."""
    return frame.assign(length=frame["text"].str.len())


def measure(root: Path, client: Any) -> dict[str, Any]:
    """Time jobs one after another, and count the parts and files of each."""
    crawl, steps = str(root / "crawl"), {}
    for name in ("patterns", "lengths", "chosen"):
        shutil.rmtree(root / name, ignore_errors=True)

    def annotate(name: str, stage: Any) -> Any:
        job = Pipeline(
            [FileReader(crawl), stage, AnnotationWriter(f"{root}/{name}")], on_error="quarantine"
        )
        return functools.partial(job.run, client, **QUIET)

    sets = [f"{root}/patterns", f"{root}/lengths"]
    reader = FileReader(crawl, annotations=sets)
    stages = [reader, Select("length > 3000"), ParquetWriter(f"{root}/chosen")]
    select = Pipeline(stages, on_error="quarantine")
    jobs: dict[str, tuple[str, Callable[[], Any]]] = {
        "annotate: spans by pattern": ("patterns", annotate("patterns", PatternSpans())),
        "annotate: a callable": ("lengths", annotate("lengths", with_length)),
        "annotate: a callable, again": ("lengths", annotate("lengths", with_length)),
        "select by both": ("chosen", functools.partial(select.run, client, **QUIET)),
        "select by both, again": ("chosen", functools.partial(select.run, client, **QUIET)),
    }
    for name, (folder, run) in jobs.items():
        started = time.perf_counter()
        summary = run()
        seconds = time.perf_counter() - started
        files = [path for path in (root / folder).rglob("*") if path.is_file()]
        steps[name] = {
            "seconds": seconds,
            "parts": summary.parts,
            "data_files": len(summary.files),
            "files": len(files),
        }
    started = time.perf_counter()
    frame = read_files(f"{root}/chosen")
    rows = len(frame)
    steps["read the selection"] = {
        "seconds": time.perf_counter() - started,
        "parts": frame.npartitions,
        "rows": rows,
    }
    return steps


def table(result: dict[str, Any]) -> str:
    """Return the measured times and counts as text."""
    lines = [f"{result['stored_bytes'] / 1e6:.1f} MB of compressed lines"]
    for name, step in result["commands"].items():
        counts = ", ".join(f"{v:,} {k}" for k, v in step.items() if k != "seconds")
        seconds = statistics.median(step["seconds"])
        lines.append(f"{name:28} {seconds:7.2f} s   {counts.replace('_', ' ')}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
