"""Recognition of out-of-memory errors and broken GPUs, retries, and free host memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import TypeVar

from gpuclassify.workers.machine import free_memory
from gpuclassify.workers.run_context import current_worker

Result = TypeVar("Result")

# Lower-case messages of errors after which CUDA's reference says that "the process must be
# terminated and relaunched", or from which a device or driver does not recover. cuDF and cuPy
# write CUDA's name of the error instead, such as "illegaladdress".
_CUDA_TEXTS = (
    "illegal memory access",
    "illegaladdress",
    "illegal_address",
    "launch timed out",
    "device-side assert triggered",  # torch ends all errors with "device-side assertions"
    "hardware stack error",
    "illegal instruction",
    "misaligned address",
    "not supported on global/shared address space",
    "invalid program counter",
    "unspecified launch failure",
    "context is destroyed",
    "uncorrectable ecc error",
    "eccuncorrectable",
    "uncorrectable nvlink error",
    "fell off the bus",
    "cuda error: unknown error",
    "fatal cuda error",  # cuDF's term for an unrecoverable error
)
# Statuses that CUDA's libraries have only if their context is broken, with two exceptions:
# "internal_error" also begins the name of an out-of-memory status, and "not_initialized" may be
# caused by lack of memory.
_NOT_INITIALIZED = "not_initialized"
_LIBRARY_STATES = (_NOT_INITIALIZED, "execution_failed", "mapping_error", "internal_error")
_DEVICES = ("cuda", "hip error")
_LACK_OF_MEMORY = "allocation_failed"
_LIBRARIES = ("cublas_status_", "cudnn_status_", "cusolver_status_", "cusparse_status_")

# Lower-case parts of allocators' out-of-memory messages.
_MEMORY_TEXTS = (
    "out of memory",  # torch; CUDA; cuPy; MPS
    "out_of_memory",  # RMM; CUDA_ERROR_OUT_OF_MEMORY of the driver
    "bad_alloc",  # C++, and through it RMM
    "cudaerrormemoryallocation",
    "alloc_failed",  # CUBLAS_, CUSOLVER_, CUSPARSE_, CUDNN_STATUS_ALLOC_FAILED; CUFFT_ALLOC_FAILED
    "allocation_failed",  # CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    # torch's out-of-memory message asks NVML for free memory, and fails if NVML does not answer.
    "nvml_success ==",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "invalid buffer size",  # MPS: one tensor is larger than Metal allows
)


class BrokenDeviceError(RuntimeError):
    """Error raised when this process has lost its GPU: only a new process can use it again."""


def is_broken_device(error: BaseException) -> bool:
    """Return whether `error`, or one of its causes, means that this process has lost its GPU.

    Only a new process can use the GPU again. The message tells: torch, cuDF and cuPy raise kinds of
    RuntimeError with CUDA's. RMM throws ``std::bad_alloc`` with it when an allocation fails for any
    reason, and cuDF converts that to MemoryError. A mere lack of memory gives False.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BrokenDeviceError) or _names_broken_device(cause):
            return True
        cause = cause.__cause__
    return False


def _names_broken_device(error: BaseException) -> bool:
    if not isinstance(error, (RuntimeError, MemoryError)):
        return False
    message = str(error).lower()
    if any(name in message for name in _LIBRARIES):
        is_state = any(f"status_{state}" in message for state in _LIBRARY_STATES)
        return is_state and _LACK_OF_MEMORY not in message
    names_device = any(name in message for name in _DEVICES)
    return names_device and any(text in message for text in _CUDA_TEXTS)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` means that memory has run out, on the host or on a GPU.

    torch raises ``torch.OutOfMemoryError`` or, with RMM, a RuntimeError that names
    ``std::bad_alloc``; cuDF and cuPy raise kinds of MemoryError, and CUDA's libraries a
    RuntimeError with their status. A broken GPU, for which RMM also reports ``std::bad_alloc``,
    gives False.
    """
    if is_broken_device(error):
        return False
    if isinstance(error, MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    message = str(error).lower()
    is_torchs_own = type(error).__name__ == "OutOfMemoryError"
    return is_torchs_own or any(text in message for text in _MEMORY_TEXTS)


def with_memory_released(action: Callable[[], Result]) -> Result:
    """Call ``action()`` and return its result; if memory runs out, free caches and call it again.

    It is also called again if a CUDA library is not initialized, which lack of memory can cause.
    """
    try:
        return action()
    except (RuntimeError, MemoryError) as error:
        if not (is_out_of_memory(error) or f"status_{_NOT_INITIALIZED}" in str(error).lower()):
            raise
    release_memory()
    return action()


def release_memory() -> None:
    """Run Python's garbage collection, and return torch's cached GPU memory to the driver."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def free_host_bytes() -> int:
    """Return the number of bytes that this process may still allocate on the host.

    In a task of a Dask worker, the worker's memory limit counts, too.
    """
    import psutil

    free = free_memory()
    worker = current_worker()
    if worker is not None and (limit := worker.memory_manager.memory_limit):
        free = max(0, min(free, limit - psutil.Process().memory_info().rss))
    return free
