"""Benchmarks compare like with like, count arithmetic rightly and never lose a result."""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib import image
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks import device, plots, scaling, suite, throughput
from benchmarks.crossfit_original import crossfit_partition
from benchmarks.footprint import Request, measure_footprint
from benchmarks.harness import (
    DisagreementError,
    Run,
    Variant,
    disturbance,
    run_interleaved,
    write_result,
)
from benchmarks.job import CLASSIFY, READ, WRITE, Timeline, measure_job
from benchmarks.models import SHAPES, TINY_SIZES, write_model
from benchmarks.names import BASELINE, SUBJECT
from benchmarks.parts import PARTS
from benchmarks.safety import (
    Outcome,
    long_template,
    one_hot,
    prompts_of,
    published_label,
    run_recipes,
)
from benchmarks.texts import LENGTHS, Lengths, texts_of_lengths
from benchmarks.ways import (
    TOLERANCES,
    Way,
    _gpu_ways,
    choose_ways,
    distinct_sizes,
    search_batches,
)
from benchmarks.work import _kernels, forward_operations, matmul_peaks
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


def with_tolerances(variants, **tolerances):
    return [replace(variant, tolerance=tolerances.get(variant.name, 0.0)) for variant in variants]


def test_a_coarse_precision_has_a_tolerance_of_its_own():
    variants = variants_of([], exact=ANSWERS, half=ANSWERS + 0.05, again=ANSWERS - 0.001)
    run = run_interleaved(with_tolerances(variants, half=0.1), 2, tolerance=0.01)
    assert run.differences == pytest.approx({"exact": 0, "half": 0.05, "again": 0.001})
    assert run.largest_difference == pytest.approx(0.051)


def test_a_coarse_precision_does_not_widen_what_exact_ones_may_differ():
    variants = variants_of([], exact=ANSWERS, half=ANSWERS + 0.05, other=ANSWERS + 0.02)
    with pytest.raises(
        DisagreementError, match=r"'other' differ from earlier ones by 0\.02, and 0\.01"
    ):
        run_interleaved(with_tolerances(variants, half=0.1), 1, tolerance=0.01)
    with pytest.raises(
        DisagreementError, match=r"'half' differ from earlier ones by 0\.05, and 0\.04"
    ):
        run_interleaved(with_tolerances(variants, half=0.04), 1, tolerance=0.03)


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


def test_only_cores_that_a_run_wanted_are_missed():
    machine = {"cores": 4, "torch_threads": 2}
    assert disturbance([{"other_cores": [0.1, 2.0]}], machine) == []
    [line] = disturbance([{"other_cores": [0.1, 2.5]}, {"other_cores": [0.3]}], machine)
    assert "up to 2.5 cores busy" in line


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


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """The directory of a tiny BERT."""
    shape = replace(SHAPES["bert"], **TINY_SIZES)
    return str(write_model(tmp_path_factory.mktemp("tiny") / "model", shape))


@pytest.fixture(scope="module")
def some_texts(tiny_model):
    """Forty texts of very different lengths, some of them too long for the model."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    return texts_of_lengths(Lengths(60, 1.2).sample(40), tokenizer)


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


CPU_NAMES = [
    "pipeline held",
    "pipeline per partition",
    "pipeline held, batch 256",
    "sorted batches of 32",
    "Curator's stages, batch 256",
    "Curator's stages, batch 32",
    "Curator's stages, best batch",
    "crossfit-original",
    "loader=crossfit",
    "gpuclassify",
]


def test_the_baseline_comes_first_and_gpuclassify_last(tiny_model):
    names = [way.name for way in choose_ways(asked(), tiny_model).ways]
    assert names == CPU_NAMES
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
    assert [way.name for way in choice.ways] == [n for n in CPU_NAMES if "crossfit" not in n]


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


def test_a_search_finds_the_fastest_batch_size_of_those_that_differ(frame):
    tried = []

    def scores(frame, directory, device, batch_size):
        tried.append(batch_size)
        time.sleep(abs(batch_size - 30) / 500)
        return batch_size

    fixed = Way("fixed", scores)
    ways, found = search_batches([fixed, Way("tuned", scores, is_searched=True)], frame, "", "cpu")
    assert set(tried) == {16, 32}  # partitions of 20 texts
    assert found["tuned"]["batch_size"] == 32
    assert set(found["tuned"]["seconds_of_one_layer"]) == {16, 32}
    assert ways[0] is fixed
    assert ways[1].scores(frame, "", "cpu") == 32


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(1, [16]), (16, [16]), (17, [16, 32]), (64, [16, 32, 64]), (999, [16, 32, 64])],
)
def test_batch_sizes_that_hold_a_whole_partition_are_one(rows, sizes):
    assert distinct_sizes((16, 32, 64), rows) == sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kernel_of_the_peak_multiplies(dtype):
    weight, states = torch.randn(64, 32).to(dtype), torch.randn(8, 32).to(dtype)
    kernels = _kernels(weight)
    assert {"linear"} <= set(kernels) <= {"linear", "prepacked"}
    expected = states.double() @ weight.double().T
    for multiply in kernels.values():
        assert torch.allclose(multiply(states).double(), expected, atol=0.2, rtol=0.02)


def test_peaks_are_told_by_kernel():
    peaks = matmul_peaks(replace(SHAPES["bert"], **TINY_SIZES), "cpu")
    assert set(peaks) == set(_kernels(torch.ones(4, 4)))
    assert all(1e6 < speed < 1e15 for speed in peaks.values())


def test_time_of_a_job_goes_to_the_phase_that_spends_it(tmp_path):
    def delay(partition):
        time.sleep(0.2)
        return partition

    dd.from_pandas(pd.DataFrame({"text": list("abcd")}), npartitions=2).to_parquet(tmp_path / "in")
    timeline = Timeline()
    with timeline, dask.config.set(scheduler="synchronous"):
        frame = dd.read_parquet(tmp_path / "in")
        for function, options in [
            (timeline.mark, {"phase": CLASSIFY}),
            (delay, {}),
            (timeline.mark, {"phase": WRITE}),
        ]:
            frame = frame.map_partitions(function, meta=frame._meta, **options)
        frame.to_parquet(tmp_path / "out")
        timeline.enter(WRITE)
    seconds = timeline.seconds
    assert 0.4 <= seconds[CLASSIFY] < 0.4 + seconds[CLASSIFY] / 2
    assert seconds[READ] > 0
    assert seconds[WRITE] > 0


def test_a_job_tells_what_its_tokens_and_its_time_went_to(tiny_model, some_texts):
    found = measure_job(some_texts, 2, tiny_model, "cpu")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    lengths = [min(len(ids), 512) for ids in tokenizer(some_texts)["input_ids"]]
    assert found["tokens"] == sum(lengths)
    assert found["padding"] == found["padded_tokens"] / found["tokens"] >= 1
    assert list(found["shares"]) == ["plan", "read", "wait_for_tokens", "model", "write", "rest"]
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert all(share > 0 for share in found["shares"].values())
    assert found["tokenize_seconds"] > 0


MEMORY = """
import numpy as np, psutil
from benchmarks.footprint import peak_resident_bytes, resident_bytes

before = resident_bytes()
assert abs(before / psutil.Process().memory_info().rss - 1) < 0.05
block = np.ones(25_000_000)
most = resident_bytes()
assert abs((most - before) / block.nbytes - 1) < 0.1
del block
assert resident_bytes() < 0.9 * most
assert peak_resident_bytes() > 0.99 * most  # the system counts pages in lots
"""


def test_memory_is_what_the_system_says():
    # In a process of its own: in this one other tests' memory comes and goes.
    folder = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", MEMORY], check=True, cwd=folder, timeout=120)


def test_a_footprint_is_that_of_a_process_of_its_own(tiny_model, some_texts):
    ways = choose_ways(asked(variants=[SUBJECT]), tiny_model)
    options = asked(footprint="main", partitions=2, threads=1)
    setting = throughput.Setting(options, SHAPES["bert"], tiny_model, "", ways)
    block = np.ones(50_000_000)  # 400 MB of this process have no part in it
    footprints = throughput._footprints(some_texts, ways.ways[1:], setting)
    assert list(footprints) == ["gpuclassify"]
    found = footprints["gpuclassify"]
    assert found["resident_bytes_before"] < found["peak_resident_bytes"]
    assert found["peak_resident_bytes"] - found["resident_bytes_before"] < block.nbytes
    assert found["first_documents"] == 8
    assert 0 < found["first_run_seconds"] < found["first_seconds"]
    loading = found["first_seconds"] - found["first_run_seconds"]
    assert found["first_load_seconds"] == pytest.approx(loading)
    [line] = throughput._footprint_lines({"footprints": footprints})
    assert line.startswith("  gpuclassify in a new process:")


def test_the_last_words_of_a_failed_process_are_told(some_texts):
    way = Way("no way", scores=len)
    with pytest.raises(RuntimeError, match=r"'no way' ended with 1: (.|\n)*TypeError: len"):
        measure_footprint(Request(way, tuple(some_texts), 2, "", "cpu", 1))


@pytest.fixture(scope="module")
def smoke_result(tmp_path_factory):
    """What a benchmark's smoke run writes, and where."""

    def run(question, *options):
        folder = tmp_path_factory.mktemp(question)
        command = [sys.executable, "-m", f"benchmarks.{question}", "--smoke", *options]
        done = subprocess.run(
            [*command, "--output", str(folder)],
            cwd=Path(__file__).parents[1],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        [path] = folder.iterdir()
        *table, last = done.stdout.splitlines()
        assert last == f"written to {path}"
        result = json.loads(path.read_text())
        assert result["question"] == question
        assert {"processor", "cores", "torch_threads", "short_name"} <= set(result["machine"])
        assert {"gpuclassify", "torch", "transformers"} <= set(result["versions"])
        assert result["settings"]["dtype"] == "float32"
        assert result["settings"]["repeats"] == 2
        return result, path, "\n".join(table)

    return run


@pytest.fixture(scope="module")
def throughput_run(smoke_result):
    return smoke_result("throughput", "--peers", "--lengths", "short", "--footprint", "none")


@pytest.fixture(scope="module")
def scaling_run(smoke_result):
    return smoke_result("scaling")


def check_times(found, settings):
    assert len(found["seconds"]) == len(found["other_cores"]) == settings["repeats"]
    assert found["median_seconds"] == pytest.approx(np.median(found["seconds"]))


def check_speed_up(speed_up, slow, fast):
    ratio = np.median(slow) / np.median(fast)
    assert speed_up["ratio_of_medians"] == pytest.approx(ratio)


def test_a_smoke_run_of_throughput_writes_a_complete_result(throughput_run):
    result, _, table = throughput_run
    assert set(result) == {
        *("question", "finished", "machine", "versions", "settings", "left_out", "corpora"),
    }
    assert list(result["corpora"]) == ["short"]
    check_corpus(result["corpora"]["short"], result["settings"])
    assert throughput.table(result) == table
    assert "a job's time: plan" in table
    assert "tokens run for each real one" in table


def check_corpus(corpus, settings):
    assert corpus["documents"] == settings["documents"]
    assert 0 <= corpus["largest_difference"] <= settings["tolerance"]
    assert corpus["pipeline_padded_tokens"] > corpus["real_tokens"]
    assert list(corpus["variants"]) == CPU_NAMES
    peak = corpus["peak_operations_per_second"]
    kernels = corpus["peaks"]["float32"]
    assert all(len(speeds) == 2 for speeds in kernels.values())  # before and after
    assert peak == max(max(speeds) for speeds in kernels.values())
    for found in corpus["variants"].values():
        check_times(found, settings)
        rate = corpus["real_tokens"] / found["median_seconds"]
        assert found["real_tokens_per_second"] == pytest.approx(rate)
        share = corpus["operations"] / found["median_seconds"] / peak
        assert 0 < found["share_of_peak"] == pytest.approx(share)
        assert share < 1
    seconds = {name: found["seconds"] for name, found in corpus["variants"].items()}
    speed_up = corpus["speed_up"]["pipeline held"]
    check_speed_up(speed_up, seconds["pipeline held"], seconds["gpuclassify"])
    assert set(corpus["searches"]) == {"Curator's stages, best batch", "crossfit-original"}
    assert all(found["batch_size"] == 16 for found in corpus["searches"].values())
    assert corpus["job"]["tokens"] == corpus["real_tokens"]
    assert corpus["footprints"] == {}


def test_a_smoke_run_of_scaling_writes_a_complete_result(scaling_run):
    result, _, table = scaling_run
    settings, partitions, rows = result["settings"], result["partitions"], result["rows"]
    assert partitions["partitions"] == {"one partition": 1, "small partitions": 4}
    names = ["pipeline held", "sorted batches of 32", "Curator's stages, batch 32", "gpuclassify"]
    assert list(partitions["variants"]) == names
    for found in partitions["variants"].values():
        check_times(found["one partition"], settings)
        small = found["small partitions"]["median_seconds"]
        ratio = small / found["one partition"]["median_seconds"]
        assert found["time_ratio"] == pytest.approx(ratio)
    assert rows["documents"] == [3, 12]
    assert rows["token_ratio"] == rows["tokens"][1] / rows["tokens"][0] > 2
    assert list(rows["variants"]) == ["pipeline held", "gpuclassify"]
    for found in rows["variants"].values():
        few, many = (times["median_seconds"] for times in found["times"])
        assert found["time_ratio"] == pytest.approx(many / few)
    assert scaling.table(result) == table
    assert "12 documents in partitions of 3 rows instead of one" in table


def is_drawn(path):
    """Whether a picture has light paper and dark ink, and nothing runs over its edges."""
    pixels = image.imread(path)[..., :3].mean(axis=2)
    edges = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    return path.stat().st_size > 10_000 and pixels.min() < 0.2 and edges.min() == 1


def test_results_are_drawn(throughput_run, scaling_run, tmp_path, capsys):
    (_, first, _), (_, second, _) = throughput_run, scaling_run
    paths = plots.main([str(first), str(second), "--output", str(tmp_path / "new")])
    names = [f"{first.stem}-ratios.png", f"{first.stem}-peak.png", f"{second.stem}-scaling.png"]
    assert [path.name for path in paths] == names
    assert all(map(is_drawn, paths))
    assert capsys.readouterr().out.count("drawn to") == 3


def test_a_picture_tells_machine_precision_and_dates():
    result = {
        "machine": {"processor": "AMD EPYC", "torch_threads": 1},
        "settings": {"dtype": "float32"},
        "finished": "2026-11-21T10:00:00+00:00",
    }
    assert plots.subtitle([result]) == "AMD EPYC, 1 thread · float32 · 2026-11-21"
    gpu = {
        "machine": {"processor": "AMD EPYC", "torch_threads": 2, "gpu": "NVIDIA H100"},
        "settings": {"dtype": "bfloat16, float32"},
        "finished": "2026-11-20T10:00:00+00:00",
    }
    both = (
        "NVIDIA H100 · AMD EPYC, 1 thread · bfloat16, float32 · float32 · 2026-11-20 · 2026-11-21"
    )
    assert plots.subtitle([gpu, result]) == both


@pytest.mark.parametrize("form", sorted(suite.FORMS))
def test_every_command_of_the_suite_can_be_given(form, tiny_model):
    modules = {"throughput": throughput, "scaling": scaling, "device": device}
    for question, arguments, _ in suite.FORMS[form]:
        options = modules[question].parse_options(arguments)
        if question == "throughput" and options.device == "cpu":
            names = [way.name for way in choose_ways(options, tiny_model).ways]
            assert set(options.variants) <= set(names)


def test_the_suite_ends_with_a_short_table(throughput_run, scaling_run):
    results = [throughput_run[0], scaling_run[0]]
    head, line, losses, growth = suite.summary(results).splitlines()
    assert "other way" in head
    found = results[0]["corpora"]["short"]
    others = {name: ratio["ratio_of_medians"] for name, ratio in found["speed_up"].items()}
    fastest = min(others, key=others.get)
    assert line.split()[:4] == ["bert", "short,", "12", "documents"]
    assert line.endswith(f"{others['pipeline held']:.2f}x{others[fastest]:8.2f}x {fastest}")
    loss = results[1]["partitions"]["variants"]["gpuclassify"]["time_ratio"] - 1
    assert losses.endswith(f"gpuclassify {loss:+.0%}")
    assert f"take {results[1]['rows']['variants']['gpuclassify']['time_ratio']:.2f} times" in growth


@pytest.mark.parametrize("model", PARTS)
def test_a_smoke_run_of_parts_leaves_each_out_and_answers_stay(smoke_result, model):
    result, _, printed = smoke_result("parts", "--model", model, "--lengths", "short")

    corpus = result["corpora"]["short"]
    names = ["all parts", *(name for name, _, _ in PARTS[model])]
    assert list(corpus["variants"]) == names
    assert 0 < corpus["largest_difference"] < 1e-4  # some rounding: not all ran the same code
    assert all(name in printed for name in names)
    for found in corpus["variants"].values():
        assert found["time_of_all_parts"]["ratio_of_medians"] > 0


def test_a_smoke_run_of_several_writes_a_complete_result(smoke_result):
    result, _, _ = smoke_result("several")
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
    result, _, _ = smoke_result("safety")
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
