"""Fair timing: variants take turns, must give the same answers, and every number has its context.

A benchmark takes its options from `new_parser` and `parse`, starts with `begin`, hands its variants
to `run_interleaved` and its findings to `finish`.
"""

import argparse
import contextlib
import gc
import os
import platform
import re
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks import RESULTS, new_path, write_json
from gpuclassify import __version__
from gpuclassify.cluster.sizing import usable_cores
from gpuclassify.workers.machine import other_core_seconds

PACKAGES = ("torch", "transformers", "tokenizers", "dask", "pandas", "numpy")
MINIMUM_SPREAD = 1e-3  # of answers over documents; constant answers agree whatever went wrong
CLOCK_SECONDS = 0.02  # two ticks of the kernel's clock: no more is known of times about as short
QUIET_SHARE = 0.05  # of the machine's cores, which other programs may take
SMOKE_OPTIONS = {"documents": 12, "repeats": 2, "threads": 1}  # tiny models need no more


def new_parser(question: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{question}", description=description
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds (3)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the result")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few texts")
    return parser


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, **smoke_options: Any
) -> argparse.Namespace:
    """Return the options of the command line; in a smoke run `smoke_options` replace some."""
    options = parser.parse_args(arguments)
    if options.smoke:
        vars(options).update(SMOKE_OPTIONS | smoke_options)
    return options


def begin(options: argparse.Namespace, **settings: Any) -> dict[str, Any]:
    """Return the head of a result: machine as it is before the run, versions, and all settings.

    Sets torch's threads as well, and keeps transformers quiet.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    chosen = {name: value for name, value in vars(options).items() if name != "output"}
    return {
        "machine": describe_machine(options.device),
        "versions": describe_versions(),
        "settings": chosen | settings,
    }


def finish(
    question: str,
    result: dict[str, Any],
    options: argparse.Namespace,
    table: Callable[[dict[str, Any]], str],
    path: Path | None = None,
) -> Path:
    """Write the result, print its table, and return its path; see `write_result`.

    ``noisy`` in it says whether other programs disturbed it; the printed table then says so too.
    """
    reasons = noise(result)
    path = write_result(question, result | {"noisy": bool(reasons)}, options.output, path)
    print(table(result))
    for reason in reasons:
        print(f"  NOISY, not to be quoted: {reason}")
    print(f"written to {path}")
    return path


class DisagreementError(RuntimeError):
    """Error raised when variants give different answers, or answers that could not differ."""


@dataclass(frozen=True)
class Variant:
    """One way to answer the question.

    `run` does the whole work and returns its answers, float (documents, outputs), on the host, so
    that nothing is still running on a device then. `warm_up` loads what a long job loads once, and
    is not timed. `tolerance` is the largest difference that answers may have from others, where
    their precision needs more than the run allows.
    """

    name: str
    run: Callable[[], np.ndarray]
    warm_up: Callable[[], Any]
    tolerance: float = 0.0


@dataclass(frozen=True)
class Run:
    """Times of variants that took turns, and cores that other programs had meanwhile, by round.

    `differences` holds the largest one between a variant's answers and the first answers of all.
    """

    seconds: dict[str, list[float]]
    other_cores: dict[str, list[float]]
    largest_difference: float
    differences: dict[str, float] = field(default_factory=dict)

    def median_seconds(self, name: str) -> float:
        """Return the median time of a variant."""
        return statistics.median(self.seconds[name])

    def times(self, name: str) -> dict[str, Any]:
        """Return the figures of a variant for a result: times of all rounds, and their median."""
        return {
            "seconds": self.seconds[name],
            "other_cores": self.other_cores[name],
            "median_seconds": self.median_seconds(name),
        }

    def speed_up(self, name: str, baseline: str) -> dict[str, Any]:
        """Return the speed-up over `baseline`: ratio of medians, and the ratio in each round."""
        rounds = zip(self.seconds[baseline], self.seconds[name], strict=False)
        return {
            "against": baseline,
            "ratio_of_medians": self.median_seconds(baseline) / self.median_seconds(name),
            "ratio_by_round": [slow / fast for slow, fast in rounds],
        }


def run_interleaved(
    variants: Sequence[Variant],
    repeats: int,
    tolerance: float,
    failures: dict[str, str] | None = None,
    tell: Callable[[Run], None] | None = None,
) -> Run:
    """Time variants in turns: A B C, A B C, so that a disturbance does not hit one alone.

    Answers of two variants may differ by `tolerance`, or by the largest of their own. `failures`
    takes what `noted` says of a variant that differs by more, whose answers do not depend on the
    document (DisagreementError), or that fails otherwise: it is not run again then, and the others
    go on. `tell` is called with the run so far whenever a variant has been timed.
    """
    seconds: dict[str, list[float]] = {}
    other_cores: dict[str, list[float]] = {}
    agreement = Agreement()

    def so_far() -> Run:
        return Run(seconds, other_cores, agreement.largest_difference, agreement.differences)

    for variant in variants:
        with noted(failures, variant.name):
            variant.warm_up()
    for variant in repeats * [*variants]:
        name = variant.name
        if name in (failures or ()):
            continue
        gc.collect()
        with noted(failures, name):
            others, started = other_core_seconds(), time.perf_counter()
            answers = variant.run()
            elapsed = time.perf_counter() - started
            others = max(0.0, other_core_seconds() - others - CLOCK_SECONDS)
            seconds.setdefault(name, []).append(elapsed)
            other_cores.setdefault(name, []).append(others / elapsed)
            agreement.add(name, answers, max(tolerance, variant.tolerance))
        if tell is not None:
            tell(so_far())
    return so_far()


@contextlib.contextmanager
def noted(failures: dict[str, str] | None, name: str) -> Iterator[None]:
    """Print an error and keep it by name, for the rest to go on; without a dict it is raised."""
    try:
        yield
    except Exception:
        if failures is None:
            raise
        failures[name] = traceback.format_exc()
        print(f"{name} failed: {failures[name]}", flush=True)


class Agreement:
    """Answers of which each must agree with all earlier ones, however they were made.

    `differences` holds, by name, the largest difference from the first answers of all.
    """

    def __init__(self) -> None:
        self.differences: dict[str, float] = {}
        self._first: np.ndarray | None = None
        self._bounds: dict[float, tuple[np.ndarray, np.ndarray]] = {}  # by tolerance

    def add(self, name: str, answers: np.ndarray, tolerance: float) -> None:
        """Add answers, float (documents, outputs), or raise DisagreementError without adding."""
        first = answers if self._first is None else self._first
        difference = _largest(np.abs(answers - first))
        self.differences[name] = max(self.differences.get(name, 0.0), difference)
        lowest, highest = self._bounds.get(tolerance, (answers, answers))
        widest = np.minimum(lowest, answers), np.maximum(highest, answers)
        bounds = self._bounds | {tolerance: widest}
        for other, (lowest, highest) in bounds.items():
            difference = _largest(np.maximum(answers - lowest, highest - answers))
            _check_difference(name, difference, max(tolerance, other))
        _check_spread(name, answers)
        self._first, self._bounds = first, bounds

    @property
    def largest_difference(self) -> float:
        """Largest difference between any two answers; 0 if there are none."""
        if not self._bounds:
            return 0.0
        lowest, highest = zip(*self._bounds.values(), strict=True)
        return _largest(np.max(highest, axis=0) - np.min(lowest, axis=0))


def _largest(values: np.ndarray) -> float:
    return float(values.max())


def _check_difference(name: str, difference: float, tolerance: float) -> None:
    if not difference <= tolerance:
        raise DisagreementError(
            f"answers of {name!r} differ from earlier ones by {difference:.3g}, and {tolerance:g} "
            "is allowed: the variants do not do the same work"
        )


def _check_spread(name: str, answers: np.ndarray) -> None:
    spread = float(np.ptp(answers, axis=0).max())
    if spread < MINIMUM_SPREAD:
        raise DisagreementError(
            f"answers of {name!r} vary by only {spread:.3g} over the documents, so that agreement "
            "would mean nothing: use another seed or more varied documents"
        )


def noise(result: dict[str, Any]) -> list[str]:
    """Return reasons why other programs disturbed a result's times; empty if none did.

    The result holds, at any depth, ``other_cores``: cores that other programs kept busy while
    something was timed, one number or one for each round.
    """
    cores, load = result["machine"]["cores"], result["machine"]["load_average"]
    others = max(map(_mean, _values(result, "other_cores")), default=0.0)
    reasons = []
    if others > QUIET_SHARE * cores:
        reasons.append(f"other programs kept {others:.2f} of {cores} cores busy")
    if load > cores:
        reasons.append(f"the load average was {load:.1f} on {cores} cores before it began")
    return reasons


def _values(tree: Any, key: str) -> Iterator[Any]:
    """Yield the values under a key, at any depth."""
    if isinstance(tree, dict):
        for name, branch in tree.items():
            if name != key:
                yield from _values(branch, key)
            elif isinstance(branch, dict):  # by variant
                yield from branch.values()
            else:
                yield branch
    elif isinstance(tree, list):
        for branch in tree:
            yield from _values(branch, key)


def _mean(cores: float | list[float]) -> float:
    return statistics.fmean(cores) if isinstance(cores, list) else cores


def describe_machine(device: str = "cpu") -> dict[str, Any]:
    """Describe the processor, cores, threads, load before the run, and the GPU if it is used.

    ``short_name`` is for file names; no host name is recorded.
    """
    processor, cores = _processor_name(), usable_cores()
    machine: dict[str, Any] = {
        "processor": processor,
        "cores": cores,
        "torch_threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
    }
    name = f"{processor} {cores} cores"
    if device.startswith("cuda"):
        machine["gpu"] = name = torch.cuda.get_device_name(device)
    machine["short_name"] = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    return machine


def _processor_name() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        found = re.search(r"model name\s*:\s*(.+)", information.read_text())
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def describe_versions() -> dict[str, str]:
    """Return package versions; gpuclassify's is that of the code that runs, installed or not."""
    return {"gpuclassify": __version__} | {package: version(package) for package in PACKAGES}


def write_result(
    question: str, result: dict[str, Any], folder: Path = RESULTS, path: Path | None = None
) -> Path:
    """Write a result as ``<question>-<date>-<machine>.json`` of a folder, never over another one.

    `path` is that of the same result as it was before.
    """
    now = datetime.now(UTC)
    path = path or new_path(folder, f"{question}-{now:%Y-%m-%d}-{result['machine']['short_name']}")
    write_json(path, {"question": question, "finished": now.isoformat()} | result)
    return path
