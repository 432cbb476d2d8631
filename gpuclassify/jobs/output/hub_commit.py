"""One commit of all files, whatever the Hub answers, and whoever commits at the same time."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any

from gpuclassify.hub.calls import TRIES, ask, wait
from gpuclassify.hub.errors import HubBusyError, HubUnreachableError
from gpuclassify.jobs.output.hub_target import CARD, Target
from gpuclassify.jobs.output.hub_upload import REGULAR, StagedFile, addition
from gpuclassify.jobs.storage import Directory

MOST_REGULAR_BYTES = 1 << 30  # of what travels inside of a commit
# A busy Hub may name an old commit as the last one, again and again: then it is not asked to
# compare. Files of others stay even so.
TRIES_WITHOUT_PARENT = 2


def commit(
    files: Sequence[StagedFile], modes: dict[str, str], target: Target, directory: Directory
) -> str:
    """Make all files visible at once, unless they are already.

    Parameters
    ----------
    files : sequence of StagedFile
    modes : dict of str to str
        How each of them is stored; see `gpuclassify.jobs.output.hub_upload.upload_all`.
    target : Target
    directory : Directory
        Where they are staged.

    Returns
    -------
    str
        A commit that has all files; or the address of the pull request.

    Raises
    ------
    FileExistsError
        Files of the same split are there that are not of this job; see `Target.strangers`.
    ValueError
        More travels inside of the commit than it takes.
    HubRefusedError, DatasetAccessError
        The Hub does not take the commit.
    HubUnreachableError
        It took none after several tries.
    """
    ours = {file.path: _digest(file, modes[file.path], directory) for file in files}
    additions = _Additions(files, modes, directory)
    for attempt in range(1, TRIES + 1):
        head = target.head()
        there = target.digests(head)
        strangers = target.strangers(there, ours)
        if not strangers and all(there.get(path) == digest for path, digest in ours.items()):
            return head  # of an earlier run, or of a try whose answer was lost
        is_compared = attempt <= TRIES - TRIES_WITHOUT_PARENT
        operations = [*_removals(strangers, ours), *additions.make()]
        if is_compared and not target.has_card(head):
            operations.append(_card(target))
        try:
            return _send(operations, target, head if is_compared else None, len(files))
        except HubBusyError as err:
            if attempt == TRIES:
                raise
            _refuse_second_pull_request(err, target)
            wait(err, attempt)
    raise AssertionError("the last try returns or raises")


class _Additions:
    """Operations that add the files, made anew for each try: the client library changes them."""

    def __init__(
        self, files: Sequence[StagedFile], modes: dict[str, str], directory: Directory
    ) -> None:
        inside = sum(file.size_bytes for file in files if modes[file.path] == REGULAR)
        if inside > MOST_REGULAR_BYTES:
            raise ValueError(
                f"{inside:,} bytes of files would travel inside of the commit, which takes "
                f"{MOST_REGULAR_BYTES:,}: add a line such as '*.jsonl filter=lfs diff=lfs "
                "merge=lfs -text' to the repository's .gitattributes, or write Parquet"
            )
        self._files, self._modes, self._directory = files, modes, directory

    def make(self) -> list[Any]:
        return [addition(file, self._modes[file.path], self._directory) for file in self._files]


def _send(operations: list[Any], target: Target, parent: str | None, count: int) -> str:
    send = functools.partial(
        target.api().create_commit,
        target.repo,
        operations,
        commit_message=target.message or f"Add {count} files with gpuclassify",
        repo_type="dataset",
        revision=target.revision,
        create_pr=target.create_pr,
        parent_commit=parent,
    )
    made = ask(target.repo, send, tries=1)
    return str(made.pr_url or made.oid)


def _removals(strangers: list[str], ours: dict[str, str]) -> list[Any]:
    from huggingface_hub import CommitOperationDelete

    return [CommitOperationDelete(path) for path in strangers if path not in ours]


def _refuse_second_pull_request(err: HubBusyError, target: Target) -> None:
    """A pull request that may have been opened is not opened again."""
    if target.create_pr and err.status not in (409, 412, 429, 503):
        raise HubUnreachableError(
            f"{err}: the pull request may have been opened all the same; look there before "
            "running the job again, which would open another one"
        )


def _digest(file: StagedFile, mode: str, directory: Directory) -> str:
    """What the Hub is going to tell of the file."""
    if mode != REGULAR:
        return file.digest
    return hashlib.sha1(b"blob %d\0" % file.size_bytes + directory.read(file.name)).hexdigest()


def _card(target: Target) -> Any:
    """A dataset card that tells loaders where the files are."""
    from huggingface_hub import CommitOperationAdd

    text = (
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        f"  - split: {target.split}\n    path: {json.dumps(target.pattern)}\n---\n\n"
        f"# {target.repo.rpartition('/')[2]}\n\nWritten with gpuclassify.\n"
    )
    return CommitOperationAdd(CARD, text.encode())
