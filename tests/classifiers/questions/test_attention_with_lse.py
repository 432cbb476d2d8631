"""Attention equals torch's own, and its log-sum-exps join to attention over all keys."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from gpuclassify.classifiers.questions import shared_prefix
from gpuclassify.classifiers.questions.shared_prefix import attend, attend_plainly

SCALING = 0.3
SHAPES = {"equal heads": (4, 4, 16), "shared keys": (4, 2, 16), "one key": (6, 1, 12)}


def draw(rows, heads, key_heads, new, width, size, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(new)

    def normal(heads, tokens):
        values = torch.randn(rows, heads, tokens, size, generator=generator)
        return values.to(device, dtype)

    return normal(heads, new), normal(key_heads, width), normal(key_heads, width)


def expected_of(query, key, value, is_seen=None):
    """Output and log-sum-exp in float64."""
    query, key, value = (tensor.double() for tensor in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * SCALING
    if is_seen is not None:
        scores = scores.masked_fill(~is_seen, -torch.inf)
    output = scaled_dot_product_attention(query, key, value, is_seen, scale=SCALING)
    return output, scores.logsumexp(3)


def close(outputs, expected, tolerance=1e-5):
    for output, target in zip(outputs, expected, strict=True):
        torch.testing.assert_close(
            output.double(), target.to(output.device), atol=tolerance, rtol=tolerance
        )


@pytest.mark.parametrize("score_bytes", [1, 4 * 3 * 2 * 50 * 4, 2**20])
@pytest.mark.parametrize(("heads", "key_heads", "size"), SHAPES.values(), ids=SHAPES)
def test_masks_differ_between_rows_however_few_queries_run_at_a_time(
    heads, key_heads, size, score_bytes
):
    inputs = draw(3, heads, key_heads, 4, 50, size)
    columns = torch.tensor([[0, 1, 2, 3], [46, 47, 48, 49], [20, 30, 10, 5]])
    is_later = torch.arange(50) > columns[:, :, None]

    outputs = attend_plainly(*inputs, SCALING, is_later, score_bytes=score_bytes)

    close(outputs, expected_of(*inputs, ~is_later[:, None]))
    close(attend(*inputs, SCALING, True, is_later), expected_of(*inputs, ~is_later[:, None]))
    close(attend(*inputs, SCALING), expected_of(*inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_no_digits_of_the_log_sum_exp(dtype):
    inputs = draw(2, 4, 2, 9, 300, 16, dtype=dtype)

    for output, lse in (
        attend(*inputs, SCALING),
        attend_plainly(*inputs, SCALING),
    ):
        assert output.dtype == dtype
        close([lse], expected_of(*inputs)[1:], tolerance=1e-3)
        close([output], expected_of(*inputs)[:1], tolerance=1e-2)


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2)])
def test_the_kernel_for_gpus_is_called_with_arguments_that_it_takes(heads, key_heads, monkeypatch):
    monkeypatch.setattr(shared_prefix, "can_use_flash_attention", lambda _: True)
    with FakeTensorMode():
        query = torch.empty(2, heads, 37, 64, device="cuda", dtype=torch.bfloat16)
        key = torch.empty(2, key_heads, 37, 64, device="cuda", dtype=torch.bfloat16)
        output, lse = attend(query, key, key, SCALING, is_causal=True)

    assert output.shape == query.shape
    assert output.dtype == query.dtype
    assert lse.shape == query.shape[:3]
    assert lse.dtype == torch.float32


def test_a_torch_for_amd_does_not_use_a_kernel_that_nobody_compared(monkeypatch):
    asked = []
    monkeypatch.setattr(shared_prefix, "can_use_flash_attention", asked.append)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    query = torch.empty(2, 4, 37, 64, device="meta", dtype=torch.bfloat16)
    output, lse = attend(query, query, query, SCALING)

    assert not asked
    assert (output.shape, output.dtype) == (query.shape, query.dtype)
    assert (lse.shape, lse.dtype) == (query.shape[:3], torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2)])
@pytest.mark.parametrize("size", [64, 12])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_on_a_gpu_equals_that_in_float64(is_causal, heads, key_heads, size, dtype):
    inputs = draw(2, heads, key_heads, 70, 70, size, "cuda", dtype)
    is_seen = torch.ones(70, 70, dtype=torch.bool, device="cuda").tril() if is_causal else None

    output, lse = attend(*inputs, SCALING, is_causal)

    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    close((output, lse), expected_of(*inputs, is_seen), tolerance)
