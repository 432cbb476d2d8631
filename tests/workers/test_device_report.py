"""What job reports say of the device: how busy a GPU was, and whether a CPU is fast in bfloat16."""

import contextlib
import itertools
import threading
import time

import pytest
import torch

from gpuclassify.inference.device import holding
from gpuclassify.settings.options import ModelOptions
from gpuclassify.workers import device_report, run_context
from gpuclassify.workers.device_report import DeviceSample, watched
from gpuclassify.workers.machine import CpuLoad
from gpuclassify.workers.nvml import DriverError, find_device, is_mig
from gpuclassify.workers.run_context import RunStats, add_up, advice, collected_stats, report_stats

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")

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


def test_of_a_slice_memory_is_known_and_use_is_not_zero():
    stats, _ = watch(Gpu(DeviceSample(None, 50)))
    assert stats.peak_device_bytes == 50
    assert stats.device_sampled_seconds is stats.device_busy_seconds is None
    assert NAMES & set(stats.as_dict()) == {"peak_device_bytes"}


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


@pytest.mark.parametrize(
    ("settings", "kind", "times", "seconds", "is_told"),
    [
        ({}, "cpu", 4.1, 9.0, True),
        ({}, "cpu", 4.1, 2.0, True),
        ({}, "cpu", 1.2, 9.0, False),
        ({}, "cpu", 4.1, 0.5, False),
        ({}, "cuda", 4.1, 9.0, False),
        ({"dtype": "float32"}, "cpu", 4.1, 9.0, False),
        ({"autocast": False}, "cpu", 4.1, 9.0, False),
    ],
)
def test_bfloat16_is_hinted_at_once_where_it_is_faster_and_nobody_chose(
    monkeypatch, caplog, settings, kind, times, seconds, is_told
):
    monkeypatch.setattr(device_report, "_seconds_to_hint", device_report.HINT_SECONDS)
    monkeypatch.setattr(device_report, "bfloat16_speed_up", lambda: times)
    monkeypatch.setattr(run_context, "_advised", set())
    totals = {}
    is_free = ModelOptions(model="m", **settings).has_free_dtype
    for is_reported in (False, True):
        for _ in range(3):  # partitions
            stats = RunStats(model_seconds=seconds)
            device_report.note_bfloat16(is_free, torch.device(kind), stats)
            with collected_stats() if is_reported else contextlib.nullcontext():
                report_stats(stats)
            add_up(totals, stats.as_dict())
    logged = [record.message for record in caplog.records if "bfloat16" in record.message]
    assert len(logged) == len(advice(totals)) == is_told
    for sentence in (*logged, *advice(totals)):
        assert "4.1 times" in sentence
        assert "--with dtype=bfloat16" in sentence


@pytest.mark.parametrize(
    ("float32_seconds", "bfloat16_seconds", "other_cores", "expected"),
    [
        ([6.0] * 5, [2.0] * 5, 0.0, 3.0),
        ([6.0, 6.6, 6.3, 6.0, 6.3], [2.0] * 5, 0.05, 3.15),
        ([6.0] * 5, [2.0] * 5, 1.4, None),  # others used the cores
        ([6.0, 6.0, 28.0, 6.0, 6.0], [2.0] * 5, 0.0, None),  # rounds differ
        ([6.0] * 5, [2.0, 2.0, 2.0, 2.0, 0.5], 0.0, None),
    ],
)
def test_a_speed_up_is_told_of_an_idle_cpu_whose_rounds_agree(
    monkeypatch, float32_seconds, bfloat16_seconds, other_cores, expected
):
    rounds = {torch.float32: iter(float32_seconds), torch.bfloat16: iter(bfloat16_seconds)}
    monkeypatch.setattr(device_report, "_product_seconds", lambda dtype: next(rounds[dtype]))
    load = CpuLoad(cores=2, usable_cores=2, other_cores=other_cores, load_average=9.0)
    monkeypatch.setattr(device_report.LoadMeter, "read", lambda meter: load)
    assert device_report.bfloat16_speed_up.__wrapped__() == (expected and pytest.approx(expected))


def test_products_are_measured_in_a_moment():
    began = time.perf_counter()
    assert all(
        device_report._product_seconds(dtype) > 0 for dtype in (torch.float32, torch.bfloat16)
    )
    assert time.perf_counter() - began < 5
