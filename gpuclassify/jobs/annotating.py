"""Jobs that write annotations: no row is dropped, and files that came later are annotated alone."""

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

KEEP = "keep"  # column of a filter's decision
# Makes the job of a reader and a writer, for some files of the input and a folder of the set.
MakeJob = Callable[..., Any]


def earlier_jobs(reader: FileReader, writer: Any, options: RunOptions, make: MakeJob) -> list[Any]:
    """Make the jobs that annotate the reader's files: those of earlier files, and of new ones.

    Raises AnnotationError for files that have changed since they were annotated, unless the writer
    redoes these.
    """
    if options.restart or not writer.directory.has(JOB):
        return [make(reader, writer)]
    held = AnnotationSet.open(writer.path, writer.storage_options)
    files = find_files(reader.paths, reader.storage_options)
    states = states_like(files, held.states, reader.storage_options)
    changed = [n for n, state in states.items() if held.states.get(n, state) != state]
    if changed and not writer.redo_changed:
        raise AnnotationError(
            f"{some_names(changed)} changed since {held.shown} annotated it: annotate such files "
            "again (redo_changed=True), or bring them back as they were"
        )
    if gone := [name for name in held.states if name not in states]:
        logger.warning(
            "%s keeps annotations of files that are gone: %s", held.shown, some_names(gone)
        )
    held.read_columns()
    jobs, columns, abandoned = [], Counter[pa.Schema](), set()
    for folder, described in held.jobs.items():
        old, known = described["identity"]["input file"], held.input_columns(folder)
        if old.items() <= states.items():
            job = make(reader.select_files(old, known), writer.below(folder))
            jobs.append(_with_types(job, held))
            known = known or input_columns(job.source)
        elif folder in held.undone:  # it cannot go on, as some of its files changed or are gone
            abandoned.add(folder)
        columns[known or pa.schema([])] += 1
    todo = [
        name
        for name in states
        if name not in held.files or name in changed or held.files[name].folder in abandoned
    ]
    if todo:
        done = len(states) - len(todo)
        logger.warning("%s has %d of the files: %d are new or changed", held.shown, done, len(todo))
        narrowed = reader.select_files(todo, common_schema(columns))
        job = make(narrowed, writer.below(held.next_folder()))
        jobs.append(_with_types(job, held, todo))
    if not jobs:
        raise AnnotationError(
            f"all that {held.shown} has is of files that are gone or have changed, and nothing is "
            "left to do"
        )
    for job in jobs:
        job.manifest.check_like(held.jobs[""]["identity"])
    return jobs


def _with_types(job: Job, held: AnnotationSet, new: Sequence[str] = ()) -> Job:
    """Return the job with the set's types for its columns, where these hold the values as well.

    Raises AnnotationError for another type of a column of `new` files, which are not written yet.
    """
    fields = []
    for field in job.spec.schema:
        kind = held.columns.field(field.name).type if field.name in held.columns.names else None
        is_held = kind is None or holds(kind, field.type)
        if new and not is_held:
            raise AnnotationError(
                f"{some_names(new)} would give {field.name!r} as {field.type}; {held.shown} has "
                f"it as {kind}, which cannot hold such values: cast the column in its stage, such "
                "as by astype() (accept_changed_code=True), annotate these files into another "
                "set, or annotate all files again (restart=True)"
            )
        fields.append(field.with_type(kind) if kind is not None and is_held else field)
    schema = pa.schema(fields, metadata=job.spec.schema.metadata)
    annotations = annotation_schema(schema, job.spec.label_fields)
    return replace(job, spec=replace(job.spec, schema=schema, annotations=annotations))


def with_decisions(mappers: Sequence[PartitionMap]) -> list[PartitionMap]:
    """Return the mappers with a column for the decision of a filter that has none.

    Raises ValueError where more than one would need it, or a mapper cannot have one.
    """
    for mapper in mappers:
        if mapper.row_filter() is not None:
            raise ValueError(
                f"annotations drop no row, and {mapper.__name__} would: let it write a column "
                "(keep_field=) where it can, or drop rows with `gpuclassify select`"
            )
    dropping = [mapper for mapper in mappers if mapper.drops_rows and mapper.text_mappers()]
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
