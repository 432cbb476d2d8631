"""Find input files by paths and patterns, detect changes of them, and open them safely."""

from __future__ import annotations

import bisect
import contextlib
import glob
import gzip
import hashlib
import lzma
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from gpuclassify.jobs.stores.names import (
    COMPRESSIONS,
    JSONL_SUFFIXES,
    PARQUET_SUFFIXES,
    file_format,
    redacted,
)
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.jobs.stores.store import (
    FILES_AT_A_TIME,
    BrokenContentError,
    Entry,
    Store,
    UnreadableInputError,
)
from gpuclassify.settings.paths import exists

Options = Mapping[str, Any]

DIGESTED_BYTES = 1 << 20  # read size for digests
# A file that unpacks to more than 256 MiB and to over 200 times its stored bytes is refused before
# memory is taken. Documents usually compress to a tenth.
UNPACKED_BYTES, MOST_UNPACKED = 256 << 20, 200
_UNPACKED, _STORED = 2, 3  # field numbers of the sizes in Parquet's PageHeader
# Type codes of Thrift's compact protocol, and the bytes of a value for types of fixed size.
_INT32, _INTEGERS, _BINARY, _STRUCT = 5, (4, 5, 6), 8, 12
_FIXED_BYTES = {1: 0, 2: 0, 3: 1, 7: 8}
_SHA256 = "sha256:"
# Digests by path and stamp, computed once in each process: a file may be read in many parts.
_digests: dict[tuple[str, str], str] = {}


class BrokenInputError(UnreadableInputError):
    """Error for an unreadable file, line or row that is not left out."""


class ChangedInputError(UnreadableInputError):
    """Error for an input file that has changed since the job began."""


@dataclass(frozen=True)
class InputFile:
    """Input file, or a folder of the input that cannot be listed.

    `version` is the file's ETag, the time of its last change, a digest of its content or the like;
    "" if unknown. With a digest, `stamp` has mtime, ctime and inode of a local file when it was
    computed, or else the ETag or time.
    """

    path: str  # path or URL as listed: folder names in it may give columns
    size_bytes: int | None
    version: str
    stamp: str = field(default="", compare=False)
    real: str = ""  # path with links resolved, which identifies the file
    linked: str = ""  # target of the link to a folder on the path, if there is one
    problem: str | None = None  # reason why it cannot be read, if the listing shows it

    @property
    def state(self) -> str:
        """Size and version as text, to detect changes of the file."""
        return f"{self.size_bytes} bytes, {self.version}"

    def __repr__(self) -> str:  # schedulers log the arguments of tasks that fail
        return f"InputFile({redacted(self.path)!r}, {self.size_bytes}, {self.version!r})"


def find_files(inputs: Iterable[str], storage_options: Options) -> list[InputFile]:
    """Find the data files that paths, globs or URLs name, sorted within each, without duplicates.

    Unreadable files and folders come last, with their problems. Raises UnreadableInputError if one
    of `inputs` matches no data file, or if no file can be read.
    """
    commits: dict[Any, str] = {}
    stores = [open_store(str(name), storage_options).pin(commits) for name in inputs]
    by_name: dict[str, InputFile] = {}
    for store in stores:
        found: dict[str, InputFile] = {}
        for file in _files_of(store):
            key = file.path if file.problem else file.real
            if key not in by_name:
                found.setdefault(key, file)
        by_name.update(sorted(found.items(), key=lambda item: item[1].path))
    if not by_name:
        raise UnreadableInputError("no input is given: name files, directories or globs")
    files = [file for file in by_name.values() if file.problem is None]
    unreadable = [file for file in by_name.values() if file.problem is not None]
    if not files:
        raise UnreadableInputError(
            f"nothing of the input can be read; {redacted(unreadable[0].path)}: "
            f"{unreadable[0].problem}"
        )
    return [*files, *unreadable]


def add_link_targets(paths: Iterable[str], files: Iterable[InputFile]) -> tuple[str, ...]:
    """Return a reader's `paths`, and the targets of linked folders that contain its `files`."""
    return (*paths, *sorted({file.linked for file in files} - {""}))


def with_digests(files: Sequence[InputFile], storage_options: Options) -> list[InputFile]:
    """Return the files with SHA-256 digests of their content as versions, and with a `stamp`.

    Files with a `problem`, files of the Hub at a commit, and files with ETags of object stores,
    which change with every write, are returned unchanged.
    """

    def digested(file: InputFile) -> InputFile:
        store = open_store(file.path, storage_options)
        if file.problem or store.is_fixed or (store.tags_files and file.version):
            return file
        stamp = store.stamp() or file.version
        return replace(file, version=_digest(file, store), stamp=stamp)

    with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
        return list(pool.map(digested, files))


def states_like(
    files: Iterable[InputFile], known: Mapping[str, str], storage_options: Options
) -> dict[str, str]:
    """Return each file's state (size and version) by name, to compare with `known` states.

    A name is the real path or URL, without secrets. A state has a digest in
    place of the version if the known one has.
    """
    files = [*files]
    by_digest = [f for f in files if _SHA256 in known.get(redacted(f.real), "")]
    digested = {file.path: file for file in with_digests(by_digest, storage_options)}
    return {redacted(file.real): digested.get(file.path, file).state for file in files}


def check_unchanged(file: InputFile, storage_options: Options, is_last: bool = False) -> None:
    """Raise ChangedInputError if a file has changed since the job began.

    Compares the size and version that the store reports, if it reports any. A file at a commit
    cannot change. If the version is a digest, a local file is read again only if its inode, ctime
    or mtime differs; `touch` and `rsync -t` cannot set a ctime back. Other files are read again if
    the store's tag or time differs, or if `is_last`, at the end of the job.
    """
    store = open_store(file.path, storage_options)
    if store.is_fixed or (file.size_bytes is None and not file.version):
        return
    try:
        info = store.info()
    except FileNotFoundError:
        raise _changed(file, "is gone") from None
    if info.get("size") not in (None, file.size_bytes) and file.size_bytes is not None:
        raise _changed(file, f"has {info['size']} bytes and had {file.size_bytes}")
    if file.version.startswith(_SHA256):
        local = store.stamp()
        stamp, is_trusted = local or store.version(info), bool(local) or not is_last
        if is_trusted and _bare(stamp) == _bare(file.stamp):
            return
        digest = _digests.get((file.path, stamp)) if is_trusted else None
        if digest is None:
            digest = _digests[file.path, stamp] = _digest(file, store)
        if digest != file.version:
            raise _changed(file, "holds other bytes, as many as before")
        return
    version = store.version(info)
    if version and file.version and _bare(version) != _bare(file.version):
        raise _changed(file, "was written again")


def check_all_unchanged(
    files: Iterable[InputFile], inputs: Iterable[str], storage_options: Options
) -> None:
    """Raise ChangedInputError if any file has changed since the job began.

    Folders and patterns in the reader's paths `inputs` are listed again, to save requests.
    """
    listed: dict[str, InputFile] = {}
    for name in map(str, inputs):
        store = open_store(name, storage_options)
        is_listed = file_format(name) is None or glob.has_magic(name)
        if is_listed and not store.has_commits:
            with contextlib.suppress(UnreadableInputError):  # Missing files are found below.
                listed.update((file.path, file) for file in _files_of(store))
    with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
        unsure = [file for file in files if listed.get(file.path) != file]
        list(pool.map(lambda file: check_unchanged(file, storage_options, is_last=True), unsure))


@contextlib.contextmanager
def decompressed(file: BinaryIO, codec: str | None) -> Iterator[BinaryIO]:
    """Open the decompressed content of an open file as a stream.

    `codec` is a result of `compression`. A gzip file may end with padding zeros, as on tapes.
    """
    if codec in ("gzip", "xz"):
        opener: Any = gzip.open if codec == "gzip" else lzma.open
        with opener(file, "rb") as stream:
            yield stream
    else:
        with pa.input_stream(file, compression=codec) as stream:
            yield stream


def check_unpacked(unpacked_bytes: int, stored_bytes: int) -> None:
    """Raise BrokenContentError if a file's sizes suggest a decompression bomb."""
    if unpacked_bytes > max(UNPACKED_BYTES, MOST_UNPACKED * stored_bytes):
        raise BrokenContentError(
            f"{stored_bytes:,} stored bytes unpack to more than {UNPACKED_BYTES >> 20} MiB, over "
            f"{MOST_UNPACKED} times as many: if you trust the file, write it with less "
            "compression, or none"
        )


def open_parquet(file: BinaryIO) -> pq.ParquetFile:
    """Open a Parquet file so that reading it finds damage and decompression bombs.

    Reading verifies the checksums of pages, if the file has any, at no measurable cost. It raises
    BrokenContentError before it unpacks pages that `check_unpacked` refuses.
    """
    metadata = pq.read_metadata(file)
    source = pa.PythonFile(_CheckedPages(file, metadata), mode="r")
    return pq.ParquetFile(source, metadata=metadata, page_checksum_verification=True)


class _CheckedPages:
    """Open Parquet file that checks page headers whenever pyarrow reads column chunks.

    pyarrow allocates the size in a page's header, even if the footer contradicts it. It reads each
    column chunk at once, because `pq.ParquetFile` has `pre_buffer=True`.
    """

    def __init__(self, file: BinaryIO, metadata: pq.FileMetaData) -> None:
        self._file = file
        self._unpacked_bytes = self._stored_bytes = 0
        groups = map(metadata.row_group, range(metadata.num_row_groups))
        chunks = (group.column(n) for group in groups for n in range(metadata.num_columns))
        # pyarrow reads no page of a column without values, whose offset may be 0.
        self._ends = dict(_extent(chunk) for chunk in chunks if chunk.num_values)
        self._starts = sorted(self._ends)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int = -1) -> bytes:
        start = self._file.tell()
        content = self._file.read(size)
        first = bisect.bisect_left(self._starts, start)
        last = bisect.bisect_left(self._starts, start + len(content))
        for chunk in self._starts[first:last]:
            at, end = chunk - start, min(self._ends[chunk] - start, len(content))
            with contextlib.suppress(IndexError, RecursionError):  # pyarrow refuses such headers
                while at < end:
                    sizes, at = _page_header(content, at)
                    stored = max(0, sizes.get(_STORED, 0))
                    self._unpacked_bytes += max(0, sizes.get(_UNPACKED, 0))
                    self._stored_bytes += stored
                    check_unpacked(self._unpacked_bytes, self._stored_bytes)
                    at += stored
        return content


def _extent(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    start = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
        start = chunk.dictionary_page_offset
    return start, start + chunk.total_compressed_size


def _page_header(content: bytes, at: int) -> tuple[dict[int, int], int]:
    """Parse a page's header, a struct in Thrift's compact protocol at offset `at` of `content`.

    Returns its int32 fields by number, and its end offset. Raises IndexError if it is truncated.
    """
    numbers: dict[int, int] = {}
    field = 0
    while head := content[at]:
        at += 1
        if head >> 4:
            field += head >> 4
        else:
            field, at = _zigzag(content, at)
        field, kind = field & 0xFFFF, head & 15
        if kind in _INTEGERS:
            value, at = _zigzag(content, at)
            if kind == _INT32:
                numbers[field] = value
        elif kind == _STRUCT:
            at = _page_header(content, at)[1]
        elif kind == _BINARY:
            size, at = _varint(content, at)
            at += size
        elif kind in _FIXED_BYTES:
            at += _FIXED_BYTES[kind]
        else:
            raise BrokenContentError("the header of a page has a field that Parquet does not have")
    return numbers, at + 1


def _zigzag(content: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(content, at)
    return (value & 0xFFFFFFFF) >> 1 ^ -(value & 1), at  # numbers wrap at 32 bits


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := content[at]) & 128:
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
    return value | byte << shift, at + 1


def _files_of(store: Store) -> Iterator[InputFile]:
    """Yield the data files and unreadable folders of an input: a file, folder or pattern."""
    entries = store.entries()
    if entries is None:
        hint = " matches nothing" if store.is_pattern else store.hint()
        raise UnreadableInputError(f"no such input: {store.shown}{hint}")
    data = [entry for entry in entries if _is_data(entry)]
    if not data:
        names = sorted(posixpath.basename(entry.path) for entry in entries)[:8]
        is_file = [entry.real for entry in entries] == [store.resolve(store.root)]
        what = "is no file to read:" if is_file else f"holds no file to read: found {names},"
        raise UnreadableInputError(
            f"{store.shown} {what} wanted names ending in "
            f"{', '.join((*PARQUET_SUFFIXES, *JSONL_SUFFIXES))} "
            f"(JSON lines also with {', '.join(COMPRESSIONS)})"
        )
    for entry in data:
        problem = store.problem(entry.path)
        if entry.problem is not None:
            reason = entry.problem.strerror or entry.problem
            problem = f"it is a folder that cannot be listed ({reason})"
        yield InputFile(
            store.url_of(entry.path),
            entry.info.get("size"),
            store.version(entry.info),
            real=store.real_name(entry),
            linked=entry.linked,
            problem=problem,
        )


def _is_data(entry: Entry) -> bool:
    """Return True for a data file, an unreadable folder, or a link to nothing."""
    if entry.problem is not None or file_format(entry.path) is not None:
        return True
    try:
        return bool(entry.info.get("islink")) and not exists(entry.path)
    except OSError:
        return True


def _digest(file: InputFile, store: Store) -> str:
    content = hashlib.sha256()
    with store.reading(file.size_bytes) as opened:
        while piece := opened.read(DIGESTED_BYTES):
            content.update(piece)
    return f"{_SHA256}{content.hexdigest()}"


def _bare(version: str) -> str:
    # ETags may have quotes, and ``W/`` marks weak ones.
    return version.removeprefix("W/").strip('"')


def _changed(file: InputFile, what: str) -> ChangedInputError:
    return ChangedInputError(
        f"{redacted(file.path)} is not what it was when the job began, it {what}: bring back "
        "the file as it was, or start over (restart=True)"
    )
