"""Files on the file systems of this machine, including network mounts such as NFS."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from gpuclassify.jobs.stores.store import Entry, Store
from gpuclassify.settings.paths import exists

# Errors of link() on file systems without hard links.
_NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EXDEV}
_FILE_TYPES = {
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


class LocalStore(Store):
    """Access to files at a path or a ``file://`` URL."""

    explains_itself = True
    is_near = True
    reports_md5 = False

    def __str__(self) -> str:
        return self.root

    @property
    def address(self) -> str:
        """Absolute path, to open the same store in other processes."""
        return self.root

    # Input.

    def entries(self) -> list[Entry] | None:
        """List files as `Store.entries` does, from a normalized path if that is the same."""
        self.filesystem.invalidate_cache()
        plain = posixpath.normpath(self.root)
        is_same = self.resolve(plain) == self.resolve(self.root)  # false for ".." behind a link
        return self._entries_of(plain if is_same else self.root)

    def resolve(self, path: str) -> str:
        """Return the path with symbolic links resolved."""
        return os.path.realpath(path)

    def url_of(self, path: str) -> str:
        """Return the path, or a ``file://`` URL if this store was opened by a URL."""
        if "://" in self.url:
            return super().url_of(path)
        if "::" in path:
            self._open_filesystem(path)  # raises, because fsspec would read a chain of URLs
        return path

    def real_name(self, entry: Entry) -> str:
        """Return the absolute path of a listed file, with symbolic links resolved."""
        return entry.real

    def problem(self, path: str) -> str | None:
        """Return the reason why a file cannot be read, or None; a missing file gives None."""
        try:
            mode = Path(path).stat().st_mode
        except OSError as err:
            if Path(path).is_symlink():
                target = Path(path).readlink()
                return f"it is a link to {target}, which leads to no file ({err.strerror})"
            return "permission denied" if isinstance(err, PermissionError) else None
        if not stat.S_ISREG(mode):
            kind = _FILE_TYPES.get(stat.S_IFMT(mode), "special file")
            return f"it is a {kind}, not a regular file: copy its content to one"
        return None if os.access(path, os.R_OK) else "permission denied"

    def hint(self) -> str:
        """Return a reason or a similar name, as text to append to an error message, or ""."""
        problem = self.problem(self.root)
        return f": {problem}" if problem else super().hint()

    def version(self, info: Mapping[str, Any]) -> str:
        """Return the modification time in `info` as text, in seconds; for a link, its target's."""
        if info.get("islink"):  # the listing has the time of the link itself
            with contextlib.suppress(OSError):
                return str(Path(info["name"]).stat().st_mtime)
        return super().version(info)

    def stamp(self) -> str:
        """Return the file's mtime and ctime (in ns) and inode as text, used to detect changes."""
        status = Path(self.root).stat()
        return f"{status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"

    # Output.

    def path(self, name: str) -> str:
        """Return the absolute path of `name`, a relative path in this folder.

        Raises ValueError if `name` leads out of the folder, goes through a symbolic link, or exists
        and is neither a regular file nor a folder.
        """
        path = super().path(name)
        checked = self.root
        for component in name.split("/"):
            checked = posixpath.join(checked, component)
            try:
                mode = os.lstat(checked).st_mode
            except OSError:  # opening the path will raise it
                break
            if stat.S_ISLNK(mode):
                raise self._refused_path(name, f"goes by the link {checked}")
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise self._refused_path(name, "is neither a regular file nor a folder")
        return path

    @contextlib.contextmanager
    def local_copy(self, name: str) -> Iterator[str]:
        """Yield the absolute path of the file `name` itself, without a copy."""
        yield self.path(name)

    def remove_folder(self, folder: str) -> None:
        """Remove `folder`, a relative path in this folder, with its contents, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.rm(self.path(folder), recursive=True)

    def prune(self, *folders: str) -> None:
        """Remove `folders`, paths in this folder, if empty, and then their empty parents."""
        for folder in folders:
            with contextlib.suppress(OSError):
                while folder:
                    Path(self.path(folder)).rmdir()
                    folder = posixpath.dirname(folder)

    def sync(self) -> None:
        """Flush the folder's list of file names to disk, so that new files survive a power loss."""
        descriptor = os.open(self.root, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def refuse_file(self) -> None:
        """Raise NotADirectoryError if the folder or one of its parents is a file."""
        self._refuse_files(self.root, *map(str, PurePath(self.root).parents))

    def would_match(self, folder: Store, name: str) -> bool:
        """Return whether this path or pattern would match a file `name` in the store `folder`."""
        if not isinstance(folder, LocalStore):
            return False
        return any(
            self._matches(resolve(self.root), f"{resolve(folder.root)}/{name}")
            for resolve in (str, self.resolve)
        )

    def matches(self, name: str) -> bool:
        """Return whether this path, folder or pattern matches a file, given its resolved path."""
        return any(self._matches(resolve(self.root), name) for resolve in (str, self.resolve))

    def move(self, source: str, target: str) -> None:
        """Move a file from one absolute path to another, replacing an existing file."""
        Path(source).replace(target)

    def create(self, name: str, data: bytes, scratch: str, *, is_lasting: bool = False) -> bool:
        """Create the file `name` with content `data` unless it exists; return whether it did so.

        The content is written to a private file in the folder `scratch`, which is then hard-linked
        to `name`: of several attempts exactly one succeeds, and nobody sees a partial file. With
        `is_lasting`, the content is flushed to disk first.
        """
        path = self.path(name)
        private = Path(
            posixpath.join(self.path(scratch), f"{posixpath.basename(path)}.{uuid.uuid4().hex}")
        )
        try:
            with private.open("wb") as file:
                file.write(data)
                file.flush()
                if is_lasting:
                    os.fsync(file.fileno())
            try:
                os.link(private, path)
            except FileExistsError:
                # If NFS lost its first answer, its retry finds the link of this attempt.
                return exists(private) and private.stat().st_nlink > 1
            except FileNotFoundError:
                if exists(private):
                    raise
                # Another run of the job has finished and removed all private files.
                return self.create(name, data, scratch, is_lasting=is_lasting)
            return True
        except OSError as err:
            err.filename = path  # the error of a full disk names no file
            raise
        finally:
            with contextlib.suppress(OSError):
                private.unlink()

    def check_creates(self, scratch: str) -> None:
        """Raise UnsupportedStorageError if files in this folder cannot be created by hard links."""
        try:
            self._try_creating(scratch)
        except OSError as err:
            if err.errno in _NO_LINKS:
                raise self._cannot_create() from err
            if err.errno is not None:  # name the path that the user passed
                raise OSError(err.errno, err.strerror, self.root) from err
            raise
