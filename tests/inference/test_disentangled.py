"""The faster DeBERTa gives what transformers' own gives, and stays out of the way elsewhere."""

import logging
import re

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import (
    BertConfig,
    BertModel,
    DebertaV2Config,
    DebertaV2Model,
)
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Encoder

from gpuclassify import hub
from gpuclassify.inference.device import device_lock
from gpuclassify.inference.loaded_model import load_model
from gpuclassify.inference.packed import (
    disentangled,
    fused_attention,
)
from gpuclassify.inference.packed.disentangled import (
    DisentangledAttention,
    DisentangledEncoder,
    reference_forward,
)
from gpuclassify.inference.packed.fused_attention import (
    KERNELS,
    FusedAttention,
    speed_up_deberta,
)
from gpuclassify.models.checkpoint import read_checkpoint
from gpuclassify.models.loading import load_module
from gpuclassify.workers.device_errors import BrokenDeviceError

pytestmark = pytest.mark.usefixtures("one_torch_thread")

CPU = torch.device("cpu")

PUBLISHED = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
    "initializer_range": 0.3,
}
LAYOUTS = {
    "published": {},
    "own projections": {"share_att_key": False},
    "content to position": {"pos_att_type": ["c2p"], "share_att_key": False},
    "position to content": {"pos_att_type": ["p2c"], "share_att_key": False},
    "no terms": {"pos_att_type": []},
    "few buckets": {"position_buckets": 16},
    "no buckets": {"position_buckets": -1},
    "short reach": {"position_buckets": -1, "max_relative_positions": 20},
    "convolution": {"conv_kernel_size": 3, "conv_act": "gelu"},
    "plain table": {"norm_rel_ebd": "none"},
    "absolute positions": {"position_biased_input": True, "type_vocab_size": 2},
    "one layer": {"num_hidden_layers": 1, "conv_kernel_size": 3, "conv_act": "gelu"},
}
RAGGED = [1, 2, 150, 31, 300, 299]


def plain_model(**sizes):
    torch.manual_seed(0)
    model = DebertaV2Model(DebertaV2Config(**{**PUBLISHED, **sizes})).eval()
    for bias in (p for name, p in model.named_parameters() if name.endswith("bias")):
        nn.init.normal_(bias, std=0.3)  # transformers begins with zeros, which hide a lost one
    return model


def batch(lengths, side="right"):
    ids = torch.randint(3, 90, (len(lengths), max(lengths)), generator=torch.manual_seed(1))
    columns = torch.arange(max(lengths))
    if side == "left":
        columns = columns.flip(0)
    return {"input_ids": ids, "attention_mask": (columns < torch.tensor(lengths)[:, None]).long()}


def states(model, inputs):
    """The states of tokens, not those of padding."""
    with torch.inference_mode():
        hidden = model(**inputs).last_hidden_state
    return hidden[inputs["attention_mask"].bool()]


def both(inputs, dtype=torch.float32, **sizes):
    """States by the faster encoder, and by transformers' untouched model."""
    model = plain_model(**sizes).to(dtype)
    expected = states(model, inputs)
    speed_up_deberta(model)
    assert type(model.encoder) is DisentangledEncoder
    return states(model, inputs), expected


def assert_close(found, expected, tolerance=2e-5):
    assert expected.std() > 0.05
    most = tolerance * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=most)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_states_of_transformers(layout, side):
    found, expected = both(batch(RAGGED, side), **LAYOUTS[layout])

    assert_close(found, expected)


@pytest.mark.parametrize(
    "lengths", [[1], [1, 1], [7], [129] * 3, [512, 1, 400], [1024], [1024, 700]], ids=str
)
def test_any_lengths_give_the_states_of_transformers(lengths):
    found, expected = both(batch(lengths))

    assert_close(found, expected)


@pytest.mark.parametrize("part_bytes", [1, 40_000, 400_000, 10**9])
def test_the_size_of_parts_changes_nothing(monkeypatch, part_bytes):
    monkeypatch.setattr(disentangled, "CPU_PART_BYTES", part_bytes)

    for lengths in ([60, 3, 59, 41, 8], [140, 2, 77]):
        assert_close(*both(batch(lengths)))


def test_a_row_of_padding_alone_is_finite_and_disturbs_no_other():
    model = plain_model()
    inputs = batch([9, 5, 9])
    inputs["attention_mask"][1] = 0
    expected = states(model, inputs)
    speed_up_deberta(model)

    with torch.inference_mode():
        assert model(**inputs).last_hidden_state.isfinite().all()
    assert_close(states(model, inputs), expected)


def test_all_hidden_states_are_given_when_asked_for():
    model = plain_model()
    inputs = batch([6, 6])
    with torch.inference_mode():
        expected = model(**inputs, output_hidden_states=True)
        speed_up_deberta(model)
        found = model(**inputs, output_hidden_states=True)
        as_tuple = model(**inputs, output_hidden_states=True, return_dict=False)

    assert len(found.hidden_states) == len(expected.hidden_states) == 4
    for one, other, third in zip(
        found.hidden_states, expected.hidden_states, as_tuple[1], strict=True
    ):
        assert_close(one, other)
        assert torch.equal(one, third)
    assert torch.equal(as_tuple[0], found.last_hidden_state)


@pytest.mark.parametrize("lengths", [[9], [40, 3, 40, 1]], ids=str)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_token_alone_has_the_state_that_it_has_in_company(layout, side, lengths):
    model = plain_model(**LAYOUTS[layout])
    inputs = batch(lengths, side)
    first = inputs["attention_mask"].argmax(1)
    with torch.inference_mode():
        expected = model(**inputs).last_hidden_state
        speed_up_deberta(model, is_first_enough=True)
        found = model(**inputs).last_hidden_state

    assert found.shape == expected.shape
    rows = torch.arange(len(first))
    assert_close(found[rows, first], expected[rows, first])


def load_both(described, folder, dtype=torch.float32):
    """The module as transformers has it, and sped up."""
    cpu = torch.device("cpu")
    return load_module(described, folder, dtype), load_model(described, folder, cpu, dtype).module


@pytest.mark.parametrize(("family", "count"), [("quality", 4), ("prompt-task-complexity", 84)])
def test_the_last_layer_runs_what_the_head_reads(checkpoint, family, count):
    inputs = batch([40, 3, 40, 1])
    described = read_checkpoint(hub.resolve(str(checkpoint(family))))
    plain, module = load_both(described, checkpoint(family))
    [encoder] = [part for part in module.modules() if isinstance(part, DebertaV2Encoder)]
    rows = []
    encoder.layer[-1].intermediate.register_forward_hook(
        lambda _, __, out: rows.append(out.shape[1])
    )
    with torch.inference_mode():
        assert_close(module(**inputs), plain(**inputs))
    assert rows == [count]


def changed_in_place(model):
    for weight in model.parameters():
        weight.mul_(1.3)
    return model


def loaded_anew(model):
    model.load_state_dict(plain_model(initializer_range=0.5).state_dict())
    return model


def assigned_anew(model):
    state = plain_model(initializer_range=0.5).state_dict()
    model.load_state_dict(state, assign=True)
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.double(),
        lambda model: model.half().float(),
        changed_in_place,
        loaded_anew,
        assigned_anew,
    ],
    ids=["cast", "cast and back", "in place", "loaded", "assigned"],
)
def test_tables_follow_the_weights(change):
    model = plain_model().requires_grad_(False)
    speed_up_deberta(model)
    inputs = batch([30, 7])
    before = states(model, inputs)
    model = change(model)

    found = states(model, inputs)
    with reference_forward():
        expected = states(model, inputs)
    assert found.dtype == expected.dtype
    assert_close(found, expected)
    assert not torch.equal(found, before)


def original_states(model, inputs):
    with reference_forward():
        return states(model, inputs)


def autocast_states(model, inputs):
    with torch.autocast("cpu", torch.bfloat16):
        return states(model, inputs)


def training_states(model, inputs):
    torch.manual_seed(0)
    found = model.train()(**inputs).last_hidden_state
    model.eval()
    return found.detach()


def states_with_gradients(model, inputs):
    return model(**inputs).last_hidden_state.detach()


def states_with_attentions(model, inputs):
    with torch.inference_mode():
        return torch.cat([a.flatten() for a in model(**inputs, output_attentions=True).attentions])


@pytest.mark.parametrize(
    "way",
    [
        original_states,
        autocast_states,
        training_states,
        states_with_gradients,
        states_with_attentions,
    ],
)
def test_what_is_not_plain_inference_is_left_to_transformers(way):
    model = plain_model()
    inputs = batch([30, 7])
    expected = way(model, inputs)
    speed_up_deberta(model)
    states(model, inputs)

    assert torch.equal(way(model, inputs), expected)


def test_an_encoder_whose_outputs_differ_keeps_its_own_forward(monkeypatch, caplog):
    """As when a version of transformers computes something else."""
    monkeypatch.setattr(disentangled, "_score_scale", lambda attention: 0.1)
    model = plain_model()
    inputs = batch([30, 7])
    expected = states(model, inputs)
    with caplog.at_level(logging.WARNING, logger="gpuclassify"):
        speed_up_deberta(model)

    assert type(model.encoder) is DebertaV2Encoder
    assert "forward is kept" in caplog.text
    assert torch.equal(states(model, inputs), expected)


@pytest.mark.parametrize(
    "model",
    [
        lambda: plain_model(relative_attention=False),
        lambda: BertModel(BertConfig(vocab_size=32, hidden_size=32, num_attention_heads=2)).eval(),
    ],
    ids=["no relative attention", "bert"],
)
def test_other_models_are_left_alone(model):
    model = model()
    inputs = {name: tensor % 30 for name, tensor in batch([9, 4]).items()}
    expected = states(model, inputs)
    types = [type(part) for part in model.modules()]
    speed_up_deberta(model)

    assert [type(part) for part in model.modules()] == types
    assert torch.equal(states(model, inputs), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["quality", "prompt-task-complexity", "deberta-v2"])
def test_checkpoints_load_sped_up_unless_asked_otherwise(
    checkpoint, sequence_classifier, family, dtype
):
    of = sequence_classifier if family == "deberta-v2" else checkpoint
    described = read_checkpoint(hub.resolve(str(of(family))))

    types = [
        type(next(part for part in module.modules() if isinstance(part, DebertaV2Encoder)))
        for module in load_both(described, of(family), dtype)
    ]
    assert types == [DebertaV2Encoder, DisentangledEncoder]


def test_padding_within_a_text_is_left_to_transformers():
    model = plain_model()
    inputs = batch([9, 5])
    inputs["attention_mask"][0, 4] = 0
    expected = states(model, inputs)
    speed_up_deberta(model)

    assert torch.equal(states(model, inputs), expected)


# One compiled kernel. It is for GPUs, and computes the same on a CPU.

WIDE_HEADS = {"hidden_size": 32, "num_attention_heads": 2}  # kernels take heads of 16 and more


def uncompiled_attend(*inputs):
    return fused_attention._attend({}, *inputs)


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(fused_attention, "_compiled", lambda *_: uncompiled_attend)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("lengths", [[130, 1, 7, 300], [2], [257, 128, 128, 50]], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_attention_gives_the_states_of_transformers(layout, lengths):
    model = plain_model(**{**LAYOUTS[layout], **WIDE_HEADS})
    inputs = batch(lengths)
    expected = states(model, inputs)
    speed_up_deberta(model)
    model.encoder.attention_type = FusedAttention

    assert_close(states(model, inputs), expected)


def test_rows_of_products_may_begin_at_whole_eights(monkeypatch):
    monkeypatch.setattr(disentangled, "ROW_STEPS", {"cpu": 8})  # as on a GPU
    model = plain_model()
    inputs = batch([13, 1, 7, 30])
    expected = states(model, inputs)
    speed_up_deberta(model)

    assert_close(states(model, inputs), expected)


@pytest.mark.slow
def test_compiled_attention_gives_the_states_of_transformers(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = plain_model(**WIDE_HEADS)
    inputs = batch([130, 1, 7, 100])
    expected = states(model, inputs)
    speed_up_deberta(model)
    model.encoder.attention_type = FusedAttention
    compiled = counters["stats"]["unique_graphs"]

    for _ in range(2):
        assert_close(states(model, inputs), expected)
    assert counters["stats"]["unique_graphs"] - compiled == 1  # for all layers and both runs


@pytest.mark.usefixtures("uncompiled")
def test_fused_attention_is_used_where_it_is_the_same_and_faster(monkeypatch, caplog):
    monkeypatch.setattr(fused_attention, "FUSED_DEVICES", {"cpu"})
    monkeypatch.setattr(fused_attention, "FUSED_LENGTHS", (130, 7))
    time_attention = fused_attention._time_attention
    used = []
    for fused_seconds in (1.0, 3.0):
        seconds = {DisentangledAttention: 2.0, FusedAttention: fused_seconds}

        def timed(encoder, attention_type, *given, seconds=seconds):
            return time_attention(encoder, attention_type, *given)[0], seconds[attention_type]

        monkeypatch.setattr(fused_attention, "_time_attention", timed)
        monkeypatch.setattr(fused_attention, "_kernels", {})
        model = plain_model(**WIDE_HEADS)
        with caplog.at_level(logging.INFO, logger="gpuclassify"):
            speed_up_deberta(model)
        used.append(model.encoder.attention_type)

    assert used == [FusedAttention, DisentangledAttention]
    assert "attention is fused: 0.5 of the time" in caplog.text
    assert "attention is not fused: 1.5 of the time" in caplog.text


def another_scale(query, key, value, *others):
    return uncompiled_attend(2 * query, key, value, *others)


def no_compiler(*_):
    raise RuntimeError("no working compiler\nwas found")


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (another_scale, "not fused: .* difference"),
        (no_compiler, "not fused: RuntimeError: no working compiler$"),
    ],
)
def test_fused_attention_that_differs_or_fails_is_not_used(monkeypatch, caplog, attend, reason):
    monkeypatch.setattr(fused_attention, "FUSED_DEVICES", {"cpu"})
    monkeypatch.setattr(fused_attention, "FUSED_LENGTHS", (130, 7))
    monkeypatch.setattr(fused_attention, "_compiled", lambda *_: attend)
    monkeypatch.setattr(fused_attention, "_kernels", {})
    model = plain_model()
    with caplog.at_level(logging.INFO, logger="gpuclassify"):
        speed_up_deberta(model)

    assert model.encoder.attention_type is DisentangledAttention
    line = caplog.records[0].getMessage()
    assert re.search(reason, line)


@pytest.mark.usefixtures("uncompiled")
def test_the_attentions_are_timed_as_runs_run(monkeypatch):
    monkeypatch.setattr(fused_attention, "FUSED_DEVICES", {"cpu"})
    monkeypatch.setattr(fused_attention, "_kernels", {})
    seen = []

    def time_attention(encoder, attention_type, states, mask):
        seen.append((device_lock(CPU).locked(), torch.is_inference_mode_enabled()))
        return states, 1.0

    monkeypatch.setattr(fused_attention, "_time_attention", time_attention)
    speed_up_deberta(plain_model(**WIDE_HEADS))

    assert seen == [(True, True)] * 2


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), BrokenDeviceError("it is lost")]
)
def test_what_is_no_fault_of_the_compiler_is_raised(monkeypatch, error):
    monkeypatch.setattr(fused_attention, "FUSED_DEVICES", {"cpu"})
    monkeypatch.setattr(fused_attention, "FUSED_LENGTHS", (130, 7))
    monkeypatch.setattr(fused_attention, "_kernels", {})

    def attend(*_):
        raise error

    monkeypatch.setattr(fused_attention, "_compiled", lambda *_: attend)
    with pytest.raises(type(error)):
        speed_up_deberta(plain_model())
    assert not fused_attention._kernels  # tried again by the next load


def test_torch_compiles_in_this_process_for_as_many_models_as_there_are(monkeypatch):
    monkeypatch.setattr(fused_attention, "FUSED_DEVICES", {"cpu"})
    monkeypatch.setattr(fused_attention, "FUSED_LENGTHS", (130, 7))
    monkeypatch.setattr(fused_attention, "_kernels", {})
    seen = set()

    def attend(*inputs):
        inductor, dynamo = torch._inductor.config, torch._dynamo.config
        seen.add((inductor.compile_threads, dynamo.recompile_limit > 100))
        return uncompiled_attend(*inputs)

    monkeypatch.setattr(fused_attention, "_compiled", lambda *_: attend)
    speed_up_deberta(plain_model())

    assert seen == {(1, True)}  # else 32 processes a worker, and the ninth graph uncompiled


class Gpu:
    name, total_bytes = "NVIDIA H100", 80 * 2**30


@pytest.mark.parametrize("fastest", [KERNELS[2][1], KERNELS[2][-1], None])
def test_the_fastest_kernel_of_a_gpu_is_kept(monkeypatch, tmp_path, fastest):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fused_attention, "CudaMemory", lambda device: Gpu)
    calls, have_all_run = [], False

    def try_kernels(encoder, key, kernels, is_known):
        calls.append((tuple(kernels), is_known))
        return fastest, have_all_run

    monkeypatch.setattr(fused_attention, "_try_kernels", try_kernels)
    key = (torch.device("cuda", 0), torch.bfloat16, 12, 64, True, True)
    found = [fused_attention._fastest_kernel(None, key)]
    have_all_run = True  # before, a compiler may have been missing: nothing was kept
    found += [fused_attention._fastest_kernel(None, key) for _ in range(2)]

    assert found == [fastest] * 3
    known = () if fastest is None else (fastest,)
    assert calls == [(KERNELS[2], False), (KERNELS[2], False), (known, True)]
    fused_attention._fastest_kernel(None, (*key[:3], 48, *key[4:]))  # no power of two
    flex = tuple(kernel for kernel in KERNELS[2] if not kernel.is_own)
    assert calls[-1] == (flex, False) != (KERNELS[2], False)
    monkeypatch.setitem(KERNELS, 2, KERNELS[2][:1])  # a release with other candidates
    fused_attention._fastest_kernel(None, key)
    assert calls[-1] == (KERNELS[2], False)
