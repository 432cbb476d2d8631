"""What a worker tells of itself before work starts."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from gpuclassify._version import __version__

# Of these another version gives other results or reads other messages; of the rest it may.
DECISIVE = ("gpuclassify", "python", "torch", "transformers", "tokenizers", "cudf")
COMPARED = (*DECISIVE, "dask", "distributed", "pandas", "pyarrow")
OPTIONAL = ("cudf",)  # a client does without it


@dataclass(frozen=True)
class Facts:
    """What a worker tells of itself.

    Attributes
    ----------
    host : str
    versions : dict of str to str
        By name of the package; one that is missing has none.
    device : str
        UUID of the GPU that torch would use; empty without one.
    memory_free_bytes : int
        What the process may still take: of the machine, and of Dask's limit.
    """

    host: str
    versions: dict[str, str]
    device: str = ""
    memory_free_bytes: int = 0


def versions_here() -> dict[str, str]:
    """Versions of what decides about results, in this process; nothing is imported for it.

    What follows a "+" is the build, which may differ: "2.13.0+cpu" and "2.13.0+cu130" are one.
    """
    found = {
        "python": ".".join(map(str, sys.version_info[:2])),
        "gpuclassify": __version__,
    }
    for name in COMPARED:
        if name not in found and (version := _version_of(name)):
            found[name] = version.partition("+")[0]
    return found


def facts_here(dask_worker: Any) -> Facts:
    """What a worker tells of itself; no CUDA context is made."""
    return Facts(socket.gethostname(), versions_here(), _device_here(), free_memory(dask_worker))


def free_memory(worker: Any) -> int:
    """Bytes that a worker's process may still take: of the machine, and of Dask's limit."""
    import psutil

    available = psutil.virtual_memory().available
    limit = worker.memory_manager.memory_limit
    if not limit:
        return available
    return max(0, min(available, limit - psutil.Process().memory_info().rss))


def _version_of(name: str) -> str | None:
    # Wheels of cuDF carry CUDA's major version in their names.
    for distribution in (name, f"{name}-cu13", f"{name}-cu12") if name == "cudf" else (name,):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _device_here() -> str:
    """UUID of the GPU that torch would take first; empty without one."""
    from gpuclassify.cluster.nvml_devices import survey_gpus

    gpus = survey_gpus().gpus
    if not gpus:
        return ""
    import torch

    return "" if torch.version.cuda is None else gpus[0].uuid
