"""Decorators for Dask tasks: errors show their message first, and workers with broken GPUs end."""

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
# Processes in which a task may break the device before its data or model is taken for the cause.
MOST_ATTEMPTS = 3
ASK_SECONDS = 30.0  # timeout of a call to the scheduler
RETIRE_SECONDS = 60.0  # timeout for moving results to other workers
EXIT_SECONDS = 60.0  # timeout for a clean exit, which a broken driver may prevent


class PanicError(RuntimeError):
    """Error raised in place of an exception that is not an Exception, such as a panic in Rust."""


@contextlib.contextmanager
def as_errors() -> Iterator[None]:
    """Convert SystemExit in the block to RuntimeError, and a panic, such as in Rust, to PanicError.

    SystemExit would end the worker, and Dask would run the task again elsewhere. A panic is not
    caught by ``except Exception``, and Dask cannot send it to the client.
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
    """Decorate a Dask task so that its errors show their message first, and the traceback last.

    On a worker, the stack frames become a note below the message, which names task and worker, too.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Result:
        try:
            return function(*args, **kwargs)
        except Exception as err:
            worker = current_worker()
            if worker is None or type(err).__name__ == "Reschedule":  # Dask's signal
                raise
            details = traceback.TracebackException.from_exception(err)
            lines, message = list(details.format()), list(details.format_exception_only())
            frames = "".join(lines[: len(lines) - len(message)]).rstrip()
            task = worker.get_current_task()
            err.add_note(f"Raised in task {task} on {worker.address}\n{frames}")
            raise err.with_traceback(None) from None

    return run


def retire_on_broken_device(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a Dask task so that its worker is replaced if the task breaks the GPU.

    A worker with a broken CUDA context fails every task, and attracts more tasks because it fails
    fast. So it moves its results to other workers and ends, its nanny starts a new process, and its
    tasks run again. A task that breaks the GPU of `MOST_ATTEMPTS` processes fails with
    BrokenDeviceError, and so does a task in the client's process.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Result:
        try:
            with as_errors():
                return function(*args, **kwargs)
        except Exception as err:
            if not is_broken_device(err):
                raise
            _retire_or_fail(err)

    return run


def _retire_or_fail(error: Exception) -> NoReturn:
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
        # Delayed until the error is reported, because the tasks of a retiring worker run again.
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
    ended = (Status.closing, Status.closed, Status.failed)
    while worker.status not in ended and time.monotonic() < deadline:
        time.sleep(0.05)
    raise Reschedule  # the scheduler may not have taken the task back yet


def _count_attempt(worker: Worker) -> int:
    """Add 1 to the scheduler's count of GPUs that the current task has broken, and return it."""
    keys = [EVENT_TOPIC, str(worker.get_current_task())]

    async def count() -> int:
        attempts = await worker.scheduler.get_metadata(keys=keys, default=0) + 1
        stored = 0 if attempts >= MOST_ATTEMPTS else attempts  # a later retry starts at 0
        await worker.scheduler.set_metadata(keys=keys, value=stored)
        return attempts

    future = asyncio.run_coroutine_threadsafe(count(), worker.loop.asyncio_loop)
    return future.result(ASK_SECONDS)


def _start_retiring(worker: Worker, reason: str) -> None:
    if worker.nanny:  # only a nanny starts the process again
        watchdog = threading.Timer(EXIT_SECONDS + RETIRE_SECONDS, os._exit, [1])
        watchdog.daemon = True
        watchdog.start()
    worker.loop.add_callback(_retire, worker, f"broken GPU: {reason}")


async def _retire(worker: Worker, reason: str) -> None:
    """Move a worker's results to other workers, and close it, so that its nanny restarts it."""
    from distributed.core import Status

    if worker.status == Status.closing_gracefully:  # another thread's task has begun this
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
