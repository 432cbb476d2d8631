"""Between what a figure may lie: intervals that hold the true one 95 times of 100."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

Figures = Callable[[np.ndarray], dict[str, float | None]]  # of rows that count so many times each
RESAMPLES = 1_000
_ENDS = (0.025, 0.975)
_Z = 1.959964  # of the normal distribution at 0.975


def wilson(share: float, rows: float) -> list[float]:
    """The interval of a share of so many rows, which may be of the length 0 at neither end.

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", Journal of
    the American Statistical Association 22 (1927), 209-212; L. D. Brown, T. T. Cai and A. DasGupta,
    "Interval estimation for a binomial proportion", Statistical Science 16 (2001), 101-133,
    recommend it for few rows.
    """
    spread = _Z**2 / rows
    centre = share + spread / 2
    half = (spread * (share * (1 - share) + spread / 4)) ** 0.5
    return [(centre - half) / (1 + spread), (centre + half) / (1 + spread)]


def intervals(
    figures: Figures, summary: Mapping[str, float | None], groups: np.ndarray
) -> dict[str, list[float] | None]:
    """The interval of each figure: of ``accuracy`` Wilson's, of others by the bootstrap.

    The bootstrap draws groups, int64 (rows,), as often as there are, with the same seed each time,
    and takes what lies between the 2.5th and the 97.5th percentile of each figure. Of rows that are
    alike within groups, accuracy counts as many as would vary as much without groups, as surveys
    have it: E. L. Korn and B. I. Graubard, Survey Methodology 24 (1998), 193-201. None for a figure
    that no draw changes, and for all of a single group.
    """
    own, sizes = np.unique(groups, return_inverse=True, return_counts=True)[1:]
    count, random = len(sizes), np.random.default_rng(0)
    if count < 2:
        return dict.fromkeys(summary)
    drawn: dict[str, list[float]] = {name: [] for name in summary}
    for _ in range(RESAMPLES):
        times = np.bincount(random.integers(0, count, count), minlength=count)
        for name, value in figures(times[own].astype(np.float64)).items():
            if value is not None:
                drawn[name].append(value)
    found: dict[str, list[float] | None] = {}
    for name, values in drawn.items():
        ends = np.quantile(values, _ENDS).tolist() if values else [0.0, 0.0]
        found[name] = ends if ends[0] < ends[1] else None
    if (share := summary.get("accuracy")) is not None:
        rows, variance = float(len(own)), float(np.var(drawn["accuracy"]))
        if count < rows:
            alike = share * (1 - share) / variance if variance else count
            rows = min(rows, max(1.0, alike))
        found["accuracy"] = wilson(share, rows)
    return found
