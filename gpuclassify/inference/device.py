"""Choice, locks, settings and monitoring of the device that models run on."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import masking_utils

from gpuclassify.inference.memory import CudaMemory
from gpuclassify.settings.options import ModelOptions
from gpuclassify.workers.device_errors import with_memory_released
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

# Values of ``model_type`` of encoders that run in float16 on GPUs. Their outputs are six to nine
# times closer to float32 than in bfloat16 (benchmarks/precision.py). Models that are known to
# exceed float16's largest number, 65,504, such as T5 and Gemma, and decoders stay in bfloat16.
FLOAT16_ENCODERS = frozenset(
    {
        "albert",
        "bert",
        "camembert",
        "deberta-v2",
        "distilbert",
        "electra",
        "modernbert",
        "roberta",
        "xlm-roberta",
    }
)

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Made = TypeVar("Made")

# A device runs one forward at a time, because concurrent ones would compete for its memory.
_device_locks: dict[tuple[str, int], threading.Lock] = {}
_seconds_to_hint = HINT_SECONDS


def pick_device(name: str) -> torch.device:
    """Return the torch device called `name`, such as "cpu", "cuda", "cuda:1" or "auto".

    "auto" is CUDA if available, else MPS (Apple's GPUs) if available, else the CPU. A CUDA device
    without an index gets the current one's. Raises ValueError for a missing CUDA or MPS device.
    """
    if name == "auto":
        name = "cpu"
        if torch.cuda.is_available():
            name = "cuda"
        elif torch.backends.mps.is_available():
            name = "mps"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device={name!r}, but torch {torch.__version__} sees no CUDA device here: "
            'run "gpuclassify doctor", or pass device="auto"'
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={name!r}, and torch sees {torch.cuda.device_count()} CUDA devices here, "
            'numbered from 0: pass one of them, or "cuda"'
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f'device={name!r}, but there is no MPS device here: pass device="auto"')
    if device.type == "cuda" and device.index is None:
        # "cuda" and "cuda:0" are one device, and a model is loaded once per device.
        return torch.device("cuda", torch.cuda.current_device())
    return device


def pick_dtype(
    options: ModelOptions, device: torch.device, architecture: str | None = None
) -> torch.dtype:
    """Choose the dtype of a model's weights and activations on `device`.

    This is ``options.dtype`` if set. Otherwise, with ``options.autocast``, CUDA devices get float16
    for the encoders in `FLOAT16_ENCODERS`, and bfloat16 (float16 if they lack it) for other models.
    Without ``options.autocast``, and on devices other than CUDA, it is float32: bfloat16 is slower
    on some CPUs and faster on others, and moves rows over thresholds, so that two machines would
    disagree. `architecture` is the ``model_type`` in the model's ``config.json``, if any.
    """
    if options.dtype is not None:
        return getattr(torch, options.dtype)
    if not options.autocast or device.type != "cuda":
        return torch.float32
    if architecture in FLOAT16_ENCODERS:
        return torch.float16
    return half_with_range()


def half_with_range() -> torch.dtype:
    """Return bfloat16, which has float32's range, or float16 if torch's current GPU lacks it."""
    is_native = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if is_native else torch.float16


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


@functools.cache
def is_bfloat16_without_amx(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `dtype` is bfloat16, and `device` a CPU with AVX-512 for it, but not AMX."""
    able: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    is_without_amx = able.get("avx512_bf16", False) and not able.get("amx_bf16", False)
    return device.type == "cpu" and dtype == torch.bfloat16 and is_without_amx


def note_bfloat16(options: ModelOptions, device: torch.device, stats: RunStats) -> None:
    """Record bfloat16's speed-up on a CPU as `peak_bfloat16_times` in `stats`, for job reports.

    Call it once after each run. Nothing is recorded on other devices, if the user has set ``dtype``
    or turned ``autocast`` off, if the ratio is at most `HINT_TIMES`, or before the process's runs
    have taken `HINT_SECONDS`, because measuring takes time.
    """
    global _seconds_to_hint
    if device.type != "cpu" or options.dtype is not None or not options.autocast:
        return
    _seconds_to_hint -= stats.model_seconds
    if _seconds_to_hint <= 0 and (times := bfloat16_speed_up() or 0.0) > HINT_TIMES:
        stats.raise_peak("peak_bfloat16_times", times)


def device_lock(device: torch.device) -> threading.Lock:
    """Return this process's lock for models on a device, the same for "cuda" and "cuda:0"."""
    return _device_locks.setdefault((device.type, device.index or 0), threading.Lock())


@contextlib.contextmanager
def exclusive_device(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Lock the device during a ``with`` block, and set torch up for inference in `dtype` on it.

    Torch is in inference mode, with `gpu_settings`. On CUDA, the device is torch's current one, and
    `_use_model_stream` may change the stream.
    """
    with contextlib.ExitStack() as stack:
        for context in (device_lock(device), gpu_settings(device, dtype), torch.inference_mode()):
            stack.enter_context(context)
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            stack.enter_context(_use_model_stream(device))
            # cuBLAS creates a handle per thread. Inside a forward, a lack of memory for it raises
            # the same error as a broken device, so create the handle here.
            with_memory_released(torch.cuda.current_blas_handle)
        yield


@contextlib.contextmanager
def _use_model_stream(device: torch.device) -> Iterator[None]:
    """Queue a ``with`` block's GPU work on a CUDA stream for models, so that cuDF does not wait.

    The stream stays the current one if another library, such as RMM, allocates torch's memory.
    """
    if torch.cuda.get_allocator_backend() == "pluggable":  # such an allocator reuses memory early
        yield
        return
    stream = _model_stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))  # weights are copied on that stream
    with torch.cuda.stream(stream):
        yield


@contextlib.contextmanager
def holding(device: torch.device, dtype: torch.dtype, stats: RunStats) -> Iterator[None]:
    """Lock the device for inference in `dtype` during a ``with`` block, and measure the block.

    Adds to `wait_device_seconds` and, without an error, `model_seconds` of `stats`. On a GPU, also
    updates `peak_torch_bytes`, if torch counts its memory.
    """
    started = time.perf_counter()
    with exclusive_device(device, dtype):
        memory = CudaMemory(device) if device.type == "cuda" else None
        if memory is not None and not memory.is_counted:
            memory = None
        if memory is not None:
            memory.forget_peak()
        taken = time.perf_counter()
        stats.wait_device_seconds += taken - started
        try:
            yield
            stats.model_seconds += time.perf_counter() - taken
        finally:
            if memory is not None:
                stats.raise_peak("peak_torch_bytes", memory.most_held_bytes())


# Process-wide settings while a model runs.


class SharedContext:
    """Context manager shared by threads: the first thread enters it, and the last one leaves it."""

    def __init__(self, begin: Callable[[], AbstractContextManager[Any]]) -> None:
        self._begin = begin
        self._lock = threading.Lock()
        self._users = 0
        self._begun = contextlib.ExitStack()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Keep the shared context manager entered while this thread's block runs."""
        with self._lock:
            if not self._users:
                self._begun.enter_context(self._begin())
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._begun.close()


def process_setting(
    read: Callable[[], Any], write: Callable[[Any], Any], wanted: object
) -> SharedContext:
    """Return a shared context that sets a process-wide setting to `wanted` while it is active.

    A value that another thread sets in the meantime is lost when the context ends.
    """

    @contextlib.contextmanager
    def changed() -> Iterator[None]:
        before = read()
        write(wanted)
        try:
            yield
        finally:
            write(before)

    return SharedContext(changed)


# cuDNN's attention, torch's first choice on recent GPUs, makes a plan for every new shape. That
# takes up to half a second per batch, because hardly two batches have the same shape.
_no_cudnn_attention = process_setting(
    torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, False
)
# cuDNN rounds the inputs of float32 convolutions to TF32 by default, which has ten bits.
_convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]
_exact_convolutions = process_setting(
    functools.partial(getattr, _convolutions, "fp32_precision"),
    functools.partial(setattr, _convolutions, "fp32_precision"),
    "ieee",
)
# Each operation releases the GIL when it is launched. Getting it back from the tokenizing thread
# takes up to the switch interval, 5 ms by default.
_short_turns = process_setting(sys.getswitchinterval, sys.setswitchinterval, 2e-4)
# transformers reads each mask to drop it if nothing is padded, which waits for all queued work. It
# does not while it is traced.
_unread_masks = process_setting(
    lambda: getattr(masking_utils, "is_tracing", None),
    lambda wanted: setattr(masking_utils, "is_tracing", wanted),
    lambda *_: True,
)
_one_thread = process_setting(torch.get_num_threads, torch.set_num_threads, 1)


@contextlib.contextmanager
def gpu_settings(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Change process-wide settings for inference on a CUDA GPU during a ``with`` block.

    Nothing changes for other devices. In float32, torch then refuses to read the older setting
    ``torch.backends.cudnn.allow_tf32``, because it also covers recurrent layers.
    """
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(_no_cudnn_attention.active())
            stack.enter_context(_unread_masks.active())
            stack.enter_context(_short_turns.active())
            if dtype == torch.float32:
                stack.enter_context(_exact_convolutions.active())
        yield


# Concurrent batches on a CPU, one per core.


def stream_count(device: torch.device) -> int:
    """Return the number of batches that run concurrently: torch's thread count on a CPU, else 1."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def run_in_streams(
    run: Callable[[Item], Made], items: Iterable[Item], device: torch.device
) -> Iterator[Made]:
    """Yield ``run(item)`` for each batch in order; on a CPU, several batches run concurrently.

    A batch spread over all cores would wait for the slowest core after every operation. Instead, as
    many batches run at a time as torch has threads; until the last one has run, torch has one
    thread everywhere in the process. On several threads, `run` is called in inference mode, in a
    copy of the caller's context, and `items` is read ahead of results.
    """
    threads = stream_count(device)
    if threads == 1:
        yield from map(run, items)
        return

    def run_one(item: Item) -> Made:
        with torch.inference_mode():
            return run(item)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="gpuclassify-batch")
    with _one_thread.active(), pool:
        running: deque[Future[Made]] = deque()
        for item in items:
            running.append(pool.submit(contextvars.copy_context().run, run_one, item))
            if len(running) > threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on the device, without waiting for a copy to CUDA.

    On a CPU the tensor shares the array's memory. On CUDA the copy goes through page-locked memory
    on a separate stream: on the model's stream it would start only after all queued work. If
    another library, such as RMM, allocates torch's memory, the current stream is used nevertheless.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    if torch.cuda.get_allocator_backend() == "pluggable":
        # Such an allocator (RMM's is one) ignores `record_stream`, and reuses memory too early.
        return tensor.pin_memory().to(device, non_blocking=True)
    side, current = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(side):
        copied = tensor.pin_memory().to(device, non_blocking=True)
    current.wait_stream(side)
    copied.record_stream(current)  # do not reuse its memory before the model has read it
    return copied


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@functools.cache
def _model_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


# GPU utilization while a model runs.


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
