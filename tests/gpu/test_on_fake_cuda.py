"""Whole batches on a CUDA device that is not there.

Nothing in them waits for the device, reaches from one device to another, or mixes types.
"""

import dataclasses
import functools
import itertools
import sys
import traceback
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor

from gpuclassify import hub
from gpuclassify.classifiers.questions.answers import AnswerForm, AnswerReader, Several
from gpuclassify.classifiers.questions.decoder import GuardNetwork, load_decoder
from gpuclassify.classifiers.questions.generation import AnswerTask, FreeReader, answer
from gpuclassify.inference import engine, linear
from gpuclassify.inference.device import exclusive_device
from gpuclassify.inference.leading_layers import Follower, ModelsInStep, shared_layers
from gpuclassify.inference.loaded_model import load_model
from gpuclassify.inference.memory import BUDGETS, BatchLimits, Budget
from gpuclassify.inference.packed.packed_layers import PackedLayers
from gpuclassify.models.checkpoint import read_checkpoint, read_token_classifier
from gpuclassify.models.networks import GuardLayers
from gpuclassify.settings.options import ModelOptions
from gpuclassify.tokenizing.text_tokenizer import TokenBatch
from gpuclassify.workers.run_context import RunStats
from tests.gpu.fake_cuda import GPU, MixedTypesError, WaitError, fake, fake_cuda, on_fake_gpu
from tests.replicas.chat_models import ARCHITECTURES as CHAT_ARCHITECTURES
from tests.replicas.chat_models import write_chat_model

pytestmark = [
    pytest.mark.rapids,
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
]

LENGTHS = [300, 17, 64, 1, 300, 128, 45]
ARCHITECTURES = [
    *("bert", "roberta", "electra", "albert", "distilbert", "modernbert"),
    *("llama", "mistral", "gpt2", "deberta-v2"),
]
FAMILIES = ["domain", "fineweb-edu", "prompt-task-complexity", "topic"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FETCH = "return torch.cat(outputs).cpu().numpy()"  # where a run waits, once and at its end
FAULTS = (WaitError, MixedTypesError, DataDependentOutputException, RuntimeError)


@pytest.fixture(scope="module")
def on_host(checkpoint, sequence_classifier, token_classifier):
    """A model on the CPU, where all was measured of it that is measured when a model is loaded."""

    @functools.cache
    def load(name, is_by_token=False):
        directory = checkpoint(name) if name in FAMILIES else sequence_classifier(name)
        describe = read_checkpoint
        if is_by_token:
            directory, describe = Path(token_classifier(name)), read_token_classifier
        description = describe(hub.resolve(str(directory)))
        return load_model(description, directory, torch.device("cpu"), torch.float32)

    return load


def random_tokens(model):
    ids = np.random.default_rng(0).integers(len(model.tokenizer), size=sum(LENGTHS))
    return TokenBatch(ids.astype(np.int32), np.cumsum([0, *LENGTHS]))


def first_fault(model, dtype, engine_name, in_step=lambda model: model):
    """The line of a run on the fake GPU that fails first, and how many batches have run by then.

    Weights are cast to `dtype`, unless it is None.
    """
    tokens, key, stats = random_tokens(model), object(), RunStats()
    for path in (key, (key, "packed")):
        BUDGETS[path] = Budget(BatchLimits(700))
    options = ModelOptions(model="m", engine=engine_name)
    engine.run(model, key, [tokens], options, stats)  # places of tokens are computed on the host
    assert stats.batches > 1
    counted = RunStats()
    with fake_cuda() as (mode, _), on_fake_gpu(model.module, mode, dtype):
        faked = dataclasses.replace(model, device=GPU, dtype=dtype or model.dtype)
        faked.adapts_to_length = model.adapts_to_length
        with pytest.raises(FAULTS) as found:
            engine.run(in_step(faked), key, [tokens], options, counted)
    lines = [
        frame.line
        for frame in traceback.extract_tb(found.value.__traceback__)
        if "/torch/" not in frame.filename and not frame.filename.endswith("/fake_cuda.py")
    ]
    return lines[-1], counted.batches / stats.batches


@pytest.mark.parametrize("engine_name", ["packed", "padded"])
@pytest.mark.parametrize("name", [*ARCHITECTURES, *FAMILIES])
def test_a_run_waits_for_the_device_at_its_end_alone(on_host, name, engine_name):
    for dtype in DTYPES:
        assert first_fault(on_host(name), dtype, engine_name) == (FETCH, 1)


@pytest.fixture
def kernels():
    """What the kernels are called with, in place of kernels, which need numbers."""
    calls = Counter()

    def add_and_norm(states, residual, norm):
        assert states.shape == residual.shape
        assert {states.dtype, residual.dtype, norm.weight.dtype, norm.bias.dtype} == {states.dtype}
        calls["add_and_norm"] += 1
        return norm(states + residual)

    def round_rows(states, dtype, has_gelu):
        assert states.ndim == 2
        calls["round_rows"] += 1
        scales = torch.empty(len(states), 1, device=states.device)
        return torch.empty_like(states, dtype=dtype), scales

    module = SimpleNamespace(add_and_norm=add_and_norm, round_rows=round_rows)
    with mock.patch.dict(sys.modules, {"gpuclassify.inference.kernels": module}):
        yield calls


@pytest.mark.parametrize("is_float8", [False, True])
@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "albert", "distilbert", "deberta-v2"])
def test_layers_for_a_gpu_wait_for_nothing(sequence_classifier, name, is_float8, kernels):
    directory = sequence_classifier(name)
    description = read_checkpoint(hub.resolve(str(directory)))
    with mock.patch.object(linear, "MOST_ARRANGED_BYTES", 0):
        model = load_model(description, directory, torch.device("cpu"), torch.bfloat16)
        assert model.is_packable
    for change in (linear.merge_projections, linear.fuse_sums):
        change(model.module)
    if is_float8:
        linear.round_products(PackedLayers(model.module).layers)
    kernels.clear()

    assert first_fault(model, None, "packed") == (FETCH, 1)
    products = sum(isinstance(part, linear.Float8Linear) for part in model.module.modules())
    assert bool(products) == is_float8
    assert (kernels["round_rows"] > 0) == is_float8
    assert (kernels["add_and_norm"] > 0) == (name not in ("albert", "distilbert"))


@pytest.mark.parametrize("engine_name", ["packed", "padded"])
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "llama", "deberta-v2"])
def test_labels_of_tokens_leave_the_device_at_the_end_of_a_block_alone(on_host, name, engine_name):
    for dtype in DTYPES:
        model = on_host(name, is_by_token=True)
        assert first_fault(model, dtype, engine_name) == (FETCH, 1)


@pytest.mark.parametrize(
    ("passing", "line"),
    [
        (None, FETCH),
        (lambda outputs: outputs[:, 0] > 0, "rows[follower.passing(values.cpu().numpy())]"),
    ],
)
@pytest.mark.parametrize("engine_name", ["packed", "padded"])
@pytest.mark.parametrize("name", ["bert", "modernbert", "deberta-v2"])
def test_models_in_step_wait_for_what_a_filter_decides_alone(
    on_host, name, engine_name, passing, line
):
    model = on_host(name)
    common = shared_layers(model, model)
    assert common.layers == common.total > 1

    def in_step(faked):
        followers = [Follower(faked, dataclasses.replace(common, layers=1), passing)]
        return ModelsInStep(faked, followers)

    found, share = first_fault(model, torch.bfloat16, engine_name, in_step)
    assert line in found
    assert share == (1 if passing is None else 0)


def wait_by_item(module, inputs, output):
    output.logits.sum().item()


def wait_by_copy(module, inputs, output):
    output.logits.cpu()


def wait_by_choice(module, inputs, output):
    output.logits[output.logits > 0].sum()


def copy_what_is_not_pinned(module, inputs, output):
    output.logits = output.logits + torch.zeros(2).to(output.logits.device)


def pick_by_places_on_the_host(module, inputs, output):
    output.logits = output.logits[torch.arange(1)]


def mix_types(module, inputs, output):
    output.logits = output.logits @ torch.ones(2, 2, device=output.logits.device)


def mix_devices(module, inputs, output):
    output.logits = output.logits + torch.ones(1, 2)


@pytest.mark.parametrize(
    ("plant", "line"),
    [
        (wait_by_item, "output.logits.sum().item()"),
        (wait_by_copy, "output.logits.cpu()"),
        (wait_by_choice, "output.logits[output.logits > 0].sum()"),
        (copy_what_is_not_pinned, "output.logits + torch.zeros(2).to(output.logits.device)"),
        (pick_by_places_on_the_host, "output.logits[torch.arange(1)]"),
        (mix_types, "output.logits @ torch.ones(2, 2, device=output.logits.device)"),
        (mix_devices, "output.logits + torch.ones(1, 2)"),
    ],
)
def test_a_fault_that_is_planted_fails_with_its_line(on_host, plant, line):
    model = on_host("bert")
    hook = model.module.register_forward_hook(
        lambda *args: plant(*args) if args[2].logits.is_cuda else None
    )
    try:
        found, share = first_fault(model, torch.bfloat16, "padded")
    finally:
        hook.remove()

    assert line in found
    assert share < 1


@pytest.mark.parametrize(("allocator", "has_own"), [("native", True), ("pluggable", False)])
def test_models_run_on_a_stream_of_their_own(allocator, has_own):
    interval = sys.getswitchinterval()
    with fake_cuda(allocator=allocator), exclusive_device(GPU, torch.bfloat16):
        current, default = torch.cuda.current_stream(), torch.cuda.default_stream()
        assert sys.getswitchinterval() == pytest.approx(2e-4)

    assert (current is not default) == has_own
    assert sys.getswitchinterval() == pytest.approx(interval)


@pytest.fixture(scope="module")
def decoder(safety_models):
    decoder = load_decoder(safety_models.base, torch.device("cpu"), torch.float32)
    decoder.add_adapter("a", safety_models.defensive)
    return decoder


@pytest.fixture(scope="module")
def chat_decoder(tmp_path_factory):
    @functools.cache
    def load(architecture):
        directory = write_chat_model(tmp_path_factory.mktemp(architecture), architecture)
        return load_decoder(directory, torch.device("cpu"), torch.float32)

    return load


def free_reader(decoder):
    return FreeReader(decoder, lambda text, is_complete: False, 5)


def choice_reader(decoder):
    tokenizer = decoder.new_tokenizer()
    fields = {
        "a": ["very good", "very bad", "fair"],
        "b": Several(["S1", "S2", "S10"], separator=","),
    }
    form = AnswerForm.of("{a}\n{b}", fields)

    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    return AnswerReader(form, encode, tokenizer.decode, " [/INST] ", decoder.eos_ids)


def assert_waits_for_each_step_alone(decoder, module, adapter, new_reader, dtype, prefix_length):
    rng = np.random.default_rng(0)
    prefix = rng.integers(5, 100, size=prefix_length).astype(np.int32)
    own = [rng.integers(5, 100, size=size).astype(np.int32) for size in (40, 3, 200, 17)]
    ids = [np.concatenate((prefix, text)) for text in own]
    prompts = TokenBatch(np.concatenate(ids), np.cumsum([0, *map(len, ids)]))
    key, stats, read = object(), RunStats(), []
    BUDGETS[key] = Budget(BatchLimits(300))
    drawn = itertools.count(5)  # what is read of a device that is not there

    def cpu(found):
        read.append(len(found))
        numbers = rng.normal(size=(len(found), found.shape[1] - 3))
        table = np.array([[next(drawn), 0.5, 1.0, *row] for row in numbers])
        return SimpleNamespace(numpy=lambda: table)

    with (
        fake_cuda() as (mode, _),
        on_fake_gpu(module, mode, dtype),
        mock.patch.object(decoder, "device", GPU),
        mock.patch.object(decoder, "dtype", dtype),
        mock.patch.object(decoder, "_attachments", {}),
        mock.patch.object(decoder, "_rows", ((), None)),
        mock.patch.object(FakeTensor, "cpu", cpu),
    ):
        task = AnswerTask(decoder, adapter, prefix, new_reader(decoder))
        answers = answer(task, key, prompts, ModelOptions(model="m"), stats)

    assert len(answers) == len(prompts)
    assert None not in answers
    assert stats.prefix_tokens == prefix_length * len(prompts)
    assert len(read) == stats.batches + stats.decode_steps
    return stats


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("prefix_length", [0, 64])
def test_a_decoder_waits_for_the_tokens_of_each_step_alone(decoder, dtype, prefix_length):
    stats = assert_waits_for_each_step_alone(
        decoder, decoder._models["a"], "a", free_reader, dtype, prefix_length
    )

    assert stats.decode_steps >= 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("architecture", CHAT_ARCHITECTURES)
def test_choices_are_read_once_a_step(chat_decoder, architecture, dtype):
    decoder = chat_decoder(architecture)
    for prefix_length in (0, 64):
        assert_waits_for_each_step_alone(
            decoder, decoder._models[None], None, choice_reader, dtype, prefix_length
        )


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_guard_does_not_wait(decoder, side):
    layers = GuardLayers(decoder._models["a"].config.hidden_size).requires_grad_(False)
    network = GuardNetwork(decoder, "a", layers)
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]] if side == "left" else [[1, 1, 0], [1, 1, 1]])
    places = (mask.cumsum(1) - 1).clamp(min=0) if side == "left" else None
    with (
        fake_cuda() as (mode, _),
        on_fake_gpu(decoder._models["a"], mode, torch.bfloat16),
        on_fake_gpu(layers, mode, torch.float32),
        exclusive_device(GPU, torch.bfloat16),
    ):
        ids, mask, places = (
            one if one is None else fake(one, mode) for one in (mask, mask, places)
        )
        logits = network(ids, mask, places)

    assert (logits.shape, logits.device, logits.dtype) == ((2, 1), GPU, torch.float32)
