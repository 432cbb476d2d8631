"""The script of the GPU benchmark, here on a CPU, and what it does when something goes wrong."""

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import limited
from benchmarks.device import ORIGINAL, PARTS, PEERS, covered, parse_options
from benchmarks.limited import DONE, Command
from benchmarks.names import BASELINE, SUBJECT
from benchmarks.suite import FORMS, GPU_SMOKE
from benchmarks.ways import _gpu_ways

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """What a run of the script without a GPU writes and prints."""
    folder = tmp_path_factory.mktemp("results")
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks/gpu.sh"), "--smoke", "--device", "cpu", "--output", folder],
        cwd=folder,
        env=os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_the_script_examines_the_machine_and_ends_with_a_short_table(script):
    folder, printed = script
    assert "Hub access" in printed  # doctor
    *_, table = printed.split("\n\n")
    *lines, last = table.splitlines()
    assert last == f"written to {next(folder.glob('gpu-*.json'))}"
    assert len(lines) < 20
    for name in (BASELINE, f"{BASELINE}, float32, best batch", *PEERS, ORIGINAL, SUBJECT):
        assert any(line.startswith(f"  {name}  ") for line in lines), name
    assert "idle after warm-up" in table


def test_the_scripts_file_has_machine_driver_versions_and_all_results(script):
    folder, _ = script
    report = json.loads(next(folder.glob("gpu-*.json")).read_text())
    assert {"name", "memory_bytes", "driver", "driver_cuda"} <= set(report["gpu"])
    assert report["gpu"]["versions"]["torch"] == torch.__version__
    [outcome], [result] = report["outcomes"], report["results"]
    assert outcome["status"] == DONE
    assert result == json.loads((folder / outcome["path"]).read_text())
    corpus = result["corpora"]["web"]
    assert corpus["largest_difference"] < 1e-4
    assert set(corpus["searches"]) == {
        f"{BASELINE}, float32, best batch", "Curator's stages, best batch", ORIGINAL,
    }  # fmt: skip
    assert 0 < result["idle"]["idle_share"] < 1
    assert result["tokens"]["host"]["tokens"] == corpus["real_tokens"]
    assert {"memory", f"{SUBJECT} on cudf frames"} <= set(result["left_out"])


def test_one_benchmark_that_fails_or_is_late_stops_no_other(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(limited, "LEAST_SECONDS", 0.0)
    commands = [Command("no_such_one", ()), Command("throughput", (), limit_seconds=0.3)]
    options = Namespace(limit_seconds=200.0, output=tmp_path)
    with pytest.raises(SystemExit):
        limited.run(commands, options, [])
    [path] = tmp_path.iterdir()
    report = json.loads(path.read_text())
    assert report["results"] == []
    assert [outcome["status"] for outcome in report["outcomes"]] == [
        "failed with 1",
        "ended after its 0 s",
    ]
    printed = capsys.readouterr().out
    assert "FAILED WITH 1: no_such_one" in printed
    assert printed.splitlines()[-1] == f"written to {path}"


def test_what_no_time_is_left_for_is_not_begun():
    outcome = limited._attempt(Command("throughput", ()), [], time.monotonic())
    assert outcome["status"] == "not begun: no time was left"


def test_the_form_for_gpus_has_every_part_and_both_models():
    options = [parse_options(command.options) for command in FORMS["gpu"]]
    assert {part for some in options for part in some.parts} == set(PARTS)
    assert set(parse_options(GPU_SMOKE.options).parts) == set(PARTS)
    assert {"bert", "deberta"} == {some.model for some in options}


def test_without_a_gpu_the_form_for_gpus_says_so():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.suite", "gpu"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 2
    assert "--smoke --device cpu" in done.stderr


def test_the_peers_that_are_named_are_ways_of_a_gpu(sequence_classifier):
    asked = Namespace(device="cpu", peers=True, variants=[])
    names = {way.name for way in _gpu_ways(asked, str(sequence_classifier()))}
    assert {BASELINE, SUBJECT, ORIGINAL, *PEERS} <= names


def test_time_that_nothing_covers_is_none():
    assert covered([]) == (0.0, 0.0)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=20))
def test_time_that_intervals_cover_is_counted_once(starts_and_lengths):
    intervals = [(float(start), float(start + length)) for start, length in starts_and_lengths]
    seconds = np.zeros(100, dtype=bool)
    for start, end in intervals:
        seconds[int(start) : int(end)] = True
    reached = np.flatnonzero(seconds)
    assert covered(intervals) == (seconds.sum(), reached[-1] + 1 - reached[0])
