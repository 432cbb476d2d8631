"""The device while models run on it: its settings and its streams."""

import contextlib
import contextvars
import threading

import pytest
import torch

from gpuclassify.inference.device import (
    device_lock,
    gpu_settings,
    holding,
    pick_device,
    run_in_streams,
)
from gpuclassify.workers.device_errors import is_broken_device
from gpuclassify.workers.run_context import RunStats
from gpuclassify.workers.shared_context import process_setting

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


def test_a_gpu_that_is_not_here_is_refused_by_its_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="device='cuda:2', and torch sees 2 CUDA devices here"):
        pick_device("cuda:2")
