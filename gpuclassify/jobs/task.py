"""The task of a job: read one part, map it, publish it."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
    key_in,
    publish,
)
from gpuclassify.jobs.output.annotations import annotation_table, extents
from gpuclassify.jobs.report.summary import (
    count_agreements,
    count_lengths,
    count_scores,
    count_sources,
)
from gpuclassify.jobs.stores.store import Store
from gpuclassify.mapping.chain import Chain
from gpuclassify.mapping.select import RowFilter
from gpuclassify.mapping.stage_counts import StageCounts, add_examples, count_labels, label_fields
from gpuclassify.workers.retire import PanicError, as_errors, retire_on_broken_device
from gpuclassify.workers.run_context import PartProgress, add_counts, add_up, run_context
from gpuclassify.workers.secrets import recall


@dataclass(frozen=True)
class TaskSpec:
    """Specification of what every task of a job does with its part."""

    chain: Chain
    meta_dtypes: Any  # what `chain` must know of the input's meta
    schema: pa.Schema  # of every part that is written
    directory: Store  # of the output
    encoding: Encoding
    on_error: str  # "raise", "quarantine" or "whole"; see `FileReader.find_parts`
    backend: str  # of the frames that files are read as, where a stage sees the difference
    keep_index: bool  # whether files get the frames' index as a column
    # Columns that are counted: labels and scores of the output, texts of the input.
    label_fields: tuple[str, ...]
    number_fields: tuple[str, ...]
    text_fields: tuple[str, ...]
    input_schema: InputSchema | None  # of input files, without storage options
    input_name: str  # under which `gpuclassify.workers.secrets` knows the storage options
    source_field: str | None = None  # by whose values rows of input and output are counted
    examples: int = 0  # texts at each end of a group of examples, at most
    run_began: float = 0.0  # see `Record`
    annotations: pa.Schema | None = None  # of what is written beside the input, instead of rows
    # What is done with a part before the stages: a function of its frame and its number.
    before: Callable[[Frame, int], Frame] | None = None

    @property
    def part_backend(self) -> str:
        """Library of the frames that the stages get: cudf only where one sees them.

        Others tokenize on the host, and would all have to bring the texts back from the GPU.
        """
        first = itertools.takewhile(lambda stage: not stage.moves_frames, self.chain.mappers)
        reads_texts = self.before is None and all(stage.text_mappers() for stage in first)
        return "pandas" if reads_texts else self.backend

    def first_select(self) -> tuple[CountedSelect | None, TaskSpec]:
        """Return the first stages, if reading can do what they do, and the spec of the others.

        Not where rows read are counted by a column, of those that they drop, too.
        """
        choices: list[RowFilter] = []
        for mapper in self.chain.mappers:
            choice = mapper.row_filter()
            if choice is None or mapper.schema().names:
                break
            choices.append(choice)
        if not choices or self.source_field is not None:
            return None, self
        count = len(choices)
        rest = replace(
            self, chain=Chain(self.chain.mappers[count:]), meta_dtypes=self.meta_dtypes[count:]
        )
        return CountedSelect(choices), rest

    def pack(self) -> bytes:
        """Pickle the spec: a scheduler unpickles tasks, and need not have the modules of stages."""
        return cloudpickle.dumps(self)

    @staticmethod
    def unpack(packed: bytes) -> TaskSpec:
        """Unpickle the spec on a worker, which has the modules of stages."""
        return cloudpickle.loads(packed)


class CountedSelect:
    """Choices that pieces of a part are read by, several at a time, and their counts in all."""

    def __init__(self, choices: Sequence[RowFilter]) -> None:
        fields = (name for choice in choices for name in choice.read_fields)
        self.read_fields = tuple(dict.fromkeys(fields))
        self.counts: dict[str, Any] = {}
        self._choices, self._lock = choices, threading.Lock()

    def choose(self, columns: pa.Table) -> np.ndarray:
        """Return which rows all choose, bool (rows,)."""
        kept = np.ones(len(columns), dtype=bool)
        with run_context(stages=StageCounts()) as context:
            for choice in self._choices:
                kept[kept] = choice.choose(columns.filter(pa.array(kept)))
        with self._lock:
            add_counts(self.counts, context.stages.counts if context.stages else {})
        return kept


@dataclass(frozen=True)
class PartRead:
    """One part of a job, as it was read: its rows and everything else that its record needs."""

    name: str  # of the file that is written
    number: int
    spec: TaskSpec
    frame: Frame
    source: dict[str, Any]  # where the rows are from
    counted: Frame | pa.Table  # the same rows, as they are counted: no GPU gives them back
    rows: int  # count of rows read, also of those that a choice of rows has dropped
    problems: list[Problem] = field(default_factory=list)
    first_stages: dict[str, Any] = field(default_factory=dict)  # counts of stages that reading did
    places: pa.Table | None = None  # file and place of each row, for annotations
    seconds: float = 0.0  # of reading


@retire_on_broken_device
def run_part(
    part: Part, number: int, name: str, packed: bytes, files: Sequence[InputFile | None] = ()
) -> Record:
    """Read one part of the input files, map it, and publish it as the file `name`.

    Raises ChangedInputError unless its pieces are from the `files` that were listed when the job
    began, and JobChangedError if another run has started over in the output.
    """
    spec = TaskSpec.unpack(packed)
    with _explained(f"part {name} of {part}", name, spec):
        written = _already_written(name, spec)
        return written or _run(_read(part, number, name, spec, files))


def _read(
    part: Part, number: int, name: str, spec: TaskSpec, files: Sequence[InputFile | None]
) -> PartRead:
    """Read a part, by the choices of rows that are its first stages."""
    started = time.perf_counter()
    assert spec.input_schema is not None
    schema = replace(spec.input_schema, storage_options=recall(spec.input_name, {}))
    text_fields = spec.chain.main_text_fields
    select, spec = spec.first_select()
    table, problems, source = read_pieces(part, files, schema, spec.on_error, text_fields, select)
    first = {} if select is None else select.counts
    places = None
    if spec.annotations is not None:
        places = table.select([FILE, PLACE])
        lent = {*spec.chain.read_fields}
        table = table.drop_columns([name for name in (FILE, PLACE) if name not in lent])
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
        places=places,
        seconds=time.perf_counter() - started,
    )


@retire_on_broken_device
def run_partition(frame: Frame, number: int, name: str, packed: bytes) -> Record:
    """Map one partition of a Dask frame, and publish it as the file `name`."""
    spec = TaskSpec.unpack(packed)
    with _explained(f"part {name} of partition {number}", name, spec):
        written = _already_written(name, spec)
        read = PartRead(name, number, spec, frame, {"partition": number}, frame, len(frame))
        return written or _run(read)


@contextlib.contextmanager
def _explained(part: str, name: str, spec: TaskSpec) -> Iterator[None]:
    """Name the part in errors, and another run's start if files have vanished because of it."""
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
    """Map a part's rows and publish the result."""
    started, spec, name, frame = time.perf_counter(), part.spec, part.name, part.frame
    mappers = sum(bool(mapper.text_fields) for mapper in spec.chain.mappers)
    progress = PartProgress(name, len(frame), mappers)
    with run_context(stats=[], part=progress) as context:
        left = frame if spec.before is None else spec.before(frame, part.number)
        table, failed, stages = _map_rows(left, part.source, spec)
    mapped = time.perf_counter()
    stats: dict[str, float] = {}
    for run_stats in context.stats or ():
        add_up(stats, run_stats.as_dict())
    names, source, rows = spec.encoding.partition_by, part.source, part.rows
    if spec.annotations is not None and part.places is not None:
        failed = [_placed(problem, part.places) for problem in failed]
        problems = [*part.problems, *failed]
        table = annotation_table(table, part.places, problems, spec.annotations)
        source, rows = {**source, ANNOTATED: extents(table)}, len(table)
    content = pack_rows(table, names) if names else spec.encoding.encode(table)
    problems = [*part.problems, *failed]
    record = Record(
        name=name,
        source=source,
        rows_in=rows,
        rows_out=len(table),
        file_bytes=len(content),
        digest=hashlib.sha256(content).hexdigest(),
        left_out=counts_by_kind(problems),
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


def _already_written(name: str, spec: TaskSpec) -> Record | None:
    """Return the record of a part that an earlier attempt has written, or None."""
    directory = spec.directory
    if not is_published(directory, name, spec.encoding):
        return None
    check_current(directory, key_in(name))
    return complete(directory, name, spec.encoding)


def _map_rows(
    frame: Frame, source: dict[str, Any], spec: TaskSpec
) -> tuple[pa.Table, list[Problem], StageCounts]:
    """Map the rows; return the results, the problems of failed rows, and counts of the stages."""
    done = StageCounts(spec.examples)

    def run(start: int, stop: int) -> pa.Table:
        stages = StageCounts(spec.examples)
        with run_context(stages=stages), as_errors():
            rows = frame.iloc[start:stop]
            if spec.annotations is not None:  # a stage may number rows anew, as merging does
                rows = rows.reset_index(drop=True)
            mapped = spec.chain.map_frame(rows, spec.meta_dtypes)
            if spec.annotations is not None:
                mapped = _beside(rows, mapped, spec.schema.names)
            folders = spec.encoding.partition_by
            table = conform(arrow_table(mapped, spec.keep_index), spec.schema, folders)
            check_values(table, folders)
        add_counts(done.counts, stages.counts)  # now that nothing has failed
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


def _beside(rows: Frame, mapped: Frame, names: list[str]) -> Any:
    """Return the new columns; raise ValueError if a stage has dropped, made or moved rows."""
    if not mapped.index.equals(rows.index) or _have_moved(rows, mapped):
        raise ValueError(
            "a stage has dropped, made or moved rows, and annotations stand beside all of them: "
            "let it add a column instead, and keep the order of rows"
        )
    return mapped[names]


def _have_moved(rows: Frame, mapped: Frame) -> bool:
    """Return whether rows have moved; a stage that moves them may number them anew.

    Most of the changed values of a column lie in another changed row then. They do not if a stage
    changes values in place, such as by stripping texts, or an unchanged column identifies most
    rows.
    """
    have_moved = False
    for name in (name for name in rows.columns if name in mapped.columns):
        try:
            old, new = (backend_of(frame).list_array(frame, name) for frame in (rows, mapped))
            kind = plain_type(old.type)
            if not (is_text(kind) or pa.types.is_integer(kind)):
                continue
            old, new = old.cast(kind), new.cast(kind)
        except (TypeError, ValueError, NotImplementedError):  # the stage has made other values
            continue
        is_changed = pc.fill_null(pc.not_equal(old, new), False)
        if pc.any(is_changed).as_py():
            new, old = new.filter(is_changed), old.filter(is_changed)
            have_moved |= 2 * pc.sum(pc.is_in(new, old)).as_py() >= len(new)
        elif 2 * pc.count_distinct(old).as_py() > len(old):
            return False
    return have_moved


def _placed(problem: Problem, places: pa.Table) -> Problem:
    row = problem.row or 0
    return replace(problem, file=places[FILE][row].as_py(), place=places[PLACE][row].as_py())


def row_errors() -> tuple[type[Exception], ...]:
    """Return the errors of one row that cannot be scored or written, whatever its neighbours."""
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
    one = frame.iloc[row : row + 1]
    try:
        record = arrow_table(one, keep_index=False).to_pylist()[0]
        content = shortened(json.dumps(record, ensure_ascii=False, default=str))
    except (ValueError, OverflowError):  # what Python cannot write or lacks is not shown either
        content = name_row(frame, row)
    for file in source.get("files", ()):
        source = {key: value for key, value in file.items() if key != "rows"}
        if row < file["rows"]:
            break
        row -= file["rows"]
    where = ", ".join(f"{key} {value}" for key, value in source.items())
    return Problem(ROW, where, str(error), row=row, content=content)


def _counts(read: Frame | pa.Table, kept: pa.Table, spec: TaskSpec) -> dict[str, Any]:
    """Count the rows read, in a frame or table, and the rows kept, for the part's record."""
    column, sources = spec.source_field, {}
    if column is not None:
        values = _columns(read, [column])[column]
        sources = {column: count_sources(values, values if spec.annotations else kept[column])}
    fields = [label_fields([mapper]) for mapper in spec.chain.mappers]
    fields += [each.labels for each in spec.input_schema.annotations] if spec.input_schema else []
    first_labels = [labels[0] for labels in fields if labels]
    return {
        "labels": count_labels(kept, spec.label_fields),
        "numbers": count_scores(kept, spec.number_fields),
        "text_lengths": count_lengths(_texts(read, spec.text_fields)),
        "agreements": count_agreements(kept, first_labels),
        "sources": sources,
    }


def _columns(read: Frame | pa.Table, names: list[str]) -> pa.Table:
    return read.select(names) if isinstance(read, pa.Table) else arrow_table(read[names], False)


def _texts(read: Frame | pa.Table, fields: tuple[str, ...]) -> dict[str, Any]:
    """Return the columns of text that the input has."""
    known = read.column_names if isinstance(read, pa.Table) else read.columns
    there = [name for name in fields if name in known]
    if not there:
        return {}
    try:
        table = _columns(read, there)
    except UnicodeEncodeError:
        return {}
    kinds = (pa.string(), pa.large_string())
    return {name: table[name] for name in there if table[name].type in kinds}
