"""What is each part of gpuclassify's speed worth?

All of it against all but one part, on the same weights and texts.
``python -m benchmarks.parts --help`` lists the options; README.md says what is measured.
"""

import argparse
import contextlib
import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import dask.dataframe as dd
import numpy as np
import pandas as pd
import torch
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
from benchmarks.recipes import gpuclassify_scores
from benchmarks.texts import LENGTHS, texts_of_lengths
from gpuclassify.inference import engine
from gpuclassify.inference.packed import disentangled
from gpuclassify.inference.packed.disentangled import DisentangledEncoder
from gpuclassify.inference.packed.packed_layers import PackedLayers

QUESTION = "parts"
ALL = "all parts"
TOLERANCE = 1e-4
WARM_UP_DOCUMENTS = 2

Way = Callable[[], contextlib.AbstractContextManager[Any]]


def with_whole_last_layer(layers: type) -> Any:
    """The last layer on all tokens, whatever the head reads."""
    never = property(lambda _: False, lambda *_: None)
    return mock.patch.object(layers, "is_first_enough", never, create=True)


def with_one_batch_at_a_time() -> Any:
    """Each batch on all cores, as torch spreads it."""
    return mock.patch.object(engine, "run_in_streams", lambda run, items, _: map(run, items))


def with_new_tables() -> Any:
    """DeBERTa's relative positions projected in every forward."""

    def anew(encoder: Any) -> Any:
        positions = encoder.get_rel_embedding()
        return [
            disentangled._project_positions(layer.attention.self, positions)
            for layer in encoder.layer
        ]

    return mock.patch.object(DisentangledEncoder, "_position_tables", anew)


def with_plain_softmax() -> Any:
    """DeBERTa's attention by two matrix products and a softmax, not fused."""

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        scores = (query * scale) @ key.mT + attn_mask
        return scores.softmax(-1) @ value

    return mock.patch.object(disentangled, "scaled_dot_product_attention", attend)


def with_transformers_encoder() -> Any:
    """transformers' own DeBERTa encoder, in the same batches."""
    return mock.patch.object(DisentangledEncoder, "_is_fast", lambda *_: False)


# What is left out, how, and options of the classifier beside it.
Part = tuple[str, Way, dict[str, Any]]
COMMON: list[Part] = [
    ("order of arrival", contextlib.nullcontext, {"sort_by_length": False}),
    ("padded", contextlib.nullcontext, {"engine": "padded"}),
    ("a batch on all cores", with_one_batch_at_a_time, {}),
]
PARTS: dict[str, list[Part]] = {
    "bert": [
        *COMMON,
        ("last layer whole", functools.partial(with_whole_last_layer, PackedLayers), {}),
    ],
    "deberta": [
        *COMMON,
        ("last layer whole", functools.partial(with_whole_last_layer, DisentangledEncoder), {}),
        ("tables made in every forward", with_new_tables, {}),
        ("softmax not fused", with_plain_softmax, {}),
        ("transformers' encoder", with_transformers_encoder, {}),
    ],
}


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    shape = replace(SHAPES[options.model], layers=options.layers)
    if options.smoke:
        shape = replace(shape, **TINY_SIZES)
    result = begin(options, shape=asdict(shape), weights="random", dtype="float32")
    kinds = tuple(LENGTHS) if options.lengths == "both" else (options.lengths,)
    with tempfile.TemporaryDirectory() as folder:
        directory = str(write_model(Path(folder, "model"), shape))
        result["corpora"] = {kind: measure(kind, directory, options) for kind in kinds}
    return finish(QUESTION, result, options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options from the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=40, help="of each kind (40)")
    parser.add_argument("--partitions", type=int, default=1, help="of the lazy frame (1)")
    parser.add_argument("--layers", type=int, default=4, help="of the model (4)")
    parser.add_argument("--lengths", choices=(*LENGTHS, "both"), default="both")
    parser.add_argument("--model", choices=tuple(PARTS), default="bert")
    return parse(parser, arguments)


def measure(kind: str, directory: str, options: argparse.Namespace) -> dict[str, Any]:
    """Findings for one kind of lengths."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    texts = texts_of_lengths(LENGTHS[kind].sample(options.documents), tokenizer)
    frame = dd.from_pandas(pd.DataFrame({"text": texts}), npartitions=options.partitions)
    few = dd.from_pandas(frame.head(WARM_UP_DOCUMENTS), npartitions=1)
    parts = [(ALL, contextlib.nullcontext, {}), *PARTS[options.model]]

    def scores(some: dd.DataFrame, way: Way, chosen: dict[str, Any]) -> np.ndarray:
        with way():
            return gpuclassify_scores(some, directory, options.device, **chosen)

    variants = [
        Variant(
            name,
            run=functools.partial(scores, frame, way, chosen),
            warm_up=functools.partial(scores, few, contextlib.nullcontext, chosen),
        )
        for name, way, chosen in parts
    ]
    run = run_interleaved(variants, options.repeats, TOLERANCE)
    return {
        "documents": len(texts),
        "largest_difference": run.largest_difference,
        "variants": {name: _findings(run, name) for name, _, _ in parts},
    }


def _findings(run: Run, name: str) -> dict[str, Any]:
    return run.times(name) | {"time_of_all_parts": run.speed_up(ALL, name)}


def table(result: dict[str, Any]) -> str:
    """The result as a few lines for people."""
    settings = result["settings"]
    lines = []
    for kind, corpus in result["corpora"].items():
        lines += [
            f"{settings['model']}, {settings['layers']} layers, {kind}: {corpus['documents']} "
            f"documents in {settings['partitions']} partitions; largest difference "
            f"{corpus['largest_difference']:.0e}",
            f"{'median s':>42}{'worth':>10}",
        ]
        for name, found in corpus["variants"].items():
            ratio = found["time_of_all_parts"]["ratio_of_medians"]
            lines.append(f"  {name:30}{found['median_seconds']:10.2f}{ratio:9.2f}x")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
