"""Compilation by numba, with the machine code in the user's cache.

By default numba writes next to the source. When pip uninstalls a package, it leaves such files
behind, and Python imports the folder that remains as an empty namespace package.
"""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import config, njit

from gpuclassify.settings.paths import is_only_mine, user_cache

logger = logging.getLogger(__name__)


def compiled(function: Callable[..., Any]) -> Any:
    """Decorate a function: numba compiles it at its first call, or loads it from the cache."""
    folder, before = _cache_folder(), config.CACHE_DIR
    # numba chooses the folder of a function when it is decorated; other packages keep theirs.
    config.CACHE_DIR = folder or before
    try:
        return njit(nogil=True, cache=folder is not None)(function)
    finally:
        config.CACHE_DIR = before


@functools.cache
def _cache_folder() -> str | None:
    """Return the folder for machine code, or None, with a warning, if it is not usable."""
    chosen: str = config.CACHE_DIR
    try:
        folder = Path(chosen or user_cache("numba"))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        # No other user may write to the cache, because numba runs the code that it reads there.
        reason = "" if chosen or is_only_mine(folder) else f"other users can write to {folder}"
    except (OSError, RuntimeError) as err:  # there may be no home
        reason = str(err)
    if not reason:
        return str(folder)
    logger.warning(
        "numba compiles anew in every process, because %s: set NUMBA_CACHE_DIR to a folder of "
        "your own",
        reason,
    )
    return None
