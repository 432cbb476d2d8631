"""Model names as pinned identities, their files, and the tokens that open gated ones.

A model is named by its Hugging Face Hub name or by a directory. `resolve` turns either into an
`Identity` once, and everything later (configuration, tensor shapes, weights) is read at exactly
that identity. Pickled weights are never fetched. Tokens live in process memory alone.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import json
import logging
import os
import re
import sys
import threading
import uuid
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

logger = logging.getLogger(__name__)

Location = str | os.PathLike[str]

LOADABLE_PATTERNS = (
    "*.json",
    "*.safetensors",
    "tokenizer*",
    "*.txt",
    "*.model",
    "vocab*",
    "merges*",
)
PICKLE_PATTERNS = ("*.bin", "*.pth", "*.pt", "*.ckpt", "*.pkl", "*.pickle")

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the limit that the safetensors format itself sets
_HOW_TO_CONVERT = """\
import torch, safetensors.torch as st
st.save_file({name: tensor.clone().contiguous() for name, tensor in torch.load(
    "pytorch_model.bin", map_location="cpu", weights_only=True).items()},
    "model.safetensors", metadata={"format": "pt"})"""

_tokens: dict[str, str] = {}
_shared: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()
_sharing = threading.Lock()


@dataclass(frozen=True)
class Identity:
    """A model pinned to what it is now.

    Parameters
    ----------
    name : str
        Hub name, or the absolute, user-expanded path of a directory.
    revision : str
        Commit sha of 40 hex digits, or ``"sha256:..."`` (`directory_digest`) of a directory.
    is_directory : bool
        Whether `name` is a directory.
    """

    name: str
    revision: str
    is_directory: bool


class ModelNotFoundError(FileNotFoundError):
    """No such model, revision, directory or file."""


class ModelAccessError(PermissionError):
    """The model is gated or private, and no token was given or the token has no access."""


class MissingOrPrivateError(ModelNotFoundError, ModelAccessError):
    """The Hub does not tell whether the model is missing or hidden from this caller."""


class HubUnreachableError(ConnectionError):
    """The Hub cannot be reached (or HF_HUB_OFFLINE=1), and the cache does not have the answer."""


class ModelChangedError(RuntimeError):
    """A directory's files are no longer the ones that its identity was made from."""


def is_directory_name(name: Location) -> bool:
    """Tell whether a model name means a directory rather than a Hub model.

    Parameters
    ----------
    name : str or path
        What the user passed as ``model=``.

    Returns
    -------
    bool
        True for an existing directory and for a name spelt as a path: absolute, starting with
        ``~``, ``./`` or ``../``, or with more than one slash.
    """
    name = os.fspath(name)
    is_spelt_as_path = name in (".", "..") or name.startswith(("~", "./", "../"))
    is_spelt_as_path = is_spelt_as_path or Path(name).is_absolute() or name.count("/") > 1
    return is_spelt_as_path or (name != "" and Path(name).is_dir())


def resolve(
    name: Location, revision: str | None = None, *, cache_dir: Location | None = None
) -> Identity:
    """Pin a model name to a commit or a digest.

    Parameters
    ----------
    name : str or path
        Hub name or directory; see `is_directory_name` for how the two are told apart.
    revision : str, optional
        Branch, tag or commit of a Hub model; ``main`` if None. A full sha costs no request.
    cache_dir : str or path, optional
        Hub cache to use instead of the default one. Without a network, the commit that it last
        knew for `revision` is taken.

    Returns
    -------
    Identity

    Raises
    ------
    ModelNotFoundError
        Neither a directory nor a Hub model, or the model has no such revision.
    ModelAccessError
        The model is gated or private, and the token is missing or has no access.
    HubUnreachableError
        The Hub does not answer and the cache knows no such revision.
    ValueError
        A revision was given for a directory.
    """
    name = os.fspath(name)
    if is_directory_name(name):
        folder = _absolute(name)
        digest = directory_digest(folder)
        if revision not in (None, digest):
            raise ValueError(
                f"revision={revision!r} names a commit of a Hub model, but {name!r} is a "
                "directory: leave it out, or rename the directory if the Hub model was meant"
            )
        return Identity(str(folder), digest, is_directory=True)
    _check_repo_name(name)
    revision = revision or "main"
    if re.fullmatch("[0-9a-fA-F]{40}", revision):
        return Identity(name, revision.lower(), is_directory=False)
    return Identity(name, _commit_of(name, revision, cache_dir), is_directory=False)


def directory_digest(path: Location) -> str:
    """Digest a model directory without reading its weights.

    Parameters
    ----------
    path : str or path
        The directory; ``~`` is expanded.

    Returns
    -------
    str
        ``"sha256:"`` and 64 hex digits over name, size and modification time of every file that
        a loader could read (configuration, tokenizer, safetensors; at any depth), and over the
        raw safetensors headers. Hidden files, hidden folders and ``__pycache__`` do not count.

    Raises
    ------
    ModelNotFoundError
        `path` is not a directory.
    """
    folder = _absolute(path)
    digest = hashlib.sha256()
    for name in _walk(folder):
        if not _matches(name, LOADABLE_PATTERNS) or _matches(name, PICKLE_PATTERNS):
            continue
        status = (folder / name).stat()
        digest.update(os.fsencode(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0"))
        if name.endswith(".safetensors"):
            digest.update(_raw_header(folder / name))
    return f"sha256:{digest.hexdigest()}"


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
        return list(_walk(Path(identity.name)))
    known = _cached_listing(identity, cache_dir)
    if known is not None:
        return known
    if (snapshot := _snapshot_if_unplugged(identity, cache_dir)) is not None:
        return list(_walk(snapshot))
    from huggingface_hub import HfApi

    name, revision = identity.name, identity.revision
    with _explained(name, revision):
        return sorted(HfApi().list_repo_files(name, revision=revision, token=token_for(name)))


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
        The file is not JSON, or is JSON of another kind than an object.
    ModelNotFoundError, ModelAccessError, HubUnreachableError
        As in `resolve`.
    """
    path = _local_or_fetched(identity, filename, cache_dir)
    if path is None:
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as err:
        raise ValueError(f"{path} of {identity.name} is not valid JSON: {err}") from err
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} of {identity.name} holds a JSON {type(content).__name__}, not an object"
        )
    return content


def read_tensor_shapes(
    identity: Identity, *, cache_dir: Location | None = None
) -> dict[str, tuple[int, ...]]:
    """Read names and shapes of a model's tensors from the safetensors headers, never weights.

    Parameters
    ----------
    identity : Identity
        From `resolve`.
    cache_dir : str or path, optional
        As in `resolve`.

    Returns
    -------
    dict of str to tuple of int
        Every tensor of ``model.safetensors``, or of all the files of its sharded index.

    Raises
    ------
    ModelNotFoundError
        The model has no safetensors weights (pickles are refused), or lacks a shard.
    ValueError
        A header or the index is truncated or corrupt; the message names the file.
    ModelAccessError, HubUnreachableError
        As in `resolve`.
    """
    files = list_files(identity, cache_dir=cache_dir)
    if _WEIGHTS in files:
        return _shapes_of_file(identity, _WEIGHTS, cache_dir)
    if _INDEX not in files:
        raise ModelNotFoundError(_no_safetensors(identity.name, files))
    weight_map = _weight_map(read_json(identity, _INDEX, cache_dir=cache_dir) or {}, identity.name)
    shards = sorted(set(weight_map.values()))
    if absent := [shard for shard in shards if shard not in files]:
        raise ModelNotFoundError(
            f"{_INDEX} of {identity.name} names weight files that are not there: {absent}"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        shapes.update(_shapes_of_file(identity, shard, cache_dir))
    if lost := sorted(set(weight_map) - set(shapes)):
        raise ValueError(
            f"{_INDEX} of {identity.name} names {len(lost)} tensors that its files lack: {lost[:5]}"
        )
    return shapes


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
    if (snapshot := _snapshot_if_unplugged(identity, cache_dir)) is not None:
        return snapshot
    from huggingface_hub import snapshot_download

    with _explained(identity.name, identity.revision):
        folder = snapshot_download(
            identity.name,
            revision=identity.revision,
            cache_dir=_cache_folder(cache_dir),
            token=token_for(identity.name),
            allow_patterns=list(LOADABLE_PATTERNS),
            ignore_patterns=list(PICKLE_PATTERNS),
        )
    # Refused by the Hub, the client library hands out whatever part of the model is in the cache.
    if _cached_listing(identity, cache_dir) is None and not _has_weights(Path(folder)):
        list_files(identity, cache_dir=cache_dir)  # raises what the Hub said
        raise HubUnreachableError(_unreachable(identity.name, identity.revision, "it just failed"))
    return Path(folder)


def remember_token(name: str, token: str) -> None:
    """Keep a token for one model in this process's memory, and nowhere else.

    Parameters
    ----------
    name : str
        Hub name of the model.
    token : str
        Access token; white space around it is dropped.

    Raises
    ------
    ValueError
        The token is empty or has characters that no token has. The message does not show it.
    """
    token = token.strip()
    # The HTTP client prints a header that it refuses, so such a token must not reach it.
    if not re.fullmatch("[!-~]+", token):
        raise ValueError(
            f"the token given for {name} is empty or has spaces, line breaks or non-ASCII "
            "characters in it; copy it again from https://huggingface.co/settings/tokens"
        )
    _tokens[name] = token


def token_for(name: str) -> str | None:
    """Return the remembered token of a model.

    Parameters
    ----------
    name : str
        Hub name of the model.

    Returns
    -------
    str or None
        None lets huggingface_hub use HF_TOKEN or the user's login.
    """
    return _tokens.get(name)


def share_tokens_with_workers(names: Iterable[str]) -> None:
    """Hand remembered tokens to all present and future workers of the default client.

    Does nothing without a distributed client or without a token for these names, and nothing
    twice for the same client and tokens.

    Parameters
    ----------
    names : iterable of str
        Hub names of the models about to be used.

    Raises
    ------
    RuntimeError
        The default client is asynchronous, so that this call could not wait for its workers.
    """
    held = {name: token for name in names if (token := token_for(name)) is not None}
    distributed = sys.modules.get("distributed")
    if not held or distributed is None:
        return
    try:
        client = distributed.default_client()
    except ValueError:
        return
    if client.asynchronous:
        raise RuntimeError(
            f"tokens for {sorted(held)} cannot be handed to workers through an asynchronous "
            "Client; set HF_TOKEN on the workers, or use a Client without asynchronous=True"
        )
    with _sharing:
        known = _shared.setdefault(client, {})
        for name, token in held.items():
            if known.get(name) != token:
                client.register_plugin(_token_plugin_class()(name, token))
                known[name] = token


@functools.cache
def _token_plugin_class() -> type:
    """Make the plugin class late: its base class needs distributed, which is slow to import."""
    from distributed.diagnostics.plugin import WorkerPlugin

    class TokenPlugin(WorkerPlugin):
        """Remembers one model's token in a worker process."""

        def __init__(self, model: str, token: str):
            self.name = f"gpuclassify-token-{model}"
            self._model = model
            self._token = token

        def __repr__(self) -> str:
            return f"<TokenPlugin {self._model}>"

        def setup(self, worker: Any) -> None:
            remember_token(self._model, self._token)

    return TokenPlugin


def _absolute(path: Location) -> Path:
    # Links are kept: the path that a shared file system shows may resolve differently per node.
    return Path(os.path.abspath(os.path.expanduser(path)))  # noqa: PTH100, PTH111


def _existing(folder: Path) -> Path:
    if folder.is_dir():
        return folder
    kind = "a file, not a directory" if folder.exists() else "no such directory"
    raise ModelNotFoundError(
        f"{folder}: {kind}; model= takes a directory that holds config.json and safetensors "
        "weights, or a Hub name of the form OWNER/NAME"
    )


def _walk(folder: Path) -> Iterator[str]:
    """Relative names of the visible files below a folder, sorted."""
    found = []
    for root, folders, files in os.walk(_existing(folder)):
        folders[:] = [name for name in folders if name[0] != "." and name != "__pycache__"]
        found += [Path(root, name) for name in files if name[0] != "."]
    yield from sorted(path.relative_to(folder).as_posix() for path in found if path.is_file())


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _unchanged_directory(identity: Identity) -> Path:
    if directory_digest(identity.name) != identity.revision:
        raise ModelChangedError(
            f"the files of {identity.name} on this machine are not those that the work was planned "
            "with: a name, size, time or safetensors header differs. If the model was rewritten, "
            "build the classifier and its frame again; if this is a node's own copy, copy it with "
            "its file times (cp -pr, rsync -a)"
        )
    return Path(identity.name)


def _cache_folder(cache_dir: Location | None) -> Path:
    from huggingface_hub import constants

    return _absolute(cache_dir if cache_dir is not None else constants.HF_HUB_CACHE)


def _repo_folder(name: str, cache_dir: Location | None) -> Path:
    from huggingface_hub.file_download import repo_folder_name

    return _cache_folder(cache_dir) / repo_folder_name(repo_id=name, repo_type="model")


def _check_repo_name(name: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        if not name:
            raise HFValidationError("the name is empty.")
        validate_repo_id(name)
    except HFValidationError as err:
        raise ModelNotFoundError(
            f"model {name!r} is neither a directory (looked for {_absolute(name)}) "
            f"nor a Hub name such as 'nvidia/domain-classifier': {err}"
        ) from err


def _commit_of(name: str, revision: str, cache_dir: Location | None) -> str:
    """The commit that a branch or tag points at: asked of the Hub, else as last cached."""
    from huggingface_hub import is_offline_mode

    ref = _repo_folder(name, cache_dir) / "refs" / revision
    if is_offline_mode():
        if not ref.is_file():
            reason = "HF_HUB_OFFLINE=1 is set"
            raise HubUnreachableError(_unreachable(name, revision, reason))
        return ref.read_text().strip()
    try:
        with _explained(name, revision):
            commit = _ask_for_commit(name, revision)
    except HubUnreachableError as err:
        if not ref.is_file():
            raise
        logger.warning("using the cached commit of %s at %s: %s", name, revision, err)
        return ref.read_text().strip()
    _note_commit(ref, commit)
    return commit


def _ask_for_commit(name: str, revision: str) -> str:
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import RemoteEntryNotFoundError

    # A file, unlike the model's public card, tells at once whether the token opens a gated model.
    url = hf_hub_url(name, _CONFIG, revision=revision)
    try:
        commit = get_hf_file_metadata(url, token=token_for(name)).commit_hash
    except RemoteEntryNotFoundError:
        commit = None
    if commit is None:
        commit = HfApi().model_info(name, revision=revision, token=token_for(name)).sha
    assert commit is not None, "a revision that exists has a commit"
    return commit


def _note_commit(ref: Path, commit: str) -> None:
    """Record a commit where the Hub cache keeps it, for times without a network."""
    try:
        if not ref.is_file() or ref.read_text() != commit:
            ref.parent.mkdir(parents=True, exist_ok=True)
            draft = ref.with_name(f"{ref.name}.{uuid.uuid4().hex}.tmp")
            draft.write_text(commit)
            draft.replace(ref)
    except OSError as err:
        logger.debug("the cache cannot record %s: %s", ref, err)


def _cached_listing(identity: Identity, cache_dir: Location | None) -> list[str] | None:
    """All file names of a Hub model if an earlier download listed them, else None."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        entries = get_cached_repo_tree(
            identity.name, revision=identity.revision, cache_dir=_cache_folder(cache_dir)
        )
    except CachedRepoTreeNotFoundError:
        return None
    return sorted(entry.path for entry in entries)


def _snapshot_if_unplugged(identity: Identity, cache_dir: Location | None) -> Path | None:
    """The cached snapshot if it has all weights and there is no network, else None."""
    from huggingface_hub import constants, get_session

    if _cached_listing(identity, cache_dir) is not None:
        return None
    try:
        # Asked once: the client library's own calls would retry for most of a minute.
        with _explained(identity.name, identity.revision):
            get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except HubUnreachableError:
        snapshot = _repo_folder(identity.name, cache_dir) / "snapshots" / identity.revision
        if not _has_weights(snapshot):
            raise
        return snapshot
    return None


def _has_weights(snapshot: Path) -> bool:
    if not snapshot.is_dir():
        return False
    names = set(_walk(snapshot))
    if _INDEX in names:
        index = json.loads((snapshot / _INDEX).read_text(encoding="utf-8"))
        return names.issuperset(_weight_map(index, str(snapshot)).values())
    return any(name.endswith(".safetensors") for name in names)


def _cached_file(identity: Identity, filename: str, cache_dir: Location | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    folder = _cache_folder(cache_dir)
    found = try_to_load_from_cache(identity.name, filename, folder, identity.revision)
    return Path(found) if isinstance(found, str) else None


def _local_or_fetched(identity: Identity, filename: str, cache_dir: Location | None) -> Path | None:
    """Path of one small file, fetched if need be; None if the model has no such file."""
    if identity.is_directory:
        folder = _existing(Path(identity.name))
        return folder / filename if (folder / filename).is_file() else None
    if (cached := _cached_file(identity, filename, cache_dir)) is not None:
        return cached
    known = _cached_listing(identity, cache_dir)
    if known is not None and filename not in known:
        return None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    with _explained(identity.name, identity.revision):
        try:
            path = hf_hub_download(
                identity.name,
                filename,
                revision=identity.revision,
                cache_dir=_cache_folder(cache_dir),
                token=token_for(identity.name),
            )
        except RemoteEntryNotFoundError:
            return None
    return Path(path)


def _weight_map(index: dict[str, Any], name: str) -> dict[str, str]:
    """Tensor name to file name of a sharded checkpoint; no file name may leave the model."""
    files = index.get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{_INDEX} of {name} has no weight_map")
    for file in files.values():
        path = PurePosixPath(str(file))
        if path.is_absolute() or ".." in path.parts or path.suffix != ".safetensors":
            raise ValueError(f"{_INDEX} of {name} names {file!r}, not one of its weight files")
    return files


def _no_safetensors(name: str, files: list[str]) -> str:
    pickles = [file for file in files if _matches(file, PICKLE_PATTERNS)]
    if not pickles:
        return f"{name} has no {_WEIGHTS} and no {_INDEX}; its files are {files}"
    return (
        f"{name} has its weights only as pickles ({', '.join(pickles)}), which can run any code "
        f"when they are read and are refused. Convert a copy that you trust:\n{_HOW_TO_CONVERT}\n"
        "and pass the directory of the new file, with config.json and the tokenizer beside it"
    )


def _shapes_of_file(
    identity: Identity, filename: str, cache_dir: Location | None
) -> dict[str, tuple[int, ...]]:
    if identity.is_directory:
        return _local_shapes(Path(identity.name, filename))
    cached = _cached_file(identity, filename, cache_dir)
    return _local_shapes(cached) if cached else _remote_shapes(identity, filename)


def _remote_shapes(identity: Identity, filename: str) -> dict[str, tuple[int, ...]]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, SafetensorsParsingError

    with _explained(identity.name, identity.revision):
        try:
            header = HfApi().parse_safetensors_file_metadata(
                identity.name,
                filename,
                revision=identity.revision,
                token=token_for(identity.name),
            )
        except (SafetensorsParsingError, HfHubHTTPError) as err:
            is_too_short = isinstance(err, HfHubHTTPError) and err.response.status_code == 416
            if isinstance(err, HfHubHTTPError) and not is_too_short:
                raise
            _forget_secrets(err)
            raise ValueError(
                f"{filename} of {identity.name} at {identity.revision} has a truncated or corrupt "
                "safetensors header; its author has to upload it again"
            ) from err
    return {name: tuple(tensor.shape) for name, tensor in header.tensors.items()}


def _raw_header(path: Path) -> bytes:
    """The length field and the JSON of a safetensors header, as far as the file has them."""
    with path.open("rb") as file:
        length = file.read(8)
        header_bytes = int.from_bytes(length, "little")
        return length + (file.read(header_bytes) if header_bytes <= _MAX_HEADER_BYTES else b"")


def _local_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    raw = _raw_header(path)
    try:
        if raw[:8] == b"version ":
            raise ValueError("it is a Git LFS pointer; run `git lfs pull` in its directory")
        if len(raw) < 8 or len(raw) - 8 != int.from_bytes(raw[:8], "little"):
            raise ValueError("it ends inside its header, or has none")
        header = json.loads(raw[8:])
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in tensors.items()}
        ends = [int(entry["data_offsets"][1]) for entry in tensors.values()]
        promised_bytes, file_bytes = len(raw) + max(ends, default=0), path.stat().st_size
        if file_bytes != promised_bytes:
            raise ValueError(f"it has {file_bytes} bytes where its header says {promised_bytes}")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as err:
        raise ValueError(f"{path} is a truncated or corrupt safetensors file: {err}") from err
    return shapes


@contextlib.contextmanager
def _explained(name: str, revision: str) -> Iterator[None]:
    """Turn the Hub client's errors into this module's, with no token left in their chain."""
    from huggingface_hub.errors import HTTPError

    try:
        yield
    except (HTTPError, OSError) as err:
        explained = _explanation(err, name, revision)
        _forget_secrets(err)
        if explained is None:
            raise
        raise explained from err


def _explanation(err: BaseException, name: str, revision: str) -> Exception | None:
    from huggingface_hub import errors

    if isinstance(err, errors.LocalEntryNotFoundError) and err.__cause__ is not None:
        err = err.__cause__
    page = f"https://huggingface.co/{name}"
    if isinstance(err, errors.GatedRepoError):
        return ModelAccessError(_gated(name, page))
    if isinstance(err, errors.RepositoryNotFoundError):
        text = (
            f"the Hub has no model {name!r} and there is no directory {_absolute(name)}. Check the "
            "spelling. A private model needs a token that may read it: token= or HF_TOKEN"
        )
        is_anonymous = err.response.status_code == 401
        return MissingOrPrivateError(text) if is_anonymous else ModelNotFoundError(text)
    if isinstance(err, errors.RevisionNotFoundError):
        return ModelNotFoundError(f"{name} has no revision {revision!r}; see {page}/commits/main")
    if isinstance(err, errors.RemoteEntryNotFoundError):
        return ModelNotFoundError(f"{name} at {revision} lacks a file: {_first_line(err)}")
    if isinstance(err, errors.HfHubHTTPError):
        status = err.response.status_code
        if status in (401, 403):
            return ModelAccessError(
                f"the Hub refused access to {name} ({_first_line(err)}): the token is not valid or "
                f"not allowed to read it. Pass another with token= or HF_TOKEN; see {page}"
            )
        return HubUnreachableError(_unreachable(name, revision, f"the Hub answered {status}"))
    if isinstance(err, errors.OfflineModeIsEnabled):
        return HubUnreachableError(_unreachable(name, revision, "HF_HUB_OFFLINE=1 is set"))
    if isinstance(
        err, (errors.HTTPError, errors.LocalEntryNotFoundError, errors.FileMetadataError)
    ):
        reason = f"{type(err).__name__}: {_first_line(err)}"
        return HubUnreachableError(_unreachable(name, revision, reason))
    return None


def _first_line(err: BaseException) -> str:
    return (str(err).strip() or "no details").splitlines()[0]


def _gated(name: str, page: str) -> str:
    from huggingface_hub import get_token

    if token_for(name) is None and get_token() is None:
        return (
            f"{name} is gated: ask for access at {page}, then pass a token with token= or HF_TOKEN"
        )
    return (
        f"{name} is gated and the token in use has no access to it: ask for access at {page} with "
        "the account of that token, or pass another with token= or HF_TOKEN"
    )


def _unreachable(name: str, revision: str, reason: str) -> str:
    return (
        f"{name} at {revision} is not (completely) in the cache and the Hub cannot be reached: "
        f"{reason}. Run `hf download {name} --revision {revision}` once with a network, with the "
        "same cache, or pass a directory that holds the model"
    )


def _forget_secrets(err: BaseException) -> None:
    """Strip credentials from a chain of HTTP errors: request headers, and frames' variables."""
    pending: list[BaseException | None] = [err]
    seen: set[int] = set()
    while pending:
        link = pending.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        pending += [link.__cause__, link.__context__]
        link.__traceback__ = None
        response = getattr(link, "response", None)
        carriers = [link, response, *getattr(response, "history", ())]
        for carrier in carriers:
            with contextlib.suppress(AttributeError, RuntimeError):  # one without a request
                carrier.request.headers.pop("authorization", None)
