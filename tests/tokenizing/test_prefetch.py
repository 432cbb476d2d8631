"""Texts are tokenized ahead of the model, in blocks that change nothing."""

import threading
import time

import numpy as np
import pytest
from dask.system import CPU_COUNT
from hypothesis import given
from hypothesis import strategies as st

from gpuclassify.tokenizing import prefetch
from gpuclassify.tokenizing.prefetch import (
    SharedTime,
    TokenSource,
    TokenStream,
    ahead,
    text_blocks,
    tokenizer_threads,
)
from gpuclassify.tokenizing.text_tokenizer import TextTokenizer, all_windows, first_windows
from gpuclassify.workers.run_context import RunStats
from tests.oracle import plain_tokenizer
from tests.replicas import sample_texts

TEXTS = ["", *sample_texts(40, max_words=80)]


@pytest.fixture
def tokenizer(sequence_classifier):
    return TextTokenizer(plain_tokenizer(sequence_classifier("bert")), 24, 5)


@given(st.lists(st.text("ab", max_size=30), max_size=60), st.integers(1, 40), st.integers(40, 90))
def test_blocks_hold_all_texts_in_order_and_keep_to_their_sizes(texts, first, most):
    bounds = text_blocks([len(text) for text in texts], first, most)

    blocks = [texts[start:stop] for start, stop in bounds]
    assert [text for block in blocks for text in block] == texts
    assert all(blocks)
    bound = first
    for block in blocks:
        assert len(block) == 1 or sum(map(len, block)) <= bound
        bound = min(2 * bound, most)


def stream_of(tokenizer, texts, has_all_windows, stats, store=None, block_chars=(300, 1_000)):
    source = TokenSource(tokenizer, texts, has_all_windows, store)
    return TokenStream(source, stats, block_chars)


@pytest.mark.parametrize("has_all_windows", [False, True])
def test_a_stream_gives_the_windows_of_one_call_and_counts_them(tokenizer, has_all_windows):
    stats = RunStats()
    stream = stream_of(tokenizer, TEXTS, has_all_windows, stats)
    whole = (all_windows if has_all_windows else first_windows)(tokenizer.encode(TEXTS))

    blocks = list(stream)

    assert len(blocks) > 3
    distinct = [block.take([row]).ids for block in blocks for row in range(len(block))]
    given_back = np.concatenate([distinct[place] for place in stream.positions])
    np.testing.assert_array_equal(given_back, whole.tokens.ids)
    np.testing.assert_array_equal(stream.counts, whole.counts)
    np.testing.assert_array_equal(stream.window_counts, whole.whole_counts)
    np.testing.assert_array_equal(stream.lengths, whole.tokens.lengths)
    np.testing.assert_array_equal(stream.seen_share, whole.seen_share)
    assert stats.windows == len(whole.tokens)
    assert stats.tokenize_seconds > 0
    assert stats.peak_tokenizer_threads == tokenizer_threads()
    owners = np.repeat(np.arange(len(TEXTS)), whole.counts)
    np.testing.assert_array_equal(stream.text_of, owners)
    for window in (0, 1, len(owners) // 2, len(owners) - 1):
        np.testing.assert_array_equal(stream.take(window).ids, whole.tokens.take([window]).ids)


def test_windows_of_equal_tokens_are_given_once(tokenizer):
    start, other = "the beginning of a page " * 10, "quite another text"
    texts = [start + end for end in ("one", "two", "three")]
    texts += [other, other.upper(), *(["in between"] * 40), start + "four", other]
    first, every = RunStats(), RunStats()

    windows = [
        block.take([row])
        for block in stream_of(tokenizer, texts, False, first)
        for row in range(len(block))
    ]
    stream = stream_of(tokenizer, texts, True, every)
    list(stream)

    assert tokenizer.encode([other])[0].windows[0].tolist() == windows[1].ids.tolist()
    assert len(windows) == 3
    assert (first.windows, first.folded_windows) == (len(texts), len(texts) - 3)
    assert len(set(stream.positions.tolist())) == every.windows - every.folded_windows


def test_work_is_done_ahead_in_order_on_one_other_thread():
    done = []

    def work(item):
        done.append((item, threading.current_thread()))
        return -item

    results = ahead(work, range(6))
    first = next(results)
    deadline = time.monotonic() + 60
    while len(done) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)

    assert first == 0
    assert [item for item, _ in done] == [0, 1, 2]  # two ahead of the one that is used, no more
    assert list(results) == [-1, -2, -3, -4, -5]
    assert len({thread for _, thread in done}) == 1
    assert done[0][1] is not threading.current_thread()


def test_an_error_ahead_is_raised_where_its_result_is_asked_for():
    def work(item):
        if item == 1:
            raise LookupError("a broken text")
        return item

    results = ahead(work, range(5))

    assert next(results) == 0
    with pytest.raises(LookupError, match="a broken text"):
        next(results)


def test_whoever_stops_early_leaves_no_thread_and_little_work_behind():
    done, before = [], set(threading.enumerate())
    results = ahead(lambda item: done.append(item), range(1_000))
    next(results)

    results.close()

    assert len(done) <= 4
    left = set(threading.enumerate()) - before
    assert not [t for t in left if t.name.startswith("gpuclassify-tokens")]


def test_threads_that_tokenize_at_once_share_the_time_that_passes(monkeypatch):
    now = 0.0
    monkeypatch.setattr(prefetch.time, "perf_counter", lambda: now)
    clock = SharedTime()
    with clock.share() as first:
        now += 2.0
        with clock.share() as second:
            now += 4.0
        now += 1.0
    now += 100.0
    with clock.share() as third:
        now += 3.0
    assert (first.seconds, second.seconds, third.seconds) == (5.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({"RAYON_NUM_THREADS": "3"}, 3),
        ({"RAYON_NUM_THREADS": "0"}, CPU_COUNT),
        ({"RAYON_NUM_THREADS": "3", "TOKENIZERS_PARALLELISM": "False"}, 1),
    ],
)
def test_tokenizer_threads_are_those_of_the_librarys_variables(monkeypatch, variables, threads):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert tokenizer_threads() == threads
