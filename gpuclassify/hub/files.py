"""The files of a model: listed, read and downloaded at its pinned identity."""

import json
from pathlib import Path
from typing import Any

from gpuclassify.hub.cache import (
    cached_file,
    cached_listing,
    has_weights,
    snapshot_if_unplugged,
)
from gpuclassify.hub.errors import HubUnreachableError, ModelChangedError
from gpuclassify.hub.explanations import explained, unreachable
from gpuclassify.hub.identity import LOADABLE_PATTERNS, PICKLE_PATTERNS, Identity, directory_digest
from gpuclassify.hub.paths import Location, cache_folder, existing_directory, visible_files
from gpuclassify.workers.secrets import token_for


def list_files(identity: Identity, *, cache_dir: Location | None = None) -> list[str]:
    """List all files of a model, sorted, as names relative to it with ``/`` between folders.

    Parameters
    ----------
    identity : Identity
        From `resolve`.
    cache_dir : str or path, optional
        As in `resolve`.

    Returns
    -------
    list of str
        Hidden files of a directory are left out.

    Raises
    ------
    ModelNotFoundError, ModelAccessError, HubUnreachableError
        As in `resolve`.
    """
    if identity.is_directory:
        return visible_files(Path(identity.name))
    known = cached_listing(identity, cache_dir)
    if known is not None:
        return known
    if (snapshot := snapshot_if_unplugged(identity, cache_dir)) is not None:
        return visible_files(snapshot)
    from huggingface_hub import HfApi

    name, revision = identity.name, identity.revision
    with explained(name, revision):
        return sorted(HfApi().list_repo_files(name, revision=revision, token=token_for(name)))


def read_text(
    identity: Identity, filename: str, *, cache_dir: Location | None = None
) -> str | None:
    """Read a text file of a model.

    Parameters
    ----------
    identity : Identity
        From `resolve`.
    filename : str
        For example ``"README.md"``.
    cache_dir : str or path, optional
        As in `resolve`.

    Returns
    -------
    str or None
        The text with its line ends as ``\n``; None if the model has no such file.

    Raises
    ------
    ValueError
        The file is not UTF-8.
    ModelNotFoundError, ModelAccessError, HubUnreachableError
        As in `resolve`.
    """
    path = _local_or_fetched(identity, filename, cache_dir)
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise ValueError(f"{filename} of {identity.name} is not UTF-8 text: {err}") from err


def read_json(
    identity: Identity, filename: str, *, cache_dir: Location | None = None
) -> dict[str, Any] | None:
    """Read a JSON file of a model.

    Parameters
    ----------
    identity : Identity
        From `resolve`.
    filename : str
        For example ``"config.json"``.
    cache_dir : str or path, optional
        As in `resolve`.

    Returns
    -------
    dict or None
        The object with its keys in the file's order; None if the model has no such file.

    Raises
    ------
    ValueError
        The file is not UTF-8, not JSON, or JSON of another kind than an object.
    ModelNotFoundError, ModelAccessError, HubUnreachableError
        As in `resolve`.
    """
    text = read_text(identity, filename, cache_dir=cache_dir)
    if text is None:
        return None
    try:
        content = json.loads(text)
    except ValueError as err:
        raise ValueError(f"{filename} of {identity.name} is not valid JSON: {err}") from err
    if not isinstance(content, dict):
        raise ValueError(
            f"{filename} of {identity.name} holds a JSON {type(content).__name__}, not an object"
        )
    return content


def download(identity: Identity, *, cache_dir: Location | None = None) -> Path:
    """Make a model's files available on this machine.

    Parameters
    ----------
    identity : Identity
        From `resolve`.
    cache_dir : str or path, optional
        As in `resolve`.

    Returns
    -------
    Path
        The directory itself, or the Hub snapshot at the pinned commit. Only configuration,
        tokenizer and safetensors files are fetched; a complete snapshot costs no request.

    Raises
    ------
    ModelChangedError
        The directory's files are not those that the identity was made from.
    ModelNotFoundError, ModelAccessError, HubUnreachableError
        As in `resolve`.
    """
    if identity.is_directory:
        return _unchanged_directory(identity)
    if (snapshot := snapshot_if_unplugged(identity, cache_dir)) is not None:
        return snapshot
    from huggingface_hub import snapshot_download

    with explained(identity.name, identity.revision):
        folder = snapshot_download(
            identity.name,
            revision=identity.revision,
            cache_dir=cache_folder(cache_dir),
            token=token_for(identity.name),
            allow_patterns=list(LOADABLE_PATTERNS),
            ignore_patterns=list(PICKLE_PATTERNS),
        )
    # Refused by the Hub, the client library hands out whatever part of the model is in the cache.
    if cached_listing(identity, cache_dir) is None and not has_weights(Path(folder)):
        list_files(identity, cache_dir=cache_dir)  # raises what the Hub said
        raise HubUnreachableError(unreachable(identity.name, identity.revision, "it just failed"))
    return Path(folder)


def _local_or_fetched(identity: Identity, filename: str, cache_dir: Location | None) -> Path | None:
    """Path of one small file, fetched if need be; None if the model has no such file."""
    if identity.is_directory:
        folder = existing_directory(Path(identity.name))
        return folder / filename if (folder / filename).is_file() else None
    if (cached := cached_file(identity, filename, cache_dir)) is not None:
        return cached
    known = cached_listing(identity, cache_dir)
    if known is not None and filename not in known:
        return None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    with explained(identity.name, identity.revision):
        try:
            path = hf_hub_download(
                identity.name,
                filename,
                revision=identity.revision,
                cache_dir=cache_folder(cache_dir),
                token=token_for(identity.name),
            )
        except RemoteEntryNotFoundError:
            return None
    return Path(path)


def _unchanged_directory(identity: Identity) -> Path:
    if directory_digest(identity.name) != identity.revision:
        raise ModelChangedError(
            f"the files of {identity.name} on this machine are not those that the work was planned "
            "with: a name, size, time or safetensors header differs. If the model was rewritten, "
            "build the classifier and its frame again; if this is a node's own copy, copy it with "
            "its file times (cp -pr, rsync -a)"
        )
    return Path(identity.name)
