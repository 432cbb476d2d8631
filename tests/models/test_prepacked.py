"""Prepacked layers give what torch's own give, and are torch's own where they are not plain."""

import copy
import functools
import pickle
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel

from gpuclassify.models import prepacked
from gpuclassify.models.prepacked import LEAST_WEIGHTS, PrepackedLinear, is_faster, prepack
from gpuclassify.models.reference import is_reference_forward, reference_forward
from tests.models.onednn import prepacks

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.skipif(
        not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"), reason="torch without oneDNN"
    ),
]

INPUTS, OUTPUTS = 301, 257  # no multiples of what kernels work on at once
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of the largest output
PREPACKED = [dtype for dtype in TOLERANCE if prepacks(dtype)]  # on this processor
PACKED_KERNEL = "mkldnn::_linear_pointwise"


@pytest.fixture
def always(monkeypatch):
    """Layers are prepacked where they can be, whichever way is faster on this machine."""
    monkeypatch.setattr(prepacked, "is_faster", lambda outputs, inputs, dtype: prepacks(dtype))


def numbers(*shape, dtype=torch.float32, seed=1):
    return torch.randn(*shape, generator=torch.manual_seed(seed)).to(dtype)


def linear(dtype=torch.float32, bias=True, weight=None):
    """A layer of random weights that do not train, as they are after loading."""
    layer = nn.Linear(INPUTS, OUTPUTS, bias=bias)
    layer.weight = nn.Parameter(numbers(OUTPUTS, INPUTS, seed=2) if weight is None else weight)
    if bias:
        layer.bias = nn.Parameter(numbers(OUTPUTS, seed=3))
    return layer.to(dtype).requires_grad_(False)


def packed_linear(**options):
    layer = linear(**options)
    assert prepack(layer) == 1
    return layer


def kernels(action):
    """Names of the operators that torch ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        action()
    return {event.name for event in profile.events()}


def is_packed(layer, states):
    """Whether the layer uses its rearranged weights for these states."""
    with torch.inference_mode():
        return PACKED_KERNEL in kernels(lambda: layer(states))


def assert_is_linear(layer, states):
    """The layer gives what torch gives for the weights that it has now."""
    with torch.inference_mode():
        found, expected = layer(states), F.linear(states, layer.weight, layer.bias)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if expected.numel():
        most = TOLERANCE[expected.dtype] * float(expected.float().abs().max())
        torch.testing.assert_close(found, expected, rtol=0, atol=most)


@pytest.fixture(scope="module")
def packed_layer():
    """The same layer for many tests that leave it as it is."""

    @functools.cache
    def make(dtype, bias):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prepacked, "is_faster", lambda *_: True)
            return packed_linear(dtype=dtype, bias=bias)

    return make


# What it computes.

LAYOUTS = {
    "rows": lambda rows: numbers(rows, INPUTS),
    "texts": lambda rows: numbers(rows, 3, INPUTS),
    "texts without tokens": lambda rows: numbers(rows, 0, INPUTS),
    "transposed": lambda rows: numbers(INPUTS, rows).T,
    "every other": lambda rows: numbers(rows, 2 * INPUTS)[:, ::2],
    "part of wider rows": lambda rows: numbers(rows, INPUTS + 9)[:, 5:-4],
    "first tokens": lambda rows: numbers(rows, 4, INPUTS)[:, 0],
    "tokens first": lambda rows: numbers(4, rows, INPUTS).transpose(0, 1),
    "one row repeated": lambda rows: numbers(1, INPUTS).expand(rows, -1),
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", PREPACKED, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_are_those_of_torch(packed_layer, layout, dtype, bias):
    layer = packed_layer(dtype, bias)
    for rows in (0, 1, 2, 7, 64, 513):
        states = LAYOUTS[layout](rows).to(dtype)
        assert_is_linear(layer, states)
    assert is_packed(layer, states) == (states.numel() > 0)


def test_a_single_vector_is_a_row(packed_layer):
    layer = packed_layer(torch.float32, True)
    assert_is_linear(layer, numbers(INPUTS))
    assert layer(input=numbers(2, INPUTS)).shape == (2, OUTPUTS)  # by the name that torch gives it


WEIGHTS = {
    "transposed": lambda: numbers(INPUTS, OUTPUTS).T,
    "part of a larger one": lambda: numbers(OUTPUTS + 9, INPUTS + 9)[4:-5, 3:-6],
    "every other": lambda: numbers(OUTPUTS, 2 * INPUTS)[:, ::2],
    "one row repeated": lambda: numbers(1, INPUTS).expand(OUTPUTS, -1),
}


@pytest.mark.parametrize("dtype", PREPACKED, ids=str)
@pytest.mark.parametrize("layout", WEIGHTS)
def test_weights_may_be_views_of_others(always, layout, dtype):
    layer = packed_linear(weight=WEIGHTS[layout]().to(dtype), dtype=dtype)

    assert_is_linear(layer, numbers(30, INPUTS, dtype=dtype))
    assert is_packed(layer, numbers(30, INPUTS, dtype=dtype))


@pytest.mark.parametrize(
    "bias",
    [numbers(2 * OUTPUTS)[::2], numbers(1).expand(OUTPUTS), numbers(OUTPUTS + 9)[9:]],
    ids=["every other", "one number repeated", "part of a larger one"],
)
def test_a_bias_may_be_a_view_of_another(always, bias):
    """oneDNN itself takes what lies behind a bias's first number."""
    layer = packed_linear()
    layer.bias = nn.Parameter(bias, requires_grad=False)

    assert_is_linear(layer, numbers(30, INPUTS))


def test_wrong_shapes_and_types_are_errors_as_in_torch(packed_layer):
    fitting = numbers(2, INPUTS)
    for states in (
        numbers(2, INPUTS + 1),
        numbers(2, INPUTS - 1),
        fitting.double(),
        fitting.bfloat16(),
    ):
        for layer in (packed_layer(torch.float32, False), linear(bias=False)):
            with torch.inference_mode(), pytest.raises(RuntimeError):
                layer(states)


# What it leaves as it is.


def test_parameters_keep_their_names_values_and_memory(always):
    module = nn.Sequential(linear(), nn.ReLU(), nn.Linear(OUTPUTS, 300))
    before = {name: (p, p.data_ptr(), p.clone()) for name, p in module.named_parameters()}
    names = list(module.state_dict())

    assert prepack(module) == 2
    with torch.inference_mode():
        module(numbers(4, INPUTS))

    after = dict(module.named_parameters())
    assert list(module.state_dict()) == names
    assert list(after) == list(before)
    for name, (parameter, address, value) in before.items():
        assert after[name] is parameter
        assert parameter.data_ptr() == address
        assert torch.equal(parameter, value)
    linear().load_state_dict(module[0].state_dict())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(OUTPUTS, INPUTS)
        self.head = nn.Linear(INPUTS, OUTPUTS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.embedding(ids))


def test_weights_that_two_modules_share_stay_shared(always):
    module = Tied().requires_grad_(False)
    ids = torch.tensor([[3, 1, 4, 256]])

    assert prepack(module) == 1
    for _ in range(2):
        assert module.head.weight is module.embedding.weight
        with torch.inference_mode():
            expected = F.linear(module.embedding.weight[ids], module.embedding.weight)
            torch.testing.assert_close(module(ids), expected, rtol=0, atol=1e-3)
        module.embedding.weight.mul_(1.5)


class OwnLinear(nn.Linear):
    pass


class OwnWeight(torch.Tensor):
    pass


def with_own_weight():
    layer = linear()
    layer.weight = nn.Parameter(layer.weight.as_subclass(OwnWeight), requires_grad=False)
    return layer


@torch.inference_mode()
def made_for_inference():
    return linear()


LEFT_ALONE = {
    "small": lambda: nn.Linear(16, LEAST_WEIGHTS // 16 - 1),
    "of a class of its own": lambda: OwnLinear(INPUTS, OUTPUTS),
    "weights of a class of their own": with_own_weight,
    "weights whose changes go unnoticed": made_for_inference,
    "weights made for each forward": lambda: nn.utils.parametrizations.weight_norm(linear()),
    "half precision": lambda: linear(dtype=torch.float16),
    "double precision": lambda: linear(dtype=torch.float64),
    "without memory": lambda: linear().to("meta"),
    "no linear layer": lambda: nn.Conv1d(INPUTS, OUTPUTS, 1),
}


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_other_layers_are_left_alone(always, kind):
    layer = LEFT_ALONE[kind]()
    kept = type(layer)

    assert prepack(nn.Sequential(layer)) == 0
    assert type(layer) is kept


def test_layers_of_just_enough_weights_are_prepacked(always):
    assert prepack(nn.Linear(16, LEAST_WEIGHTS // 16)) == 1


def test_a_copy_of_more_than_a_quarter_of_the_free_memory_is_not_made(always, monkeypatch):
    wanted_bytes = 2 * OUTPUTS * INPUTS * 4
    memory = SimpleNamespace(available=4 * wanted_bytes - 1)
    monkeypatch.setattr(prepacked.psutil, "virtual_memory", lambda: memory)
    module = nn.Sequential(linear(), linear(), nn.Linear(8, 8))

    assert prepack(module) == 0
    assert {type(layer) for layer in module} == {nn.Linear}
    memory.available += 1
    assert prepack(module) == 2


# When it is torch's own.


def reference(layer, states):
    with torch.inference_mode(), reference_forward():
        return layer(states)


def autocast(layer, states):
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        return layer(states)


def gradients(layer, states):
    layer.requires_grad_()
    states = states.clone().requires_grad_()
    outputs = layer(states)
    outputs.square().sum().backward()
    return torch.cat([outputs.flatten(), layer.weight.grad.flatten(), states.grad.flatten()])


def training(layer, states):
    return layer.train()(states)


def compiled(layer, states):
    with torch.inference_mode():
        return torch.compile(layer, backend="eager", fullgraph=True)(states)


@pytest.mark.parametrize("way", [reference, autocast, gradients, training, compiled])
def test_what_is_not_plain_inference_is_torchs_own_to_the_bit(always, way):
    states = numbers(30, INPUTS)
    expected = way(linear(), states)
    layer = packed_linear()
    assert is_packed(layer, states)
    found = []

    names = kernels(lambda: found.append(way(layer, states)))

    assert PACKED_KERNEL not in names
    assert "aten::linear" in names
    assert torch.equal(found[0], expected)


def test_without_gradients_outputs_may_be_trained_on(always):
    """Weights are rearranged in inference mode, whose own tensors could not be."""
    layer, scale = packed_linear(), nn.Parameter(torch.ones(OUTPUTS))
    states = numbers(30, INPUTS)
    found = []
    with torch.no_grad():
        assert PACKED_KERNEL in kernels(lambda: found.append(layer(states)))

    assert not found[0].is_inference()
    (found[0] * scale).sum().backward()
    expected = F.linear(states, layer.weight, layer.bias).sum(0)
    torch.testing.assert_close(scale.grad, expected, rtol=1e-4, atol=1e-3)


def test_reference_forward_ends_and_is_one_threads_own():
    assert not is_reference_forward()
    with reference_forward():
        with reference_forward():
            assert is_reference_forward()
        assert is_reference_forward()
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(is_reference_forward).result()
    assert not is_reference_forward()
    with pytest.raises(ZeroDivisionError), reference_forward():
        raise ZeroDivisionError
    assert not is_reference_forward()


def test_a_whole_model_in_reference_forward_is_as_if_never_prepacked(always):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, num_hidden_layers=2, initializer_range=0.2, **sizes)
    model = BertModel(config).eval().requires_grad_(False)
    ids = torch.arange(33)[None] % 50
    with torch.inference_mode():
        expected = model(ids).last_hidden_state
        assert prepack(model) == 13  # six in each layer, and the pooler
        found = model(ids).last_hidden_state
        with reference_forward():
            assert torch.equal(model(ids).last_hidden_state, expected)
    assert PACKED_KERNEL in kernels(lambda: torch.no_grad()(model)(ids))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


# Weights that change, copies and threads.


def other_numbers():
    return numbers(OUTPUTS, INPUTS, seed=7)


def replaced(layer):
    layer.weight = nn.Parameter(other_numbers(), requires_grad=False)


def loaded(layer):
    layer.load_state_dict(linear(weight=other_numbers()).state_dict())


def assigned(layer):
    layer.load_state_dict(linear(weight=other_numbers()).state_dict(), assign=True)


def given_other_memory(layer):
    """Often, so that memory which the old weights had is used for the new ones."""
    for seed in range(20):
        layer.weight.data = torch.empty(0)
        layer.weight.data = numbers(OUTPUTS, INPUTS, seed=seed)


@torch.inference_mode()
def multiplied_in_inference_mode(layer):
    layer.weight.mul_(2)


CHANGES = {
    "in place": lambda layer: layer.weight.mul_(2),
    "in place in inference mode": multiplied_in_inference_mode,
    "one number": lambda layer: layer.weight[3, 5].fill_(1e3),
    "loaded": loaded,
    "assigned": assigned,
    "replaced": replaced,
    "other memory": given_other_memory,
    "another view": lambda layer: setattr(layer.weight, "data", layer.weight.data.flip(0)),
    "another bias": lambda layer: setattr(layer, "bias", nn.Parameter(torch.ones(OUTPUTS))),
    "no bias": lambda layer: setattr(layer, "bias", None),
    "bias in place": lambda layer: layer.bias.add_(7),
    "cast": lambda layer: layer.bfloat16(),
    "cast and back": lambda layer: layer.half().float(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_outputs_follow_the_weights(always, change):
    layer, states = packed_linear(), numbers(30, INPUTS)
    with torch.inference_mode():
        before = layer(states)

    CHANGES[change](layer)

    states = states.to(layer.weight.dtype)
    assert_is_linear(layer, states)
    with torch.inference_mode():
        assert not torch.equal(layer(states), before)
    can_be_packed = prepacks(states.dtype)
    assert prepack(layer) == can_be_packed  # and again
    assert_is_linear(layer, states)
    assert is_packed(layer, states) == can_be_packed


def test_moving_and_casting_frees_what_was_rearranged(always):
    layer = packed_linear()
    rearranged = weakref.ref(layer._packed.weights)
    layer.bfloat16()

    assert rearranged() is None


def test_a_square_weight_that_is_turned_is_noticed(always):
    """Its memory is the same one."""
    layer = nn.Linear(300, 300).requires_grad_(False)
    prepack(layer)
    layer.weight.data = layer.weight.data.T

    assert_is_linear(layer, numbers(30, 300))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_carry_the_weights_and_not_what_was_rearranged(always, duplicate):
    layer, states = packed_linear(), numbers(30, INPUTS)
    copied = duplicate(layer)

    assert len(pickle.dumps(layer)) < 1.1 * layer.weight.nbytes
    assert type(copied) is PrepackedLinear
    assert not is_packed(copied, states)
    assert prepack(copied) == 1
    assert is_packed(copied, states)
    with torch.inference_mode():
        assert torch.equal(copied(states), layer(states))
        copied.weight.zero_()
        assert torch.equal(copied(states), copied.bias.expand(30, -1))
    assert is_packed(layer, states)
    assert_is_linear(layer, states)


def test_threads_share_a_layer(always):
    layer = packed_linear()
    batches = [numbers(rows, INPUTS, seed=rows) for rows in range(1, 120, 3)]
    with torch.inference_mode():
        expected = [layer(states) for states in batches]
    start = threading.Barrier(4)

    @torch.inference_mode()
    def work(_):
        start.wait()
        return [layer(states) for states in batches]

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(work, range(4)):
            assert all(map(torch.equal, found, expected))


# Whether it is worth it.


@pytest.fixture
def measured():
    """`is_faster` for a small layer, measured anew."""
    is_faster.cache_clear()
    yield lambda dtype=torch.float32: is_faster(64, 96, dtype)
    is_faster.cache_clear()


def slowly(action):
    def act(*given):
        time.sleep(0.01)
        return action(*given)

    return act


@pytest.mark.parametrize("dtype", PREPACKED, ids=str)
def test_the_faster_way_is_found(measured, monkeypatch, dtype):
    with monkeypatch.context() as patch:
        patch.setattr(prepacked, "_multiply", slowly(prepacked._multiply))
        assert not measured(dtype)
    is_faster.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(F, "linear", slowly(F.linear))
        assert measured(dtype)


def test_kernels_that_give_something_else_are_not_used(measured, monkeypatch):
    multiply = prepacked._multiply
    for spoil in (lambda found: found * 1.0001, lambda found: found * torch.nan):
        monkeypatch.setattr(prepacked, "_multiply", lambda *given, s=spoil: s(multiply(*given)))
        monkeypatch.setattr(F, "linear", slowly(F.linear))
        assert not measured()
        is_faster.cache_clear()


def test_a_torch_without_onednn_keeps_its_own_kernels(measured, monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    layer = linear()

    assert not measured()
    assert prepack(layer) == 0
    assert type(layer) is nn.Linear


def test_a_processor_that_cannot_rearrange_bfloat16_keeps_torchs_own_kernels(measured, monkeypatch):
    if prepacks(torch.bfloat16):  # else this is such a processor
        monkeypatch.setattr(prepacked, "_pack", refuse)
    layer, states = linear(dtype=torch.bfloat16), numbers(30, INPUTS, dtype=torch.bfloat16)

    assert not measured(torch.bfloat16)
    assert prepack(layer) == 0
    assert type(layer) is nn.Linear
    assert torch.equal(layer(states), F.linear(states, layer.weight, layer.bias))


def refuse(weight):
    raise RuntimeError("bf16 path needs the cpu support avx512bw, avx512vl and avx512dq")


def test_layers_that_would_be_slower_stay_torchs_own(monkeypatch):
    asked = []
    monkeypatch.setattr(prepacked, "is_faster", lambda *shape: asked.append(shape))
    module = nn.Sequential(linear(), linear(dtype=torch.bfloat16))

    assert prepack(module) == 0
    assert {type(layer) for layer in module} == {nn.Linear}
    assert asked == [(OUTPUTS, INPUTS, torch.float32), (OUTPUTS, INPUTS, torch.bfloat16)]
