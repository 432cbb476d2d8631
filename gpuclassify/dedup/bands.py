"""How many bands, of how many numbers each, find which pairs of documents.

Two sets of Jaccard similarity s agree in one number of their MinHash signatures with probability s
(Broder 1997), in all `rows` numbers of a band with ``s**rows``, and in at least one of `bands`
with ``1 - (1 - s**rows)**bands`` (Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, 3.4).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuclassify.settings.checks import check_count


def catch_probability(similarity: Any, bands: Any, rows: Any) -> Any:
    """The share of pairs of this Jaccard similarity, 0 to 1, that agree in at least one band.

    Arguments may be arrays: they are broadcast.
    """
    return 1 - (1 - np.power(similarity, rows)) ** bands


def choose_bands(
    threshold: float, hashes: int = 260, *, false_negative_weight: float = 0.95
) -> tuple[int, int]:
    """Bands, and numbers in each, that suit a threshold.

    The pair minimises what datasketch and text-dedup minimise: the area under `catch_probability`
    below the threshold (pairs found in vain) and that above it (pairs missed), weighted. With equal
    weights, as there, fewer than half of the pairs at a threshold of 0.8 are found; with the
    default, 19 to 1, 0.89 to 0.97 of those at any threshold from 0.5 to 0.95. A pair found in vain
    costs a comparison of two texts, and one that is missed is never seen again.

    Parameters
    ----------
    threshold : float
        Jaccard similarity, above 0 and up to 1, from which on pairs are to be found.
    hashes : int
        The most that ``bands * rows`` may be.
    false_negative_weight : float
        Weight of pairs missed, 0 to 1; those found in vain have the rest.

    Returns
    -------
    bands, rows : int

    Raises
    ------
    ValueError
        A threshold that is no such similarity.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold={threshold} suits no bands: pass one above 0, and 1 at most")
    check_count("hashes", hashes)
    pairs = [
        (bands, rows) for bands in range(1, hashes + 1) for rows in range(1, hashes // bands + 1)
    ]
    bands, rows = np.array(pairs).T[:, :, None]
    nodes, weights = np.polynomial.legendre.leggauss(64)  # of Gauss and Legendre, on [-1, 1]
    nodes, weights = (nodes + 1) / 2, weights / 2
    in_vain = threshold * catch_probability(threshold * nodes, bands, rows) @ weights
    above = threshold + (1 - threshold) * nodes
    missed = (1 - threshold) * (1 - catch_probability(above, bands, rows) @ weights)
    error = (1 - false_negative_weight) * in_vain + false_negative_weight * missed
    return pairs[np.argmin(error)]


def curve(bands: int, rows: int) -> str:
    """What share of pairs is found at some similarities, in a line."""
    points = (0.5, 0.6, 0.7, 0.8, 0.9)
    shares = (f"{point}: {catch_probability(point, bands, rows):.0%}" for point in points)
    half = (1 - 0.5 ** (1 / bands)) ** (1 / rows)
    return f"find by Jaccard similarity {', '.join(shares)} of pairs; half at {half:.2f}"
