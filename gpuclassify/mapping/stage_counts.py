"""What each mapper does with the rows of a part: counts that add up, and a few of its texts."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.frames import Texts
from gpuclassify.mapping.columns import LABELS
from gpuclassify.mapping.partition_map import PartitionMap

# Why a row is dropped. One that several filters drop counts once, under the first of these.
REASONS = ("null", "label", "confidence", "score")
KEPT, NULL = -1, 0  # beside and among the places in REASONS
MOST_LABELS = 1_000
MOST_LABELS_WITH_EXAMPLES = 30  # of one part, so that its record stays small
EXAMPLE_CHARS = 160
LABEL = {b"role": b"label"}  # metadata of the field of a label


@dataclass(frozen=True)
class TextOutcomes:
    """What a mapper found for distinct texts."""

    texts: Texts
    reasons: np.ndarray  # int8 (texts,), as `first_reasons` gives them
    labels: pa.Array | None = None
    certainties: np.ndarray | None = None  # what examples are ordered by, finite numbers (texts,)

    def examples(self, most: int) -> dict[str, dict[str, list[list[Any]]]]:
        """The texts at the highest and the lowest certainties, `most` at each end.

        Returns
        -------
        dict of str to dict
            ``labels`` and ``dropped``: by label and by reason, pairs of certainty, or None, and
            the text's beginning, the highest first. A mapper without labels has one group, "".
        """
        groups = {"": np.arange(len(self.texts))} if self.certainties is not None else {}
        if self.labels is not None:
            coded = self.labels.dictionary_encode()
            codes = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
            places = {str(name): code for code, name in enumerate(coded.dictionary.to_pylist())}
            frequent = [*count_values(self.labels)][:MOST_LABELS_WITH_EXAMPLES]
            groups = {name: np.flatnonzero(codes == places[name]) for name in frequent}
        dropped = {name: np.flatnonzero(self.reasons == n) for n, name in enumerate(REASONS)}
        return {"labels": self._pick(groups, most), "dropped": self._pick(dropped, most)}

    def _pick(self, groups: Mapping[str, np.ndarray], most: int) -> dict[str, list[list[Any]]]:
        picked = {}
        for name, places in groups.items():
            sure = self.certainties
            ordered = places if sure is None else places[np.argsort(-sure[places], kind="stable")]
            chosen = np.array(_ends(ordered.tolist(), most), dtype=np.int64)
            numbers = (
                [None] * len(chosen)
                if sure is None
                else sure[chosen].astype(float).round(4).tolist()
            )
            texts = self.texts.take(chosen).to_list() if len(chosen) else []
            pairs = zip(numbers, map(beginning, texts), strict=True)
            picked[name] = [list(pair) for pair in pairs]
        return {name: pairs for name, pairs in picked.items() if pairs}


@dataclass
class Stages:
    """What the mappers of one run did, by their names in the order in which they ran.

    Filled by those that run within ``run_context(stages=...)``.

    Attributes
    ----------
    most_examples : int
        Texts at each end of a group of examples, at most; 0 for no examples.
    counts : dict of str to dict
        Of each mapper ``read``, ``kept``, and ``dropped`` and ``would_drop`` by reason; ``labels``
        by column, before the filters; ``truncated_texts`` and ``seconds``.
    examples : dict of str to dict
        Of each mapper ``most``, and what `TextOutcomes.examples` gives.
    """

    most_examples: int = 0
    counts: dict[str, dict[str, Any]] = field(default_factory=dict)
    examples: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, name: str, counts: dict[str, Any], outcomes: TextOutcomes) -> None:
        """Note what one more mapper did; a second one of the same name gets a number."""
        same = sum(known.partition(" ")[0] == name for known in self.counts)
        name = f"{name} {same + 1}" if same else name
        self.counts[name] = counts
        if self.most_examples:
            most = self.most_examples
            self.examples[name] = {"most": most, **outcomes.examples(most)}


def label_fields(mappers: Iterable[PartitionMap]) -> tuple[str, ...]:
    """New columns whose values a report counts: labels, whole numbers and decisions.

    Of a column of lists every label of a row counts.
    """
    counted: list[str] = []
    for schema in (mapper.schema() for mapper in mappers):
        counted += [field.name for field in schema if field.metadata == LABEL]
        kinds = (pa.bool_(), pa.int64(), LABELS)
        counted += [field.name for field in schema if field.type in kinds]
    return tuple(dict.fromkeys(counted))


def first_reasons(passed: Mapping[str, np.ndarray], count: int) -> np.ndarray:
    """Why each of `count` texts is dropped first: its place in `REASONS`, or `KEPT`, int8 (texts,).

    `passed` says which texts pass the filter of each reason.
    """
    reasons = np.full(count, KEPT, dtype=np.int8)
    for place, reason in reversed([*enumerate(REASONS)]):
        if reason in passed:
            reasons[~passed[reason]] = place
    return reasons


def row_reasons(text_reasons: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The reasons of rows, int8 (rows,), of those of the texts at `positions`, -1 for null."""
    reasons = np.full(len(positions), NULL, dtype=np.int8)
    has_text = positions >= 0
    reasons[has_text] = text_reasons[positions[has_text]]
    return reasons


def count_rows(rows: int, reasons: np.ndarray | None, drops_rows: bool) -> dict[str, Any]:
    """Rows read, kept, and dropped by reason; what would be dropped, if all are to stay.

    `reasons` are int8 (rows,), None without filters; `drops_rows` is false where rows are marked in
    a column.
    """
    refused, kept = {}, rows
    if reasons is not None:
        counts = {name: int((reasons == place).sum()) for place, name in enumerate(REASONS)}
        refused = {name: count for name, count in counts.items() if count}
        kept = int((reasons == KEPT).sum()) if drops_rows else rows
    dropped, would_drop = (refused, {}) if drops_rows else ({}, refused)
    return {"read": rows, "kept": kept, "dropped": dropped, "would_drop": would_drop}


def count_values(column: Any) -> dict[str, int]:
    """Rows by value, of lists by each value, the most frequent `MOST_LABELS` first; not nulls."""
    if pa.types.is_list(column.type):
        column = pc.list_flatten(column)
    pairs = pc.value_counts(column.drop_null()).to_pylist()
    pairs.sort(key=lambda pair: (-pair["counts"], str(pair["values"])))
    return {str(pair["values"]): int(pair["counts"]) for pair in pairs[:MOST_LABELS]}


def count_labels(columns: Any, names: Sequence[str]) -> dict[str, dict[str, int]]:
    """`count_values` of some columns of a table, or of a dict of arrays, as far as it has them."""
    there = columns.column_names if isinstance(columns, pa.Table) else columns
    return {name: count_values(columns[name]) for name in names if name in there}


def add_examples(sums: dict[str, Any], examples: Mapping[str, Any]) -> None:
    """Keep in `sums` the best of its examples and of one more part's; both as `Stages.examples`."""
    for stage, groups in examples.items():
        known = sums.setdefault(stage, {"most": 0, "labels": {}, "dropped": {}})
        known["most"] = max(known["most"], groups["most"])
        for kind in ("labels", "dropped"):
            for name, pairs in groups[kind].items():
                every = {(sure, text) for sure, text in [*known[kind].get(name, ()), *pairs]}
                ordered = sorted(every, key=lambda pair: (-(pair[0] or 0.0), pair[1]))
                known[kind][name] = [list(pair) for pair in _ends(ordered, known["most"])]


def beginning(text: str) -> str:
    """The first `EXAMPLE_CHARS` characters of a text in one line, without those that are invisible.

    Controls, marks of direction and lone surrogates would change how what is around them is shown.
    """
    line = " ".join(text[:EXAMPLE_CHARS].split())
    shown = "".join(char for char in line if unicodedata.category(char)[0] != "C")
    return f"{shown}…" if len(text) > EXAMPLE_CHARS else shown


def _ends(ordered: list[Any], most: int) -> list[Any]:
    """The first and the last `most` of a list, or all of a shorter one."""
    return ordered if len(ordered) <= 2 * most else ordered[:most] + ordered[-most:]
