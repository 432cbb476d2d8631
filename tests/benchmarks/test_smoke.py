"""Each benchmark runs in its smallest form, and writes a complete result."""

import contextlib
import functools
import importlib
import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib import image
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.utils import logging

from benchmarks import (
    BASELINE,
    SUBJECT,
    decontamination,
    deduplication,
    plots,
    safety,
    suite,
    throughput,
)
from benchmarks.harness import noise
from benchmarks.inputs import SHAPES, TINY_SIZES
from benchmarks.ways import choose_ways
from benchmarks.work import forward_operations
from tests.loaders import OTHER_LOADERS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PLAIN = (
    "annotations decontamination fasttext heads jobs pairs questions safety spans static "
    "thresholds tokens training trunks"
)
OPTIONS = dict.fromkeys(PLAIN.split(), ()) | {
    "throughput": ("--peers", "--lengths", "short"),
    "deduplication": ("--peers", "nowhere"),
    "workers": ("--workers", "1", "2"),
}
# Where the variants stand in a result.
PARTS = {
    "throughput": ("corpora", "short"),
    "deduplication": ("corpora", "14x8"),
    "jobs": ("overhead",),
    "questions": ("choice",),
    "tokens": ("cases", "WordPiece, English"),
    "trunks": ("found", "bert"),
}


@pytest.fixture(scope="module")
def smoke_run(tmp_path_factory):
    """What a benchmark's smoke run in this process writes, and where."""

    @functools.cache
    def run(question):
        folder = tmp_path_factory.mktemp(question)
        benchmark = importlib.import_module(f"benchmarks.{question}")
        threads, verbosity = torch.get_num_threads(), logging.get_verbosity()
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                options = ["--smoke", *OPTIONS.get(question, ()), "--output", str(folder)]
                path = benchmark.main(options)
        finally:
            torch.set_num_threads(threads)
            logging.set_verbosity(verbosity)
        assert list(folder.iterdir()) == [path]
        result = json.loads(path.read_text())
        assert result["question"] == question
        assert result["noisy"] == bool(noise(result))
        assert {"processor", "cores", "torch_threads", "short_name"} <= set(result["machine"])
        assert {"gpuclassify", "torch", "transformers"} <= set(result["versions"])
        assert printed.getvalue().startswith(f"{benchmark.table(result)}\n")
        return result, path

    return run


@pytest.mark.parametrize("question", OPTIONS)
def test_a_smoke_run_writes_a_complete_result(smoke_run, question):
    result, _ = smoke_run(question)
    measured = functools.reduce(dict.__getitem__, PARTS.get(question, ()), result)
    medians = {}
    for name, times in measured["variants"].items():
        assert len(times["seconds"]) == len(times["other_cores"]) == result["settings"]["repeats"]
        medians[name] = times["median_seconds"]
        assert medians[name] == pytest.approx(np.median(times["seconds"]))
    subject = safety.SUBJECT if question == "safety" else SUBJECT
    for ratio in measured.get("speed_up", {}).values():
        expected = medians[ratio["against"]] / medians[subject]
        assert ratio["ratio_of_medians"] == pytest.approx(expected)


def test_the_baseline_comes_first_and_gpuclassify_last(smoke_run):
    corpus = smoke_run("throughput")[0]["corpora"]["short"]
    first, *others, last = corpus["variants"]
    assert (first, last) == (BASELINE, SUBJECT)
    originals = {f"{loader}-original" for loader in OTHER_LOADERS}
    assert originals | {"Curator's stages, best batch"} <= set(others)
    tokens = corpus["real_tokens"]
    assert corpus["pipeline_padded_tokens"] > tokens == corpus["tokenizer"]["tokens"]


def test_samples_have_their_strata_and_mixtures_all_rows(smoke_run):
    result = smoke_run("samples")[0]
    assert [{run["rows"] for run in runs} for runs in result["ways"].values()] == [{2_200}, {400}]
    assert {(run["rows"], run["cells"]) for run in result["mixes"]} == {(8_000, 14)}


def test_planted_items_are_found_and_nothing_else(smoke_run):
    families = smoke_run("decontamination")[0]["families"]
    for number, family in enumerate(decontamination.FOUND):
        found = families[family]
        assert found["contaminated"] == found["with_their_item"]
        assert found["contaminated"] >= (0.7 if number > 4 else 1) * found["documents"]
    assert not any(families[family]["contaminated"] for family in decontamination.CLEAN)


def test_int8_is_farther_from_float32_than_bfloat16(smoke_run):
    models = smoke_run("int8")[0]["models"]
    assert 0 <= models["the demo's classifier"]["changed_labels"]["int8"] <= 0.2
    minilm = models["all-MiniLM-L6-v2"]["mean_difference"]
    assert 0 < minilm["bfloat16"] < minilm["int8"] < 0.3  # and nearer to itself than to noise


def test_deduplication_recalls_what_was_planted(smoke_run):
    result, _ = smoke_run("deduplication")
    measured = result["corpora"]["14x8"]["variants"]
    assert list(measured) == list(deduplication.OURS)
    assert all(each["recall_of_planted"]["exact 0"] == 1 for each in measured.values())
    assert [step["documents"] for step in result["growth"]] == [200, 300]


def test_results_are_drawn_and_the_suite_ends_with_a_short_table(smoke_run, tmp_path):
    results = [smoke_run(name) for name in ("throughput", "deduplication", "scale")]
    paths = plots.main([*(str(path) for _, path in results), "--output", str(tmp_path)])
    drawn = [path.stem.rpartition("-")[2] for path in paths]
    assert drawn[:5] == ["ratios", "peak", "ratios", "recall", "growth"] and len(drawn) == 6
    for path in paths:  # light paper, dark ink, and nothing runs over the edges
        pixels = image.imread(path)[..., :3].mean(axis=2)
        edges = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
        assert pixels.min() < 0.2 and edges.min() == 1
    head, line = suite.summary([results[0][0]]).splitlines()
    assert "other way" in head
    assert line.split()[:4] == ["bert", "short,", "12", "documents"]


@pytest.mark.parametrize("form", sorted(suite.FORMS))
def test_every_command_of_the_suite_is_possible(form):
    for question, *arguments in suite.FORMS[form]:
        options = throughput.parse_options(arguments)
        ways = {way.name for way in choose_ways(options, "model").ways}
        assert question == "throughput" and ways >= {*options.variants}


def test_operations_are_those_that_torch_counts():
    shape = replace(SHAPES["bert"], **TINY_SIZES)
    width, layers = shape.hidden_size, shape.layers
    sizes = {"hidden_size": width, "intermediate_size": shape.intermediate_size}
    sizes |= {"num_attention_heads": shape.heads, "num_hidden_layers": layers, "num_labels": 3}
    config = AutoConfig.for_model(shape.architecture, vocab_size=50, **sizes)
    module = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module.eval()(input_ids=torch.ones(1, 40, dtype=torch.int64))
    head = 2 * width**2 + 2 * width * 3
    assert forward_operations([40], shape) == counter.get_total_flops() - head


def test_engines_that_are_not_installed_are_left_out_by_name(tmp_path, capsys):
    options = ["--smoke", "--engines", "--lengths", "web", "--footprint", "none"]
    path = throughput.main([*options, "--output", str(tmp_path)])
    result = json.loads(path.read_text())
    assert path.stem.startswith("engines-")
    variants = result["corpora"]["web"]["variants"]
    always = {BASELINE, "torch float32", "torch bfloat16", f"{SUBJECT}, bfloat16", SUBJECT}
    assert always <= set(variants)
    for engine in ("OpenVINO float32", "OpenVINO, int8 and bfloat16", "ONNX Runtime int8"):
        assert engine in variants or "make bench-peers" in result["left_out"][engine]
    assert "share_of_peak" in variants[SUBJECT]
    assert plots.main([str(path)])
