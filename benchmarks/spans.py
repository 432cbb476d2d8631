"""How fast does gpuclassify find spans, beside transformers' pipeline on the same weights?

``python -m benchmarks.spans --help`` lists the options; README.md says what is measured.
"""

import argparse
import functools
import importlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerFast, pipeline

from benchmarks import SUBJECT
from benchmarks.footprint import Request, measure_footprint
from benchmarks.harness import Variant, begin, finish, new_parser, parse, run_interleaved
from benchmarks.inputs import LENGTHS, SHAPES, TINY_SIZES, texts_of_lengths, write_model
from gpuclassify import SpanClassifier
from tests.replicas import write_token_classifier

QUESTION = "spans"
PEER = "pipeline, sorted batches"
BATCH_SIZE = 32
TOLERANCE = 1e-3  # of sums over the spans of a text
OUTSIDE = 4.0  # so that about as many tokens are in no span as in text of the web

Span = tuple[int, int, str, float]


@dataclass(frozen=True)
class Way:
    """Way to find spans, as `measure_footprint` runs it in a process of its own."""

    name: str

    def scores(self, frame: dd.DataFrame, directory: str, device: str) -> np.ndarray:
        """Return sums over the spans of each text of a lazy frame."""
        return sums_of(FINDERS[self.name](directory, device)(frame["text"].compute().tolist()))


@functools.lru_cache(maxsize=1)
def by_pipeline(directory: str, device: str) -> Any:
    """Return transformers' pipeline, over texts from the longest to the shortest."""
    find = pipeline(
        "token-classification",
        model=AutoModelForTokenClassification.from_pretrained(directory),
        tokenizer=PreTrainedTokenizerFast.from_pretrained(directory),
        aggregation_strategy="simple",
        device=device,
    )

    def spans_of(texts: list[str]) -> list[list[Span]]:
        order = np.argsort([-len(text) for text in texts], kind="stable")
        with torch.inference_mode():
            found = find([texts[place] for place in order], batch_size=BATCH_SIZE)
        names = ("start", "end", "entity_group", "score")
        rows = [[tuple(entity[name] for name in names) for entity in text] for text in found]
        return [rows[place] for place in np.argsort(order)]

    return spans_of


@functools.lru_cache(maxsize=1)
def by_mapper(directory: str, device: str) -> Any:
    """Return gpuclassify's mapper, over texts as they come, cut as the pipeline cuts them."""
    mapper = SpanClassifier(model=directory, long_text="truncate", device=device, autocast=False)

    def spans_of(texts: list[str]) -> list[list[Span]]:
        found = mapper(pd.DataFrame({"text": texts}))["spans"]
        return [[(*span.values(),) for span in row] for row in pa.array(found.array).to_pylist()]

    return spans_of


FINDERS = {PEER: by_pipeline, SUBJECT: by_mapper}


def sums_of(rows: list[list[Span]]) -> np.ndarray:
    """Return number, mean start and end, mean score and share of a label for each text."""
    sums = np.zeros((len(rows), 5))
    for row, spans in enumerate(rows):
        for start, end, label, score in spans:
            sums[row] += 1, start, end, score, label == "PER"
        sums[row, 1:] /= max(1, len(spans))
    return sums


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    shape = replace(SHAPES[options.model], **(TINY_SIZES if options.smoke else {}))
    result = begin(options, dtype="float32", weights="random", batch_size=BATCH_SIZE)
    write = functools.partial(write_token_classifier, outside=OUTSIDE)
    with tempfile.TemporaryDirectory() as folder:
        result |= measure(write_model(Path(folder, "model"), shape, write), options)
    return finish(QUESTION, result, options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=200, help="number of texts (200)")
    parser.add_argument("--lengths", choices=LENGTHS, default="web", help="of texts (web)")
    parser.add_argument("--model", choices=tuple(SHAPES), default="minilm")
    return parse(parser, arguments)


def measure(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Time gpuclassify and the pipeline, whose spans must be equal, and measure their memory."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    texts = texts_of_lengths(LENGTHS[options.lengths].sample(options.documents), tokenizer)
    finders = {name: make(str(model), options.device) for name, make in FINDERS.items()}
    ours, theirs = (
        [[span[:3] for span in row] for row in finders[name](texts)] for name in (SUBJECT, PEER)
    )
    run = run_interleaved(
        [
            Variant(
                name,
                run=functools.partial(lambda find: sums_of(find(texts)), find),
                warm_up=functools.partial(find, texts[:2]),
            )
            for name, find in finders.items()
        ],
        options.repeats,
        TOLERANCE,
    )
    way_type = importlib.import_module("benchmarks.spans").Way  # by which the process knows it
    ways = {
        name: measure_footprint(
            Request(way_type(name), tuple(texts), 1, str(model), options.device, options.threads)
        )
        for name in finders
    }
    return {
        "texts": len(texts),
        "spans": sum(map(len, theirs)),
        "equal_spans": sum(map(len, theirs)) if ours == theirs else 0,
        "texts_with_spans": sum(map(bool, theirs)),
        "largest_difference": run.largest_difference,
        "variants": {name: run.times(name) for name in finders},
        "footprints": ways,
        "speed_up": {PEER: run.speed_up(SUBJECT, PEER)},
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    equal = "all equal" if result["equal_spans"] == result["spans"] else "NOT all equal"
    lines = [f"{result['texts']} texts with {result['spans']} spans, {equal}"]
    for name, times in result["variants"].items():
        speed = result["texts"] / times["median_seconds"]
        peak = result["footprints"][name]["peak_resident_bytes"] / 2**20
        lines.append(
            f"  {name:26}{times['median_seconds']:10.2f} s{speed:10.1f} texts/s{peak:8.0f} MiB"
        )
    ratio = result["speed_up"][PEER]["ratio_of_medians"]
    lines.append(f"  {SUBJECT} is {ratio:.2f} times as fast as {PEER}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
