"""Out-of-memory errors and their cure, free memory of the host, and GPUs that are lost."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import TypeVar

from gpuclassify.workers.machine import free_memory
from gpuclassify.workers.run_context import current_worker

Result = TypeVar("Result")

# Texts of the errors of which CUDA's reference of cudaError says that "the process must be
# terminated and relaunched", and of those that a device or its driver does not recover from. In
# lower case; after the first list's words comes CUDA's name of the error, in cuDF and cuPy.
_CUDA_TEXTS = (
    "illegal memory access",
    "illegaladdress",
    "illegal_address",
    "launch timed out",
    "device-side assert triggered",  # torch's advice after any error has the first two words
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
    "fatal cuda error",  # cuDF's word for an error that stays
)
# States in which CUDA's libraries only are when the context beneath them is broken, but for two:
# one begins the name of a lack of memory, and one may come from it.
_NOT_INITIALIZED = "not_initialized"
_LIBRARY_STATES = (_NOT_INITIALIZED, "execution_failed", "mapping_error", "internal_error")
_DEVICES = ("cuda", "hip error")
_LACK_OF_MEMORY = "allocation_failed"
_LIBRARIES = ("cublas_status_", "cudnn_status_", "cusolver_status_", "cusparse_status_")

# How allocators say in a message that memory ran out, in lower case.
_MEMORY_TEXTS = (
    "out of memory",  # torch; CUDA; cuPy; MPS
    "out_of_memory",  # RMM; CUDA_ERROR_OUT_OF_MEMORY of the driver
    "bad_alloc",  # C++, and through it RMM
    "cudaerrormemoryallocation",
    "alloc_failed",  # CUBLAS_, CUSOLVER_, CUSPARSE_, CUDNN_STATUS_ALLOC_FAILED; CUFFT_ALLOC_FAILED
    "allocation_failed",  # CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
    # torch fails while it composes the message of an out-of-memory, where NVML does not answer
    "nvml_success ==",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "invalid buffer size",  # MPS: one tensor is larger than Metal allows
)


class BrokenDeviceError(RuntimeError):
    """Error of a GPU context broken in this process: only a new process can use the GPU again."""


def is_broken_device(error: BaseException) -> bool:
    """Return whether `error`, or its cause, says that this process has lost its GPU for good.

    torch raises ``torch.AcceleratorError``, cuDF and cuPy kinds of RuntimeError, each with CUDA's
    own text. RMM throws ``std::bad_alloc`` for whatever an allocation meets, with that text too,
    and cuDF makes a MemoryError of it. Running out of memory is none of these: the context lives
    on.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BrokenDeviceError) or _tells_of_it(cause):
            return True
        cause = cause.__cause__
    return False


def _tells_of_it(error: BaseException) -> bool:
    if not isinstance(error, (RuntimeError, MemoryError)):
        return False
    message = str(error).lower()
    if any(name in message for name in _LIBRARIES):
        is_state = any(f"status_{state}" in message for state in _LIBRARY_STATES)
        return is_state and _LACK_OF_MEMORY not in message
    is_of_device = any(name in message for name in _DEVICES)
    return is_of_device and any(text in message for text in _CUDA_TEXTS)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that memory ran out, in any of the ways that allocators say it.

    torch raises ``torch.OutOfMemoryError`` from its allocator; with RMM as its allocator the
    C++ exception arrives as a RuntimeError that names ``std::bad_alloc``. cuDF and cuPy raise kinds
    of MemoryError; CUDA's libraries, which allocate directly, a RuntimeError with their status.
    RMM says ``std::bad_alloc`` of a broken device as well, for which less memory is no cure.
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
    """Return the result of `action`, run again after cached memory is released if memory ran out.

    A library of CUDA that has no memory to begin with says only that it is not initialized: that
    is tried once more as well, and is a broken device (`is_broken_device`) if it comes back.
    """
    try:
        return action()
    except (RuntimeError, MemoryError) as error:
        if not (is_out_of_memory(error) or f"status_{_NOT_INITIALIZED}" in str(error).lower()):
            raise
    release_memory()
    return action()


def release_memory() -> None:
    """Give cached memory of the device back."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is None:  # nothing was loaded with torch
        return
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def free_host_bytes() -> int:
    """Return the bytes this process may still take: of the machine, or of the worker that it is."""
    import psutil

    free = free_memory()
    worker = current_worker()
    if worker is not None and (limit := worker.memory_manager.memory_limit):
        free = max(0, min(free, limit - psutil.Process().memory_info().rss))
    return free
