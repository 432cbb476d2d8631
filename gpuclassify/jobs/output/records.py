"""A part's record, and how a part and its record come to be exactly once.

An attempt at a part first writes its record under a private name: the intent. Then it creates the
part's file, which only the first attempt can, and then the record, under the part's name. Whoever
finds a part without a record compares the part's digest with those of the intents, and completes
the work of the attempt that wrote it: a second attempt that came too late, or the next run.

Only the part's file is brought to disk before it gets its name. A record that a loss of power left
empty is no record.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from gpuclassify.jobs.output.exclusive import create
from gpuclassify.jobs.quarantine import Problem, quarantine_lines
from gpuclassify.jobs.storage import Directory

METADATA = "_gpuclassify"  # readers of datasets pass over names that begin with an underscore
RECORDS, SCRATCH = f"{METADATA}/records", f"{METADATA}/attempts"
QUARANTINE = "_quarantine"


@dataclass(frozen=True)
class Record:
    """What was done with one part.

    Attributes
    ----------
    name : str
        The file that holds the part's rows.
    source : dict
        Path and byte range or row groups, or number of the partition.
    rows_in, rows_out : int
    file_bytes : int
    digest : str
        SHA-256 of the file.
    left_out : dict of str to int
        Files, lines and rows in quarantine.
    labels : dict of str to dict
        Rows written by label, for every column of labels.
    numbers : dict of str to dict
        Rows written by bin of score, for every column of scores; see
        `gpuclassify.jobs.report.counts`.
    text_lengths : dict of str to dict
        Rows read by bin of the text's length, for every column of text.
    stages : dict of str to dict
        What each classifier did with the rows; see `gpuclassify.stage_counts.Stages`.
    examples : dict of str to dict
        Beginnings of texts, for each classifier; see there.
    agreements : dict of str to dict
        Rows written by the labels of two columns, which the name gives.
    sources : dict of str to dict
        Rows ``read`` and ``kept`` by the values of the column that names a row's source.
    seconds : dict of str to float
        Reading, mapping and writing.
    stats : dict of str to float
        Sums of the `RunStats` of what was mapped.
    finished : float
        Seconds since 1970, before the file was written.
    worker : str
        Host and process.
    """

    name: str
    source: dict[str, Any]
    rows_in: int
    rows_out: int
    file_bytes: int
    digest: str
    left_out: dict[str, int] = field(default_factory=dict)
    labels: dict[str, dict[str, int]] = field(default_factory=dict)
    numbers: dict[str, dict[str, int]] = field(default_factory=dict)
    text_lengths: dict[str, dict[str, int]] = field(default_factory=dict)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    examples: dict[str, dict[str, Any]] = field(default_factory=dict)
    agreements: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    sources: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    stats: dict[str, float] = field(default_factory=dict)
    finished: float = 0.0
    worker: str = ""

    def as_json(self) -> bytes:
        """One line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False).encode("utf-8", "replace")


def parse_record(content: bytes) -> Record | None:
    """The record in a file, or None: a machine that lost power may leave files without content.

    A record of an earlier version lacks what was not counted then.
    """
    try:
        values = json.loads(content)
        known = [each.name for each in fields(Record)]
        return Record(**{name: values[name] for name in known if name in values})
    except (ValueError, KeyError, TypeError):
        return None


def stem_of(name: str) -> str:
    """The part's name without the suffixes of its file."""
    return name.partition(".")[0]


def record_path(name: str) -> str:
    """The path of the record of the part `name`."""
    return f"{RECORDS}/{stem_of(name)}.json"


def quarantine_path(name: str) -> str:
    """The path of the problems of the part `name`."""
    return f"{QUARANTINE}/{stem_of(name)}.jsonl"


def publish(
    directory: Directory, record: Record, content: bytes, problems: Sequence[Problem]
) -> Record:
    """Create the part's file and its record, unless another attempt was first.

    Returns
    -------
    Record
        Of the attempt whose file is there.

    Raises
    ------
    OSError
        The disk is full, or permission is lost; then nothing of this attempt is left.
    """
    intent = f"{SCRATCH}/{stem_of(record.name)}.{uuid.uuid4().hex}.json"
    try:
        create(directory, intent, record.as_json(), SCRATCH)
        if problems:  # the same ones in every attempt
            create(directory, quarantine_path(record.name), quarantine_lines(problems), SCRATCH)
        is_first = create(directory, record.name, content, SCRATCH, is_lasting=True)
        written = record if is_first else None
        if is_first and not create(directory, record_path(record.name), record.as_json(), SCRATCH):
            written = None
        written = written or complete(directory, record.name)
    except BaseException:
        # Of a part that is there without a record, the intent is what the next run goes by.
        with contextlib.suppress(Exception):
            if record.name not in directory.sizes():
                directory.remove(intent)
        raise
    directory.remove(intent)
    if written is None:
        raise FileExistsError(
            f"{directory} has a file {record.name} that no attempt at this part wrote: remove it"
        )
    return written


def complete(directory: Directory, name: str) -> Record | None:
    """The record of a part that is there; made of an attempt's intent if it is missing.

    None if no attempt's intent describes a file with this content.
    """
    for _ in range(2):  # an attempt may create the record and remove its intent meanwhile
        with contextlib.suppress(FileNotFoundError):
            return parse_record(directory.read(record_path(name)))
        digest = hashlib.sha256(directory.read(name)).hexdigest()
        for intent in sorted(directory.sizes(SCRATCH)):
            if not (intent.startswith(f"{stem_of(name)}.") and intent.endswith(".json")):
                continue
            with contextlib.suppress(FileNotFoundError):
                record = parse_record(directory.read(f"{SCRATCH}/{intent}"))
                if record is not None and record.digest == digest:
                    create(directory, record_path(name), record.as_json(), SCRATCH)
                    return parse_record(directory.read(record_path(name)))
    return None
