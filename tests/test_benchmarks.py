"""Benchmarks compare like with like, count arithmetic rightly and never lose a result."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.harness import DisagreementError, Run, Variant, run_interleaved, write_result
from benchmarks.models import SHAPES, TINY_SIZES, write_model
from benchmarks.safety import (
    Outcome,
    long_template,
    one_hot,
    prompts_of,
    published_label,
    run_recipes,
)
from benchmarks.texts import LENGTHS, Lengths, texts_of_lengths
from benchmarks.work import forward_operations
from gpuclassify.models.template import parse_template

ANSWERS = np.array([[0.1], [0.9]])


def variants_of(journal, **answers):
    def record(event, name, answer=None):
        journal.append((event, name))
        return answer

    return [
        Variant(
            name,
            run=lambda name=name, answer=answer: record("run", name, answer),
            warm_up=lambda name=name: record("warm up", name),
        )
        for name, answer in answers.items()
    ]


def test_variants_warm_up_first_and_then_take_turns():
    journal = []
    run = run_interleaved(variants_of(journal, a=ANSWERS, b=ANSWERS), repeats=2, tolerance=0)
    turn = [("run", "a"), ("run", "b")]
    assert journal == [("warm up", "a"), ("warm up", "b"), *turn, *turn]
    assert {name: len(times) for name, times in run.seconds.items()} == {"a": 2, "b": 2}
    assert {name: len(cores) for name, cores in run.other_cores.items()} == {"a": 2, "b": 2}


def test_the_largest_difference_of_answers_is_told():
    close = variants_of([], a=ANSWERS, b=ANSWERS + 0.01, c=ANSWERS - 0.02)
    assert run_interleaved(close, 1, tolerance=0.05).largest_difference == pytest.approx(0.03)


@pytest.mark.parametrize("answer", [ANSWERS + 0.2, ANSWERS[::-1], ANSWERS * np.nan])
def test_other_answers_end_the_benchmark(answer):
    with pytest.raises(DisagreementError, match="'b' differ from earlier ones by"):
        run_interleaved(variants_of([], a=ANSWERS, b=answer), 1, tolerance=0.1)


def test_answers_that_do_not_depend_on_the_document_end_the_benchmark():
    same = np.full((2, 1), 0.5)
    with pytest.raises(DisagreementError, match="'a' vary by only 0 over the documents"):
        run_interleaved(variants_of([], a=same, b=same), 1, tolerance=0.1)


def test_speed_up_is_the_ratio_of_medians_and_keeps_every_round():
    run = Run({"slow": [4.0, 9.0, 6.0], "fast": [2.0, 3.0, 1.0]}, {}, 0.0)
    assert run.speed_up("fast", "slow") == {
        "against": "slow",
        "ratio_of_medians": 3.0,
        "ratio_by_round": [2.0, 3.0, 6.0],
    }


def test_results_are_never_overwritten(tmp_path):
    results = [{"machine": {"short_name": "box"}, "number": number} for number in range(3)]
    paths = [write_result("speed", result, tmp_path / "new") for result in results]
    assert [json.loads(path.read_text())["number"] for path in paths] == [0, 1, 2]
    assert all(path.name.startswith("speed-20") and "-box" in path.name for path in paths)


def test_web_lengths_have_the_median_and_the_share_above_the_limit_that_is_claimed():
    lengths = LENGTHS["web"].sample(1_001)
    assert np.median(lengths) == 350
    assert np.mean(np.asarray(lengths) > 512) == pytest.approx(1 / 3, abs=0.01)


@pytest.mark.parametrize("model", sorted(SHAPES))
def test_documents_have_the_prescribed_lengths(tmp_path, model):
    directory = write_model(tmp_path / "model", replace(SHAPES[model], **TINY_SIZES))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    wanted = Lengths(80, 0.9).sample(30)
    texts = texts_of_lengths(wanted, tokenizer)
    found = sorted(len(ids) for ids in tokenizer(texts)["input_ids"])
    assert len(set(texts)) == 30
    assert all(length >= tokens for length, tokens in zip(wanted, found, strict=True))
    assert sum(found) > 0.95 * sum(wanted)


@pytest.mark.parametrize("model", sorted(SHAPES))
def test_operations_are_those_that_torch_counts(model):
    shape = replace(SHAPES[model], **TINY_SIZES)
    if shape.position_buckets:
        shape = replace(shape, position_buckets=16)
    config = AutoConfig.for_model(
        shape.architecture,
        vocab_size=50,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.heads,
        num_hidden_layers=shape.layers,
        num_labels=3,
        **deberta_settings(shape),
    )
    module = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module.eval()(input_ids=torch.ones(1, 40, dtype=torch.int64))
    width = shape.hidden_size
    head = 2 * width**2 + 2 * width * 3
    # Keys and queries of the positions, which are the same for every text.
    positions = shape.layers * 2 * 2 * (2 * shape.position_buckets) * width**2
    assert forward_operations([40], shape) == counter.get_total_flops() - head - positions


def deberta_settings(shape):
    if not shape.position_buckets:
        return {}
    return {
        "max_relative_positions": -1,
        "norm_rel_ebd": "layer_norm",
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "position_buckets": shape.position_buckets,
        "relative_attention": True,
        "share_att_key": True,
    }


@pytest.fixture
def smoke_result(tmp_path):
    """What a benchmark's smoke run writes."""

    def run(question):
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{question}", "--smoke", "--output", str(tmp_path)],
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        [path] = tmp_path.iterdir()
        assert done.stdout.splitlines()[-1] == f"written to {path}"
        result = json.loads(path.read_text())
        assert result["question"] == question
        assert {"processor", "cores", "torch_threads", "short_name"} <= set(result["machine"])
        assert {"gpuclassify", "torch", "transformers"} <= set(result["versions"])
        assert result["settings"]["dtype"] == "float32"
        return result

    return run


def check_times(found, settings):
    assert len(found["seconds"]) == len(found["other_cores"]) == settings["repeats"]
    assert found["median_seconds"] == pytest.approx(np.median(found["seconds"]))


def check_speed_up(speed_up, slow, fast):
    ratio = np.median(slow) / np.median(fast)
    assert speed_up["ratio_of_medians"] == pytest.approx(ratio)


def test_a_smoke_run_of_throughput_writes_a_complete_result(smoke_result):
    result = smoke_result("throughput")
    assert set(result) == {"question", "finished", "machine", "versions", "settings", "corpora"}
    assert set(result["corpora"]) == {"web", "short"}
    for corpus in result["corpora"].values():
        check_corpus(corpus, result["settings"])


def check_corpus(corpus, settings):
    assert corpus["documents"] == settings["documents"]
    assert 0 <= corpus["largest_difference"] <= settings["tolerance"]
    assert corpus["pipeline_padded_tokens"] > corpus["real_tokens"]
    assert set(corpus["variants"]) == {"pipeline held", "pipeline per partition", "gpuclassify"}
    for found in corpus["variants"].values():
        check_times(found, settings)
        rate = corpus["real_tokens"] / found["median_seconds"]
        assert found["real_tokens_per_second"] == pytest.approx(rate)
        share = (
            corpus["operations"] / found["median_seconds"] / corpus["peak_operations_per_second"]
        )
        assert 0 < found["share_of_peak"] == pytest.approx(share)
        assert share < 1
    seconds = {name: found["seconds"] for name, found in corpus["variants"].items()}
    speed_up = corpus["speed_up"]["pipeline held"]
    check_speed_up(speed_up, seconds["pipeline held"], seconds["gpuclassify"])


def test_a_smoke_run_of_several_writes_a_complete_result(smoke_result):
    result = smoke_result("several")
    settings, variants = result["settings"], result["variants"]
    assert list(variants) == ["separate passes", "chained", "classify"]
    for found in variants.values():
        check_times(found, settings)
    texts = result["documents"]
    assert texts == settings["documents"]
    tokenized = [found["tokenized_texts"] for found in variants.values()]
    assert tokenized == [3 * texts, 3 * texts, texts]
    assert set(result["speed_up"]) == {"separate passes", "chained"}
    for name, speed_up in result["speed_up"].items():
        check_speed_up(speed_up, variants[name]["seconds"], variants["classify"]["seconds"])


def test_a_smoke_run_of_safety_writes_a_complete_result(smoke_result):
    result = smoke_result("safety")
    settings, variants = result["settings"], result["variants"]
    assert "peft" in result["versions"]
    assert list(variants) == ["plain generate", "plain generate, merged", "AegisClassifier"]
    for found in variants.values():
        check_times(found, settings)
        rate = result["prompt_tokens"] / found["median_seconds"]
        assert found["prompt_tokens_per_second"] == pytest.approx(rate)
        assert found["decode_steps"] > 0
    aegis = variants.pop("AegisClassifier")
    assert set(result["speed_up"]) == set(variants)
    for name, found in variants.items():
        assert found["tokens_run"] > result["prompt_tokens"] > aegis["tokens_run"]
        check_speed_up(result["speed_up"][name], found["seconds"], aegis["seconds"])
    assert sum(result["labels"].values()) == result["documents"] == settings["documents"]
    assert len(result["labels"]) >= 3
    template_share = result["template_tokens"] * result["documents"] / result["prompt_tokens"]
    assert 0.5 * template_share < aegis["prefix_tokens_share"] < template_share
    seconds = result["adapters"]["seconds"]
    check_speed_up(result["adapters"]["speed_up"], seconds["unmerged"], seconds["merged"])


class Labelled:
    """A recipe that gives the same labels in every run."""

    def __init__(self, *labels):
        self.labels = labels

    def run(self, texts):
        self.outcome = Outcome(list(self.labels[: len(texts)]))
        return one_hot(self.outcome.labels)


def test_documents_with_other_labels_are_counted_and_end_the_safety_benchmark():
    recipes = {"a": Labelled("safe", "O1", "O2", "O3"), "b": Labelled("safe", "O2", "O2", "O1")}
    with pytest.raises(DisagreementError, match="labels differ for 2 of 4 documents"):
        run_recipes(recipes, list("wxyz"), repeats=1)


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("safe", "safe"),
        (" safe\nO1", "safe"),
        ("unsafe\nO13", "O13"),
        ("unsafe\n O3, O1", "O3"),
        ("unsafe", "unknown"),
        ("unsafe\nO14", "unknown"),
        ("sound", "unknown"),
    ],
)
def test_plain_answers_are_read_by_the_published_rule(answer, label):
    assert published_label(answer) == label


def test_the_long_prompt_is_a_whole_one_and_as_long_as_the_published():
    template = parse_template(long_template(90), "the long prompt")
    assert long_template(90) == template.text
    assert len(template.text.split()) == pytest.approx(1_337, rel=0.1)
    assert prompts_of(template.text, ["one text"]) == [f"{template.head}one text{template.tail}"]
