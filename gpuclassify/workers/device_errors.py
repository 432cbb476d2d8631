"""Errors after which a process can use its GPU no more, whatever it tries."""

from __future__ import annotations

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
# States in which CUDA's libraries only are when the context beneath them is broken, or was never
# made for lack of memory: both take a new process. One of them begins the name of a lack of memory.
_LIBRARY_STATES = ("not_initialized", "execution_failed", "mapping_error", "internal_error")
_DEVICES = ("cuda", "hip error")
_LACK_OF_MEMORY = "allocation_failed"
_LIBRARIES = ("cublas_status_", "cudnn_status_", "cusolver_status_", "cusparse_status_")


class BrokenDeviceError(RuntimeError):
    """The GPU's context in this process is broken: only a new process can use the GPU again."""


def is_broken_device(error: BaseException) -> bool:
    """Whether `error`, or what caused it, says that this process has lost its GPU for good.

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
