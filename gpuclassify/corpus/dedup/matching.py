"""Compare the texts of candidates by their n-grams, and find a kept text for each duplicate.

By default, n-grams are of words, while candidates were found by n-grams of characters.
"""

from __future__ import annotations

import string
import sys
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from gpuclassify.corpus.dedup.compiling import compiled
from gpuclassify.settings.checks import check_choice

# A text's sketch is this number of its smallest hashes. If two texts share 80% of their n-grams,
# all 16 hashes differ with a probability of about 10^-11.
_SKETCH_HASHES = 16
_LAST_CODE_POINT = np.uint64(0x10FFFF)
_OWNERS = 4  # documents recorded per hash; text that more documents share is boilerplate
_WORD, _GAP, _ALONE = range(3)
# Blocks of scripts without spaces, in which each character is a token.
WITHOUT_SPACES = (
    (0x0E00, 0x0FFF),  # Thai, Lao, Tibetan
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x1950, 0x1AAF),  # Tai Le, New Tai Lue, Khmer's symbols, Buginese, Tai Tham
    (0x1B00, 0x1B7F),  # Balinese
    (0x1BC0, 0x1BFF),  # Batak
    (0x231A, 0x23FF),  # emoji
    (0x2600, 0x27BF),
    (0x2B00, 0x2BFF),
    (0x3005, 0x3007),  # ideographic iteration mark, closing mark and zero
    (0x3040, 0x312F),  # kana, Bopomofo
    (0x31A0, 0x31BF),  # Bopomofo
    (0x31F0, 0x31FF),  # kana
    (0x3400, 0x4DBF),  # CJK ideographs
    (0x4E00, 0xA4CF),  # and Yi
    (0xA980, 0xA9FF),  # Javanese, Myanmar
    (0xAA60, 0xAADF),  # Myanmar, Tai Viet
    (0xF900, 0xFAFF),  # CJK ideographs
    (0xFF66, 0xFF9F),  # halfwidth kana
    (0x11700, 0x1174F),  # Ahom
    (0x16FE0, 0x18D8F),  # Tangut, Khitan
    (0x1B000, 0x1B2FF),  # kana, Nushu
    (0x1F000, 0x1FAFF),  # emoji
    (0x20000, 0x3FFFF),  # CJK ideographs
)
# FNV-1a's offset basis and prime (draft-eastlake-fnv, 64 bits), here over characters, not bytes.
_FNV_START = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)
# The finaliser of MurmurHash3 (Appleby, public domain), 64 bits.
_MIX_1 = np.uint64(0xFF51AFD7ED558CCD)
_MIX_2 = np.uint64(0xC4CEB9FE1A85EC53)
_MIX_SHIFT = np.uint64(33)


def _character_kinds() -> np.ndarray:
    kinds = np.full(sys.maxunicode + 1, _WORD, np.uint8)
    kinds[[ord(character) for character in string.punctuation]] = _GAP
    kinds[[code for code in range(0x3001) if chr(code).isspace()]] = _GAP  # U+3000 is the last
    for first, last in WITHOUT_SPACES:
        kinds[first : last + 1] = _ALONE
    return kinds


_KINDS = _character_kinds()
_CHARACTERS = np.full_like(_KINDS, _ALONE)


class NgramSets(NamedTuple):
    """Hashes of the distinct n-grams of several texts, concatenated.

    Text i has ``hashes[offsets[i]:offsets[i + 1]]``: uint64, sorted and distinct, at least one.
    ``offsets`` is int64 (texts + 1,).
    """

    offsets: np.ndarray
    hashes: np.ndarray


def ngram_sets(texts: pa.LargeStringArray, n: int, *, by_characters: bool = False) -> NgramSets:
    """Hash the distinct n-grams of each text's words, or characters, to 64 bits.

    A word is a run of characters other than white space (`str.isspace`) and ASCII punctuation; case
    matters. A character in `WITHOUT_SPACES`, such as an ideograph or an emoji, is a word by itself.
    A text of fewer than `n` words has one n-gram of all of them; a text without words is one word.
    With `by_characters`, each character is a word, white space and punctuation too. Raises
    ValueError for null texts.
    """
    if texts.null_count:
        raise ValueError(f"{texts.null_count} of {len(texts)} texts are null: drop them before")
    if not len(texts):
        return NgramSets(np.zeros(1, np.int64), np.empty(0, np.uint64))
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    characters = np.frombuffer(data or b"", np.uint8)
    # A token takes at least two bytes: one and the gap after it, or three in scripts without gaps.
    kinds, least_bytes = (_CHARACTERS, 1) if by_characters else (_KINDS, 2)
    return NgramSets(*_ngram_sets(characters, ends, n, kinds, least_bytes))


@compiled
def _ngram_sets(data, ends, n, kinds, least_bytes):
    texts = len(ends) - 1
    # Unwritten pages take no memory.
    hashes = np.empty((ends[-1] - ends[0]) // least_bytes + texts, np.uint64)
    offsets = np.zeros(texts + 1, np.int64)
    for text in range(texts):
        text_hashes = hashes[offsets[text] :]
        tokens = _hash_tokens(data[ends[text] : ends[text + 1]], kinds, text_hashes)
        ngrams = _hash_ngrams(text_hashes, tokens, n)
        text_hashes[:ngrams].sort()
        offsets[text + 1] = offsets[text] + _drop_repeats(text_hashes, ngrams)
    return offsets, hashes[: offsets[-1]].copy()


@compiled
def _hash_tokens(text, kinds, hashes):
    """Write the hashes of a text's words to `hashes`; return the number of words, at least 1."""
    count, at = np.uint64(0), 0  # unsigned, so that numba does not test for negative indices
    word = _FNV_START
    while at < len(text):
        code, at = character(text, at)
        kind = kinds[code]
        # The entry after the last word is overwritten until a word ends. A branch would be
        # slower, because a processor could not predict it.
        hashes[count] = word
        count += np.uint64((kind != _WORD) & (word != _FNV_START))
        if kind == _ALONE:
            hashes[count] = add(_FNV_START, code)
            count += np.uint64(1)
        longer = add(word, code)
        word = longer if kind == _WORD else _FNV_START
    if count == 0 and word == _FNV_START:
        for byte in text:
            word = add(word, np.uint64(byte))
    if count == 0 or word != _FNV_START:
        hashes[count] = word
        count += np.uint64(1)
    return np.int64(count)


@compiled
def character(text, at):
    """Decode the UTF-8 character at byte `at`; return its code point, uint64, and the next offset.

    Invalid UTF-8 is not detected.
    """
    code = np.uint64(text[at])
    return (code, at + 1) if code < np.uint64(0x80) else _long_character(text, at)


@compiled
def _long_character(text, at):
    code = np.uint64(text[at])
    size = 2 + (code >= np.uint64(0xE0)) + (code >= np.uint64(0xF0))
    code &= np.uint64(0x7F >> size)
    for byte in text[at + 1 : at + size]:
        code = code << np.uint64(6) | np.uint64(byte & 0x3F)
    return min(code, _LAST_CODE_POINT), at + size  # invalid UTF-8 may give more


@compiled
def add(state, value):
    """Add a value to a running hash by FNV-1a's step, and return the new hash, uint64."""
    return (state ^ value) * _FNV_PRIME


@compiled
def murmur64(value):
    """Mix the bits of a uint64 hash by MurmurHash3's finalizer, so that each depends on all."""
    value = (value ^ (value >> _MIX_SHIFT)) * _MIX_1
    value = (value ^ (value >> _MIX_SHIFT)) * _MIX_2
    return value ^ (value >> _MIX_SHIFT)


@compiled
def _hash_ngrams(hashes, tokens, n):
    """Replace the hashes of words by hashes of n-grams, and return the number of n-grams."""
    size = min(n, tokens)
    for token in range(tokens):
        hashes[token] = murmur64(hashes[token])
    for first in range(tokens - size + 1):
        ngram = np.uint64(size)
        for token in range(first, first + size):
            ngram = add(ngram, hashes[token])
        hashes[first] = murmur64(ngram)
    return tokens - size + 1


@compiled
def _drop_repeats(hashes, count):
    """Move the distinct ones of `count` sorted hashes to the front, and return their number."""
    distinct = 1
    for at in range(1, count):
        if hashes[at] != hashes[at - 1]:
            hashes[distinct] = hashes[at]
            distinct += 1
    return distinct


class GroupMatches(NamedTuple):
    """For each document of some groups, the similar document that stays.

    Attributes
    ----------
    kept : ndarray of int64, shape (documents,)
        Row of the document that stays: the document's own row if it stays itself.
    similarity : ndarray of float32, shape (documents,)
        Similarity to the document in ``kept``; 1 if it stays itself.
    compared : ndarray of int8, shape (documents,)
        Number of comparisons, 0 to 2; for a document that goes, the last one was the match.
    """

    kept: np.ndarray
    similarity: np.ndarray
    compared: np.ndarray


def match_groups(
    sets: NgramSets, starts: np.ndarray, is_fixed: np.ndarray, *, threshold: float, measure: str
) -> GroupMatches:
    """Find, for each document of a group of candidates, a similar document that stays.

    The first document of a group stays. Each further document is compared with at most two that
    stay: the first, and the one that has the same n-grams, or else shares most of the document's
    sketch (its 16 smallest hashes). If neither is similar enough, the document stays as well. So
    every document that goes is similar to one that stays, not only to another that goes.

    `sets` has the n-grams of the documents, sorted by group, with the document to keep first.
    `starts`, int64 (groups + 1,), has the first row of each group, and the number of documents.
    Documents in the mask `is_fixed`, bool (documents,), stay without comparison. Similar means a
    similarity of at least `threshold`. The `measure` divides the shared n-grams by the n-grams of
    both documents together ("jaccard"), or of the document that would go ("containment"). With
    "containment", sketches miss a text that contains the document more often, the longer this text
    is.
    """
    check_choice("measure", measure, ("jaccard", "containment"))
    counts = len(sets.offsets) - 1, int(starts[-1]), len(is_fixed)
    if len(set(counts)) > 1:
        raise ValueError(
            f"sets, starts and is_fixed are of {counts[0]}, {counts[1]} and {counts[2]} documents"
        )
    by_containment = measure == "containment"
    return GroupMatches(
        *_match_groups(
            sets, np.asarray(starts), np.asarray(is_fixed), float(threshold), by_containment
        )
    )


class _Sketches(NamedTuple):
    """Hash table of the documents of one group that stay so far, by the hashes in their sketches.

    A slot is free if its ``owners`` are rows of earlier groups, so that the table need not be
    cleared between groups.
    """

    owners: np.ndarray  # int64 (slots, _OWNERS): row + 1 of the last documents with the hash
    hashes: np.ndarray  # uint64 (slots,)
    counts: np.ndarray  # int64 (slots,): number of documents that stay and have the hash
    votes: np.ndarray  # float64 (documents,): buffer for sums; zero between calls


@compiled
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
                _enter_document(sketches, ngrams, first, row)
    return kept, similarity, compared


@compiled
def _empty_sketches(starts):
    slots = 0
    for group in range(len(starts) - 1):
        slots = max(slots, _slots(starts[group + 1] - starts[group]))
    return _Sketches(
        np.zeros((slots, _OWNERS), np.int64),  # takes memory only when written
        np.empty(slots, np.uint64),
        np.empty(slots, np.int64),
        np.zeros(starts[-1]),
    )


@compiled
def _part(table, documents):
    slots = _slots(documents)
    # A view of the needed slots, because a small table fits into the processor's cache.
    return _Sketches(table.owners[:slots], table.hashes[:slots], table.counts[:slots], table.votes)


@compiled
def _slots(documents):
    slots = 1  # a power of two; at least half of the slots stay free
    while slots < 2 * (_SKETCH_HASHES + 1) * documents:
        slots *= 2
    return slots


@compiled
def _set(sets, row):
    return sets.hashes[sets.offsets[row] : sets.offsets[row + 1]]


@compiled
def _similarity(ngrams, others, by_containment):
    shared = _count_shared(ngrams, others)
    return shared / (len(ngrams) if by_containment else len(ngrams) + len(others) - shared)


@compiled
def _count_shared(ngrams, others):
    """Count the values that two sorted arrays of distinct values share."""
    if len(ngrams) > len(others):
        ngrams, others = others, ngrams
    shared = at = 0
    if 16 * len(ngrams) < len(others):  # otherwise a linear scan is faster
        for value in ngrams:
            at += np.searchsorted(others[at:], value)
            shared += at < len(others) and others[at] == value
        return shared
    here = 0
    while here < len(ngrams) and at < len(others):
        value, other = ngrams[here], others[at]
        shared += value == other
        here += value <= other
        at += other <= value
    return shared


@compiled
def _slot(sketches, ngram, first):
    """Return the index of the slot with the hash `ngram`, or else of a free slot."""
    last = np.uint64(len(sketches.owners) - 1)
    slot = ngram & last
    while sketches.owners[slot, 0] > first and sketches.hashes[slot] != ngram:
        slot = (slot + np.uint64(1)) & last
    return slot


@compiled
def _enter_document(sketches, ngrams, first, row):
    _enter(sketches, _whole(ngrams), first, row)  # finds texts with equal n-grams
    for ngram in ngrams[:_SKETCH_HASHES]:
        _enter(sketches, ngram, first, row)


@compiled
def _enter(sketches, ngram, first, row):
    slot = _slot(sketches, ngram, first)
    if sketches.owners[slot, 0] <= first:
        sketches.hashes[slot], sketches.counts[slot] = ngram, 0
    sketches.owners[slot, sketches.counts[slot] % _OWNERS] = row + 1
    sketches.counts[slot] += 1


@compiled
def _whole(ngrams):
    whole = np.uint64(len(ngrams))
    for ngram in ngrams:
        whole = add(whole, ngram)
    return murmur64(whole)


@compiled
def _most_shared(sketches, ngrams, first):
    """Return the row of the kept document that is most likely similar to a text, or -1.

    It has equal n-grams, or else shares most of the text's smallest hashes, each counted 1 / n if n
    documents have it. The row `first` was compared already, and is never returned.
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
