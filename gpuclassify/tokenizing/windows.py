"""Long texts as overlapping windows, and the windows' outputs as one row a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpuclassify.tokenizing.text_tokenizer import TextTokens
from gpuclassify.tokenizing.token_batch import TokenBatch, flat_batch


@dataclass(frozen=True)
class Windows:
    """The windows of many texts that are run, in the texts' order.

    Attributes
    ----------
    tokens : TokenBatch
        Every window as a text of its own.
    counts : ndarray of int64, shape (texts,)
        How many of them each text has; at least one.
    found : ndarray of int64, shape (texts,)
        How many it would have; more than `counts` where only the first one is run.
    seen_share : ndarray of float32, shape (texts,)
        Share of each text's tokens that is run, as `TokenBatch.seen_share` tells it.
    """

    tokens: TokenBatch
    counts: np.ndarray
    found: np.ndarray
    seen_share: np.ndarray

    @property
    def truncated(self) -> int:
        """How many texts are not run to the full."""
        return int((self.seen_share < 1).sum())


def all_windows(texts: Sequence[TextTokens]) -> Windows:
    """Every window of every text."""
    counts = _window_counts(texts)
    types = [ids for text in texts if text.type_ids is not None for ids in text.type_ids]
    tokens = flat_batch([ids for text in texts for ids in text.windows], types)
    shares = [min(1, sum(map(len, text.windows)) / text.whole_length) for text in texts]
    return Windows(tokens, counts, counts, np.array(shares, dtype=np.float32))


def first_windows(texts: Sequence[TextTokens]) -> Windows:
    """The first window of each text."""
    whole = np.fromiter((text.whole_length for text in texts), dtype=np.int64, count=len(texts))
    types = [text.type_ids[0] for text in texts if text.type_ids is not None]
    tokens = flat_batch([text.windows[0] for text in texts], types, whole)
    ones = np.ones(len(texts), dtype=np.int64)
    return Windows(tokens, ones, _window_counts(texts), tokens.seen_share)


def only_windows(tokens: TokenBatch) -> Windows:
    """The windows of texts that have one each, cut or not."""
    ones = np.ones(len(tokens), dtype=np.int64)
    return Windows(tokens, ones, ones, tokens.seen_share)


def _window_counts(texts: Sequence[TextTokens]) -> np.ndarray:
    return np.fromiter((len(text.windows) for text in texts), dtype=np.int64, count=len(texts))


def aggregate(values: np.ndarray, counts: np.ndarray, lengths: np.ndarray, how: str) -> np.ndarray:
    """One row a text, float32 (texts, outputs), from one row a window.

    Parameters
    ----------
    values : ndarray of float32, shape (windows, outputs)
    counts : ndarray of int64, shape (texts,)
        Windows of each text, at least one.
    lengths : ndarray of int64, shape (windows,)
        The text's own tokens in each window.
    how : {"mean", "max", "tokens"}
        Mean or maximum of each output, or the mean weighted by the text's tokens in the windows,
        which is the plain mean of a text without any. A text with a single window keeps its values
        to the bit.
    """
    if not len(counts):
        return np.zeros((0, values.shape[1]), dtype=values.dtype)
    starts = np.cumsum(counts) - counts
    if how == "max":
        return np.maximum.reduceat(values, starts, axis=0)
    weights = np.ones(len(values))
    if how == "tokens":
        has_any = np.repeat(np.add.reduceat(lengths, starts) > 0, counts)
        weights[has_any] = lengths[has_any]
    sums = np.add.reduceat(values * weights[:, None], starts, axis=0)
    return (sums / np.add.reduceat(weights, starts)[:, None]).astype(np.float32)
