"""Fuzzy duplicates: texts that share most of their n-grams, found by MinHash and verified."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Literal

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd

from gpuclassify.dedup.bands import choose_bands, curve
from gpuclassify.dedup.components import bucket_edges, join_forests, star_rounds, with_roots
from gpuclassify.dedup.corpus import Corpus, document_numbers, from_parts, shuffle
from gpuclassify.dedup.duplicates import (
    Checkpoint,
    Duplicates,
    accepts_old_spellings,
    check_share,
    group_hashes,
)
from gpuclassify.dedup.groups import Verification

Measure = Literal["jaccard", "containment"]
Components = Literal["tree", "rounds"]


@accepts_old_spellings("fuzzy")
@dataclass(frozen=True, kw_only=True, repr=False)
class FuzzyDuplicates(Duplicates):
    """Documents that share most of their text: found by MinHash, then verified.

    Texts become sets of character n-grams, sets become MinHash signatures of
    ``bands * rows`` numbers (those of libcudf), and documents that agree in all
    `rows` numbers of a band become candidates; a chain of them is one
    component. Without verification a component is a group, and documents at its
    ends may have nothing in common. With it, each document goes only if its
    full text is as similar as `min_similarity` to that of a document that is
    kept.

    Parameters
    ----------
    char_ngrams : int
        Characters of the n-grams that signatures are made of.
    threshold : float
        Jaccard similarity of these n-grams from which on documents are to be found, 0 to 1; it
        chooses `bands` and `rows`, and what goes, unless `min_similarity` is given. By words texts
        are more alike than by these n-grams, of which a changed word changes more: at 0.8, of
        pairs of English texts 0.80 to 0.82 alike in n-grams of three words 6 of 10 are found, and
        all from 0.90 on. ``threshold=0.7, min_similarity=0.8`` finds 97% of the former, and looks
        at more candidates.
    bands : int
        Bands of a signature. Default: as `threshold` needs; the repr shows what they find.
    rows : int
        Numbers in each band, given together with `bands`.
    seed : int
        Of the hash functions.
    bands_per_pass : int
        Bands that are shuffled at a time: 16 bytes a band and document.
    verify : bool
        Compare full texts. False gives plain MinHash, whose `similarity` is NaN.
    min_similarity : float, optional
        Similarity, in n-grams of `token_ngrams` words, to the document that is kept, from which on
        a document goes. Default: `threshold`.
    measure : {"jaccard", "containment"}
        Shared n-grams as a share of both documents' together, or of those of the one that goes.
    token_ngrams : int
        Words of an n-gram when texts are compared. Chinese, Japanese, Thai and the like have a word
        a character.
    components : {"tree", "rounds"}
        Where candidates are joined: in the memory of a worker, which holds 160 bytes for each
        document that has a candidate, or in rounds of shuffles of the whole cluster, which run at
        the call.

    Examples
    --------
    >>> FuzzyDuplicates(id_field="id", keep_by=["quality_score"]).remove(ddf)  # doctest: +SKIP
    """

    char_ngrams: int = 24
    threshold: float = 0.8
    bands: int | None = None
    rows: int | None = None
    seed: int = field(default=42, metadata={"least": 0})
    bands_per_pass: int = 5
    verify: bool = True
    min_similarity: float | None = None
    measure: Measure = "jaccard"
    token_ngrams: int = 3
    components: Components = "tree"

    has_similarity = True
    libraries = ("numba", "scipy")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("threshold", self.threshold)
        if (self.bands is None) != (self.rows is None):
            raise ValueError(
                f"bands={self.bands} and rows={self.rows}: give both, or neither, and "
                "threshold= chooses them"
            )
        if self.min_similarity is not None:
            check_share("min_similarity", self.min_similarity)
        _ = self.band_shape  # refuses a threshold that no bands suit

    def __repr__(self) -> str:
        bands, rows = self.band_shape
        return f"{super().__repr__()}: {bands} bands of {rows}, which {curve(bands, rows)}"

    @functools.cached_property
    def band_shape(self) -> tuple[int, int]:
        """Bands, and numbers in each."""
        if self.bands is None or self.rows is None:
            return choose_bands(self.threshold)
        return self.bands, self.rows

    def find_components(self, corpus: Corpus, keep: Checkpoint) -> dd.DataFrame:
        """Documents that agree in a band, directly or in a chain, and the smallest of them."""
        columns = self.signature_fields
        meta = band_frame(corpus.empty(columns), 0, self)
        keys = keep("signatures", corpus.map(band_frame, columns, settings=self, meta=meta))
        parts: list[Any] = []
        after: Any = None
        count_rows = dask.delayed(len, pure=True)
        count, _ = self.band_shape
        for first in range(0, count, self.bands_per_pass):
            bands = range(first, min(first + self.bands_per_pass, count))
            edges = keep(f"edges-{first:03}", _edges(keys, bands, after))
            found = edges.to_delayed(optimize_graph=False)
            after = dask.delayed(sum, pure=True)([count_rows(part) for part in found])
            parts += found
        if self.components == "rounds":
            edges = from_parts(parts, edges._meta)
            joined = star_rounds(edges)
            found = joined.map_partitions(with_roots, meta=edges._meta)
        else:
            joined = dask.delayed(with_roots, pure=True)(join_forests(parts))
            found = from_parts([joined], edges._meta)
        return keep("components", found)

    @property
    def verification(self) -> Verification | None:
        """How texts of candidates are compared."""
        if not self.verify:
            return None
        least = self.threshold if self.min_similarity is None else self.min_similarity
        return Verification(least, self.measure, self.token_ngrams)


def band_frame(frame: Any, partition: int, settings: FuzzyDuplicates) -> pd.DataFrame:
    """Columns ``document``, ``band_0`` and on (int64): a key for each band of each text."""
    from gpuclassify.dedup.minhash import frame_band_keys

    bands, rows = settings.band_shape
    keys, has_text = frame_band_keys(
        frame,
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


def band_rows(keys: pd.DataFrame, after: Any = None) -> pd.DataFrame:
    """Columns ``document`` and ``key``, a row for each document and band.

    `after` is not looked at: a pass waits for the edges of the one before it, so that no more
    bands are shuffled at a time than are meant to.
    """
    chosen = keys.drop(columns="document").to_numpy()
    documents = np.repeat(keys["document"].to_numpy(), chosen.shape[1])
    return pd.DataFrame({"document": documents, "key": chosen.ravel()})


def _edges(keys: dd.DataFrame, bands: range, after: Any) -> dd.DataFrame:
    """From each document to the smallest one that agrees with it in a band."""
    keys = keys[["document", *(f"band_{band}" for band in bands)]]
    meta = band_rows(keys._meta)
    rows = keys.map_partitions(band_rows, after, meta=meta)
    moved = shuffle(rows, "key")
    return moved.map_partitions(bucket_edges, meta=bucket_edges(meta))
