"""Agreement of two columns: correlations, chance-corrected coefficients, confusion matrices."""

from __future__ import annotations

import numpy as np

MOST_GRADES = 20  # range of whole numbers that count as grades


def grades_of(numbers: np.ndarray) -> tuple[int, int] | None:
    """Return the lowest and highest number if all are grades, else None.

    Grades are whole numbers that differ by less than 20. `numbers` must not be empty.
    """
    is_whole = (numbers == np.rint(numbers)).all()
    if not is_whole or np.ptp(numbers) >= MOST_GRADES:
        return None
    return int(numbers.min()), int(numbers.max())


def chance_corrected(observed: float, by_chance: float) -> float | None:
    """Return a chance-corrected agreement such as kappa: ``1 - observed / by_chance``.

    Both arguments are disagreements. Returns None if `by_chance` is 0, or at most 1e-12.
    """
    return float(1 - observed / by_chance) if by_chance > 1e-12 else None


def correlation(a: np.ndarray, b: np.ndarray, weights: np.ndarray) -> float | None:
    """Return Pearson's weighted correlation of two columns, or None if one is constant."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    (x, products), (_, y) = np.cov(np.stack([a, b]), aweights=weights)
    return float(np.clip(products / np.sqrt(x * y), -1, 1))


def rank_correlation(a: np.ndarray, b: np.ndarray, weights: np.ndarray) -> float | None:
    """Return Spearman's weighted correlation of two columns, or None if one is constant.

    Columns hold codes, int64 (rows,), which count from 0 in the order of the values. scipy's
    correlations have no weights, and are too slow for a bootstrap.
    """
    ranks = []
    for codes in (a, b):
        sums = np.bincount(codes, weights)
        ranks.append((np.cumsum(sums) - sums / 2)[codes])
    return correlation(ranks[0], ranks[1], weights)


def confusion(
    rows: np.ndarray, columns: np.ndarray, count: int, weights: np.ndarray | None = None
) -> np.ndarray:
    """Count rows, or sum their weights, for each pair of codes in two columns, int64 (rows,).

    Codes are 0 to `count` - 1. The result, (count, count), has a row for each code in `rows`.
    """
    cells = np.bincount(rows * count + columns, weights, count * count)
    return cells.reshape(count, count)
