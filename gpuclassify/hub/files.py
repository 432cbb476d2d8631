"""The files of a model: listed, read and downloaded at its pinned identity."""

import functools
import json
from pathlib import Path, PurePosixPath
from typing import Any

from gpuclassify.hub.calls import ask_model, unreachable
from gpuclassify.hub.errors import HubUnreachableError, ModelChangedError
from gpuclassify.hub.identity import (
    LOADABLE_PATTERNS,
    PICKLE_PATTERNS,
    Identity,
    Location,
    cache_folder,
    directory_digest,
    existing_directory,
    visible_files,
)
from gpuclassify.workers.secrets import token_for

INDEX = "model.safetensors.index.json"


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
    known = _cached_listing(identity, cache_dir)
    if known is not None:
        return known
    if (snapshot := _snapshot_if_unplugged(identity, cache_dir)) is not None:
        return visible_files(snapshot)
    from huggingface_hub import HfApi

    name, revision = identity.name, identity.revision
    list_all = functools.partial(HfApi().list_repo_files, revision=revision, token=token_for(name))
    return sorted(ask_model(name, revision, lambda: list_all(name)))


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
    path = local_or_fetched(identity, filename, cache_dir)
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


def download(
    identity: Identity, *, cache_dir: Location | None = None, has_weights: bool = True
) -> Path:
    """Make a model's files available on this machine.

    Parameters
    ----------
    identity : Identity
        From `resolve`.
    cache_dir : str or path, optional
        As in `resolve`.
    has_weights : bool
        Fetch the weights too.

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
    name, revision = identity.name, identity.revision
    if identity.is_directory:
        return _unchanged_directory(identity)
    if has_weights and (snapshot := _snapshot_if_unplugged(identity, cache_dir)) is not None:
        return snapshot
    from huggingface_hub import snapshot_download

    fetch = functools.partial(
        snapshot_download,
        name,
        revision=revision,
        cache_dir=cache_folder(cache_dir),
        token=token_for(name),
        allow_patterns=list(LOADABLE_PATTERNS),
        ignore_patterns=[*PICKLE_PATTERNS, *([] if has_weights else ["*.safetensors"])],
    )
    folder = Path(ask_model(name, revision, fetch))
    # Refused by the Hub, the client library hands out whatever part of the model is in the cache.
    if has_weights and _cached_listing(identity, cache_dir) is None and not _is_whole(folder):
        list_files(identity, cache_dir=cache_dir)  # raises what the Hub said
        raise HubUnreachableError(unreachable(name, revision, "it just failed"))
    return folder


def cached_file(identity: Identity, filename: str, cache_dir: Location | None) -> Path | None:
    """A Hub model's file if the cache has it, else None."""
    from huggingface_hub import try_to_load_from_cache

    folder = cache_folder(cache_dir)
    found = try_to_load_from_cache(identity.name, filename, folder, identity.revision)
    return Path(found) if isinstance(found, str) else None


def weight_map_of(index: dict[str, Any], name: str) -> dict[str, str]:
    """Tensor name to file name of a sharded checkpoint; no file name may leave the model."""
    files = index.get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{INDEX} of {name} has no weight_map")
    for file in files.values():
        path = PurePosixPath(str(file))
        if path.is_absolute() or ".." in path.parts or path.suffix != ".safetensors":
            raise ValueError(f"{INDEX} of {name} names {file!r}, not one of its weight files")
    return files


def local_or_fetched(identity: Identity, filename: str, cache_dir: Location | None) -> Path | None:
    """Path of one small file, fetched if need be; None if the model has no such file."""
    name, revision = identity.name, identity.revision
    if identity.is_directory:
        path = existing_directory(Path(name)) / filename
        return path if path.is_file() else None
    if (cached := cached_file(identity, filename, cache_dir)) is not None:
        return cached
    known = _cached_listing(identity, cache_dir)
    if known is not None and filename not in known:
        return None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    def fetch() -> Path | None:
        folder, token = cache_folder(cache_dir), token_for(name)
        try:
            path = hf_hub_download(name, filename, revision=revision, cache_dir=folder, token=token)
        except RemoteEntryNotFoundError:
            return None
        return Path(path)

    return ask_model(name, revision, fetch)


def _unchanged_directory(identity: Identity) -> Path:
    if directory_digest(identity.name) != identity.revision:
        raise ModelChangedError(
            f"the files of {identity.name} on this machine are not those that the work was planned "
            "with: a name, size, time or safetensors header differs. If the model was rewritten, "
            "build the classifier and its frame again; if this is a node's own copy, copy it with "
            "its file times (cp -pr, rsync -a)"
        )
    return Path(identity.name)


def _cached_listing(identity: Identity, cache_dir: Location | None) -> list[str] | None:
    """All file names of a Hub model if an earlier download listed them, else None."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        entries = get_cached_repo_tree(
            identity.name, revision=identity.revision, cache_dir=cache_folder(cache_dir)
        )
    except CachedRepoTreeNotFoundError:
        return None
    return sorted(entry.path for entry in entries)


def _snapshot_if_unplugged(identity: Identity, cache_dir: Location | None) -> Path | None:
    """The cached snapshot if it has all weights and there is no network, else None."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.file_download import repo_folder_name

    if _cached_listing(identity, cache_dir) is not None:
        return None
    timeout = constants.HF_HUB_ETAG_TIMEOUT
    probe = functools.partial(get_session().head, constants.ENDPOINT, timeout=timeout)
    try:
        # Asked once: the client library's own calls would retry for most of a minute.
        ask_model(identity.name, identity.revision, probe, tries=1)
    except HubUnreachableError:
        repo = repo_folder_name(repo_id=identity.name, repo_type="model")
        snapshot = cache_folder(cache_dir) / repo / "snapshots" / identity.revision
        if not _is_whole(snapshot):
            raise
        return snapshot
    return None


def _is_whole(snapshot: Path) -> bool:
    """Tell whether a snapshot has all files of its weights."""
    if not snapshot.is_dir():
        return False
    names = set(visible_files(snapshot))
    if INDEX in names:
        index = json.loads((snapshot / INDEX).read_text(encoding="utf-8"))
        return names.issuperset(weight_map_of(index, str(snapshot)).values())
    return any(name.endswith(".safetensors") for name in names)
