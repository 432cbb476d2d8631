"""GTE checkpoints as published give what the code that was published with them computes.

That code is not run: what it computes is written out below, one text at a time.
"""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from gpuclassify import DistributedDataClassifier, Embedder
from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.models.tensors import known_shapes
from tests.models.test_loading import described
from tests.oracle import assert_close, assert_labels_agree, plain_tokenizer, probabilities, stacked
from tests.replicas import sample_texts, write_gte
from tests.replicas.writing import rewrite

pytest.importorskip("transformers.models.gte", reason="younger than transformers 5.0")
pytestmark = pytest.mark.usefixtures("one_torch_thread")

LABELS = ["Adult", "Art & Design", "Games"]
TEXTS = [*sample_texts(12, seed=9, max_words=60), "", "river", "oven flour " * 400]


def published(tensors, config, ids):
    """States of one text's tokens, float32 (tokens, width), from names without their prefix."""

    def linear(name, states):
        return F.linear(states, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def norm(name, states):
        weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
        return F.layer_norm(states, states.shape[-1:], weight, bias, config["layer_norm_eps"])

    def turned(states):
        first, second = states.chunk(2, dim=-1)
        return states * cos + torch.cat([-second, first], dim=-1) * sin

    heads = config["num_attention_heads"]
    width = config["hidden_size"] // heads
    angles = torch.arange(len(ids)).float()[:, None] * frequencies(config, width)
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    cos, sin = angles.cos(), angles.sin()
    states = tensors["embeddings.word_embeddings.weight"][ids]
    if config["type_vocab_size"]:
        states = states + tensors["embeddings.token_type_embeddings.weight"][0]
    states = norm("embeddings.LayerNorm", states)
    for number in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{number}"
        packed = linear(f"{layer}.attention.qkv_proj", states).unflatten(1, (3, heads, width))
        query, key, value = packed.unbind(1)
        scores = torch.einsum("qhd,khd->hqk", turned(query), turned(key)) / width**0.5
        read = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
        attended = linear(f"{layer}.attention.o_proj", read)
        states = norm(f"{layer}.attn_ln", states + attended)
        up, gate = linear(f"{layer}.mlp.up_gate_proj", states).chunk(2, dim=-1)
        states = norm(
            f"{layer}.mlp_ln", states + linear(f"{layer}.mlp.down_proj", up * F.gelu(gate))
        )
    return states


def frequencies(config, width):
    """Of rotary positions with NTK scaling as in https://kexue.fm/archives/9706."""
    factor = (config["rope_scaling"] or {"factor": 1.0})["factor"]
    base = config["rope_theta"] * factor
    return base ** -(torch.arange(0, width, 2) / width) / factor ** (2 / width)


def ids_of(directory, text):
    return plain_tokenizer(directory)(text, truncation=True, max_length=512).input_ids


def logits(directory, text):
    tensors = load_file(directory / "model.safetensors")
    plain = {name.removeprefix("new."): tensor for name, tensor in tensors.items()}
    config = json.loads((directory / "config.json").read_text())
    first = published(plain, config, ids_of(directory, text))[0]
    pooled = F.linear(first, plain["pooler.dense.weight"], plain["pooler.dense.bias"]).tanh()
    return F.linear(pooled, plain["classifier.weight"], plain["classifier.bias"]).numpy()


def embedding(directory, text):
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    return F.normalize(published(tensors, config, ids_of(directory, text))[0], dim=0).numpy()


def frame(texts=TEXTS):
    return pd.DataFrame({"text": texts})


@pytest.fixture(scope="module")
def classifier_of(tmp_path_factory):
    """A classifier's directory, by the settings of its ``config.json``."""
    return lambda **settings: write_gte(
        tmp_path_factory.mktemp("gte") / "topic", LABELS, **settings
    )


@pytest.fixture(scope="module")
def topic(classifier_of):
    return classifier_of()


@pytest.fixture(scope="module")
def arctic(tmp_path_factory):
    return write_gte(tmp_path_factory.mktemp("gte") / "arctic")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rope_scaling": None},
        {"rope_scaling": {"type": "ntk", "factor": 8.0}, "rope_theta": 20000.0},
        {"type_vocab_size": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ["packed", "padded"])
def test_a_classifier_gives_what_the_published_code_computes(classifier_of, settings, engine):
    directory = classifier_of(**settings)
    options = {"score_field": "scores", "engine": engine, "autocast": False, "max_chars": None}
    found = DistributedDataClassifier(model=str(directory), **options)(frame())
    expected = probabilities(np.stack([logits(directory, text) for text in TEXTS]))
    assert expected.std(0).max() > 0.05
    assert_close(stacked(found.scores), expected)
    assert assert_labels_agree(found.preds, LABELS, expected) == 0


def test_an_embedder_gives_what_the_published_code_computes(arctic):
    found = Embedder(model=str(arctic), autocast=False, max_chars=None)(frame())
    assert_close(stacked(found.embedding), [embedding(arctic, text) for text in TEXTS])
    asked = Embedder(model=str(arctic), prompt_name="query", autocast=False)(frame(["a river"]))
    assert_close(stacked(asked.embedding), [embedding(arctic, "query: a river")])


def test_its_tensors_are_known_without_torch(topic, arctic):
    embedder = Embedder(model=str(arctic)).model.checkpoint
    for directory, checkpoint in ((topic, described(topic)), (arctic, embedder)):
        saved = load_file(directory / "model.safetensors")
        shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
        assert known_shapes(checkpoint) == shapes


def test_a_missing_tensor_is_refused_by_the_client(topic, tmp_path):
    model = shutil.copytree(topic, tmp_path / "model")
    rewrite(model, lambda tensors: tensors.pop("new.encoder.layer.1.mlp.up_gate_proj.weight"))
    with pytest.raises(CheckpointError, match=r"missing: new\.encoder\.layer\.1\.mlp"):
        DistributedDataClassifier(model=str(model))(frame().iloc[:0])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type='rms_norm'"),
        ({"logn_attention_scale": True}, "logn_attention_scale=True"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type='absolute'"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}}, "'mixed_b': 0.6"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'type': 'linear'"),
    ],
)
def test_what_transformers_does_otherwise_is_refused(classifier_of, settings, words):
    with pytest.raises(CheckpointError, match=words):
        DistributedDataClassifier(model=str(classifier_of(**settings)))(frame())


def test_a_model_that_transformers_saved_itself_is_read_as_it_is(topic, tmp_path):
    """Whose configuration has transformers' words, and whose tensors have its names."""
    from transformers import AutoModelForSequenceClassification, GteConfig

    sizes = described(topic).sizes
    torch.manual_seed(0)
    own = AutoModelForSequenceClassification.from_config(GteConfig(**sizes)).eval()
    own.save_pretrained(tmp_path / "own", save_original_format=False)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(topic / name, tmp_path / "own" / name)
    found = DistributedDataClassifier(
        model=str(tmp_path / "own"), problem_type="regression", score_field="s", autocast=False
    )(frame())
    with torch.inference_mode():
        expected = [own(torch.tensor([ids_of(topic, text)])).logits[0].numpy() for text in TEXTS]
    assert_close(stacked(found.s), expected)
