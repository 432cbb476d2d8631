"""Stores of files: their file systems, what their errors say, and URLs without secrets."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator
from typing import Any

from gpuclassify.hub.dataset_files import hub_uri

HTTP = ("http://", "https://")
# What is left of a store's error; any other is an OSError.
_KINDS = (FileNotFoundError, PermissionError, TimeoutError)


def redacted(url: str) -> str:
    """A URL without user, password and signed query, as messages and records show it."""
    head, separator, rest = url.partition("://")
    if not separator:
        return url
    return f"{head}://{re.sub('^[^/@]*@', '', rest).partition('?')[0]}"


def url_to_filesystem(url: str, storage_options: dict[str, Any]) -> tuple[Any, str]:
    """The file system of a path or URL, and the path in it.

    Raises
    ------
    ModuleNotFoundError
        The package for such URLs is not installed.
    """
    import fsspec

    try:
        return fsspec.core.url_to_fs(url, **storage_options)
    except ImportError as err:
        package = getattr(err.__cause__, "name", None) or "the package for such URLs"
        raise ModuleNotFoundError(
            f"{redacted(url)} needs {package}, which is not installed: pip install {package}, "
            "here and on the workers",
            name=package,
        ) from err


def without_query(path: str) -> str:
    """A path as it is, or a URL of a web server without what follows the file's name."""
    return redacted(path) if path.startswith(HTTP) else path


@contextlib.contextmanager
def explained(url: str, storage_options: Collection[str] = ()) -> Iterator[None]:
    """Say of which store an error is, and what to do about it; of no secret that the URL holds.

    Parameters
    ----------
    url : str
        A path that is no URL, and one of the Hub, have errors that say so themselves.
    storage_options : collection of str
        Names of the options that were given.

    Raises
    ------
    FileNotFoundError, PermissionError, TimeoutError, OSError
        In place of what the store's client raised in the block.
    """
    try:
        yield
    except Exception as err:
        if "://" not in url or hub_uri(url) is not None:
            raise
        raise _store_error(url, what_happened(url, err), storage_options) from None


def what_happened(url: str, err: Exception) -> BaseException:
    """The error itself: over HTTP, fsspec takes whatever it is for a file that is not there."""
    cause = err.__cause__
    if not (isinstance(err, FileNotFoundError) and url.startswith(HTTP)) or cause is None:
        return err
    return err if getattr(cause, "status", None) in (404, 410) else cause


def _store_error(url: str, err: BaseException, given: Collection[str]) -> OSError:
    kind: type[OSError] = next((each for each in _KINDS if isinstance(err, each)), OSError)
    reason = re.sub(r"\w+://[^\s'\"]+", lambda found: redacted(found[0]), str(err)).rstrip(".")
    options = f"gives {', '.join(sorted(given))}" if given else "is empty"
    return kind(
        f"{redacted(url)}: {type(err).__name__}: {reason}. Check address, bucket, region and "
        f"credentials: storage_options= {options}, and the environment gives the rest, here and "
        "on the workers"
    )
