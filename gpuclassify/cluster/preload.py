"""Settings of Dask workers and schedulers; ``dask worker --preload gpuclassify.cluster.preload``.

As a preload, this module does the same as `prepare`, before any task, also for ``dask scheduler``,
``dask cuda worker`` and in Dask's configuration (``distributed.worker.preload``). A worker gets as
torch threads the CPUs of its Slurm task, or else the cores of its process. If workers share cores,
set ``OMP_NUM_THREADS`` (above 1) to the share of each.
"""

import os
from collections.abc import Mapping
from typing import Any

from distributed import Client, Scheduler, Worker, WorkerPlugin

from gpuclassify.workers.machine import keep_freed_memory, threads_in, usable_cores

# A task that holds the GIL (compiling, loading, pandas) delays heartbeats. Lost hosts are detected
# by the TCP timeout below, so that this timeout only matters for hanging workers.
WORKER_TTL_SECONDS = 900.0
# Every worker lost during a task counts against the task, also by preemption.
ALLOWED_FAILURES = 10
COMMUNICATION = {"distributed.comm.timeouts.tcp": "120s"}
# Any value of this variable keeps Python from adding the working directory to `sys.path`.
SAFE_PATH, BY_US = "PYTHONSAFEPATH", "gpuclassify"


class ProcessSettings(WorkerPlugin):
    """Dask worker plugin that sets threads, memory allocation and timeouts of a worker's process.

    `threads` are torch's and the tokenizers library's. If None, they are the worker's cores divided
    by `sharing`, the number of workers that use the same cores. By default, torch would have a
    single thread, because Dask's nanny sets ``OMP_NUM_THREADS=1``, and each worker's tokenizers
    library would use all cores.
    """

    name = "gpuclassify-process"

    def __init__(self, threads: int | None = None, *, sharing: int = 1) -> None:
        self.threads = threads
        self.sharing = sharing

    def setup(self, worker: Worker) -> None:
        """Set threads, memory allocation and timeouts; Dask calls this when `worker` starts.

        A worker without a nanny, Dask's parent process, may run in the user's process, so its
        memory allocation and tokenizing threads do not change. ``RAYON_NUM_THREADS``, if set, takes
        precedence for tokenizing.
        """
        import torch

        threads = self.threads or max(1, usable_cores() // self.sharing)
        torch.set_num_threads(threads)
        if worker.nanny:
            if (
                os.environ.get(SAFE_PATH) == BY_US
            ):  # programs started by tasks need their usual path
                del os.environ[SAFE_PATH]
            os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
            keep_freed_memory()
        if not worker.address.startswith("inproc://"):
            raise_by_value()(COMMUNICATION)


class TorchMemoryFraction(WorkerPlugin):
    """Dask worker plugin that limits torch to a fraction of its GPU's memory."""

    name = "gpuclassify-torch-memory-fraction"

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction

    def setup(self, worker: Worker) -> None:
        """Limit torch on the first GPU that it sees, the worker's own if dask-cuda started it."""
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError(
                f"torch {torch.__version__} sees no GPU on worker {worker.address}; install a "
                "CUDA build of torch that fits the driver, or use cluster_type='cpu'"
            )
        torch.cuda.set_per_process_memory_fraction(self.fraction)


def raise_by_value() -> Any:
    """Return a function that increases Dask's timeouts and limits, but never lowers them.

    It is made here because pickle then sends its code: a scheduler need not have this package.
    """

    def raise_settings(
        communication: Mapping[str, str],
        ttl_seconds: float = 0,
        allowed_failures: int = 0,
        dask_scheduler: Scheduler | None = None,
    ) -> None:
        from dask import config
        from dask.utils import parse_timedelta

        for name, time in communication.items():
            if parse_timedelta(config.get(name)) < parse_timedelta(time):
                config.set({name: time})
        if dask_scheduler is None:
            return
        if dask_scheduler.worker_ttl:  # if None, no worker is removed
            dask_scheduler.worker_ttl = max(dask_scheduler.worker_ttl, ttl_seconds)
        dask_scheduler.allowed_failures = max(dask_scheduler.allowed_failures, allowed_failures)

    return raise_settings


def set_up(client: Client, threads: int | None, sharing: int = 1) -> None:
    """Apply the settings of `gpuclassify.cluster.prepare` to a running cluster.

    `threads` and `sharing` are explained at `ProcessSettings`.
    """
    settings = (COMMUNICATION, WORKER_TTL_SECONDS, ALLOWED_FAILURES)
    client.run_on_scheduler(raise_by_value(), *settings)
    client.register_plugin(ProcessSettings(threads, sharing=sharing))


def dask_setup(service: Scheduler | Worker) -> None:
    """Configure this process's Dask scheduler or worker; Dask calls it in a ``--preload``.

    A worker's torch threads are ``OMP_NUM_THREADS`` if that is above 1, else
    ``SLURM_CPUS_PER_TASK``, else the cores that it may use.
    """
    if isinstance(service, Scheduler):
        raise_by_value()(COMMUNICATION, WORKER_TTL_SECONDS, ALLOWED_FAILURES, service)
        return
    threads = threads_in("OMP_NUM_THREADS")
    if threads <= 1:  # Dask's nanny has set it
        threads = threads_in("SLURM_CPUS_PER_TASK")
    ProcessSettings(threads or None).setup(service)
