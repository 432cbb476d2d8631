"""Semantic duplicates: documents whose embeddings point in almost the same direction."""

from __future__ import annotations

import functools
import itertools
import logging
from dataclasses import dataclass, field
from typing import Any

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd

from gpuclassify.classifiers.embedder import Embedder
from gpuclassify.dedup.clusters import assign, border_width, fit_centroids, match
from gpuclassify.dedup.corpus import (
    MEMBERS_GATHERED,
    Corpus,
    document_numbers,
    from_parts,
    read_apart,
    reduce_tree,
    shuffle,
)
from gpuclassify.dedup.duplicates import (
    Checkpoint,
    Duplicates,
    accepts_old_spellings,
    check_share,
    group_hashes,
)
from gpuclassify.dedup.embeddings import (
    SAMPLE,
    estimate_documents,
    pack,
    take_sample,
    unit_vectors,
    unpack,
    vector_digests,
)
from gpuclassify.dedup.groups import ranked, ranking
from gpuclassify.frames import backend_of
from gpuclassify.mapping.partition_map import PartitionMap
from gpuclassify.settings.checks import check_text
from gpuclassify.workers.retire import on_sound_device

logger = logging.getLogger(__name__)

CLUSTER_DOCUMENTS = 2_000  # on average, unless n_clusters= says otherwise
CENTROID_SAMPLES = 50  # that a centroid needs at least
NO_CENTROID = np.zeros((1, 0), np.float32)  # where there are no documents
MOST_NEAR_BORDERS = 0.1  # of the documents, without a warning
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # odd, so that different clusters have different products


@accepts_old_spellings("semantic")
@dataclass(frozen=True, kw_only=True, repr=False)
class SemanticDuplicates(Duplicates):
    """Documents whose embeddings are similar, whatever words they use.

    K-means cuts the corpus into clusters. In each, documents are taken in the
    order of `keep_by`, and one goes if its embedding is similar to that of a
    document that is kept: the most similar of those before it. Null and empty
    texts and null and all-zero embeddings are no duplicates of anything.

    Pairs that a border between clusters parts are missed. A near-duplicate at
    the threshold lies δ = sqrt(2 - 2 * threshold) away, and in a random one of
    `width` directions this leads δ / sqrt(width) towards a border (one standard
    deviation). A summary counts the documents that are nearer to one as
    ``near_border``, and a warning is logged if they are more than a tenth. Of
    pairs at the threshold, half as large a share to as large a share is missed,
    and of more similar pairs a smaller one.

    Parameters
    ----------
    embedder : Embedder or str
        Embeds the texts; a string names its model. Default: that of `Embedder`.
    embedding_field : str, optional
        Column of embeddings that are there already (lists of numbers), instead of `embedder`. They
        are read once more than texts, rather than kept in the workers' memory.
    threshold : float
        Cosine from which on documents are duplicates, 0 to 1; up to 1e-6 below is equal to it.
    n_clusters : int, optional
        Work falls with their number, and the share of pairs that is found with it. Default: one
        for 2,000 documents, and for 50 of the sample at most.
    max_iter : int
        Passes of k-means over the sample.
    sample_size : int
        Documents that clusters are fitted to. The same ones whatever the order and partitioning.
    seed : int
        Of k-means.

    Examples
    --------
    >>> SemanticDuplicates(id_field="id", threshold=0.97).remove(ddf)  # doctest: +SKIP
    """

    embedder: Embedder | str | None = None
    embedding_field: str | None = None
    threshold: float = 0.95
    n_clusters: int | None = None
    max_iter: int = 20
    sample_size: int = 100_000
    seed: int = field(default=42, metadata={"least": 0})

    has_similarity = True
    libraries = ("sklearn",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("threshold", self.threshold)
        if self.n_clusters is not None and self.n_clusters > self.sample_size:
            raise ValueError(
                f"n_clusters={self.n_clusters} cannot be fitted to sample_size={self.sample_size} "
                f"documents: pass sample_size={self.n_clusters * CENTROID_SAMPLES} or more"
            )
        self._check_embeddings()

    def _check_embeddings(self) -> None:
        if self.embedding_field is not None:
            if self.embedder is not None:
                raise ValueError(
                    f"embedder={self.embedder!r} and embedding_field={self.embedding_field!r} both "
                    "give embeddings: pass one of them"
                )
            return
        if self.embedder is None:
            object.__setattr__(self, "embedder", Embedder.defaults["model"])
        fields = self.embedder.text_fields if isinstance(self.embedder, Embedder) else ()
        if fields not in ((), (self.text_field,)):
            raise ValueError(
                f"the embedder reads {', '.join(map(repr, fields))} and text_field is "
                f"{self.text_field!r}: pass the same to both"
            )
        if not isinstance(self.embedder, Embedder):
            check_text("embedder", self.embedder, "an Embedder or the name of its model")

    def find_components(self, corpus: Corpus, keep: Checkpoint) -> dd.DataFrame:
        """Documents that have a similar one, with the one that stays; see `match_clusters`."""
        embedder = self.make_embedder()
        if embedder is not None:
            embedder.prepare()
        columns = list(dict.fromkeys([*self.signature_fields, *self.member_fields(corpus)]))
        options: dict[str, Any] = {"settings": self, "embedder": embedder}
        meta = embedding_frame(corpus.empty(columns), 0, **options)
        signatures = keep("signatures", corpus.map(embedding_frame, columns, meta=meta, **options))
        if embedder is None:  # read anew, so that embeddings need not stay until there are clusters
            samples = corpus.map(sample_frame, columns, meta=meta[SAMPLE], **options)
            parts = samples.to_delayed(optimize_graph=False)
        else:
            take = dask.delayed(take_sample, pure=True)
            parts = [take([part], self.sample_size) for part in read_apart(signatures, SAMPLE, "")]
        sample = reduce_tree(functools.partial(take_sample, size=self.sample_size), parts)
        fitted = dask.delayed(find_centroids, pure=True)(sample, self)
        # A step of its own: fitted again, on another machine, they may differ in their last bits.
        found = keep("centroids", from_parts([fitted], meta[["embedding"]]))
        (centroids,) = found.to_delayed(optimize_graph=False)
        meta = to_clusters(meta, pd.DataFrame({"embedding": pack(NO_CENTROID)}), self.threshold)
        clusters = signatures.map_partitions(to_clusters, centroids, self.threshold, meta=meta)
        moved = shuffle(clusters, "key", MEMBERS_GATHERED)
        matched = {"own_partitions": corpus.own_partitions, "threshold": self.threshold}
        meta = match_clusters(meta, **matched)
        return keep("components", moved.map_partitions(match_clusters, meta=meta, **matched))

    def make_embedder(self) -> Embedder | None:
        """The mapper that embeds texts; None where `embedding_field` has embeddings."""
        if isinstance(self.embedder, str):
            return Embedder(model=self.embedder, text_field=self.text_field)
        return self.embedder

    def mappers(self) -> list[PartitionMap]:
        """The embedder, if there is one."""
        embedder = self.make_embedder()
        return [] if embedder is None else [embedder]

    @property
    def signature_fields(self) -> list[str]:
        """Columns that candidates are found by."""
        return [*super().signature_fields, *filter(None, [self.embedding_field])]

    def _check(self, frame: Any) -> None:
        super()._check(frame)
        embedder = self.make_embedder()
        if embedder is not None:
            embedder.check(frame[[self.text_field]])
            embedder.check_library(frame)
        if self.embedding_field is not None:
            unit_vectors(frame.iloc[:0], self.embedding_field)


@on_sound_device
def embedding_frame(
    frame: Any, partition: int, settings: SemanticDuplicates, embedder: Embedder | None
) -> pd.DataFrame:
    """The embeddings of the documents that have any.

    Returns
    -------
    pandas.DataFrame
        ``document`` (int64), ``number`` (int64, by which a sample is drawn), ``within`` (int64,
        equal where `by` is), ``embedding`` (as of `pack`), and what `ranking` gives.
    """
    digests, is_candidate = backend_of(frame).text_digests(frame, settings.text_field)
    if embedder is not None:
        embedded = embedder.map_frame(frame[[settings.text_field]])
        vectors, has_direction = unit_vectors(embedded, embedder.options.embedding_field)
    else:
        assert settings.embedding_field is not None
        vectors, has_direction = unit_vectors(frame, settings.embedding_field)
        digests[has_direction] = vector_digests(vectors)  # equal texts may have different ones
    vectors = vectors[is_candidate[has_direction]]
    is_candidate = is_candidate & has_direction
    documents = document_numbers(partition, len(frame))[is_candidate]
    rows = backend_of(frame).take_rows(frame, is_candidate)
    fields = (settings.text_field, settings.id_field, settings.keep_by)
    return pd.DataFrame(
        {
            "document": documents,
            "number": digests[is_candidate, 0],
            "within": group_hashes(rows, settings.by),
            "embedding": pack(vectors),
            **ranking(rows, documents, *fields),
        }
    )


def sample_frame(
    frame: Any, partition: int, settings: SemanticDuplicates, embedder: Embedder | None
) -> pd.DataFrame:
    """What `take_sample` takes of the embeddings of a partition."""
    embeddings = embedding_frame(frame, partition, settings, embedder)
    return take_sample([embeddings[SAMPLE]], settings.sample_size)


def find_centroids(sample: pd.DataFrame, settings: SemanticDuplicates) -> pd.DataFrame:
    """Centroids of the clusters as rows of ``embedding``; warns if borders part too much."""
    vectors = unpack(sample["embedding"])
    if not len(vectors):
        return pd.DataFrame({"embedding": pack(NO_CENTROID)})
    documents = estimate_documents(sample["number"].to_numpy(), settings.sample_size)
    most = max(len(vectors) // CENTROID_SAMPLES, 1)
    chosen = settings.n_clusters or min(max(documents // CLUSTER_DOCUMENTS, 1), most)
    count = min(chosen, len(vectors))
    centroids = fit_centroids(vectors, count, settings.max_iter, settings.seed)
    _, distances = assign(vectors, centroids)
    share = (distances < border_width(settings.threshold, vectors.shape[1])).mean()
    if share > MOST_NEAR_BORDERS:
        logger.warning(
            "%.0f%% of the documents lie so near the border of a cluster that near-duplicates may "
            "lie beyond it, where they are not found: pass a smaller n_clusters than %d",
            100 * share,
            count,
        )
    return pd.DataFrame({"embedding": pack(centroids)})


@on_sound_device
def to_clusters(
    embeddings: pd.DataFrame, centroids: pd.DataFrame, threshold: float
) -> pd.DataFrame:
    """Embeddings with ``key`` (int64), which tells clusters apart, and ``near_border`` (bool)."""
    vectors, centres = unpack(embeddings["embedding"]), unpack(centroids["embedding"])
    clusters, distances = assign(vectors, centres)
    keys = embeddings["within"].to_numpy() ^ (clusters.view(np.uint64) * _GOLDEN).view(np.int64)
    near = distances < border_width(threshold, centres.shape[1])
    return embeddings.drop(columns=["number", "within"]).assign(key=keys, near_border=near)


@on_sound_device
def match_clusters(embeddings: pd.DataFrame, own_partitions: int, threshold: float) -> pd.DataFrame:
    """In whole clusters, the documents that have a similar one.

    Returns
    -------
    pandas.DataFrame
        ``document`` and ``root`` (int64, the one that stays, which has a row as well),
        ``similarity`` (float32) of both, and ``near_border`` (int64): how many documents of a
        cluster are near its border, told in the row of its first one, which is there even if it
        has no duplicate.
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
        places, similarity[cluster] = match(vectors, int(is_earlier[cluster].sum()), threshold)
        kept[cluster] = start + places
        near[start] = is_near[cluster].sum()
    is_found = (kept != np.arange(len(keys))) | (near > 0)
    is_found[kept[is_found]] = True
    documents = embeddings["document"].to_numpy()
    found = {"document": documents, "root": documents[kept], "similarity": similarity}
    return pd.DataFrame({**found, "near_border": near})[is_found].reset_index(drop=True)
