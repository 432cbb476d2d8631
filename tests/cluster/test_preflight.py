"""What is found of workers before work starts, on real clusters."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import cloudpickle
import dask
import pytest
from distributed import Client, LocalCluster

from gpuclassify.classifiers import DomainClassifier
from gpuclassify.cluster import preflight
from gpuclassify.cluster.local import PatientNanny
from gpuclassify.cluster.preflight import check_workers
from gpuclassify.cluster.preflight_table import MisfitError, PreflightError
from gpuclassify.cluster.worker_facts import facts_here
from gpuclassify.jobs.input.readers import JsonlReader
from gpuclassify.jobs.output.writers import JsonlWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.probe import ModelProbe, may_use_gpu

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
    client.run(facts_here)  # one that was started again imports the library, without haste
    return sorted(client.nthreads())


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


@contextlib.contextmanager
def installed(client, worker, folder, name, version):
    """A package of another version, as far as its metadata go, in one worker's process."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    place = str(folder)
    client.run(lambda: sys.path.insert(0, place), workers=[worker])
    yield
    client.run(lambda: sys.path.remove(place), workers=[worker])


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
    facts = check_workers(client, probe)
    assert sorted(facts) == workers
    assert probe.counts() == (1, 2)
    shares = [int(path.read_text()) for path in tmp_path.glob("run-*")]
    assert sum(shares) <= sum(one.memory_free_bytes for one in facts.values()) * 0.75


@pytest.mark.parametrize("name", ["transformers", "tokenizers", "torch"])
def test_another_version_of_what_decides_is_refused(client, workers, tmp_path, name):
    with (
        installed(client, workers[1], tmp_path, name, "1.2.3"),
        pytest.raises(PreflightError, match=r"^1 of 2 workers cannot do this work") as error,
    ):
        check_workers(client)
    [[worker, _host, check, found, expected, cure]] = rows_of(error)
    assert (worker, check, found) == (workers[1], name, "1.2.3")
    assert cure == f"pip install {name}=={expected}"


def test_another_build_and_another_pandas_are_no_reason_to_refuse(
    client, workers, tmp_path, caplog
):
    from importlib.metadata import version

    build = version("torch").partition("+")[0] + "+cu130"
    with (
        installed(client, workers[0], tmp_path, "pandas", "3.99.0"),
        installed(client, workers[0], tmp_path, "torch", build),
        caplog.at_level(logging.WARNING, "gpuclassify"),
    ):
        assert sorted(check_workers(client)) == workers
    assert "1 workers have pandas 3.99.0" in told(caplog)
    assert "torch" not in told(caplog)


def test_a_worker_without_the_package_is_named(client, workers):
    modules = ["gpuclassify.cluster.worker_facts", "gpuclassify.cluster.preflight"]

    def lose():
        sys.lost = {name: sys.modules.get(name) for name in modules}
        sys.modules.update(dict.fromkeys(modules))

    def find():
        sys.modules.update(sys.lost)
        del sys.lost

    client.run(lose, workers=workers[:1])
    with pytest.raises(PreflightError, match="pip install gpuclassify==") as error:
        check_workers(client)
    client.run(find, workers=workers[:1])
    [[worker, _host, check, found, *_]] = rows_of(error)
    assert (worker, check) == (workers[0], "gpuclassify")
    assert "ModuleNotFoundError" in found


def test_two_workers_on_one_gpu_are_refused(client, workers):
    def use(uuid):
        from gpuclassify.cluster import worker_facts

        worker_facts._device_here = lambda: uuid

    client.run(use, "GPU-1")  # there is none in this machine
    with pytest.raises(PreflightError, match="one worker for each GPU") as error:
        check_workers(client)
    assert sorted(check_workers(client, uses_gpu=False)) == workers
    client.run(use, "GPU-2", workers=workers[:1])
    assert {one.device for one in check_workers(client).values()} == {"GPU-1", "GPU-2"}
    client.run(use, "")
    assert len(check_workers(client)) == 2
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

    # The sound one answers after a second, too: the time of the others begins with its answer.
    waking = threading.Timer(2, send, (signal.SIGCONT, workers[1]))
    send(signal.SIGSTOP, *workers)
    waking.start()
    try:
        with (
            # The scheduler shall not give up before the client does.
            dask.config.set({"distributed.comm.timeouts.connect": "10 minutes"}),
            caplog.at_level(logging.WARNING, "gpuclassify"),
        ):
            assert list(check_workers(client, answer_seconds=1)) == [workers[1]]
            assert f"{workers[0]} was not checked: no answer in 1 seconds" in told(caplog)
            send(signal.SIGSTOP, workers[1])
            with pytest.raises(PreflightError, match=r"^2 of 2 workers") as error:
                check_workers(client, answer_seconds=1, first_seconds=2)
    finally:
        waking.join()
        send(signal.SIGCONT, *workers)
    assert {row[3] for row in rows_of(error)} == {"no answer in 3 seconds"}
    assert sorted(check_workers(client, answer_seconds=120)) == workers


def test_a_worker_that_dies_of_the_probe_is_left_to_dask(client, workers, tmp_path, caplog):
    pid = client.run(os.getpid, workers=workers[:1])[workers[0]]

    def die():
        if os.getpid() == pid:
            os.kill(pid, signal.SIGKILL)

    with caplog.at_level(logging.WARNING, "gpuclassify"):
        assert list(check_workers(client, Notes(tmp_path, on_run=die))) == [workers[1]]
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


def test_workers_that_all_leave_while_they_are_asked_are_no_mistake(monkeypatch, tmp_path, caplog):
    async def leave(dask_worker):
        """What an adaptive cluster does to a worker that is idle, as all are that are asked."""
        scheduler, here = dask_worker.scheduler, dask_worker.address
        await scheduler.retire_workers(workers=[here], close_workers=True, remove=True)
        await asyncio.Event().wait()

    monkeypatch.setattr(preflight, "facts_here", leave)
    with (
        LocalCluster(n_workers=1, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
        caplog.at_level(logging.WARNING, "gpuclassify"),
    ):
        assert check_workers(client, Notes(tmp_path)) == {}
        assert not client.nthreads()
    assert "all workers have left during the check" in told(caplog)


def test_a_model_probe_downloads_measures_and_runs(checkpoint, one_torch_thread):
    from gpuclassify.inference.residency import MODELS

    mapper = DomainClassifier(model=str(checkpoint("domain")), device="cpu")
    probe = ModelProbe((mapper,))
    probe.fetch()
    MODELS.evict_idle()
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


def test_a_job_is_refused_before_its_first_part(client, workers, tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "one"}) + "\n")
    job = Pipeline([JsonlReader(f"{tmp_path}/in.jsonl"), JsonlWriter(f"{tmp_path}/out")])
    other = tmp_path / "site"
    other.mkdir()
    with installed(client, workers[0], other, "transformers", "1.2.3"):
        with pytest.raises(PreflightError, match="transformers") as error:
            job.run(client)
        assert "0 of 1 parts are written" in error.value.__notes__[-1]
        with dask.config.set({"gpuclassify.preflight": False}):
            assert job.run(client).rows_out == 1
        job.run(client)  # is done: nobody is asked
