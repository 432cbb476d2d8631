"""Gaps: offsets where a text can be cut without changing its tokens, and a cache of words' tokens.

A gap is white space between two characters that do not interact across it, neither in normal forms
and graphemes nor in letter case. A cut before a gap does not change the result of a normalizer that
works by characters. It always falls between two words, and a model tokenizes words one at a time.
`ends_words_in_gaps` and `read_gaps` check a tokenizer's steps for this. If they fail, or a text
contains an added token that absorbs white space, the text is tokenized whole.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
import sys
import threading
import unicodedata
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa

from gpuclassify.models.tokenizer_backend import panics_as_errors

CACHE_BYTES = 64 << 20  # size of a tokenizer's cache
LONGEST_WORD = 48  # bytes of the longest cached word; longer words seldom recur
# Tokenizing a new word alone takes up to 1.5 times as long as within its text, so texts are cut
# only while new words have less than this share of all words' bytes. The share is larger for the
# first texts, because most of their words recur later. It is measured on the first bytes of some
# texts, and less and less often while it is too large.
_MOST_NEW_AT_FIRST, _MOST_NEW = 0.65, 0.35
_FIRST_BYTES = 8 << 20
_COUNTED_BYTES = 1 << 18
_LEAST_PATIENCE, _MOST_PATIENCE = 4, 64
_ENTRY_BYTES = 100  # size of a dictionary's entry
_KEPT_AT_ONCE = 4096  # words added to the cache before its size is checked
# New words are joined by an added token, a noncharacter that no text should contain, and tokenized
# together. Alone, a word takes twice as long.
_BETWEEN = "\ufdd0"
_WORDS_AT_ONCE = 64

_GAP = re.compile("[!-~](?= [!-~])")
_PRINTABLE = " ".join(map(chr, range(ord("!"), ord("~") + 1)))
_SPACES = "\t\n\r "

_LOCAL_NORMALIZERS = {
    *("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled"),
    *("Strip", "StripAccents"),
}
# Patterns that match only white space, but not a single space.
_WHITE_SPACE_RUNS = {r"\s{2,}|[\n\r\t]", " {2,}"}
_LOCAL_SPLITTERS = {"Digits", "Punctuation"}
_WORD_SPLITTERS = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}  # they drop white space
# Regular expression by which Llama 3 and Qwen split words: matches start with a space, or are runs
# of white space.
_LETTERS_OR_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORD_PATTERNS = {_LETTERS_OR_DIGITS % digits for digits in (r"\p{N}", r"\p{N}{1,3}")}
# Matches added tokens that could occur across a gap.
_ACROSS = re.compile(r"\S[\s▁]")

# Characters that may border a gap, if the tokenizer's normalizer treats them one by one: Latin,
# Greek, Cyrillic, Armenian, Hebrew, Arabic, Devanagari, punctuation and currencies. A letter forms
# no grapheme with white space before it, but a mark does, so marks may only precede a gap.
_RANGES = ((0xA1, 0x700), (0x900, 0x980), (0x1E00, 0x2000), (0x2010, 0x2028), (0x2030, 0x205F),
           (0x20A0, 0x20C1))  # fmt: skip
_BASES = {*("Lu", "Ll", "Lt", "Lo", "Nd", "No", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po"),
          *("Sc", "Sm", "So")}  # fmt: skip
_MARKS = {"Mn", "Mc"}
_MOST_MARKS = 3  # stacked marks
_ASCII = range(0x21, 0x7F)


def prefix_end(text: str, chars: int) -> int:
    """Return the length of a text's shortest prefix above `chars` characters that ends at a gap.

    Gaps here are single spaces between printable ASCII characters, and the end of the text.
    """
    gap = _GAP.search(text, chars)
    return len(text) if gap is None else gap.end()


def ends_words_in_gaps(backend: Any, description: dict[str, Any]) -> bool:
    """Return whether a tokenizer provably tokenizes both sides of a gap independently.

    Gaps here are single spaces between printable ASCII characters. `backend` is a
    ``tokenizers.Tokenizer``, and `description` its parsed ``tokenizer.json``.
    """
    _, splitters = _split_steps(description)
    return (
        all(map(_is_local, steps_of(description["normalizer"], "normalizers")))
        and _keeps_ascii(backend.normalizer)
        and bool(splitters)
        and _ends_words(splitters[0])
        and not any(_ACROSS.search(token["content"]) for token in description["added_tokens"])
    )


def _split_steps(description: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split a pre-tokenizer's steps into leading ones for digits or punctuation, and the rest."""
    steps = list(steps_of(description["pre_tokenizer"], "pretokenizers"))
    local = list(itertools.takewhile(lambda step: step["type"] in _LOCAL_SPLITTERS, steps))
    return local, steps[len(local) :]


def steps_of(step: dict[str, Any] | None, name: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer, pre-tokenizer or post-processor in ``tokenizer.json``.

    Sequences, whose steps are stored under the key `name`, are flattened.
    """
    if step is not None and step["type"] == "Sequence":
        for part in step[name]:
            yield from steps_of(part, name)
    elif step is not None:
        yield step


def _is_local(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] != "Replace":
        return normalizer["type"] in _LOCAL_NORMALIZERS
    [(kind, pattern)] = normalizer["pattern"].items()
    if kind == "Regex":
        return pattern in _WHITE_SPACE_RUNS
    replacing = pattern + normalizer["content"]
    return bool(normalizer["content"]) and not re.search(r"[\s▁]", replacing)


def _keeps_ascii(normalizer: Any) -> bool:
    return normalizer is None or normalizer.normalize_str(_PRINTABLE).lower() == _PRINTABLE.lower()


def _ends_words(splitter: dict[str, Any]) -> bool:
    kind = splitter["type"]
    if kind == "Metaspace":
        return splitter["split"]
    if kind == "Split":
        is_whole = splitter["behavior"] == "Isolated" and not splitter["invert"]
        return is_whole and splitter["pattern"].get("Regex") in _WORD_PATTERNS
    return splitter["use_regex"] if kind == "ByteLevel" else kind in _WORD_SPLITTERS


@dataclass(frozen=True)
class Gaps:
    """Rules for the offsets (gaps) where a tokenizer's texts can be cut without changing tokens.

    Tables are bool arrays by code point, (0x10000,).
    """

    spaces: bytes  # white space that separates words
    before: np.ndarray  # characters that may precede a gap
    marks: np.ndarray  # characters of `before` that are combining marks
    before_lines: np.ndarray  # characters that may precede a gap that starts with a line end
    after: np.ndarray  # characters that may follow a gap
    # Characters that may follow a word's leading space: a run of white space is also cut before it.
    after_space: np.ndarray
    ends_lines: bool  # a run of white space is also cut after its last line end
    unsafe: tuple[bytes, ...]  # added tokens; texts that contain one are not cut
    # Texts without these added tokens are also cut around ASCII punctuation; None: no text is.
    tokens: tuple[bytes, ...] | None

    def cut(self, data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Split concatenated UTF-8 texts into words at their gaps, and return the words' offsets.

        `data` are the bytes, uint8, and `offsets`, (texts + 1,), the texts' offsets in `data`. The
        result, int64 (words + 1,), ends with ``len(data)``. Words cover all bytes, spaces too, and
        no word spans two texts.
        """
        begins = np.zeros(len(data) + 1, dtype=bool)
        begins[offsets] = True
        is_space = functools.reduce(np.logical_or, (data == space for space in self.spaces))
        edges = np.flatnonzero(is_space[1:] != is_space[:-1]) + 1
        edges = edges[int(is_space[:1].any()) :]  # skips leading white space of the first text
        first, last = edges[: len(edges) // 2 * 2].reshape(-1, 2).T
        last_bytes, after = data[last - 1], _code_points(data, last)
        is_whole = np.ones(len(first), dtype=bool)
        runs = np.searchsorted(first, offsets, side="right") - 1
        runs, edges = runs[runs >= 0], offsets[runs >= 0]
        is_whole[runs[last[runs] >= edges]] = False  # runs at a text's start or end
        starts = _previous_starts(data, first)
        before, opening = _code_points(data, starts), data[first]
        # A mark can merge with its base: "\xa0\u0301" becomes one space.
        base, marked = before.copy(), np.flatnonzero(self.marks[before])
        for _ in range(_MOST_MARKS):
            starts[marked] = _previous_starts(data, starts[marked])
            base[marked] = _code_points(data, starts[marked])
            marked = marked[self.marks[base[marked]]]
        is_whole &= self.before[base] & ~self.marks[base]
        is_line = (opening == ord("\n")) | (opening == ord("\r"))
        has_before = np.where(is_line, self.before_lines[before], self.before[before])
        begins[first[is_whole & has_before & self.after[after]]] = True
        is_whole &= self.after_space[after]
        begins[last[is_whole & (last_bytes == ord(" ")) & (last - first > 1)] - 1] = True
        if self.ends_lines and len(first):
            lines = np.flatnonzero((data == ord("\n")) | (data == ord("\r")))
            runs = np.searchsorted(first, lines, side="right") - 1
            is_last = np.diff(runs, append=len(first)) != 0
            is_last &= (runs >= 0) & is_whole[runs] & (lines < last[runs])
            begins[lines[is_last] + 1] = True
        if self.tokens is not None and not any(map(data.tobytes().__contains__, self.tokens)):
            is_printable = (data > ord(" ")) & (data <= ord("~"))
            is_mark = is_printable & ~_is_alphanumeric(data)
            begins[1:-1] |= (is_mark[1:] & is_printable[:-1]) | (is_mark[:-1] & is_printable[1:])
        return np.flatnonzero(begins)


def _is_alphanumeric(data: np.ndarray) -> np.ndarray:
    return ((data | 0x20) - ord("a") < 26) | (data - ord("0") < 10)  # uint8 wraps around below 0


def _previous_starts(data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the start offsets of the UTF-8 characters that end right before these offsets."""
    starts = offsets - 1
    within = np.flatnonzero((data[starts] & 0xC0) == 0x80)
    while len(within):
        starts[within] -= 1
        within = within[(data[starts[within]] & 0xC0) == 0x80]
    return starts


def _code_points(data: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Decode the UTF-8 characters at these offsets to code points; 0 for characters of 4 bytes."""
    codes = data[starts].astype(np.int64)
    wide = np.flatnonzero(codes >= 0x80)
    lead, start = codes[wide], starts[wide]
    second, third = (data[np.minimum(start + n, len(data) - 1)] & 0x3F for n in (1, 2))
    two = (lead & 0x1F) << 6 | second
    three = (lead & 0x0F) << 12 | second.astype(np.int64) << 6 | third
    codes[wide] = np.where(lead < 0xE0, two, np.where(lead < 0xF0, three, 0))
    return codes


def read_gaps(backend: Any, description: dict[str, Any]) -> Gaps | None:
    """Derive the rules for cutting a tokenizer's texts into words that are tokenized separately.

    Returns None if the tokenizer has steps that are not proven to work word by word.
    """
    if not ends_words_in_gaps(backend, description) or description["model"].get("dropout"):
        return None
    rules = _Rules(backend, description)
    spaces = rules.spaces() if rules.are_known() else ""
    if not spaces:
        return None
    is_split = rules.ender["type"] == "Split"
    contents = (token["content"].encode() for token in rules.added)
    return Gaps(
        spaces.encode(),
        *rules.character_tables(),
        ends_lines=is_split and rules.splits_runs(),
        unsafe=tuple(token["content"].encode() for token in rules.unsafe),
        tokens=tuple(filter(None, contents)) if rules.cuts_punctuation() else None,
    )


class _Rules:
    """Properties of a tokenizer that decide where its texts can be cut without changing tokens."""

    def __init__(self, backend: Any, description: dict[str, Any]) -> None:
        normalizer = backend.normalizer
        self.normalize = str if normalizer is None else normalizer.normalize_str
        self.normalizers = list(steps_of(description["normalizer"], "normalizers"))
        self.local, (self.ender, *self.later) = _split_steps(description)
        self.drops = self.ender["type"] in _WORD_SPLITTERS
        self.is_metaspace = self.ender["type"] == "Metaspace"
        self.has_prefix = self.ender.get("add_prefix_space", False)
        self.strips = any(step.get("strip_left") for step in self.normalizers)
        self.added = description["added_tokens"]
        self.unsafe = list(filter(self._absorbs_space, self.added))
        self._forms = {form for token in self.added for form in self._forms_of(token)}
        self._firsts = {form[:1] for form in self._forms}
        if self.is_metaspace:  # it adds no "▁" to a word that already starts with one
            self._firsts.add(self.ender["replacement"])
        self._has_space = any(re.search(r"\s", form) for form in self._forms)

    def _forms_of(self, token: dict[str, Any]) -> set[str]:
        return {token["content"], self.normalize(token["content"])}

    def _absorbs_space(self, token: dict[str, Any]) -> bool:
        has_edge = any(form != form.strip() for form in self._forms_of(token))
        extends = token["lstrip"] or token["rstrip"] or (token["single_word"] and has_edge)
        return bool(token["content"] and extends)

    def are_known(self) -> bool:
        """Return whether added tokens, and steps at a text's beginning, provably allow cuts."""
        prepends_always = self.is_metaspace and self.ender["prepend_scheme"] == "always"
        prepends_first = any(step.get("prepend_scheme") == "first" for step in self.later)
        return (
            (self.drops or not self.strips or (prepends_always and not self.local))
            and (self.drops or not prepends_first)
            and not any(map(_ACROSS.search, self._forms))
            and not (self.normalizers and any(token["normalized"] for token in self.unsafe))
            and not (self._has_space and any(s["type"] == "Strip" for s in self.normalizers))
        )

    def spaces(self) -> str:
        """Return the white space characters that separate words, as one string; "" for none."""
        spaces = next(filter(self._are_gaps, (_SPACES, " ")), "")
        return " " if spaces and self.has_prefix else spaces

    def _are_gaps(self, spaces: str) -> bool:
        for length in (1, 2, 3):
            for run in map("".join, itertools.product(spaces, repeat=length)):
                within, alone = self.normalize(f"x{run}y"), self.normalize(f"{run}y")
                kept = within[1:-1]
                if within[0] + within[-1] + alone.strip() != "xyy" or not kept.isspace():
                    return False
                if self.drops:
                    continue
                if alone != "y" or kept != " " if self.strips else alone != f"{kept}y":
                    return False
                if set(kept) != {" "} if self.is_metaspace else kept != run:
                    return False
        return True

    def splits_runs(self) -> bool:
        """Return whether white space is provably split before its last character, as in GPT-2."""
        tail = [] if self.ender["type"] == "ByteLevel" else [("ByteLevel", False, False)]
        rest = [(s["type"], s.get("add_prefix_space"), s.get("use_regex")) for s in self.later]
        is_other = self.drops or self.is_metaspace or self.has_prefix or self.local
        is_plain = all(step["type"] == "NFC" for step in self.normalizers)
        return is_plain and rest == tail and not (is_other or self._has_space)

    def cuts_punctuation(self) -> bool:
        """Return whether each ASCII punctuation mark is provably a word of its own."""
        return (
            self.ender["type"] == "BertPreTokenizer"
            and not (self.local or self.later)
            and all(step["type"] == "BertNormalizer" for step in self.normalizers)
            and not any(token["normalized"] for token in self.added)
        )

    def character_tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the tables `before`, `marks`, `before_lines`, `after`, `after_space` of `Gaps`."""
        before, marks, before_lines, after, after_space = np.zeros((5, 0x10000), dtype=bool)
        splits_runs, normalize = self.splits_runs(), self.normalize
        for code in itertools.chain(_ASCII, *itertools.starmap(range, _RANGES)):
            char = chr(code)
            kind, form = unicodedata.category(char), normalize(char)
            is_known = kind in _BASES | _MARKS or (kind == "Sk" and code < 0x80)
            if not is_known or not form.strip():
                continue
            before[code] = normalize(f"{char} x") == f"{form} x" and form[-1] != " "
            marks[code] = kind in _MARKS
            is_word = unicodedata.category(form[-1])[0] in "LN"
            before_lines[code] = before[code] and (is_word or self.ender["type"] != "Split")
            is_mark = marks[code] or unicodedata.category(form[0])[0] == "M"
            # White space before an added token may be kept; before "▁", Metaspace adds none.
            is_first = not self._firsts.isdisjoint({char, form[0]})
            after[code] = normalize(f"x {char}") == f"x {form}" and form[0] != " "
            after[code] &= not (is_mark or (self.strips and is_first))
            after_space[code] = after[code] and splits_runs and not is_first
        return before, marks, before_lines, after, after_space


class Words:
    """Token ids of many texts, without special tokens, stored once per distinct word.

    `rows` has the int32 token ids of each distinct word, as bytes. `indices` has the index in
    `rows` of every word of all texts, and `bounds`, (texts + 1,), the texts' offsets in `indices`.
    """

    def __init__(self, rows: Sequence[bytes], indices: np.ndarray, bounds: np.ndarray) -> None:
        self._flat = np.frombuffer(b"".join(rows), np.int32)
        lengths = np.fromiter(map(len, rows), np.int64, len(rows)) // self._flat.itemsize
        self._starts = (np.cumsum(lengths) - lengths)[indices]  # start of each word in `_flat`
        self._ends = np.append(0, np.cumsum(lengths[indices]))  # token offsets of all words
        self._first, self._last = bounds[:-1], bounds[1:]

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each text, int64 (texts,)."""
        return self._ends[self._last] - self._ends[self._first]

    def replace(self, texts: Sequence[int], words: Words) -> None:
        """Replace the tokens of the texts at the indices `texts` by the tokens in `words`."""
        starts, ends = words._starts + len(self._flat), words._ends[1:] + self._ends[-1]
        self._first, self._last = self._first.copy(), self._last.copy()
        self._first[texts] = words._first + len(self._starts)
        self._last[texts] = words._last + len(self._starts)
        self._flat = np.concatenate([self._flat, words._flat])
        self._starts = np.concatenate([self._starts, starts])
        self._ends = np.concatenate([self._ends, ends])

    def take(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Concatenate the token ids of all texts, int32 (tokens,), each from a start to a stop."""
        words = self._last - self._first
        index, begins = _ranges(self._first, words), self._ends[self._first]
        low = np.maximum(self._ends[index], np.repeat(begins + starts, words))
        high = np.minimum(self._ends[1:][index], np.repeat(begins + stops, words))
        offsets = self._starts[index] - self._ends[index] + low
        return self._flat[_ranges(offsets, np.maximum(high - low, 0))]


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenate ``arange(start, start + count)`` for all pairs of `starts` and `counts`."""
    numbers = np.repeat(starts - np.cumsum(counts) + counts, counts)
    numbers += np.arange(len(numbers))
    return numbers


class WordCache:
    """Tokenizer that caches the token ids of words, for all threads of the process.

    Texts are cut into words where that cannot change tokens, and if it is faster. Lookups take no
    lock, because threads compute equal entries. A word found in the older half of the cache moves
    to the younger half; when that is full, the older half is dropped.
    """

    def __init__(self, backend: Any, description: dict[str, Any]) -> None:
        self._backend = backend
        self.ends_words = ends_words_in_gaps(backend, description)  # prefixes can be tokenized
        self._gaps = read_gaps(backend, description)
        self._joiner = None if self._gaps is None else _make_joiner(backend, description)
        self._younger: dict[str, bytes] = {}
        self._older: dict[str, bytes] = {}
        self._younger_bytes = 0
        self._keeping = threading.Lock()  # held while the halves change
        self._pays = False  # whether texts are cut
        self._whole_bytes = 0  # bytes of uncut texts until cutting is tried again
        self._cut_bytes = 0
        self._patience = _LEAST_PATIENCE  # `_whole_bytes` relative to the bytes counted last

    def __call__(self, texts: Sequence[str]) -> Words:
        """Return the texts' token ids, without special tokens, as `backend` would compute them."""
        _, ends, content = pa.array([*texts, ""], pa.large_string()).buffers()
        offsets = np.frombuffer(ends, np.int64, len(texts) + 1)
        data = np.frombuffer(content or b"", np.uint8, int(offsets[-1]))
        self._whole_bytes -= len(data)
        bounds = offsets[np.append(True, offsets[1:] > offsets[:-1])]
        if self._gaps is not None and (self._pays or self._whole_bytes < 0):
            cut = self._bounds(self._gaps, data, offsets)
            self._pays = self._pays or self._would_pay(data, cut)
            bounds = cut if self._pays else bounds
        rows, indices = self._look_up(data, bounds)
        return Words(rows, indices, np.searchsorted(bounds, offsets))

    def _would_pay(self, data: np.ndarray, bounds: np.ndarray) -> bool:
        """Return whether few of the first words are new to the cache, so that cutting is faster.

        Also sets `_whole_bytes`, the number of bytes until cutting is tried again.
        """
        counted = bounds[: np.searchsorted(bounds, min(_COUNTED_BYTES, len(data))) + 1]
        distinct = _encode_words(data, counted).dictionary
        is_new = [not (w in self._younger or w in self._older) for w in distinct.to_pylist()]
        pays = self._cutting_pays(np.array(is_new, dtype=bool), _byte_lengths(distinct), counted)
        self._patience = _LEAST_PATIENCE if pays else min(2 * self._patience, _MOST_PATIENCE)
        self._whole_bytes = self._patience * int(counted[-1])
        return pays

    def _bounds(self, gaps: Gaps, data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the words' offsets in texts, as `Gaps.cut` does, but keep some texts whole.

        A text is a single word if over half of its bytes are in long words, or if it contains an
        added token that absorbs white space. `data` and `offsets` are those of `Gaps.cut`.
        """
        bounds = gaps.cut(data, offsets)
        first = np.searchsorted(bounds, offsets)
        lengths = np.diff(bounds)
        long = np.append(0, np.cumsum(lengths * (lengths > LONGEST_WORD)))[first]
        is_whole = 2 * np.diff(long) > np.diff(offsets)
        content = data.tobytes() if gaps.unsafe else b""
        for token in gaps.unsafe:
            offset = content.find(token)
            while offset >= 0:
                text = np.searchsorted(offsets, offset, side="right") - 1
                is_whole[text] = True
                offset = content.find(token, offsets[text + 1])
        is_kept = np.repeat(~is_whole, np.diff(first))
        is_kept[first[:-1][np.diff(first) > 0]] = True
        return bounds[np.append(is_kept, True)]

    def _look_up(self, data: np.ndarray, bounds: np.ndarray) -> tuple[list[bytes], np.ndarray]:
        """Return the distinct words' token ids, as int32 bytes, and each word's index among them.

        Word i is ``data[bounds[i]:bounds[i + 1]]``. New words are tokenized, and short ones cached.
        """
        coded = _encode_words(data, bounds)
        distinct, lengths = coded.dictionary.to_pylist(), _byte_lengths(coded.dictionary)
        rows: list[Any] = list(map(self._younger.get, distinct))
        missing = [number for number, row in enumerate(rows) if row is None]
        for number in missing:
            rows[number] = self._older.get(distinct[number])
        is_new = np.fromiter((row is None for row in rows), bool, len(rows))
        is_short = lengths <= LONGEST_WORD
        short, long = np.flatnonzero(is_new & is_short), np.flatnonzero(is_new & ~is_short)
        new = [*short.tolist(), *long.tolist()]
        words = [distinct[number] for number in new]
        with panics_as_errors():
            tokens = self._tokenize(words, len(short))
        for number, row in zip(new, tokens, strict=True):
            rows[number] = row
        self._keep([number for number in missing if is_short[number]], distinct, rows)
        if self._pays:
            self._pays = self._cutting_pays(is_new, lengths, bounds)
            self._cut_bytes += int(bounds[-1])
        return rows, coded.indices.to_numpy()

    def _tokenize(self, words: list[str], short: int) -> Sequence[bytes]:
        """Return the int32 token ids of each of `words`, as bytes, from the tokenizer.

        The first `short` words are joined and tokenized many at a time, which is faster.
        """
        if not words:
            return []
        if self._joiner is None:
            return self._tokenize_singly(words)
        bounds = itertools.pairwise([*range(0, short, _WORDS_AT_ONCE), short])
        texts = [_BETWEEN.join(words[start:stop]) for start, stop in bounds] + words[short:]
        between = self._joiner.token_to_id(_BETWEEN)
        encodings = self._joiner.encode_batch_fast(texts, add_special_tokens=False)
        ids = array("i")
        for encoding in encodings:
            ids.extend(encoding.ids)
            ids.append(between)
        flat = np.frombuffer(ids, np.int32)
        ends = np.flatnonzero(flat == between)
        if len(ends) != len(words):  # a text contains the separator
            return self._tokenize_singly(words)
        content, stops = ids.tobytes(), (ends * flat.itemsize).tolist()
        starts = [0, *(stop + flat.itemsize for stop in stops)]
        return [content[start:stop] for start, stop in zip(starts, stops, strict=False)]

    def _tokenize_singly(self, words: list[str]) -> list[bytes]:
        encodings = self._backend.encode_batch_fast(words, add_special_tokens=False)
        return [array("i", encoding.ids).tobytes() for encoding in encodings]

    def _cutting_pays(self, is_new: np.ndarray, lengths: np.ndarray, bounds: np.ndarray) -> bool:
        """Return whether new words are few enough that cutting texts into words is faster.

        `is_new` and `lengths` are (distinct words,), and `bounds` has the offsets of all words.
        """
        most = _MOST_NEW if self._cut_bytes > _FIRST_BYTES else _MOST_NEW_AT_FIRST
        # Long words are ignored, because they cost the same alone and within their texts.
        sizes = lengths[is_new], np.diff(bounds)
        new_bytes, all_bytes = (words[words <= LONGEST_WORD].sum() for words in sizes)
        return bool(new_bytes < most * all_bytes)

    def _keep(self, numbers: list[int], words: list[str], rows: list[bytes]) -> None:
        for start in range(0, len(numbers), _KEPT_AT_ONCE):
            kept = {words[n]: rows[n] for n in numbers[start : start + _KEPT_AT_ONCE]}
            sizes = map(sys.getsizeof, itertools.chain(kept, kept.values()))
            size = sum(sizes) + _ENTRY_BYTES * len(kept)
            with self._keeping:
                self._younger.update(kept)
                self._younger_bytes += size
                if 2 * self._younger_bytes > CACHE_BYTES:
                    self._younger, self._older, self._younger_bytes = {}, self._younger, 0


def _make_joiner(backend: Any, description: dict[str, Any]) -> Any | None:
    """Return a copy of the tokenizer `backend` with the separator `_BETWEEN` as an added token.

    Returns None if a word could have other tokens between separators than alone.
    """
    from tokenizers import AddedToken, Tokenizer

    if '"first"' in json.dumps(description["pre_tokenizer"]):  # only a text's start gets a prefix
        return None
    joiner = Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer"):
        if getattr(backend, part) is not None:
            setattr(joiner, part, getattr(backend, part))
    joiner.encode_special_tokens = backend.encode_special_tokens
    ids = {token["content"]: token["id"] for token in description["added_tokens"]}
    joiner.add_tokens(
        [
            AddedToken(**{name: value for name, value in token.items() if name != "id"})
            for token in description["added_tokens"]
        ]
    )
    if any(_BETWEEN in content or joiner.token_to_id(content) != ids[content] for content in ids):
        return None
    joiner.add_tokens([AddedToken(_BETWEEN, normalized=False)])
    return joiner


def _encode_words(data: np.ndarray, bounds: np.ndarray) -> pa.DictionaryArray:
    buffers = [None, pa.py_buffer(np.ascontiguousarray(bounds)), pa.py_buffer(data)]
    words = pa.Array.from_buffers(pa.large_string(), len(bounds) - 1, buffers)
    return words.dictionary_encode()


def _byte_lengths(words: Any) -> np.ndarray:
    # The buffer has the offsets of an unsliced large_string array.
    return np.diff(np.frombuffer(words.buffers()[1], np.int64, len(words) + 1))


_caches: WeakValueDictionary[tuple[str, bool], WordCache] = WeakValueDictionary()
_caching = threading.Lock()


@panics_as_errors()
def word_cache(backend: Any) -> WordCache:
    """Return the cache that equal tokenizers share; `backend` must not truncate or pad."""
    description = json.loads(backend.to_str())
    steps = [description[name] for name in ("added_tokens", "normalizer", "pre_tokenizer", "model")]
    digest = hashlib.sha256(json.dumps(steps).encode()).hexdigest()
    key = (digest, backend.encode_special_tokens)
    with _caching:
        cache = _caches.get(key)
        if cache is None:
            cache = _caches[key] = WordCache(backend, description)
        return cache
