"""Counts of rows of a part (a slice that one task reads), and the summary of a job."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from dask.utils import format_bytes

from gpuclassify.jobs.ledger.records import Record
from gpuclassify.mapping.stage_counts import MOST_LABELS, REASONS, add_examples
from gpuclassify.models.checkpoint import some_of
from gpuclassify.pages import (
    counted,
    counted_kinds,
    html_table,
    readable_time,
    short_number,
    text_table,
)
from gpuclassify.workers.run_context import (
    RunningParts,
    add_counts,
    add_up,
    advice,
    shared_layers,
)

MOST_SHOWN = 5  # maximum labels of a column in the displayed summary
SCORE_BIN_WIDTH = 0.05
LARGEST_SCORE = 10.0  # larger scores go to the last bin
# Lower edges of the bins of text lengths in characters: 0 to 3, then four bins per octave.
LENGTH_EDGES = (0, 1, 2, 3, *(2**octave // 4 * n for octave in range(2, 40) for n in range(4, 8)))
OTHER, NO_SOURCE = "(other)", "(null)"  # names of all rare sources, and of rows without a source


def count_scores(table: pa.Table, columns: Sequence[str]) -> dict[str, dict[str, int]]:
    """Count rows by bin of score, for each column in `columns` that the table has.

    Returns numbers of rows by column, then by bin: ``floor(score / 0.05)``, as text. Scores are
    clipped to -10 and 10.
    """
    counts = {}
    for name in columns:
        if name not in table.column_names:
            continue
        scores = table[name].drop_null().to_numpy()
        scores = np.clip(scores[np.isfinite(scores)], -LARGEST_SCORE, LARGEST_SCORE)
        # Rounded first: in float32, 0.15 / 0.05 is a little less than 3.
        bins = np.floor(np.round(scores.astype(np.float64) / SCORE_BIN_WIDTH, 5))
        counts[name] = _count(bins.astype(np.int64))
    return counts


def largest_scores(table: pa.Table, columns: Sequence[str]) -> dict[str, float]:
    """Return the largest finite score of each column in `columns` that has a finite score."""
    largest = {}
    for name in (name for name in columns if name in table.column_names):
        scores = table[name].drop_null().to_numpy()
        if len(scores := scores[np.isfinite(scores)]):
            largest[name] = float(scores.max())
    return largest


def count_lengths(texts: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Count rows by bin of the text's length in characters, for each column.

    Returns numbers of rows by column, then by the bin's lower edge in `LENGTH_EDGES`, as text.
    """
    counts = {}
    for name, column in texts.items():
        lengths = pc.utf8_length(column.drop_null()).to_numpy()
        bins = np.searchsorted(LENGTH_EDGES, lengths, side="right") - 1
        counts[name] = _count(np.array(LENGTH_EDGES)[bins])
    return counts


def count_agreements(table: pa.Table, columns: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Count rows by the labels in two columns, for each pair of the table's columns in `columns`.

    Returns numbers of rows by ``"FIRST and SECOND"``, then by the label in the first column, then
    by the label in the second. Columns of lists or structs are in no pair.
    """
    agreements = {}
    present = [name for name in columns if name in table.column_names]
    flat = [name for name in present if not pa.types.is_nested(table[name].type)]
    for first, second in itertools.combinations(flat, 2):
        pairs = table.select([first, second]).drop_null().group_by([first, second])
        counts: dict[str, dict[str, int]] = {}
        for row in pairs.aggregate([([], "count_all")]).to_pylist():
            counts.setdefault(str(row[first]), {})[str(row[second])] = row["count_all"]
        agreements[f"{first} and {second}"] = counts
    return agreements


def count_sources(read: pa.ChunkedArray, written: pa.ChunkedArray) -> dict[str, dict[str, int]]:
    """Count rows by value of the source column, before (`read`) and after filters (`written`).

    Each value, as text, has a dict with ``read`` and ``written``; rare ones are folded by
    `fold_rare`.
    """
    counts: dict[str, dict[str, int]] = {}
    for kind, column in (("read", read), ("written", written)):
        for pair in pc.value_counts(column).to_pylist():
            value = NO_SOURCE if pair["values"] is None else str(pair["values"])
            add_counts(counts, {value: {"read": 0, "written": 0, kind: pair["counts"]}})
    return fold_rare(counts)


def fold_rare(
    counts: Mapping[str, dict[str, int]], most: int = MOST_LABELS
) -> dict[str, dict[str, int]]:
    """Keep the `most` values with the most rows ``read``, and sum up all others as "(other)".

    `counts` has a dict with ``read`` and ``written``, numbers of rows, for each value. Values are
    sorted by rows read, largest first, and "(other)" comes last.
    """
    named = [item for item in counts.items() if item[0] != OTHER]
    named.sort(key=lambda item: (-item[1]["read"], item[0]))
    folded = dict(named[:most])
    for rest in [*(count for _, count in named[most:]), counts.get(OTHER, {})]:
        add_counts(folded, {OTHER: rest} if rest else {})
    return folded


def most_frequent(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts, keyed by name, sorted: the largest first, and equal counts by name."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


@dataclass(frozen=True)
class ColumnLabels:
    """Counts of the labels in a column, for tables and charts.

    If counts before filters are unknown, those of rows written are in their place.

    Attributes
    ----------
    labelled : int
        Number of rows whose value in the column is not null, before filters.
    rows : list of (str, int, int)
        Each label with its number of rows before filters and its number of rows written, sorted by
        the former, largest first.
    occurrences : dict of str to int
        Occurrences by label, before filters; empty unless a row may have a label several times.
    """

    labelled: int
    rows: list[tuple[str, int, int]]
    occurrences: Mapping[str, int]

    @property
    def has_drops(self) -> bool:
        """Whether any label has different numbers of rows before filters and in the output."""
        return any(labelled != written for _, labelled, written in self.rows)

    def share(self, labelled: int) -> str:
        """Return a number of rows as a percentage of all labelled rows, such as ``12.5%``."""
        return f"{labelled / (self.labelled or 1):.1%}"


def column_labels(
    written: Mapping[str, Mapping[str, int]],
    labelled: Mapping[str, int],
    stages: Mapping[str, Mapping[str, Any]],
) -> dict[str, ColumnLabels]:
    """Return the counts of labels of each column in `written`, by column.

    `written` has rows written by column and label, and `labelled` rows whose value is not null by
    column. If a classifier in `stages` labels the column, its counts before filters are used.
    """
    before: dict[str, Mapping[str, Any]] = {}
    for stage in stages.values():
        before |= dict.fromkeys(stage["labels"], stage)
    columns = {}
    for name, counts in written.items():
        stage = before.get(name, {"labels": {}, "labelled": labelled, "occurrences": {}})
        rows = most_frequent({**counts, **stage["labels"].get(name, {})})
        columns[name] = ColumnLabels(
            stage["labelled"].get(name, 0),
            [(label, count, counts.get(label, 0)) for label, count in rows.items()],
            stage["occurrences"].get(name, {}),
        )
    return columns


def textless_warnings(counts: Mapping[str, int]) -> list[str]:
    """Return a list with a warning on files without any text, or an empty list."""
    files = some_of([f"{name} ({rows:,} rows)" for name, rows in most_frequent(counts).items()])
    warning = (
        f"no row has a text in {files}: they get no label, and columns that only they have are in "
        "all of the output. If they are none of this corpus, leave them out of the input"
    )
    return [warning] * bool(counts)


def _count(bins: np.ndarray) -> dict[str, int]:
    values, counts = np.unique(bins, return_counts=True)
    return {str(value): int(count) for value, count in zip(values, counts, strict=True)}


@dataclass(repr=False)
class JobSummary:
    """Summary of a job: counts of rows and tokens, speeds, and files written.

    Attributes
    ----------
    files : list of str
        Files written by this run and by earlier runs of the job.
    parts : int
        Number of parts done: slices of the input that one task processes. Small parts share a file.
    rows_read : int
        Number of rows of the input that could be read, including those that filters drop.
    rows_written : int
        Number of rows in the output. An output of annotations (new columns only) also has a row for
        each line or row left out, which is not counted here.
    labels : dict of str to int
        Rows written by label of the first label column, most frequent first.
    elapsed_seconds : float
        Working time of this run, from the submission of its first part to the end of its last part;
        without start-up and listing of the input.
    totals : dict of str to float
        Counts, seconds and peaks of the models' runs by name, such as "tokens", summed over all
        parts; for peaks, the maximum.
    columns : dict of str to dict
        Rows written by label, for every label column.
    labelled : dict of str to int
        Rows written whose value is not null, for every label column.
    numbers : dict of str to dict
        Rows written by bin of score, for every score column. A bin is ``floor(score / 0.05)``, as
        text.
    largest : dict of str to float
        Largest score written, for every score column.
    lengths : dict of str to dict
        Rows read by bin of the text's length in characters, for every text column. A bin is named
        by its lower edge.
    stages : dict of str to dict
        Counts of rows for each classifier, in order. ``read`` is the sum of ``kept`` and of
        ``dropped`` by reason; ``would_drop`` replaces ``dropped`` if `keep_field` keeps all rows.
        By label column, and before the filters: ``labels`` has rows by label, ``labelled`` the
        number of rows whose value is not null, and ``occurrences`` the number of times each label
        occurs, if a row may have it several times. Also ``truncated_texts``, and ``seconds`` of
        work.
    examples : dict of str to dict
        Example texts by classifier: ``labels`` (by label) and ``dropped`` (by reason) have pairs of
        certainty and beginning of the text. ``most`` is the number of texts kept with the highest,
        and with the lowest certainty.
    agreements : dict of str to dict
        Rows written by pair of label columns, then by the label in each of them.
    sources : dict of str to dict
        Rows ``read`` and ``written``, by source column and its value.
    textless : dict of str to int
        Rows by file, for files without any text.
    empty_files : list of str
        Files without any row.
    seconds : dict of str to float
        Seconds of reading (``read``), mapping (``map``) and writing (``write``), summed over
        workers.
    left_out : dict of str to int
        Numbers of files, lines and rows left out, which are in quarantine, by "file", "line" and
        "row".
    first_problem : str
        Position and reason of the first problem in the first finished part that left any out.
    output_bytes : int
        Bytes of all `files`.
    resumed_parts, resumed_rows, resumed_tokens : int
        Numbers of parts, rows and tokens of earlier runs of the same job.
    checked : str
        Method by which files of earlier runs were verified, and their number and size.
    output : str
        Directory or URL of the output.
    commit_url : str
        Address of the commit with the output, if a `HubWriter` uploaded it.
    running : RunningParts
        Progress of unfinished parts; not in `as_dict`.
    """

    files: list[str] = field(default_factory=list)
    parts: int = 0
    rows_read: int = 0
    rows_written: int = 0
    labels: dict[str, int] = field(default_factory=dict)
    elapsed_seconds: float = 0.0
    totals: dict[str, float] = field(default_factory=dict)
    columns: dict[str, dict[str, int]] = field(default_factory=dict)
    labelled: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, dict[str, int]] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    lengths: dict[str, dict[str, int]] = field(default_factory=dict)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    examples: dict[str, dict[str, Any]] = field(default_factory=dict)
    agreements: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    sources: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    textless: dict[str, int] = field(default_factory=dict)
    empty_files: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    first_problem: str = ""
    output_bytes: int = 0
    resumed_parts: int = 0
    resumed_rows: int = 0
    resumed_tokens: int = 0
    checked: str = ""
    output: str = ""
    commit_url: str = ""
    running: RunningParts = field(default_factory=RunningParts, repr=False, compare=False)
    # Files with texts in some part; another part of such a file may have none.
    _with_texts: set[str] = field(default_factory=set, repr=False, compare=False)

    def __repr__(self) -> str:
        return text_table(self._rows())

    def _repr_html_(self) -> str:
        return html_table("JobSummary", self._rows())

    def _rows(self) -> Iterator[tuple[str, str]]:
        share = f" ({self.rows_written / self.rows_read:.1%})" if self.rows_read else ""
        yield "rows", f"{self.rows_read:,} read, {self.rows_written:,} written{share}"
        size = f"{counted(len(self.files), 'file')}, {format_bytes(self.output_bytes)}"
        yield "output", f"{self.output or 'no directory'}: {size}"
        speeds = f"{short_number(self.rows_per_second)} rows/s"
        if self.tokens_per_second:
            speeds += f", {short_number(self.tokens_per_second)} tokens/s"
        yield (
            "this run",
            f"{self.run_rows:,} rows in {readable_time(self.elapsed_seconds)}, {speeds}",
        )
        for sentence in advice(self.totals):
            yield "advice", sentence
        for sentence in self.warnings:
            yield "warning", sentence
        if common := shared_layers(self.totals):
            yield "models", common
        if self.resumed_parts:
            yield "earlier", f"{self.resumed_parts:,} parts, {self.resumed_rows:,} rows"
            if self.checked:
                yield "checked", self.checked
        if self.left_out:
            yield "left out", counted_kinds(self.left_out)
        for column, counts in self.columns.items():
            most = list(most_frequent(counts).items())[:MOST_SHOWN]
            more = f", and {len(counts) - len(most):,} more" if len(counts) > len(most) else ""
            yield column, ", ".join(f"{label}: {count:,}" for label, count in most) + more

    @property
    def warnings(self) -> list[str]:
        """Sentences on files without rows, and on files without texts; empty if there are none."""
        names = sorted(self.empty_files)
        empty = [f"{counted(len(names), 'empty file')}: {some_of(names)}"] if names else []
        return [*empty, *textless_warnings(self.textless)]

    @property
    def drops(self) -> list[str]:
        """Lines of text on the rows that each filtering stage dropped or would drop, by reason."""
        lines = []
        for name, stage in self.stages.items():
            for kind, words in (("dropped", "dropped"), ("would_drop", "would drop")):
                if counts := stage[kind]:
                    names = [*REASONS, *sorted({*counts} - {*REASONS})]
                    reasons = ", ".join(f"{n} {counts[n]:,}" for n in names if n in counts)
                    rows = f"{sum(counts.values()):,} of {stage['read']:,} rows"
                    lines.append(f"{name}: {words} {rows} ({reasons})")
        return lines

    @property
    def run_rows(self) -> int:
        """Number of rows that this run read; parts finished by earlier runs are not counted."""
        return self.rows_read - self.resumed_rows

    @property
    def rows_per_second(self) -> float:
        """Rows that this run read, per second of `elapsed_seconds`; 0 at first."""
        return self.run_rows / self.elapsed_seconds if self.elapsed_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens that models read in this run, per second of `elapsed_seconds`; 0 at first."""
        tokens = self.totals.get("tokens", 0) - self.resumed_tokens
        return tokens / self.elapsed_seconds if self.elapsed_seconds else 0.0

    def add(self, record: Record, is_resumed: bool = False) -> None:
        """Add the counts of a finished part, or of a file that joins several parts.

        `is_resumed` is True if an earlier run of the job finished them.
        """
        self.output_bytes += record.file_bytes
        for part in record.parts:
            self._add_part(part, is_resumed)

    def _add_part(self, record: Record, is_resumed: bool) -> None:
        self.running.finish(record.name)
        self.parts += 1
        self.rows_read += record.rows_in
        self.rows_written += record.rows_out - record.rows_marked
        self.resumed_parts += is_resumed
        self.resumed_rows += record.rows_in * is_resumed
        self.resumed_tokens += int(record.stats.get("tokens", 0)) * is_resumed
        add_up(self.totals, record.stats)
        add_counts(self.seconds, record.seconds)
        add_counts(self.left_out, record.left_out)
        self.first_problem = self.first_problem or record.first_problem
        add_counts(self.columns, record.labels)
        add_counts(self.labelled, record.labelled)
        add_counts(self.numbers, record.numbers)
        for name, score in record.largest.items():
            self.largest[name] = max(score, self.largest.get(name, score))
        add_counts(self.lengths, record.text_lengths)
        add_counts(self.stages, record.stages)
        add_counts(self.agreements, record.agreements)
        add_counts(self.sources, record.sources)
        self._count_textless(record)
        self.empty_files += record.source.get("empty", ())
        for name, counts in self.sources.items():
            if len(counts) > 2 * MOST_LABELS:  # parts may have different values
                self.sources[name] = fold_rare(counts)
        add_examples(self.examples, record.examples)
        self.labels = most_frequent(next(iter(self.columns.values()), {}))

    def _count_textless(self, record: Record) -> None:
        textless = record.source.get("textless", {})
        path = record.source.get("path")
        if path is not None and path not in textless and record.rows_in:
            self._with_texts.add(path)
            self.textless.pop(path, None)
        add_counts(self.textless, {p: n for p, n in textless.items() if p not in self._with_texts})

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes except `running`, and the two speeds, by name, as JSON values."""
        speeds = {"rows_per_second": self.rows_per_second}
        hidden = ("running", "_with_texts")
        values = {name: value for name, value in vars(self).items() if name not in hidden}
        return {**values, **speeds, "tokens_per_second": self.tokens_per_second}


Report = Callable[[int, int, JobSummary], None]
