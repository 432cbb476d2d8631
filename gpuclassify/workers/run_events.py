"""What a run did, handed to who collects it and to the events of a Dask worker."""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuclassify.workers.run_stats import RunStats

EVENT_TOPIC = "gpuclassify"

_collector: contextvars.ContextVar[list[RunStats] | None] = contextvars.ContextVar(
    "collector", default=None
)


@contextlib.contextmanager
def collected_stats() -> Iterator[list[RunStats]]:
    """The stats of what this thread maps in the block, for a task that reports them itself."""
    runs: list[RunStats] = []
    reset = _collector.set(runs)
    try:
        yield runs
    finally:
        _collector.reset(reset)


def publish(stats: RunStats) -> None:
    """Hand the run's stats to who collects them, and log them as an event of a Dask worker."""
    runs = _collector.get()
    if runs is not None:
        runs.append(stats)
    distributed = sys.modules.get("distributed")
    if distributed is None:
        return
    try:
        worker = distributed.get_worker()
    except ValueError:  # not in a task
        return
    worker.log_event(EVENT_TOPIC, stats.as_dict())
