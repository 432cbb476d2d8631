"""The precision that a device runs in: the same on every CPU."""

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    DebertaConfig,
    DebertaForSequenceClassification,
)

from gpuclassify import DistributedDataClassifier
from gpuclassify.inference.device import pick_dtype
from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.settings.options import ModelOptions
from gpuclassify.workers.run_context import add_up, advice, collected_stats
from tests.examples import make_example
from tests.oracle import plain_tokenizer
from tests.replicas import sample_texts, write_sequence_classifier


def picked(device, architecture=None, **options):
    return pick_dtype(ModelOptions(model="m", **options), torch.device(device), architecture)


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
    for architecture in (None, "llama", "t5", "gemma3_text", "qwen3"):
        assert picked("cuda", architecture) == expected
    for architecture in ("bert", "deberta-v2", "modernbert", "xlm-roberta"):
        assert picked("cuda", architecture) == torch.float16
        assert picked("cpu", architecture) == torch.float32
    assert picked("cuda", "bert", dtype="bfloat16") == torch.bfloat16
    assert picked("cuda", "bert", autocast=False) == torch.float32
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
    on_gpu = lambda options, *_: getattr(torch, options.dtype or "bfloat16")  # noqa: E731
    monkeypatch.setattr("gpuclassify.inference.device.pick_dtype", on_gpu)
    for _ in range(2):
        found = DistributedDataClassifier(**options)(frame)
        pd.testing.assert_frame_equal(found, expected)
    assert caplog.text.count("runs in float32") == 1

    with pytest.raises(CheckpointError, match=r'does not run in torch\.bfloat16 on cpu.*"float32"'):
        DistributedDataClassifier(dtype="bfloat16", **options)(frame)


@pytest.fixture
def beyond_float16(tmp_path):
    """The directory of a BERT whose second layer has states that float16 cannot hold."""
    directory = write_sequence_classifier(tmp_path / "large", "bert")
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["bert.encoder.layer.1.output.dense.weight"] *= 1e6
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize(("has_bfloat16", "name"), [(True, "bfloat16"), (False, "float32")])
def test_a_model_that_overflows_in_float16_runs_with_more_range(
    has_bfloat16, name, beyond_float16, monkeypatch, caplog
):
    frame = pd.DataFrame({"text": sample_texts(6)})
    options = {"model": beyond_float16, "score_field": "scores"}
    expected = {
        dtype: DistributedDataClassifier(dtype=dtype, **options)(frame)
        for dtype in ("float32", "bfloat16")
    }
    on_gpu = lambda options, *_: getattr(torch, options.dtype or "float16")  # noqa: E731
    monkeypatch.setattr("gpuclassify.inference.device.pick_dtype", on_gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16)
    monkeypatch.setattr("gpuclassify.mapping.runners._WIDER_DTYPES", {})
    for _ in range(2):
        with collected_stats() as runs:
            found = DistributedDataClassifier(**options)(frame)
        pd.testing.assert_frame_equal(found, expected[name])
        assert sum(run.rescued_texts for run in runs) == 0
    assert caplog.text.count(f"runs in {name}: outputs of random texts are not finite") == 1

    with collected_stats() as runs:  # whoever asks for it gets it, and each row is right
        found = DistributedDataClassifier(dtype="float16", **options)(frame)
    pd.testing.assert_frame_equal(found, expected["float32"], rtol=1e-4)
    assert sum(run.rescued_texts for run in runs) == 6
    totals = {}
    add_up(totals, runs[0].as_dict())
    assert any("computed again alone in float32" in sentence for sentence in advice(totals))


HALF = dict.fromkeys(("domain", "checkpoint", "embedder", "spans", "zero-shot"), torch.float16)
HALF |= dict.fromkeys(("prompt", "aegis", "instruction-data-guard", "perplexity"), torch.bfloat16)


@pytest.mark.parametrize("name", HALF)
def test_encoders_run_in_float16_on_a_gpu_and_decoders_in_bfloat16(name, request, monkeypatch):
    mapper = make_example(name, request)
    monkeypatch.setattr("gpuclassify.inference.device.pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert mapper.runner.device_and_dtype() == (torch.device("cuda"), HALF[name])


def test_a_network_of_your_own_keeps_the_range_of_float32(sequence_classifier, monkeypatch):
    class Own(DistributedDataClassifier):
        def build_module(self, config):
            return AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**config))

    monkeypatch.setattr("gpuclassify.inference.device.pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    runner = Own(model=sequence_classifier("bert")).runner
    assert runner.device_and_dtype()[1] == torch.bfloat16
