"""The fast kernels run on a GPU, not only something that gives the same outputs."""

import functools
import inspect
import itertools
import logging
from collections import Counter

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification

from gpuclassify import hub
from gpuclassify.inference.device import FLOAT8_CAPABILITY, holding
from gpuclassify.inference.engine import run
from gpuclassify.inference.linear import FLOAT8, Float8Linear, FusedSum, MergedPart
from gpuclassify.inference.loaded_model import load_model
from gpuclassify.inference.packed import fused_attention
from gpuclassify.inference.packed.disentangled import fast_encoder
from gpuclassify.inference.packed.fused_attention import KERNELS, FusedAttention, _compiled
from gpuclassify.inference.packed.packed_layers import varlen_attn
from gpuclassify.models.checkpoint import read_checkpoint
from gpuclassify.settings.options import ModelOptions
from gpuclassify.tokenizing.text_tokenizer import TokenBatch
from gpuclassify.workers.run_context import RunStats

options = functools.partial(ModelOptions, model="a model", engine="padded")

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
LENGTHS = [300, 17, 64, 1, 300, 128, 45]
CUDNN = "aten::_scaled_dot_product_cudnn_attention"
FUSED = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
}


@pytest.fixture
def load(sequence_classifier):
    """Architecture and precision to a model on the GPU, with heads of a published model's size."""

    def load(architecture, dtype):
        directory = sequence_classifier(architecture, hidden_size=256)
        checkpoint = read_checkpoint(hub.resolve(str(directory)))
        return load_model(checkpoint, directory, GPU, dtype)

    return load


def operations(model, engine):
    """Names of the operations of torch that a run calls."""
    ids = np.random.default_rng(0).integers(len(model.tokenizer), size=sum(LENGTHS))
    tokens = TokenBatch(ids.astype(np.int32), np.cumsum([0, *LENGTHS]))
    key = ("kernels", engine, str(model.dtype))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(model, key, [tokens], options(engine=engine), RunStats())
    return {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("architecture", ["bert", "modernbert", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_texts_end_to_end_are_one_call_of_flash_attention(load, architecture, dtype):
    needed = {"scale", "window_size"} | ({"enable_gqa"} if architecture == "llama" else set())
    if varlen_attn is None or not needed <= set(inspect.signature(varlen_attn).parameters):
        pytest.skip(f"torch {torch.__version__} has no such varlen_attn")
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("flash attention needs a GPU of capability 8.0")
    model = load(architecture, dtype)
    names = operations(model, "packed")
    assert model.packed_layers().attention == "varlen_attn"
    assert any("varlen_attn" in name for name in names)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_padded_batches_are_attended_to_by_a_fused_kernel_that_is_not_cudnns(load, dtype):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    names = operations(load("bert", dtype), "padded")
    assert names & FUSED
    assert CUDNN not in names
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_float32_convolutions_are_not_rounded():
    states = torch.randn(4, 512, 64, device=GPU)
    weight = torch.randn(512, 512, 3, device=GPU)
    right = F.conv1d(states.double(), weight.double(), padding=1)
    with holding(GPU, torch.float32, RunStats()):
        found = F.conv1d(states, weight, padding=1)
    error = (found.double() - right).abs().max() / right.abs().max()
    assert error < 1e-5  # TF32 has ten bits: about 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_debertas_attention_is_one_kernel_for_batches_of_any_size(load, dtype):
    """It is compiled at load or for the first batch, and at most once more.

    In half precision it is nearer to float32 than transformers' own attention is, which adds the
    terms one by one; in float32 both are the same.
    """
    exact, model = load("deberta-v2", torch.float32), load("deberta-v2", dtype)
    fast_encoder(model.module).attention_type = FusedAttention
    compiled, calls = counters["stats"]["unique_graphs"], _compiled.cache_info()
    outputs = {}
    for lengths in (LENGTHS, [512] * 9, [3], [129, 128, 127] * 20):
        ids = np.random.default_rng(0).integers(len(model.tokenizer), size=sum(lengths))
        tokens = TokenBatch(ids.astype(np.int32), np.cumsum([0, *lengths]))
        ways = {"fused": (model, "packed"), "same": (model, "reference")}
        for name, (one, engine) in (ways | {"exact": (exact, "reference")}).items():
            key = (name, str(dtype))
            rows = run(one, key, [tokens], options(engine=engine), RunStats())
            outputs.setdefault(name, []).append(np.asarray(rows, dtype=np.float64))
    fused, same, right = map(np.concatenate, (outputs[name] for name in ("fused", "same", "exact")))
    if dtype == torch.float32:
        np.testing.assert_allclose(fused, right, atol=1e-4, rtol=1e-4)
    else:
        assert np.sqrt(np.mean((fused - right) ** 2)) <= np.sqrt(np.mean((same - right) ** 2))
    assert sum(_compiled.cache_info()[:2]) > sum(calls[:2])  # it ran: by hits and misses
    assert counters["stats"]["unique_graphs"] - compiled <= 2


@pytest.mark.parametrize("kernel", [one for one in KERNELS[2] if one.is_own], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_debertas_own_kernel_is_as_near_to_float32_as_the_other(load, dtype, kernel, monkeypatch):
    exact, model = load("deberta-v2", torch.float32), load("deberta-v2", dtype)
    fast_encoder(model.module).attention_type = FusedAttention
    ids = np.random.default_rng(0).integers(len(model.tokenizer), size=sum(LENGTHS))
    tokens = TokenBatch(ids.astype(np.int32), np.cumsum([0, *LENGTHS]))
    right = run(exact, "exact", [tokens], options(engine="reference"), RunStats())
    errors = []
    for one in (kernel, KERNELS[2][0]):
        monkeypatch.setitem(fused_attention.KERNELS, 2, (one,))
        monkeypatch.setattr(fused_attention, "_kernels", {})
        found = run(model, str(one), [tokens], options(engine="packed"), RunStats())
        errors.append(np.sqrt(np.mean((np.asarray(found) - np.asarray(right)) ** 2)))
    assert errors[0] <= 1.2 * errors[1]


def test_the_log_says_whether_attention_is_fused(load, caplog):
    with caplog.at_level(logging.INFO, logger="gpuclassify"):
        model = load("deberta-v2", torch.bfloat16)

    assert "DeBERTa's attention is" in caplog.text
    if "attention is fused" in caplog.text:
        assert fast_encoder(model.module).attention_type is FusedAttention
    assert "Error" not in caplog.text  # where the compiler failed, the reason follows


@pytest.mark.parametrize("architecture", ["bert", "xlm-roberta", "deberta-v2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_fused_and_as_near_to_float32_as_transformers(
    load, sequence_classifier, architecture, dtype
):
    model = load(architecture, dtype)
    kinds = Counter(type(part) for part in model.module.modules())
    assert kinds[FusedSum] == 4  # two layers
    assert kinds[MergedPart] == 6
    ids = np.random.default_rng(0).integers(len(model.tokenizer), size=sum(LENGTHS))
    tokens = TokenBatch(ids.astype(np.int32), np.cumsum([0, *LENGTHS]))
    directory, pieces = sequence_classifier(architecture, hidden_size=256), np.cumsum(LENGTHS)[:-1]
    outputs = {}
    for name, device, kind in (("exact", "cpu", torch.float32), ("plain", GPU, dtype)):
        plain = AutoModelForSequenceClassification.from_pretrained(directory, dtype=kind)
        plain = plain.to(device).eval()
        rows = [torch.from_numpy(part)[None].to(device) for part in np.split(ids, pieces)]
        with torch.inference_mode():
            outputs[name] = torch.cat([plain(row).logits.float().cpu() for row in rows]).numpy()
    found = np.asarray(run(model, "packed", [tokens], options(engine="packed"), RunStats()))
    errors = [np.square(rows - outputs["exact"]).mean() for rows in (found, outputs["plain"])]
    assert errors[0] <= 1.5 * errors[1]


def has_8_bit_products():
    return torch.version.hip is None and torch.cuda.get_device_capability() >= FLOAT8_CAPABILITY


@pytest.mark.parametrize("has_gelu", [False, True])
def test_8_bit_products_are_those_of_a_cpu(has_gelu):
    """On a CPU, `test_gpu_layers.py` holds them against the formula."""
    if not has_8_bit_products():
        pytest.skip("the GPU has no products of 8-bit numbers")
    torch.manual_seed(0)
    layer = torch.nn.Linear(768, 3072).bfloat16().requires_grad_(False)
    states = (torch.randn(1, 333, 768) * torch.logspace(-3, 3, 333)[:, None]).bfloat16()
    states[0, 5, 7], states[0, 6, 8] = torch.nan, torch.inf
    expected = Float8Linear(layer, has_gelu)(states).float()
    found = Float8Linear(layer.to(GPU), has_gelu)(states.to(GPU)).float().cpu()
    assert (found.isnan() == expected.isnan()).all()
    assert found.isnan().any(-1)[0].nonzero()[:, 0].tolist() == [5, 6]
    scale = expected.nan_to_num().abs().amax(-1, keepdim=True).clamp(min=1e-12)
    # A value half way between two 8-bit numbers may be rounded to either.
    assert ((found - expected).abs().nan_to_num() / scale).max() < 0.02


@pytest.mark.parametrize("architecture", ["bert", "xlm-roberta", "deberta-v2", "modernbert"])
def test_scores_of_8_bits_do_not_depend_on_a_texts_company(load, architecture):
    if not has_8_bit_products():
        pytest.skip("the GPU has no products of 8-bit numbers")
    exact, model = load(architecture, torch.float32), load(architecture, FLOAT8)
    assert any(isinstance(part, Float8Linear) for part in model.module.modules())
    ids = np.random.default_rng(0).integers(len(model.tokenizer), size=sum(LENGTHS))
    offsets = np.cumsum([0, *LENGTHS])
    together = [TokenBatch(ids.astype(np.int32), offsets)]
    alone = [
        TokenBatch(ids[start:stop].astype(np.int32), np.array([0, stop - start]))
        for start, stop in itertools.pairwise(offsets)
    ]
    right = run(exact, "exact", together, options(engine="reference"), RunStats())
    found = run(model, "float8", together, options(engine="packed"), RunStats())
    single = run(model, "float8", alone, options(engine="packed"), RunStats())
    error = np.sqrt(np.mean((np.asarray(found) - np.asarray(right)) ** 2))
    assert error > 0
    assert np.sqrt(np.mean((np.asarray(found) - np.asarray(single)) ** 2)) < 0.5 * error
