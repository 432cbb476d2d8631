"""Checkpoints as people save them: run as transformers runs them, or refused at the call."""

import json
import shutil

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForTokenClassification,
    pipeline,
)

from gpuclassify import DistributedDataClassifier, Embedder, PromptClassifier
from gpuclassify.models.checkpoint import CheckpointError
from tests.oracle import assert_close, probabilities, raw_outputs, stacked
from tests.replicas import sample_texts
from tests.replicas.chat_models import write_chat_model

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("one_torch_thread")]

TEXTS = sample_texts(6, seed=4, max_words=9)
FRAME = pd.DataFrame({"text": TEXTS})


@pytest.fixture
def edited(sequence_classifier, tmp_path):
    """A copy of a small classifier, with other settings and tensors; None takes a setting out."""

    def make(architecture="bert", tensors=(), settings=None, **config):
        model = shutil.copytree(sequence_classifier(architecture), tmp_path / "model")
        own = json.loads((model / "config.json").read_text()) | config | (settings or {})
        own = {name: value for name, value in own.items() if value is not ...}
        (model / "config.json").write_text(json.dumps(own))
        if tensors:
            path = model / "model.safetensors"
            kept = load_file(path) | {name: torch.ones(shape) for name, shape in tensors}
            save_file(kept, path, metadata={"format": "pt"})
        return model

    return make


def classify(model, **options):
    return DistributedDataClassifier(model=model, autocast=False, **options)(FRAME)


# Labels.

ODD_LABELS = [
    {"0": 0, "1": 1, "2": 2},
    {"0": 1.5, "1": True, "2": False},
    {"0": "a", "1": None, "2": "b"},
    {"0": "a", "1": "b", "2": "a"},
]


@pytest.mark.parametrize("id2label", ODD_LABELS, ids=str)
def test_labels_that_are_no_names_are_those_that_transformers_gives(edited, id2label):
    model = edited(id2label=id2label, label2id=...)
    found = classify(model, label_field="label", score_field="scores", confidence_field="sure")
    results = pipeline("text-classification", str(model))(TEXTS)
    assert found["label"].tolist() == [str(one["label"]) for one in results]
    assert_close(found["sure"], [one["score"] for one in results])
    assert_close(stacked(found["scores"]), probabilities(raw_outputs(model, TEXTS)))
    found = classify(model, label_field="label", labels=["x", "y", "z"], filter_by=["x", "y", "z"])
    expected = probabilities(raw_outputs(model, TEXTS)).argmax(axis=1)
    assert found["label"].tolist() == ["xyz"[number] for number in expected]
    with pytest.raises(CheckpointError, match=r"labels=\['x', 'y'\] are not those of"):
        classify(model, labels=["x", "y"])


@pytest.mark.parametrize(
    "options",
    [
        {"min_score": {"a": 0.5}},
        {"score_format": "struct", "score_field": "scores"},
        {"problem_type": "multi_label_classification", "labels_field": "l", "thresholds": {"a": 1}},
    ],
    ids=["minimum", "struct", "threshold"],
)
def test_a_setting_of_one_of_several_equal_labels_is_refused(edited, options):
    model = edited(id2label={"0": "a", "1": "b", "2": "a"}, label2id=...)
    with pytest.raises(ValueError, match=r"'a' is the label of several outputs .* pass labels="):
        classify(model, **options)


@pytest.mark.parametrize("problem_type", ["single_label_classification", None])
def test_one_output_is_no_single_label(sequence_classifier, problem_type):
    model = sequence_classifier("bert", num_labels=1, problem_type="regression")
    assert classify(model, problem_type=None)["score"].notna().all()
    with pytest.raises(CheckpointError, match='problem_type="multi_label_classification"'):
        classify(model, problem_type="single_label_classification")
    found = classify(model, problem_type="multi_label_classification", confidence_field="sure")
    assert_close(found["sure"], torch.tensor(raw_outputs(model, TEXTS)).sigmoid()[:, 0])


# What the network does not do.


@pytest.mark.parametrize(
    "settings",
    [
        {"_attn_implementation": "flash_attention_2"},
        {"attn_implementation": "flash_attention_3", "quantization_config": None},
        {"_attn_implementation": "a/kernel"},
    ],
    ids=str,
)
def test_how_a_checkpoint_computed_attention_is_its_own_matter(edited, settings):
    model = edited(settings=settings)
    found = classify(model, score_field="scores")
    plain = json.loads((model / "config.json").read_text())
    for name in settings:
        del plain[name]
    (model / "config.json").write_text(json.dumps(plain))
    assert_close(stacked(found["scores"]), probabilities(raw_outputs(model, TEXTS)))


@pytest.mark.parametrize(
    "quantized",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "of-next-year"},
        {"bits": 4},
        "int8",
    ],
    ids=str,
)
@pytest.mark.parametrize("mapper", ["classifier", "embedder", "decoder"])
def test_quantized_weights_are_refused_at_the_call(edited, tmp_path, mapper, quantized):
    named = {"quant_method": quantized} if isinstance(quantized, str) else quantized
    method = named.get("quant_method", "a method without a name")
    if mapper == "decoder":
        model = write_chat_model(tmp_path / "chat", words=["yes", "no"])
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))
        asking = PromptClassifier(model=model, prompt="{text}", answers=["yes", "no"])
    else:
        kind = Embedder if mapper == "embedder" else DistributedDataClassifier
        asking = kind(model=edited(quantization_config=quantized))
    with pytest.raises(CheckpointError, match=f"quantized by {method}"):
        asking.check(FRAME)


@pytest.mark.parametrize("name", ["relative_key", "relative_key_query"])
@pytest.mark.parametrize("kind", [DistributedDataClassifier, Embedder])
def test_positions_that_transformers_no_longer_has_are_refused_at_the_call(edited, kind, name):
    shape = (2 * 64 - 1, 4)
    names = [f"bert.encoder.layer.{n}.attention.self.distance_embedding.weight" for n in range(2)]
    model = edited(position_embedding_type=name, tensors=[(one, shape) for one in names])
    with pytest.raises(CheckpointError, match=f"position_embedding_type='{name}'"):
        kind(model=model).check(FRAME)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("bert", "bert.encoder.layer.0.attention.self.distance_embedding.weight"),
        ("bert", "bert.encoder.layer.7.output.dense.bias"),
        ("bert", "second_classifier.weight"),
        ("roberta", "roberta.encoder.adapter.weight"),
        ("distilbert", "distilbert.transformer.layer.0.extra.weight"),
        ("modernbert", "model.layers.0.attn.gate.weight"),
    ],
)
def test_trained_tensors_that_the_network_does_not_use_are_refused(edited, architecture, name):
    model = edited(architecture, tensors=[(name, (32, 32))])
    with pytest.raises(CheckpointError, match=f"1 tensors are no part of the architecture: {name}"):
        classify(model)
    if "classifier" not in name:
        with pytest.raises(CheckpointError, match=f"no part of the architecture: .*{name[-12:]}"):
            Embedder(model=model, autocast=False)(FRAME)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("bert", "bert.embeddings.position_ids"),
        ("bert", "cls.predictions.transform.dense.weight"),
        ("roberta", "roberta.pooler.dense.weight"),
        ("roberta", "lm_head.dense.weight"),
        ("distilbert", "vocab_projector.bias"),
        ("deberta-v2", "lm_predictions.lm_head.dense.weight"),
        ("deberta-v2", "mask_predictions.dense.weight"),
        ("modernbert", "decoder.bias"),
    ],
)
def test_constants_and_heads_of_pretraining_do_no_harm(edited, architecture, name):
    model = edited(architecture, tensors=[(name, (32, 32))])
    found = classify(model, score_field="scores")
    assert_close(stacked(found["scores"]), probabilities(raw_outputs(model, TEXTS)))
    Embedder(model=model, autocast=False)(FRAME)


OTHER_HEADS = {
    "tokens": AutoModelForTokenClassification,
    "choices": AutoModelForMultipleChoice,
    "masks": AutoModelForMaskedLM,
    "words": AutoModelForCausalLM,
}


@pytest.mark.parametrize(
    ("architecture", "head"),
    [
        ("bert", "tokens"),
        ("bert", "choices"),
        ("bert", "masks"),
        ("modernbert", "tokens"),
        ("deberta-v2", "tokens"),
        ("llama", "tokens"),
        ("mistral", "tokens"),
        ("llama", "words"),
    ],
)
def test_a_network_with_another_head_is_refused_at_the_call(
    sequence_classifier, tmp_path, architecture, head
):
    model = shutil.copytree(sequence_classifier(architecture), tmp_path / "model")
    network = OTHER_HEADS[head].from_config(AutoConfig.from_pretrained(model))
    network.save_pretrained(model)
    with pytest.raises(CheckpointError, match=f"is a {type(network).__name__}, whose head labels"):
        DistributedDataClassifier(model=model).check(FRAME)
    config = json.loads((model / "config.json").read_text())
    del config["architectures"]  # then the tensors tell, where they are called otherwise
    (model / "config.json").write_text(json.dumps(config))
    if (architecture, head) not in (("bert", "choices"), ("modernbert", "tokens")):
        with pytest.raises(CheckpointError, match=r"are missing|no part"):
            classify(model)


def test_a_decoder_with_tensors_of_its_own_is_refused(tmp_path):
    model = write_chat_model(tmp_path / "chat", words=["yes", "no"])
    path = model / "model.safetensors"
    extra = {"model.layers.0.self_attn.gate.weight": torch.ones(3)}
    save_file(load_file(path) | extra, path, metadata={"format": "pt"})
    asking = PromptClassifier(model=model, prompt="{text}", answers=["yes", "no"])
    with pytest.raises(CheckpointError, match=r"self_attn\.gate\.weight"):
        asking.prepare()
    with pytest.raises(CheckpointError, match=r"self_attn\.gate\.weight"):
        asking.map_frame(FRAME)
