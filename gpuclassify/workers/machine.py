"""Numbers of cores and of bytes of memory that this process may use, and the load of the cores.

Slurm's ``--mem`` and systemd's slices limit a control group somewhere above the process. Dask reads
the topmost group alone, which has the whole machine; here the tightest limit of all levels counts.
"""

import contextlib
import ctypes
import logging
import math
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
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
    """Return the number of CPU cores that this process may use, by its affinity and CPU quotas."""
    from dask.system import cpu_count

    return min([cpu_count(), *(max(1, math.ceil(quota)) for quota in _quotas())])


def threads_in(variable: str) -> int:
    """Return the number of threads in an environment variable such as OMP_NUM_THREADS; 0 for none.

    In a list of numbers, which OpenMP takes for nested levels, the first counts.
    """
    number = os.environ.get(variable, "").partition(",")[0].strip()
    return int(number) if number.isdecimal() else 0


def usable_memory() -> int:
    """Return the number of bytes of memory that this process may use, including memory in use."""
    from distributed.system import MEMORY_LIMIT

    return min([int(MEMORY_LIMIT), *(limit for _, limit in _memory_limits())])


def free_memory() -> int:
    """Return the number of bytes that this process may still allocate.

    Page cache that the kernel can drop counts as free.
    """
    import psutil

    free = [int(psutil.virtual_memory().available)]
    for group, limit in _memory_limits():
        used = next((size for name in _MEMORY_USED if (size := _read_number(group / name))), 0)
        free.append(max(0, limit - used + _reclaimable(group)))
    return min(free)


def other_core_seconds() -> float:
    """Return the CPU time, in seconds of one core, that other processes have used since boot.

    Processes that this one started do not count.
    """
    import psutil

    times = psutil.cpu_times()
    # Later fields are parts of earlier ones.
    busy = sum(times[:8]) - times.idle - getattr(times, "iowait", 0.0)
    return busy - own_core_seconds()


def own_core_seconds() -> float:
    """Return the CPU time, in seconds of one core, that this process and its children have used."""
    import psutil

    spent = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            spent += sum(process.cpu_times()[:4])
    return spent + time.process_time() + sum(os.times()[2:4])


@dataclass(frozen=True)
class CpuLoad:
    """Load of this machine's cores during a measurement.

    Attributes
    ----------
    cores, usable_cores : int
        Cores of the machine, and those that this process may use.
    other_cores : float
        Cores that other processes used on average during the measurement.
    load_average : float
        Processes that ran or waited for a core before the measurement, on average over one or five
        minutes, whichever is more.
    """

    cores: int
    usable_cores: int
    other_cores: float
    load_average: float

    @property
    def is_idle(self) -> bool:
        """Whether other processes used at most 0.1 cores, or 5% of `usable_cores` if more."""
        return self.other_cores <= max(0.1, 0.05 * self.usable_cores)

    @property
    def idle_share(self) -> float:
        """Estimated time of the measured work on an idle machine, divided by the measured time.

        It is the share of `usable_cores` that other processes left free, 0.1 to 1.
        """
        return min(1.0, max(0.1, (self.cores - self.other_cores) / self.usable_cores))

    @property
    def slowdown(self) -> float:
        """Estimated time of work under the load average, divided by its time on an idle machine.

        The work is assumed to run in one thread per usable core, and all cores to be shared evenly.
        """
        return max(1.0, (self.load_average + self.usable_cores) / self.cores)


class LoadMeter:
    """Measurement of the load of this machine's cores, from construction until `read` is called."""

    def __init__(self) -> None:
        self._load_average = max(os.getloadavg()[:2])
        self._other_seconds, self._began = other_core_seconds(), time.perf_counter()

    def read(self) -> CpuLoad:
        """Return the load of the cores by other processes since this object was made."""
        cores, seconds = os.cpu_count() or 1, time.perf_counter() - self._began
        other = (other_core_seconds() - self._other_seconds) / seconds
        return CpuLoad(cores, usable_cores(), min(max(0.0, other), cores), self._load_average)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory and use it again, instead of returning it to the kernel.

    New memory from the kernel is slow, because of page faults, and Dask's nanny sets a low trim
    threshold. The price is that a worker keeps its peak memory. Tensors above 64 MiB, the size of a
    heap in a thread's arena, get new memory regardless.
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
    """Yield the CPU quotas, in cores, of the cgroups of this process that have one."""
    for group in _groups("cpu"):
        try:
            quota, period = (group / "cpu.max").read_text().split()
        except (OSError, ValueError):
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = (str(_read_number(group / name) or "max") for name in names)
        if quota != "max" and period != "max":
            yield int(quota) / int(period)


def _read_number(path: Path) -> int | None:
    try:
        number = int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max", which means no limit
        return None
    return number if number > 0 else None  # -1 means no limit


def _groups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroups for "cpu" or "memory", innermost first."""
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
