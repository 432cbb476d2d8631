"""The task of a job: read one part, map it, publish it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pyarrow as pa

from gpuclassify.frames import name_row
from gpuclassify.jobs.access import options_for
from gpuclassify.jobs.files import InputFile, check_unchanged, redacted
from gpuclassify.jobs.input.parts import Form, Part, read_table
from gpuclassify.jobs.input.schema import to_frame
from gpuclassify.jobs.output.encoding import Encoding, arrow_table, conform
from gpuclassify.jobs.output.manifest import check_current, key_in
from gpuclassify.jobs.output.records import Record, complete, publish
from gpuclassify.jobs.quarantine import ROW, Problem, counts_by_kind, row_content, run_halved
from gpuclassify.jobs.report.counts import count_labels, count_lengths, count_scores
from gpuclassify.jobs.storage import Directory, open_directory
from gpuclassify.partition_map import Chain
from gpuclassify.workers.retire import on_sound_device
from gpuclassify.workers.run_events import collected_stats
from gpuclassify.workers.run_stats import add_up


@dataclass(frozen=True)
class Work:
    """What every task of a job does with its part.

    Attributes
    ----------
    chain : Chain
        The stages.
    announced : object
        What `chain` must know of the input's meta.
    schema : pyarrow.Schema
        Columns of every part that is written.
    output : str
        Directory, absolute, or URL.
    encoding : Encoding
    on_error : {"raise", "quarantine"}
    backend : {"pandas", "cudf"}
        Of the frames that files are read as.
    keep_index : bool
        Whether files get the frames' index as a column.
    label_fields, number_fields, text_fields : tuple of str
        Columns that are counted: labels and scores of the output, texts of the input.
    form : Form, optional
        Columns of input files, without storage options.
    input_name, output_name : str
        Under which `gpuclassify.jobs.access` knows the storage options.
    """

    chain: Chain
    announced: Any
    schema: pa.Schema
    output: str
    encoding: Encoding
    on_error: str
    backend: str
    keep_index: bool
    label_fields: tuple[str, ...]
    number_fields: tuple[str, ...]
    text_fields: tuple[str, ...]
    form: Form | None
    input_name: str
    output_name: str

    @property
    def directory(self) -> Directory:
        """Where parts are written."""
        return open_directory(self.output, options_for(self.output_name))


@dataclass(frozen=True)
class PackedWork:
    """`Work` as bytes: a scheduler unpickles tasks, and need not have the modules of stages.

    Attributes
    ----------
    content : bytes
    """

    content: bytes

    @classmethod
    def of(cls, work: Work) -> PackedWork:
        """Pack once for all tasks of a job."""
        return cls(cloudpickle.dumps(work))

    def unpack(self) -> Work:
        """On a worker, which has those modules."""
        return cloudpickle.loads(self.content)


@on_sound_device
def run_part(part: Part, name: str, packed: PackedWork, file: InputFile | None = None) -> Record:
    """Read one part of the input files, map it, and publish it as the file `name`.

    Raises
    ------
    ChangedInputError
        It is no more the `file` that was planned.
    JobChangedError
        Another run has started over in the output.
    """
    work = packed.unpack()
    with _naming(f"part {name} of {part}"), _noticing_others(name, work):
        return _already_written(name, work) or _read_and_run(part, file, name, work)


@on_sound_device
def run_partition(frame: Any, number: int, name: str, packed: PackedWork) -> Record:
    """Map one partition of a Dask frame, and publish it as the file `name`."""
    work = packed.unpack()
    with _naming(f"part {name} of partition {number}"), _noticing_others(name, work):
        source = {"partition": number}
        return _already_written(name, work) or _run(frame, [], source, name, work, 0.0)


@contextlib.contextmanager
def _naming(part: str) -> Iterator[None]:
    try:
        yield
    except Exception as err:
        err.add_note(part)
        raise


@contextlib.contextmanager
def _noticing_others(name: str, work: Work) -> Iterator[None]:
    """Files may vanish because another run starts over: then say so."""
    try:
        yield
    except FileNotFoundError:
        check_current(work.directory, key_in(name))
        raise


@contextlib.contextmanager
def _noticing_changes(file: InputFile | None, storage_options: dict[str, Any]) -> Iterator[None]:
    """Compare a file with what was planned once it is read; or could not be, perhaps for that."""
    try:
        yield
    except Exception:
        if file is not None:
            with contextlib.suppress(OSError):
                check_unchanged(file, storage_options)
        raise
    if file is not None:
        check_unchanged(file, storage_options)


def _read_and_run(part: Part, file: InputFile | None, name: str, work: Work) -> Record:
    assert work.form is not None
    started = time.perf_counter()
    form = Form(work.form.schema, options_for(work.input_name), work.form.is_projected)
    with _noticing_changes(file, form.storage_options):
        table, problems = read_table(part, form, work.on_error)
    frame = to_frame(table, work.backend)
    return _run(frame, problems, _describe(part), name, work, time.perf_counter() - started)


def _run(
    frame: Any,
    problems: list[Problem],
    source: dict[str, Any],
    name: str,
    work: Work,
    read_seconds: float,
) -> Record:
    started = time.perf_counter()
    with collected_stats() as runs:
        table, failed = _map_rows(frame, source, work)
    mapped = time.perf_counter()
    content = work.encoding.encode(table).to_pybytes()
    problems = [*problems, *failed]
    record = Record(
        name=name,
        source=source,
        rows_in=len(frame),
        rows_out=len(table),
        file_bytes=len(content),
        digest=hashlib.sha256(content).hexdigest(),
        left_out=counts_by_kind(problems),
        labels=count_labels(table, work.label_fields),
        numbers=count_scores(table, work.number_fields),
        lengths=count_lengths(_texts(frame, work.text_fields)),
        seconds={
            "read": read_seconds,
            "map": mapped - started,
            "write": time.perf_counter() - mapped,
        },
        stats=_sums(runs),
        finished=time.time(),
        worker=f"{socket.gethostname()}:{os.getpid()}",
    )
    directory = work.directory
    check_current(directory, key_in(name))
    return publish(directory, record, content, problems)


def _already_written(name: str, work: Work) -> Record | None:
    """The record of a part that an attempt before this one has written, if one has."""
    directory = work.directory
    if not directory.filesystem.exists(directory.path(name)):
        return None
    check_current(directory, key_in(name))
    return complete(directory, name)


def _map_rows(frame: Any, source: dict[str, Any], work: Work) -> tuple[pa.Table, list[Problem]]:
    """The rows that the stages return, and those that they fail for."""

    def run(start: int, stop: int) -> pa.Table:
        mapped = work.chain.map_frame(frame.iloc[start:stop], work.announced)
        return conform(arrow_table(mapped, work.keep_index), work.schema)

    if work.on_error == "raise" or not len(frame):
        return run(0, len(frame)), []
    tables, problems = [], []
    for row, found in run_halved(run, 0, len(frame), _row_errors()):
        if isinstance(found, Exception):
            problems.append(_row_problem(frame, row, source, found))
        else:
            tables.append(found)
    return pa.concat_tables(tables or [run(0, 0)]), problems


def _row_errors() -> tuple[type[Exception], ...]:
    """What a mapper raises for one document that cannot be scored, whatever its neighbours."""
    from gpuclassify.inference.memory import DocumentTooLargeError
    from gpuclassify.runners import NonFiniteOutputError

    return (NonFiniteOutputError, DocumentTooLargeError, UnicodeEncodeError)


def _row_problem(frame: Any, row: int, source: dict[str, Any], error: Exception) -> Problem:
    one = frame.iloc[row : row + 1]
    try:
        content = row_content(arrow_table(one, keep_index=False).to_pylist()[0])
    except UnicodeEncodeError:  # what cannot be written is not shown either
        content = name_row(frame, row)
    where = ", ".join(f"{key} {value}" for key, value in source.items())
    return Problem(ROW, where, str(error), row=row, content=content)


def _describe(part: Part) -> dict[str, Any]:
    """A part's source, for its record."""
    known = {key: value for key, value in asdict(part).items() if value is not None}
    known["path"] = redacted(part.path)
    if part.row_groups is not None or part.length is None:
        del known["start"]
    return known


def _texts(frame: Any, fields: tuple[str, ...]) -> dict[str, Any]:
    """The columns of text that the input has."""
    there = [name for name in fields if name in frame.columns]
    if not there:
        return {}
    try:
        table = arrow_table(frame[there], keep_index=False)
    except UnicodeEncodeError:
        return {}
    return {name: table[name] for name in there if pa.types.is_string(table[name].type)
            or pa.types.is_large_string(table[name].type)}  # fmt: skip


def _sums(runs: list[Any]) -> dict[str, float]:
    """The runs' stats, added up."""
    sums: dict[str, float] = {}
    for run in runs:
        add_up(sums, run.as_dict())
    return sums
