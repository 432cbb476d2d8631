"""A job whose Dask scheduler dies tells so, and goes on elsewhere."""

import json
import os
import subprocess
import sys
import threading
import time

import dask
import job_faults as faults
import pandas as pd
import pytest
from distributed import Client
from job_faults import job, result

from gpuclassify.jobs import execution
from gpuclassify.jobs.input.readers import read_files
from tests.processes import local_client, wait_until

pytestmark = pytest.mark.slow


def wait_for_address(file):
    """Dask writes a scheduler's file in steps, and its client waits 0.1 seconds for it."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            return json.loads(file.read_text())["address"]
        except (FileNotFoundError, ValueError):
            time.sleep(0.05)
    raise TimeoutError(f"{file} has no address")


@pytest.mark.parametrize("has_results", [False, True], ids=["tasks", "results"])
def test_a_scheduler_that_dies_is_told_and_the_job_goes_on_elsewhere(folder, expected, has_results):
    """It dies with tasks alone, or with results, too, that the client is about to ask for."""
    rows = read_files([f"{folder}/in/*.jsonl"], part_bytes=2_000)["id"]
    before_gate = sum(part.compute().min() < 150 for part in rows.partitions)
    file = folder / "scheduler.json"
    start = [sys.executable, "-m"]
    here = ["--scheduler-file", str(file), "--no-dashboard"]
    scheduler = subprocess.Popen([*start, "distributed.cli.dask_scheduler", *here, "--port", "0"])
    command = [*start, "distributed.cli.dask_worker", *here, "--no-nanny", "--nthreads", "1"]
    search = os.pathsep.join(path for path in sys.path if path)
    # The job cannot end first: rows behind a gate that never opens hold its worker.
    environment = {**os.environ, "PYTHONPATH": search, "GATE": str(folder / "never")}
    processes = [scheduler]

    def kill(done, total, summary):
        if done == (5 if has_results else before_gate):
            deadline = time.monotonic() + 120
            while len(list((folder / "out").glob("*.parquet"))) < before_gate:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            scheduler.kill()

    try:
        wait_for_address(file)
        worker = subprocess.Popen([*command, "--death-timeout", "300"], env=environment)
        processes.append(worker)
        with (
            Client(scheduler_file=str(file)) as client,
            pytest.raises(ConnectionError, match="scheduler has lost") as caught,
        ):
            job(folder, faults.slowly).run(client, report=kill)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert "run the same job again to continue" in caught.value.__notes__[-1]
    summary = job(folder, faults.slowly).run()
    assert 5 <= before_gate == summary.resumed_parts < 20
    pd.testing.assert_frame_equal(result(folder), expected)


def pause_from(share, dask_worker):
    """Pause the worker from this share of its memory on."""
    dask_worker.memory_manager.memory_pause_fraction = share


def square(number):
    return number**2


@pytest.mark.parametrize("kind", ["run_tasks", "compute_tasks"])
def test_paused_workers_are_told_while_the_job_waits_for_them(monkeypatch, caplog, kind):
    """All of them, which take no tasks; a job goes on by itself when one has memory again."""
    monkeypatch.setattr(execution, "PAUSES_EVERY_SECONDS", 0.1)
    results = []
    with local_client(2, memory_limit="64 GiB") as client:
        workers = [*client.nthreads()]

        def statuses():
            found = client.scheduler_info()["workers"].values()
            return sorted(worker["status"] for worker in found)

        def work():
            if kind == "run_tasks":
                results.extend(execution.run_tasks(client, square, [(n,) for n in range(20)]))
            else:
                tasks = [dask.delayed(square)(n) for n in range(20)]
                results.extend(execution.compute_tasks(client, tasks))

        client.run(pause_from, 1e-9, workers=workers[:1])
        wait_until(lambda: statuses() == ["paused", "running"])
        work()
        assert not [r for r in caplog.records if r.name.startswith("gpuclassify")]
        client.run(pause_from, 1e-9)
        wait_until(lambda: statuses() == ["paused"] * 2)
        job = threading.Thread(target=work, daemon=True)
        job.start()
        wait_until(lambda: "because all 2 workers are paused" in caplog.text)
        assert "memory_limit, or smaller parts (part_bytes=)" in caplog.text
        assert len(results) == 20
        client.run(pause_from, 9.0)
        job.join(60)
    assert sorted(results) == sorted(2 * [n**2 for n in range(20)])
