"""Input files: what names match, how large they are, and how they are opened."""

from __future__ import annotations

import contextlib
import functools
import glob
import gzip
import hashlib
import io
import os
import posixpath
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from gpuclassify.hub.dataset_files import (
    LINE_BYTES,
    PinnedFile,
    hub_uri,
    listed,
    names_commit,
    pinned,
    with_token,
)
from gpuclassify.jobs.storage import (
    FILES_AT_A_TIME,
    HTTP,
    OBJECT_STORES,
    asked,
    explained,
    redacted,
    url_to_filesystem,
    what_happened,
    without_query,
)
from gpuclassify.settings.checks import nearest

PARQUET, JSONL = "parquet", "jsonl"
PARQUET_SUFFIXES = (".parquet", ".pq")
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
# Where file systems note that a file has changed, the best first.
_VERSIONS = (
    *("ETag", "etag", "md5Hash", "generation", "blob_id"),
    *("mtime", "LastModified", "Last-Modified", "created"),
)
_UNDECODABLE = (pa.ArrowException, ValueError, EOFError, OSError, zlib.error)
_SHA256 = "sha256:"
DIGESTED_BYTES = 1 << 20
_KINDS = {
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}
# Digests that this process has taken, by path and stamp: a file may be of many parts.
_digests: dict[tuple[str, str], str] = {}


class UnreadableInputError(ValueError):
    """An input file is missing, broken, or does not fit the others."""


class BrokenContentError(UnreadableInputError):
    """Bytes of a file cannot be decoded."""


class BrokenInputError(UnreadableInputError):
    """A file, line or row of the input cannot be read, and the job is not to go on without it."""


class ChangedInputError(UnreadableInputError):
    """An input file is not what it was when the job began."""


@dataclass(frozen=True)
class InputFile:
    """A file of the input.

    `version` changes when the file does: a tag of its store, the time of its last change, or a
    digest of its content. `stamp`, beside a digest, stays as long as nobody writes to the file.
    """

    path: str
    size_bytes: int | None
    version: str
    stamp: str = field(default="", compare=False)

    def __repr__(self) -> str:  # schedulers log the arguments of tasks that fail
        return f"InputFile({redacted(self.path)!r}, {self.size_bytes}, {self.version!r})"


def find_files(inputs: Iterable[str], storage_options: dict[str, Any]) -> list[InputFile]:
    """The files that `inputs` name, in sorted order within each input, each once."""
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


def with_digests(files: Sequence[InputFile], storage_options: dict[str, Any]) -> list[InputFile]:
    """The files with digests of their content as versions; those that cannot be read as they are.

    All bytes are read, of several files at a time. Tags of object stores, which are other ones
    whenever an object is written, stay as they are, and so do files of the Hub at a commit.
    """

    def digested(file: InputFile) -> InputFile:
        filesystem, plain = _open_filesystem(file.path, storage_options)
        has_tag = bool(file.version) and not OBJECT_STORES.isdisjoint(filesystem.protocol)
        if has_tag or names_commit(file.path) or local_problem(file.path):
            return file
        stamp = _stamp(filesystem, plain) or file.version
        return replace(file, version=_digest(file, storage_options), stamp=stamp)

    with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
        return list(pool.map(digested, files))


def check_unchanged(
    file: InputFile, storage_options: dict[str, Any], is_last: bool = False
) -> None:
    """Raise ChangedInputError unless a file is what it was when the job began; asks its store.

    Size and version count where the store has them. A file at a commit cannot change. Where the
    version is a digest, a file of this machine is read again only if its inode or the times of its
    last changes are others: that of a change of the inode is the system's, and none that `touch` or
    `rsync -t` can set back. Elsewhere it is read again if the store's tag or time is another, and
    with `is_last` in any case.
    """
    if names_commit(file.path) or (file.size_bytes is None and not file.version):
        return
    filesystem, plain = _open_filesystem(file.path, storage_options)
    filesystem.invalidate_cache(filesystem._parent(plain))  # else it may answer from a listing
    try:
        with explained(file.path, storage_options):
            info = asked(file.path, functools.partial(filesystem.info, plain))
    except FileNotFoundError:
        raise _changed(file, "is gone") from None
    if info.get("size") not in (None, file.size_bytes) and file.size_bytes is not None:
        raise _changed(file, f"has {info['size']} bytes and had {file.size_bytes}")
    if file.version.startswith(_SHA256):
        local = _stamp(filesystem, plain)
        stamp, is_telling = local or _version(info), bool(local) or not is_last
        if _bare(stamp) == _bare(file.stamp) and is_telling:
            return
        found = _digests.get((file.path, stamp)) if is_telling else None
        if found is None:
            found = _digests[file.path, stamp] = _digest(file, storage_options)
        if found != file.version:
            raise _changed(file, "holds other bytes, as many as before")
        return
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
    with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
        left = [file for file in files if found.get(file.path) != file]
        list(pool.map(lambda file: check_unchanged(file, storage_options, is_last=True), left))


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

    `size_bytes`, if it is known, saves requests on the Hub; `ahead_bytes` are fetched from there
    beyond what is asked for, by default all of a small file. Raises BrokenContentError if what is
    read in the block cannot be decoded, and OSError if the bytes are not delivered.
    """
    with _opened(path, storage_options, size_bytes, ahead_bytes) as opened:
        file = WatchedFile(opened, path)
        try:
            yield file
        except Exception as err:
            if file.failure is not None:
                with explained(path, storage_options, file.place):
                    raise file.failure from None
            if not isinstance(err, _UNDECODABLE):
                raise
            reason = " ".join(str(err).split())  # Arrow's may be of several lines
            if "CRC checksum" in reason:
                reason = (
                    f"bytes have changed since they were written, {reason}: bring the file again "
                    "from where it is whole"
                )
            raise BrokenContentError(reason) from err


def _opened(
    path: str, storage_options: dict[str, Any], size_bytes: int | None, ahead_bytes: int | None
) -> Any:
    filesystem, plain = _open_filesystem(path, storage_options)
    if size_bytes is not None and names_commit(path):
        return PinnedFile(path, size_bytes, filesystem, ahead_bytes)
    with explained(path, storage_options):
        whole = _whole_file(filesystem, plain, size_bytes)
        # Stores read far ahead by themselves, s3fs 50 MiB: several times what a part is.
        block_size = None if compression(path) else LINE_BYTES
        known = {"size": size_bytes} if path.startswith(HTTP) and size_bytes else {}
        opened = functools.partial(filesystem.open, plain, "rb", block_size=block_size, **known)
        return whole or asked(path, opened)


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
    ask = functools.partial(filesystem.cat_file, plain, start=0, end=1)
    content = asked(plain, ask) if size_bytes != 0 else b""
    return None if len(content) == 1 != size_bytes else io.BytesIO(content)


class WatchedFile:
    """A file that remembers what failed in reading its bytes; over HTTP it tries again first.

    Arrow raises a bare OSError for bytes that it cannot decode, and so do some stores for requests
    that they refuse.
    """

    def __init__(self, file: Any, path: str) -> None:
        self._file, self._path = file, path
        self.failure: Exception | None = None
        self.place = ""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._file, name)
        return functools.partial(self._call, found) if callable(found) else found

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        place = self._file.tell() if self._path.startswith(HTTP) and not self._file.closed else None

        def call() -> Any:
            if place is not None and self._file.tell() != place:  # after half of a line
                self._file.seek(place)
            return method(*arguments)

        try:
            return asked(self._path, call)
        except Exception as err:
            self.failure = err
            self.place = "" if place is None else f", from byte {place}"
            raise


@contextlib.contextmanager
def decompressed(file: Any, codec: str | None) -> Iterator[Any]:
    """The content of an open file, as a stream. Behind gzip's there may be zeros, as on tapes."""
    if codec == "gzip":
        with gzip.GzipFile(fileobj=file, mode="rb") as stream:
            yield stream
    else:
        with pa.input_stream(file, compression=codec) as stream:
            yield stream


def local_problem(path: str) -> str | None:
    """Why a file of this machine cannot be read; of other URLs only reading can say."""
    path = path.removeprefix("file://")
    if "://" in path:
        return None
    try:
        mode = Path(path).stat().st_mode
    except OSError as err:
        if Path(path).is_symlink():
            target = Path(path).readlink()
            return f"it is a link to {target}, which leads to no file ({err.strerror})"
        return "permission denied" if isinstance(err, PermissionError) else None
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "special file")
        return f"it is a {kind}, not a regular file: write what it gives to a file"
    return None if os.access(path, os.R_OK) else "permission denied"


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
    hint = ""
    if "file" in filesystem.protocol and (problem := local_problem(path)):
        hint = f": {problem}"
    elif not name.startswith(HTTP):
        folder, wanted = posixpath.split(path)
        with contextlib.suppress(Exception):  # whatever a store raises: it is only a hint
            beside = filesystem.ls(folder, False)
            near = nearest(wanted, [posixpath.basename(each.rstrip("/")) for each in beside])
            hint = near and f".{near}"
    return UnreadableInputError(f"no such input: {redacted(name)}{hint}")


def _version(info: dict[str, Any]) -> str:
    if info.get("islink"):  # a listing has the link's own time
        with contextlib.suppress(OSError):
            return str(os.stat(info["name"]).st_mtime)  # noqa: PTH116 (paths are those of fsspec)
    value = next((info[key] for key in _VERSIONS if info.get(key)), "")
    return str(value.timestamp() if hasattr(value, "timestamp") else value)


def _stamp(filesystem: Any, plain: str) -> str:
    """What is another one after every change of a file of this machine; "" for others."""
    if "file" not in filesystem.protocol:
        return ""
    found = Path(plain).stat()
    return f"{found.st_mtime_ns} {found.st_ctime_ns} {found.st_ino}"


def _digest(file: InputFile, storage_options: dict[str, Any]) -> str:
    content = hashlib.sha256()
    with reading(file.path, storage_options, file.size_bytes) as opened:
        while some := opened.read(DIGESTED_BYTES):
            content.update(some)
    return f"{_SHA256}{content.hexdigest()}"


def _bare(version: str) -> str:
    """A version without what some stores put around a tag in one answer and not in another."""
    return version.removeprefix("W/").strip('"')


def _changed(file: InputFile, what: str) -> ChangedInputError:
    return ChangedInputError(
        f"{redacted(file.path)} is not what it was when the job began, it {what}: bring back "
        "the file as it was, or start over (restart=True)"
    )


def _is_hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in path.split("/") if part not in (".", ".."))
