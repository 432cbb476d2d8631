"""Which texts of a group share enough n-grams with one that stays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from gpuclassify.dedup.ngrams import NgramSets, add, mix
from gpuclassify.settings.checks import check_choice

# So many of a text's smallest hashes are its sketch. Of two texts that share 80% of their n-grams,
# that all of 16 differ has a chance of about one in 10^11.
_SKETCH_HASHES = 16
_OWNERS = 4  # documents that are noted for a hash: what more of them have is boilerplate


class Matches(NamedTuple):
    """Which document stays for each one.

    Attributes
    ----------
    kept : ndarray of int64, shape (documents,)
        The row of the document that stays for this one: its own if it stays itself.
    similarity : ndarray of float32, shape (documents,)
        To that document.
    compared : ndarray of int8, shape (documents,)
        How many documents it was compared with, 0 to 2: the last one it is like, if it goes.
    """

    kept: np.ndarray
    similarity: np.ndarray
    compared: np.ndarray


def match_groups(
    sets: NgramSets, starts: np.ndarray, is_fixed: np.ndarray, *, threshold: float, measure: str
) -> Matches:
    """Which documents of each group go, because one that stays is similar enough.

    The first document of a group stays. Each further one is compared with at most two that stay:
    the first, and the one of the others that has the same n-grams or else shares the most of the
    document's sketch (its smallest hashes). If neither is similar enough it stays as well, so that
    a chain of documents, each similar to the next, goes only as far as similarity to one that
    stays. Linear in the n-grams of a group, however many documents stay.

    Parameters
    ----------
    sets : NgramSets
        Of the documents, group by group, and in each the one that stays first.
    starts : ndarray of int64, shape (groups + 1,)
        Where groups begin, and the number of documents.
    is_fixed : ndarray of bool, shape (documents,)
        Documents that stay without comparison, such as those of an earlier corpus.
    threshold : float
        The least similarity at which a document goes, from 0 to 1.
    measure : {"jaccard", "containment"}
        n-grams in common, divided by those of either, or by those of the document that would go.
        Sketches find what contains a text less often, the longer it is than the text.

    Raises
    ------
    ValueError
        An unknown measure, or the arguments are of different numbers of documents.
    """
    check_choice("measure", measure, ("jaccard", "containment"))
    counts = len(sets.offsets) - 1, int(starts[-1]), len(is_fixed)
    if len(set(counts)) > 1:
        raise ValueError(
            f"sets, starts and is_fixed are of {counts[0]}, {counts[1]} and {counts[2]} documents"
        )
    by_containment = measure == "containment"
    return Matches(
        *_match_groups(
            sets, np.asarray(starts), np.asarray(is_fixed), float(threshold), by_containment
        )
    )


class _Sketches(NamedTuple):
    """A hash table of the sketches of a group's documents that stay.

    Attributes
    ----------
    owners : ndarray of int64, shape (slots, _OWNERS)
        Rows, and 1, of the last documents that have the slot's hash. A slot is free if they are not
        of this group: groups come in order, so that their rows are smaller.
    hashes : ndarray of uint64, shape (slots,)
    counts : ndarray of int64, shape (slots,)
        How many documents that stay have the hash.
    votes : ndarray of float64, shape (documents,)
        Room to add up in; zero between calls.
    """

    owners: np.ndarray
    hashes: np.ndarray
    counts: np.ndarray
    votes: np.ndarray


@njit(nogil=True, cache=True)
def _match_groups(sets, starts, is_fixed, threshold, by_containment):
    kept = np.arange(len(is_fixed))
    similarity = np.ones(len(is_fixed), np.float32)
    compared = np.zeros(len(is_fixed), np.int8)
    table = _empty_sketches(starts)
    for group in range(len(starts) - 1):
        first, end = starts[group], starts[group + 1]
        sketches = _part(table, end - first)
        for row in range(first, end):
            ngrams = _set(sets, row)
            candidate = first if row > first and not is_fixed[row] else -1
            while candidate >= 0:
                compared[row] += 1
                share = _similarity(ngrams, _set(sets, candidate), by_containment)
                if share >= threshold:
                    kept[row], similarity[row] = candidate, share
                    break
                candidate = _most_shared(sketches, ngrams, first) if candidate == first else -1
            if kept[row] == row:
                _own(sketches, ngrams, first, row)
    return kept, similarity, compared


@njit(nogil=True, cache=True)
def _empty_sketches(starts):
    slots = 0
    for group in range(len(starts) - 1):
        slots = max(slots, _slots(starts[group + 1] - starts[group]))
    return _Sketches(
        np.zeros((slots, _OWNERS), np.int64),  # takes memory where it is written
        np.empty(slots, np.uint64),
        np.empty(slots, np.int64),
        np.zeros(starts[-1]),
    )


@njit(nogil=True, cache=True)
def _part(table, documents):
    """As much of the table as these documents need: small groups stay in the processor's cache."""
    slots = _slots(documents)
    return _Sketches(table.owners[:slots], table.hashes[:slots], table.counts[:slots], table.votes)


@njit(nogil=True, cache=True)
def _slots(documents):
    """Room for the sketches of so many documents, at most half full: a power of two."""
    slots = 1
    while slots < 2 * (_SKETCH_HASHES + 1) * documents:
        slots *= 2
    return slots


@njit(nogil=True, cache=True)
def _set(sets, row):
    return sets.hashes[sets.offsets[row] : sets.offsets[row + 1]]


@njit(nogil=True, cache=True)
def _similarity(ngrams, others, by_containment):
    shared = _count_shared(ngrams, others)
    return shared / (len(ngrams) if by_containment else len(ngrams) + len(others) - shared)


@njit(nogil=True, cache=True)
def _count_shared(some, others):
    """How many values are in both of two sorted arrays: nearly linear in the shorter one."""
    if len(some) > len(others):
        some, others = others, some
    shared = at = 0
    if 16 * len(some) < len(others):  # else a step takes less time than a search
        for value in some:
            at += np.searchsorted(others[at:], value)
            shared += at < len(others) and others[at] == value
        return shared
    here = 0
    while here < len(some) and at < len(others):
        value, other = some[here], others[at]
        shared += value == other
        here += value <= other
        at += other <= value
    return shared


@njit(nogil=True, cache=True)
def _slot(sketches, ngram, first):
    """Where a hash is, or the free place for it."""
    last = np.uint64(len(sketches.owners) - 1)
    slot = ngram & last
    while sketches.owners[slot, 0] > first and sketches.hashes[slot] != ngram:
        slot = (slot + np.uint64(1)) & last
    return slot


@njit(nogil=True, cache=True)
def _own(sketches, ngrams, first, row):
    """Enter the sketch of a document that stays, and its n-grams as a whole."""
    _enter(sketches, _whole(ngrams), first, row)
    for ngram in ngrams[:_SKETCH_HASHES]:
        _enter(sketches, ngram, first, row)


@njit(nogil=True, cache=True)
def _enter(sketches, ngram, first, row):
    slot = _slot(sketches, ngram, first)
    if sketches.owners[slot, 0] <= first:
        sketches.hashes[slot], sketches.counts[slot] = ngram, 0
    sketches.owners[slot, sketches.counts[slot] % _OWNERS] = row + 1
    sketches.counts[slot] += 1


@njit(nogil=True, cache=True)
def _whole(ngrams):
    """One hash of all n-grams of a text."""
    whole = np.uint64(len(ngrams))
    for ngram in ngrams:
        whole = add(whole, ngram)
    return mix(whole)


@njit(nogil=True, cache=True)
def _most_shared(sketches, ngrams, first):
    """The row with the same n-grams, or that shares the most of a document's sketch; or -1.

    A hash that many have says little of any: it counts for one part in as many. Of rows that share
    as much, it is the first.
    """
    equal = sketches.owners[_slot(sketches, _whole(ngrams), first), 0] - 1
    if equal > first:
        return equal
    most = -1
    votes = sketches.votes
    for ngram in ngrams[:_SKETCH_HASHES]:
        slot = _slot(sketches, ngram, first)
        for owner in sketches.owners[slot]:
            row = owner - 1
            if row > first:
                votes[row] += 1 / sketches.counts[slot]
                is_equal = votes[row] == votes[most]
                if most < 0 or votes[row] > votes[most] or (is_equal and row < most):
                    most = row
    for ngram in ngrams[:_SKETCH_HASHES]:
        for owner in sketches.owners[_slot(sketches, ngram, first)]:
            votes[owner - 1] = 0
    return most
