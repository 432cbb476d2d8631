"""Outputs come back in input order and do not depend on batches, loaders or padding."""

import dataclasses
import functools
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from gpuclassify.inference import device
from gpuclassify.inference.engine import BatchSettings, run, run_alone
from gpuclassify.inference.memory import (
    FOUND_LIMITS,
    BatchLimits,
    DocumentTooLargeError,
    ScoreRule,
    cpu_limits,
)
from gpuclassify.workers.run_context import RunStats
from tests.replicas import ARCHITECTURES, sample_texts

TEXTS = [*sample_texts(30, seed=6, max_words=60), "", " ", "the river " * 400]
SETTINGS = {
    "sorted": BatchSettings(),
    "unsorted": BatchSettings(sort_by_length=False),
    "crossfit": BatchSettings(loader="crossfit"),
}
WITHOUT_EMPTY = {
    "gpt2"
}  # its tokenizer gives an empty text no token, so transformers cannot run it


@pytest.fixture(scope="module")
def expected_of(directory_of):
    """Architecture to logits by plain transformers, one unpadded text at a time."""

    @functools.cache
    def expected(name):
        module = AutoModelForSequenceClassification.from_pretrained(directory_of(name)).eval()
        tokenizer = AutoTokenizer.from_pretrained(directory_of(name))
        rows = []
        for text in TEXTS:
            inputs = tokenizer(text, truncation=True, max_length=512, return_tensors="pt")
            if text == "" and name in WITHOUT_EMPTY:
                inputs = {"input_ids": torch.tensor([[tokenizer.bos_token_id]])}
            with torch.inference_mode():
                rows.append(module(**inputs).logits[0].numpy())
        return np.stack(rows)

    return expected


@pytest.fixture(scope="module")
def tokens_of(model_of):
    return functools.cache(lambda name: model_of(name).text_tokenizer(None)(TEXTS))


@pytest.fixture
def bert(model_of):
    return model_of("bert")


@pytest.fixture
def bert_tokens(tokens_of):
    return tokens_of("bert")


def close(outputs, expected):
    np.testing.assert_allclose(outputs, expected, atol=1e-5, rtol=1e-5)


class Watched(nn.Module):
    """The module inside, with its batches noted and its memory limited to so many tokens."""

    def __init__(self, inner, capacity=None, error=None):
        super().__init__()
        self.inner = inner
        self.capacity = capacity
        self.error = error or torch.OutOfMemoryError("CUDA out of memory")
        self.masks = []
        self.failures = 0

    def forward(self, **inputs):
        if self.capacity is not None and inputs["input_ids"].numel() > self.capacity:
            self.failures += 1
            raise self.error
        self.masks.append(inputs["attention_mask"].clone())
        return self.inner(**inputs)


def watched(model, **limits):
    module = Watched(model.module, **limits)
    return dataclasses.replace(model, module=module, _padding_safety={"left": True, "right": True})


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_outputs_equal_plain_transformers_one_text_at_a_time(
    model_of, tokens_of, expected_of, key, architecture, name, side
):
    settings = dataclasses.replace(SETTINGS[name], padding_side=side)

    outputs = run(model_of(architecture), key, [tokens_of(architecture)], settings, RunStats())

    assert outputs.dtype == np.float32
    close(outputs, expected_of(architecture))


@pytest.mark.parametrize("name", SETTINGS)
def test_no_texts_give_no_outputs_and_run_no_batch(bert, key, name):
    stats = RunStats()

    outputs = run(bert, key, [bert.text_tokenizer(None)([])], SETTINGS[name], stats)

    assert outputs.shape == (0, 3)
    assert outputs.dtype == np.float32
    assert stats == RunStats()


@pytest.mark.parametrize("name", SETTINGS)
def test_counts_add_up(bert, bert_tokens, key, name):
    model = watched(bert)
    stats = RunStats(batches=100)

    run(model, key, [bert_tokens], SETTINGS[name], stats)

    masks = model.module.masks
    assert stats.tokens == sum(int(mask.sum()) for mask in masks) == len(bert_tokens.ids)
    assert stats.padded_tokens == sum(mask.numel() for mask in masks)
    assert stats.batches == 100 + len(masks)
    assert stats.out_of_memory == 0
    assert stats.model_seconds > 0
    assert stats.as_dict()["batches"] == stats.batches


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_few_texts_are_shared_out_among_the_cores(bert, bert_tokens, expected_of, key, threads):
    torch.set_num_threads(threads)
    stats = RunStats()

    outputs = run(bert, key, [bert_tokens.take(np.arange(12))], BatchSettings(), stats)

    assert stats.batches >= threads
    close(outputs, expected_of("bert")[:12])


def test_sorting_pads_less(bert, key):
    tokens = bert.text_tokenizer(None)(sample_texts(80, seed=2, max_words=60))
    FOUND_LIMITS.for_run(key, lambda: BatchLimits(512))
    padded = {}
    for name, settings in SETTINGS.items():
        stats = RunStats()
        run(bert, key, [tokens], settings, stats)
        padded[name] = stats.padded_tokens

    assert padded["sorted"] == padded["crossfit"] < padded["unsorted"]


@pytest.mark.parametrize("name", SETTINGS)
def test_batch_size_bounds_the_rows_of_a_batch(bert, bert_tokens, expected_of, key, name):
    model = watched(bert)

    settings = dataclasses.replace(SETTINGS[name], batch_size=3)
    outputs = run(model, key, [bert_tokens], settings, RunStats())

    assert max(len(mask) for mask in model.module.masks) == 3
    close(outputs, expected_of("bert"))


def test_a_model_that_needs_single_rows_gets_them(bert, bert_tokens, expected_of, key):
    model = dataclasses.replace(watched(bert), needs_single_rows=True)

    outputs = run(model, key, [bert_tokens], BatchSettings(batch_size=8), RunStats())

    assert {mask.shape[0] for mask in model.module.masks} == {1}
    close(outputs, expected_of("bert"))


def test_limits_hold_and_scores_are_bounded_for_relative_attention(model_of, tokens_of, key):
    model = dataclasses.replace(watched(model_of("deberta-v2")), score_rule=ScoreRule(4, 64, 4))
    limits = dataclasses.replace(cpu_limits(model.score_rule), max_score_bytes=2 * 2**20)
    FOUND_LIMITS.for_run(key, lambda: limits)

    run(model, key, [tokens_of("deberta-v2")], BatchSettings(), RunStats())

    shapes = [tuple(mask.shape) for mask in model.module.masks]
    assert all(rows == 1 or rows * width <= 2_048 for rows, width in shapes)
    assert all(
        rows == 1 or model.score_rule.size_bytes(rows, width) <= 2 * 2**20 for rows, width in shapes
    )
    assert any(rows > 1 for rows, _ in shapes)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("std::bad_alloc: out_of_memory: CUDA error"),
        MemoryError(),
    ],
    ids=["torch", "rmm", "host"],
)
def test_exhausted_memory_loses_nothing_and_is_remembered(
    bert, bert_tokens, expected_of, key, name, error
):
    model = watched(bert, capacity=520, error=error)
    first, second = RunStats(), RunStats()

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # CrossFit's own retry would warn
        outputs = run(model, key, [bert_tokens], SETTINGS[name], first)
        failures = model.module.failures
        again = run(model, key, [bert_tokens], SETTINGS[name], second)

    assert first.out_of_memory == failures > 0
    assert second.out_of_memory == model.module.failures - failures == 0
    assert first.padded_tokens == sum(m.numel() for m in model.module.masks[: first.batches])
    close(outputs, expected_of("bert"))
    close(again, expected_of("bert"))


@pytest.mark.parametrize("name", ["sorted", "crossfit"])
def test_a_size_that_failed_is_not_tried_on_later_batches_of_the_same_run(
    bert, bert_tokens, key, name
):
    model = watched(bert, capacity=600)
    stats = RunStats()
    FOUND_LIMITS.for_run(key, lambda: BatchLimits(2_048, enough_tokens=2_048))

    run(model, key, [bert_tokens], SETTINGS[name], stats)

    # 2,048, 1,024 and 512 tokens: each fails once at most, whatever follows.
    assert 1 <= stats.out_of_memory <= 2


def test_a_text_that_does_not_fit_alone_is_an_error_and_frees_the_device(bert, bert_tokens, key):
    with pytest.raises(DocumentTooLargeError, match="lower max_seq_length"):
        run(watched(bert, capacity=100), key, [bert_tokens], BatchSettings(), RunStats())

    assert not device.device_lock(bert.device).locked()


class Crowded(nn.Module):
    """Notes how many threads are inside forward at once."""

    inside = 0
    most_inside = 0

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **inputs):
        Crowded.inside += 1
        Crowded.most_inside = max(Crowded.most_inside, Crowded.inside)
        time.sleep(0.005)
        try:
            return self.inner(**inputs)
        finally:
            Crowded.inside -= 1


def test_two_threads_never_run_forward_on_one_device_at_the_same_time(
    bert, bert_tokens, expected_of, key
):
    devices = [torch.device("cpu"), torch.device("cpu", 0)]
    models = [dataclasses.replace(bert, module=Crowded(bert.module), device=d) for d in devices]
    Crowded.inside = Crowded.most_inside = 0
    start = threading.Barrier(4)

    def work(number):
        stats = RunStats()
        start.wait()
        model, settings = models[number % 2], BatchSettings(batch_size=8)
        outputs = run(model, (*key, number), [bert_tokens], settings, stats)
        run_alone(model, bert_tokens.take([0]), "right")
        return outputs, stats

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(4)))

    assert Crowded.most_inside == 1
    for outputs, _ in results:
        close(outputs, expected_of("bert"))
    assert max(stats.wait_device_seconds for _, stats in results) > 0.01


class Leaky(nn.Module):
    """Averages over padding too, so that its outputs depend on the neighbours of a text."""

    def __init__(self, vocabulary):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, 3)
        self.masks = []

    def forward(self, input_ids, attention_mask):
        self.masks.append(attention_mask)
        return self.embedding(input_ids).mean(dim=1)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_model_that_padding_changes_gets_batches_without_padding(bert, key, name, side):
    module = Leaky(len(bert.tokenizer))
    model = dataclasses.replace(bert, module=module, accepts_positions=False, _padding_safety={})
    tokens = bert.text_tokenizer(None)([*TEXTS, "the river", "a valley", "one forest"])
    assert not model.is_padding_safe(side)
    module.masks.clear()

    settings = dataclasses.replace(SETTINGS[name], padding_side=side)
    outputs = run(model, key, [tokens], settings, RunStats())

    assert all(mask.all() for mask in module.masks)
    assert max(len(mask) for mask in module.masks) > 1
    close(outputs, [run_alone(model, tokens.take([row]), side) for row in range(len(tokens))])


@pytest.mark.parametrize("side", ["right", "left"])
def test_tokens_that_a_gpu_made_give_the_same_outputs(bert, key, bert_tokens, expected_of, side):
    """A tensor stands for one on a GPU."""
    made = dataclasses.replace(bert_tokens, ids=torch.from_numpy(bert_tokens.ids))
    assert not made.is_on_host
    settings = BatchSettings(padding_side=side)
    close(run(bert, key, [made], settings, RunStats()), expected_of("bert"))


def test_no_gradient_is_kept(bert, bert_tokens, key):
    model = watched(bert)
    modes = []
    model.module.register_forward_hook(lambda *_: modes.append(torch.is_inference_mode_enabled()))

    run(model, key, [bert_tokens], BatchSettings(), RunStats())

    assert modes
    assert all(modes)
    assert not torch.is_inference_mode_enabled()


@pytest.mark.gpu
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("architecture", ["bert", "deberta-v2", "llama"])
def test_outputs_on_a_gpu_equal_those_on_the_cpu(
    model_of, directory_of, tokens_of, expected_of, key, architecture, name, side
):
    model = model_of(architecture)
    module = AutoModelForSequenceClassification.from_pretrained(model.tokenizer.name_or_path).eval()
    on_gpu = dataclasses.replace(
        model, module=module.cuda(), device=torch.device("cuda"), _padding_safety={}
    )
    settings = dataclasses.replace(SETTINGS[name], padding_side=side)

    outputs = run(on_gpu, key, [tokens_of(architecture)], settings, RunStats())

    np.testing.assert_allclose(outputs, expected_of(architecture), atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_copies_wait_in_line_where_another_allocator_than_torchs_gives_memory(monkeypatch):
    """It may give the memory of a copy to the next one on the same stream, before it was read."""

    def refuse(device):
        pytest.fail("a stream of its own")

    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")
    monkeypatch.setattr(device, "_copy_stream", refuse)
    found = device.to_device(np.arange(9, dtype=np.int32), torch.device("cuda"))
    assert found.is_cuda
    assert found.tolist() == list(range(9))
