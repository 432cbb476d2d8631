"""A dataset repository of the Hugging Face Hub as the output of a job, in one commit."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

from gpuclassify.jobs.files import JSONL, PARQUET
from gpuclassify.jobs.output.hub_target import MAIN, MOST_FILES, Target
from gpuclassify.jobs.output.hub_upload import staged_files, upload_and_commit
from gpuclassify.jobs.output.manifest import SUCCESS
from gpuclassify.jobs.output.records import sealed, unsealed
from gpuclassify.jobs.output.run_key import METADATA
from gpuclassify.jobs.output.writers import JSONL_COMPRESSIONS, PARQUET_COMPRESSIONS, FileWriter
from gpuclassify.jobs.storage import Place
from gpuclassify.jobs.stores import redacted
from gpuclassify.settings.checks import check_choice
from gpuclassify.settings.options import NON_FINITE
from gpuclassify.workers.secrets import (
    remember,
    remember_token,
    share_tokens_with_workers,
    share_with_workers,
)

_SPLIT = re.compile(r"\w+(\.\w+)*")  # what loaders of datasets take for one


class HubWriter(FileWriter):
    """Files in a dataset repository of the Hugging Face Hub, all in one commit at the end.

    The job writes its parts to `staging` first, as any other job does, so that a lost client loses
    no work. Then workers upload the files, and the client makes one commit. Running the same job
    again computes and uploads only what is missing (workers read the staged files, and send those
    that the Hub's store lacks), and does nothing when the commit is made.

    Parameters
    ----------
    repo : str
        ``"OWNER/NAME"``; created if it is not there.
    staging : str
        Directory that all workers see, or fsspec URL of one. It may be removed afterwards.
    path : str
        Folder in the repository.
    split : str
        Files are called ``{split}-00012-of-00128.parquet``. Parts without rows are left out.
    revision : str
        Branch; created if it is not there.
    private : bool, optional
        Whether a repository that is created is private. Default: its owner's setting.
    token : str, optional
        That may write. Kept in memory alone, and sent to workers directly. Default: HF_TOKEN or
        the Hub login, which workers on other machines need too.
    overwrite : bool
        Replace files of the same split, and remove those that this job does not write; in the same
        commit. Other files always stay.
    commit_message : str, optional
    file_format : {"parquet", "jsonl"}
    compression : str, optional
        As of `ParquetWriter` and `JsonlWriter`. Default: zstd for Parquet, none for JSON lines.
    non_finite : {"null", "literal", "string"}
        As of `JsonlWriter`.
    endpoint : str, optional
        Address of the Hub. Default: HF_ENDPOINT, or huggingface.co.
    storage_options : dict, optional
        For `staging`.

    Raises
    ------
    ValueError
        A name or format is none that the Hub takes.
    """

    def __init__(
        self,
        repo: str,
        *,
        staging: str,
        path: str = "data",
        split: str = "train",
        revision: str = MAIN,
        private: bool | None = None,
        token: str | None = None,
        overwrite: bool = False,
        commit_message: str | None = None,
        file_format: str = PARQUET,
        compression: str | None = None,
        non_finite: str = NON_FINITE[0],
        endpoint: str | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        from huggingface_hub import constants

        check_choice("file_format", file_format, (PARQUET, JSONL))
        is_parquet = file_format == PARQUET
        self.file_format = file_format
        self.compressions = PARQUET_COMPRESSIONS if is_parquet else JSONL_COMPRESSIONS
        super().__init__(
            staging,
            compression=compression,
            storage_options=storage_options,
            non_finite=non_finite,
        )
        _check_names(repo, path, split)
        if token is not None:
            remember_token(f"datasets/{repo}", token)
        self.target = Target(
            repo,
            path.strip("/"),
            split,
            revision,
            endpoint or constants.ENDPOINT,
            private=private,
            overwrite=overwrite,
            message=commit_message,
        )

    def __repr__(self) -> str:
        target = self.target
        names = ("path", "split", "revision", "private", "overwrite", "endpoint")
        options = {"staging": redacted(self.path)} | {n: getattr(target, n) for n in names}
        options |= {"commit_message": target.message, "file_format": self.file_format}
        options |= {name: getattr(self.encoding, name) for name in ("compression", "non_finite")}
        shown = ", ".join(f"{name}={value!r}" for name, value in options.items())
        return f"HubWriter({target.repo!r}, {shown})"

    @property
    def keeps_index(self) -> bool:
        """Never: datasets have none."""
        return False

    def check(self, parts: int) -> None:
        """Raise unless so many parts may go there, as far as a look at it can show.

        Raises
        ------
        ValueError
            They are more than one commit and one folder take.
        FileExistsError
            Files of the same split are there, and `overwrite` is false.
        DatasetAccessError, HubUnreachableError
            The Hub does not let in, or does not answer.
        """
        if parts > MOST_FILES:
            raise ValueError(
                f"{parts:,} parts are more files than a folder of the Hub takes, {MOST_FILES:,}: "
                "make parts larger (part_bytes=), or repartition the frame"
            )
        directory = self.directory
        if not directory.filesystem.exists(directory.path(SUCCESS)):
            self.target.check(self._noted().get("files", {}))

    def is_uploaded(self) -> bool:
        """Whether an earlier run has made the commit of what is staged."""
        files = staged_files(self.directory, self.target, self.encoding.suffix)
        return self._commit_of({file.path: file.digest for file in files}) is not None

    def upload(self, client: Any, *, restart: bool = False) -> str:
        """Upload and commit what the job has written.

        Parameters
        ----------
        client : distributed.Client or None
        restart : bool
            Ask the Hub even if an earlier run has made the commit.

        Returns
        -------
        str
            Address of the commit.

        Raises
        ------
        FileExistsError, DatasetAccessError, HubRefusedError, HubUnreachableError
            What is staged and uploaded stays: run the same job again.
        """
        directory, target = self.directory, self.target
        files = staged_files(directory, target, self.encoding.suffix)
        digests = {file.path: file.digest for file in files}
        if restart:
            directory.remove(self._note)
        elif (earlier := self._commit_of(digests)) is not None:
            return self._address(earlier)
        staging = Place(
            directory.root if directory.is_local else self.path, f"staging {redacted(self.path)}"
        )
        remember(staging.options_name, self.storage_options)
        with contextlib.nullcontext() if client is None else client.as_current():
            if client is not None:
                share_with_workers([staging.options_name])
                share_tokens_with_workers([f"datasets/{target.repo}"])
            target.make()
            commit = upload_and_commit(client, files, target, staging)
        content = json.dumps({"commit": commit, "files": digests})
        directory.replace(self._note, sealed(content.encode()))
        return self._address(commit)

    @property
    def _note(self) -> str:
        """The file that says which commit was made."""
        return f"{METADATA}/commit-{self.target.key}.json"

    def _noted(self) -> dict[str, Any]:
        """The commit that an earlier run has made, and its files' digests."""
        with contextlib.suppress(FileNotFoundError):
            return unsealed(self.directory.read(self._note)) or {}
        return {}

    def _commit_of(self, digests: dict[str, str]) -> str | None:
        """The commit that was made of these files, by their digests."""
        noted = self._noted()
        return noted["commit"] if noted.get("files") == digests else None

    def _address(self, commit: str) -> str:
        return f"{self.target.endpoint}/datasets/{self.target.repo}/commit/{commit}"


def _check_names(repo: str, path: str, split: str) -> None:
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(repo)
    if repo.count("/") != 1:
        raise ValueError(f"{repo!r} is no name of a repository: pass OWNER/NAME")
    if not _SPLIT.fullmatch(split):
        raise ValueError(f"split={split!r}: pass letters, digits and underscores, such as 'train'")
    if path.strip("/") and {"", ".", ".."} & {*path.strip("/").split("/")}:
        raise ValueError(f"path={path!r} is no folder of a repository: pass one such as 'data'")
