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
from benchmarks.texts import LENGTHS, Lengths, texts_of_lengths
from benchmarks.work import forward_operations

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


def test_a_smoke_run_writes_a_complete_result_and_prints_a_table(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.throughput", "--smoke", "--output", str(tmp_path)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    [path] = tmp_path.iterdir()
    assert done.stdout.splitlines()[-1] == f"written to {path}"
    result = json.loads(path.read_text())
    assert set(result) == {"question", "finished", "machine", "versions", "settings", "corpora"}
    assert {"processor", "cores", "torch_threads", "short_name"} <= set(result["machine"])
    assert {"gpuclassify", "torch", "transformers"} <= set(result["versions"])
    assert result["settings"]["dtype"] == "float32"
    assert set(result["corpora"]) == {"web", "short"}
    for corpus in result["corpora"].values():
        check_corpus(corpus, result["settings"])


def check_corpus(corpus, settings):
    assert corpus["documents"] == settings["documents"]
    assert 0 <= corpus["largest_difference"] <= settings["tolerance"]
    assert corpus["pipeline_padded_tokens"] > corpus["real_tokens"]
    assert set(corpus["variants"]) == {"pipeline held", "pipeline per partition", "gpuclassify"}
    for found in corpus["variants"].values():
        assert len(found["seconds"]) == len(found["other_cores"]) == settings["repeats"]
        assert found["median_seconds"] == pytest.approx(np.median(found["seconds"]))
        rate = corpus["real_tokens"] / found["median_seconds"]
        assert found["real_tokens_per_second"] == pytest.approx(rate)
        share = (
            corpus["operations"] / found["median_seconds"] / corpus["peak_operations_per_second"]
        )
        assert 0 < found["share_of_peak"] == pytest.approx(share)
        assert share < 1
    medians = {name: found["median_seconds"] for name, found in corpus["variants"].items()}
    ratio = medians["pipeline held"] / medians["gpuclassify"]
    assert corpus["speed_up"]["pipeline held"]["ratio_of_medians"] == pytest.approx(ratio)
