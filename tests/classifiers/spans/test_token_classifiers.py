"""Spans of token classifiers against transformers' pipeline, one text at a time."""

import functools
import random

import numpy as np
import pandas as pd
import pytest
from transformers import AutoModelForTokenClassification, pipeline
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

from gpuclassify import SpanClassifier
from gpuclassify.models.checkpoint import CheckpointError
from tests.classifiers.test_every_architecture import NOT_BUILT, small_config
from tests.oracle import plain_tokenizer
from tests.replicas import ARCHITECTURES, sample_texts
from tests.replicas.texts import documents_of
from tests.replicas.tokenizers import trained_tokenizer, write_tokenizer
from tests.replicas.writing import save_model, seeded

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.filterwarnings("ignore:Tokenizer does not support real words"),
]
AGGREGATIONS = ["simple", "first", "average", "max", "none"]
HARD = [
    *("", " ", "\n \t", "a\r\nb\r\n  c", "nul\x00byte", " lead  double   spaces ", "a" * 300),
    *(
        "Ünïcödé e\u0301te\u0301 z\u0328\u0301",
        "👩‍👩‍👧‍👦 family 👍🏽 🇩🇪",
        "שלום עולם مرحبا",
        "\u202eright\u202c",
    ),
    *(
        "ｆｕｌｌ ＡＢＣ ﬁ … x² ½",
        "天気 🙂 中文字",
        "[SEP] [CLS] <s> <mask> </s>",
        "don't-stop, (it)!",
    ),
    *("no\xa0break\u3000wide\u200bzero", "\ufeffmark", "\U0001f9d1\u200d\U0001f4bb x"),
]
QUICK = {"bert", "deberta-v2", "modernbert"}


def generated(count, seed):
    """Texts of pieces that tokenizers find hard, in any order."""
    draw = random.Random(seed)
    pieces = [
        *HARD[3:],
        *" .,-'’…\n",
        *(" ".join(sample_texts(6, seed=seed)).split()),
        " the ",
        "é",
        "🙂",
    ]
    return ["".join(draw.choices(pieces, k=draw.randint(1, 14)))[:160] for _ in range(count)]


@functools.cache
def pipeline_of(directory):
    tokenizer = plain_tokenizer(directory)
    model = AutoModelForTokenClassification.from_pretrained(directory).eval()
    return pipeline("token-classification", model=model, tokenizer=tokenizer)


def spans_of_pipeline(directory, text, aggregation):
    """Its spans without the white space at their ends, which come with tokens of many models."""
    found = []
    entities = pipeline_of(directory)(text, aggregation_strategy=aggregation) if text else []
    for entity in entities:
        span = text[entity["start"] : entity["end"]]
        start = entity["start"] + len(span) - len(span.lstrip())
        if span.strip():
            label = entity.get("entity_group", entity.get("entity"))
            found.append((start, start + len(span.strip()), label, float(entity["score"])))
    return sorted(found)


def rows_of(column):
    return [
        None if row is None else sorted((s["start"], s["end"], s["label"], s["score"]) for s in row)
        for row in column.tolist()
    ]


def assert_equal_spans(found, expected, tolerance=1e-5):
    for ours, theirs in zip(found, expected, strict=True):
        assert [span[:3] for span in ours] == [span[:3] for span in theirs]
        differences = [abs(a[3] - b[3]) for a, b in zip(ours, theirs, strict=True)]
        assert max(differences, default=0) <= tolerance


@pytest.mark.parametrize(
    "architecture",
    [a if a in QUICK else pytest.param(a, marks=pytest.mark.slow) for a in ARCHITECTURES],
)
def test_spans_are_those_of_transformers_pipeline(token_classifier, architecture):
    directory = token_classifier(architecture)
    texts = [*HARD, *sample_texts(10, seed=2, max_words=60)]
    texts += generated(200, seed=ARCHITECTURES.index(architecture))
    frame = pd.DataFrame({"text": texts})
    for aggregation in AGGREGATIONS:
        mapper = SpanClassifier(model=directory, aggregation=aggregation, autocast=False)
        found = rows_of(mapper(frame)["spans"])
        expected = [spans_of_pipeline(directory, text, aggregation) for text in texts]
        assert sum(map(len, expected)) > 300
        assert_equal_spans(found, expected)


NO_TEXT_ALONE = {"bros"}  # it reads where words stand on a page, too
KINDS = sorted({*MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES} - {*NOT_BUILT} - NO_TEXT_ALONE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_of_token_classifiers(tmp_path, kind):
    from transformers import CONFIG_MAPPING

    config = small_config(CONFIG_MAPPING[kind], num_labels=3)
    build = AutoModelForTokenClassification.from_config
    model = seeded(lambda: build(config).float(), 0)
    save_model(model, tmp_path)
    tokenizer = trained_tokenizer("roberta", documents_of(None))
    write_tokenizer(tmp_path, "roberta", tokenizer, 512, "right")
    texts = [*sample_texts(6, seed=5, max_words=40), "river flows", "a b c"]
    found = rows_of(SpanClassifier(model=str(tmp_path), autocast=False)(texts)["spans"])
    expected = [spans_of_pipeline(str(tmp_path), text, "simple") for text in texts]
    assert_equal_spans(found, expected, 1e-4)


def test_sides_batches_engines_and_precision_of_the_frame_change_nothing(token_classifier):
    texts = [*HARD, *sample_texts(40, seed=6, max_words=80)]
    for architecture, side in (("roberta", "right"), ("llama", "left"), ("deberta-v2", "left")):
        directory = token_classifier(architecture, padding_side=side)
        whole = rows_of(SpanClassifier(model=directory, autocast=False)(texts)["spans"])
        for options in (
            {"batch_size": 1},
            {"engine": "padded", "batch_size": 7},
            {"engine": "reference"},
            {"loader": "crossfit", "engine": "padded"},
            {"sort_by_length": False, "padding_side": "left", "engine": "padded"},
        ):
            mapper = SpanClassifier(model=directory, autocast=False, **options)
            assert_equal_spans(rows_of(mapper(texts)["spans"]), whole)


def test_another_head_is_refused_with_its_cure(sequence_classifier, token_classifier):
    with pytest.raises(CheckpointError, match=r"labels no tokens.*DistributedDataClassifier"):
        SpanClassifier(model=str(sequence_classifier()))(["a"])
    from gpuclassify import DistributedDataClassifier

    with pytest.raises(CheckpointError, match="SpanClassifier runs a ForTokenClassification"):
        DistributedDataClassifier(model=token_classifier())(["a"])


@pytest.mark.parametrize("family", ["domain", "quality", "prompt-task-complexity", "fineweb-edu"])
def test_published_text_classifiers_are_refused_before_any_weight_is_read(checkpoint, family):
    with pytest.raises(CheckpointError, match=r"labels no tokens.*DistributedDataClassifier"):
        SpanClassifier(model=str(checkpoint(family))).labels  # noqa: B018


def test_a_tokenizer_without_places_is_refused(tmp_path, token_classifier):
    from unittest import mock

    mapper = SpanClassifier(model=token_classifier(), autocast=False)
    with (
        mock.patch(
            "gpuclassify.classifiers.spans.token_runner.TokenRunner.text_tokenizer"
        ) as tokenizer,
        pytest.raises(CheckpointError, match="written in Python"),
    ):
        tokenizer.return_value.backend = None
        mapper(["a"])


def test_a_score_that_is_no_number_is_computed_again_or_fails_by_its_row(
    token_classifier, tmp_path
):
    import shutil

    from safetensors.torch import load_file, save_file

    from gpuclassify.mapping.runners import NonFiniteOutputError

    broken = tmp_path / "broken"
    shutil.copytree(token_classifier(), broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["bert.embeddings.position_embeddings.weight"][300] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NonFiniteOutputError, match=r"row 1 \(index label 1\)"):
        SpanClassifier(model=str(broken), autocast=False)([None, "a " * 310, "a text"])


def test_half_precision_runs_packed_and_gives_about_the_same(token_classifier):
    texts = sample_texts(20, seed=3, max_words=30)
    exact = SpanClassifier(model=token_classifier(), dtype="float32")(texts)["spans"]
    half = SpanClassifier(model=token_classifier(), dtype="bfloat16")(texts)["spans"]
    pairs = [
        ({(s["start"], s["label"]) for s in a}, {(s["start"], s["label"]) for s in b})
        for a, b in zip(exact, half, strict=True)
    ]
    assert sum(len(a & b) for a, b in pairs) > 0.8 * sum(len(a | b) for a, b in pairs)
    assert np.isfinite([s["score"] for row in half for s in row]).all()
