"""Jobs that write annotations: no row is dropped, and later runs add new or changed files."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from gpuclassify.jobs.input.annotation_reader import AnnotationError
from gpuclassify.jobs.input.annotations import AnnotationSet, holds, some_names
from gpuclassify.jobs.input.files import find_files, states_like
from gpuclassify.jobs.input.readers import FileReader
from gpuclassify.jobs.input.schema import common_schema
from gpuclassify.jobs.job import Job, input_columns
from gpuclassify.jobs.ledger.manifest import RunOptions
from gpuclassify.jobs.ledger.records import JOB
from gpuclassify.jobs.output.annotations import annotation_schema
from gpuclassify.mapping.partition_map import PartitionMap

logger = logging.getLogger(__name__)

KEEP = "keep"  # column for the decision of a filter
# Function that makes a job from a reader of some input files and a writer to a folder of the set.
MakeJob = Callable[..., Any]


def earlier_jobs(reader: FileReader, writer: Any, options: RunOptions, make: MakeJob) -> list[Any]:
    """Make the jobs that annotate the reader's files: earlier jobs, and one for the other files.

    The writer's directory is an annotation set, with a folder for the output of each job: new
    columns for some of the files. ``make(reader, writer)`` makes a job from a reader of some files
    and a writer to one folder. If no job has begun there, or with ``options.restart``, the result
    is one job with all files. Otherwise it has each earlier job whose files are all present and
    unchanged, in order of their folders. A last job has the other files, if there are any: new
    files, changed files, and files of unfinished jobs that cannot go on. If there would be no job,
    the result is one that `run` skips.

    Raises AnnotationError if files have changed since they were annotated, unless the writer has
    ``redo_changed=True``, and JobChangedError if the settings differ from the last earlier job's.
    """
    if options.restart or not writer.directory.has(JOB):
        return [make(reader, writer)]
    known = AnnotationSet.open(writer.path, writer.storage_options)
    files = find_files(reader.paths, reader.storage_options)
    states = states_like(files, known.states, reader.storage_options)
    changed = [n for n, state in states.items() if known.states.get(n, state) != state]
    if changed and not writer.redo_changed:
        raise AnnotationError(
            f"{some_names(changed)} changed since {known.shown} annotated it: annotate such files "
            "again (redo_changed=True), or bring them back as they were"
        )
    if gone := [name for name in known.states if name not in states]:
        logger.warning(
            "%s keeps annotations of files that are gone: %s", known.shown, some_names(gone)
        )
    known.read_columns()
    jobs, columns, abandoned = [], Counter[pa.Schema](), set()
    for folder, described in known.jobs.items():
        old, schema = described["identity"]["input file"], known.input_columns(folder)
        if old.items() <= states.items():
            job = make(reader.select_files(old, schema), writer.below(folder))
            jobs.append(_use_set_types(job, known))
            schema = schema or input_columns(job.source)
        elif folder in known.undone:  # it cannot go on, because files have changed or are gone
            abandoned.add(folder)
        columns[schema or pa.schema([])] += 1
    todo = [
        name
        for name in states
        if name not in known.files or name in changed or known.files[name].folder in abandoned
    ]
    if todo:
        done = len(states) - len(todo)
        logger.warning(
            "%s has %d of the files: %d are new or changed", known.shown, done, len(todo)
        )
        narrowed = reader.select_files(todo, common_schema(columns))
        job = make(narrowed, writer.below(known.next_folder()))
        jobs.append(_use_set_types(job, known, todo))
    if not jobs:  # planned for its checks
        narrowed = reader.select_files(states, common_schema(columns))
        job = make(narrowed, writer.below(known.next_folder()))
        whole = replace(job.manifest, directory=known.store)
        jobs.append(replace(job, manifest=whole, is_skipped=True))
    for job in jobs:
        job.manifest.check_like(known.jobs[max(known.jobs)])
    return jobs


def _use_set_types(job: Job, known: AnnotationSet, new: Sequence[str] = ()) -> Job:
    """Return a copy of the job that writes its columns in the types of the annotation set.

    A column keeps its type if the set lacks it, or if its type there cannot hold all values. The
    latter raises AnnotationError if the job is for new or changed files, named in `new`.
    """
    fields = []
    for field in job.spec.schema:
        kind = known.columns.field(field.name).type if field.name in known.columns.names else None
        fits = kind is None or holds(kind, field.type)
        if new and not fits:
            raise AnnotationError(
                f"{some_names(new)} would give {field.name!r} as {field.type}; {known.shown} has "
                f"it as {kind}, which cannot hold such values: cast the column in its stage, such "
                "as by astype() (accept_changed_code=True), annotate these files into another "
                "set, or annotate all files again (restart=True)"
            )
        fields.append(field.with_type(kind) if kind is not None and fits else field)
    schema = pa.schema(fields, metadata=job.spec.schema.metadata)
    annotations = annotation_schema(schema, job.spec.label_fields)
    return replace(job, spec=replace(job.spec, schema=schema, annotations=annotations))


def add_decision_column(mappers: Sequence[PartitionMap]) -> list[PartitionMap]:
    """Return the stages, changed so that a filter writes its decision to the bool column "keep".

    Raises ValueError if that cannot be done, as for several filters, or for a `Select` that drops
    rows. Functions are returned unchanged, even if they drop rows.
    """
    for mapper in mappers:
        if mapper.row_filter() is not None:
            raise ValueError(
                f"annotations drop no row, and {mapper.__name__} would: let it write a column "
                "(keep_field=) where it can, or drop rows with `gpuclassify select`"
            )
    dropping = [
        mapper
        for mapper in mappers
        if mapper.drops_rows and (mapper.text_mappers() or mapper.keeping(KEEP) is not None)
    ]
    if not dropping:
        return [*mappers]
    deciding = dropping[0].keeping(KEEP)
    if len(dropping) > 1 or deciding is None:
        names = ", ".join(mapper.__name__ for mapper in dropping)
        raise ValueError(
            f"annotations drop no row, and {names} would: name a column for the decision of each "
            "(keep_field=)"
        )
    return [deciding if mapper is dropping[0] else mapper for mapper in mappers]
