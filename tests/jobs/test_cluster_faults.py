"""Jobs on Dask clusters: lost workers, a lost scheduler, bounded windows, secrets."""

import functools
import os
import subprocess
import sys

import job_faults as faults
import pandas as pd
import pytest
from distributed import Client, LocalCluster
from job_faults import job, result, write_input


@pytest.fixture
def folder(tmp_path):
    write_input(tmp_path / "in")
    return tmp_path


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    write_input(folder / "in")
    job(folder).run()
    return result(folder)


def test_a_worker_that_dies_loses_and_doubles_nothing(folder, expected):
    stage = functools.partial(faults.dying_once, flag=f"{folder}/flag")
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        summary = job(folder, stage).run(client)
    assert (folder / "flag").exists()
    assert summary.rows_out == len(expected)
    pd.testing.assert_frame_equal(result(folder), expected)
    assert list((folder / "out" / "_gpuclassify" / "attempts").iterdir()) == []


def test_a_scheduler_that_dies_is_told_and_the_job_goes_on_elsewhere(folder, expected):
    file = folder / "scheduler.json"
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--no-dashboard"]
    scheduler = subprocess.Popen([*command, "--port", "0", "--scheduler-file", file])
    command = [sys.executable, "-m", "distributed.cli.dask_worker", "--no-nanny", "--no-dashboard"]
    search = os.pathsep.join(path for path in sys.path if path)
    worker = subprocess.Popen(
        [*command, "--nthreads", "1", "--scheduler-file", file, "--death-timeout", "5"],
        env={**os.environ, "PYTHONPATH": search},
    )

    def kill(done, total, summary):
        if done == 5:
            scheduler.kill()

    try:
        with (
            Client(scheduler_file=str(file)) as client,
            pytest.raises(ConnectionError, match="scheduler has lost") as caught,
        ):
            job(folder, faults.slowly).run(client, report=kill)
    finally:
        for process in (scheduler, worker):
            process.kill()
            process.wait()
    assert "run the same job again to continue" in caught.value.__notes__[-1]
    summary = job(folder, faults.slowly).run()
    assert 5 <= summary.resumed_parts < 20
    pd.testing.assert_frame_equal(result(folder), expected)
