"""Wrappers of tasks: errors arrive as one message, and a worker without its GPU retires."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from gpuclassify.workers.device_errors import BrokenDeviceError, is_broken_device
from gpuclassify.workers.run_context import current_worker

if TYPE_CHECKING:
    from distributed import Worker

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

EVENT_TOPIC = "gpuclassify-faults"
# Processes in which a task may break the device; after that, its data or its model is the cause.
MOST_ATTEMPTS = 3
ASK_SECONDS = 30.0  # timeout of a call to the scheduler
RETIRE_SECONDS = 60.0  # timeout for moving results to other workers
EXIT_SECONDS = 60.0  # timeout for a clean exit, which a broken driver may prevent


class PanicError(RuntimeError):
    """Error of code that raised no ``Exception``, such as a panic in a library of Rust."""


@contextlib.contextmanager
def as_errors() -> Iterator[None]:
    """Convert a BaseException in the block to an Exception, except KeyboardInterrupt.

    A panic of a tokenizer is not an Exception: it passes every handler, and Dask cannot send it to
    the client. SystemExit would end the worker, and the task would be tried again elsewhere.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except SystemExit as err:
        raise RuntimeError(
            f"a task called sys.exit({err.code!r}), which would end the worker and not the job: "
            "raise an error there instead"
        ) from None
    except BaseException as err:
        raise PanicError(f"{type(err).__name__}: {err}") from None


def message_first(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a task so that its errors show their message first, and the worker's frames last.

    Dask shows the worker's frames, and the frames of every cause, above the message. Here they
    follow as a note, with the task and its worker. Outside of a Dask worker nothing changes.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Result:
        try:
            return function(*args, **kwargs)
        except Exception as err:
            worker = current_worker()
            if worker is None or type(err).__name__ == "Reschedule":  # Dask's signal
                raise
            place = f"task {worker.get_current_task()} on {worker.address}"
            shown = traceback.TracebackException.from_exception(err)
            lines, message = list(shown.format()), list(shown.format_exception_only())
            frames = "".join(lines[: len(lines) - len(message)]).rstrip()
            err.add_note(f"Raised in {place}\n{frames}")
            raise err.with_traceback(None) from None

    return run


def on_sound_device(function: Callable[..., Result]) -> Callable[..., Result]:
    """Make a task retire its worker if the device breaks under it, and end with an ``Exception``.

    A worker with a broken CUDA context fails every task that it gets, and fails faster than
    others work. So it moves its results to other workers and ends, its nanny starts a new process
    with a new context, and its tasks run again. A task that breaks the device of `MOST_ATTEMPTS`
    processes is at fault rather than its worker: it fails, with BrokenDeviceError, as one does
    whose worker cannot be replaced or shares the client's process.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Result:
        try:
            with as_errors():
                return function(*args, **kwargs)
        except Exception as err:
            if not is_broken_device(err):
                raise
            _answer(err)

    return run


def _answer(error: Exception) -> NoReturn:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    worker = current_worker()
    if worker is None or worker.address.startswith("inproc://"):  # runs in the client's process
        raise BrokenDeviceError(
            f"{reason}: this process can use its GPU no more, start it again"
        ) from error
    attempts = _count_attempt(worker)
    logger.error("the GPU is lost to %s, which retires: %s", worker.address, reason)
    worker.log_event(EVENT_TOPIC, {"reason": reason, "attempts": attempts, "pid": os.getpid()})
    if attempts >= MOST_ATTEMPTS:
        # Once the error is reported: a worker that leaves takes its tasks back instead.
        worker.loop.add_callback(worker.loop.call_later, 1.0, _start_retiring, worker, reason)
        raise BrokenDeviceError(
            f"{reason}: {attempts} workers, one after another, have lost their GPU to this task. "
            "Look for a text or a model that does it, with CUDA_LAUNCH_BLOCKING=1"
        ) from error
    worker.loop.add_callback(_start_retiring, worker, reason)
    from distributed import Reschedule
    from distributed.core import Status

    # Keep the task until the scheduler gives it to another worker.
    deadline = time.monotonic() + RETIRE_SECONDS + EXIT_SECONDS
    over = (Status.closing, Status.closed, Status.failed)
    while worker.status not in over and time.monotonic() < deadline:
        time.sleep(0.05)
    raise Reschedule  # if the scheduler has not taken the task back yet


def _count_attempt(worker: Worker) -> int:
    """Count on the scheduler, which outlives workers, the devices that this task has broken."""
    place = [EVENT_TOPIC, str(worker.get_current_task())]

    async def count() -> int:
        attempts = await worker.scheduler.get_metadata(keys=place, default=0) + 1
        left = 0 if attempts >= MOST_ATTEMPTS else attempts  # a later retry starts at 0
        await worker.scheduler.set_metadata(keys=place, value=left)
        return attempts

    future = asyncio.run_coroutine_threadsafe(count(), worker.loop.asyncio_loop)
    return future.result(ASK_SECONDS)


def _start_retiring(worker: Worker, reason: str) -> None:
    if worker.nanny:  # else nothing would start the process again
        watchdog = threading.Timer(EXIT_SECONDS + RETIRE_SECONDS, os._exit, [1])
        watchdog.daemon = True
        watchdog.start()
    worker.loop.add_callback(_retire, worker, f"broken GPU: {reason}")


async def _retire(worker: Worker, reason: str) -> None:
    """End the worker, not its nanny; results that no other takes over are computed again."""
    from distributed.core import Status

    if worker.status == Status.closing_gracefully:  # another thread's task was first
        return
    worker.nanny = None  # closing this worker must not end the nanny
    leaving = worker.scheduler.retire_workers(
        workers=[worker.address], close_workers=False, remove=False, stimulus_id=reason
    )
    try:
        await asyncio.wait_for(leaving, RETIRE_SECONDS)
    except Exception:
        logger.exception("%s cannot move its results to other workers, and ends", worker.address)
    await worker.close(nanny=False, reason=reason)
