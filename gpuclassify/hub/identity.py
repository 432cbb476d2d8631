"""Identity of a model: its name, pinned to a commit on the Hub or to a digest of its directory."""

import contextlib
import fnmatch
import functools
import hashlib
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gpuclassify.hub.calls import HubUnreachableError, ModelNotFoundError, ask_model
from gpuclassify.hub.saving import finish_saving, refuse_unfinished
from gpuclassify.settings.checks import HubName, warn_once
from gpuclassify.settings.paths import Location, exists, is_directory, is_file
from gpuclassify.workers.secrets import token_for, token_name

logger = logging.getLogger(__name__)

LOADABLE_PATTERNS = (
    *("*.json", "*.safetensors", "tokenizer*", "*.jinja"),
    *("*.txt", "*.model", "vocab*", "merges*"),
)
PICKLE_PATTERNS = ("*.bin", "*.pth", "*.pt", "*.ckpt", "*.pkl", "*.pickle")
_MAX_HEADER_BYTES = 100_000_000  # the limit that the safetensors format itself sets


@dataclass(frozen=True)
class Identity:
    """Name of a model, pinned to a commit or to a digest, so that all workers read equal files."""

    name: str  # Hub name, or the absolute path of a directory
    # The commit's 40 hex digits, or "sha256:..." of `directory_digest` or of a model's single file.
    revision: str
    is_directory: bool
    # Name of the token in use, so that workers select the right user's token.
    token_name: str = field(default="", compare=False, repr=False)

    @property
    def token(self) -> str | None:
        """Hub token that this process has for the model; None means HF_TOKEN or the login."""
        return token_for(self.token_name or self.name)

    def __dask_tokenize__(self) -> tuple[str, str, bool]:
        return self.name, self.revision, self.is_directory  # any token reads the same files

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}"


def resolve(
    name: Location, revision: str | None = None, *, cache_dir: Location | None = None
) -> Identity:
    """Pin a model, by its Hub name or directory, to a Hub commit or a digest of the directory.

    `revision` is a branch, tag or commit (default: "main"), and for a directory only its digest. A
    full commit is not looked up. Without a network, the cached commit of a branch or tag is used,
    with a warning in the log. Raises ModelNotFoundError, ModelAccessError or HubUnreachableError.
    """
    name = os.fspath(name)
    if is_directory_name(name):
        if name in HubName.known:
            warn_once(
                f"{name!r} is a directory here, and its model is taken, not the one that the Hub "
                f"has by this name: if that is meant, pass './{name}', else leave model= out"
            )
        folder, digest = absolute(name), ""
        while _settle(folder) or not digest:  # another process may save the model meanwhile
            digest = directory_digest(folder)
        if revision not in (None, digest):
            raise ValueError(
                f"revision={revision!r} names a commit of a Hub model, but {name!r} is a "
                "directory: leave it out, or rename the directory if the Hub model was meant"
            )
        return Identity(str(folder), digest, is_directory=True)
    if is_file(name):
        raise ModelNotFoundError(f"{name} is a file: name the directory that holds the model")
    _check_repo_name(name)
    revision = revision or "main"
    if is_commit(revision):
        commit = revision.lower()
    else:
        commit = _find_commit(name, revision, cache_dir)
    return Identity(name, commit, is_directory=False, token_name=token_name(name))


def _settle(folder: Path) -> bool:
    """Finish this user's interrupted saves in a model directory; return True if there was one."""
    try:
        has_moved = finish_saving(folder)
        refuse_unfinished(folder)
    except OSError as err:
        raise ModelNotFoundError(
            f"the saving of {folder} was interrupted, and cannot be finished here ({err}): "
            "save it again, or name it once as a user who may write there"
        ) from err
    return has_moved


def is_directory_name(name: Location) -> bool:
    """Tell whether a model name means a directory: one that exists, or a name spelt as a path.

    A `HubName`, such as a published classifier's default model, always means a Hub model.
    """
    name = os.fspath(name)
    if isinstance(name, HubName):
        return False
    is_spelt_as_path = name in (".", "..") or name.startswith(("~", "./", "../"))
    is_spelt_as_path = is_spelt_as_path or Path(name).is_absolute() or name.count("/") > 1
    return is_spelt_as_path or (name != "" and is_directory(name))


def is_pinned(name: Location, revision: str | None) -> bool:
    """Tell whether a model is a directory, or a Hub model whose revision is a full commit."""
    return is_directory_name(name) or is_commit(revision)


def is_commit(revision: str | None) -> bool:
    """Tell whether a revision is a full commit SHA: 40 hex digits, in lower or upper case."""
    return re.fullmatch("[0-9a-fA-F]{40}", revision or "") is not None


def directory_digest(path: Location) -> str:
    """Return a digest of a model directory, to detect changes: ``"sha256:"`` and 64 hex digits.

    It covers names, sizes and modification times of the files that a loader could read, and the
    headers of safetensors files, but no weights.
    """
    folder = absolute(path)
    while True:
        names = visible_files(folder)
        with contextlib.suppress(FileNotFoundError):  # a file was replaced meanwhile
            return _digest_files(folder, names)


def _digest_files(folder: Path, names: list[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        if not matches(name, LOADABLE_PATTERNS) or matches(name, PICKLE_PATTERNS):
            continue
        status = (folder / name).stat()
        digest.update(os.fsencode(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\0"))
        if name.endswith(".safetensors"):
            with (folder / name).open("rb") as file:  # a truncated header is digested, too
                length = file.read(8)
                count = int.from_bytes(length, "little")
                digest.update(length + (file.read(count) if count <= _MAX_HEADER_BYTES else b""))
    return f"sha256:{digest.hexdigest()}"


def _check_repo_name(name: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as err:
        raise ModelNotFoundError(
            f"model {name!r} is neither a directory (looked for {absolute(name)}) "
            f"nor a Hub name such as 'nvidia/domain-classifier': {err}"
        ) from err


def _find_commit(name: str, revision: str, cache_dir: Location | None) -> str:
    """Return the commit of a branch or tag, from the Hub or, if that is out of reach, the cache."""
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import RemoteEntryNotFoundError, RevisionResolutionError

    look_up = functools.partial(
        HfApi(token=token_for(name)).resolve_revision,
        name,
        revision=revision,
        cache_dir=cache_folder(cache_dir),
    )

    def ask() -> str:
        url = hf_hub_url(name, "config.json", revision=revision)
        # The metadata of a file shows whether the token opens a gated model; the card is public.
        with contextlib.suppress(RemoteEntryNotFoundError):
            get_hf_file_metadata(url, token=token_for(name))
        return look_up().resolved

    try:
        # Few tries, because without a network the cache may answer.
        return ask_model(name, revision, ask, tries=3)
    except HubUnreachableError as err:
        try:
            commit = look_up(local_files_only=True).resolved
        except RevisionResolutionError:
            raise err from None
        logger.warning("using the cached commit of %s at %s: %s", name, revision, err)
        return commit


def absolute(path: Location) -> Path:
    """Return the absolute path, with ``~`` expanded and symbolic links not resolved."""
    # Links are kept, because they may resolve differently on each node of a shared file system.
    return Path(os.path.abspath(os.path.expanduser(path)))  # noqa: PTH100, PTH111


def existing_directory(folder: Path) -> Path:
    """Return the model directory `folder`; raise ModelNotFoundError if it is no directory."""
    if is_directory(folder):
        return folder
    kind = "a file, not a directory" if exists(folder) else "no such directory"
    raise ModelNotFoundError(
        f"{folder}: {kind}; model= takes a directory that holds config.json and safetensors "
        "weights, or a Hub name of the form OWNER/NAME"
    )


def visible_files(folder: Path) -> list[str]:
    """List the files below a folder as sorted relative paths with "/", without hidden ones.

    ``__pycache__`` is left out, too, and links to folders are not followed.
    """
    paths = []
    for root, folders, files in os.walk(existing_directory(folder), onerror=_raise):
        folders[:] = [name for name in folders if name[0] != "." and name != "__pycache__"]
        paths += [Path(root, name) for name in files if name[0] != "."]
    return sorted(path.relative_to(folder).as_posix() for path in paths if is_file(path))


def _raise(err: OSError) -> None:
    # `os.walk` would ignore every error. A folder that was removed meanwhile is ignored here, too.
    if not isinstance(err, FileNotFoundError):
        raise err


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether a path matches one of the shell `patterns`, whose "*" also matches "/"."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def cache_folder(cache_dir: Location | None) -> Path:
    """Return the Hub cache folder: `cache_dir`, or the client library's default."""
    from huggingface_hub import constants

    return absolute(cache_dir if cache_dir is not None else constants.HF_HUB_CACHE)
