"""How many workers should share the cores: how near is the default to the best number?

``python -m benchmarks.workers --help`` lists the options; README.md says what is measured.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import psutil
import torch
from distributed import Client
from transformers import PreTrainedTokenizerFast

from benchmarks.harness import (
    Variant,
    begin,
    finish,
    new_parser,
    parse,
    run_interleaved,
)
from benchmarks.inputs import LENGTHS, SHAPES, TINY_SIZES, texts_of_lengths, write_model
from benchmarks.recipes import classifier_of
from benchmarks.ways import TOLERANCES
from gpuclassify import get_client
from gpuclassify.cluster.sizing import cpu_cluster_options

QUESTION = "workers"
BUSY = "while True: pass"


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    shape = SHAPES[options.model]
    if options.smoke:
        shape = replace(shape, **TINY_SIZES)
    head = begin(options, shape=asdict(shape), dtype="float32", weights="random")
    with tempfile.TemporaryDirectory() as folder:
        directory = str(write_model(Path(folder, "model"), shape))
        texts = texts_of_lengths(
            LENGTHS[options.lengths].sample(options.documents),
            PreTrainedTokenizerFast.from_pretrained(directory),
        )
        result = head | measure(texts, directory, options)
    return finish(QUESTION, result, options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1, 2], help="that share the cores (1 2)"
    )
    parser.add_argument("--documents", type=int, default=240, help="in all (240)")
    parser.add_argument("--partitions", type=int, default=8, help="of the lazy frame (8)")
    parser.add_argument("--lengths", choices=tuple(LENGTHS), default="short")
    parser.add_argument("--model", choices=tuple(SHAPES), default="bert")
    parser.add_argument("--busy", type=int, default=0, help="loops that take cores away (0)")
    return parse(parser, arguments, documents=6, partitions=2, repeats=1)


@dataclass
class Cluster:
    """A local cluster that classifies a frame, and the time its workers spend on cores.

    Attributes
    ----------
    client : Client
    scores : dask.dataframe.Series
        What is computed.
    core_seconds : list of float
        Of all workers in each run.
    """

    client: Client
    scores: Any
    core_seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        pids = self.client.run(os.getpid).values()
        self._processes = [psutil.Process(pid) for pid in pids]

    def run(self) -> np.ndarray:
        """Classify the frame, and return probabilities, float (documents, labels)."""
        before = self._spent()
        rows = self.client.compute(self.scores).result()
        self.core_seconds.append(self._spent() - before)
        return np.stack([np.asarray(row) for row in rows])

    def warm_up(self) -> None:
        """Load the model on every worker, and classify the frame once."""
        self.run()
        self.core_seconds.clear()

    def torch_threads(self) -> list[int]:
        """Return the number of torch's threads of each worker."""
        return list(self.client.run(torch.get_num_threads).values())

    def _spent(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)


def measure(texts: Sequence[str], directory: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time clusters, the default among them, that take turns and are idle in between."""
    frame = dd.from_pandas(pd.DataFrame({"text": list(texts)}), npartitions=options.partitions)
    scores = classifier_of(directory, options.device)(frame)["probabilities"]
    default = cpu_cluster_options()[0]["n_workers"]
    with contextlib.ExitStack() as stack:
        clusters = {
            shown(count): Cluster(stack.enter_context(get_client("cpu", n_workers=count)), scores)
            for count in sorted({*options.workers, default})
        }
        for _ in range(options.busy):
            stack.enter_context(busy_loop())
        variants = [
            Variant(name, cluster.run, cluster.warm_up) for name, cluster in clusters.items()
        ]
        run = run_interleaved(variants, options.repeats, TOLERANCES["float32"])
        threads = {name: cluster.torch_threads() for name, cluster in clusters.items()}
    best = min(clusters, key=run.median_seconds)
    return {
        "documents": len(texts),
        "partitions": frame.npartitions,
        "largest_difference": run.largest_difference,
        "variants": {
            name: run.times(name)
            | {"core_seconds": cluster.core_seconds, "torch_threads_of_workers": threads[name]}
            for name, cluster in clusters.items()
        },
        "default": shown(default),
        "default_against_best": run.speed_up(shown(default), best),
    }


def shown(count: int) -> str:
    """Return the name of a cluster."""
    return f"{count} worker{'s' if count > 1 else ''}"


@contextlib.contextmanager
def busy_loop() -> Iterator[None]:
    """Run another program that would take a whole core, within the context."""
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def table(result: dict[str, Any]) -> str:
    """Return the result as a short table for people to read."""
    lines = [
        f"{result['documents']} documents in {result['partitions']} partitions; largest difference "
        f"{result['largest_difference']:.0e}; {result['settings']['busy']} busy loops beside",
        f"{'torch threads':>34}{'median s':>10}{'rows/s':>10}{'core seconds':>14}",
    ]
    for name, found in result["variants"].items():
        threads = " + ".join(map(str, found["torch_threads_of_workers"]))
        seconds, spent = found["median_seconds"], float(np.median(found["core_seconds"]))
        rate = result["documents"] / seconds
        lines.append(f"  {name:16}{threads:>16}{seconds:10.2f}{rate:10.1f}{spent:14.2f}")
    ratio = result["default_against_best"]
    rounds = ", ".join(f"{of_round:.2f}" for of_round in ratio["ratio_by_round"])
    lines.append(
        f"  the default, {result['default']}, is {ratio['ratio_of_medians']:.2f} times as fast as "
        f"{ratio['against']} ({rounds})"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
