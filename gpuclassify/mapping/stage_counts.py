"""Count the rows that each mapper of a job reads, keeps and drops, and collect example texts."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.frames import Texts
from gpuclassify.mapping.partition_map import PartitionMap
from gpuclassify.workers.run_context import add_counts

NO_MODEL = "no model"  # reason for rows without a route
CONDITION, UNKNOWN = "condition", "unknown"  # reasons for a condition that is false or null
# Descriptions of reasons to drop a row. A row that several filters drop counts under the first of
# these reasons; additional reasons of a head come last.
REASONS = {
    "null": "without text",
    "empty": "with an empty text",
    "blank": "with a text of white space alone",
    "label": "with another label",
    "confidence": "below the minimum confidence",
    "score": "below the minimum score",
    NO_MODEL: "without a model",
    CONDITION: "for which the condition is false",
    UNKNOWN: "for which the condition is null",
}
NULL, EMPTY, BLANK, KEPT = 0, 1, 2, -1  # indices in REASONS; KEPT stands for no reason
MOST_LABELS = 1_000
MOST_LABELS_WITH_EXAMPLES = 30  # limits the size of the record of each partition
EXAMPLE_CHARS = 160
CONTEXT_CHARS = 60  # characters of context on each side of a passage
MARKS = "\ue000", "\ue001"  # enclose a passage; escaped texts never have these characters
LABELS = pa.list_(pa.string())  # type of a column with several labels per row
LABEL = {b"role": b"label"}  # metadata of the Arrow field of a label column
COUNT = {b"role": b"count"}  # metadata of a column whose integers are not labels
SELECT = "Select "  # prefix of the names of conditions
NOTHING_LABELLED: Mapping[str, Any] = {"labels": {}, "labelled": {}, "occurrences": {}}


@dataclass(frozen=True)
class TextOutcomes:
    """Result of one mapper for each distinct text: passed filters, label and certainty.

    Used to count dropped rows and select example texts for a job's report.
    """

    texts: Texts
    passed: Mapping[str, np.ndarray] | None  # mask by filter reason; None without filters
    labels: pa.Array | None = None
    certainties: np.ndarray | None = None  # sort key of examples, finite (texts,)

    @property
    def names(self) -> list[str]:
        """Names of all possible reasons to drop a text, such as "score", in order of precedence."""
        return [*dict.fromkeys([*REASONS, *(self.passed or ())])]

    @functools.cached_property
    def reasons(self) -> np.ndarray:
        """Reason to drop each text, int8 (texts,): an index into `names`, or `KEPT` (-1) for none.

        A dropped text that is empty or blank has that reason, other texts the first that applies.
        """
        reasons = np.full(len(self.texts), KEPT, dtype=np.int8)
        for index, name in reversed([*enumerate(self.names)]):
            if self.passed and name in self.passed:
                reasons[~self.passed[name]] = index
        if len(dropped := np.flatnonzero(reasons != KEPT)):
            for row, text in zip(dropped, self.texts.take(dropped), strict=True):
                whole = text if isinstance(text, str) else "".join(text)  # or a pair of texts
                if not whole.strip():
                    reasons[row] = BLANK if whole else EMPTY
        return reasons

    def examples(self, most: int) -> dict[str, dict[str, list[list[Any]]]]:
        """Return example texts by label and by reason to drop.

        ``labels`` is the result of `labelled`. ``dropped`` maps reasons, except "null", "empty" and
        "blank", to examples of the same form.
        """
        reasons, named = self.reasons, [*enumerate(self.names)][BLANK + 1 :]
        dropped = {name: np.flatnonzero(reasons == index) for index, name in named}
        return {"labels": self.labelled(most), "dropped": self._pick(dropped, most)}

    def labelled(self, most: int) -> dict[str, list[list[Any]]]:
        """Return example texts by label, each as a list of certainty and beginning of the text.

        They are the `most` texts with the highest certainties and the `most` with the lowest, in
        descending order; without certainties, the first and last texts, with None. Only the
        `MOST_LABELS_WITH_EXAMPLES` most frequent labels have examples. A regression has the label
        "", and a mapper without labels and certainties none.
        """
        groups = {"": np.arange(len(self.texts))} if self.certainties is not None else {}
        if self.labels is not None:
            coded = self.labels.dictionary_encode()
            codes = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
            code_of = {str(name): code for code, name in enumerate(coded.dictionary.to_pylist())}
            frequent = [*count_values(self.labels)][:MOST_LABELS_WITH_EXAMPLES]
            groups = {name: np.flatnonzero(codes == code_of[name]) for name in frequent}
        return self._pick(groups, most)

    def _pick(self, groups: Mapping[str, np.ndarray], most: int) -> dict[str, list[list[Any]]]:
        picked = {}
        for name, members in groups.items():
            sure, ordered = self.certainties, members
            if sure is not None:
                ordered = members[np.argsort(-sure[members], kind="stable")]
            picks = np.array(best_and_worst(ordered.tolist(), most), dtype=np.int64)
            numbers = (
                [None] * len(picks) if sure is None else sure[picks].astype(float).round(4).tolist()
            )
            texts = self.texts.take(picks) if len(picks) else []
            pairs = zip(numbers, map(beginning, texts), strict=True)
            picked[name] = [list(pair) for pair in pairs]
        return {name: pairs for name, pairs in picked.items() if pairs}


@dataclass
class StageCounts:
    """Counts of rows and example texts of one run, by name of the mapper, in run order.

    A mapper whose name is taken gets a number, such as "QualityClassifier 2". Mappers add their
    counts while they run within ``run_context(stages=...)``.
    """

    most_examples: int = 0  # texts at each end of a group of examples; 0 for no examples
    # Counts by mapper: rows ``read`` and ``kept``; rows by reason in ``dropped`` and
    # ``would_drop``; the result of `count_labels` for all rows read; ``truncated_texts``; and
    # ``seconds``.
    counts: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Examples by mapper: ``most``, and the result of `TextOutcomes.examples`.
    examples: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(
        self,
        mapper: PartitionMap,
        outcomes: TextOutcomes,
        positions: np.ndarray,
        columns: Mapping[str, pa.Array],
        **counts: object,
    ) -> None:
        """Record a mapper's counts of rows read, kept, dropped and labelled, and its example texts.

        `columns` are the new columns, whose labels are counted. `positions` is the index of each
        row's text in `outcomes`, int64 (rows,); -1 for null. `counts` are more counts by name.
        """
        refused: dict[str, int] = {}
        if outcomes.passed is not None:
            reasons = np.append(outcomes.reasons, NULL)[positions]
            every = ((name, int((reasons == n).sum())) for n, name in enumerate(outcomes.names))
            refused = {name: count for name, count in every if count}
        dropped, would_drop = (refused, {}) if mapper.drops_rows else ({}, refused)
        name, rows = self._name(mapper), len(positions)
        self.counts[name] = {
            **{"read": rows, "kept": rows - sum(dropped.values())},
            **{"dropped": dropped, "would_drop": would_drop},
            **count_labels(columns, label_fields([mapper])),
            **counts,
        }
        if self.most_examples:
            most = self.most_examples
            self.examples[name] = {"most": most, **outcomes.examples(most)}

    def add_routed(
        self,
        mapper: PartitionMap,
        routes: Mapping[str, StageCounts],
        unrouted: int,
        has_filters: bool,
    ) -> None:
        """Record the counts of `mapper`, a `Route`: sums, and each model's counts under ``models``.

        `routes` maps a description of routed rows, such as "language=de", to the counts of their
        mapper. `unrouted` is the number of rows without a mapper, which pass no filter if the
        mappers have filters (`has_filters`).
        """
        name, refused = self._name(mapper), {NO_MODEL: unrouted} if has_filters and unrouted else {}
        dropped, would_drop = (refused, {}) if mapper.drops_rows else ({}, refused)
        rest = {"read": unrouted, "kept": 0 if dropped else unrouted, **NOTHING_LABELLED}
        rest |= {"dropped": dropped, "would_drop": would_drop, "truncated_texts": 0, "seconds": 0.0}
        total: dict[str, Any] = {}
        add_counts(total, {**rest, "models": {NO_MODEL: rest} if unrouted else {}})
        for route, stages in routes.items():
            for stage, counts in stages.counts.items():
                add_counts(total, {**counts, "models": {f"{route}: {stage}": counts}})
            for stage, examples in stages.examples.items():
                self.examples[f"{name}, {route}: {stage}"] = examples
        self.counts[name] = total

    def add_condition(
        self, term: str, read: np.ndarray, met: np.ndarray, unknown: int, seconds: float
    ) -> None:
        """Record the numbers of rows that one term of a condition keeps and drops.

        `read` masks the rows that met earlier terms, and `met` the rows for which the term is true,
        both bool (rows,). The term is null for `unknown` of the rows read.
        """
        rows, kept = int(read.sum()), int((read & met).sum())
        refused = {CONDITION: rows - kept - unknown, UNKNOWN: unknown}
        dropped = {reason: count for reason, count in refused.items() if count}
        counts = {"read": rows, "kept": kept, "dropped": dropped, "would_drop": {}}
        counts |= {**NOTHING_LABELLED, "truncated_texts": 0, "seconds": seconds}
        self.counts[f"{SELECT}{term}"] = counts

    def _name(self, mapper: PartitionMap) -> str:
        name = mapper.__name__
        same = sum(known.partition(" ")[0] == name for known in self.counts)
        return f"{name} {same + 1}" if same else name


def is_condition(name: str) -> bool:
    """Return whether a name in a job's counts belongs to a condition instead of a mapper."""
    return name.startswith(SELECT)


def label_fields(mappers: Iterable[PartitionMap]) -> tuple[str, ...]:
    """Return the names of new columns whose values a report counts as labels."""
    counted: list[str] = []
    for schema in (mapper.schema() for mapper in mappers):
        counted += [field.name for field in schema if field.metadata == LABEL]
        kinds = (pa.bool_(), pa.int64(), LABELS)
        counted += [
            field.name
            for field in schema
            if (field.type in kinds or _has_labels(field.type)) and field.metadata != COUNT
        ]
    return tuple(dict.fromkeys(counted))


def _has_labels(kind: pa.DataType) -> bool:
    is_of_structs = pa.types.is_list(kind) and pa.types.is_struct(kind.value_type)
    return is_of_structs and kind.value_type.get_field_index("label") >= 0


def count_values(column: pa.Array | pa.ChunkedArray) -> dict[str, int]:
    """Count the `MOST_LABELS` most frequent values, as str and without nulls, in this order."""
    pairs = pc.value_counts(column.drop_null()).to_pylist()
    pairs.sort(key=lambda pair: (-pair["counts"], str(pair["values"])))
    return {str(pair["values"]): int(pair["counts"]) for pair in pairs[:MOST_LABELS]}


def count_labels(
    columns: pa.Table | Mapping[str, pa.Array], names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Count the rows by label in the named columns, as three dicts by column.

    ``labels`` has the number of rows by label; a row with several labels counts once for each.
    ``labelled`` has the number of rows whose value is not null, which may be an empty list.
    ``occurrences``, only for lists of structs, has the number of structs by label.
    """
    there = columns.column_names if isinstance(columns, pa.Table) else columns
    counts: dict[str, dict[str, Any]] = {"labels": {}, "labelled": {}, "occurrences": {}}
    for name in (name for name in names if name in there):
        column = columns[name]
        counts["labelled"][name] = len(column) - column.null_count
        if pa.types.is_list(column.type):
            rows, values = pc.list_parent_indices(column), pc.list_flatten(column)
            if pa.types.is_struct(values.type):
                values = pc.struct_field(values, "label")
                counts["occurrences"][name] = count_values(values)
            pairs = pa.table({"row": rows, "value": values}).group_by(["row", "value"])
            column = pairs.aggregate([])["value"]  # each label once per row
        counts["labels"][name] = count_values(column)
    return counts


def add_examples(sums: dict[str, Any], examples: Mapping[str, Any]) -> None:
    """Merge the example texts of another partition into `sums`, in place.

    Both map a mapper's name to the number "most" and to the groups "labels" and "dropped", as in
    `StageCounts.examples`.
    """
    for stage, groups in examples.items():
        known = sums.setdefault(stage, {"most": 0, "labels": {}, "dropped": {}})
        known["most"] = max(known["most"], groups["most"])
        for kind in ("labels", "dropped"):
            for name, pairs in groups[kind].items():
                every = {(sure, text) for sure, text in [*known[kind].get(name, ()), *pairs]}
                ordered = sorted(every, key=lambda pair: (-(pair[0] or 0.0), pair[1]))
                known[kind][name] = [list(pair) for pair in best_and_worst(ordered, known["most"])]


def beginning(text: str | tuple[str, str]) -> str:
    """Return the first `EXAMPLE_CHARS` characters of a text as one line, to show it as an example.

    The texts of a pair are joined by " | ". Control characters, direction marks and lone surrogates
    are removed, because they would change the display of other text.
    """
    if isinstance(text, tuple):
        return " | ".join(map(beginning, text))
    shown = _without_controls(" ".join(text[:EXAMPLE_CHARS].split()))
    return f"{shown}…" if len(text) > EXAMPLE_CHARS else shown


def marked_line(text: str, start: int, end: int) -> str:
    """Return the passage ``text[start:end]`` as one line, between the two characters in `MARKS`.

    It has up to `CONTEXT_CHARS` characters of context on each side. Only the first `EXAMPLE_CHARS`
    characters of the passage are shown.
    """
    first, last = max(0, start - CONTEXT_CHARS), min(len(text), end + CONTEXT_CHARS)
    inside = text[start : min(end, start + EXAMPLE_CHARS)]
    before, inside, after = (
        _without_controls(re.sub(r"\s+", " ", part))
        for part in (text[first:start], inside, text[end:last])
    )
    ends = "…" * (first > 0), "…" * (last < len(text))
    return f"{ends[0]}{before}{MARKS[0]}{inside}{MARKS[1]}{after}{ends[1]}"


def _without_controls(line: str) -> str:
    return "".join(char for char in line if unicodedata.category(char)[0] != "C")


def best_and_worst(ordered: list[Any], most: int) -> list[Any]:
    """Return the first and the last `most` (at least 1) items; all if these would overlap."""
    return ordered if len(ordered) <= 2 * most else ordered[:most] + ordered[-most:]
