"""A smoke run of the throughput benchmark writes a complete result."""

import pytest

from tests.benchmarks.checks import check_speed_up, check_times
from tests.benchmarks.cpu_ways import CPU_NAMES


def test_a_smoke_run_of_throughput_writes_a_complete_result(throughput_run):
    result, _, table = throughput_run
    assert set(result) == {
        *("question", "finished", "machine", "versions", "settings", "left_out", "corpora"),
        "noisy",
    }
    assert list(result["corpora"]) == ["short"]
    check_corpus(result["corpora"]["short"], result["settings"])
    assert "a job's time: plan" in table
    assert "the tokenizer alone gives at most" in table
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
    alone = corpus["tokenizer"]
    assert alone["tokens"] == corpus["real_tokens"]
    for name, count in (("documents", corpus["documents"]), ("tokens", alone["tokens"])):
        assert alone[f"{name}_per_second"] == pytest.approx(count / min(alone["seconds"]))
    assert corpus["job"]["tokens"] == corpus["real_tokens"]
    assert corpus["footprints"] == {}
