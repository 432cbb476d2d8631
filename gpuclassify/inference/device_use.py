"""How busy a GPU is and how much of its memory is taken while it works."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from gpuclassify.inference.memory import CudaMemory
from gpuclassify.workers.nvml import DriverError, find_device, open_nvml
from gpuclassify.workers.run_context import RunStats

logger = logging.getLogger(__name__)

# The driver renews its figure of how busy a GPU is every 1/6 to 1 second.
SAMPLE_SECONDS = 0.2


@dataclass(frozen=True)
class DeviceSample:
    """What the driver tells of a device at one moment.

    Attributes
    ----------
    busy_share : float or None
        Share of the last fraction of a second in which anything ran, 0 to 1; None for a MIG slice,
        of which the driver does not say.
    used_bytes : int or None
        Memory that is taken, by other processes and libraries too.
    """

    busy_share: float | None
    used_bytes: int | None


Ask = Callable[[], DeviceSample]


@contextlib.contextmanager
def watched(
    device: torch.device, stats: RunStats, source: Callable[[torch.device], Ask] | None = None
) -> Iterator[None]:
    """Sample a GPU on a thread while the block runs, and add what is found to `stats`.

    Nothing is added on a CPU, or where the driver does not answer.

    Parameters
    ----------
    device : torch.device
    stats : RunStats
    source : callable, optional
        ``source(device)()`` gives a DeviceSample; `nvml_source` by default.
    """
    ask = None
    if device.type == "cuda":
        try:
            ask = (source or nvml_source)(device)
        except DriverError as err:
            logger.debug("what %s does is not known: %s", device, err)
    if ask is None:
        yield
        return
    is_over = threading.Event()
    thread = threading.Thread(target=_sample, args=(ask, stats, is_over), daemon=True)
    thread.name = "gpuclassify-device-use"
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _sample(ask: Ask, stats: RunStats, is_over: threading.Event) -> None:
    """Until it is over, and once more then."""
    before = time.monotonic()
    is_last = False
    while not is_last:
        is_last = is_over.wait(SAMPLE_SECONDS)
        now = time.monotonic()
        note(ask(), now - before, stats)
        before = now


def note(sample: DeviceSample, elapsed_seconds: float, stats: RunStats) -> None:
    """Let `sample` stand for the time since the one before."""
    stats.raise_peak("peak_device_bytes", sample.used_bytes)
    if sample.busy_share is not None:
        busy_seconds = elapsed_seconds * sample.busy_share
        stats.device_sampled_seconds = (stats.device_sampled_seconds or 0.0) + elapsed_seconds
        stats.device_busy_seconds = (stats.device_busy_seconds or 0.0) + busy_seconds


def nvml_source(device: torch.device) -> Ask:
    """Asks NVML, which neither waits for the device nor makes a context on it.

    Raises
    ------
    DriverError
        There is no driver to ask, or it does not know the device.
    """
    nvml = open_nvml()
    handle = find_device(nvml, str(torch.cuda.get_device_properties(device).uuid))

    def ask() -> DeviceSample:
        busy_share = used_bytes = None
        with contextlib.suppress(nvml.NVMLError):  # as for a slice
            busy_share = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        with contextlib.suppress(nvml.NVMLError):  # memory shared with the host
            used_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        return DeviceSample(busy_share, used_bytes)

    return ask


@contextlib.contextmanager
def torch_peak(device: torch.device, stats: RunStats) -> Iterator[None]:
    """Note the most memory that torch holds in the block, which has the device for itself."""
    memory = CudaMemory(device) if device.type == "cuda" else None
    if memory is None or not memory.is_counted:
        yield
        return
    memory.forget_peak()
    try:
        yield
    finally:
        stats.raise_peak("peak_torch_bytes", memory.most_held_bytes())
