"""What is saved is there as a whole or not at all, and is read as it was saved."""

import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load, load_file, save_file
from transformers import AutoModelForSequenceClassification, BertConfig, BertModel

from gpuclassify import Deberta, DistributedDataClassifier, HeadClassifier, hub
from gpuclassify.hub import saving as saving_module
from gpuclassify.hub.saving import replace_file, saving
from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.models.head_network import HeadNetwork, load_head, read_head
from tests.kills import is_killed, kills
from tests.oracle import stacked

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FILES = ["config.json", "model.safetensors"]


def head(labels, width=2):
    """A head whose weights tell which labels they belong to."""
    value = float(sum(map(ord, "".join(labels))))
    layer = np.full((len(labels), width), value), np.zeros(len(labels))
    return HeadNetwork((layer,), "single_label_classification", tuple(labels))


def labels_of(folder):
    """The labels of the head in a directory, which its weights must fit; None without a head."""
    try:
        found = load_head(read_head(hub.resolve(folder)))
    except (hub.ModelNotFoundError, CheckpointError) as err:
        assert "so it is no head" in str(err) or "no such directory" in str(err)
        return None
    assert (found.layers[0][0] == head(found.labels).layers[0][0]).all()
    return found.labels


def plain_labels(folder):
    """The same for a reader that knows nothing of this project."""
    try:
        labels = json.loads((folder / "config.json").read_text())["id2label"].values()
    except FileNotFoundError:
        return None
    tensors = load_file(folder / "model.safetensors")
    assert (tensors["layers.0.weight"] == head(labels).layers[0][0]).all()
    return tuple(labels)


def names_in(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.mark.parametrize("old", [None, ("a", "b")])
def test_a_killed_save_leaves_the_old_head_or_the_new_one(tmp_path, old):
    new, folder = ("b", "a", "c"), tmp_path / "head"

    def prepare():
        if old:
            head(old).save(folder)
        else:
            subprocess.run(["rm", "-rf", folder], check=True)

    seen = set()
    for _ in kills(lambda: head(new).save(folder), prepare):
        seen.add(("plain", plain_labels(folder)))
        seen.add(labels_of(folder))
        head(new).save(folder)
        assert labels_of(folder) == new
        assert names_in(folder) == FILES
    assert seen == {old, new, ("plain", old), ("plain", new), ("plain", None)}


@pytest.mark.slow
def test_a_killed_save_leaves_whole_classifiers_and_other_files(tmp_path):
    folder, ids = tmp_path / "model", torch.arange(5, 15)[None]

    def classifier(labels):
        torch.manual_seed(len(labels))
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        backbone = BertModel(BertConfig(vocab_size=20, intermediate_size=8, **sizes))
        config = {"base_model": str(folder), "id2label": dict(enumerate(labels))}
        return Deberta(config, backbone).eval()

    old, new = classifier("ab"), classifier("abc")
    expected = {
        len(model.config["id2label"]): model(ids, torch.ones_like(ids)) for model in (old, new)
    }
    (tmp_path / "model").mkdir()
    (folder / "README.md").write_text("mine")
    found = set()
    for _ in kills(lambda: new.save_pretrained(folder), lambda: old.save_pretrained(folder)):
        loaded = Deberta.from_pretrained(folder).eval()
        found.add(len(loaded.config["id2label"]))
        assert torch.equal(
            loaded(ids, torch.ones_like(ids)), expected[len(loaded.config["id2label"])]
        )
        new.save_pretrained(folder)
        assert names_in(folder) == ["README.md", "backbone", "backbone/config.json", *FILES]
        assert (folder / "README.md").read_text() == "mine"
    assert found == {2, 3}


def test_a_killed_write_leaves_the_old_file_or_the_new_one(tmp_path):
    path = tmp_path / "edges.json"
    found = set()
    for _ in kills(lambda: replace_file(path, b"new"), lambda: replace_file(path, b"old")):
        found.add(path.read_bytes())
        replace_file(path, b"new")
        assert names_in(tmp_path) == ["edges.json"]
    assert found == {b"old", b"new"}


def test_a_save_outlives_a_reader_that_finishes_it(tmp_path, monkeypatch):
    """A reader that comes in between moves the files, and removes the folder that they were in."""
    decide = saving_module._commit

    def decide_and_be_read(directory, folder):
        decide(directory, folder)
        assert labels_of(tmp_path) == tuple("bac")
        assert not folder.exists()

    head("ab").save(tmp_path)
    monkeypatch.setattr(saving_module, "_commit", decide_and_be_read)
    head("bac").save(tmp_path)
    assert labels_of(tmp_path) == tuple("bac")


def test_a_reader_sees_the_old_head_or_the_new_one(tmp_path):
    heads = ["ab", "bac"]
    head(heads[0]).save(tmp_path)
    writer = multiprocessing.get_context("fork").Process(
        target=save_for_ever, args=(heads, tmp_path)
    )
    writer.start()
    seen, end = set(), time.monotonic() + 60
    try:
        while len(seen) < 3 and time.monotonic() < end:
            seen.add(read_while_saved(tmp_path))
    finally:
        writer.kill()
        writer.join()
    assert seen >= {tuple("ab"), tuple("bac")}
    assert labels_of(tmp_path) in map(tuple, heads)


def save_for_ever(heads, folder):
    while True:
        for labels in heads:
            head(labels).save(folder)


def read_while_saved(folder):
    """Plan, as a client does, and load, as a worker does: what was planned, or a refusal."""
    classifier = HeadClassifier(heads={"x": folder}, backbone="a/b")
    pinned = classifier.model.heads["x"]
    planned = pinned.checkpoint.labels
    try:
        found = load_head(pinned.checkpoint)
    except hub.ModelChangedError as err:
        assert "build the classifier and its frame again" in str(err)
        return "refused"
    assert found.labels == planned
    assert (found.layers[0][0] == head(planned).layers[0][0]).all()
    return planned


def test_the_files_of_a_living_process_are_left_alone(tmp_path):
    program = f"""
import sys
from pathlib import Path
from gpuclassify.hub.saving import saving
with saving(Path({str(tmp_path)!r})) as folder:
    (folder / "config.json").write_text('{{"by": "the other"}}')
    print(folder, flush=True)
    sys.stdin.read()
"""
    other = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    folder = Path(other.stdout.readline().strip())
    with saving(tmp_path) as own:
        (own / "config.json").write_text('{"by": "this"}')
    assert folder.is_dir()
    other.communicate()
    assert json.loads((tmp_path / "config.json").read_text()) == {"by": "the other"}
    assert names_in(tmp_path) == ["config.json"]


def test_a_save_that_cannot_be_finished_is_named(tmp_path):
    def resolve_as_nobody():
        for folder in (tmp_path, *tmp_path.parents[:2]):
            folder.chmod(0o555)
        if os.getuid() == 0:
            os.setuid(65534)
        with pytest.raises(
            hub.ModelNotFoundError, match="interrupted, and cannot be finished here"
        ):
            hub.resolve(tmp_path)

    for _ in kills(lambda: head("ba").save(tmp_path), lambda: head("ab").save(tmp_path)):
        if not (tmp_path / "config.json").exists():
            break
    try:
        assert not is_killed(resolve_as_nobody)
    finally:
        for folder in (tmp_path, *tmp_path.parents[:2]):
            folder.chmod(0o700)


@pytest.fixture
def around(tmp_path):
    """A directory to name as a model, beside a user's own files, which must stay as they are."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "run").write_text("mine")
    (tmp_path / "model").mkdir()
    yield tmp_path / "model"
    assert names_in(tmp_path / "bin") == ["run"]
    assert (tmp_path / "bin" / "run").read_text() == "mine"


def plant(folder, *, numbers=False):
    """What a clone may bring: a save that looks interrupted, into a folder that is a link."""
    hidden = folder / ".gpuclassify-planted"
    (hidden / "scripts").mkdir(parents=True)
    (folder / "scripts").symlink_to("../bin")
    for name in (".lock", ".replaced", "config.json", "model.safetensors", "scripts/run"):
        (hidden / name).write_text("{}")
    if numbers:  # of another lock
        (hidden / f".by-{os.geteuid()}-1-1").touch()
    return hidden


@pytest.mark.parametrize("numbers", [False, True])
def test_naming_a_model_finishes_no_save_that_was_not_begun_here(around, numbers):
    plant(around, numbers=numbers)
    before = names_in(around)
    with pytest.raises(hub.ModelNotFoundError, match="interrupted, and cannot be finished here"):
        hub.resolve(around)
    assert names_in(around) == before
    (around / "config.json").write_text("{}")
    hub.resolve(around)
    replace_file(around / "edges.json", b"new")
    assert names_in(around) == sorted([*before, "config.json", "edges.json"])


def test_a_copy_of_an_interrupted_save_is_not_finished(around):
    for _ in kills(lambda: head("ba").save(around), lambda: head("ab").save(around)):
        if not (around / "config.json").exists():
            break
    copied = around.parent / "copied"
    subprocess.run(["cp", "-a", around, copied], check=True)
    with pytest.raises(hub.ModelNotFoundError, match="cannot be finished here"):
        hub.resolve(copied)
    head("xy").save(copied)  # which is the cure
    assert labels_of(copied) == ("x", "y")
    assert labels_of(around) == ("b", "a")


def test_saving_empties_nothing_that_a_link_names(around):
    hidden = around / ".gpuclassify-planted"
    hidden.mkdir()
    (hidden / ".lock").symlink_to("../../bin/run")
    (around / ".gpuclassify-folder").symlink_to("../bin")
    os.mkfifo(around / ".gpuclassify-pipe")
    (around / ".gpuclassify-piped").mkdir()
    os.mkfifo(around / ".gpuclassify-piped" / ".lock")
    head("ab").save(around)
    assert labels_of(around) == ("a", "b")


def test_saving_writes_through_no_link(around):
    head("ab").save(around)
    (around / "backbone").symlink_to("../bin")
    with pytest.raises(NotADirectoryError, match="backbone is a link"), saving(around) as folder:
        shutil.copytree(around, folder, dirs_exist_ok=True, ignore=lambda *_: ["backbone"])
        (folder / "backbone").mkdir()
        (folder / "backbone" / "run").write_text("theirs")
    assert labels_of(around) == ("a", "b")


def test_a_changed_byte_is_refused_and_heads_without_a_digest_load(tmp_path):
    head("ab").save(tmp_path)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match=str(tmp_path)):
            load_head(read_head(hub.resolve(tmp_path)))
    path.write_bytes(content)
    assert labels_of(tmp_path) == ("a", "b")
    assert load(content).keys() == {"layers.0.weight", "layers.0.bias"}

    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(head("ab").config()))
    assert config == head("ab").config() | {
        "transformers_weights": "model.safetensors",
        "weights_sha256": hashlib.sha256(content).hexdigest(),
    }
    assert labels_of(tmp_path) == ("a", "b")


def test_weights_of_another_head_are_refused_with_the_cure(tmp_path):
    head("ab").save(tmp_path)
    save_file(head("ba", 3).tensors() | head("xy").tensors(), tmp_path / "model.safetensors")
    refusal = (
        r"model\.safetensors is not the file that was saved with its config\.json.*copy both anew"
    )
    with pytest.raises(CheckpointError, match=refusal):
        load_head(read_head(hub.resolve(tmp_path)))


def test_a_whole_classifier_is_refused_too_but_not_what_transformers_makes_of_it(
    sequence_classifier, tmp_path
):
    frame = pd.DataFrame({"text": ["some text"]})
    with saving(tmp_path / "model") as folder:
        shutil.copytree(sequence_classifier("bert"), folder, dirs_exist_ok=True)
    expected = DistributedDataClassifier(model=tmp_path / "model", score_field="s")(frame)

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    model.classifier.weight.data.neg_()
    model.save_pretrained(tmp_path / "model")
    found = DistributedDataClassifier(model=tmp_path / "model", score_field="s")(frame)
    assert np.abs(stacked(found["s"]) - stacked(expected["s"])).max() > 1e-3

    path = tmp_path / "model" / "model.safetensors"
    with saving(tmp_path / "model") as folder:
        shutil.copy(path, folder)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=f"{path} is not the file that was saved"):
        DistributedDataClassifier(model=tmp_path / "model")(frame)
