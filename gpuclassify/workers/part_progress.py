"""How far a part has come, told by the worker that runs it, and heard by the job's client."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gpuclassify.workers.current_worker import current_worker

TOPIC = "gpuclassify-progress"
TELL_EVERY_SECONDS = 1.0

# What is told: the part's name, its rows, and the share of the work on them that is done.
Told = tuple[str, int, float]


class PartProgress:
    """Counts the rows of a part as their batches are done, and tells of them once a second.

    Parameters
    ----------
    name : str
    rows : int
        Of the part.
    runs : int
        How many mappers read them.
    """

    def __init__(self, name: str, rows: int, runs: int) -> None:
        self._name, self._rows, self._work = name, rows, max(1, rows * runs)
        self._done = 0
        self._told = 0.0

    def advance(self, rows: int) -> None:
        """Count rows of one mapper; repeated ones, as after an error, never exceed the whole."""
        self._done = min(self._done + rows, self._work)
        if time.monotonic() - self._told >= TELL_EVERY_SECONDS:
            self._told = time.monotonic()
            _tell((self._name, self._rows, self._done / self._work))


class RunningParts:
    """The parts that are running, as workers tell of them; safe to use from several threads.

    A part that is run again counts from where it was once it gets beyond that.

    Made when the first of them is handed out.

    Parameters
    ----------
    names : iterable of str
        Parts that are to be run. What is told of others, as by other jobs, is passed over.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._began = time.monotonic()
        self._left = set(names)
        self._told: dict[str, tuple[int, float]] = {}
        self._lock = threading.Lock()

    @property
    def elapsed_seconds(self) -> float:
        """Since the first of the parts was handed out."""
        return time.monotonic() - self._began

    def hear(self, told: Told) -> None:
        """Note what a worker tells, unless more is known already."""
        name, rows, share = told
        with self._lock:
            if name in self._left:
                self._told[name] = max(self._told.get(name, (rows, 0.0)), (rows, share))

    def finish(self, name: str) -> None:
        """Forget a part that is done."""
        with self._lock:
            self._left.discard(name)
            self._told.pop(name, None)

    def totals(self) -> tuple[float, int]:
        """How many parts and rows are done in those that are running."""
        with self._lock:
            told = list(self._told.values())
        return sum(share for _, share in told), round(sum(rows * share for rows, share in told))


_part: contextvars.ContextVar[PartProgress | None] = contextvars.ContextVar("part", default=None)
_listener: contextvars.ContextVar[Callable[[Told], None] | None] = contextvars.ContextVar(
    "listener", default=None
)


@contextlib.contextmanager
def progress_of(part: PartProgress) -> Iterator[None]:
    """What this thread runs in the block are rows of the part."""
    reset = _part.set(part)
    try:
        yield
    finally:
        _part.reset(reset)


def advance(rows: int) -> None:
    """Count rows whose outputs have been computed for the part that this thread runs, if any."""
    part = _part.get()
    if part is not None:
        part.advance(rows)


@contextlib.contextmanager
def heard_by(hear: Callable[[Told], None], client: Any) -> Iterator[None]:
    """Call `hear` with what is told of parts in the block, here or on the workers of a client.

    Parameters
    ----------
    hear : callable
        Called from the client's own thread.
    client : distributed.Client or None
    """
    if client is None:
        reset = _listener.set(hear)
        try:
            yield
        finally:
            _listener.reset(reset)
        return
    client.subscribe_topic(TOPIC, lambda event: hear(tuple(event[1])))
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):  # the scheduler is gone
            client.unsubscribe_topic(TOPIC)


def _tell(told: Told) -> None:
    worker, hear = current_worker(), _listener.get()
    if worker is not None:
        worker.log_event(TOPIC, told)
    elif hear is not None:
        hear(told)
