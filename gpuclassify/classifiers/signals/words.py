"""Words and sentences of texts as spaCy splits them.

spaCy splits a text at white space into chunks, and then each chunk on its own. So each distinct
chunk is split once, and its words are looked up for all texts. Texts are split as a whole in two
cases: if an abbreviation or emoticon of several tokens may begin in a chunk and end in the next,
and if a text has the word ``IS_ALPHA``, on which spaCy fails after its first use.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product

import numpy as np

from gpuclassify.classifiers.signals.characters import PUNCTUATION, STOP_WORDS

# Languages that datatrove splits with spaCy's rules, by spaCy's codes; "xx" is any other.
LANGUAGES = (
    *("af", "am", "ar", "az", "bg", "ca", "cs", "da", "de", "dsb", "el", "en", "es", "et", "eu"),
    *("fa", "fi", "fo", "fr", "ga", "grc", "he", "hr", "hsb", "hu", "hy", "id", "is", "it", "ky"),
    *("la", "lb", "lg", "lij", "lt", "lv", "mk", "ms", "nb", "nl", "pl", "pt", "ro", "ru", "sk"),
    *("sl", "sq", "sr", "sv", "ti", "tl", "tn", "tr", "tt", "uk", "xx", "yo"),
)
_SYMBOL, _STAND_IN = "IS_ALPHA", "IS_ALPHB"
_GAPS = re.compile(r"\S+|\s{2,}|[^\S ]")  # words, and white space that is a token of spaCy
BASE = np.uint64(0x9E3779B97F4A7C15)  # base of polynomial hashes modulo 2^64; odd
_MOST_CHARS = 30_000_000  # maximum characters of all remembered chunks
SPACE, OTHER, END, MARK = range(4)  # kinds of tokens, for sentences

# Facts on a distinct token: characters, kind, whether it is punctuation only, whether it has a
# letter, its bit in `STOP_WORDS` or 0, its polynomial hash, and `BASE` to the power of its length.
_TOKEN = np.dtype([
    ("length", np.int64), ("kind", np.uint8), ("is_symbol", bool), ("has_letter", bool),
    ("stop_word", np.uint8), ("hash", np.uint64), ("factor", np.uint64),
])  # fmt: skip


@dataclass(frozen=True)
class Tokens:
    """Tokens of some texts, concatenated: ``ids[starts[i] : starts[i + 1]]`` is text `i`.

    An id is a token's index in `names`, the distinct tokens, and in `table`, the facts on these.
    """

    ids: np.ndarray  # row of each token in `table`, int64 (tokens,)
    starts: np.ndarray  # offset of each text's tokens, and the end, int64 (texts + 1,)
    table: np.ndarray  # facts on each distinct token, `_TOKEN` (distinct tokens,)
    names: list[str]  # the token that each row of `table` describes

    @property
    def counts(self) -> np.ndarray:
        """Number of tokens of each text, int64 (texts,)."""
        return np.diff(self.starts)

    @property
    def text_of(self) -> np.ndarray:
        """Index of each token's text, int64 (tokens,)."""
        return np.repeat(np.arange(len(self.starts) - 1), self.counts)

    def column(self, name: str) -> np.ndarray:
        """Return a fact on each token, (tokens,): the field `name` of `table`, such as "length"."""
        return self.table[name][self.ids]

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sum each text's `values`, which are integers or bool (tokens,), to int64 (texts,)."""
        return np.diff(running_sum(values)[self.starts])

    def joined(self, text: int) -> str:
        """Return the tokens of the text with the index `text`, joined without spaces."""
        ids = self.ids[self.starts[text] : self.starts[text + 1]]
        return "".join(map(self.names.__getitem__, ids.tolist()))


def code_of(char: str) -> np.uint64:
    """Return the number that stands for a character in the hashes of tokens; never 0."""
    return np.uint64(ord(char) + 1)


def running_sum(values: np.ndarray) -> np.ndarray:
    """Return the cumulative sums of `values`, after a leading 0, int64 (values + 1,)."""
    return np.concatenate([[0], np.cumsum(values, dtype=np.int64)])


class Splitter:
    """Splitter of texts into words, and counter of sentences, by spaCy's rules. Thread-safe.

    `language` is one of `LANGUAGES`. Tokens of chunks are remembered, up to a limit.
    """

    def __init__(self, language: str) -> None:
        import spacy
        from spacy.attrs import IS_PUNCT, ORTH
        from spacy.tokenizer import Tokenizer

        self._language = spacy.blank(language)
        self._split = rules = self._language.tokenizer
        self._ends = self._language.add_pipe("sentencizer").punct_chars
        self._strings = self._language.vocab.strings
        getters = self._language.vocab.lex_attr_getters
        self._is_mark = getters[IS_PUNCT]
        self._language.vocab.lex_attr_getters = {}  # slow, and not needed
        affixes = ("prefix_search", "suffix_search", "infix_finditer", "token_match", "url_match")
        plain = Tokenizer(rules.vocab, **{name: getattr(rules, name) for name in affixes})
        patterns = {rule: [token.text for token in plain(rule)] for rule in rules.rules}
        # Pairs of adjacent tokens in the patterns that spaCy searches among the tokens of all
        # chunks. True: the pattern has white space. False: a match of the pattern changes nothing,
        # but hides matches of other patterns.
        self._pairs: dict[tuple[str, str], bool] = {}
        for rule, pattern in patterns.items():
            for pair in pairwise(pattern):
                self._pairs[pair] = self._pairs.get(pair, False) or len(rule.split()) > 1
        self._before = {name for name, _ in self._pairs}
        self._after = {name for _, name in self._pairs}
        self._changing = {
            rule: patterns[rule]
            for rule, parts in rules.rules.items()
            if [part[ORTH] for part in parts] != patterns[rule]
        }
        self._most_parts = max(map(len, rules.rules.values()))
        self._lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        """Forget all chunks and their tokens, to free memory."""
        self._chunks: dict[str, int] = {}
        self._chars = 0
        self._token_ids: dict[str, int] = {}
        self._names: list[str] = []
        self._table = np.zeros(0, _TOKEN)
        self._flat = np.zeros(0, np.int64)  # token ids of all chunks, concatenated
        self._bounds = np.zeros(1, np.int64)  # start of each chunk in `_flat`, and the end
        # Whether a chunk's last (first) token may be the first (second) of a pair in `_pairs`.
        self._is_before = self._is_after = np.zeros(0, bool)

    def words(self, texts: Sequence[str]) -> Tokens:
        """Return the words of each text: all of spaCy's tokens except white space."""
        with self._lock:
            tokens = self._tokens(texts, [text.split() for text in texts])
        is_word = tokens.column("kind") != SPACE
        if is_word.all():
            return tokens
        starts = running_sum(tokens.sums(is_word))
        return Tokens(tokens.ids[is_word], starts, tokens.table, tokens.names)

    def count_sentences(self, lines: Sequence[str]) -> np.ndarray:
        """Count each line's sentences as spaCy's sentencizer does, int64 (lines,); at least 1."""
        pieces = [line.split() for line in lines]
        for index, line in enumerate(lines):
            if " ".join(pieces[index]) != line:
                pieces[index] = _GAPS.findall(line)
        with self._lock:
            tokens = self._tokens(lines, pieces)
        kinds, line_of = tokens.column("kind"), tokens.text_of
        is_known = kinds != MARK
        kinds, line_of = kinds[is_known], line_of[is_known]
        begins = (kinds[:-1] == END) & (kinds[1:] != END) & (line_of[:-1] == line_of[1:])
        return 1 + np.bincount(line_of[1:][begins], minlength=len(lines))

    def _tokens(self, texts: Sequence[str], pieces: list[list[str]]) -> Tokens:
        """Return spaCy's tokens of texts, from each text's list of chunks in `pieces`.

        A text that is split as a whole replaces its chunks in `pieces`. The caller holds the lock.
        """
        if self._chars > _MOST_CHARS:
            self.forget()
        for index, text in enumerate(texts):
            if _SYMBOL in text:
                pieces[index] = [text]
        chunks, ends = self._look_up(pieces)
        if whole := self._joined(chunks, ends):
            for index in whole:
                pieces[index] = [texts[index].strip()]
            chunks, ends = self._look_up(pieces)
        first, counts = self._bounds[chunks], np.diff(self._bounds)[chunks]
        totals = running_sum(counts)
        ids = self._flat[np.arange(totals[-1]) + np.repeat(first - totals[:-1], counts)]
        return Tokens(ids, totals[ends], self._table, self._names)

    def _look_up(self, pieces: list[list[str]]) -> tuple[np.ndarray, np.ndarray]:
        """Return each chunk's index in the splitter's memory, and the texts' offsets, (texts + 1,).

        Chunks of all texts are concatenated; new ones are split and remembered.
        """
        flat = [*chain.from_iterable(pieces)]
        if new := [chunk for chunk in dict.fromkeys(flat) if chunk not in self._chunks]:
            self._add(new)
        chunks = np.fromiter(map(self._chunks.__getitem__, flat), np.int64, len(flat))
        return chunks, running_sum(np.fromiter(map(len, pieces), np.int64, len(pieces)))

    def _joined(self, chunks: np.ndarray, ends: np.ndarray) -> list[int]:
        """Return the indices of texts where a spaCy rule may match tokens of two adjacent chunks.

        `chunks` and `ends` are the results of `_look_up`.
        """
        text_of = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
        is_edge = self._is_before[chunks[:-1]] & self._is_after[chunks[1:]]
        found: dict[int, None] = {}
        for place in np.flatnonzero(is_edge & (text_of[:-1] == text_of[1:])).tolist():
            names = [*map(self._names_of, chunks[place : place + 2])]
            pairs = product(self._edge(names[0], -1), self._edge(names[1], 0))
            reach = [self._pairs[pair] for pair in pairs if pair in self._pairs]
            if any(reach) or (reach and any(map(self._changes, names))):
                found[int(text_of[place])] = None
        return [*found]

    def _names_of(self, chunk: int) -> list[str]:
        start, stop = self._bounds[chunk : chunk + 2]
        return [self._names[token] for token in self._flat[start:stop]]

    def _edge(self, names: list[str], side: int) -> list[str]:
        """Return the first (`side` is 0) or last (-1) of a chunk's tokens `names`, in a list.

        If a special-case rule of spaCy may have made the tokens at this edge, the list also has the
        first or last token that the chunk would have without the rule.
        """
        found = [names[side]] if names else []
        for count in range(1, self._most_parts + 1 if len(names) > 1 else 1):
            rule = "".join(names[-count:] if side else names[:count])
            if rule in self._changing:
                found.append(self._changing[rule][side])
        return found

    def _changes(self, names: list[str]) -> bool:
        """Return whether a special-case rule of spaCy may have made some of a chunk's tokens."""
        return any(
            "".join(names[start:stop]) in self._changing
            for start in range(len(names))
            for stop in range(start + 1, start + 1 + self._most_parts)
        )

    def _add(self, chunks: list[str]) -> None:
        plain = [chunk for chunk in chunks if len(chunk.split()) == 1 and _SYMBOL not in chunk]
        others = set(chunks).difference(plain)
        split = [*self._split_chunks(plain), *map(self._split_whole, others)]
        for chunk in chain(plain, others):
            self._chunks[chunk] = len(self._chunks)
            self._chars += len(chunk)
        known = self._token_ids
        new = [name for name in dict.fromkeys(chain.from_iterable(split)) if name not in known]
        known.update(zip(new, range(len(known), len(known) + len(new)), strict=True))
        self._names += new
        self._table = np.concatenate([self._table, self._rows(new)])
        ids = [known[name] for name in chain.from_iterable(split)]
        self._flat = np.concatenate([self._flat, np.array(ids, np.int64)])
        for known_edges, side, edges in (
            (self._before, -1, "_is_before"),
            (self._after, 0, "_is_after"),
        ):
            new_edges = [not known_edges.isdisjoint(self._edge(names, side)) for names in split]
            setattr(self, edges, np.append(getattr(self, edges), new_edges))
        bounds = self._bounds[-1] + running_sum(np.array([len(tokens) for tokens in split]))
        self._bounds = np.concatenate([self._bounds, bounds[1:]])

    def _split_chunks(self, chunks: list[str]) -> Iterator[list[str]]:
        """Yield a list of the tokens of each chunk; chunks lack white space and ``IS_ALPHA``."""
        with self._language.memory_zone():
            ids = self._split("\n".join(chunks)).to_array("ORTH")
            names = {id: self._strings[id] for id in np.unique(ids).tolist()}
        tokens = [*map(names.__getitem__, ids.tolist()), "\n"]
        start = 0
        for _ in chunks:
            stop = tokens.index("\n", start)
            yield tokens[start:stop]
            start = stop + 1

    def _split_whole(self, text: str) -> list[str]:
        with self._language.memory_zone():
            names = [token.text for token in self._split(text.replace(_SYMBOL, _STAND_IN))]
        if _SYMBOL in text and _STAND_IN in names:  # it is a word; removed as in datatrove
            return self._split_whole(text.replace(_SYMBOL, ""))
        return [name.replace(_STAND_IN, _SYMBOL) for name in names]

    def _rows(self, names: list[str]) -> np.ndarray:
        """Return a `_TOKEN` record for each of the tokens `names`."""
        rows = np.zeros(len(names), _TOKEN)
        rows["length"] = [len(name) for name in names]
        rows["kind"] = [self._kind(name) for name in names]
        rows["is_symbol"] = [PUNCTUATION.issuperset(name) for name in names]
        rows["has_letter"] = [any(map(str.isalpha, name)) for name in names]
        rows["stop_word"] = [STOP_WORDS.get(name, 0) for name in names]
        powers = np.full(1 + rows["length"].max(initial=0), BASE, np.uint64)
        powers[0] = 1
        powers = np.cumprod(powers)
        rows["factor"] = powers[rows["length"]]
        codes = np.frombuffer("".join(names).encode("utf-32-le"), np.uint32).astype(np.uint64)
        ends = running_sum(rows["length"])
        at = np.arange(len(codes)) - np.repeat(ends[:-1], rows["length"])
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((codes + 1) * powers[at])])
        rows["hash"] = np.diff(sums[ends])
        return rows

    def _kind(self, name: str) -> int:
        if name in self._ends:
            return END
        if name.isspace():
            return SPACE
        return MARK if self._is_mark(name) else OTHER
