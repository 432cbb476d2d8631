"""Process-wide state of transformers while it loads and builds, without importing torch."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator

# transformers switches process-wide state (default dtype, progress bars) while it loads and builds.
building_lock = threading.Lock()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn off transformers' progress bars, and messages below errors, during the block.

    The settings are those of the whole process, so hold `building_lock` meanwhile.
    """
    from transformers.utils import logging as transformers_logging

    had_bars = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
