"""A head's files against torch's own modules, and what is refused in them."""

import itertools
import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import nn

from gpuclassify import hub
from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.models.head_network import Backbone, HeadNetwork, load_head, read_head

BACKBONE = Backbone("a/b", revision="f" * 40, pooling="cls", normalize=True, prompt="query: ")
EMBEDDINGS = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)


def dense(*widths, seed=0):
    """Random layers between these widths."""
    draw = np.random.default_rng(seed).standard_normal
    return tuple((draw((high, low)), draw(high)) for low, high in itertools.pairwise(widths))


def head(*widths, **settings):
    labels = [f"l{place}" for place in range(widths[-1])]
    return HeadNetwork(
        dense(*widths), **{"problem_type": "regression", "labels": labels, **settings}
    )


def write(folder, *, config=None, tensors=None, without=()):
    """A head's directory with other entries in its configuration and other tensors."""
    head(4, 3, 2, hidden_activation="relu").save(folder)
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    del saved["weights_sha256"]  # it belongs to other tensors
    path.write_text(json.dumps(saved | (config or {})))
    if tensors is not None:
        kept = load_file(folder / "model.safetensors") | tensors
        save_file({k: v for k, v in kept.items() if k not in without}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("widths", "settings", "between", "after"),
    [
        ((4, 1), {}, [], []),
        ((4, 3, 1), {"hidden_activation": "relu"}, [nn.ReLU()], []),
        ((4, 3, 3, 2), {"hidden_activation": "tanh"}, [nn.Tanh()], []),
        (
            (4, 3, 1),
            {"hidden_activation": "relu", "output_activation": "sigmoid"},
            [nn.ReLU()],
            [nn.Sigmoid()],
        ),
    ],
    ids=["linear", "relu", "three-layers", "sigmoid"],
)
def test_outputs_are_those_of_torch_before_and_after_saving(
    tmp_path, widths, settings, between, after
):
    made = head(*widths, **settings, backbone=BACKBONE)
    network = nn.Sequential()
    for weight, bias in dense(*widths):
        linear = nn.Linear(*weight.shape[::-1])
        linear.weight.data, linear.bias.data = map(torch.from_numpy, (weight, bias))
        network.extend([*between, linear] if len(network) else [linear])
    expected = network.extend(after).float()(torch.from_numpy(EMBEDDINGS))

    made.save(tmp_path / "head")
    checkpoint = read_head(hub.resolve(tmp_path / "head"))
    loaded = load_head(checkpoint)

    for found in (made, loaded):
        outputs = found.apply(EMBEDDINGS)
        assert outputs.dtype == np.float32
        np.testing.assert_allclose(outputs, expected.detach(), atol=1e-6)
    assert checkpoint.widths == widths
    assert checkpoint.labels == loaded.labels == made.labels
    assert checkpoint.backbone == loaded.backbone == BACKBONE
    assert loaded.config() == made.config()
    assert checkpoint.config | made.config() == checkpoint.config


def test_saving_replaces_a_head_and_no_other_model(tmp_path, checkpoint):
    head(4, 1).save(tmp_path)
    head(4, 2).save(tmp_path)
    assert read_head(hub.resolve(tmp_path)).labels == ("l0", "l1")
    with pytest.raises(FileExistsError, match="another model"):
        head(4, 1).save(checkpoint("domain"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": {"model_type": "bert"}}, r"model_type is 'bert'.*DistributedDataClassifier"),
        ({"config": {"hidden_activation": "relv"}}, r"hidden_activation.*Did you mean 'relu'"),
        ({"config": {"output_activation": "tanh"}}, r"output_activation.*'tanh'.*'sigmoid'"),
        ({"config": {"problem_type": "ranking"}}, r"problem_type.*'ranking'.*'regression'"),
        ({"config": {"id2label": {}}}, "id2label"),
        ({"config": {"id2label": {"0": "a"}}}, "2 outputs, and its id2label names 1"),
        ({"config": {"backbone": {"name": "a/b"}}}, r"backbone.*model, revision, pooling"),
        (
            {
                "config": {
                    "problem_type": "multi_label_classification",
                    "output_activation": "sigmoid",
                }
            },
            "outputs are logits",
        ),
        ({"tensors": {}, "without": ["layers.1.bias"]}, r"layers\.1\.weight \(2, 3\).*head's are"),
        ({"tensors": {"fc.weight": np.zeros((2, 2))}}, r"fc\.weight \(2, 2\)"),
        ({"tensors": {"layers.1.weight": np.zeros((2, 5))}}, "do not fit each other"),
        ({"tensors": {"layers.0.bias": np.zeros(4)}}, "do not fit each other"),
    ],
)
def test_what_is_no_head_is_refused_by_what_was_found(tmp_path, changes, message):
    write(tmp_path / "head", **changes)
    with pytest.raises(CheckpointError, match=message):
        read_head(hub.resolve(tmp_path / "head"))


def test_a_weight_that_is_not_finite_is_refused(tmp_path):
    write(tmp_path / "head", tensors={"layers.0.bias": np.full(3, np.nan, np.float32)})
    with pytest.raises(CheckpointError, match=r"layers\.0\.bias hold NaN"):
        load_head(read_head(hub.resolve(tmp_path / "head")))


@pytest.mark.parametrize(("files", "cure"), [(["head.pt"], "gpuclassify convert"), ([], "no head")])
def test_a_directory_without_a_head_is_refused_with_its_files(tmp_path, files, cure):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=cure):
        read_head(hub.resolve(tmp_path))
