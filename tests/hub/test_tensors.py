"""Shapes of a model's tensors without its weights, and weights that are refused."""

import json

import pytest

from gpuclassify import hub
from tests.hub.small_model import NAME, SHAPES, sharded_checkpoint, weights, write


def test_shapes_come_without_the_weights(server, cache):
    big = {"embedding": (1000, 1000), "bias": (3,)}
    server.add(NAME, {"model.safetensors": weights(big)})
    identity = hub.resolve(NAME, cache_dir=cache)
    assert hub.read_tensor_shapes(identity, cache_dir=cache) == big
    assert sum(request.sent_bytes for request in server.requests) < 110_000  # of 4,000,000
    assert not list(cache.rglob("*.safetensors"))


def test_a_header_longer_than_the_first_range_is_read_whole(server, cache):
    many = {f"encoder.layer.{number}.attention.weight": (1,) for number in range(2500)}
    server.add(NAME, {"model.safetensors": weights(many)})
    assert hub.read_tensor_shapes(hub.resolve(NAME, cache_dir=cache), cache_dir=cache) == many


def test_shapes_of_shards_are_joined(server, cache, tmp_path):
    server.add(NAME, sharded_checkpoint())
    local = hub.resolve(write(tmp_path / "model", sharded_checkpoint()))
    for identity in (hub.resolve(NAME, cache_dir=cache), local):
        assert hub.read_tensor_shapes(identity, cache_dir=cache) == {"a": (3, 2), "b": (5,)}


def test_missing_shards_and_tensors_are_named(tmp_path):
    folder = write(tmp_path / "model", sharded_checkpoint())
    (folder / "model-00002.safetensors").unlink()
    with pytest.raises(hub.ModelNotFoundError, match=r"not there: \['model-00002.safetensors'\]"):
        hub.read_tensor_shapes(hub.resolve(folder))
    write(folder, {"model-00002.safetensors": weights({"c": (1,)})})
    with pytest.raises(ValueError, match=r"1 tensors that its files lack: \['b'\]"):
        hub.read_tensor_shapes(hub.resolve(folder))


@pytest.mark.parametrize("index", [{}, [1], {"weight_map": {"a": "../../secret.safetensors"}}])
def test_a_bad_shard_index_is_named(tmp_path, index):
    files = {"model.safetensors.index.json": json.dumps(index).encode()}
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        hub.read_tensor_shapes(hub.resolve(write(tmp_path / "model", files)))


PICKLED = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}


def test_pickled_weights_are_refused_on_the_hub(server, cache):
    server.add(NAME, PICKLED)
    identity = hub.resolve(NAME, cache_dir=cache)
    with pytest.raises(hub.ModelNotFoundError, match=r"pickles \(pytorch_model.bin\)"):
        hub.read_tensor_shapes(identity, cache_dir=cache)
    assert not any(request.path.endswith(".bin") for request in server.requests)


def test_the_advice_on_pickled_weights_works(tmp_path, monkeypatch):
    import torch

    folder = write(tmp_path / "model", PICKLED)
    shared = torch.zeros(3, 2)
    torch.save({"a": shared, "b": shared.T}, folder / "pytorch_model.bin")
    with pytest.raises(hub.ModelNotFoundError) as caught:
        hub.read_tensor_shapes(hub.resolve(folder))
    advice = str(caught.value).split("\n")
    code = "\n".join(line for line in advice[1:-1])
    monkeypatch.chdir(folder)
    exec(code, {})
    assert hub.read_tensor_shapes(hub.resolve(folder)) == {"a": (3, 2), "b": (2, 3)}


def test_a_directory_without_weights_lists_what_is_there(tmp_path):
    folder = write(tmp_path / "model", {"config.json": b"{}", "weights.h5": b"", ".git/x": b""})
    pattern = r"no model\.safetensors.* its files are \['config.json', 'weights.h5'\]"
    with pytest.raises(hub.ModelNotFoundError, match=pattern):
        hub.read_tensor_shapes(hub.resolve(folder))


WHOLE = weights(SHAPES)
DAMAGED = {
    "empty": b"",
    "short length": WHOLE[:5],
    "cut in the header": WHOLE[:40],
    "endless header": b"\xff" * 64,
    "no json": (12).to_bytes(8, "little") + b"x" * 12,
    "no shapes": (9).to_bytes(8, "little") + b'{"a": {}}',
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_header_is_named_on_both_sides(server, cache, tmp_path, damage):
    files = {"model.safetensors": DAMAGED[damage]}
    server.add(NAME, files)
    local = hub.resolve(write(tmp_path / "model", files))
    for identity in (hub.resolve(NAME, cache_dir=cache), local):
        with pytest.raises(ValueError, match=r"model\.safetensors.*truncated or corrupt"):
            hub.read_tensor_shapes(identity, cache_dir=cache)


def test_truncated_weights_and_lfs_pointers_are_named(tmp_path):
    folder = write(tmp_path / "model", {"model.safetensors": WHOLE[:-1]})
    with pytest.raises(ValueError, match=r"truncated or corrupt.*not fully covered"):
        hub.read_tensor_shapes(hub.resolve(folder))
    write(folder, {"model.safetensors": b"version https://git-lfs.github.com/spec/v1\noid"})
    with pytest.raises(ValueError, match="git lfs pull"):
        hub.read_tensor_shapes(hub.resolve(folder))
