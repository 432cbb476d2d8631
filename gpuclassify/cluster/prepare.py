"""Settings for long, memory-hungry tasks on workers that come and go: `prepare`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Client


def prepare(client: Client, *, threads: int | None = None) -> Client:
    """Set a running cluster up for classifying: its scheduler, its workers, and those to come.

    It changes this, and nothing else. A setting that is already more patient stays. Timeouts are
    those of whole processes: a scheduler that runs in this one shares them with it.

    - scheduler: a worker is given up after 15 minutes without a heartbeat (``worker-ttl``; Dask's
      own is 5), since a task that holds Python's lock holds up the heartbeat too;
    - scheduler: a task may lose 10 workers before it fails (``allowed-failures``; Dask's own is
      3), since spot machines are taken away under innocent tasks;
    - scheduler and workers: a silent connection is dead after 120 seconds
      (``comm.timeouts.tcp``; Dask's own is 30). Connections that are open already keep their
      timeout. Connecting keeps Dask's, since the last results of a worker that is gone are asked
      for as long as that takes;
    - workers: threads of torch and of tokenizing;
    - workers with a nanny: glibc keeps freed memory instead of returning it at once.

    Left alone: ``distributed.worker.memory``, whose limits only the one who knows the machine can
    set. A model's memory is unmanaged memory to Dask: workers pause at 80% of their memory limit
    and are killed at 95%, so that a limit must leave room for the model.

    Parameters
    ----------
    client : distributed.Client
        Of any cluster. The package must be installed on the workers; the scheduler needs only
        Dask.
    threads : int, optional
        Threads of torch and of tokenizing in each worker. By default the cores that a worker may
        use, shared among the workers that are there now and may use the same ones.

    Returns
    -------
    distributed.Client
        The same client.

    Raises
    ------
    ValueError
        No worker is there, so that their share of the cores is unknown; give `threads`. Or
        `threads` is below 1.
    RuntimeError
        The client is asynchronous.

    Examples
    --------
    >>> from gpuclassify.cluster import prepare
    >>> client = prepare(Client("tcp://10.0.0.1:8786"))  # doctest: +SKIP
    """
    if client.asynchronous:
        raise RuntimeError(
            "prepare() waits for the cluster: use a Client without asynchronous=True"
        )
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads} is below 1; leave it out for the cores' share")
    from gpuclassify.cluster.preload import set_up

    set_up(client, threads, 1 if threads is not None else _workers_sharing_cores(client))
    return client


def _workers_sharing_cores(client: Client) -> int:
    """The most workers that may use one and the same set of cores."""

    def cores() -> tuple[str, tuple[int, ...]]:
        import os
        import socket

        affinity = getattr(os, "sched_getaffinity", lambda pid: range(os.cpu_count() or 1))
        return socket.gethostname(), tuple(sorted(affinity(0)))

    places = client.run(cores)
    if not places:
        raise ValueError(
            "no worker is there yet, so that their share of the cores is unknown; wait for them "
            "with client.wait_for_workers(1), or give threads="
        )
    return max(Counter(places.values()).values())
