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


def effective_rows(share: Any, weight: Any, squares: Any, part_squares: Any) -> Any:
    """Return the rows of equal weight that would tell as much of a share of weighted rows.

    By the sums of all rows' weights and of their squares, and of the squares of those that the
    share is of: the variance of a ratio of sums (W. G. Cochran, Sampling Techniques, 1977), or, of
    shares of 0 and 1, L. Kish's (Survey Sampling, 1965).
    """
    spread = (1 - share) ** 2 * part_squares + share**2 * np.maximum(squares - part_squares, 0)
    product, least = share * (1 - share), np.finfo(float).tiny
    known = product * np.square(weight, dtype=float) / np.maximum(spread, least)
    kish = np.square(weight, dtype=float) / np.maximum(squares, least)
    return np.where((product > 0) & (spread > 0), known, kish)
