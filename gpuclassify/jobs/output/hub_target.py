"""A folder of a dataset repository: the names of its files, what is there, and what may be."""

from __future__ import annotations

import functools
import hashlib
import json
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuclassify.hub.calls import DatasetAccessError, DatasetMissingError, ask
from gpuclassify.jobs.files import file_format
from gpuclassify.workers.secrets import token_for

MAIN = "main"
MOST_FILES = 10_000  # the Hub's limit for entries of a folder; of large files it takes 25,000


@dataclass(frozen=True)
class Target:
    """A folder of a dataset repository.

    Attributes
    ----------
    repo : str
        OWNER/NAME.
    path : str
        Folder in the repository; empty for its root.
    split : str
        Which names of files begin with.
    revision : str
        Branch.
    endpoint : str
        Address of the Hub.
    private : bool, optional
        Whether a repository that is created is private.
    overwrite : bool
        Whether files of the same split that are there are replaced and removed.
    message : str, optional
        Commit message.
    """

    repo: str
    path: str
    split: str
    revision: str
    endpoint: str
    private: bool | None = None
    overwrite: bool = False
    message: str | None = None

    @property
    def key(self) -> str:
        """A short digest that differs between targets."""
        place = [self.endpoint, self.repo, self.revision, self.path, self.split]
        return hashlib.sha256(json.dumps(place).encode()).hexdigest()[:8]

    def name(self, number: int, count: int, suffix: str) -> str:
        """The path of the file with a number, as loaders of datasets expect it."""
        return posixpath.join(self.path, f"{self.split}-{number:05d}-of-{count:05d}{suffix}")

    def api(self) -> Any:
        """The client library's `HfApi`, with the token that this process knows."""
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint, token=token_for(f"datasets/{self.repo}"))

    def head(self) -> str:
        """The branch's last commit.

        Raises
        ------
        DatasetAccessError, DatasetMissingError, HubUnreachableError
            There is no such repository or branch, or the Hub does not answer.
        """
        api = self.api()
        return ask(
            self.repo,
            lambda: api.dataset_info(self.repo, revision=self.revision, expand=["sha"]).sha,
        )

    def make(self) -> None:
        """Create the repository and the branch, unless they are there."""
        api = self.api()
        make_repo = functools.partial(api.create_repo, private=self.private)
        ask(self.repo, lambda: make_repo(self.repo, repo_type="dataset", exist_ok=True))
        if self.revision != MAIN:
            make_branch = functools.partial(api.create_branch, branch=self.revision)
            ask(self.repo, lambda: make_branch(self.repo, repo_type="dataset", exist_ok=True))

    def digests(self, commit: str) -> dict[str, str]:
        """The folder's files at a commit: SHA-256 of large files, Git's SHA-1 of others."""
        api = self.api()

        def list_folder() -> dict[str, str]:
            from huggingface_hub import RepoFile

            entries = api.list_repo_tree(
                self.repo, self.path or None, revision=commit, repo_type="dataset"
            )
            return {
                entry.path: entry.lfs.sha256 if entry.lfs else entry.blob_id
                for entry in entries
                if isinstance(entry, RepoFile)
            }

        try:
            return ask(self.repo, list_folder)
        except DatasetMissingError:
            return {}  # no such folder

    def foreign_files(self, there: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
        """Files of the same split that differ from ours.

        Parameters
        ----------
        there, ours : mapping of str to str
            Digests by path.

        Raises
        ------
        FileExistsError
            There are some, and `overwrite` is false.
        """
        names = re.compile(f"{re.escape(self.split)}-[^/]*")
        found = [
            path
            for path, digest in sorted(there.items())
            if names.fullmatch(posixpath.basename(path))
            and file_format(path) is not None
            and ours.get(path) != digest
        ]
        if found and not self.overwrite:
            raise FileExistsError(
                f"{self.repo} at {self.revision} has {len(found)} files of the split "
                f"{self.split!r} that are not of this job, such as {found[0]}: choose another "
                "path= or split=, or replace them (overwrite=True)"
            )
        return found

    def check(self, ours: Mapping[str, str]) -> None:
        """Raise unless an upload may go here; only reads.

        Parameters
        ----------
        ours : mapping of str to str
            Digests by path of what an earlier run of the job has uploaded.

        Raises
        ------
        FileExistsError
            See `foreign_files`.
        DatasetAccessError
            The repository is not there, and there is no token to create it with.
        """
        from huggingface_hub import get_token

        try:
            there = self.digests(self.head())
        except DatasetMissingError:
            return  # a branch that will be created
        except DatasetAccessError as err:
            if (
                err.status == 404
                and (token_for(f"datasets/{self.repo}") or get_token()) is not None
            ):
                return  # a repository that will be created
            raise
        self.foreign_files(there, ours)
