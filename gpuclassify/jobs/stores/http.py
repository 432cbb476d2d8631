"""Files on web servers, with retries; a server without byte ranges sends whole files."""

from __future__ import annotations

import functools
import io
from typing import Any

from gpuclassify.hub.calls import BUSY_STATUSES
from gpuclassify.jobs.stores.names import compression, file_format
from gpuclassify.jobs.stores.store import LINE_BYTES, CutShortError, Store


class HttpStore(Store):
    """Read-only access to a file on a web server, or to the files that a web page links."""

    is_writable = False

    @property
    def root(self) -> str:
        """URL of the file or page; a trailing slash stays, because it names another page."""
        return self._opened[1]

    def is_transient(self, err: BaseException) -> bool:
        """Return whether a retry may succeed after this error, such as a busy or lost server."""
        from fsspec.implementations import http  # imports aiohttp

        status = getattr(err, "status", None)
        transient = (http.aiohttp.ClientError, ConnectionError, TimeoutError)
        return isinstance(err, transient) if status is None else status in BUSY_STATUSES

    def cause_of(self, err: Exception) -> BaseException:
        """Return the web client's error if fsspec wrongly reports a missing file, else `err`."""
        cause = err.__cause__
        if not isinstance(err, FileNotFoundError) or cause is None:
            return err
        return err if getattr(cause, "status", None) in (404, 410) else cause

    def _is_folder(self, path: str) -> bool:
        # fsspec would download a whole file to see whether it is a page of links.
        return not file_format(path) and super()._is_folder(path)

    def hint(self) -> str:
        """Return "", because looking for files with similar names would fetch a page."""
        return ""

    def open(self, size_bytes: int | None, ahead_bytes: int | None) -> Any:
        """Open the file for reading bytes; read it whole if the server sends no byte ranges."""
        block_size = None if compression(self.url) else LINE_BYTES
        known = {"size": size_bytes} if size_bytes else {}
        with self.explained():
            return self._whole_file(size_bytes) or self.retried(
                lambda: self.filesystem.open(self.root, "rb", block_size=block_size, **known)
            )

    def delivers_ranges(self, size_bytes: int | None) -> bool:
        """Return whether the server sends byte ranges of the file, by requesting its first byte.

        False if `size_bytes` is 0 or 1. A server without ranges sends the whole file in answer.
        """
        with self.explained():
            return self._whole_file(size_bytes) is None

    def _whole_file(self, size_bytes: int | None) -> io.BytesIO | None:
        """Request the first byte as a range; return the content if all of it comes, else None."""
        ask = functools.partial(self.filesystem.cat_file, self.root, start=0, end=1)

        def read() -> bytes:
            content = ask() if size_bytes != 0 else b""
            if len(content) != 1 and len(content) < (size_bytes or 0):
                raise CutShortError(f"{len(content):,} of the file's {size_bytes:,} bytes came")
            return content

        content = self.retried(read)
        return None if len(content) == 1 != size_bytes else io.BytesIO(content)
