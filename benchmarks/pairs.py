"""How fast is gpuclassify on pairs of texts, beside sentence-transformers' CrossEncoder?

``python -m benchmarks.pairs --help`` lists the options; README.md says what is measured.
"""

import argparse
import functools
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sentence_transformers import CrossEncoder
from transformers import PreTrainedTokenizerFast

from benchmarks import SUBJECT
from benchmarks.harness import Variant, begin, finish, new_parser, parse, run_interleaved
from benchmarks.inputs import LENGTHS, SHAPES, TINY_SIZES, texts_of_lengths, write_model
from gpuclassify import DistributedDataClassifier

QUESTION = "pairs"
PEER = "CrossEncoder.predict"
BATCH_SIZE = 32  # that of CrossEncoder, if no other is asked for
QUERY_TOKENS = 12
TOLERANCE = 1e-4  # of a probability
WARM_UP_PAIRS = 2


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    shape = replace(SHAPES[options.model], **(TINY_SIZES if options.smoke else {}))
    result = begin(options, dtype="float32", weights="random", batch_size=BATCH_SIZE)
    result["versions"]["sentence-transformers"] = version("sentence-transformers")
    with tempfile.TemporaryDirectory() as folder:
        result |= measure(write_model(Path(folder, "model"), shape), options)
    return finish(QUESTION, result, options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=120, help="of a query each (120)")
    parser.add_argument("--queries", type=int, default=4, help="that documents share (4)")
    parser.add_argument("--lengths", choices=LENGTHS, default="web", help="of documents (web)")
    parser.add_argument("--model", choices=tuple(SHAPES), default="minilm")
    return parse(parser, arguments)


def measure(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Time gpuclassify and CrossEncoder, whose probabilities must agree."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    documents = texts_of_lengths(LENGTHS[options.lengths].sample(options.documents), tokenizer)
    queries = texts_of_lengths([QUERY_TOKENS] * options.queries, tokenizer, seed=1)
    pairs = [*zip(itertools.cycle(queries), documents, strict=False)]
    frame = pd.DataFrame(pairs, columns=["query", "document"])
    classifier = DistributedDataClassifier(
        model=model,
        text_field=["query", "document"],
        score_field="scores",
        device=options.device,
        autocast=False,
    )
    encoder = CrossEncoder(str(model), device=options.device, local_files_only=True)

    def predict(pairs: list[tuple[str, str]]) -> np.ndarray:
        return encoder.predict(
            pairs,
            batch_size=BATCH_SIZE,
            show_progress_bar=False,
            activation_fn=torch.nn.Softmax(dim=-1),
        )

    def classify(frame: pd.DataFrame) -> np.ndarray:
        return np.stack(classifier(frame)["scores"])

    ways = {PEER: (predict, pairs), SUBJECT: (classify, frame)}
    run = run_interleaved(
        [
            Variant(
                name,
                run=functools.partial(give, given),
                warm_up=functools.partial(give, given[:WARM_UP_PAIRS]),
            )
            for name, (give, given) in ways.items()
        ],
        options.repeats,
        TOLERANCE,
    )
    return {
        "pairs": len(pairs),
        "largest_difference": run.largest_difference,
        "variants": {name: run.times(name) for name in ways},
        "speed_up": {PEER: run.speed_up(SUBJECT, PEER)},
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    lines = [f"{result['pairs']} pairs; largest difference {result['largest_difference']:.0e}"]
    for name, times in result["variants"].items():
        speed = result["pairs"] / times["median_seconds"]
        lines.append(f"  {name:24}{times['median_seconds']:10.2f} s{speed:10.1f} pairs/s")
    ratio = result["speed_up"][PEER]["ratio_of_medians"]
    lines.append(f"  {SUBJECT} is {ratio:.2f} times as fast as {PEER}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
