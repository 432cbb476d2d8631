"""Annotation sets: columns that jobs wrote beside the rows of files, and what of an input they are.

A set is the output of a job, in the folder itself, and of later ones, for files that came or
changed since, in folders below it. However a set and a reader are cut, rows with one place in one
file are beside each other.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gpuclassify.jobs.input.arrow_types import changed, restored
from gpuclassify.jobs.input.files import states_like
from gpuclassify.jobs.input.notes import (
    ANNOTATED,
    FILE,
    LEFT_OUT,
    PLACE,
    AnnotationColumns,
    AnnotationError,
    NotedRows,
    damaged,
)
from gpuclassify.jobs.input.parts import InputParts, Part
from gpuclassify.jobs.output.manifest import SUCCESS, manifest_of, read_job
from gpuclassify.jobs.output.records import Record
from gpuclassify.mapping.stage_counts import LABEL
from gpuclassify.stores.names import redacted
from gpuclassify.stores.opening import open_store
from gpuclassify.stores.store import BrokenContentError, Store, UnreadableInputError

LATER = re.compile(r"more-\d{5}")  # folders of a set with what was annotated later
MOST_NAMED = 3  # files of an error


@dataclass
class FileNotes:
    """Annotations of one file: of which state of it, and where they are."""

    state: str
    job: str  # its key
    rows: list[NotedRows] = field(default_factory=list)


@dataclass
class AnnotationSet:
    """A set as its jobs have described it; `unfinished` is a folder whose job is not done yet."""

    store: Store
    prefix: str = ""
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)  # job.json by folder
    files: dict[str, FileNotes] = field(default_factory=dict)
    unfinished: str | None = None
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
                opened.unfinished = opened.unfinished or folder or "."
            for file, state in job["identity"]["input file"].items():
                opened.files[file] = FileNotes(state, job["key"])  # in place of an earlier state's
        return opened

    @property
    def states(self) -> dict[str, str]:
        """State in which each file was annotated last."""
        return {name: notes.state for name, notes in self.files.items()}

    def key_of(self, files: Collection[str]) -> str:
        """Return the keys of the jobs that annotated these files last."""
        keys = {self.files[name].job: None for name in sorted(files) if name in self.files}
        return "-".join(keys)

    def next_folder(self) -> str:
        """Return the folder for what is annotated next."""
        return f"more-{len(self.jobs):05d}"

    def folder(self, name: str) -> Store:
        """Return the folder of one of its jobs."""
        return self.store.below(name) if name else self.store

    def read_records(self) -> None:
        """Find the rows of each file, and the columns."""
        some = ""
        for folder, job in self.jobs.items():
            store = self.folder(folder)
            sizes = store.part_sizes()
            for name, record in manifest_of(store).listed().items():
                if record is None:
                    raise damaged(self.shown, posixpath.join(folder, name), "nor is its record")
                _check_size(self.shown, folder, record, sizes)
                some = posixpath.join(folder, record.name)
                first, has_unread = 0, bool(record.left_out)
                for file, (count, low, high) in record.source[ANNOTATED].items():
                    if self.files[file].job == job["key"]:  # else it was annotated again later
                        rows = NotedRows(some, first, count, low, high, has_unread)
                        self.files[file].rows.append(rows)
                    first += count
        if some:
            self.columns = self._columns_of(some)

    def _columns_of(self, name: str) -> pa.Schema:
        store = open_store(f"{self.store.address}/{name}", self.store.storage_options)
        try:
            with store.reading() as file:
                held = changed(pq.read_schema(file).empty_table(), restored).schema
        except BrokenContentError as err:
            raise damaged(self.shown, name, str(err)) from err
        return pa.schema([each for each in held if each.name not in (FILE, PLACE, LEFT_OUT)])

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
        if is_complete and self.unfinished is not None:
            raise AnnotationError(
                f"{self.shown} is not finished ({self.unfinished}): run the command that writes it "
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
        return self.unfinished is None and not missing


def later_folders(store: Store) -> list[str]:
    """List the folders of a set with what was annotated after its first files."""
    return sorted(name for name in store.folders() if LATER.fullmatch(name))


def job_folders(store: Store) -> list[Store]:
    """Return the folders of an output's jobs: itself, and of a set those of later files."""
    return [store, *map(store.below, later_folders(store))]


def some_names(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _check_size(shown: str, folder: str, record: Record, sizes: Mapping[str, int]) -> None:
    size = sizes.get(record.name)
    if size != record.file_bytes:
        now = "is gone" if size is None else f"has {size:,} bytes of {record.file_bytes:,}"
        raise damaged(shown, posixpath.join(folder, record.name), f"it {now}")


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
        folder = open_store(posixpath.dirname(name), storage_options)
        is_taken = (store.would_match(folder, posixpath.basename(name)) for store in stores)
        return name not in listed and any(is_taken)

    columns, fields, owners = [], [*plan.schema.arrow], dict.fromkeys(plan.schema.arrow.names, "")
    for each in sets:
        states = states_like(plan.files, each.states, storage_options)
        is_whole = each.check(states, takes_in, is_complete)
        for column, shown in zip(each.columns, each.names.values(), strict=True):
            if shown in owners:
                _refuse_twice(shown, owners[shown], each)
            owners[shown] = each.shown
            fields.append(column.with_name(shown).remove_metadata().with_nullable(True))
        key = each.key_of(states)
        marked = [f.name for f in each.columns if LABEL.items() <= (f.metadata or {}).items()]
        labels = tuple(each.names[name] for name in marked)
        columns.append(AnnotationColumns(each.store.address, each.names, key, is_whole, labels))
    real = {file.path: redacted(file.real) for file in plan.files}
    parts = tuple(_noted(part, sets, real) for part in plan.parts)
    schema = replace(plan.schema, arrow=pa.schema(fields), annotations=tuple(columns))
    return replace(plan, parts=parts, schema=schema)


def _noted(part: Part, sets: Sequence[AnnotationSet], real: Mapping[str, str]) -> Part:
    """Return the part with the rows of each set that are beside its own."""

    def noted(piece: Part) -> Part:
        low, high = piece.places or (0, math.inf)
        notes = []
        for each in sets:
            known = each.files.get(real[piece.path])
            rows = known.rows if known else []
            beside = [some for some in rows if some.low < high and some.high >= low]
            notes.append(tuple(sorted(beside, key=lambda some: some.low)))
        return replace(piece, notes=tuple(notes))

    first, *rest = map(noted, part.pieces)
    return replace(first, followers=tuple(rest))


def _refuse_twice(name: str, owner: str, each: AnnotationSet) -> None:
    where = f"in {owner}" if owner else "in the input"
    raise UnreadableInputError(
        f"the column {name!r} is {where} and in {each.shown}: give the columns of one set a "
        f"prefix, such as {each.shown}={posixpath.basename(each.shown.rstrip('/'))}_"
    )
