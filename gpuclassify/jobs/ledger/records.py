"""Records of parts, and the protocol that publishes each part and its record exactly once.

An attempt at a part first writes its record under a private name: the intent. Then it creates the
part's file, in which only the first attempt succeeds, and then the record, under the part's name.
If a later attempt or the next run finds a part without a record, it compares the part's digest
with the intents' digests, and creates the record from the intent that matches.

If parts will be joined into larger files, they are published in the metadata, where readers of
datasets do not look. When all parts are done, tasks join neighbouring parts: each publishes a file
of several parts in the same way, with a record that contains the parts' records, and then removes
the parts. A reader never sees a row twice, and of an unfinished job only files that are final.

Rows that go to partition folders are published in the same way, first as one file of all rows in
the metadata. They are spread over the folders before the record is created. Several attempts may do
so, because all of them make the same files.

Files of rows are flushed to disk before they get their names; records are not. If a power loss
leaves a record empty, the next run removes the part and does it again.
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
FUNCTION, SOURCE = "function", "source"  # names of the digests of a stage's code in job.json
KEY_DIGITS = 8
PART_NAME = re.compile(rf"part-(\d{{5,}})(?:-(\d{{5,}}))?-([0-9a-f]{{{KEY_DIGITS}}})\.")
_HEAD_BYTES = 64  # enough of job.json for the key, which comes first
RECORDS, SCRATCH = f"{METADATA}/records", f"{METADATA}/attempts"
WHOLE = f"{METADATA}/whole"  # files whose rows are not yet spread over folders
PARTS = f"{METADATA}/parts"  # parts that are not yet joined
QUARANTINE = "_quarantine"
# Errors of reading a value from a JSON file that no job wrote.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
LEDGER = "summary.json"  # state of a job's steps, in their folder


class JobChangedError(ValueError):
    """Error for an output directory of another job or run, or one that has lost its metadata."""


def part_name(number: int, count: int, key: str, suffix: str) -> str:
    """Return the output file name of a part, such as ``part-00012-1a2b3c4d.parquet``.

    `number` counts from 0 to `count` - 1, `key` are 8 hex digits that identify the run, and
    `suffix` is the extension, with its dot.
    """
    return f"part-{_padded(number, count)}-{key}{suffix}"


def joined_name(first: int, last: int, count: int, key: str, suffix: str) -> str:
    """Return the file name of joined parts, such as ``part-00000-00023-1a2b3c4d.parquet``.

    Part `last` is included, and `count` is the number of all parts. See `part_name`.
    """
    return f"part-{_padded(first, count)}-{_padded(last, count)}-{key}{suffix}"


def part_number(name: str) -> int:
    """Return the number, from 0, of the first part in an output file's name or path."""
    match = PART_NAME.match(posixpath.basename(name))
    assert match is not None
    return int(match[1])


def is_joined(name: str) -> bool:
    """Return whether a file name is of several joined parts, such as ``part-00000-00023-...``."""
    match = PART_NAME.match(posixpath.basename(name))
    return match is not None and match[2] is not None


def _padded(number: int, count: int) -> str:
    return f"{number:0{max(5, len(str(count - 1)))}d}"


def key_in(name: str) -> str | None:
    """Return the run's key in the name or path of a part's file, or None for other names."""
    match = PART_NAME.match(posixpath.basename(name))
    return match[3] if match else None


def check_current(directory: Store, key: str | None) -> None:
    """Raise JobChangedError unless job.json of the directory begins with this `key`.

    If it has another one, or is missing, another run has started over.
    """
    path = directory.path(JOB)
    try:
        # The whole file may be large, because it names every input file.
        head = directory.filesystem.cat_file(path, start=0, end=_HEAD_BYTES)
    except FileNotFoundError:
        raise metadata_gone(directory) from None
    if f'"key": "{key}"'.encode() not in head:
        raise JobChangedError(
            f"another run has started over in {directory}: this one stops, and what it wrote there "
            "does not count. Write to another directory to have the results of both"
        )


def metadata_gone(directory: Store) -> JobChangedError:
    """Return the JobChangedError to raise if the job's metadata files have been removed."""
    return JobChangedError(
        f"the metadata of this job is gone from {directory}: another run has started over there, "
        "or somebody has removed it. Run the job again, in another directory"
    )


@dataclass(frozen=True)
class Record:
    """Record of a finished part, a slice of the input: its source, output files, counts and times.

    A file of several joined parts has a record, too, which contains the parts' records and the sums
    of their rows; other counts are only in the parts' records.
    """

    name: str  # name of the part's file, or of its file in each folder
    source: dict[str, Any]  # path, byte range or row groups, rows without text; or the partition
    rows_in: int  # rows read
    rows_out: int  # rows in the file
    file_bytes: int  # size of the file, or of all its files in folders
    digest: str  # SHA-256 of the file, as it was published
    # Numbers of files, lines and rows in quarantine, by kind.
    left_out: dict[str, int] = field(default_factory=dict)
    first_problem: str = ""  # position and reason of the first problem in quarantine
    # Number of rows of an annotation set that only name a line or row that was left out.
    rows_marked: int = 0
    # Rows written by label, and rows with a label, by label column; see
    # `gpuclassify.mapping.stage_counts.count_labels`.
    labels: dict[str, dict[str, int]] = field(default_factory=dict)
    labelled: dict[str, int] = field(default_factory=dict)
    # Rows written by bin of score, and the largest score, for every score column; see
    # `gpuclassify.jobs.report.summary`.
    numbers: dict[str, dict[str, int]] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    # Rows read by bin of the text's length, for every text column.
    text_lengths: dict[str, dict[str, int]] = field(default_factory=dict)
    # Counts of each classifier, and beginnings of texts; see
    # `gpuclassify.mapping.stage_counts.StageCounts`.
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    examples: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Rows written by both labels, for each pair of label columns.
    agreements: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    # Rows "read" and "written", by source column and its value.
    sources: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # time to read, map and write
    stats: dict[str, float] = field(default_factory=dict)  # sums of the `RunStats`
    finished: float = 0.0  # seconds since 1970, before the file was written
    run_began: float = 0.0  # seconds since 1970, when the run handed out its first part
    worker: str = ""  # host and process
    folder_files: dict[str, int] | None = None  # size of each file, if rows are in folders
    folder_digests: dict[str, str] | None = None  # SHA-256 of each file, if rows are in folders
    md5: dict[str, str] | None = None  # MD5 of each file, for stores whose listings have it
    quarantine: dict[str, str] | None = None  # SHA-256 of the quarantine file, by path
    joined: tuple[Record, ...] = ()  # record of each part, if the file has several parts

    @property
    def parts(self) -> tuple[Record, ...]:
        """Records of the parts in this file, in order; only this record if it is not joined."""
        return self.joined or (self,)

    @property
    def quarantined(self) -> dict[str, str]:
        """SHA-256 of the quarantine files of this record's parts, by path."""
        return {p: sha for part in self.parts for p, sha in (part.quarantine or {}).items()}

    @property
    def files(self) -> dict[str, int]:
        """Size in bytes of the record's output file, or of its file in each folder, by path."""
        return {self.name: self.file_bytes} if self.folder_files is None else self.folder_files

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of the record's output file, or of its file in each folder, by path."""
        return {self.name: self.digest} if self.folder_digests is None else self.folder_digests

    def with_files(self, files: Mapping[str, bytes], directory: Store) -> Record:
        """Return a copy of the record with the sizes and digests of its files.

        `files` maps paths to contents: the one file `self.name`, or files in partition folders,
        whose total size becomes `file_bytes`. MD5 is added if listings of `directory` may report
        it.
        """
        changes: dict[str, Any] = {}
        if directory.reports_md5:
            changes["md5"] = {
                name: hashlib.md5(content, usedforsecurity=False).hexdigest()
                for name, content in files.items()
            }
        if self.name not in files:
            changes["folder_files"] = {name: len(content) for name, content in files.items()}
            changes["folder_digests"] = {name: _sha256(content) for name, content in files.items()}
            changes["file_bytes"] = sum(changes["folder_files"].values())
        return replace(self, **changes)

    def as_json(self) -> bytes:
        """Return the record as one line of JSON that ends with a SHA-256 of the text before it."""
        return sealed(asdict(self))


def sealed(values: Mapping[str, Any], indent: int | None = None) -> bytes:
    """Serialize `values` as a JSON object in UTF-8; its last entry is a SHA-256 of the others."""
    text = json.dumps(values, indent=indent, ensure_ascii=False)
    return _append_digest(text.encode("utf-8", "backslashreplace"))


def unsealed(content: bytes) -> dict[str, Any] | None:
    """Return the values that `sealed` serialized, or None if the content is not from it.

    The digest is no signature: anybody can compute it, so callers check types before use.
    """
    body = content.strip().rpartition(b', "sha256": ')[0] + b"}"
    if content.strip() == _append_digest(body):
        with contextlib.suppress(*MALFORMED):
            values = json.loads(body)
            return values if isinstance(values, dict) else None
    return None


def _append_digest(content: bytes) -> bytes:
    return b'%s, "sha256": "%s"}' % (content[:-1], _sha256(content).encode())


def read_ledger(directory: Store, folder: str, key: str) -> dict[str, Any] | None:
    """Read `LEDGER` in a folder; return None if it is missing, damaged, or has another key."""
    try:
        content = directory.read(f"{folder}/{LEDGER}")
    except FileNotFoundError:
        return None
    ledger = unsealed(content)
    return ledger if ledger is not None and ledger.get("key") == key else None


def parse_record(content: bytes) -> Record | None:
    """Parse a record from its JSON line; return None if it is damaged, empty, or no record."""
    with contextlib.suppress(*MALFORMED):
        values = unsealed(content) or {}
        joined = tuple(Record(**part) for part in values.pop("joined", ()))
        return Record(**values, joined=joined)
    return None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def stem_of(name: str) -> str:
    """Return the base name of a file, up to the first dot; its record has the same one."""
    return posixpath.basename(name).partition(".")[0]


def record_path(name: str) -> str:
    """Return the path, in the output directory, of the record of the output file `name`."""
    return f"{RECORDS}/{stem_of(name)}.json"


def quarantine_path(name: str) -> str:
    """Return the path, in the output directory, of the quarantine file of the part `name`."""
    return f"{QUARANTINE}/{stem_of(name)}.jsonl"


def published_path(name: str, encoding: Encoding) -> str:
    """Return the path of the file of rows that a task creates first for the output file `name`.

    It is `name`, or a file in `WHOLE` if the rows are to be split into partition folders.
    """
    return f"{WHOLE}/{name}" if _is_spread(name, encoding) else name


def _is_spread(name: str, encoding: Encoding) -> bool:
    """Return whether a file's rows go to partition folders; parts to join in `PARTS` do not."""
    return bool(encoding.partition_by) and not name.startswith(f"{PARTS}/")


def is_published(directory: Store, name: str, encoding: Encoding) -> bool:
    """Return whether an attempt has created the output file `name`, perhaps without a record."""
    paths = [published_path(name, encoding)]
    if _is_spread(name, encoding):
        paths.append(record_path(name))  # the record is created before the file is removed
    return any(map(directory.has, paths))


def publish(
    directory: Store,
    record: Record,
    content: bytes,
    problems: Sequence[Problem],
    encoding: Encoding,
) -> Record:
    """Create a part's output file, quarantine file and record; return the record.

    Also used for a file of joined parts. The first of several attempts at a part counts: if it has
    created the file, later attempts leave it, and return its record. `content` is this attempt's
    file content, from `pack_rows` with partition folders. `problems` are written to a quarantine
    file, unless there are none. The returned record has the digests of these files.

    Raises RuntimeError if the file would not have ``record.rows_out`` rows, and FileExistsError if
    a file of this name is from no attempt at this part or has a damaged record.
    """
    if _is_spread(record.name, encoding):
        # Nothing is published if this raises.
        files = folder_files(record.name, content, encoding)
    else:
        files = {record.name: content}
        if not encoding.partition_by:
            encoding.check_rows(files.values(), record.rows_out)
        record = record.with_files(files, directory)
    left_out = quarantine_lines(problems)  # the same bytes in every attempt
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
        # The next run needs the intent if the part is there without a record.
        with contextlib.suppress(Exception):
            if not directory.has(path):
                directory.remove(intent)
        raise
    directory.remove(intent)
    if written is None:
        raise FileExistsError(
            f"{directory} has a file {record.name} that no attempt at this part wrote: remove it"
        )
    return written


def complete(directory: Store, name: str, encoding: Encoding) -> Record | None:
    """Return the record of the output file `name`, which exists; create the record if missing.

    It is then copied from an intent: the record that each attempt writes under a private name
    first. Returns None if no intent has the digest of the file, or if the record is damaged. Raises
    FileNotFoundError if neither the record nor the file exists.
    """
    # Another attempt may create the record and remove the file between the first two reads.
    for is_last in (False, True):
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
                    spreads = _is_spread(name, encoding)
                    files = folder_files(name, content, encoding) if spreads else {}
                    _create_record(directory, record, files, encoding)
                    return parse_record(directory.read(record_path(name)))
    return None


def _create_record(
    directory: Store, record: Record, files: Mapping[str, bytes], encoding: Encoding
) -> Record | None:
    """Create a part's record; if its rows go to partition folders, create `files` there first.

    Returns the record with the files' sizes and digests, or None if another attempt has created it.
    """
    path, is_spread = record_path(record.name), _is_spread(record.name, encoding)
    # If the record exists, a late attempt has published a part again whose rows are spread.
    if is_spread and not directory.has(path):
        for file, content in files.items():
            check_current(directory, key_in(file))
            directory.make(posixpath.dirname(file))
            # Another version of Arrow may have encoded the same rows differently.
            directory.ensure(file, content, SCRATCH, is_lasting=True)
        record = record.with_files(files, directory)
    is_created = directory.create(path, record.as_json(), SCRATCH)
    if is_spread:
        directory.remove(published_path(record.name, encoding))
    return record if is_created else None
