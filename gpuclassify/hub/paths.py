"""Where models lie: directories, the folders of the Hub cache, and the files in them."""

import fnmatch
import os
from collections.abc import Iterable
from pathlib import Path

from gpuclassify.hub.errors import ModelNotFoundError

Location = str | os.PathLike[str]


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


def absolute(path: Location) -> Path:
    """The absolute path, with ``~`` expanded."""
    # Links are kept: the path that a shared file system shows may resolve differently per node.
    return Path(os.path.abspath(os.path.expanduser(path)))  # noqa: PTH100, PTH111


def existing_directory(folder: Path) -> Path:
    """The folder itself; ModelNotFoundError if it is none."""
    if folder.is_dir():
        return folder
    kind = "a file, not a directory" if folder.exists() else "no such directory"
    raise ModelNotFoundError(
        f"{folder}: {kind}; model= takes a directory that holds config.json and safetensors "
        "weights, or a Hub name of the form OWNER/NAME"
    )


def visible_files(folder: Path) -> list[str]:
    """Relative names of the visible files below a folder, sorted."""
    found = []
    for root, folders, files in os.walk(existing_directory(folder)):
        folders[:] = [name for name in folders if name[0] != "." and name != "__pycache__"]
        found += [Path(root, name) for name in files if name[0] != "."]
    return sorted(path.relative_to(folder).as_posix() for path in found if path.is_file())


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether a file name fits one of the shell patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def cache_folder(cache_dir: Location | None) -> Path:
    """The Hub cache: the one given, else the client library's."""
    from huggingface_hub import constants

    return absolute(cache_dir if cache_dir is not None else constants.HF_HUB_CACHE)


def repo_folder(name: str, cache_dir: Location | None) -> Path:
    """A Hub model's folder in the cache, which need not exist."""
    from huggingface_hub.file_download import repo_folder_name

    return cache_folder(cache_dir) / repo_folder_name(repo_id=name, repo_type="model")
