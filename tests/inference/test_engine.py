"""Outputs come back in input order and do not depend on batches, loaders or padding."""

import dataclasses
import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

from gpuclassify.inference import device
from gpuclassify.inference.engine import run, run_alone
from gpuclassify.inference.memory import (
    BUDGETS,
    CPU_MAX_TOKENS,
    BatchLimits,
    Budget,
    ScoreRule,
)
from gpuclassify.settings.options import ModelOptions
from gpuclassify.workers.run_context import RunStats
from tests.loaders import LOADERS, OTHER_LOADERS
from tests.oracle import plain_tokenizer
from tests.replicas import sample_texts

options = functools.partial(ModelOptions, model="a model", engine="padded")

TEXTS = [*sample_texts(30, seed=6, max_words=60), "", " ", "the river " * 400]
SETTINGS = {
    "sorted": options(),
    "unsorted": options(sort_by_length=False),
    **{loader: options(loader=loader) for loader in OTHER_LOADERS},
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
        tokenizer = plain_tokenizer(directory_of(name))
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
    """The module inside, with its batches noted."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.masks = []

    def forward(self, **inputs):
        assert torch.is_inference_mode_enabled()  # so that no gradient is kept
        self.masks.append(inputs["attention_mask"].clone())
        return self.inner(**inputs)


def watched(model):
    safe = {"left": True, "right": True}
    return dataclasses.replace(model, module=Watched(model.module), _padding_safety=safe)


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

    outputs = run(bert, key, [bert_tokens.take(np.arange(12))], options(), stats)

    assert stats.batches >= threads
    close(outputs, expected_of("bert")[:12])


def test_sorting_pads_less(bert, key):
    tokens = bert.text_tokenizer(None)(sample_texts(80, seed=2, max_words=60))
    BUDGETS[key] = Budget(BatchLimits(512))
    padded = {}
    for name, settings in SETTINGS.items():
        stats = RunStats()
        run(bert, key, [tokens], settings, stats)
        padded[name] = stats.padded_tokens

    assert len({padded[loader] for loader in LOADERS}) == 1
    assert padded["sorted"] < padded["unsorted"]


@pytest.mark.parametrize("name", SETTINGS)
def test_batch_size_bounds_the_rows_of_a_batch(bert, bert_tokens, expected_of, key, name):
    model = watched(bert)

    settings = dataclasses.replace(SETTINGS[name], batch_size=3)
    outputs = run(model, key, [bert_tokens], settings, RunStats())

    assert max(len(mask) for mask in model.module.masks) == 3
    close(outputs, expected_of("bert"))


def test_limits_hold_and_scores_are_bounded_for_relative_attention(model_of, tokens_of, key):
    model = dataclasses.replace(watched(model_of("deberta-v2")), score_rule=ScoreRule(4, 64, 4))
    limits = BatchLimits(CPU_MAX_TOKENS, score_rule=model.score_rule, max_score_bytes=2 * 2**20)
    BUDGETS[key] = Budget(limits)

    run(model, key, [tokens_of("deberta-v2")], options(), RunStats())

    shapes = [tuple(mask.shape) for mask in model.module.masks]
    assert all(rows == 1 or rows * width <= 2_048 for rows, width in shapes)
    assert all(
        rows == 1 or model.score_rule.size_bytes(rows, width) <= 2 * 2**20 for rows, width in shapes
    )
    assert any(rows > 1 for rows, _ in shapes)


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
        model, settings = models[number % 2], options(batch_size=8)
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

    def refuse(*_):
        pytest.fail("a stream of its own")

    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")
    monkeypatch.setattr(device, "_stream", refuse)
    found = device.to_device(np.arange(9, dtype=np.int32), torch.device("cuda"))
    assert found.is_cuda
    assert found.tolist() == list(range(9))
