"""Long texts as overlapping windows, and the windows' outputs as one row a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gpuclassify.inference.tokens import TextTokens, TokenBatch, flat_batch


@dataclass(frozen=True)
class Windows:
    """The windows of many texts, in the texts' order.

    Attributes
    ----------
    tokens : TokenBatch
        Every window as a text of its own.
    starts : ndarray of int64, shape (texts + 1,)
        Text i has the windows from ``starts[i]`` to ``starts[i + 1]``.
    """

    tokens: TokenBatch
    starts: np.ndarray

    @property
    def counts(self) -> np.ndarray:
        """Windows of each text, int64 (texts,); at least one."""
        return np.diff(self.starts)

    def text_of(self, window: int) -> int:
        """Which text a window belongs to."""
        return int(np.searchsorted(self.starts, window, side="right")) - 1


def all_windows(texts: Sequence[TextTokens]) -> Windows:
    """Every window of every text."""
    counts = np.fromiter((len(text.windows) for text in texts), dtype=np.int64, count=len(texts))
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
    types = [ids for text in texts if text.type_ids is not None for ids in text.type_ids]
    return Windows(flat_batch([ids for text in texts for ids in text.windows], types), starts)


def aggregate(values: np.ndarray, windows: Windows, how: str) -> np.ndarray:
    """One row a text, float32 (texts, outputs), from one row a window.

    Parameters
    ----------
    values : ndarray of float32, shape (windows, outputs)
    windows : Windows
    how : {"mean", "max", "tokens"}
        Mean or maximum of each output, or the mean weighted by the windows' tokens. A text with a
        single window keeps its values to the bit.
    """
    if not len(windows.counts):
        return np.zeros((0, values.shape[1]), dtype=values.dtype)
    return _AGGREGATORS[how](values, windows)


def _mean(values: np.ndarray, windows: Windows) -> np.ndarray:
    sums = np.add.reduceat(values, windows.starts[:-1], axis=0, dtype=np.float64)
    return (sums / windows.counts[:, None]).astype(np.float32)


def _max(values: np.ndarray, windows: Windows) -> np.ndarray:
    return np.maximum.reduceat(values, windows.starts[:-1], axis=0)


def _by_tokens(values: np.ndarray, windows: Windows) -> np.ndarray:
    weights = windows.tokens.lengths.astype(np.float64)
    sums = np.add.reduceat(values * weights[:, None], windows.starts[:-1], axis=0)
    totals = np.add.reduceat(weights, windows.starts[:-1])
    return (sums / totals[:, None]).astype(np.float32)


_AGGREGATORS: dict[str, Callable[[np.ndarray, Windows], np.ndarray]] = {
    "mean": _mean,
    "max": _max,
    "tokens": _by_tokens,
}
