"""tokenizer="gpu": the flow around the GPU's tokenizer gives what the host's alone gives.

cuDF runs on a GPU only. Here a column of pandas is what stays there, tensors of the CPU are the
ids, and the Hugging Face tokenizer makes them for those texts that the real screen does not doubt.
tests/gpu/test_gpu_tokenizing.py runs cuDF itself.
"""

import json
import pickle
import shutil

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from gpuclassify import (
    AegisClassifier,
    DistributedDataClassifier,
    DomainClassifier,
    Embedder,
    FineWebEduClassifier,
    ParquetReader,
    ParquetWriter,
    Pipeline,
    classify,
)
from gpuclassify.commands.cli import main
from gpuclassify.commands.settings import load_settings
from gpuclassify.frames.texts import DeviceTexts
from gpuclassify.mapping.runners import NonFiniteOutputError
from gpuclassify.tokenizing import placement, prefetch
from gpuclassify.tokenizing.gpu_wordpiece import GpuTokens, offsets_of
from gpuclassify.tokenizing.placement import NotEligibleError
from gpuclassify.tokenizing.prefetch import DeviceSource, HostSource, TokenStream
from gpuclassify.tokenizing.text_tokenizer import TextTokenizer
from gpuclassify.tokenizing.wordpiece_rules import read_rules
from gpuclassify.tokenizing.wordpiece_screen import find_doubtful, pack
from gpuclassify.workers.run_context import RunStats, collected_stats
from tests.oracle import assert_close, raw_outputs
from tests.replicas import sample_texts

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MAX_TOKENS = 24
TEXTS = [
    None,
    "",
    " \n\t",
    "한국어 text",
    "[SEP] inside",
    "x" * 60,
    "river " * 100,
    "river " * 101,
    "naïve café 学习 👩\u200d🔬",
    *sample_texts(30, seed=6, max_words=60),
    "한국어 text",
    None,
    "river",
    "river",
]
FRAME = pd.DataFrame({"text": pd.Series(TEXTS, dtype="str")}).set_axis(np.arange(len(TEXTS)) // 2)
DISTINCT = [text for text in dict.fromkeys(TEXTS) if text is not None]


class ColumnTexts(DeviceTexts):
    """A column of pandas, which calls things as cudf does, in the place of one on a GPU."""

    def to_list(self):
        return [None if pd.isna(text) else text for text in self.series]


class HostIds:
    """Tokens as `GpuWordPiece` gives them, by the Hugging Face tokenizer."""

    def __init__(self, backend, max_tokens):
        self.special = read_rules(backend).special
        self.cut, self.whole = (Tokenizer.from_str(backend.to_str()) for _ in range(2))
        self.cut.enable_truncation(max_tokens)
        self.whole.no_truncation()

    def __call__(self, series):
        texts = series.tolist()
        is_left = doubtful(texts, self.special)
        rows = [
            [] if left else encoding.ids
            for encoding, left in zip(self.cut.encode_batch(texts), is_left, strict=True)
        ]
        whole = [len(encoding.ids) for encoding in self.whole.encode_batch(texts)]
        ids = torch.tensor([number for row in rows for number in row], dtype=torch.int32)
        whole_lengths = np.where(is_left, 0, np.array(whole, dtype=np.int64))
        return GpuTokens(
            ids,
            offsets_of(np.array([len(row) for row in rows])),
            whole_lengths,
            is_left.nonzero()[0],
        )


def doubtful(texts, special=("[SEP]", "[CLS]", "[MASK]", "[PAD]", "[UNK]")):
    codes = torch.tensor([pack(char) for text in texts for char in text], dtype=torch.int32)
    return find_doubtful(codes, torch.tensor([len(text) for text in texts]), special).numpy()


class OnDevice:
    """A mapper whose texts stay in their column, whatever its frame and device."""

    def read_texts(self, frame):
        texts = frame[self.text_field]
        return ColumnTexts(texts if self.max_chars is None else texts.str.slice(0, self.max_chars))


class DeviceFineWeb(OnDevice, FineWebEduClassifier):
    """With the published column names."""


class DeviceEncoder(OnDevice, DistributedDataClassifier):
    """Any classifier."""


@pytest.fixture
def education(checkpoint, monkeypatch):
    """Mappers of one small FineWeb model: on the host, and with tokens of a device."""
    monkeypatch.setattr(placement, "_build", lambda host: HostIds(host.backend, host.max_tokens))

    def make(kind, **options):
        settings = {"autocast": False, "max_seq_length": MAX_TOKENS, **options}
        return kind(model=settings.pop("model", checkpoint("fineweb-edu")), **settings)

    return make


@pytest.fixture
def _small_blocks(monkeypatch):
    monkeypatch.setattr(prefetch, "FIRST_BLOCK_CHARS", 400)
    monkeypatch.setattr(prefetch, "MOST_BLOCK_CHARS", 1_000)


def run(mapper, frame=FRAME):
    with collected_stats() as runs:
        result = mapper(frame)
    return result, runs[-1]


def assert_same(found, expected):
    """Everything but scores exactly, scores within the tolerance."""
    score = "fineweb-edu-score-float"
    pd.testing.assert_frame_equal(found.drop(columns=score), expected.drop(columns=score))
    assert found[score].dtype == expected[score].dtype == np.float32
    assert found[score].isna().tolist() == expected[score].isna().tolist()
    assert_close(found[score].dropna(), expected[score].dropna())


# The same tokens, the same columns.


@pytest.mark.usefixtures("_small_blocks")
def test_a_feed_of_a_device_gives_the_hosts_tokens(checkpoint):
    def tokenizer():
        return TextTokenizer(AutoTokenizer.from_pretrained(checkpoint("fineweb-edu")), MAX_TOKENS)

    on_host, stats = tokenizer(), RunStats()
    column = ColumnTexts(pd.Series(DISTINCT, dtype="str"))
    stream = TokenStream(DeviceSource(column, HostIds(on_host.backend, MAX_TOKENS), on_host), stats)
    other = TokenStream(HostSource(tokenizer(), DISTINCT, False), RunStats())
    blocks, expected = list(stream), list(other)

    assert len(blocks) == len(expected) > 3
    assert not any(block.is_on_host for block in blocks)
    for found, wanted in zip(stream.blocks, other.blocks, strict=True):
        assert found.tokens.ids.dtype == torch.int32
        np.testing.assert_array_equal(found.tokens.ids.numpy(), wanted.tokens.ids)
        np.testing.assert_array_equal(found.tokens.offsets, wanted.tokens.offsets)
        np.testing.assert_array_equal(found.tokens.whole_lengths, wanted.tokens.whole_lengths)
    for name in ("counts", "window_counts", "lengths", "seen_share", "text_of"):
        np.testing.assert_array_equal(getattr(stream, name), getattr(other, name), err_msg=name)
    assert stream.places.tolist() == list(range(len(DISTINCT)))
    for window in (0, 5, len(DISTINCT) - 1):
        alone = stream.take(window)
        assert alone.is_on_host
        np.testing.assert_array_equal(alone.ids, other.take(window).ids)
    left = int(doubtful(DISTINCT).sum())
    assert 0 < left < len(DISTINCT) / 2
    assert (stats.host_fallback_texts, stats.gpu_tokenized_texts) == (left, len(DISTINCT) - left)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize(
    "options",
    [
        {"truncated_field": "cut", "seen_field": "seen", "min_score": 0, "keep_field": "kept"},
        {"truncated_field": "cut", "seen_field": "seen", "max_chars": 50},
        {"max_chars": 20, "filter_by": "low_quality"},
        {"padding_side": "left", "engine": "padded", "batch_size": 3},
        {"loader": "crossfit"},
        {"sort_by_length": False, "engine": "reference"},
    ],
)
def test_columns_are_those_of_the_hosts_tokenizer(education, options):
    found, stats = run(education(DeviceFineWeb, **options))
    expected, hosts = run(education(FineWebEduClassifier, **options))
    assert_same(found, expected)
    assert stats.gpu_tokenized_texts + stats.host_fallback_texts == stats.windows == hosts.windows
    assert stats.host_fallback_texts > 0
    for name in ("rows", "null_rows", "folded_rows", "truncated_texts"):
        assert getattr(stats, name) == getattr(hosts, name), name
    assert (hosts.gpu_tokenized_texts, hosts.host_fallback_texts) == (0, 0)


def test_partitions_without_text_and_rows_in_partitions(education):
    nulls = FRAME.assign(text=pd.Series([None] * len(FRAME), dtype="str", index=FRAME.index))
    lazy = dd.from_map(lambda part: part, [FRAME, FRAME.iloc[:0], nulls], meta=FRAME.iloc[:0])
    found = education(DeviceFineWeb)(lazy).compute(scheduler="sync")
    assert_same(found, education(FineWebEduClassifier)(lazy).compute(scheduler="sync"))


def test_without_memory_for_it_the_host_does_a_block(education, monkeypatch):
    def fail(self, series):
        raise MemoryError("std::bad_alloc: out_of_memory")

    monkeypatch.setattr(HostIds, "__call__", fail)
    found, stats = run(education(DeviceFineWeb, truncated_field="cut"))
    assert_same(found, run(education(FineWebEduClassifier, truncated_field="cut"))[0])
    assert (stats.host_fallback_texts, stats.gpu_tokenized_texts) == (len(DISTINCT), 0)


def test_other_errors_of_the_gpu_are_not_hidden(education, monkeypatch):
    def fail(self, series):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(HostIds, "__call__", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(education(DeviceFineWeb))


# Outputs that are not finite.


@pytest.fixture
def with_embedding(checkpoint, tmp_path):
    """A copy of the checkpoint where the embedding of "river" begins with another value."""

    def write(value):
        model = tmp_path / "odd"
        shutil.copytree(checkpoint("fineweb-edu"), model)
        token = AutoTokenizer.from_pretrained(model)("river", add_special_tokens=False).input_ids[0]
        tensors = load_file(model / "model.safetensors")
        [name] = [name for name in tensors if name.endswith("word_embeddings.weight")]
        tensors[name][token, 0] = value
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
        return model

    return write


def test_a_row_without_a_finite_score_is_named(education, with_embedding):
    frame = pd.DataFrame({"text": [None, "oven flour", "market", "river", "river"]})
    with pytest.raises(NonFiniteOutputError, match=r"row 3 \(index label 3\)"):
        education(DeviceFineWeb, model=with_embedding(float("nan")))(frame)


def test_what_overflows_in_half_precision_is_recomputed_in_float32(education, with_embedding):
    model = with_embedding(1e5)  # beyond float16's largest number, 65504
    frame = pd.DataFrame({"text": ["market budget", "river", None, "river 한국어"]})
    found, stats = run(education(DeviceFineWeb, model=model, dtype="float16"), frame)
    assert stats.rescued_texts == 2
    expected = np.clip(raw_outputs(model, ["river", "river 한국어"])[:, 0], 0, 5)
    assert_close(found["fineweb-edu-score-float"].iloc[[1, 3]], expected)


# Who may have it.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "cuda"}, r"tokenizer='cuda' is not .*gpu"),
        ({"tokenizer": "gpu", "long_text": "windows"}, r"no windows.*pass tokenizer=\"host\""),
        ({"tokenizer": "gpu", "device": "cpu"}, r"needs the model on CUDA.*tokenizer=\"host\""),
        ({"tokenizer": "gpu", "device": "mps"}, r"needs the model on CUDA, not device='mps'"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_the_constructor(options, message):
    with pytest.raises(ValueError, match=message):
        FineWebEduClassifier(**options)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_pandas_frame_is_refused_at_the_call(checkpoint, lazy):
    frame = dd.from_pandas(FRAME, npartitions=2, sort=False) if lazy else FRAME
    with pytest.raises(TypeError, match=r"this frame is one of pandas: move it with.*\"host\""):
        FineWebEduClassifier(model=checkpoint("fineweb-edu"), tokenizer="gpu")(frame)


def test_a_chain_and_a_job_refuse_a_pandas_frame_at_the_latest_in_the_first_part(
    checkpoint, tmp_path
):
    mapper = FineWebEduClassifier(model=checkpoint("fineweb-edu"), tokenizer="gpu")
    with pytest.raises(TypeError, match="this frame is one of pandas"):
        dask.compute(classify(dd.from_pandas(FRAME, npartitions=1), [mapper]), scheduler="sync")
    FRAME.to_parquet(tmp_path / "in.parquet")
    stages = [ParquetReader(f"{tmp_path}/in.parquet"), mapper, ParquetWriter(f"{tmp_path}/out")]
    with pytest.raises(TypeError, match="this frame is one of pandas"):
        Pipeline(stages).run()


def test_the_command_line_takes_it(tmp_path):
    path = tmp_path / "job.yaml"
    command = ["classify", "in", "out", "--classifier", "fineweb-edu", "--set", "tokenizer=gpu"]
    CliRunner().invoke(main, [*command, "--dump-config", str(path)], catch_exceptions=False)
    [settings] = load_settings(str(path))["classifiers"]
    assert settings == {"classifier": "fineweb-edu", "tokenizer": "gpu"}


def changed(checkpoint, folder, **parts):
    """A copy of the checkpoint whose tokenizer has other parts."""
    shutil.copytree(checkpoint("fineweb-edu"), folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return folder


def test_a_tokenizer_is_judged_by_its_files_before_any_work_starts(checkpoint, tmp_path):
    FineWebEduClassifier(model=checkpoint("fineweb-edu"), tokenizer="gpu").prepare()
    other = changed(checkpoint, tmp_path / "other", normalizer=None)
    refused = [
        (FineWebEduClassifier(model=other, tokenizer="gpu"), "its normalizer is None"),
        (DomainClassifier(model=checkpoint("domain"), tokenizer="gpu"), "type is 'Unigram'"),
    ]
    for mapper, reason in refused:
        with pytest.raises(
            NotEligibleError, match=rf"does not suit .*{reason}.*tokenizer=\"host\""
        ):
            mapper.prepare()
    for tokenizer in ("auto", "host"):
        FineWebEduClassifier(model=other, tokenizer=tokenizer).prepare()


def test_models_that_are_given_other_texts_are_refused(sequence_classifier, safety_models):
    embedder = Embedder(model=sequence_classifier("bert"), prompt="query: ", tokenizer="gpu")
    aegis = AegisClassifier(
        model=safety_models.permissive, base_model=safety_models.base, tokenizer="gpu"
    )
    for mapper in (embedder, aegis):
        with pytest.raises(NotEligibleError, match="other texts than those of the column"):
            mapper.runner.check_tokenizer()


def test_a_refusal_by_the_tokenizer_itself_is_an_error_or_means_the_host(
    education, sequence_classifier
):
    model = sequence_classifier("roberta")
    frame = FRAME.iloc[:8]
    expected = education(DistributedDataClassifier, model=model, score_field="s")(frame)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "_build", lambda host: NotEligibleError("another cudf"))
        with pytest.raises(NotEligibleError, match=r"does not suit .*another cudf"):
            education(DeviceEncoder, model=model, tokenizer="gpu").compute(
                ColumnTexts(frame.text), str
            )
        found, stats = run(education(DeviceEncoder, model=model, score_field="s"), frame)
    assert found.preds.equals(expected.preds)
    assert (stats.gpu_tokenized_texts, stats.host_fallback_texts) == (0, 0)


def test_auto_is_the_host_until_it_has_been_measured(monkeypatch):
    class Frame:
        """What a frame of cudf says of itself."""

    options = FineWebEduClassifier().options
    monkeypatch.setattr(placement, "_is_cudf", lambda frame: True)
    monkeypatch.setattr(placement, "_runs_on_cuda", lambda options: True)
    assert not placement.is_for_gpu(options, Frame())
    monkeypatch.setattr(placement, "IS_GPU_FASTER", True)
    assert placement.is_for_gpu(options, Frame())
    for other in ({"tokenizer": "host"}, {"long_text": "windows"}):
        assert not placement.is_for_gpu(FineWebEduClassifier(**other).options, Frame())
    monkeypatch.setattr(placement, "_runs_on_cuda", lambda options: False)
    assert not placement.is_for_gpu(options, Frame())
    with pytest.raises(ValueError, match=r"makes tokens on a CUDA device.*tokenizer=\"host\""):
        placement.is_for_gpu(FineWebEduClassifier(tokenizer="gpu").options, Frame())


def test_what_stands_in_for_a_tokenizer_is_built_once_and_forgotten_with_it(education, checkpoint):
    tokenizer = TextTokenizer(AutoTokenizer.from_pretrained(checkpoint("fineweb-edu")), MAX_TOKENS)
    assert placement.gpu_tokenizer(tokenizer) is placement.gpu_tokenizer(tokenizer)
    known = len(placement._found)
    del tokenizer
    assert len(placement._found) == known - 1


def test_nothing_stands_in_for_a_tokenizer_that_cuts_on_the_left(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint("fineweb-edu"), truncation_side="left")
    with pytest.raises(NotEligibleError, match="cuts texts on the left"):
        placement.gpu_tokenizer(TextTokenizer(tokenizer, MAX_TOKENS))


def test_settings_and_keys_tell_where_texts_are_tokenized(checkpoint):
    def make(**options):
        return FineWebEduClassifier(model=checkpoint("fineweb-edu"), **options)

    one = make(tokenizer="gpu")
    assert one == make(tokenizer="gpu") == pickle.loads(pickle.dumps(one))
    tokens = [dask.base.tokenize(m) for m in (one, make(tokenizer="gpu"), make())]
    assert tokens[0] == tokens[1] != tokens[2]
    assert make() == make(tokenizer="auto") != make(tokenizer="host")
