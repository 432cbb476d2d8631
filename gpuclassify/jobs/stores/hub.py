"""Files in repositories of the Hub: revisions pinned to commits, few requests, no secrets."""

from __future__ import annotations

import functools
import glob
import posixpath
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from gpuclassify.hub.calls import DatasetMissingError, ask, retried
from gpuclassify.hub.identity import is_commit
from gpuclassify.jobs.stores.names import redacted
from gpuclassify.jobs.stores.store import LINE_BYTES, READ_TRIES, CutShortError, Entry, Store
from gpuclassify.workers.secrets import (
    TokenName,
    remember_token,
    share_tokens_with_workers,
    token_for,
    token_name,
)

if TYPE_CHECKING:
    from huggingface_hub import HfUri

SCHEME = "hf://"
# The Hub limits requests, not bytes: a file of at most this size is read in one request.
WHOLE_FILE_BYTES = 8 << 20
AHEAD_BYTES = 8 << 20
TIMEOUT_SECONDS = 60


def hub_uri(url: str) -> HfUri | None:
    """Parse the ``hf://`` URL of a repository of the Hub; return None for any other URL.

    The revision is "main" if the URL has none. Raises ValueError if the URL is malformed.
    """
    if not url.startswith(SCHEME):
        return None
    from huggingface_hub import parse_hf_uri

    uri = parse_hf_uri(url.rstrip("/"))
    return None if uri.is_bucket else replace(uri, revision=uri.revision or "main")


def keep_tokens(urls: Iterable[str], storage_options: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of fsspec options with the Hub token replaced by a name that is not secret.

    The token is kept in this process's memory. Without a repository in `urls`, nothing changes.
    """
    token, names = storage_options.get("token"), _token_names(urls)
    if not names or not isinstance(token, str):
        return dict(storage_options)
    for name in names:
        remember_token(name, token)
    return storage_options | {"token": token_name(min(names))}


def share_tokens(urls: Iterable[str]) -> None:
    """Send the tokens kept for Hub repositories in `urls` to the current client's workers."""
    share_tokens_with_workers(_token_names(urls))


def _token_names(urls: Iterable[str]) -> set[str]:
    return {_token_name(uri) for url in urls if (uri := hub_uri(url)) is not None}


def _token_name(uri: HfUri) -> str:
    return uri.id if uri.type == "model" else f"{uri.type}s/{uri.id}"


class BucketStore(Store):
    """Read-only access to files in a storage bucket of the Hub (``hf://buckets/``)."""

    is_flat = True
    is_writable = False

    @property
    def storage_options(self) -> dict[str, Any]:
        """Storage options for fsspec; a name that stands for a Hub token becomes the token."""
        name = self._given_options.get("token")
        token = {"token": token_for(name)} if isinstance(name, TokenName) else {}
        return super().storage_options | token

    @classmethod
    def check_output(cls, url: str) -> None:
        """Raise ValueError for every URL: jobs cannot write to the Hub directly, file by file."""
        raise ValueError(
            f"{redacted(url)}: on the Hub, each file would be a commit of its own; "
            'HubWriter("OWNER/NAME", staging="out/") makes one of all'
        )


class HubStore(BucketStore):
    """Read-only access to files in a repository of the Hub, at a branch, tag or commit."""

    explains_itself = True
    has_commits = True

    @functools.cached_property
    def uri(self) -> HfUri:
        """URL, parsed into repository, revision and path."""
        uri = hub_uri(self.url)
        assert uri is not None, "the URL of a repository"
        return uri

    @property
    def is_fixed(self) -> bool:
        """Whether the URL's revision is a commit hash, so that the files cannot change."""
        return is_commit(self.uri.revision)

    @property
    def storage_options(self) -> dict[str, Any]:
        """Storage options for fsspec, with the token that this process keeps if they have none."""
        options, token = super().storage_options, token_for(_token_name(self.uri))
        return options if token is None or options.get("token") else options | {"token": token}

    def pin(self, commits: dict[Any, str]) -> HubStore:
        """Return a store for the same path at its commit, or the current one of its branch or tag.

        `commits` caches the commit hash by repository and revision, and is updated.
        """
        revision = self.uri.revision or ""
        if self.is_fixed and revision == revision.lower():
            return self
        repo = replace(self.uri, path_in_repo="")
        if repo not in commits:
            commits[repo] = revision.lower() if self.is_fixed else self._current_commit()
        return replace(self, url=replace(self.uri, revision=commits[repo]).to_uri())

    def _current_commit(self) -> str:
        from huggingface_hub import HfApi

        repo, options = self.uri, self.storage_options
        api = HfApi(endpoint=options.get("endpoint"), token=options.get("token"))

        def look_up() -> str | None:
            # Without sha alone, the answer would list every file.
            expand: Any = ["sha"]
            return api.repo_info(
                repo.id, repo_type=repo.type, revision=repo.revision, expand=expand
            ).sha

        commit = ask(repo.id, look_up)
        assert commit is not None, "a revision that exists has a commit"
        return commit

    def entries(self) -> list[Entry] | None:
        """List the file, the files below a folder, or a glob pattern's matches; None if none exist.

        Raises DatasetMissingError if the parent folder does not exist. It is listed first, because
        `_entries_of` would mistake errors of a busy Hub for a missing file.
        """
        path = posixpath.dirname(self.uri.path_in_repo)
        while glob.has_magic(path):
            path = posixpath.dirname(path)
        folder = replace(self.uri, path_in_repo=path).to_uri()
        try:
            ask(self.uri.id, lambda: self.filesystem.ls(folder))
            return ask(self.uri.id, lambda: self._entries_of(self.root), tries=1)
        except FileNotFoundError:
            self.filesystem.invalidate_cache()  # else a retry would get the cached answer
        # Raised outside of `except`: as its context, that error would keep the request's headers.
        raise DatasetMissingError(
            f"the Hub shows no {folder}: check the spelling; a private "
            "repository needs a token that may read it, as storage_options or in HF_TOKEN"
        )

    def open(self, size_bytes: int | None, ahead_bytes: int | None) -> Any:
        """Open the file for reading bytes; a file of known size at a commit needs no request.

        `ahead_bytes` is used only for such a file: see `PinnedFile`.
        """
        if size_bytes is not None and self.is_fixed:
            return PinnedFile(self.uri, size_bytes, self.filesystem, ahead_bytes)
        return super().open(size_bytes, ahead_bytes)


class PinnedFile(AbstractBufferedFile):
    """Readable file at a commit of the Hub; opening it needs no request, because its size is known.

    `ahead_bytes` is the number of bytes to read ahead. By default, a file up to `WHOLE_FILE_BYTES`
    is read at once, and `AHEAD_BYTES` at a time of a larger one.
    """

    def __init__(
        self,
        uri: HfUri,
        size_bytes: int,
        filesystem: AbstractFileSystem,
        ahead_bytes: int | None = None,
    ) -> None:
        self._uri = uri
        is_whole = ahead_bytes is None and 0 < size_bytes <= WHOLE_FILE_BYTES
        super().__init__(
            filesystem,
            uri.to_uri().removeprefix(SCHEME),
            block_size=AHEAD_BYTES if ahead_bytes is None else ahead_bytes,
            cache_type="all" if is_whole else "readahead",
            size=size_bytes,
        )

    def readline(self) -> bytes:
        """Return the next line with its newline, or b"" at the end of the file."""
        return self.readuntil(b"\n", LINE_BYTES)  # the default is the whole read-ahead

    def _fetch_range(self, start: int, end: int) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

        uri = self._uri
        url = hf_hub_url(
            uri.id,
            uri.path_in_repo,
            repo_type=uri.type,
            revision=uri.revision,
            endpoint=self.fs.endpoint,
        )
        headers = build_hf_headers(token=self.fs.token)
        headers |= {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}

        def fetch() -> bytes:
            response = http_backoff("GET", url, headers=headers, timeout=TIMEOUT_SECONDS)
            hf_raise_for_status(response)
            if len(response.content) != end - start:
                raise CutShortError(f"{uri.to_uri()} was cut off, or its store ignores byte ranges")
            return response.content

        def is_cut(err: Exception) -> bool:  # http_backoff has retried other errors
            return isinstance(err, CutShortError)

        return retried(lambda: ask(uri.id, fetch, tries=1), is_cut, tries=READ_TRIES)
