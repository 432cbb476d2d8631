"""Checks of paths that raise OSError if a permission is missing or a disk fails.

``Path.exists`` and the like return False in both cases from Python 3.14 on.
"""

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path

Location = str | os.PathLike[str]

_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG}


def exists(path: Location) -> bool:
    """Return whether a file or folder is at `path`; raise OSError if that cannot be determined."""
    return _mode(path) is not None


def is_file(path: Location) -> bool:
    """Return whether `path` is a regular file; raise OSError if that cannot be determined."""
    return stat.S_ISREG(_mode(path) or 0)


def is_directory(path: Location) -> bool:
    """Return whether `path` is a directory; raise OSError if that cannot be determined."""
    return stat.S_ISDIR(_mode(path) or 0)


def is_only_mine(path: Location) -> bool:
    """Return whether a path exists, is no link, and is owned and writable by this user only."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    is_shared = stat.S_ISLNK(status.st_mode) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid == os.getuid() and not is_shared


def private_folder(parent: Location | None = None) -> Path:
    """Return a folder in `parent` that only this user can enter; create it if it is missing.

    The default of `parent` is the system's folder for temporary files. Raises PermissionError if it
    is a link, another user's, or open to others.
    """
    folder = Path(parent or tempfile.gettempdir(), f"gpuclassify-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    is_open = not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077
    if is_open or status.st_uid != os.getuid():
        raise PermissionError(
            f"{folder} is open to other users: remove it, or set TMPDIR to a folder of your own"
        )
    return folder


def user_cache(name: str) -> Path:
    """Return the path of the folder `name` in this user's cache; it may not exist yet."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "gpuclassify", name)


def _mode(path: Location) -> int | None:
    try:
        return os.stat(path).st_mode  # noqa: PTH116 (names of the Hub are asked for as well)
    except ValueError:  # a zero byte, which no path has
        return None
    except OSError as err:
        if err.errno in _ABSENT:
            return None
        raise
