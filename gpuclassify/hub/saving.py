"""Directories of models saved whole: a process that is killed leaves the old or the new one.

New files are written into a hidden folder of the directory. The move of the old ``config.json``
into that folder decides: until then the old files are there as they were, and from then on the new
ones are complete. They take the places of the old ones, ``config.json`` last, so that a reader that
knows nothing of this finds no model rather than half of each. If the process ends in between, its
user finishes it by reading the directory next, or by saving there. A hidden folder that came with a
copy of the directory, or is another user's, moves nothing: it has no file named by what the file
system gave its lock. No link is followed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from gpuclassify.settings.paths import exists, is_file

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
# The file whose digest is kept. transformers drops this name where it saves the model anew, and
# keeps the digest, which is not that of the new weights.
WEIGHTS_NAME = "transformers_weights"
WEIGHTS_DIGEST = "weights_sha256"
_HIDDEN = ".gpuclassify-"  # begins the names of folders whose files are not in their places yet
_DECIDED = ".replaced"  # file in such a folder: the old configuration, empty if there was none
_LOCK = ".lock"


@contextlib.contextmanager
def workshop(directory: Path) -> Iterator[Path]:
    """Make a hidden folder for unfinished files in a directory, which is made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    sweep(directory)
    with contextlib.ExitStack() as kept:
        while True:
            folder = directory / f"{_HIDDEN}{uuid.uuid4().hex}"
            folder.mkdir()
            try:
                kept.enter_context(_lock(folder, os.O_EXCL))
            except (FileNotFoundError, FileExistsError, BlockingIOError):
                continue  # another process took it for a killed one's
            except OSError:  # a file system without locks, on which no folder is ever removed
                pass
            break
        try:
            yield folder
        finally:
            if not exists(folder / _DECIDED):
                shutil.rmtree(folder, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Finish interrupted replacements, and remove other hidden folders of killed processes."""
    for left in directory.glob(f"{_HIDDEN}*"):
        if left.is_symlink() or (exists(left / _DECIDED) and not _is_own(left)):
            continue
        if exists(left / _DECIDED):
            _put_in_place(left)
        with contextlib.suppress(OSError), _lock(left):
            shutil.rmtree(left)


@contextlib.contextmanager
def saving(directory: Path) -> Iterator[Path]:
    """Create a folder whose files atomically replace files of `directory` if the block succeeds.

    Files with other names stay. ``config.json`` gets the digest of the weights.
    """
    with workshop(directory) as folder:
        yield folder
        if not exists(folder / CONFIG):  # `config.json` is replaced last, unchanged
            shutil.copy2(directory / CONFIG, folder)
        if exists(folder / WEIGHTS):
            digests = {WEIGHTS_NAME: WEIGHTS, WEIGHTS_DIGEST: file_sha256(folder / WEIGHTS)}
            text = (folder / CONFIG).read_text(encoding="utf-8")
            new = json.dumps(json.loads(text) | digests, indent=2, ensure_ascii=text.isascii())
            whole = new + text[len(text.rstrip()) :]
            (folder / CONFIG).write_text(whole, encoding="utf-8")
        for path in _places(folder):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        _mark(folder).touch()
        with _alone(directory):
            _decide(directory, folder)
            _put_in_place(folder)


def replace_file(path: Path, content: bytes) -> None:
    """Write a whole file, in place of an earlier one."""
    with workshop(path.parent) as folder:
        with (folder / path.name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        (folder / path.name).replace(path)


def finish_saving(directory: Path) -> bool:
    """Finish this user's interrupted saving here, and tell whether there was one."""
    interrupted = list(filter(_is_own, _decided(directory)))
    for folder in interrupted:
        _put_in_place(folder)
    return bool(interrupted)


def config_text(directory: Path) -> str | None:
    """Return a directory's configuration, also while it is saved anew; None if it has none."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return (directory / CONFIG).read_text(encoding="utf-8")
        if not finish_saving(directory) and not exists(directory / CONFIG):
            return None


def refuse_unfinished(directory: Path) -> None:
    """Raise PermissionError if a model's saving is not finished, which `finish_saving` may not."""
    for folder in _decided(directory):
        if not _is_own(folder) and exists(folder / _DECIDED):
            raise PermissionError(f"{folder.name} is another user's, or a copy of such a folder")


def _decided(directory: Path) -> list[Path]:
    """Return hidden folders that replace a directory whose configuration is already moved."""
    if exists(directory / CONFIG):
        return []
    return [path.parent for path in directory.glob(f"{_HIDDEN}*/{_DECIDED}")]


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _lock(folder: Path, flags: int = 0) -> IO[bytes]:
    """Lock and return the file that is open while the process that writes this folder lives.

    Raises BlockingIOError if another process holds the lock, and FileNotFoundError if the folder is
    gone.
    """
    path = folder / _LOCK
    flags |= os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK  # the file may be a pipe
    file = os.fdopen(os.open(path, flags, 0o666), "wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.stat()
    except OSError:
        file.close()
        raise
    return file


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Wait until no other process puts a model in place there, if the file system can tell."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _mark(folder: Path) -> Path:
    """Return the path of the mark that shows where a folder was begun, and by whom."""
    lock = (folder / _LOCK).lstat()
    return folder / f".by-{lock.st_uid}-{lock.st_ino}-{lock.st_ctime_ns}"


def _is_own(folder: Path) -> bool:
    """Tell whether this user has begun to save in this very folder."""
    try:
        lock, mark = (folder / _LOCK).lstat(), _mark(folder)
    except OSError:
        return False
    return lock.st_uid == os.geteuid() and exists(mark) and not folder.is_symlink()


def _decide(directory: Path, folder: Path) -> None:
    """Commit the replacement of a directory's files by the files in `folder`."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            (directory / CONFIG).rename(folder / _DECIDED)
            return
        if not finish_saving(directory) and not exists(directory / CONFIG):
            (folder / _DECIDED).touch()
            return


def _put_in_place(folder: Path) -> None:
    """Move files to where they belong, which several processes may do at once."""
    try:
        places = _places(folder)
    except FileNotFoundError:  # another process, which had moved all, removes the folder
        return
    for path in sorted(places, key=lambda path: path == folder / CONFIG):
        target = places[path]
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path.replace(target)
    (folder / _DECIDED).unlink(missing_ok=True)  # first: with it, only this user's is removed
    shutil.rmtree(folder, ignore_errors=True)


def _places(folder: Path) -> dict[Path, Path]:
    """Return where each file of a hidden folder belongs; OSError if a link leads there."""
    places = {}
    for path in folder.rglob("*"):
        if path.name[0] != "." and is_file(path) and not path.is_symlink():
            places[path] = folder.parent / path.relative_to(folder)
            parent = places[path].parent
            if parent.resolve() != folder.parent.resolve() / parent.relative_to(folder.parent):
                raise NotADirectoryError(f"{parent} is a link: remove it, and save again")
    return places
