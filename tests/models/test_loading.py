"""Weights load as they were saved, in one file or many, and never by half."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpuclassify import hub
from gpuclassify.models.checkpoint import CheckpointError, read_checkpoint
from gpuclassify.models.loading import (
    build_without_memory,
    check_tensors,
    load_module,
)
from gpuclassify.models.tensors import shapes_of
from tests.replicas.writing import rewrite

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def described(directory):
    return read_checkpoint(hub.resolve(str(directory)))


def expected_shapes(found):
    return shapes_of(build_without_memory(found).state_dict())


def loaded(directory, dtype=torch.float32):
    return load_module(described(directory), directory, dtype)


@pytest.fixture
def domain(checkpoint, tmp_path):
    return shutil.copytree(checkpoint("domain"), tmp_path / "domain")


def shard(model, count):
    """Split the weights into files with an index, as large models are saved."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    weight_map = {}
    for number in range(count):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        part = dict(list(tensors.items())[number::count])
        save_file(part, model / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("family", ["domain", "fineweb-edu"])
def test_every_tensor_arrives_as_it_was_saved(checkpoint, family):
    module = loaded(checkpoint(family))
    saved = load_file(checkpoint(family) / "model.safetensors")
    state = module.state_dict()
    assert set(saved) <= set(state)
    assert all(torch.equal(state[name], tensor) for name, tensor in saved.items())
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("family", ["domain", "fineweb-edu"])
def test_shards_load_like_one_file(checkpoint, tmp_path, family):
    model = shutil.copytree(checkpoint(family), tmp_path / family)
    whole = loaded(model).state_dict()
    shard(model, 3)
    check_tensors(described(model))
    sharded = loaded(model).state_dict()
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], tensor) for name, tensor in sharded.items())


@pytest.mark.parametrize("family", ["domain", "fineweb-edu"])
def test_the_single_file_wins_over_shards_that_are_there_as_well(checkpoint, tmp_path, family):
    """As in transformers: a model that was saved anew in one file may have old shards beside it."""
    model = shutil.copytree(checkpoint(family), tmp_path / family)
    whole = (model / "model.safetensors").read_bytes()
    rewrite(model, lambda tensors: tensors.update({n: t + 1 for n, t in tensors.items()}))
    shard(model, 2)
    (model / "model.safetensors").write_bytes(whole)
    for name, tensor in loaded(checkpoint(family)).state_dict().items():
        assert torch.equal(loaded(model).state_dict()[name], tensor)
    (model / "model-00001-of-00002.safetensors").unlink()
    check_tensors(described(model))
    (model / "model.safetensors").unlink()
    with pytest.raises(hub.ModelNotFoundError, match=r"not there: .'model-00001-of-00002"):
        check_tensors(described(model))
    with pytest.raises(FileNotFoundError, match="model-00001-of-00002"):
        loaded(model)


@pytest.mark.parametrize("family", ["domain", "fineweb-edu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_floating_weights_get_the_precision_asked_for(checkpoint, tmp_path, family, dtype):
    model = shutil.copytree(checkpoint(family), tmp_path / family)
    module = loaded(model, dtype)
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    rewrite(model, lambda tensors: tensors.update({k: t.to(dtype) for k, t in tensors.items()}))
    assert {parameter.dtype for parameter in loaded(model).parameters()} == {torch.float32}


def test_a_buffer_of_old_versions_is_dropped(domain):
    positions = {"model.embeddings.position_ids": torch.arange(512)[None]}
    rewrite(domain, lambda tensors: tensors.update(positions))
    check_tensors(described(domain))
    assert "model.embeddings.position_ids" not in loaded(domain).state_dict()


def test_unknown_tensors_are_refused_at_the_call_and_by_the_loading(domain):
    rewrite(domain, lambda tensors: tensors.update({"head_1.fc.weight": torch.zeros(2, 2)}))
    for look in (loaded, lambda directory: check_tensors(described(directory))):
        with pytest.raises(CheckpointError, match=r"no part of the architecture: head_1\.fc\.wei"):
            look(domain)


def test_older_names_of_tensors_are_renamed_as_transformers_does(checkpoint, tmp_path):
    model = shutil.copytree(checkpoint("fineweb-edu"), tmp_path / "model")
    expected = loaded(model).state_dict()

    def age(tensors):
        for name in [name for name in tensors if ".LayerNorm." in name]:
            older = name.replace("LayerNorm.weight", "LayerNorm.gamma")
            tensors[older.replace("LayerNorm.bias", "LayerNorm.beta")] = tensors.pop(name)

    rewrite(model, age)
    check_tensors(described(model))
    found = loaded(model).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_building_leaves_the_processes_settings_alone(checkpoint):
    from transformers.utils import logging

    before = (torch.get_default_dtype(), logging.get_verbosity(), torch.initial_seed())
    loaded(checkpoint("fineweb-edu"), torch.bfloat16)
    expected_shapes(described(checkpoint("domain")))
    assert (torch.get_default_dtype(), logging.get_verbosity(), torch.initial_seed()) == before
