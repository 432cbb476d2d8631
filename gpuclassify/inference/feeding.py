"""Texts tokenized block by block on a thread of its own, ahead of the model."""

from __future__ import annotations

import contextvars
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from gpuclassify.inference import sharing
from gpuclassify.inference.tokens import TextTokenizer, TokenBatch
from gpuclassify.inference.windows import Windows, all_windows, first_windows

if TYPE_CHECKING:
    from gpuclassify.inference.stats import RunStats

# The first block is about one batch of a GPU, so that the model starts soon. Encodings of a block
# are alive together, at over 100 bytes a token: the largest one bounds them.
FIRST_BLOCK_CHARS = 250_000
MOST_BLOCK_CHARS = 4_000_000
BLOCKS_AHEAD = 2

Item = TypeVar("Item")
Made = TypeVar("Made")


class Feed:
    """Tokens of texts, a block at a time while iterated over, and then what was read of each text.

    Windows of equal tokens are given once: texts that differ only behind the cut, or in what the
    tokenizer makes alike, have them.

    Parameters
    ----------
    tokenizer : TextTokenizer
    texts : sequence of str
        In the order in which they should run.
    has_all_windows : bool
        Whether all windows of a text are wanted, or its first one.
    stats : RunStats
        Tokenizing and waiting for it are added to it.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        texts: Sequence[str],
        has_all_windows: bool,
        stats: RunStats,
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._pick = all_windows if has_all_windows else first_windows
        self._stats = stats
        self._first: dict[bytes, int] = {}  # by their tokens, distinct windows in order
        self._places: list[int] = []
        self.blocks: list[Windows] = []

    def __iter__(self) -> Iterator[TokenBatch]:
        """Blocks of distinct windows; tokenizing goes on while the caller uses them."""
        blocks = ahead(self._tokenize, cut_blocks(self._texts))
        while True:
            started = time.perf_counter()
            block = next(blocks, None)
            self._stats.wait_tokens_seconds += time.perf_counter() - started
            if block is None:
                return
            yield block

    @property
    def places(self) -> np.ndarray:
        """Where each window is among the distinct ones that were given, int64 (windows,)."""
        return np.asarray(self._places, dtype=np.int64)

    @property
    def window_counts(self) -> np.ndarray:
        """Windows of each text, int64 (texts,), also when only the first one is run."""
        return np.concatenate([block.found for block in self.blocks])

    @property
    def seen_share(self) -> np.ndarray:
        """Share of each text's tokens that is run, float32 (texts,)."""
        return np.concatenate([block.seen_share for block in self.blocks])

    @property
    def counts(self) -> np.ndarray:
        """Windows of each text that are run, int64 (texts,)."""
        return np.concatenate([block.counts for block in self.blocks])

    @property
    def text_of(self) -> np.ndarray:
        """Which text each window that is run belongs to, int64 (windows,)."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each window that is run, int64 (windows,)."""
        return np.concatenate([block.tokens.lengths for block in self.blocks])

    def take(self, window: int) -> TokenBatch:
        """One window alone."""
        for block in self.blocks:
            if window < len(block.tokens):
                break
            window -= len(block.tokens)
        return block.tokens.take([window])

    def _tokenize(self, texts: Sequence[str]) -> TokenBatch:
        """The windows of a block that are not known yet. Runs on the other thread."""
        started = time.perf_counter()
        encoded, shared = sharing.encode(self._tokenizer, texts)
        windows = self._pick(encoded)
        new = self._fold(windows.tokens)
        self.blocks.append(windows)
        stats = self._stats
        stats.shared_texts += shared
        stats.windows += len(windows.tokens)
        stats.truncated_texts += windows.tokens.truncated
        stats.folded_windows += len(windows.tokens) - len(new)
        stats.tokenize_seconds += time.perf_counter() - started
        return windows.tokens if len(new) == len(windows.tokens) else windows.tokens.take(new)

    def _fold(self, tokens: TokenBatch) -> list[int]:
        """Rows of windows that none before them equals."""
        new = []
        for row, digest in enumerate(tokens.digests()):
            if digest not in self._first:
                self._first[digest] = len(self._first)
                new.append(row)
            self._places.append(self._first[digest])
        return new


def cut_blocks(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """`texts` in blocks, each up to twice as large as the one before."""
    most_chars, chars, start = FIRST_BLOCK_CHARS, 0, 0
    for stop, text in enumerate(texts):
        if stop > start and chars + len(text) > most_chars:
            yield texts[start:stop]
            start, chars, most_chars = stop, 0, min(2 * most_chars, MOST_BLOCK_CHARS)
        chars += len(text)
    if start < len(texts):
        yield texts[start:]


def ahead(work: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
    """``work(item)`` for each item in order, done on a thread of its own while results are used."""
    context = contextvars.copy_context()
    made: deque[Future[Made]] = deque()
    items = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="gpuclassify-tokens") as thread:
        try:
            for item in itertools.islice(items, BLOCKS_AHEAD):
                made.append(thread.submit(context.run, work, item))
            while made:
                done = made.popleft().result()
                for item in itertools.islice(items, 1):
                    made.append(thread.submit(context.run, work, item))
                yield done
        finally:
            for future in made:  # of a caller that stopped early
                future.cancel()
