"""What do labels beside the text save, and what does a selection of some rows cost?

``python -m benchmarks.annotations --help`` lists the options; README.md says what is measured.
"""

import argparse
import functools
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.harness import Variant, begin, finish, new_parser, parse, run_interleaved
from gpuclassify import AnnotationWriter, ParquetReader, ParquetWriter, Pipeline, Select

QUESTION = "annotations"
LABELS = 4  # classifiers, each of which writes a score and a label
ROWS_OF_A_GROUP = 2_000
WORD_BYTES, WORDS = 8, 200  # of a document
SELECTIONS = {
    "1% clustered": "place < 0.01",
    "1% spread": "score_0 < 0.01",
    "50%": "score_0 < 0.5",
}
SETS_ZIPPED = 8
QUIET = {"report": lambda *_: None}


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    head = begin(options)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_texts(root / "crawl", options.megabytes, options.files)
        result = head | {
            "writing": measure_writing(root),
            "selections": measure_selections(root, options.repeats),
            "growth": [in_process(measure_growth, root, files) for files in options.growth],
            "zip": measure_zip(root, options.rows, options.repeats),
        }
    return finish(QUESTION, result, options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--megabytes", type=int, default=1_000, help="of text (1000)")
    parser.add_argument("--files", type=int, default=16, help="that hold it (16)")
    parser.add_argument("--growth", type=int, nargs="+", default=[100, 50_000], help="tiny files")
    parser.add_argument("--rows", type=int, default=10_000_000, help="of a zip (10,000,000)")
    smoke = {"megabytes": 2, "files": 2, "growth": [3, 6], "rows": 5_000}
    return parse(parser, arguments, **smoke)


def write_texts(folder: Path, megabytes: int, files: int) -> None:
    """Write documents of random words, which compress about as text does."""
    folder.mkdir()
    random = np.random.default_rng(0)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
    words = [bytes(random.choice(letters, WORD_BYTES - 1)).decode() for _ in range(20_000)]
    rows = megabytes * 1_000_000 // (WORDS * WORD_BYTES) // files
    for number in range(files):
        drawn = random.zipf(1.3, (rows, WORDS)) % len(words)
        texts = [" ".join(words[word] for word in row) for row in drawn]
        ids = np.arange(rows) + number * rows
        table = pa.table({"id": ids, "place": ids / (rows * files), "text": texts})
        path = folder / f"{number:05}.parquet"
        pq.write_table(table, path, compression="zstd", row_group_size=ROWS_OF_A_GROUP)


def label(number: int, frame: pd.DataFrame) -> pd.DataFrame:
    """Add a score and a label that follow from the id: what is left is reading and writing."""
    scores = ((frame["id"].to_numpy() * 2_654_435_761 + number) % 2**32 / 2**32).astype(np.float32)
    labels = pd.Series(np.where(scores < 0.5, "Low", "High"), dtype="str")
    return frame.assign(**{f"score_{number}": scores, f"label_{number}": labels.array})


def labelled(number: int) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Return the stage of one classifier."""

    def stage(frame: pd.DataFrame) -> pd.DataFrame:
        return label(number, frame)

    return stage


def size_of(*folders: Path) -> int:
    """Return the bytes of all files below folders."""
    return sum(p.stat().st_size for folder in folders for p in folder.rglob("*") if p.is_file())


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure_writing(root: Path) -> dict[str, Any]:
    """Label by four stages: as rewrites, and as annotations with one selection of half."""
    source, rewrites = root / "crawl", []

    def rewrite() -> None:
        for number in range(LABELS):
            read = ParquetReader(str(rewrites[-1] if rewrites else source))
            rewrites.append(root / f"rewrite-{number}")
            Pipeline([read, labelled(number), ParquetWriter(str(rewrites[-1]))]).run(**QUIET)

    def annotate() -> None:
        for number in range(LABELS):
            # Of all columns the id alone: a classifier reads the text alone.
            read = ParquetReader(str(source), fields=["id", "text"])
            writer = AnnotationWriter(str(root / f"notes/{number}"))
            Pipeline([read, labelled(number), writer]).run(**QUIET)

    seconds = {"rewrites": timed(rewrite), "annotations": timed(annotate)}
    seconds["selection"] = timed(functools.partial(select, root, SELECTIONS["50%"]))
    written = {"rewrites": size_of(*rewrites), "annotations": size_of(root / "notes")}
    written |= {"selection": size_of(root / "chosen"), "crawl": size_of(source)}
    for folder in rewrites:
        shutil.rmtree(folder)
    return {"seconds": seconds, "bytes": written}


def select(root: Path, where: str) -> None:
    """Write the rows of a condition, with all columns."""
    shutil.rmtree(root / "chosen", ignore_errors=True)
    sets = [str(root / f"notes/{number}") for number in range(LABELS)]
    reader = ParquetReader(str(root / "crawl"), annotations=sets)
    Pipeline([reader, Select(where), ParquetWriter(str(root / "chosen"))]).run(**QUIET)


def select_by_script(root: Path, where: str) -> None:
    """Write the same rows by pyarrow alone, a file after the other."""
    shutil.rmtree(root / "chosen", ignore_errors=True)
    (root / "chosen").mkdir()
    name, _, value = where.partition(" < ")
    notes = [pq.read_table(root / f"notes/{number}") for number in range(LABELS)]
    for path in sorted((root / "crawl").iterdir()):
        table = pq.read_table(path)
        for each in notes:
            mine = each.filter(pc.equal(each["_file"], str(path))).sort_by("_place")
            for column in mine.column_names[3:]:
                table = table.append_column(column, mine[column])
        chosen = table.filter(pc.less(table[name], float(value)))
        pq.write_table(chosen, root / "chosen" / path.name, compression="zstd")


def measure_selections(root: Path, repeats: int) -> dict[str, Any]:
    """Time selections, and a plain script that makes the same."""
    found = {}
    for name, where in SELECTIONS.items():
        seconds: dict[str, list[float]] = {"select": [], "pyarrow": []}
        for _ in range(repeats):
            for way, call in (("select", select), ("pyarrow", select_by_script)):
                seconds[way].append(timed(functools.partial(call, root, where)))
                paths = (root / "chosen").glob("*.parquet")
                rows = sum(pq.read_metadata(path).num_rows for path in paths)
                assert found.setdefault(name, {"rows": rows})["rows"] == rows
        found[name]["seconds"] = seconds
    return found


def in_process(function: Any, *arguments: Any) -> Any:
    """Call a function in a new process, which nothing else has run in, and return its result."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def measure_growth(root: Path, files: int) -> dict[str, Any]:
    """Measure the memory of a client that plans a frame of many tiny files and their set."""
    home = root / f"files-{files}"
    home.mkdir()
    row = pa.table({"id": [1], "place": [0.0], "text": ["text"]})
    pq.write_table(row, home / "0.parquet")
    content = (home / "0.parquet").read_bytes()
    for number in range(1, files):
        (home / f"{number}.parquet").write_bytes(content)
    reader = ParquetReader(str(home), files_per_partition=250)
    writer = AnnotationWriter(str(root / "notes-of-tiny"))
    Pipeline([reader, labelled(0), writer]).run(**QUIET)
    found = in_process(planned, str(home), str(root / "notes-of-tiny"))
    shutil.rmtree(home)
    shutil.rmtree(root / "notes-of-tiny")
    return {"files": files, **found}


def planned(folder: str, notes: str) -> dict[str, Any]:
    """Plan with and without a set; return seconds, and how much more memory the set took."""
    options: dict[str, Any] = {"files_per_partition": 250}
    seconds = {"input": timed(ParquetReader(folder, **options).find_parts)}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reader = ParquetReader(folder, annotations=notes, **options)
    seconds["with a set"] = timed(reader.find_parts)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "input_bytes": before * 1024, "more_bytes": (after - before) * 1024}


def measure_zip(root: Path, rows: int, repeats: int) -> dict[str, Any]:
    """Time a frame of the columns of 8 sets, and reading the same columns one set after another."""
    from gpuclassify import read_files

    home = root / "zip"
    home.mkdir()
    for number in range(4):
        ids = np.arange(rows // 4) + number * (rows // 4)
        pq.write_table(pa.table({"id": ids}), home / f"{number}.parquet")
    sets = [str(root / f"zipped/{number}") for number in range(SETS_ZIPPED)]
    for number, path in enumerate(sets):
        stages = [ParquetReader(str(home)), labelled(number), AnnotationWriter(path)]
        Pipeline(stages).run(**QUIET)
    columns = [f"score_{number}" for number in range(SETS_ZIPPED)]

    def together() -> np.ndarray:
        frame = read_files(str(home), annotations=sets)[columns]
        return frame.compute(scheduler="sync")[columns[-1]].to_numpy()

    def apart() -> np.ndarray:
        pairs = zip(sets, columns, strict=True)
        frames = [read_files(str(home), annotations=path)[[name]] for path, name in pairs]
        return [each.compute(scheduler="sync") for each in frames][-1][columns[-1]].to_numpy()

    variants = [Variant("apart", apart, apart), Variant("together", together, together)]
    run = run_interleaved(variants, repeats, 0.0)
    return {
        "rows": rows,
        "sets": SETS_ZIPPED,
        "variants": {name: run.times(name) for name in ("apart", "together")},
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    written, seconds = result["writing"]["bytes"], result["writing"]["seconds"]
    lines = [
        f"{way:12}{written[way] / 1e6:10.1f} MB written in {seconds[way]:8.1f} s"
        for way in ("rewrites", "annotations", "selection")
    ]
    for name, found in result["selections"].items():
        best = {way: min(values) for way, values in found["seconds"].items()}
        lines.append(
            f"{name:14}{found['rows']:9,} rows: {best['select']:.2f} s, by pyarrow "
            f"{best['pyarrow']:.2f} s"
        )
    for found in result["growth"]:
        lines.append(
            f"{found['files']:7,} files: {found['seconds']['with a set']:.2f} s to plan, "
            f"{found['more_bytes'] / 2**20:.1f} MiB for the set"
        )
    zipped = result["zip"]
    times = {name: of["median_seconds"] for name, of in zipped["variants"].items()}
    lines.append(
        f"{zipped['rows']:,} rows of {zipped['sets']} sets: {times['together']:.2f} s together, "
        f"{times['apart']:.2f} s apart"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
