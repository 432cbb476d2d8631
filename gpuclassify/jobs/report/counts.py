"""What a part's record counts of its rows, in bins that add up over parts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.mapping.stage_counts import MOST_LABELS

BIN_WIDTH = 0.05  # of scores
LARGEST_SCORE = 10.0  # the last bin holds what is larger
# Lower edges of the bins of lengths, in characters: each of the shortest, then four an octave.
LENGTH_EDGES = (0, 1, 2, 3, *(2**octave // 4 * n for octave in range(2, 40) for n in range(4, 8)))
OTHER, NO_SOURCE = "(other)", "(null)"


def count_scores(table: pa.Table, columns: Sequence[str]) -> dict[str, dict[str, int]]:
    """Rows by ``floor(score / BIN_WIDTH)``, for each of the columns of finite numbers."""
    return {name: _count(_bins(table[name])) for name in columns if name in table.column_names}


def count_lengths(texts: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Rows by the lower edge of their bin of the text's length, one of `LENGTH_EDGES`."""
    counts = {}
    for name, column in texts.items():
        lengths = pc.utf8_length(column.drop_null()).to_numpy()
        bins = np.searchsorted(LENGTH_EDGES, lengths, side="right") - 1
        counts[name] = _count(np.array(LENGTH_EDGES)[bins])
    return counts


def count_agreements(table: pa.Table, columns: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Rows by label of the one and of the other, for each two columns of labels; without nulls."""
    agreements = {}
    there = [name for name in columns if name in table.column_names]
    there = [name for name in there if not pa.types.is_nested(table[name].type)]
    for first, second in itertools.combinations(there, 2):
        pairs = table.select([first, second]).drop_null().group_by([first, second])
        counts: dict[str, dict[str, int]] = {}
        for row in pairs.aggregate([([], "count_all")]).to_pylist():
            counts.setdefault(str(row[first]), {})[str(row[second])] = row["count_all"]
        agreements[f"{first} and {second}"] = counts
    return agreements


def count_sources(read: Any, kept: Any) -> dict[str, dict[str, int]]:
    """Rows by value of a column of what is read and of what is kept; see `fold_rare`."""
    counts: dict[str, dict[str, int]] = {}
    for kind, column in (("read", read), ("kept", kept)):
        for pair in pc.value_counts(column).to_pylist():
            value = NO_SOURCE if pair["values"] is None else str(pair["values"])
            add_counts(counts, {value: {"read": 0, "kept": 0, kind: pair["counts"]}})
    return fold_rare(counts)


def fold_rare(
    counts: Mapping[str, dict[str, int]], most: int = MOST_LABELS
) -> dict[str, dict[str, int]]:
    """The values of which most rows are read, first the most frequent, and the others as one."""
    named = [item for item in counts.items() if item[0] != OTHER]
    named.sort(key=lambda item: (-item[1]["read"], item[0]))
    folded = dict(named[:most])
    for rest in [*(count for _, count in named[most:]), counts.get(OTHER, {})]:
        add_counts(folded, {OTHER: rest} if rest else {})
    return folded


def add_counts(sums: dict[str, Any], counts: Mapping[str, Any]) -> None:
    """Add the counts of one part to the sums of others, by name, however deep they lie."""
    for name, count in counts.items():
        if isinstance(count, Mapping):
            add_counts(sums.setdefault(name, {}), count)
        else:
            sums[name] = sums.get(name, 0) + count


def most_frequent(counts: Mapping[str, int]) -> dict[str, int]:
    """The counts by name, first the largest."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _bins(column: pa.ChunkedArray) -> np.ndarray:
    scores = column.drop_null().to_numpy()
    scores = np.clip(scores[np.isfinite(scores)], -LARGEST_SCORE, LARGEST_SCORE)
    # Rounded first: in float32, 0.15 / 0.05 is a little less than 3.
    return np.floor(np.round(scores.astype(np.float64) / BIN_WIDTH, 5)).astype(np.int64)


def _count(bins: np.ndarray) -> dict[str, int]:
    values, counts = np.unique(bins, return_counts=True)
    return {str(value): int(count) for value, count in zip(values, counts, strict=True)}
