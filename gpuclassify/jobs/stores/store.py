"""Files of one protocol, through fsspec: listing, reading, writing, exclusive creation.

`Store` works with every protocol of fsspec, and `ObjectStore` with buckets; the other modules of
this folder have the rest. `gpuclassify.jobs.stores.opening.open_store` chooses among them.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import glob
import hashlib
import inspect
import itertools
import logging
import lzma
import os
import posixpath
import re
import socket
import tempfile
import time
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple, TypeVar, cast

import psutil
import pyarrow as pa
from fsspec.utils import glob_translate

from gpuclassify.hub.calls import retried
from gpuclassify.jobs.stores.names import URL, compression, redacted, without_query
from gpuclassify.settings.checks import nearest
from gpuclassify.workers.secrets import TokenName, recall

Result = TypeVar("Result")
AnyStore = TypeVar("AnyStore", bound="Store")
Levels = tuple[re.Pattern[str], ...]

logger = logging.getLogger(__name__)

FILES_AT_A_TIME = 16
READ_TRIES = 4
BLOCK_BYTES = 4 << 20
LINE_BYTES = 64 << 10  # read-ahead for lines
# S3 may answer simultaneous attempts with a conflict; all of them may try again.
CONFLICT_WAITS_SECONDS = (0.1, 0.5, 0.0)
# Suffix of temporary files of `Store.replacing`: process namespace, process ID, random digits.
_MARK = re.compile("([0-9a-f]{8})-([0-9]{1,10})-[0-9a-f]{32}")
_ABANDONED_SECONDS = 86_400.0
_being_written: set[str] = set()  # suffixes of temporary files that this process is writing
# Error types that users see; other errors of a store become OSError.
_ERRORS = (FileNotFoundError, PermissionError, TimeoutError)
_NO_GZIP = "Not a gzipped file"
_UNDECODABLE = (pa.ArrowException, ValueError, EOFError, OSError, zlib.error, lzma.LZMAError)
# Fields in which file systems store a file's version, best first.
_VERSIONS = (
    *("ETag", "etag", "md5Hash", "generation", "blob_id"),
    *("mtime", "LastModified", "Last-Modified", "created"),
)


class UnreadableInputError(ValueError):
    """Error for an input file that is missing or broken, or does not fit the other input files."""


class BrokenContentError(UnreadableInputError):
    """Error for a file whose bytes cannot be decoded, such as damaged Parquet or gzip."""


class UnsupportedStorageError(ValueError):
    """Error for a file system without exclusive creation (to create a file unless it exists)."""


class CutShortError(ConnectionError):
    """Error for a server's answer that ends before the requested bytes of a file do."""


class Entry(NamedTuple):
    """File, empty folder or unlistable folder in a listing: paths, fsspec's info, and the error."""

    path: str  # path in its file system, as listed
    real: str  # path with links resolved
    info: dict[str, Any] = {}
    linked: str = ""  # target of the folder link that the path goes through, if any
    problem: OSError | None = None  # the reason why a folder cannot be listed


class WatchedFile:
    """Wrapper of an fsspec file that completes short reads and retries transient errors.

    `failure` is the last error that a call raised after its retries, or None. It distinguishes
    failed reads from bytes that Arrow cannot decode, for which Arrow also raises a bare OSError.
    """

    def __init__(self, file: Any, store: Store, size_bytes: int | None = None) -> None:
        self._file, self._store = file, store
        self._size = getattr(file, "size", None) or size_bytes
        self.failure: Exception | None = None
        self.failed_at = ""  # such as ", from byte 5"

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._file, name)
        return functools.partial(self._call, value) if callable(value) else value

    def read(self, length: int = -1) -> bytes:
        """Read `length` bytes (negative: the rest of the file), and complete short answers.

        A store may answer with fewer bytes than asked for, and fsspec returns them as if the file
        ended there. Raises CutShortError if the file ends before its known size.
        """
        pieces, begin = [self._call(self._file.read, length)], self._file.tell()
        if self._size is not None:
            begin -= len(pieces[0])
            end = self._size if length < 0 else min(self._size, begin + length)
            while (missing := end - self._file.tell()) > 0:
                pieces.append(self._call(self._read_some, missing))
        return b"".join(pieces)

    def _read_some(self, length: int) -> bytes:
        content: bytes = self._file.read(length)
        if not content:
            raise CutShortError(f"the answer lacks {length:,} of the file's {self._size:,} bytes")
        return content

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        offset = None if getattr(self._file, "closed", False) else self._file.tell()

        def call() -> Any:
            if offset is not None and self._file.tell() != offset:  # a try failed within a line
                self._file.seek(offset)
            return method(*arguments)

        try:
            return self._store.retried(call)
        except Exception as err:
            self.failure = err
            self.failed_at = "" if offset is None else f", from byte {offset}"
            raise


@dataclass(frozen=True)
class Store:
    """Access to a file, a folder, or the files that a glob pattern matches, at a path or URL.

    Methods take names of files relative to the folder. The file system is opened at first use.
    Pickling drops the storage options, which may be secrets; other processes find them as
    `options_name` in `gpuclassify.workers.secrets`.
    """

    url: str
    options_name: str = ""
    options: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    has_commits: ClassVar[bool] = False  # whether inputs are read at a commit of the Hub
    is_flat: ClassVar[bool] = False  # whether one request lists everything below a folder
    is_writable: ClassVar[bool] = True  # whether jobs can write there
    explains_itself: ClassVar[bool] = False  # whether errors name the file and the cure
    is_near: ClassVar[bool] = False  # whether reading a file twice is cheap
    tags_files: ClassVar[bool] = False  # whether every write gives a file another version
    reports_md5: ClassVar[bool] = True  # whether listings may have MD5 digests

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.address, self.options_name)

    def __dask_tokenize__(self) -> tuple[str, ...]:
        return type(self).__name__, self.address, self.options_name

    def __repr__(self) -> str:  # schedulers log the arguments of tasks that fail
        return f"{type(self).__name__}({self.shown!r})"

    def __str__(self) -> str:
        return redacted(self.filesystem.unstrip_protocol(self.root))

    @classmethod
    def check_output(cls, url: str) -> None:
        """Raise ValueError if jobs cannot write to such a URL; this class accepts every URL."""

    @property
    def is_fixed(self) -> bool:
        """Whether the URL names a commit of the Hub, so that its files can never change."""
        return False

    @property
    def shown(self) -> str:
        """Path or URL as it was passed, without secrets."""
        return redacted(self.url)

    @property
    def address(self) -> str:
        """URL to open the same store in other processes and on other machines."""
        return self.url

    @property
    def _given_options(self) -> Mapping[str, Any]:
        return recall(self.options_name, {}) if self.options is None else self.options

    @property
    def storage_options(self) -> dict[str, Any]:
        """Storage options for fsspec, without options that only name a Hub token."""
        options = self._given_options.items()
        return {name: value for name, value in options if not isinstance(value, TokenName)}

    @functools.cached_property
    def _opened(self) -> tuple[Any, str]:
        return self._open_filesystem(self.url)

    @property
    def filesystem(self) -> Any:
        """File system of fsspec for the URL, opened at first use."""
        return self._opened[0]

    @property
    def root(self) -> str:
        """Path in `filesystem` of the file, folder or pattern, without a trailing slash."""
        path = self._opened[1]
        return path.rstrip("/") or path

    def _open_filesystem(self, url: str) -> tuple[Any, str]:
        import fsspec

        head, is_chain, _ = url.partition("::")
        try:
            if is_chain and "://" not in head:
                fsspec.get_filesystem_class(head)
            return fsspec.core.url_to_fs(url, **self.storage_options)
        except ImportError as err:
            package = getattr(err.__cause__, "name", None) or "the package for such URLs"
            raise ModuleNotFoundError(
                f"{redacted(url)} needs {package}, which is not installed: pip install {package}, "
                "here and on the workers",
                name=package,
            ) from err
        except ValueError as err:
            if "Protocol not known" not in str(err):
                raise
            raise UnreadableInputError(
                f'{redacted(url)} is taken for a URL, whose marks are "://" and "::", and there is '
                "no such protocol: rename the file or folder, or correct the URL"
            ) from err

    def below(self: AnyStore, folder: str) -> AnyStore:
        """Return a store for a relative path in this folder, with the same storage options."""
        self.path(folder)
        return replace(self, url=f"{self.address.rstrip('/')}/{folder}")

    # Calls, and their errors.

    def retried(self, call: Callable[[], Result]) -> Result:
        """Return ``call()``; retry it if it raises a transient error, up to `READ_TRIES` tries."""

        def may_pass(err: Exception) -> bool:
            reason = self.cause_of(err)
            is_transient = self.is_transient(reason)
            if is_transient:
                logger.warning("%s: %s: it is asked again", self.shown, error_text(reason))
            return is_transient

        return retried(call, may_pass, tries=READ_TRIES)

    def is_transient(self, err: BaseException) -> bool:
        """Return whether a retry may succeed after `err`, here only if an answer was cut short.

        fsspec's clients of most protocols retry other errors themselves.
        """
        return isinstance(err, CutShortError)

    def cause_of(self, err: Exception) -> BaseException:
        """Return the storage client's error if fsspec raised `err` in its place, else `err`."""
        return err

    @contextlib.contextmanager
    def explained(self, where: str = "") -> Iterator[None]:
        """Replace errors of the block by errors with the URL and advice, without secrets.

        The new error is FileNotFoundError, PermissionError, TimeoutError or OSError. `where` is the
        position in the file. Stores whose `explains_itself` is True replace no errors.
        """
        try:
            yield
        except Exception as err:
            if self.explains_itself:
                raise
            reason = self.cause_of(err)
            names = ", ".join(sorted(self.storage_options))
            error = next((kind for kind in _ERRORS if isinstance(reason, kind)), OSError)
            raise error(
                f"{self.shown}{where}: {error_text(reason)}. Check address, bucket, region and "
                f"credentials: storage_options= {f'gives {names}' if names else 'is empty'}, and "
                "the environment gives the rest, here and on the workers"
            ) from None

    # The file, or the files of the pattern or folder, as an input.

    def pin(self: AnyStore, commits: dict[Any, str]) -> AnyStore:
        """Return this store; for a Hub repository, a store at the current commit of its revision.

        `commits` caches commit hashes by repository, and is updated.
        """
        return self

    @property
    def is_pattern(self) -> bool:
        """Whether the path has glob characters, which may also be a part of a file's name."""
        return glob.has_magic(without_query(self.root))

    def entries(self) -> list[Entry] | None:
        """List the file, the files below a folder, or a glob pattern's matches.

        Returns None if there is no such file, folder or match, and [] for an empty folder.
        """
        self.filesystem.invalidate_cache()
        with self.explained():
            return self._entries_of(self.root)

    def _entries_of(self, path: str) -> list[Entry] | None:
        try:
            if self._is_folder(path):
                return [*self.walk(path)]
            return [Entry(path, self.resolve(path), self.filesystem.info(path))]
        except FileNotFoundError as err:
            if self.cause_of(err) is not err:
                raise
        if not self.is_pattern:
            return None
        names = path.split("/")
        first = next(number for number, name in enumerate(names) if glob.has_magic(name))
        root = "/".join(names[:first]) or self.filesystem.root_marker
        plain = itertools.takewhile("**".__ne__, names[first:])
        levels = tuple(re.compile(glob_translate(name)) for name in plain)
        matches = re.compile(glob_translate(path)).match
        with contextlib.suppress(FileNotFoundError):
            return [
                entry
                for entry in self.walk(root, levels)
                if "**" not in names
                or entry.problem
                or any(map(matches, _path_and_parents(entry.path, root)))
            ] or None
        return None

    def _is_folder(self, path: str) -> bool:
        return bool(self.filesystem.isdir(path))

    def walk(self, root: str | None = None, levels: Levels = ()) -> Iterator[Entry]:
        """Yield the files below the folder `root` (default: this one), with all subfolders.

        `levels` are regular expressions for the names directly in `root`, in its subfolders, and so
        on. Files above the last of these levels are skipped; below it, all names match. Names that
        begin with a dot or an underscore are skipped. Links are followed last, and may yield a file
        again. An empty subfolder is an entry of type "directory", and a local folder that cannot be
        listed is an entry with a `problem`. Raises FileNotFoundError if `root` does not exist,
        except that a flat store may yield nothing.
        """
        root = self.root if root is None else root
        waiting = deque([(root, levels, "")])
        links: deque[tuple[str, Levels, str]] = deque()
        last: list[Entry] = []
        listed = set()
        while waiting or links:
            folder, levels, linked = (waiting or links).popleft()
            real = self.resolve(folder)
            if (real, levels) in listed:
                continue
            listed.add((real, levels))
            try:
                if self.is_flat and not levels:
                    infos = [*self.filesystem.find(folder, detail=True).values()]
                else:
                    infos = list(self.filesystem.ls(folder, detail=True))
            except OSError as err:
                if not self.is_near or (folder == root and isinstance(err, FileNotFoundError)):
                    raise
                yield Entry(folder, real, {}, linked, err)
                continue
            if not infos and folder != root:  # an empty folder may share its name with a file
                yield Entry(folder, real, {"type": "directory"}, linked)
            for info in infos:
                path, is_link = info["name"].rstrip("/"), bool(info.get("islink"))
                name = path.removeprefix(folder).strip("/")
                is_hidden = any(part.startswith((".", "_")) for part in name.split("/"))
                if not name or is_hidden or (levels and not levels[0].match(name)):
                    continue
                if is_link and self.filesystem.isdir(path):
                    links.append((path, levels[1:], self.resolve(path)))
                elif info["type"] == "directory":
                    waiting.append((path, levels[1:], linked))
                elif is_link and len(levels) < 2:
                    last.append(Entry(path, self.resolve(path), info, linked))
                elif len(levels) < 2:
                    yield Entry(path, posixpath.join(real, name), info, linked)
        yield from last

    def resolve(self, path: str) -> str:
        """Return the path unchanged, because most file systems have no symbolic links."""
        return path

    def url_of(self, path: str) -> str:
        """Return the URL that opens `path`, a path in this store's file system, again."""
        url = self.filesystem.unstrip_protocol(path)
        if "::" in url:
            self._open_filesystem(url)  # raises, unless the marks belong to the URL
        return url

    def real_name(self, entry: Entry) -> str:
        """Return the canonical path or URL of a listed file, the same in every listing."""
        return self.url_of(entry.path)

    def problem(self, path: str) -> str | None:
        """Return the reason why the file `path` cannot be read, if it is known without reading."""
        return None

    def hint(self) -> str:
        """Return text to append to an error about this missing file, with a similar name, or ""."""
        folder, wanted = posixpath.split(self.root)
        with contextlib.suppress(Exception):  # a hint is not worth an error
            siblings = self.filesystem.ls(folder, False)
            similar = nearest(wanted, [posixpath.basename(name.rstrip("/")) for name in siblings])
            return similar and f".{similar}"
        return ""

    def info(self) -> dict[str, Any]:
        """Request and return fsspec's info dict on this file, such as its ``size`` and ``ETag``."""
        self.filesystem.invalidate_cache(self.filesystem._parent(self.root))
        with self.explained():
            return self.retried(functools.partial(self.filesystem.info, self.root))

    def version(self, info: Mapping[str, Any]) -> str:
        """Return a file's version in `info`, fsspec's info on it, as text; "" if there is none.

        It is the ETag, MD5, generation or identifier, else the time of modification or creation.
        """
        value = next((info[key] for key in _VERSIONS if info.get(key) not in (None, "")), "")
        return str(value.timestamp() if hasattr(value, "timestamp") else value)

    def stamp(self) -> str:
        """Return "": only local files have a stamp (mtime, ctime, inode), to detect changes."""
        return ""

    @contextlib.contextmanager
    def reading(
        self, size_bytes: int | None = None, ahead_bytes: int | None = None
    ) -> Iterator[BinaryIO]:
        """Open the file for reading bytes, and yield it, with retries of transient errors.

        `size_bytes` is the file's size, if known, which saves requests to the Hub. `ahead_bytes` is
        the read-ahead there. Raises OSError, or an error of `gpuclassify.hub.calls`, if the bytes
        are not delivered. If they are, any ValueError, EOFError, OSError, or error of Arrow, zlib
        or lzma in the block becomes BrokenContentError.
        """
        with self.open(size_bytes, ahead_bytes) as opened:
            file = WatchedFile(opened, self, size_bytes)
            try:
                yield cast(BinaryIO, file)
            except Exception as err:
                if file.failure is not None:
                    with self.explained(file.failed_at):
                        raise file.failure from None
                if not isinstance(err, _UNDECODABLE):
                    raise
                raise BrokenContentError(_decoding_problem(err)) from err

    def open(self, size_bytes: int | None, ahead_bytes: int | None) -> Any:
        """Open the file for reading bytes, with a read-ahead of `LINE_BYTES`.

        A compressed file gets the file system's default read-ahead, which is larger. `size_bytes`
        and `ahead_bytes`, which may be None, are used by subclasses.
        """
        # The default read-ahead, 50 MiB in s3fs, is several times the size of a part.
        block_size = None if compression(self.url) else LINE_BYTES
        with self.explained():
            return self.filesystem.open(self.root, "rb", block_size=block_size)

    def delivers_ranges(self, size_bytes: int | None) -> bool:
        """Return whether byte ranges of the file can be read: True, except for some web servers."""
        return True

    # Files in the folder, as an output.

    def path(self, name: str) -> str:
        """Return the path in `filesystem` of `name`, a relative path in this folder.

        `name` may come from an untrusted record: raises ValueError if it is absolute or has "..".
        Local stores also refuse symbolic links and special files.
        """
        if name.startswith("/") or ".." in name.split("/"):
            raise self._refused_path(name, "leads out of it")
        return posixpath.join(self.root, name)

    def _refused_path(self, name: str, wrong: str) -> ValueError:
        return ValueError(
            f"{name} in {self} {wrong}, and no job wrote it so: remove it, or take another "
            "directory"
        )

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the size in bytes of each file directly in `folder`, by name; {} if missing."""
        return {
            posixpath.basename(info["name"]): info["size"]
            for info in self._infos_in(folder)
            if info["type"] == "file"
        }

    def folders(self, folder: str = "") -> list[str]:
        """List the names of folders directly in `folder`, a relative path; [] if it is missing."""
        names = [info["name"] for info in self._infos_in(folder) if info["type"] == "directory"]
        return [posixpath.basename(name.rstrip("/")) for name in names]

    def part_sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file here and in partition folders, by relative path."""
        return {name: info["size"] for name, info in self.part_infos().items()}

    def part_infos(self, folder: str = "") -> dict[str, dict[str, Any]]:
        """Return fsspec's info dict on each file in `folder` and its partition folders, by path.

        Paths are relative to this store, such as ``bucket=19/part-00000.parquet``.
        """
        infos: dict[str, dict[str, Any]] = {}
        for info in self._infos_in(folder):
            name = posixpath.join(folder, posixpath.basename(info["name"].rstrip("/")))
            if info["type"] == "file":
                infos[name] = info
            elif "=" in posixpath.basename(name):
                infos |= self.part_infos(name)
        return infos

    def _infos_in(self, folder: str) -> list[dict[str, Any]]:
        """List fsspec's info dicts on files and folders directly in `folder`; [] if missing."""
        path = self.path(folder).rstrip("/")
        self.filesystem.invalidate_cache(path)
        try:
            return list(self.filesystem.ls(path, detail=True))
        except FileNotFoundError:
            return []

    def reported_md5(self, info: Mapping[str, Any]) -> str | None:
        """Return the hexadecimal MD5 of a file's content if fsspec's info on it has it, else None.

        S3's ETag is the MD5 of objects that were stored by one request and are not encrypted with a
        customer's key; any other ETag is returned, too, and equals no MD5.
        """
        settings = info.get("content_settings") or {}
        md5 = settings.get("content_md5") or info.get("md5Hash") or info.get("ETag")
        if isinstance(md5, str):
            md5 = md5.strip('"')
            return (base64.b64decode(md5).hex() if md5.endswith("==") else md5) or None
        return bytes(md5 or b"").hex() or None

    def make(self, *folders: str) -> None:
        """Create this folder, and in it `folders` (relative paths); existing ones are no error."""
        for folder in ("", *folders):
            self.filesystem.makedirs(self.path(folder).rstrip("/"), exist_ok=True)

    def has(self, name: str) -> bool:
        """Return whether `name` exists in this folder; raise if that cannot be determined."""
        try:
            self.filesystem.info(self.path(name))
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str) -> bytes:
        """Return the content of the file `name` in this folder, or raise FileNotFoundError."""
        return self.filesystem.cat_file(self.path(name))

    def read_all(self, names: Sequence[str]) -> Iterator[bytes]:
        """Yield the contents of the files `names` in this folder, in order, read in parallel."""
        with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
            for start in range(0, len(names), 32 * FILES_AT_A_TIME):
                yield from pool.map(self.read, names[start : start + 32 * FILES_AT_A_TIME])

    @contextlib.contextmanager
    def local_copy(self, name: str) -> Iterator[str]:
        """Yield the path of a temporary local copy of the file `name`, removed after the block."""
        with tempfile.TemporaryDirectory() as folder:
            copy = str(Path(folder, "file"))
            self.filesystem.get_file(self.path(name), copy)
            yield copy

    def digest(self, name: str) -> str:
        """Return the SHA-256 of the file `name` in this folder: 64 hex digits."""
        digest, start = hashlib.sha256(), 0
        path, size = self.path(name), self.filesystem.size(self.path(name))

        def read_block() -> bytes:
            end = min(start + BLOCK_BYTES, size)
            block: bytes = self.filesystem.cat_file(path, start=start, end=end)
            if not block:
                raise CutShortError(errno.EIO, f"{name} ends after {start:,} of {size:,} bytes")
            return block

        while start < size:
            block = self.retried(read_block)
            digest.update(block)
            start += len(block)
        return digest.hexdigest()

    def digests(self, names: Sequence[str]) -> list[tuple[str, str, str]]:
        """Return (name, SHA-256, "") of each file, or (name, "", reason) if it cannot be read.

        Reasons are a missing file and errors with the errno EIO; other errors are raised.
        """

        def digest(name: str) -> tuple[str, str, str]:
            try:
                return name, self.digest(name), ""
            except OSError as err:
                # The file systems of most protocols report missing files without an errno.
                if not isinstance(err, FileNotFoundError) and err.errno != errno.EIO:
                    raise
                return name, "", f"cannot be read: {err}"

        with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
            return list(pool.map(digest, names))

    def remove(self, *names: str) -> None:
        """Remove the files `names` in this folder, several at a time; missing ones are ignored."""

        def remove(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self.filesystem.rm_file(self.path(name))

        with ThreadPoolExecutor(min(max(1, len(names)), FILES_AT_A_TIME)) as pool:
            list(pool.map(remove, names))

    def remove_folder(self, folder: str) -> None:
        """Remove all files below `folder`, a relative path. Local stores also remove folders."""
        path = self.path(folder)
        below = self.filesystem.find(path)  # rm() would read names as patterns
        self.remove(*(posixpath.join(folder, name[len(path) :].lstrip("/")) for name in below))

    def prune(self, *folders: str) -> None:
        """Do nothing; local stores remove `folders` if empty, and then their empty parents."""

    def sync(self) -> None:
        """Do nothing; local stores flush the folder's list of file names to disk."""

    def refuse_file(self) -> None:
        """Raise NotADirectoryError if this path, meant for a folder, is a file."""
        self._refuse_files(self.root)

    def _refuse_files(self, *paths: str) -> None:
        for path in paths:
            if self.filesystem.isfile(path):
                shown = self if path == self.root else path
                raise NotADirectoryError(f"{shown} is a file: name a directory for the output")

    def holds(self, file: Store) -> bool:
        """Return whether the path of the store `file` lies below this folder."""
        try:
            is_same_kind = type(file.filesystem) is type(self.filesystem)
        except (ValueError, ImportError):  # an unknown protocol, or one without its package
            return False
        return is_same_kind and file.resolve(file.root).startswith(f"{self.resolve(self.root)}/")

    def would_match(self, folder: Store, name: str) -> bool:
        """Return whether this path or pattern would match a file `name` in the store `folder`.

        The file need not exist. Raises ImportError if a package for one of the URLs is missing.
        """
        return self.filesystem == folder.filesystem and self._matches(
            self.root, f"{folder.root}/{name}"
        )

    def matches(self, name: str) -> bool:
        """Return whether this path or pattern matches a file, given its canonical URL `name`.

        A path to a folder matches the files below it. Names may be untrusted, so they are compared
        as text: opening the file system that a name gives would send these storage options to a
        host of its author's choice.
        """
        return self._matches(self.url_of(self.root), name)

    @staticmethod
    def _matches(root: str, path: str) -> bool:
        pattern = re.compile(glob_translate(root))
        names = path.split("/")  # a pattern may match a folder above the file
        return path.startswith(f"{root}/") or any(
            pattern.match("/".join(names[:end])) for end in range(len(names), 0, -1)
        )

    # Whole files.

    def replace(self, name: str, data: bytes) -> None:
        """Write `data` to a temporary file, and rename it to `name`, replacing an existing file."""
        with self.replacing(self.path(name)) as file:
            file.write(data)

    @contextlib.contextmanager
    def replacing(self, target: str) -> Iterator[Any]:
        """Open a temporary file for writing bytes, and rename it to `target` after the block.

        `target` is a path in `filesystem`.
        """
        mark = new_mark()
        private = posixpath.join(posixpath.dirname(target), f".{posixpath.basename(target)}.{mark}")
        _being_written.add(mark)
        try:
            with self.filesystem.open(private, "wb") as file:
                yield file
            self.move(private, target)
        except BaseException:
            with contextlib.suppress(OSError):
                self.filesystem.rm_file(private)
            raise
        finally:
            _being_written.discard(mark)

    def move(self, source: str, target: str) -> None:
        """Move a file from one path in `filesystem` to another, replacing an existing file."""
        try:
            self.filesystem.cp_file(source, target)
        except NotImplementedError:
            self.filesystem.mv(source, target)
        else:
            self.filesystem.rm_file(source)

    def sweep(self, *folders: str) -> None:
        """Remove temporary files in these folders that killed processes left while writing.

        "" is this folder. Files of other machines are kept for a day.
        """
        for folder in folders:
            left = [
                posixpath.join(folder, name)
                for info in self._infos_in(folder)
                if _is_abandoned(name := posixpath.basename(info["name"]), info)
            ]
            self.remove(*left)

    # Exclusive creation.

    def create(self, name: str, data: bytes, scratch: str, *, is_lasting: bool = False) -> bool:
        """Create the file `name` with content `data` unless it exists; return whether it did so.

        Exactly one of several attempts succeeds; stores other than local ones also return True if
        the existing file has the same content. Local stores first write a temporary file in the
        folder `scratch`; with `is_lasting`, they flush it to disk.
        """
        for wait_seconds in CONFLICT_WAITS_SECONDS:
            try:
                self.filesystem.pipe_file(self.path(name), data, mode="create")
                return True
            except (FileNotFoundError, PermissionError):
                raise
            except OSError as err:  # clients report an existing file by various types
                refusal = err
            with contextlib.suppress(FileNotFoundError):
                # If the first answer was lost, the client's retry finds the file of this attempt.
                return self.read(name) == data
            time.sleep(wait_seconds)
        raise refusal

    def ensure(self, name: str, data: bytes, scratch: str, *, is_lasting: bool = False) -> None:
        """Create the file `name` with content `data`, replacing a file with other content.

        `scratch` and `is_lasting` are as in `create`.
        """
        is_created = self.create(name, data, scratch, is_lasting=is_lasting)
        if not is_created and self.read(name) != data:
            self.remove(name)
            self.create(name, data, scratch, is_lasting=is_lasting)

    def check_creates(self, scratch: str) -> None:
        """Try `create`; raise UnsupportedStorageError unless it refuses existing files here."""
        # fsspec's own method is not atomic: it looks for the file, and then writes it.
        from fsspec import AbstractFileSystem
        from fsspec.asyn import AsyncFileSystem

        method = getattr(self.filesystem, "_pipe_file", self.filesystem.pipe_file)
        inherited = (AbstractFileSystem.pipe_file, AsyncFileSystem._pipe_file)
        # adlfs accepts "mode", but its signature has the older name "overwrite".
        names = {"mode", "overwrite"} & inspect.signature(method).parameters.keys()
        if method.__func__ in inherited or not names:
            raise self._cannot_create()
        self._try_creating(scratch)

    def _try_creating(self, scratch: str) -> None:
        # Probe in the target folder: BeeGFS and AFS link only within one folder.
        mark = new_mark()
        name = f".probe.{mark}"
        _being_written.add(mark)  # other jobs of this process must not sweep it away
        try:
            with self.explained():
                is_created = [self.create(name, content, scratch) for content in (b"1", b"2")]
        finally:
            _being_written.discard(mark)
            with contextlib.suppress(OSError):
                self.remove(name)
        if is_created != [True, False]:
            raise self._cannot_create()

    def _cannot_create(self) -> UnsupportedStorageError:
        return UnsupportedStorageError(
            f"{self} is on a file system that cannot create a file only if it is not there, so "
            "that two attempts at a part could both count: write to a local path with hard links, "
            "or to s3://, gs:// or az://"
        )


class ObjectStore(Store):
    """Access to objects in a bucket of S3, Google Cloud Storage or Azure, which have no folders."""

    is_flat = True
    tags_files = True

    def is_transient(self, err: BaseException) -> bool:
        """Return whether a retry may succeed after `err`: a short answer or a wrong checksum."""
        # botocore raises it if an answer does not match the checksum that S3 has of the object.
        return super().is_transient(err) or type(err).__name__ == "FlexibleChecksumError"

    def make(self, *folders: str) -> None:
        """Do nothing: object stores have no folders, and s3fs would create a missing bucket."""


def error_text(err: BaseException) -> str:
    """Return an error's type and message, with secrets removed from URLs in it."""
    text = URL.sub(lambda match: redacted(match[0]), str(err))
    return f"{type(err).__name__}: {text}".rstrip(".: ")


def _decoding_problem(err: Exception) -> str:
    reason = " ".join(str(err).split())  # Arrow's messages may have several lines
    if reason.startswith(_NO_GZIP):  # without the repr of the first bytes
        reason = _NO_GZIP
    if "CRC checksum" in reason:
        reason = (
            f"bytes have changed since they were written, {reason}: bring the file again "
            "from where it is whole"
        )
    if "too much memory" in reason:
        reason += (
            ": it is compressed with a window above 2^27 bytes (zstd --long), which few "
            "readers take: write it again, as with `zstd -dc --long=31 FILE | zstd -o NEW`"
        )
    return reason


def _path_and_parents(path: str, root: str) -> Iterator[str]:
    while len(path) > len(root):
        yield path
        path = posixpath.dirname(path)


# Names of temporary files.


def _process_namespace() -> str:
    """Return eight hex digits that identify the PID namespace, where process IDs are unique."""
    parts = [socket.gethostname()]  # not enough, because containers may share it
    with contextlib.suppress(OSError):  # not Linux, or hidden
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


_NAMESPACE = _process_namespace()


def new_mark() -> str:
    """Return a unique suffix for a temporary file, which `Store.sweep` recognizes."""
    return f"{_NAMESPACE}-{os.getpid()}-{uuid.uuid4().hex}"


def _is_abandoned(name: str, info: Mapping[str, Any]) -> bool:
    mark = _MARK.fullmatch(name.rpartition(".")[2])
    if mark is None or not name.startswith("."):
        return False
    namespace, process = mark[1], int(mark[2])
    if namespace == _NAMESPACE:
        if process == os.getpid():
            return mark[0] not in _being_written
        return not psutil.pid_exists(process)
    times = [info.get(name) for name in ("mtime", "LastModified", "last_modified")]
    written: Any = next((time for time in times if time is not None), time.time())
    seconds = written.timestamp() if hasattr(written, "timestamp") else written
    return time.time() - seconds > _ABANDONED_SECONDS
