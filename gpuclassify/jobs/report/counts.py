"""What a part's record counts of its rows, in bins that add up over parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

BIN_WIDTH = 0.05  # of scores
LARGEST_SCORE = 10.0  # the last bin holds what is larger
MOST_LABELS = 1_000


def count_labels(table: pa.Table, columns: Sequence[str]) -> dict[str, dict[str, int]]:
    """Rows by value, the most frequent first, for each of the columns; nulls are not counted."""
    counts = {}
    for name in columns:
        pairs = pc.value_counts(table[name].drop_null()).to_pylist()
        pairs.sort(key=lambda pair: (-pair["counts"], str(pair["values"])))
        counts[name] = {str(p["values"]): int(p["counts"]) for p in pairs[:MOST_LABELS]}
    return counts


def count_scores(table: pa.Table, columns: Sequence[str]) -> dict[str, dict[str, int]]:
    """Rows by ``floor(score / BIN_WIDTH)``, for each of the columns of finite numbers."""
    return {name: _count(_bins(table[name])) for name in columns}


def count_lengths(texts: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Rows by bits of the text's length in characters: bin b holds 2**(b-1) to 2**b - 1."""
    counts = {}
    for name, column in texts.items():
        lengths = pc.utf8_length(column.drop_null()).to_numpy()
        counts[name] = _count(np.frexp(lengths)[1])  # the exponent of n is its number of bits
    return counts


def add_counts(sums: dict[str, dict[str, int]], counts: Mapping[str, Mapping[str, int]]) -> None:
    """Add the counts of one part to the sums of others."""
    for name, bins in counts.items():
        known = sums.setdefault(name, {})
        for value, count in bins.items():
            known[value] = known.get(value, 0) + count


def _bins(column: pa.ChunkedArray) -> np.ndarray:
    scores = column.drop_null().to_numpy()
    scores = np.clip(scores[np.isfinite(scores)], -LARGEST_SCORE, LARGEST_SCORE)
    # Rounded first: in float32, 0.15 / 0.05 is a little less than 3.
    return np.floor(np.round(scores.astype(np.float64) / BIN_WIDTH, 5)).astype(np.int64)


def _count(bins: np.ndarray) -> dict[str, int]:
    values, counts = np.unique(bins, return_counts=True)
    return {str(value): int(count) for value, count in zip(values, counts, strict=True)}
