"""A model in memory is the one that was planned with, whatever happens to its files meanwhile."""

import shutil
import subprocess
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from gpuclassify import (
    DistributedDataClassifier,
    DomainClassifier,
    Embedder,
    FastTextClassifier,
    PromptClassifier,
)
from gpuclassify.hub import ModelChangedError, ModelNotFoundError
from gpuclassify.models.loading import read_weights
from tests.replicas import sample_texts
from tests.replicas.chat_models import write_chat_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")

WEIGHTS = "model.safetensors"
FRAME = pd.DataFrame({"text": sample_texts(4, seed=2, max_words=8)})


@pytest.fixture
def mapper_of(checkpoint, sequence_classifier, fasttext_model, tmp_path):
    """A mapper of a kind, and the file of its weights, which the test may change."""

    def make(kind):
        folder = tmp_path / kind
        if kind == "fasttext":
            folder.mkdir()
            shutil.copy(fasttext_model("softmax"), folder / "model.bin")
            return FastTextClassifier(model=folder / "model.bin"), folder / "model.bin"
        if kind == "decoder":
            write_chat_model(folder, words=["yes", "no"])
            asks = {"prompt": "{text}", "answers": ["yes", "no"], "autocast": False}
            return PromptClassifier(model=folder, **asks), folder / WEIGHTS
        if kind == "published":
            shutil.copytree(checkpoint("domain"), folder)
            return DomainClassifier(model=folder, autocast=False), folder / WEIGHTS
        shutil.copytree(sequence_classifier("bert"), folder)
        mapper = Embedder if kind == "embedder" else DistributedDataClassifier
        return mapper(model=folder, autocast=False), folder / WEIGHTS

    return make


KINDS = ["published", "transformers", "embedder", "decoder", "fasttext"]


def rewrite(path):
    """Other numbers under the same names, into the same file."""
    if path.name != WEIGHTS:
        path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\1")
        return
    other = path.with_name("other")
    save_file({n: t + 1 for n, t in load_file(path).items()}, other, metadata={"format": "pt"})
    subprocess.run(["cp", other, path], check=True)
    other.unlink()


CHANGES = {
    "rewritten": rewrite,
    "emptied": lambda path: path.write_bytes(b""),
    "removed": lambda path: path.unlink(),
}


@pytest.mark.contract
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_in_memory_is_refused_once_its_files_are_others(mapper_of, kind, change):
    mapper, path = mapper_of(kind)
    mapper(FRAME)
    time.sleep(0.01)
    CHANGES[change](path)
    with pytest.raises((ModelChangedError, ModelNotFoundError)) as refusal:
        mapper.map_frame(FRAME)
    assert change == "removed" or path.name in str(refusal.value)


def test_weights_in_memory_are_not_those_of_a_file_that_changes(mapper_of, run_python):
    """In a process of its own, which a signal may end."""
    paths = {kind: str(mapper_of(kind)[1]) for kind in KINDS if kind != "fasttext"}
    run_python(f"""
from pathlib import Path
import torch
from tests.mapping.test_changed_models import CHANGES, load
for kind, path in {paths}.items():
    module = load(kind, Path(path))
    before = {{name: tensor.clone() for name, tensor in module.state_dict().items()}}
    for change in ("rewritten", "emptied"):
        CHANGES[change](Path(path))
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, before[name]), (kind, change, name)
""")


def load(kind, path):
    """The module in memory."""
    from gpuclassify import hub
    from gpuclassify.classifiers.questions.decoder import load_decoder
    from gpuclassify.models.checkpoint import read_checkpoint
    from gpuclassify.models.loading import load_module
    from gpuclassify.models.sentence_transformers import read_embedding_checkpoint

    if kind == "decoder":
        return load_decoder(path.parent, torch.device("cpu"), torch.float32)._model
    read = read_embedding_checkpoint if kind == "embedder" else read_checkpoint
    return load_module(read(hub.resolve(path.parent)), path.parent, torch.float32)


def test_files_that_are_known_by_their_content_are_mapped(tmp_path):
    blob = tmp_path / "blobs" / ("a1" * 32)
    snapshot, plain = tmp_path / "snapshots" / "main", tmp_path / "plain"
    for folder in (blob.parent, snapshot, plain):
        folder.mkdir(parents=True)
    save_file({"weight": torch.ones(4)}, blob)
    (snapshot / WEIGHTS).symlink_to(blob)
    shutil.copy(blob, plain / WEIGHTS)
    read = read_weights(plain)["weight"][...]
    assert torch.equal(read, torch.ones(4)) and not is_mapped(str(plain))
    mapped = read_weights(snapshot)["weight"][...]
    assert torch.equal(mapped, torch.ones(4)) and is_mapped(blob.name)


def is_mapped(name):
    return name in Path("/proc/self/maps").read_text()
