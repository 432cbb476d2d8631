"""Token n-grams of texts, as sets of hashes.

The n-grams are those of words, so that what a group of candidates has in common is judged by other
means than the character n-grams that made them candidates.
"""

from __future__ import annotations

import string
import sys
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numba import njit

_WORD, _GAP, _ALONE = range(3)
# Blocks of scripts that are written without spaces: each character is a token.
_WITHOUT_SPACES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3005, 0x3007),  # ideographic iteration mark, closing mark and zero
    (0x3040, 0x30FF),  # kana
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),  # CJK ideographs
    (0x4E00, 0x9FFF),
    (0xA9E0, 0xA9FF),  # Myanmar
    (0xAA60, 0xAA7F),
    (0xF900, 0xFAFF),  # CJK ideographs
    (0xFF66, 0xFF9F),  # halfwidth kana
    (0x1B000, 0x1B16F),  # kana
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
    for first, last in _WITHOUT_SPACES:
        kinds[first : last + 1] = _ALONE
    return kinds


_KINDS = _character_kinds()


class NgramSets(NamedTuple):
    """The n-grams of some texts as hashes.

    Attributes
    ----------
    offsets : ndarray of int64, shape (texts + 1,)
        The hashes of text i are ``hashes[offsets[i]:offsets[i + 1]]``.
    hashes : ndarray of uint64
        Sorted and distinct within each text, and at least one.
    """

    offsets: np.ndarray
    hashes: np.ndarray


def ngram_sets(texts: pa.LargeStringArray, n: int) -> NgramSets:
    """The distinct n-grams of each text's tokens, as 64-bit hashes.

    A token is a run of characters other than white space (`str.isspace`) and ASCII punctuation,
    in the case that it has. A character of a script without spaces (CJK ideographs, kana, Thai,
    Lao, Khmer, Myanmar) is a token by itself. A text of fewer than `n` tokens has one n-gram of
    them all; a text without tokens is one token as a whole.

    Parameters
    ----------
    texts : pyarrow.LargeStringArray, shape (texts,)
        Without nulls.
    n : int
        Tokens in an n-gram, at least 1.

    Returns
    -------
    NgramSets
        Takes 8 bytes for each n-gram, and while it is made address space (not memory) for twice
        as many as there are.

    Raises
    ------
    ValueError
        A text is null.
    """
    if texts.null_count:
        raise ValueError(f"{texts.null_count} of {len(texts)} texts are null: drop them before")
    if not len(texts):
        return NgramSets(np.zeros(1, np.int64), np.empty(0, np.uint64))
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    characters = np.frombuffer(data or b"", np.uint8)
    return NgramSets(*_ngram_sets(characters, ends, n, _KINDS))


@njit(nogil=True, cache=True)
def _ngram_sets(data, ends, n, kinds):
    texts = len(ends) - 1
    # Tokens take at least two bytes each: with the gap behind them, or three by themselves. What
    # is not written takes no memory.
    hashes = np.empty((ends[-1] - ends[0]) // 2 + texts, np.uint64)
    offsets = np.zeros(texts + 1, np.int64)
    for text in range(texts):
        found = hashes[offsets[text] :]
        tokens = _hash_tokens(data[ends[text] : ends[text + 1]], kinds, found)
        ngrams = _hash_ngrams(found, tokens, n)
        found[:ngrams].sort()
        offsets[text + 1] = offsets[text] + _drop_repeats(found, ngrams)
    return offsets, hashes[: offsets[-1]].copy()


@njit(nogil=True, cache=True)
def _hash_tokens(text, kinds, found):
    """Write the hashes of a text's tokens to `found`; returns how many.

    Without a branch for each gap, which no processor could foresee: what stands behind the last
    token is overwritten until a word ends there. Unsigned places cannot count from the end, which
    spares a test of each.
    """
    count, at = np.uint64(0), 0
    word = _FNV_START
    while at < len(text):
        code, at = _character(text, at)
        kind = kinds[code]
        found[count] = word
        count += np.uint64((kind != _WORD) & (word != _FNV_START))
        if kind == _ALONE:
            found[count] = add(_FNV_START, code)
            count += np.uint64(1)
        longer = add(word, code)
        word = longer if kind == _WORD else _FNV_START
    if count == 0 and word == _FNV_START:
        for byte in text:
            word = add(word, np.uint64(byte))
    if count == 0 or word != _FNV_START:
        found[count] = word
        count += np.uint64(1)
    return np.int64(count)


@njit(nogil=True, cache=True)
def _character(text, at):
    """The code point of the UTF-8 character at a byte, and where the next one begins."""
    code = np.uint64(text[at])
    return (code, at + 1) if code < np.uint64(0x80) else _long_character(text, at)


@njit(nogil=True, cache=True)
def _long_character(text, at):
    code = np.uint64(text[at])
    size = 2 + (code >= np.uint64(0xE0)) + (code >= np.uint64(0xF0))
    code &= np.uint64(0x7F >> size)
    for byte in text[at + 1 : at + size]:
        code = code << np.uint64(6) | np.uint64(byte & 0x3F)
    return code, at + size


@njit(nogil=True, cache=True)
def add(state, value):
    """One more value in a hash of several."""
    return (state ^ value) * _FNV_PRIME


@njit(nogil=True, cache=True)
def mix(value):
    """A hash whose every bit depends on every bit of the value."""
    value = (value ^ (value >> _MIX_SHIFT)) * _MIX_1
    value = (value ^ (value >> _MIX_SHIFT)) * _MIX_2
    return value ^ (value >> _MIX_SHIFT)


@njit(nogil=True, cache=True)
def _hash_ngrams(found, tokens, n):
    """Overwrite the hashes of tokens with those of the n-grams that begin there; how many."""
    size = min(n, tokens)
    for token in range(tokens):
        found[token] = mix(found[token])
    for first in range(tokens - size + 1):
        ngram = np.uint64(size)
        for token in range(first, first + size):
            ngram = add(ngram, found[token])
        found[first] = mix(ngram)
    return tokens - size + 1


@njit(nogil=True, cache=True)
def _drop_repeats(found, count):
    """Move the distinct of sorted values to the front; returns how many."""
    distinct = 1
    for at in range(1, count):
        if found[at] != found[at - 1]:
            found[distinct] = found[at]
            distinct += 1
    return distinct
