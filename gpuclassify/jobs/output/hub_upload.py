"""Uploading a job's files from where they are staged to the Hub, on workers, each once."""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpuclassify.hub.calls import ask
from gpuclassify.hub.errors import HubRefusedError
from gpuclassify.jobs.execution import run_tasks
from gpuclassify.jobs.output.hub_target import Target
from gpuclassify.jobs.output.manifest import MANIFEST
from gpuclassify.jobs.output.records import BOOKS, Record, parse_record, stem_of
from gpuclassify.jobs.storage import Directory, open_directory
from gpuclassify.workers.secrets import recall

LARGE, REGULAR = "lfs", "regular"


@dataclass(frozen=True)
class StagedFile:
    """A part of the output, and what it is to be called on the Hub.

    Attributes
    ----------
    name : str
        In the staging directory.
    path : str
        In the repository.
    size_bytes : int
    digest : str
        SHA-256.
    """

    name: str
    path: str
    size_bytes: int
    digest: str


@dataclass(frozen=True)
class Staging:
    """Where a job's files lie.

    Attributes
    ----------
    path : str
        Absolute, or a URL.
    options_name : str
        Under which `gpuclassify.workers.secrets` knows the storage options.
    """

    path: str
    options_name: str

    @property
    def directory(self) -> Directory:
        """The directory, on any worker."""
        return open_directory(self.path, recall(self.options_name, {}))


def staged_files(directory: Directory, target: Target, suffix: str) -> list[StagedFile]:
    """The files of a job that is done, those without rows left out.

    If all of them are, the first one stays, for its columns.
    """
    records = list(_records(directory))
    records = [record for record in records if record.rows_out] or records[:1]
    return [
        StagedFile(
            record.name,
            target.name(number, len(records), suffix),
            record.file_bytes,
            record.digest,
        )
        for number, record in enumerate(records)
    ]


def upload_all(
    client: Any, files: Sequence[StagedFile], target: Target, staging: Staging
) -> dict[str, str]:
    """Upload what is not uploaded yet; how each file is stored, by its path in the repository.

    Large files are in the Hub's store then, and in no commit. Others, by the repository's
    ``.gitattributes``, travel inside of the commit.
    """
    directory, folder = staging.directory, _folder(target)
    directory.make(folder)
    there = directory.sizes(folder)
    notes = [file for file in files if f"{stem_of(file.name)}.json" in there]
    contents = directory.read_all([_note(file, target) for file in notes])
    modes = {}
    for file, content in zip(notes, contents, strict=True):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            noted = json.loads(content)
            if {**noted, "mode": None} == {**asdict(file), "mode": None}:
                modes[file.path] = noted["mode"]
    calls = ((file, target, staging) for file in files if file.path not in modes)
    modes.update(run_tasks(client, upload, calls))
    return modes


def upload(file: StagedFile, target: Target, staging: Staging) -> tuple[str, str]:
    """Upload one file, and note it beside the job's books; on a worker.

    Returns
    -------
    (str, str)
        Path in the repository, and `LARGE` or `REGULAR`.
    """
    from huggingface_hub import CommitOperationAdd

    directory = staging.directory
    with _local(directory, file.name) as path:
        operation = CommitOperationAdd(file.path, path)
        if operation.upload_info.sha256.hex() != file.digest:
            raise ValueError(f"{directory}/{file.name} is not what the job wrote: start over")
        send = functools.partial(
            target.api().preupload_lfs_files,
            target.repo,
            [operation],
            repo_type="dataset",
            revision=target.revision,
            create_pr=target.create_pr,
            num_threads=1,
        )
        with _without_bars():
            ask(target.repo, send, tries=1)
    mode = operation._upload_mode
    if operation._should_ignore or mode not in (LARGE, REGULAR):
        raise HubRefusedError(
            f"{target.repo} does not take {file.path}: its .gitignore names it; change that, or "
            "choose another path="
        )
    directory.replace(_note(file, target), json.dumps({**asdict(file), "mode": mode}).encode())
    return file.path, mode


def forget_uploads(directory: Directory, target: Target) -> None:
    """Let everything be uploaded anew."""
    folder = _folder(target)
    directory.remove(*(f"{folder}/{name}" for name in directory.sizes(folder)))


def addition(file: StagedFile, mode: str, directory: Directory) -> Any:
    """What a commit says of a file: of a large one that it is in the store, without content."""
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.lfs import UploadInfo

    if mode == REGULAR:
        return CommitOperationAdd(file.path, directory.read(file.name))
    operation = CommitOperationAdd(file.path, b"")
    operation.upload_info = UploadInfo(
        size=file.size_bytes, sample=b"", sha256=bytes.fromhex(file.digest)
    )
    operation._upload_mode = "lfs"
    operation._is_uploaded = True
    return operation


def _records(directory: Directory) -> Iterator[Record]:
    for line in directory.read(MANIFEST).splitlines():
        record = parse_record(line)
        assert record is not None, "a job that is done has whole records"
        yield record


@contextlib.contextmanager
def _local(directory: Directory, name: str) -> Iterator[str]:
    """The path of a file's copy on this machine, or of the file itself."""
    if directory.is_local:
        yield directory.path(name)
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "file")
        directory.filesystem.get_file(directory.path(name), str(copy))
        yield str(copy)


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """No progress bar for each of very many files."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _folder(target: Target) -> str:
    return f"{BOOKS}/uploads-{target.key}"


def _note(file: StagedFile, target: Target) -> str:
    return f"{_folder(target)}/{stem_of(file.name)}.json"
