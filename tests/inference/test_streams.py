"""Batches on cores of their own: in order, alone, and with torch's threads as they were."""

import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gpuclassify.inference.device import run_in_streams

CPU = torch.device("cpu")
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


def test_a_torch_product_in_a_stream_uses_one_core(threads):
    """What the number of threads says is what torch does, in threads that others made too."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(torch.ones(4, 4).matmul, torch.ones(4, 4)).result()
        assert pool.submit(torch.get_num_threads).result() == threads
        list(run_in_streams(lambda item: item, range(3), CPU))
        assert pool.submit(torch.get_num_threads).result() == threads
