"""Run tasks on a Dask cluster: check workers first, limit tasks in flight, retry lost tasks."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import dask

from gpuclassify.cluster.preflight import SETTING, MisfitError, check_workers
from gpuclassify.frames import Texts, frame_of_texts
from gpuclassify.jobs.stores.store import Store
from gpuclassify.mapping.partition_map import PartitionMap
from gpuclassify.mapping.text_mapper import TextMapper

if TYPE_CHECKING:
    from dask.delayed import Delayed
    from distributed import Client, Future


logger = logging.getLogger(__name__)
Result = TypeVar("Result")

# Tasks in flight: enough that no thread waits for the client, few enough to save its memory.
TASKS_PER_THREAD = 3
FEWEST_TASKS = 32
FILES_A_TASK = 64  # files that one task digests
LOOK_EVERY_SECONDS = 10.0  # interval of counting the cluster's threads
PAUSES_EVERY_SECONDS = 5.0  # interval of looking for paused workers
# Connections fail temporarily, and spot machines end workers whatever their tasks do.
MOST_TRIES = 3


def run_tasks(
    client: Client | None, function: Callable[..., Result], tasks: Iterable[tuple[Any, ...]]
) -> Iterator[Result]:
    """Yield the results of ``function(*task)`` for each task, in order of completion.

    `tasks` are tuples of arguments, and are taken from the iterable as earlier ones finish. Without
    a client, tasks run in this process, one after another. With a client, a task whose workers
    died, or that raises ConnectionError or TimeoutError, is submitted up to three times in all. If
    an error is raised, all unfinished tasks are cancelled.
    """
    if client is None:
        yield from itertools.starmap(function, tasks)
        return
    from distributed import as_completed

    waiting, completed = iter(tasks), as_completed(loop=client.loop)
    pending: dict[Future, tuple[Any, ...]] = {}
    size, looked = FEWEST_TASKS, -math.inf

    def submit(task: tuple[Any, ...]) -> Future:
        future = client.submit(function, *task, pure=False)
        pending[future] = task
        completed.add(future)
        return future

    def fill() -> None:
        nonlocal size, looked
        if time.monotonic() - looked > LOOK_EVERY_SECONDS:
            looked = time.monotonic()
            with contextlib.suppress(OSError):  # a lost scheduler also cancels all tasks
                size = max(FEWEST_TASKS, TASKS_PER_THREAD * sum(client.nthreads().values()))
        for task in itertools.islice(waiting, max(0, size - len(pending))):  # workers may have left
            submit(task)

    try:
        with _warn_of_pauses(client):
            fill()
            for future, result in _settled(completed, lambda future: submit(pending.pop(future))):
                del pending[future]
                yield result
                fill()
    finally:
        _cancel(client, [*pending])


def compute_tasks(client: Client | None, tasks: list[Delayed]) -> Iterator[Any]:
    """Yield the results of delayed tasks that may share inputs, in order of completion.

    Without a client, this process computes all of them before it yields the results, in the order
    of `tasks`. With a client, failed tasks are treated as in `run_tasks`.
    """
    if client is None:
        # The name of a scheduler would make Dask import distributed.
        yield from dask.compute(*tasks, scheduler=dask.get)
        return
    from distributed import as_completed

    futures = client.compute(tasks)
    completed = as_completed(futures)

    def retry(future: Future) -> Future:
        if future.status == "error":  # else its result was lost on the way
            client.retry([future])
        completed.add(future)
        return future

    try:
        with _warn_of_pauses(client):
            for _, result in _settled(completed, retry):
                yield result
    finally:
        _cancel(client, futures)


def digest_files(
    client: Client | None, directory: Store, names: Sequence[str]
) -> Iterator[tuple[str, str, str]]:
    """Yield (name, SHA-256, "") of each file, or (name, "", reason) if it cannot be read.

    `names` are paths relative to `directory`. Workers of `client` read the files, or threads of
    this process if it is None. The order may differ from `names`. See `Store.digests`.
    """
    starts = range(0, len(names), FILES_A_TASK)
    batches = [names[start : start + FILES_A_TASK] for start in starts]
    calls = [(batch,) for batch in batches] if client else [(names,)]
    for digests in run_tasks(client, directory.digests, calls):
        yield from digests


@contextlib.contextmanager
def _warn_of_pauses(client: Client) -> Iterator[None]:
    """Log a warning if all workers stay paused, and so take no tasks, while the block runs."""
    is_over = threading.Event()

    def watch() -> None:
        pauses = 0  # successive looks with all workers paused
        while not is_over.wait(PAUSES_EVERY_SECONDS):
            try:
                workers = client.scheduler_info(n_workers=-1)["workers"].values()
            except Exception:  # a lost scheduler, which the tasks report
                continue
            is_paused = workers and all(worker["status"] == "paused" for worker in workers)
            pauses = pauses + 1 if is_paused else 0
            if pauses == 2:  # a single look may see a short pause
                logger.warning(
                    "the job waits, because all %d workers are paused: each uses most of its "
                    "memory, %s or more. If they stay so, stop the job, and run it again with "
                    "fewer workers or threads a machine, a higher memory_limit, or smaller parts "
                    "(part_bytes=)",
                    len(workers),
                    dask.utils.format_bytes(min(worker["metrics"]["memory"] for worker in workers)),
                )

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()


def _settled(
    completed: Iterable[Future], retry: Callable[[Future], Future]
) -> Iterator[tuple[Future, Any]]:
    """Yield each completed future with its result, and retry tasks as `run_tasks` describes.

    `retry` starts the task of a failed future again, adds its future to `completed`, and returns
    it.
    """
    from distributed import KilledWorker
    from distributed.comm import CommClosedError

    tries: Counter[str] = Counter()
    for future in completed:
        if future.cancelled():  # only a lost scheduler does this
            raise _lost_tasks()
        try:
            yield future, future.result()
        except (KilledWorker, ConnectionError, TimeoutError):
            failed = tries[future.key] + 1
            if failed == MOST_TRIES:
                raise
            tries[retry(future).key] = failed
        except (CommClosedError, concurrent.futures.CancelledError) as err:
            if future.status == "error":  # the task itself raised it
                raise
            raise _lost_tasks() from err


def _lost_tasks() -> ConnectionError:
    return ConnectionError("the Dask scheduler has lost the job's tasks, or is gone itself")


def _cancel(client: Client, futures: list[Future]) -> None:
    # A disconnected client raises these errors.
    with contextlib.suppress(OSError, concurrent.futures.CancelledError):
        client.cancel(futures, force=True)


@dataclass(frozen=True)
class ModelProbe:
    """Trial of a job's models before the job: machines download them, and all workers run them."""

    mappers: tuple[TextMapper, ...]

    def fetch(self) -> None:
        """Download the mappers' models; called on one worker of each machine."""
        for mapper in self.mappers:
            mapper.model.fetch()

    def run(self, memory_bytes: int) -> None:
        """Load each mapper's model in turn, and run it on one short text.

        `memory_bytes` is this worker's share of the host's free memory. Raises the error of a model
        that does not run, such as MisfitError if its weights exceed the free memory.
        """
        for mapper in self.mappers:
            _check_memory(mapper, memory_bytes)
            frame = frame_of_texts("One short text tells if a model runs.", mapper.text_fields)
            mapper.compute(Texts(mapper.list_texts(frame, None)), str)


def check_cluster(client: Client, stages: Iterable[PartitionMap], backend: str) -> None:
    """Raise PreflightError if the client's workers cannot run a job's pipeline stages.

    `backend` is the library of the frames, "pandas" or "cudf". Nothing is checked if
    ``gpuclassify.preflight`` in Dask's config is false. `check_workers` describes the checks.
    """
    if not dask.config.get(SETTING, True):
        return
    mappers = tuple(mapper for stage in stages for mapper in stage.text_mappers())
    probe = ModelProbe(mappers) if mappers else None
    check_workers(client, probe, uses_gpu=may_use_gpu(mappers, backend))


def may_use_gpu(mappers: Iterable[TextMapper], backend: str) -> bool:
    """Return whether a job uses GPUs of its workers, if any: for cudf frames, or for a model."""
    return backend == "cudf" or any(mapper.runner.takes_gpu for mapper in mappers)


def _check_memory(mapper: TextMapper, memory_bytes: int) -> None:
    """Raise MisfitError if a model's weights are larger than the free memory of its device.

    `memory_bytes` is this worker's share of the CPU's. Nothing is checked if models are loaded.
    """
    from gpuclassify.inference.residency import MODELS

    if MODELS.keys():  # loading evicts these if necessary
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
