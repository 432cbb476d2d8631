"""The Dask worker that this code runs in, if there is one."""

from __future__ import annotations

import sys
from typing import Any


def current_worker() -> Any:
    """The worker whose task this thread runs, or None; where Dask is not in use, it stays so."""
    distributed = sys.modules.get("distributed")
    if distributed is None:
        return None
    try:
        return distributed.get_worker()
    except ValueError:  # not in a task
        return None
