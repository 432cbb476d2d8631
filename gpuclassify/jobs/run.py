"""A whole job: files in, one classifier, files out, and what came of it."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gpuclassify.jobs.readers import find_files, read_files
from gpuclassify.jobs.storage import open_directory
from gpuclassify.jobs.writers import FORMATS, PARQUET, write_tasks
from gpuclassify.model_mapper import EVENT_TOPIC, ModelMapper


@dataclass(frozen=True)
class PartSummary:
    """What one task wrote.

    Attributes
    ----------
    path : str
    rows : int
    labels : dict of str to int
        Rows by label.
    """

    path: str
    rows: int
    labels: dict[str, int]


@dataclass
class JobSummary:
    """What a job did.

    Attributes
    ----------
    files : list of str
        Files written.
    rows_in, rows_out : int
        Rows read and rows kept.
    labels : dict of str to int
        Rows kept by label, most frequent first.
    elapsed_seconds : float
        From the first task to the last.
    totals : dict of str to float
        Sums of all partitions' `RunStats`.
    """

    files: list[str] = field(default_factory=list)
    rows_in: int = 0
    rows_out: int = 0
    labels: dict[str, int] = field(default_factory=dict)
    elapsed_seconds: float = 0.0
    totals: dict[str, float] = field(default_factory=dict)

    @property
    def rows_per_second(self) -> float:
        """Rows read per second."""
        return self.rows_in / self.elapsed_seconds if self.elapsed_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values by name, for JSON."""
        return {**asdict(self), "rows_per_second": self.rows_per_second}


@dataclass(frozen=True)
class JobPlan:
    """What a job will do; nothing has been written or removed yet.

    Attributes
    ----------
    dataset : dask.dataframe.DataFrame
        The classified frame.
    output : str
        Directory or URL.
    file_format : {"parquet", "jsonl"}
    overwrite : bool
        Remove part files that `output` has already when the job starts.
    label_field : str, optional
        Column whose values are counted.
    """

    dataset: Any
    output: str
    file_format: str
    overwrite: bool
    label_field: str | None


Report = Callable[[int, int, JobSummary], None]


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
    for path in find_files(inputs, {}):
        if directory.holds(path):
            raise ValueError(
                f"the input {path} lies in the output directory {output}, whose part files a job "
                "replaces: choose an output directory outside the input"
            )
    dataset = classifier(read_files(inputs, fields=fields, part_bytes=part_bytes))
    directory.check(overwrite, [f".{name}" for name in FORMATS])
    return JobPlan(dataset, output, file_format, overwrite, classifier.label_field)


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

    tasks = write_tasks(
        plan.dataset,
        plan.output,
        plan.file_format,
        overwrite=plan.overwrite,
        summarize=functools.partial(summarize_part, label_field=plan.label_field),
        keep_index=False,  # positions within parts of the input: no data
    )
    summary = JobSummary()
    labels: Counter[str] = Counter()
    totals: Counter[str] = Counter()

    def add(event: tuple[float, dict[str, Any]]) -> None:
        totals.update({name: value for name, value in event[1].items() if name != "worker"})

    client.subscribe_topic(EVENT_TOPIC, add)
    if report is not None:
        report(0, len(tasks), summary)
    started = time.perf_counter()
    futures = client.compute(tasks)
    try:
        for done, future in enumerate(as_completed(futures), 1):
            part = future.result()
            summary.files.append(part.path)
            summary.rows_out += part.rows
            labels.update(part.labels)
            summary.labels = dict(labels.most_common())
            summary.elapsed_seconds = time.perf_counter() - started
            summary.totals = dict(totals)
            summary.rows_in = int(totals["rows"])
            if report is not None:
                report(done, len(tasks), summary)
    except BaseException:
        client.cancel(futures, force=True)
        raise
    finally:
        client.unsubscribe_topic(EVENT_TOPIC)
    summary.files.sort()
    return summary


def summarize_part(frame: Any, path: str, label_field: str | None) -> PartSummary:
    """Rows and label counts of a plain frame that was written to `path`."""
    labels: dict[str, int] = {}
    if label_field is not None and len(frame):
        counts = frame[label_field].value_counts()
        if hasattr(counts, "to_pandas"):
            counts = counts.to_pandas()
        labels = {str(label): int(count) for label, count in counts.items()}
    return PartSummary(path, len(frame), labels)
