"""The task of a job: read one part, map it, publish it."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import posixpath
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.frames import Frame, backend_of, is_text, name_row, plain_type
from gpuclassify.jobs.input.annotation_reader import ANNOTATED
from gpuclassify.jobs.input.files import InputFile
from gpuclassify.jobs.input.parts import InputSchema, Part
from gpuclassify.jobs.input.schema import to_frame
from gpuclassify.jobs.input.sources import read_pieces
from gpuclassify.jobs.ledger.encoding import (
    FILE,
    LEFT_OUT,
    PLACE,
    Encoding,
    UnnamedFolderError,
    arrow_table,
    check_values,
    conform,
    pack_rows,
)
from gpuclassify.jobs.ledger.quarantine import (
    ROW,
    Problem,
    counts_by_kind,
    isolate_bad_rows,
    shortened,
)
from gpuclassify.jobs.ledger.records import (
    Record,
    check_current,
    complete,
    is_published,
    joined_name,
    key_in,
    parse_record,
    part_number,
    publish,
    record_path,
)
from gpuclassify.jobs.output.annotations import annotation_table, extents
from gpuclassify.jobs.report.summary import (
    count_agreements,
    count_lengths,
    count_scores,
    count_sources,
    largest_scores,
)
from gpuclassify.jobs.stores.store import Store
from gpuclassify.mapping.chain import Chain
from gpuclassify.mapping.select import RowFilter
from gpuclassify.mapping.stage_counts import StageCounts, add_examples, count_labels, label_fields
from gpuclassify.workers.retire import PanicError, as_errors, retire_on_broken_device
from gpuclassify.workers.run_context import PartProgress, add_counts, add_up, run_context
from gpuclassify.workers.secrets import recall

# Fields of `Part` in the source of a record, which name its file and the range in it.
_RANGE = ("path", "row_groups", "start", "length", "share")


@dataclass(frozen=True)
class TaskSpec:
    """Settings that all tasks of a job share: stages, schemas, output and ways to count."""

    chain: Chain
    meta_dtypes: Any  # see `Chain.meta_dtypes`
    schema: pa.Schema  # schema of every written part
    directory: Store  # output directory
    encoding: Encoding
    on_error: str  # "raise", "quarantine" or "whole"; see `FileReader.find_parts`
    backend: str  # see `part_backend`
    keep_index: bool  # whether files get the frames' index as a column
    # Columns that are counted: labels and scores of the output, texts of the input.
    label_fields: tuple[str, ...]
    number_fields: tuple[str, ...]
    text_fields: tuple[str, ...]
    input_schema: InputSchema | None  # schema of input files, without storage options
    input_name: str  # name of the storage options in `gpuclassify.workers.secrets`
    source_field: str | None = None  # column by which rows of input and output are counted
    examples: int = 0  # maximum texts at each end of a group of examples
    run_began: float = 0.0  # see `Record`
    annotations: pa.Schema | None = None  # schema of annotations, if they are written
    metadata: Mapping[bytes, bytes] = field(
        default_factory=dict
    )  # key-value metadata for Parquet files
    # Function of a part's frame and number that is called before the stages.
    before: Callable[[Frame, int], Frame] | None = None

    @property
    def part_backend(self) -> str:
        """Library of the frames that parts of files are read into: "pandas" or "cudf".

        It is `backend`, but "pandas" if only models read these frames: they tokenize on the host.
        """
        first = itertools.takewhile(lambda stage: not stage.moves_frames, self.chain.mappers)
        reads_texts = self.before is None and all(stage.text_mappers() for stage in first)
        return "pandas" if reads_texts else self.backend

    def split_filters(self) -> tuple[CountedSelect | None, TaskSpec]:
        """Split off the first stages, as long as they only drop rows; readers can apply these.

        Returns the filters, None if there are none, and the settings with the remaining stages.
        With `source_field`, nothing is split off, because dropped rows are counted, too.
        """
        filters: list[RowFilter] = []
        for mapper in self.chain.mappers:
            row_filter = mapper.row_filter()
            if row_filter is None or mapper.schema().names:
                break
            filters.append(row_filter)
        if not filters or self.source_field is not None:
            return None, self
        count = len(filters)
        rest = replace(
            self, chain=Chain(self.chain.mappers[count:]), meta_dtypes=self.meta_dtypes[count:]
        )
        return CountedSelect(filters), rest

    def pack(self) -> bytes:
        """Pickle the settings to bytes, because a scheduler may lack the modules of stages."""
        return cloudpickle.dumps(self)

    @staticmethod
    def unpack(packed: bytes) -> TaskSpec:
        """Unpickle the result of `pack` on a worker, which has the stages' modules."""
        return cloudpickle.loads(packed)


class CountedSelect:
    """Row filters that several threads apply while they read the files of a part.

    `counts` has counts by the name of the condition, as in `StageCounts.counts`.
    """

    def __init__(self, filters: Sequence[RowFilter]) -> None:
        fields = (name for row_filter in filters for name in row_filter.read_fields)
        self.read_fields = tuple(dict.fromkeys(fields))
        self.counts: dict[str, Any] = {}
        self._filters, self._lock = filters, threading.Lock()

    def choose(self, columns: pa.Table) -> np.ndarray:
        """Return a mask of the rows that all filters keep, bool (rows,), and add to `counts`."""
        kept = np.ones(len(columns), dtype=bool)
        with run_context(stages=StageCounts()) as context:
            for row_filter in self._filters:
                kept[kept] = row_filter.choose(columns.filter(pa.array(kept)))
        with self._lock:
            add_counts(self.counts, context.stages.counts if context.stages else {})
        return kept


@dataclass(frozen=True)
class PartRead:
    """Part that was read, but not mapped: its rows, and everything else that its record needs."""

    name: str  # name of the file to write
    number: int
    spec: TaskSpec
    frame: Frame
    source: dict[str, Any]  # see `Record`
    counted: Frame | pa.Table  # the same rows, for counting; in host memory if read from files
    rows: int  # rows read, including those that filters dropped
    problems: list[Problem] = field(default_factory=list)
    first_stages: dict[str, Any] = field(default_factory=dict)  # counts of filters while reading
    positions: pa.Table | None = None  # file and position of each row, for annotations
    seconds: float = 0.0  # reading time


@retire_on_broken_device
def run_part(
    part: Part, number: int, name: str, packed: bytes, files: Sequence[InputFile | None] = ()
) -> Record:
    """Read one part of the input files, map it, and publish it as the file `name`.

    `number` is the part's number, and `packed` are the settings from `TaskSpec.pack`. Returns the
    record of the part; if an earlier attempt has written the part, returns that record. `files` has
    each of the part's input files as it was when the job began; changed ones raise
    ChangedInputError. A file that is None is not checked, and no file is if `files` is empty.
    """
    spec = TaskSpec.unpack(packed)
    with _explained(f"part {posixpath.basename(name)} of {part}", name, spec):
        written = _already_written(name, spec)
        return written or _run(_read(part, number, name, spec, files))


def _read(
    part: Part, number: int, name: str, spec: TaskSpec, files: Sequence[InputFile | None]
) -> PartRead:
    """Read a part, and apply the row filters among the first stages of `spec`.

    The result has the settings `spec` without the applied stages. See `run_part` on the arguments.
    """
    started = time.perf_counter()
    assert spec.input_schema is not None
    schema = replace(spec.input_schema, storage_options=recall(spec.input_name, {}))
    text_fields = spec.chain.main_text_fields
    select, spec = spec.split_filters()
    table, problems, source = read_pieces(part, files, schema, spec.on_error, text_fields, select)
    first = {} if select is None else select.counts
    positions = None
    if spec.annotations is not None:
        positions = table.select([FILE, PLACE])
        needed = {*spec.chain.read_fields}
        table = table.drop_columns([name for name in (FILE, PLACE) if name not in needed])
    frame = to_frame(table, spec.part_backend)
    return PartRead(
        name=name,
        number=number,
        spec=spec,
        frame=frame,
        source=source,
        counted=frame if spec.part_backend == "pandas" else table,
        rows=next((counts["read"] for counts in first.values()), len(table)),
        problems=problems,
        first_stages=first,
        positions=positions,
        seconds=time.perf_counter() - started,
    )


@retire_on_broken_device
def run_partition(frame: Frame, number: int, name: str, packed: bytes) -> Record:
    """Map one partition of a Dask frame, and publish it as the file `name`; see `run_part`."""
    spec = TaskSpec.unpack(packed)
    with _explained(f"part {posixpath.basename(name)} of partition {number}", name, spec):
        written = _already_written(name, spec)
        read = PartRead(name, number, spec, frame, {"partition": number}, frame, len(frame))
        return written or _run(read)


@contextlib.contextmanager
def _explained(part: str, name: str, spec: TaskSpec) -> Iterator[None]:
    """Add the note `part`, a part's description, to errors of the block.

    A missing file raises JobChangedError instead if another run has started over in the output.
    """
    try:
        try:
            yield
        except FileNotFoundError:
            check_current(spec.directory, key_in(name))
            raise
    except Exception as err:
        err.add_note(part)
        raise


def _run(part: PartRead) -> Record:
    """Map a part's rows, and publish them; return the record that `publish` returns."""
    started, spec, name, frame = time.perf_counter(), part.spec, part.name, part.frame
    mappers = sum(bool(mapper.text_fields) for mapper in spec.chain.mappers)
    progress = PartProgress(name, len(frame), mappers)
    with run_context(stats=[], part=progress) as context:
        frame = frame if spec.before is None else spec.before(frame, part.number)
        table, failed, stages = _map_rows(frame, part.source, spec)
    mapped = time.perf_counter()
    stats: dict[str, float] = {}
    for run_stats in context.stats or ():
        add_up(stats, run_stats.as_dict())
    names, source = spec.encoding.partition_by, part.source
    if spec.annotations is not None and part.positions is not None:
        failed = [_add_position(problem, part.positions) for problem in failed]
        problems = [*part.problems, *failed]
        table = annotation_table(table, part.positions, problems, spec.annotations)
        source = {**source, ANNOTATED: extents(table)}
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), **spec.metadata})
    content = pack_rows(table, names) if names else spec.encoding.encode(table)
    problems = [*part.problems, *failed]
    record = Record(
        name=name,
        source=source,
        rows_in=part.rows,
        rows_out=len(table),
        file_bytes=len(content),
        digest=hashlib.sha256(content).hexdigest(),
        left_out=counts_by_kind(problems),
        first_problem=str(problems[0]) if problems else "",
        rows_marked=0 if spec.annotations is None else pc.count(table[LEFT_OUT]).as_py(),
        stages={**part.first_stages, **stages.counts},
        examples=stages.examples,
        **_counts(part.counted, table, spec),
        seconds={
            "read": part.seconds,
            "map": mapped - started,
            "write": time.perf_counter() - mapped,
        },
        stats=stats,
        finished=time.time(),
        run_began=spec.run_began,
        worker=f"{socket.gethostname()}:{os.getpid()}",
    )
    directory = spec.directory
    check_current(directory, key_in(name))
    return publish(directory, record, content, problems, spec.encoding)


def join_parts(
    directory: Store, names: Sequence[str], count: int, encoding: Encoding
) -> list[Record]:
    """Publish the parts in the files `names` as one file, and then remove them; return the records.

    The parts are neighbours, and `count` is the number of all parts of the job. If columns have no
    common type, there are several files. If another client has joined the parts, returns the
    records that it made, without damaged ones. Raises ValueError if a part or its record is
    damaged.
    """
    key, first, last = str(key_in(names[0])), part_number(names[0]), part_number(names[-1])
    name = joined_name(first, last, count, key, encoding.suffix)

    def join_halves() -> list[Record]:
        half = len(names) // 2
        halves = (names[:half], names[half:])
        return [r for part in halves for r in join_parts(directory, part, count, encoding)]

    try:
        parts = [parse_record(directory.read(record_path(part))) for part in names]
        contents = [directory.read(part) for part in names]
    except FileNotFoundError:
        check_current(directory, key)
        try:
            record = complete(directory, name, encoding)  # another client has joined them
        except FileNotFoundError:
            if len(names) == 1:
                raise
            return join_halves()  # that client has found no common type
        return [] if record is None else [record]
    records = [record for record in parts if record is not None]
    digests = [hashlib.sha256(content).hexdigest() for content in contents]
    if digests != [record.digest for record in records]:
        raise ValueError(
            f"parts {first:,} to {last:,} in {directory} are not what was written: run the same "
            "job again, which does the damaged parts anew"
        )
    try:
        content = contents[0] if len(contents) == 1 else encoding.join(contents)
    except (pa.ArrowException, ArithmeticError):
        return join_halves()
    record = Record(
        name=name,
        source={},
        rows_in=sum(record.rows_in for record in records),
        rows_out=sum(record.rows_out for record in records),
        file_bytes=len(content),
        digest=hashlib.sha256(content).hexdigest(),
        finished=time.time(),
        joined=tuple(records),
    )
    check_current(directory, key)
    record = publish(directory, record, content, (), encoding)
    directory.remove(*names, *map(record_path, names))
    return [record]


def _already_written(name: str, spec: TaskSpec) -> Record | None:
    """Return the record of the part in the file `name`; None if there is no undamaged one."""
    directory = spec.directory
    if not is_published(directory, name, spec.encoding):
        return None
    check_current(directory, key_in(name))
    return complete(directory, name, spec.encoding)


def _map_rows(
    frame: Frame, source: dict[str, Any], spec: TaskSpec
) -> tuple[pa.Table, list[Problem], StageCounts]:
    """Run the stages on a part's rows; return a table, problems of failed rows, and counts.

    `source` says where the rows are from, for the problems. Failed rows raise, unless
    `spec.on_error` is "quarantine" and their error is one of `row_errors`.
    """
    done = StageCounts(spec.examples)

    def run(start: int, stop: int) -> pa.Table:
        stages = StageCounts(spec.examples)
        with run_context(stages=stages), as_errors():
            rows = frame.iloc[start:stop]
            if spec.annotations is not None:  # a stage may renumber rows, as merging does
                rows = rows.reset_index(drop=True)
            mapped = spec.chain.map_frame(rows, spec.meta_dtypes)
            if spec.annotations is not None:
                mapped = _take_new_columns(rows, mapped, spec.schema.names)
            folders = spec.encoding.partition_by
            table = conform(arrow_table(mapped, spec.keep_index), spec.schema, folders)
            check_values(table, folders)
        add_counts(done.counts, stages.counts)  # counted only if all rows have passed
        add_examples(done.examples, stages.examples)
        return table

    if spec.on_error != "quarantine" or not len(frame):
        return run(0, len(frame)), [], done
    tables, problems = [], []
    for row, result in isolate_bad_rows(run, 0, len(frame), row_errors()):
        if isinstance(result, Exception):
            problems.append(_row_problem(frame, row, source, result))
        else:
            tables.append(result)
    return pa.concat_tables(tables or [run(0, 0)]), problems, done


def _take_new_columns(rows: Frame, mapped: Frame, names: list[str]) -> Any:
    """Return the columns `names` of `mapped`, the stages' result for the frame `rows`.

    Raises ValueError if a stage seems to have dropped, made or reordered rows.
    """
    if not mapped.index.equals(rows.index) or _have_moved(rows, mapped):
        raise ValueError(
            "a stage has dropped, made or moved rows, and annotations need all of them in order: "
            "let it add a column instead, and keep the order of rows"
        )
    return mapped[names]


def _have_moved(rows: Frame, mapped: Frame) -> bool:
    """Return whether the rows of `mapped`, a stage's result, seem reordered compared to `rows`.

    The stage may have reset the index, so texts and integers of columns in both frames are
    compared: in reordered rows, changed values are mostly values of other rows.
    """
    have_moved = False
    for name in (name for name in rows.columns if name in mapped.columns):
        try:
            old, new = (backend_of(frame).list_array(frame, name) for frame in (rows, mapped))
            kind = plain_type(old.type)
            if not (is_text(kind) or pa.types.is_integer(kind)):
                continue
            old, new = old.cast(kind), new.cast(kind)
        except (TypeError, ValueError, NotImplementedError):  # the column has a new type
            continue
        is_changed = pc.fill_null(pc.not_equal(old, new), False)
        if pc.any(is_changed).as_py():
            # Moving brings values from other rows, and changing them in place, such as by
            # stripping texts, makes new ones.
            new, old = new.filter(is_changed), old.filter(is_changed)
            have_moved |= 2 * pc.sum(pc.is_in(new, old)).as_py() >= len(new)
        elif 2 * pc.count_distinct(old).as_py() > len(old):  # identifies most rows
            return False
    return have_moved


def _add_position(problem: Problem, positions: pa.Table) -> Problem:
    row = problem.row or 0
    file, position = positions[FILE][row].as_py(), positions[PLACE][row].as_py()
    return replace(problem, file=file, place=position)


def row_errors() -> tuple[type[Exception], ...]:
    """Return the types of errors that leave out a row if `on_error` is "quarantine"."""
    from gpuclassify.inference.memory import DocumentTooLargeError
    from gpuclassify.mapping.runners import NonFiniteOutputError

    return (
        NonFiniteOutputError,
        DocumentTooLargeError,
        UnicodeEncodeError,
        UnnamedFolderError,
        PanicError,
    )


def _row_problem(frame: Frame, row: int, source: dict[str, Any], error: Exception) -> Problem:
    row_frame = frame.iloc[row : row + 1]
    try:
        record = arrow_table(row_frame, keep_index=False).to_pylist()[0]
        content = shortened(json.dumps(record, ensure_ascii=False, default=str))
    except (ValueError, OverflowError):  # a value has no Python or JSON form
        content = name_row(frame, row)
    for file in source.get("files", ()):
        source = file
        if row < file["rows"]:
            break
        row -= file["rows"]
    known = {name: source[name] for name in _RANGE if name in source}
    where = str(Part(**known)) if known else f"partition {source['partition']}"
    reason = str(error)
    if isinstance(error, UnicodeEncodeError):
        half = ord(error.object[error.start])
        reason = (
            f"a text has \\u{half:04x}, half of a surrogate pair, which UTF-8 cannot encode: put "
            "another character in its place, such as U+FFFD"
        )
    return Problem(ROW, where, reason, row=row, content=content)


def _counts(read: Frame | pa.Table, kept: pa.Table, spec: TaskSpec) -> dict[str, Any]:
    """Return counts of rows for a part's record, by field of `Record`.

    `kept` has the output's rows, and `read` the rows read, without rows that a `CountedSelect`
    dropped.
    """
    column, sources = spec.source_field, {}
    if column is not None:
        values = _columns(read, [column])[column]
        sources = {column: count_sources(values, values if spec.annotations else kept[column])}
    fields = [label_fields([mapper]) for mapper in spec.chain.mappers]
    fields += [known.labels for known in spec.input_schema.annotations] if spec.input_schema else []
    labels = count_labels(kept, spec.label_fields)
    first_labels = [labels[0] for labels in fields if labels]
    return {
        "labels": labels["labels"],
        "labelled": labels["labelled"],
        "numbers": count_scores(kept, spec.number_fields),
        "largest": largest_scores(kept, spec.number_fields),
        "text_lengths": count_lengths(_texts(read, spec.text_fields)),
        "agreements": count_agreements(kept, first_labels),
        "sources": sources,
    }


def _columns(read: Frame | pa.Table, names: list[str]) -> pa.Table:
    return read.select(names) if isinstance(read, pa.Table) else arrow_table(read[names], False)


def _texts(read: Frame | pa.Table, fields: tuple[str, ...]) -> dict[str, Any]:
    """Return the columns in `fields` that are text, by name; {} if a text has no UTF-8 form."""
    known = read.column_names if isinstance(read, pa.Table) else read.columns
    present = [name for name in fields if name in known]
    if not present:
        return {}
    try:
        table = _columns(read, present)
    except UnicodeEncodeError:
        return {}
    kinds = (pa.string(), pa.large_string())
    return {name: table[name] for name in present if table[name].type in kinds}
