"""Documents beside items: which items a document holds, how much of each, and where."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numba import njit

from gpuclassify.corpus.decontamination.index import Hits, ItemIndex, distinct
from gpuclassify.corpus.decontamination.words import buffers


class Matches(NamedTuple):
    """Documents and the test items they share n-grams with.

    Ordered by document, then by overlap, largest first. ``shares`` (float64) is the overlap: the
    fraction of an item's n-grams that also occur in the document.
    """

    documents: np.ndarray
    items: np.ndarray
    shares: np.ndarray

    def only(self, mask: np.ndarray) -> Matches:
        """Return some of the matches."""
        return Matches(*(values[mask] for values in self))

    def worst(self) -> Matches:
        """Return the first match of each document."""
        return self.only(np.append(True, np.diff(self.documents) > 0)[: len(self.documents)])


def match_items(index: ItemIndex, hits: Hits) -> Matches:
    """Return the items of hits, with the share of their distinct n-grams that documents have."""
    ngrams, items = len(index.ngrams.keys), len(index.ngrams.counts)
    pairs = distinct(hits.documents * ngrams + hits.ngrams)
    rows, owners = _owners(index, pairs % max(1, ngrams))
    documents = pairs[rows] // max(1, ngrams)
    both, counts = np.unique(documents * items + owners, return_counts=True)
    documents, owners = both // max(1, items), both % max(1, items)
    shares = counts / index.ngrams.counts[owners]
    order = np.lexsort((owners, -shares, documents))
    return Matches(documents[order], owners[order], shares[order])


def find_passages(
    index: ItemIndex, texts: pa.LargeStringArray, hits: Hits, matches: Matches
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return where documents have n-grams of their matches' items: document, start, end.

    Places are those of characters; passages that touch are one.
    """
    items = len(index.ngrams.counts)
    rows, owners = _owners(index, hits.ngrams)
    is_matched = np.isin(
        hits.documents[rows] * items + owners, matches.documents * items + matches.items
    )
    rows = distinct(rows[is_matched])
    spans = np.stack([hits.documents[rows], hits.begins[rows], hits.ends[rows]])
    documents, begins, ends = spans[:, np.lexsort(spans[::-1])]
    reached = _furthest(documents, ends)
    is_new = np.append(True, (np.diff(documents) > 0) | (begins[1:] > reached[:-1]))[: len(ends)]
    first = np.flatnonzero(is_new)
    ends = reached[np.append(first[1:], len(ends)) - 1] if len(first) else ends[:0]
    data, starts = buffers(texts)
    return documents[first], *_characters(data, starts, documents[first], begins[first], ends)


def cut_text(text: str, starts: np.ndarray, ends: np.ndarray, margin: int) -> str:
    """Return the text without passages and `margin` characters around each, which a line breaks."""
    kept, at = [], 0
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        kept.append(text[at : max(at, start - margin)])
        at = end + margin
    return "\n".join(piece for piece in (*kept, text[at:]) if piece)


def _owners(index: ItemIndex, ngrams: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index in `ngrams` and the item of every (n-gram, item) pair."""
    starts = index.ngrams.owner_starts.astype(np.int64, copy=False)
    sizes = starts[ngrams + 1] - starts[ngrams]
    rows = np.repeat(np.arange(len(ngrams)), sizes)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return rows, index.ngrams.owners[starts[ngrams[rows]] + within].astype(np.int64)


@njit(nogil=True, cache=True)
def _furthest(documents, ends):
    """Return the furthest end so far in each document."""
    reached = ends.copy()
    for place in range(1, len(ends)):
        if documents[place] == documents[place - 1]:
            reached[place] = max(reached[place], reached[place - 1])
    return reached


@njit(nogil=True, cache=True)
def _characters(data, starts, documents, begins, ends):
    """Return places in bytes, in order within each document, as places in characters."""
    first, last = np.empty(len(begins), np.int64), np.empty(len(begins), np.int64)
    at, count, document = 0, 0, -1
    for place in range(len(begins)):
        if documents[place] != document:
            document, at, count = documents[place], 0, 0
        origin = starts[document]
        while at < begins[place]:
            count += data[origin + at] & 0xC0 != 0x80
            at += 1
        first[place] = count
        while at < ends[place]:
            count += data[origin + at] & 0xC0 != 0x80
            at += 1
        last[place] = count
    return first, last
