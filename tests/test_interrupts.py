"""SIGINT and SIGTERM at any moment end commands and scripts in seconds, with all their workers."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path

import pandas as pd
import psutil
import pytest

from tests.processes import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux does")

ROOT = Path(__file__).parents[1]
MARK = "GPUCLASSIFY_TEST_RUN"
MOST_SECONDS, AT_ONCE_SECONDS = 20, 5
# The same job as a script of a user's and as a command: forty parts, each a twentieth of a second.
JOB = """
import pathlib, sys, time

import click
from gpuclassify import JsonlReader, JsonlWriter, Pipeline, get_client

def stage(frame):
    time.sleep(0.05)
    return frame

def run(output):
    with get_client("cpu", n_workers=1) as client:
        reader = JsonlReader("in.jsonl", part_bytes=15)
        Pipeline([reader, stage, JsonlWriter(output, output_bytes=0)]).run(client)
        pathlib.Path(output, "done").touch()
    pathlib.Path(output, "ended").touch()

if __name__ == "__main__":
    if sys.argv[1] == "script":
        run(sys.argv[2])
    elif sys.argv[1] == "notebook":
        try:
            run(sys.argv[2])
        except KeyboardInterrupt:
            run("again")
    else:
        from gpuclassify.commands.cli import main
        from gpuclassify.commands.console import quiet_dask

        @main.command()
        @click.argument("output")
        def command(output):
            quiet_dask()
            run(output)

        main()
"""
ROWS = [{"text": f"row {number}"} for number in range(10, 50)]


@pytest.fixture
def job(tmp_path):
    """Starts the job, and ends what is left of it."""
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    runs = []

    def start(*words):
        runs.append(Run(tmp_path, words))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        for process in run.left():
            process.kill()
        run.process.wait()


class Run:
    """A process that starts others, as a terminal starts it: in a group of its own."""

    def __init__(self, folder, words):
        self.output = folder / words[-1]
        self.log = folder / "shown"
        self.mark = uuid.uuid4().hex
        environment = {**os.environ, "PYTHONPATH": str(ROOT), MARK: self.mark}
        with self.log.open("w") as shown:
            self.process = subprocess.Popen(
                [sys.executable, *words], stdout=shown, stderr=shown, cwd=folder,
                start_new_session=True, env=environment,
            )  # fmt: skip

    def wait_for(self, moment):
        """Until a moment by its name, or so many seconds."""
        if isinstance(moment, float):
            time.sleep(moment)
            return
        signs = {
            "workers start": lambda: psutil.Process(self.process.pid).children(),
            "parts are written": lambda: list(self.output.glob("part-*")),
            "_SUCCESS is written": (self.output / "_SUCCESS").exists,
            "the cluster closes": (self.output / "done").exists,
        }
        wait_until(lambda: signs[moment]() or self.process.poll() is not None)
        if moment == "the cluster closes":
            time.sleep(0.1)  # of about half a second

    def tell(self, number, to_group=False):
        """Send a signal, and return how long the process takes to end."""
        begun = time.monotonic()
        if self.process.poll() is None:
            (os.killpg if to_group else os.kill)(self.process.pid, number)
        self.process.wait(timeout=MOST_SECONDS)
        return time.monotonic() - begun

    def left(self):
        """Its processes that have not ended."""
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get(MARK) == self.mark
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:  # ended meanwhile, or is another user's
                pass
        return found

    def rows(self):
        """All rows of the output, in the order of its parts."""
        parts = sorted(self.output.glob("part-*.jsonl"))
        return [json.loads(line) for part in parts for line in part.read_text().splitlines()]


INT, TERM = signal.SIGINT, signal.SIGTERM


@pytest.mark.parametrize(
    ("how", "number", "moment"),
    [
        pytest.param("command", INT, "workers start", marks=pytest.mark.slow),
        ("command", INT, "parts are written"),
        pytest.param("command", TERM, "_SUCCESS is written", marks=pytest.mark.slow),
        pytest.param("script", INT, "the cluster closes", marks=pytest.mark.slow),
        ("script", TERM, "parts are written"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_signal_ends_the_job_and_its_workers(job, how, number, moment):
    run = job("job.py", how, "out")
    run.wait_for(moment)
    run.tell(number)
    assert run.process.returncode == (128 + number if how == "command" else -number)
    wait_until(lambda: not run.left(), AT_ONCE_SECONDS)
    shown = run.log.read_text()
    if how == "command":
        assert ("Interrupted." if number == INT else "Terminated.") in shown
        assert "Traceback" not in shown
    if (how, moment) == ("command", "parts are written"):
        assert re.search(r"\d+ of \d+ parts are written to .*: run the same job again to", shown)
        again = job("job.py", how, "out")
        assert again.process.wait(timeout=120) == 0
        assert again.rows() == ROWS


@pytest.mark.parametrize("number", [INT, signal.SIGKILL], ids=lambda value: value.name)
def test_a_small_command_runs_without_workers_and_goes_on_after_a_signal(job, tmp_path, number):
    rows = [{"text": f"write to reader{n}@example.org"} for n in range(2_000)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["-m", "gpuclassify", "annotate", "--classifier", "patterns", "--part-size", "500"]
    words += ["--output-bytes", "0"]  # a file for each part
    run = job(*words, "in.jsonl", "out")
    run.wait_for("parts are written")
    assert not psutil.Process(run.process.pid).children()
    run.tell(number)
    assert run.process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert not run.left() and not (run.output / "_SUCCESS").exists()
    kept = {path: path.stat().st_mtime_ns for path in run.output.glob("part-*")}
    again = job(*words, "in.jsonl", "out")
    assert again.process.wait(timeout=120) == 0
    assert f"{len(kept):,} of " in again.log.read_text()
    assert all(path.stat().st_mtime_ns == time_ns for path, time_ns in kept.items())
    found = pd.concat(map(pd.read_parquet, sorted(run.output.glob("part-*.parquet"))))
    assert [spans[0]["start"] for spans in found["pattern_spans"]] == [9] * len(rows)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["workers start", "_SUCCESS is written"])
def test_a_notebook_goes_on_after_an_interrupt(job, tmp_path, moment):
    run = job("job.py", "notebook", "out")
    run.wait_for(moment)
    children = psutil.Process(run.process.pid).children()
    workers = [each for each in children if "resource_tracker" not in " ".join(each.cmdline())]
    os.kill(run.process.pid, INT)
    wait_until((tmp_path / "again").exists)
    assert [each for each in workers if each.is_running()] == []
    assert run.process.wait(timeout=120) == 0
    assert (tmp_path / "again" / "ended").exists()
    wait_until(lambda: not run.left(), AT_ONCE_SECONDS)


@pytest.mark.faults
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("how", ["command", "script"])
def test_a_signal_at_any_moment_ends_the_job_and_its_workers(job, how, record_property):
    begun = time.monotonic()
    assert job("job.py", how, "undisturbed").process.wait(timeout=300) == 0
    whole = time.monotonic() - begun
    moments, longest, codes = 60, 0.0, []
    for moment in range(moments):
        run = job("job.py", how, f"out{moment}")
        run.wait_for(whole * moment / moments)
        number, to_group = (INT, TERM)[moment % 2], moment % 4 > 1
        longest = max(longest, run.tell(number, to_group))
        wait_until(lambda left=run.left: not left(), AT_ONCE_SECONDS)
        code = run.process.returncode
        # Before the command begins, and after it has ended, Python's own answer holds.
        has_ended = (run.output / "ended").exists()
        assert code in {128 + number, -number} | ({0} if has_ended else set())
        codes.append(code)
    record_property("codes", dict(Counter(codes)))
    record_property("longest_seconds", longest)
    assert codes.count(0) < moments / 2  # most of them met the job at its work


# A command that works for ever on one worker, and tells how far it is by files.
WAITING = """
import pathlib, time
from gpuclassify.commands.cli import main

def wait(folder):
    pathlib.Path(folder, "begun").touch()
    time.sleep(1000)

@main.command()
def waiting():
    from gpuclassify.cluster import get_client
    folder = str(pathlib.Path.cwd())
    with get_client("cpu", n_workers=1) as client:
        try:
            client.submit(wait, folder).result()
        except KeyboardInterrupt:
            pathlib.Path("interrupted").touch()
            {then}

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def waiting(job, tmp_path):
    """Starts that command, whose work has begun when this returns."""

    def start(then):
        (tmp_path / "waiting.py").write_text(WAITING.format(then=then))
        run = job("waiting.py", "waiting")
        wait_until((tmp_path / "begun").exists)
        return run

    return start


@pytest.mark.slow
def test_a_second_signal_ends_the_command_at_once(waiting, tmp_path):
    run = waiting("time.sleep(1000)")
    os.killpg(run.process.pid, INT)
    wait_until((tmp_path / "interrupted").exists)
    assert run.tell(TERM, to_group=True) < AT_ONCE_SECONDS
    assert run.process.returncode == 130
    wait_until(lambda: not run.left(), AT_ONCE_SECONDS)
    shown = run.log.read_text()
    assert "Interrupted twice" in shown
    assert "Traceback" not in shown


@pytest.mark.slow
def test_what_hangs_after_a_signal_is_ended(waiting):
    """A library that never comes back to Python, where no handler of a signal runs."""
    run = waiting("import ctypes; [ctypes.CDLL(None).sleep(60) for _ in range(20)]")
    run.tell(TERM)
    assert run.process.returncode == 143
    wait_until(lambda: not run.left(), AT_ONCE_SECONDS)
    assert "ended after 15 seconds" in run.log.read_text()


@pytest.mark.slow
def test_no_thread_holds_up_the_end_of_a_command(waiting):
    run = waiting(
        "import threading; threading.Thread(target=time.sleep, args=[1000]).start(); raise"
    )
    run.tell(INT)
    assert run.process.returncode == 130
    assert run.log.read_text().endswith("Interrupted.\n")
