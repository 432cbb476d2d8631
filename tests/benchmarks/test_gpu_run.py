"""The command for machines with a GPU, here on a CPU, and what it does when something is wrong."""

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import BASELINE, SUBJECT, device
from benchmarks.device import ORIGINAL, PEERS, covered
from benchmarks.gpu import kit, probe, run
from benchmarks.gpu.run import DONE, PARTS, Step, attempt, parse_options, steps_of
from benchmarks.ways import _gpu_ways
from tests.processes import is_running, wait_until

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """Report, log and printed lines of the benchmarks' part without a GPU."""
    folder = tmp_path_factory.mktemp("results")
    arguments = [
        "--device",
        "cpu",
        "--parts",
        "speed",
        "--output",
        folder,
        "--limit-seconds",
        "560",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.run", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(folder.iterdir())) == 2
    report = json.loads(next(folder.glob("gpu-*.json")).read_text())
    return report, next(folder.glob("gpu-*.log")).read_text(), done.stdout.splitlines()


def test_the_report_has_every_step_with_its_result(rehearsal):
    report, _, _ = rehearsal
    steps = steps_of("speed", parse_options(["--device", "cpu"]))
    assert [step["command"] for step in report["steps"]] == [" ".join(s.arguments) for s in steps]
    assert {(step["status"], step["exit_code"]) for step in report["steps"]} == {(DONE, 0)}
    results = [result for step in report["steps"] for result in step["results"]]
    speed, rest, deberta, original = results
    assert speed["versions"]["torch"] == torch.__version__
    assert {"name", "memory_bytes", "driver", "driver_cuda"} <= set(speed["gpu"])
    assert speed["corpora"]["web"]["largest_difference"] < 1e-4
    assert f"{SUBJECT} on cudf frames" in speed["left_out"]
    assert 0 < rest["idle"]["idle_share"] < 1
    assert rest["tokens"]["host"]["tokens"] == speed["corpora"]["web"]["real_tokens"]
    assert deberta["settings"]["model"] == "deberta"
    assert ORIGINAL in original["corpora"]["web"]["searches"]


def test_the_log_has_all_that_the_steps_print_and_the_console_the_end(rehearsal):
    report, log, printed = rehearsal
    for name in (BASELINE, f"{BASELINE}, float32, best batch", *PEERS, ORIGINAL, SUBJECT):
        assert any(line.startswith(f"  {name}  ") for line in log.splitlines()), name
    assert "idle after warm-up" in log
    *_, log_line, json_line = printed
    assert log_line.startswith("written to ") and log_line.endswith(".log")
    assert json_line.startswith("written to ") and json_line.endswith(".json")
    for line, step in zip(printed[-2 - len(report["steps"]) : -2], report["steps"], strict=True):
        assert line.endswith(f"done: {step['command']}")


def test_a_step_that_fails_or_is_late_stops_no_other(tmp_path, capsys, monkeypatch):
    steps = {
        "probe": [Step(("-c", "print('lost'); raise SystemExit(3)"), 60)],
        "tests": [Step(("-c", "import time; print('begun', flush=True); time.sleep(99)"), 3)],
        "speed": [Step(("-m", "no_such_module"), 60)],
        "cudf": [Step(("-c", "print('last')"), 60)],
    }
    monkeypatch.setattr(run, "steps_of", lambda part, options: steps[part])
    monkeypatch.setattr(run, "LEAST_SECONDS", 0)
    with pytest.raises(SystemExit):
        run.main(["--output", str(tmp_path)])
    report = json.loads(next(tmp_path.glob("*.json")).read_text())
    statuses = ["failed with 3", "ended after its 3 s", "failed with 1", DONE]
    assert [step["status"] for step in report["steps"]] == statuses
    assert [step["exit_code"] for step in report["steps"]] == [3, None, 1, 0]
    assert [step["last_lines"][-1] for step in report["steps"][::3]] == ["lost", "last"]
    assert "begun\n" in next(tmp_path.glob("*.log")).read_text()
    assert "failed with 3: -c print('lost')" in capsys.readouterr().out


def test_what_no_time_is_left_for_is_not_begun(tmp_path):
    outcome = attempt(Step(("-c", ""), 60), sys.executable, tmp_path / "log", time.monotonic())
    assert outcome["status"] == "not begun: no time was left"


def test_a_late_step_leaves_no_process_behind(tmp_path):
    body = (
        "import subprocess, sys, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']);"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); time.sleep(99)"
    )
    attempt(Step(("-c", body), 12), sys.executable, tmp_path / "log", time.monotonic() + 60)
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_running(pid))  # a moment after the signal


@pytest.mark.parametrize("part", PARTS)
def test_every_step_of_a_part_can_be_given(part):
    for arguments, _, writes in steps_of(part, parse_options(["--device", "cuda"])):
        if arguments[1] == "benchmarks.device":
            assert writes
            device.parse_options(arguments[2:])
        paths = [
            argument.removeprefix("--ignore=") for argument in arguments if "tests/" in argument
        ]
        assert all((ROOT / path).exists() for path in paths)


def test_the_parts_measure_all_that_there_is():
    options = parse_options(["--device", "cuda"])
    steps = [step for part in PARTS for step in steps_of(part, options)]
    asked = [
        device.parse_options(s.arguments[2:]) for s in steps if "benchmarks.device" in s.arguments
    ]
    assert {part for some in asked for part in some.parts} == set(device.PARTS)
    assert {"bert", "deberta"} == {some.model for some in asked}


def test_the_command_starts_where_no_package_is_installed():
    command = [sys.executable, "-S", "-m", "benchmarks.gpu.run", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "--limit-seconds" in done.stdout, done.stderr


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """A kit of one wheel, in parts of 2 kB."""
    wheels, info = tmp_path / "wheels", "carried-1.0.dist-info"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", f"text = {'x' * 20_000!r}\n")
        wheel.writestr("carried.safetensors", bytes(1_000))
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "carried.py,,\ncarried.safetensors,,\n")
    kit.drop_weights(Path(wheel.filename))
    monkeypatch.setattr(kit, "PART_BYTES", 2_000)
    parts = kit.cut(wheels, tmp_path / "parts" / "base")
    assert len(parts) > 3
    assert all(part.stat().st_size <= 2_000 for part in parts)
    return parts


def test_a_kit_is_installed_beside_what_is_there(packed, tmp_path):
    for _ in range(2):  # again on a machine that still has it
        kit.install(packed[0].parent, "base", tmp_path / "environment")
    shown = "import carried, torch; print(len(carried.text), torch.__version__)"
    python = str(kit.python_of(tmp_path / "environment"))
    done = subprocess.run([python, "-c", shown], capture_output=True, text=True)
    assert done.stdout.split() == ["20000", torch.__version__], done.stderr
    assert not list(tmp_path.rglob("*.safetensors"))
    missing = subprocess.run([sys.executable, "-c", "import carried"], capture_output=True)
    assert missing.returncode == 1


def test_a_kit_with_a_part_that_has_not_arrived_is_not_installed(packed, tmp_path):
    packed[3].unlink()
    with pytest.raises(FileNotFoundError, match=f"{len(packed) - 1} of {len(packed)} parts"):
        kit.install(packed[0].parent, "base", tmp_path / "environment")


def test_the_probe_finds_everything_on_a_cpu_and_goes_on_after_a_part_that_fails(
    tmp_path, monkeypatch
):
    def copies(device, sizes):
        raise RuntimeError("no copies here")

    monkeypatch.setattr(probe, "copies", copies)
    monkeypatch.setattr(probe, "CPU", probe.Sizes(64, 2**16, 2, 1))
    path = probe.main(["--device", "cpu", "--output", str(tmp_path)])
    found = json.loads(path.read_text())
    assert "no copies here" in found["copies"]["error"]
    assert found["machine"]["versions"]["torch"] == version("torch")
    assert all(rate > 0 for rate in found["products"].values())
    assert [len(times) for times in found["fresh_shapes"].values()] == [8, 8]
    assert "window_size" in found["varlen"]["parameters"]
    if shutil.which("g++"):
        assert found["flex"]["largest_difference"] < 1e-4


def test_the_peers_that_are_named_are_ways_of_a_gpu(sequence_classifier):
    asked = Namespace(device="cpu", peers=True, variants=[])
    names = {way.name for way in _gpu_ways(asked, str(sequence_classifier()))}
    assert {BASELINE, SUBJECT, ORIGINAL, *PEERS} <= names


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=20))
def test_time_that_intervals_cover_is_counted_once(starts_and_lengths):
    intervals = [(float(start), float(start + length)) for start, length in starts_and_lengths]
    seconds = np.zeros(100, dtype=bool)
    for start, end in intervals:
        seconds[int(start) : int(end)] = True
    reached = np.flatnonzero(seconds)
    assert covered(intervals) == (seconds.sum(), reached[-1] + 1 - reached[0])
