"""What a run counts: stats, and rows of parts as they are done, once each, never backwards."""

import io
import threading
import time

import pandas as pd
import pytest
from rich.console import Console

from gpuclassify.jobs.input.readers import JsonlReader
from gpuclassify.jobs.ledger.records import Record
from gpuclassify.jobs.output.writers import ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.report.progress import JobProgress
from gpuclassify.jobs.report.summary import JobSummary
from gpuclassify.workers import run_context as counting
from gpuclassify.workers.run_context import (
    PartProgress,
    RunningParts,
    RunStats,
    advance,
    collected_stats,
    progress_events,
    report_stats,
    run_context,
)
from tests.processes import local_client
from tests.replicas import sample_texts

ROWS = 90


@pytest.fixture
def often(monkeypatch):
    """Workers in this process report every batch."""
    monkeypatch.setattr(counting, "REPORT_EVERY_SECONDS", 0.0)


def test_a_context_within_another_leaves_what_it_does_not_set():
    with collected_stats() as outer:
        with run_context(stages=object()):
            report_stats(RunStats(rows=1))
        with collected_stats() as inner:
            report_stats(RunStats(rows=2))
        report_stats(RunStats(rows=3))
    report_stats(RunStats(rows=4))
    assert [stats.rows for stats in outer] == [1, 3]
    assert [stats.rows for stats in inner] == [2]


def test_a_retry_counts_once_and_a_finished_part_is_forgotten():
    running = RunningParts(["a", "b"])
    for event in [("a", 100, 0.5), ("b", 10, 0.1), ("a", 100, 0.2), ("other job's", 9, 1.0)]:
        running.update(event)
    assert running.totals() == (0.6, 51)
    running.update(("a", 100, 0.7))
    assert running.totals() == (pytest.approx(0.8), 71)
    running.finish("a")
    running.update(("a", 100, 0.9))  # of an attempt that comes late
    assert running.totals() == (0.1, 1)


def test_rows_that_run_again_never_exceed_the_part(often):
    events = []
    with progress_events(events.append, None), run_context(part=PartProgress("a", 10, 2)):
        for _ in range(5):
            advance(8)
    advance(8)  # for no part
    assert [share for *_, share in events] == [0.4, 0.8, 1.0, 1.0, 1.0]


def test_what_is_told_is_told_once_a_second(monkeypatch):
    events = []
    clock = iter([100.0, 100.0, 100.4, 100.9, 101.0, 101.0])
    monkeypatch.setattr(counting.time, "monotonic", lambda: next(clock))
    with progress_events(events.append, None), run_context(part=PartProgress("a", 4, 1)):
        for _ in range(4):
            advance(1)
    assert [share for *_, share in events] == [0.25, 1.0]


@pytest.fixture
def job(domain, tmp_path):
    """A job of one part, whose batches have few rows."""
    frame = pd.DataFrame({"text": [f"{n} {text}" for n, text in enumerate(sample_texts(ROWS))]})
    frame.to_json(tmp_path / "in.jsonl", orient="records", lines=True)
    reader, writer = JsonlReader(str(tmp_path / "in.jsonl")), ParquetWriter(str(tmp_path / "out"))
    return Pipeline([reader, domain(batch_size=10, sort_by_length=False), writer])


@pytest.mark.parametrize("is_distributed", [False, True])
def test_rows_inside_of_a_part_are_reported(job, often, monkeypatch, is_distributed):
    totals = []
    update = RunningParts.update
    monkeypatch.setattr(
        RunningParts,
        "update",
        lambda self, event: (update(self, event), totals.append(self.totals())),
    )
    if is_distributed:
        with local_client() as client:
            summary = job.run(client)
            deadline = time.monotonic() + 30
            while len(totals) < 9 and time.monotonic() < deadline:
                time.sleep(0.05)
    else:
        summary = job.run()
        assert [rows for _, rows in totals] == list(range(10, ROWS + 1, 10))
    assert len(totals) == 9
    assert summary.rows_read == ROWS
    assert summary.running.totals() == (0, 0)
    assert "running" not in summary.as_dict()


def test_the_line_moves_with_rows_inside_of_a_part_and_never_back():
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    summary = JobSummary()
    with JobProgress("domain", console) as bar:
        bar.parts(0, 4, summary)
        assert "0/4 parts, 0 rows read, waiting for rows" in bar._line
        summary.running = RunningParts(["a", "b"])
        shares = []
        for event in [("a", 100, 0.5), ("b", 100, 0.5), None, ("b", 100, 0.6), ("b", 100, 0.1)]:
            if event is None:
                summary.add(Record("a", {}, 100, 100, 1, ""))
            else:
                summary.running.update(event)
            bar._show_parts()  # as every second
            shares.append(bar._share)
        assert shares == [0.125, 0.25, 0.25, 0.25, 0.25]
        bar.parts(1, 4, summary)
        assert bar._share == pytest.approx(0.4)
        assert "1/4 parts, 160 rows" in bar._line
        assert "left" in bar._line


@pytest.mark.parametrize(
    ("total", "done", "begun", "speeds"),
    [
        (200, 0, 0.4, ""),
        (200, 2, 0.9, ", 29 rows/s"),
        (200, 3, 0.0, ", 30 rows/s, 10:57 left"),
        (4, 0, 0.75, ""),
        (4, 1, 0.3, ", 13 rows/s, 0:21 left"),
        (1, 0, 0.15, ""),
        (1, 0, 0.6, ", 5 rows/s, 8.0 s left"),
        (1, 1, 0.0, ", 2.5 rows/s, 40.0 s of working time"),
    ],
)
def test_speeds_are_shown_once_they_mean_something(monkeypatch, total, done, begun, speeds):
    clock = [1_000.0]
    monkeypatch.setattr(counting.time, "monotonic", lambda: clock[0])
    summary = JobSummary(running=RunningParts("ab"))
    bar = JobProgress("domain", Console(file=io.StringIO()))
    clock[0] += 30.0  # loading a model
    summary.running.update(("a", 100, 0.1 * (total == 1) * (done == 0)))
    clock[0] += 10.0
    if done:
        summary.running.finish("a")
        summary.rows_read, summary.parts, summary.elapsed_seconds = 100 * done, done, 40.0
    if begun:
        summary.running.update(("b" if done else "a", 100, begun))
    bar.parts(done, total, summary)
    assert bar._line.endswith(f" rows read{speeds}")


def test_each_step_leaves_a_line(caplog):
    caplog.set_level("INFO", logger="gpuclassify")
    terminal = Console(file=io.StringIO(), force_terminal=True, width=200)
    log = Console(file=io.StringIO())
    for console in (terminal, log, None):
        with JobProgress("removal", console) as lines:
            for step in ("ids", "signatures", "counts"):
                for done in range(3):
                    lines.step(step, done, 2, JobSummary(elapsed_seconds=1.5 * done))
    speed = "2/2 parts, 3.0 s of working time"
    expected = [f"{step}: 100% {speed}" for step in ("ids", "signatures", "counts")]
    assert log.file.getvalue().splitlines() == caplog.messages == expected
    assert all(line in terminal.file.getvalue() for line in expected[:2])


def test_the_line_shows_rows_without_a_call(often):
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    summary = JobSummary()
    with JobProgress("domain", console) as bar:
        bar.parts(0, 1, summary)
        summary.running = RunningParts(["a"])
        summary.running.update(("a", 100, 0.42))
        deadline = time.monotonic() + 30
        while "42 rows" not in console.file.getvalue() and time.monotonic() < deadline:
            time.sleep(0.1)
    assert "0/1 parts, 42 rows" in console.file.getvalue()
    assert bar._ticker not in threading.enumerate()


def test_what_is_waited_for_is_told_at_once():
    log = io.StringIO()
    with JobProgress("", Console(file=log)) as lines:
        lines.waiting("Starting 2 workers")
        assert log.getvalue() == "Starting 2 workers\n"
    terminal = io.StringIO()
    with JobProgress("", Console(file=terminal, force_terminal=True, width=200)) as bar:
        bar.waiting("Starting 2 workers")
    assert "Starting 2 workers" in terminal.getvalue()
