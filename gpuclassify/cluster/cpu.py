"""How a local CPU cluster is cut: few processes, many torch threads in each."""

from collections.abc import Mapping
from typing import Any

# Measured: one process of two torch threads is as fast as two of one, and holds one model.
CORES_PER_WORKER = 8


def usable_cores() -> int:
    """Return the CPUs this process may use: the machine's, its affinity, its cgroup's quota."""
    from dask.system import cpu_count

    return cpu_count()


def cpu_cluster_options(
    options: Mapping[str, Any] | None = None,
    *,
    n_workers: int | None = None,
    threads_per_worker: int = 1,
    cores: int | None = None,
) -> tuple[dict[str, Any], int]:
    """Build the arguments of ``LocalCluster`` and the torch threads of each worker.

    Parameters
    ----------
    options : mapping, optional
        Arguments to pass on as they are.
    n_workers : int, optional
        Worker processes; one for every 8 cores by default.
    threads_per_worker : int
        Tasks that a worker runs at a time.
    cores : int, optional
        CPUs to share out; `usable_cores` by default.

    Returns
    -------
    options : dict
        Arguments of ``distributed.LocalCluster``.
    torch_threads : int
        Threads of torch per worker: workers times threads never exceeds `cores`, unless
        there are more workers than cores.
    """
    cores = usable_cores() if cores is None else cores
    n_workers = max(1, cores // CORES_PER_WORKER) if n_workers is None else n_workers
    workers = {"n_workers": n_workers, "threads_per_worker": threads_per_worker}
    return workers | dict(options or {}), max(1, cores // n_workers)
