"""Settings of the whole process that change while any thread needs them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any


class SharedContext:
    """Context manager shared by threads: the first thread enters it, and the last one leaves it."""

    def __init__(self, begin: Callable[[], AbstractContextManager[Any]]) -> None:
        self._begin = begin
        self._lock = threading.Lock()
        self._users = 0
        self._begun = contextlib.ExitStack()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Keep the shared context manager entered while this thread's block runs."""
        with self._lock:
            if not self._users:
                self._begun.enter_context(self._begin())
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._begun.close()


def process_setting(
    read: Callable[[], Any], write: Callable[[Any], Any], wanted: object
) -> SharedContext:
    """Return a shared context that sets a process-wide setting to `wanted` while it is active.

    A value that another thread sets in the meantime is lost when the context ends.
    """

    @contextlib.contextmanager
    def changed() -> Iterator[None]:
        before = read()
        write(wanted)
        try:
            yield
        finally:
            write(before)

    return SharedContext(changed)
