"""Input files: what names match, how large they are, and how they are opened."""

from __future__ import annotations

import contextlib
import functools
import glob
import io
import os
import posixpath
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from gpuclassify.checks import nearest
from gpuclassify.hub.dataset_files import (
    LINE_BYTES,
    PinnedFile,
    hub_uri,
    is_pinned,
    listed,
    pinned,
    with_token,
)
from gpuclassify.jobs.stores import (
    HTTP,
    explained,
    redacted,
    url_to_filesystem,
    what_happened,
    without_query,
)

PARQUET, JSONL = "parquet", "jsonl"
PARQUET_SUFFIXES = (".parquet", ".pq")
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
# Where file systems note that a file has changed, the best first.
_VERSIONS = (
    *("ETag", "etag", "md5Hash", "generation", "blob_id"),
    *("mtime", "LastModified", "Last-Modified", "created"),
)
_UNDECODABLE = (pa.ArrowException, ValueError, EOFError, OSError)


class UnreadableInputError(ValueError):
    """An input file is missing, broken, or does not fit the others."""


class BrokenContentError(UnreadableInputError):
    """Bytes of a file cannot be decoded."""


class ChangedInputError(UnreadableInputError):
    """An input file is not what it was when the job began."""


@dataclass(frozen=True)
class InputFile:
    """A file of the input.

    Attributes
    ----------
    path : str
        Path or URL.
    size_bytes : int, optional
        None where the file system does not say.
    version : str
        What changes when the file does: a tag of its store, or the time of its last change.
    """

    path: str
    size_bytes: int | None
    version: str

    def __repr__(self) -> str:  # schedulers log the arguments of tasks that fail
        return f"InputFile({redacted(self.path)!r}, {self.size_bytes}, {self.version!r})"


def find_files(inputs: Iterable[str], storage_options: dict[str, Any]) -> list[InputFile]:
    """The files that `inputs` name, in sorted order within each input, each once.

    Raises
    ------
    UnreadableInputError
        Nothing matches, or formats are mixed.
    OSError
        A store refuses, or cannot be reached.
    """
    found: dict[str, InputFile] = {}
    for name in pinned(map(str, inputs), storage_options):
        found.update((file.path, file) for file in _expand(name, storage_options))
    if not found:
        raise UnreadableInputError("no input is given: name files, directories or globs")
    formats = {file_format(path): path for path in found}
    if len(formats) > 1:
        one, other, *_ = formats.values()
        raise UnreadableInputError(
            f"inputs are of several formats, such as {one} and {other}: read them separately"
        )
    return list(found.values())


def check_unchanged(file: InputFile, storage_options: dict[str, Any]) -> None:
    """Raise unless a file is what it was when the job began; asks its store for that.

    Size and version count where the store has them. A file at a commit cannot change.

    Raises
    ------
    ChangedInputError
    """
    if is_pinned(file.path) or (file.size_bytes is None and not file.version):
        return
    filesystem, plain = _open_filesystem(file.path, storage_options)
    filesystem.invalidate_cache(filesystem._parent(plain))  # else it may answer from a listing
    try:
        with explained(file.path, storage_options):
            info = filesystem.info(plain)
    except FileNotFoundError:
        raise _changed(file, "is gone") from None
    if info.get("size") not in (None, file.size_bytes) and file.size_bytes is not None:
        raise _changed(file, f"has {info['size']} bytes and had {file.size_bytes}")
    version = _version(info)
    if version and file.version and _bare(version) != _bare(file.version):
        raise _changed(file, "was written again")


def check_all_unchanged(
    files: Iterable[InputFile], inputs: Iterable[str], storage_options: dict[str, Any]
) -> None:
    """`check_unchanged` for all files that `inputs` have named; few requests where they can list.

    Files that have come since then are none of the job's.
    """
    found: dict[str, InputFile] = {}
    for name in map(str, inputs):
        is_listed = file_format(name) is None or glob.has_magic(name)
        if is_listed and hub_uri(name) is None:
            with contextlib.suppress(UnreadableInputError):  # what is gone is found below
                found.update((file.path, file) for file in _expand(name, storage_options))
    for file in files:
        if found.get(file.path) != file:
            check_unchanged(file, storage_options)


def file_format(path: str) -> str | None:
    """`PARQUET`, `JSONL`, or None for a name that is neither's."""
    path = without_query(path)
    if path.endswith(PARQUET_SUFFIXES):
        return PARQUET
    stem = posixpath.splitext(path)[0] if compression(path) else path
    return JSONL if stem.endswith(JSONL_SUFFIXES) else None


def compression(path: str) -> str | None:
    """What the file's bytes are compressed with, by its name."""
    return COMPRESSIONS.get(posixpath.splitext(without_query(path))[1])


@contextlib.contextmanager
def reading(
    path: str,
    storage_options: dict[str, Any],
    size_bytes: int | None = None,
    ahead_bytes: int | None = None,
) -> Iterator[WatchedFile]:
    """The file at a path or URL, open for reading bytes.

    Parameters
    ----------
    path : str
    storage_options : dict
    size_bytes : int, optional
        Of the file, if it is known, which saves requests on the Hub.
    ahead_bytes : int, optional
        How much to fetch from the Hub beyond what is asked for. Default: all of a small file.

    Raises
    ------
    BrokenContentError
        What is read in the block cannot be decoded.
    OSError
        The bytes are not delivered; see `explained`.
    """
    with _opened(path, storage_options, size_bytes, ahead_bytes) as opened:
        file = WatchedFile(opened)
        try:
            yield file
        except Exception as err:
            if file.failure is not None:
                with explained(path, storage_options):
                    raise file.failure from None
            if not isinstance(err, _UNDECODABLE):
                raise
            reason = " ".join(str(err).split())  # Arrow's may be of several lines
            raise BrokenContentError(reason) from err


def _opened(
    path: str, storage_options: dict[str, Any], size_bytes: int | None, ahead_bytes: int | None
) -> Any:
    filesystem, plain = _open_filesystem(path, storage_options)
    if size_bytes is not None and is_pinned(path):
        return PinnedFile(path, size_bytes, filesystem, ahead_bytes)
    with explained(path, storage_options):
        whole = _whole_file(filesystem, plain, size_bytes)
        # Stores read far ahead by themselves, s3fs 50 MiB: several times what a part is.
        block_size = None if compression(path) else LINE_BYTES
        return whole or filesystem.open(plain, "rb", block_size=block_size)


def delivers_ranges(path: str, storage_options: dict[str, Any], size_bytes: int | None) -> bool:
    """Whether a file can be read in pieces; an HTTP server may know whole files alone."""
    if not path.startswith(HTTP):
        return True
    opened = _open_filesystem(path, storage_options)
    with explained(path, storage_options):
        return _whole_file(*opened, size_bytes) is None


def _whole_file(filesystem: Any, plain: str, size_bytes: int | None) -> io.BytesIO | None:
    """What an HTTP server sends that is asked for the first byte, if that is the whole file."""
    if not plain.startswith(HTTP):
        return None
    content = filesystem.cat_file(plain, start=0, end=1) if size_bytes != 0 else b""
    return None if len(content) == 1 != size_bytes else io.BytesIO(content)


class WatchedFile:
    """A file that remembers what failed in reading its bytes.

    Arrow raises a bare OSError for bytes that it cannot decode, and so do some stores for requests
    that they refuse.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self.failure: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._file, name)
        return functools.partial(self._call, found) if callable(found) else found

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except Exception as err:
            self.failure = err
            raise


def is_denied(path: str) -> bool:
    """Whether a file of this machine may not be read; of URLs only reading can say."""
    return "://" not in path and not os.access(path, os.R_OK)


def _open_filesystem(url: str, storage_options: dict[str, Any]) -> tuple[Any, str]:
    """The file system of a path or URL, and the path in it."""
    import fsspec

    head, is_chain, _ = url.partition("::")
    try:
        if is_chain and "://" not in head:
            fsspec.get_filesystem_class(head)
        return url_to_filesystem(url, with_token(url, storage_options))
    except ValueError as err:
        if "Protocol not known" not in str(err):
            raise
        raise UnreadableInputError(
            f'{redacted(url)} is taken for a URL, whose marks are "://" and "::", and there is no '
            "such protocol: rename the file or folder, or correct the URL"
        ) from err


def _expand(name: str, storage_options: dict[str, Any]) -> Iterator[InputFile]:
    filesystem, path = _open_filesystem(name, storage_options)
    if hub_uri(name) is None:  # there, a commit has the same files whenever one looks
        filesystem.invalidate_cache()
    with explained(name, storage_options):
        found = listed(filesystem, name, functools.partial(_list, filesystem, path, name))
    if found is None:
        raise _no_such_input(filesystem, path, name)
    # Names that begin with a dot or underscore are metadata (_SUCCESS, _metadata), not data.
    data = [p for p in sorted(found) if p == path or not _is_hidden(posixpath.relpath(p, path))]
    readable = [p for p in data if file_format(p) is not None]
    if not readable:
        shown = sorted(map(posixpath.basename, found))[:8]
        what = "is no file to read:" if path in found else f"holds no file to read: found {shown},"
        raise UnreadableInputError(
            f"{redacted(name)} {what} wanted names ending in "
            f"{', '.join((*PARQUET_SUFFIXES, *JSONL_SUFFIXES))} "
            f"(JSON lines also with {', '.join(COMPRESSIONS)})"
        )
    for plain in readable:
        full = filesystem.unstrip_protocol(plain) if "://" in name else plain
        if "::" in full:
            _open_filesystem(full, storage_options)  # raises, unless the marks are a URL's own
        yield InputFile(full, found[plain].get("size"), _version(found[plain]))


def _list(filesystem: Any, path: str, name: str) -> dict[str, dict[str, Any]] | None:
    """What is at `path`, by name: all below a directory, a file, or a pattern's matches, if any."""
    # A web server would be asked for all of a file to see whether it is a list of others.
    if not (name.startswith(HTTP) and file_format(name)) and filesystem.isdir(path):
        return filesystem.find(path, detail=True)
    try:
        return {path: filesystem.info(path)}
    except FileNotFoundError as err:
        if what_happened(name, err) is not err:
            raise
    matches: dict[str, dict[str, Any]] = {}
    if glob.has_magic(without_query(path)):
        for match, info in filesystem.glob(path, detail=True).items():
            is_directory = info["type"] == "directory"
            matches.update(filesystem.find(match, detail=True) if is_directory else {match: info})
    return matches or None


def _no_such_input(filesystem: Any, path: str, name: str) -> UnreadableInputError:
    if glob.has_magic(without_query(path)):
        return UnreadableInputError(f"no such input: {redacted(name)} matches nothing")
    near = "" if name.startswith(HTTP) else _near(filesystem, path)
    return UnreadableInputError(f"no such input: {redacted(name)}{near}")


def _near(filesystem: Any, path: str) -> str:
    """A phrase that suggests the name beside `path` that is nearest to it, or nothing."""
    folder, name = posixpath.split(path)
    try:
        beside = [posixpath.basename(each.rstrip("/")) for each in filesystem.ls(folder, False)]
    except Exception:  # whatever a store raises: it is only a hint
        return ""
    near = nearest(name, beside)
    return f".{near}" if near else ""


def _version(info: dict[str, Any]) -> str:
    if info.get("islink"):  # a listing has the link's own time
        with contextlib.suppress(OSError):
            return str(os.stat(info["name"]).st_mtime)  # noqa: PTH116 (paths are those of fsspec)
    value = next((info[key] for key in _VERSIONS if info.get(key)), "")
    return str(value.timestamp() if hasattr(value, "timestamp") else value)


def _bare(version: str) -> str:
    """A version without what some stores put around a tag in one answer and not in another."""
    return version.removeprefix("W/").strip('"')


def _changed(file: InputFile, what: str) -> ChangedInputError:
    return ChangedInputError(
        f"{redacted(file.path)} is not what it was when the job began, it {what}: bring back "
        "the file as it was, or start over (restart=True, --restart)"
    )


def _is_hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in path.split("/") if part not in (".", ".."))
