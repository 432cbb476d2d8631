"""How busy a GPU is, by a thread that asks, and how runs' numbers add up."""

import itertools
import threading
import time

import pytest
import torch

from gpuclassify.inference.device import DeviceSample, holding, note, watched
from gpuclassify.workers.nvml import DriverError, find_device, is_mig
from gpuclassify.workers.run_context import RunStats, add_up

GPU, CPU = torch.device("cuda"), torch.device("cpu")
NAMES = {
    "device_sampled_seconds",
    "device_busy_seconds",
    "peak_device_bytes",
    "peak_torch_bytes",
    "peak_planned_bytes",
}


class Gpu:
    """Answers with each of some samples in turn, and knows when it was asked."""

    def __init__(self, *samples):
        self.samples = itertools.chain(samples, itertools.repeat(samples[-1]))
        self.asked = []
        self.is_asked_often = threading.Event()
        self.often = len(samples) + 1

    def __call__(self, device):
        assert device == GPU
        return self.ask

    def ask(self):
        self.asked.append(time.monotonic())
        if len(self.asked) >= self.often:
            self.is_asked_often.set()
        return next(self.samples)


def watching_threads():
    return [t for t in threading.enumerate() if t.name == "gpuclassify-device-use"]


def watch(gpu):
    """The stats of a block that lasts until the GPU was asked often, and the block's seconds."""
    stats, started = RunStats(), time.monotonic()
    with watched(GPU, stats, gpu, sample_seconds=0.01):
        assert gpu.is_asked_often.wait(60)
    return stats, time.monotonic() - started


def test_samples_stand_for_the_whole_block_and_peaks_stay():
    gpu = Gpu(DeviceSample(0.25, 100), DeviceSample(0.25, 900), DeviceSample(0.25, 300))

    stats, elapsed = watch(gpu)

    assert gpu.asked[-1] - gpu.asked[0] <= stats.device_sampled_seconds <= elapsed
    assert stats.device_busy_seconds == pytest.approx(0.25 * stats.device_sampled_seconds)
    assert stats.peak_device_bytes == 900


def test_a_block_that_is_over_at_once_is_sampled_at_its_end():
    gpu, stats = Gpu(DeviceSample(1.0, 7)), RunStats()
    with watched(GPU, stats, gpu):
        pass
    assert len(gpu.asked) == 1
    assert stats.peak_device_bytes == 7
    assert stats.device_busy_seconds == stats.device_sampled_seconds > 0


def test_of_a_slice_memory_is_known_and_use_is_not_zero():
    stats, _ = watch(Gpu(DeviceSample(None, 50)))
    assert stats.peak_device_bytes == 50
    assert stats.device_sampled_seconds is stats.device_busy_seconds is None
    assert NAMES & set(stats.as_dict()) == {"peak_device_bytes"}


def test_a_device_at_rest_was_busy_for_no_time_and_that_is_known():
    stats = RunStats()
    note(DeviceSample(0.0, None), 2.0, stats)
    note(DeviceSample(0.5, None), 4.0, stats)
    assert (stats.device_sampled_seconds, stats.device_busy_seconds) == (6.0, 2.0)
    assert stats.peak_device_bytes is None


def test_an_error_in_the_block_ends_the_thread_too():
    with pytest.raises(KeyError), watched(GPU, RunStats(), Gpu(DeviceSample(1.0, 1))):
        assert len(watching_threads()) == 1
        raise KeyError
    assert not watching_threads()


def test_a_driver_that_does_not_answer_costs_a_run_nothing():
    def fail(device):
        raise DriverError("gone")

    stats = RunStats()
    with watched(GPU, stats, fail):
        assert not watching_threads()
    assert stats == RunStats()


def test_on_a_cpu_nothing_is_asked_and_nothing_is_told():
    stats, gpu = RunStats(), Gpu(DeviceSample(1.0, 1))
    with watched(CPU, stats, gpu), holding(CPU, torch.float32, stats):
        pass
    assert gpu.asked == []
    assert not NAMES & set(stats.as_dict())


def test_runs_add_up_but_the_highest_peak_stays():
    sums = {}
    for busy, peak in ((1.0, 900), (2.0, 300)):
        stats = RunStats(rows=2, device_busy_seconds=busy, peak_torch_bytes=peak)
        add_up(sums, stats.as_dict())
    add_up(sums, RunStats(rows=1).as_dict())  # on a CPU
    assert sums["rows"] == 5
    assert sums["device_busy_seconds"] == 3.0
    assert sums["peak_torch_bytes"] == 900
    assert "peak_device_bytes" not in sums


class Driver:
    """As much of pynvml as finding a device needs; a real one answers on GPUs only."""

    class NVMLError(Exception):
        pass

    def __init__(self, modes):
        self.modes = modes  # by name; None where asking is an error

    def nvmlDeviceGetHandleByUUID(self, name):  # noqa: N802
        if name not in self.modes:
            raise self.NVMLError
        return name

    def nvmlDeviceGetMigMode(self, handle):  # noqa: N802
        if self.modes[handle] is None:
            raise self.NVMLError
        return [self.modes[handle], self.modes[handle]]


@pytest.mark.parametrize(
    ("modes", "found"),
    [
        ({"GPU-1": 0}, "GPU-1"),
        ({"GPU-1": None}, "GPU-1"),  # too old to know of slices
        ({"GPU-2": 1, "MIG-1": None}, "MIG-1"),
    ],
)
def test_a_device_is_found_by_the_name_that_cuda_gives_it(modes, found):
    nvml = Driver(modes)
    assert find_device(nvml, "1") == found
    assert not is_mig(nvml, found)


@pytest.mark.parametrize("modes", [{}, {"GPU-2": 0}, {"GPU-1": 1}])
def test_a_whole_gpu_does_not_stand_for_a_slice(modes):
    with pytest.raises(DriverError, match="no device 1"):
        find_device(Driver(modes), "1")
