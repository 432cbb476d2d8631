"""Benchmarks compare like with like, tell what disturbed them and never lose a result."""

import json
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace

import numpy as np
import psutil
import pytest

from benchmarks.harness import (
    DisagreementError,
    Run,
    Variant,
    finish,
    noise,
    other_core_seconds,
    run_interleaved,
    write_result,
)

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


@pytest.mark.parametrize("answer", [ANSWERS + 0.2, ANSWERS[::-1], ANSWERS * np.nan])
def test_other_answers_end_the_benchmark(answer):
    with pytest.raises(DisagreementError, match="'b' differ from earlier ones by"):
        run_interleaved(variants_of([], a=ANSWERS, b=answer), 1, tolerance=0.1)


def with_tolerances(variants, **tolerances):
    return [replace(variant, tolerance=tolerances.get(variant.name, 0.0)) for variant in variants]


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


def result_of(*other_cores, cores=4, load=0.5):
    variants = {str(number): {"other_cores": found} for number, found in enumerate(other_cores)}
    return {"machine": {"cores": cores, "load_average": load}, "corpora": [{"variants": variants}]}


def test_a_result_is_noisy_if_other_programs_took_more_than_a_twentieth_of_the_cores():
    quiet = result_of([0.1, 0.29], 0.0, {"by name": [0.2, 0.2]})
    assert noise(quiet) == []
    for others in ([0.1, 0.4], 0.25, {"by name": [0.2, 0.3]}):
        assert noise(result_of([0.0], others)) == ["other programs kept 0.25 of 4 cores busy"]


def test_a_result_is_noisy_if_the_machine_was_loaded_before_it_began():
    assert noise(result_of([0.0], load=4.0)) == []
    [reason] = noise(result_of([0.0], load=4.1))
    assert reason == "the load average was 4.1 on 4 cores before it began"


@pytest.mark.parametrize("others", [0.0, 1.0])
def test_a_noisy_result_says_so_in_its_file_and_under_its_table(tmp_path, capsys, others):
    result = result_of([others])
    result["machine"]["short_name"] = "box"
    path = finish("speed", result, Namespace(output=tmp_path), lambda result: "the table")
    assert json.loads(path.read_text())["noisy"] == (others > 0)
    table, *noisy, last = capsys.readouterr().out.splitlines()
    assert (table, last) == ("the table", f"written to {path}")
    assert (
        noisy
        == ["  NOISY, not to be quoted: other programs kept 1.00 of 4 cores busy"][: int(others)]
    )


def test_what_another_process_takes_is_measured():
    busy = "import time; end = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    with subprocess.Popen([sys.executable, "-c", busy]) as other:
        before, started = other_core_seconds(), time.perf_counter()
        spent = psutil.Process(other.pid).cpu_times().user
        while psutil.Process(other.pid).cpu_times().user < spent + 0.3:
            time.sleep(0.05)
        found = other_core_seconds() - before
        other.kill()
    assert found > 0.2
    assert found < 2 * psutil.cpu_count() * (time.perf_counter() - started)


def test_results_are_never_overwritten(tmp_path):
    results = [{"machine": {"short_name": "box"}, "number": number} for number in range(3)]
    paths = [write_result("speed", result, tmp_path / "new") for result in results]
    assert [json.loads(path.read_text())["number"] for path in paths] == [0, 1, 2]
    assert all(path.name.startswith("speed-20") and "-box" in path.name for path in paths)
