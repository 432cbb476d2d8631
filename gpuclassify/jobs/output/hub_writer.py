"""A dataset repository of the Hugging Face Hub as the output of a job, in one commit."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from typing import Any

from gpuclassify.checks import check_choice
from gpuclassify.hub import share_tokens_with_workers
from gpuclassify.hub.datasets import HubRefusedError, keep_token, token_name
from gpuclassify.jobs.access import remember_options, share_options_with_workers
from gpuclassify.jobs.files import JSONL, PARQUET, redacted
from gpuclassify.jobs.output.hub_commit import commit
from gpuclassify.jobs.output.hub_target import MAIN, MOST_FILES, Target
from gpuclassify.jobs.output.hub_upload import (
    StagedFile,
    Staging,
    forget_uploads,
    staged_files,
    upload_all,
)
from gpuclassify.jobs.output.manifest import SUCCESS
from gpuclassify.jobs.output.records import BOOKS
from gpuclassify.jobs.output.writers import JSONL_COMPRESSIONS, PARQUET_COMPRESSIONS, FileWriter
from gpuclassify.jobs.storage import Directory

logger = logging.getLogger(__name__)

_SPLIT = re.compile(r"\w+(\.\w+)*")  # what loaders of datasets take for one


class HubWriter(FileWriter):
    """Files in a dataset repository of the Hugging Face Hub, all in one commit at the end.

    The job writes its parts to `staging` first, as any other job does, so that a lost client loses
    no work. Then workers upload the files, and the client makes one commit. Running the same job
    again computes and uploads only what is missing, and does nothing when the commit is made.

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
        Of a repository that is created. Default: what its owner has chosen.
    token : str, optional
        That may write. Kept in memory alone, and handed to workers directly. Default: HF_TOKEN or
        the Hub login, which workers on other machines need too.
    create_pr : bool
        Open a pull request instead of committing to the branch; the repository must be there.
    overwrite : bool
        Replace files of the same split, and remove those that this job does not write; in the same
        commit. Other files always stay.
    commit_message : str, optional
    file_format : {"parquet", "jsonl"}
    compression : str, optional
        As of `ParquetWriter` and `JsonlWriter`. Default: zstd for Parquet, none for JSON lines.
    endpoint : str, optional
        Address of the Hub. Default: HF_ENDPOINT, or huggingface.co.
    storage_options : dict, optional
        For `staging`.
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
        create_pr: bool = False,
        overwrite: bool = False,
        commit_message: str | None = None,
        file_format: str = PARQUET,
        compression: str | None = None,
        endpoint: str | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        check_choice("file_format", file_format, (PARQUET, JSONL))
        is_parquet = file_format == PARQUET
        self.file_format = file_format
        self.compressions = PARQUET_COMPRESSIONS if is_parquet else JSONL_COMPRESSIONS
        if compression is None and is_parquet:
            compression = "zstd"
        super().__init__(staging, compression=compression, storage_options=storage_options)
        _check_names(repo, path, split)
        if create_pr and revision != MAIN:
            raise ValueError(f"a pull request goes to main: leave out revision={revision!r}")
        keep_token("dataset", repo, token)
        self.target = Target(
            repo,
            path.strip("/"),
            split,
            revision,
            endpoint or _endpoint(),
            private=private,
            create_pr=create_pr,
            overwrite=overwrite,
            message=commit_message,
        )

    def __repr__(self) -> str:
        target = self.target
        shown = [f"{target.repo!r}", f"staging={redacted(self.path)!r}"]
        shown += [f"{name}={getattr(target, name)!r}" for name in ("path", "split", "revision")]
        shown.append(f"file_format={self.file_format!r}")
        return f"HubWriter({', '.join(shown)})"

    @property
    def keeps_index(self) -> bool:
        """Never: datasets have none."""
        return False

    def check(self, parts: int) -> None:
        """Raise unless so many parts may go there, as far as looking tells.

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
                "make parts larger (part_bytes=, --part-size), or repartition the frame"
            )
        directory = self.directory
        if not directory.filesystem.exists(directory.path(SUCCESS)):
            self.target.check()

    def publish(self, client: Any, *, restart: bool = False) -> str:
        """Upload and commit what the job has written; returns where it is.

        Raises
        ------
        FileExistsError, DatasetAccessError, HubRefusedError, HubUnreachableError
            What is staged and uploaded stays: run the same job again.
        """
        directory, target = self.directory, self.target
        files = staged_files(directory, target, self.encoding.suffix)
        if restart:
            directory.remove(self._note)
        done = self._committed(directory, files)
        if done is None:
            target.make()
            done = self._upload_and_commit(client, directory, files)
            note = {"commit": done, "files": _digests(files)}
            directory.replace(self._note, json.dumps(note, indent=1).encode())
        if "://" in done:
            return done
        return f"{target.endpoint}/datasets/{target.repo}/commit/{done}"

    @property
    def _note(self) -> str:
        return f"{BOOKS}/commit-{self.target.key}.json"

    def _committed(self, directory: Directory, files: list[StagedFile]) -> str | None:
        """The commit that an earlier run made of the same files."""
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
            note = json.loads(directory.read(self._note))
            return note["commit"] if note["files"] == _digests(files) else None
        return None

    def _upload_and_commit(self, client: Any, directory: Directory, files: list[StagedFile]) -> str:
        target = self.target
        path = directory.root if directory.is_local else self.path
        staging = Staging(path, f"staging {redacted(self.path)}")
        remember_options(staging.options_name, self.storage_options)
        with contextlib.nullcontext() if client is None else client.as_current():
            if client is not None:
                share_options_with_workers(client, [staging.options_name])
                share_tokens_with_workers([token_name("dataset", target.repo)])
            modes = upload_all(client, files, target, staging)
            try:
                return commit(files, modes, target, directory)
            except HubRefusedError as err:
                # The store need not keep for ever what no commit names.
                logger.warning("the files are uploaded once more: %s", err)
                forget_uploads(directory, target)
                return commit(files, upload_all(client, files, target, staging), target, directory)


def _digests(files: list[StagedFile]) -> dict[str, str]:
    return {file.path: file.digest for file in files}


def _check_names(repo: str, path: str, split: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as err:
        raise ValueError(f"{repo!r} is no name of a repository: {err}") from err
    if repo.count("/") != 1:
        raise ValueError(f"{repo!r} is no name of a repository: pass OWNER/NAME")
    if not _SPLIT.fullmatch(split):
        raise ValueError(f"split={split!r}: pass letters, digits and underscores, such as 'train'")
    if any(step in ("", ".", "..") for step in path.strip("/").split("/")) and path.strip("/"):
        raise ValueError(f"path={path!r} is no folder of a repository: pass one such as 'data'")


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT
