"""Shared tokens are those that each tokenizer would have made itself."""

import pytest

from gpuclassify.tokenizing.prefetch import TokenStore
from gpuclassify.tokenizing.text_tokenizer import TextTokenizer
from tests.oracle import plain_tokenizer
from tests.replicas import sample_texts, write_sequence_classifier

TEXTS = ["", *sample_texts(40, max_words=150)]


@pytest.fixture(scope="module")
def tokenizer_of(sequence_classifier):
    def tokenizer(architecture="bert", length=24, overlap=None, counts_rest=True, **options):
        loaded = plain_tokenizer(sequence_classifier(architecture), **options)
        return TextTokenizer(loaded, length, overlap, counts_rest=counts_rest)

    return tokenizer


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.whole_length == other.whole_length
        assert [w.tolist() for w in one.windows] == [w.tolist() for w in other.windows]


def shares(first, second, texts=TEXTS):
    """How many texts the second got from the first, each as it would have made it itself."""
    store = TokenStore()
    _, known = store.encode(first, texts)
    assert known == 0
    found, known = store.encode(second, texts)
    assert_same(found, second.encode(texts))
    return known


def test_equal_tokenizers_share_everything(tokenizer_of):
    assert tokenizer_of().fingerprint == tokenizer_of().fingerprint
    assert shares(tokenizer_of(), tokenizer_of()) == len(TEXTS)


@pytest.mark.parametrize("lengths", [(24, 64), (64, 24)])
def test_other_lengths_share_the_texts_that_neither_cuts(tokenizer_of, lengths):
    first, second = (tokenizer_of(length=length) for length in lengths)
    whole = [tokens.whole_length for tokens in second.encode(TEXTS)]

    assert shares(first, second) == sum(n <= min(lengths) for n in whole) not in (0, len(TEXTS))


def test_windows_and_cut_texts_are_not_mixed(tokenizer_of):
    short = sum(tokens.whole_length <= 24 for tokens in tokenizer_of().encode(TEXTS))

    assert shares(tokenizer_of(), tokenizer_of(overlap=4)) == short
    assert shares(tokenizer_of(overlap=4), tokenizer_of(overlap=5)) == short
    assert shares(tokenizer_of(overlap=4), tokenizer_of(overlap=4)) == len(TEXTS)


def test_counts_are_not_taken_from_who_does_not_count(tokenizer_of):
    short = sum(tokens.whole_length <= 24 for tokens in tokenizer_of().encode(TEXTS))

    assert shares(tokenizer_of(counts_rest=False), tokenizer_of()) == short < len(TEXTS)
    assert shares(*[tokenizer_of(counts_rest=False)] * 2) == len(TEXTS)


def test_other_sides_are_other_tokenizers(tokenizer_of):
    assert shares(tokenizer_of(), tokenizer_of(truncation_side="left")) == 0


def test_other_vocabularies_share_nothing(tokenizer_of, tmp_path):
    other = write_sequence_classifier(tmp_path / "other", "bert", texts=["quite other words here"])

    assert shares(tokenizer_of(), TextTokenizer(plain_tokenizer(other), 24)) == 0
    assert shares(tokenizer_of(), tokenizer_of("roberta")) == 0


def test_texts_that_were_filtered_out_are_not_needed(tokenizer_of):
    store = TokenStore()
    store.encode(tokenizer_of(), TEXTS)
    found, known = store.encode(tokenizer_of(), [*TEXTS[10:15], "a new text"])

    assert known == 5
    assert_same(found, tokenizer_of().encode([*TEXTS[10:15], "a new text"]))
