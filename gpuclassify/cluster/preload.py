"""``dask worker --preload gpuclassify.cluster.preload``: what `prepare` does, before any task.

The same goes for ``dask scheduler``, ``dask cuda worker`` and Dask's configuration
(``distributed.worker.preload``). A worker's threads of torch are the cores that its process may
use. Where workers share cores, set ``OMP_NUM_THREADS`` (above 1) to the share of each.
"""

import os

from distributed import Scheduler, Worker

from gpuclassify.cluster.plugins import (
    ALLOWED_FAILURES,
    COMMUNICATION,
    WORKER_TTL_SECONDS,
    raise_by_value,
    worker_plugins,
)


def dask_setup(service: Scheduler | Worker) -> None:
    """Set up the scheduler or worker that this module is preloaded in; called by Dask."""
    if isinstance(service, Scheduler):
        raise_by_value()(COMMUNICATION, WORKER_TTL_SECONDS, ALLOWED_FAILURES, service)
        return
    threads = int(os.environ.get("OMP_NUM_THREADS") or 1)
    for plugin in worker_plugins(threads if threads > 1 else None):
        plugin.setup(service)
