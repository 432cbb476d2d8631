"""Atomic saving of model directories: a killed process leaves the old or the new model.

New files are written into a hidden folder of the directory. Moving the old ``config.json`` into
that folder commits the save: the new files are then complete. They replace the old ones,
``config.json`` last, so that a reader finds no model rather than a mixed one. If the process ends
in between, the same user's next read or save of the directory finishes the move. The files of a
committed save stay hidden if the folder is a copy or another user's.
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
# Keys of config.json. transformers drops the file's name but keeps the digest when it saves the
# model again, so a digest without a name belongs to other weights.
WEIGHTS_NAME = "transformers_weights"
WEIGHTS_DIGEST = "weights_sha256"
_HIDDEN = ".gpuclassify-"  # prefix of the hidden folders of unfinished saves
_DECIDED = ".replaced"  # file in such a folder: the old configuration, empty if there was none
_LOCK = ".lock"


@contextlib.contextmanager
def workshop(directory: Path) -> Iterator[Path]:
    """Yield a new hidden folder in `directory` for unfinished files, removed after the block.

    Interrupted saves in `directory` are finished or removed first. A committed save stays.
    """
    directory.mkdir(parents=True, exist_ok=True)
    sweep(directory)
    with contextlib.ExitStack() as locks:
        while True:
            folder = directory / f"{_HIDDEN}{uuid.uuid4().hex}"
            folder.mkdir()
            try:
                locks.enter_context(_lock(folder, os.O_EXCL))
            except (FileNotFoundError, FileExistsError, BlockingIOError):
                continue  # another process is sweeping the folder
            except OSError:  # a file system without locks, where `sweep` removes no folder
                pass
            break
        try:
            yield folder
        finally:
            if not exists(folder / _DECIDED):
                shutil.rmtree(folder, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Finish this user's complete but interrupted saves in a model directory.

    Incomplete saves of any user are removed if they can be locked, which a running save prevents.
    Complete saves of other users are left alone.
    """
    for folder in directory.glob(f"{_HIDDEN}*"):
        if folder.is_symlink() or (exists(folder / _DECIDED) and not _is_own(folder)):
            continue
        if exists(folder / _DECIDED):
            _move_files(folder)
        with contextlib.suppress(OSError), _lock(folder):
            shutil.rmtree(folder)


@contextlib.contextmanager
def saving(directory: Path) -> Iterator[Path]:
    """Yield a folder to write a model into; after the block, it replaces the model in `directory`.

    The replacement is atomic, and skipped if the block raises. Other files in `directory` stay. The
    SHA-256 of a new ``model.safetensors`` is added to ``config.json``, which must exist by then.
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
        for path in _targets(folder):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        _mark(folder).touch()
        with _directory_lock(directory):
            _commit(directory, folder)
            _move_files(folder)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically, replacing an earlier one; create its folder if need be."""
    with workshop(path.parent) as folder:
        with (folder / path.name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        (folder / path.name).replace(path)


def finish_saving(directory: Path) -> bool:
    """Finish this user's complete but interrupted saves in a directory; return True if any."""
    interrupted = list(filter(_is_own, _committed(directory)))
    for folder in interrupted:
        _move_files(folder)
    return bool(interrupted)


def config_text(directory: Path) -> str | None:
    """Return the text of a model's ``config.json``, even during a save; None if it has none."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return (directory / CONFIG).read_text(encoding="utf-8")
        if not finish_saving(directory) and not exists(directory / CONFIG):
            return None


def refuse_unfinished(directory: Path) -> None:
    """Raise PermissionError if a model directory has a save that this user cannot finish."""
    for folder in _committed(directory):
        if not _is_own(folder) and exists(folder / _DECIDED):
            raise PermissionError(f"{folder.name} is another user's, or a copy of such a folder")


def _committed(directory: Path) -> list[Path]:
    """Return the hidden folders of complete saves whose files were not all moved to `directory`."""
    if exists(directory / CONFIG):
        return []
    return [path.parent for path in directory.glob(f"{_HIDDEN}*/{_DECIDED}")]


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _lock(folder: Path, flags: int = 0) -> IO[bytes]:
    """Lock a save's hidden folder until the returned file is closed; raise OSError if it cannot."""
    path = folder / _LOCK
    flags |= os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a pipe would block
    file = os.fdopen(os.open(path, flags, 0o666), "wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.stat()
    except OSError:
        file.close()
        raise
    return file


@contextlib.contextmanager
def _directory_lock(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _mark(folder: Path) -> Path:
    """Return the path of an empty file that marks a hidden folder as an original, not a copy.

    Its name has owner, inode and time of the folder's lock file, which differ in a copy.
    """
    lock = (folder / _LOCK).lstat()
    return folder / f".by-{lock.st_uid}-{lock.st_ino}-{lock.st_ctime_ns}"


def _is_own(folder: Path) -> bool:
    """Tell whether a hidden folder has all files of a save by this user, and is no copy of one."""
    try:
        lock, mark = (folder / _LOCK).lstat(), _mark(folder)
    except OSError:
        return False
    return lock.st_uid == os.geteuid() and exists(mark) and not folder.is_symlink()


def _commit(directory: Path, folder: Path) -> None:
    """Commit a save: put the old ``config.json``, or else an empty file, into its `folder`."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            (directory / CONFIG).rename(folder / _DECIDED)
            return
        if not finish_saving(directory) and not exists(directory / CONFIG):
            (folder / _DECIDED).touch()
            return


def _move_files(folder: Path) -> None:
    """Move a committed save's files from `folder` to its parent, and remove `folder`."""
    try:
        targets = _targets(folder)
    except FileNotFoundError:  # another process has moved all files and removes the folder
        return
    for path in sorted(targets, key=lambda path: path == folder / CONFIG):
        target = targets[path]
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path.replace(target)
    # Removed first: while it exists, the `sweep` of other users leaves the folder alone.
    (folder / _DECIDED).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _targets(folder: Path) -> dict[Path, Path]:
    """Map each visible file of a save's hidden folder to its path in the model directory."""
    targets = {}
    for path in folder.rglob("*"):
        if path.name[0] != "." and is_file(path) and not path.is_symlink():
            targets[path] = folder.parent / path.relative_to(folder)
            parent = targets[path].parent
            if parent.resolve() != folder.parent.resolve() / parent.relative_to(folder.parent):
                raise NotADirectoryError(f"{parent} is a link: remove it, and save again")
    return targets
