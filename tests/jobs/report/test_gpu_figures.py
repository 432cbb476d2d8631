"""Use and memory of GPUs, while a job runs and in its report."""

import io
import time

import pytest
from distributed.diagnostics import nvml
from rich.console import Console

from gpuclassify.commands.console import print_summary
from gpuclassify.jobs.ledger.records import JOB, RECORDS, Record, part_name, record_path, sealed
from gpuclassify.jobs.report.progress import JobProgress
from gpuclassify.jobs.report.report import write_report
from gpuclassify.jobs.report.summary import JobSummary
from gpuclassify.jobs.stores.opening import open_store
from gpuclassify.workers import run_context
from gpuclassify.workers.run_context import RunStats, report_stats, waiting_for_host
from tests.processes import local_client

RUNS = [
    {"device_sampled_seconds": 4.0, "device_busy_seconds": 3.0, "peak_device_bytes": 2**30},
    {"device_sampled_seconds": 6.0, "device_busy_seconds": 6.0, "peak_device_bytes": 3 * 2**30},
]  # fmt: skip


def report_of_runs(folder, runs):
    """The report of a job whose parts had these stats, and its page."""
    (folder / RECORDS).mkdir(parents=True)
    identity = {"output": {"format": "parquet", "compression": "zstd"}}
    job = {"key": "01234567", "created": "2026-11-01T00:00:00Z", "parts": len(runs)}
    job |= {"identity": identity, "earlier": [], "versions": {}, "code": "Pipeline()"}
    (folder / JOB).write_bytes(sealed(job))
    for number, stats in enumerate(runs):
        name = part_name(number, len(runs), job["key"], ".parquet")
        record = Record(name, {}, 5, 5, 100, "", stats=stats, finished=1e9)
        (folder / record_path(name)).write_bytes(record.as_json())
    return write_report(open_store(str(folder))), (folder / "_report/report.html").read_text()


@pytest.mark.parametrize(
    ("runs", "figures", "shown"),
    [
        (RUNS, {"busy_share": 0.9, "peak_device_bytes": 3 * 2**30}, ["90%", "3.0 GiB"]),
        ([{"peak_torch_bytes": 5}], {"busy_share": None, "peak_torch_bytes": 5}, []),
        ([{"tokens": 7}], None, []),
    ],
    ids=["all", "a slice of a GPU", "no GPU"],
)
def test_a_report_tells_the_mean_use_and_the_highest_peak(tmp_path, runs, figures, shown):
    report, page = report_of_runs(tmp_path, runs)
    assert report["gpu"] == figures
    assert ("GPU" in page) == bool(shown)
    tiles = zip(shown, ["GPUs busy", "peak memory of a GPU"], strict=False)
    assert all(f"<b>{number}</b><span>{what}" in page for number, what in tiles)


HELD_UP = {
    "tokens": 6_000_000, "tokenize_seconds": 5.0, "model_seconds": 3.0, "wait_tokens_seconds": 2.0,
    "device_sampled_seconds": 5.0, "device_busy_seconds": 3.0, "peak_tokenizer_threads": 8,
}  # fmt: skip
SENTENCE = (
    "the host holds the GPU up: 8 tokenizer cores feed 1.2 M tokens/s, the model could run 2 M: "
    "give each GPU worker more cores, or use fewer GPUs a machine"
)


def test_a_host_that_holds_the_gpu_up_is_told_on_the_page_and_the_terminal(tmp_path):
    report, page = report_of_runs(tmp_path, [HELD_UP])
    summary = JobSummary(totals=HELD_UP)
    console = Console(file=io.StringIO(), width=400)
    print_summary(summary, console)

    assert report["advice"] == [SENTENCE]
    assert SENTENCE in page
    assert SENTENCE in console.file.getvalue()
    assert SENTENCE in " ".join(repr(summary).split())


@pytest.mark.parametrize(
    "change",
    [
        {"wait_tokens_seconds": 0.3},
        {"model_seconds": 6.0},
        {"device_busy_seconds": 4.6},
        {"device_sampled_seconds": None},
    ],
    ids=["short waits", "a slower model", "a busy device", "no GPU"],
)
def test_it_is_not_told_without_need(change):
    totals = {name: v for name, v in {**HELD_UP, **change}.items() if v is not None}
    assert waiting_for_host(totals) is None


def test_it_is_logged_once_where_nothing_reports_the_run(monkeypatch, caplog):
    monkeypatch.setattr(run_context, "_advised", set())
    for _ in range(2):
        report_stats(RunStats(**HELD_UP))
    assert [record.getMessage() for record in caplog.records] == [SENTENCE]


@pytest.fixture
def client(monkeypatch):
    """A worker whose driver reports one GPU; this machine has none."""
    monkeypatch.setattr(nvml, "device_get_count", lambda: 1)
    monkeypatch.setattr(nvml, "one_time", lambda: {"name": "GPU", "memory-total": 8 * 2**30})
    monkeypatch.setattr(nvml, "real_time", lambda: {"utilization": 83, "memory-used": 2**30})
    with local_client() as client:
        yield client


def test_a_running_job_shows_how_busy_the_workers_gpus_are(client):
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    summary = JobSummary(rows_read=10, elapsed_seconds=1.0)
    with JobProgress("domain", console, client, look_every_seconds=0.0) as bar:
        deadline = time.monotonic() + 60
        while "GPU" not in console.file.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
            bar.parts(1, 2, summary)
    assert "left, GPU 83% busy" in console.file.getvalue()
