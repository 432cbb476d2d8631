"""Intervals of shares, which hold the true share 95 times of 100."""

from __future__ import annotations

from typing import Any

import numpy as np

_DEVIATIONS = 1.959963984540054  # of a normal distribution, between which 95% of it lies


def wilson_interval(share: Any, trials: Any) -> tuple[Any, Any]:
    """Return both ends of Wilson's interval of shares of so many independent trials.

    E. B. Wilson, Journal of the American Statistical Association 22 (1927), 209-212. Numbers or
    arrays; `trials` may be fractions, as of weighted rows, and are above 0.
    """
    extra = _DEVIATIONS**2 / np.maximum(trials, np.finfo(float).tiny)
    middle = (share + extra / 2) / (1 + extra)
    half = np.sqrt(extra * share * (1 - share) + extra**2 / 4) / (1 + extra)
    # Rounded, they would not always have shares of 0 and 1 between them.
    low, high = np.minimum(middle - half, share), np.maximum(middle + half, share)
    return np.maximum(low, 0.0), np.minimum(high, 1.0)


def effective_rows(weights: np.ndarray | float, squares: np.ndarray | float) -> Any:
    """Return the rows of equal weight that would tell as much, by sums of weights and squares.

    L. Kish, Survey Sampling (1965).
    """
    return np.square(weights, dtype=float) / np.maximum(squares, np.finfo(float).tiny)
