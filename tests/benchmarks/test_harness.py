"""Benchmarks compare like with like, tell what disturbed them and never lose a result."""

import json
import re
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace

import numpy as np
import psutil
import pytest

from benchmarks import RESULTS, harness
from benchmarks.harness import DisagreementError, Run, Variant, noise, run_interleaved

ROOT = RESULTS.parents[1]
COMMITTED = sorted(RESULTS.glob("*.json"))
PAGES = [ROOT / "README.md", ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ANSWERS = np.array([[0.1], [0.9]])
BUSY = "import time; end = time.monotonic() + 60\nwhile time.monotonic() < end: pass"


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
    assert [{k: len(v) for k, v in kept.items()} for kept in (run.seconds, run.other_cores)] == [
        {"a": 2, "b": 2}
    ] * 2


@pytest.mark.parametrize(
    ("answers", "coarse", "message"),
    [
        ({"a": ANSWERS, "b": ANSWERS + 0.2}, {}, r"'b' differ from earlier ones by 0\.2"),
        ({"a": ANSWERS, "b": ANSWERS[::-1]}, {}, "'b' differ from earlier ones by"),
        ({"a": ANSWERS, "b": ANSWERS * np.nan}, {}, "'b' differ from earlier ones by"),
        ({"a": np.full((2, 1), 0.5)}, {}, "'a' vary by only 0 over the documents"),
        # What a coarse precision may differ does not widen it for exact ones.
        ({"a": ANSWERS, "half": ANSWERS + 0.15, "b": ANSWERS + 0.12}, {"half": 0.2}, "'b' differ"),
        ({"a": ANSWERS, "half": ANSWERS + 0.25}, {"half": 0.2}, r"by 0\.25, and 0\.2 "),
    ],
)
def test_answers_that_differ_or_are_constant_end_the_benchmark(answers, coarse, message):
    variants = [replace(v, tolerance=coarse.get(v.name, 0.0)) for v in variants_of([], **answers)]
    with pytest.raises(DisagreementError, match=message):
        run_interleaved(variants, 1, tolerance=0.1)


def test_what_fails_or_differs_is_noted_and_the_rest_is_timed_and_reported():
    variants = variants_of([], a=ANSWERS, b=ANSWERS + 0.5, c=ANSWERS, d=ANSWERS, e=ANSWERS)
    variants[2] = replace(variants[2], run=lambda: 1 / 0)
    variants[3] = replace(variants[3], warm_up=lambda: [][0])
    failures, reports = {}, []
    run = run_interleaved(
        variants, 2, 0.1, failures, lambda run: reports.append({*run.seconds, *failures})
    )
    reasons = {name: why.splitlines()[-1].partition(":")[0] for name, why in failures.items()}
    differs = "benchmarks.harness.DisagreementError"
    assert reasons == {"b": differs, "c": "ZeroDivisionError", "d": "IndexError"}
    assert {name: len(times) for name, times in run.seconds.items()} == {"a": 2, "b": 1, "e": 2}
    assert reports[:3] == [{"a", "d"}, {"a", "b", "d"}, {"a", "b", "c", "d"}]
    assert run.largest_difference == 0 and run.differences["b"] == pytest.approx(0.5)


def test_speed_up_is_the_ratio_of_medians_and_keeps_every_round():
    run = Run({"slow": [4.0, 9.0, 6.0], "fast": [2.0, 3.0, 1.0]}, {}, 0.0)
    rounds = {"ratio_of_medians": 3.0, "ratio_by_round": [2.0, 3.0, 6.0]}
    assert run.speed_up("fast", "slow") == {"against": "slow", **rounds}


@pytest.mark.parametrize(
    ("others", "load", "reason"),
    [
        ([0.1, 0.29], 4.0, None),
        ({"by name": [0.2, 0.2]}, 0.5, None),
        ([0.1, 0.4], 0.5, "other programs kept 0.25 of 4 cores busy"),
        (0.25, 0.5, "other programs kept 0.25 of 4 cores busy"),
        ({"by name": [0.2, 0.3]}, 0.5, "other programs kept 0.25 of 4 cores busy"),
        (0.0, 4.1, "the load average was 4.1 on 4 cores before it began"),
    ],
)
def test_a_disturbed_result_says_so_in_its_file_and_under_its_table(
    tmp_path, capsys, others, load, reason
):
    machine = {"cores": 4, "load_average": load, "short_name": "box"}
    result = {"machine": machine, "corpora": [{"variants": {"a": {"other_cores": others}}}]}
    assert noise(result) == [reason] * bool(reason)
    paths = [
        harness.finish("speed", result, Namespace(output=tmp_path / "new"), lambda _: "the table")
        for _ in range(2)  # none is overwritten
    ]
    assert len({*paths}) == 2 and all(re.match(r"speed-20.*-box", path.name) for path in paths)
    assert [json.loads(path.read_text())["noisy"] for path in paths] == [bool(reason)] * 2
    noisy = [f"  NOISY, not to be quoted: {reason}"] * bool(reason)
    printed = capsys.readouterr().out.splitlines()
    assert printed[: len(printed) // 2] == ["the table", *noisy, f"written to {paths[0]}"]


def test_what_another_process_takes_is_measured_and_what_this_one_started_is_not():
    def spin(process, seconds=0.3):
        spent = process.cpu_times().user
        while process.cpu_times().user < spent + seconds:
            time.sleep(0.05)

    start = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {BUSY!r}]"
    start += ", stdout=subprocess.DEVNULL); "
    command = [sys.executable, "-c", start + "print(child.pid)"]  # which ends: nobody's child
    stranger = psutil.Process(int(subprocess.check_output(command)))
    others, ours = harness.other_core_seconds(), harness.own_core_seconds()
    spin(stranger)
    assert harness.other_core_seconds() - others > 0.2
    assert harness.own_core_seconds() - ours < 0.2
    stranger.kill()
    with subprocess.Popen([sys.executable, "-c", start + "child.wait()"]) as compiler:
        ours = harness.own_core_seconds()
        while not (workers := psutil.Process(compiler.pid).children()):
            time.sleep(0.05)
        spin(workers[0])
        assert harness.own_core_seconds() - ours > 0.2
        workers[0].kill()
    assert harness.own_core_seconds() - ours > 0.2  # of those that have ended


# What is said of a result beside its figures, where a borrowed GPU left no time for another run.
TOLD = {
    "device-2026-11-26-nvidia-h200-bert": {"unfinished"},  # all ways were timed, idle time was not
    "device-2026-11-26-nvidia-h200-deberta": {"failures"},  # one peer's float16 differs by 0.07
}


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_no_committed_result_is_noisy(path):
    report = json.loads(path.read_text())
    steps = report.get("steps", [{"results": [report]}])  # a run on a GPU has several
    for result in (result for step in steps for result in step["results"]):
        if "cores" in result.get("machine", ()):  # others are arithmetic
            assert noise(result) == []
        wrong = ("noisy", "failures", "unfinished", "unreadable")
        assert {key for key in wrong if result.get(key)} == TOLD.get(path.stem, set())


def test_pages_name_and_pictures_show_committed_results():
    pattern = re.compile(r"\bresults/([\w.*-]+\.(?:json|png))")
    named = {name for page in PAGES for name in pattern.findall(page.read_text("utf-8"))}
    assert named and not {name for name in named if not list(RESULTS.glob(name))}
    stems = tuple(path.stem for path in COMMITTED)
    assert all(picture.stem.startswith(stems) for picture in RESULTS.glob("*.png"))
