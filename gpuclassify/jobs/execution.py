"""Tasks on a Dask cluster: few of them submitted at a time, and what lost workers and errors do."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

Result = TypeVar("Result")

# Enough that no thread waits for the client, few enough that the client stays small.
TASKS_PER_THREAD = 3
FEWEST_TASKS = 32
LOOK_EVERY_SECONDS = 10.0  # at how many threads the cluster has
# Connections fail for a while, and workers on spot machines die of other causes than their tasks.
MOST_TRIES = 3


def run_tasks(
    client: Any, function: Callable[..., Result], calls: Iterable[tuple[Any, ...]]
) -> Iterator[Result]:
    """Results of ``function(*call)`` for each of the calls, as they come.

    Parameters
    ----------
    client : distributed.Client or None
        None runs them here, one after another.
    function : callable
    calls : iterable of tuple
        Taken as room for them comes.

    Raises
    ------
    ConnectionError
        The scheduler is gone.
    Exception
        The first one that a task raises; tasks that have not begun are dropped. On a cluster,
        tasks whose workers died, lost their GPU or lost a connection are tried again first.
    """
    if client is None:
        yield from itertools.starmap(function, calls)
    else:
        yield from _Window(client, function, iter(calls)).results()


def compute_tasks(client: Any, tasks: list[Any]) -> Iterator[Any]:
    """Results of delayed tasks that may share what they are made of, as they come.

    Parameters
    ----------
    client : distributed.Client or None
        None computes them here, and gives results when all are done.
    tasks : list of dask.delayed.Delayed

    Raises
    ------
    ConnectionError, Exception
        See `run_tasks`.
    """
    import dask

    if client is None:
        yield from dask.compute(*tasks, scheduler="sync")
        return
    from distributed import as_completed

    futures = client.compute(tasks)
    completed = as_completed(futures)
    tries: Counter[str] = Counter()
    try:
        for future in completed:
            if future.cancelled():
                raise _lost()
            try:
                yield future.result()
            except _passing_errors():
                tries[future.key] += 1
                if tries[future.key] == MOST_TRIES:
                    raise
                if future.status == "error":  # else its result was lost on the way
                    client.retry([future])
                completed.add(future)
            except _losses() as err:
                _raise_lost(future, err)
    finally:
        _cancel(client, futures)


class _Window:
    """The tasks of a job that are with the scheduler."""

    def __init__(
        self, client: Any, function: Callable[..., Any], calls: Iterator[tuple[Any, ...]]
    ) -> None:
        from distributed import as_completed

        self._client = client
        self._function = function
        self._calls = calls
        self._pending: dict[Any, tuple[tuple[Any, ...], int]] = {}
        self._completed = as_completed(loop=client.loop)
        self._size = FEWEST_TASKS
        self._looked = 0.0

    def results(self) -> Iterator[Any]:
        """See `run_tasks`."""
        try:
            self._fill()
            for future in self._completed:
                call, tries = self._pending.pop(future)
                yield from self._result(future, call, tries)
                self._fill()
        finally:
            _cancel(self._client, list(self._pending))

    def _fill(self) -> None:
        if time.monotonic() - self._looked > LOOK_EVERY_SECONDS:
            self._looked = time.monotonic()
            with contextlib.suppress(OSError):  # a lost scheduler cancels all tasks, which shows
                threads = sum(self._client.nthreads().values())
                self._size = max(FEWEST_TASKS, TASKS_PER_THREAD * threads)
        for call in itertools.islice(self._calls, self._size - len(self._pending)):
            self._submit(call, 1)

    def _submit(self, call: tuple[Any, ...], tries: int) -> None:
        future = self._client.submit(self._function, *call, pure=False)
        self._pending[future] = (call, tries)
        self._completed.add(future)

    def _result(self, future: Any, call: tuple[Any, ...], tries: int) -> Iterator[Any]:
        if future.cancelled():
            raise _lost()
        try:
            yield future.result()
        except _passing_errors():
            if tries == MOST_TRIES:
                raise
            self._submit(call, tries + 1)
        except _losses() as err:
            _raise_lost(future, err)


def _passing_errors() -> tuple[type[Exception], ...]:
    """What a task fails of for what happens around it."""
    from distributed import KilledWorker

    return (KilledWorker, ConnectionError, TimeoutError)


def _losses() -> tuple[type[BaseException], ...]:
    """What asking for a result fails of when the scheduler goes away under it."""
    from distributed.comm import CommClosedError

    return (CommClosedError, concurrent.futures.CancelledError)


def _raise_lost(future: Any, error: BaseException) -> NoReturn:
    """Tell of the scheduler, unless it is the task itself that failed so."""
    if future.status == "error":
        raise error
    raise _lost() from error


def _lost() -> ConnectionError:
    """For tasks that are cancelled: a job cancels none that it waits for."""
    return ConnectionError("the Dask scheduler has lost the job's tasks, or is gone itself")


def _cancel(client: Any, futures: list[Any]) -> None:
    # A client that is cut off raises these.
    with contextlib.suppress(OSError, concurrent.futures.CancelledError):
        client.cancel(futures, force=True)
