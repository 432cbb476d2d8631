"""Errors of tasks as a client shows them: the message, and below it where it was raised."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from gpuclassify.workers.run_context import current_worker

Result = TypeVar("Result")


def message_first(function: Callable[..., Result]) -> Callable[..., Result]:
    """Let what a task of a Dask worker raises reach the client as one message.

    Dask shows a client the worker's frames, and those of every cause, above the message and in its
    log. Here they follow as a note, with the task and its worker. Elsewhere nothing changes: a
    debugger finds the frames.

    Parameters
    ----------
    function : callable
        Run in a task of a Dask worker, or anywhere else.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Result:
        try:
            return function(*args, **kwargs)
        except Exception as err:
            worker = current_worker()
            if worker is None or type(err).__name__ == "Reschedule":  # which is Dask's own signal
                raise
            place = f"task {worker.get_current_task()} on {worker.address}"
            err.add_note(f"Raised in {place}\n{_frames(err)}")
            raise err.with_traceback(None) from None

    return run


def _frames(error: Exception) -> str:
    """The traceback with those of its causes, without the error's own message."""
    shown = traceback.TracebackException.from_exception(error)
    lines, message = list(shown.format()), list(shown.format_exception_only())
    return "".join(lines[: len(lines) - len(message)]).rstrip()
