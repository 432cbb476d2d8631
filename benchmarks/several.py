"""What does one pass with several classifiers save?

``python -m benchmarks.several --help`` lists the options; README.md says what is measured.
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
from transformers import AutoTokenizer

from benchmarks.harness import (
    Run,
    Variant,
    begin,
    finish,
    new_parser,
    parse,
    run_interleaved,
)
from benchmarks.models import SHAPES, TINY_SIZES, write_model
from benchmarks.texts import LENGTHS, texts_of_lengths
from gpuclassify import DistributedDataClassifier, classify
from gpuclassify.workers.run_context import collected_stats

QUESTION = "several"
BASELINE = "separate passes"
SUBJECT = "classify"
TOLERANCE = 1e-4  # of a probability
WARM_UP_DOCUMENTS = 2


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    shape = replace(SHAPES["bert"], layers=options.layers)
    if options.smoke:
        shape = replace(shape, **TINY_SIZES)
    head = begin(options, shape=asdict(shape), dtype="float32", weights="random")
    with tempfile.TemporaryDirectory() as folder:
        directory = str(write_model(Path(folder, "model"), shape))
        result = head | measure(directory, Path(folder, "texts"), options)
    return finish(QUESTION, result, options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options from the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=200, help="web documents (200)")
    parser.add_argument("--partitions", type=int, default=2, help="of the lazy frame (2)")
    parser.add_argument("--classifiers", type=int, default=3, help="with one tokenizer (3)")
    parser.add_argument("--layers", type=int, default=2, help="of each model (2)")
    return parse(parser, arguments)


def measure(directory: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Times of every variant, and what each tokenized."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    texts = texts_of_lengths(LENGTHS["web"].sample(options.documents), tokenizer, 0)
    frame = dd.from_pandas(pd.DataFrame({"text": texts}), npartitions=options.partitions)
    frame.to_parquet(folder)
    mappers = [
        DistributedDataClassifier(
            model=directory,
            label_field=f"label_{number}",
            score_field=f"scores_{number}",
            device=options.device,
            autocast=False,
        )
        for number in range(options.classifiers)
    ]
    recipes = {BASELINE: separate_passes, "chained": chained, SUBJECT: one_pass}
    run = run_interleaved(
        [
            Variant(
                name,
                run=functools.partial(recipe, folder, mappers),
                warm_up=functools.partial(chained_frame, frame.head(WARM_UP_DOCUMENTS), mappers),
            )
            for name, recipe in recipes.items()
        ],
        options.repeats,
        TOLERANCE,
    )
    return {
        "documents": len(texts),
        "largest_difference": run.largest_difference,
        "variants": {
            name: _findings(run, name, functools.partial(recipe, folder, mappers))
            for name, recipe in recipes.items()
        },
        "speed_up": {name: run.speed_up(SUBJECT, name) for name in (BASELINE, "chained")},
    }


def separate_passes(folder: Path, mappers: list[DistributedDataClassifier]) -> np.ndarray:
    """A job for each classifier: the texts are read and tokenized every time."""
    return _scores(
        pd.concat(
            [
                mapper(dd.read_parquet(folder)).compute(scheduler="sync").drop(columns="text")
                for mapper in mappers
            ],
            axis=1,
        )
    )


def chained(folder: Path, mappers: list[DistributedDataClassifier]) -> np.ndarray:
    """One classifier after another on one lazy frame: read once, tokenized every time."""
    return _scores(chained_frame(dd.read_parquet(folder), mappers).compute(scheduler="sync"))


def one_pass(folder: Path, mappers: list[DistributedDataClassifier]) -> np.ndarray:
    """classify(): read once and tokenized once."""
    return _scores(classify(dd.read_parquet(folder), mappers).compute(scheduler="sync"))


def chained_frame(frame: Any, mappers: list[DistributedDataClassifier]) -> Any:
    """The frame after all mappers."""
    for mapper in mappers:
        frame = mapper(frame)
    return frame


def _scores(frame: pd.DataFrame) -> np.ndarray:
    columns = [name for name in frame.columns if name.startswith("scores_")]
    return np.hstack([np.stack(frame[name].to_list()) for name in columns])


def _findings(run: Run, name: str, recipe: Any) -> dict[str, Any]:
    """Times, and from one more run what it tokenized and for how long."""
    with collected_stats() as stats:
        recipe()
    return {
        **run.times(name),
        "tokenize_seconds": sum(one.tokenize_seconds for one in stats),
        "tokenized_texts": sum(one.windows - one.shared_texts for one in stats),
    }


def table(result: dict[str, Any]) -> str:
    """The result as a few lines for people."""
    lines = [
        f"{result['documents']} documents, {result['settings']['classifiers']} classifiers; "
        f"largest difference {result['largest_difference']:.0e}",
        f"{'median s':>28}{'tokenizing s':>14}{'texts tokenized':>17}",
    ]
    for name, found in result["variants"].items():
        lines.append(
            f"  {name:16}{found['median_seconds']:10.2f}{found['tokenize_seconds']:14.2f}"
            f"{found['tokenized_texts']:17d}"
        )
    for name, ratio in result["speed_up"].items():
        lines.append(f"  {SUBJECT}: {ratio['ratio_of_medians']:.2f} times as fast as {name}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
