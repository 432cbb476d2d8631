"""A preload of Dask's: the worker tells where it is, and holds its tasks until a file is there.

``GATE`` names that file. A few tasks pass before, so that a job is caught in the middle: as many as
a job's checks give its first worker, and so some parts on the others.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FREE_TASKS = 4


class GatedThreadPoolExecutor(ThreadPoolExecutor):
    """One thread, whose tasks wait; Dask knows threads from processes by the class's name."""

    def __init__(self, gate):
        super().__init__(max_workers=1)
        self._gate = gate
        self._free = FREE_TASKS

    def submit(self, function, *arguments, **options):
        return super().submit(self._run, function, *arguments, **options)

    def _run(self, function, *arguments, **options):
        if self._free == 0:
            while not self._gate.exists():
                time.sleep(0.05)
        else:
            self._free -= 1
        return function(*arguments, **options)


def dask_setup(worker):
    gate = Path(os.environ["GATE"])
    known = (
        os.environ["SLURMD_NODENAME"],
        os.environ.get("CUDA_VISIBLE_DEVICES", "none"),
        os.environ.get("SLURM_RESTART_COUNT", "0"),
        str(os.getpid()),
    )
    gate.with_name(" ".join(["worker", *known])).touch()
    worker.executors["default"] = GatedThreadPoolExecutor(gate)
