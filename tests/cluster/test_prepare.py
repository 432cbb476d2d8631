"""Clusters that were not started by `get_client`: set up while they run, or as they start."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from dask import config
from distributed import Client, LocalCluster

from gpuclassify.cluster import get_client, prepare
from gpuclassify.cluster.local import PatientNanny
from gpuclassify.cluster.preload import (
    ALLOWED_FAILURES,
    COMMUNICATION,
    WORKER_TTL_SECONDS,
    raise_by_value,
)
from gpuclassify.workers.machine import usable_cores

pytestmark = pytest.mark.slow


def settings_of(client):
    """Timeouts in each worker's process."""

    def read(names):
        from dask import config

        return {name: config.get(name) for name in names}

    return client.run(read, list(COMMUNICATION))


@pytest.fixture
def unchanged_configuration():
    """A scheduler in this process shares its configuration."""
    with config.set({name: config.get(name) for name in COMMUNICATION}):
        yield


def test_a_running_cluster_is_set_up_and_so_are_workers_that_join(unchanged_configuration):
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0", worker_class=PatientNanny
        ) as cluster,
        Client(cluster) as client,
    ):
        share = max(1, usable_cores() // 2)
        assert prepare(client) is client
        assert cluster.scheduler.worker_ttl == WORKER_TTL_SECONDS
        assert cluster.scheduler.allowed_failures == ALLOWED_FAILURES
        assert set(client.run(torch.get_num_threads).values()) == {share}
        cluster.scale(3)
        client.wait_for_workers(3, timeout=120)
        assert list(settings_of(client).values()) == [COMMUNICATION] * 3
        assert list(client.run(os.getenv, "RAYON_NUM_THREADS").values()) == [str(share)] * 3


def test_settings_that_are_more_patient_stay(unchanged_configuration):
    longer = dict.fromkeys(COMMUNICATION, "10 minutes")
    with (
        config.set({**longer, "distributed.scheduler.worker-ttl": None}),
        LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        threads = torch.get_num_threads()
        cluster.scheduler.allowed_failures = 50
        prepare(client, threads=threads)
        assert cluster.scheduler.allowed_failures == 50
        assert cluster.scheduler.worker_ttl is None
        assert {name: config.get(name) for name in COMMUNICATION} == longer


def test_what_cannot_be_prepared_is_refused():
    options = {"n_workers": 0, "processes": False, "dashboard_address": ":0"}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        with pytest.raises(ValueError, match=r"no worker is there yet.*threads="):
            prepare(client)
        with pytest.raises(ValueError, match="threads=0 is below 1"):
            prepare(client, threads=0)
    with pytest.raises(RuntimeError, match="without asynchronous=True"):
        prepare(SimpleNamespace(asynchronous=True))


def test_a_scheduler_needs_nothing_but_dask(tmp_path):
    (tmp_path / "function.pickle").write_bytes(cloudpickle.dumps(raise_by_value()))
    code = """
import pickle, sys
from pathlib import Path
from types import SimpleNamespace
sys.modules["gpuclassify"] = None
scheduler = SimpleNamespace(worker_ttl=300, allowed_failures=3)
raise_settings = pickle.loads(Path("function.pickle").read_bytes())
raise_settings({}, 1800.0, 10, dask_scheduler=scheduler)
assert (scheduler.worker_ttl, scheduler.allowed_failures) == (1800.0, 10)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=280)


def test_the_docstring_lists_what_is_changed():
    for name in (*COMMUNICATION, "worker-ttl", "allowed-failures"):
        assert name.removeprefix("distributed.") in prepare.__doc__
    assert f"{WORKER_TTL_SECONDS / 60:g} minutes" in prepare.__doc__
    assert f"{ALLOWED_FAILURES} workers" in prepare.__doc__


def test_the_preload_sets_up_schedulers_and_workers_as_they_start(tmp_path):
    file = tmp_path / "scheduler.json"
    preload = ["--preload", "gpuclassify.cluster.preload"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    environment.pop("OMP_NUM_THREADS", None)
    start = [sys.executable, "-m", "dask"]
    here = ["--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0"]
    commands = [
        ["scheduler", "--scheduler-file", str(file), "--port", "0", *here],
        ["worker", "--scheduler-file", str(file), "--nthreads", "1", *here],
    ]
    processes = [
        subprocess.Popen([*start, *command, *preload], env=environment, cwd=tmp_path)
        for command in commands
    ]
    try:
        with get_client(scheduler_file=file, timeout=120, set_as_default=False) as client:
            client.wait_for_workers(1, timeout=120)

            def limits(dask_scheduler):
                return dask_scheduler.worker_ttl, dask_scheduler.allowed_failures

            assert client.run_on_scheduler(limits) == (WORKER_TTL_SECONDS, ALLOWED_FAILURES)
            assert list(settings_of(client).values()) == [COMMUNICATION]
            assert list(client.run(torch.get_num_threads).values()) == [usable_cores()]
            client.shutdown()
    finally:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()
