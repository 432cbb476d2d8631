"""The command for machines with a GPU, here on a CPU, and what it does when something is wrong."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import BASELINE, SUBJECT, device
from benchmarks.device import ORIGINAL
from benchmarks.gpu import kit, run
from benchmarks.gpu.run import CUT_OFF, DONE, NOT_BEGUN, Step, all_steps
from benchmarks.ways import Choice, Way

ROOT = Path(__file__).parents[2]
WRITE = "import pathlib, sys; path = pathlib.Path(sys.argv[-1], 'r.json'); path.write_text({!r})"


def step_of(code, limit_seconds=60, **options):
    return Step("tests", ("-c", code), limit_seconds, **options)


@pytest.fixture
def run_steps(tmp_path, monkeypatch):
    """Runs steps in place of the command's, and returns the report's steps."""

    def run_them(*steps, options=()):
        monkeypatch.setattr(run, "all_steps", lambda device: list(steps))
        (tmp_path / "out").mkdir(exist_ok=True)
        before, status = set((tmp_path / "out").glob("*.json")), 0
        try:
            run.main(["--output", str(tmp_path / "out"), *options])
        except SystemExit as end:
            status = end.code
        [path] = set((tmp_path / "out").glob("*.json")) - before
        outcomes = json.loads(path.read_text())["steps"]
        assert status == any(outcome["status"] != DONE for outcome in outcomes)
        return outcomes

    return run_them


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_report_has_every_step_with_its_result(tmp_path):
    arguments = ["--device", "cpu", "--parts", "speed", "--limit-seconds", "560"]
    run.main([*arguments, "--output", str(tmp_path)])
    report = json.loads(next(tmp_path.glob("gpu-*.json")).read_text())
    steps = [step.command for step in all_steps("cpu") if step.part == "speed"]
    assert [step["command"] for step in report["steps"]] == steps
    assert {(step["status"], step["exit_code"]) for step in report["steps"]} == {(DONE, 0)}
    results = [result for step in report["steps"] for result in step["results"]]
    assert not any("unfinished" in result or result.get("failures") for result in results)
    speed, deberta, rest, questions, original = results
    assert speed["corpora"]["web"]["largest_difference"] < 1e-4
    assert f"{SUBJECT} on cudf frames" in speed["left_out"]
    assert questions["choice"]["largest_difference"] < 1e-4
    assert 0 < rest["idle"]["idle_share"] < 1 and deberta["settings"]["model"] == "deberta"
    assert ORIGINAL in original["corpora"]["web"]["searches"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_way_or_a_part_that_fails_loses_no_other(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise MemoryError("too large")

    def choose_more(options, directory, choose=device.choose):
        baseline, *_, subject = choose(options, directory).ways
        searched = Way("peer", fail, is_searched=True)
        return Choice((baseline, searched, Way("other", fail), subject))

    monkeypatch.setattr(device, "choose", choose_more)
    monkeypatch.setattr(device, "tokenizer_speed", fail)
    with pytest.raises(SystemExit, match="failed: peer, other, tokens"):
        device.main(["--smoke", "--repeats", "1", "--output", str(tmp_path)])
    [path] = tmp_path.iterdir()
    result = json.loads(path.read_text())
    assert "unfinished" not in result and set(result["failures"]) == {"peer", "other", "tokens"}
    assert list(result["corpora"]["web"]["variants"]) == [BASELINE, SUBJECT]


def test_a_step_that_fails_or_is_late_stops_no_other(run_steps, tmp_path):
    outcomes = run_steps(
        step_of("print('lost'); raise SystemExit(3)"),
        step_of("import time; print('begun', flush=True); time.sleep(99)", 3),
        step_of(WRITE.format('{"noisy": tr'), writes=True),
        step_of("pass", writes=True),
        step_of("raise SystemExit(1)", advises=True),
        step_of("import benchmarks, gpuclassify; print('last')"),
    )
    lost = "failed: it has not written its result"
    statuses = ["failed with 3", "ended after its 3 s", lost, lost, DONE, DONE]
    assert [outcome["status"] for outcome in outcomes] == statuses
    assert "r.json: Expecting value" in outcomes[2]["results"][0]["unreadable"]
    assert [outcomes[number]["last_lines"][-1] for number in (0, -1)] == ["lost", "last"]
    assert "begun\n" in next(tmp_path.glob("out/*.log")).read_text()


def test_what_a_step_has_written_is_reported_while_it_runs(run_steps, monkeypatch, tmp_path):
    """So that it outlives the end of the machine."""
    monkeypatch.setattr(run, "LOOK_SECONDS", 0.2)
    seen = tmp_path / "seen"
    looks = (
        f"import pathlib, time; seen = pathlib.Path({str(seen)!r})\n"
        f"reports = pathlib.Path({str(tmp_path / 'out')!r})\n"
        "while not seen.exists() and time.sleep(0.1) is None:\n"
        "    for report in reports.glob('*.json'):\n"
        "        if 'first way' in report.read_text(): seen.write_text(report.read_text())"
    )
    [outcome] = run_steps(step_of(WRITE.format('{"is": "first way"}') + "\n" + looks, writes=True))
    assert outcome["status"] == DONE
    assert json.loads(seen.read_text())["steps"][-1]["status"] == "running"


def test_the_next_call_goes_on_with_what_is_not_begun_and_keeps_what_is_done(
    run_steps, tmp_path, monkeypatch
):
    journal = tmp_path / "journal"

    def note(word, code=0, limit_seconds=60):
        body = f"open({str(journal)!r}, 'a').write({word!r}); raise SystemExit({code})"
        return step_of(body, limit_seconds)

    steps = [note("done "), note("fails ", 1), note("long ", limit_seconds=1_200)]
    statuses = [outcome["status"] for outcome in run_steps(*steps)]
    assert statuses == [DONE, "failed with 1", NOT_BEGUN]
    more = ["--limit-seconds", "700"]
    second = run_steps(*steps, options=more)
    assert [outcome["status"] for outcome in second] == [DONE, DONE, "failed with 1"]
    assert journal.read_text() == "done fails " + "long fails "
    monkeypatch.setattr(run, "name_gpus", lambda: "another GPU")
    run_steps(*steps, options=more)
    run_steps(*steps, options=[*more, "--again"])
    assert journal.read_text().endswith("long fails " + 2 * "done fails long ")


def test_a_call_ends_within_its_limit(run_steps):
    sleeper, started = "import time; time.sleep(99)", time.monotonic()
    steps = (step_of(sleeper, 6), step_of(sleeper + " ", 60))
    outcomes = run_steps(*steps, options=["--limit-seconds", "4"])
    assert time.monotonic() - started < 30
    assert [outcome["status"] for outcome in outcomes] == [CUT_OFF, NOT_BEGUN]


def test_steps_are_in_order_and_each_is_possible():
    steps = all_steps("cuda")
    first = ["probe", "probe", "tests", "tests", "speed", "speed", "cudf"]
    assert [step.part for step in steps[:7]] == first
    assert sum(step.limit_seconds for step in steps[2:5]) < 540
    for step in steps:
        if step.arguments[1] == "benchmarks.device":
            assert step.writes and device.parse_options(step.arguments[2:])
        names = [name.removeprefix("--ignore=") for name in step.arguments if "tests/" in name]
        assert all((ROOT / name).exists() for name in names)


def test_the_command_starts_where_no_package_is_installed():
    command = [sys.executable, "-S", "-m", "benchmarks.gpu.run", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "--limit-seconds" in done.stdout, done.stderr


def test_the_base_of_the_kit_has_what_tests_and_clusters_need(tmp_path, monkeypatch):
    packed = {}
    pack = lambda stem, wanted, python: packed.update({stem.name: wanted}) or []  # noqa: E731
    monkeypatch.setattr(kit, "pack", pack)
    kit.main(["pack", str(tmp_path)])
    names = {kit: {line.partition("==")[0] for line in lines} for kit, lines in packed.items()}
    assert {"pytest", "pytest-timeout", "hypothesis", "dask-cuda", "rmm-cu13"} <= names["base"]
    assert "cudf-cu13" in names["cudf"]
    assert not {"triton", "nvidia-nvjitlink", *names["base"]} & names["cudf"]


def test_why_a_test_failed_is_printed_before_the_run_ends(tmp_path):
    file = tmp_path / "test_one.py"
    file.write_text("import os\ndef test_a():\n    assert 1 == 2\ndef test_b():\n    os._exit(3)")
    command = [sys.executable, "-m", "pytest", "-p", "benchmarks.gpu.failures", str(file)]
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )

    assert done.returncode == 3
    assert "test_a failed in call:" in done.stdout and "assert 1 == 2" in done.stdout
