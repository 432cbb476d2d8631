"""A directory on a file system or object store, through fsspec."""

from __future__ import annotations

import contextlib
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

    def prepare(self, overwrite: bool, suffixes: Sequence[str]) -> None:
        """Make the directory; remove earlier part files if told to, and nothing else.

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
        for path in earlier:
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


def open_directory(path: str, storage_options: dict[str, Any] | None = None) -> Directory:
    """The directory at `path`, a local path or a URL such as ``s3://bucket/out``."""
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(str(path), **(storage_options or {}))
    return Directory(filesystem, root.rstrip("/"))
