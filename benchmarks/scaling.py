"""How does time change with the size of partitions, and with the number of rows?

``python -m benchmarks.scaling --help`` lists the options; README.md says what is measured.
"""

import argparse
import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
from transformers import AutoTokenizer

from benchmarks.harness import (
    Run,
    begin,
    finish,
    new_parser,
    parse,
    run_interleaved,
)
from benchmarks.models import SHAPES, TINY_SIZES, write_model
from benchmarks.names import BASELINE, SUBJECT
from benchmarks.recipes import MAX_TOKENS
from benchmarks.texts import LENGTHS, texts_of_lengths
from benchmarks.ways import TOLERANCES, Way, choose_ways, dtype_names

QUESTION = "scaling"
PEERS = ("sorted batches of 32", "Curator's stages, batch 32")
WHOLE, SMALL = "one partition", "small partitions"
GROWTH = 4


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    shape = replace(SHAPES[options.model], layers=options.layers)
    if options.smoke:
        shape = replace(shape, **TINY_SIZES)
    result = begin(options, shape=asdict(shape), weights="random")
    with tempfile.TemporaryDirectory() as folder:
        directory = str(write_model(Path(folder, "model"), shape))
        texts = texts_of_lengths(
            LENGTHS[options.lengths].sample(options.documents),
            AutoTokenizer.from_pretrained(directory),
        )
        ways = {way.name: way for way in _ways(options, directory)}
        result["settings"]["dtype"] = dtype_names(ways.values())
        result["partitions"] = measure_partitions(texts, list(ways.values()), directory, options)
        result["rows"] = measure_rows(texts, [ways[BASELINE], ways[SUBJECT]], directory, options)
    return finish(QUESTION, result, options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options from the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=100, help="in all (100)")
    parser.add_argument("--small-rows", type=int, default=25, help="of a small partition (25)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (2)")
    parser.add_argument("--lengths", choices=tuple(LENGTHS), default="short")
    parser.add_argument("--model", choices=tuple(SHAPES), default="bert")
    return parse(parser, arguments, small_rows=3)


def _ways(options: argparse.Namespace, directory: str) -> tuple[Way, ...]:
    asked = argparse.Namespace(device=options.device, peers=True, variants=list(PEERS))
    return choose_ways(asked, directory).ways


def measure_partitions(
    texts: Sequence[str], ways: Sequence[Way], directory: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Times with all texts in one partition, and in partitions of a few rows."""
    layouts = {
        WHOLE: _frame(texts, len(texts)),
        SMALL: _frame(texts, options.small_rows),
    }
    variants = [
        replace(way.variant(frame, directory, options.device), name=_variant_name(way.name, layout))
        for layout, frame in layouts.items()
        for way in ways
    ]
    run = run_interleaved(variants, options.repeats, TOLERANCES["float32"])
    return {
        "documents": len(texts),
        "small_rows": options.small_rows,
        "partitions": {layout: frame.npartitions for layout, frame in layouts.items()},
        "largest_difference": run.largest_difference,
        "variants": {way.name: _partition_findings(run, way.name) for way in ways},
    }


def _partition_findings(run: Run, name: str) -> dict[str, Any]:
    seconds = {layout: run.median_seconds(_variant_name(name, layout)) for layout in (WHOLE, SMALL)}
    return {
        **{layout: run.times(_variant_name(name, layout)) for layout in seconds},
        "time_ratio": seconds[SMALL] / seconds[WHOLE],
        "speed_up_over_baseline": {
            layout: run.speed_up(_variant_name(name, layout), _variant_name(BASELINE, layout))
            for layout in seconds
        },
    }


def _variant_name(name: str, layout: str) -> str:
    return f"{name}, {layout}"


def measure_rows(
    texts: Sequence[str], ways: Sequence[Way], directory: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Times of all rows and of a quarter of them, in partitions of the same size."""
    few = list(texts[: len(texts) // GROWTH])
    tokens = [_real_tokens(some, directory) for some in (few, texts)]
    variants = []
    for way in ways:
        for some in (few, texts):
            frame = _frame(some, options.small_rows)
            variant = way.variant(frame, directory, options.device)
            # Only of the rows that both have: answers must be comparable.
            first = functools.partial(_first_answers, variant.run, len(few))
            name = _variant_name(way.name, str(len(some)))
            variants.append(replace(variant, name=name, run=first))
    run = run_interleaved(variants, options.repeats, TOLERANCES["float32"])
    token_ratio = tokens[1] / tokens[0]
    return {
        "documents": [len(few), len(texts)],
        "tokens": tokens,
        "token_ratio": token_ratio,
        "variants": {
            way.name: _row_findings(run, way.name, len(few), len(texts), token_ratio)
            for way in ways
        },
    }


def _first_answers(run: Callable[[], np.ndarray], count: int) -> np.ndarray:
    return run()[:count]


def _row_findings(run: Run, name: str, few: int, many: int, token_ratio: float) -> dict[str, Any]:
    times = [run.times(_variant_name(name, str(count))) for count in (few, many)]
    ratio = times[1]["median_seconds"] / times[0]["median_seconds"]
    return {
        "times": times,
        "time_ratio": ratio,
        "time_ratio_by_round": [
            slow / fast for fast, slow in zip(times[0]["seconds"], times[1]["seconds"], strict=True)
        ],
        "time_ratio_to_token_ratio": ratio / token_ratio,
    }


def _real_tokens(texts: Sequence[str], directory: str) -> int:
    """Tokens after the cut."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return sum(min(len(ids), MAX_TOKENS) for ids in tokenizer(list(texts))["input_ids"])


def _frame(texts: Sequence[str], rows: int) -> dd.DataFrame:
    frame = pd.DataFrame({"text": list(texts)})
    return dd.from_pandas(frame, npartitions=-(-len(texts) // rows))


def table(result: dict[str, Any]) -> str:
    """The result as a few lines for people."""
    partitions, rows = result["partitions"], result["rows"]
    lines = [
        f"{partitions['documents']} documents in partitions of {partitions['small_rows']} rows "
        f"instead of one; largest difference {partitions['largest_difference']:.0e}",
        f"{'one: s':>38}{'small: s':>10}{'small / one':>13}"
        f"{'against the pipeline: one, small':>36}",
    ]
    for name, found in partitions["variants"].items():
        ratios = [
            found["speed_up_over_baseline"][layout]["ratio_of_medians"] for layout in (WHOLE, SMALL)
        ]
        lines.append(
            f"  {name:26}{found[WHOLE]['median_seconds']:10.2f}"
            f"{found[SMALL]['median_seconds']:10.2f}{found['time_ratio']:13.2f}"
            f"{ratios[0]:28.2f}{ratios[1]:8.2f}"
        )
    lines.append(
        f"{rows['documents'][0]} to {rows['documents'][1]} documents, "
        f"{rows['token_ratio']:.2f} times the tokens:"
    )
    for name, found in rows["variants"].items():
        lines.append(
            f"  {name:26}{found['time_ratio']:10.2f} times the time, "
            f"{found['time_ratio_to_token_ratio']:.2f} of the tokens'"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
