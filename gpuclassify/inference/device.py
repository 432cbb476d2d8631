"""Choice, locks and settings of the device that models run on."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from transformers import masking_utils

from gpuclassify.inference.memory import CudaMemory
from gpuclassify.settings.options import FLOAT8, ModelOptions
from gpuclassify.workers.device_errors import with_memory_released
from gpuclassify.workers.run_context import RunStats
from gpuclassify.workers.shared_context import process_setting

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

Item = TypeVar("Item")
Made = TypeVar("Made")

# Minimum compute capability for products of 8-bit floats (Ada).
FLOAT8_CAPABILITY = (8, 9)

# A device runs one forward at a time, because concurrent ones would compete for its memory.
_device_locks: dict[tuple[str, int], threading.Lock] = {}


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
    disagree. `architecture` is the ``model_type`` in the model's ``config.json``, if any. Raises
    ValueError for "float8" on a device without such products.
    """
    if options.dtype == FLOAT8:
        is_nvidia = device.type == "cuda" and torch.version.hip is None
        if not is_nvidia or torch.cuda.get_device_capability(device) < FLOAT8_CAPABILITY:
            raise ValueError(
                f'dtype="{FLOAT8}" needs an NVIDIA GPU with 8-bit products (Ada, Hopper or later), '
                f'and the model runs on {device}: pass dtype="bfloat16"'
            )
        return torch.float8_e4m3fn
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
def is_bfloat16_without_amx(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `dtype` is bfloat16, and `device` a CPU with AVX-512 for it, but not AMX."""
    able: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    is_without_amx = able.get("avx512_bf16", False) and not able.get("amx_bf16", False)
    return device.type == "cpu" and dtype == torch.bfloat16 and is_without_amx


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
    stream = _stream(device, "models")
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
    side, current = _stream(device, "copies"), torch.cuda.current_stream(device)
    with torch.cuda.stream(side):
        copied = tensor.pin_memory().to(device, non_blocking=True)
    current.wait_stream(side)
    copied.record_stream(current)  # do not reuse its memory before the model has read it
    return copied


@functools.cache
def _stream(device: torch.device, user: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
