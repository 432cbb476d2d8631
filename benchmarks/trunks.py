"""What do more classifiers on one trunk cost?

``python -m benchmarks.trunks --help`` lists the options; README.md says what is measured.
"""

import argparse
import functools
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from benchmarks.harness import Variant, begin, finish, new_parser, parse, run_interleaved
from benchmarks.inputs import LENGTHS, docstrings, texts_of_lengths
from gpuclassify import DistributedDataClassifier, classify
from gpuclassify.workers.run_context import collected_stats
from tests.replicas import write_sequence_classifier

QUESTION = "trunks"
ONE, IN_STEP, ALONE = "one", "all, in one pass", "all, one after another"
WEIGHTS = "model.safetensors"
TOLERANCE = 1e-4  # of a probability
WARM_UP_DOCUMENTS = 2


class Trunk(NamedTuple):
    """Classifiers of which the first layers, and the embeddings, are equal."""

    architecture: str
    classifiers: int
    shared: int  # layers
    sizes: dict[str, int]


BERT = {"hidden_size": 768, "intermediate_size": 3_072, "num_attention_heads": 12}
MODERNBERT = {"hidden_size": 1_024, "intermediate_size": 2_624, "num_attention_heads": 16}
TRUNKS = {
    "bert": Trunk("bert", 3, 12, BERT | {"num_hidden_layers": 12}),
    # As FinePDFs' four English classifiers: ModernBERT-large, of which the last layers are trained.
    "modernbert": Trunk("modernbert", 4, 24, MODERNBERT | {"num_hidden_layers": 28}),
}


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    head = begin(options, dtype="float32", weights="random")
    found = {}
    for name in options.trunks:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = measure(TRUNKS[name], Path(folder), options)
    return finish(QUESTION, head | {"found": found}, options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=48, help="(48)")
    parser.add_argument("--lengths", choices=LENGTHS, default="short", help="of documents (short)")
    parser.add_argument("--trunks", nargs="+", choices=TRUNKS, default=[*TRUNKS], help="(all)")
    return parse(parser, arguments, documents=4)


def write_classifiers(trunk: Trunk, folder: Path, is_smoke: bool) -> list[Path]:
    """Write classifiers of random weights, whose first layers are those of the first classifier."""
    small = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 2}
    sizes = {**trunk.sizes, **(small if is_smoke else {})}
    first = write_sequence_classifier(
        folder / "classifier0",
        trunk.architecture,
        initializer_range=0.02,
        texts=docstrings()[:8],
        **sizes,
    )
    own = [f".{n}." for n in range(trunk.shared, sizes["num_hidden_layers"])]
    own += ["classifier", "pooler", "head", "final_norm"]
    paths = [first]
    for seed in range(1, trunk.classifiers):
        draw = torch.Generator().manual_seed(seed)
        path = Path(shutil.copytree(first, folder / f"classifier{seed}"))
        tensors = load_file(first / WEIGHTS)
        for name, tensor in tensors.items():
            if any(word in name for word in own):
                tensor += 0.02 * torch.randn(tensor.shape, generator=draw)
        save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
        paths.append(path)
    return paths


def measure(trunk: Trunk, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Time one classifier and all, whose scores must agree."""
    paths = write_classifiers(trunk, folder, options.smoke)
    mappers = [
        DistributedDataClassifier(
            model=path,
            label_field=f"label{number}",
            score_field=f"score{number}",
            device=options.device,
            autocast=False,
        )
        for number, path in enumerate(paths)
    ]
    lengths = LENGTHS[options.lengths].sample(options.documents)
    texts = texts_of_lengths(lengths, PreTrainedTokenizerFast.from_pretrained(paths[0]))
    frame = pd.DataFrame({"text": texts})
    passes = {ONE: [mappers[:1]], IN_STEP: [mappers], ALONE: [[each] for each in mappers]}
    largest_difference = np.abs(scores(passes[IN_STEP], frame) - scores(passes[ALONE], frame)).max()
    if largest_difference > TOLERANCE:
        raise AssertionError(f"scores differ by {largest_difference}")
    with collected_stats() as stats:
        scores(passes[IN_STEP], frame)
    run = run_interleaved(
        [
            Variant(
                name,
                run=functools.partial(first_scores, own, frame),
                warm_up=functools.partial(first_scores, own, frame.head(WARM_UP_DOCUMENTS)),
            )
            for name, own in passes.items()
        ],
        options.repeats,
        TOLERANCE,
    )
    return {
        "documents": len(texts),
        "shared_layers": (stats[0].peak_sharing or [0, 0])[1],
        "largest_difference": float(largest_difference),
        "variants": {name: run.times(name) for name in passes},
        "cost": {name: run.speed_up(ONE, name) for name in (IN_STEP, ALONE)},
    }


def scores(passes: list[list[DistributedDataClassifier]], frame: pd.DataFrame) -> np.ndarray:
    """Return the scores of all classifiers, (documents, labels of all)."""
    found = [classify(frame, own) for own in passes]
    names = [(own, name) for own in found for name in own.columns if name.startswith("score")]
    return np.hstack([np.stack(own[name]) for own, name in names])


def first_scores(passes: list[list[DistributedDataClassifier]], frame: pd.DataFrame) -> np.ndarray:
    """Run all classifiers, and return the scores of the first one, (documents, labels)."""
    first, *_ = [classify(frame, own) for own in passes]
    return np.stack(first["score0"])


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    lines = []
    for name, found in result["found"].items():
        lines.append(
            f"{TRUNKS[name].classifiers} classifiers of {name}, {found['shared_layers']} layers in "
            f"common, {found['documents']} documents; largest difference "
            f"{found['largest_difference']:.0e}"
        )
        for way, times in found["variants"].items():
            lines.append(f"  {way:24}{times['median_seconds']:10.2f} s")
        for way, cost in found["cost"].items():
            lines.append(f"  {way}: {cost['ratio_of_medians']:.2f} times the time of {ONE}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
