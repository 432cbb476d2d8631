"""Whether forwards are transformers' own or sped up, thread by thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_is_reference: ContextVar[bool] = ContextVar("is_reference", default=False)


@contextlib.contextmanager
def reference_forward() -> Iterator[None]:
    """Within it, this thread's forwards are transformers' own, with nothing sped up."""
    token = _is_reference.set(True)
    try:
        yield
    finally:
        _is_reference.reset(token)


def is_reference_forward() -> bool:
    """Whether this thread is within `reference_forward`."""
    return _is_reference.get()
