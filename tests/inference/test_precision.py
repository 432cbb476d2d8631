"""The precision that a device runs in: the same on every CPU."""

import pandas as pd
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    DebertaConfig,
    DebertaForSequenceClassification,
)

from gpuclassify import DistributedDataClassifier
from gpuclassify.inference.device import pick_dtype
from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.settings.options import ModelOptions
from tests.oracle import plain_tokenizer
from tests.replicas import sample_texts, write_sequence_classifier


def picked(device, **options):
    return pick_dtype(ModelOptions(model="m", **options), torch.device(device))


@pytest.mark.parametrize("has_bfloat16", [False, True])
def test_a_cpu_runs_float32_whatever_it_could(has_bfloat16, monkeypatch):
    able = {"avx512_bf16": has_bfloat16, "amx_bf16": has_bfloat16}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able, raising=False)
    assert picked("cpu") == torch.float32
    assert picked("cpu", dtype="bfloat16") == torch.bfloat16


@pytest.mark.parametrize(
    ("has_bfloat16", "expected"), [(True, torch.bfloat16), (False, torch.float16)]
)
def test_a_gpu_runs_what_it_does_well(has_bfloat16, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16)
    assert picked("cuda") == expected
    assert picked("cuda", autocast=False) == torch.float32
    assert picked("cuda", dtype="float32") == torch.float32


@pytest.fixture
def deberta(tmp_path):
    """The directory of a small DeBERTa of the first version, which runs in float32 alone."""
    write_sequence_classifier(tmp_path / "bert", "roberta")
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    config = DebertaConfig(
        num_hidden_layers=1,
        vocab_size=len(plain_tokenizer(tmp_path / "bert")),
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        max_position_embeddings=64,
        **sizes,
    )
    plain_tokenizer(tmp_path / "bert").save_pretrained(tmp_path / "deberta")
    DebertaForSequenceClassification(config).save_pretrained(tmp_path / "deberta")
    return tmp_path / "deberta"


def test_a_model_that_half_precision_fails_runs_in_float32_and_says_so_once(
    deberta, monkeypatch, caplog
):
    frame = pd.DataFrame({"text": sample_texts(6)})
    model = AutoModelForSequenceClassification.from_pretrained(deberta, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="BFloat16"):
        model(torch.arange(5, 9)[None])

    options = {"model": deberta, "score_field": "scores"}
    expected = DistributedDataClassifier(autocast=False, **options)(frame)
    on_gpu = lambda options, _: getattr(torch, options.dtype or "bfloat16")  # noqa: E731
    monkeypatch.setattr("gpuclassify.inference.device.pick_dtype", on_gpu)
    for _ in range(2):
        found = DistributedDataClassifier(**options)(frame)
        pd.testing.assert_frame_equal(found, expected)
    assert caplog.text.count("runs in float32") == 1

    with pytest.raises(CheckpointError, match=r'does not run in torch\.bfloat16 on cpu.*"float32"'):
        DistributedDataClassifier(dtype="bfloat16", **options)(frame)
