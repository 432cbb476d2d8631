"""Linear layers on arranged weights give what torch's own give."""

import copy

import pytest
import torch
from torch import nn

from gpuclassify.inference import linear
from gpuclassify.inference.linear import ArrangedLinear, arrange_weights, share_arranged

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch is without oneDNN"
)
SHAPES = [(3, 24), (1, 7, 24), (2, 5, 24), (1, 24), (0, 24), (24,)]


@pytest.fixture(autouse=True)
def _with_avx512(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


class OwnLinear(nn.Linear):
    """Somebody's own layer."""


def network():
    torch.manual_seed(0)
    parts = nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24, bias=False), OwnLinear(24, 24)
    return nn.Sequential(*parts).eval().requires_grad_(False)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float64, 0)]
)
def test_outputs_are_those_of_torch(shape, dtype, tolerance):
    plain = network().to(dtype)
    states = torch.randn(shape, dtype=dtype)
    expected = plain.double()(states.double())
    fast = network().to(dtype)

    arrange_weights(fast)

    is_fast = dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    assert [type(part) is ArrangedLinear for part in fast] == [is_fast, False, is_fast, False]
    found = fast(states)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_weights_keep_their_names_and_their_memory():
    module = network()
    before = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}

    arrange_weights(module)

    after = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    assert after == before
    assert not any(tensor.requires_grad for tensor in module.parameters())


def test_a_module_that_was_cast_or_moved_runs_by_torch():
    module = network()
    arrange_weights(module)
    states = torch.randn(3, 24, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="dtype"):
        module(states)
    assert torch.equal(module.double()(states), network().double()(states))
    assert module.to("meta")(states.to("meta")).device.type == "meta"


def test_copies_share_arranged_weights():
    module = network()
    arrange_weights(module)
    assert copy.deepcopy(module)[0].arranged is module[0].arranged
    other = network()
    arrange_weights(other)

    share_arranged(nn.ModuleList(other), nn.ModuleList(module))

    assert other[0].arranged is module[0].arranged
    states = torch.randn(3, 24)
    assert torch.equal(other(states), module(states))


@pytest.mark.parametrize("reason", ["too large", "without AVX-512", "without the operator"])
def test_layers_stay_where_arranging_would_not_help(monkeypatch, reason):
    if reason == "too large":
        monkeypatch.setattr(linear, "MOST_ARRANGED_BYTES", 4 * 24 * 40)
    elif reason == "without AVX-512":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    else:
        monkeypatch.setattr(linear, "_OPERATORS", ("there_is_none",))
    module = network()
    arrange_weights(module)
    assert not any(isinstance(part, ArrangedLinear) for part in module)
