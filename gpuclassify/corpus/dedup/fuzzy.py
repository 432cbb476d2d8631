"""Fuzzy duplicates: texts that share most of their n-grams, found by MinHash and then compared.

Signatures are cut into bands (`gpuclassify.corpus.dedup.minhash`), and documents that agree in a
band are linked. A connected component is a set of candidates, whose texts are then compared, unless
``verify=False`` (`gpuclassify.corpus.dedup.matching`).

Two sets of Jaccard similarity s agree in one number of their MinHash signatures with probability s
(Broder 1997), in all `rows` numbers of a band with ``s**rows``, and in at least one of `bands`
with ``1 - (1 - s**rows)**bands`` (Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, 3.4).
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from dask.utils import format_bytes

from gpuclassify.corpus.dedup.corpus import Corpus, choose_shuffle, document_numbers, shuffle
from gpuclassify.corpus.dedup.duplicates import (
    Keep,
    TextDuplicates,
    accepts_old_spellings,
    group_hashes,
)
from gpuclassify.frames import Frame
from gpuclassify.frames.lazy import from_parts, reduce_tree
from gpuclassify.settings.checks import check_count, check_seed
from gpuclassify.settings.declared import declared, setting
from gpuclassify.workers.device_errors import free_host_bytes

Measure = Literal["jaccard", "containment"]
Unit = Literal["words", "characters"]
Components = Literal["tree", "rounds"]
BYTES_TO_JOIN = 160  # bytes of memory per row while forests are joined; a row has 16
# A forest maps each document to the smallest document of its component. Edges are stored only as
# forests, because the forest of several forests is the forest of all their edges.
FOREST = pd.DataFrame({"document": [], "root": []}, dtype=np.int64)
_NEIGHBOURS = pd.DataFrame({"document": [], "neighbour": []}, dtype=np.int64)


@accepts_old_spellings("fuzzy")
@declared
class FuzzyDuplicates(TextDuplicates):
    """Documents that share most of their text: found by MinHash, then verified.

    Texts become sets of character n-grams, sets become MinHash signatures of
    ``bands * rows`` numbers (those of libcudf), and documents that agree in all
    `rows` numbers of a band become candidates; a chain of them is one
    component. Without verification a component is a group, and documents at its
    ends may have nothing in common. With it, each document goes only if its
    full text and that of a document that is kept have a similarity of
    `min_similarity` or more. A call lists these duplicates, `remove` drops
    them, and `summarize` counts them.

    Parameters
    ----------
    char_ngrams : int
        Characters per n-gram of the signatures.
    threshold : float
        Jaccard similarity of these n-grams, 0 to 1, from which on documents are to be found. It
        determines `bands` and `rows` if they are unset; it must be above 0 then. It is also the
        default of `min_similarity`. A changed word
        changes more n-grams of characters than of words. At 0.8, 60% of the pairs of English texts
        with a similarity of 0.80 to 0.82 in n-grams of three words are found, and all pairs from
        0.90 on. ``threshold=0.7, min_similarity=0.8`` finds 97% of the former, and compares more
        candidates.
    bands : int
        Bands of a signature. Default: chosen for `threshold`; the repr shows the share of pairs
        that they find.
    rows : int
        Numbers in each band, set together with `bands`.
    seed : int
        Seed of the hash functions.
    bands_per_pass : int
        Bands that are shuffled at a time, with 16 bytes per band and document.
    verify : bool
        Compare full texts. False gives plain MinHash: ``similarity`` is NaN for documents that go.
    min_similarity : float, optional
        Minimum similarity of a removed document to a kept one, in the n-grams of `compare_by`.
        Default: `threshold`.
    measure : {"jaccard", "containment"}
        Divide the shared n-grams by those of both documents together, or by those of the document
        to remove.
    compare_by : {"words", "characters"}
        Compare texts by n-grams of `token_ngrams` words, or of `char_ngrams` characters as NeMo
        Curator's ``jaccard_threshold`` does.
    token_ngrams : int
        Words per n-gram. In Chinese, Japanese, Thai and the like, a character is a word.
    components : {"tree", "rounds"}
        Join candidates in the memory of one worker ("tree"), with 160 bytes for each document that
        has a candidate, or in shuffles of the whole cluster ("rounds"), which run at the call.

    Examples
    --------
    >>> FuzzyDuplicates(id_field="id", keep_by=["quality_score"]).remove(ddf)  # doctest: +SKIP
    """

    char_ngrams: int = 24
    threshold: float = setting(default=0.8, is_share=True)
    bands: int | None = None
    rows: int | None = None
    seed: int = setting(default=42, least=0)
    bands_per_pass: int = 5
    verify: bool = True
    min_similarity: float | None = setting(default=None, is_share=True)
    measure: Measure = "jaccard"
    compare_by: Unit = "words"
    token_ngrams: int = 3
    components: Components = "tree"

    has_similarity = True
    libraries = ("numba", "scipy")

    def check_together(self) -> None:
        """Refuse `bands` or `rows` alone, a `threshold` of 0 without both, and a large `seed`."""
        super().check_together()
        check_seed(self.seed)
        if (self.bands is None) != (self.rows is None):
            raise ValueError(
                f"bands={self.bands} and rows={self.rows}: give both, or neither, and "
                "threshold= chooses them"
            )
        _ = self.band_shape  # raises if no bands suit the threshold

    def __repr__(self) -> str:
        bands, rows = self.band_shape
        return f"{super().__repr__()}: {bands} bands of {rows}, which {curve(bands, rows)}"

    @functools.cached_property
    def band_shape(self) -> tuple[int, int]:
        """Numbers of bands, and of hashes in a band, as set or as chosen for `threshold`."""
        if self.bands is None or self.rows is None:
            return choose_bands(self.threshold)
        return self.bands, self.rows

    def find_components(self, corpus: Corpus, keep: Keep) -> dd.DataFrame:
        """Link candidates to the smallest document number of their connected component.

        If `components` is "rounds", components are computed at the call.
        """
        columns = self.signature_fields
        meta = band_frame(corpus.empty(columns), 0, self)
        keys = keep("signatures", corpus.map(band_frame, columns, settings=self, meta=meta))
        parts: list[Any] = []
        after: Any = None
        count_rows = dask.delayed(len, pure=True)
        count, _ = self.band_shape
        for first in range(0, count, self.bands_per_pass):
            bands = range(first, min(first + self.bands_per_pass, count))
            rows = keys[["document", *(f"band_{band}" for band in bands)]]
            empty = band_rows(rows._meta)
            moved = shuffle(rows.map_partitions(band_rows, after, meta=empty), "key")
            # Edges from each document to the smallest document with an equal band.
            edges = moved.map_partitions(bucket_edges, meta=bucket_edges(empty))
            edges = keep(f"edges-{first:03}", edges)
            band_parts = edges.to_delayed(optimize_graph=False)
            after = dask.delayed(sum, pure=True)([count_rows(part) for part in band_parts])
            parts += band_parts
        if self.components == "rounds":
            edges = from_parts(parts, edges._meta)
            joined = star_rounds(edges)
            components = joined.map_partitions(with_roots, meta=edges._meta)
        else:
            joined = dask.delayed(with_roots, pure=True)(join_forests(parts))
            components = from_parts([joined], edges._meta)
        return keep("components", components)

    @property
    def verification(self) -> FuzzyDuplicates | None:
        """These settings if `verify` is set, to compare texts of candidates by; else None."""
        return self if self.verify else None


def band_frame(frame: Frame, partition: int, settings: FuzzyDuplicates) -> pd.DataFrame:
    """Return a partition's ``document`` numbers, and keys ``band_0``, ``band_1``, ... (int64).

    Documents with equal keys in a band are candidates. Null and empty texts have no row.
    """
    from gpuclassify.corpus.dedup.minhash import band_keys

    bands, rows = settings.band_shape
    keys, has_text = band_keys(
        settings.compared(frame, settings.text_field),
        settings.text_field,
        ngram_chars=settings.char_ngrams,
        bands=bands,
        rows=rows,
        seed=settings.seed,
    )
    keys ^= group_hashes(frame, settings.by)[:, None]
    columns = {"document": document_numbers(partition, len(frame))}
    columns |= {f"band_{band}": keys[:, band] for band in range(keys.shape[1])}
    return pd.DataFrame({name: column[has_text] for name, column in columns.items()})


def band_rows(keys: pd.DataFrame, after: object = None) -> pd.DataFrame:
    """Return columns ``document`` and ``key``, with a row for each document and band.

    Keys of different bands differ, except by chance, because they are hashes that include the
    band's number. `after` is not used, but if it is a delayed value, Dask computes it first, which
    limits the bands that are shuffled at a time.
    """
    band_keys = keys.drop(columns="document").to_numpy()
    documents = np.repeat(keys["document"].to_numpy(), band_keys.shape[1])
    return pd.DataFrame({"document": documents, "key": band_keys.ravel()})


def catch_probability(similarity: Any, bands: Any, rows: Any) -> Any:
    """Return the probability that two documents of this Jaccard similarity agree in some band."""
    return 1 - (1 - np.power(similarity, rows)) ** bands


def choose_bands(
    threshold: float, hashes: int = 260, *, false_negative_weight: float = 0.95
) -> tuple[int, int]:
    """Choose the number of bands, and of rows (hashes) in each, for a similarity threshold.

    There are at most `hashes` hashes in all. As in datasketch and text-dedup, the numbers minimise
    a weighted sum of two areas: under `catch_probability` below the threshold (false candidates),
    and over it above the threshold (missed pairs, with the weight `false_negative_weight`). With
    equal weights, as in those libraries, fewer than half of the pairs at a threshold of 0.8 are
    found. The default weights find 0.89 to 0.97 of the pairs at any threshold from 0.5 to 0.95;
    more false candidates only cost comparisons.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold={threshold} suits no bands: pass one above 0, and 1 at most")
    check_count("hashes", hashes)
    pairs = [
        (bands, rows) for bands in range(1, hashes + 1) for rows in range(1, hashes // bands + 1)
    ]
    bands, rows = np.array(pairs).T[:, :, None]
    nodes, weights = np.polynomial.legendre.leggauss(64)  # Gauss-Legendre quadrature on [-1, 1]
    nodes, weights = (nodes + 1) / 2, weights / 2
    false = threshold * catch_probability(threshold * nodes, bands, rows) @ weights
    above = threshold + (1 - threshold) * nodes
    missed = (1 - threshold) * (1 - catch_probability(above, bands, rows) @ weights)
    error = (1 - false_negative_weight) * false + false_negative_weight * missed
    return pairs[np.argmin(error)]


def curve(bands: int, rows: int) -> str:
    """Describe, for a repr, the share of pairs that these bands find at several similarities."""
    points = (0.5, 0.6, 0.7, 0.8, 0.9)
    shares = (f"{point}: {catch_probability(point, bands, rows):.0%}" for point in points)
    half = (1 - 0.5 ** (1 / bands)) ** (1 / rows)
    return f"find by Jaccard similarity {', '.join(shares)} of pairs; half at {half:.2f}"


def bucket_edges(keys: pd.DataFrame) -> pd.DataFrame:
    """Link documents that share a band key, directly or by a chain, to the smallest of them.

    `keys` has columns ``key`` and ``document`` (int64), with all rows of each key. The result is as
    from `forest`. Takes linear time, because only pairs with the smallest document of a key are
    joined.
    """
    smallest = keys.groupby("key", sort=False)["document"].transform("min")
    return forest(pd.DataFrame({"document": keys["document"], "root": smallest}))


def forest(edges: pd.DataFrame) -> pd.DataFrame:
    """Link each document to the smallest document number of its connected component.

    `edges` has columns ``document`` and ``root`` (int64), the ends of each edge. The result has the
    same columns, sorted by document, with a row for each document except the smallest of each
    component.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    is_edge = (edges["document"] != edges["root"]).to_numpy()
    ends = edges.loc[is_edge, ["document", "root"]].to_numpy().T
    documents, positions = np.unique(ends, return_inverse=True)
    # Values are bool, so that repeated edges are not summed.
    graph = coo_array((np.ones(ends.shape[1], bool), positions), shape=(len(documents),) * 2)
    count, components = connected_components(graph, directed=False)
    smallest = np.empty(count, np.int64)
    # Reversed, because the last value assigned to an index wins.
    smallest[components[::-1]] = documents[::-1]
    roots = smallest[components]
    is_larger = documents > roots
    return pd.DataFrame({"document": documents[is_larger], "root": roots[is_larger]})


def with_roots(forest: pd.DataFrame) -> pd.DataFrame:
    """Add a row for each distinct root, which is both ``document`` and ``root`` there."""
    roots = np.unique(forest["root"].to_numpy())
    return pd.concat([forest, pd.DataFrame({"document": roots, "root": roots})], ignore_index=True)


def join_forests(parts: list[Any], fan_in: int = 8, bytes_to_join: int = BYTES_TO_JOIN) -> Any:
    """Join delayed results of `forest` into one, `fan_in` at a time, in a tree reduction.

    The delayed result links each document to the smallest of its component in all `parts`. One
    worker holds it. Computing it raises MemoryError if less than `bytes_to_join` bytes are free for
    each row of frames that are joined at once.
    """
    return reduce_tree(functools.partial(_join, bytes_to_join=bytes_to_join), parts, fan_in)


def _join(parts: list[pd.DataFrame], bytes_to_join: int) -> pd.DataFrame:
    documents = sum(map(len, parts))
    needed, free = documents * bytes_to_join, free_host_bytes()
    if needed > free:
        raise MemoryError(
            f"to join the candidates of {documents:,} documents takes {format_bytes(needed)}, and "
            f"{format_bytes(free)} are free here: pass components='rounds', which joins them in "
            "the memory of all workers"
        )
    return forest(pd.concat(parts))


def star_rounds(edges: dd.DataFrame) -> dd.DataFrame:
    """Link documents to the smallest of their connected component, in rounds of Dask shuffles.

    Edges (columns ``document`` and ``root``) may exceed the memory of a worker. Computes when
    called. Alternates the large-star and small-star operations of Kiveris et al., "Connected
    Components in MapReduce and Beyond" (SoCC 2014); `forest` joins the edges of a partition. Rounds
    end, because each lowers the sum of the edges' ends until all edges point at the smallest
    document of their component. The lazy result has the same columns, and a row for each document
    except the smallest of each component.
    """
    method = choose_shuffle()
    edges = edges.map_partitions(forest, meta=FOREST)
    while True:
        pairs = edges.map_partitions(_both_ways, meta=_NEIGHBOURS)
        pairs = pairs.shuffle("document", shuffle_method=method)
        pairs = pairs.map_partitions(_distinct, meta=_NEIGHBOURS).persist()
        if not pairs.map_partitions(_count_unsettled, meta=(None, np.int64)).sum().compute():
            return pairs.map_partitions(_settled_forest, meta=FOREST)
        edges = pairs.map_partitions(_large_star, meta=FOREST)
        edges = edges.shuffle("document", shuffle_method=method)
        edges = edges.map_partitions(forest, meta=FOREST)  # small-star operation


def _both_ways(edges: pd.DataFrame) -> pd.DataFrame:
    ends = edges[["document", "root"]].to_numpy()
    ends = np.concatenate([ends, ends[:, ::-1]])
    return pd.DataFrame({"document": ends[:, 0], "neighbour": ends[:, 1]})


def _distinct(pairs: pd.DataFrame) -> pd.DataFrame:
    return pairs.drop_duplicates().sort_values(["document", "neighbour"], ignore_index=True)


def _count_unsettled(pairs: pd.DataFrame) -> int:
    """Count documents with a link to a smaller number and other links; 0 ends `star_rounds`."""
    neighbours = pairs.groupby("document")["neighbour"].agg(["min", "size"])
    return int(((neighbours["min"] < neighbours.index) & (neighbours["size"] > 1)).sum())


def _settled_forest(pairs: pd.DataFrame) -> pd.DataFrame:
    is_larger = pairs["document"] > pairs["neighbour"]
    return pairs[is_larger].rename(columns={"neighbour": "root"}).reset_index(drop=True)


def _large_star(pairs: pd.DataFrame) -> pd.DataFrame:
    """Link larger neighbours to the smallest of the document and its neighbours (large-star)."""
    smallest = pairs.groupby("document")["neighbour"].transform("min")
    edges = pd.DataFrame(
        {"document": pairs["neighbour"], "root": np.minimum(smallest, pairs["document"])}
    )
    return forest(edges[pairs["neighbour"] > pairs["document"]])
