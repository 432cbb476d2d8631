"""Labelled spans of texts, as arrays; merging, redaction and conversion to Arrow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.mapping.heads import FLOAT32
from gpuclassify.mapping.stage_counts import MOST_LABELS_WITH_EXAMPLES, best_and_worst, marked_line

# Arrow type of spans: characters from `start` to `end` (exclusive), a label, and its probability.
SPANS = pa.list_(
    pa.struct(
        [("start", pa.int64()), ("end", pa.int64()), ("label", pa.string()), ("score", FLOAT32)]
    )
)
Redact = str | Callable[[str, str], str]  # a template with {label}, or a function of text and label


@dataclass(frozen=True)
class Spans:
    """Labelled spans (character ranges) of several texts, as arrays sorted by text and start.

    Each array has one element per span.
    """

    text_of: np.ndarray  # index of each span's text, int64 (spans,), ascending
    starts: np.ndarray  # first character, int64 (spans,)
    ends: np.ndarray  # exclusive, int64 (spans,)
    labels: np.ndarray  # index of the label in `names`, int64 (spans,)
    scores: np.ndarray  # float32 (spans,)
    names: tuple[str, ...]
    texts: int  # number of texts, including texts without spans

    @classmethod
    def of(cls, texts: int, names: Sequence[str], *parts: Sequence[np.ndarray]) -> Spans:
        """Concatenate unsorted spans of several texts, and sort them by text, start and end.

        Each of `parts` has some of the spans, as the arrays `text_of`, `starts`, `ends`, `labels`
        and `scores`, in this order.
        """
        kinds = (np.int64, np.int64, np.int64, np.int64, np.float32)
        columns = zip(*parts, strict=True) if parts else [()] * len(kinds)
        joined = [
            np.concatenate([np.zeros(0, kind), *column]).astype(kind)
            for kind, column in zip(kinds, columns, strict=True)
        ]
        order = np.lexsort((joined[2], joined[1], joined[0]))
        text_of, starts, ends, labels, scores = (column[order] for column in joined)
        return cls(text_of, starts, ends, labels, scores, tuple(names), texts)

    @classmethod
    def from_arrow(cls, columns: Sequence[pa.Array]) -> Spans:
        """Collect each row's spans from columns of type `SPANS` and equal lengths; null is none."""
        names: dict[str, int] = {}
        parts = []
        for column in columns:
            counts = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False)
            flat = pc.list_flatten(column)
            starts, ends, labels, scores = (
                pc.struct_field(flat, name) for name in ("start", "end", "label", "score")
            )
            coded = labels.dictionary_encode()
            indices = [names.setdefault(name, len(names)) for name in coded.dictionary.to_pylist()]
            codes = np.array(indices, dtype=np.int64)[coded.indices.to_numpy(zero_copy_only=False)]
            numbers = (part.to_numpy(zero_copy_only=False) for part in (starts, ends, scores))
            start, end, score = numbers
            parts.append((np.repeat(np.arange(len(column)), counts), start, end, codes, score))
        return cls.of(len(columns[0]), tuple(names), *parts)

    def __len__(self) -> int:
        return self.texts

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """Number of spans of each text, int64 (texts,)."""
        return np.bincount(self.text_of, minlength=self.texts)

    def keys(self) -> list[tuple[int, int, int, str]]:
        """Return a tuple (index of the text, start, end, label) for each span, to compare spans."""
        columns = (self.text_of.tolist(), self.starts.tolist(), self.ends.tolist())
        return [*zip(*columns, self.arrow_labels.to_pylist(), strict=True)]

    @property
    def arrow_labels(self) -> pa.Array:
        """Label of each span, as an Arrow array of strings, (spans,)."""
        return pa.array(self.names, pa.string()).take(pa.array(self.labels))

    def take(self, which: np.ndarray) -> Spans:
        """Return the spans at `which`, a mask or ascending indices; the number of texts stays."""
        columns = ("text_of", "starts", "ends", "labels", "scores")
        return replace(self, **{name: getattr(self, name)[which] for name in columns})

    def kept(
        self, labels: Sequence[str] | None, min_score: float | Sequence[tuple[str, float]] | None
    ) -> Spans:
        """Return the spans with one of `labels` and at least `min_score`; None means any."""
        least: Mapping[str, float] = dict(min_score) if isinstance(min_score, tuple) else {}
        usual = min_score if isinstance(min_score, float) else -np.inf
        minimums = [
            least.get(name, usual) if labels is None or name in labels else np.inf
            for name in self.names
        ]
        return self.take(self.scores >= np.array(minimums, dtype=np.float32)[self.labels])

    def merged(self, *, touching: bool = False) -> Spans:
        """Merge overlapping spans and, with `touching`, also adjacent ones, to new `Spans`.

        Labels may differ. A merged span has the label and the score of its longest span.
        """
        if not len(self.starts):
            return self
        shift = self.text_of * (self.ends.max() + 1)  # keeps the texts' ranges disjoint
        reached = np.maximum.accumulate(self.ends + shift)
        is_first = np.append(True, self.starts[1:] + shift[1:] >= reached[:-1] + touching)
        first = np.flatnonzero(is_first)
        group = np.cumsum(is_first) - 1
        longest = np.lexsort((self.starts, self.starts - self.ends, group))[first]
        ends = np.maximum.reduceat(self.ends, first)
        return replace(self.take(longest), starts=self.starts[first], ends=ends)

    def covered(self) -> np.ndarray:
        """Return the number of characters of each text that are in any span, int64 (texts,)."""
        whole = self.merged()
        sums = np.bincount(whole.text_of, whole.ends - whole.starts, minlength=self.texts)
        return sums.astype(np.int64)

    def array(self) -> pa.ListArray:
        """Return an Arrow array of type `SPANS`, with one list of spans per text."""
        columns = [self.starts, self.ends, self.arrow_labels, self.scores]
        offsets = np.append(0, np.cumsum(self.counts)).astype(np.int32)
        flat = pa.StructArray.from_arrays(
            [pa.array(column) for column in columns], fields=SPANS.value_type.fields
        )
        return pa.ListArray.from_arrays(offsets, flat)

    def redacted(self, texts: Sequence[str | None], redact: Redact) -> list[str | None]:
        """Return texts with spans replaced, overlapping ones once; None stays None."""
        result = list(texts)
        for index, spans in self.merged().by_text():
            if (text := texts[index]) is None:  # spans of other mappers may have no text here
                continue
            pieces: list[str] = []
            reached = 0
            for start, end, code in spans:
                new = replacement(redact, text[start:end], self.names[code])
                pieces += [text[reached:start], new]
                reached = end
            result[index] = "".join([*pieces, text[reached:]])
        return result

    def by_text(self) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
        """Yield the index of each text with spans, and a list of (start, end, index in `names`)."""
        columns = (self.starts.tolist(), self.ends.tolist(), self.labels.tolist())
        spans = [*zip(*columns, strict=True)]
        indices, first = np.unique(self.text_of, return_index=True)
        bounds = pairwise([*first.tolist(), len(spans)])
        for index, (start, stop) in zip(indices.tolist(), bounds, strict=True):
            yield index, spans[start:stop]

    def examples(self, texts: Any, most: int) -> dict[str, list[list[Any]]]:
        """Return the spans with the highest and the lowest scores by label, for reports.

        A span is a list of its score and a line of text in which it is marked. Each of the most
        frequent labels has up to `most` spans with the highest scores, and up to `most` with the
        lowest.
        """
        counts = np.bincount(self.labels, minlength=len(self.names))
        picked: dict[str, list[list[Any]]] = {}
        for code in np.argsort(-counts, kind="stable")[:MOST_LABELS_WITH_EXAMPLES].tolist():
            spans = np.flatnonzero(self.labels == code)
            ordered = spans[np.argsort(-self.scores[spans], kind="stable")].tolist()
            for span in best_and_worst(ordered, most):
                (text,) = texts.take(self.text_of[[span]])
                line = marked_line(text, int(self.starts[span]), int(self.ends[span]))
                score = round(float(self.scores[span]), 4)
                picked.setdefault(self.names[code], []).append([score, line])
        return picked


def replacement(redact: Redact, text: str, label: str) -> str:
    """Return the text that replaces a span, from the template or function `redact`."""
    if isinstance(redact, str):
        return redact.format(label=label)
    new = redact(text, label)
    if not isinstance(new, str):
        raise TypeError(f"redact= gave a {type(new).__name__} for {label!r}: it must return a str")
    return new


def as_texts(spans: Spans) -> list[str]:
    """Return a line with the spans of each text, such as "PER 0:5, LOC 12:18", to compare them."""
    shown = [
        f"{spans.names[code]} {start}:{end}"
        for code, start, end in zip(spans.labels, spans.starts, spans.ends, strict=True)
    ]
    bounds = np.append(0, np.cumsum(spans.counts)).tolist()
    return [", ".join(shown[start:stop]) for start, stop in pairwise(bounds)]
