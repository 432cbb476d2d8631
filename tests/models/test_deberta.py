"""Deberta: its logits, and what it saves and loads."""

import contextlib
import re
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from huggingface_hub import PyTorchModelHubMixin
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, BertConfig, BertModel

from gpuclassify import Deberta, QualityClassifier
from gpuclassify.models.checkpoint import CheckpointError
from tests.oracle import assert_close, plain_tokenizer, stacked
from tests.replicas import FAMILY_LABELS, category_config

pytestmark = pytest.mark.usefixtures("one_torch_thread")

CONFIG = {"base_model": "a/bert", "fc_dropout": 0.5, "id2label": {0: "a", 1: "b", 2: "c"}}
SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
}


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_gives_the_logits_of_the_text_alone(side):
    torch.manual_seed(0)
    head = Deberta(CONFIG, BertModel(BertConfig(**SIZES, initializer_range=0.5))).eval()
    ids = torch.tensor([[7, 8, 9]])
    padding = torch.zeros(1, 4, dtype=torch.long)
    parts, masks = [ids, padding], [torch.ones_like(ids), torch.zeros_like(padding)]
    positions = [torch.arange(3)[None], torch.zeros_like(padding)]
    if side == "left":
        parts, masks, positions = parts[::-1], masks[::-1], positions[::-1]
    with torch.inference_mode():
        alone = head(ids, torch.ones_like(ids))
        padded = head(
            torch.cat(parts, dim=1),
            torch.cat(masks, dim=1),
            position_ids=torch.cat(positions, dim=1),
        )
    torch.testing.assert_close(padded, alone, rtol=1e-5, atol=1e-5)
    assert alone.std() > 0.01


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return plain_tokenizer(checkpoint("quality"))


@pytest.fixture
def trained(checkpoint, tmp_path):
    """A Deberta on a backbone of one's own, saved as after training, with its tokenizer."""

    def save(labels=FAMILY_LABELS["quality"], base_model=None):
        base = base_model or str(checkpoint("quality") / "backbone")
        torch.manual_seed(1)
        backbone = AutoModel.from_config(AutoConfig.from_pretrained(base))
        config = {"base_model": base, "fc_dropout": 0.2, "id2label": dict(enumerate(labels))}
        model = Deberta(config, backbone).eval()
        model.save_pretrained(tmp_path / "saved")
        return model, tmp_path / "saved"

    return save


def config_text(folder):
    """The text of config.json but for what it tells of the weights."""
    text = (folder / "config.json").read_text()
    return re.sub(
        r',\n  "transformers_weights": "model.safetensors",\n  "weights_sha256": "\w{64}"', "", text
    )


def test_what_is_saved_has_the_published_layout_and_loads_back_bit_for_bit(
    trained, checkpoint, tmp_path
):
    model, folder = trained()
    published = checkpoint("quality")
    loaded = Deberta.from_pretrained(folder)

    assert loaded.config == model.config | {"base_model": "backbone"}
    assert not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    ids = torch.arange(5, 15)[None]
    with torch.inference_mode():
        assert torch.equal(loaded(ids, torch.ones_like(ids)), model(ids, torch.ones_like(ids)))
    assert config_text(folder) == category_config(FAMILY_LABELS["quality"])
    found, expected = (load_file(path / "model.safetensors") for path in (folder, published))
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in expected.items()}
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    loaded.save_pretrained(tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_the_config_of_a_public_base_is_the_published_one_byte_for_byte(tmp_path):
    config = {"base_model": "microsoft/deberta-v3-base", "fc_dropout": 0.2}
    config["id2label"] = dict(enumerate(FAMILY_LABELS["quality"]))
    with torch.device("meta"):
        model = Deberta(config)
    assert model.model.config.num_hidden_layers == 12
    tiny = Deberta(config, BertModel(BertConfig(**SIZES)))
    tiny.config["model_type"] = "deberta-v2"
    tiny.save_pretrained(tmp_path)

    text = config_text(tmp_path)
    assert text == category_config(FAMILY_LABELS["quality"], "microsoft/deberta-v3-base")
    assert len(text) == 281  # as on the Hub
    assert not (tmp_path / "backbone").exists()


def test_the_published_way_of_loading_reads_it(trained, checkpoint):
    """A module as model cards of this layout show it, with the mixin's own loading."""

    class CardModel(nn.Module, PyTorchModelHubMixin):
        def __init__(self, config):
            super().__init__()
            sizes = AutoConfig.from_pretrained(checkpoint("quality") / config["base_model"])
            self.model = AutoModel.from_config(sizes)
            self.dropout = nn.Dropout(config["fc_dropout"])
            self.fc = nn.Linear(self.model.config.hidden_size, len(config["id2label"]))

        def forward(self, input_ids, attention_mask):
            features = self.model(input_ids=input_ids, attention_mask=attention_mask)
            return torch.softmax(self.fc(self.dropout(features.last_hidden_state))[:, 0], dim=1)

    model, folder = trained()
    card = CardModel.from_pretrained(folder, strict=True).eval()

    ids = torch.arange(5, 15)[None]
    with torch.inference_mode():
        torch.testing.assert_close(
            card(ids, torch.ones_like(ids)), model(ids, torch.ones_like(ids)).softmax(1)
        )


def test_classifiers_read_it(trained, tokenizer):
    model, folder = trained()
    tokenizer.save_pretrained(folder)
    texts = ["the river", "a much longer text about a river and its banks", ""]
    frame = pd.DataFrame({"text": texts})

    found = QualityClassifier(model=folder, score_field="scores", autocast=False)(frame)

    with torch.inference_mode():
        rows = [
            model(b["input_ids"], b["attention_mask"]).softmax(1)[0].numpy()
            for b in (tokenizer(text, return_tensors="pt") for text in texts)
        ]
    assert_close(stacked(found["scores"]), np.stack(rows))
    assert found["quality_pred"].tolist() == [("High", "Medium", "Low")[r.argmax()] for r in rows]


def test_a_tokenizer_that_was_not_saved_is_missed_at_the_call(trained):
    _, folder = trained()
    with pytest.raises(CheckpointError, match="save it beside the model"):
        QualityClassifier(model=folder)(pd.DataFrame({"text": ["a"]}))


def test_the_base_models_tokenizer_serves_a_module_saved_alone(trained, tokenizer, tmp_path):
    _, folder = trained()
    tokenizer.save_pretrained(tmp_path / "base")
    shutil.copy(folder / "backbone" / "config.json", tmp_path / "base")
    frame = pd.DataFrame({"text": ["the river", "a bank"]})

    found = QualityClassifier(model=folder, base_model=str(tmp_path / "base"))(frame)

    with contextlib.chdir(tmp_path):  # a name without a slash is a directory, too
        assert found.equals(QualityClassifier(model=folder, base_model="base")(frame))
    tokenizer.save_pretrained(folder)
    assert found.equals(QualityClassifier(model=folder)(frame))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"base_model": "a/b"}, "no id2label"),
        ({"id2label": {0: "x"}}, "no base_model"),
        ({"base_model": "a/b", "id2label": {0: "x", 2: "y"}}, "from 0 to 1"),
        ({"base_model": "a/b", "id2label": {0: "x", 1: "x"}}, "names a label twice"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(config, message):
    with pytest.raises(CheckpointError, match=message):
        Deberta(config)


def test_other_checkpoints_and_wrong_tensors_are_refused(trained, checkpoint):
    with pytest.raises(CheckpointError, match="no backbone with one linear layer"):
        Deberta.from_pretrained(checkpoint("fineweb-edu"))
    _, folder = trained()
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"][:2].clone()
    del tensors["fc.bias"]
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(config_text(folder))
    with pytest.raises(CheckpointError, match=r"missing: fc.bias.*fc.weight \(2, 32\) instead of"):
        Deberta.from_pretrained(folder)
