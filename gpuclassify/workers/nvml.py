"""Asking the NVIDIA driver through NVML, which makes no CUDA context."""

import contextlib
import functools
import os
from typing import Any


class DriverError(RuntimeError):
    """There is no driver to ask, or it does not answer."""


def open_nvml() -> Any:
    """The module pynvml, ready to be called.

    Its library is opened once a process and stays open: opening it takes longer than any question.

    Raises
    ------
    DriverError
        The package, the library or the driver is missing.
    """
    try:
        import pynvml
    except ImportError as err:
        raise DriverError("the package nvidia-ml-py that lists GPUs is missing") from err
    try:
        _open(pynvml, os.getpid())
    except pynvml.NVMLError as err:
        raise DriverError(f"the NVIDIA driver says: {err}") from err
    return pynvml


@functools.cache
def _open(nvml: Any, process_id: int) -> None:
    """Once for each process: what was opened before a fork is of no use after it."""
    nvml.nvmlInit()


def find_device(nvml: Any, uuid: str) -> Any:
    """NVML's handle of a GPU or MIG slice.

    Parameters
    ----------
    nvml : module
        From `open_nvml`.
    uuid : str
        As CUDA tells it, without ``"GPU-"`` or ``"MIG-"``.

    Raises
    ------
    DriverError
        There is none, or it is a GPU cut into slices, which says nothing of the one in use.
    """
    for name in (f"MIG-{uuid}", f"GPU-{uuid}"):
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(name)
        except nvml.NVMLError:
            continue
        if not is_cut(nvml, handle):
            return handle
    raise DriverError(f"the NVIDIA driver knows no device {uuid}, or only as a GPU in MIG mode")


def is_cut(nvml: Any, handle: Any) -> bool:
    """Whether a device is a GPU in MIG mode, of which CUDA only uses slices."""
    with contextlib.suppress(nvml.NVMLError):
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    return False
