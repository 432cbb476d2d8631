"""The ways that are compared give the same answers, in the order and size that is said."""

import argparse
import sys

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks import BASELINE, SUBJECT
from benchmarks.harness import run_interleaved
from benchmarks.recipes import crossfit_partition
from benchmarks.ways import (
    TOLERANCES,
    _gpu_ways,
    choose_ways,
    distinct_sizes,
    search_batches,
)


@pytest.fixture(scope="module")
def frame(some_texts):
    return dd.from_pandas(pd.DataFrame({"text": some_texts}), npartitions=2)


@pytest.fixture(scope="module")
def alone(tiny_model, some_texts):
    """Probabilities by plain transformers, each text by itself."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model).eval()
    with torch.no_grad():
        logits = [
            model(**tokenizer(text, truncation=True, max_length=512, return_tensors="pt")).logits
            for text in some_texts
        ]
    return torch.cat(logits).softmax(1).numpy()


def asked(**options):
    return argparse.Namespace(**{"device": "cpu", "peers": True, "variants": [], **options})


def test_the_baseline_comes_first_and_gpuclassify_last(tiny_model):
    few = choose_ways(asked(peers=False), tiny_model).ways
    assert [way.name for way in few] == [BASELINE, "pipeline per partition", SUBJECT]
    named = choose_ways(asked(variants=["sorted batches of 32"]), tiny_model).ways
    assert [way.name for way in named] == [BASELINE, "sorted batches of 32", SUBJECT]
    with pytest.raises(ValueError, match=r"no variants \['sorted'\] in this run, which has"):
        choose_ways(asked(variants=["sorted"]), tiny_model)


def test_ways_that_need_crossfit_are_left_out_without_it(tiny_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "crossfit", None)
    choice = choose_ways(asked(), tiny_model)
    assert list(choice.left_out) == ["crossfit-original", "loader=crossfit"]
    assert "pip install" in choice.left_out["crossfit-original"]
    assert not [way.name for way in choice.ways if "crossfit" in way.name]


def test_the_ways_of_a_gpu_agree_within_their_precisions(tiny_model, frame, alone):
    ways = _gpu_ways(asked(), tiny_model)
    dtypes = {way.name: way.dtype for way in ways}
    assert dtypes["pipeline held"] == dtypes["gpuclassify, float32"] == "float32"
    assert dtypes["pipeline held, float16"] == dtypes["crossfit-original"] == "float16"
    few = frame.partitions[0]
    ways, _ = search_batches(ways, few, tiny_model, "cpu")
    variants = [way.variant(few, tiny_model, "cpu") for way in ways]
    run = run_interleaved(variants, 1, TOLERANCES["float32"])
    # Other precisions run where they are said to run, and nowhere else.
    coarse = {name for name, difference in run.differences.items() if difference > 1e-5}
    assert coarse == {name for name, dtype in dtypes.items() if dtype != "float32"}
    assert ways[0].scores(few, tiny_model, "cpu") == pytest.approx(alone[:20], abs=1e-5)


@pytest.mark.parametrize("batch_size", [1, 4, 512])
def test_crossfits_own_loader_gives_the_answers_of_single_texts(
    tiny_model, some_texts, alone, batch_size
):
    texts = pd.Series(some_texts, index=range(100, 140))
    scores = crossfit_partition(texts, tiny_model, "cpu", batch_size=batch_size)
    assert np.stack(scores.to_list()) == pytest.approx(alone, abs=1e-5)
    assert list(scores.index) == list(texts.index)


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(1, [16]), (16, [16]), (17, [16, 32]), (64, [16, 32, 64]), (999, [16, 32, 64])],
)
def test_batch_sizes_that_hold_a_whole_partition_are_one(rows, sizes):
    assert distinct_sizes((16, 32, 64), rows) == sizes
