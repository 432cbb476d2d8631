"""K-means of embeddings as unit vectors, in the order: read them, sample, fit, assign."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.frames import Frame, backend_of, name_row

CENTROID_SAMPLES = 50  # minimum sampled embeddings per centroid if `n_clusters` is not set
TILE_NUMBERS = 1 << 26  # numbers of a matrix product in memory at once: 256 MB
_CANDIDATES = 3  # number of nearest centroids in float32 that are compared in float64
_ROUNDING = 1e-5  # largest rounding error of a score in float32


class Assigned(NamedTuple):
    """Nearest centroid of each vector, and distances from it and from the border of its cluster."""

    clusters: np.ndarray  # int64 (vectors,): index, the lowest if several are equally near
    distances: np.ndarray  # float32 (vectors,): Euclidean
    borders: np.ndarray  # float32 (vectors,): see `assign`; infinite for a single centroid


def unit_vectors(frame: Frame, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a column's embeddings scaled to length 1, and a mask of the rows that have one.

    The embeddings are float32 (embeddings, width), without null and all-zero rows, and the mask is
    bool (rows,). The width is 0 if all rows are null. Raises TypeError unless the column holds
    lists of numbers, and ValueError unless these are finite, and lists equally long and not empty.
    """
    lists = backend_of(frame).list_array(frame, column)
    if not _holds_numbers(lists.type):
        raise TypeError(
            f"column {column!r} holds {lists.type}, not lists of numbers: name the column of "
            "embeddings as embedding_field=. (Dask makes strings of lists in an object column: "
            "give it Arrow's type, pandas.ArrowDtype(pyarrow.list_(pyarrow.float32())))"
        )
    is_given = lists.is_valid().to_numpy(zero_copy_only=False)
    if not is_given.any():
        return np.zeros((0, 0), np.float32), is_given
    present = lists.drop_null()
    rows = np.flatnonzero(is_given)
    widths = pc.list_value_length(present).to_numpy()
    is_other = (widths != widths[0]) | (widths == 0)
    if is_other.any():
        at = int(is_other.argmax())
        raise ValueError(
            f"{name_row(frame, int(rows[at]))} of column {column!r} holds {widths[at]} numbers "
            f"and {name_row(frame, int(rows[0]))} {widths[0]}: all must be of one model"
        )
    numbers = present.flatten().to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        vectors = numbers.astype(np.float32).reshape(len(rows), -1)
    is_finite = np.isfinite(vectors).all(axis=1)
    if not is_finite.all():
        raise ValueError(
            f"{name_row(frame, int(rows[is_finite.argmin()]))} of column {column!r} holds a number "
            "that is not finite: make that embedding null, or compute it anew in float32"
        )
    largest = np.abs(vectors).max(axis=1)
    is_given[rows] = largest > 0
    # Divided twice, because squares of very large and very small numbers exceed float32.
    vectors = vectors[largest > 0] / largest[largest > 0, None]
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), is_given


def _holds_numbers(kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
        return types.is_floating(kind) or types.is_integer(kind) or types.is_null(kind)
    return types.is_null(kind)  # type of an empty partition


def pack(vectors: np.ndarray) -> pd.api.extensions.ExtensionArray:
    """Pack vectors, float32 (rows, width), into an array of one bytes object per row.

    Used to shuffle vectors: every shuffle method of Dask preserves bytes, but "p2p" fails on
    Arrow's lists.
    """
    rows, width = vectors.shape
    ends = np.arange(rows + 1, dtype=np.int64) * width * vectors.itemsize
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(np.ascontiguousarray(vectors))]
    values = pa.LargeBinaryArray.from_buffers(pa.large_binary(), rows, buffers)
    return pd.arrays.ArrowExtensionArray(values)


def unpack(packed: pd.Series) -> np.ndarray:
    """Return the vectors in a column from `pack`, float32 (rows, width)."""
    check_widths(packed)
    data = bytearray().join(packed.to_list())
    return np.frombuffer(data, np.float32).reshape(len(packed), -1 if data else 0)


def check_widths(packed: pd.Series) -> None:
    """Raise ValueError unless all vectors in a column from `pack` have the same width."""
    widths = pc.unique(pc.binary_length(pa.array(packed.array))).to_pylist()
    if len(widths) > 1:
        raise ValueError(
            f"embeddings have {widths[0] // 4} numbers in one partition and {widths[1] // 4} in "
            "another: all must be of one model"
        )


def take_sample(parts: Sequence[pd.DataFrame], size: int) -> pd.DataFrame:
    """Return up to `size` rows with the smallest distinct values of the column "number", ascending.

    The numbers are hashes, so that the sample is random, and does not depend on the order of rows.
    """
    rows = pd.concat(parts, ignore_index=True)
    check_widths(rows["embedding"])
    return rows.drop_duplicates("number").nsmallest(size, "number")


def fit_centroids(vectors: np.ndarray, count: int, max_iter: int, seed: int) -> np.ndarray:
    """Fit k-means centroids of length 1, float32 (count, width), to vectors of length 1.

    One CPU thread fits the centroids, so that all machines give equal results: 2,000 centroids to
    100,000 vectors of 384 dimensions take 100 s. Initial centroids are random, because k-means++
    took fifteen times as long without better clusters. Centroids are scaled to length 1, because
    the mean of scattered vectors is short, so close to vectors of all directions, and would attract
    a large cluster.
    """
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    means = KMeans(count, init="random", n_init=1, max_iter=max_iter, random_state=seed)
    with threadpool_limits(1):
        centroids = means.fit(vectors).cluster_centers_
    lengths = np.linalg.norm(centroids, axis=1, keepdims=True)
    return (centroids / np.maximum(lengths, np.finfo(np.float32).tiny)).astype(np.float32)


def assign(vectors: np.ndarray, centroids: np.ndarray) -> Assigned:
    """Find the nearest centroid of each vector, on the worker's GPU if it has one.

    Vectors have length 1, and centroids at most length 1; both are float32 (rows, width). A
    vector's cluster does not depend on other vectors, because distances that are almost equal in
    float32 are compared in float64.

    The border between the clusters of the nearest centroid a and the second nearest one b is the
    plane midway between them. A vector x has the distance (|x - b|² - |x - a|²) / (2 |a - b|) from
    it.
    """
    count = len(vectors)
    found = Assigned(
        np.zeros(count, np.int64), np.zeros(count, np.float32), np.full(count, np.inf, np.float32)
    )
    if not count:  # a client that makes Dask's meta loads no torch
        return found
    import torch

    centres = on_device(centroids)
    halves = (centres * centres).sum(dim=1) / 2
    step = max(TILE_NUMBERS // max(centroids.shape), 1)
    for at in range(0, count, step):
        rows = slice(at, at + step)
        points = on_device(vectors[rows])
        scores = points @ centres.T - halves  # (|x|² - |x - c|²) / 2
        best, nearest = torch.topk(scores, min(_CANDIDATES, len(centroids)), dim=1)
        if len(centroids) > 1:
            unsure = torch.nonzero(best[:, 0] - best[:, 1] < _ROUNDING)[:, 0]
            for some in unsure.split(step // _CANDIDATES + 1):
                _decide(points, centres, best, nearest, some)
            apart = (centres[nearest[:, 0]] - centres[nearest[:, 1]]).norm(dim=1)
            borders = (best[:, 0] - best[:, 1]) / apart
            found.borders[rows] = borders.nan_to_num(0).cpu().numpy()  # 0 / 0 for equal centroids
        found.clusters[rows] = nearest[:, 0].cpu().numpy()
        found.distances[rows] = (points - centres[nearest[:, 0]]).norm(dim=1).cpu().numpy()
    return found


def _decide(points: Any, centres: Any, best: Any, nearest: Any, rows: Any) -> None:
    """Sort the nearest centroids of the vectors `rows` by distance in float64, in place.

    `nearest` has indices in `centres`, and `best` their scores, both (vectors, candidates). New
    scores are minus half the squared distances.
    """
    candidates = nearest[rows].sort(dim=1).values  # the lowest index comes first in a tie
    differences = points[rows, None].double() - centres[candidates].double()
    squares, order = differences.square().sum(dim=2).sort(dim=1, stable=True)
    nearest[rows] = candidates.gather(1, order)
    best[rows] = (-squares / 2).float()  # scores without |x|² / 2, which is equal in a row


def on_device(values: np.ndarray) -> Any:
    """Return an array as a tensor on the GPU, or on the CPU if there is none."""
    import torch

    return torch.from_numpy(values).to("cuda" if torch.cuda.is_available() else "cpu")
