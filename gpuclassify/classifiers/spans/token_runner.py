"""Run a token classifier, merge overlapping windows of tokens, and convert tokens to characters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuclassify.classifiers.spans.columns import SpanHead, SpanOutputs
from gpuclassify.classifiers.spans.spans import Spans
from gpuclassify.classifiers.spans.tags import Predictions, TagSet, tags_of, words_of
from gpuclassify.frames import Texts
from gpuclassify.mapping.pinned_model import PinnedModel
from gpuclassify.mapping.runners import EncoderRunner
from gpuclassify.models.checkpoint import Checkpoint, CheckpointError, read_token_classifier
from gpuclassify.workers.run_context import RunStats

if TYPE_CHECKING:
    from gpuclassify.inference.loaded_model import LoadedModel
    from gpuclassify.tokenizing.text_tokenizer import TextTokenizer, TokenBatch

_BLOCK_CHARS = 4_000_000  # maximum characters per block of texts encoded with offsets


class TokenClassifier(PinnedModel):
    """Pinned checkpoint of a token classifier, a model that gives each token a label."""

    def read(self) -> Checkpoint:
        """Return the model's description, read from its configuration files without weights."""
        return read_token_classifier(self.identity, cache_dir=self.options.cache_dir)

    @property
    def tags(self) -> TagSet:
        """Meaning of the model's labels: for B-PER, the label PER, and that a span begins."""
        is_raw = self.options.aggregation == "none"
        return tags_of(self.checkpoint.labels, self.options.scheme, is_raw)


class TokenHead(SpanHead):
    """Head that converts spans found by a token classifier to columns, and filters rows by them."""

    model: TokenClassifier

    @property
    def labels(self) -> list[Any]:
        """Labels that spans can have; the labels in the settings if the model cannot be reached."""
        is_known = self.model.is_readable()
        return list(self.model.tags.names if is_known else self.options.labels)

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raise ValueError if the settings name a label that spans of the model cannot have."""
        self.check_settings()


class TokenRunner(EncoderRunner):
    """Runner that labels tokens, and joins neighbouring tokens of a label to spans."""

    model: TokenClassifier

    @property
    def encoder(self) -> EncoderRunner:
        """The runner itself, because its network can share layers with other mappers' networks."""
        return self

    def run_key(self, model: LoadedModel) -> tuple[Hashable, ...]:
        """Return the model's key in the caches of batch limits and of outputs."""
        return (*super().run_key(model), self.options.keeps_all_scores)

    def run(self, texts: Texts, stats: RunStats, name_text: Callable[[int], str]) -> SpanOutputs:
        """Find the labelled spans of distinct texts.

        Only texts with a label other than "O" are tokenized again, to get character offsets.
        """
        with self.lease(*self.device_and_dtype()) as model:
            tokenizer = self.text_tokenizer(model)
            if tokenizer.backend is None:
                raise CheckpointError(
                    f"the tokenizer of {self.options.model} is written in Python, and does not say "
                    "where tokens are in a text: save one with a tokenizer.json beside the model"
                )
            outputs = super().run(texts, stats, name_text)
            counts = outputs.counts
            if counts is None:
                counts = np.ones(len(texts), dtype=np.int64)
            found = _WindowedTokens(
                tokenizer, self.model.tags, self.options, outputs.values, counts, outputs.lengths
            )
            parts = [*found.parts(texts)]
        return SpanOutputs(
            outputs.values,
            outputs.text_windows,
            outputs.seen_share,
            texts=texts,
            spans=Spans.of(len(texts), self.model.tags.names, *parts),
        )

    def _are_finite(self, values: np.ndarray) -> np.ndarray:
        return np.fromiter((np.isfinite(part).all() for part in values), bool, len(values))

    def _rescue(
        self, model: LoadedModel, tokens: TokenBatch, name_text: Callable[[], str]
    ) -> np.ndarray:
        import torch

        logits = super()._rescue(model, tokens, name_text)
        kept = model.reduce(torch.from_numpy(logits), self.options.keeps_all_scores)
        return kept.numpy()


class _WindowedTokens:
    """Outputs for tokens in overlapping windows, to merge and convert to labelled spans."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        tags: TagSet,
        options: Any,
        values: np.ndarray,
        counts: np.ndarray,
        lengths: Any,
    ) -> None:
        self._tokenizer = tokenizer
        self._tags = tags
        self._options = options
        # Label and probability of each token, or all labels' probabilities, (windows,) of arrays.
        self._values = values
        self._lengths = np.maximum(lengths, 0)  # tokens of the text in each window
        self._firsts = np.append(0, np.cumsum(counts))  # first window of each text

    def parts(self, texts: Texts) -> Iterator[Predictions]:
        """Yield the labelled spans of `texts`, all texts of a `TokenRunner.run`, block by block."""
        from gpuclassify.tokenizing.prefetch import text_blocks

        labelled = np.flatnonzero(self._have_labels())
        with_labels = texts.take(labelled)
        for start, stop in text_blocks(with_labels.char_counts, _BLOCK_CHARS, _BLOCK_CHARS):
            block = with_labels.take(np.arange(start, stop))
            yield self._spans(block, labelled[start:stop])

    def _have_labels(self) -> np.ndarray:
        """Return which texts have a token in a labelled span, bool (texts,)."""
        if not len(self._values):
            return np.zeros(0, dtype=bool)
        flat, sizes = np.concatenate(self._values), np.array([*map(len, self._values)])
        begins = np.cumsum(sizes) - sizes
        position = np.arange(len(flat)) - np.repeat(begins + self._tokenizer.special_before, sizes)
        is_text = (position >= 0) & (position < np.repeat(self._lengths, sizes))
        in_span = is_text & (self._tags.spans[self._best(flat)[0]] >= 0)
        return np.logical_or.reduceat(np.logical_or.reduceat(in_span, begins), self._firsts[:-1])

    def _spans(self, texts: list[str], indices: np.ndarray) -> Predictions:
        """Return the labelled spans of a block of texts.

        `indices` are the texts' indices in `TokenRunner.run`; `text_of` of the result has them.
        """
        encodings = self._tokenizer.backend.encode_batch(texts, add_special_tokens=False)
        ids, offsets, values, counts = [], [], [], []
        for index, encoding in zip(indices.tolist(), encodings, strict=True):
            first, rows = self._merge_windows(index, len(encoding.ids))
            ids.append(np.array(encoding.ids[first : first + len(rows)], dtype=np.int64))
            offsets += encoding.offsets[first : first + len(rows)]
            values.append(rows)
            counts.append(len(rows))
        starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
        flat = np.concatenate(values)
        text_of = np.repeat(np.arange(len(texts)), counts)
        tokens = Predictions(text_of, starts, ends, *self._best(flat))
        aggregation = self._options.aggregation
        if aggregation not in ("simple", "none"):
            is_continued = self._continued(texts, tokens, np.concatenate(ids))
            tokens = words_of(tokens, is_continued, aggregation, flat)
        return _trimmed(self._tags.group(tokens), texts, indices)

    def _merge_windows(self, index: int, tokens: int) -> tuple[int, np.ndarray]:
        """Return the index of a text's first token that the model has read, and the text's outputs.

        The outputs have a row per token read. A token in two windows has the row of the window with
        more context. `tokens` is the number of the text's tokens, read or not.
        """
        windows = range(self._firsts[index], self._firsts[index + 1])
        before, cuts_left = self._tokenizer.special_before, self._tokenizer.cuts_left
        lengths = [int(self._lengths[window]) for window in windows]
        rows = [
            self._values[window][before : before + length]
            for window, length in zip(windows, lengths, strict=True)
        ]
        if len(rows) == 1:
            first = max(tokens - lengths[0], 0) if cuts_left else 0
            return first, rows[0][:tokens]
        step = lengths[0] - (self._tokenizer.overlap or 0)
        starts = [number * step for number in range(len(rows))]
        if cuts_left:
            starts = [tokens - first - n for first, n in zip(starts, lengths, strict=True)][::-1]
            rows, lengths = rows[::-1], lengths[::-1]
        borders = [
            (start + length + following + 1) // 2
            for (start, following), length in zip(pairwise(starts), lengths, strict=False)
        ]
        kept = pairwise([0, *borders, tokens])
        parts = zip(rows, starts, kept, strict=True)
        return 0, np.concatenate([row[a - start : b - start] for row, start, (a, b) in parts])

    def _continued(self, texts: list[str], tokens: Predictions, ids: np.ndarray) -> np.ndarray:
        """Return a mask of tokens that continue the word before, as in transformers' pipeline.

        WordPiece marks such tokens by a prefix; in other tokenizers, a word begins with a space.
        """
        if getattr(self._tokenizer.backend.model, "continuing_subword_prefix", None):
            is_continued = self._token_chars[ids] != tokens.ends - tokens.starts
        else:
            data = [np.frombuffer(f"{text} ".encode("utf-32-le"), np.uint32) for text in texts]
            is_space = np.concatenate(data) == ord(" ")
            sizes = np.array([*map(len, data)])
            first = (np.cumsum(sizes) - sizes)[tokens.text_of] + tokens.starts
            is_end = tokens.starts == sizes[tokens.text_of] - 1  # a position without a character
            is_continued = ~is_space[first - 1] & (is_end | ~is_space[first])
            is_continued &= tokens.starts > 0
        return is_continued & (ids != self._tokenizer.unknown_id)

    def _best(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self._options.keeps_all_scores:
            return values.argmax(axis=1), values.max(axis=1)
        return values[:, 0].astype(np.int64), values[:, 1]

    @functools.cached_property
    def _token_chars(self) -> np.ndarray:
        vocabulary = self._tokenizer.backend.get_vocab()
        chars = np.zeros(max(vocabulary.values()) + 1, dtype=np.int64)
        chars[[*vocabulary.values()]] = [*map(len, vocabulary)]
        return chars


def _trimmed(spans: Predictions, texts: Sequence[str], indices: np.ndarray) -> Predictions:
    """Strip white space from spans, and drop blank ones: many models' tokens begin with a space.

    `text_of` of the result has the `indices` of the texts, instead of indices in `texts`.
    """
    starts, ends = spans.starts.copy(), spans.ends.copy()
    bounds = zip(spans.text_of.tolist(), starts.tolist(), ends.tolist(), strict=True)
    for row, (text, start, end) in enumerate(bounds):
        span = texts[text][start:end]
        if span and not (span[0].isspace() or span[-1].isspace()):
            continue
        starts[row] += len(span) - len(span.lstrip())
        ends[row] = starts[row] + len(span.strip())
    trimmed = spans._replace(text_of=indices[spans.text_of], starts=starts, ends=ends)
    return Predictions(*(part[starts < ends] for part in trimmed))
