"""Survey of this machine's GPUs through NVML, NVIDIA's library, which creates no CUDA context."""

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

DEVICE_FILES = Path("/dev")


class DriverError(RuntimeError):
    """Error raised when the NVIDIA driver or its library NVML is missing, or does not answer."""


def open_nvml() -> Any:
    """Return the module pynvml, ready to be called; raise DriverError without it or a driver."""
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
def _open(nvml: ModuleType, process_id: int) -> None:
    """Initialize NVML once per process, because its handles are invalid after a fork."""
    nvml.nvmlInit()


def find_device(nvml: ModuleType, uuid: str) -> Any:
    """Return NVML's handle of the GPU or MIG slice with this UUID, which has no prefix like "GPU-".

    Raises DriverError without such a device, and for a GPU in MIG mode, because its memory and
    utilization are not those of the slice in use.
    """
    for name in (f"MIG-{uuid}", f"GPU-{uuid}"):
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(name)
        except nvml.NVMLError:
            continue
        if not is_mig(nvml, handle):
            return handle
    raise DriverError(f"the NVIDIA driver knows no device {uuid}, or only as a GPU in MIG mode")


def is_mig(nvml: ModuleType, handle: object) -> bool:
    """Return whether NVML's `handle` is a GPU in MIG mode, which CUDA uses only by its slices."""
    with contextlib.suppress(nvml.NVMLError):
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    return False


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG slice (an isolated part) of a GPU."""

    index: int  # NVML's index of the physical GPU
    uuid: str  # "GPU-...", or "MIG-..." for a slice
    name: str  # product name
    memory_bytes: int | None  # None if the GPU shares the host's memory

    @property
    def visible_name(self) -> str:
        """Entry of ``CUDA_VISIBLE_DEVICES`` for this device: a slice's UUID, or a GPU's index."""
        return self.uuid if self.is_slice else str(self.index)

    @property
    def is_slice(self) -> bool:
        """Whether this is a MIG slice rather than a whole GPU."""
        return self.uuid.startswith("MIG-")


@dataclass(frozen=True)
class GpuSurvey:
    """List of the GPUs that this process may use, and the driver's versions, from NVML."""

    gpus: tuple[Gpu, ...] = ()  # the visible devices, in the order of CUDA_VISIBLE_DEVICES
    has_gpu: bool = False  # a GPU is present and not hidden, even if it cannot be listed
    driver_version: str | None = None
    cuda_version: tuple[int, int] | None = None  # newest version that the driver supports
    absent_because: str = ""  # why `gpus` is empty


def survey_gpus(visible_devices: str | None = None) -> GpuSurvey:
    """List the GPUs of this machine that ``CUDA_VISIBLE_DEVICES`` shows to CUDA.

    `visible_devices` replaces that variable. A missing driver, library or device is no error.
    """
    if visible_devices is None:
        visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        nvml = open_nvml()
    except DriverError as err:
        return _unlisted(visible_devices, str(err))
    try:
        return _survey(nvml, visible_devices)
    except nvml.NVMLError as err:
        return _unlisted(visible_devices, f"the NVIDIA driver says: {err}")


def select_visible(devices: Sequence[Gpu], visible_devices: str | None) -> tuple[Gpu, ...]:
    """Return the devices that CUDA would show for a value of ``CUDA_VISIBLE_DEVICES``.

    They are in the value's order; None shows all. As in CUDA, the list ends at the first name that
    matches no device, an index names the first slice of a GPU in MIG mode, and a UUID may be
    shortened.
    """
    if visible_devices is None:
        return tuple(devices)

    def is_named(gpu: Gpu, name: str) -> bool:
        if name.isdecimal():
            return gpu.index == int(name)
        return name.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(name)

    selected: list[Gpu] = []
    for name in (part.strip() for part in visible_devices.split(",")):
        device = next((gpu for gpu in devices if is_named(gpu, name)), None)
        if device is None:
            break
        selected.append(device)
    return tuple(selected)


def _unlisted(visible_devices: str | None, reason: str) -> GpuSurvey:
    """Return a survey without GPUs, because of `reason` unless they are absent or hidden."""
    if not any(DEVICE_FILES.glob("nvidia[0-9]*")):
        return GpuSurvey(absent_because="no NVIDIA GPU or driver is here")
    is_hidden = visible_devices is not None and visible_devices.strip() in ("", "-1")
    if is_hidden:
        return GpuSurvey(absent_because=f"CUDA_VISIBLE_DEVICES={visible_devices!r} hides every GPU")
    return GpuSurvey(has_gpu=True, absent_because=reason)


def _survey(nvml: ModuleType, visible_devices: str | None) -> GpuSurvey:
    devices = [gpu for i in range(nvml.nvmlDeviceGetCount()) for gpu in _list_devices(nvml, i)]
    gpus = select_visible(devices, visible_devices)
    reason = "the NVIDIA driver lists no GPU, or only GPUs in MIG mode without an instance"
    if devices:
        reason = f"CUDA_VISIBLE_DEVICES={visible_devices!r} hides every GPU"
    cuda_version = nvml.nvmlSystemGetCudaDriverVersion()
    return GpuSurvey(
        gpus=gpus,
        has_gpu=bool(gpus),
        driver_version=_text(nvml.nvmlSystemGetDriverVersion()),
        cuda_version=(cuda_version // 1000, cuda_version % 1000 // 10),
        absent_because="" if gpus else reason,
    )


def _list_devices(nvml: ModuleType, index: int) -> Iterator[Gpu]:
    """Yield the devices that CUDA can use on a physical GPU: itself or, in MIG mode, its slices."""
    parent = nvml.nvmlDeviceGetHandleByIndex(index)
    handles = [parent]
    if is_mig(nvml, parent):
        handles = []
        for i in range(nvml.nvmlDeviceGetMaxMigDeviceCount(parent)):
            with contextlib.suppress(nvml.NVMLError):  # a slot may be empty
                handles.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, i))
    for handle in handles:
        try:
            memory_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
        except nvml.NVMLError:
            memory_bytes = None
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        yield Gpu(index, uuid, _text(nvml.nvmlDeviceGetName(parent)), memory_bytes)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
