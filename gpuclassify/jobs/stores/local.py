"""Files of this machine's file systems, NFS and the like included."""

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
    """Files by a path, or by a URL that begins with ``file://``; their errors name the path."""

    explains_itself = True
    is_near = True
    reports_md5 = False

    def __str__(self) -> str:
        return self.root

    @property
    def address(self) -> str:
        """Absolute path."""
        return self.root

    # Input.

    def entries(self) -> list[Entry] | None:
        """List a file, all below a folder, or a pattern's matches; None if there is nothing."""
        self.filesystem.invalidate_cache()
        plain = posixpath.normpath(self.root)
        is_same = self.resolve(plain) == self.resolve(self.root)  # not behind a link and ".."
        return self._entries_of(plain if is_same else self.root)

    def resolve(self, path: str) -> str:
        """Return a path without symbolic links."""
        return os.path.realpath(path)

    def url_of(self, path: str) -> str:
        """Return the path, or its URL if the store has one itself."""
        if "://" in self.url:
            return super().url_of(path)
        if "::" in path:
            self._open_filesystem(path)  # raises: it would be taken for a chain of URLs
        return path

    def real_name(self, entry: Entry) -> str:
        """Return the path without links."""
        return entry.real

    def problem(self, path: str) -> str | None:
        """Return why a file cannot be read, or None."""
        try:
            mode = Path(path).stat().st_mode
        except OSError as err:
            if Path(path).is_symlink():
                target = Path(path).readlink()
                return f"it is a link to {target}, which leads to no file ({err.strerror})"
            return "permission denied" if isinstance(err, PermissionError) else None
        if not stat.S_ISREG(mode):
            kind = _FILE_TYPES.get(stat.S_IFMT(mode), "special file")
            return f"it is a {kind}, not a regular file: write what it gives to a file"
        return None if os.access(path, os.R_OK) else "permission denied"

    def hint(self) -> str:
        """Return why there is no such file, or which name is near, or nothing."""
        problem = self.problem(self.root)
        return f": {problem}" if problem else super().hint()

    def version(self, info: Mapping[str, Any]) -> str:
        """Return the time of a file's last change, also of one behind a link."""
        if info.get("islink"):  # a listing has the link's time
            with contextlib.suppress(OSError):
                return str(Path(info["name"]).stat().st_mtime)
        return super().version(info)

    def stamp(self) -> str:
        """Return the change stamp: mtime, ctime, inode."""
        status = Path(self.root).stat()
        return f"{status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"

    # Output.

    def path(self, name: str) -> str:
        """Return the path of the file or folder `name`; raise an error if it contains a link."""
        path = super().path(name)
        checked = self.root
        for step in name.split("/"):
            checked = posixpath.join(checked, step)
            try:
                mode = os.lstat(checked).st_mode
            except OSError:  # opening it will say why
                break
            if stat.S_ISLNK(mode):
                raise self._refused_path(name, f"goes by the link {checked}")
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise self._refused_path(name, "is neither a regular file nor a folder")
        return path

    @contextlib.contextmanager
    def local_copy(self, name: str) -> Iterator[str]:
        """Yield the path of a file."""
        yield self.path(name)

    def remove_folder(self, folder: str) -> None:
        """Remove a folder, if it is there, with all that is in it."""
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.rm(self.path(folder), recursive=True)

    def prune(self, *folders: str) -> None:
        """Remove folders that are empty, and those above them."""
        for folder in folders:
            with contextlib.suppress(OSError):
                while folder:
                    Path(self.path(folder)).rmdir()
                    folder = posixpath.dirname(folder)

    def sync(self) -> None:
        """Bring the names of the files to disk, where they may be in memory only."""
        number = os.open(self.root, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)

    def refuse_file(self) -> None:
        """Raise NotADirectoryError if a file is where the folder or one above it belongs."""
        self._refuse_files(self.root, *map(str, PurePath(self.root).parents))

    def would_match(self, folder: Store, name: str) -> bool:
        """Tell whether this path or pattern takes in a file `name` of another folder."""
        if not isinstance(folder, LocalStore):
            return False
        return any(
            self._takes_in(resolve(self.root), f"{resolve(folder.root)}/{name}")
            for resolve in (str, self.resolve)
        )

    def takes_in(self, name: str) -> bool:
        """Tell whether this path or pattern takes in a file by its real path."""
        return any(self._takes_in(resolve(self.root), name) for resolve in (str, self.resolve))

    def move(self, source: str, target: str) -> None:
        """Move a file to another path, replacing an existing file."""
        Path(source).replace(target)

    def create(self, name: str, data: bytes, scratch: str, *, is_lasting: bool = False) -> bool:
        """Create a whole file by a link to a private one; see `Store.create`."""
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
                # An answer of NFS that was lost and asked for again looks like somebody else's.
                return exists(private) and private.stat().st_nlink > 1
            except FileNotFoundError:
                if exists(private):
                    raise
                # Another run of the job has finished, and removed what attempts had left.
                return self.create(name, data, scratch, is_lasting=is_lasting)
            return True
        except OSError as err:
            err.filename = path  # a full disk does not say of what
            raise
        finally:
            with contextlib.suppress(OSError):
                private.unlink()

    def check_creates(self, scratch: str) -> None:
        """Check by a trial that files can be linked; raise UnsupportedStorageError if not."""
        try:
            self._try_creating(scratch)
        except OSError as err:
            if err.errno in _NO_LINKS:
                raise self._cannot_create() from err
            if err.errno is not None:  # name what the user named
                raise OSError(err.errno, err.strerror, self.root) from err
            raise
