"""Arithmetic, parameters and memory of models, against torch's own counts."""

import json

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSequenceClassification

from benchmarks.names import RESULTS
from gpuclassify import AegisClassifier, DistributedDataClassifier, InstructionDataGuardClassifier
from gpuclassify.jobs.estimate.effort import Network, count_parameters, read_network
from gpuclassify.jobs.estimate.rates import RATES, Rate, gpu_hours
from gpuclassify.testing import safety_template

TEXTS, TOKENS = 4, 256


def test_operations_are_those_that_torch_counts(sequence_classifier):
    for architecture in ("bert", "distilbert", "modernbert", "deberta-v2", "gpt2", "llama"):
        path = sequence_classifier(architecture)
        network = read_network(DistributedDataClassifier(model=path).model.checkpoint)
        # Fused attention on CPUs is not among what the counter knows.
        model = AutoModelForSequenceClassification.from_pretrained(
            path, attn_implementation="eager"
        ).requires_grad_(False)
        ids = torch.full((TEXTS, TOKENS), 5)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
        counted = counter.get_total_flops()
        reckoned = TEXTS * network.operations(np.array([TOKENS]))[0]
        # Left out: heads, poolers, projections of embeddings and of relative positions.
        share = reckoned / counted
        assert 0.85 <= share <= 1, (architecture, share)


def test_a_known_prefix_is_run_once():
    network = Network("llama", 32, 64, 2, 4, 2, 8, is_gated=True)
    whole, own = network.operations(np.array([100])), network.operations(np.array([100]), 60)
    # The tokens after the prefix still attend to it.
    assert own == pytest.approx(whole * 40 / 100)
    assert network.operations(np.array([50]), 60) == 0


def test_parameters_are_those_of_the_loaded_model(sequence_classifier):
    path = sequence_classifier("bert")
    model = AutoModelForSequenceClassification.from_pretrained(path)
    counts = count_parameters(DistributedDataClassifier(model=path).model.checkpoint)
    assert sum(counts.values()) == model.num_parameters()


def test_models_on_one_decoder_name_the_same_place(safety_models, tmp_path):
    (tmp_path / "prompt.txt").write_text(safety_template())
    base = {"base_model": safety_models.base}
    guard = InstructionDataGuardClassifier(
        model=safety_models.guard, adapter=safety_models.defensive, **base
    )
    aegis = AegisClassifier(model=safety_models.defensive, template=safety_template(), **base)
    of_guard, of_aegis = (
        count_parameters(guard.model.checkpoint),
        count_parameters(aegis.model.checkpoint),
    )
    assert set(of_aegis) < set(of_guard)
    assert len(of_guard) == 3
    assert read_network(guard.model.checkpoint) == read_network(aegis.model.checkpoint)


def test_other_networks_are_not_reckoned(sequence_classifier, tmp_path):
    config = json.loads((sequence_classifier("bert") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mixtral"}))
    assert read_network(DistributedDataClassifier(model=tmp_path).model.checkpoint) is None


# Rates of GPUs: figures of committed files, and no others.


def figure_of(rate):
    figure = json.loads((RESULTS / rate.result).read_text())
    for key in rate.figure:
        figure = figure[key]
    return figure


def is_committed(rate):
    result = json.loads((RESULTS / rate.result).read_text())
    machine = json.dumps(result["machine"])
    return rate.tokens_per_second == figure_of(rate) and rate.device in machine


def test_every_rate_is_a_figure_of_a_committed_file():
    assert all(is_committed(rate) for rate in RATES)


def test_hours_are_told_for_networks_that_were_measured():
    name = "throughput-2026-11-21-amd-epyc-2-cores.json"
    figure = ("corpora", "web", "variants", "gpuclassify", "real_tokens_per_second")
    model = (("kind", "bert"), ("width", 768), ("layers", 12))
    measured = json.loads((RESULTS / name).read_text())
    speed = measured["corpora"]["web"]["variants"]["gpuclassify"]["real_tokens_per_second"]
    rate = Rate("AMD EPYC", "float32", model, speed, name, figure)
    assert is_committed(rate)
    assert not is_committed(Rate("AMD EPYC", "float32", model, speed + 1, name, figure))
    bert = Network("bert", 768, 3072, 12, 12, 12, 64)
    assert gpu_hours(bert, speed * 3600, [rate]) == {"AMD EPYC, float32": 1.0}
    assert gpu_hours(Network("bert", 1024, 4096, 24, 16, 16, 64), 1.0, [rate]) == {}
    assert gpu_hours(None, 1.0, [rate]) == {}
