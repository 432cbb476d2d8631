"""Ragged tokens equal the tokenizer's own, one text at a time."""

import sys

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer

from gpuclassify.tokenizing.text_tokenizer import TextTokenizer
from tests.oracle import plain_tokenizer
from tests.replicas import ARCHITECTURES, sample_texts

pytestmark = pytest.mark.contract

ODD_TEXTS = [
    " ",
    "\n\t",
    "a",
    "NUL \x00 inside",
    "lead and trail  ",
    "é decomposed e\u0301 ﬁ ☃ 🦄 学习语言",
    "[SEP] <s> </s> [PAD] <pad> <|endoftext|> [MASK]",
    "river " * 2_000,
]
TEXTS = sample_texts(40, seed=3) + ODD_TEXTS
WITHOUT_SPECIAL_TOKENS = {"gpt2"}


def rows_of(batch):
    return [row.tolist() for row in np.split(batch.ids, batch.offsets[1:-1])]


@pytest.mark.parametrize("max_tokens", [24, 512])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ids_equal_the_tokenizer_called_on_one_text_at_a_time(
    sequence_classifier, architecture, max_tokens
):
    one_by_one = plain_tokenizer(sequence_classifier(architecture))
    ours = TextTokenizer(plain_tokenizer(sequence_classifier(architecture)), max_tokens)

    batch = ours(TEXTS)

    expected = [one_by_one(t, truncation=True, max_length=max_tokens)["input_ids"] for t in TEXTS]
    assert rows_of(batch) == expected
    assert max(map(len, expected)) == max_tokens
    assert batch.ids.dtype == np.int32
    assert batch.offsets.dtype == batch.lengths.dtype == np.int64
    assert batch.type_ids is None
    assert len(batch) == len(TEXTS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_empty_text_is_never_an_empty_row(sequence_classifier, architecture):
    tokenizer = plain_tokenizer(sequence_classifier(architecture))
    expected = tokenizer("")["input_ids"]
    assert bool(expected) != (architecture in WITHOUT_SPECIAL_TOKENS)

    batch = TextTokenizer(tokenizer, 16)(["", "the river", ""])

    assert rows_of(batch)[0] == rows_of(batch)[2] == (expected or [tokenizer.bos_token_id])


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama"])
def test_truncation_on_the_left_keeps_the_end(sequence_classifier, architecture):
    directory = sequence_classifier(architecture)
    one_by_one = plain_tokenizer(directory, truncation_side="left")
    right = TextTokenizer(plain_tokenizer(directory), 12)(TEXTS)

    left = TextTokenizer(plain_tokenizer(directory, truncation_side="left"), 12)(TEXTS)

    expected = [one_by_one(t, truncation=True, max_length=12)["input_ids"] for t in TEXTS]
    assert rows_of(left) == expected
    assert rows_of(left) != rows_of(right)
    assert (left.seen_share < 1).sum() == (right.seen_share < 1).sum() > 0


def test_truncated_counts_texts_that_lost_tokens_and_no_others(sequence_classifier):
    tokenizer = plain_tokenizer(sequence_classifier("bert"))
    texts = ["the river", "the river the river", "the river the river the", "the " * 5_000]
    lengths = [len(tokenizer(text)["input_ids"]) for text in texts]
    limit = lengths[1]

    batch = TextTokenizer(tokenizer, limit)(texts)

    assert (batch.seen_share < 1).sum() == sum(length > limit for length in lengths) == 2
    assert batch.lengths.tolist() == [min(length, limit) for length in lengths]


def test_a_tokenizer_written_in_python_gives_the_same_and_counts_exactly():
    texts = ["", "abcde", "abcdef", "abcdefghij"]

    batch = TextTokenizer(ByT5Tokenizer(), 6)(texts)

    one_by_one = ByT5Tokenizer()
    assert rows_of(batch) == [
        one_by_one(text, truncation=True, max_length=6)["input_ids"] for text in texts
    ]
    assert batch.lengths.tolist() == [1, 6, 6, 6]
    assert (batch.seen_share < 1).sum() == 2


def test_segment_ids_are_kept_where_the_tokenizer_gives_other_than_zero(sequence_classifier):
    def with_segments():
        tokenizer = plain_tokenizer(sequence_classifier("bert"))
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="[CLS]:2 $A:0 [SEP]:1",
            special_tokens=[("[CLS]", tokenizer.cls_token_id), ("[SEP]", tokenizer.sep_token_id)],
        )
        return tokenizer

    batch = TextTokenizer(with_segments(), 10)(TEXTS)

    settings = {"truncation": True, "max_length": 10, "return_token_type_ids": True}
    expected = [with_segments()(text, **settings)["token_type_ids"] for text in TEXTS]
    assert batch.type_ids.dtype == np.int32
    assert [r.tolist() for r in np.split(batch.type_ids, batch.offsets[1:-1])] == expected


def test_a_text_costs_few_calls_of_python(sequence_classifier):
    tokenizer = TextTokenizer(plain_tokenizer(sequence_classifier("bert")), 24)

    def calls(texts):
        events = []
        sys.setprofile(lambda frame, event, arg: events.append(event))
        tokenizer(texts)
        sys.setprofile(None)
        return sum(event.endswith("call") for event in events)

    for _ in range(8):  # until it knows the words
        tokenizer(TEXTS)
    assert (calls(TEXTS * 4) - calls(TEXTS)) / (3 * len(TEXTS)) < 6
