"""Tokenizing of texts block by block on a separate thread, ahead of the model."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import TypeVar

import numpy as np
from dask.system import CPU_COUNT

from gpuclassify.tokenizing.text_tokenizer import (
    TextTokenizer,
    TextTokens,
    TokenBatch,
    Windows,
    all_windows,
    first_windows,
    only_windows,
)
from gpuclassify.workers.run_context import RunStats, set_variable

# Texts are tokenized in blocks. The first block is about one batch of a GPU, so that the model
# starts soon. The largest block bounds memory, because all encodings of a block exist at once, at
# over 100 bytes per token.
FIRST_BLOCK_CHARS = 250_000
MOST_BLOCK_CHARS = 4_000_000
BLOCKS_AHEAD = 2
_OFF = {"off", "false", "f", "no", "n", "0"}  # values of TOKENIZERS_PARALLELISM

Item = TypeVar("Item")
Made = TypeVar("Made")


class TokenStore:
    """Cache of texts' tokens, so that mappers (models) over one partition tokenize a text once.

    Mappers share a text's tokens if their tokenizers have equal fingerprints, and both cut in the
    same way or neither cuts this text.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, dict[str, TextTokens]] = defaultdict(dict)

    def encode(
        self, tokenizer: TextTokenizer, texts: Sequence[str]
    ) -> tuple[list[TextTokens], int]:
        """Return the tokens of each text, in order, and the number of texts found in the cache."""
        uncut = self._known[tokenizer.fingerprint]
        cut = self._known[tokenizer.fingerprint, tokenizer.cut]
        encoded = {text: cut[text] for text in texts if text in cut}
        for text in texts:
            if text in uncut and uncut[text].whole_length <= tokenizer.max_tokens:
                encoded[text] = uncut[text]
        missing = [text for text in texts if text not in encoded]
        for text, tokens in zip(missing, tokenizer.encode(missing), strict=True):
            is_whole = tokens.whole_length <= tokenizer.max_tokens
            (uncut if is_whole else cut)[text] = encoded[text] = tokens
        return [encoded[text] for text in texts], len(texts) - len(missing)


# Store of this thread's `shared_tokens` block.
current_store: ContextVar[TokenStore | None] = ContextVar("current_store", default=None)


def shared_tokens() -> contextlib.AbstractContextManager[None]:
    """Return a context manager, in whose block this thread's mappers share the tokens of texts."""
    return set_variable(current_store, TokenStore())


class TokenSource:
    """Texts to run, with their tokenizer, which tokenizes ranges of them on demand.

    With `has_all_windows`, long texts have several windows; otherwise, each text has its first one.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        texts: Sequence[str],
        has_all_windows: bool,
        store: TokenStore | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._store = store
        self._pick = all_windows if has_all_windows else first_windows
        self._is_flat = store is None and not has_all_windows and tokenizer.cuts_once

    @property
    def char_counts(self) -> np.ndarray:
        """Estimated number of characters of each text that are tokenized, int64 (texts,)."""
        return self._tokenizer.char_counts(self._texts)

    def windows(self, start: int, stop: int, stats: RunStats) -> Windows:
        """Tokenize ``texts[start:stop]``, return the windows, and count shared texts in `stats`."""
        texts = self._texts[start:stop]
        if self._is_flat:
            return only_windows(self._tokenizer(texts))
        if self._store is None:
            return self._pick(self._tokenizer.encode(texts))
        encoded, shared = self._store.encode(self._tokenizer, texts)
        stats.shared_texts += shared
        return self._pick(encoded)


class TokenStream:
    """Distinct windows of texts (token spans as long as the model reads), in blocks of texts.

    Iteration yields the blocks, which are tokenized on another thread. Afterwards, properties map
    the windows back to the texts. Equal windows are yielded once. `known` are digests of windows
    that have outputs already: they are not yielded, and are the first distinct windows in
    `positions`. `block_chars` limits the characters of the first block and of the largest one; a
    single text may exceed it.

    The used windows of a text are all of its windows, or the first one, as `source` was told.
    Properties have an element per text or per used window, yielded or not.
    """

    def __init__(
        self,
        source: TokenSource,
        stats: RunStats,
        block_chars: tuple[int, int] | None = None,
        known: Iterable[Hashable] = (),
    ) -> None:
        self._source = source
        self._stats = stats
        self._block_chars = block_chars or (FIRST_BLOCK_CHARS, MOST_BLOCK_CHARS)
        # Number of each distinct window, by digest of its tokens.
        self._first: dict[Hashable, int] = {key: number for number, key in enumerate(known)}
        self._known = len(self._first)
        self._positions: list[int] = []
        self.blocks: list[Windows] = []

    def __iter__(self) -> Iterator[TokenBatch]:
        """Yield batches of new windows, one per block of texts, in the texts' order.

        A batch may be empty. A stream can be iterated only once.
        """
        bounds = text_blocks(self._source.char_counts, *self._block_chars)
        blocks = ahead(self._tokenize, bounds)
        while True:
            started = time.perf_counter()
            block = next(blocks, None)
            self._stats.wait_tokens_seconds += time.perf_counter() - started
            if block is None:
                return
            yield block

    @property
    def new_keys(self) -> list[Hashable]:
        """Digests of the windows that were yielded, in order; to pass as `known` later."""
        return list(self._first)[self._known :]

    @property
    def positions(self) -> np.ndarray:
        """Index of each used window among the distinct windows, int64 (windows,)."""
        return np.asarray(self._positions, dtype=np.int64)

    @property
    def window_counts(self) -> np.ndarray:
        """Number of all windows of each text, int64 (texts,), even if only the first is used."""
        return np.concatenate([block.whole_counts for block in self.blocks])

    @property
    def seen_share(self) -> np.ndarray:
        """Fraction of each text's tokens that are in its used windows, float32 (texts,).

        It is below 1 if the text was cut, but exact only if the tokens behind the cut were counted.
        """
        return np.concatenate([block.seen_share for block in self.blocks])

    @property
    def counts(self) -> np.ndarray:
        """Number of each text's used windows (all, or the first one), int64 (texts,)."""
        return np.concatenate([block.counts for block in self.blocks])

    @property
    def text_of(self) -> np.ndarray:
        """Index of each used window's text, int64 (windows,)."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each used window, special tokens included, int64 (windows,)."""
        return np.concatenate([block.tokens.lengths for block in self.blocks])

    def take(self, window: int) -> TokenBatch:
        """Return the window with this index among the used windows, as a batch of one."""
        for block in self.blocks:
            if window < len(block.tokens):
                break
            window -= len(block.tokens)
        return block.tokens.take([window])

    def _tokenize(self, bounds: tuple[int, int]) -> TokenBatch:
        """Tokenize the texts from a start to a stop (exclusive), and return their new windows."""
        stats = self._stats
        with _tokenizing.share() as share:
            windows = self._source.windows(*bounds, stats)
            new = self._fold(windows.tokens)
        stats.tokenize_seconds += share.seconds
        stats.raise_peak("peak_tokenizer_threads", tokenizer_threads())
        self.blocks.append(windows)
        stats.windows += len(windows.tokens)
        stats.folded_windows += len(windows.tokens) - len(new)
        return windows.tokens if len(new) == len(windows.tokens) else windows.tokens.take(new)

    def _fold(self, tokens: TokenBatch) -> list[int]:
        """Record each window's index among the distinct ones; return the rows of new windows."""
        new = []
        for row, key in enumerate(tokens.digests()):
            if key not in self._first:
                self._first[key] = len(self._first)
                new.append(row)
            self._positions.append(self._first[key])
        return new


class Share:
    """Seconds that one thread has spent, set when the block of `SharedTime.share` ends."""

    seconds = 0.0


class SharedTime:
    """Wall time of an activity, such as tokenizing, divided among the threads that do it.

    The shares of all threads add up to the time in which at least one of them was active.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = 0
        self._total_share = 0.0  # share of a thread that was active all the time
        self._updated = 0.0

    @contextlib.contextmanager
    def share(self) -> Iterator[Share]:
        """Measure this thread's part of the wall time of a ``with`` block, which gets a `Share`."""
        share = Share()
        began = self._change(1)
        try:
            yield share
        finally:
            share.seconds = self._change(-1) - began

    def _change(self, threads: int) -> float:
        with self._lock:
            now = time.perf_counter()
            self._total_share += (now - self._updated) / max(1, self._threads)
            self._updated = now
            self._threads += threads
            return self._total_share


_tokenizing = SharedTime()


def tokenizer_threads() -> int:
    """Return the number of threads that the tokenizers library uses, by environment variables."""
    if os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in _OFF:
        return 1
    threads = os.environ.get("RAYON_NUM_THREADS", "")
    return (int(threads) if threads.isdigit() else 0) or CPU_COUNT


def text_blocks(
    char_counts: Sequence[int] | np.ndarray, first_chars: int, largest_chars: int
) -> Iterator[tuple[int, int]]:
    """Divide texts with these numbers of characters into blocks; yield each block's (start, stop).

    `stop` is exclusive. The limit on a block's characters begins at `first_chars`, and doubles with
    each block up to `largest_chars`. A single text that exceeds it is a block of its own.
    """
    most_chars, chars, start = first_chars, 0, 0
    for stop, count in enumerate(np.asarray(char_counts).tolist()):
        if stop > start and chars + count > most_chars:
            yield start, stop
            start, chars, most_chars = stop, 0, min(2 * most_chars, largest_chars)
        chars += count
    if start < len(char_counts):
        yield start, len(char_counts)


def ahead(work: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
    """Yield ``work(item)`` for each item in order, computed ahead on another thread."""
    made: deque[Future[Made]] = deque()
    items = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="gpuclassify-tokens") as thread:
        try:
            for item in itertools.islice(items, BLOCKS_AHEAD):
                made.append(thread.submit(work, item))
            while made:
                done = made.popleft().result()
                for item in itertools.islice(items, 1):
                    made.append(thread.submit(work, item))
                yield done
        finally:
            for future in made:  # the caller stopped early
                future.cancel()
