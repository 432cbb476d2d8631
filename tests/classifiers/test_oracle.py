"""Every classifier against plain transformers, one document at a time."""

import numpy as np
import pandas as pd
import pytest

from gpuclassify import DistributedDataClassifier
from gpuclassify.classifiers import FAMILIES
from tests.loaders import LOADERS
from tests.oracle import (
    assert_close,
    assert_labels_agree,
    independent_probabilities,
    probabilities,
    raw_outputs,
    stacked,
)
from tests.replicas import ARCHITECTURES, FAMILY_LABELS, sample_texts

pytestmark = pytest.mark.usefixtures("one_torch_thread")

# Short and long ones, equal ones, blank, and one that is cut at every model's limit.
TEXTS = [*sample_texts(12, seed=21, max_words=50), " ", "river", "river", "oven flour " * 600]
CATEGORIES = ("domain", "multilingual-domain", "quality", "content-type")
EDUCATION = ("fineweb-edu", "fineweb-mixtral-edu", "fineweb-nemotron-edu")
SIDES = ("left", "right")
MODEL_KINDS = {
    "single label": {"problem_type": "single_label_classification"},
    "multi label": {"problem_type": "multi_label_classification"},
    "regression": {"problem_type": "regression", "num_labels": 1},
    "three regressions": {"problem_type": "regression"},
}


def documents(texts=TEXTS):
    return pd.DataFrame({"text": texts})


@pytest.mark.contract
@pytest.mark.parametrize("padding_side", SIDES)
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("family", CATEGORIES)
def test_categories_agree(checkpoint, family, loader, padding_side):
    fields = {"label_field": "label", "score_field": "scores", "confidence_field": "confidence"}
    how = {"loader": loader, "padding_side": padding_side, "autocast": False}
    classifier = FAMILIES[family](model=checkpoint(family), **fields, **how)
    options = classifier.options
    texts = [text[: options.max_chars] for text in TEXTS]
    expected = probabilities(raw_outputs(checkpoint(family), texts, options.max_seq_length))
    found = classifier(documents())
    assert_close(stacked(found.scores), expected)
    assert classifier.labels == list(FAMILY_LABELS[family])
    assert assert_labels_agree(found.label, classifier.labels, expected) == 0
    assert_close(found.confidence, expected.max(axis=1))
    assert found.label.nunique() > 1


@pytest.mark.contract
@pytest.mark.parametrize("padding_side", SIDES)
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("family", EDUCATION)
def test_education_scores_agree(checkpoint, family, loader, padding_side):
    fields = {"score_field": "score", "int_score_field": "int", "label_field": "label"}
    how = {"loader": loader, "padding_side": padding_side, "autocast": False}
    classifier = FAMILIES[family](model=checkpoint(family), **fields, **how)
    expected = raw_outputs(checkpoint(family), TEXTS, 512)[:, 0].clip(0, 5)
    found = classifier(documents())
    assert_close(found.score, expected)
    assert np.abs(expected % 1 - 0.5).min() > 1e-3  # no row near a threshold, so all must agree
    assert list(found.int) == [round(float(score)) for score in expected]
    names = ["high_quality" if score >= 2.5 else "low_quality" for score in expected]
    assert list(found.label) == names
    assert len(set(names)) == 2


def check_against_oracle(model, kind, tolerance=1e-5, **options):
    """Run a sequence classifier over the texts; its columns must be the oracle's."""
    classifier = DistributedDataClassifier(
        **{"model": model, "score_field": "score", "autocast": False, **options}
    )
    found = classifier(documents())
    outputs = raw_outputs(model, TEXTS)
    if kind == "regression":
        assert list(found.columns) == ["text", "score"]
        assert found.score.dtype == np.float32
        assert_close(found.score, outputs[:, 0], tolerance)
        return
    if kind == "three regressions":
        assert list(found.columns) == ["text", "score"]
        assert_close(stacked(found.score), outputs, tolerance)
        return
    to_scores = probabilities if kind == "single label" else independent_probabilities
    expected = to_scores(outputs)
    assert_close(stacked(found.score), expected, tolerance)
    ties = assert_labels_agree(found.preds, classifier.labels, expected, tolerance)
    assert ties == 0 or tolerance > 1e-5


@pytest.mark.parametrize("padding_side", SIDES)
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_agrees_with_either_loader_and_padding(
    sequence_classifier, architecture, loader, padding_side
):
    model = sequence_classifier(architecture, **MODEL_KINDS["single label"])
    check_against_oracle(model, "single label", loader=loader, padding_side=padding_side)


@pytest.mark.parametrize("kind", [kind for kind in MODEL_KINDS if kind != "single label"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_agrees_for_every_kind_of_problem(
    sequence_classifier, architecture, kind
):
    check_against_oracle(sequence_classifier(architecture, **MODEL_KINDS[kind]), kind)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "bert"])
def test_the_tokenizers_own_padding_side_is_the_default(sequence_classifier, architecture):
    settings = {**MODEL_KINDS["single label"], "padding_side": "left"}
    check_against_oracle(sequence_classifier(architecture, **settings), "single label")


@pytest.mark.parametrize("num_labels", [1, 2])
def test_kinds_follow_transformers_where_the_configuration_does_not_say(
    sequence_classifier, num_labels
):
    model = sequence_classifier("bert", num_labels=num_labels)
    check_against_oracle(model, "regression" if num_labels == 1 else "single label")


def test_a_problem_type_given_overrides_the_configurations(sequence_classifier):
    model = sequence_classifier("bert", **MODEL_KINDS["single label"])
    check_against_oracle(model, "multi label", problem_type="multi_label_classification")
    check_against_oracle(model, "three regressions", problem_type="regression")


@pytest.mark.parametrize("architecture", ["bert", "modernbert"])
def test_bfloat16_is_within_two_hundredths_of_float32(sequence_classifier, architecture):
    """The tolerance of probabilities in bfloat16, whose rounding step is 1/256."""
    model = sequence_classifier(architecture, **MODEL_KINDS["single label"])
    check_against_oracle(model, "single label", tolerance=0.02, dtype="bfloat16")


@pytest.mark.parametrize("max_tokens", [3, 7, 64])
def test_a_shorter_limit_cuts_as_transformers_does(checkpoint, max_tokens):
    classifier = FAMILIES["domain"](
        model=checkpoint("domain"), score_field="s", max_seq_length=max_tokens, autocast=False
    )
    expected = probabilities(raw_outputs(checkpoint("domain"), TEXTS, max_tokens))
    assert_close(stacked(classifier(documents([t[:2000] for t in TEXTS])).s), expected)


def test_text_with_special_tokens_in_it_is_read_as_transformers_reads_it(sequence_classifier):
    texts = ["river [SEP] oven", "[MASK] flour [PAD] [PAD]", "[CLS]"]
    model = sequence_classifier("bert", **MODEL_KINDS["single label"])
    classifier = DistributedDataClassifier(model=model, score_field="s", autocast=False)
    found = classifier(documents(texts))
    assert_close(stacked(found.s), probabilities(raw_outputs(model, texts)))
