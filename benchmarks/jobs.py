"""What does a whole job cost beside its model, and what do small first parts and many parts cost?

``python -m benchmarks.jobs --help`` lists the options; README.md says what is measured.
"""

import argparse
import contextlib
import functools
import gc
import json
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
from transformers import PreTrainedTokenizerFast

from benchmarks.harness import (
    Run,
    Variant,
    begin,
    finish,
    new_parser,
    parse,
    run_interleaved,
)
from benchmarks.inputs import LENGTHS, SHAPES, TINY_SIZES, texts_of_lengths, write_model
from benchmarks.recipes import classifier_of
from gpuclassify import DistributedDataClassifier, JsonlReader, ParquetWriter, Pipeline, get_client

QUESTION = "jobs"
FRAME, JOB = "frame", "job"
EARLY, USUAL = "small first parts", "equal parts"
SECURITY = {"TLS": True, "plain": False}
SCORES = "probabilities"
TOLERANCE = 1e-4  # of a probability
ROWS_OF_A_TINY_PART = 3
PROCESSES = multiprocessing.get_context("forkserver")


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    shape = replace(SHAPES["bert"], layers=options.layers)
    if options.smoke:
        shape = replace(shape, **TINY_SIZES)
    head = begin(options, shape=asdict(shape), dtype="float32", weights="random")
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_model(Path(folder, "model"), shape))
        result = head | {
            "overhead": measure_overhead(model, Path(folder, "overhead"), options),
            "encryption": measure_encryption(model, Path(folder, "overhead"), options),
            "early": measure_early_parts(model, Path(folder, "early"), options),
            "growth": [in_process(measure_growth, folder, parts) for parts in options.parts],
        }
    return finish(QUESTION, result, options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=400, help="web documents (400)")
    parser.add_argument("--files", type=int, default=4, help="that hold them (4)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (2)")
    parser.add_argument(
        "--early-documents", type=int, default=4_000, help="of jobs with small first parts (4000)"
    )
    parser.add_argument(
        "--parts", type=int, nargs="+", default=[100, 1_000, 10_000], help="of tiny jobs"
    )
    return parse(parser, arguments, parts=[4, 8], early_documents=60)


# Overhead.


def measure_overhead(model: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Time a job from files to files, and its classifier on frames in memory."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    texts = texts_of_lengths(LENGTHS["web"].sample(options.documents), tokenizer, 0)
    write_files(folder / "in", np.array_split(np.arange(len(texts)), options.files), texts)
    classifier = classifier_of(model, options.device, autocast=False)
    frames = [pd.read_json(path, lines=True) for path in sorted((folder / "in").iterdir())]
    run = run_interleaved(
        [
            Variant(
                name, functools.partial(way, *inputs), functools.partial(classifier, frames[0][:2])
            )
            for name, way, *inputs in (
                (FRAME, classify_frames, frames, classifier),
                (JOB, run_whole_job, folder, classifier),
            )
        ],
        options.repeats,
        TOLERANCE,
    )
    report = json.loads((folder / "out/_report/report.json").read_text())
    return {
        "documents": len(texts),
        "files": options.files,
        "largest_difference": run.largest_difference,
        "variants": {name: run.times(name) for name in (FRAME, JOB)},
        "overhead": _overhead(run),
        "overhead_by_round": [
            job / frame - 1 for job, frame in zip(run.seconds[JOB], run.seconds[FRAME], strict=True)
        ],
        "worker_seconds": report["worker_seconds"],
    }


def _overhead(run: Run) -> float:
    return run.median_seconds(JOB) / run.median_seconds(FRAME) - 1


def write_files(folder: Path, groups: Sequence[np.ndarray], texts: Sequence[str]) -> None:
    """Write a file of JSON lines with the texts of each group of positions."""
    folder.mkdir(parents=True)
    for number, rows in enumerate(groups):
        lines = [json.dumps({"id": int(row), "text": texts[row]}) + "\n" for row in rows]
        (folder / f"{number:06}.jsonl").write_text("".join(lines))


def classify_frames(
    frames: Sequence[pd.DataFrame], classifier: DistributedDataClassifier
) -> np.ndarray:
    """Run the model's part of the job: one frame after the other, nothing read or written."""
    return _scores(pd.concat([classifier(frame) for frame in frames]))


def run_whole_job(
    folder: Path,
    classifier: DistributedDataClassifier,
    client: Any = None,
    report: Callable[..., None] | None = None,
    **reading: int | None,
) -> np.ndarray:
    """Run the whole job: read, classify, publish, record and report; then read what it wrote."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    reader = JsonlReader(str(folder / "in"), **(reading or {"files_per_partition": 1}))
    Pipeline([reader, classifier, ParquetWriter(str(out))]).run(client=client, report=report)
    return _scores(pd.concat(map(pd.read_parquet, sorted(out.glob("*.parquet")))))


def _scores(frame: pd.DataFrame) -> np.ndarray:
    return np.stack(frame.sort_values("id")[SCORES].to_list())


# Small first parts.


def measure_early_parts(model: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Time a job on one file whose first parts are small, and the same job with equal parts."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    texts = texts_of_lengths(LENGTHS["web"].sample(options.early_documents), tokenizer, 0)
    write_files(folder / "in", [np.arange(len(texts))], texts)
    classifier = classifier_of(model, options.device, autocast=False)
    planned = JsonlReader(str(folder / "in")).find_parts(needed=("text",))
    seconds: dict[str, list[float]] = {EARLY: [], USUAL: []}  # until the first part is done
    parts: dict[str, int] = {}

    def run(name: str, part_bytes: int | None) -> np.ndarray:
        started = time.perf_counter()

        def look(done: int, total: int, _: Any) -> None:
            parts[name] = total
            if done == 1:
                seconds[name].append(time.perf_counter() - started)

        return run_whole_job(folder, classifier, report=look, part_bytes=part_bytes)

    first = pd.DataFrame({"text": texts[:2]})
    variants = [
        Variant(name, functools.partial(run, name, size), functools.partial(classifier, first))
        for name, size in ((EARLY, None), (USUAL, planned.part_bytes))
    ]
    times = run_interleaved(variants, options.repeats, TOLERANCE)
    return {
        "documents": len(texts),
        "bytes": sum(file.size_bytes or 0 for file in planned.files),
        "largest_difference": times.largest_difference,
        "variants": {
            name: times.times(name)
            | {"parts": parts[name], "first_part_seconds": float(np.median(seconds[name]))}
            for name in seconds
        },
        "loss": times.median_seconds(EARLY) / times.median_seconds(USUAL) - 1,
    }


# Encryption.


def measure_encryption(model: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Time the job on a local cluster with and without TLS, alone and with the cluster's start."""
    classifier = classifier_of(model, options.device, autocast=False)

    def cluster(has_tls: bool) -> Any:
        return get_client("cpu", n_workers=1, dashboard=False, security=has_tls)

    def start_and_run(has_tls: bool) -> np.ndarray:
        with cluster(has_tls) as client, client.cluster:
            return run_whole_job(folder, classifier, client)

    def times_of(call: Callable[..., np.ndarray], *inputs: Sequence[Any]) -> dict[str, Any]:
        ways = [functools.partial(call, *values) for values in zip(*inputs, strict=True)]
        variants = [Variant(name, way, way) for name, way in zip(SECURITY, ways, strict=True)]
        run = run_interleaved(variants, options.repeats, TOLERANCE)
        return {name: run.times(name) for name in SECURITY}

    whole = times_of(start_and_run, SECURITY.values())
    with contextlib.ExitStack() as kept:
        clients = [kept.enter_context(cluster(has_tls)) for has_tls in SECURITY.values()]
        for client in clients:
            kept.enter_context(client.cluster)
        return {
            "start and job": whole,
            "job": times_of(run_whole_job, 2 * [folder], 2 * [classifier], clients),
        }


# Growth.


def same(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame: a stage that costs nothing."""
    return frame


def in_process(function: Any, *arguments: Any) -> Any:
    """Call a function in a new process, which nothing else has run in, and return its result."""
    with ProcessPoolExecutor(1, mp_context=PROCESSES) as pool:
        return pool.submit(function, *arguments).result()


def measure_growth(folder: str, parts: int) -> dict[str, Any]:
    """Measure times and memory of a client that runs a job of many tiny parts."""
    from distributed import Client

    home = Path(folder, f"parts-{parts}")
    rows = np.arange(parts * ROWS_OF_A_TINY_PART).reshape(parts, -1)
    write_files(home / "in", list(rows), [f"text {row}" for row in rows.ravel()])
    pipeline = Pipeline([JsonlReader(str(home / "in")), same, ParquetWriter(str(home / "out"))])
    address, stop = PROCESSES.Queue(), PROCESSES.Event()
    cluster = PROCESSES.Process(target=serve_cluster, args=(address, stop))
    cluster.start()
    with Client(address.get()) as client:
        found = _watched(pipeline, client)
    stop.set()
    cluster.join()
    started = time.perf_counter()
    summary = pipeline.run()
    found["again_seconds"] = time.perf_counter() - started
    assert summary.resumed_parts == parts
    shutil.rmtree(home)
    return {"parts": parts, **found}


def serve_cluster(address: Any, stop: Any) -> None:
    """Run scheduler and workers apart from the client, whose memory is measured."""
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None,
        protocol="tcp://",
    ) as cluster:  # fmt: skip
        address.put(cluster.scheduler_address)
        stop.wait()


def _watched(pipeline: Pipeline, client: Any) -> dict[str, Any]:
    started = time.perf_counter()
    job = pipeline.prepare()
    planned = time.perf_counter()
    gc.collect()
    process, peak = psutil.Process(), 0
    before = process.memory_info().rss

    def look(done: int, *_: Any) -> None:
        nonlocal peak
        if done % 50 == 0:
            peak = max(peak, process.memory_info().rss)

    job.run(client, look)
    return {
        "plan_seconds": planned - started,
        "run_seconds": time.perf_counter() - planned,
        "client_before_bytes": before,
        "client_peak_bytes": max(peak, before),
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    overhead, early = result["overhead"], result["early"]
    frame, job = (overhead["variants"][name]["median_seconds"] for name in (FRAME, JOB))
    lines = [
        f"{overhead['documents']} web documents in {overhead['files']} files: classified in "
        f"{frame:.2f} s, the whole job in {job:.2f} s ({overhead['overhead']:+.1%})",
        *(
            f"on a local cluster, {name}: {times['TLS']['median_seconds']:.2f} s with TLS, "
            f"{times['plain']['median_seconds']:.2f} s without"
            for name, times in result["encryption"].items()
        ),
        *(
            f"{early['documents']:,} web documents in one file, {name}: the first of "
            f"{found['parts']} after {found['first_part_seconds']:.2f} s, the whole job in "
            f"{found['median_seconds']:.2f} s"
            for name, found in early["variants"].items()
        ),
        f"small first parts cost {early['loss']:+.2%}",
        f"{'parts':>8}{'plan s':>9}{'run s':>9}{'ms/part':>9}{'again s':>9}{'client grew by':>16}",
    ]
    for found in result["growth"]:
        grown = found["client_peak_bytes"] - found["client_before_bytes"]
        lines.append(
            f"{found['parts']:8,}{found['plan_seconds']:9.2f}{found['run_seconds']:9.1f}"
            f"{1000 * found['run_seconds'] / found['parts']:9.1f}{found['again_seconds']:9.2f}"
            f"{grown / 2**20:12.1f} MiB"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
