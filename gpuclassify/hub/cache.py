"""What the Hub cache of this machine holds."""

import json
from pathlib import Path

from gpuclassify.hub.errors import HubUnreachableError
from gpuclassify.hub.explanations import explained
from gpuclassify.hub.headers import INDEX, weight_map_of
from gpuclassify.hub.identity import Identity
from gpuclassify.hub.paths import Location, cache_folder, repo_folder, visible_files


def cached_file(identity: Identity, filename: str, cache_dir: Location | None) -> Path | None:
    """A Hub model's file if the cache has it, else None."""
    from huggingface_hub import try_to_load_from_cache

    folder = cache_folder(cache_dir)
    found = try_to_load_from_cache(identity.name, filename, folder, identity.revision)
    return Path(found) if isinstance(found, str) else None


def cached_listing(identity: Identity, cache_dir: Location | None) -> list[str] | None:
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


def snapshot_if_unplugged(identity: Identity, cache_dir: Location | None) -> Path | None:
    """The cached snapshot if it has all weights and there is no network, else None."""
    from huggingface_hub import constants, get_session

    if cached_listing(identity, cache_dir) is not None:
        return None
    try:
        # Asked once: the client library's own calls would retry for most of a minute.
        with explained(identity.name, identity.revision):
            get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except HubUnreachableError:
        snapshot = repo_folder(identity.name, cache_dir) / "snapshots" / identity.revision
        if not has_weights(snapshot):
            raise
        return snapshot
    return None


def has_weights(snapshot: Path) -> bool:
    """Tell whether a snapshot has all files of its weights."""
    if not snapshot.is_dir():
        return False
    names = set(visible_files(snapshot))
    if INDEX in names:
        index = json.loads((snapshot / INDEX).read_text(encoding="utf-8"))
        return names.issuperset(weight_map_of(index, str(snapshot)).values())
    return any(name.endswith(".safetensors") for name in names)
