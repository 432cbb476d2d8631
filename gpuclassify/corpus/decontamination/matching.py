"""Compute overlaps of documents with test items, and the passages that match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from gpuclassify.classifiers.spans.spans import Spans
from gpuclassify.corpus.decontamination.index import Hits, ItemIndex, distinct
from gpuclassify.corpus.decontamination.words import buffers
from gpuclassify.corpus.dedup.compiling import compiled


class Matches(NamedTuple):
    """Documents and the test items they share n-grams with.

    Ordered by document, then by overlap, largest first, then by item. ``documents`` and ``items``
    (int64) are the row of the document and the index of the item. ``shares`` (float64) is the
    overlap: the fraction of an item's n-grams in the index that also occur in the document.
    """

    documents: np.ndarray
    items: np.ndarray
    shares: np.ndarray

    def select(self, mask: np.ndarray) -> Matches:
        """Return the matches selected by a mask, bool (matches,)."""
        return Matches(*(values[mask] for values in self))

    def worst(self) -> Matches:
        """Return, for each document with matches, the first match with the largest overlap."""
        return self.select(np.append(True, np.diff(self.documents) > 0)[: len(self.documents)])


def match_items(index: ItemIndex, hits: Hits) -> Matches:
    """Compute overlaps of documents with test items from all `hits` in the documents."""
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
) -> Spans:
    """Return each document's passages that consist of n-grams of the items matched with it.

    `hits` are all occurrences of the index's n-grams in `texts`. The passages are spans without
    labels, with start and end in characters. N-grams, also of different items, make one passage if
    they overlap, or follow each other without a character between them.
    """
    items = len(index.ngrams.counts)
    rows, owners = _owners(index, hits.ngrams)
    is_matched = np.isin(
        hits.documents[rows] * items + owners, matches.documents * items + matches.items
    )
    rows = distinct(rows[is_matched])
    none = np.zeros(len(rows))
    columns = (hits.documents[rows], hits.begins[rows], hits.ends[rows], none, none)
    passages = Spans.of(len(texts), ("",), columns).merged(touching=True)
    offsets = (passages.text_of, passages.starts, passages.ends)
    starts, ends = _character_offsets(*buffers(texts), *offsets)
    return replace(passages, starts=starts, ends=ends)


def remove_passages(text: str, passages: Sequence[tuple[int, int, int]], margin: int) -> str:
    """Remove passages, and `margin` characters on both sides of each, from a text.

    Passages are tuples of start and end in characters and an unused value, in order. The remaining
    pieces, unless empty, are joined by newlines.
    """
    kept, at = [], 0
    for start, end, _ in passages:
        kept.append(text[at : max(at, start - margin)])
        at = end + margin
    return "\n".join(piece for piece in (*kept, text[at:]) if piece)


def _owners(index: ItemIndex, ngrams: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return positions in `ngrams`, one for each item with the n-gram, and these items' indices."""
    starts = index.ngrams.owner_starts.astype(np.int64, copy=False)
    sizes = starts[ngrams + 1] - starts[ngrams]
    rows = np.repeat(np.arange(len(ngrams)), sizes)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return rows, index.ngrams.owners[starts[ngrams[rows]] + within].astype(np.int64)


@compiled
def _character_offsets(data, starts, documents, begins, ends):
    """Convert the starts and ends of passages in UTF-8 texts from bytes to characters.

    Passage i is in the text `documents[i]`; its offsets count from the beginning of that text.
    Passages are sorted, and do not overlap.
    """
    first, last = np.empty(len(begins), np.int64), np.empty(len(begins), np.int64)
    at, count, document = 0, 0, -1
    for number in range(len(begins)):
        if documents[number] != document:
            document, at, count = documents[number], 0, 0
        origin = starts[document]
        while at < begins[number]:
            count += data[origin + at] & 0xC0 != 0x80
            at += 1
        first[number] = count
        while at < ends[number]:
            count += data[origin + at] & 0xC0 != 0x80
            at += 1
        last[number] = count
    return first, last
