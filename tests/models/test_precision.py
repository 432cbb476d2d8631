"""The precision that a device runs in: the same on every CPU."""

import pytest
import torch

from gpuclassify.models.precision import pick_dtype
from gpuclassify.options import ModelOptions


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
