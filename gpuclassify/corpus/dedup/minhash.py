"""MinHash signatures of texts, and the band keys that documents are compared by.

Signatures equal those of libcudf's ``nvtext::minhash`` for 32-bit hashes, bit for bit
(``cpp/src/text/minhash.cu``), so that a corpus may be hashed partly on GPUs and partly on hosts. A
text's windows are its n-grams of characters; a shorter text is one window. Hash function i maps
each window's MurmurHash3_x86_32 h (1 if it is 0) to ``(h * a[i] + b[i]) mod 2**32``, and number i
of the signature is the minimum over all windows. libcudf's documentation also reduces the sum
modulo 2**61 - 1, but its kernel multiplies in 32 bits, so that there is nothing to reduce.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.corpus.dedup.compiling import compiled
from gpuclassify.frames import Frame, backend_of
from gpuclassify.frames.hashing import mix64

BLOCK = 512  # windows hashed at a time; their arrays fit in 32 KiB of L1
SLICE = 1024  # texts hashed at a time; their signatures take about 1 MB

_mix64 = compiled(mix64)


def hash_functions(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw the factors a and the terms b of `count` MinHash functions (a x + b).

    Both are uint32 (count,). As in NeMo Curator, each a is drawn before its b, from
    ``RandomState(seed)``, and callers also use ``a[0]`` as the seed of the windows' hash.
    """
    draw = np.random.RandomState(seed)
    limit = (1 << 31) - 1
    pairs = [(draw.randint(1, limit), draw.randint(0, limit)) for _ in range(count)]
    a, b = np.array(pairs, dtype=np.uint32).reshape(-1, 2).T.copy()
    return a, b


def signatures(
    texts: pa.Array | pa.ChunkedArray, a: np.ndarray, b: np.ndarray, *, seed: int, width: int
) -> np.ndarray:
    """Compute MinHash signatures of texts, uint32 (texts, hashes), equal to libcudf's.

    `a` and `b`, uint32 (hashes,), are factors and terms of the hash functions. Windows of `width`
    characters are hashed with `seed`. Null and empty texts get zeros.
    """
    texts = _as_array(texts).fill_null("")  # a null's bytes are undefined
    # Read-only, so that one compilation serves all arrays.
    offsets, data = (memoryview(buffer or b"").toreadonly() for buffer in texts.buffers()[1:])
    starts = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    result = np.empty((len(texts), len(a)), np.uint32)
    _fill_signatures(np.frombuffer(data, np.uint8), starts, width, np.uint32(seed), a, b, result)
    return result


def fold(signatures: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """Combine the hashes of each band, with the band's number, into one key, int64 (texts, bands).

    `signatures` are (texts, bands * rows). Two different bands have the same key with a probability
    of 2**-64: among n documents, n**2 / 2**65 pairs per band.
    """
    if signatures.shape[1] != bands * rows:
        raise ValueError(
            f"signatures of {signatures.shape[1]} numbers do not make {bands} bands of {rows}: "
            f"pass bands * rows = {bands * rows} of them"
        )
    keys = np.empty((len(signatures), bands), np.uint64)
    _fold_bands(signatures, rows, keys)
    return keys.view(np.int64)


def band_keys(
    frame: Frame,
    column: str,
    *,
    ngram_chars: int,
    bands: int,
    rows: int,
    seed: int,
    device_numbers: int = 1 << 24,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the band keys of a column of texts; texts with an equal key in a band are candidates.

    A signature has ``bands * rows`` MinHash numbers of n-grams of `ngram_chars` characters; a key
    is a hash of the `rows` numbers of a band. Returns keys, int64 (texts, bands), and a mask of
    rows with a non-empty text, bool (texts,); the keys of other rows have no meaning. Texts of a
    cudf frame are hashed on the GPU, `device_numbers` numbers of signatures at a time.
    """
    a, b = hash_functions(bands * rows, seed)
    keys, has_text = np.empty((len(frame), bands), np.int64), np.empty(len(frame), bool)
    backend = backend_of(frame)
    if backend.__name__.endswith(".cudf"):
        for part in _slices(len(frame), max(1, device_numbers // len(a))):
            numbers, has_text[part] = backend.text_minhashes(
                frame.iloc[part], column, a, b, seed=a[0], width=ngram_chars
            )
            keys[part] = fold(numbers, bands, rows)
        return keys, has_text
    texts = _as_array(backend.text_array(frame, column))
    for part in _slices(len(frame), SLICE):
        numbers = signatures(texts[part], a, b, seed=a[0], width=ngram_chars)
        keys[part] = fold(numbers, bands, rows)
    has_text[:] = pc.fill_null(pc.greater(pc.binary_length(texts), 0), False)
    return keys, has_text


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, length, size))


def _as_array(texts: pa.Array | pa.ChunkedArray) -> pa.LargeStringArray:
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
    return texts.cast(pa.large_string())


@compiled
def _fill_signatures(data, offsets, width, seed, a, b, result):
    starts = np.empty(BLOCK + width, np.int64)
    words = np.empty(4 * len(starts), np.uint32)
    heads = np.empty(len(words), np.uint32)
    hashes = np.empty(BLOCK, np.uint32)
    for text in range(len(result)):
        rest = data[offsets[text] : offsets[text + 1]]
        result[text] = 0xFFFFFFFF if len(rest) else 0
        while len(rest):
            chars = _find_chars(rest, starts)
            windows = max(chars - width + 1, 1)
            block = rest[: starts[chars]]
            _scramble_words(block, words)
            head = _hash_heads(words, len(block), width, seed, heads)
            stops = starts[min(width, chars) :]
            _hash_windows(block, words, starts, stops, head, heads, hashes[:windows])
            _take_minima(hashes[:windows], a, b, result[text])
            rest = rest[starts[windows] if len(block) < len(rest) else len(rest) :]


@compiled
def _find_chars(data, starts):
    """Write the byte offsets of a text's characters, and of the end, to `starts`.

    Returns the number of characters that were read, at most ``len(starts) - 1``.
    """
    chars = 0
    for byte in range(len(data)):
        starts[chars] = byte
        chars += data[byte] & 0xC0 != 0x80  # no continuation byte
        if chars == len(starts):
            return chars - 1
    starts[chars] = len(data)
    return chars


@compiled
def _scramble_words(data, words):
    """Write MurmurHash3_x86_32's mix of the four bytes that begin at each byte to `words`.

    The mix depends on no other bytes, so that windows share it.
    """
    for byte in range(len(data) - 3):
        words[byte] = _scramble(
            data[byte] | data[byte + 1] << 8 | data[byte + 2] << 16 | data[byte + 3] << 24
        )


@compiled
def _hash_heads(words, size, width, seed, heads):
    """Write the hash state after the first bytes of the window at each byte to `heads`.

    Returns the number of these bytes: `width` (characters per window, so at least as many bytes) or
    `size` if less, rounded down to a multiple of four.
    """
    head = min(width, size) // 4 * 4
    heads = heads[: size - head + 1]
    heads[:] = seed
    for offset in range(0, head, 4):
        shifted = words[offset : offset + len(heads)]
        for byte in range(len(heads)):  # vectorized
            heads[byte] = _add_word(heads[byte], shifted[byte])
    return head


@compiled
def _hash_windows(data, words, starts, stops, head, heads, hashes):
    """Write the MurmurHash3_x86_32 of each window to `hashes`; 0 becomes 1.

    Window i is ``data[starts[i]:stops[i]]``. `heads` has the hash states after `head` bytes, from
    `_hash_heads`, and `words` is from `_scramble_words`.
    """
    for window in range(len(hashes)):
        start, stop = starts[window], stops[window]
        h = heads[start]
        for byte in range(start + head, stop - 3, 4):
            h = _add_word(h, words[byte])
        tail = 0
        for byte in range(stop - 1, stop - 1 - (stop - start) % 4, -1):
            tail = tail << 8 | data[byte]
        hashes[window] = h ^ _scramble(tail) ^ np.uint32(stop - start)
    for window in range(len(hashes)):  # a separate loop, which is vectorized
        h = hashes[window]
        h = np.uint32((h ^ h >> 16) * 0x85EBCA6B)
        h = np.uint32((h ^ h >> 13) * 0xC2B2AE35)
        hashes[window] = max(np.uint32(h ^ h >> 16), np.uint32(1))


@compiled
def _scramble(word):
    return np.uint32(_rotate(np.uint32(word * 0xCC9E2D51), 15) * 0x1B873593)


@compiled
def _rotate(word, bits):
    return np.uint32(word << bits | word >> (32 - bits))


@compiled
def _add_word(h, word):
    return np.uint32(_rotate(h ^ word, 13) * 5 + 0xE6546B64)


@compiled
def _take_minima(hashes, a, b, signature):
    for number in range(len(signature)):
        factor, term, least = a[number], b[number], signature[number]
        for window in range(len(hashes)):
            least = min(least, np.uint32(hashes[window] * factor + term))
        signature[number] = least


@compiled
def _fold_bands(signatures, rows, keys):
    for text in range(len(keys)):
        for band in range(keys.shape[1]):
            key = _mix64(np.uint64(band + 1))
            for row in range(rows):
                key = _mix64(key + np.uint64(signatures[text, band * rows + row]))
            keys[text, band] = key
