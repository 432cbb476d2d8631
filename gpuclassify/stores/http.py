"""Files of web servers: requests are tried again, and files read whole without byte ranges."""

from __future__ import annotations

import functools
import io
import logging
from collections.abc import Callable
from typing import Any

from gpuclassify.hub.calls import BUSY_STATUSES, retried
from gpuclassify.stores.names import compression, file_format
from gpuclassify.stores.store import LINE_BYTES, Result, Store, WatchedFile, error_text

logger = logging.getLogger(__name__)

HTTP_TRIES = 4


class HttpFile(WatchedFile):
    """File that is read again from the same byte when a request fails."""

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        place = None if self._file.closed else self._file.tell()

        def call() -> Any:
            if place is not None and self._file.tell() != place:  # after half of a line
                self._file.seek(place)
            return method(*arguments)

        try:
            return self._store.retried(call)
        except Exception as err:
            self.failure = err
            self.failed_at = "" if place is None else f", from byte {place}"
            raise


class HttpStore(Store):
    """A file, or a page that lists some, of a web server."""

    is_writable = False
    watched = HttpFile

    @property
    def root(self) -> str:
        """URL; with a last slash it is another page."""
        return self._opened[1]

    def retried(self, call: Callable[[], Result]) -> Result:
        """Call and return the result, retrying transient HTTP errors."""
        from fsspec.implementations import http  # which brings aiohttp

        def may_pass(err: Exception) -> bool:
            reason = self.cause_of(err)
            status = getattr(reason, "status", None)
            transient = (http.aiohttp.ClientError, ConnectionError, TimeoutError)
            is_transient = (
                isinstance(reason, transient) if status is None else status in BUSY_STATUSES
            )
            if is_transient:
                logger.warning("%s: %s: it is asked again", self.shown, error_text(reason))
            return is_transient

        return retried(call, may_pass, tries=HTTP_TRIES)

    def cause_of(self, err: Exception) -> BaseException:
        """Return the cause of an error that says that the file is missing when it may be there."""
        cause = err.__cause__
        if not isinstance(err, FileNotFoundError) or cause is None:
            return err
        return err if getattr(cause, "status", None) in (404, 410) else cause

    def _is_folder(self, path: str) -> bool:
        # The server would be asked for all of a file to see whether it is a list of others.
        return not file_format(path) and super()._is_folder(path)

    def hint(self) -> str:
        """Return nothing: to ask for near names would fetch a page."""
        return ""

    def open(self, size_bytes: int | None, ahead_bytes: int | None) -> Any:
        """Open the file, whole if the server does not deliver ranges."""
        block_size = None if compression(self.url) else LINE_BYTES
        known = {"size": size_bytes} if size_bytes else {}
        with self.explained():
            return self._whole_file(size_bytes) or self.retried(
                lambda: self.filesystem.open(self.root, "rb", block_size=block_size, **known)
            )

    def delivers_ranges(self, size_bytes: int | None) -> bool:
        """Tell whether the file can be read in pieces; the server may know whole files alone."""
        with self.explained():
            return self._whole_file(size_bytes) is None

    def _whole_file(self, size_bytes: int | None) -> io.BytesIO | None:
        """Return the whole file if the server sends it when asked for the first byte, else None."""
        content = b""
        if size_bytes != 0:
            ask = functools.partial(self.filesystem.cat_file, self.root, start=0, end=1)
            content = self.retried(ask)
        return None if len(content) == 1 != size_bytes else io.BytesIO(content)
