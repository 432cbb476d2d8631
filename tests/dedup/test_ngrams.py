"""n-grams against sets of tuples in plain Python."""

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuclassify.dedup.ngrams import ngram_sets
from tests.dedup.ngram_oracle import ngrams_of

# Of these categories, and but for one mark, the blocks that count and the scripts are the same.
CHARACTERS = st.characters(
    codec="utf-8", categories=["Lo", "Lu", "Ll", "Nd", "Pd", "Zs", "Cc"], exclude_characters="〆"
)


def sets_of(texts, n):
    return ngram_sets(pa.array(texts, pa.large_string()), n)


def hashes_of(sets):
    return [sets.hashes[first:end] for first, end in pairwise(sets.offsets.tolist())]


def assert_same_sets(texts, n):
    """Hashes stand for n-grams one to one, over all texts."""
    found = hashes_of(sets_of(texts, n))
    expected = [ngrams_of(text, n) for text in texts]
    for hashes, ngrams in zip(found, expected, strict=True):
        assert len(hashes) == len(ngrams)
        assert (np.diff(hashes) > 0).all()
    for hashes, ngrams in zip(found, expected, strict=True):
        for others, other_ngrams in zip(found, expected, strict=True):
            assert len(np.intersect1d(hashes, others)) == len(ngrams & other_ngrams)


TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "The quick brown fox jumps; over the lazy dog!",
    "the the the the the the",
    "one",
    "one two",
    "two one",
    "onetwo",
    "",
    " ",
    "!?",
    "?!",
    "\t\n",
    "jumpéd naïve Straße",
    "word\u3000word\u00a0word\u2029word\x1cword\u200bword",
    "東京都は日本の首都",
    "東京 都は日本の首都",
    "a東b京c",
    "ภาษาไทย ลาวລາວ ខ្មែរ မြန်မာ",
    "한국어 문장 하나 한국어",
    "𠀀𠀁🦄𠀂 🦄🦄 𠀀𠀁🦄",
    "nul\0byte nul",
    "\ufffd \U0010ffff",
]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 50])
def test_sets_are_those_of_plain_python(n):
    assert_same_sets(TEXTS, n)


@given(
    st.lists(st.text(st.sampled_from("ab .,é東ไ🦄\u3000\n") | CHARACTERS), max_size=8),
    st.integers(1, 4),
)
def test_sets_of_random_texts(texts, n):
    assert_same_sets(texts, n)


def test_slices_and_no_texts():
    texts = pa.array(TEXTS, pa.large_string())
    whole = hashes_of(ngram_sets(texts, 3))
    part = hashes_of(ngram_sets(texts[5:9], 3))
    assert all(map(np.array_equal, whole[5:9], part))
    assert ngram_sets(texts[:0], 3).offsets.tolist() == [0]
    assert ngram_sets(pa.array(["", ""], pa.large_string()), 3).offsets.tolist() == [0, 1, 2]


def test_texts_of_a_megabyte():
    words = np.random.default_rng(0).integers(1000, size=300_000)
    texts = [" ".join(map(str, words)), "same " * 200_000, "東" * 350_000, "x" * 1_000_000]
    found = [len(hashes) for hashes in hashes_of(sets_of(texts, 3))]
    assert found == [len(ngrams_of(text, 3)) for text in texts]


def test_null_texts_are_refused():
    with pytest.raises(ValueError, match="1 of 2 texts are null"):
        sets_of(["a", None], 3)
