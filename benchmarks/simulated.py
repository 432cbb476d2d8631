"""A simulated fleet: a real scheduler and many real workers in one process beside this one.

The client reaches the scheduler over TCP, as it would on a cluster. Workers have one thread each
and reach the scheduler in memory: what is simulated is that they are on machines of their own.
``python -m benchmarks.simulated FILE`` is how the process starts.
"""

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_ROOT = Path(__file__).parents[1]
LONGEST_START_SECONDS = 180
# What each worker does besides tasks, on cores of its own where it has a machine of its own.
QUIET_WORKERS = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "10s",
    "distributed.admin.system-monitor.interval": "10s",
    "distributed.admin.system-monitor.gil.enabled": False,
    "distributed.admin.system-monitor.disk": False,
}


@dataclass(frozen=True)
class Fleet:
    """A fleet that is up.

    Attributes
    ----------
    address : str
        Of its scheduler.
    processes : dict of str to psutil.Process
        This one, which has the client, and that of the scheduler and all workers.
    """

    address: str
    processes: dict[str, psutil.Process]

    def core_seconds(self) -> dict[str, float]:
        """Time that each process has spent on cores since it began."""
        return {name: sum(one.cpu_times()[:2]) for name, one in self.processes.items()}

    def resident_bytes(self) -> dict[str, int]:
        """Memory that each process holds now."""
        return {name: one.memory_info().rss for name, one in self.processes.items()}


@contextlib.contextmanager
def fleet(workers: int) -> Iterator[Fleet]:
    """A scheduler and so many workers on this machine, gone after the block."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "address")
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.simulated", str(file), "--workers", str(workers)],
            cwd=_ROOT,
            env=os.environ | {"DASK_LOGGING__DISTRIBUTED": "error"},
        )
        try:
            names = {"client": os.getpid(), "scheduler and workers": process.pid}
            processes = {name: psutil.Process(pid) for name, pid in names.items()}
            yield Fleet(_written(file, process), processes)
        finally:
            process.terminate()
            process.wait()


def _written(file: Path, process: subprocess.Popen) -> str:
    """What the process writes to the file once it is ready."""
    deadline = time.monotonic() + LONGEST_START_SECONDS
    while not file.exists():
        if process.poll() is not None:
            raise RuntimeError(f"the simulated fleet ended with {process.returncode}: see above")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no fleet after {LONGEST_START_SECONDS} s: ask for fewer --workers")
        time.sleep(0.1)
    return file.read_text()


def main(arguments: Sequence[str] | None = None) -> None:
    """Be a scheduler and its workers until told to end."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulated", description=__doc__)
    parser.add_argument("file", type=Path, help="written with the address when all is ready")
    parser.add_argument("--workers", type=int, default=1, help="(1)")
    options = parser.parse_args(arguments)
    asyncio.run(run(options.file, options.workers))


async def run(file: Path, workers: int) -> None:
    """Run a scheduler on the loopback, and workers without nannies or limits of memory."""
    import dask
    from distributed import Scheduler, Worker

    dask.config.set(QUIET_WORKERS)
    async with Scheduler(
        host=["127.0.0.1", None], port=[0, None], protocol=["tcp", "inproc"], dashboard=False
    ) as scheduler:
        over_tcp, in_memory = (listener.contact_address for listener in scheduler.listeners)
        for _ in range(workers):
            await Worker(
                in_memory,
                nthreads=1,
                dashboard=False,
                memory_limit=0,
                local_directory=str(file.parent),
            )
        part = file.with_suffix(".part")
        part.write_text(over_tcp)
        part.rename(file)  # whole, once it has this name
        await scheduler.finished()


if __name__ == "__main__":
    main()
