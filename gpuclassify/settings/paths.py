"""Questions about paths: no permission to look, or a disk that fails, is no absence.

``Path.exists`` and its kind say False to both from Python 3.14 on.
"""

import errno
import os
import stat

Location = str | os.PathLike[str]

_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG}


def exists(path: Location) -> bool:
    """Return whether anything is at `path`; OSError if that cannot be determined."""
    return _mode(path) is not None


def is_file(path: Location) -> bool:
    """Return whether there is a regular file at `path`, as `exists` does."""
    return stat.S_ISREG(_mode(path) or 0)


def is_directory(path: Location) -> bool:
    """Return whether there is a directory at `path`, as `exists` does."""
    return stat.S_ISDIR(_mode(path) or 0)


def _mode(path: Location) -> int | None:
    try:
        return os.stat(path).st_mode  # noqa: PTH116 (names of the Hub are asked for as well)
    except ValueError:  # a zero byte, which no path has
        return None
    except OSError as err:
        if err.errno in _ABSENT:
            return None
        raise
