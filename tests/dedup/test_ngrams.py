"""n-grams against sets of tuples that `re` makes, and matches against brute force over them."""

import re
import string
import time
import unicodedata

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuclassify.dedup.ngrams import match_groups, ngram_sets

SCRIPTS = ("CJK UNIFIED", "CJK COMPAT", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR")
ALONE = "".join(
    re.escape(chr(code))
    for code in range(0x110000)
    if unicodedata.name(chr(code), "").startswith(SCRIPTS)
    and unicodedata.category(chr(code)) in ("Lo", "Mn", "Mc")
)
GAP = r"\s" + re.escape(string.punctuation)
TOKEN = re.compile(f"[{ALONE}]|[^{GAP}{ALONE}]+")


def ngrams_of(text, n):
    tokens = TOKEN.findall(text)
    if not tokens:
        return {text}
    size = min(n, len(tokens))
    return {tuple(tokens[first : first + size]) for first in range(len(tokens) - size + 1)}


def sets_of(texts, n=3):
    return ngram_sets(pa.array(texts, pa.large_string()), n)


def hashes_of(sets):
    bounds = sets.offsets.tolist()
    return [sets.hashes[first:end] for first, end in zip(bounds[:-1], bounds[1:], strict=True)]


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
    st.lists(st.text(st.sampled_from("ab .,é東ไ🦄\u3000\n") | st.characters(codec="utf-8"))),
    st.integers(1, 4),
)
def test_sets_of_random_texts(texts, n):
    texts = [text for text in texts if not re.search("[\u3005-\u3007]", text)]
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
    found = [len(hashes) for hashes in hashes_of(sets_of(texts))]
    assert found == [len(ngrams_of(text, 3)) for text in texts]


def test_null_texts_are_refused():
    with pytest.raises(ValueError, match="1 of 2 texts are null"):
        sets_of(["a", None])
