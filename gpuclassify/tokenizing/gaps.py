"""Words: where a text can be cut so that both sides keep their tokens, and tokens kept by word.

A cut is made in a gap: before white space between characters of which no rule reaches across it.
Neither normal forms nor graphemes or letter case do. So what works character by character leaves
both sides as they are alone, what finds words ends one there, and a model sees one word at a time.
`ends_words_in_gaps` and `read_gaps` hold a tokenizer's steps against that; where they say no, or an
added token that takes white space stands in a text, the library reads the text whole.
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

# Of words that are kept for a tokenizer. Those of more bytes seldom come again.
CACHE_BYTES = 64 << 20
LONGEST_WORD = 48
# A word that is new costs up to half as much again by itself as in its text: no text is cut while
# new ones have more than a share of the bytes of all words. It is larger for the first texts, as
# most of their words come again later. What is new is counted in the first bytes of some texts,
# less and less often while it is too much.
_MOST_NEW_AT_FIRST, _MOST_NEW = 0.65, 0.35
_FIRST_BYTES = 8 << 20
_COUNTED_BYTES = 1 << 18
_LEAST_PATIENCE, _MOST_PATIENCE = 4, 64
_ENTRY_BYTES = 100  # of a place in a dictionary
_KEPT_AT_ONCE = 4096  # words, before the size of what is kept is looked at
# New words are tokenized many at a time, with an added token between them that no text has: it is
# no character. Each by itself costs twice as much.
_BETWEEN = "\ufdd0"
_WORDS_AT_ONCE = 64

_GAP = re.compile("[!-~](?= [!-~])")
_PRINTABLE = " ".join(map(chr, range(ord("!"), ord("~") + 1)))
_SPACES = "\t\n\r "

_LOCAL_NORMALIZERS = {
    *("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled"),
    *("Strip", "StripAccents"),
}
# Patterns that match white space only, and no single space.
_WHITE_SPACE_RUNS = {r"\s{2,}|[\n\r\t]", " {2,}"}
_LOCAL_SPLITTERS = {"Digits", "Punctuation"}
_WORD_SPLITTERS = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}  # they drop white space
# As Llama 3 and Qwen split texts: a match has a space at its beginning, or runs of white space.
_LETTERS_OR_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORD_PATTERNS = {_LETTERS_OR_DIGITS % digits for digits in (r"\p{N}", r"\p{N}{1,3}")}
# Of an added token that could be found across a gap.
_ACROSS = re.compile(r"\S[\s▁]")

# Characters beside which there are gaps, if the tokenizer's normalizer leaves them to themselves:
# Latin, Greek, Cyrillic, Armenian, Hebrew, Arabic, Devanagari, punctuation and currencies. Letters
# of these join no white space in a grapheme; a mark does, so it may stand before a gap only.
_RANGES = ((0xA1, 0x700), (0x900, 0x980), (0x1E00, 0x2000), (0x2010, 0x2028), (0x2030, 0x205F),
           (0x20A0, 0x20C1))  # fmt: skip
_BASES = {*("Lu", "Ll", "Lt", "Lo", "Nd", "No", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po"),
          *("Sc", "Sm", "So")}  # fmt: skip
_MARKS = {"Mn", "Mc"}
_MOST_MARKS = 3  # one on another
_ASCII = range(0x21, 0x7F)


def prefix_end(text: str, chars: int) -> int:
    """Return where to cut `text`: in the first gap behind `chars` characters, or at its end."""
    gap = _GAP.search(text, chars)
    return len(text) if gap is None else gap.end()


def ends_words_in_gaps(backend: Any, description: dict[str, Any]) -> bool:
    """Tell whether a ``tokenizers.Tokenizer`` is known to tokenize both sides of a gap apart.

    The gaps meant are single spaces between printable characters of ASCII. The tokens of a text
    then begin with those of what is before any of them.
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
    """Return the splitters before the one that ends words, and that one with those behind it."""
    steps = list(steps_of(description["pre_tokenizer"], "pretokenizers"))
    is_first = (step["type"] not in _LOCAL_SPLITTERS for step in steps)
    count = next((number for number, is_it in enumerate(is_first) if is_it), len(steps))
    return steps[:count], steps[count:]


def steps_of(step: dict[str, Any] | None, name: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer, those of sequences too."""
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
    """Tell whether printable ASCII stays what it is, but for letter case."""
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
    """White space of gaps, and tables by code point below 0x10000 of what stands beside them."""

    spaces: bytes  # white space that parts words
    before: np.ndarray  # characters before a gap
    marks: np.ndarray  # of these, what only stands before one behind another of them
    before_lines: np.ndarray  # the same where it begins with the end of a line
    after: np.ndarray  # characters behind a gap
    # Characters before which a run of white space is cut once more, before its last space.
    after_space: np.ndarray
    ends_lines: bool  # and behind its last end of a line
    unsafe: tuple[bytes, ...]  # what no text may contain that is cut
    # Added tokens, without which punctuation of ASCII is cut out too; None: it never is.
    tokens: tuple[bytes, ...] | None

    def cut(self, data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return where words begin in texts end to end, and their end, int64, ascending."""
        begins = np.zeros(len(data) + 1, dtype=bool)
        begins[offsets] = True
        is_space = functools.reduce(np.logical_or, (data == space for space in self.spaces))
        edges = np.flatnonzero(is_space[1:] != is_space[:-1]) + 1
        edges = edges[int(is_space[:1].any()) :]  # white space that the first text begins with
        first, last = edges[: len(edges) // 2 * 2].reshape(-1, 2).T
        last_bytes, after = data[last - 1], _code_points(data, last)
        is_whole = np.ones(len(first), dtype=bool)
        runs = np.searchsorted(first, offsets, side="right") - 1
        runs, edges = runs[runs >= 0], offsets[runs >= 0]
        is_whole[runs[last[runs] >= edges]] = False  # at an end of a text
        place = _last_character(data, first)
        before, opening = _code_points(data, place), data[first]
        # A mark can vanish in what it stands on: "\xa0\u0301" becomes one space.
        base, marked = before.copy(), np.flatnonzero(self.marks[before])
        for _ in range(_MOST_MARKS):
            place[marked] = _last_character(data, place[marked])
            base[marked] = _code_points(data, place[marked])
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
    """Tell which bytes are letters and digits of ASCII."""
    return ((data | 0x20) - ord("a") < 26) | (data - ord("0") < 10)  # below, uint8 wraps around


def _last_character(data: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return where the characters before these places begin."""
    places = places - 1
    within = np.flatnonzero((data[places] & 0xC0) == 0x80)
    while len(within):
        places[within] -= 1
        within = within[(data[places[within]] & 0xC0) == 0x80]
    return places


def _code_points(data: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the code points of characters that begin at these places; 0 for those of 4 bytes."""
    codes = data[places].astype(np.int64)
    wide = np.flatnonzero(codes >= 0x80)
    lead, at = codes[wide], places[wide]
    second, third = (data[np.minimum(at + n, len(data) - 1)] & 0x3F for n in (1, 2))
    two = (lead & 0x1F) << 6 | second
    three = (lead & 0x0F) << 12 | second.astype(np.int64) << 6 | third
    codes[wide] = np.where(lead < 0xE0, two, np.where(lead < 0xF0, three, 0))
    return codes


def read_gaps(backend: Any, description: dict[str, Any]) -> Gaps | None:
    """Return where a tokenizer's texts fall into words; None if that is not known."""
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
        *rules.beside_gaps(),
        ends_lines=is_split and rules.splits_runs(),
        unsafe=tuple(token["content"].encode() for token in rules.unsafe),
        tokens=tuple(filter(None, contents)) if rules.cuts_punctuation() else None,
    )


class _Rules:
    """Rules of a tokenizer for white space and what stands beside it."""

    def __init__(self, backend: Any, description: dict[str, Any]) -> None:
        normalizer = backend.normalizer
        self.normalize = str if normalizer is None else normalizer.normalize_str
        self.normalizers = list(steps_of(description["normalizer"], "normalizers"))
        self.local, (self.ender, *self.behind) = _split_steps(description)
        self.drops = self.ender["type"] in _WORD_SPLITTERS
        self.is_metaspace = self.ender["type"] == "Metaspace"
        self.has_prefix = self.ender.get("add_prefix_space", False)
        self.strips = any(step.get("strip_left") for step in self.normalizers)
        self.added = description["added_tokens"]
        self.unsafe = list(filter(self._takes_space, self.added))
        self._forms = {form for token in self.added for form in self._forms_of(token)}
        self._firsts = {form[:1] for form in self._forms}
        if self.is_metaspace:  # no other sign is put before a word that begins with its own
            self._firsts.add(self.ender["replacement"])
        self._has_space = any(re.search(r"\s", form) for form in self._forms)

    def _forms_of(self, token: dict[str, Any]) -> set[str]:
        return {token["content"], self.normalize(token["content"])}

    def _takes_space(self, token: dict[str, Any]) -> bool:
        """Tell whether an added token reaches into the white space beside it."""
        is_edged = any(form != form.strip() for form in self._forms_of(token))
        reaches = token["lstrip"] or token["rstrip"] or (token["single_word"] and is_edged)
        return bool(token["content"] and reaches)

    def are_known(self) -> bool:
        """Tell whether words are known to have the same tokens alone and in their text."""
        begins_all = self.is_metaspace and self.ender["prepend_scheme"] == "always"
        begins_first = any(step.get("prepend_scheme") == "first" for step in self.behind)
        return (
            (self.drops or not self.strips or (begins_all and not self.local))
            and (self.drops or not begins_first)
            and not any(map(_ACROSS.search, self._forms))
            and not (self.normalizers and any(token["normalized"] for token in self.unsafe))
            and not (self._has_space and any(s["type"] == "Strip" for s in self.normalizers))
        )

    def spaces(self) -> str:
        """Return the characters whose runs are the same before a word alone and in its text."""
        spaces = next((one for one in (_SPACES, " ") if self._are_gaps(one)), "")
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
        """Tell whether the splitter's own pattern is known to end a match in white space."""
        tail = [] if self.ender["type"] == "ByteLevel" else [("ByteLevel", False, False)]
        rest = [(s["type"], s.get("add_prefix_space"), s.get("use_regex")) for s in self.behind]
        is_other = self.drops or self.is_metaspace or self.has_prefix or self.local
        is_plain = all(step["type"] == "NFC" for step in self.normalizers)
        return is_plain and rest == tail and not (is_other or self._has_space)

    def cuts_punctuation(self) -> bool:
        """Tell whether each punctuation mark of ASCII is a word of its own."""
        return (
            self.ender["type"] == "BertPreTokenizer"
            and not (self.local or self.behind)
            and all(step["type"] == "BertNormalizer" for step in self.normalizers)
            and not any(token["normalized"] for token in self.added)
        )

    def beside_gaps(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the tables of characters of `Gaps`, bool (0x10000,), in their order."""
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
            # Before an added token white space may stay, and before Metaspace's sign none is added.
            is_first = not self._firsts.isdisjoint({char, form[0]})
            after[code] = normalize(f"x {char}") == f"x {form}" and form[0] != " "
            after[code] &= not (is_mark or (self.strips and is_first))
            after_space[code] = after[code] and splits_runs and not is_first
        return before, marks, before_lines, after, after_space


class Words:
    """Tokens of many texts by their words, without special ones, copied when they are taken."""

    def __init__(self, rows: Sequence[bytes], which: np.ndarray, bounds: np.ndarray) -> None:
        self._flat = np.frombuffer(b"".join(rows), np.int32)
        lengths = np.fromiter(map(len, rows), np.int64, len(rows)) // self._flat.itemsize
        self._starts = (np.cumsum(lengths) - lengths)[which]  # of each word's tokens in `_flat`
        self._ends = np.append(0, np.cumsum(lengths[which]))  # of those of all words end to end
        self._first, self._last = bounds[:-1], bounds[1:]  # word of each text, and behind its last

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each text, int64 (texts,)."""
        return self._ends[self._last] - self._ends[self._first]

    def replace(self, places: Sequence[int], words: Words) -> None:
        """Put other texts in the places of some."""
        starts, ends = words._starts + len(self._flat), words._ends[1:] + self._ends[-1]
        self._first, self._last = self._first.copy(), self._last.copy()
        self._first[places] = words._first + len(self._starts)
        self._last[places] = words._last + len(self._starts)
        self._flat = np.concatenate([self._flat, words._flat])
        self._starts = np.concatenate([self._starts, starts])
        self._ends = np.concatenate([self._ends, ends])

    def take(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Return the tokens of each text from start to stop, end to end, int32."""
        words = self._last - self._first
        index, begins = _ranges(self._first, words), self._ends[self._first]
        low = np.maximum(self._ends[index], np.repeat(begins + starts, words))
        high = np.minimum(self._ends[1:][index], np.repeat(begins + stops, words))
        places = self._starts[index] - self._ends[index] + low
        return self._flat[_ranges(places, np.maximum(high - low, 0))]


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the numbers from each of `starts` on, as many as `counts` says, end to end."""
    numbers = np.repeat(starts - np.cumsum(counts) + counts, counts)
    numbers += np.arange(len(numbers))
    return numbers


class WordCache:
    """Tokens of words that a tokenizer has had, for all threads of the process.

    Without a lock: what two threads find out at once is the same. Words that come again outlive
    others: what is looked up in the older half of what is kept joins the younger one, and the older
    half is dropped when the younger one is full.
    """

    def __init__(self, backend: Any, description: dict[str, Any]) -> None:
        self._backend = backend
        self.ends_words = ends_words_in_gaps(backend, description)  # so prefixes can be read
        self._gaps = read_gaps(backend, description)
        self._joining = None if self._gaps is None else _joining(backend, description)
        self._younger: dict[str, bytes] = {}
        self._older: dict[str, bytes] = {}
        self._younger_bytes = 0
        self._pays = False  # to cut texts
        self._whole_bytes = 0  # of texts that are not cut before some are tried again
        self._cut_bytes = 0
        self._patience = _LEAST_PATIENCE  # how many times as many as those that were counted

    def __call__(self, texts: Sequence[str]) -> Words:
        """Return the tokens that the library gives these texts."""
        _, ends, content = pa.array([*texts, ""], pa.large_string()).buffers()
        offsets = np.frombuffer(ends, np.int64, len(texts) + 1)
        data = np.frombuffer(content or b"", np.uint8, int(offsets[-1]))
        self._whole_bytes -= len(data)
        bounds = offsets[np.append(True, offsets[1:] > offsets[:-1])]
        if self._gaps is not None and (self._pays or self._whole_bytes < 0):
            cut = self._bounds(self._gaps, data, offsets)
            self._pays = self._pays or self._would_pay(data, cut)
            bounds = cut if self._pays else bounds
        rows, which = self._look_up(data, bounds)
        return Words(rows, which, np.searchsorted(bounds, offsets))

    def _would_pay(self, data: np.ndarray, bounds: np.ndarray) -> bool:
        """Tell whether few enough of the first words are new; none gets its tokens for it."""
        counted = bounds[: np.searchsorted(bounds, min(_COUNTED_BYTES, len(data))) + 1]
        distinct = _coded(data, counted).dictionary
        is_new = [not (w in self._younger or w in self._older) for w in distinct.to_pylist()]
        pays = self._are_few(np.array(is_new, dtype=bool), _byte_lengths(distinct), counted)
        self._patience = _LEAST_PATIENCE if pays else min(2 * self._patience, _MOST_PATIENCE)
        self._whole_bytes = self._patience * int(counted[-1])
        return pays

    def _bounds(self, gaps: Gaps, data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return where words begin; texts with much that has no gaps are words as a whole."""
        bounds = gaps.cut(data, offsets)
        first = np.searchsorted(bounds, offsets)
        lengths = np.diff(bounds)
        long = np.append(0, np.cumsum(lengths * (lengths > LONGEST_WORD)))[first]
        is_whole = 2 * np.diff(long) > np.diff(offsets)
        content = data.tobytes() if gaps.unsafe else b""
        for token in gaps.unsafe:
            place = content.find(token)
            while place >= 0:
                text = np.searchsorted(offsets, place, side="right") - 1
                is_whole[text] = True
                place = content.find(token, offsets[text + 1])
        is_kept = np.repeat(~is_whole, np.diff(first))
        is_kept[first[:-1][np.diff(first) > 0]] = True
        return bounds[np.append(is_kept, True)]

    def _look_up(self, data: np.ndarray, bounds: np.ndarray) -> tuple[list[bytes], np.ndarray]:
        """Return the tokens of distinct words between bounds, and which of them each word is."""
        coded = _coded(data, bounds)
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
            self._pays = self._are_few(is_new, lengths, bounds)
            self._cut_bytes += int(bounds[-1])
        return rows, coded.indices.to_numpy()

    def _tokenize(self, words: list[str], short: int) -> Sequence[bytes]:
        """Return the tokens of words, of which the first are so many short ones."""
        if not words:
            return []
        if self._joining is None:
            return self._tokenize_each(words)
        bounds = itertools.pairwise([*range(0, short, _WORDS_AT_ONCE), short])
        texts = [_BETWEEN.join(words[start:stop]) for start, stop in bounds] + words[short:]
        between = self._joining.token_to_id(_BETWEEN)
        encodings = self._joining.encode_batch_fast(texts, add_special_tokens=False)
        ids = array("i")
        for encoding in encodings:
            ids.extend(encoding.ids)
            ids.append(between)
        flat = np.frombuffer(ids, np.int32)
        ends = np.flatnonzero(flat == between)
        if len(ends) != len(words):  # a text has it all the same
            return self._tokenize_each(words)
        content, stops = ids.tobytes(), (ends * flat.itemsize).tolist()
        starts = [0, *(stop + flat.itemsize for stop in stops)]
        return [content[start:stop] for start, stop in zip(starts, stops, strict=False)]

    def _tokenize_each(self, words: list[str]) -> list[bytes]:
        encodings = self._backend.encode_batch_fast(words, add_special_tokens=False)
        return [array("i", encoding.ids).tobytes() for encoding in encodings]

    def _are_few(self, is_new: np.ndarray, lengths: np.ndarray, bounds: np.ndarray) -> bool:
        """Tell whether new words are so small a part of all that cutting them out pays.

        `lengths` are those of distinct words; long ones cost the same within their texts and alone.
        """
        most = _MOST_NEW if self._cut_bytes > _FIRST_BYTES else _MOST_NEW_AT_FIRST
        new, words = lengths[is_new], np.diff(bounds)
        new_bytes, all_bytes = (one[one <= LONGEST_WORD].sum() for one in (new, words))
        return bool(new_bytes < most * all_bytes)

    def _keep(self, numbers: list[int], words: list[str], rows: list[bytes]) -> None:
        for start in range(0, len(numbers), _KEPT_AT_ONCE):
            some = numbers[start : start + _KEPT_AT_ONCE]
            kept = {words[number]: rows[number] for number in some}
            self._younger.update(kept)
            sizes = map(sys.getsizeof, itertools.chain(kept, kept.values()))
            self._younger_bytes += sum(sizes) + _ENTRY_BYTES * len(kept)
            if 2 * self._younger_bytes > CACHE_BYTES:
                self._younger, self._older, self._younger_bytes = {}, self._younger, 0


def _joining(backend: Any, description: dict[str, Any]) -> Any | None:
    """Return the tokenizer with a token between words, which shares its model.

    None where words would get other tokens behind one another than each alone.
    """
    from tokenizers import AddedToken, Tokenizer

    if '"first"' in json.dumps(description["pre_tokenizer"]):  # a prefix of a text's beginning
        return None
    joining = Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer"):
        if getattr(backend, part) is not None:
            setattr(joining, part, getattr(backend, part))
    joining.encode_special_tokens = backend.encode_special_tokens
    ids = {token["content"]: token["id"] for token in description["added_tokens"]}
    joining.add_tokens(
        [
            AddedToken(**{name: value for name, value in token.items() if name != "id"})
            for token in description["added_tokens"]
        ]
    )
    if any(_BETWEEN in content or joining.token_to_id(content) != ids[content] for content in ids):
        return None
    joining.add_tokens([AddedToken(_BETWEEN, normalized=False)])
    return joining


def _coded(data: np.ndarray, bounds: np.ndarray) -> pa.DictionaryArray:
    """Return the words between bounds of UTF-8 bytes, each distinct one once."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(bounds)), pa.py_buffer(data)]
    words = pa.Array.from_buffers(pa.large_string(), len(bounds) - 1, buffers)
    return words.dictionary_encode()


def _byte_lengths(words: Any) -> np.ndarray:
    """Return the bytes of each word of a large string array that is no slice, int64 (words,)."""
    return np.diff(np.frombuffer(words.buffers()[1], np.int64, len(words) + 1))


_caches: WeakValueDictionary[tuple[str, bool], WordCache] = WeakValueDictionary()
_caching = threading.Lock()


@panics_as_errors()
def word_cache(backend: Any) -> WordCache:
    """Return the process's only cache of a ``tokenizers.Tokenizer``, or of one that equals it.

    It lasts as long as anyone holds it. The tokenizer must not cut or pad.
    """
    description = json.loads(backend.to_str())
    steps = [description[name] for name in ("added_tokens", "normalizer", "pre_tokenizer", "model")]
    digest = hashlib.sha256(json.dumps(steps).encode()).hexdigest()
    key = (digest, backend.encode_special_tokens)
    with _caching:
        cache = _caches.get(key)
        if cache is None:
            cache = _caches[key] = WordCache(backend, description)
        return cache
