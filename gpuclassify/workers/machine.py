"""Cores and memory of this machine that this process may use.

Slurm's ``--mem`` and systemd's slices bound a control group somewhere above the process. Dask looks
at the topmost one alone, where it finds the whole machine; here the tightest of all levels counts.
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
# Files with limits in bytes, of the second and the first generation of control groups.
_MEMORY_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
_MEMORY_USED = ("memory.current", "memory.usage_in_bytes")
# Pages of files, which are dropped when memory is short; part of what is used.
_RECLAIMABLE = ("inactive_file", "total_inactive_file")


def usable_cores() -> int:
    """Return the CPUs this process may use: the machine's, its affinity, its groups' quotas."""
    from dask.system import cpu_count

    return min([cpu_count(), *(max(1, math.ceil(quota)) for quota in _quotas())])


def usable_memory() -> int:
    """Return the bytes this process may use: the limits of the machine, its groups and itself."""
    from distributed.system import MEMORY_LIMIT

    return min([int(MEMORY_LIMIT), *(limit for _, limit in _memory_limits())])


def free_memory() -> int:
    """Return the bytes that this process may still take, of the machine and of its groups."""
    import psutil

    rest = [int(psutil.virtual_memory().available)]
    for group, limit in _memory_limits():
        used = next((size for name in _MEMORY_USED if (size := _number(group / name))), 0)
        rest.append(max(0, limit - used + _reclaimable(group)))
    return min(rest)


def keep_freed_memory() -> None:
    """Raise glibc's thresholds, so that freed memory is not faulted in for every operation.

    Dask's nanny sets its trim threshold, which makes every large activation a fresh mapping. The
    price is that a worker holds on to its peak memory. A tensor above the 64 MiB of a heap in a
    thread's arena is mapped anew all the same; token budgets for CPUs stay below that.
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
            if (limit := _number(group / name)) is not None:
                yield group, limit


def _reclaimable(group: Path) -> int:
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split() for line in lines)
    return max(int(counts.get(name, 0)) for name in _RECLAIMABLE)


def _quotas() -> Iterator[float]:
    """Yield the CPUs that a group's processes may use together, at any time."""
    for group in _groups("cpu"):
        try:
            quota, period = (group / "cpu.max").read_text().split()
        except (OSError, ValueError):
            limits = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
            quota, period = (str(number) if number else "max" for number in limits)
        if quota != "max" and period != "max":
            yield int(quota) / int(period)


def _number(path: Path) -> int | None:
    """Return the positive number in a file, or None: no limit is "max", or -1."""
    try:
        number = int(path.read_text())
    except (OSError, ValueError):
        return None
    return number if number > 0 else None


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups, the innermost first."""
    try:
        lines = (PROCESS / "cgroup").read_text().splitlines()
        mounts = (PROCESS / "mountinfo").read_text().splitlines()
    except OSError:  # not Linux
        return
    paths: dict[str, str] = {}
    for _, controllers, path in (line.split(":", 2) for line in lines):
        paths |= dict.fromkeys(controllers.split(","), path)  # cgroup v2 has no controller name: ""
    for mount in mounts:
        _, _, _, root, place, *rest = mount.split()
        kind, _, options = rest[rest.index("-") + 1 :][:3]
        name = {"cgroup": controller, "cgroup2": ""}.get(kind)
        if name in paths and (kind == "cgroup2" or controller in options.split(",")):
            # In a container, the mount may contain only the container's group.
            below = PurePosixPath(paths[name])
            inner = below.relative_to(root) if below.is_relative_to(root) else PurePosixPath()
            if ".." not in inner.parts:
                yield from (Path(place, level) for level in (inner, *inner.parents))
