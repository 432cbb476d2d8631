"""A whole job: files in, one classifier, files out, and what came of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpuclassify.events import collected_stats
from gpuclassify.jobs.files import find_files
from gpuclassify.jobs.parts import Form, Part, read_part
from gpuclassify.jobs.planning import plan_source
from gpuclassify.jobs.records import Record
from gpuclassify.jobs.storage import open_directory
from gpuclassify.jobs.summary import JobSummary, Report
from gpuclassify.jobs.writers import PARQUET, SUFFIXES, part_names, write_part
from gpuclassify.model_mapper import ModelMapper


@dataclass(frozen=True)
class PartWork:
    """What every task of a job does with its part.

    Attributes
    ----------
    form : Form
        Columns of the input.
    classifier : ModelMapper
    output : str
        Directory or URL.
    file_format : {"parquet", "jsonl"}
    """

    form: Form
    classifier: ModelMapper
    output: str
    file_format: str


@dataclass(frozen=True)
class JobPlan:
    """What a job will do; nothing has been written or removed yet.

    Attributes
    ----------
    parts : tuple of Part
        The input, a task each.
    work : PartWork
    overwrite : bool
        Remove part files that the output has already when the job starts.
    """

    parts: tuple[Part, ...]
    work: PartWork
    overwrite: bool


def plan_job(
    inputs: Sequence[str],
    output: str,
    classifier: ModelMapper,
    *,
    fields: Sequence[str] | None = None,
    file_format: str = PARQUET,
    part_bytes: int | None = None,
    overwrite: bool = False,
) -> JobPlan:
    """Plan a job; checks everything that can be checked without a cluster, and writes nothing.

    Parameters
    ----------
    inputs : sequence of str
        Files, directories, globs or URLs; see `gpuclassify.jobs.readers.read_files`.
    output : str
        Directory or URL.
    classifier : ModelMapper
    fields : sequence of str, optional
        Columns to read and keep beside the text. Default: all.
    file_format : {"parquet", "jsonl"}
    part_bytes : int, optional
        Bytes of a part of the input.
    overwrite : bool, default False
        Remove part files that `output` has already, once the job starts.

    Returns
    -------
    JobPlan

    Raises
    ------
    UnreadableInputError, FileExistsError, TypeError, ValueError
        The input, the output or the classifier's settings cannot work.
    """
    if fields is not None and classifier.text_field not in fields:
        fields = [classifier.text_field, *fields]
    directory = open_directory(output)
    for file in find_files(inputs, {}):
        if directory.holds(file.path):
            raise ValueError(
                f"the input {file.path} lies in the output directory {output}, whose part files a "
                "job replaces: choose an output directory outside the input"
            )
    source = plan_source(inputs, fields=fields, part_bytes=part_bytes)
    classifier.check(source.form.meta())
    classifier.prepare()
    directory.check(overwrite, SUFFIXES)
    work = PartWork(source.form, classifier, output, file_format)
    return JobPlan(source.parts, work, overwrite)


def run_job(plan: JobPlan, client: Any, report: Report | None = None) -> JobSummary:
    """Run a job that `plan_job` planned.

    Parameters
    ----------
    plan : JobPlan
    client : distributed.Client
    report : callable, optional
        ``report(parts_done, parts, summary_so_far)``, at first and after every part.
    """
    from distributed import as_completed

    open_directory(plan.work.output).prepare(plan.overwrite, SUFFIXES)
    names = part_names(len(plan.parts))
    summary = JobSummary()
    if report is not None:
        report(0, len(plan.parts), summary)
    started = time.perf_counter()
    futures = client.map(run_part, plan.parts, names, work=plan.work, pure=False)
    try:
        for done, future in enumerate(as_completed(futures), 1):
            record = future.result()
            summary.add(record, record.name)
            summary.elapsed_seconds = time.perf_counter() - started
            if report is not None:
                report(done, len(plan.parts), summary)
    except BaseException:
        client.cancel(futures, force=True)
        raise
    summary.files.sort()
    return summary


def run_part(part: Part, name: str, work: PartWork) -> Record:
    """The task: read one part, classify it, write it as the file `name`."""
    frame = read_part(part, work.form)
    with collected_stats() as runs:
        classified = work.classifier.map_frame(frame)
    # The index is a position within the part: no data.
    path = write_part(classified, work.output, name, work.file_format, keep_index=False)
    stats: Counter[str] = Counter()
    for run in runs:
        stats.update(run.as_dict())
    labels = _count_labels(classified, work.classifier.label_field)
    return Record(path, {}, len(frame), len(classified), 0, "", labels=labels, stats=dict(stats))


def _count_labels(frame: Any, label_field: str | None) -> dict[str, dict[str, int]]:
    if label_field is None or not len(frame):
        return {}
    counts = frame[label_field].value_counts()
    return {label_field: {str(label): int(count) for label, count in counts.items()}}
