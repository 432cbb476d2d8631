"""What a checkpoint says about a text, by plain transformers: one document at a time, in float32.

Nothing here uses gpuclassify, so that agreement with it is evidence.
"""

import functools
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

TOLERANCE = 1e-5  # absolute and relative, for float32 models of ordinary scale


def plain_tokenizer(directory, **options):
    """The tokenizers library on a model's own file, called as transformers does.

    Other classes of transformers 5, which AutoTokenizer takes by name, drop steps of the file.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, **options)
    tokenizer._tokenizer = Tokenizer.from_file(str(Path(directory, "tokenizer.json")))
    return tokenizer


def raw_outputs(directory, texts, max_tokens=None):
    """Logits or regression outputs, float32 (texts, outputs)."""
    return np.stack([_outputs_of(str(directory), text, max_tokens) for text in texts])


def probabilities(outputs):
    """Softmax of each row."""
    return torch.from_numpy(outputs).softmax(dim=1).numpy()


def independent_probabilities(outputs):
    """Sigmoid of each output."""
    return torch.from_numpy(outputs).sigmoid().numpy()


def assert_close(found, expected, tolerance=TOLERANCE):
    """Every number within ``tolerance + tolerance * |expected|``; NaN nowhere."""
    found, expected = np.asarray(found, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    excess = np.abs(found - expected) - tolerance * (1 + np.abs(expected))
    assert excess.max(initial=-np.inf) <= 0, f"{excess.max()} beyond the tolerance"


def assert_labels_agree(found, labels, expected, tolerance=TOLERANCE):
    """The label of the highest score; another one only where the two highest nearly tie.

    Returns how many rows differed within the tolerance.
    """
    found, expected = list(found), np.asarray(expected)
    ties = 0
    for row, label in enumerate(found):
        scores = expected[row]
        if label == labels[int(scores.argmax())]:
            continue
        margin = scores.max() - scores[list(labels).index(label)]
        assert margin <= 2 * tolerance * (1 + scores.max()), f"row {row}: {label}, margin {margin}"
        ties += 1
    return ties


def stacked(column):
    """A column of lists as one float32 array (rows, classes)."""
    return np.stack([np.asarray(value, dtype=np.float32) for value in column])


@functools.cache
def _model(directory):
    """Tokenizer and a function from its output to raw outputs."""
    tokenizer = plain_tokenizer(directory)
    config = json.loads(Path(directory, "config.json").read_text())
    if "base_model" not in config:
        model = AutoModelForSequenceClassification.from_pretrained(directory).float().eval()
        return tokenizer, lambda inputs: model(**inputs).logits
    backbone = AutoModel.from_config(
        AutoConfig.from_pretrained(Path(directory, config["base_model"]))
    )
    tensors = load_file(Path(directory, "model.safetensors"))
    weight, bias = tensors.pop("fc.weight"), tensors.pop("fc.bias")
    backbone.load_state_dict({name.removeprefix("model."): t for name, t in tensors.items()})
    backbone.float().eval()
    return tokenizer, lambda inputs: backbone(**inputs).last_hidden_state[:, 0] @ weight.T + bias


@functools.cache
def _outputs_of(directory, text, max_tokens):
    tokenizer, run = _model(directory)
    limit = min(max_tokens or tokenizer.model_max_length, tokenizer.model_max_length)
    inputs = tokenizer(text, truncation=True, max_length=limit, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    with torch.inference_mode():
        return run(inputs)[0].numpy()
