"""Annotation sets: folders of columns that jobs wrote for the rows of input files.

The first job writes into the folder itself. Later jobs, which annotate files that came or changed
since, write into folders below it. Rows are matched by input file and position, so that the set and
the input may be cut into different parts (slices that one task reads).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import math
import operator
import posixpath
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gpuclassify.frames import plain_type
from gpuclassify.jobs.input.annotation_reader import (
    ANNOTATED,
    AnnotationColumns,
    AnnotationError,
    AnnotationRange,
    damaged,
    naming_damage,
)
from gpuclassify.jobs.input.files import states_like
from gpuclassify.jobs.input.parts import InputParts, Part
from gpuclassify.jobs.input.schema import nulls_untyped
from gpuclassify.jobs.ledger.arrow_types import changed_schema, restored, union
from gpuclassify.jobs.ledger.encoding import FILE, LEFT_OUT, PLACE
from gpuclassify.jobs.ledger.manifest import SUCCESS, manifest_of, read_job
from gpuclassify.jobs.ledger.records import JOB, Record, key_in
from gpuclassify.jobs.provenance import Provenance
from gpuclassify.jobs.stores.names import redacted
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.jobs.stores.store import BrokenContentError, Store, UnreadableInputError
from gpuclassify.mapping.stage_counts import LABEL

LATER_DIGITS = 5
LATER = re.compile(rf"more-\d{{{LATER_DIGITS}}}")  # folders of later jobs
POSITION_LIMIT = 1 << 62  # a position fits into int64, and so does the one after it
MOST_NAMED = 3  # files that an error lists


@dataclass
class FileAnnotations:
    """Annotations of one input file: its state when it was annotated, and row ranges in the set.

    `state` is the file's size and version. `folder` is the folder of the job that annotated the
    file last. It identifies the job, unlike the job's key: if a file is changed and changed back,
    two jobs have the same key.
    """

    state: str
    folder: str
    ranges: list[AnnotationRange] = field(default_factory=list)


@dataclass
class AnnotationSet:
    """Annotation set: a folder of columns that jobs wrote for the rows of input files.

    `open` reads the jobs, and `read_records` adds row ranges, `digests` and `columns`.
    """

    store: Store
    prefix: str = ""  # prefix of column names in frames
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)  # job.json by folder
    files: dict[str, FileAnnotations] = field(default_factory=dict)  # keyed by input file
    undone: set[str] = field(default_factory=set)  # folders of unfinished jobs
    digests: list[str] = field(default_factory=list)  # SHA-256 of each annotation file, in order
    columns: pa.Schema = field(default_factory=lambda: pa.schema([]))

    @property
    def shown(self) -> str:
        """Address of the set for messages, without secrets."""
        return redacted(self.store.address)

    @property
    def digest(self) -> str:
        """SHA-256 of the annotation files' digests in order, such as "sha256:1a2b...".

        `read_records` must have been called.
        """
        content = "".join(self.digests).encode("utf-8", "backslashreplace")
        return f"sha256:{hashlib.sha256(content).hexdigest()}"

    @property
    def provenance(self) -> Provenance:
        """Origin of the set's columns (models and settings), under the columns' names in frames."""
        name, known = posixpath.basename(self.shown.rstrip("/")), Provenance()
        names = self.names
        for folder, job in self.jobs.items():
            with naming_damage(self.shown, posixpath.join(folder, JOB)):
                described = Provenance.parse(job.get("provenance"))
            known = known.joined(described.read_as(names, name))
        return replace(known, annotations=((name, self.digest), *known.annotations))

    @property
    def names(self) -> dict[str, str]:
        """Names of annotation columns in frames, with the set's prefix, by their names in files."""
        return {name: f"{self.prefix}{name}" for name in self.columns.names}

    @classmethod
    def open(cls, name: str, storage_options: Mapping[str, Any]) -> AnnotationSet:
        """Open the set at the path or URL `name`, and read the ``job.json`` of each of its jobs.

        ``NAME=prefix_`` prefixes the names of its columns in frames. Raises FileNotFoundError if no
        job wrote there, and AnnotationError if a job wrote rows there instead of annotations.
        """
        address, _, prefix = name.rpartition("=")
        if not address or not prefix.endswith("_") or "/" in prefix:
            address, prefix = name, ""
        opened = cls(open_store(address, storage_options), prefix)
        for folder in ("", *later_folders(opened.store)):
            job = opened.jobs[folder] = read_job(opened.folder(folder))
            if not job["identity"]["output"].get("annotations"):
                raise AnnotationError(
                    f"{opened.shown} holds rows that a job wrote, and no annotations: read it as "
                    "the input, or write annotations with `gpuclassify annotate`"
                )
            if not opened.store.has(posixpath.join(folder, SUCCESS)):
                opened.undone.add(folder)
            with naming_damage(opened.shown, posixpath.join(folder, JOB)):
                for file, state in job["identity"]["input file"].items():
                    opened.files[file] = FileAnnotations(f"{state}", folder)
        return opened

    @property
    def unfinished(self) -> str | None:
        """Folder of an unfinished job that is the latest one to annotate some input file, or None.

        "" is the folder of the set itself.
        """
        folders = (file.folder for file in self.files.values())
        return min((folder for folder in folders if folder in self.undone), default=None)

    @property
    def states(self) -> dict[str, str]:
        """Size and version, as text, of each input file when it was last annotated, by name."""
        return {name: file.state for name, file in self.files.items()}

    def has_unread(self, name: str) -> bool:
        """Return whether an input file, or some of its rows, may have been left out as unreadable.

        False if the file is not completely annotated. Call `read_records` before.
        """
        file = self.files.get(name)
        if file is None or file.folder in self.undone:
            return False
        return not file.ranges or any(rows.left_out for rows in file.ranges)

    def job_keys(self, files: Collection[str]) -> str:
        """Return the keys of the jobs that last annotated these files, joined to one text."""
        folders = (self.files[name].folder for name in sorted(files) if name in self.files)
        return "-".join(dict.fromkeys(self.jobs[folder]["key"] for folder in folders))

    def next_folder(self) -> str:
        """Return the name for the folder of the set's next job, such as ``more-00001``."""
        last = max(self.jobs)
        return f"more-{int(last[-LATER_DIGITS:] or 0) + 1:0{LATER_DIGITS}d}"

    def folder(self, name: str) -> Store:
        """Return the store of a folder or file in the set, or of the set itself if `name` is ""."""
        return self.store.below(name) if name else self.store

    def read_records(self) -> None:
        """Read row ranges, digests and columns of the annotation files from the jobs' records.

        Adds them to `files`, `digests` and `columns`: call it once. Jobs whose files were all
        annotated again later are skipped. Raises AnnotationError if a file of another job is
        missing, or its record is missing or damaged.
        """
        for folder, job in self.jobs.items():
            latest = {name for name, file in self.files.items() if file.folder == folder}
            if not latest:  # A later job annotated all of its files again.
                continue
            store, path = self.folder(folder), ""
            with naming_damage(self.shown, posixpath.join(folder, JOB)):
                manifest = manifest_of(store)
                listed = manifest.listed()
                sizes = {name: info["size"] for name, info in manifest.file_infos().items()}
                files = (name for name in store.part_sizes() if key_in(name) == job["key"])
                unlisted = [name for name in files if name not in listed]
                if unlisted and folder not in self.undone:
                    raise ValueError(f"its {job['parts']:,} parts do not include {unlisted[0]}")
            for name, record in listed.items():
                if record is None:
                    raise damaged(self.shown, posixpath.join(folder, name), "nor is its record")
                path = posixpath.join(folder, name)
                with naming_damage(self.shown, path):
                    _check_size(record, sizes)
                    self.digests.append(f"{record.digest}")
                    for file, rows in _ranges(path, record):
                        if file not in job["identity"]["input file"]:
                            raise ValueError(f"it has rows of {file}, and {JOB} does not")
                        if file in latest:
                            self.files[file].ranges.append(rows)
            if path:
                with naming_damage(self.shown, path):
                    self.columns = self._merge_columns(path)
        for file, annotated in self.files.items():
            annotated.ranges.sort(key=lambda rows: rows.low)
            for rows, later in itertools.pairwise(annotated.ranges):
                if later.low <= rows.high:
                    reason = f"it has rows of {file} that {rows.name} has"
                    raise damaged(self.shown, later.name, reason)

    def read_columns(self) -> None:
        """Set `columns` from the first readable annotation file in each job's folder."""
        for folder in self.jobs:
            for name in filter(key_in, sorted(manifest_of(self.folder(folder)).file_infos())):
                path = posixpath.join(folder, name)
                with contextlib.suppress(AnnotationError), naming_damage(self.shown, path):
                    self.columns = self._merge_columns(path)
                    break

    def input_columns(self, folder: str) -> pa.Schema | None:
        """Return the columns of the input files of the job in `folder`; None if not recorded."""
        encoded = self.jobs[folder].get("columns")
        if encoded is None:
            return None
        with naming_damage(self.shown, posixpath.join(folder, JOB)):
            try:
                return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(encoded)))
            except OSError as err:
                raise ValueError(f"its columns cannot be read: {err}") from err

    def _merge_columns(self, name: str) -> pa.Schema:
        """Return `columns` merged with the annotation file `name`, except bookkeeping columns."""
        with self.folder(name).reading() as file:
            metadata = pq.read_metadata(file)
        stored = metadata.schema.to_arrow_schema()
        if missing := {FILE, PLACE, LEFT_OUT} - {*stored.names}:
            raise ValueError(f"it has no column {', '.join(sorted(missing))}")
        columns = changed_schema(stored, restored)
        new = pa.schema([c for c in columns if c.name not in (FILE, PLACE, LEFT_OUT)])
        if self.columns.names not in ([], new.names):
            raise ValueError(f"it has columns {new.names}, and other files {self.columns.names}")
        merged = []
        for column, other in zip(self.columns or new, new, strict=True):
            try:
                column = column.with_type(common_type(column.type, other.type))
            except pa.ArrowException as err:
                kind = nulls_untyped(stored, metadata, [column.name]).field(column.name).type
                if not pa.types.is_null(kind):  # A column without any value was written as text.
                    raise AnnotationError(
                        f"{column.name!r} is {other.type} in {self.shown}/{name}, and "
                        f"{column.type} in files before it: remove this folder, and annotate its "
                        "files again with a stage that casts the column, such as by astype() "
                        f"(accept_changed_code=True): {err}"
                    ) from err
            merged.append(column)
        return pa.schema(merged)

    def check(
        self, states: Mapping[str, str], was_input: Callable[[str], bool], is_complete: bool
    ) -> bool:
        """Check that the set is of this input; return True if it is finished and has every file.

        `states` has the size and version of each input file, by name. `was_input` returns True for
        the name of a file that is gone but that the reader's paths match. Raises AnnotationError if
        the set is of another input, or if a file changed after it was annotated; with
        `is_complete`, also if files or annotations are missing.
        """
        if not states.keys() & self.files.keys():
            raise AnnotationError(
                f"{self.shown} annotates other files, such as {next(iter(self.files), 'none')}, "
                f"and the input has {next(iter(states), 'none')}: name the set of this input, or "
                "the input of this set"
            )
        annotated = self.states
        changes = [name for name, state in states.items() if annotated.get(name, state) != state]
        if changes:
            raise AnnotationError(
                f"{some_names(changes)} changed since {self.shown} annotated it: annotate it again "
                "(redo_changed=True), or bring back the file as it was"
            )
        missing = [name for name in states if name not in annotated]
        gone = [name for name in annotated if name not in states and was_input(name)]
        unfinished = self.unfinished
        if is_complete and unfinished is not None:
            raise AnnotationError(
                f"{redacted(self.folder(unfinished).address)} is not finished: run the command "
                "that writes it again, or take null for what is missing "
                "(annotations_complete=False)"
            )
        if is_complete and missing:
            raise AnnotationError(
                f"{some_names(missing)} is not annotated in {self.shown}: run the same annotate "
                "again, which does new files alone, or take null for it "
                "(annotations_complete=False)"
            )
        if is_complete and gone:
            raise AnnotationError(
                f"{some_names(gone)} is gone since {self.shown} annotated it: bring it back, or go "
                "on with the files that are there (annotations_complete=False)"
            )
        return unfinished is None and not missing

    def check_rows(self, file: str, last: Part) -> None:
        """Raise AnnotationError if an input file cannot have the rows that the set annotates.

        `file` is its name, and `last` the last of its pieces, whose end is the file's end.
        """
        ranges = self.files[file].ranges
        count = sum(rows.count for rows in ranges)
        end = last.rows[1] if last.rows else (last.position_range or (0, math.inf))[1]
        if any(rows.high >= end for rows in ranges) or (last.rows and count != end):
            raise AnnotationError(
                f"{self.shown} has {count:,} rows of {file}, which has {end:,} "
                f"{'rows' if last.rows else 'bytes, and some rows begin after its end'}: annotate "
                "all files again (restart=True), or do not use this set"
            )


def later_folders(store: Store) -> list[str]:
    """List the folders of later jobs that have begun in the annotation set at `store`."""
    names = sorted(name for name in store.folders() if LATER.fullmatch(name))
    return [n for n in names if store.has(f"{n}/{JOB}") or any(map(key_in, store.sizes(n)))]


def job_folders(store: Store) -> list[Store]:
    """Return the output's `store` and, for an annotation set, the stores of its later jobs."""
    return [store, *map(store.below, later_folders(store))]


def some_names(names: Sequence[str]) -> str:
    """Return the first three names as text for a message, with the number of the others."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _ranges(name: str, record: Record) -> list[tuple[str, AnnotationRange]]:
    """Return pairs of an input file and a row range of it, in the order of the annotation file."""
    ranges, first, total = [], 0, record.rows_out
    for part in record.parts:
        left_out = tuple(map(str, part.left_out))
        for file, numbers in part.source[ANNOTATED].items():
            count, low, high = map(operator.index, numbers)
            if not (0 < count <= high - low + 1 and low >= 0 and high < POSITION_LIMIT):
                raise ValueError(f"it has {count} rows of {file} from {low} to {high}")
            rows = AnnotationRange(name, first, count, low, high, left_out, total, file)
            ranges.append((file, rows))
            first += count
    if first != record.rows_out:
        raise ValueError(f"it has {record.rows_out:,} rows, and {first:,} of its files")
    return ranges


def common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return the Arrow type that holds the values of both types, such as int64 for int32 and int64.

    Raises one of Arrow's errors if there is no common type.
    """
    return one if one == other else union(plain_type(one), plain_type(other))


def holds(kind: pa.DataType, other: pa.DataType) -> bool:
    """Return True if the Arrow type `kind` holds all values of the type `other`."""
    try:
        return bool(common_type(kind, other) == kind)
    except pa.ArrowException:
        return False


def _check_size(record: Record, sizes: Mapping[str, int]) -> None:
    size = sizes.get(record.name)
    if size != record.file_bytes:
        now = "is gone" if size is None else f"has {size:,} bytes of {record.file_bytes:,}"
        raise BrokenContentError(f"it {now}")


def add_annotations(
    plan: InputParts,
    sets: Sequence[AnnotationSet],
    listed: Collection[str],
    paths: Sequence[str],
    storage_options: dict[str, Any],
    is_complete: bool,
) -> InputParts:
    """Return the parts of an input with the columns of annotation sets.

    `plan` is the input without annotations. `sets` must have read their records. `paths` are the
    reader's paths, and `listed` the names of all files found there, including files that are not
    read. Raises AnnotationError if a set does not fit the files, or is incomplete despite
    `is_complete`. Raises UnreadableInputError if two columns have one name.
    """
    stores = [open_store(path, storage_options) for path in paths]

    def was_input(name: str) -> bool:
        return name not in listed and any(store.matches(name) for store in stores)

    real = {file.path: redacted(file.real) for file in plan.files}
    last = {piece.path: piece for part in plan.parts for piece in part.pieces}
    provenance = Provenance()
    columns, fields, owners = [], [*plan.schema.arrow], dict.fromkeys(plan.schema.arrow.names, "")
    for opened in sets:
        states = states_like(plan.files, opened.states, storage_options)
        is_whole = opened.check(states, was_input, is_complete)
        names = opened.names
        for column in opened.columns:
            name = names[column.name]
            if name in owners:
                _refuse_duplicate(name, owners[name], opened)
            owners[name] = opened.shown
            fields.append(column.with_name(name).remove_metadata().with_nullable(True))
        for path, piece in last.items() if is_whole else ():
            opened.check_rows(real[path], piece)
        key = opened.job_keys(states)
        marked = [f.name for f in opened.columns if LABEL.items() <= (f.metadata or {}).items()]
        labels = tuple(names[name] for name in marked)
        provenance = provenance.joined(opened.provenance)
        columns.append(AnnotationColumns(opened.store.address, names, key, is_whole, labels))
    parts = tuple(_add_ranges(part, sets, real) for part in plan.parts)
    schema = replace(plan.schema, arrow=pa.schema(fields), annotations=tuple(columns))
    return replace(plan, parts=parts, schema=schema, provenance=provenance)


def _add_ranges(part: Part, sets: Sequence[AnnotationSet], real: Mapping[str, str]) -> Part:
    """Return a copy of a part whose pieces list the overlapping row ranges of annotation files.

    `real` maps each input file's path to its name in the sets.
    """

    def add(piece: Part) -> Part:
        low, high = piece.position_range or (0, math.inf)
        by_set: list[tuple[AnnotationRange, ...] | None] = []
        for opened in sets:
            file = opened.files.get(real[piece.path])
            found = [r for r in file.ranges if r.low < high and r.high >= low] if file else []
            is_done = file is not None and file.folder not in opened.undone
            by_set.append(tuple(found) if found or is_done else None)
        return replace(piece, annotations=tuple(by_set))

    first, *rest = map(add, part.pieces)
    return replace(first, followers=tuple(rest))


def _refuse_duplicate(name: str, owner: str, opened: AnnotationSet) -> None:
    where = f"in {owner}" if owner else "in the input"
    raise UnreadableInputError(
        f"the column {name!r} is {where} and in {opened.shown}: give the columns of one set a "
        f"prefix, such as {opened.shown}={posixpath.basename(opened.shown.rstrip('/'))}_"
    )
