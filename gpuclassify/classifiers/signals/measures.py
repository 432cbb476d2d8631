"""Signals of a block of texts, computed as datatrove's filters of version 0.10.1 compute them.

A ratio with a denominator of 0 is 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from gpuclassify.classifiers.signals.characters import POLICIES, TERMINAL
from gpuclassify.classifiers.signals.words import BASE, Splitter, Tokens, code_of, running_sum

TOP = (2, 3, 4)  # values of n for which each text's most frequent n-gram of words is found
DUPLICATE = (5, 6, 7, 8, 9, 10)  # values of n for which repeated n-grams of words are found
SHORT_LINE = 30  # maximum characters of a short line
LONGEST_WORD = 1000  # maximum characters of a word in a line that C4 keeps
_LINES, _PARAGRAPHS = re.compile("\n+"), re.compile("\n{2,}")
_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_SEED = np.uint64(0xD1B54A32D192ED03)  # odd; equal n-grams of two texts get different hashes

Measures = dict[str, np.ndarray]  # (texts,) numbers, by name of the signal


@dataclass(frozen=True)
class Block:
    """Texts and their words. `splitter` splits all texts when `words` is first used."""

    texts: Sequence[str]
    splitter: Splitter

    @cached_property
    def words(self) -> Tokens:
        """Words of the texts as spaCy splits them: all of its tokens except white space."""
        return self.splitter.words(self.texts)


def gopher(block: Block) -> Measures:
    """Return the signals of Gopher's quality filter: see `SETS` in `signals.py`."""
    texts, words = block.texts, block.words
    is_plain = ~words.column("is_symbol")
    plain = words.sums(is_plain)
    found = np.bitwise_or.reduceat(  # the added 0 ends empty texts
        np.append(words.column("stop_word"), np.uint8(0)), words.starts[:-1]
    )
    found[words.counts == 0] = 0
    lines = [text.splitlines() for text in texts]
    bullets = [sum(s.lstrip().startswith(("•", "-")) for s in own) for own in lines]
    ellipses = [sum(s.rstrip().endswith(("...", "…")) for s in own) for own in lines]
    counts = [len(own) for own in lines]
    return {
        "gopher_words": plain,
        "gopher_mean_word_length": _share(words.sums(words.column("length") * is_plain), plain),
        "gopher_hashes_per_word": _share([text.count("#") for text in texts], words.counts),
        "gopher_ellipses_per_word": _share(
            [text.count("...") + text.count("…") for text in texts], words.counts
        ),
        "gopher_lines": np.array(counts),
        "gopher_bullet_line_share": _share(bullets, counts),
        "gopher_ellipsis_line_share": _share(ellipses, counts),
        "gopher_alphabetic_word_share": _share(
            words.sums(words.column("has_letter")), words.counts
        ),
        "gopher_stop_words": np.unpackbits(found[:, None], axis=1).sum(axis=1),
    }


def repetition(block: Block) -> Measures:
    """Return the signals of Gopher's repetition filter: see `SETS` in `signals.py`."""
    texts, words = block.texts, block.words
    chars = np.array([len(text) for text in texts])
    found: Measures = {"repetition_chars": chars}
    for name, split in (("line", _LINES.split), ("paragraph", _split_paragraphs)):
        pieces = [split(text) for text in texts]
        counts = np.array([len(own) for own in pieces])
        distinct = [set(own) for own in pieces]
        found[f"repetition_duplicate_{name}_share"] = _share(
            counts - [len(own) for own in distinct], counts
        )
        found[f"repetition_duplicate_{name}_char_share"] = _share(_repeated_chars(pieces), chars)
    for n, top in zip(TOP, _top_chars(words), strict=True):
        found[f"repetition_top_{n}_gram_share"] = _share(top, chars)
    for n, repeated in zip(DUPLICATE, _duplicate_chars(words), strict=True):
        found[f"repetition_duplicate_{n}_gram_share"] = _share(repeated, chars)
    return found


def c4(block: Block) -> Measures:
    """Return the signals of C4's quality filter: see `SETS` in `signals.py`."""
    texts = block.texts
    kept: list[str] = []
    # Lines of each text by `_sort_line`: kept, with "lorem ipsum", with a curly bracket.
    counts = np.zeros((3, len(texts)), np.int64)
    for index, text in enumerate(texts):
        for line in text.splitlines():
            kind, clean = _sort_line(line.strip())
            if kind is not None:
                counts[kind, index] += 1
            if kind == 0:
                kept.append(clean)
    sentences = running_sum(block.splitter.count_sentences(kept)) if kept else np.zeros(1, np.int64)
    return {
        "c4_sentences": np.diff(sentences[running_sum(counts[0])]),
        "c4_lorem_ipsum_lines": counts[1],
        "c4_curly_bracket_lines": counts[2],
    }


def _sort_line(line: str) -> tuple[int | None, str]:
    """Return the kind of a stripped line in C4's filter, and the line without citations.

    Kinds: 0, a line that C4 keeps; 1, with "lorem ipsum", and 2, with a curly bracket: C4 drops
    the whole text; None: C4 drops only the line. A line with an overlong word keeps its citations.
    """
    if len(line) > LONGEST_WORD and max(map(len, line.split())) > LONGEST_WORD:
        return None, line
    clean = _CITATION.sub("", line) if "[" in line else line
    if not clean.endswith((".", "?", "!", '"', "'")) or clean.endswith("..."):
        return None, clean
    if len(line.split(maxsplit=2)) < 3:
        return None, clean
    lower = clean.lower()
    if "lorem ipsum" in lower:
        return 1, clean
    if "javascript" in lower:
        return None, clean
    if "{" in clean:
        return 2, clean
    return None if any(policy in lower for policy in POLICIES) else 0, clean


def fineweb(block: Block) -> Measures:
    """Return the signals of FineWeb's quality filter: see `SETS` in `signals.py`."""
    texts = block.texts
    lines = [[s for s in text.split("\n") if not (s == "" or s.isspace())] for text in texts]
    counts = [len(own) for own in lines]
    newlines = np.array([text.count("\n") for text in texts])
    chars = np.array([len(text) for text in texts]) - newlines
    ended = [sum(s.endswith(TERMINAL) for s in own) for own in lines]
    short = [sum(len(s) <= SHORT_LINE for s in own) for own in lines]
    return {
        "fineweb_punctuated_line_share": _share(ended, counts),
        "fineweb_short_line_share": _share(short, counts),
        "fineweb_duplicate_line_char_share": _share(_repeated_chars(lines), chars),
        "fineweb_newlines_per_word": _share(newlines, block.words.counts),
    }


MEASURES: dict[str, Callable[[Block], Measures]] = {
    "gopher": gopher, "repetition": repetition, "c4": c4, "fineweb": fineweb,
}  # fmt: skip


def _share(part: ArrayLike, whole: ArrayLike) -> np.ndarray:
    divisor = np.asarray(whole, np.float64)
    return np.divide(part, divisor, out=np.zeros(len(divisor)), where=divisor > 0)


def _split_paragraphs(text: str) -> list[str]:
    return _PARAGRAPHS.split(text.strip())


def _repeated_chars(pieces: list[list[str]]) -> list[int]:
    return [sum(map(len, own)) - sum(map(len, set(own))) for own in pieces]


def _ngrams(
    words: Tokens, sizes: Sequence[int], separator: str
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield n, the indices of first words and the hashes of n-grams of words, for n in `sizes`.

    A hash is of the text's index and the words joined by `separator`. Sizes are at least 2, and no
    n-gram spans two texts.
    """
    hashes, factors, text_of = words.column("hash"), words.column("factor"), words.text_of
    for char in separator:
        hashes, factors = hashes + code_of(char) * factors, factors * BASE
    stops = words.starts[1:][text_of]
    keys, reach = hashes, factors
    for n in range(2, max(sizes) + 1):
        keys = keys[:-1] + reach[:-1] * hashes[n - 1 :]
        reach = reach[:-1] * factors[n - 1 :]
        if n in sizes:
            at = np.flatnonzero(np.arange(n, n + len(keys)) <= stops[: len(keys)])
            yield n, at, keys[at] + text_of[at].astype(np.uint64) * _SEED


def _top_chars(words: Tokens) -> Iterator[np.ndarray]:
    """Yield each text's number of characters in its most frequent n-gram of words, by n in `TOP`.

    It is the n-gram's length, with spaces, times its occurrences, even if these overlap.
    """
    ends, text_of = running_sum(words.column("length") + 1), words.text_of
    wide = len(text_of) + 1
    for n, at, keys in _ngrams(words, TOP, " "):
        best = np.zeros(len(words.counts), np.int64)
        if len(at):
            order = np.argsort(keys)
            starts = np.flatnonzero(np.append(True, np.diff(keys[order]) != 0))
            firsts = np.minimum.reduceat(at[order], starts)
            counts = np.diff(np.append(starts, len(at)))
            np.maximum.at(best, text_of[firsts], counts * wide - firsts)
        counts = -(-best // wide)
        first = counts * wide - best
        yield counts * (ends[np.minimum(first + n, wide - 1)] - ends[first] - 1)


def _duplicate_chars(words: Tokens) -> Iterator[list[int]]:
    """Yield a list for each n in `DUPLICATE`: each text's characters in repeated n-grams of words.

    First occurrences in a text and spaces do not count, and no word counts twice.
    """
    offsets, text_of = running_sum(words.column("length")), words.text_of
    joined: dict[int, str] = {}
    for n, at, keys in _ngrams(words, DUPLICATE, ""):
        order = np.argsort(keys)
        is_equal = np.diff(keys[order]) == 0
        is_repeated = np.zeros(len(at), bool)
        is_repeated[order[1:][is_equal]] = is_repeated[order[:-1][is_equal]] = True
        at = at[is_repeated]
        found = [0] * len(words.counts)
        index, seen, free, base = -1, set[str](), 0, 0
        columns = (at, text_of[at], offsets[at], offsets[at + n])
        for word, text, start, stop in zip(*(column.tolist() for column in columns), strict=True):
            if text != index:
                index, seen, free = text, set(), 0
                base = int(offsets[words.starts[text]])
                if text not in joined:
                    joined[text] = words.joined(text)
            if word < free:
                continue
            ngram = joined[text][start - base : stop - base]
            if ngram in seen:
                found[text] += stop - start
                free = word + n
            seen.add(ngram)
        yield found
