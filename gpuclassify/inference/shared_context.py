"""A context that several threads are in at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any


class SharedContext:
    """A context that begins with the first thread that needs it and ends with the last one.

    Parameters
    ----------
    begin : callable
        Gives the context manager, a new one each time.
    """

    def __init__(self, begin: Callable[[], AbstractContextManager[Any]]) -> None:
        self._begin = begin
        self._lock = threading.Lock()
        self._users = 0
        self._begun = contextlib.ExitStack()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within it, the context has begun and has not ended."""
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
