"""How fast are rule signals on one core, beside datatrove's filters?

``taskset -c 0 python -m benchmarks.signals`` measures; README.md says what.
"""

import argparse
import functools
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks import SUBJECT
from benchmarks.harness import Variant, begin, finish, new_parser, parse, run_interleaved
from benchmarks.inputs import LENGTHS
from examples.demo.corpus import collect_documents
from gpuclassify import Signals

QUESTION = "signals"
KNOWN = "gpuclassify, known words"
PEER, FIRST = "datatrove, all decisions", "datatrove, until one drops it"
CHARS_OF_A_TOKEN = 4.2


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--documents", type=int, default=2_000, help="number of texts (2,000)")
    options = parse(parser, arguments)
    head = begin(options, language="en")
    return finish(QUESTION, head | measure(web_texts(options.documents), options), options, table)


def web_texts(count: int) -> list[str]:
    """Return texts of web lengths: docstrings of installed packages, one after the other."""
    lines = "\n\n".join(
        own.text for own in collect_documents(max_documents=12 * count + 100)
    ).split("\n")
    chars = [round(CHARS_OF_A_TOKEN * tokens) for tokens in LENGTHS["web"].sample(count)]
    ends = np.cumsum(np.random.default_rng(0).permutation(chars))
    starts = [0, *accumulate(len(line) + 1 for line in lines)]
    ends = ends[ends < starts[-1]]
    cuts = np.searchsorted(starts, [0, *ends])
    texts = ["\n".join(lines[a:b]) for a, b in pairwise(cuts)]
    return [text for text in texts if text.strip()]


def measure(texts: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Time signals and filters in turns; they must keep the same documents."""
    mapper, frame = Signals(), pd.DataFrame({"text": texts})

    def ours(is_new: bool) -> np.ndarray:
        if is_new:
            with mapper.runner.lease(None, None) as splitter:
                splitter.forget()
        return kept(mapper(frame))

    theirs = datatrove(texts)
    ways: dict[str, Callable[[], np.ndarray]] = {
        SUBJECT: functools.partial(ours, True),
        KNOWN: functools.partial(ours, False),
        PEER: functools.partial(theirs, every=True),
        FIRST: functools.partial(theirs, every=False),
    }
    run = run_interleaved(
        [Variant(name, run=way, warm_up=way) for name, way in ways.items()], options.repeats, 0.0
    )
    return {
        "documents": len(texts),
        "mean_text_chars": float(np.mean([len(text) for text in texts])),
        "kept": int(ways[SUBJECT]().sum()),
        "largest_difference": run.largest_difference,
        "variants": {
            name: run.times(name) | {"rows_per_second": len(texts) / run.median_seconds(name)}
            for name in ways
        },
        "speed_up": {
            f"{name} against {peer}": run.speed_up(name, peer)
            for name in (SUBJECT, KNOWN)
            for peer in (PEER, FIRST)
        },
    }


def kept(signals: pd.DataFrame) -> np.ndarray:
    """Return 1 for the texts that all four conditions keep, float (texts, 1)."""
    from tests.classifiers.signals.conditions import conditions

    is_kept = np.ones(len(signals), bool)
    for condition in conditions().values():
        is_kept &= signals.index.isin(condition(signals).index)
    return is_kept[:, None].astype(float)


def datatrove(texts: list[str]) -> Callable[..., np.ndarray]:
    """Return datatrove's filters over texts, in FineWeb's order, with the answers of `kept`."""
    from datatrove.data import Document
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )

    kinds = (GopherRepetitionFilter, GopherQualityFilter, C4QualityFilter, FineWebQualityFilter)
    filters = [kind() for kind in kinds]

    def run(every: bool) -> np.ndarray:
        decisions = []
        for text in texts:
            found = (own.filter(Document(text=text, id="")) is True for own in filters)
            decisions.append(all([*found]) if every else all(found))
        return np.array(decisions, float)[:, None]

    return run


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    lines = [
        f"{result['documents']:,} documents of {result['mean_text_chars']:,.0f} characters, "
        f"{result['kept']:,} kept by all; largest difference {result['largest_difference']:.0e}"
    ]
    for name, found in result["variants"].items():
        seconds, rate = found["median_seconds"], found["rows_per_second"]
        lines.append(f"  {name:30}{seconds:8.2f} s{rate:10,.0f} documents/s")
    for name, ratio in result["speed_up"].items():
        rounds = ", ".join(f"{of_round:.2f}" for of_round in ratio["ratio_by_round"])
        lines.append(f"  {name}: {ratio['ratio_of_medians']:.2f} times ({rounds})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
