"""How fast is gpuclassify against a Hugging Face pipeline in ``map_partitions``?

``python -m benchmarks.throughput --help`` lists the options; README.md says what is measured.
"""

import argparse
import functools
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import torch
import transformers
from transformers import AutoTokenizer

from benchmarks.harness import (
    RESULTS,
    Run,
    Variant,
    describe_machine,
    describe_versions,
    run_interleaved,
    write_result,
)
from benchmarks.models import SHAPES, TINY_SIZES, Shape, write_model
from benchmarks.recipes import (
    MAX_TOKENS,
    PIPELINE_BATCH_SIZE,
    gpuclassify_scores,
    partition_scores,
    pipeline_partition,
    sorted_partition,
    stage_partition,
)
from benchmarks.texts import LENGTHS, texts_of_lengths
from benchmarks.work import forward_operations, matmul_peak

QUESTION = "throughput"
BASELINE = "pipeline held"
SUBJECT = "gpuclassify"
TOLERANCE = 1e-4  # of a probability
WARM_UP_DOCUMENTS = 2
QUIET_CORES = 0.1  # that other programs may take


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    shape = replace(SHAPES[options.model], layers=options.layers)
    if options.smoke:
        shape = replace(shape, **TINY_SIZES)
    result: dict[str, Any] = {
        "machine": describe_machine(options.device),
        "versions": describe_versions(),
        "settings": _settings(options, shape),
        "corpora": {},
    }
    kinds = tuple(LENGTHS) if options.lengths == "both" else (options.lengths,)
    with tempfile.TemporaryDirectory() as folder:
        directory = str(write_model(Path(folder, "model"), shape))
        for kind in kinds:
            result["corpora"][kind] = measure(kind, directory, shape, options)
    path = write_result(QUESTION, result, options.output)
    print(table(result))
    print(f"written to {path}")
    return path


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=__doc__)
    parser.add_argument("--documents", type=int, default=40, help="of each kind (40)")
    parser.add_argument("--partitions", type=int, default=1, help="of the lazy frame (1)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (3)")
    parser.add_argument("--layers", type=int, default=12, help="of the model (12)")
    parser.add_argument("--lengths", choices=(*LENGTHS, "both"), default="both")
    parser.add_argument("--model", choices=tuple(SHAPES), default="bert")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--seed", type=int, default=0, help="of the texts (0)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the result")
    parser.add_argument("--peers", action="store_true", help="time other ways to batch too")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few texts")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.documents, options.repeats, options.threads = 12, 2, 1  # tiny models need no more
    return options


def measure(kind: str, directory: str, shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """Findings for one kind of lengths."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    texts = texts_of_lengths(LENGTHS[kind].sample(options.documents), tokenizer, options.seed)
    whole = [len(ids) for ids in tokenizer(texts)["input_ids"]]
    lengths = [min(length, MAX_TOKENS) for length in whole]
    frame = dd.from_pandas(pd.DataFrame({"text": texts}), npartitions=options.partitions)
    peaks = [matmul_peak(shape, options.device)]
    variants = _variants(frame, directory, options)
    run = run_interleaved(variants, options.repeats, TOLERANCE)
    peaks.append(matmul_peak(shape, options.device))
    operations = forward_operations(lengths, shape)
    return {
        "documents": len(texts),
        "median_tokens_uncut": float(np.median(whole)),
        "cut_documents_share": float(np.mean(np.asarray(whole) > MAX_TOKENS)),
        "real_tokens": sum(lengths),
        "pipeline_padded_tokens": _padded_tokens(lengths, options.partitions),
        "operations": operations,
        "peak_operations_per_second": max(peaks),
        "peak_operations_per_second_before_and_after": peaks,
        "largest_difference": run.largest_difference,
        "variants": {
            name: _findings(run, name, len(texts), sum(lengths), operations / max(peaks))
            for name in run.seconds
        },
        "speed_up": {name: run.speed_up(SUBJECT, name) for name in run.seconds if name != SUBJECT},
    }


def _variants(frame: dd.DataFrame, directory: str, options: argparse.Namespace) -> list[Variant]:
    by_partition: dict[str, Any] = {
        BASELINE: functools.partial(pipeline_partition, is_held=True),
        "pipeline per partition": functools.partial(pipeline_partition, is_held=False),
    }
    if options.peers:
        by_partition |= {
            "pipeline held, batch 256": functools.partial(
                pipeline_partition, is_held=True, batch_size=256
            ),
            "sorted batches of 32": sorted_partition,
            "Curator's stages, batch 256": stage_partition,
            "Curator's stages, batch 32": functools.partial(stage_partition, batch_size=32),
        }
    recipes: dict[str, Any] = {
        name: functools.partial(partition_scores, recipe) for name, recipe in by_partition.items()
    }
    if options.peers:
        recipes["loader=crossfit"] = functools.partial(gpuclassify_scores, loader="crossfit")
    recipes[SUBJECT] = gpuclassify_scores
    few = dd.from_pandas(frame.head(WARM_UP_DOCUMENTS), npartitions=1)
    return [
        Variant(
            name,
            run=functools.partial(recipe, frame, directory, options.device),
            warm_up=functools.partial(recipe, few, directory, options.device),
        )
        for name, recipe in recipes.items()
    ]


def _padded_tokens(lengths: list[int], partitions: int) -> int:
    """Tokens that the pipeline runs: batches in arrival order, each as wide as its longest."""
    total = 0
    for partition in np.array_split(np.asarray(lengths), partitions):
        for start in range(0, len(partition), PIPELINE_BATCH_SIZE):
            batch = partition[start : start + PIPELINE_BATCH_SIZE]
            total += len(batch) * int(batch.max())
    return total


def _findings(
    run: Run, name: str, documents: int, tokens: int, ideal_seconds: float
) -> dict[str, Any]:
    seconds = run.median_seconds(name)
    return {
        "seconds": run.seconds[name],
        "other_cores": run.other_cores[name],
        "median_seconds": seconds,
        "documents_per_second": documents / seconds,
        "real_tokens_per_second": tokens / seconds,
        "share_of_peak": ideal_seconds / seconds,
    }


def _settings(options: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    chosen = {name: value for name, value in vars(options).items() if name != "output"}
    return chosen | {
        "shape": asdict(shape),
        "dtype": "float32",
        "max_tokens": MAX_TOKENS,
        "pipeline_batch_size": PIPELINE_BATCH_SIZE,
        "tolerance": TOLERANCE,
        "weights": "random",
    }


def table(result: dict[str, Any]) -> str:
    """The result as a few lines for people."""
    lines = []
    for kind, corpus in result["corpora"].items():
        lines += [
            f"{kind}: {corpus['documents']} documents, {corpus['real_tokens']} real tokens, "
            f"{corpus['cut_documents_share']:.0%} of documents cut at {MAX_TOKENS}; matmul peak "
            f"{corpus['peak_operations_per_second'] / 1e9:.0f} GFLOP/s; largest difference "
            f"{corpus['largest_difference']:.0e}",
            f"{'median s':>40}{'min - max':>16}{'docs/s':>9}{'tokens/s':>10}{'of peak':>9}"
            f"{SUBJECT:>13}",
        ]
        for name, found in corpus["variants"].items():
            spread = f"{min(found['seconds']):.2f} - {max(found['seconds']):.2f}"
            ratio = corpus["speed_up"].get(name, {"ratio_of_medians": 1.0})["ratio_of_medians"]
            lines.append(
                f"  {name:28}{found['median_seconds']:10.2f}{spread:>16}"
                f"{found['documents_per_second']:9.2f}{found['real_tokens_per_second']:10.0f}"
                f"{found['share_of_peak']:9.0%}{ratio:12.2f}x"
            )
        lines += _disturbance(corpus, result["machine"])
    return "\n".join(lines)


def _disturbance(corpus: dict[str, Any], machine: dict[str, Any]) -> list[str]:
    """A warning if other programs took cores that the variants wanted."""
    others = max(max(found["other_cores"]) for found in corpus["variants"].values())
    free = machine["cores"] - machine["torch_threads"]
    if others < free + QUIET_CORES:
        return []
    return [f"  other programs kept up to {others:.1f} cores busy: repeat the run"]


if __name__ == "__main__":
    main()
