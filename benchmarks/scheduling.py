"""What does a partition cost that does nothing?

``python -m benchmarks.scheduling --help`` lists the options; README.md says what is measured.
"""

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import pandas as pd
from distributed import Client, wait

from benchmarks.harness import begin, finish, new_parser, other_core_seconds, parse
from benchmarks.simulated import LONGEST_START_SECONDS, Fleet, fleet
from gpuclassify.jobs.execution import run_tasks

QUESTION = "scheduling"
JOB, FRAME = "job", "lazy frame"
PAYLOAD_BYTES = 3_200  # of a job with one classifier
LOOK_EVERY_SECONDS = 0.1
NO_ROWS = pd.DataFrame({"text": pd.Series(dtype="str")})


def main(arguments: Sequence[str] | None = None) -> Path:
    """Measure, write the result, print a table, and return the result's path."""
    options = parse_options(arguments)
    result = begin(options, dtype="none", payload_bytes=PAYLOAD_BYTES)
    result["ways"] = {}
    for name in options.ways:
        with fleet(options.workers) as processes:
            result["ways"][name] = measure(WAYS[name], processes, options)
    return finish(QUESTION, result, options, table)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options from the command line."""
    parser = new_parser(QUESTION, __doc__)
    parser.add_argument("--partitions", type=int, default=100_000, help="(100000)")
    parser.add_argument("--workers", type=int, default=200, help="simulated (200)")
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=tuple(WAYS))
    return parse(parser, arguments, partitions=200, workers=4)


def run_as_job(client: Client, partitions: int) -> int:
    """Partitions done, submitted as a job submits its parts, with as much for each to carry."""
    packed = bytes(PAYLOAD_BYTES)
    calls = ((number, f"part-{number:05d}.parquet", packed) for number in range(partitions))
    return sum(rows == 0 for rows in run_tasks(client, no_part, calls))


def no_part(number: int, name: str, packed: bytes) -> int:
    """A part of a job that is not read, mapped or written: no rows."""
    return 0


def run_as_frame(client: Client, partitions: int) -> int:
    """Partitions done of a lazy frame, all of which are given to the scheduler at once."""
    frame = dd.from_map(no_rows, range(partitions), meta=NO_ROWS)
    frame = frame.map_partitions(no_change, bytes(PAYLOAD_BYTES), meta=NO_ROWS)
    done = client.persist(frame)
    wait(done)
    return done.npartitions


def no_rows(number: int) -> pd.DataFrame:
    """A partition that is not read."""
    return NO_ROWS


def no_change(partition: pd.DataFrame, mapper: bytes) -> pd.DataFrame:
    """The partition as it is."""
    return partition


WAYS: dict[str, Callable[[Client, int], int]] = {JOB: run_as_job, FRAME: run_as_frame}


def measure(
    way: Callable[[Client, int], int], processes: Fleet, options: argparse.Namespace
) -> dict[str, Any]:
    """Time, cores' time and memory of one way, on a fleet of its own."""
    with Client(processes.address) as client:
        client.wait_for_workers(options.workers, timeout=LONGEST_START_SECONDS)
        way(client, 2 * options.workers)  # connections are made, modules imported
        with MostMemory(processes) as memory:
            before, busy, started = processes.core_seconds(), busy_seconds(), time.perf_counter()
            done = way(client, options.partitions)
            seconds, busy = time.perf_counter() - started, busy_seconds() - busy
            core_seconds = {
                name: spent - before[name] for name, spent in processes.core_seconds().items()
            }
    if done != options.partitions:
        raise RuntimeError(f"{done} of {options.partitions} partitions came back")
    return {
        "partitions": done,
        "workers": options.workers,
        "seconds": seconds,
        "seconds_per_partition": seconds / done,
        "core_seconds_per_partition": {name: spent / done for name, spent in core_seconds.items()},
        "other_cores": max(0.0, busy - sum(core_seconds.values())) / seconds,
        "resident_bytes_before": memory.before,
        "resident_bytes_added": memory.added,
    }


def busy_seconds() -> float:
    """Time that the machine's cores have spent on anything."""
    return other_core_seconds() + time.process_time()


class MostMemory:
    """The most memory that a fleet's processes come to hold in a ``with`` block.

    Attributes
    ----------
    before : dict of str to int
        Bytes, by process.
    """

    def __init__(self, processes: Fleet) -> None:
        self._processes = processes
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "MostMemory":
        self.before = self._most = self._processes.resident_bytes()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def added(self) -> dict[str, int]:
        """Bytes above those before, by process."""
        return {name: most - self.before[name] for name, most in self._most.items()}

    def _watch(self) -> None:
        while not self._is_over.wait(LOOK_EVERY_SECONDS):
            now = self._processes.resident_bytes()
            self._most = {name: max(most, now[name]) for name, most in self._most.items()}


def table(result: dict[str, Any]) -> str:
    """The result as a few lines for people."""
    settings = result["settings"]
    lines = [
        f"{settings['partitions']:,} partitions that do nothing, "
        f"{settings['workers']} simulated workers",
        f"{'ms a partition':>28}{'on cores: client, scheduler and workers':>42}"
        f"{'MB added: client, others':>27}",
    ]
    for name, found in result["ways"].items():
        cores = [1e3 * seconds for seconds in found["core_seconds_per_partition"].values()]
        added = [count / 1e6 for count in found["resident_bytes_added"].values()]
        lines.append(
            f"  {name:12}{1e3 * found['seconds_per_partition']:14.2f}"
            f"{cores[0]:19.2f}{cores[1]:23.2f}{added[0]:18.0f}{added[1]:9.0f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
