"""Jobs that write annotations: no row is dropped, and files that came later are annotated alone."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuclassify.jobs.input.annotations import AnnotationSet, later_folders, some_names
from gpuclassify.jobs.input.files import find_files, states_like
from gpuclassify.jobs.input.notes import AnnotationError
from gpuclassify.jobs.input.readers import FileReader
from gpuclassify.jobs.job import Job
from gpuclassify.jobs.output.manifest import RunOptions
from gpuclassify.jobs.output.records import JOB
from gpuclassify.jobs.output.writers import AnnotationWriter
from gpuclassify.jobs.report.summary import JobSummary, Report
from gpuclassify.mapping.partition_map import PartitionMap
from gpuclassify.mapping.text_mapper import TextMapper

if TYPE_CHECKING:
    from distributed import Client

    from gpuclassify.jobs.output.records import Record

logger = logging.getLogger(__name__)

KEEP = "keep"  # column of a filter's decision
# Makes the job of a reader and a writer, for some files of the input and a folder of the set.
MakeJob = Callable[[FileReader, AnnotationWriter], Job]


@dataclass(frozen=True)
class AnnotateJob(Job):
    """Job of the files that came last; `earlier` are those of the files before, in their order."""

    earlier: tuple[Job, ...] = ()

    def needs_workers(self) -> bool:
        """Tell whether any of the jobs has parts to do."""
        return any(job.needs_workers() for job in self.earlier) or super().needs_workers()

    @contextlib.contextmanager
    def current(self, client: Client | None) -> Iterator[None]:
        """Make the client current for all of the jobs."""
        with contextlib.ExitStack() as stack:
            for job in self.earlier:
                stack.enter_context(job.current(client))
            stack.enter_context(super().current(client))
            yield

    def begin(self, client: Client | None = None) -> Iterator[Record]:
        """Begin as any job; a start over removes what was annotated later, too."""
        if self.restart:
            for folder in later_folders(self.directory):
                self.directory.remove_folder(folder)
        return super().begin(client)

    def write(self, client: Client | None, report: Report | None) -> JobSummary:
        """Finish the earlier jobs, or redo what is damaged there, and then this one."""
        for job in self.earlier:
            job.write(client, report)
        return super().write(client, report)


def annotate_job(
    reader: FileReader, writer: AnnotationWriter, options: RunOptions, make: MakeJob
) -> AnnotateJob:
    """Make the job that annotates what the set lacks of the reader's files.

    Raises AnnotationError for files that have changed since they were annotated, unless the writer
    redoes these.
    """
    if options.restart or not writer.directory.has(JOB):
        return AnnotateJob(**vars(make(reader, writer)))
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
    jobs = []
    for folder, described in known.jobs.items():
        old = described["identity"]["input file"]
        if old.items() <= states.items() or folder == known.unfinished:
            jobs.append(make(_only(reader, old), writer.below(folder)))
    todo = [name for name in states if name not in known.states or name in changed]
    if todo:
        done = len(states) - len(todo)
        logger.warning(
            "%s has %d of the files: %d are new or changed", known.shown, done, len(todo)
        )
        jobs.append(make(_only(reader, todo), writer.below(known.next_folder())))
    if not jobs:
        raise AnnotationError(
            f"all that {known.shown} has is of files that are gone or have changed, and nothing is "
            "left to do"
        )
    for job in jobs:
        job.manifest.check_like(known.jobs[""]["identity"])
    return AnnotateJob(**vars(jobs[-1]), earlier=tuple(jobs[:-1]))


def _only(reader: FileReader, names: Iterable[str]) -> FileReader:
    """Return the reader of some of its files."""
    narrowed = copy.copy(reader)
    narrowed.only = frozenset(names)
    return narrowed


def with_decisions(mappers: Sequence[PartitionMap]) -> list[PartitionMap]:
    """Return the mappers with a column for the decision of a filter that has none.

    Raises ValueError where more than one would need it, or a mapper cannot have one.
    """
    dropping = [mapper for mapper in mappers if mapper.drops_rows and mapper.text_mappers()]
    if not dropping:
        return [*mappers]
    names = ", ".join(mapper.__name__ for mapper in dropping)
    if len(dropping) > 1 or not isinstance(dropping[0], TextMapper):
        raise ValueError(
            f"annotations drop no row, and {names} would: name a column for the decision of each "
            "(keep_field=)"
        )
    return [mapper.keeping(KEEP) if mapper is dropping[0] else mapper for mapper in mappers]
