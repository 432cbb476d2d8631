"""A part's record, and how a part and its record come to be exactly once.

An attempt at a part first writes its record under a private name: the intent. Then it creates the
part's file, which only the first attempt can, and then the record, under the part's name. Whoever
finds a part without a record compares the part's digest with those of the intents, and completes
the work of the attempt that wrote it: a second attempt that came too late, or the next run.

Rows that go to folders are published in the same way, all of a part in one file of the metadata.
From there they are spread before the record is created: whoever does it makes the same files.

Only files of rows are brought to disk before they get their names. A record that a loss of power
left empty is no record.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import posixpath
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gpuclassify.jobs.ledger.encoding import Encoding, folder_files
from gpuclassify.jobs.ledger.quarantine import Problem, quarantine_lines
from gpuclassify.jobs.stores.store import Store

METADATA = "_gpuclassify"  # readers of datasets pass over names that begin with an underscore
JOB = f"{METADATA}/job.json"
FUNCTION = "function"  # the digest of a stage's code in the identity of a job
KEY_DIGITS = 8
PART_NAME = re.compile(rf"part-\d{{5,}}-([0-9a-f]{{{KEY_DIGITS}}})\.")
_HEAD_BYTES = 64  # of job.json, which begins with the key
RECORDS, SCRATCH = f"{METADATA}/records", f"{METADATA}/attempts"
WHOLE = f"{METADATA}/whole"  # parts whose rows go to folders, until they are there
QUARANTINE = "_quarantine"
# What reading a value of a JSON file may raise, if the file is not what a job writes.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
LEDGER = "summary.json"  # in the folder of a job's steps: which are done, and what was counted


class JobChangedError(ValueError):
    """Error for an output directory with parts of a job of other settings, model or input."""


def part_name(number: int, count: int, key: str, suffix: str) -> str:
    """Return the name of one of `count` parts of the run with this key."""
    return f"part-{number:0{max(5, len(str(count - 1)))}d}-{key}{suffix}"


def key_in(name: str) -> str | None:
    """Return the key of the run whose part, record or quarantine file has this name, or None."""
    match = PART_NAME.match(posixpath.basename(name))
    return match[1] if match else None


def check_current(directory: Store, key: str | None) -> None:
    """Raise JobChangedError unless a directory still belongs to the run with this key."""
    path = directory.path(JOB)
    try:  # of the beginning alone: the whole file names every input file
        head = directory.filesystem.cat_file(path, start=0, end=_HEAD_BYTES)
    except FileNotFoundError:
        raise metadata_gone(directory) from None
    if f'"key": "{key}"'.encode() not in head:
        raise JobChangedError(
            f"another run has started over in {directory}: this one stops, and what it wrote there "
            "does not count. Write to another directory to have the results of both"
        )


def metadata_gone(directory: Store) -> JobChangedError:
    """Return the error for metadata of a run that is gone."""
    return JobChangedError(
        f"the metadata of this job is gone from {directory}: another run has started over there, "
        "or somebody has removed it. Run the job again, in another directory"
    )


@dataclass(frozen=True)
class Record:
    """Record of what was done with one part."""

    name: str  # of the file that holds the part's rows, or of its files in folders
    source: dict[str, Any]  # path, byte range or row groups, rows of no text; or the partition
    rows_in: int
    rows_out: int
    file_bytes: int
    digest: str  # SHA-256 of the file, as it was published
    # Files, lines and rows in quarantine.
    left_out: dict[str, int] = field(default_factory=dict)
    # Rows written by label, or by bin of score, for every such column; see
    # `gpuclassify.jobs.report.summary`.
    labels: dict[str, dict[str, int]] = field(default_factory=dict)
    numbers: dict[str, dict[str, int]] = field(default_factory=dict)
    # Rows read by bin of the text's length, for every column of text.
    text_lengths: dict[str, dict[str, int]] = field(default_factory=dict)
    # What each classifier did with the rows, and beginnings of texts; see
    # `gpuclassify.mapping.stage_counts.StageCounts`.
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    examples: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Rows written by the labels of two columns, which the name gives.
    agreements: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    # Rows "read" and "kept" by the values of the column that names a row's source.
    sources: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # reading, mapping and writing
    stats: dict[str, float] = field(default_factory=dict)  # sums of the `RunStats`
    finished: float = 0.0  # seconds since 1970, before the file was written
    run_began: float = (
        0.0  # when the run that did the part handed out its first one; also since 1970
    )
    worker: str = ""  # host and process
    folder_files: dict[str, int] | None = None  # size of each file, where rows are in folders
    folder_digests: dict[str, str] | None = None  # SHA-256 of each of these
    md5: dict[str, str] | None = None  # of each file, for stores that tell of it unasked
    quarantine: dict[str, str] | None = None  # SHA-256 of the file that tells what was left out

    @property
    def files(self) -> dict[str, int]:
        """Size in bytes of each file that holds rows of the part."""
        return {self.name: self.file_bytes} if self.folder_files is None else self.folder_files

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each file that holds rows of the part."""
        return {self.name: self.digest} if self.folder_digests is None else self.folder_digests

    def with_files(self, files: Mapping[str, bytes], directory: Store) -> Record:
        """Return the record with sizes and digests of these files, which hold the part's rows."""
        known: dict[str, Any] = {}
        if directory.reports_md5:
            known["md5"] = {
                name: hashlib.md5(content, usedforsecurity=False).hexdigest()
                for name, content in files.items()
            }
        if self.name not in files:
            known["folder_files"] = {name: len(content) for name, content in files.items()}
            known["folder_digests"] = {name: _sha256(content) for name, content in files.items()}
            known["file_bytes"] = sum(known["folder_files"].values())
        return replace(self, **known)

    def as_json(self) -> bytes:
        """Return the record as one line of JSON, sealed."""
        return sealed(asdict(self))


def sealed(values: Mapping[str, Any], indent: int | None = None) -> bytes:
    """Return the values as a JSON object that ends with the SHA-256 of the object without it."""
    text = json.dumps(values, indent=indent, ensure_ascii=False)
    return _with_digest(text.encode("utf-8", "backslashreplace"))


def unsealed(content: bytes) -> dict[str, Any] | None:
    """Return the values that were sealed, or None if they are not as they were written.

    Others can seal values, too: callers check types before they use one.
    """
    body = content.strip().rpartition(b', "sha256": ')[0] + b"}"
    if content.strip() == _with_digest(body):
        with contextlib.suppress(*MALFORMED):
            values = json.loads(body)
            return values if isinstance(values, dict) else None
    return None


def _with_digest(content: bytes) -> bytes:
    return b'%s, "sha256": "%s"}' % (content[:-1], _sha256(content).encode())


def read_ledger(directory: Store, folder: str, key: str) -> dict[str, Any] | None:
    """Read what a folder's steps noted of the job with this key; None if there is nothing sound."""
    try:
        content = directory.read(f"{folder}/{LEDGER}")
    except FileNotFoundError:
        return None
    ledger = unsealed(content)
    return ledger if ledger is not None and ledger.get("key") == key else None


def parse_record(content: bytes) -> Record | None:
    """Parse the record in a file; return None if it is not as it was written.

    A machine that lost power may leave files without content.
    """
    with contextlib.suppress(*MALFORMED):  # anybody may have written it
        return Record(**(unsealed(content) or {}))
    return None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def stem_of(name: str) -> str:
    """Return the part's name without the suffixes of its file."""
    return name.partition(".")[0]


def record_path(name: str) -> str:
    """Return the path of the record of the part `name`."""
    return f"{RECORDS}/{stem_of(name)}.json"


def quarantine_path(name: str) -> str:
    """Return the path of the problems of the part `name`."""
    return f"{QUARANTINE}/{stem_of(name)}.jsonl"


def published_path(name: str, encoding: Encoding) -> str:
    """Return the path of the one file with which the part `name` is published."""
    return f"{WHOLE}/{name}" if encoding.partition_by else name


def is_published(directory: Store, name: str, encoding: Encoding) -> bool:
    """Tell whether an attempt has published the part `name`."""
    paths = [published_path(name, encoding)]
    if encoding.partition_by:
        paths.append(record_path(name))  # created before the file is removed
    return any(map(directory.has, paths))


def publish(
    directory: Store,
    record: Record,
    content: bytes,
    problems: Sequence[Problem],
    encoding: Encoding,
) -> Record:
    """Create the part's file and record; return the record of the attempt whose file is there.

    An attempt that fails, such as on a full disk, leaves nothing.
    """
    if encoding.partition_by:  # what cannot be spread must not be published
        files = folder_files(record.name, content, encoding)
    else:
        files = {record.name: content}
        encoding.check_rows(files.values(), record.rows_out)
        record = record.with_files(files, directory)
    left_out = quarantine_lines(problems)  # the same ones in every attempt
    if problems:
        record = replace(record, quarantine={quarantine_path(record.name): _sha256(left_out)})
    intent = f"{SCRATCH}/{stem_of(record.name)}.{uuid.uuid4().hex}.json"
    path = published_path(record.name, encoding)
    try:
        directory.create(intent, record.as_json(), SCRATCH)
        for quarantined in record.quarantine or ():
            directory.ensure(quarantined, left_out, SCRATCH)
        is_first = directory.create(path, content, SCRATCH, is_lasting=True)
        written = _create_record(directory, record, files, encoding) if is_first else None
        written = written or complete(directory, record.name, encoding)
    except BaseException:
        # Of a part that is there without a record, the intent is what the next run goes by.
        with contextlib.suppress(Exception):
            if record.name not in directory.sizes(posixpath.dirname(path)):
                directory.remove(intent)
        raise
    directory.remove(intent)
    if written is None:
        raise FileExistsError(
            f"{directory} has a file {record.name} that no attempt at this part wrote: remove it"
        )
    return written


def complete(directory: Store, name: str, encoding: Encoding) -> Record | None:
    """Return the record of a part that is there, made of an attempt's intent if it is missing.

    None if no attempt's intent describes a file with this content.
    """
    for is_last in (False, True):  # an attempt may create the record meanwhile, and clear up
        with contextlib.suppress(FileNotFoundError):
            return parse_record(directory.read(record_path(name)))
        try:
            content = directory.read(published_path(name, encoding))
        except FileNotFoundError:
            if is_last:
                raise
            continue
        digest = _sha256(content)
        for intent in sorted(directory.sizes(SCRATCH)):
            if not (intent.startswith(f"{stem_of(name)}.") and intent.endswith(".json")):
                continue
            with contextlib.suppress(FileNotFoundError):
                record = parse_record(directory.read(f"{SCRATCH}/{intent}"))
                if record is not None and record.digest == digest:
                    spreads = bool(encoding.partition_by)
                    files = folder_files(name, content, encoding) if spreads else {}
                    _create_record(directory, record, files, encoding)
                    return parse_record(directory.read(record_path(name)))
    return None


def _create_record(
    directory: Store, record: Record, files: Mapping[str, bytes], encoding: Encoding
) -> Record | None:
    """Create the record of a part that is published, after its files in folders.

    None if another attempt's record is there.
    """
    path = record_path(record.name)
    # With a record, the file is that of an attempt which came after the first one was cleared up.
    if encoding.partition_by and not directory.has(path):
        for file, content in files.items():
            check_current(directory, key_in(file))
            directory.make(posixpath.dirname(file))
            # Another version of Arrow may have written another file of the same rows.
            directory.ensure(file, content, SCRATCH, is_lasting=True)
        record = record.with_files(files, directory)
    is_created = directory.create(path, record.as_json(), SCRATCH)
    if encoding.partition_by:
        directory.remove(published_path(record.name, encoding))
    return record if is_created else None
