"""95% confidence intervals of shares, by Wilson, and of other figures, by the bootstrap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Figures = Callable[[np.ndarray], dict[str, float | None]]  # statistics of rows by position

RESAMPLES = 1_000
_ENDS = (0.025, 0.975)
_DEVIATIONS = 1.959963984540054  # 97.5% quantile of the standard normal distribution


def wilson_interval(share: Any, trials: Any) -> tuple[Any, Any]:
    """Return the lower and upper end of Wilson's 95% confidence interval of a proportion.

    `share` is the proportion, 0 to 1, of `trials` rows. Both are numbers or arrays. `trials` must
    be above 0, and may be a fraction, as for weighted rows. Source: E. B. Wilson, Journal of the
    American Statistical Association 22 (1927), 209-212.
    """
    extra = _DEVIATIONS**2 / np.maximum(trials, np.finfo(float).tiny)
    middle = (share + extra / 2) / (1 + extra)
    half = np.sqrt(extra * share * (1 - share) + extra**2 / 4) / (1 + extra)
    # Rounding must not exclude shares of 0 and 1 from their interval.
    low, high = np.minimum(middle - half, share), np.maximum(middle + half, share)
    return np.maximum(low, 0.0), np.minimum(high, 1.0)


def effective_rows(share: Any, weight: Any, squares: Any, part_squares: Any) -> Any:
    """Return the number of unweighted rows that give a weighted share the same variance.

    `weight` and `squares` are the sums of all rows' weights and of their squares; `part_squares` is
    the sum of the squared weights of the rows counted in the share. All are numbers or arrays. The
    variance of a ratio of sums is W. G. Cochran's (Sampling Techniques, 1977); for shares of 0 and
    1 the size is L. Kish's (Survey Sampling, 1965).
    """
    spread = (1 - share) ** 2 * part_squares + share**2 * np.maximum(squares - part_squares, 0)
    product, least = share * (1 - share), np.finfo(float).tiny
    known = product * np.square(weight, dtype=float) / np.maximum(spread, least)
    kish = np.square(weight, dtype=float) / np.maximum(squares, least)
    return np.where((product > 0) & (spread > 0), known, kish)


def bootstrap(
    figures: Figures, summary: Mapping[str, float | None], groups: np.ndarray
) -> dict[str, list[float] | None]:
    """Compute the 95% confidence interval of each figure in `summary`, as [low, high] by name.

    `summary` has the figures of all rows, and ``figures(positions)`` returns the figures of the
    rows at these positions, int64, which may repeat. `groups`, int64 (rows,), is equal for rows
    that are not independent: the bootstrap draws whole groups 1,000 times, with a fixed seed. An
    interval is None if there is only one group, or if the bootstrap's ends are equal.

    ``accuracy``, a share of rows, gets Wilson's interval instead. For groups of several rows, it
    uses the number of independent rows with the same variance: E. L. Korn and B. I. Graubard,
    Survey Methodology 24 (1998), 193-201.
    """
    group_of_row, sizes = np.unique(groups, return_inverse=True, return_counts=True)[1:]
    count, random = len(sizes), np.random.default_rng(0)
    if count < 2:
        return dict.fromkeys(summary)
    drawn: dict[str, list[float]] = {name: [] for name in summary}
    for _ in range(RESAMPLES):
        times = np.bincount(random.integers(0, count, count), minlength=count)[group_of_row]
        for name, value in figures(np.repeat(np.arange(len(groups)), times)).items():
            if value is not None:
                drawn[name].append(value)
    intervals: dict[str, list[float] | None] = {}
    for name, values in drawn.items():
        low, high = np.quantile(values, _ENDS).tolist() if values else (0.0, 0.0)
        intervals[name] = [low, high] if low < high else None
    if (accuracy := summary.get("accuracy")) is not None:
        rows, variance = len(groups), np.var(drawn["accuracy"])
        if count < rows:
            independent = accuracy * (1 - accuracy) / variance if variance else count
            rows = min(rows, max(1, round(independent)))
        ends = wilson_interval(round(accuracy * rows) / rows, rows)
        intervals["accuracy"] = [*map(float, ends)]
    return intervals
