"""Prompts are tokenized as wholes, and a document that is too long loses its end only."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from gpuclassify.questions.prompt_tokens import PromptTokenizer
from tests.replicas import sample_texts

HEAD, TAIL = "Judge this.\n\nUser: ", "\n\nAnswer safe or unsafe. [/INST]"
TEXTS = ["", " x", "\nx", "9" * 40, "天気🙂" * 20, *sample_texts(20, max_words=80)]


@pytest.fixture(scope="module")
def new_tokenizer(safety_models):
    return lambda: AutoTokenizer.from_pretrained(safety_models.base)


def rows_of(batch):
    return [row.tolist() for row in np.split(batch.ids, batch.offsets[1:-1])]


def test_tokens_are_those_of_the_whole_prompt(new_tokenizer):
    batch = PromptTokenizer(new_tokenizer(), HEAD, TAIL, 10_000)(TEXTS)

    plain = new_tokenizer()
    assert rows_of(batch) == [plain(HEAD + text + TAIL)["input_ids"] for text in TEXTS]
    assert batch.truncated == 0


def test_a_long_document_keeps_as_much_as_fits(new_tokenizer):
    plain = new_tokenizer()
    limit = len(plain(HEAD + TAIL)["input_ids"]) + 12
    batch = PromptTokenizer(new_tokenizer(), HEAD, TAIL, limit)(TEXTS)

    end = plain(TAIL, add_special_tokens=False)["input_ids"][-6:]
    for text, row, whole in zip(TEXTS, rows_of(batch), batch.whole_lengths, strict=True):
        assert whole == len(plain(HEAD + text + TAIL)["input_ids"])
        assert len(row) <= limit
        assert row[-6:] == end
        if whole > limit:
            fits = [
                n
                for n in range(len(text))
                if len(plain(HEAD + text[:n] + TAIL)["input_ids"]) <= limit
            ]
            longest = plain(HEAD + text[: fits[-1]] + TAIL)["input_ids"]
            assert len(longest) - len(row) <= 2
            assert plain.decode(row).startswith(plain.decode(longest[:-10])[:-8])
    assert batch.truncated > 5


def test_the_prefix_is_shared_by_every_prompt(new_tokenizer):
    tokenizer = PromptTokenizer(new_tokenizer(), HEAD, TAIL, 10_000)
    prefix = tokenizer.prefix.tolist()

    rows = rows_of(tokenizer(TEXTS))
    assert all(row[: len(prefix)] == prefix for row in rows if len(row) > len(prefix))
    assert len(prefix) > 5


def test_the_share_that_is_read(new_tokenizer):
    fixed = len(new_tokenizer()(HEAD + TAIL)["input_ids"])
    tokenizer = PromptTokenizer(new_tokenizer(), HEAD, TAIL, fixed + 10)
    long = sample_texts(1, min_words=60, max_words=60)[0]
    batch = tokenizer(["", "a", long])

    shares = tokenizer.seen_share(batch)
    assert shares[:2].tolist() == [1, 1]
    document = len(new_tokenizer()(HEAD + long + TAIL)["input_ids"]) - fixed
    assert shares[2] == pytest.approx(10 / document, abs=3 / document)


def test_a_prompt_that_leaves_no_room_is_refused(new_tokenizer):
    with pytest.raises(ValueError, match="max_seq_length=9 leaves no room for a document"):
        PromptTokenizer(new_tokenizer(), HEAD, TAIL, 9)


def test_no_documents_give_an_empty_batch(new_tokenizer):
    assert len(PromptTokenizer(new_tokenizer(), HEAD, TAIL, 10_000)([])) == 0
