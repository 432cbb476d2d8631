"""Packed texts get the outputs that they get alone, whichever model they run through."""

import dataclasses
import functools
import itertools
import json
import logging
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForSequenceClassification

from gpuclassify.inference.engine import run
from gpuclassify.inference.memory import BUDGETS, BatchLimits, Budget
from gpuclassify.inference.packed import layout as layouts
from gpuclassify.inference.packed import packed_layers as attention
from gpuclassify.inference.packed.layout import Layout, current_layout
from gpuclassify.inference.packed.packed_layers import NotPackableError, packed_attention
from gpuclassify.settings.options import ModelOptions
from gpuclassify.tokenizing.text_tokenizer import TokenBatch
from gpuclassify.workers.run_context import RunStats
from tests.replicas import ARCHITECTURES, write_sequence_classifier

options = functools.partial(ModelOptions, model="a model", engine="padded")

CHANGED = tuple(name for name in ARCHITECTURES if name != "deberta-v2")  # in their layers
LENGTHS = {
    "ragged": [64, 1, 17, 512, 300, 17, 1, 129, 2, 3],
    "equal": [33] * 5,
    "one": [45],
    "shortest": [1, 1],
}


def tokens_of(model, lengths, seed=0):
    """Texts of random tokens, the padding id and other special ones among them."""
    ids = np.random.default_rng(seed).integers(len(model.tokenizer), size=sum(lengths))
    return TokenBatch(ids.astype(np.int32), np.cumsum([0, *lengths]))


@functools.cache
def plain_module(directory):
    return AutoModelForSequenceClassification.from_pretrained(directory).eval()


def one_by_one(directory, tokens):
    """Logits by plain transformers, one unpadded text at a time."""
    module = plain_module(directory)
    ids = [torch.from_numpy(tokens.take([row]).ids).long()[None] for row in range(len(tokens))]
    with torch.inference_mode():
        return np.concatenate(
            [module(row, attention_mask=torch.ones_like(row)).logits.numpy() for row in ids]
        )


def close(outputs, expected):
    np.testing.assert_allclose(outputs, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def case_of(model_of, directory_of):
    """Architecture and kind of lengths to the model, its tokens and what they must give."""

    @functools.cache
    def case(name, kind="ragged"):
        tokens = tokens_of(model_of(name), LENGTHS[kind])
        return model_of(name), tokens, one_by_one(directory_of(name), tokens)

    return case


class Watched(nn.Module):
    """The module inside, with its masks noted and its memory limited to so many real tokens."""

    def __init__(self, inner, capacity=None):
        super().__init__()
        self.inner = inner
        self.capacity = capacity
        self.masks = []

    def forward(self, **inputs):
        mask = inputs["attention_mask"]
        if self.capacity is not None and int(mask.sum()) > self.capacity:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.masks.append(mask)
        return self.inner(**inputs)


def watched(model, capacity=None):
    """The model with a module that is watched from now on, found packable before."""
    assert model.is_packable
    return dataclasses.replace(model, module=Watched(model.module, capacity), _padding_safety={})


def fresh(model, module):
    return dataclasses.replace(model, module=module, _padding_safety={}, _packed_layers=None)


@pytest.mark.parametrize(
    ("kind", "side"), [*itertools.product(LENGTHS, ["right"]), ("ragged", "left")]
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_outputs_equal_transformers_one_text_at_a_time(
    case_of, key, architecture, kind, side
):
    model, tokens, expected = case_of(architecture, kind)
    stats = RunStats()

    outputs = run(model, key, [tokens], options(engine="packed", padding_side=side), stats)

    close(outputs, expected)
    assert stats.padded_tokens == stats.tokens == sum(LENGTHS[kind])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_texts_of_similar_length_may_share_a_call_of_attention(
    case_of, key, monkeypatch, architecture
):
    """As on GPUs, where no kernel takes texts of any lengths."""
    monkeypatch.setattr(layouts, "shortest_share", lambda device: 0.3)
    BUDGETS[key, "packed"] = Budget(BatchLimits(10_000))
    model, tokens, expected = case_of(architecture)

    close(run(model, key, [tokens], options(engine="packed"), RunStats()), expected)


@pytest.mark.parametrize(
    ("architecture", "window"),
    [("modernbert", {"local_attention": 8}), ("mistral", {"sliding_window": 5})],
)
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_local_windows_end_where_transformers_ends_them(
    load_directory, tmp_path, monkeypatch, key, architecture, window, share
):
    monkeypatch.setattr(layouts, "shortest_share", lambda device: share)
    directory = write_sequence_classifier(tmp_path / "m", architecture, **window)
    model = load_directory(directory)
    tokens = tokens_of(model, [40, 39, 4, 5, 6, 8, 30, 1])

    outputs = run(model, key, [tokens], options(engine="packed"), RunStats())

    close(outputs, one_by_one(directory, tokens))


def test_heads_that_average_all_tokens_average_real_ones(load_directory, tmp_path, key):
    directory = write_sequence_classifier(tmp_path / "m", "modernbert", classifier_pooling="mean")
    model = load_directory(directory)
    tokens = tokens_of(model, LENGTHS["ragged"])

    outputs = run(model, key, [tokens], options(engine="packed"), RunStats())

    close(outputs, one_by_one(directory, tokens))


def test_the_last_layer_runs_first_tokens_alone_where_the_head_reads_no_others(model_of):
    trimmed = {name for name in CHANGED if model_of(name).packed_layers().is_first_enough}

    assert trimmed == {"bert", "roberta", "xlm-roberta", "electra", "camembert"}


def test_the_last_layer_runs_all_tokens_for_a_head_that_reads_them(model_of, directory_of, key):
    """Not only those of its first column."""

    class Averaging(nn.Module):
        def __init__(self, backbone):
            super().__init__()
            self.backbone = backbone

        def forward(self, input_ids, attention_mask):
            states = self.backbone(input_ids, attention_mask).last_hidden_state
            mask = attention_mask[..., None]
            return ((states * mask).sum(1) / mask.sum(1))[:, :3]

    model = model_of("bert")
    averaging = fresh(model, Averaging(model.module.bert))
    averaging.accepts_positions = False
    tokens = tokens_of(model, LENGTHS["ragged"])

    outputs = run(averaging, key, [tokens], options(engine="packed"), RunStats())

    assert not averaging.packed_layers().is_first_enough
    close(outputs, run(averaging, key, [tokens], options(engine="reference"), RunStats()))


@pytest.mark.parametrize("architecture", ["bert", "roberta", "modernbert", "llama"])
def test_half_precision_is_packed_too(model_of, directory_of, key, architecture):
    """Its rounding is no reason to refuse."""
    module = AutoModelForSequenceClassification.from_pretrained(
        directory_of(architecture), dtype=torch.bfloat16
    ).eval()
    model = dataclasses.replace(fresh(model_of(architecture), module), dtype=torch.bfloat16)

    assert model.is_packable


def test_the_reference_runs_every_text_alone_and_unpadded(case_of, key):
    model, tokens, _ = case_of("bert")
    model = watched(model)

    run(model, key, [tokens], options(engine="reference"), RunStats())

    assert [tuple(mask.shape) for mask in model.module.masks] == [
        (1, length) for length in sorted(LENGTHS["ragged"], reverse=True)
    ]
    assert all(mask.all() for mask in model.module.masks)


@pytest.mark.parametrize("architecture", ["bert", "modernbert", "albert", "deberta-v2", "llama"])
def test_batches_that_run_at_once_do_not_disturb_each_other(case_of, key, architecture):
    """Layers of one module on three threads, with limits that make a batch of each two texts."""
    model, tokens, expected = case_of(architecture)
    configs = [part.config for part in model.module.modules() if hasattr(part, "config")]
    before = [config._attn_implementation for config in configs]
    BUDGETS[key, "packed"] = Budget(BatchLimits(10_000, max_rows=2))
    torch.set_num_threads(3)
    for _ in range(3):
        stats = RunStats()
        settings = options(engine="packed", batch_size=2)
        close(run(model, key, [tokens], settings, stats), expected)
        assert stats.batches >= 5
        assert stats.padded_tokens == stats.tokens

    assert torch.get_num_threads() == 3
    assert [config._attn_implementation for config in configs] == before


# What is not packed.


class LooksBack(nn.Module):
    """A layer that adds to each token what its neighbour was: padding on the right changes nothing,
    but the first token of a text has another text's last one before it when they are packed."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, states, *given, **named):
        output = self.layer(states, *given, **named)
        return output + nn.functional.pad(output[:, :-1], (0, 0, 1, 0))


class LooseHead(nn.Module):
    """Reads an own embedding, and no transformers model at all."""

    def __init__(self, vocabulary):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 3)

    def forward(self, input_ids, attention_mask):
        return self.embedding(input_ids[:, 0])


def looking_back(model_of, directory_of):
    module = AutoModelForSequenceClassification.from_pretrained(directory_of("bert")).eval()
    module.bert.encoder.layer[0] = LooksBack(module.bert.encoder.layer[0])
    return fresh(model_of("bert"), module)


def test_layers_that_look_across_texts_are_found_and_padded(model_of, directory_of, key):
    model = looking_back(model_of, directory_of)
    tokens = tokens_of(model, LENGTHS["ragged"])
    stats = RunStats()

    outputs = run(model, key, [tokens], options(engine="auto"), stats)

    assert not model.is_packable
    assert stats.padded_tokens > stats.tokens
    close(outputs, run(model, key, [tokens], options(engine="reference"), RunStats()))


def test_texts_that_attention_lets_see_each_other_are_found(model_of, directory_of, monkeypatch):
    """The check itself must be able to fail."""
    lone_group = functools.cached_property(
        lambda layout: [layouts.Group(0, int(layout.lengths.sum()), 1)]
    )
    lone_group.__set_name__(Layout, "groups")
    monkeypatch.setattr(Layout, "groups", lone_group)

    for name in CHANGED:
        assert not fresh(model_of(name), model_of(name).module).is_packable, name


def test_packing_what_cannot_be_packed_is_an_error_with_its_reason(model_of, directory_of, key):
    models = {
        "see each other": looking_back(model_of, directory_of),
        "no list of transformers layers": fresh(
            model_of("bert"), LooseHead(len(model_of("bert").tokenizer))
        ),
        "no padding id": dataclasses.replace(
            fresh(model_of("llama"), model_of("llama").module), needs_single_rows=True
        ),
    }
    for reason, model in models.items():
        for _ in range(2):  # the answer is remembered
            with pytest.raises(NotPackableError, match=rf"(?s){reason}.*engine=\"auto\""):
                run(
                    model,
                    key,
                    [tokens_of(model, [3, 4])],
                    options(engine="packed"),
                    RunStats(),
                )


def test_attention_refuses_what_it_does_not_know():
    states = torch.zeros(1, 2, 3, 4)

    with pytest.raises(NotImplementedError, match="softcap"):
        packed_attention(nn.Identity(), states, states, states, None, softcap=50.0)
    with pytest.raises(NotImplementedError, match="a mask"):
        packed_attention(nn.Identity(), states, states, states, torch.ones(1, 1, 3, 3))


def test_a_model_is_checked_once_and_left_as_it_was(model_of, directory_of, caplog):
    module = AutoModelForSequenceClassification.from_pretrained(directory_of("bert")).eval()
    model = fresh(model_of("bert"), module)
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))

    with caplog.at_level(logging.INFO, "gpuclassify"):
        assert model.is_packable
        once = len(calls)
        assert model.is_packable

    assert len(calls) == once > 0
    assert "BertForSequenceClassification runs without padding" in caplog.text
    assert module.config._attn_implementation == "sdpa"
    layers = module.bert.encoder.layer
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)


# Batches and memory.


def test_exhausted_memory_loses_nothing_and_is_remembered_apart_from_padded_batches(case_of, key):
    model, tokens, expected = case_of("bert")
    model = watched(model, capacity=600)
    BUDGETS[key] = Budget(BatchLimits(5_000))
    first, second = RunStats(), RunStats()

    outputs = run(model, key, [tokens], options(engine="packed"), first)
    again = run(model, key, [tokens], options(engine="packed"), second)

    assert first.out_of_memory > 0
    assert second.out_of_memory == 0
    assert first.padded_tokens == first.tokens
    assert BUDGETS[key].known == BatchLimits(5_000)
    close(outputs, expected)
    close(again, expected)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=8))
def test_a_layout_keeps_every_token_and_gives_it_back_to_its_place(lengths):
    mask = (np.arange(max(lengths)) < np.array(lengths)[:, None]).astype(np.int64)
    states = torch.randn(*mask.shape, 3)
    layout = Layout(np.array(lengths), max(lengths), torch.device("cpu"))

    packed = layout.pack(states)

    longest_first = np.argsort(-np.array(lengths), kind="stable")
    expected = [states[row, torch.from_numpy(mask[row].copy()).bool()] for row in longest_first]
    assert torch.equal(packed[0], torch.cat(expected))
    back = states * torch.from_numpy(mask.copy())[..., None]
    assert torch.equal(layout.unpack(packed), back)
    assert layout.ends.tolist() == np.cumsum([0, *sorted(lengths, reverse=True)]).tolist()
    assert sum(group.texts for group in layout.groups) == len(lengths)


def test_a_decoder_without_padding_id_is_run_alone_by_the_auto_engine(
    load_directory, tmp_path, key
):
    directory = write_sequence_classifier(tmp_path / "m", "llama")
    config = json.loads((directory / "config.json").read_text())
    config["pad_token_id"] = None
    (directory / "config.json").write_text(json.dumps(config))
    model = load_directory(directory)
    tokens = tokens_of(model, [9, 4, 4, 1])

    outputs = run(model, key, [tokens], options(engine="auto"), RunStats())

    close(outputs, one_by_one(directory, tokens))


def varlen_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
    """As torch has it in that release: without a window and a scale."""
    raise AssertionError("it cannot say what is asked of it")


def varlen_2_11(query, key, value, ends, _, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    """As torch has it in that release, text by text: tensors (tokens, heads, size)."""
    before, behind = (len(query) if most < 0 else most for most in window_size)
    assert (int(ends[0]), int(ends[-1])) == (0, len(query))
    assert int(ends.diff().max()) == max_q == max_k
    outputs = []
    for start, stop in itertools.pairwise(ends.tolist()):
        places = torch.arange(stop - start)
        distance = places[:, None] - places
        part = [states[start:stop].transpose(0, 1) for states in (query, key, value)]
        mask = (distance <= before) & (-distance <= behind)
        outputs.append(
            nn.functional.scaled_dot_product_attention(
                *part, attn_mask=mask, scale=scale, enable_gqa=len(part[0]) != len(part[1])
            )
        )
    return torch.cat([output.transpose(0, 1) for output in outputs])


def varlen_2_12(*args, scale=None, window_size=(-1, -1), enable_gqa=False):
    """As torch has it from that release on: it wants to be told of shared heads."""
    assert enable_gqa == (args[0].shape[1] != args[1].shape[1])
    return varlen_2_11(*args, scale=scale, window_size=window_size)


@pytest.mark.parametrize(
    ("function", "own_heads", "shared_heads"),
    [
        (None, False, False),
        (varlen_2_10, False, False),
        (varlen_2_11, True, False),
        (varlen_2_12, True, True),
    ],
)
def test_varlen_attention_is_used_as_far_as_the_torch_that_is_here_has_it(
    monkeypatch, function, own_heads, shared_heads
):
    monkeypatch.setattr(attention, "varlen_attn", function)
    has_varlen = attention._has_varlen.__wrapped__  # which remembers what it has found
    assert has_varlen(has_shared_heads=False) == own_heads
    assert has_varlen(has_shared_heads=True) == shared_heads


def varlen_that_is_not_built(*_, **__):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


def varlen_across_texts(query, key, value, ends, *_, **others):
    """As a kernel would that does not keep texts apart."""
    ends = ends[[0, -1]]
    return varlen_2_12(query, key, value, ends, ends, len(query), len(query), **others)


@pytest.mark.parametrize("function", [varlen_that_is_not_built, varlen_across_texts])
@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_where_varlen_attention_fails_its_trial_texts_are_packed_without_it(
    model_of, architecture, function, monkeypatch, caplog
):
    """Such as on GPUs that torch has no kernel for, or builds of torch for AMD's GPUs."""
    caplog.set_level("INFO", "gpuclassify")
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(attention, "varlen_attn", function)
    monkeypatch.setattr(attention, "_is_varlen_usable", lambda *_: True)
    model = model_of(architecture)
    layers = fresh(model, model.module).packed_layers()
    assert layers.attention == "scaled_dot_product_attention"
    assert not layers.is_tried and not layers.may_use_varlen
    assert caplog.text.count("varlen_attn is not used on cpu") == 1


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("function", "heads"), [(varlen_2_11, 4), (varlen_2_12, 2)])
def test_varlen_attention_gets_what_gives_the_same_as_groups(
    monkeypatch, function, heads, is_causal, window
):
    lengths = np.array([9, 4, 1, 4])
    layout = Layout(lengths, 9, torch.device("cpu"))
    query = torch.randn(1, 4, lengths.sum(), 8)
    key, value = torch.randn(2, 1, heads, lengths.sum(), 8)
    monkeypatch.setattr(attention, "varlen_attn", function)
    found = {}
    for name in ("scaled_dot_product_attention", "varlen_attn"):
        is_varlen = name == "varlen_attn"
        monkeypatch.setattr(attention, "_is_varlen_usable", lambda *_, answer=is_varlen: answer)
        reset = current_layout.set(layout)
        found[name], _ = packed_attention(
            nn.Identity(), query, key, value, None, 0.4, 0.0, is_causal, window
        )
        current_layout.reset(reset)
        assert layout.attention == name
    close(*found.values())


@pytest.mark.parametrize("most_scores", [1, 4 * 4 * 40 * 40])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_by_products_gives_the_same_as_that_of_torch(monkeypatch, window, most_scores):
    monkeypatch.setattr(attention, "_MOST_SCORES", most_scores)
    lengths = np.array([40, 39, 9, 4, 1, 4])  # some share a call with padding
    layout = Layout(lengths, 40, torch.device("cpu"))
    states = tuple(torch.randn(3, 1, 4, lengths.sum(), 8))
    by_products = Mock(wraps=attention._attend_by_products)
    monkeypatch.setattr(attention, "_attend_by_products", by_products)
    found = []
    for is_by_products in (False, True):
        monkeypatch.setattr(
            attention, "is_bfloat16_without_amx", lambda *_, answer=is_by_products: answer
        )
        found.append(attention._grouped(layout, states, 0.4, False, window))
        assert by_products.called == is_by_products
        by_products.reset_mock()
        attention._grouped(layout, states, 0.4, True, window)
        assert not by_products.called  # of decoders, half would be thrown away
    close(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["bert", "modernbert", "mistral", "llama"])
def test_packed_outputs_on_a_gpu_equal_those_on_the_cpu(
    case_of, directory_of, key, architecture, dtype
):
    model, tokens, expected = case_of(architecture)
    module = AutoModelForSequenceClassification.from_pretrained(
        directory_of(architecture), dtype=dtype
    )
    on_gpu = dataclasses.replace(
        fresh(model, module.eval().cuda()), device=torch.device("cuda"), dtype=dtype
    )

    outputs = run(on_gpu, key, [tokens], options(engine="packed"), RunStats())

    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    np.testing.assert_allclose(outputs, expected, atol=tolerance, rtol=tolerance)
