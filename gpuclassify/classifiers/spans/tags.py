"""BIO-style tags: join tokens or words with tags such as B-PER to spans."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from gpuclassify.settings.checks import check_choice

Aggregation = Literal["simple", "first", "average", "max", "none"]
Scheme = Literal["iob1", "iob2", "bioes", "bilou", "plain"]
OUTSIDE = "O"
# Prefixes of labels at which a span begins, and prefixes at which one ends. In IOB1, a span begins
# with B only next to another span of its label, which IOB2's rules read correctly.
_LETTERS = {
    "iob1": ("B", ""),
    "iob2": ("B", ""),
    "bioes": ("BS", "ES"),
    "bilou": ("BU", "LU"),
    "plain": ("", ""),
}
_TAG = re.compile(r"([BIESLU])-(.+)", re.DOTALL)


class Predictions(NamedTuple):
    """Concatenated predictions for the tokens, words or spans of several texts, as arrays.

    Each array has one element per token, word or span.
    """

    text_of: np.ndarray  # index of the text, int64 (tokens,), ascending
    starts: np.ndarray  # first character, int64 (tokens,)
    ends: np.ndarray  # exclusive, int64 (tokens,)
    labels: np.ndarray  # index of the best label, int64 (tokens,)
    scores: np.ndarray  # probability of the label, float32 (tokens,)


@dataclass(frozen=True)
class TagSet:
    """Meaning of a token classifier's labels: their span labels, and where spans begin and end."""

    names: tuple[str, ...]  # labels of spans
    spans: np.ndarray  # index in `names` of each label, int64 (labels,); -1 for none
    begins: np.ndarray  # whether a span begins at the label, bool (labels,)
    ends: np.ndarray  # whether a span ends at the label, bool (labels,)

    def group(self, tokens: Predictions) -> Predictions:
        """Join neighbouring tokens of one span label to spans, and drop tokens outside of spans.

        Tags such as B also separate spans. Labels of `tokens` are indices in the model's labels,
        and a span's label is an index in `names`. A span's score is the mean of its tokens' scores.
        """
        if not len(tokens.labels):
            return tokens
        codes, labels = self.spans[tokens.labels], tokens.labels
        is_first = np.append(True, (codes[1:] != codes[:-1]) | self.begins[labels[1:]])
        is_first[1:] |= self.ends[labels[:-1]] | (np.diff(tokens.text_of) > 0)
        first = np.flatnonzero(is_first)
        counts = np.diff(np.append(first, len(labels)))
        means = np.add.reduceat(tokens.scores.astype(np.float64), first) / counts
        grouped = Predictions(
            tokens.text_of[first],
            tokens.starts[first],
            tokens.ends[first + counts - 1],
            codes[first],
            means.astype(np.float32),
        )
        return Predictions(*(part[codes[first] >= 0] for part in grouped))


def tags_of(labels: Sequence[str], scheme: str | None = None, is_raw: bool = False) -> TagSet:
    """Parse a model's labels, such as B-PER, by a tagging scheme; None derives it from the labels.

    With `is_raw`, every token with a label other than "O" is a span, with the model's own label.
    """
    kind = scheme or scheme_of(labels)
    check_choice("scheme", kind, tuple(_LETTERS))
    starting, ending = _LETTERS[kind]
    pairs = [_split(name, kind) for name in labels]
    if kind != "plain" and not any(letter for letter, _ in pairs):
        raise ValueError(
            f'scheme="{kind}" needs labels such as B-PER, and the model\'s are '
            f'{", ".join(labels[:8])}: pass scheme="plain", or leave it out'
        )
    if is_raw:
        pairs = [("", name) for name in labels]
    names = tuple(dict.fromkeys(name for _, name in pairs if name != OUTSIDE))
    return TagSet(
        names,
        np.array([-1 if name == OUTSIDE else names.index(name) for _, name in pairs]),
        np.array([is_raw or letter in {*starting} for letter, _ in pairs]),
        np.array([letter in {*ending} for letter, _ in pairs]),
    )


def _split(label: str, scheme: str) -> tuple[str, str]:
    """Split B-PER, for example, into "B" and "PER"; a label without a tag of `scheme` gets ""."""
    match = None if scheme == "plain" else _TAG.fullmatch(label)
    if match is None or match[1] not in {"I", *"".join(_LETTERS[scheme])}:
        return "", label
    return match[1], match[2]


def scheme_of(labels: Sequence[str]) -> str:
    """Guess the tagging scheme from the prefixes of labels: plain, iob2, bioes or bilou."""
    tags = [match.groups() for label in labels if (match := _TAG.fullmatch(label))]
    inside = {name for letter, name in tags if letter in "BI"}
    letters = {letter for letter, name in tags if name in inside}
    if not inside:
        return "plain"
    if letters & set("LU"):
        return "bilou"
    return "bioes" if letters & set("ES") else "iob2"


def words_of(
    tokens: Predictions, is_continued: np.ndarray, aggregation: Aggregation, scores: np.ndarray
) -> Predictions:
    """Aggregate predictions for tokens to predictions for words.

    `is_continued`, bool (tokens,), marks tokens that continue the previous token's word. A word has
    the label and score of its first token ("first") or of its most certain token ("max"), or the
    label with the largest mean of its tokens' probabilities, and this mean ("average"). Only
    "average" needs `scores`, all labels' probabilities, float32 (tokens, labels).
    """
    is_first = ~is_continued
    is_first[:1] = True
    is_first[1:] |= np.diff(tokens.text_of) > 0
    first = np.flatnonzero(is_first)
    counts = np.diff(np.append(first, len(is_first)))
    picked = first
    labels, best = tokens.labels, tokens.scores
    if aggregation == "max" and len(first):
        word = np.cumsum(is_first) - 1
        order = np.lexsort((np.arange(len(word)), -best, word))
        picked = order[first]
    labels, best = labels[picked], best[picked]
    if aggregation == "average" and len(first):
        means = np.add.reduceat(scores, first) / counts[:, None]
        labels, best = means.argmax(axis=1), means.max(axis=1)
    ends = tokens.ends[first + counts - 1]
    return Predictions(tokens.text_of[first], tokens.starts[first], ends, labels, best)
