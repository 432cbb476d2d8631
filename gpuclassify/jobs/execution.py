"""Work on a Dask cluster: models are tried first, few tasks go at a time, lost ones go again."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import dask

from gpuclassify.cluster.preflight import SETTING, MisfitError, check_workers
from gpuclassify.frames import HostTexts
from gpuclassify.mapping.partition_map import PartitionMap
from gpuclassify.mapping.text_mapper import TextMapper

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
    """Results of ``function(*call)`` for each call, as they come; without a client from here.

    Calls are taken as room for them comes. Raises ConnectionError if the scheduler is gone, else
    what the first task raises; tasks that have not begun are dropped. On a cluster, tasks whose
    workers died, lost their GPU or lost a connection are tried again first.
    """
    if client is None:
        yield from itertools.starmap(function, calls)
    else:
        yield from _Window(client, function, iter(calls)).results()


def compute_tasks(client: Any, tasks: list[Any]) -> Iterator[Any]:
    """Results of delayed tasks that may share what they are made of, as they come.

    Without a client they are computed here, and all come when the last is done. See `run_tasks`.
    """
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


@dataclass(frozen=True)
class ModelProbe:
    """Downloads, loads and runs the models of mappers."""

    mappers: tuple[TextMapper, ...]

    def fetch(self) -> None:
        """Download every model, once for the machine."""
        for mapper in self.mappers:
            mapper.model.fetch()

    def run(self, memory_bytes: int) -> None:
        """Load each model in turn and run it on a text, in so much host memory.

        Raises MisfitError if a model is larger than what is free, or whatever else stops it.
        """
        for mapper in self.mappers:
            _check_memory(mapper, memory_bytes)
            mapper.compute(HostTexts(["One short text shows whether a model runs here."]), str)


def check_cluster(client: Any, stages: Iterable[PartitionMap], backend: str) -> None:
    """Raise PreflightError if workers of the client cannot do a job; unless that is set off."""
    if not dask.config.get(SETTING, True):
        return
    mappers = tuple(stage for stage in stages if isinstance(stage, TextMapper))
    probe = ModelProbe(mappers) if mappers else None
    check_workers(client, probe, uses_gpu=may_use_gpu(mappers, backend))


def may_use_gpu(mappers: Iterable[TextMapper], backend: str) -> bool:
    """Whether a job takes a GPU where a worker has one."""
    return backend == "cudf" or any(mapper.runner.takes_gpu for mapper in mappers)


def _check_memory(mapper: TextMapper, memory_bytes: int) -> None:
    """Raise MisfitError if the weights are larger than what is free.

    Where models are loaded already, loading another one makes room for itself.
    """
    from gpuclassify.inference.residency import MODELS

    if MODELS.keys():
        return
    device, dtype = mapper.runner.device_and_dtype()
    needed = sum(mapper.model.weights_bytes(dtype).values())
    free = memory_bytes
    if str(device) != "cpu":
        from gpuclassify.inference.memory import free_bytes  # imports torch

        free = free_bytes(device)
    if needed > free:
        raise MisfitError(
            f"memory of {device}",
            f"{free / 1e9:.2f} GB free",
            f"{needed / 1e9:.2f} GB for {mapper.model.identities[0].name}",
            "fewer workers a machine, a higher memory_limit, or end what else runs there",
        )
