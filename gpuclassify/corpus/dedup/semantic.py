"""Semantic duplicates: documents whose embeddings point in almost the same direction.

Embeddings are scaled to length 1, k-means of a sample divides the corpus into clusters, and within
a cluster each vector is compared with all vectors before it that stay. Matrix products run on the
worker's GPU if it has one.
"""

from __future__ import annotations

import functools
import itertools
import logging
from typing import TYPE_CHECKING, Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd

from gpuclassify.classifiers.embedder import Embedder
from gpuclassify.corpus.clusters.kmeans import (
    CENTROID_SAMPLES,
    TILE_NUMBERS,
    assign,
    fit_centroids,
    on_device,
    pack,
    take_sample,
    unit_vectors,
    unpack,
)
from gpuclassify.corpus.dedup.corpus import (
    MEMBERS_GATHERED,
    Corpus,
    document_numbers,
    read_apart,
    shuffle,
)
from gpuclassify.corpus.dedup.duplicates import (
    Duplicates,
    Keep,
    accepts_old_spellings,
    group_hashes,
)
from gpuclassify.corpus.dedup.groups import ranked, ranking
from gpuclassify.frames import Frame, backend_of
from gpuclassify.frames.hashing import md5_digests
from gpuclassify.frames.lazy import from_parts, reduce_tree
from gpuclassify.mapping.partition_map import PartitionMap
from gpuclassify.settings.checks import check_seed, check_text
from gpuclassify.settings.declared import declared, setting
from gpuclassify.workers.retire import retire_on_broken_device

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CLUSTER_DOCUMENTS = 2_000  # mean documents per cluster, unless n_clusters= is set
NO_CENTROID = np.zeros((1, 0), np.float32)  # centroids without documents
MOST_NEAR_BORDERS = 0.1  # share of documents near borders that causes a warning
SAMPLE = ["number", "embedding"]  # columns of a sample
ROUNDING = 1e-6  # rounding error of a cosine in float32, subtracted from the threshold
BLOCK_ROWS = 1024  # rows compared with all survivors at a time
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # odd, so that different clusters have different products


@accepts_old_spellings("semantic")
@declared
class SemanticDuplicates(Duplicates):
    """Documents with similar embeddings, even if they share no words.

    K-means divides the corpus into clusters. Within a cluster, documents are
    visited in the order of `keep_by`. A document is a duplicate if its embedding
    is similar to a document that is kept; the most similar earlier one counts.
    Null and empty texts, and null and all-zero embeddings, have no duplicates. A
    call lists duplicates, `remove` drops them, and `summarize` counts them.

    Pairs in different clusters are missed. A near-duplicate at the threshold has
    the distance δ = sqrt(2 - 2 * threshold). In a random direction of `width`
    dimensions, its distance towards a border has the standard deviation
    δ / sqrt(width). A summary counts the documents that are nearer to a border
    as ``near_border``; a warning is logged if they are more than a tenth of the
    sample. The share of missed pairs at the threshold is between half of the
    share of these documents and all of it; for more similar pairs it is smaller.

    Parameters
    ----------
    embedder : Embedder or str
        Embedder of the texts, or the name of its model. Default: `Embedder`'s model.
    embedding_field : str, optional
        Column of existing embeddings (lists of numbers), instead of `embedder`. It is read twice,
        to save memory of the workers. Texts are read, too.
    threshold : float
        Minimum cosine of duplicates, 0 to 1, minus 1e-6 for rounding.
    n_clusters : int, optional
        Number of clusters. More clusters need less work, and find fewer pairs. Default: one per
        2,000 documents, at most one per 50 documents of the sample.
    max_iter : int
        Maximum passes of k-means over the sample.
    sample_size : int
        Maximum documents that clusters are fitted to. The sample does not depend on order or
        partitions.
    seed : int
        Seed of k-means.

    Examples
    --------
    >>> SemanticDuplicates(id_field="id", threshold=0.97).remove(ddf)  # doctest: +SKIP
    """

    embedder: Embedder | str | None = None
    embedding_field: str | None = None
    threshold: float = setting(default=0.95, is_share=True)
    n_clusters: int | None = None
    max_iter: int = 20
    sample_size: int = 100_000
    seed: int = setting(default=42, least=0)

    has_similarity = True
    libraries = ("sklearn",)

    def check_together(self) -> None:
        """Refuse contradictory settings; without `embedding_field`, set a missing `embedder`."""
        super().check_together()
        check_seed(self.seed)
        if self.n_clusters is not None and self.n_clusters > self.sample_size:
            raise ValueError(
                f"n_clusters={self.n_clusters} cannot be fitted to sample_size={self.sample_size} "
                f"documents: pass sample_size={self.n_clusters * CENTROID_SAMPLES} or more"
            )
        if self.embedding_field is not None:
            if self.embedder is not None:
                raise ValueError(
                    f"embedder={self.embedder!r} and embedding_field={self.embedding_field!r} both "
                    "give embeddings: pass one of them"
                )
            return
        if self.embedder is None:
            self._set("embedder", Embedder.defaults["model"])
        fields = self.embedder.text_fields if isinstance(self.embedder, Embedder) else ()
        if fields not in ((), (self.text_field,)):
            raise ValueError(
                f"the embedder reads {', '.join(map(repr, fields))} and text_field is "
                f"{self.text_field!r}: pass the same to both"
            )
        if not isinstance(self.embedder, Embedder):
            check_text("embedder", self.embedder, "an Embedder or the name of its model")

    def find_components(self, corpus: Corpus, keep: Keep) -> dd.DataFrame:
        """Find the documents that are similar to a document that stays.

        The lazy result has the columns of `match_clusters`. The embedder, if any, is prepared: its
        model is looked up.
        """
        embedder = self.make_embedder()
        if embedder is not None:
            embedder.prepare()
        columns = list(dict.fromkeys([*self.signature_fields, *self.member_fields(corpus)]))
        options: dict[str, Any] = {"settings": self, "embedder": embedder}
        meta = embedding_frame(corpus.empty(columns), 0, **options)
        signatures = keep("signatures", corpus.map(embedding_frame, columns, meta=meta, **options))
        if embedder is None:  # read twice, so that embeddings are not held in memory
            samples = corpus.map(sample_frame, columns, meta=meta[SAMPLE], **options)
            parts = samples.to_delayed(optimize_graph=False)
        else:
            take = dask.delayed(take_sample, pure=True)
            parts = [take([part], self.sample_size) for part in read_apart(signatures, SAMPLE, "")]
        sample = reduce_tree(functools.partial(take_sample, size=self.sample_size), parts)
        fitted = dask.delayed(find_centroids, pure=True)(sample, self)
        # Kept as a step, because centroids fitted on another machine may differ in the last bits.
        centroids_frame = keep("centroids", from_parts([fitted], meta[["embedding"]]))
        (centroids,) = centroids_frame.to_delayed(optimize_graph=False)
        meta = to_clusters(meta, pd.DataFrame({"embedding": pack(NO_CENTROID)}), self.threshold)
        clusters = signatures.map_partitions(to_clusters, centroids, self.threshold, meta=meta)
        moved = shuffle(clusters, "key", MEMBERS_GATHERED)
        matched = {"own_partitions": corpus.own_partitions, "threshold": self.threshold}
        meta = match_clusters(meta, **matched)
        return keep("components", moved.map_partitions(match_clusters, meta=meta, **matched))

    def make_embedder(self) -> Embedder | None:
        """Return `embedder`, or an `Embedder` of the model that it names; None if it is unset."""
        if isinstance(self.embedder, str):
            return Embedder(model=self.embedder, text_field=self.text_field)
        return self.embedder

    def mappers(self) -> list[PartitionMap]:
        """Return the embedder in a list; empty if `embedding_field` names existing embeddings."""
        embedder = self.make_embedder()
        return [] if embedder is None else [embedder]

    @property
    def signature_fields(self) -> list[str]:
        """Names of the columns of texts, `by`, and existing embeddings, as far as they are set."""
        return [*super().signature_fields, *filter(None, [self.embedding_field])]

    def _check(self, frame: Frame) -> None:
        super()._check(frame)
        embedder = self.make_embedder()
        if embedder is not None:
            embedder.check(frame[[self.text_field]])
        if self.embedding_field is not None:
            unit_vectors(frame.iloc[:0], self.embedding_field)


@retire_on_broken_device
def embedding_frame(
    frame: Frame, partition: int, settings: SemanticDuplicates, embedder: Embedder | None
) -> pd.DataFrame:
    """Return the embeddings of a partition's documents, with ids and ranks.

    Documents with a null or empty text, or a null or all-zero embedding, are left out. Columns are
    ``document`` (int64), ``number`` (int64, a hash of the text or vector, to draw a sample),
    ``within`` (int64, the hash of the column `by`), ``embedding`` (bytes of float32; vectors have
    length 1), and the columns of `ranking`. Texts are embedded by `embedder`; if it is None,
    embeddings are read from the column `embedding_field` of `settings`.
    """
    digests, is_candidate = backend_of(frame).text_digests(frame, settings.text_field)
    if embedder is not None:
        embedded = embedder.map_frame(frame[[settings.text_field]])
        vectors, has_direction = unit_vectors(embedded, embedder.options.embedding_field)
    else:
        assert settings.embedding_field is not None
        vectors, has_direction = unit_vectors(frame, settings.embedding_field)
        digests[has_direction] = md5_digests(vectors)  # equal texts may have unequal vectors
    vectors = vectors[is_candidate[has_direction]]
    is_candidate = is_candidate & has_direction
    documents = document_numbers(partition, len(frame))[is_candidate]
    rows = backend_of(frame).take_rows(frame, is_candidate)
    return pd.DataFrame(
        {
            "document": documents,
            "number": digests[is_candidate, 0],
            "within": group_hashes(rows, settings.by),
            "embedding": pack(vectors),
            **ranking(rows, documents, settings),
        }
    )


def sample_frame(
    frame: Frame, partition: int, settings: SemanticDuplicates, embedder: Embedder | None
) -> pd.DataFrame:
    """Return the partition's embeddings with the smallest hashes, up to `sample_size` of them.

    Columns are ``number``, the hash of the text or vector, distinct and ascending, and
    ``embedding`` (bytes of float32).
    """
    embeddings = embedding_frame(frame, partition, settings, embedder)
    return take_sample([embeddings[SAMPLE]], settings.sample_size)


def find_centroids(sample: pd.DataFrame, settings: SemanticDuplicates) -> pd.DataFrame:
    """Fit cluster centroids to a sample; return them in a column ``embedding``, a row each.

    If the sample is empty, the result is one vector without numbers. Logs a warning if more than a
    tenth of the sample is near the border of a cluster.
    """
    vectors = unpack(sample["embedding"])
    if not len(vectors):
        return pd.DataFrame({"embedding": pack(NO_CENTROID)})
    documents = estimate_documents(sample["number"].to_numpy(), settings.sample_size)
    most = max(len(vectors) // CENTROID_SAMPLES, 1)
    wanted = settings.n_clusters or min(max(documents // CLUSTER_DOCUMENTS, 1), most)
    count = min(wanted, len(vectors))
    centroids = fit_centroids(vectors, count, settings.max_iter, settings.seed)
    borders = assign(vectors, centroids).borders
    share = (borders < border_width(settings.threshold, vectors.shape[1])).mean()
    if share > MOST_NEAR_BORDERS:
        logger.warning(
            "%.0f%% of the documents lie so near the border of a cluster that near-duplicates may "
            "lie beyond it, where they are missed: pass a smaller n_clusters than %d",
            100 * share,
            count,
        )
    return pd.DataFrame({"embedding": pack(centroids)})


@retire_on_broken_device
def to_clusters(
    embeddings: pd.DataFrame, centroids: pd.DataFrame, threshold: float
) -> pd.DataFrame:
    """Add each embedding's cluster, by the nearest centroid, and whether it is near the border.

    New columns are ``key`` (int64, equal for one cluster and one value of the setting `by`) and
    ``near_border`` (bool, by `border_width`). The columns ``number`` and ``within`` are dropped.
    """
    vectors, centres = unpack(embeddings["embedding"]), unpack(centroids["embedding"])
    clusters, _, borders = assign(vectors, centres)
    keys = embeddings["within"].to_numpy() ^ (clusters.view(np.uint64) * _GOLDEN).view(np.int64)
    near = borders < border_width(threshold, centres.shape[1])
    return embeddings.drop(columns=["number", "within"]).assign(key=keys, near_border=near)


@retire_on_broken_device
def match_clusters(embeddings: pd.DataFrame, own_partitions: int, threshold: float) -> pd.DataFrame:
    """Find, for each document, the most similar one in its cluster that comes before it and stays.

    `embeddings` are results of `to_clusters`, with all rows of each ``key``. Documents of
    partitions from `own_partitions` on belong to an earlier corpus, and stay. Columns of the result
    are ``document``, ``root`` (int64, the document that stays; it has a row, too), ``similarity``
    (float32) of both, and ``near_border`` (int64). The latter counts the documents of a cluster
    near its border, without the earlier corpus, in the row of the cluster's first document, and is
    0 in other rows. Documents with neither a similar document nor such a count are left out.
    """
    embeddings = ranked(embeddings, own_partitions, "key")
    keys, is_earlier = embeddings["key"].to_numpy(), embeddings["is_earlier"].to_numpy()
    kept = np.arange(len(keys))
    similarity = np.ones(len(keys), np.float32)
    near = np.zeros(len(keys), np.int64)
    is_near = embeddings["near_border"].to_numpy() & ~is_earlier
    starts = np.flatnonzero(np.diff(keys, prepend=~keys[:1]))
    for start, end in itertools.pairwise([*starts.tolist(), len(keys)]):
        cluster = slice(start, end)
        vectors = unpack(embeddings["embedding"].iloc[cluster])
        survivors, similarity[cluster] = match(vectors, int(is_earlier[cluster].sum()), threshold)
        kept[cluster] = start + survivors
        near[start] = is_near[cluster].sum()
    is_found = (kept != np.arange(len(keys))) | (near > 0)
    is_found[kept[is_found]] = True
    documents = embeddings["document"].to_numpy()
    components = {"document": documents, "root": documents[kept], "similarity": similarity}
    return pd.DataFrame({**components, "near_border": near})[is_found].reset_index(drop=True)


def estimate_documents(numbers: np.ndarray, size: int) -> int:
    """Estimate the number of distinct documents from the smallest of their random numbers.

    `numbers` are the up to `size` smallest int64 hashes of distinct documents, ascending. The k-th
    smallest of n uniform numbers between 0 and 1 is about k / n (Bar-Yossef et al., "Counting
    Distinct Elements in a Data Stream", 2002); (k - 1) makes the estimate unbiased. Its relative
    error is about 1 / sqrt(k).
    """
    if len(numbers) < size:
        return len(numbers)
    return int((size - 1) / ((float(numbers[-1]) + 2.0**63) / 2.0**64))


def border_width(threshold: float, width: int) -> float:
    """Return the largest distance from the border of a cluster that counts as near it.

    Near-duplicates of a document this near may be beyond the border, where they are missed. It is
    the typical distance, in the direction of the border, of a near-duplicate from its document:
    unit vectors with cosine t, `threshold`, have the distance sqrt(2 - 2 t), and a random step in w
    dimensions, `width`, has the standard deviation 1 / sqrt(w) along any one of them.

    The full distance sqrt(2 - 2 t) would be a strict bound, but not a useful one: 93 to 98% of
    MiniLM's embeddings were nearer to a border, and at most 2% of their pairs were split.
    """
    return float(np.sqrt((2 - 2 * threshold) / max(width, 1)))


def match(
    vectors: np.ndarray, staying: int, threshold: float, tile_numbers: int = TILE_NUMBERS
) -> tuple[np.ndarray, np.ndarray]:
    """Find, for each vector, the most similar one before it that stays, if it is similar enough.

    `vectors` are float32 (rows, width), of length 1, and sorted with those to keep first; the first
    `staying` vectors always stay, and so does each vector without a similar one. Similar means a
    cosine of at least `threshold`, minus 1e-6 for rounding. Returns the row of the vector that
    stays, int64 (rows,) (its own row if it stays itself), and the cosine with it, float32 (rows,),
    at most 1.
    """
    points = on_device(vectors)
    limit = threshold - ROUNDING
    kept = np.arange(len(vectors))
    similarity = np.ones(len(vectors), np.float32)
    for first in range(staying, len(vectors), BLOCK_ROWS):
        block = points[first : first + BLOCK_ROWS]
        survivors = np.flatnonzero(kept[:first] == np.arange(first))
        best, nearest = _most_similar(block, points, survivors, tile_numbers)
        _match_within((block @ block.T).cpu().numpy(), first, best, nearest, limit)
        goes = np.flatnonzero(best >= limit)
        kept[first + goes] = nearest[goes]
        similarity[first + goes] = np.minimum(best[goes], 1)
    return kept, similarity


def _most_similar(
    block: torch.Tensor, points: torch.Tensor, survivors: np.ndarray, tile_numbers: int
) -> tuple[np.ndarray, np.ndarray]:
    """Find the most similar survivor (a vector that stays) for each vector of a block.

    `survivors` are row indices in `points`. Returns each vector's largest cosine, -inf without
    survivors, and the row index of that survivor, 0 without survivors.
    """
    best = np.full(len(block), -np.inf, np.float32)
    nearest = np.zeros(len(block), np.int64)
    step = tile_numbers // BLOCK_ROWS
    for at in range(0, len(survivors), step):
        tile = survivors[at : at + step]
        values, indices = (block @ points[tile].T).max(dim=1)
        similarities = values.cpu().numpy()
        is_better = similarities > best
        best[is_better] = similarities[is_better]
        nearest[is_better] = tile[indices.cpu().numpy()[is_better]]
    return best, nearest


def _match_within(
    cosines: np.ndarray, first: int, best: np.ndarray, nearest: np.ndarray, limit: float
) -> None:
    """Update `best` and `nearest` in place by similar earlier vectors of the block that stay.

    `best` has each vector's highest cosine with a vector that stays, and `nearest` the row of that
    vector in the cluster. A vector goes if its `best` is at least `limit`. `cosines` are between
    the vectors of the block, which begins at the row `first`.
    """
    goes = best >= limit
    is_before = np.tri(len(cosines), k=-1, dtype=bool)
    for row in np.flatnonzero(((cosines >= limit) & is_before).any(axis=1)):
        before = np.where(goes[:row], -np.inf, cosines[row, :row])
        index = int(before.argmax())
        if before[index] > best[row]:
            best[row], nearest[row] = before[index], first + index
        goes[row] = best[row] >= limit
