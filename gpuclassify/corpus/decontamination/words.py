"""Split texts into normalized words, with their hashes and byte offsets.

Characters are decomposed by NFKD, and case is folded. Decimal digits of any script become ASCII
digits. Letters, digits and marks form words; a character of a script without spaces is a word by
itself. Invisible format characters are removed. All other characters, such as punctuation, symbols
and white space, separate words.
"""

from __future__ import annotations

import functools
import unicodedata
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from gpuclassify.corpus.dedup.compiling import compiled
from gpuclassify.corpus.dedup.matching import WITHOUT_SPACES, add, character, murmur64

_GAP, _WORD, _MARK, _ALONE, _NOTHING = range(5)
_KINDS = {"L": _WORD, "N": _WORD, "M": _MARK}  # key: first letter of the Unicode category
_ASSIGNED = ((0, 0xD800), (0xE000, 0x40000), (0xE0000, 0xE0200))  # all others are separators
_SELECTORS = ((0xFE00, 0xFE10), (0xE0100, 0xE01F0))  # variation selectors
SPACE = 32
_ROOM = 256  # maximum bytes, and maximum words, of a normalized character
_MOST_MARKS = 32  # marks sorted after one letter; stream-safe text has at most 30
_START = np.uint64(0xCBF29CE484222325)
UNICODE = unicodedata.unidata_version


class Characters(NamedTuple):
    """Tables, by code point, to normalize characters and to find words.

    Attributes
    ----------
    quick : ndarray of uint8, shape (256,)
        By byte of UTF-8: the normalized byte for an ASCII character of words, a space for other
        ASCII characters, and 0 for bytes above 127.
    becomes : ndarray of int32, shape (code points,)
        Normalized code point, or ``-1 - index`` of a sequence in `several`.
    several : ndarray of int32
        Sequences of code points, each preceded by its length, which is at the index.
    kinds : ndarray of uint8, shape (code points,)
        Class of a normalized character: 0 separates words, 1 is part of a word, 2 is a combining
        mark, 3 is a word by itself, and 4 is removed.
    orders : ndarray of uint8, shape (code points,)
        Canonical combining class, by which the marks of a character are sorted.
    """

    quick: np.ndarray
    becomes: np.ndarray
    several: np.ndarray
    kinds: np.ndarray
    orders: np.ndarray


@functools.cache
def characters() -> Characters:
    """Return the normalization tables, built once per process."""
    becomes = np.arange(0x110000, dtype=np.int32)
    kinds, orders = np.full(len(becomes), _GAP, np.uint8), np.zeros(len(becomes), np.uint8)
    several: list[int] = []
    for first, last in _ASSIGNED:
        chars = [*map(chr, range(first, last))]
        kinds[first:last] = [_KINDS.get(unicodedata.category(char)[0], _GAP) for char in chars]
        kinds[first:last][[unicodedata.category(char) == "Cf" for char in chars]] = _NOTHING
        orders[first:last] = [*map(unicodedata.combining, chars)]
        for code, char in enumerate(chars, first):
            if char.isascii() and not char.isupper():
                continue
            folded = [ord(folded_char) for folded_char in _fold(char)]
            if len(folded) == 1:
                becomes[code] = folded[0]
            else:
                becomes[code] = -1 - len(several)
                several += [len(folded), *folded]
    for first, last in WITHOUT_SPACES:
        block = kinds[first : last + 1]
        block[block == _WORD] = _ALONE
    for first, last in _SELECTORS:
        kinds[first:last] = _NOTHING
    quick = np.zeros(256, np.uint8)
    quick[:128] = np.where(kinds[becomes[:128]] == _WORD, becomes[:128], SPACE)
    tables = Characters(quick, becomes, np.array(several, np.int32), kinds, orders)
    for array in tables:
        array.setflags(write=False)  # read-only like mapped arrays, so that numba compiles once
    return tables


def _fold(char: str) -> str:
    for _ in range(2):  # some characters change again in the second pass
        char = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", char).casefold())
    return "".join(str(unicodedata.decimal(part, part)) for part in char)


def buffers(texts: pa.LargeStringArray) -> tuple[np.ndarray, np.ndarray]:
    """Return the UTF-8 bytes of all texts, uint8, and the byte offset of each, int64 (texts + 1,).

    The last offset is the end of the last text. A null is an empty text. For a slice, the first
    offset may be above 0.
    """
    texts = texts.fill_null("")
    offsets, data = (memoryview(buffer or b"").toreadonly() for buffer in texts.buffers()[1:])
    starts = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return np.frombuffer(data, np.uint8), starts if len(texts) else np.zeros(1, np.int64)


@compiled
def new_words(size):
    """Allocate five buffers for the words that `read_words` finds in `size` bytes of text."""
    words = size // 2 + 2 * _ROOM
    text = np.empty(size + size // 4 + 2 * _ROOM, np.uint8)
    starts, sums = np.empty(words, np.int64), np.empty(words, np.uint64)
    return text, starts, sums, np.empty(words, np.int64), np.empty(words, np.int64)


@compiled
def read_words(data, table, room):
    """Split a text into normalized words; return their number and five buffers.

    `data` is the text as UTF-8 bytes. The buffers are the words' bytes, each word followed by a
    space; the offset of each word in them, and of the end; prefix sums of the words' hashes, for
    `ngram_key`; and the byte offsets in the text at which each word begins and ends. Entries after
    the last word have no meaning. The buffers are `room`, from `new_words`, or larger ones if it is
    too small.
    """
    size = len(data)
    while True:
        if len(room[0]) < size + _ROOM:
            room = new_words(size)
        count = _fill_words(data, table, *room)
        if count >= 0:
            break
        size = 2 * len(room[0])
    sums, total = room[2], np.uint64(0)
    for index in range(count):
        word = murmur64(sums[index])
        sums[index] = total
        total = total * _START + word
    sums[count] = total
    return count, room


@compiled
def ngram_key(sums, first, width, power):
    """Return the hash (uint64) of the `width` words from index `first` on, in constant time.

    It is a polynomial hash of the words' hashes modulo 2**64, plus `width`, mixed by `murmur64`.
    `sums` are from `read_words`, and `power` is ``power_of(width)``.
    """
    stop = np.uint64(first) + np.uint64(width)  # unsigned indices need no sign test
    return murmur64(sums[stop] - sums[np.uint64(first)] * power + np.uint64(width))


@compiled
def power_of(width):
    """Return ``_START ** width`` modulo 2**64, the factor of `ngram_key`."""
    power = np.uint64(1)
    for _ in range(width):
        power *= _START
    return power


@compiled
def _fill_words(data, table, text, starts, hashes, begins, ends):
    """Write a text's words to buffers; return their number, or -1 if a buffer is too small."""
    marks, orders = np.empty(_MOST_MARKS, np.int32), np.empty(_MOST_MARKS, np.uint8)
    waiting, count, size, at = 0, 0, 0, 0
    state, word = _GAP, _START
    starts[0] = 0
    while at < len(data):
        if waiting == 0 and state != _ALONE:
            at, count, size, word, state = _read_ascii(
                data, table.quick, text, starts, hashes, begins, ends, at, count, size, word, state
            )
            if at == len(data):
                break
        if size + len(data) - at + _ROOM > len(text) or count + _ROOM > len(starts):
            return -1
        begin = at
        code_point, at = character(data, at)
        code, pieces, sequence = np.int64(table.becomes[code_point]), 1, np.int64(-1)
        if code < 0:
            sequence = -code
            pieces = table.several[sequence - 1]
        for piece in range(pieces):
            if sequence >= 0:
                code = np.int64(table.several[sequence + piece])
            kind, order = table.kinds[code], table.orders[code]
            if kind == _NOTHING:
                continue
            if order > 0 and kind == _MARK and waiting < _MOST_MARKS:
                if state == _GAP:
                    begins[count] = begin
                    state = _WORD
                slot = waiting
                while slot > 0 and orders[slot - 1] > order:
                    marks[slot], orders[slot] = marks[slot - 1], orders[slot - 1]
                    slot -= 1
                marks[slot], orders[slot] = code, order
                waiting += 1
                ends[count] = at
                continue
            for slot in range(waiting):
                word, size = _write(marks[slot], word, text, size)
            waiting = 0
            is_new = kind == _ALONE or (kind == _WORD and state == _ALONE)
            if state != _GAP and (kind == _GAP or is_new):
                word, size, count = _end_word(word, text, size, starts, hashes, count)
                state = _GAP
            if kind != _GAP:
                if state == _GAP:
                    begins[count] = begin
                    state = _WORD if kind == _MARK else kind
                word, size = _write(code, word, text, size)
                ends[count] = at
    for slot in range(waiting):
        word, size = _write(marks[slot], word, text, size)
    if state != _GAP:
        word, size, count = _end_word(word, text, size, starts, hashes, count)
    return count


@compiled
def _read_ascii(data, quick, text, starts, hashes, begins, ends, at, count, size, word, state):
    """Read words from byte `at` of a text up to a non-ASCII character, its end, or full buffers.

    `word` is the hash of the unfinished word. Returns new values of `at` to `state`.
    """
    one, stop, most = np.uint64(1), np.uint64(len(data)), np.uint64(len(starts) - _ROOM)
    at, count, size = np.uint64(at), np.uint64(count), np.uint64(size)  # no sign tests
    in_word = np.uint64(state == _WORD)
    while at < stop and count < most:
        code = quick[data[at]]
        if code == 0:
            break
        is_word = np.uint64(code != SPACE)
        # The entries after the last word are overwritten until the word ends. A branch would be
        # slower, because a processor could not predict it.
        text[size] = code
        size += is_word | in_word
        hashes[count] = word
        begins[count + (in_word | is_word ^ one)] = at
        at += one
        ends[count + (is_word ^ one)] = at
        count += in_word & (is_word ^ one)
        starts[count + is_word] = size
        longer = add(word, np.uint64(code))
        word = longer if is_word else _START
        in_word = is_word
    return np.int64(at), np.int64(count), np.int64(size), word, _WORD if in_word else _GAP


@compiled
def _end_word(word, text, size, starts, hashes, count):
    text[size] = SPACE
    starts[count + 1] = size + 1
    hashes[count] = word
    return _START, size + 1, count + 1


@compiled
def _write(code, word, text, size):
    """Write a code point as UTF-8 to `text`; return the word's new hash, and the next offset."""
    if code < 0x80:
        text[size] = code
        return add(word, np.uint64(code)), size + 1
    more = 1 + (code >= 0x800) + (code >= 0x10000)
    text[size] = (0x7F80 >> more) & 0xFF | code >> 6 * more
    for index in range(1, more + 1):
        text[size + index] = 0x80 | code >> 6 * (more - index) & 0x3F
    for index in range(size, size + more + 1):
        word = add(word, np.uint64(text[index]))
    return word, size + more + 1
