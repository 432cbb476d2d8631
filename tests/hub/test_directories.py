"""A directory is known by a digest of what a loader reads, as it has no commits."""

import json
import os
import subprocess
import time

import pytest

from gpuclassify import Embedder, hub
from tests.hub.small_model import CONFIG, checkpoint, weights, write

pytestmark = pytest.mark.contract


def test_a_digest_follows_what_a_loader_reads(tmp_path):
    folder = write(tmp_path / "model", checkpoint())
    first = hub.directory_digest(folder)
    assert first.startswith("sha256:") and len(first) == len("sha256:") + 64
    write(
        folder, {".git/config.json": b"", "__pycache__/x.json": b"", "train.log": b"", "a.bin": b""}
    )
    assert hub.directory_digest(folder) == first
    os.utime(folder / "model.safetensors", ns=(0, 0))
    touched = hub.directory_digest(folder)
    assert touched != first
    write(folder, {"1_Pooling/config.json": b"{}"})
    assert hub.directory_digest(folder) not in (first, touched)


def test_a_digest_sees_new_headers_behind_equal_sizes_and_times(tmp_path):
    folder = write(tmp_path / "model", {"model.safetensors": weights({"aa": (4,)})})
    times = (folder / "model.safetensors").stat()
    first = hub.directory_digest(folder)
    write(folder, {"model.safetensors": weights({"bb": (4,)})})
    os.utime(folder / "model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert hub.directory_digest(folder) != first


def test_a_changed_directory_is_refused(tmp_path):
    folder = write(tmp_path / "model", checkpoint())
    identity = hub.resolve(folder)
    assert hub.download(identity) == folder
    assert hub.resolve(folder, identity.revision) == identity
    time.sleep(0.01)
    write(folder, {"config.json": json.dumps(CONFIG).encode()})
    with pytest.raises(hub.ModelChangedError, match="not those that the work was planned"):
        hub.download(identity)


def test_a_copy_that_keeps_times_is_the_same_model(tmp_path):
    folder = write(tmp_path / "a/model", checkpoint())
    digest = hub.directory_digest(folder)
    subprocess.run(["cp", "-pr", folder, tmp_path / "copy"], check=True)
    assert hub.directory_digest(tmp_path / "copy") == digest


def test_a_directory_has_no_revisions(tmp_path):
    write(tmp_path, checkpoint())
    with pytest.raises(ValueError, match=r"revision='v2'.*is a directory"):
        hub.resolve(tmp_path, "v2")


@pytest.mark.parametrize("place", ["../outside", "a/../../outside", "{}/outside"])
@pytest.mark.parametrize("has_file", [False, True])
def test_a_model_that_names_files_outside_of_it_is_refused(tmp_path, place, has_file):
    outside = place.format(tmp_path)
    write(tmp_path, {"outside/config.json": b'{"password": "secret"}'})
    write(tmp_path, {"outside/model.safetensors": weights({"a": (1,)})})
    index = {"weight_map": {"a": f"{outside}/model.safetensors"}}
    files = {"config.json": b'{"model_type": "bert"}', hub.files.INDEX: json.dumps(index).encode()}
    folder = write(tmp_path / "model", (checkpoint() if has_file else {}) | files)
    with pytest.raises(
        ValueError, match=r"outside/model\.safetensors', which is not inside of the"
    ):
        hub.download(hub.resolve(folder))
    if not has_file:
        with pytest.raises(ValueError, match="which is not inside of the model"):
            hub.read_tensor_shapes(hub.resolve(folder))

    (folder / hub.files.INDEX).unlink()
    kinds = enumerate(("Transformer", "Pooling", "Normalize"))
    modules = [
        {"path": outside if at else "", "type": f"sentence_transformers.models.{kind}"}
        for at, kind in kinds
    ]
    write(folder, {"modules.json": json.dumps(modules).encode()})
    with pytest.raises(ValueError, match="which is not inside of the model") as told:
        _ = Embedder(model=folder).model.checkpoint
    assert "secret" not in str(told.value)
