"""Arithmetic of a forward pass is counted rightly, and so is what a machine can do of it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.inputs import LENGTHS, SHAPES, TINY_SIZES, Lengths, texts_of_lengths
from benchmarks.work import _kernels, forward_operations


@pytest.mark.parametrize("model", sorted(SHAPES))
def test_operations_are_those_that_torch_counts(model):
    shape = replace(SHAPES[model], **TINY_SIZES)
    if shape.position_buckets:
        shape = replace(shape, position_buckets=16)
    config = AutoConfig.for_model(
        shape.architecture,
        vocab_size=50,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.heads,
        num_hidden_layers=shape.layers,
        num_labels=3,
        **deberta_settings(shape),
    )
    module = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module.eval()(input_ids=torch.ones(1, 40, dtype=torch.int64))
    width = shape.hidden_size
    head = 2 * width**2 + 2 * width * 3
    # Keys and queries of the positions, which are the same for every text.
    positions = shape.layers * 2 * 2 * (2 * shape.position_buckets) * width**2
    assert forward_operations([40], shape) == counter.get_total_flops() - head - positions


def deberta_settings(shape):
    if not shape.position_buckets:
        return {}
    return {
        "max_relative_positions": -1,
        "norm_rel_ebd": "layer_norm",
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "position_buckets": shape.position_buckets,
        "relative_attention": True,
        "share_att_key": True,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kernel_of_the_peak_multiplies(dtype):
    weight, states = torch.randn(64, 32).to(dtype), torch.randn(8, 32).to(dtype)
    kernels = _kernels(weight)
    assert {"linear"} <= set(kernels) <= {"linear", "prepacked"}
    expected = states.double() @ weight.double().T
    for multiply in kernels.values():
        assert torch.allclose(multiply(states).double(), expected, atol=0.2, rtol=0.02)


def test_web_lengths_have_the_median_and_the_share_above_the_limit_that_is_claimed():
    lengths = LENGTHS["web"].sample(1_001)
    assert np.median(lengths) == 350
    assert np.mean(np.asarray(lengths) > 512) == pytest.approx(1 / 3, abs=0.01)


def test_documents_have_the_prescribed_lengths(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    wanted = Lengths(80, 0.9).sample(30)
    texts = texts_of_lengths(wanted, tokenizer)
    found = sorted(len(ids) for ids in tokenizer(texts)["input_ids"])
    assert len(set(texts)) == 30
    assert all(length >= tokens for length, tokens in zip(wanted, found, strict=True))
    assert sum(found) > 0.95 * sum(wanted)
