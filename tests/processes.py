"""Other processes: workers of Dask, and waiting for what they do."""

import contextlib
import os
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]


def search_path():
    """PYTHONPATH for processes that see this checkout first, and what this one was given."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


@contextlib.contextmanager
def local_client(workers=1, processes=False, **options):
    """A client of workers with a thread each, in this process or in processes of their own."""
    from distributed import Client, LocalCluster  # a machine without it runs other tests

    from gpuclassify.cluster.local import PatientNanny

    options = {"threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"} | options
    if processes:
        options["worker_class"] = PatientNanny
    with (
        LocalCluster(n_workers=workers, processes=processes, **options) as cluster,
        Client(cluster) as client,
    ):
        yield client


def wait_until(is_so, seconds=120):
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"not so after {seconds} seconds"
        time.sleep(0.05)


def is_running(pid):
    """Whether a process is there that has not ended; one that has may wait for its parent."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
