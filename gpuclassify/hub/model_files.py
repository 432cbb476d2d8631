"""Models that are one file: found in a directory or a repository, pinned, read and downloaded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

from gpuclassify.hub.calls import ask_model
from gpuclassify.hub.errors import ModelChangedError, ModelNotFoundError
from gpuclassify.hub.files import cached_file, list_files, local_or_fetched
from gpuclassify.hub.identity import Identity, Location, absolute, is_directory_name, matches
from gpuclassify.hub.identity import resolve as resolve_model
from gpuclassify.workers.secrets import token_for

Result = TypeVar("Result")

USUAL_NAME = "model.bin"  # under which the Hub expects a model of fastText
_DIGESTED_BYTES = 65_536  # of a file's beginning
_BLOCK_BYTES = 2**20  # of a file on the Hub that are asked for at once


class ModelFile(NamedTuple):
    """A model in one file.

    Attributes
    ----------
    identity : Identity
        A commit of the Hub; or the file's directory, with the digest of this file.
    filename : str
        Relative to that.
    """

    identity: Identity
    filename: str


def resolve_file(
    name: Location,
    filename: str | None,
    patterns: Sequence[str],
    *,
    revision: str | None = None,
    cache_dir: Location | None = None,
) -> ModelFile:
    """Pin a model that is one file.

    Parameters
    ----------
    name : str or path
        The file, a directory that holds it, or a Hub name.
    filename : str, optional
        Which file of the directory or repository. Default: the only one of `patterns`, or of
        several ``model.bin``.
    patterns : sequence of str
        Of such files' names, as the shell has them.
    revision, cache_dir
        As in `resolve`.

    Raises
    ------
    ModelNotFoundError
        There is none, no file of this name, or several of other names and no `filename`.
    ModelAccessError, HubUnreachableError, ValueError
        As in `resolve`.
    """
    path = absolute(name)
    if path.is_file() or is_directory_name(name):
        if revision is not None:
            raise ValueError(f"revision={revision!r} names a commit of a Hub model, not of {path}")
        folder = Identity(str(path.parent if path.is_file() else path), "", is_directory=True)
        filename = path.name if path.is_file() else _choose(folder, filename, patterns, cache_dir)
        digest = file_digest(Path(folder.name, filename))
        return ModelFile(Identity(folder.name, digest, is_directory=True), filename)
    identity = resolve_model(name, revision, cache_dir=cache_dir)
    return ModelFile(identity, _choose(identity, filename, patterns, cache_dir))


def _choose(
    identity: Identity,
    filename: str | None,
    patterns: Sequence[str],
    cache_dir: Location | None,
) -> str:
    files = list_files(identity, cache_dir=cache_dir)
    fitting = [file for file in files if matches(file, patterns)]
    chosen = filename or (fitting[0] if len(fitting) == 1 else USUAL_NAME)
    if chosen in files:
        return chosen
    what = f"no file {filename!r}" if filename is not None else f"no one file of {patterns}"
    raise ModelNotFoundError(
        f"{identity.name} has {what}; it has {fitting or files}: pass file= with one of them"
    )


def file_digest(path: Path) -> str:
    """Digest a file without reading all of it.

    Parameters
    ----------
    path : Path

    Returns
    -------
    str
        ``"sha256:"`` and 64 hex digits over its name, size, modification time and beginning.
    """
    status = path.stat()
    digest = hashlib.sha256(os.fsencode(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0"))
    with path.open("rb") as file:
        digest.update(file.read(_DIGESTED_BYTES))
    return f"sha256:{digest.hexdigest()}"


def read_file(
    model: ModelFile, read: Callable[[BinaryIO], Result], *, cache_dir: Location | None = None
) -> Result:
    """What `read` makes of a model's file; of one on the Hub only what it reads is fetched.

    Parameters
    ----------
    model : ModelFile
    read : callable
        Gets the file at its beginning, and may be called anew where the Hub did not answer.
    cache_dir : str or path, optional
        As in `resolve`.

    Raises
    ------
    ModelChangedError, ModelNotFoundError, ModelAccessError, HubUnreachableError
        As in `fetch_file`.
    """
    identity, filename = model
    if identity.is_directory or cached_file(identity, filename, cache_dir) is not None:
        with fetch_file(model, cache_dir=cache_dir).open("rb") as file:
            return read(file)
    from huggingface_hub import HfFileSystem

    name, revision = identity.name, identity.revision
    files = HfFileSystem(token=token_for(name), skip_instance_cache=True)

    def read_ranges() -> Result:
        place = f"{name}/{filename}"
        with files.open(place, revision=revision, block_size=_BLOCK_BYTES) as file:
            return read(file)

    return ask_model(name, revision, read_ranges)


def fetch_file(model: ModelFile, *, cache_dir: Location | None = None) -> Path:
    """The path of a model's file on this machine, downloaded if it is not there yet.

    Raises
    ------
    ModelChangedError
        The file is not the one that the identity was made from.
    ModelNotFoundError, ModelAccessError, HubUnreachableError
        As in `resolve`.
    """
    identity, filename = model
    path = local_or_fetched(identity, filename, cache_dir)
    if path is None:
        raise ModelNotFoundError(f"{identity.name} has no file {filename}")
    if identity.is_directory and file_digest(path) != identity.revision:
        raise ModelChangedError(
            f"{path} on this machine is not the file that the work was planned with: its size, "
            "time or beginning differs. If it was written anew, build the classifier and its frame "
            "again; if this is a node's own copy, copy it with its time (cp -p, rsync -a)"
        )
    return path
