"""tokenizer="gpu" with cuDF itself: the host's ids exactly, and its scores within the tolerance."""

import importlib

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer

from gpuclassify import DistributedDataClassifier, DomainClassifier, FineWebEduClassifier, classify
from gpuclassify.frames.texts import DeviceTexts
from gpuclassify.inference.batching import stage
from gpuclassify.tokenizing.placement import NotEligibleError, gpu_tokenizer
from gpuclassify.tokenizing.prefetch import DeviceSource, HostSource, TokenStream
from gpuclassify.tokenizing.text_tokenizer import TextTokenizer
from gpuclassify.workers.run_context import RunStats, collected_stats
from tests.gpu.test_gpu_wordpiece import HARD
from tests.oracle import assert_close
from tests.replicas import sample_texts

pytestmark = pytest.mark.gpu

MAX_TOKENS = 64
ROWS = [None, *HARD, None, *HARD[:20], *sample_texts(300, seed=11)]
FRAME = pd.DataFrame({"text": pd.Series(ROWS, dtype="str")}).set_axis(np.arange(len(ROWS)) // 2)
SCORE = "fineweb-edu-score-float"


@pytest.fixture(scope="module")
def cudf():
    return importlib.import_module("cudf")


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
        return TextTokenizer(AutoTokenizer.from_pretrained(checkpoint("fineweb-edu")), MAX_TOKENS)

    distinct, positions = DeviceTexts(cudf.Series(ROWS)).fold(None)
    texts = distinct.to_list()
    assert [None if place < 0 else texts[place] for place in positions] == ROWS
    on_host = tokenizer()
    source, stats = DeviceSource(distinct, gpu_tokenizer(on_host), on_host), RunStats()
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
        {"loader": "crossfit"},
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


def test_labels_are_gathered_from_their_categories(cudf, sequence_classifier):
    frame = cudf.from_pandas(FRAME)
    settings = {"model": sequence_classifier("bert"), "device": "cuda", "autocast": False}
    found, _ = run(DistributedDataClassifier(tokenizer="gpu", **settings), frame)
    expected = DistributedDataClassifier(tokenizer="host", **settings)(FRAME)
    assert found.preds.isna().tolist() == FRAME.text.isna().tolist()
    assert found.preds.fillna("").tolist() == expected.preds.fillna("").tolist()


def test_auto_is_the_host_for_now(cudf, education):
    _, stats = run(education("auto"), cudf.from_pandas(FRAME))
    assert (stats.gpu_tokenized_texts, stats.host_fallback_texts) == (0, 0)


def test_another_tokenizer_is_refused(cudf, checkpoint):
    classifier = DomainClassifier(model=checkpoint("domain"), tokenizer="gpu")
    with pytest.raises(NotEligibleError, match=r'does not suit .*tokenizer="host"'):
        classifier(cudf.from_pandas(FRAME))
