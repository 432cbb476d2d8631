"""Files of a model: listed, read and downloaded at the version that its `Identity` pins."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple, TypeVar

from gpuclassify.hub.calls import (
    CheckpointError,
    HubUnreachableError,
    ModelChangedError,
    ModelNotFoundError,
    ask_model,
    unreachable,
)
from gpuclassify.hub.identity import (
    LOADABLE_PATTERNS,
    PICKLE_PATTERNS,
    Identity,
    Location,
    absolute,
    cache_folder,
    directory_digest,
    existing_directory,
    is_directory_name,
    matches,
    resolve,
    visible_files,
)
from gpuclassify.hub.saving import WEIGHTS as WEIGHTS
from gpuclassify.settings.paths import exists, is_directory, is_file

Result = TypeVar("Result")

DEEPEST = 100  # maximum nesting of a JSON file; recursive copies fail at 1,000 levels
MOST_TEXT_BYTES = 2**26  # limit of a text file; the tokenizer of 256,000 tokens has half of it
INDEX = "model.safetensors.index.json"
USUAL_NAME = "model.bin"  # the Hub's file name for fastText models
_DIGESTED_BYTES = 65_536  # bytes at a file's beginning that are digested
_BLOCK_BYTES = 2**20  # bytes per request of a file on the Hub
_HOW_TO_CONVERT = """\
import torch, safetensors.torch as st
st.save_file({name: tensor.clone().contiguous() for name, tensor in torch.load(
    "pytorch_model.bin", map_location="cpu", weights_only=True).items()},
    "model.safetensors", metadata={"format": "pt"})"""


def list_files(identity: Identity, *, cache_dir: Location | None = None) -> list[str]:
    """List the files of a model as sorted relative paths, without a directory's hidden files.

    While the Hub does not answer, files that are not cached may be missing from the list.
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
    list_all = functools.partial(HfApi().list_repo_files, revision=revision, token=identity.token)
    return sorted(ask_model(name, revision, lambda: list_all(name)))


def read_text(
    identity: Identity, filename: str, *, cache_dir: Location | None = None
) -> str | None:
    """Read a UTF-8 text file of a model, downloaded if need be; None if there is no such file."""
    path = _find_or_fetch(identity, filename, cache_dir)
    return None if path is None else _read_text(path, f"{filename} of {identity.name}")


def read_json(
    identity: Identity, filename: str, *, cache_dir: Location | None = None
) -> dict[str, Any] | None:
    """Read a JSON object from a model's file as a dict; None if the model has no such file."""
    text = read_text(identity, filename, cache_dir=cache_dir)
    return None if text is None else _parse_object(text, f"{filename} of {identity.name}")


def read_json_file(path: Path) -> dict[str, Any]:
    """Read a JSON object from a local file as a dict; raise CheckpointError if it holds none."""
    return _parse_object(_read_text(path, str(path)), str(path))


def parse_json(text: str, owner: str) -> Any:
    """Parse JSON text from a file of an untrusted model; messages call the file `owner`.

    Raises CheckpointError unless it is valid JSON, nested at most 100 levels deep, with numbers
    within float64's range. NaN and Infinity are accepted, because transformers writes them.
    """
    try:
        content = json.loads(text, parse_int=_parse_int, parse_float=_parse_float)
        is_deep = _is_deep(content)
    except RecursionError:
        is_deep = True
    except ValueError as err:
        raise CheckpointError(f"{owner} is not valid JSON: {err}") from err
    if is_deep:
        raise CheckpointError(f"{owner} is nested deeper than {DEEPEST} levels")
    return content


def _parse_object(text: str, owner: str) -> dict[str, Any]:
    content = parse_json(text, owner)
    if not isinstance(content, dict):
        raise CheckpointError(f"{owner} holds a JSON {type(content).__name__}, not an object")
    return content


def _read_text(path: Path, owner: str) -> str:
    if (size := path.stat().st_size) > MOST_TEXT_BYTES:
        raise CheckpointError(
            f"{owner} has {size:,} bytes, and at most {MOST_TEXT_BYTES:,} are read: take the file "
            "from whoever made the model"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise CheckpointError(f"{owner} is not UTF-8 text: {err}") from err


def _parse_int(text: str) -> int:
    _parse_float(text)
    return int(text)


def _parse_float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"the number {text[:20]}... is beyond those of float64")
    return value


def _is_deep(content: object) -> bool:
    level = [[content]]
    for _ in range(DEEPEST + 1):
        level = [
            list(inner.values()) if isinstance(inner, dict) else inner
            for part in level
            for inner in part
            if isinstance(inner, dict | list)
        ]
    return bool(level)


def download(
    identity: Identity, *, cache_dir: Location | None = None, has_weights: bool = True
) -> Path:
    """Return a model's directory, or a Hub model's folder in the cache, downloaded if need be.

    Configuration, tokenizer and, with `has_weights`, safetensors files are downloaded. Raises
    ModelChangedError if a directory's files changed after it was pinned.
    """
    name, revision = identity.name, identity.revision
    if identity.is_directory:
        if directory_digest(name) != revision:
            times = {}
            for file in visible_files(Path(name)):
                with contextlib.suppress(FileNotFoundError):  # it is being replaced
                    times[file] = Path(name, file).stat().st_mtime
            newest = max(times, key=times.__getitem__, default="none")
            raise ModelChangedError(
                f"the files of {name} on this machine are not those that the work was planned with:"
                f" a name, size, time or safetensors header differs (last written: {newest}). If "
                "the model was rewritten, build the classifier and its frame again; if this is a "
                "node's own copy, copy it with its file times (cp -pr, rsync -a)"
            )
        return _with_own_weights(Path(name), name)
    if has_weights and (snapshot := _snapshot_if_unplugged(identity, cache_dir)) is not None:
        return snapshot
    from huggingface_hub import snapshot_download

    fetch = functools.partial(
        snapshot_download,
        name,
        revision=revision,
        cache_dir=cache_folder(cache_dir),
        token=identity.token,
        allow_patterns=list(LOADABLE_PATTERNS),
        ignore_patterns=[*PICKLE_PATTERNS, *([] if has_weights else ["*.safetensors"])],
    )
    folder = Path(ask_model(name, revision, fetch))
    # If the Hub refuses, the client library returns the cached files, which may be incomplete.
    if has_weights and _cached_listing(identity, cache_dir) is None and not _is_whole(folder):
        list_files(identity, cache_dir=cache_dir)  # raises the Hub's error
        raise HubUnreachableError(unreachable(name, revision, "it just failed"))
    return _with_own_weights(folder, name)


def _with_own_weights(folder: Path, name: str) -> Path:
    if is_file(folder / INDEX):  # raises if it names files outside of the model
        _read_weight_map(read_json_file(folder / INDEX), name)
    return folder


def weights_paths(folder: Path) -> dict[Path, bool]:
    """Map the path of each weight file of a model to True if the file can never change, else False.

    Files in the Hub's cache never change, because they are named by content. Some may be missing.
    """
    names = {WEIGHTS}
    if exists(folder / INDEX) and not exists(folder / WEIGHTS):
        names = set(_read_weight_map(read_json_file(folder / INDEX), str(folder)).values())
    blobs = {folder / name: (folder / name).resolve() for name in sorted(names)}
    return {path: p.parent.name == "blobs" and p.name != path.name for path, p in blobs.items()}


# Names and shapes of tensors, without the weights.


def read_tensor_shapes(
    identity: Identity, filename: str = WEIGHTS, *, cache_dir: Location | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors by name, from the headers of its safetensors files.

    If the model has no file `filename`, all shards in its index are read. Raises ModelNotFoundError
    if there are no safetensors weights.
    """
    files = list_files(identity, cache_dir=cache_dir)
    if filename in files:
        return _read_file_shapes(identity, filename, cache_dir)
    if INDEX not in files:
        pickles = [file for file in files if matches(file, PICKLE_PATTERNS)]
        if not pickles:
            raise ModelNotFoundError(
                f"{identity.name} has no {WEIGHTS} and no {INDEX}; its files are {files}"
            )
        raise ModelNotFoundError(
            f"{identity.name} has its weights only as pickles ({', '.join(pickles)}), which can "
            "run any code when they are read and are refused. Convert a copy that you trust:\n"
            f"{_HOW_TO_CONVERT}\n"
            "and pass the directory of the new file, with config.json and the tokenizer beside it"
        )
    weight_map = _read_weight_map(
        read_json(identity, INDEX, cache_dir=cache_dir) or {}, identity.name
    )
    shards = sorted(set(weight_map.values()))
    if absent := [shard for shard in shards if shard not in files]:
        raise ModelNotFoundError(
            f"{INDEX} of {identity.name} names weight files that are not there: {absent}"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        shapes.update(_read_file_shapes(identity, shard, cache_dir))
    if lost := sorted(set(weight_map) - set(shapes)):
        raise CheckpointError(
            f"{INDEX} of {identity.name} names {len(lost)} tensors that its files lack: {lost[:5]}"
        )
    return shapes


def _read_file_shapes(
    identity: Identity, filename: str, cache_dir: Location | None
) -> dict[str, tuple[int, ...]]:
    if identity.is_directory:
        return _local_shapes(Path(identity.name, filename))
    cached = _cached_file(identity, filename, cache_dir)
    return _local_shapes(cached) if cached else _remote_shapes(identity, filename)


def _local_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as err:
        with path.open("rb") as file:
            is_pointer = file.read(8) == b"version "
        cure = "; it is a Git LFS pointer: run `git lfs pull` in its directory"
        raise CheckpointError(
            f"{path} is a truncated or corrupt safetensors file: {err}{cure if is_pointer else ''}"
        ) from err


def _remote_shapes(identity: Identity, filename: str) -> dict[str, tuple[int, ...]]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, SafetensorsParsingError

    name, revision = identity.name, identity.revision

    def read_header() -> Any:
        try:
            return HfApi().parse_safetensors_file_metadata(
                name, filename, revision=revision, token=identity.token
            )
        except SafetensorsParsingError:
            return None
        except HfHubHTTPError as err:
            if err.response.status_code != 416:  # the file is shorter than the requested range
                raise
            return None

    header = ask_model(name, revision, read_header)
    if header is None:
        raise CheckpointError(
            f"{filename} of {name} at {revision} has a truncated or corrupt safetensors header; "
            "its author has to upload it again"
        )
    return {tensor: tuple(entry.shape) for tensor, entry in header.tensors.items()}


# Models in a single file.


class ModelFile(NamedTuple):
    """Model that is a single file, such as fastText's, in a repository or directory."""

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
    """Pin a model that is a single file, named by its path, its directory or its Hub name.

    Without `filename`, the only file that matches the shell `patterns` is taken, or ``model.bin``
    if none or several match. If `name` is the path of a file, `filename` and `patterns` are
    ignored.
    """
    path = absolute(name)
    if is_file(path) or is_directory_name(name):
        if revision is not None:
            raise ValueError(f"revision={revision!r} names a commit of a Hub model, not of {path}")
        folder = Identity(str(path.parent if is_file(path) else path), "", is_directory=True)
        filename = path.name if is_file(path) else _find_file(folder, filename, patterns, cache_dir)
        digest = _file_digest(Path(folder.name, filename))
        return ModelFile(Identity(folder.name, digest, is_directory=True), filename)
    identity = resolve(name, revision, cache_dir=cache_dir)
    return ModelFile(identity, _find_file(identity, filename, patterns, cache_dir))


def _find_file(
    identity: Identity,
    filename: str | None,
    patterns: Sequence[str],
    cache_dir: Location | None,
) -> str:
    files = list_files(identity, cache_dir=cache_dir)
    matching = [file for file in files if matches(file, patterns)]
    name = filename or (matching[0] if len(matching) == 1 else USUAL_NAME)
    if name in files:
        return name
    missing = f"no file {filename!r}" if filename is not None else f"no one file of {patterns}"
    raise ModelNotFoundError(
        f"{identity.name} has {missing}; it has {matching or files}: pass file= with one of them"
    )


def _file_digest(path: Path) -> str:
    status = path.stat()
    digest = hashlib.sha256(os.fsencode(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0"))
    with path.open("rb") as file:
        digest.update(file.read(_DIGESTED_BYTES))
    return f"sha256:{digest.hexdigest()}"


def read_file(
    model: ModelFile, read: Callable[[BinaryIO], Result], *, cache_dir: Location | None = None
) -> Result:
    """Return ``read(file)`` for the opened file of a model that is a single file.

    Parts of an uncached file on the Hub are downloaded as `read` reads them. If the Hub does not
    answer meanwhile, `read` is called again.
    """
    identity, filename = model
    if identity.is_directory or _cached_file(identity, filename, cache_dir) is not None:
        with fetch_file(model, cache_dir=cache_dir).open("rb") as file:
            return read(file)
    from huggingface_hub import HfFileSystem

    name, revision = identity.name, identity.revision
    files = HfFileSystem(token=identity.token, skip_instance_cache=True)

    def read_ranges() -> Result:
        path = f"{name}/{filename}"
        with files.open(path, revision=revision, block_size=_BLOCK_BYTES) as file:
            return read(file)

    return ask_model(name, revision, read_ranges)


def fetch_file(model: ModelFile, *, cache_dir: Location | None = None) -> Path:
    """Return the local path of a model that is a single file, downloaded if need be.

    Raises ModelChangedError if a local file changed after it was pinned.
    """
    identity, filename = model
    path = _find_or_fetch(identity, filename, cache_dir)
    if path is None:
        raise ModelNotFoundError(f"{identity.name} has no file {filename}")
    if identity.is_directory and _file_digest(path) != identity.revision:
        raise ModelChangedError(
            f"{path} on this machine is not the file that the work was planned with: its size, "
            "time or beginning differs. If it was written anew, build the classifier and its frame "
            "again; if this is a node's copy, copy it with its time (cp -p, rsync -a)"
        )
    return path


# The Hub cache, and downloads of single files.


def _cached_file(identity: Identity, filename: str, cache_dir: Location | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    folder = cache_folder(cache_dir)
    path = try_to_load_from_cache(identity.name, filename, folder, identity.revision)
    return Path(path) if isinstance(path, str) else None


def _read_weight_map(index: dict[str, Any], name: str) -> dict[str, str]:
    """Return each tensor's weight file, by tensor name, from the parsed index of shards."""
    files = index.get("weight_map")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{INDEX} of {name} has no weight_map")
    for file in files.values():
        check_inside(f"{INDEX} of {name}", file)
        if not str(file).endswith(".safetensors"):
            raise CheckpointError(f"{INDEX} of {name} names {file!r}, not one of its weight files")
    return files


def check_inside(owner: str, filename: object) -> None:
    """Raise CheckpointError if `filename`, which `owner` names, is absolute or contains ".."."""
    path = PurePosixPath(str(filename))
    if path.is_absolute() or ".." in path.parts:
        raise CheckpointError(
            f"{owner} names {filename!r}, which is not inside of the model: nothing is "
            "read there. Take the model from whoever made it, or correct the file"
        )


def _find_or_fetch(identity: Identity, filename: str, cache_dir: Location | None) -> Path | None:
    """Return the local path of a model's file, downloaded if need be; None if there is none."""
    name, revision = identity.name, identity.revision
    check_inside(f"a file of {name}", filename)
    if identity.is_directory:
        path = existing_directory(Path(name)) / filename
        return path if is_file(path) else None
    if (cached := _cached_file(identity, filename, cache_dir)) is not None:
        return cached
    known = _cached_listing(identity, cache_dir)
    if known is not None and filename not in known:
        return None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    def fetch() -> Path | None:
        folder, token = cache_folder(cache_dir), identity.token
        try:
            path = hf_hub_download(name, filename, revision=revision, cache_dir=folder, token=token)
        except RemoteEntryNotFoundError:
            return None
        return Path(path)

    return ask_model(name, revision, fetch)


def _cached_listing(identity: Identity, cache_dir: Location | None) -> list[str] | None:
    """Return the paths of a Hub model's files, cached or not; None if the cache has no listing."""
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
    """Return the folder of a Hub model's cached files if the Hub does not answer, else None.

    Also returns None if the cache has a listing of the model's files. Raises HubUnreachableError if
    the Hub does not answer and weights are not cached.
    """
    from huggingface_hub import constants, get_session
    from huggingface_hub.file_download import repo_folder_name

    if _cached_listing(identity, cache_dir) is not None:
        return None
    timeout = constants.HF_HUB_ETAG_TIMEOUT
    probe = functools.partial(get_session().head, constants.ENDPOINT, timeout=timeout)
    try:
        # A single try: the client library's own calls would retry for most of a minute.
        ask_model(identity.name, identity.revision, probe, tries=1)
    except HubUnreachableError:
        repo = repo_folder_name(repo_id=identity.name, repo_type="model")
        snapshot = cache_folder(cache_dir) / repo / "snapshots" / identity.revision
        if not _is_whole(snapshot):
            raise
        return snapshot
    return None


def _is_whole(snapshot: Path) -> bool:
    if not is_directory(snapshot):
        return False
    if exists(snapshot / INDEX):
        return all(exists(path) for path in weights_paths(snapshot))
    return any(name.endswith(".safetensors") for name in visible_files(snapshot))
