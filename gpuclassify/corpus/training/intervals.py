"""Intervals of shares, which hold the true share 95 times of 100."""

from __future__ import annotations

from typing import Any

import numpy as np

_DEVIATIONS = 1.959963984540054  # 97.5% quantile of the standard normal distribution


def wilson_interval(share: Any, trials: Any) -> tuple[Any, Any]:
    """Return both ends of Wilson's 95% confidence interval of a share.

    Source: E. B. Wilson, Journal of the American Statistical Association 22 (1927), 209-212. Takes
    numbers or arrays. `trials` must be above 0, and may be a fraction, as for weighted rows.
    """
    extra = _DEVIATIONS**2 / np.maximum(trials, np.finfo(float).tiny)
    middle = (share + extra / 2) / (1 + extra)
    half = np.sqrt(extra * share * (1 - share) + extra**2 / 4) / (1 + extra)
    # Rounding must not exclude shares of 0 and 1 from their interval.
    low, high = np.minimum(middle - half, share), np.maximum(middle + half, share)
    return np.maximum(low, 0.0), np.minimum(high, 1.0)


def effective_rows(share: Any, weight: Any, squares: Any, part_squares: Any) -> Any:
    """Return the effective sample size of a share of weighted rows.

    `weight` and `squares` are the sums of all rows' weights and of their squares; `part_squares` is
    the sum of squares of the rows counted in the share. The variance of a ratio of sums is W. G.
    Cochran's (Sampling Techniques, 1977); for shares of 0 and 1 the size is L. Kish's (Survey
    Sampling, 1965).
    """
    spread = (1 - share) ** 2 * part_squares + share**2 * np.maximum(squares - part_squares, 0)
    product, least = share * (1 - share), np.finfo(float).tiny
    known = product * np.square(weight, dtype=float) / np.maximum(spread, least)
    kish = np.square(weight, dtype=float) / np.maximum(squares, least)
    return np.where((product > 0) & (spread > 0), known, kish)
