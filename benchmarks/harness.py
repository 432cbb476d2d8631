"""Fair timing: variants take turns, must give the same answers, and every number has its context.

A benchmark hands its variants to `run_interleaved` and its findings to `write_result`.
"""

import gc
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from gpuclassify.cluster.cpu import usable_cores

RESULTS = Path(__file__).with_name("results")
PACKAGES = ("gpuclassify", "torch", "transformers", "tokenizers", "dask", "pandas", "numpy")
MINIMUM_SPREAD = 1e-3  # of answers over documents; constant answers agree whatever went wrong


class DisagreementError(RuntimeError):
    """Variants give different answers, or answers that could not differ."""


@dataclass(frozen=True)
class Variant:
    """One way to answer the question.

    Attributes
    ----------
    name : str
    run : callable
        Does the whole work and returns its answers, float (documents, outputs), on the host, so
        that nothing is still running on a device when it returns.
    warm_up : callable
        Loads what a long job loads once. It is not timed.
    """

    name: str
    run: Callable[[], np.ndarray]
    warm_up: Callable[[], Any]


@dataclass(frozen=True)
class Run:
    """Times of variants that took turns.

    Attributes
    ----------
    seconds : dict of str to list of float
        By variant, one for each round.
    other_cores : dict of str to list of float
        Cores that other programs kept busy meanwhile. Far from 0, a time says little.
    largest_difference : float
        Between the answers of any two variants.
    """

    seconds: dict[str, list[float]]
    other_cores: dict[str, list[float]]
    largest_difference: float

    def median_seconds(self, name: str) -> float:
        """Median time of a variant."""
        return statistics.median(self.seconds[name])

    def speed_up(self, name: str, baseline: str) -> dict[str, Any]:
        """How many times as fast as `baseline`: ratio of medians, and the ratio in each round."""
        rounds = zip(self.seconds[baseline], self.seconds[name], strict=True)
        return {
            "against": baseline,
            "ratio_of_medians": self.median_seconds(baseline) / self.median_seconds(name),
            "ratio_by_round": [slow / fast for slow, fast in rounds],
        }


def run_interleaved(variants: Sequence[Variant], repeats: int, tolerance: float) -> Run:
    """Time variants in turns: A B C, A B C, so that a disturbance does not hit one alone.

    Parameters
    ----------
    variants : sequence of Variant
        The first is the reference for answers.
    repeats : int
        Rounds, at least 1.
    tolerance : float
        Largest difference allowed between two answers.

    Returns
    -------
    Run

    Raises
    ------
    DisagreementError
        Some answer differs by more, in any round; or no answer depends on the document.
    """
    for variant in variants:
        variant.warm_up()
    seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    other_cores: dict[str, list[float]] = {variant.name: [] for variant in variants}
    lowest = highest = None
    for _ in range(repeats):
        for variant in variants:
            gc.collect()
            others, started = _other_core_seconds(), time.perf_counter()
            answers = variant.run()
            elapsed = time.perf_counter() - started
            seconds[variant.name].append(elapsed)
            other_cores[variant.name].append((_other_core_seconds() - others) / elapsed)
            lowest = answers if lowest is None else np.minimum(lowest, answers)
            highest = answers if highest is None else np.maximum(highest, answers)
            _check_agreement(variant.name, lowest, highest, tolerance)
    return Run(seconds, other_cores, float((highest - lowest).max()))


def _other_core_seconds() -> float:
    """Time that cores have spent on other processes, or on other machines of the same host."""
    times = psutil.cpu_times()
    # Later fields are parts of earlier ones.
    busy = sum(times[:8]) - times.idle - getattr(times, "iowait", 0.0)
    return busy - time.process_time()


def _check_agreement(name: str, lowest: np.ndarray, highest: np.ndarray, tolerance: float) -> None:
    difference = float((highest - lowest).max())
    if not difference <= tolerance:
        raise DisagreementError(
            f"answers of {name!r} differ from earlier ones by {difference:.3g}, and {tolerance:g} "
            "is allowed: the variants do not do the same work"
        )
    spread = float(np.ptp(lowest, axis=0).max())
    if spread < MINIMUM_SPREAD:
        raise DisagreementError(
            f"answers of {name!r} vary by only {spread:.3g} over the documents, so that agreement "
            "would mean nothing: use another seed or more varied documents"
        )


def describe_machine(device: str = "cpu") -> dict[str, Any]:
    """What ran it: processor, cores, threads, load before the run, and the GPU if it is used.

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
    """Installed versions of what takes part."""
    return {package: version(package) for package in PACKAGES}


def write_result(question: str, result: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write a result beside the earlier ones and never over one.

    Parameters
    ----------
    question : str
        Name of the benchmark.
    result : dict
        Holds ``machine`` from `describe_machine`.
    folder : Path
        Created if missing.

    Returns
    -------
    Path
        ``<question>-<date>-<machine>.json``, with a number added where that is taken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC)
    name = f"{question}-{now:%Y-%m-%d}-{result['machine']['short_name']}"
    text = json.dumps({"question": question, "finished": now.isoformat()} | result, indent=2)
    for number in range(1, 1_000):
        path = folder / (f"{name}.json" if number == 1 else f"{name}-{number}.json")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text + "\n")
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"{folder} holds 999 results named {name}: move some elsewhere")
