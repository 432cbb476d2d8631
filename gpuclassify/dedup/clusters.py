"""Clusters of vectors of length 1, and in each cluster the vectors that have a similar one.

Matrix products run on the worker's GPU if it has one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ROUNDING = 1e-6  # of a cosine in float32: so much below the threshold is still taken as equal to it
BLOCK_ROWS = 1024  # compared with all survivors at a time
TILE_NUMBERS = 1 << 26  # of a product that is held at a time: 256 MB


def fit_centroids(vectors: np.ndarray, count: int, max_iter: int, seed: int) -> np.ndarray:
    """Centroids of k-means.

    Fitted by one thread of a CPU, whatever there is, so that all machines give the same.

    Parameters
    ----------
    vectors : numpy.ndarray
        float32 (vectors, width), `count` of them or more.
    count, max_iter, seed : int

    Returns
    -------
    numpy.ndarray
        float32 (count, width).
    """
    if count == 1:
        return vectors.mean(axis=0, keepdims=True)
    from sklearn.cluster import MiniBatchKMeans
    from threadpoolctl import threadpool_limits

    means = MiniBatchKMeans(count, max_iter=max_iter, random_state=seed, n_init=1)
    with threadpool_limits(1):
        return means.fit(vectors).cluster_centers_.astype(np.float32)


def assign(vectors: np.ndarray, centroids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nearest centroid of each vector, and how far the border of its cluster is.

    The border with the cluster of the second nearest centroid b is the plane midway between both
    centroids; a vector x of the cluster of a lies (|x - b|² - |x - a|²) / (2 |a - b|) from it.

    Parameters
    ----------
    vectors : numpy.ndarray
        float32 (vectors, width).
    centroids : numpy.ndarray
        float32 (centroids, width).

    Returns
    -------
    clusters : numpy.ndarray
        int64 (vectors,).
    distances : numpy.ndarray
        float32 (vectors,); infinite if there is no other cluster.
    """
    import torch

    clusters = np.zeros(len(vectors), np.int64)
    distances = np.full(len(vectors), np.inf, np.float32)
    if len(centroids) == 1:
        return clusters, distances
    centres = _on_device(centroids)
    halves = (centres * centres).sum(dim=1) / 2
    step = max(TILE_NUMBERS // len(centroids), 1)
    for at in range(0, len(vectors), step):
        scores = _on_device(vectors[at : at + step]) @ centres.T - halves  # (|x|² - |x - c|²) / 2
        best, nearest = torch.topk(scores, 2, dim=1)
        apart = (centres[nearest[:, 0]] - centres[nearest[:, 1]]).norm(dim=1)
        clusters[at : at + step] = nearest[:, 0].cpu().numpy()
        distances[at : at + step] = ((best[:, 0] - best[:, 1]) / apart).nan_to_num(0).cpu().numpy()
    return clusters, distances


def border_width(threshold: float, width: int) -> float:
    """How far a near-duplicate typically lies towards a border, from the document it is one of.

    Vectors of length 1 with cosine t are sqrt(2 - 2 t) apart. Of a step in a random one of `width`
    directions, 1 / sqrt(width) is the standard deviation along any given one.

    (The whole of sqrt(2 - 2 t) is the bound that no near-duplicate exceeds; within it of a border
    lay 93 to 98 % of texts that MiniLM embedded, of whose pairs no more than 2 % were parted.)
    """
    return float(np.sqrt((2 - 2 * threshold) / max(width, 1)))


def match(vectors: np.ndarray, staying: int, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """For each vector, in order: the most similar survivor before it, if similar enough.

    A vector without one survives. Those that do not are no reason for others to go, so that each
    of them has a survivor that is similar to it.

    Parameters
    ----------
    vectors : numpy.ndarray
        float32 (vectors, width), of length 1, those to keep first.
    staying : int
        So many first ones survive whatever they are similar to.
    threshold : float
        Cosine from which on vectors are similar.

    Returns
    -------
    kept : numpy.ndarray
        int64 (vectors,): the position of the survivor, which is a survivor's own.
    similarity : numpy.ndarray
        float32 (vectors,): the cosine with it, at most 1, and 1 for a survivor.
    """
    points = _on_device(vectors)
    limit = threshold - ROUNDING
    kept = np.arange(len(vectors))
    similarity = np.ones(len(vectors), np.float32)
    for first in range(staying, len(vectors), BLOCK_ROWS):
        block = points[first : first + BLOCK_ROWS]
        survivors = np.flatnonzero(kept[:first] == np.arange(first))
        best, nearest = _most_similar(block, points, survivors)
        _match_within((block @ block.T).cpu().numpy(), first, best, nearest, limit)
        goes = np.flatnonzero(best >= limit)
        kept[first + goes] = nearest[goes]
        similarity[first + goes] = np.minimum(best[goes], 1)
    return kept, similarity


def _most_similar(block: Any, points: Any, survivors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The highest cosine of each of a block with survivors, and the first survivor that has it."""
    best = np.full(len(block), -np.inf, np.float32)
    nearest = np.zeros(len(block), np.int64)
    step = TILE_NUMBERS // BLOCK_ROWS
    for at in range(0, len(survivors), step):
        tile = survivors[at : at + step]
        values, places = (block @ points[tile].T).max(dim=1)
        found = values.cpu().numpy()
        is_better = found > best
        best[is_better] = found[is_better]
        nearest[is_better] = tile[places.cpu().numpy()[is_better]]
    return best, nearest


def _match_within(
    cosines: np.ndarray, first: int, best: np.ndarray, nearest: np.ndarray, limit: float
) -> None:
    """Update `best` and `nearest` of a block with the survivors in the block itself."""
    goes = best >= limit
    for row in np.flatnonzero((np.tril(cosines, -1) >= limit).any(axis=1)):
        before = np.where(goes[:row], -np.inf, cosines[row, :row])
        place = int(before.argmax())
        if before[place] > best[row]:
            best[row], nearest[row] = before[place], first + place
        goes[row] = best[row] >= limit


def _on_device(values: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(values).to("cuda" if torch.cuda.is_available() else "cpu")
