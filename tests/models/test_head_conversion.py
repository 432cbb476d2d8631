"""Heads of other projects' files give what torch's own modules give, and no pickle runs code."""

import io
import pathlib
import re

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gpuclassify import hub
from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.models.head_conversion import convert_head
from gpuclassify.models.head_network import Backbone, load_head, read_head
from tests.oracle import assert_close

JQL = Backbone("Snowflake/snowflake-arctic-embed-m-v2.0", None, "cls", True, "", 8192)
FINEWEB2_HQ = Backbone("FacebookAI/xlm-roberta-base", None, "mean", False, "", 512)


class RegressionHead(nn.Module):
    """As JQL's pipeline has it, without Lightning."""

    def __init__(self, inputs=768, hidden=32):
        super().__init__()
        self.layer1, self.relu, self.layer2 = (
            nn.Linear(inputs, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, values):
        return self.layer2(self.relu(self.layer1(values)))


class BinaryClassifier(nn.Module):
    """As FineWeb2-HQ's repository has it; the sigmoid stands outside of it."""

    def __init__(self):
        super().__init__()
        self.classifier = nn.Sequential(
            nn.Linear(768, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 1)
        )

    def forward(self, values):
        return self.classifier(values)


class HyperParameters(dict):
    """Of a class that weights_only does not know, as a training may keep them."""


def lightning_checkpoint(module):
    """What Lightning's Trainer saves of a module that called save_hyperparameters()."""
    return {
        "epoch": 3,
        "pytorch-lightning_version": "2.5.1",
        "state_dict": module.state_dict(),
        "callbacks": {"ModelCheckpoint{'monitor': 'val'}": {"best_model_score": torch.tensor(0.7)}},
        "hparams_name": "kwargs",
        "hyper_parameters": HyperParameters(
            input_dim=768, train_sets=[pathlib.PurePosixPath("a/b")], learning_rate=0.1
        ),
    }


def embeddings(width=768):
    return torch.randn(9, width, generator=torch.Generator().manual_seed(0))


def assert_gives(directory, expected, width=768):
    """The directory, read as a classifier reads it, gives what the module gave."""
    found = load_head(read_head(hub.resolve(directory)))
    assert_close(found.apply(embeddings(width).numpy()), expected.detach())
    return found


@pytest.mark.parametrize("has_state", [True, False], ids=["lightning", "state-dict"])
def test_a_head_of_jql(tmp_path, has_state):
    module = RegressionHead()
    path = tmp_path / "edu.ckpt"
    torch.save(lightning_checkpoint(module) if has_state else module.state_dict(), path)

    _, layout = convert_head(path, tmp_path / "head")

    head = assert_gives(tmp_path / "head", module(embeddings()))
    assert (layout, head.backbone, head.problem_type) == ("JQL", JQL, "regression")


def test_a_head_of_fineweb2_hq(tmp_path):
    module = BinaryClassifier().eval()
    torch.save(module.state_dict(), tmp_path / "hq.pt")

    _, layout = convert_head(
        tmp_path / "hq.pt", tmp_path / "head", backbone={"model": "/models/xlm-r"}
    )

    head = assert_gives(tmp_path / "head", torch.sigmoid(module(embeddings())))
    assert layout == "FineWeb2-HQ"
    assert head.backbone == Backbone("/models/xlm-r", None, "mean", False, "", 512)


def test_two_labels_make_a_classifier_of_one_output(tmp_path):
    module = BinaryClassifier().eval()
    torch.save(module.state_dict(), tmp_path / "hq.pt")

    convert_head(tmp_path / "hq.pt", tmp_path / "head", labels=["low", "high"])

    logit = module(embeddings())
    head = assert_gives(tmp_path / "head", torch.cat([torch.zeros_like(logit), logit], dim=1))
    assert (head.labels, head.output_activation) == (("low", "high"), None)


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_a_linear_layer_of_half_precision(tmp_path, kind):
    module = nn.Linear(16, 3).bfloat16()
    path = tmp_path / f"probe.{kind}"
    (torch.save if kind == "pt" else save_file)(module.state_dict(), path)

    convert_head(path, tmp_path / "head", labels=["a", "b", "c"], backbone={"model": "a/b"})

    head = assert_gives(tmp_path / "head", module.float()(embeddings(16)), width=16)
    assert (head.problem_type, head.backbone) == ("single_label_classification", Backbone("a/b"))


@pytest.mark.parametrize("count", [10, 11])
def test_layers_of_safetensors_stand_in_the_order_of_their_numbers(tmp_path, count):
    module = nn.Sequential(*(nn.Linear(4, 4, bias=place != 2) for place in range(count)))
    save_file(module.state_dict(), tmp_path / "deep.safetensors")
    expected = embeddings(4)
    for place, layer in enumerate(module):
        expected = layer(torch.tanh(expected) if place else expected)

    convert_head(
        tmp_path / "deep.safetensors",
        tmp_path / "head",
        labels="abcd",
        hidden_activation="tanh",
    )

    assert_gives(tmp_path / "head", expected, width=4)


def test_a_bias_without_a_weight_is_refused(tmp_path):
    save_file(
        {"a.weight": torch.ones(2, 3), "b.bias": torch.ones(2)}, tmp_path / "head.safetensors"
    )
    with pytest.raises(CheckpointError, match="holds no head of linear layers"):
        convert_head(tmp_path / "head.safetensors", tmp_path / "head", labels=["a", "b"])


def test_models_of_scikit_learn(tmp_path):
    linear_model = pytest.importorskip("sklearn.linear_model")
    values, rng = embeddings(6).numpy(), np.random.default_rng(0)
    score, kind = rng.standard_normal(9), np.arange(9) % 3
    ridge = linear_model.Ridge().fit(values, score)
    several = linear_model.LogisticRegression().fit(values, kind)
    binary = linear_model.LogisticRegression().fit(values, kind > 0)
    for name, model in (("ridge", ridge), ("several", several), ("binary", binary)):
        np.savez(tmp_path / name, coef_=model.coef_, intercept_=model.intercept_)
    for name, labels in (("ridge", ()), ("several", "abc"), ("binary", ["no", "yes"])):
        convert_head(tmp_path / f"{name}.npz", tmp_path / name, labels=labels)
    heads = {
        name: load_head(read_head(hub.resolve(tmp_path / name)))
        for name in ("ridge", "several", "binary")
    }

    assert_close(heads["ridge"].apply(values)[:, 0], ridge.predict(values))
    assert_close(heads["several"].apply(values), several.decision_function(values))
    probabilities = torch.from_numpy(heads["binary"].apply(values)).softmax(1)
    assert_close(probabilities, binary.predict_proba(values))


class Evil:
    """Writes a file when it is unpickled by a reader that trusts it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("is_zip", [True, False])
def test_reading_a_pickle_runs_none_of_its_code(tmp_path, is_zip):
    mark = tmp_path / "mark"
    module = RegressionHead()
    checkpoint = {"state_dict": module.state_dict(), "hyper_parameters": {"x": Evil(mark)}}
    torch.save(checkpoint, tmp_path / "evil.ckpt", _use_new_zipfile_serialization=is_zip)

    if is_zip:
        convert_head(tmp_path / "evil.ckpt", tmp_path / "head")
        assert_gives(tmp_path / "head", module(embeddings()))
    else:
        with pytest.raises(CheckpointError, match="cannot be read as tensors alone"):
            convert_head(tmp_path / "evil.ckpt", tmp_path / "head")
    assert not mark.exists()


def test_objects_that_cannot_be_left_out_are_named(tmp_path):
    torch.save({"state_dict": {}, "rate": np.float64(0.1)}, tmp_path / "head.ckpt")
    with pytest.raises(CheckpointError, match=r"numpy\.dtype.*torch\.save\(torch\.load\("):
        convert_head(tmp_path / "head.ckpt", tmp_path / "head")


def ones(**shapes):
    return {f"{name}.weight": torch.ones(*shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        ({"norm.weight": torch.ones(4), **ones(fc=(4, 4))}, {}, "2 layers"),
        ({"a.running_mean": torch.ones(4), **ones(a=(4, 4))}, {}, r"running_mean \(4,\)"),
        (ones(embed=(2, 3, 4)), {}, r"embed\.weight \(2, 3, 4\)"),
        ({}, {}, "its tensors are none"),
        (ones(a=(3, 4), b=(1, 2)), {"hidden_activation": "relu"}, "do not fit each other"),
        (ones(a=(3, 4), b=(1, 3)), {}, "2 layers.*hidden_activation"),
        (ones(a=(1, 4)), {"hidden_activation": "relv"}, "Did you mean 'relu'"),
        (ones(a=(3, 4)), {}, "3 outputs"),
        ({0: torch.ones(3, 4)}, {}, "no head of linear layers"),
        ([torch.ones(3, 4)], {}, "its tensors are none"),
        (nn.Linear(4, 1), {}, "its tensors are none"),
        (ones(a=(1, 4)), {"backbone": {"pooling": "cls"}}, "model="),
        ({"a.weight": torch.full((1, 4), torch.nan)}, {}, "NaN"),
    ],
)
def test_what_is_no_head_is_refused_by_its_tensors(tmp_path, tensors, settings, message):
    torch.save(tensors, tmp_path / "head.pt")
    with pytest.raises(ValueError, match=message):
        convert_head(tmp_path / "head.pt", tmp_path / "head", **settings)
    assert not (tmp_path / "head").exists()


def archive(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.pkl", b"x"),
        *((f"a{kind}", b"") for kind in (".pt", ".safetensors", ".npz")),
        *((f"a{kind}", b"hello, no pickle") for kind in (".pt", ".ckpt", ".safetensors", ".npz")),
        ("a.npz", archive(coef_=np.array([{}], dtype=object))),
        ("a.npz", archive(coef_=np.array(["text"]))),
    ],
)
def test_other_files_are_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / name))):
        convert_head(tmp_path / name, tmp_path / "head")
