"""Every way to run a model faster gives what plain transformers gives, rounding apart.

Weights are large, so that attention is sharp and a small mistake shows in the outputs. Right is
what transformers gives in float64, one text at a time.
"""

import functools

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from gpuclassify import DistributedDataClassifier
from gpuclassify.inference.packed import disentangled, packed_layers
from tests.loaders import OTHER_LOADERS
from tests.oracle import plain_tokenizer, stacked
from tests.replicas import sample_texts, write_checkpoint

pytestmark = pytest.mark.usefixtures("one_torch_thread")

MOST_TOKENS = 200
USUAL, SHARP = 0.1, 0.3  # standard deviations of weights
# Of the largest output. Measured: transformers' own float32 is up to 7e-6 off, fast paths 1.5e-5.
TOLERANCE = 1e-4
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}
DISTILBERT = {"dim": 64, "hidden_dim": 80, "n_heads": 4, "n_layers": 2}
MODELS = {
    "bert": ("bert", SIZES),
    "roberta": ("roberta", SIZES),
    "xlm-roberta": ("xlm-roberta", SIZES),
    "electra": ("electra", SIZES | {"embedding_size": 32}),
    "distilbert": ("distilbert", DISTILBERT),
    "modernbert": ("modernbert", SIZES),
    "deberta-v2": ("deberta-v2", SIZES),
    "deberta-v2-convolution": (
        "deberta-v2",
        SIZES | {"conv_kernel_size": 3, "conv_act": "gelu", "position_buckets": 256},
    ),
    "deberta-v3-linear-head": None,
}
PATHS = {
    "auto": {},  # which packs every model here but DeBERTa
    "padded": {"engine": "padded", "padding_side": "right"},
    "padded-left": {"engine": "padded", "padding_side": "left"},
    "unsorted": {"sort_by_length": False, "batch_size": 3},
    **{loader: {"loader": loader} for loader in OTHER_LOADERS},
    "reference": {"engine": "reference"},
}
RAGGED = ["", "a", *sample_texts(6, seed=5, max_words=120), "river " * 300, "word " * 190]
WORDS = sample_texts(1, seed=8, min_words=40)[0].split()
FRAMES = {
    "ragged": RAGGED,
    "equal": [" ".join(["the", *np.roll(WORDS, by)]) for by in range(6)],
    "longest": ["river " * 300, "word " * 300 + "oven"],
    "shortest": ["", "a"],
    "one": [RAGGED[5]],
    "one of the longest": ["river " * 300],
    "the shortest one": [""],
}


@pytest.fixture(scope="module")
def model_of(sequence_classifier, tmp_path_factory):
    """Model and size of its weights to its directory."""

    @functools.cache
    def write(name, initializer_range):
        if MODELS[name] is not None:
            architecture, sizes = MODELS[name]
            return sequence_classifier(architecture, initializer_range=initializer_range, **sizes)
        folder = tmp_path_factory.mktemp("category") / "domain"
        return write_checkpoint(
            folder, "domain", hidden_size=64, initializer_range=initializer_range
        )

    return write


@functools.cache
def plain_model(directory, dtype):
    """Tokenizer, and ids to outputs, by transformers alone."""
    tokenizer = plain_tokenizer(directory)
    if not (directory / "backbone").exists():
        whole = AutoModelForSequenceClassification.from_pretrained(directory).to(dtype).eval()
        return tokenizer, lambda ids: whole(ids, torch.ones_like(ids)).logits
    backbone = AutoModel.from_config(AutoConfig.from_pretrained(directory / "backbone"))
    tensors = load_file(directory / "model.safetensors")
    weight, bias = (tensors.pop(f"fc.{name}").to(dtype) for name in ("weight", "bias"))
    backbone.load_state_dict({name.removeprefix("model."): t for name, t in tensors.items()})
    backbone.to(dtype).eval()
    return tokenizer, lambda ids: backbone(ids).last_hidden_state[:, 0] @ weight.T + bias


@functools.cache
def plain_outputs(directory, text, dtype):
    """Of a text alone and unpadded, float64 (outputs,)."""
    tokenizer, run = plain_model(directory, dtype)
    ids = tokenizer(text, truncation=True, max_length=MOST_TOKENS, return_tensors="pt").input_ids
    with torch.inference_mode():
        return run(ids)[0].double().numpy()


def outputs(directory, texts, **options):
    """What the classifier gives, before any softmax that would hide large errors."""
    raw = {"problem_type": "regression", "score_field": "outputs", "autocast": False}
    raw["max_seq_length"] = MOST_TOKENS
    classifier = DistributedDataClassifier(model=directory, **{**raw, **options})
    return stacked(classifier(pd.DataFrame({"text": texts})).outputs)


def stacked_outputs(directory, texts, dtype):
    return np.stack([plain_outputs(directory, text, dtype) for text in texts])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", MODELS)
def test_every_path_gives_what_transformers_gives(model_of, name, path):
    directory = model_of(name, SHARP)
    right = stacked_outputs(directory, RAGGED, torch.float64)
    scale = np.abs(right).max()
    assert right.std(axis=0).min() > 0.1 * scale  # else mistakes would not show
    for texts in FRAMES.values():
        found = outputs(directory, texts, **PATHS[path])

        right = stacked_outputs(directory, texts, torch.float64)
        assert found.shape == right.shape
        assert np.abs(found - right).max() <= TOLERANCE * scale


@pytest.mark.parametrize("path", ["auto", "padded-left", *OTHER_LOADERS])
@pytest.mark.parametrize("name", ["bert", "electra", "modernbert", "deberta-v3-linear-head"])
def test_bfloat16_is_as_near_as_in_transformers(model_of, name, path):
    """On short texts, for processors on which it is slow."""
    directory = model_of(name, USUAL)
    texts = [text for text in RAGGED if len(text) < 300]
    right, plain = (stacked_outputs(directory, texts, d) for d in (torch.float64, torch.bfloat16))
    found = outputs(directory, texts, dtype="bfloat16", **PATHS[path])

    assert np.abs(found - right).mean() <= 1.5 * np.abs(plain - right).mean() < 0.2 * right.std()


@pytest.mark.parametrize("is_without_amx", [False, True])
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("deberta-v3-linear-head", disentangled),
        ("bert", packed_layers),
        ("modernbert", packed_layers),
    ],
)
def test_bfloat16_is_as_near_whichever_attention_the_processor_is_faster_with(
    model_of, name, attention, is_without_amx, monkeypatch
):
    asked = []
    monkeypatch.setattr(
        attention, "is_bfloat16_without_amx", lambda *of: asked.append(of) or is_without_amx
    )
    test_bfloat16_is_as_near_as_in_transformers(model_of, name, "auto")
    assert asked
