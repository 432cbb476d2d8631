"""Index of test items: their distinct word n-grams, and the items that contain each.

The index is a folder of arrays that are mapped into memory, so that all workers of a machine share
them.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.corpus.decontamination.items import ITEM
from gpuclassify.corpus.decontamination.words import (
    SPACE,
    UNICODE,
    buffers,
    characters,
    new_words,
    ngram_key,
    power_of,
    read_words,
)
from gpuclassify.corpus.dedup.compiling import compiled
from gpuclassify.jobs.ledger.records import sealed, unsealed
from gpuclassify.jobs.stores.local import LocalStore
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.jobs.stores.store import Store
from gpuclassify.settings.paths import is_only_mine, private_folder
from gpuclassify.settings.signatures import short

FORMAT = 2
ABOUT = "index.json"
MOST = 2**32 - 1  # maximum number of words, and of bytes of words
MOST_WORDS = 255  # maximum words of an n-gram
ALL_BITS = 2**64 - 1
_EMPTY = np.uint32(MOST)
_BLOCK = 1 << 16  # texts searched at a time, and initial capacity for hits


class Ngrams(NamedTuple):
    """Arrays of an index of n-grams: their words, hash table, Bloom filters, and items.

    An item of fewer than n words has one n-gram, of all its words.

    Attributes
    ----------
    text : ndarray of uint8
        Words of all items, each followed by a space.
    starts : ndarray of uint32, shape (words + 1,)
        Byte offset of each word in ``text``, and of the end.
    keys : ndarray of uint64, shape (n-grams,)
        Hash of each distinct n-gram.
    places, widths : ndarray of uint32 and uint8, shape (n-grams,)
        Index of the first word of each n-gram, and its number of words.
    slots : ndarray of uint32
        Hash table of n-gram indices by key; 2**32 - 1 in empty slots.
    bits : ndarray of uint64
        Bloom filter of the keys of n-grams of n words.
    short_bits : ndarray of uint64
        Bloom filter of items shorter than n words. A key is the hash of the item's first w words,
        where w is the number of words of the shortest item.
    owner_starts, owners : ndarray of uint32
        N-gram i occurs in the items ``owners[owner_starts[i]:owner_starts[i + 1]]``.
    counts : ndarray of uint32, shape (items,)
        Number of distinct n-grams of each item, without boilerplate.
    settings : ndarray of uint64
        Bit mask of the keys, n, and the widths below n, ascending.
    """

    text: np.ndarray
    starts: np.ndarray
    keys: np.ndarray
    places: np.ndarray
    widths: np.ndarray
    slots: np.ndarray
    bits: np.ndarray
    short_bits: np.ndarray
    owner_starts: np.ndarray
    owners: np.ndarray
    counts: np.ndarray
    settings: np.ndarray


# Array types by file of an index.
_DTYPES = {
    **dict.fromkeys(("text.npy", "widths.npy"), np.uint8),
    **dict.fromkeys(("starts.npy", "places.npy", "slots.npy"), np.uint32),
    **dict.fromkeys(("owner_starts.npy", "owners.npy", "counts.npy"), np.uint32),
    **dict.fromkeys(("keys.npy", "bits.npy", "short_bits.npy", "settings.npy"), np.uint64),
    **{f"item_{name}.npy": np.uint8 for name in ITEM.names},
    **{f"item_{name}_offsets.npy": np.int64 for name in ITEM.names},
}


class Hits(NamedTuple):
    """Occurrences of indexed n-grams in documents, in the order of the documents.

    Attributes
    ----------
    documents : ndarray of int64, shape (hits,)
        Row of the document.
    ngrams : ndarray of int64, shape (hits,)
        Index of the n-gram in `Ngrams`.
    begins, ends : ndarray of int64, shape (hits,)
        Byte offsets in the document's UTF-8 text at which the n-gram begins and ends (exclusive).
    """

    documents: np.ndarray
    ngrams: np.ndarray
    begins: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True, eq=False)
class ItemIndex:
    """Index that finds the word n-grams of test items in documents.

    Attributes
    ----------
    ngrams : Ngrams
    items : pyarrow.Table
        Columns ``source``, ``id`` and ``text`` of the distinct items, in the order of the input.
    about : dict
        Settings of the index, and counts of items and of ignored n-grams, as JSON values.
    """

    ngrams: Ngrams
    items: pa.Table
    about: Mapping[str, Any]

    @classmethod
    def build(
        cls,
        items: pa.Table,
        *,
        ngram: int = 13,
        min_words: int = 8,
        max_items: int = 10,
        key_bits: int = ALL_BITS,
    ) -> ItemIndex:
        """Make the index of the distinct items in a table with ``source``, ``id`` and ``text``.

        Items with equal source and normalized words count once. Each n-gram has `ngram` words; a
        shorter item is one n-gram of all its words. Items with a null text or of fewer than
        `min_words` words are left out. N-grams in more than `max_items` items are ignored; for this
        count, items of several sources with equal words are one item. `key_bits` is a bit mask of
        the hash keys; tests pass fewer bits to provoke collisions. Raises ValueError if no item has
        `min_words` words.
        """
        about: dict[str, Any] = {"ngram": ngram, "min_words": min_words, "max_items": max_items}
        read = items.filter(pc.is_valid(items["text"])).combine_chunks()
        words, counts = item_words(read["text"].cast(pa.large_string()).combine_chunks())
        longest = int(counts.max(initial=0))
        if longest < min_words:
            raise ValueError(
                f"none of the {len(items):,} test items has {min_words} words, and the longest has "
                f"{longest}: check the columns of the items, or pass a smaller min_words="
            )
        is_long = pa.array(counts >= min_words)
        read, short, words = (
            read.filter(is_long),
            read.filter(pc.invert(is_long)),
            words.filter(is_long),
        )
        coded, sources = words.dictionary_encode(), read["source"].dictionary_encode()
        codes = coded.indices.to_numpy().astype(np.int64) * 2**32
        codes += sources.combine_chunks().indices.to_numpy()
        first = np.sort(np.unique(codes, return_index=True)[1])
        unique, words = read.take(pa.array(first)), words.take(pa.array(first))
        index = cls(_collect(*buffers(words), ngram, key_bits), unique, {})
        per_source: dict[str, dict[str, int]] = {}
        for name, counted in (("items", items), ("distinct", unique), ("too_short", short)):
            for pair in pc.value_counts(counted["source"]).to_pylist():
                known = {"items": 0, "distinct": 0, "too_short": 0}
                per_source.setdefault(pair["values"], known)[name] = pair["counts"]
        about |= {"format": FORMAT, "unicode": UNICODE, "sources": per_source, "boilerplate": {}}
        often = index.document_counts(coded.dictionary) > max_items
        return cls(index.ngrams, unique, about).without(often, f"in over {max_items} items")

    def without(self, is_boilerplate: np.ndarray, reason: str) -> ItemIndex:
        """Return an index without the n-grams in the mask `is_boilerplate`, bool (ngrams,).

        All items stay, even without n-grams. The report shows `reason`, such as "in ignore=".
        """
        ngrams, keep = self.ngrams, ~is_boilerplate
        kept = np.flatnonzero(keep)
        ends = ngrams.owner_starts.astype(np.int64)
        sizes = ends[1:] - ends[:-1]
        owners = ngrams.owners[np.repeat(keep, sizes)]
        about = dict(self.about)
        if len(gone := np.flatnonzero(is_boilerplate)):
            examples = [self.ngram_text(number) for number in gone[:20]]
            entry = {"ngrams": len(gone), "such_as": examples}
            about["boilerplate"] = {**about["boilerplate"], reason: entry}
        new = ngrams._replace(
            keys=ngrams.keys[kept],
            places=ngrams.places[kept],
            widths=ngrams.widths[kept],
            owner_starts=_starts(sizes[kept]),
            owners=owners,
            counts=np.bincount(owners, minlength=len(self.items)).astype(np.uint32),
        )
        about["ngrams"] = len(kept)
        about["weightless_items"] = int((new.counts == 0).sum())
        return ItemIndex(_frozen(new._replace(**_table(new))), self.items, about)

    def ngram_text(self, number: int) -> str:
        """Return the normalized words of the n-gram with this index in `ngrams`, with spaces."""
        starts, first = self.ngrams.starts, int(self.ngrams.places[number])
        end = int(starts[first + int(self.ngrams.widths[number])])
        return bytes(self.ngrams.text[int(starts[first]) : end]).decode().rstrip()

    def hits(self, texts: pa.LargeStringArray) -> Hits:
        """Find all occurrences of the index's n-grams in texts, in the order of the texts."""
        data, starts = buffers(texts)
        return Hits(*_find_hits(data, starts, characters(), self.ngrams))

    def document_counts(self, texts: pa.LargeStringArray) -> np.ndarray:
        """Return the number of texts that each n-gram occurs in, int64 (ngrams,)."""
        ngrams = len(self.ngrams.keys)
        counts = np.zeros(ngrams, np.int64)
        for start in range(0, len(texts) if ngrams else 0, _BLOCK):
            hits = self.hits(texts[start : start + _BLOCK])
            pairs = distinct(hits.documents * ngrams + hits.ngrams)
            counts += np.bincount(pairs % ngrams, minlength=ngrams)
        return counts

    @property
    def nbytes(self) -> int:
        """Number of bytes of the arrays in `ngrams`; texts in `items` are not counted."""
        return sum(array.nbytes for array in self.ngrams)

    def save(self, folder: Store) -> str:
        """Write the index into a folder, as ``.npy`` files and ``index.json``; return a digest."""
        folder.make()
        digests = {}
        for name, array in self._arrays().items():
            content = _header(array.dtype, len(array)) + array.tobytes()
            folder.replace(name, content)
            digests[name] = hashlib.sha256(content).hexdigest()
        digest = _digest_of(digests)
        about = {**self.about, "files": digests, "digest": digest}
        folder.replace(ABOUT, sealed(about, indent=1))
        return digest

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = self.ngrams._asdict()
        for name in ITEM.names:
            data, offsets = buffers(self.items[name].combine_chunks())
            arrays[f"item_{name}"] = data[offsets[0] : offsets[-1]]
            arrays[f"item_{name}_offsets"] = offsets - offsets[0]
        return {f"{name}.npy": array for name, array in arrays.items()}


def open_index(store: Store) -> ItemIndex:
    """Check and open the index in a folder, mapped into memory that processes of a machine share.

    An index on another machine, or that other users can write, is copied once into the user's
    folder for temporary files. Raises FileNotFoundError without ``index.json``, and ValueError if
    the index is damaged or of another version.
    """
    return _opened(store, store.read(ABOUT), store.stamp())


def about_index(folder: Store) -> dict[str, Any]:
    """Read ``index.json`` of a saved index: its settings, counts, and the digests of its files.

    Raises FileNotFoundError without it, and ValueError if it is damaged or of another version.
    """
    return _parse_about(folder, folder.read(ABOUT))


def is_sound(folder: Store) -> bool:
    """Tell whether a folder has an index of this version, with files that match their digests."""
    try:
        digests = about_index(folder)["files"]
        return all(folder.digest(name) == digest for name, digest in digests.items())
    except (FileNotFoundError, ValueError):
        return False


def _parse_about(folder: Store, content: bytes) -> dict[str, Any]:
    about = unsealed(content)
    if about is None:
        raise _unsound(folder, f"{ABOUT} is not as it was written")
    version = about.get("format"), about.get("unicode")
    if version != (FORMAT, UNICODE):
        raise _unsound(
            folder,
            f"it has format {short(version[0])} for Unicode {short(version[1])}, and this Python "
            f"reads {FORMAT} and {UNICODE}",
        )
    files = about.get("files")
    if (
        not isinstance(files, dict)
        or files.keys() != _DTYPES.keys()
        or not all(isinstance(digest, str) for digest in files.values())
        or about.get("digest") != _digest_of(files)
    ):
        raise _unsound(folder, f"{ABOUT} names other files than an index has")
    if not isinstance(about.get("boilerplate"), dict):
        raise _unsound(folder, f"{ABOUT} has no counts of boilerplate")
    return about


def _unsound(folder: Store, problem: str) -> ValueError:
    return ValueError(
        f"the index of test items in {folder} cannot be used: {problem}. Build it again"
    )


def _digest_of(digests: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


@functools.lru_cache(maxsize=4)
def _opened(store: Store, content: bytes, stamp: str) -> ItemIndex:
    """Open and check an index; `stamp` changes when a local folder is modified."""
    about = _parse_about(store, content)
    folder = _local_folder(store, about)
    files = about["files"].items()
    arrays = {name: _read_array(folder, name, digest) for name, digest in files}
    ngrams = _frozen(Ngrams(*(arrays[f"{name}.npy"] for name in Ngrams._fields)))
    try:
        columns = [
            _checked_texts(arrays[f"item_{name}.npy"], arrays[f"item_{name}_offsets.npy"])
            for name in ITEM.names
        ]
        index = ItemIndex(ngrams, pa.table(columns, schema=ITEM), about)
        wrong = next((name for name, agrees in _checks(index) if not agrees), None)
    except pa.ArrowInvalid as err:
        raise _unsound(folder, f"its texts are damaged ({err})") from err
    if wrong is not None:
        raise _unsound(folder, f"{wrong} contradicts its other files")
    return index


def _local_folder(store: Store, about: Mapping[str, Any]) -> Store:
    """Return `store` if it is local and only this user can write it, else a private local copy."""
    if isinstance(store, LocalStore):
        paths = [store.root, *map(store.path, about["files"])]
        if all(map(is_only_mine, paths)):
            return store
    folder = open_store(private_folder() / "indexes" / _digest_of(about["files"]))
    folder.make()
    for name, digest in about["files"].items():
        if not (folder.has(name) and folder.digest(name) == digest):
            try:
                content = store.read(name)
            except FileNotFoundError as err:
                raise _unsound(store, f"it lacks {name}") from err
            if hashlib.sha256(content).hexdigest() != digest:
                raise _unsound(store, f"{name} is not as it was written")
            folder.replace(name, content)
    return folder


def _read_array(folder: Store, name: str, digest: str) -> np.ndarray:
    """Return the array in the file `name`, mapped into memory, after checking digest and dtype."""
    content = pa.memory_map(folder.path(name)).read_buffer()
    if hashlib.sha256(content).hexdigest() != digest:
        raise _unsound(folder, f"{name} is not as it was written")
    dtype = np.dtype(_DTYPES[name])
    head = len(_header(dtype, 0))  # NumPy's headers of short shapes are equally long
    count, rest = divmod(content.size - head, dtype.itemsize)
    if count < 0 or rest or content[:head] != _header(dtype, count):
        raise _unsound(folder, f"{name} is not an array of {dtype}")
    return np.frombuffer(content.slice(head), dtype)


def _header(dtype: np.dtype, count: int) -> bytes:
    header = io.BytesIO()
    form = {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(header, form)
    return header.getvalue()


def _checked_texts(data: np.ndarray, offsets: np.ndarray) -> pa.LargeStringArray:
    parts = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    texts = pa.Array.from_buffers(pa.large_string(), max(0, len(offsets) - 1), parts)
    texts.validate(full=True)
    return texts


def _checks(index: ItemIndex) -> Iterator[tuple[str, Any]]:
    """Yield the names of arrays of an index, each with whether it agrees with the arrays before.

    Raises pyarrow.ArrowInvalid if the words are no valid UTF-8. Needed because compiled code checks
    no bounds, and searches the hash table up to an empty slot.
    """
    ngrams, count, items = index.ngrams, len(index.ngrams.keys), len(index.items)
    widths = np.append(ngrams.settings[2:], ngrams.settings[1:2])
    yield (
        "settings",
        (
            len(ngrams.settings) > 1
            and int(widths[-1]) == index.about.get("ngram")
            and 0 < widths[0] <= widths[-1] <= MOST_WORDS
            and np.all(widths[1:] > widths[:-1])
        ),
    )
    starts = ngrams.starts.astype(np.int64)
    yield (
        "starts",
        (
            len(starts) > 0
            and starts[0] == 0
            and starts[-1] == len(ngrams.text)
            and np.all(starts[1:] > starts[:-1])
            and np.all(ngrams.text[starts[1:] - 1] == SPACE)
        ),
    )
    _checked_texts(ngrams.text, starts)
    fits = len(ngrams.widths) == count < MOST and np.isin(np.unique(ngrams.widths), widths).all()
    yield "widths", fits
    yield (
        "places",
        (
            len(ngrams.places) == count
            and np.all(ngrams.places.astype(np.int64) + ngrams.widths < len(starts))
        ),
    )
    ends = ngrams.owner_starts.astype(np.int64)
    yield (
        "owner_starts",
        (
            len(ends) == count + 1
            and ends[0] == 0
            and ends[-1] == len(ngrams.owners)
            and np.all(ends[1:] >= ends[:-1])
        ),
    )
    yield "owners", np.all(ngrams.owners < items)
    yield "counts", np.array_equal(ngrams.counts, np.bincount(ngrams.owners, minlength=items))
    for name, table in _table(ngrams).items():
        yield name, np.array_equal(getattr(ngrams, name), table)


def item_words(texts: pa.LargeStringArray) -> tuple[pa.LargeStringArray, np.ndarray]:
    """Return each text's normalized words, each followed by a space, and its number of words.

    The words of a text are one string; the numbers are int64 (texts,).
    """
    data, starts = buffers(texts)
    content, offsets, counts = _all_words(data, starts, characters())
    buffer = [None, pa.py_buffer(offsets), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.large_string(), len(texts), buffer), counts


def distinct(values: np.ndarray) -> np.ndarray:
    """Return the sorted distinct values, ten times as fast as `numpy.unique`, which hashes."""
    values = np.sort(values)
    return values[np.append(True, values[1:] != values[:-1])[: len(values)]]


def _collect(data: np.ndarray, offsets: np.ndarray, n: int, key_bits: int) -> Ngrams:
    """Return the arrays of an index for test items, given as normalized words.

    `data` has the words of all items as UTF-8 bytes, each followed by a space, and `offsets` the
    byte offset of each item, and of the end. Raises ValueError if `data` takes 4 GB.
    """
    if len(data) >= MOST:
        raise ValueError(f"the items have {len(data):,} bytes, and an index holds 4 GB: split them")
    count, room = read_words(data, characters(), new_words(len(data)))
    starts, sums = room[1][: count + 1], room[2][: count + 1]
    bounds = np.searchsorted(starts, offsets)  # index of the first word of each item
    lengths = np.diff(bounds)
    positions = np.where(lengths >= n, lengths - n + 1, 1)
    owners = np.repeat(np.arange(len(lengths)), positions)
    slots = np.full(_slot_count(len(owners)), _EMPTY)
    starts = starts.astype(np.uint32)
    numbers, keys, first_words, widths = _insert(
        data, starts, sums, bounds, n, np.uint64(key_bits), slots, len(owners)
    )
    pairs = distinct(numbers * len(lengths) + owners)
    ngrams, owners = pairs // max(1, len(lengths)), pairs % max(1, len(lengths))
    counts = np.bincount(owners, minlength=len(lengths)).astype(np.uint32)
    owner_starts = _starts(np.bincount(ngrams, minlength=len(keys)))
    settings = np.array([key_bits, n, *np.unique(widths[widths < n])], np.uint64)
    parts = (owner_starts, owners.astype(np.uint32), counts, settings)
    none = np.zeros(0, np.uint64)  # hash table and filters, which are made from the other arrays
    found = _frozen(Ngrams(data, starts, keys, first_words, widths, none, none, none, *parts))
    return _frozen(found._replace(**_table(found)))


def _starts(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.uint32)


def _slot_count(entries: int) -> int:
    return 1 << max(4, (3 * entries // 2).bit_length())  # a power of two, not over 2/3 full


def _frozen(ngrams: Ngrams) -> Ngrams:
    # Read-only, like arrays mapped from files, so that numba compiles for one type only.
    frozen = [np.ascontiguousarray(array).view() for array in ngrams]
    for array in frozen:
        array.setflags(write=False)
    return Ngrams(*frozen)


def _table(ngrams: Ngrams) -> dict[str, np.ndarray]:
    """Compute an index's hash table and Bloom filters, by field name, from its other arrays."""
    keys, is_short = ngrams.keys, ngrams.widths < int(ngrams.settings[1])
    slots = np.full(_slot_count(len(keys)), _EMPTY)
    _fill_slots(keys, slots)
    least = int(ngrams.settings[2]) if len(ngrams.settings) > 2 else 0
    first_words, key_bits = ngrams.places[is_short], ngrams.settings[0]
    prefixes = _keys_at(first_words, least, ngrams.text, ngrams.starts, key_bits, characters())
    filters = []
    for filter_keys in (keys[~is_short], prefixes):
        bits = np.zeros(_slot_count(len(filter_keys)) // 8, np.uint64)  # 12 bits per key or more
        _fill_bits(filter_keys, bits)
        filters.append(bits)
    return {"slots": slots, "bits": filters[0], "short_bits": filters[1]}


@compiled
def _all_words(data, starts, table):
    """Normalize the words of texts; return their bytes, text offsets in them, and word counts."""
    content = np.empty(starts[-1] - starts[0] + 256, np.uint8)
    offsets, counts = np.zeros(len(starts), np.int64), np.zeros(len(starts) - 1, np.int64)
    room = new_words(0)
    for text in range(len(counts)):
        count, room = read_words(data[starts[text] : starts[text + 1]], table, room)
        size, begin = room[1][count], offsets[text]
        if begin + size > len(content):
            wider = np.empty(2 * (begin + size), np.uint8)
            wider[:begin] = content[:begin]
            content = wider
        content[begin : begin + size] = room[0][:size]
        offsets[text + 1], counts[text] = begin + size, count
    return content[: offsets[-1]].copy(), offsets, counts


@compiled
def _insert(text, starts, sums, bounds, n, key_bits, slots, positions):
    """Assign numbers to distinct n-grams by first occurrence; fill the hash table `slots`.

    `bounds` has each item's first word, and the end. Returns the numbers of all `positions`
    n-grams, repeats too, and key, first word and width of each distinct n-gram.
    """
    numbers, keys = np.empty(positions, np.int64), np.empty(positions, np.uint64)
    first_words, widths = np.empty(positions, np.uint32), np.empty(positions, np.uint8)
    last, count, at = np.int64(len(slots) - 1), 0, 0
    for item in range(len(bounds) - 1):
        first, stop = bounds[item], bounds[item + 1]
        width = min(n, stop - first)
        power = power_of(width)
        for word in range(first, max(first, stop - n) + 1):
            key = ngram_key(sums, word, width, power) & key_bits
            slot = np.int64(key) & last
            while slots[slot] != _EMPTY:
                known = slots[slot]
                first_word = np.int64(first_words[known])
                if (
                    keys[known] == key
                    and widths[known] == width
                    and _is_equal(text, starts, first_word, text, starts, word, width)
                ):
                    break
                slot = (slot + 1) & last
            if slots[slot] == _EMPTY:
                slots[slot] = count
                keys[count], first_words[count], widths[count] = key, word, width
                count += 1
            numbers[at] = slots[slot]
            at += 1
    return numbers, keys[:count].copy(), first_words[:count].copy(), widths[:count].copy()


@compiled
def _is_equal(text, starts, word, other_text, other_starts, other_word, width):
    """Return whether the `width` words from `word` and from `other_word` on have equal bytes."""
    begin, end = np.int64(starts[word]), np.int64(starts[word + width])
    shift = np.int64(other_starts[other_word]) - begin
    if np.int64(other_starts[other_word + width]) - shift != end:
        return False
    for byte in range(begin, end):  # noqa: SIM110 - numba compiles no generator here
        if text[byte] != other_text[byte + shift]:
            return False
    return True


@compiled
def _fill_slots(keys, slots):
    last = np.int64(len(slots) - 1)
    for number in range(len(keys)):
        slot = np.int64(keys[number]) & last
        while slots[slot] != _EMPTY:
            slot = (slot + 1) & last
        slots[slot] = number


@compiled
def _fill_bits(keys, bits):
    for key in keys:
        bits[_block(key, bits)] |= _mask(key)


@compiled
def _keys_at(first_words, width, text, starts, key_bits, table):
    """Return the hash keys, uint64, of the n-grams of `width` words that begin at `first_words`."""
    keys, room, power = np.empty(len(first_words), np.uint64), new_words(0), power_of(width)
    for number in range(len(first_words)):
        word = np.int64(first_words[number])
        _, room = read_words(text[starts[word] : starts[word + width]], table, room)
        keys[number] = ngram_key(room[2], 0, width, power) & key_bits
    return keys


@compiled
def _block(key, bits):
    return (key >> np.uint64(32)) & np.uint64(len(bits) - 1)


@compiled
def _mask(key):
    """Return the bits, at most three, that a key sets in its 64-bit block of a Bloom filter."""
    one, six = np.uint64(1), np.uint64(63)
    key >>= np.uint64(8)
    bits = one << (key & six) | one << (key >> np.uint64(6) & six)
    return bits | one << (key >> np.uint64(12) & six)


@compiled
def _find_hits(data, starts, table, ngrams):
    """Find n-grams in texts by hash key, then compare word by word; return the arrays of `Hits`."""
    hits, count, key_bits = np.empty((4, _BLOCK), np.int64), 0, ngrams.settings[0]
    room, proposed = new_words(0), np.empty(0, np.int64)
    for text in range(len(starts) - 1):
        words, room = read_words(data[starts[text] : starts[text + 1]], table, room)
        if len(proposed) < words + 1:
            proposed = np.empty(2 * words + 1, np.int64)
        n = np.int64(ngrams.settings[1])
        proposals = _propose(room[2], words, n, key_bits, ngrams.bits, proposed)
        if proposals:
            count, hits = _decide(proposed[:proposals], n, words, room, ngrams, text, hits, count)
        if len(ngrams.settings) > 2:
            least, bits = np.int64(ngrams.settings[2]), ngrams.short_bits
            proposals = _propose(room[2], words, least, key_bits, bits, proposed)
            for number in range(2, len(ngrams.settings) if proposals else 0):
                width, some = np.int64(ngrams.settings[number]), proposed[:proposals]
                count, hits = _decide(some, width, words, room, ngrams, text, hits, count)
    return hits[0, :count], hits[1, :count], hits[2, :count], hits[3, :count]


@compiled
def _propose(sums, words, width, key_bits, bits, proposed):
    """Write the indices of the words whose n-gram passes the Bloom filter `bits` to `proposed`.

    Returns their number.
    """
    power, count, keys = power_of(width), np.uint64(0), proposed.view(np.uint64)
    positions = np.uint64(max(0, words - width + 1))
    # Keys, filter and hash table are separate loops, so that many memory accesses are in flight.
    for word in range(positions):
        keys[word] = ngram_key(sums, word, width, power) & key_bits
    for word in range(positions):
        key = keys[word]
        mask = _mask(key)
        proposed[count] = word  # `count` never exceeds `word`
        count += np.uint64(bits[_block(key, bits)] & mask == mask)
    return np.int64(count)


@compiled
def _decide(proposed, width, words, room, ngrams, text, hits, count):
    """Look up some n-grams of a text in the index `ngrams`; append those found to `hits`.

    They begin at the words `proposed`. Returns the new count, and `hits`, or a larger copy if it
    was full.
    """
    power, last = power_of(width), np.int64(len(ngrams.slots) - 1)
    for word in proposed:
        if word + width > words:
            continue
        key = ngram_key(room[2], word, width, power) & ngrams.settings[0]
        slot = np.int64(key) & last
        while ngrams.slots[slot] != _EMPTY:
            known = ngrams.slots[slot]
            first = np.int64(ngrams.places[known])
            if (
                ngrams.keys[known] == key
                and ngrams.widths[known] == width
                and _is_equal(ngrams.text, ngrams.starts, first, room[0], room[1], word, width)
            ):
                if count == hits.shape[1]:
                    wider = np.empty((4, 2 * count), np.int64)
                    wider[:, :count] = hits
                    hits = wider
                hits[0, count], hits[1, count] = text, known
                hits[2, count], hits[3, count] = room[3][word], room[4][word + width - 1]
                count += 1
                break
            slot = (slot + 1) & last
    return count, hits
