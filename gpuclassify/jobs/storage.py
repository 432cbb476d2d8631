"""A directory on a file system or object store, through fsspec."""

from __future__ import annotations

import contextlib
import os
import posixpath
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Directory:
    """A directory of part files.

    Attributes
    ----------
    filesystem : fsspec.AbstractFileSystem
    root : str
        Path without protocol.
    """

    filesystem: Any
    root: str

    def parts(self, suffixes: Sequence[str]) -> list[str]:
        """Paths of the part files with one of `suffixes`, sorted."""
        if not self.filesystem.exists(self.root):
            return []
        return sorted(
            path
            for path in self.filesystem.ls(self.root, detail=False)
            if posixpath.basename(path).startswith("part-") and path.endswith(tuple(suffixes))
        )

    def holds(self, path: str) -> bool:
        """Whether the file at `path`, a path or URL, lies in this directory or below it."""
        other = open_directory(path)
        if other.filesystem != self.filesystem:
            return False
        return _real(other).startswith(f"{_real(self)}/")

    def check(self, overwrite: bool, suffixes: Sequence[str]) -> None:
        """Raise unless part files may be written here.

        Raises
        ------
        FileExistsError
            Part files are there, and `overwrite` is false.
        NotADirectoryError
            A file has this name.
        """
        if self.filesystem.isfile(self.root):
            raise NotADirectoryError(f"{self.root} is a file: name a directory for the output")
        earlier = self.parts(suffixes)
        if earlier and not overwrite:
            raise FileExistsError(
                f"{self.root} has {len(earlier)} part files already: choose another directory, "
                "or overwrite them (overwrite=True, --overwrite)"
            )

    def prepare(self, overwrite: bool, suffixes: Sequence[str]) -> None:
        """Make the directory; remove earlier part files if told to, and nothing else.

        Raises
        ------
        FileExistsError, NotADirectoryError
            See `check`.
        """
        self.check(overwrite, suffixes)
        for path in self.parts(suffixes):
            self.filesystem.rm_file(path)
        self.filesystem.makedirs(self.root, exist_ok=True)

    @contextlib.contextmanager
    def replacing(self, target: str) -> Iterator[Any]:
        """A binary file that becomes `target` when the block ends well, and vanishes if not."""
        private = posixpath.join(
            posixpath.dirname(target), f".{posixpath.basename(target)}.{uuid.uuid4().hex}"
        )
        try:
            with self.filesystem.open(private, "wb") as file:
                yield file
            self.filesystem.mv(private, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                self.filesystem.rm_file(private)
            raise


def _real(directory: Directory) -> str:
    """The root without symbolic links, where the file system has them."""
    is_local = "file" in directory.filesystem.protocol
    return os.path.realpath(directory.root) if is_local else directory.root


def open_directory(path: str, storage_options: dict[str, Any] | None = None) -> Directory:
    """The directory at `path`, a local path or a URL such as ``s3://bucket/out``."""
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(str(path), **(storage_options or {}))
    return Directory(filesystem, root.rstrip("/"))
