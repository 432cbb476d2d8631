"""A job's files from where they are staged to the Hub: uploaded by workers, in one commit."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuclassify.hub.calls import TRIES, HubBusyError, HubRefusedError, ask, wait
from gpuclassify.jobs.execution import run_tasks
from gpuclassify.jobs.output.hub_target import Target
from gpuclassify.jobs.output.manifest import MANIFEST
from gpuclassify.jobs.output.records import parse_record
from gpuclassify.jobs.storage import Directory, Place

MOST_INSIDE_BYTES = 1 << 30  # of files that are not large and so travel inside of the commit


@dataclass(frozen=True)
class StagedFile:
    """A part of the output, and its name on the Hub.

    Attributes
    ----------
    name : str
        In the staging directory.
    path : str
        In the repository.
    digest : str
        SHA-256.
    """

    name: str
    path: str
    digest: str


def staged_files(directory: Directory, target: Target, suffix: str) -> list[StagedFile]:
    """The files of a finished job, except those without rows.

    If no file has rows, the first one stays, for its columns.
    """
    records = [parse_record(line) for line in directory.read(MANIFEST).splitlines()]
    whole = [record for record in records if record is not None]
    kept = [record for record in whole if record.rows_out] or whole[:1]
    return [
        StagedFile(record.name, target.name(number, len(kept), suffix), record.digest)
        for number, record in enumerate(kept)
    ]


def upload_and_commit(
    client: Any, files: Sequence[StagedFile], target: Target, staging: Place
) -> str:
    """Upload what the Hub lacks, and make all files visible at once.

    Workers read the staged files, and the Hub's store takes only those that it does not have.

    Parameters
    ----------
    client : distributed.Client or None
    files : sequence of StagedFile
    target : Target
    staging : Place

    Returns
    -------
    str
        A commit that has all files.

    Raises
    ------
    FileExistsError
        There are files of the same split that are not of this job.
    ValueError
        A staged file has changed, or more would travel inside of the commit than it takes.
    HubRefusedError, DatasetAccessError
        The Hub does not take the files.
    HubUnreachableError
        It does not answer, after several tries.
    """
    there = target.digests(target.head())
    digests = {file.path: file.digest for file in files}
    calls = ((file, target, staging) for file in files if there.get(file.path) != file.digest)
    additions, inside_bytes = [], 0
    for addition, digest in run_tasks(client, upload, calls):
        inside_bytes += len(addition.path_or_fileobj)
        if inside_bytes > MOST_INSIDE_BYTES:
            raise ValueError(
                f"more than {MOST_INSIDE_BYTES:,} bytes of files would travel inside of the "
                "commit: add a line such as '*.jsonl filter=lfs diff=lfs merge=lfs -text' to the "
                "repository's .gitattributes, or write Parquet"
            )
        additions.append(addition)
        digests[addition.path_in_repo] = digest
    return _commit(additions, digests, target)


def upload(file: StagedFile, target: Target, staging: Place) -> tuple[Any, str]:
    """Upload one file to the Hub's store, if it is a large one; on a worker.

    Returns
    -------
    huggingface_hub.CommitOperationAdd
        Without content if that is in the store.
    str
        Digest by which the Hub knows the content: SHA-256 of large files, Git's SHA-1 of others.
    """
    from huggingface_hub import CommitOperationAdd

    directory = staging.open()
    with _local(directory, file.name) as path:
        addition = CommitOperationAdd(file.path, path)
        if addition.upload_info.sha256.hex() != file.digest:
            raise ValueError(
                f"{directory}/{file.name} is not what the job wrote: run the same job again, which "
                "does this part anew, or start over (restart=True)"
            )
        with _without_bars():
            ask(target.repo, functools.partial(_preupload, addition, target), tries=1)
        if addition.path_or_fileobj == b"":
            return addition, file.digest
        content = Path(path).read_bytes()
    addition.path_or_fileobj = content  # of a small file, for the client to commit
    return addition, hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _preupload(addition: Any, target: Target) -> None:
    from huggingface_hub.errors import HTTPError

    try:
        target.api().preupload_lfs_files(
            target.repo,
            [addition],
            repo_type="dataset",
            revision=target.revision,
            num_threads=1,
            gitignore_content="\n",  # else the repository's own could leave files out silently
        )
    except RuntimeError as err:  # what the client library makes of an answer of the store
        if isinstance(err.__cause__, HTTPError):
            raise err.__cause__ from None
        raise


def _commit(additions: Sequence[Any], digests: dict[str, str], target: Target) -> str:
    """One commit of all files, whoever else commits, and although an answer may be lost."""
    from huggingface_hub import CommitOperationDelete

    for attempt in range(1, TRIES + 1):
        head = target.head()
        there = target.digests(head)
        foreign = target.foreign_files(there, digests)
        if not foreign and digests.items() <= there.items():
            return head  # by an earlier run, or by a try whose answer was lost
        removals = [CommitOperationDelete(path) for path in foreign if path not in digests]
        send = functools.partial(
            target.api().create_commit,
            target.repo,
            [*removals, *additions],
            commit_message=target.message or f"Add {len(digests)} files with gpuclassify",
            repo_type="dataset",
            revision=target.revision,
            parent_commit=head,
        )
        try:
            made = ask(target.repo, send, tries=1).oid
        except HubBusyError as err:
            if attempt == TRIES:
                raise
            wait(err, attempt)
            continue
        if not digests.items() <= target.digests(made).items():
            raise HubRefusedError(
                f"the commit {made} of {target.repo} lacks files that were there when this job "
                "began to upload: run the same job again"
            )
        return str(made)
    raise AssertionError("the last try returns or raises")


@contextlib.contextmanager
def _local(directory: Directory, name: str) -> Iterator[str]:
    """The path of a file's copy on this machine, or of the file itself."""
    if directory.is_local:
        yield directory.path(name)
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = str(Path(folder, "file"))
        directory.filesystem.get_file(directory.path(name), copy)
        yield copy


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """No progress bar for each of very many files."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            enable_progress_bars()
