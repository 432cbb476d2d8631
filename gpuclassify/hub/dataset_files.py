"""Reading files of Hub repositories: revisions pinned to commits, few requests, no secrets."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from fsspec.spec import AbstractBufferedFile

from gpuclassify.hub.datasets import (
    DatasetMissingError,
    HubBusyError,
    asked,
    keep_token,
    retried,
    token_name,
    token_of,
)

Found = TypeVar("Found")

SCHEME = "hf://"
# Requests are limited, and bytes are not: a file this small is one request.
WHOLE_FILE_BYTES = 8 << 20
AHEAD_BYTES, LINE_BYTES = 8 << 20, 64 << 10
TIMEOUT_SECONDS = 60
_KINDS = {"datasets/": "dataset", "spaces/": "space", "": "model"}
_URL = re.compile(
    r"hf://(?P<kind>datasets/|spaces/|)(?P<repo>[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<path>.*))?"
)
_COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class HubPath:
    """Where a file, folder or pattern is on the Hub.

    Attributes
    ----------
    repo_type : {"dataset", "space", "model"}
    repo : str
        OWNER/NAME.
    revision : str
        Branch, tag, pull request or commit.
    path : str
        Within the repository.
    """

    repo_type: str
    repo: str
    revision: str
    path: str

    @classmethod
    def of(cls, url: str) -> HubPath | None:
        """The parts of an ``hf://`` URL; None for other URLs, and for buckets."""
        match = _URL.fullmatch(url)
        if match is None or url.startswith(f"{SCHEME}buckets/"):
            return None
        revision, path = unquote(match["revision"] or "main"), (match["path"] or "").strip("/")
        return cls(_KINDS[match["kind"]], match["repo"], revision, path)

    @property
    def url(self) -> str:
        """What `of` takes apart."""
        kind = next(prefix for prefix, name in _KINDS.items() if name == self.repo_type)
        revision = quote(self.revision, safe="")
        return f"{SCHEME}{kind}{self.repo}@{revision}/{self.path}".rstrip("/")


def keep_tokens(urls: Iterable[str], storage_options: dict[str, Any]) -> dict[str, Any]:
    """The storage options without the Hub token, which is kept in this process's memory."""
    paths = [found for url in urls if (found := HubPath.of(url)) is not None]
    if not paths or not isinstance(storage_options.get("token"), str):
        return dict(storage_options)
    for each in paths:
        keep_token(each.repo_type, each.repo, storage_options["token"])
    return {name: value for name, value in storage_options.items() if name != "token"}


def with_token(url: str, storage_options: dict[str, Any]) -> dict[str, Any]:
    """The storage options with the token that was kept for the URL's repository, if one was."""
    path = HubPath.of(url)
    token = None if path is None else token_of(path.repo_type, path.repo)
    return storage_options if token is None else {**storage_options, "token": token}


def token_names(urls: Iterable[str]) -> set[str]:
    """Under which names `gpuclassify.hub` has the tokens of these URLs."""
    paths = (HubPath.of(url) for url in urls)
    return {token_name(path.repo_type, path.repo) for path in paths if path is not None}


def pinned(urls: Iterable[str], storage_options: dict[str, Any]) -> list[str]:
    """The URLs with the commits that their revisions stand for now; other URLs as they are.

    Each revision is looked up once, so that all of the files are of one commit.

    Raises
    ------
    DatasetAccessError, DatasetMissingError, HubUnreachableError
        The Hub does not tell.
    """
    commits: dict[HubPath, str] = {}
    found = []
    for url in urls:
        path = HubPath.of(url)
        if path is None:
            found.append(url)
            continue
        whole = replace(path, path="")
        if _COMMIT.fullmatch(path.revision):
            commits[whole] = path.revision
        elif whole not in commits:
            commits[whole] = _commit_of(whole, with_token(url, storage_options))
        found.append(replace(path, revision=commits[whole]).url)
    return found


def is_pinned(url: str) -> bool:
    """Whether a URL names a file of the Hub at a commit."""
    path = HubPath.of(url)
    return path is not None and _COMMIT.fullmatch(path.revision) is not None


def _commit_of(path: HubPath, storage_options: dict[str, Any]) -> str:
    from huggingface_hub import HfApi

    api = HfApi(endpoint=storage_options.get("endpoint"), token=storage_options.get("token"))
    # Without sha alone, the answer would list every file.
    info = retried(
        path.repo,
        lambda: api.repo_info(
            path.repo,
            repo_type=path.repo_type,
            revision=path.revision,
            expand=["sha"],  # type: ignore[arg-type]
        ),
    )
    assert info.sha is not None, "a revision that exists has a commit"
    return info.sha


def listed(filesystem: Any, url: str, find: Callable[[], Found]) -> Found:
    """What `find` returns, which lists the file system for a URL; retried if that is of the Hub.

    The file system itself takes a Hub that is busy for a file that is not there.

    Raises
    ------
    DatasetAccessError, DatasetMissingError, HubUnreachableError
        The Hub does not tell.
    """
    path = HubPath.of(url)
    if path is None:
        return find()
    try:
        retried(path.repo, lambda: filesystem.resolve_path(url))
        with contextlib.suppress(DatasetMissingError):  # a pattern's folder may be a pattern
            retried(path.repo, lambda: filesystem.ls(filesystem._parent(url)))
        return asked(path.repo, find)
    except FileNotFoundError:
        filesystem.invalidate_cache()  # it would not look again
    # Raised out here, since the other error holds the request with its headers.
    raise DatasetMissingError(
        f"the Hub shows no {path.repo} at {path.revision}: check the spelling; a private "
        "repository needs a token that may read it, as storage_options or in HF_TOKEN"
    )


class PinnedFile(AbstractBufferedFile):
    """A file at a commit, opened without a request, since its size is known; for reading.

    Parameters
    ----------
    url : str
        With a commit.
    size_bytes : int
    filesystem : huggingface_hub.HfFileSystem
        Its end point and token are taken.
    ahead_bytes : int, optional
        How much to fetch beyond what is asked for. Default: all of a small file, `AHEAD_BYTES` of
        others.
    """

    def __init__(
        self, url: str, size_bytes: int, filesystem: Any, ahead_bytes: int | None = None
    ) -> None:
        path = HubPath.of(url)
        assert path is not None
        self._place = path
        is_whole = ahead_bytes is None and 0 < size_bytes <= WHOLE_FILE_BYTES
        super().__init__(
            filesystem,
            filesystem._strip_protocol(url),
            block_size=AHEAD_BYTES if ahead_bytes is None else ahead_bytes,
            cache_type="all" if is_whole else "readahead",
            size=size_bytes,
        )

    def readline(self) -> bytes:
        """As of any binary file."""
        return self.readuntil(b"\n", LINE_BYTES)  # whose default is all that is fetched ahead

    def _fetch_range(self, start: int, end: int) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

        place = self._place
        url = hf_hub_url(
            place.repo,
            place.path,
            repo_type=place.repo_type,
            revision=place.revision,
            endpoint=self.fs.endpoint,
        )
        headers = build_hf_headers(token=self.fs.token)
        headers |= {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}

        def fetch() -> bytes:
            response = http_backoff("GET", url, headers=headers, timeout=TIMEOUT_SECONDS)
            hf_raise_for_status(response)
            return response.content

        content = asked(place.repo, fetch)
        if len(content) != end - start:
            raise HubBusyError(f"{place.url} was cut off, or its store ignores byte ranges")
        return content
