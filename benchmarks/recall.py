"""How many of the similar pairs are found, and how alike is what is removed to what is kept?

The truth is brute force: the Jaccard similarity of all pairs of documents, by sets of n-grams.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.sparse import csr_matrix
from scipy.stats import binom
from sklearn.feature_extraction.text import CountVectorizer

from benchmarks.deduplicators import character_ngrams

ALIKE = 0.3  # pairs below this hardly ever share a band: 14 of 8 rows do in 1 of 1,100
EDGES = np.linspace(0.5, 1.0, 11).round(2)  # of the bins of similarity
CONFIDENCE = 0.95
LEAST = (0.5, 0.7, 0.8)  # similarities from which on a removal counts as right
COMPARED_WORDS = 3  # of an n-gram, when full texts are compared
BLOCK_ROWS = 1_000


def character_sets(texts: Sequence[str]) -> csr_matrix:
    """Return float32 (texts, distinct n-grams): 1 where a text has the n-gram."""
    counter = CountVectorizer(analyzer=character_ngrams, binary=True, dtype=np.float32)
    return counter.fit_transform(texts)


def word_sets(texts: Sequence[str]) -> csr_matrix:
    """Return float32 (texts, distinct n-grams of words): 1 where a text has the n-gram.

    Words are what stands between white space and ASCII punctuation, as texts are compared.
    """
    counter = CountVectorizer(
        ngram_range=(COMPARED_WORDS, COMPARED_WORDS),
        token_pattern=r"[^\s!-/:-@\[-`{-~]+",
        lowercase=False,
        binary=True,
        dtype=np.float32,
    )
    return counter.fit_transform(texts)


def similar_pairs(sets: csr_matrix, least: float = ALIKE) -> pd.DataFrame:
    """Return all pairs of rows at least this similar (Jaccard): first < second, and similarity."""
    sizes = sets.getnnz(axis=1)
    blocks = []
    for start in range(0, sets.shape[0], BLOCK_ROWS):
        common = (sets[start : start + BLOCK_ROWS] @ sets.T).tocoo()
        first, second = common.row + start, common.col
        similarity = common.data / (sizes[first] + sizes[second] - common.data)
        block = pd.DataFrame({"first": first, "second": second, "similarity": similarity})
        blocks.append(block[(first < second) & (similarity >= least)])
    return pd.concat(blocks, ignore_index=True)


def lone_pairs(pairs: pd.DataFrame) -> pd.DataFrame:
    """Return the pairs neither of whose documents is similar to any third one.

    Groups are transitive, so that other pairs can be found by way of a third document; for these
    to be in one group means to share a band.
    """
    often = pd.concat([pairs["first"], pairs["second"]]).value_counts()
    is_lone = (pairs["first"].map(often) == 1) & (pairs["second"].map(often) == 1)
    return pairs[is_lone]


def is_found(groups: pd.DataFrame, pairs: pd.DataFrame) -> pd.Series:
    """Tell whether the two documents of each pair, by id, are in one group."""
    group = groups.set_index("id")["group"]
    return pairs["first"].map(group) == pairs["second"].map(group)


def band_probability(similarity: Any, bands: int, rows: int) -> Any:
    """Return the probability that two documents share a band: 1 - (1 - s^rows)^bands.

    Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, section 3.4.2.
    """
    return 1 - (1 - similarity**rows) ** bands


def recall_by_similarity(
    groups: pd.DataFrame, pairs: pd.DataFrame, bands: int, rows: int
) -> list[dict[str, Any]]:
    """Return the share of pairs found in each bin of similarity, beside the expected share.

    Returns
    -------
    list of dict
        ``from`` and ``to`` (the last bin includes it), ``pairs``, ``found``; ``expected``, the mean
        of the formula over the pairs, and ``interval``, in which the share found lies with 95%
        probability if the formula holds.
    """
    found = is_found(groups, pairs)
    place = np.digitize(pairs["similarity"], EDGES[1:-1])
    bins = []
    for number, (low, high) in enumerate(itertools.pairwise(EDGES)):
        chosen = (place == number) & (pairs["similarity"] >= EDGES[0])
        count = int(chosen.sum())
        if count:
            expected = band_probability(pairs["similarity"][chosen], bands, rows).mean()
            interval = np.array(binom.interval(CONFIDENCE, count, expected)) / count
            bins.append(
                {"from": float(low), "to": float(high), "pairs": count}
                | {"found": float(found[chosen].mean()), "expected": float(expected)}
                | {"interval": interval.tolist()}
            )
    return bins


def precision(groups: pd.DataFrame, sets: dict[str, csr_matrix]) -> dict[str, Any]:
    """Return the shares of removed documents that are so similar to the one kept of their group.

    Parameters
    ----------
    groups : DataFrame
        id, which are rows of the sets, group and keep.
    sets : dict of str to csr_matrix
        By name, what similarity is measured on.
    """
    kept = groups[groups["keep"]].set_index("group")["id"]
    removed = groups[~groups["keep"]]
    one, other = removed["id"].to_numpy(), removed["group"].map(kept).to_numpy()
    found: dict[str, Any] = {"removed": len(removed)}
    for name, of_name in sets.items():
        similarity = jaccard(of_name[one], of_name[other])
        found[name] = {str(least): float((similarity >= least).mean()) for least in LEAST}
    return found


def jaccard(one: csr_matrix, other: csr_matrix) -> np.ndarray:
    """Return the Jaccard similarity of each row of `one` and of `other`, float32 (rows,)."""
    common = np.asarray(one.multiply(other).sum(axis=1)).ravel()
    return common / np.maximum(one.getnnz(axis=1) + other.getnnz(axis=1) - common, 1)
