"""The tokenizing benchmark times the host's tokenizer and holds all variants to the same tokens."""

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from benchmarks import tokenizing
from gpuclassify.tokenizing.text_tokenizer import TextTokenizer
from gpuclassify.tokenizing.token_batch import TokenBatch
from tests.replicas import sample_texts

TEXTS = sample_texts(20, seed=2)


def test_a_smoke_run_writes_a_complete_result(smoke_run):
    result, _, printed = smoke_run("tokenizing")
    assert list(result["variants"]) == ["host, 1 cores"]
    assert result["text_tokens"] > result["model_tokens"] > result["documents"] == 12
    for name, found in result["variants"].items():
        assert len(found["seconds"]) == result["settings"]["repeats"]
        rate = result["model_tokens"] / found["median_seconds"]
        assert found["model_tokens_per_second"] == pytest.approx(rate)
        assert name in printed
    ceiling = result["ceiling"]
    one, many = ceiling["model_tokens_per_second_and_core"], ceiling["model_tokens_per_second"]
    assert ceiling["library_cpu_seconds"] > ceiling["python_cpu_seconds"] > 0
    lengths = result["lengths"]
    ratio = lengths["long_seconds"] / lengths["short_seconds"]
    assert lengths["time_ratio"] == pytest.approx(ratio)
    assert lengths["long_chars"] == 200 * lengths["short_chars"]
    assert f"takes {ratio:.2f} times as long" in printed
    assert one < many <= ceiling["cores"] * one * (1 + 1e-9)


def test_the_librarys_work_is_shared_and_pythons_is_not():
    found = tokenizing.ceiling(cpu_seconds=4.0, python_seconds=0.8, tokens=1_000)
    assert found["model_tokens_per_second_and_core"] == pytest.approx(1_000 / 4)
    assert found["model_tokens_per_second"] == pytest.approx(1_000 / (3.2 / 16 + 0.8))


def test_a_summary_tells_tokens_apart_wherever_they_are(sequence_classifier):
    tokens = TextTokenizer(AutoTokenizer.from_pretrained(sequence_classifier("bert")), 16)(TEXTS)
    expected = tokenizing.summary(tokens)
    assert expected[:, 0].tolist() == tokens.lengths.tolist()
    there = TokenBatch(torch.from_numpy(tokens.ids), tokens.offsets, None, tokens.whole_lengths)
    np.testing.assert_array_equal(tokenizing.summary(there), expected)
    swapped = tokens.ids.copy()
    swapped[[1, 2]] = swapped[[2, 1]]
    assert swapped[1] != swapped[2]
    other = tokenizing.summary(TokenBatch(swapped, tokens.offsets, None, tokens.whole_lengths))
    assert (other != expected).any(axis=1).tolist() == [True] + [False] * (len(TEXTS) - 1)
