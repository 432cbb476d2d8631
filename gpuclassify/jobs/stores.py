"""Stores of files: their file systems, what their errors say, and URLs without secrets."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

from gpuclassify.hub.dataset_files import hub_uri

logger = logging.getLogger(__name__)
Found = TypeVar("Found")

HTTP = ("http://", "https://")
# They have no folders, and give an object another tag whenever it is written.
OBJECT_STORES = {"s3", "gs", "az"}
# Seconds until a web server that has failed is asked again; clients of other stores ask by
# themselves.
PAUSES = (0.5, 2.0, 8.0)
_PASSING = {408, 425, 429, 500, 502, 503, 504}
URL = re.compile(r"\b\w++://[^\s'\"]+")  # in a text
# What is left of a store's error; any other is an OSError.
_KINDS = (FileNotFoundError, PermissionError, TimeoutError)


def redacted(url: str) -> str:
    """A URL without user, password and signed query, as messages and records show it."""
    return "::".join(map(_redacted, url.split("::")))  # fsspec's chains of URLs


def _redacted(url: str) -> str:
    head, separator, rest = url.partition("://")
    if not separator:
        return url
    return f"{head}://{re.sub('^[^/]*@', '', rest.partition('?')[0])}"


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


def retried(url: str, call: Callable[[], Found]) -> Found:
    """What `call` returns; over HTTP it is tried again after what may pass, up to three times.

    Raises
    ------
    Exception
        What the last try has raised.
    """
    for seconds in PAUSES if url.startswith(HTTP) else ():
        try:
            return call()
        except Exception as err:
            reason = what_happened(url, err)
            if not _may_pass(reason):
                raise
            logger.warning("%s: %s: asked again in %s s", redacted(url), _shown(reason), seconds)
        time.sleep(seconds)  # out here: the error holds what the request had
    return call()


def _may_pass(err: BaseException) -> bool:
    """Whether a web server that failed like this may answer the next time."""
    import aiohttp

    status = getattr(err, "status", None)
    if status is not None:
        return status in _PASSING
    return isinstance(err, (aiohttp.ClientError, ConnectionError, TimeoutError))


@contextlib.contextmanager
def explained(url: str, storage_options: Collection[str] = (), what: str = "") -> Iterator[None]:
    """Say of which store an error is, and what to do about it; of no secret that the URL holds.

    Parameters
    ----------
    url : str
        A path that is no URL, and one of the Hub, have errors that say so themselves.
    storage_options : collection of str
        Names of the options that were given.
    what : str
        What was read of it, such as ``", from byte 5"``.

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
        error = _store_error(redacted(url) + what, what_happened(url, err), storage_options)
        raise error from None


def what_happened(url: str, err: Exception) -> BaseException:
    """The error itself: over HTTP, fsspec takes whatever it is for a file that is not there."""
    cause = err.__cause__
    if not (isinstance(err, FileNotFoundError) and url.startswith(HTTP)) or cause is None:
        return err
    return err if getattr(cause, "status", None) in (404, 410) else cause


def _shown(err: BaseException) -> str:
    """An error of a store's client in a line, without secrets of the URLs in it."""
    text = URL.sub(lambda found: redacted(found[0]), str(err))
    return f"{type(err).__name__}: {text}".rstrip(".: ")


def _store_error(where: str, err: BaseException, given: Collection[str]) -> OSError:
    kind: type[OSError] = next((each for each in _KINDS if isinstance(err, each)), OSError)
    options = f"gives {', '.join(sorted(given))}" if given else "is empty"
    return kind(
        f"{where}: {_shown(err)}. Check address, bucket, region and "
        f"credentials: storage_options= {options}, and the environment gives the rest, here and "
        "on the workers"
    )
