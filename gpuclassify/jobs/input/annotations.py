"""Annotation sets: columns that jobs wrote beside the rows of files, and what of an input they are.

A set is the output of a job, in the folder itself, and of later ones, for files that came or
changed since, in folders below it. However a set and a reader are cut, rows with one place in one
file are beside each other.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import math
import operator
import posixpath
import re
from collections.abc import Collection, Mapping, Sequence
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
from gpuclassify.jobs.input.schema import without_values
from gpuclassify.jobs.ledger.arrow_types import changed_schema, restored, union
from gpuclassify.jobs.ledger.encoding import FILE, LEFT_OUT, PLACE
from gpuclassify.jobs.ledger.manifest import SUCCESS, manifest_of, read_job
from gpuclassify.jobs.ledger.records import JOB, Record, key_in
from gpuclassify.jobs.stores.names import redacted
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.jobs.stores.store import BrokenContentError, Store, UnreadableInputError
from gpuclassify.mapping.stage_counts import LABEL

LATER_DIGITS = 5
LATER = re.compile(rf"more-\d{{{LATER_DIGITS}}}")  # folders with what was annotated later
MOST_PLACES = 1 << 62  # a place fits into int64, and so does the one after it
MOST_NAMED = 3  # files of an error


@dataclass
class FileAnnotations:
    """Annotations of one file: the state that was annotated, and the rows in a folder of the set.

    The folder identifies the rows. A job's key does not: a job that annotates a file whose earlier
    state is back has the same settings and input, and so the same key, as the job before.
    """

    state: str
    folder: str
    rows: list[AnnotationRange] = field(default_factory=list)


@dataclass
class AnnotationSet:
    """A set as its jobs have described it."""

    store: Store
    prefix: str = ""
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)  # job.json by folder
    files: dict[str, FileAnnotations] = field(default_factory=dict)
    undone: set[str] = field(default_factory=set)  # folders whose jobs are not finished
    columns: pa.Schema = field(default_factory=lambda: pa.schema([]))

    @property
    def shown(self) -> str:
        """Name of the set, for people."""
        return redacted(self.store.address)

    @property
    def names(self) -> dict[str, str]:
        """Names of its columns in frames, by those in its files."""
        return {name: f"{self.prefix}{name}" for name in self.columns.names}

    @classmethod
    def open(cls, name: str, storage_options: Mapping[str, Any]) -> AnnotationSet:
        """Read what a set is of; `name` may end with ``=prefix_`` for the names of its columns.

        Raises FileNotFoundError if no job wrote there, and AnnotationError if one that writes rows.
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
                    opened.files[file] = FileAnnotations(
                        f"{state}", folder
                    )  # replaces an earlier state
        return opened

    @property
    def unfinished(self) -> str | None:
        """First folder whose job is not finished and holds the last annotations of some file."""
        folders = (known.folder for known in self.files.values())
        return min((folder or "." for folder in folders if folder in self.undone), default=None)

    @property
    def states(self) -> dict[str, str]:
        """State in which each file was annotated last."""
        return {name: known.state for name, known in self.files.items()}

    def key_of(self, files: Collection[str]) -> str:
        """Return the keys of the jobs that annotated these files last."""
        folders = (self.files[name].folder for name in sorted(files) if name in self.files)
        return "-".join(dict.fromkeys(self.jobs[folder]["key"] for folder in folders))

    def next_folder(self) -> str:
        """Return the folder for what is annotated next."""
        last = max(self.jobs)
        return f"more-{int(last[-LATER_DIGITS:] or 0) + 1:0{LATER_DIGITS}d}"

    def folder(self, name: str) -> Store:
        """Return the folder of one of its jobs."""
        return self.store.below(name) if name else self.store

    def read_records(self) -> None:
        """Find the rows of each file, and the columns; raise AnnotationError for damage."""
        for folder, job in self.jobs.items():
            mine = {name for name, known in self.files.items() if known.folder == folder}
            if not mine:  # all of its files were annotated again later
                continue
            store, some = self.folder(folder), ""
            with naming_damage(self.shown, posixpath.join(folder, JOB)):
                sizes, listed = store.part_sizes(), manifest_of(store).listed()
                unlisted = [n for n in sizes if key_in(n) == job["key"] and n not in listed]
                if unlisted and folder not in self.undone:
                    raise ValueError(f"it has {job['parts']:,} parts, and not {unlisted[0]}")
            for name, record in listed.items():
                if record is None:
                    raise damaged(self.shown, posixpath.join(folder, name), "nor is its record")
                some = posixpath.join(folder, name)
                with naming_damage(self.shown, some):
                    _check_size(record, sizes)
                    for file, rows in _rows_of(some, record).items():
                        if file not in job["identity"]["input file"]:
                            raise ValueError(f"it has rows of {file}, and {JOB} does not")
                        if file in mine:
                            self.files[file].rows.append(rows)
            if some:
                with naming_damage(self.shown, some):
                    self.columns = self._with_columns_of(some)
        for file, known in self.files.items():
            known.rows.sort(key=lambda rows: rows.low)
            for rows, later in itertools.pairwise(known.rows):
                if later.low <= rows.high:
                    raise damaged(
                        self.shown, later.name, f"it has rows of {file} that {rows.name} has"
                    )

    def read_columns(self) -> None:
        """Find the columns as far as files can be read; see `read_records`, which refuses damage.

        Files whose columns contradict those of earlier folders are passed over.
        """
        for folder in self.jobs:
            for name in filter(key_in, sorted(self.folder(folder).part_sizes())):
                some = posixpath.join(folder, name)
                with contextlib.suppress(AnnotationError), naming_damage(self.shown, some):
                    self.columns = self._with_columns_of(some)
                    break

    def input_columns(self, folder: str) -> pa.Schema | None:
        """Return the input's columns as the job of a folder read them, if it noted them."""
        noted = self.jobs[folder].get("columns")
        if noted is None:
            return None
        with naming_damage(self.shown, posixpath.join(folder, JOB)):
            try:
                return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(noted)))
            except OSError as err:
                raise ValueError(f"its columns cannot be read: {err}") from err

    def _with_columns_of(self, name: str) -> pa.Schema:
        """Return the columns with types that also hold the values of one more file of the set."""
        with self.folder(name).reading() as file:
            metadata = pq.read_metadata(file)
        stored = metadata.schema.to_arrow_schema()
        if missing := {FILE, PLACE, LEFT_OUT} - {*stored.names}:
            raise ValueError(f"it has no column {', '.join(sorted(missing))}")
        held = changed_schema(stored, restored)
        new = pa.schema([column for column in held if column.name not in (FILE, PLACE, LEFT_OUT)])
        if self.columns.names not in ([], new.names):
            raise ValueError(f"it has columns {new.names}, and other files {self.columns.names}")
        joined = []
        for one, other in zip(self.columns or new, new, strict=True):
            try:
                one = one.with_type(type_of_both(one.type, other.type))
            except pa.ArrowException as err:
                kind = without_values(stored, metadata, [one.name]).field(one.name).type
                if not pa.types.is_null(kind):  # else it is text for lack of any value
                    raise AnnotationError(
                        f"{one.name!r} is {other.type} in {self.shown}/{name}, and {one.type} in "
                        "files before it: remove this folder, and annotate its files again with a "
                        "stage that casts the column, such as by astype() "
                        f"(accept_changed_code=True): {err}"
                    ) from err
            joined.append(one)
        return pa.schema(joined)

    def check(self, states: Mapping[str, str], takes_in: Any, is_complete: bool) -> bool:
        """Tell whether all files are annotated; raise AnnotationError if what it says is untrue.

        `states` are those of the input's files by their names. `takes_in` tells whether the reader
        would read a file of this name, were it there. Without `is_complete`, files may lack
        annotations, and files that are gone leave theirs behind.
        """
        if not states.keys() & self.files.keys():
            raise AnnotationError(
                f"{self.shown} annotates other files, such as {next(iter(self.files), 'none')}, "
                f"and the input has {next(iter(states))}: name the set of this input, or the input "
                "of this set"
            )
        known = self.states
        changes = [name for name, state in states.items() if known.get(name, state) != state]
        if changes:
            raise AnnotationError(
                f"{some_names(changes)} changed since {self.shown} annotated it: annotate it again "
                "(redo_changed=True), or bring back the file as it was"
            )
        missing = [name for name in states if name not in known]
        gone = [name for name in known if name not in states and takes_in(name)]
        unfinished = self.unfinished
        if is_complete and unfinished is not None:
            raise AnnotationError(
                f"{self.shown} is not finished ({unfinished}): run the command that writes it "
                "again, or take null for what is missing (annotations_complete=False)"
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
        """Raise AnnotationError unless the set's rows of a file are those that the file can have.

        `last` is the last piece of the file. The number of rows is known for Parquet; for JSON
        lines, only the byte before which the last of them begins.
        """
        noted = self.files[file].rows
        count = sum(rows.count for rows in noted)
        end = last.rows[1] if last.rows else (last.places or (0, math.inf))[1]
        if any(rows.high >= end for rows in noted) or (last.rows and count != end):
            raise AnnotationError(
                f"{self.shown} has {count:,} rows of {file}, which has {end:,} "
                f"{'rows' if last.rows else 'bytes, and some of them lie behind these'}: annotate "
                "all files again (restart=True), or do not use this set"
            )


def later_folders(store: Store) -> list[str]:
    """List the folders of a set with what was annotated after its first files.

    A folder in which no job has begun is left out: a run that is killed early may leave one.
    """
    names = sorted(name for name in store.folders() if LATER.fullmatch(name))
    return [n for n in names if store.has(f"{n}/{JOB}") or any(map(key_in, store.sizes(n)))]


def job_folders(store: Store) -> list[Store]:
    """Return the folders of an output's jobs: itself, and of a set those of later files."""
    return [store, *map(store.below, later_folders(store))]


def some_names(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _rows_of(name: str, record: Record) -> dict[str, AnnotationRange]:
    """Return the rows that a record of the set's file `name` states for each file of the input."""
    noted, first = {}, 0
    for file, numbers in record.source[ANNOTATED].items():
        count, low, high = map(operator.index, numbers)
        if not (0 < count <= high - low + 1 and low >= 0 and high < MOST_PLACES):
            raise ValueError(f"it has {count} rows of {file} from {low} to {high}")
        has_unread = bool(record.left_out)
        noted[file] = AnnotationRange(name, first, count, low, high, has_unread, record.rows_out)
        first += count
    if first != record.rows_out:
        raise ValueError(f"it has {record.rows_out:,} rows, and {first:,} of its files")
    return noted


def type_of_both(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return the type that holds the values of two columns; see `union`."""
    return one if one == other else union(plain_type(one), plain_type(other))


def holds(kind: pa.DataType, other: pa.DataType) -> bool:
    """Tell whether a type holds the values of another one."""
    try:
        return bool(type_of_both(kind, other) == kind)
    except pa.ArrowException:
        return False


def _check_size(record: Record, sizes: Mapping[str, int]) -> None:
    size = sizes.get(record.name)
    if size != record.file_bytes:
        now = "is gone" if size is None else f"has {size:,} bytes of {record.file_bytes:,}"
        raise BrokenContentError(f"it {now}")


def with_annotations(
    plan: InputParts,
    sets: Sequence[AnnotationSet],
    listed: Collection[str],
    paths: Sequence[str],
    storage_options: dict[str, Any],
    is_complete: bool,
) -> InputParts:
    """Return the parts of an input with the columns of annotation sets beside the files'.

    `listed` are names of files that are there, whether they are read or not. Raises AnnotationError
    unless the sets are of these very files, and UnreadableInputError if two columns have one name.
    """
    stores = [open_store(path, storage_options) for path in paths]

    def takes_in(name: str) -> bool:
        return name not in listed and any(store.matches(name) for store in stores)

    real = {file.path: redacted(file.real) for file in plan.files}
    last = {piece.path: piece for part in plan.parts for piece in part.pieces}
    columns, fields, owners = [], [*plan.schema.arrow], dict.fromkeys(plan.schema.arrow.names, "")
    for known in sets:
        states = states_like(plan.files, known.states, storage_options)
        is_whole = known.check(states, takes_in, is_complete)
        for column, shown in zip(known.columns, known.names.values(), strict=True):
            if shown in owners:
                _refuse_twice(shown, owners[shown], known)
            owners[shown] = known.shown
            fields.append(column.with_name(shown).remove_metadata().with_nullable(True))
        for path, piece in last.items() if is_whole else ():
            known.check_rows(real[path], piece)
        key = known.key_of(states)
        marked = [f.name for f in known.columns if LABEL.items() <= (f.metadata or {}).items()]
        labels = tuple(known.names[name] for name in marked)
        columns.append(AnnotationColumns(known.store.address, known.names, key, is_whole, labels))
    parts = tuple(_with_ranges(part, sets, real) for part in plan.parts)
    schema = replace(plan.schema, arrow=pa.schema(fields), annotations=tuple(columns))
    return replace(plan, parts=parts, schema=schema)


def _with_ranges(part: Part, sets: Sequence[AnnotationSet], real: Mapping[str, str]) -> Part:
    """Return the part with the ranges of each set's rows that belong to its own."""

    def with_ranges(piece: Part) -> Part:
        low, high = piece.places or (0, math.inf)
        ranges = []
        for known in sets:
            file = known.files.get(real[piece.path])
            found = [r for r in (file.rows if file else ()) if r.low < high and r.high >= low]
            ranges.append(tuple(sorted(found, key=lambda rows: rows.low)))
        return replace(piece, annotations=tuple(ranges))

    first, *rest = map(with_ranges, part.pieces)
    return replace(first, followers=tuple(rest))


def _refuse_twice(name: str, owner: str, known: AnnotationSet) -> None:
    where = f"in {owner}" if owner else "in the input"
    raise UnreadableInputError(
        f"the column {name!r} is {where} and in {known.shown}: give the columns of one set a "
        f"prefix, such as {known.shown}={posixpath.basename(known.shown.rstrip('/'))}_"
    )
