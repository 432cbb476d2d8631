"""Windows cover every token of a text, and their outputs become one row a text."""

import numpy as np
import pytest
from transformers import ByT5Tokenizer

from gpuclassify.tokenizing.text_tokenizer import (
    TextTokenizer,
    TextTokens,
    aggregate,
    all_windows,
    first_windows,
)
from tests.oracle import plain_tokenizer
from tests.replicas import sample_texts

TEXTS = ["", *sample_texts(30, max_words=200)]


@pytest.fixture(scope="module")
def tokenizer_of(sequence_classifier):
    def tokenizer(architecture, side="right"):
        directory = sequence_classifier(architecture)
        return plain_tokenizer(directory, truncation_side=side)

    return tokenizer


def expected_windows(tokenizer, text, size, overlap):
    """By transformers' own splitting, one text at a time."""
    return tokenizer(
        text, truncation=True, max_length=size, stride=overlap, return_overflowing_tokens=True
    )["input_ids"]


@pytest.mark.parametrize("architecture", ["bert", "deberta-v2", "roberta", "llama"])
@pytest.mark.parametrize("overlap", [0, 5])
def test_windows_are_those_of_transformers(tokenizer_of, architecture, overlap):
    found = TextTokenizer(tokenizer_of(architecture), 24, overlap).encode(TEXTS)

    one_by_one = tokenizer_of(architecture)
    for text, tokens in zip(TEXTS, found, strict=True):
        expected = expected_windows(one_by_one, text, 24, overlap)
        if text:
            assert [window.tolist() for window in tokens.windows] == expected
        whole = len(one_by_one(text)["input_ids"])
        assert tokens.whole_length == max(whole, 1)
    assert max(len(tokens.windows) for tokens in found) > 5


def test_windows_from_the_end_of_the_text(tokenizer_of):
    found = TextTokenizer(tokenizer_of("bert", "left"), 24, 5).encode(TEXTS)

    expected = [expected_windows(tokenizer_of("bert", "left"), text, 24, 5) for text in TEXTS]
    assert [[window.tolist() for window in tokens.windows] for tokens in found] == expected


@pytest.mark.parametrize("overlap", [None, 0, 3])
def test_a_tokenizer_written_in_python_windows_alike(overlap):
    text = "abcdefghijklmnopqrstuvwxyz"
    tokenizer = ByT5Tokenizer()
    inner = tokenizer(text, add_special_tokens=False)["input_ids"]

    (tokens,) = TextTokenizer(tokenizer, 10, overlap).encode([text])

    step = 9 - (overlap or 0)
    starts = [0] if overlap is None else range(0, len(inner) - overlap, step)
    expected = [[*inner[start : start + 9], tokenizer.eos_token_id] for start in starts]
    assert [window.tolist() for window in tokens.windows] == expected
    assert tokens.whole_length == 27


def test_the_first_windows_are_what_truncation_leaves(tokenizer_of):
    cut = TextTokenizer(tokenizer_of("bert"), 24)(TEXTS)
    windows = first_windows(TextTokenizer(tokenizer_of("bert"), 24, 5).encode(TEXTS))

    np.testing.assert_array_equal(windows.tokens.ids, cut.ids)
    np.testing.assert_array_equal(windows.tokens.offsets, cut.offsets)
    np.testing.assert_array_equal(windows.tokens.whole_lengths, cut.whole_lengths)
    np.testing.assert_array_equal(windows.seen_share, cut.seen_share)
    assert windows.counts.tolist() == [1] * len(TEXTS)
    assert windows.whole_counts.max() > 5


@pytest.mark.parametrize(("size", "overlap"), [(2, None), (24, 22), (24, 30)])
def test_windows_without_room_for_text_are_refused(tokenizer_of, size, overlap):
    with pytest.raises(ValueError, match="leaves no room for text"):
        TextTokenizer(tokenizer_of("bert"), size, overlap)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("mean", [[2.0, 20.0], [7.0, 70.0]]),
        ("max", [[3.0, 30.0], [7.0, 70.0]]),
        ("tokens", [[(1 * 4 + 2 * 4 + 3 * 2) / 10, 18.0], [7.0, 70.0]]),
    ],
)
def test_aggregation_by_hand(how, expected):
    lengths = [4, 4, 2, 0]
    windows = all_windows(
        [
            TextTokens([np.zeros(n + 2, np.int32) for n in lengths[:3]], None, 16),
            TextTokens([np.zeros(2, np.int32)], None, 2),
        ]
    )
    values = np.array([[1, 10], [2, 20], [3, 30], [7, 70]], dtype=np.float32)

    found = aggregate(values, windows.counts, windows.tokens.lengths - 2, how)

    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert windows.counts.tolist() == windows.whole_counts.tolist() == [3, 1]
    assert windows.seen_share.tolist() == [1, 1]
