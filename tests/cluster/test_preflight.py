"""What is found of workers before work starts, on real clusters."""

import json
import logging
import os
import signal
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path

import cloudpickle
import dask
import psutil
import pytest
from distributed import Client, LocalCluster

from gpuclassify.classifiers import DomainClassifier
from gpuclassify.cluster.local import PatientNanny
from gpuclassify.cluster.preflight import MisfitError, PreflightError, check_workers, look_here
from gpuclassify.jobs.execution import ModelProbe, may_use_gpu
from gpuclassify.jobs.input.readers import JsonlReader
from gpuclassify.jobs.output.writers import JsonlWriter
from gpuclassify.jobs.pipeline import Pipeline

pytestmark = pytest.mark.slow

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it


@pytest.fixture(scope="module")
def client():
    with (
        # A nanny is closed whose new worker takes longer than this, 15 seconds, to start.
        dask.config.set({"distributed.deploy.lost-worker-timeout": "10 minutes"}),
        LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, worker_class=PatientNanny
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture
def workers(client):
    client.wait_for_workers(2, timeout=120)
    client.run(look_here)  # one that was started again imports the library, without haste
    return sorted(client.nthreads())


@pytest.fixture
def other_client(tmp_path):
    """Two workers of one process each, the second with other packages, as far as metadata go."""
    others = {"transformers": "1.2.3", "tokenizers": None, "pyarrow": "99.0"}
    others["torch"] = version("torch").partition("+")[0] + "+cu999"
    for name, number in others.items():
        info = tmp_path / "site" / f"{name}-0.dist-info"
        info.mkdir(parents=True)
        lines = [f"Name: {name}", *([f"Version: {number}"] if number else [])]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        place, second = str(tmp_path / "site"), sorted(client.nthreads())[1]
        # Before it was asked for any version: each is read once a process.
        client.run(lambda: sys.path.insert(0, place), workers=[second])
        yield client


class Notes:
    """A probe that writes down who does what, and does something worse on some workers."""

    def __init__(self, folder, on_fetch=None, on_run=None):
        self.folder, self.on_fetch, self.on_run = str(folder), on_fetch, on_run

    def fetch(self):
        Path(self.folder, f"fetch-{os.getpid()}").touch()
        if self.on_fetch:
            self.on_fetch()

    def run(self, memory_bytes):
        assert memory_bytes > 0
        Path(self.folder, f"run-{os.getpid()}").write_text(str(memory_bytes))
        if self.on_run:
            self.on_run()

    def counts(self):
        names = [path.name.partition("-")[0] for path in Path(self.folder).iterdir()]
        return names.count("fetch"), names.count("run")


def told(caplog):
    """What the library logged: Dask tells of its own when a machine is busy."""
    records = [record for record in caplog.records if record.name.startswith("gpuclassify")]
    return "\n".join(record.getMessage() for record in records)


def rows_of(error):
    """Cells of the table, below its head."""
    lines = str(error.value).splitlines()
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[2:-1]]


def test_sound_workers_pass_and_one_of_a_machine_fetches(client, workers, tmp_path):
    probe = Notes(tmp_path)
    assert check_workers(client, probe) == workers
    assert probe.counts() == (1, 2)
    shares = [int(path.read_text()) for path in tmp_path.glob("run-*")]
    assert sum(shares) <= psutil.virtual_memory().total


def test_other_versions_of_what_decides_are_refused_before_the_first_part(
    other_client, tmp_path, caplog
):
    """Another build of torch is none, and another pyarrow is told and no reason to refuse."""
    second = sorted(other_client.nthreads())[1]
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "one"}) + "\n")
    job = Pipeline([JsonlReader(f"{tmp_path}/in.jsonl"), JsonlWriter(f"{tmp_path}/out")])
    with (
        caplog.at_level(logging.WARNING, "gpuclassify"),
        pytest.raises(PreflightError, match=r"^1 of 2 workers cannot do this work") as error,
    ):
        job.run(other_client)
    wanted = {name: version(name) for name in ("transformers", "tokenizers")}
    assert {tuple(row[:1] + row[2:]) for row in rows_of(error)} == {
        (second, name, found, wanted[name], f"pip install {name}=={wanted[name]}")
        for name, found in {"transformers": "1.2.3", "tokenizers": "not installed"}.items()
    }
    assert "1 workers have pyarrow 99.0" in told(caplog)
    assert "0 of 1 parts are written" in error.value.__notes__[-1]
    with dask.config.set({"gpuclassify.preflight": False}):
        assert job.run(other_client).rows_written == 1
    job.run(other_client)  # is done: nobody is asked


def test_two_workers_on_one_gpu_are_refused(client, workers):
    def use(uuid):
        from gpuclassify.cluster import preflight

        preflight.device_here = lambda: uuid

    client.run(use, "GPU-1")  # there is none in this machine
    with pytest.raises(PreflightError, match="one worker for each GPU") as error:
        check_workers(client)
    assert check_workers(client, uses_gpu=False) == workers
    client.run(use, "GPU-2", workers=workers[:1])
    assert check_workers(client) == workers
    client.run(use, "")
    assert check_workers(client) == workers
    [[worker, _host, check, found, *_]] = rows_of(error)
    assert (worker, check) == (workers[1], "GPU")
    assert found == f"GPU-1, which {workers[0]} uses too"


def test_what_a_probe_raises_is_in_the_table(client, workers, tmp_path):
    pid = client.run(os.getpid, workers=workers[:1])[workers[0]]

    def too_small():
        if os.getpid() == pid:
            raise MisfitError("memory of cpu", "1 GB free", "2 GB", "a larger machine")

    with pytest.raises(PreflightError) as error:
        check_workers(client, Notes(tmp_path, on_run=too_small))
    [[worker, _host, *said]] = rows_of(error)
    assert [worker, *said] == [workers[0], "memory of cpu", "1 GB free", "2 GB", "a larger machine"]


def test_where_fetching_fails_nobody_goes_on(client, workers, tmp_path):
    def refuse():
        raise ConnectionError("the Hub is out of reach\nmore of it")

    probe = Notes(tmp_path, on_fetch=refuse)
    with pytest.raises(PreflightError, match="a model in the cache, or the Hub") as error:
        check_workers(client, probe)
    assert rows_of(error)[0][2:4] == ["files", "ConnectionError: the Hub is out of reach"]
    assert probe.counts() == (1, 0)


def test_a_worker_that_hangs_is_left_out(client, workers, caplog):
    pids = client.run(os.getpid)

    def send(number, *addresses):
        for address in addresses:
            os.kill(pids[address], number)

    # The scheduler gives up to connect, and tells the versions of the others.
    quick = dask.config.set({"distributed.comm.timeouts.connect": "1s"})
    send(signal.SIGSTOP, workers[0])
    try:
        with caplog.at_level(logging.WARNING, "gpuclassify"), quick:
            assert check_workers(client, step_seconds=6) == [workers[1]]
        assert f"{workers[0]} was not checked: it did not answer in 6 seconds" in told(caplog)
        send(signal.SIGSTOP, workers[1])
        with pytest.raises(PreflightError, match=r"^2 of 2 workers") as error, quick:
            check_workers(client, step_seconds=2)
    finally:
        send(signal.SIGCONT, *workers)
    assert {row[3] for row in rows_of(error)} == {"it did not answer in 2 seconds"}
    assert check_workers(client) == workers


def test_a_worker_that_dies_of_the_probe_is_left_to_dask(client, workers, tmp_path, caplog):
    pid = client.run(os.getpid, workers=workers[:1])[workers[0]]

    def die():
        if os.getpid() == pid:
            os.kill(pid, signal.SIGKILL)

    with caplog.at_level(logging.WARNING, "gpuclassify"):
        assert check_workers(client, Notes(tmp_path, on_run=die)) == [workers[1]]
    assert f"worker {workers[0]} was not checked: lost during the check" in told(caplog)


def test_a_cluster_that_scales_by_its_tasks_starts_a_worker(caplog):
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
        caplog.at_level(logging.WARNING, "gpuclassify"),
    ):
        cluster.adapt(minimum=0, maximum=1, wait_count=1_000)  # it takes none away meanwhile
        assert len(check_workers(client)) == 1
    assert "the cluster has no workers yet: waiting for the first" in told(caplog)


def test_workers_that_all_leave_while_they_are_asked_are_no_mistake(tmp_path, caplog):
    with (
        LocalCluster(
            n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
        caplog.at_level(logging.WARNING, "gpuclassify"),
    ):
        client.submit(time.sleep, 4)  # before it answers, it leaves
        leaving = threading.Timer(1, client.retire_workers, (list(client.nthreads()),))
        leaving.start()
        assert check_workers(client, Notes(tmp_path)) == []
        leaving.join()
        assert not client.nthreads()
    assert "all workers have left during the check" in told(caplog)


def test_a_model_probe_downloads_measures_and_runs(checkpoint, one_torch_thread):
    from gpuclassify.inference.residency import MODELS

    mapper = DomainClassifier(model=str(checkpoint("domain")), device="cpu")
    probe = ModelProbe((mapper,))
    probe.fetch()
    MODELS.evict()
    with pytest.raises(MisfitError, match=r"memory of cpu: 0\.00 GB free, expected"):
        probe.run(1_000)
    assert MODELS.keys() == []
    probe.run(2**31)
    [key] = MODELS.keys()
    assert key[0] == mapper.model.checkpoint
    probe.run(0)  # it is loaded already


def test_a_job_uses_a_gpu_unless_all_its_models_are_told_not_to(tmp_path):
    here, anywhere = DomainClassifier(device="cpu"), DomainClassifier()
    assert not may_use_gpu([here], "pandas")
    assert may_use_gpu([here, anywhere], "pandas")
    assert may_use_gpu([], "cudf")
