"""Deberta: its logits, and what it saves and loads."""

import pytest
import torch
from transformers import BertConfig, BertModel

from gpuclassify.models.deberta import Deberta

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
