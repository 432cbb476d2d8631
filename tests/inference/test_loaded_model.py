"""A loaded model knows its lengths, its padding and what padding does to it."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers import MPNetConfig, MPNetForSequenceClassification

from gpuclassify.inference import loaded_model
from gpuclassify.inference.batching import pad, stage
from gpuclassify.inference.memory import ScoreRule
from gpuclassify.tokenizing.text_tokenizer import TextTokenizer, TokenBatch
from tests.oracle import plain_tokenizer
from tests.replicas import (
    ARCHITECTURES,
    sample_texts,
    write_sequence_classifier,
)

OFFSET_POSITIONS = {"roberta", "xlm-roberta", "camembert"}
TEXTS = sample_texts(6, seed=4, max_words=30)


def one_by_one(directory, model_class, texts):
    """Logits by plain transformers, one unpadded text at a time."""
    module = model_class.from_pretrained(directory).eval()
    tokenizer = plain_tokenizer(directory)
    with torch.inference_mode():
        return torch.cat([module(**tokenizer(text, return_tensors="pt")).logits for text in texts])


def padded_together(model, texts, side):
    tokens = model.text_tokenizer(None)(texts)
    with torch.inference_mode():
        return model.forward(
            pad(stage(tokens, model.device), np.arange(len(tokens)), model.pad_id, side), side
        )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_lengths_positions_padding_and_outputs_are_the_checkpoints(model_of, architecture):
    model = model_of(architecture)

    assert model.max_tokens == 512
    assert model.pad_id == model.tokenizer.pad_token_id
    assert model.output_size == 3
    assert not model.needs_single_rows
    assert not model.module.training
    assert not any(p.requires_grad for p in model.module.parameters())
    # Not passed to models that derive them.
    assert model.accepts_positions == (architecture not in OFFSET_POSITIONS)
    assert model.is_padding_safe("right")


def test_infinite_outputs_are_close_to_nothing(model_of):
    infinite, finite = torch.tensor([[np.inf, 1.0]]), torch.tensor([[5.0, 1.0]])
    model = model_of("bert")
    assert model.are_close(finite, finite)
    for outputs, expected in ((finite, infinite), (infinite, finite), (infinite, infinite)):
        assert not model.are_close(outputs, expected)


def test_padding_on_the_left_is_found_unsafe_for_heads_that_read_the_first_column(model_of):
    safe = {name for name in ARCHITECTURES if model_of(name).is_padding_safe("left")}

    # DeBERTa's encoder gives the state of the first token in every column.
    assert safe == {"gpt2", "llama", "mistral", "deberta-v2"}


def test_positions_that_do_not_begin_at_zero_are_never_overridden_by_wrong_ones(
    directory_of, load_directory, tmp_path
):
    """MPNet numbers its positions from 2, with a function that is no method of its modules."""
    tokenizer = plain_tokenizer(directory_of("roberta"))
    config = MPNetConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        initializer_range=0.3,
        num_labels=3,
    )
    torch.manual_seed(0)
    MPNetForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = load_directory(tmp_path)
    expected = one_by_one(tmp_path, MPNetForSequenceClassification, TEXTS)

    for text, logits in zip(TEXTS, expected, strict=True):
        alone = padded_together(model, [text], "left")[0]
        torch.testing.assert_close(alone, logits, atol=1e-5, rtol=1e-5)
    if model.is_padding_safe("left"):
        together = padded_together(model, TEXTS, "left")
        torch.testing.assert_close(together, expected, atol=1e-5, rtol=1e-5)


def test_scores_are_counted_where_a_model_materialises_them(
    model_of, load_directory, directory_of, monkeypatch
):
    assert all(model_of(a).score_rule is None for a in ARCHITECTURES)
    monkeypatch.setattr(loaded_model, "speed_up_deberta", lambda *_: None)
    model = load_directory(directory_of("deberta-v2"))

    assert model.score_rule == ScoreRule(heads=4, min_span=64, item_bytes=4)


def test_two_lengths_in_two_threads_do_not_disturb_each_other(model_of):
    model = model_of("bert")
    lengths = [16, 40]
    texts = sample_texts(300, seed=8)
    expected = {n: TextTokenizer(model.new_tokenizer(), n)(texts).ids for n in lengths}
    start = threading.Barrier(4)

    def tokenize(length):
        start.wait()
        return [model.text_tokenizer(length)(texts).ids for _ in range(3)]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(tokenize, lengths * 2))

    for length, runs in zip(lengths * 2, results, strict=True):
        for ids in runs:
            np.testing.assert_array_equal(ids, expected[length])


@pytest.mark.parametrize(("wanted", "side"), [(None, "left"), ("right", "right")])
def test_the_tokenizer_decides_the_padding_side_unless_the_user_does(
    load_directory, tmp_path, wanted, side
):
    model = load_directory(write_sequence_classifier(tmp_path / "m", "llama", padding_side="left"))

    assert model.padding_side(wanted) == side


def test_segment_ids_reach_the_model(model_of):
    model = model_of("bert")
    ids = np.array([5, 6, 7, 8], np.int32)
    plain = TokenBatch(ids, np.array([0, 4]))
    second = dataclasses.replace(plain, type_ids=np.ones(4, np.int32))

    def outputs(tokens):
        with torch.inference_mode():
            return model.forward(
                pad(stage(tokens, model.device), np.array([0]), model.pad_id), "right"
            )

    assert not torch.allclose(outputs(plain), outputs(second))


@pytest.mark.parametrize("check", ["packed_layers", "is_padding_safe"])
def test_memory_that_runs_out_in_a_check_says_nothing_about_the_model(model_of, check):
    model = dataclasses.replace(model_of("bert"), _packed_layers=None, _padding_safety={})
    errors = [torch.OutOfMemoryError("CUDA out of memory")]

    def run_out(*_):
        if errors:
            raise errors.pop()

    hook = model.module.register_forward_pre_hook(run_out)
    try:
        found = (
            model.packed_layers() if check == "packed_layers" else model.is_padding_safe("right")
        )
    finally:
        hook.remove()

    assert found
    assert not errors
