"""One policy for exhausted memory: recognised, halved, remembered, and never a lost row."""

import inspect
import math
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import create_autospec

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuclassify.inference.memory import (
    CPU_MAX_TOKENS,
    GPU_MAX_TOKENS,
    PROBE_TOKENS,
    BatchLimits,
    Budget,
    CudaMemory,
    DocumentTooLargeError,
    RunLimits,
    ScoreRule,
    find_budget,
    free_bytes,
    halve_on_oom,
    largest_batch_bytes,
)
from gpuclassify.workers import device_errors
from gpuclassify.workers.device_errors import is_out_of_memory

pytestmark = pytest.mark.contract

CPU = torch.device("cpu")
ABSURD = 2**50  # elements: a petabyte and more, which no machine gives


@pytest.fixture(autouse=True)
def budgets(monkeypatch):
    monkeypatch.setattr("gpuclassify.inference.memory.BUDGETS", {})


def error_of(action):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        action()
    return caught.value


# What torch appends to every error that CUDA reports, whatever it is.
ADVICE = """
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below
might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


class OutOfMemoryError(MemoryError):
    """As cuPy declares its own."""


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.OutOfMemoryError("Allocation on device 0 would exceed allowed memory."),
        torch.AcceleratorError("CUDA error: out of memory" + ADVICE),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("std::bad_alloc: out_of_memory: CUDA error at: device_memory_resource.hpp"),
        RuntimeError("std::bad_alloc"),
        MemoryError(
            "std::bad_alloc: out_of_memory: RMM failure at:/include/rmm/mr/device/"
            "pool_memory_resource.hpp:196: Maximum pool size exceeded"
        ),
        MemoryError(
            "std::bad_alloc: CUDA error at: cuda_memory_resource.hpp68: cudaErrorMemoryAllocation "
            "out of memory"
        ),
        OutOfMemoryError("Out of memory allocating 25,600 bytes (allocated so far: 512 bytes)."),
        RuntimeError("cudaErrorMemoryAllocation: out of memory"),
        RuntimeError("cudaMallocAsync failed with cudaErrorMemoryAllocation"),
        RuntimeError("CUDA_ERROR_OUT_OF_MEMORY"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDn`"),
        RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
        RuntimeError(
            'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":830, please '
            "report a bug to PyTorch."
        ),
        RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"),
        RuntimeError("Invalid buffer size: 9.75 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to"),
        RuntimeError("unable to mmap 1024 bytes from file <model>: Cannot allocate memory (12)"),
        MemoryError(),
    ],
    ids=lambda error: str(error).split("\n")[0][:60] or type(error).__name__,
)
def test_every_allocators_error_is_recognised(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("library", [torch, np], ids=["torch", "numpy"])
def test_what_the_cpu_allocators_really_raise_is_recognised(library):
    assert is_out_of_memory(error_of(lambda: library.empty(ABSURD)))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        torch.AcceleratorError("CUDA error: device-side assert triggered" + ADVICE),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered" + ADVICE),
        RuntimeError("CUDA error: unspecified launch failure" + ADVICE),
        RuntimeError("CUDA error: too many resources requested for launch" + ADVICE),
        RuntimeError("CUDA error: no kernel image is available for execution on the device"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered"),
        MemoryError("std::bad_alloc: CUDA error at: x.hpp:80: cudaErrorIllegalAddress an illegal"),
        RuntimeError("out of resource: shared memory, Required: 180224, Hardware limit: 101376"),
        RuntimeError("index 512 is out of bounds for dimension 1 with size 512"),
        ValueError("out of memory"),
    ],
    ids=lambda error: str(error).split("\n")[0][:60],
)
def test_other_errors_are_not_taken_for_exhausted_memory(error):
    assert not is_out_of_memory(error)


def halving(rows, capacity):
    """Ranges that ran, ranges that were tried, and the row counts reported as too many."""
    tried, too_many = [], []

    def step(start, stop):
        tried.append((start, stop))
        if stop - start > capacity:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return (start, stop)

    return halve_on_oom(step, 0, rows, too_many.append), tried, too_many


@settings(max_examples=25)
@given(st.integers(1, 60), st.integers(1, 60))
def test_halving_loses_no_row_and_fails_at_most_once_for_each_size(rows, capacity):
    ran, tried, too_many = halving(rows, capacity)

    assert [row for start, stop in ran for row in range(start, stop)] == list(range(rows))
    failed = [stop - start for start, stop in tried if (start, stop) not in ran]
    assert failed == too_many == sorted(set(too_many), reverse=True)
    assert max(stop - start for start, stop in ran) <= capacity
    assert len(too_many) <= math.ceil(math.log2(rows)) if rows > 1 else not too_many


def test_one_row_that_does_not_fit_says_so_with_the_cure_and_the_reason():
    with pytest.raises(DocumentTooLargeError, match=r"lower max_seq_length.*CUDA out of memory"):
        halving(4, capacity=0)


@pytest.mark.parametrize("is_cyclic", [False, True], ids=["plain", "in a cycle"])
def test_tensors_of_a_failed_batch_are_gone_before_the_retry(is_cyclic):
    held, were_alive = [], []

    def step(start, stop):
        were_alive.append([tensor() is not None for tensor in held])
        tensor = torch.zeros(8)
        held.append(weakref.ref(tensor))
        if is_cyclic:
            box = [tensor]
            box.append(box)
        if stop - start > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return start

    def check(rows):
        were_alive.append([tensor() is not None for tensor in held])

    assert halve_on_oom(step, 0, 2, check) == [0, 1]
    assert were_alive[:3] == [[], [False], [False]]


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), max_size=10))
def test_limits_never_grow(failures):
    limits = BatchLimits(2_048, score_rule=ScoreRule(4, 64, 4))

    for rows, width in failures:
        lowered = limits.below(rows, width)
        assert 1 <= lowered.max_tokens <= limits.max_tokens
        assert 1 <= lowered.max_score_bytes <= limits.max_score_bytes
        assert rows == 1 or lowered.rows(width) < rows
        limits = lowered


def test_limits_lowered_by_several_threads_end_at_the_lowest():
    budget = Budget(BatchLimits(10_000))
    start = threading.Barrier(8)

    def lower(rows):
        start.wait()
        for _ in range(200):
            budget.lower(rows, 10)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lower, range(20, 100, 10)))

    assert budget.capped(BatchLimits(10_000)) == BatchLimits(100)


class BudgetOf(Budget):
    """A budget of which a test sets the tokens."""

    asked = 0

    def limits(self):
        self.asked += 1
        return self.known


def test_a_run_asks_its_budget_once_and_after_each_failure_which_its_key_remembers():
    budget = BudgetOf(BatchLimits(1_000))

    first, other = RunLimits("a", lambda: budget), RunLimits("b", lambda: Budget(BatchLimits(700)))
    assert budget.asked == 0
    assert first.current().max_tokens == 1_000
    budget.known = BatchLimits(500)
    assert [first.current().max_tokens for _ in range(3)] == [1_000] * 3
    assert RunLimits("a", lambda: None).current().max_tokens == 500
    assert budget.asked == 2

    budget.known = BatchLimits(90)
    first.lower(10, 40)
    assert first.current().max_tokens == 90
    assert budget.asked == 3
    budget.known = BatchLimits(10**6)  # however much is free later
    assert RunLimits("a", lambda: None).current().max_tokens == 200
    assert other.current().max_tokens == 700


def test_limits_on_a_cpu_are_known_without_a_probe():
    rule = ScoreRule(heads=12, min_span=512, item_bytes=4)

    budget = find_budget(CPU, lambda rows, width: pytest.fail("a probe ran"), 512, score_rule=rule)

    limits = budget.limits()
    assert limits == BatchLimits(1_024, None, rule, 64 * 2**20)
    assert limits.rows(512) == 1  # 50 MB of scores each
    assert BatchLimits(CPU_MAX_TOKENS).rows(512) == 2


@pytest.mark.parametrize(
    ("width", "tokens"),
    [(None, 1_024), (4_096, 1_024), (768, 1_024), (384, 2_048), (128, 6_144), (16, 16_384)],
)
def test_batches_of_narrow_models_hold_more_tokens_in_as_many_bytes(width, tokens):
    limits = find_budget(CPU, None, 512, width=width).limits()
    assert (limits.max_tokens, limits.enough_tokens) == (tokens, tokens // 2)

    sizes = {} if width is None else {"hidden_size": width}
    planned = largest_batch_bytes(sizes, CPU, torch.float32)
    widest = largest_batch_bytes({"hidden_size": 768}, CPU, torch.float32)
    assert planned is None if width is None else planned <= max(1, width / 768) * widest


def test_free_memory_of_a_cpu_is_what_the_machine_has_left_or_the_worker_may_take(monkeypatch):
    assert 2**20 < free_bytes(CPU) < 2**50

    manager = SimpleNamespace(memory_limit=psutil.Process().memory_info().rss + 2**30)
    worker = SimpleNamespace(memory_manager=manager)
    monkeypatch.setattr(device_errors, "current_worker", lambda: worker)
    assert free_bytes(CPU) <= 2**30 + 2**28
    manager.memory_limit = 1
    assert free_bytes(CPU) == 0


@pytest.mark.gpu
class TestOnGpu:
    device = torch.device("cuda")

    def test_limits_hold_as_much_as_fits_and_no_more(self):
        token_bytes = 4 * 2**20
        widths = []

        def probe(rows, width):
            widths.append(width)
            return torch.zeros(rows * width, token_bytes, dtype=torch.uint8, device=self.device)

        limits = find_budget(self.device, probe, 512).limits()

        free = free_bytes(self.device)
        assert set(widths) == {512}
        assert limits.max_tokens * token_bytes <= free
        assert limits.max_tokens >= min(GPU_MAX_TOKENS, int(0.7 * free) // token_bytes)

    def test_a_probe_that_does_not_fit_is_halved(self):
        free = free_bytes(self.device)
        token_bytes = free // PROBE_TOKENS * 2

        def probe(rows, width):
            return torch.empty(rows * width, token_bytes, dtype=torch.uint8, device=self.device)

        limits = find_budget(self.device, probe, PROBE_TOKENS).limits()

        assert 1 <= limits.max_tokens < PROBE_TOKENS

    def test_free_memory_counts_what_torch_keeps_and_not_what_is_taken(self):
        memory = CudaMemory(self.device)
        before = memory.free_bytes()
        taken = torch.empty(2**28, dtype=torch.uint8, device=self.device)
        assert memory.free_bytes() <= before - 2**28 + 2**25
        del taken  # kept by the allocator
        assert memory.free_bytes() >= before - 2**25

    def test_a_peak_is_what_an_action_had_at_most(self):
        memory = CudaMemory(self.device)
        kept = torch.zeros(2**20, dtype=torch.uint8, device=self.device)

        def action():
            one = torch.zeros(2**26, dtype=torch.uint8, device=self.device)
            del one
            torch.zeros(2**25, dtype=torch.uint8, device=self.device)

        assert 2**26 <= memory.peak_bytes(action) < 2**26 + 2**22
        assert kept.device.type == "cuda"

    def test_what_the_gpu_allocator_really_raises_is_recognised(self):
        assert is_out_of_memory(error_of(lambda: torch.empty(2**50, device=self.device)))


FREE, POOL, TAKEN = 10_000, 7_000, 3_000
KEPT = POOL - TAKEN


@pytest.mark.rapids
@pytest.mark.parametrize(
    ("adaptors", "limit", "expected"),
    [
        (["TrackingResourceAdaptor"], None, FREE + KEPT),
        (["LoggingResourceAdaptor", "StatisticsResourceAdaptor"], None, FREE + KEPT),
        (["LimitingResourceAdaptor"], 5_000, 5_000 - TAKEN),
        (["LimitingResourceAdaptor"], 100_000, FREE + KEPT),
        (["LoggingResourceAdaptor"], None, FREE),
        ([], None, FREE),
    ],
)
def test_what_is_free_of_rmms_pool_is_free_for_torch(monkeypatch, adaptors, limit, expected):
    """With RMM's own classes as what the resources may be asked; without a GPU none can be made."""
    from rmm import mr

    resource = create_autospec(mr.PoolMemoryResource, instance=True)
    resource.pool_size.return_value = POOL
    resource.get_upstream.return_value = create_autospec(mr.CudaMemoryResource, instance=True)
    for name in reversed(adaptors):
        below, resource = resource, create_autospec(getattr(mr, name), instance=True)
        resource.get_upstream.return_value = below
        if hasattr(resource, "get_allocated_bytes"):
            resource.get_allocated_bytes.return_value = TAKEN
        if hasattr(resource, "get_allocation_limit"):
            resource.get_allocation_limit.return_value = limit
        if hasattr(resource, "allocation_counts"):
            resource.allocation_counts = SimpleNamespace(current_bytes=TAKEN)
    inspect.signature(mr.get_per_device_resource).bind(1)
    monkeypatch.setattr(mr, "get_per_device_resource", {1: resource}.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE, 100_000))
    assert free_bytes(torch.device("cuda", 1)) == expected
