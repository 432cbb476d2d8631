"""A dataset repository of the Hugging Face Hub as the output of a job, in one commit."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import posixpath
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.utils import glob_translate

from gpuclassify.hub.calls import (
    TRIES,
    DatasetAccessError,
    DatasetMissingError,
    HubBusyError,
    HubRefusedError,
    ask,
    is_busy,
    retried,
)
from gpuclassify.hub.identity import is_commit
from gpuclassify.jobs.execution import run_tasks
from gpuclassify.jobs.ledger.manifest import MANIFEST, REPORTS, SUCCESS
from gpuclassify.jobs.ledger.records import METADATA, parse_record, sealed, unsealed
from gpuclassify.jobs.output.writers import FileWriter
from gpuclassify.jobs.provenance import FRONT, HEADING, with_section
from gpuclassify.jobs.stores.names import PARQUET, file_format, redacted
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.jobs.stores.store import Store
from gpuclassify.pages import markdown
from gpuclassify.settings.declared import declared, setting
from gpuclassify.workers.secrets import (
    remember_token,
    share_tokens_with_workers,
    share_with_workers,
    token_for,
    token_name,
)

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)

MAIN = "main"
MOST_FILES = 10_000  # the Hub's limit of entries per folder
MOST_INSIDE_BYTES = 1 << 30  # limit of all small files together, which are sent in the commit
CARD = "README.md"
MOST_CARD_BYTES = 1 << 20  # limit of the section in the card
# Arrow types that `datasets` names differently, and its types that may have any Arrow type.
_DTYPES = {"double": "float64", "float": "float32", "halffloat": "float16"}
_OPAQUE = ("image", "audio", "video", "pdf", "json")
_SPLIT = re.compile(r"\w+(\.\w+)*")  # names that loaders of datasets accept


@declared
class HubWriter(FileWriter):
    """Writer of files in a dataset repository of the Hugging Face Hub, in one commit at the end.

    The job writes its parts (slices of the input that are processed as one unit) to `staging`
    first, like any other job, so that a lost client loses no work. Then workers upload the files,
    and the client makes one commit. Running the same job again computes and uploads only missing
    files, and does nothing once the commit is made.

    The commit adds a section to the dataset card: for each new column the class, model, commit,
    licence, citation, settings and distribution; the names and digests of annotation sets (outputs
    of `AnnotationWriter`) that were read; and the conditions by which rows were kept. The rest
    of the card stays.

    Parameters
    ----------
    repo : str
        ``"OWNER/NAME"``; created if it does not exist.
    staging : str
        Directory that all workers see, or fsspec URL of one. It may be removed afterwards.
    path : str
        Folder in the repository.
    split : str
        Split, such as "train". Files are called ``{split}-00012-of-00128.parquet``. Parts without
        rows are left out.
    revision : str
        Branch; created if it does not exist.
    private : bool, optional
        Whether a new repository is private. Default: its owner's setting.
    token : str, optional
        Token with write access; kept in memory only, and sent to workers directly. Default:
        HF_TOKEN or the Hub login, which workers on other machines need too.
    overwrite : bool
        Replace all files of the split in the same commit. Other files always stay.
    commit_message : str, optional
        Title of the commit. Default: "Add N files with gpuclassify".
    file_format : {"parquet", "jsonl"}
        Format of the files.
    compression : str, optional
        Codec of `ParquetWriter` or `JsonlWriter`. Default: zstd for Parquet, none for JSON lines.
    output_bytes : int
        Size of the files into which neighbouring parts are joined; 0 makes a file of each part.
    endpoint : str, optional
        Address of the Hub. Default: HF_ENDPOINT, or huggingface.co.
    storage_options : dict, optional
        fsspec options for `staging`.
    annotates : bool
        Write only new columns, as `AnnotationWriter` does. ``annotations=`` of readers takes the
        directory `staging`, not the repository. Files that come later need another directory.

    Raises
    ------
    ValueError
        The Hub does not accept a name, or the format is not Parquet with `annotates`.
    """

    repo: str = setting(kw_only=False)
    staging: str = setting()
    path: str = setting(default="data")
    split: str = "train"
    revision: str = MAIN
    private: bool | None = None
    token: InitVar[str | None] = None
    overwrite: bool = False
    commit_message: str | None = None
    file_format: Literal["parquet", "jsonl"] = setting(default=PARQUET)
    partition_by: None = field(default=None, init=False)
    endpoint: str | None = None
    annotates: bool = False

    def __post_init__(self, token: str | None) -> None:
        super().__post_init__()
        if token is not None:
            remember_token(f"datasets/{self.repo}", token)

    def check_together(self) -> None:
        """Check repository, path, split and format; set defaults of compression and endpoint."""
        from huggingface_hub import constants

        super().check_together()
        if self.annotates and self.file_format != PARQUET:
            raise ValueError(f"file_format={self.file_format!r}: annotations are Parquet files")
        _check_names(self.repo, self.path, self.split)
        self._set("endpoint", self.endpoint or constants.ENDPOINT)

    def settings(self) -> dict[str, Any]:
        """Return the constructor's arguments by name, without token, options and URL secrets."""
        return super().settings() | {"staging": redacted(self.staging)}

    @property
    def address(self) -> str:
        """Path or URL of the staging directory."""
        return self.staging

    @property
    def target(self) -> Target:
        """Folder and split of the dataset repository to upload to."""
        return Target(
            self.repo,
            self.path.strip("/"),
            self.split,
            self.revision,
            str(self.endpoint),
            private=self.private,
            overwrite=self.overwrite,
            message=self.commit_message,
            token_name=token_name(f"datasets/{self.repo}"),
        )

    @property
    def keeps_index(self) -> bool:
        """Whether a dataframe's index is written: always False, because datasets have no index."""
        return False

    def check(self, parts: int) -> None:
        """Raise an error if the Hub would refuse the upload, as far as that can be known now.

        Nothing is written. Raises ValueError for too many files, FileExistsError if the split has
        files that this job did not write and `overwrite` is false, and Hub errors if the repository
        cannot be read. The Hub is not asked if the files in `staging` are complete.
        """
        if not self.output_bytes:
            _check_count(parts)
        if not self.directory.has(SUCCESS):
            self.target.check(self._read_commit().get("files", {}))

    def is_uploaded(self) -> bool:
        """Return whether an earlier run has committed exactly the files that are in `staging`."""
        files = staged_files(self.directory, self.target, self.encoding.suffix)
        return self._earlier_commit({file.path: file.digest for file in files}) is not None

    def upload(self, client: Client | None, *, restart: bool = False) -> str:
        """Upload the files in `staging`, add them in one commit, and return the commit's URL.

        If an earlier run has committed the same files, nothing is sent, unless `restart` is true.
        After a failure, run the same job again. Raises ValueError for too many or changed files,
        FileExistsError if the split has files that this job did not write and `overwrite` is false,
        and Hub errors.
        """
        directory, target = self.directory, self.target
        files = staged_files(directory, target, self.encoding.suffix)
        _check_count(len(files))
        digests = {file.path: file.digest for file in files}
        if restart:
            directory.remove(self._commit_path)
        elif (earlier := self._earlier_commit(digests)) is not None:
            return self._address(earlier)
        with contextlib.nullcontext() if client is None else client.as_current():
            if client is not None:
                share_with_workers([directory.options_name])
                share_tokens_with_workers([f"datasets/{target.repo}"])
            target.make()
            commit = upload_and_commit(client, files, target, directory)
        directory.replace(self._commit_path, sealed({"commit": commit, "files": digests}))
        return self._address(commit)

    @property
    def _commit_path(self) -> str:
        return f"{METADATA}/commit-{self.target.key}.json"

    def _read_commit(self) -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError):
            return unsealed(self.directory.read(self._commit_path)) or {}
        return {}

    def _earlier_commit(self, digests: dict[str, str]) -> str | None:
        recorded = self._read_commit()
        commit = str(recorded.get("commit"))
        return commit if recorded.get("files") == digests and is_commit(commit) else None

    def _address(self, commit: str) -> str:
        return f"{self.target.endpoint}/datasets/{self.target.repo}/commit/{commit}"


def _check_count(files: int) -> None:
    if files > MOST_FILES:
        raise ValueError(
            f"{files:,} files are more than a folder of the Hub takes, {MOST_FILES:,}: make them "
            "larger (output_bytes=)"
        )


def _check_names(repo: str, path: str, split: str) -> None:
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(repo)
    if repo.count("/") != 1:
        raise ValueError(f"{repo!r} is no name of a repository: pass OWNER/NAME")
    if not _SPLIT.fullmatch(split):
        raise ValueError(f"split={split!r}: pass letters, digits and underscores, such as 'train'")
    if path.strip("/") and {"", ".", ".."} & {*path.strip("/").split("/")}:
        raise ValueError(f"path={path!r} is no folder of a repository: pass one such as 'data'")


@dataclass(frozen=True)
class Target:
    """Split in a folder of a dataset repository of the Hub, with settings of `HubWriter`."""

    repo: str
    path: str  # empty for the repository's root
    split: str
    revision: str
    endpoint: str
    private: bool | None = None
    overwrite: bool = False
    message: str | None = None
    token_name: str = field(default="", compare=False)

    @property
    def key(self) -> str:
        """Hash of endpoint, repository, branch, folder and split: 8 hex digits, for file names."""
        parts = [self.endpoint, self.repo, self.revision, self.path, self.split]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]

    def name(self, number: int, count: int, suffix: str) -> str:
        """Return a file's path in the repository, such as ``data/train-00012-of-00128.parquet``."""
        return posixpath.join(self.path, f"{self.split}-{number:05d}-of-{count:05d}{suffix}")

    def api(self) -> Any:
        """Return a `huggingface_hub.HfApi` with the token that this process keeps, if any."""
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint, token=token_for(self.token_name))

    def head(self, tries: int = TRIES) -> str:
        """Return the hash of the branch's last commit; a busy Hub is tried up to `tries` times.

        Raises DatasetMissingError without such a branch.
        """
        look = functools.partial(self.api().dataset_info, revision=self.revision, expand=["sha"])
        return ask(self.repo, lambda: look(self.repo).sha, tries=tries)

    def make(self) -> None:
        """Create the repository and the branch, unless they exist.

        The Hub is not asked to create an existing repository, because a token may be allowed to
        write to a repository but not to create it.
        """
        api = self.api()
        try:
            self.head()
            return
        except DatasetMissingError:
            pass  # no such branch
        except DatasetAccessError as err:
            if err.status != 404:
                raise
            make_repo = functools.partial(api.create_repo, private=self.private)
            ask(self.repo, lambda: make_repo(self.repo, repo_type="dataset", exist_ok=True))
        if self.revision != MAIN:
            make_branch = functools.partial(api.create_branch, branch=self.revision)
            ask(self.repo, lambda: make_branch(self.repo, repo_type="dataset", exist_ok=True))

    def digests(
        self, commit: str, tries: int = TRIES, *, has_files: bool = False
    ) -> dict[str, str]:
        """Return the digest of each file directly in the folder at a commit, by path.

        Digests are SHA-256 for large files, and Git's SHA-1 for others. With `has_files`, the
        folder is known to exist, and the request is retried if the Hub does not show it yet;
        otherwise, a missing folder gives {}.
        """
        api = self.api()

        def list_folder() -> dict[str, str]:
            from huggingface_hub import RepoFile
            from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError

            entries = api.list_repo_tree(
                self.repo, self.path or None, revision=commit, repo_type="dataset"
            )
            try:
                return {
                    entry.path: entry.lfs.sha256 if entry.lfs else entry.blob_id
                    for entry in entries
                    if isinstance(entry, RepoFile)
                }
            except RemoteEntryNotFoundError:
                if not has_files:
                    return {}  # no such folder
            except HfHubHTTPError as err:
                if err.response.status_code != 404:
                    raise
            # Raised outside of `except`: otherwise its context, the Hub's error, keeps the headers.
            raise HubBusyError(f"the Hub does not show the commit {commit} of {self.repo} yet")

        return ask(self.repo, list_folder, tries=tries)

    def card(self, commit: str) -> str:
        """Return the repository's dataset card (README.md) at a commit, or "" if there is none."""
        options = {"endpoint": self.endpoint}  # the store adds the token
        store = open_store(f"hf://datasets/{self.repo}@{commit}/{CARD}", options)

        def read() -> str:
            with store.reading() as file:
                return file.read().decode()

        try:
            return ask(self.repo, read, tries=1)
        except (FileNotFoundError, DatasetMissingError):
            return ""

    def foreign_files(self, existing: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
        """List paths of the split's files that `ours` lacks, or that have another digest there.

        `existing` (the folder's files) and `ours` (the job's files) have digests by path. Raises
        FileExistsError if there are such files and `overwrite` is false.
        """
        names = re.compile(f"{re.escape(self.split)}-[^/]*")
        foreign = [
            path
            for path, digest in sorted(existing.items())
            if names.fullmatch(posixpath.basename(path))
            and file_format(path) is not None
            and ours.get(path) != digest
        ]
        if foreign and not self.overwrite:
            raise FileExistsError(
                f"{self.repo} at {self.revision} has {len(foreign)} files of the split "
                f"{self.split!r} that are not of this job, such as {foreign[0]}: choose another "
                "path= or split=, or replace them (overwrite=True)"
            )
        return foreign

    def check(self, ours: Mapping[str, str]) -> None:
        """Raise an error if the split cannot be uploaded; nothing is written to the Hub.

        `ours` maps paths to digests, for files that an earlier run of the job has uploaded. Raises
        FileExistsError if the split has other files and `overwrite` is false, and Hub errors if the
        repository cannot be read. A branch or repository that an upload would create is no error.
        """
        from huggingface_hub import get_token

        try:
            existing = self.digests(self.head())
        except DatasetMissingError:
            return  # a branch that will be created
        except DatasetAccessError as err:
            token = token_for(self.token_name) or get_token()
            if err.status != 404 or token is None:
                raise
            return  # a repository that will be created
        self.foreign_files(existing, ours)


@dataclass(frozen=True)
class StagedFile:
    """Output file in the staging directory, and the repository path to upload it to."""

    name: str  # path in the staging directory
    path: str  # path in the repository
    digest: str  # SHA-256


def staged_files(directory: Store, target: Target, suffix: str) -> list[StagedFile]:
    """List the files with rows in `directory`, the output of a finished job.

    If no file has rows, only the first file is listed, to upload its columns. Raises
    FileNotFoundError if the job is not finished, and ValueError if its manifest is incomplete.
    """
    records = [parse_record(line) for line in directory.read(MANIFEST).splitlines()]
    parsed = [record for record in records if record is not None]
    parts = json.loads(directory.read(SUCCESS))["parts"]
    listed = sum(len(record.parts) for record in parsed)
    if listed != parts:
        raise ValueError(
            f"{directory}/{MANIFEST} lists {listed:,} of the job's {parts:,} parts: run the "
            "same job again, which writes it anew"
        )
    kept = [record for record in parsed if record.rows_out] or parsed[:1]
    return [
        StagedFile(record.name, target.name(number, len(kept), suffix), record.digest)
        for number, record in enumerate(kept)
    ]


def upload_and_commit(
    client: Client | None, files: Sequence[StagedFile], target: Target, staging: Store
) -> str:
    """Upload missing files, add all files in one commit, and return the commit's hash.

    Workers of `client`, or this process if it is None, read the files in `staging` and send them.
    """
    existing = target.digests(target.head())
    digests = {file.path: file.digest for file in files}
    calls = ((file, target, staging) for file in files if existing.get(file.path) != file.digest)
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
    columns = _read_columns(staging, files)
    return _commit(additions, digests, target, columns, _read_card(staging, target))


def _read_card(staging: Store, target: Target) -> str:
    """Return the dataset card's section that the job's report wrote; "" if missing or too large."""
    folder, name = posixpath.split(REPORTS[-1])
    size = staging.sizes(folder).get(name, 0)
    if not 0 < size <= MOST_CARD_BYTES:
        return ""
    title = f"{HEADING} in {markdown(posixpath.join(target.path, target.split))}"
    return staging.read(REPORTS[-1]).decode().replace(HEADING, title, 1)


def _read_columns(staging: Store, files: Sequence[StagedFile]) -> pa.Schema | None:
    if not files or file_format(files[0].name) != PARQUET:
        return None
    with staging.below(files[0].name).reading() as file:
        return pq.read_schema(file)


def upload(file: StagedFile, target: Target, staging: Store) -> tuple[Any, str]:
    """Upload one staged file to the Hub's large-file store, or read its content if it is small.

    Returns huggingface_hub's `CommitOperationAdd`, which has the content of small files only, and
    the Hub's digest of the content: SHA-256 for large files, Git's SHA-1 for others. Raises
    ValueError if the file is not what the job wrote.
    """
    from huggingface_hub import CommitOperationAdd

    with staging.local_copy(file.name) as path:
        addition = CommitOperationAdd(file.path, path)
        if addition.upload_info.sha256.hex() != file.digest:
            raise ValueError(
                f"{staging}/{file.name} is not what the job wrote: run the same job again, which "
                "does this part anew, or start over (restart=True)"
            )
        with _hide_progress_bars():  # each file would have its own
            ask(target.repo, functools.partial(_preupload, addition, target), tries=1)
        if addition.path_or_fileobj == b"":
            return addition, file.digest
        content = Path(path).read_bytes()
    addition.path_or_fileobj = content  # small files travel inside of the commit
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
            gitignore_content="\n",  # else the repository's could silently exclude files
        )
    except RuntimeError as err:  # huggingface_hub wraps HTTP errors of the store
        if isinstance(err.__cause__, HTTPError):
            raise err.__cause__ from None
        raise


def _commit(
    additions: Sequence[Any],
    digests: dict[str, str],
    target: Target,
    columns: pa.Schema | None,
    section: str,
) -> str:
    """Replace the split's files by this job's files in one commit; return the commit's hash.

    `additions` are operations for files that the Hub lacks, and `digests` the Hub's digests of the
    job's files by path. If the branch has these files already, its last commit is returned.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    def commit() -> str:
        head = target.head(tries=1)
        existing = target.digests(head, tries=1)
        foreign = target.foreign_files(existing, digests)
        if not foreign and digests.items() <= existing.items():
            return head  # an earlier run, or a try whose answer was lost, has made it
        removals = [CommitOperationDelete(path) for path in foreign if path not in digests]
        folder = (existing.keys() - foreign) | digests.keys()
        card = target.card(head)
        try:
            new_card = card and card_with_split(card, target, digests.keys(), folder, columns)
            if section:
                new_card = new_card or f"{FRONT}# {target.repo}\n"
                new_card = with_section(new_card, section, target.key)
        except Exception as err:  # a card written by hand may be broken in any way
            logger.warning(
                "%s: the dataset card is left as it is, because it cannot be read (%s): correct "
                "its dataset_info and configs if `datasets` does not load the new files",
                target.repo,
                err,
            )
            new_card = card
        cards = [CommitOperationAdd(CARD, new_card.encode())] if new_card != card else []
        send = functools.partial(
            target.api().create_commit,
            target.repo,
            [*removals, *additions, *cards],
            commit_message=target.message or f"Add {len(digests)} files with gpuclassify",
            repo_type="dataset",
            revision=target.revision,
            parent_commit=head,
        )
        made = str(ask(target.repo, send, tries=1).oid)
        if not digests.items() <= target.digests(made, has_files=True).items():
            raise HubRefusedError(
                f"the commit {made} of {target.repo} lacks files that were there when this job "
                "began to upload: run the same job again"
            )
        return made

    return retried(commit, is_busy)


def card_with_split(
    card: str,
    target: Target,
    files: Collection[str],
    folder: Collection[str],
    columns: pa.Schema | None,
) -> str:
    """Return the text `card` of a dataset card (README.md), updated for new `files` of the split.

    A card may list files, columns and row counts of splits, which `datasets` then expects. The
    split's files are added to the list, and descriptions that no longer fit are removed. `folder`
    has all paths in the target's folder after the commit, and `columns` is None if unknown.
    """
    from huggingface_hub import DatasetCard

    parsed = DatasetCard(card, ignore_metadata_errors=True)
    before = parsed.data.to_dict()
    configs, infos = parsed.data.get("configs"), parsed.data.get("dataset_info", [])
    name = "default"
    if configs:
        config = _find_config(configs, target, files)
        name = config.get("config_name", "default")
        if "data_files" in config:
            _add_files(config, target, files, folder)
    for info in infos if isinstance(infos, list) else [infos]:
        if info.get("config_name", "default") != name:
            continue
        for outdated in ("splits", "download_size", "dataset_size"):
            info.pop(outdated, None)
        if not _fits(info.get("features", []), columns):
            info.pop("features", None)
            logger.warning(
                "%s: features are removed from the dataset card, because the columns of the split "
                "%r may differ from them. `datasets` cannot load splits with different columns "
                "together: if there are any, choose another path= and its own configuration",
                target.repo,
                target.split,
            )
    return card if parsed.data.to_dict() == before else str(parsed)


def _find_config(configs: list[dict[str, Any]], target: Target, files: Collection[str]) -> Any:
    """Return the configuration for `files`, or the default one; append one if there is neither."""

    def holds(config: dict[str, Any]) -> bool:
        patterns = [pattern for entry in _entries(config) for pattern in entry["path"]]
        data_dir = config.get("data_dir")
        return (data_dir is not None and data_dir.strip("./") == target.path) or any(
            posixpath.dirname(pattern) == target.path or _matches(pattern, files)
            for pattern in patterns
        )

    for config in configs:
        if holds(config):
            return config
    for config in configs:
        if config.get("default") or config.get("config_name", "default") == "default":
            return config
    name = (target.path or target.split).replace("/", "-")
    configs.append({"config_name": name, "data_files": []})
    return configs[-1]


def _add_files(
    config: dict[str, Any], target: Target, files: Collection[str], folder: Collection[str]
) -> None:
    """Change ``data_files`` of `config` in place, so that it lists the split's `files`.

    Patterns of the split for the target's folder that match none of `folder` are removed.
    """
    entries = _entries(config)
    ours = [entry for entry in entries if entry["split"] == target.split]
    if not ours:
        entries += (ours := [{"split": target.split, "path": []}])
    for entry in ours:  # `datasets` refuses patterns that match no file
        entry["path"] = [
            pattern
            for pattern in entry["path"]
            if posixpath.dirname(pattern) != target.path or _matches(pattern, folder)
        ]
    if not all(any(_matches(p, [file]) for p in ours[0]["path"]) for file in files):
        ours[0]["path"].append(posixpath.join(target.path, f"{target.split}-*"))
    config["data_files"] = [
        entry | {"path": entry["path"][0] if len(entry["path"]) == 1 else entry["path"]}
        for entry in entries
    ]


def _entries(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a configuration's ``data_files`` as new dicts of ``split`` and ``path`` (a list)."""
    files = config.get("data_files") or []
    if isinstance(files, dict):
        files = [{"split": split, "path": path} for split, path in files.items()]
    files = [files] if isinstance(files, str) else files
    entries = [
        file if isinstance(file, dict) else {"split": "train", "path": file} for file in files
    ]
    return [
        entry | {"path": [entry["path"]] if isinstance(entry["path"], str) else [*entry["path"]]}
        for entry in entries
    ]


def _matches(pattern: str, files: Collection[str]) -> bool:
    return any(map(re.compile(glob_translate(pattern)).match, files))


def _fits(features: Sequence[Mapping[str, Any]], columns: pa.Schema | None) -> bool:
    dtypes = {feature["name"]: feature.get("dtype") for feature in features}
    if columns is None or dtypes.keys() != set(columns.names):
        return not features

    def fits(kind: pa.DataType, dtype: Any) -> bool:
        if isinstance(dtype, dict):
            return "class_label" in dtype and pa.types.is_integer(kind)
        name = str(kind).removeprefix("large_")
        return dtype in (_DTYPES.get(name, name), *_OPAQUE)

    return all(fits(columns.field(name).type, dtype) for name, dtype in dtypes.items())


@contextlib.contextmanager
def _hide_progress_bars() -> Iterator[None]:
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
