"""Files of one protocol, through fsspec: listed, read, written, and created only once.

`Store` is right for any protocol that fsspec knows, and `ObjectStore` for buckets; its other kinds
are in the files beside. `gpuclassify.jobs.stores.opening.open_store` chooses among them.
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
LINE_BYTES = 64 << 10  # fetched beyond what is asked for, where lines are read
# S3 may answer attempts that meet with a conflict, and then any of them may be tried again.
CONFLICT_WAITS_SECONDS = (0.1, 0.5, 0.0)
# The last part of the names of files that `Store.replacing` writes: host, process, a number.
_MARK = re.compile("([0-9a-f]{8})-([0-9]{1,10})-[0-9a-f]{32}")
_ABANDONED_SECONDS = 86_400.0
_being_written: set[str] = set()  # files that this process is writing
# Error types that are kept; other errors of a store become OSError.
_ERRORS = (FileNotFoundError, PermissionError, TimeoutError)
_UNDECODABLE = (pa.ArrowException, ValueError, EOFError, OSError, zlib.error, lzma.LZMAError)
# Fields in which file systems store a file's version, best first.
_VERSIONS = (
    *("ETag", "etag", "md5Hash", "generation", "blob_id"),
    *("mtime", "LastModified", "Last-Modified", "created"),
)


class UnreadableInputError(ValueError):
    """Error for an input file that is missing, broken, or does not fit the others."""


class BrokenContentError(UnreadableInputError):
    """Error for bytes of a file that cannot be decoded."""


class UnsupportedStorageError(ValueError):
    """Error for a file system that cannot create a file only if it is not there."""


class CutShortError(ConnectionError):
    """Error for an answer that ends before the file does."""


class Entry(NamedTuple):
    """A file of a listing, or a folder that is empty or, for a `problem`, has no listing."""

    path: str  # path in its file system, as listed
    real: str  # the same without links
    info: dict[str, Any] = {}
    linked: str = ""  # the folder that a link on the way leads to, if there is one
    problem: OSError | None = None


class WatchedFile:
    """File that completes short reads, retries failed ones, and remembers why reading failed.

    Arrow raises a bare OSError for bytes that it cannot decode, and so do some stores for requests
    that they refuse.
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
        """Read `length` bytes, or the rest of the file; complete short answers by further reads.

        A store may answer with fewer bytes than asked for, also in the middle of a file, and
        fsspec returns them as if the file ended there.
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
        place = None if getattr(self._file, "closed", False) else self._file.tell()

        def call() -> Any:
            if place is not None and self._file.tell() != place:  # a try failed within a line
                self._file.seek(place)
            return method(*arguments)

        try:
            return self._store.retried(call)
        except Exception as err:
            self.failure = err
            self.failed_at = "" if place is None else f", from byte {place}"
            raise


@dataclass(frozen=True)
class Store:
    """A file, folder or pattern of files at a path or URL; names are relative to the folder.

    It opens its file system where it is first used. A pickled store has no storage options: these
    may be secrets, and `gpuclassify.workers.secrets` knows them as `options_name` elsewhere.
    """

    url: str
    options_name: str = ""
    options: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    has_commits: ClassVar[bool] = False  # whether inputs are read at a commit
    is_flat: ClassVar[bool] = False  # whether all below a folder is listed at once
    is_writable: ClassVar[bool] = True  # whether jobs may have written there
    explains_itself: ClassVar[bool] = False  # whether errors name the file and the cure
    is_near: ClassVar[bool] = False  # whether a file can be read twice at no cost
    tags_files: ClassVar[bool] = False  # whether a file written again always has another version
    reports_md5: ClassVar[bool] = True  # whether a listing may have digests of content

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
        """Raise ValueError if no job can write parts to this kind of URL."""

    @property
    def is_fixed(self) -> bool:
        """Whether its files can never change."""
        return False

    @property
    def shown(self) -> str:
        """Path or URL as it was passed, without secrets."""
        return redacted(self.url)

    @property
    def address(self) -> str:
        """Absolute path or URL for other machines."""
        return self.url

    @property
    def _given_options(self) -> Mapping[str, Any]:
        return recall(self.options_name, {}) if self.options is None else self.options

    @property
    def storage_options(self) -> dict[str, Any]:
        """Storage options for fsspec; names of the Hub's tokens are none of another store's."""
        options = self._given_options.items()
        return {name: value for name, value in options if not isinstance(value, TokenName)}

    @functools.cached_property
    def _opened(self) -> tuple[Any, str]:
        return self._open_filesystem(self.url)

    @property
    def filesystem(self) -> Any:
        """File system of fsspec."""
        return self._opened[0]

    @property
    def root(self) -> str:
        """Path in the file system."""
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
        """Return the store of a folder or file in this one; raises ValueError as `path` does."""
        self.path(folder)
        return replace(self, url=f"{self.address.rstrip('/')}/{folder}")

    # Calls, and their errors.

    def retried(self, call: Callable[[], Result]) -> Result:
        """Call and return the result, retrying transient errors."""

        def may_pass(err: Exception) -> bool:
            reason = self.cause_of(err)
            is_transient = self.is_transient(reason)
            if is_transient:
                logger.warning("%s: %s: it is asked again", self.shown, error_text(reason))
            return is_transient

        return retried(call, may_pass, tries=READ_TRIES)

    def is_transient(self, err: BaseException) -> bool:
        """Tell whether another try may succeed; most stores' clients retry other errors."""
        return isinstance(err, CutShortError)

    def cause_of(self, err: Exception) -> BaseException:
        """Return the error that has happened, where fsspec raises another one."""
        return err

    @contextlib.contextmanager
    def explained(self, where: str = "") -> Iterator[None]:
        """Add the store's name and a cure to errors, without secrets of URLs.

        `where` is the position in the file, such as ``", from byte 5"``.
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
        """Return the store as it is now, if it has versions; `commits` are those known already."""
        return self

    @property
    def is_pattern(self) -> bool:
        """Whether the path is a pattern, if it names nothing itself."""
        return glob.has_magic(without_query(self.root))

    def entries(self) -> list[Entry] | None:
        """List a file, all below a folder, or a pattern's matches; None if there is nothing."""
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
        steps = path.split("/")
        first = next(number for number, step in enumerate(steps) if glob.has_magic(step))
        root = "/".join(steps[:first]) or self.filesystem.root_marker
        plain = itertools.takewhile("**".__ne__, steps[first:])
        levels = tuple(re.compile(glob_translate(step)) for step in plain)
        matches = re.compile(glob_translate(path)).match
        with contextlib.suppress(FileNotFoundError):
            return [
                entry
                for entry in self.walk(root, levels)
                if "**" not in steps or entry.problem or any(map(matches, _above(entry.path, root)))
            ] or None
        return None

    def _is_folder(self, path: str) -> bool:
        return bool(self.filesystem.isdir(path))

    def walk(self, root: str | None = None, levels: Levels = ()) -> Iterator[Entry]:
        """Yield the files below a folder. Inputs and outputs are listed by this function only.

        `levels` are patterns of names, one per folder level; below the last level everything
        matches. Names that begin with a dot or an underscore are metadata, and are skipped. Links
        are followed after everything else, so that real folders and files come first. No folder is
        listed twice, which ends cycles of links. A local folder that cannot be listed is an entry
        with a problem.
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
                infos = self._infos(folder, is_deep=self.is_flat and not levels)
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
                is_hidden = any(step.startswith((".", "_")) for step in name.split("/"))
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

    def _infos(self, folder: str, is_deep: bool) -> list[dict[str, Any]]:
        if is_deep:
            return [*self.filesystem.find(folder, detail=True).values()]
        return list(self.filesystem.ls(folder, detail=True))

    def resolve(self, path: str) -> str:
        """Return a path without symbolic links, where the file system has them."""
        return path

    def url_of(self, path: str) -> str:
        """Return the path or URL that opens a file of this store's file system."""
        url = self.filesystem.unstrip_protocol(path)
        if "::" in url:
            self._open_filesystem(url)  # raises, unless the marks belong to the URL
        return url

    def real_name(self, entry: Entry) -> str:
        """Return the canonical name of an entry, which identifies the file."""
        return self.url_of(entry.path)

    def problem(self, path: str) -> str | None:
        """Return why a file cannot be read, as far as is known without reading it."""
        return None

    def hint(self) -> str:
        """Return further words about a file that is missing: which name is near, or nothing."""
        folder, wanted = posixpath.split(self.root)
        with contextlib.suppress(Exception):  # whatever a store raises: it is only a hint
            beside = self.filesystem.ls(folder, False)
            near = nearest(wanted, [posixpath.basename(name.rstrip("/")) for name in beside])
            return near and f".{near}"
        return ""

    def info(self) -> dict[str, Any]:
        """Ask the file system for its entry of the file."""
        # Else it may answer from a listing.
        self.filesystem.invalidate_cache(self.filesystem._parent(self.root))
        with self.explained():
            return self.retried(functools.partial(self.filesystem.info, self.root))

    def version(self, info: Mapping[str, Any]) -> str:
        """Return the tag or time of change in a file system's entry; empty if there is neither."""
        value = next((info[key] for key in _VERSIONS if info.get(key) not in (None, "")), "")
        return str(value.timestamp() if hasattr(value, "timestamp") else value)

    def stamp(self) -> str:
        """Return the change stamp of a local file: mtime, ctime, inode; empty for other files."""
        return ""

    @contextlib.contextmanager
    def reading(
        self, size_bytes: int | None = None, ahead_bytes: int | None = None
    ) -> Iterator[BinaryIO]:
        """Open the file for reading bytes.

        `size_bytes`, if it is known, saves requests on the Hub; `ahead_bytes` are fetched from
        there beyond what is asked for, by default all of a small file. Raises BrokenContentError if
        what is read in the block cannot be decoded, and OSError if the bytes are not delivered.
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
        """Open the file as fsspec does; see `reading`."""
        # Stores read far ahead by themselves, s3fs 50 MiB: several times what a part is.
        block_size = None if compression(self.url) else LINE_BYTES
        with self.explained():
            return self.filesystem.open(self.root, "rb", block_size=block_size)

    def delivers_ranges(self, size_bytes: int | None) -> bool:
        """Tell whether the file can be read in pieces."""
        return True

    # Files in the folder, as an output.

    def path(self, name: str) -> str:
        """Return the path of the file or folder `name`, which somebody else's record may give.

        Raises ValueError if it leads out of the folder, itself or by a link, or is neither a
        regular file nor a folder.
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
        """Return the sizes in bytes of the files in `folder`, not below it, by their names."""
        return {
            posixpath.basename(info["name"]): info["size"]
            for info in self._infos_in(folder)
            if info["type"] == "file"
        }

    def folders(self, folder: str = "") -> list[str]:
        """List the names of the folders in `folder`, where the file system has or shows folders."""
        names = [info["name"] for info in self._infos_in(folder) if info["type"] == "directory"]
        return [posixpath.basename(name.rstrip("/")) for name in names]

    def part_sizes(self) -> dict[str, int]:
        """Return `sizes`, with the files in partition folders, such as ``bucket=19/part-00000``."""
        return {name: info["size"] for name, info in self.part_infos().items()}

    def part_infos(self, folder: str = "") -> dict[str, dict[str, Any]]:
        """Return the file system's entries of the files that `part_sizes` has."""
        infos: dict[str, dict[str, Any]] = {}
        for info in self._infos_in(folder):
            name = posixpath.join(folder, posixpath.basename(info["name"].rstrip("/")))
            if info["type"] == "file":
                infos[name] = info
            elif "=" in posixpath.basename(name):
                infos |= self.part_infos(name)
        return infos

    def _infos_in(self, folder: str) -> list[dict[str, Any]]:
        """List the file system's entries in `folder`; empty if it does not exist."""
        path = self.path(folder).rstrip("/")
        self.filesystem.invalidate_cache(path)
        try:
            return list(self.filesystem.ls(path, detail=True))
        except FileNotFoundError:
            return []

    def reported_md5(self, info: Mapping[str, Any]) -> str | None:
        """Return the MD5 of a file's content, in hexadecimal, if an entry has it.

        S3's ETag is that digest of what was stored at once and is not encrypted with a customer's
        key; Google's store and Azure's name theirs.
        """
        settings = info.get("content_settings") or {}
        md5 = settings.get("content_md5") or info.get("md5Hash") or info.get("ETag")
        if isinstance(md5, str):
            md5 = md5.strip('"')
            return base64.b64decode(md5).hex() if md5.endswith("==") else md5
        return None if md5 is None else bytes(md5).hex()

    def make(self, *folders: str) -> None:
        """Make the folder and these in it, where the file system has folders."""
        for folder in ("", *folders):
            self.filesystem.makedirs(self.path(folder).rstrip("/"), exist_ok=True)

    def has(self, name: str) -> bool:
        """Tell whether a file is there; unlike fsspec's ``exists``, fail where nobody can tell."""
        try:
            self.filesystem.info(self.path(name))
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str) -> bytes:
        """Read the content of a file; raise FileNotFoundError if there is none."""
        return self.filesystem.cat_file(self.path(name))

    def read_all(self, names: Sequence[str]) -> Iterator[bytes]:
        """Yield the contents of many files in order; several are read at a time."""
        with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
            for start in range(0, len(names), 32 * FILES_AT_A_TIME):
                yield from pool.map(self.read, names[start : start + 32 * FILES_AT_A_TIME])

    @contextlib.contextmanager
    def local_copy(self, name: str) -> Iterator[str]:
        """Yield the path of a file, or of its copy on this machine."""
        with tempfile.TemporaryDirectory() as folder:
            copy = str(Path(folder, "file"))
            self.filesystem.get_file(self.path(name), copy)
            yield copy

    def digest(self, name: str) -> str:
        """Return the SHA-256 of the content of a file, read block by block."""
        digest, at = hashlib.sha256(), 0
        path, size = self.path(name), self.filesystem.size(self.path(name))

        def read_block() -> bytes:
            block: bytes = self.filesystem.cat_file(path, start=at, end=min(at + BLOCK_BYTES, size))
            if not block:
                raise CutShortError(errno.EIO, f"{name} ends after {at:,} of {size:,} bytes")
            return block

        while at < size:
            block = self.retried(read_block)
            digest.update(block)
            at += len(block)
        return digest.hexdigest()

    def digests(self, names: Sequence[str]) -> list[tuple[str, str, str]]:
        """Return names with the SHA-256 of their files, or with why they cannot be read."""

        def digest(name: str) -> tuple[str, str, str]:
            try:
                return name, self.digest(name), ""
            except OSError as err:
                if err.errno not in (errno.EIO, errno.ENOENT):  # others pass, such as of a network
                    raise
                return name, "", f"cannot be read: {err}"

        with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
            return list(pool.map(digest, names))

    def remove(self, *names: str) -> None:
        """Remove files, if they are there; several at a time."""

        def remove(name: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self.filesystem.rm_file(self.path(name))

        with ThreadPoolExecutor(min(max(1, len(names)), FILES_AT_A_TIME)) as pool:
            list(pool.map(remove, names))

    def remove_folder(self, folder: str) -> None:
        """Remove a folder, if it is there, with all that is in it."""
        path = self.path(folder)
        below = self.filesystem.find(path)  # rm() takes names for patterns
        self.remove(*(posixpath.join(folder, name[len(path) :].lstrip("/")) for name in below))

    def prune(self, *folders: str) -> None:
        """Remove folders that are empty, and those above them, where there are folders."""

    def sync(self) -> None:
        """Bring the names of the files to disk, where they may be in memory only."""

    def refuse_file(self) -> None:
        """Raise NotADirectoryError if a file is where the folder or one above it belongs."""
        self._refuse_files(self.root)

    def _refuse_files(self, *paths: str) -> None:
        for path in paths:
            if self.filesystem.isfile(path):
                shown = self if path == self.root else path
                raise NotADirectoryError(f"{shown} is a file: name a directory for the output")

    def holds(self, file: Store) -> bool:
        """Tell whether a file of any store lies in this folder or below it."""
        try:
            is_beside = type(file.filesystem) is type(self.filesystem)
        except (ValueError, ImportError):  # no file, or one of a store that is not this one
            return False
        return is_beside and file.resolve(file.root).startswith(f"{self.resolve(self.root)}/")

    def would_match(self, folder: Store, name: str) -> bool:
        """Tell whether this path or pattern takes in a file `name` of another folder.

        Raises ImportError where fsspec has no package for this URL.
        """
        return self.filesystem == folder.filesystem and self._takes_in(
            self.root, f"{folder.root}/{name}"
        )

    def takes_in(self, name: str) -> bool:
        """Tell whether this path or pattern takes in a file by its `real_name`.

        A stranger may have written the name, so it is compared as text. To open the file system
        that it names would send these storage options to a host of the stranger's choice.
        """
        return self._takes_in(self.url_of(self.root), name)

    @staticmethod
    def _takes_in(root: str, path: str) -> bool:
        return path.startswith(f"{root}/") or bool(re.match(glob_translate(root), path))

    # Whole files.

    def replace(self, name: str, data: bytes) -> None:
        """Write a whole file, in place of an earlier one."""
        with self.replacing(self.path(name)) as file:
            file.write(data)

    @contextlib.contextmanager
    def replacing(self, target: str) -> Iterator[Any]:
        """Open a binary file that becomes `target` when the block ends well, else vanishes."""
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
        """Move a file to another path, replacing an existing file. Names are never patterns."""
        try:
            self.filesystem.cp_file(source, target)
        except NotImplementedError:
            self.filesystem.mv(source, target)
        else:
            self.filesystem.rm_file(source)

    def sweep(self, *folders: str) -> None:
        """Remove temporary files of `replacing` that killed processes left in these folders.

        Files of running processes of this machine are kept, and files of other machines for a day.
        """
        for folder in folders:
            left = [
                posixpath.join(folder, name)
                for info in self._infos_in(folder)
                if _is_abandoned(name := posixpath.basename(info["name"]), info)
            ]
            self.remove(*left)

    # Files that are created whole and only if they are not there: of several attempts one counts.

    def create(self, name: str, data: bytes, scratch: str, *, is_lasting: bool = False) -> bool:
        """Create a whole file unless it is there; of several attempts exactly one succeeds.

        On a file system of this machine, the file is written under a private name and linked: a
        name appears with all of its content or not at all, without locks, on NFS too. Other stores
        are asked to store the object only if there is none.

        Private files are in the folder `scratch`; with `is_lasting`, the content is brought to disk
        first, so that it outlives a loss of power. Returns whether this attempt's content is there
        now.
        """
        for wait_seconds in CONFLICT_WAITS_SECONDS:
            try:
                self.filesystem.pipe_file(self.path(name), data, mode="create")
                return True
            except (FileNotFoundError, PermissionError):
                raise
            except OSError as err:  # stores and their clients have several words for "it is there"
                refusal = err
            with contextlib.suppress(FileNotFoundError):
                # An answer that was lost and asked for again looks like somebody else's file.
                return self.read(name) == data
            time.sleep(wait_seconds)
        raise refusal

    def ensure(self, name: str, data: bytes, scratch: str, *, is_lasting: bool = False) -> None:
        """Create a whole file, in place of one with other content; see `create`."""
        is_created = self.create(name, data, scratch, is_lasting=is_lasting)
        if not is_created and self.read(name) != data:
            self.remove(name)
            self.create(name, data, scratch, is_lasting=is_lasting)

    def check_creates(self, scratch: str) -> None:
        """Check by a trial that `create` works here; raise UnsupportedStorageError if not."""
        # The store has to be asked; fsspec's way looks first and writes then.
        from fsspec import AbstractFileSystem
        from fsspec.asyn import AsyncFileSystem

        method = getattr(self.filesystem, "_pipe_file", self.filesystem.pipe_file)
        inherited = (AbstractFileSystem.pipe_file, AsyncFileSystem._pipe_file)
        # adlfs takes "mode", too, and shows the name that it had before.
        names = {"mode", "overwrite"} & inspect.signature(method).parameters.keys()
        if method.__func__ in inherited or not names:
            raise self._cannot_create()
        self._try_creating(scratch)

    def _try_creating(self, scratch: str) -> None:
        # Probe in the target folder: BeeGFS and AFS link only within one folder.
        mark = new_mark()
        name = f".probe.{mark}"
        _being_written.add(mark)  # else another job of this process would sweep it away
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
    """Objects of a bucket, which has no folders; S3, Google Cloud Storage or Azure."""

    is_flat = True
    tags_files = True

    def is_transient(self, err: BaseException) -> bool:
        """Tell whether another try may succeed."""
        # botocore compares the answer with the checksum of the whole object, if S3 has one.
        return super().is_transient(err) or type(err).__name__ == "FlexibleChecksumError"

    def make(self, *folders: str) -> None:
        """Do nothing: asked for a folder, s3fs would create the bucket if there is none."""


def error_text(err: BaseException) -> str:
    """Format an error of a store's client in a line, without secrets of the URLs in it."""
    text = URL.sub(lambda match: redacted(match[0]), str(err))
    return f"{type(err).__name__}: {text}".rstrip(".: ")


def _decoding_problem(err: Exception) -> str:
    reason = " ".join(str(err).split())  # Arrow's may be of several lines
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


def _above(path: str, root: str) -> Iterator[str]:
    """Yield the path, and the paths of the folders between it and the root."""
    while len(path) > len(root):
        yield path
        path = posixpath.dirname(path)


# Names of files that are not whole yet.


def _processes_here() -> str:
    """Return eight digits that tell the processes whose numbers are valid here from all others.

    Containers may share a name, and number their processes alike.
    """
    known = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not Linux, or hidden
        known.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        known.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.sha256("\0".join(known).encode()).hexdigest()[:8]


_HERE = _processes_here()


def new_mark() -> str:
    """Return a mark that tells this process's private files from others; see `Store.sweep`."""
    return f"{_HERE}-{os.getpid()}-{uuid.uuid4().hex}"


def _is_abandoned(name: str, info: Mapping[str, Any]) -> bool:
    mark = _MARK.fullmatch(name.rpartition(".")[2])
    if mark is None or not name.startswith("."):
        return False
    here, process = mark[1], int(mark[2])
    if here == _HERE:
        if process == os.getpid():
            return mark[0] not in _being_written
        return not psutil.pid_exists(process)
    times = [info.get(name) for name in ("mtime", "LastModified", "last_modified")]
    written: Any = next((time for time in times if time is not None), time.time())
    seconds = written.timestamp() if hasattr(written, "timestamp") else written
    return time.time() - seconds > _ABANDONED_SECONDS
