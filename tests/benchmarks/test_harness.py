"""Benchmarks compare like with like, tell what disturbed them and never lose a result."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.harness import (
    DisagreementError,
    Run,
    Variant,
    disturbance,
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
