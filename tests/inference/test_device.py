"""The device while models run on it: its settings, its streams, and how busy it is told to be."""

import contextlib
import contextvars
import itertools
import threading
import time

import pytest
import torch

from gpuclassify.inference import device
from gpuclassify.inference.device import (
    DeviceSample,
    device_lock,
    gpu_settings,
    holding,
    pick_device,
    process_setting,
    run_in_streams,
    watched,
)
from gpuclassify.settings.options import ModelOptions
from gpuclassify.workers import run_context
from gpuclassify.workers.device_errors import is_broken_device
from gpuclassify.workers.machine import CpuLoad
from gpuclassify.workers.nvml import DriverError, find_device, is_mig
from gpuclassify.workers.run_context import RunStats, add_up, advice, collected_stats, report_stats

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
NOT_INITIALIZED = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"


# Settings of the whole process.


def torch_settings():
    """Whether cuDNN may attend, and what its convolutions do with float32."""
    conv = torch.backends.cudnn.conv.fp32_precision
    return torch.backends.cuda.cudnn_sdp_enabled(), conv


@pytest.fixture
def values():
    """Of a setting, in the order in which it had them."""
    return ["its own"]


@pytest.fixture
def setting(values):
    return process_setting(lambda: values[-1], values.append, "wanted")


def test_a_setting_is_put_back_whatever_happens(setting, values):
    with contextlib.suppress(ZeroDivisionError), setting.active():
        assert values[-1] == "wanted"
        raise ZeroDivisionError
    assert values == ["its own", "wanted", "its own"]


def test_a_setting_stays_until_the_last_thread_is_done(setting, values):
    is_first_in, is_first_over = threading.Event(), threading.Event()

    def first():
        with setting.active():
            is_first_in.set()
            is_first_over.wait(60)

    thread = threading.Thread(target=first)
    thread.start()
    assert is_first_in.wait(60)
    with setting.active():
        is_first_over.set()
        thread.join()
        assert values == ["its own", "wanted"]
    assert values == ["its own", "wanted", "its own"]


@pytest.mark.parametrize("before", [(True, "tf32"), (False, "none")])
@pytest.mark.parametrize(
    ("device", "dtype", "within"),
    [
        (GPU, torch.bfloat16, lambda before: (False, before[1])),
        (GPU, torch.float32, lambda before: (False, "ieee")),
        (CPU, torch.float32, lambda before: before),
    ],
)
def test_a_gpu_runs_without_cudnns_attention_and_float32_in_float32(before, device, dtype, within):
    own = torch_settings()
    try:
        torch.backends.cuda.enable_cudnn_sdp(before[0])
        torch.backends.cudnn.conv.fp32_precision = before[1]
        with gpu_settings(device, dtype):
            assert torch_settings() == within(before)
        assert torch_settings() == before
    finally:
        torch.backends.cuda.enable_cudnn_sdp(own[0])
        torch.backends.cudnn.conv.fp32_precision = own[1]


class Handles:
    """Stands for cuBLAS, which fails so many times before it begins."""

    def __init__(self, failures):
        self.failures = failures
        self.asked = 0

    def __call__(self):
        self.asked += 1
        if self.asked <= self.failures:
            raise RuntimeError(NOT_INITIALIZED)


def hold(monkeypatch, handles):
    """Hold a GPU that is not there, as far as it can be told from one that is."""
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", handles)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")
    with holding(GPU, torch.bfloat16, RunStats()):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert device_lock(GPU).locked()


def test_a_library_that_lacks_memory_to_begin_gets_some_before_any_forward(monkeypatch):
    handles = Handles(failures=1)
    hold(monkeypatch, handles)
    assert handles.asked == 2
    assert not device_lock(GPU).locked()


def test_a_library_that_does_not_begin_at_all_tells_of_a_broken_device(monkeypatch):
    before, handles = torch_settings(), Handles(failures=9)
    with pytest.raises(RuntimeError, match="NOT_INITIALIZED") as caught:
        hold(monkeypatch, handles)
    assert handles.asked == 2
    assert is_broken_device(caught.value)
    assert torch_settings() == before
    assert not device_lock(GPU).locked()


# Batches on cores of their own: in order, alone, and with torch's threads as they were.

number = contextvars.ContextVar("number", default=0)


@pytest.fixture(params=[2, 3])
def threads(request):
    torch.set_num_threads(request.param)
    return request.param


def test_results_come_in_order_from_as_many_threads_as_torch_has(threads):
    together = threading.Barrier(threads, timeout=30)

    def run(item):
        together.wait()  # passes only when so many run at once
        assert torch.get_num_threads() == 1
        assert torch.is_inference_mode_enabled()
        return item, number.get()

    number.set(7)
    items = range(threads * 4)
    assert list(run_in_streams(run, items, CPU)) == [(item, 7) for item in items]
    assert torch.get_num_threads() == threads


def test_items_are_taken_as_they_are_needed(threads):
    taken = []

    def items():
        for item in range(50):
            taken.append(item)
            yield item

    results = run_in_streams(lambda item: item, items(), CPU)
    next(results)
    assert len(taken) == threads + 1
    results.close()
    assert torch.get_num_threads() == threads


def test_an_error_reaches_the_caller_and_threads_come_back(threads):
    def run(item):
        if item == 5:
            raise ValueError("of item 5")
        return item

    results = run_in_streams(run, range(100), CPU)
    with pytest.raises(ValueError, match="of item 5"):
        list(results)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("device", "count"), [("cpu", 1), ("meta", 4)])
def test_one_thread_or_another_device_runs_in_the_callers(device, count):
    torch.set_num_threads(count)
    own = threading.get_ident()

    ran = list(run_in_streams(lambda _: threading.get_ident(), range(5), torch.device(device)))

    assert ran == [own] * 5


# How busy it is, by a thread that asks, and how runs' numbers add up.

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
    monkeypatch.setattr(device, "_seconds_to_hint", device.HINT_SECONDS)
    monkeypatch.setattr(device, "bfloat16_speed_up", lambda: times)
    monkeypatch.setattr(run_context, "_advised", set())
    totals = {}
    for is_reported in (False, True):
        for _ in range(3):  # partitions
            stats = RunStats(model_seconds=seconds)
            device.note_bfloat16(ModelOptions(model="m", **settings), torch.device(kind), stats)
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
    monkeypatch.setattr(device, "_product_seconds", lambda dtype: next(rounds[dtype]))
    load = CpuLoad(cores=2, usable_cores=2, other_cores=other_cores, load_average=9.0)
    monkeypatch.setattr(device.LoadMeter, "read", lambda meter: load)
    assert device.bfloat16_speed_up.__wrapped__() == (expected and pytest.approx(expected))


def test_products_are_measured_in_a_moment():
    began = time.perf_counter()
    assert all(device._product_seconds(dtype) > 0 for dtype in (torch.float32, torch.bfloat16))
    assert time.perf_counter() - began < 5


def test_a_gpu_that_is_not_here_is_refused_by_its_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="device='cuda:2', and torch sees 2 CUDA devices here"):
        pick_device("cuda:2")
