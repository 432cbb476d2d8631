"""Fit clusters to the embeddings of a corpus, save their centroids, and assign them to rows."""

from __future__ import annotations

import base64
import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import dask
import numpy as np
import pandas as pd
import pyarrow as pa

from gpuclassify.corpus.clusters.kmeans import (
    assign,
    fit_centroids,
    pack,
    take_sample,
    unit_vectors,
    unpack,
)
from gpuclassify.corpus.scores.saved import Saved
from gpuclassify.frames import Frame, LazyFrame, backend_of
from gpuclassify.frames.hashing import md5_digests
from gpuclassify.frames.lazy import as_dask, reduce_tree
from gpuclassify.jobs.input.left_out import left_out_logged
from gpuclassify.jobs.input.readers import FileReader, read_columns
from gpuclassify.jobs.ledger.quarantine import OnError
from gpuclassify.jobs.stores.names import redacted
from gpuclassify.mapping.columns import check_are_new, check_is_there, list_sizes
from gpuclassify.mapping.partition_map import PartitionMap, RowWiseMap
from gpuclassify.settings.checks import check_seed, check_values, install, with_plain_values
from gpuclassify.settings.declared import Declared, declared, setting

NUMBERS = np.dtype("<f4")  # dtype of centroids in a file
MOST_LENGTH = 1.001  # largest length of a mean of vectors of length 1, plus rounding errors
_FIELD = 'a column name such as "cluster"'


@dataclass(frozen=True, repr=False)
class Clusters(Saved):
    """Centroids of clusters of embeddings; `AssignClusters` finds the centroid nearest to each row.

    Embeddings are scaled to length 1. Centroids from `fit` have length 1, too, so that the nearest
    centroid has the largest cosine.

    Attributes
    ----------
    width : int
        Number of dimensions of an embedding.
    data : str
        Centroids as base64 of float32 numbers, little-endian; see `centroids`.
    sizes : list of int
        Number of embeddings of the sample of `fit` in each cluster; empty if the centroids were
        fitted elsewhere.
    seed : int, optional
        Seed of k-means; None if the centroids were fitted elsewhere.
    """

    what: ClassVar[str] = "clusters"

    width: int
    data: str
    sizes: list[int] = field(default_factory=list)
    seed: int | None = None

    @classmethod
    @with_plain_values
    def fit(
        cls,
        embeddings: Frame | LazyFrame | FileReader,
        n_clusters: int,
        *,
        embedding_field: str = "embedding",
        sample_size: int = 100_000,
        max_iter: int = 20,
        seed: int = 42,
        on_error: OnError = "raise",
    ) -> Self:
        """Fit clusters to a sample of embeddings by k-means, reading the embeddings once.

        The sample has the distinct embeddings with the smallest hashes. So it does not depend on
        partitions, the order of rows, or repeated rows. Null and all-zero embeddings are left out,
        and others are scaled to length 1. scikit-learn fits the centroids on one CPU thread of this
        process: 2,000 centroids to 100,000 embeddings of 384 numbers take 100 s.

        Parameters
        ----------
        embeddings : dask.dataframe.DataFrame, pandas.DataFrame, cudf.DataFrame or FileReader
            A reader reads only the embeddings. A Dask frame that embeds texts embeds all of them
            for the sample: write the embeddings first, or pass a part of the corpus.
        n_clusters : int
            Number of clusters, at most the number of sampled embeddings.
        embedding_field : str
            Column of embeddings: lists of numbers.
        sample_size : int
            Maximum number of embeddings in the sample; 50 per cluster are enough.
        max_iter : int
            Maximum passes of k-means over the sample.
        seed : int
            Seed of k-means.
        on_error : {"raise", "quarantine"}
            Raise for the first file, line or row of a reader that cannot be read, or leave it out
            and count it in Python's log. Rows that the reader's annotation files list as
            unreadable never raise.

        Returns
        -------
        Clusters

        Raises
        ------
        TypeError, ValueError
            An argument is invalid, the column is missing or holds no embeddings of one width, or
            there are fewer distinct embeddings than clusters.
        ModuleNotFoundError
            scikit-learn is missing.

        Examples
        --------
        >>> clusters = Clusters.fit(ddf, 1_000)  # doctest: +SKIP
        >>> clusters.save("clusters.json")  # doctest: +SKIP
        >>> ddf = AssignClusters(clusters, distance_field="distance")(ddf)  # doctest: +SKIP
        """
        check_values(cls.fit.__wrapped__, {  # type: ignore[attr-defined]
            "n_clusters": n_clusters, "embedding_field": embedding_field,
            "sample_size": sample_size, "max_iter": max_iter,
        })  # fmt: skip
        check_seed(seed)
        if n_clusters > sample_size:
            raise ValueError(
                f"n_clusters={n_clusters} cannot be fitted to sample_size={sample_size} "
                "embeddings: pass a larger sample_size"
            )
        if importlib.util.find_spec("sklearn") is None:
            raise ModuleNotFoundError(
                f"Clusters.fit needs sklearn, which is not here: {install('dedup')}", name="sklearn"
            )
        with left_out_logged():
            frame = as_dask(read_columns(embeddings, [embedding_field], on_error))
            _check_column(frame._meta, embedding_field)
            take = dask.delayed(_sample_partition, pure=True)
            parts = frame[[embedding_field]].to_delayed()
            samples = [take(part, embedding_field, sample_size) for part in parts]
            join = functools.partial(take_sample, size=sample_size)
            (sample,) = dask.compute(reduce_tree(join, samples))
        vectors = unpack(sample["embedding"])
        if len(vectors) < n_clusters:
            raise ValueError(
                f"n_clusters={n_clusters} cannot be fitted to {len(vectors):,} distinct embeddings "
                f"in the column {embedding_field!r}: pass fewer clusters, or more embeddings"
            )
        centroids = fit_centroids(vectors, n_clusters, max_iter, seed)
        sizes = np.bincount(assign(vectors, centroids).clusters, minlength=n_clusters)
        return cls(centroids.shape[1], _encoded(centroids), sizes.tolist(), seed)

    @classmethod
    def of(cls, centroids: Any) -> Self:
        """Make clusters from centroids fitted elsewhere, such as by FAISS or scikit-learn.

        Parameters
        ----------
        centroids : array of float, (clusters, width)
            Centroids of embeddings of length 1. They are converted to float32, but not scaled.

        Returns
        -------
        Clusters

        Raises
        ------
        TypeError
            `centroids` is no array of numbers, has another shape, or is empty.
        ValueError
            A number is not finite in float32, or a centroid is longer than 1.
        """
        array = np.asarray(centroids)
        if array.dtype.kind not in "fiu" or array.ndim != 2 or not array.size:
            raise TypeError(
                f"centroids have the shape {array.shape} and the type {array.dtype}: pass an array "
                "of numbers, a row for each cluster"
            )
        with np.errstate(over="ignore"):  # infinite numbers are refused
            clusters = cls(array.shape[1], _encoded(array))
        clusters.check_saved()
        return clusters

    def check_saved(self) -> None:
        """Raise ValueError unless `data` holds valid centroids, and `sizes` fit them."""
        data = base64.b64decode(self.data, validate=True)
        row_bytes = self.width * NUMBERS.itemsize
        if self.width < 1 or not data or len(data) % row_bytes:
            raise ValueError(f"{len(data):,} bytes hold no centroids of {self.width:,} numbers")
        centroids = self.centroids
        lengths = np.linalg.norm(centroids.astype(np.float64), axis=1)
        if not np.isfinite(lengths).all():
            raise ValueError(f"centroid {np.isfinite(lengths).argmin()} holds no finite numbers")
        if lengths.max() > MOST_LENGTH:
            raise ValueError(
                f"centroid {lengths.argmax()} has the length {lengths.max():.4g}, and means of "
                "embeddings of length 1 have at most 1: fit it to embeddings of that length"
            )
        if self.sizes and (len(self.sizes) != len(centroids) or min(self.sizes) < 0):
            raise ValueError(f"{len(centroids):,} clusters have {len(self.sizes):,} sizes")

    @property
    def centroids(self) -> np.ndarray:
        """Centroids, float32 (clusters, width), decoded from `data` at each access."""
        numbers = np.frombuffer(base64.b64decode(self.data), NUMBERS)
        return numbers.astype(np.float32).reshape(-1, self.width)

    def __len__(self) -> int:
        return len(self.centroids)

    def __repr__(self) -> str:
        known = f"{len(self):,} of {self.width:,} numbers"
        if self.sizes:
            low, middle, high = np.quantile(self.sizes, [0, 0.5, 1])
            known += (
                f", fitted to {sum(self.sizes):,} embeddings: {low:,.0f} to {high:,.0f} in a "
                f"cluster, median {middle:,.0f}"
            )
        return f"<Clusters: {known}>"


@declared
class AssignClusters(Declared, RowWiseMap):
    """Mapper that adds the cluster of each row's embedding, and its distance from the centroid.

    Embeddings are scaled to length 1. The cluster is the index of the nearest centroid, the lowest
    index if several are equally near. It does not depend on other rows. Rows with a null or
    all-zero embedding get null. Distances are computed on the worker's GPU if it has one.

    In a chain after an `Embedder`, texts are embedded and assigned in one pass. Every task carries
    the centroids: 1.5 MB for 1,000 of 384 numbers.

    Parameters
    ----------
    clusters : Clusters, str or Path
        Result of `Clusters.fit` or `Clusters.of`, or the file that it was saved to.
    embedding_field : str
        Column of embeddings: lists of numbers, from the model that the clusters were fitted for.
    cluster_field : str
        Output column (integer) of the cluster, from 0.
    distance_field : str, optional
        Output column (float32) of the Euclidean distance from the centroid, 0 to 2. For centroids
        of length 1 it is sqrt(2 - 2 * cosine). Default: none.
    overwrite : bool
        Replace columns that the dataset already has.

    Examples
    --------
    >>> ddf = AssignClusters("clusters.json")(Embedder()(ddf))  # doctest: +SKIP
    """

    clusters: Any = setting(kw_only=False, is_hashed=False)
    embedding_field: str = setting(default="embedding", what=_FIELD, least=1)
    cluster_field: str = setting(default="cluster", what=_FIELD, least=1)
    distance_field: str | None = setting(default=None, what=_FIELD, least=1)
    overwrite: bool = setting(default=False, changes_results=False)

    _file: ClassVar[str | None] = None  # file with the clusters

    def check_together(self) -> None:
        """Load the clusters if they are a path, and check the names of the output columns."""
        if not isinstance(self.clusters, Clusters):
            self._set("_file", redacted(str(self.clusters)))
            self._set("clusters", Clusters.load(self.clusters))
        if self.cluster_field == self.distance_field:
            raise ValueError(f"cluster_field and distance_field are both {self.cluster_field!r}")

    def code(self, show: Callable[[Any], str] = repr) -> str:
        """Return the constructor call, with clusters as their file's path or a placeholder."""
        known, file = self.clusters, self._file
        name = repr(known if file is None else file)
        return super().code(lambda value: name if value is known else show(value))

    @property
    def read_fields(self) -> tuple[str, ...]:
        """Name of the column of embeddings, in a tuple."""
        return (self.embedding_field,)

    def schema(self) -> pa.Schema:
        """Return the output fields: the cluster, and the distance if `distance_field` is set."""
        fields = [pa.field(self.cluster_field, pa.int64())]
        if self.distance_field is not None:
            fields.append(pa.field(self.distance_field, pa.float32()))
        return pa.schema(fields)

    def identity(self) -> dict[str, Any]:
        """Return settings that change results, by name, with a digest instead of the clusters."""
        return {**super().identity(), "clusters": self.clusters.digest()}

    def check(self, frame: Frame) -> None:
        """Raise an error unless `frame` has embeddings to read, and new columns can be added."""
        _check_column(frame, self.embedding_field)
        names, columns = self.schema().names, [*map(str, frame.columns)]
        check_are_new(names, columns, self.read_fields, self.overwrite)

    def check_after(self, earlier: Sequence[PartitionMap]) -> None:
        """Raise ValueError if `earlier` stages are known to write embeddings of another width."""
        for mapper in (mapper for stage in earlier for mapper in stage.text_mappers()):
            self._check_width(list_sizes(mapper.heads).get(self.embedding_field))

    def meta(self, frame: Frame) -> Any:
        """Return a frame without rows that has the columns of `frame` and the new columns."""
        return self.map_frame(frame.iloc[:0])

    def map_frame(self, frame: Frame, meta_dtypes: object = None) -> Any:
        """Return a pandas or cudf frame with the new columns added; `meta_dtypes` is not used."""
        vectors, is_given = unit_vectors(frame, self.embedding_field)
        if len(vectors):
            self._check_width(vectors.shape[1])
        found = assign(vectors, self.clusters.centroids)
        schema, new = self.schema(), {}
        for name, values in zip(schema.names, (found.clusters, found.distances), strict=False):
            column = np.zeros(len(frame), values.dtype)
            column[is_given] = values
            new[name] = pa.array(column, mask=~is_given)
        return backend_of(frame).with_columns(frame, new, schema, None)

    def _check_width(self, width: int | None) -> None:
        if width and width != self.clusters.width:
            raise ValueError(
                f"embeddings of the column {self.embedding_field!r} have {width:,} numbers, and "
                f"clusters were fitted to {self.clusters.width:,}: pass embeddings of the same "
                "model, or fit clusters to these"
            )


def _check_column(frame: Frame, embedding_field: str) -> None:
    columns = [*map(str, frame.columns)]
    check_is_there(embedding_field, columns, "embedding_field", "column of embeddings")
    unit_vectors(frame.iloc[:0], embedding_field)


def _encoded(centroids: np.ndarray) -> str:
    return base64.b64encode(np.asarray(centroids, NUMBERS).tobytes()).decode()


def _sample_partition(frame: Frame, embedding_field: str, size: int) -> pd.DataFrame:
    vectors, _ = unit_vectors(frame, embedding_field)
    # Vectors are sampled by a hash of their bytes, so that equal vectors count once.
    rows = pd.DataFrame({"number": md5_digests(vectors)[:, 0], "embedding": pack(vectors)})
    return take_sample([rows], size)
