"""Measurements of the device for job reports: a GPU's load, and bfloat16's speed on a CPU."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from gpuclassify.workers.machine import LoadMeter
from gpuclassify.workers.nvml import DriverError, find_device, open_nvml
from gpuclassify.workers.run_context import RunStats

# Seconds between samples. The driver updates a GPU's utilization every 1/6 to 1 second.
SAMPLE_SECONDS = 0.2
# Seconds of inference in a process before bfloat16 is measured on a CPU, and the smallest speed-up
# that is reported.
HINT_SECONDS, HINT_TIMES = 5.0, 1.3
# Rounds of this measurement, seconds per round, and the largest ratio of two rounds' results.
ROUNDS, ROUND_SECONDS, MOST_SPREAD = 5, 0.1, 1.25

logger = logging.getLogger(__name__)

_seconds_to_hint = HINT_SECONDS


@dataclass(frozen=True)
class DeviceSample:
    """Load of a GPU and memory used by all processes; a value is None if it is not reported."""

    busy_share: float | None  # utilization, 0 to 1; None for a MIG slice
    used_bytes: int | None  # None for memory shared with the host


Ask = Callable[[], DeviceSample]  # takes a sample now


@contextlib.contextmanager
def watched(
    device: torch.device,
    stats: RunStats,
    source: Callable[[torch.device], Ask] | None = None,
    sample_seconds: float = SAMPLE_SECONDS,
) -> Iterator[None]:
    """Sample a GPU's load and memory on a thread during a ``with`` block, and add them to `stats`.

    The function that takes a sample is ``source(device)`` (default: `nvml_source`). Nothing is
    added on devices other than CUDA, or if `source` raises DriverError.
    """
    ask = None
    if device.type == "cuda":
        try:
            ask = (source or nvml_source)(device)
        except DriverError as err:
            logger.debug("the use of %s is not known: %s", device, err)
    if ask is None:
        yield
        return
    is_over = threading.Event()
    thread = threading.Thread(
        target=_sample, args=(ask, stats, is_over, sample_seconds), daemon=True
    )
    thread.name = "gpuclassify-device-use"
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _sample(ask: Ask, stats: RunStats, is_over: threading.Event, sample_seconds: float) -> None:
    before = time.monotonic()
    is_last = False
    while not is_last:
        is_last = is_over.wait(sample_seconds)
        now = time.monotonic()
        note(ask(), now - before, stats)
        before = now


def note(sample: DeviceSample, elapsed_seconds: float, stats: RunStats) -> None:
    """Add a sample, taken `elapsed_seconds` after the previous one, to fields of `stats`."""
    stats.raise_peak("peak_device_bytes", sample.used_bytes)
    if sample.busy_share is not None:
        busy_seconds = elapsed_seconds * sample.busy_share
        stats.device_sampled_seconds = (stats.device_sampled_seconds or 0.0) + elapsed_seconds
        stats.device_busy_seconds = (stats.device_busy_seconds or 0.0) + busy_seconds


def nvml_source(device: torch.device) -> Ask:
    """Return a function that samples a GPU's load and memory through NVIDIA's library NVML.

    NVML neither waits for the device nor makes a context on it. Raises DriverError if NVML is
    missing or does not know the device.
    """
    nvml = open_nvml()
    handle = find_device(nvml, str(torch.cuda.get_device_properties(device).uuid))

    def ask() -> DeviceSample:
        busy_share = used_bytes = None
        with contextlib.suppress(nvml.NVMLError):  # a MIG slice has no utilization
            busy_share = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        with contextlib.suppress(nvml.NVMLError):  # memory shared with the host
            used_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        return DeviceSample(busy_share, used_bytes)

    return ask


# bfloat16's speed on a CPU.


@functools.cache
def bfloat16_speed_up() -> float | None:
    """Measure the ratio of float32's time to bfloat16's time for matrix products on this CPU.

    Takes about half a second, once per process. Returns None if other processes used the cores, or
    if rounds differ much, because busy cores slow one type more than the other.
    """
    meter = LoadMeter()
    rounds = sorted(
        _product_seconds(torch.float32) / _product_seconds(torch.bfloat16) for _ in range(ROUNDS)
    )
    if rounds[-1] > MOST_SPREAD * rounds[0] or not meter.read().is_idle:
        return None
    return rounds[ROUNDS // 2]


def _product_seconds(dtype: torch.dtype) -> float:
    # BERT-base's first feed-forward layer for 512 tokens
    states, weight = torch.ones(512, 768, dtype=dtype), torch.ones(3_072, 768, dtype=dtype)
    ends, least = time.perf_counter() + ROUND_SECONDS / 2, math.inf
    with torch.inference_mode():
        while least == math.inf or time.perf_counter() < ends:
            began = time.perf_counter()
            torch.nn.functional.linear(states, weight)
            least = min(least, time.perf_counter() - began)
    return least


def note_bfloat16(is_free: bool, device: torch.device, stats: RunStats) -> None:
    """Record bfloat16's speed-up on a CPU as `peak_bfloat16_times` in `stats`, for job reports.

    Call it once after each run. Nothing is recorded on other devices, unless the precision is left
    to gpuclassify (`is_free`), if the ratio is at most `HINT_TIMES`, or before the process's runs
    have taken `HINT_SECONDS`, because measuring takes time.
    """
    global _seconds_to_hint
    if device.type != "cpu" or not is_free:
        return
    _seconds_to_hint -= stats.model_seconds
    if _seconds_to_hint <= 0 and (times := bfloat16_speed_up() or 0.0) > HINT_TIMES:
        stats.raise_peak("peak_bfloat16_times", times)
