"""Numbers of cores and of bytes of memory that this process may use.

Slurm's ``--mem`` and systemd's slices limit a control group somewhere above the process. Dask reads
the topmost group alone, which has the whole machine; here the tightest limit of all levels counts.
"""

import ctypes
import logging
import math
import platform
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

logger = logging.getLogger(__name__)

PROCESS = Path("/proc/self")
# Parameters of mallopt(3). Releases of glibc before 2.34 refuse thresholds above 32 MiB.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MMAP_THRESHOLDS_BYTES = (1 << 30, 32 << 20)
TRIM_THRESHOLD_BYTES = 2**31 - 1
# Files with limits in bytes, of cgroup v2 and v1.
_MEMORY_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
_MEMORY_USED = ("memory.current", "memory.usage_in_bytes")
# Page cache that counts as used memory but is dropped when memory is short.
_RECLAIMABLE = ("inactive_file", "total_inactive_file")


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use.

    It is the smallest of the machine's cores, the process's affinity and its cgroups' quotas.
    """
    from dask.system import cpu_count

    return min([cpu_count(), *(max(1, math.ceil(quota)) for quota in _quotas())])


def usable_memory() -> int:
    """Return the number of bytes of memory that this process may use in all.

    It is the smallest of the machine's memory, cgroup limits and the process's own limit.
    """
    from distributed.system import MEMORY_LIMIT

    return min([int(MEMORY_LIMIT), *(limit for _, limit in _memory_limits())])


def free_memory() -> int:
    """Return the number of bytes that this process may still allocate.

    It is the smaller of the machine's available memory and the rest of its cgroups' limits.
    """
    import psutil

    free = [int(psutil.virtual_memory().available)]
    for group, limit in _memory_limits():
        used = next((size for name in _MEMORY_USED if (size := _read_number(group / name))), 0)
        free.append(max(0, limit - used + _reclaimable(group)))
    return min(free)


def keep_freed_memory() -> None:
    """Raise glibc's mmap and trim thresholds, so that freed memory is reused without page faults.

    Dask's nanny sets a low trim threshold, so that every large activation would be a new mapping.
    The price is that a worker keeps its peak memory. Tensors above 64 MiB, the size of a heap in a
    thread's arena, are mapped anew regardless; token budgets for CPUs stay below that.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    is_raised = any(mallopt(M_MMAP_THRESHOLD, size) for size in MMAP_THRESHOLDS_BYTES)
    if not (is_raised and mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)):
        logger.debug("glibc's allocator has refused thresholds")


def _memory_limits() -> Iterator[tuple[Path, int]]:
    for group in _groups("memory"):
        for name in _MEMORY_LIMITS:
            if (limit := _read_number(group / name)) is not None:
                yield group, limit


def _reclaimable(group: Path) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split() for line in lines)
    return max(int(counts.get(name, 0)) for name in _RECLAIMABLE)


def _quotas() -> Iterator[float]:
    """Yield the CPU quota, in cores, of each control group of this process that has one."""
    for group in _groups("cpu"):
        try:
            quota, period = (group / "cpu.max").read_text().split()
        except (OSError, ValueError):
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = (str(_read_number(group / name) or "max") for name in names)
        if quota != "max" and period != "max":
            yield int(quota) / int(period)


def _read_number(path: Path) -> int | None:
    """Return the number in a control group's file; None if missing, or "max" or -1 (no limit)."""
    try:
        number = int(path.read_text())
    except (OSError, ValueError):
        return None
    return number if number > 0 else None


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups (cgroups), innermost first.

    `controller` is the limited resource: "cpu" or "memory".
    """
    try:
        lines = (PROCESS / "cgroup").read_text().splitlines()
        mounts = (PROCESS / "mountinfo").read_text().splitlines()
    except OSError:  # not Linux
        return
    paths: dict[str, str] = {}
    for _, controllers, path in (line.split(":", 2) for line in lines):
        paths |= dict.fromkeys(controllers.split(","), path)  # cgroup v2 has no controller name: ""
    for mount in mounts:
        _, _, _, root, mount_point, *rest = mount.split()
        kind, _, options = rest[rest.index("-") + 1 :][:3]
        name = {"cgroup": controller, "cgroup2": ""}.get(kind)
        if name in paths and (kind == "cgroup2" or controller in options.split(",")):
            # A container may mount only its own group, whose path is then not below the root.
            group = PurePosixPath(paths[name])
            inner = group.relative_to(root) if group.is_relative_to(root) else PurePosixPath()
            if ".." not in inner.parts:
                yield from (Path(mount_point, level) for level in (inner, *inner.parents))
