"""Texts have the ids that `tokenizers` gives them, whatever their words were before."""

import gc
import itertools
import json
import random
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from gpuclassify.tokenizing import gaps
from tests.replicas.tokenizers import nmt_nfkc

# As Llama 3 and Qwen have them, and what GPT-2's files may have instead of ByteLevel's own.
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA.replace("{1,3}", "")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
BARE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
PREFIXED = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
COLLAPSED = normalizers.Replace(Regex(" {2,}"), " ")


def metaspace(scheme="always", split=True):
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)


def split(pattern, *behind):
    first = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([first, *behind])


def in_turn(*steps):
    kind = pre_tokenizers if isinstance(steps[0], pre_tokenizers.PreTokenizer) else normalizers
    return kind.Sequence(list(steps))


def pipeline(normalizer, splitter, *tokens):
    """A tokenizer whose ids tell where each word begins, and every character."""
    chars = [chr(code) for code in range(1, 0x180)] + [
        *"▁ΣςσДд학́̀ा्न،ﷺ´\u0600\u2028\u3000\ufeff\u200d習"
    ]
    chars += [*pre_tokenizers.ByteLevel.alphabet()]
    vocabulary = {piece: n for n, piece in enumerate(
        dict.fromkeys(["[UNK]", *chars, *(f"##{char}" for char in chars)]))}  # fmt: skip
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    if normalizer is not None:
        backend.normalizer = normalizer
    if splitter is not None:
        backend.pre_tokenizer = splitter
    backend.add_tokens(list(tokens))
    return backend


def cache_of(backend):
    return gaps.WordCache(backend, json.loads(backend.to_str()))


def assert_same_ids(backend, texts, cache=None):
    cache = cache or cache_of(backend)
    try:
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
    except BaseException as err:  # the library itself cannot read some texts by some added tokens
        if type(err).__name__ != "PanicException":
            raise
        pytest.skip("the library panics")
    wanted = [one.ids for one in encodings]
    for _ in range(2):  # and once more, when it knows the words
        made = cache(texts)
        lengths = np.array([*map(len, wanted)], dtype=np.int64)
        flat = np.fromiter(itertools.chain.from_iterable(wanted), np.int32, int(lengths.sum()))
        ids = made.take(np.zeros_like(lengths), made.lengths)
        if not np.array_equal(made.lengths, lengths) or not np.array_equal(ids, flat):
            for text, row in zip(texts, wanted, strict=True):
                one = cache([text])
                got = one.take(np.zeros(1, int), one.lengths).tolist()
                assert got == row, repr(text)
            raise AssertionError("texts of one call take tokens from each other")


PIPELINES = {
    "bert": (normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()),
    "bert-cased": (normalizers.BertNormalizer(lowercase=False), pre_tokenizers.BertPreTokenizer()),
    "unclean": (
        normalizers.BertNormalizer(clean_text=False, lowercase=False),
        pre_tokenizers.BertPreTokenizer(),
    ),
    "deberta-v3": (in_turn(normalizers.Strip(), nmt_nfkc(), COLLAPSED), metaspace()),
    "xlm-roberta": (nmt_nfkc(), in_turn(pre_tokenizers.WhitespaceSplit(), metaspace())),
    "t5": (in_turn(nmt_nfkc(), COLLAPSED), metaspace()),
    "first": (nmt_nfkc(), metaspace("first")),
    "never": (in_turn(nmt_nfkc(), COLLAPSED), metaspace("never")),
    "first-behind": (None, in_turn(pre_tokenizers.WhitespaceSplit(), metaspace("first"))),
    "albert": (
        in_turn(
            normalizers.Replace("``", '"'),
            normalizers.NFKD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            nmt_nfkc(),
            COLLAPSED,
        ),
        in_turn(pre_tokenizers.WhitespaceSplit(), metaspace()),
    ),
    "stripped": (normalizers.Strip(), pre_tokenizers.Whitespace()),
    "strip-right": (normalizers.Strip(left=False, right=True), BYTES),
    "plain-metaspace": (None, metaspace()),
    "gpt2": (None, BYTES),
    "roberta-prefixed": (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "modernbert": (normalizers.NFC(), BYTES),
    "nfkc-bytes": (normalizers.NFKC(), BYTES),
    "llama3": (None, split(LLAMA, BARE)),
    "qwen": (normalizers.NFC(), split(QWEN, BARE)),
    "llama-prefixed": (None, split(LLAMA, PREFIXED)),
    "llama-metaspace": (None, split(LLAMA, metaspace("always"))),
    "digits": (None, in_turn(pre_tokenizers.Digits(individual_digits=True), BYTES)),
    "punctuation": (None, in_turn(pre_tokenizers.Punctuation("merged_with_next"), metaspace())),
    "punctuation-bytes": (
        None, in_turn(pre_tokenizers.Punctuation("merged_with_previous"), BYTES)
    ),
    "nmt": (normalizers.Nmt(), metaspace("first")),
}  # fmt: skip
REFUSED = {
    "stripped-bytes": (normalizers.Strip(), BYTES),
    "stripped-first": (in_turn(normalizers.Strip(), COLLAPSED), metaspace("first")),
    "stripped-runs": (normalizers.Strip(), metaspace()),
    "stripped-digits": (
        in_turn(normalizers.Strip(), COLLAPSED),
        in_turn(pre_tokenizers.Digits(), metaspace()),
    ),
    "first-behind-bytes": (None, split(LLAMA, metaspace("first"))),
    "removed-runs": (normalizers.Replace(Regex(" {2,}"), ""), metaspace()),
    "whole": (None, metaspace(split=False)),
}
TOKENS = [
    (),
    (AddedToken("<t>", normalized=False),),
    (AddedToken("<t>", normalized=False, lstrip=True),),
    (AddedToken("<t>", normalized=False, rstrip=True),),
    (AddedToken("<t>", normalized=True),),
    (AddedToken("  ", normalized=True), AddedToken("   ", normalized=False)),
    (AddedToken("\n", normalized=False), AddedToken("1", normalized=True)),
    (AddedToken(" a", normalized=False, single_word=True),),
    (AddedToken("a", normalized=True, single_word=True),),
]
EDGES = ["<t>", "a", "1", ".", " ", "\n", "\t", "é"]


@pytest.fixture(autouse=True)
def every_word(monkeypatch):
    """Cut all texts, however seldom their words come again."""
    for name in ("_MOST_NEW", "_MOST_NEW_AT_FIRST"):
        monkeypatch.setattr(gaps, name, 2.0)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", [*PIPELINES, *REFUSED])
def test_every_short_text_of_edges(name, tokens):
    backend = pipeline(*(PIPELINES | REFUSED)[name], *tokens)
    parts = [*itertools.chain.from_iterable(itertools.product(EDGES, repeat=n) for n in range(4))]
    draw = random.Random(name)
    parts += [draw.choices(EDGES, k=draw.randint(4, 9)) for _ in range(1_000)]
    assert_same_ids(backend, ["".join(one) for one in parts])
    assert name in PIPELINES or gaps.read_gaps(backend, json.loads(backend.to_str())) is None


PUBLISHED = ["bert", "bert-cased", "deberta-v3", "xlm-roberta", "albert", "gpt2", "llama3", "qwen"]
CORPUS = {
    "Russian": "Съешь же ещё этих мягких французских булок, да выпей чаю. Ёлки — «палки»",
    "German": "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich",
    "French": "Dès Noël où un zéphyr haï me vêt de glaçons würmiens, je dîne d’exquis rôtis",
    "Greek": "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία τοις πάσιν",
    "Arabic": "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر",
    "Hebrew": "דג סקרן שט בים מאוכזב ולפתע מצא לו חברה",
    "Hindi": "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश करने वाले विष्णु",
}

HOSTILE = ["", " ", "\ufeff", "\u200d", "\u0301", "\u2028", "\xa0", "\0", "👩\u200d👩", "\r\n"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_code_point_on_each_side_of_a_gap(name):
    backend = pipeline(*PIPELINES[name])
    codes = [*range(1, 0xD800), *range(0xE000, 0x10000), *range(0x1F300, 0x1F700)]
    parts = [f"x{c} y {c}z{c}\n{c}. \n {c}w  {c}{c}\tv{c}\r\n" for c in map(chr, codes)]
    assert_same_ids(backend, ["".join(parts[n::2_000]) for n in range(2_000)])


@pytest.mark.parametrize("language", CORPUS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_words_of_other_languages_are_cut_too(name, language):
    backend = pipeline(*PIPELINES[name])
    text, cache = CORPUS[language], cache_of(backend)
    draw = random.Random(language)
    texts = [" ".join(draw.choices([*text.split(), draw.choice(HOSTILE)], k=9)) for _ in range(300)]
    assert_same_ids(backend, [*texts, "x" * 100_000, "ab " * 5, " " * 999], cache)
    if language != "Hindi" or name not in ("bert", "albert"):  # which drop marks that words end in
        assert len(cache([text])._starts) >= 0.6 * len(text.split())


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_an_eighth_of_a_million_texts_of_many_scripts(name):
    """Words of all languages, what may stand between them, and characters from everywhere."""
    backend, draw = pipeline(*PIPELINES[name], *TOKENS[1]), random.Random(name)
    cache = cache_of(backend)
    kinds = [
        [*" ".join(CORPUS.values()).split(), "一二", "ไทย"],
        EDGES,
        HOSTILE,
        [" ", "  ", "\n\n"],
    ]
    anything = [chr(code) for code in (*range(1, 0xD800), *range(0xE000, 0x30000))]
    for _ in range(25):
        texts = []
        for _ in range(5_000):
            parts = [draw.choice(draw.choice(kinds)) for _ in range(draw.randint(0, 8))]
            texts.append("".join([*parts, *draw.choices(anything, k=draw.randint(0, 2))]))
        assert_same_ids(backend, texts, cache)


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
@pytest.mark.parametrize("name", ["bert", "llama3"])
def test_no_text_at_all_has_no_tokens(name, texts):
    assert_same_ids(pipeline(*PIPELINES[name]), texts)


def test_a_tokenizer_that_draws_is_read_whole():
    model = models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.5)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    assert gaps.read_gaps(backend, json.loads(backend.to_str())) is None
    model.dropout = None
    assert gaps.read_gaps(backend, json.loads(backend.to_str())) is not None


def test_equal_tokenizers_have_one_cache_that_goes_with_its_last_holder():
    backend, other = (pipeline(*PIPELINES["bert"]) for _ in range(2))
    cache = gaps.word_cache(backend)
    assert gaps.word_cache(other) is cache
    other.encode_special_tokens = True
    assert gaps.word_cache(other) is not cache
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("name", [*PIPELINES])
def test_new_words_are_read_at_once_whatever_stands_between(name, is_plain, tokens):
    """The token between them could be in a text, in a word, and next to any other token."""
    special = AddedToken("<s>", special=True, normalized=False)
    backend = pipeline(*PIPELINES[name], special, *tokens)
    backend.encode_special_tokens = is_plain
    cache = cache_of(backend)
    draw, parts = random.Random(name), ["<t>", "a", "1", ".", "<s>", "s", "é", "</t>", "`"]
    many = ["".join(draw.choices(parts, k=draw.randint(1, 6))) for _ in range(400)]
    texts = [" ".join(draw.choices(many, k=20)) for _ in range(60)]
    calls, read_each = [], cache._tokenize_singly
    cache._tokenize_singly = lambda words: calls.append(words) or read_each(words)
    assert_same_ids(backend, texts, cache)
    assert bool(calls) == (cache._joiner is None)
    hostile = [text.replace("a", "a\ufdd0") for text in texts] + ["\ufdd0", " \ufdd0\ufdd0 a"]
    assert_same_ids(backend, hostile, cache)
    assert calls


def test_a_tokenizer_that_knows_what_stands_between_words_reads_each_alone():
    backend = pipeline(*PIPELINES["gpt2"], AddedToken("a\ufdd0", normalized=False))
    cache = cache_of(backend)
    assert cache._joiner is None
    assert_same_ids(backend, ["b a\ufdd0 a b", "b a\ufdd0b a\ufdd0"], cache)


def test_threads_share_a_cache_that_stays_small(monkeypatch):
    monkeypatch.setattr(gaps, "CACHE_BYTES", 20_000)  # so that halves are dropped all the time
    monkeypatch.setattr(gaps, "_KEPT_AT_ONCE", 8)
    backend, draw = pipeline(*PIPELINES["bert"]), random.Random(0)
    cache = cache_of(backend)
    texts = [" ".join(str(draw.randint(0, 999)) for _ in range(30)) for _ in range(400)]

    def check(number):
        assert_same_ids(backend, texts[number::8], cache)
        with cache._keeping:
            kept = [*cache._younger.items(), *cache._older.items()]
        size = sum(sys.getsizeof(word) + sys.getsizeof(row) + 100 for word, row in kept)
        assert size < 20_000 + 2 * 8 * 300  # each half may exceed its share by one addition

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check, 4 * [*range(8)]))
    assert cache._older


def test_texts_whose_words_seldom_come_again_are_not_cut(monkeypatch):
    for name in ("_MOST_NEW", "_MOST_NEW_AT_FIRST"):
        monkeypatch.setattr(gaps, name, 0.5)
    draw = random.Random(0)
    seldom = [" ".join(f"{draw.getrandbits(40):x}" for _ in range(40)) for _ in range(2_000)]
    backend = pipeline(*PIPELINES["gpt2"])
    cache = cache_of(backend)
    cache(seldom)
    assert not cache._pays
    assert not cache._younger
    for _ in range(40):  # until as much has gone by as is left alone
        cache(["the same again and again"] * 3_000)
    assert cache._pays
