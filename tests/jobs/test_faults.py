"""Workers that are lost, hang or lose their GPU: the results are those of an undisturbed run."""

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
from device_faults import ILLEGAL_ACCESS, BreakingClassifier
from distributed import Client, KilledWorker, LocalCluster, wait

from gpuclassify.classifiers import DomainClassifier
from gpuclassify.cluster.local import PatientNanny
from gpuclassify.jobs.execution import compute_tasks
from gpuclassify.jobs.input.readers import JsonlReader
from gpuclassify.jobs.output.writers import ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.workers.device_errors import BrokenDeviceError
from gpuclassify.workers.retire import EVENT_TOPIC, MOST_ATTEMPTS, retire_on_broken_device

pytestmark = pytest.mark.slow
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it

WORKERS = 4
SETTINGS = {
    "distributed.scheduler.allowed-failures": 20,
    # The last results of a worker that is gone are asked for as long as connecting may take.
    "distributed.comm.timeouts.connect": "30s",
    # A local cluster closes nannies whose new worker takes longer than this, 15 seconds, to start.
    "distributed.deploy.lost-worker-timeout": "10 minutes",
}


def start_cluster(workers):
    return LocalCluster(
        n_workers=workers, threads_per_worker=1, dashboard_address=None, worker_class=PatientNanny
    )


@pytest.fixture(scope="module")
def cluster():
    with dask.config.set(SETTINGS), start_cluster(WORKERS) as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    with Client(cluster) as client:
        client.wait_for_workers(WORKERS, timeout=120)
        yield client


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Input of some 45 parts: texts of several lengths, and ids that tell rows apart."""
    folder = tmp_path_factory.mktemp("faults")
    with (folder / "in.jsonl").open("w") as file:
        for row in range(600):
            file.write(json.dumps({"id": row, "text": f"text {row} " + "ü" * (row % 40)}) + "\n")
    return folder


def job(folder, out, *stages):
    reader = JsonlReader(f"{folder}/in.jsonl", part_bytes=700)
    writer = ParquetWriter(f"{out}", output_bytes=0)  # a file for each part
    return Pipeline([reader, *stages, writer])


def double(frame):
    """A stage that drops every third row."""
    time.sleep(0.1)
    frame = frame[frame["id"] % 3 != 0]
    return frame.assign(doubled=frame["id"] * 2)


def assert_whole(out):
    """Every row once, the books agree with the files, and no attempt is left behind."""
    parts = sorted(Path(out).glob("*.parquet"))
    found = pd.concat([pd.read_parquet(part) for part in parts])
    found = found.sort_values("id", ignore_index=True)
    ids = [row for row in range(600) if row % 3]
    assert found["id"].tolist() == ids
    assert found["doubled"].tolist() == [2 * row for row in ids]
    books = Path(out, "_gpuclassify")
    records = [json.loads(path.read_bytes()) for path in sorted((books / "records").iterdir())]
    assert [part.name for part in parts] == [record["name"] for record in records]
    assert sum(record["rows_out"] for record in records) == len(ids)
    assert list((books / "attempts").iterdir()) == []
    assert Path(out, "_SUCCESS").exists()


def at_parts(actions):
    """A report that acts when so many parts are done."""
    left = dict(actions)

    def report(done, total, summary):
        for count in [count for count in left if count <= done]:
            left.pop(count)()

    return report


def pids(client):
    return client.run(os.getpid, on_error="ignore")


def test_workers_that_are_killed_at_random(client, folder, tmp_path):
    chance = random.Random(3)
    killed = []

    def kill():
        while True:
            process = chance.choice(sorted(pids(client).values()))
            with contextlib.suppress(ProcessLookupError):  # it was killed before
                os.kill(process, signal.SIGKILL)
                killed.append(process)
                return

    actions = {chance.randrange(1, 35): kill for _ in range(3)}
    job(folder, tmp_path / "out", double).run(client, report=at_parts(actions))
    assert len(killed) == len(actions) == 3
    assert_whole(tmp_path / "out")


def test_nannies_that_restart_workers(client, folder, tmp_path):
    before = pids(client)

    def restart():
        client.restart_workers(sorted(before)[:2], timeout=120)

    job(folder, tmp_path / "out", double).run(client, report=at_parts({5: restart}))
    assert_whole(tmp_path / "out")
    assert len(set(before.values()) & set(pids(client).values())) == WORKERS - 2


def hanging(frame, flag):
    """The same; the one process that is told to stops in the middle of its first part."""
    if "STOPS_ITSELF" in os.environ and not Path(flag).exists():
        Path(flag).touch()
        os.kill(os.getpid(), signal.SIGSTOP)
        while not Path(f"{flag}-wake").exists():  # a thread may run on a little
            time.sleep(0.01)
        Path(f"{flag}-woken").touch()
    return double(frame)


def watch_workers(seconds, dask_scheduler):
    """Replace workers that are silent for so long; imports before that may take them longer."""
    dask_scheduler.worker_ttl = seconds
    check = dask_scheduler.periodic_callbacks["worker-ttl"]
    check.stop()
    check.callback_time = seconds * 1000
    check.start()


def import_all():
    import gpuclassify.jobs.pipeline  # noqa: F401


def test_workers_that_hang_are_replaced_and_wake_up_too_late(cluster, client, folder, tmp_path):
    command = [sys.executable, "-m", "distributed.cli.dask_worker", "--no-nanny", "--nthreads", "1"]
    search = os.pathsep.join(path for path in sys.path if path)
    sleeper = subprocess.Popen(
        [*command, "--no-dashboard", "--death-timeout", "60", cluster.scheduler_address],
        env={**os.environ, "PYTHONPATH": search, "STOPS_ITSELF": "1"},
    )
    flag = tmp_path / "flag"

    def stop():
        os.kill(victim, signal.SIGSTOP)
        client.run_on_scheduler(watch_workers, 8)

    try:
        client.wait_for_workers(WORKERS + 1, timeout=120)
        client.run(import_all)
        victim = next(pid for pid in pids(client).values() if pid != sleeper.pid)
        stage = functools.partial(hanging, flag=flag)
        job(folder, tmp_path / "out", stage).run(client, report=at_parts({3: stop}))
        assert flag.exists()
        assert " T " in Path(f"/proc/{sleeper.pid}/stat").read_text()  # it is stopped still
        assert_whole(tmp_path / "out")
        Path(f"{flag}-wake").touch()
        os.kill(sleeper.pid, signal.SIGCONT)
        sleeper.wait(timeout=120)  # it ends its part first
    finally:
        client.run_on_scheduler(watch_workers, 300)
        sleeper.kill()
        sleeper.wait()
    assert Path(f"{flag}-woken").exists()
    assert_whole(tmp_path / "out")
    assert victim not in pids(client).values()


def breaking(number, flag):
    """A task; the first process that runs number 3 has lost its GPU from then on."""
    broken = Path(f"{flag}-{os.getpid()}")
    if number == 3 and not Path(flag).exists():
        Path(flag).touch()
        broken.touch()
    if broken.exists():
        raise torch.AcceleratorError(ILLEGAL_ACCESS)
    time.sleep(0.05)
    return number


def test_a_worker_whose_gpu_broke_retires_and_its_tasks_run_elsewhere(client, tmp_path):
    before = pids(client)
    held = client.map(abs, [-number for number in range(8)], pure=False)
    wait(held)
    flag = tmp_path / "flag"
    run = retire_on_broken_device(breaking)
    futures = client.map(run, range(20), flag=str(flag), pure=False)
    assert client.gather(futures) == list(range(20))
    assert client.gather(held) == list(range(8))
    [file] = tmp_path.glob("flag-*")
    lost = int(file.name.removeprefix("flag-"))
    assert lost in before.values()
    client.wait_for_workers(WORKERS, timeout=120)  # the nanny has started another process
    assert lost not in pids(client).values()
    told = [event for _, event in client.get_events(EVENT_TOPIC)]
    assert [event["pid"] for event in told] == [lost]
    assert told[0]["reason"] == ILLEGAL_ACCESS.splitlines()[0]


def test_a_task_that_breaks_every_gpu_fails(client):
    @retire_on_broken_device
    def poison():
        raise torch.AcceleratorError(ILLEGAL_ACCESS)

    known = len(client.get_events(EVENT_TOPIC))
    with pytest.raises(BrokenDeviceError, match=f"{MOST_ATTEMPTS} workers, one after another"):
        client.submit(poison, pure=False).result()
    assert len(client.get_events(EVENT_TOPIC)) == known + MOST_ATTEMPTS


def test_without_a_worker_the_error_says_what_to_do():
    def poison():
        raise torch.AcceleratorError(ILLEGAL_ACCESS)

    with pytest.raises(BrokenDeviceError, match=r"illegal memory .*: .*start it again") as caught:
        retire_on_broken_device(poison)()
    assert isinstance(caught.value.__cause__, torch.AcceleratorError)


def test_jobs_and_lazy_frames_of_a_model_go_on_when_a_gpu_breaks(
    checkpoint, folder, tmp_path, monkeypatch
):
    flag = tmp_path / "flag"
    monkeypatch.setenv("BREAKS", str(flag))
    model = str(checkpoint("domain"))
    options = {"model": model, "device": "cpu", "score_field": "scores", "autocast": False}
    reader = JsonlReader(f"{folder}/in.jsonl", part_bytes=5_000)
    with dask.config.set(SETTINGS), start_cluster(2) as cluster, Client(cluster) as client:
        stages = [BreakingClassifier(**options), ParquetWriter(f"{tmp_path}/out")]
        Pipeline([reader, *stages]).run(client)
        assert len(list(tmp_path.glob("flag-*"))) == 1
        client.wait_for_workers(2, timeout=120)
        flag.unlink()
        lazy = dd.read_json(f"{folder}/in.jsonl", lines=True, blocksize=5_000)
        computed = BreakingClassifier(**options)(lazy).compute()
        assert len(list(tmp_path.glob("flag-*"))) == 2
    Pipeline([reader, DomainClassifier(**options), ParquetWriter(f"{tmp_path}/calm")]).run()
    found, calm = (
        pd.read_parquet(tmp_path / name).sort_values("id", ignore_index=True)
        for name in ("out", "calm")
    )
    expected = np.stack(calm.pop("scores"))
    for frame in (found, computed.sort_values("id", ignore_index=True)):
        np.testing.assert_allclose(np.stack(frame.pop("scores")), expected, atol=1e-5)
        assert frame.to_dict("list") == calm.to_dict("list")


def test_delayed_tasks_are_tried_again_after_lost_workers(client, tmp_path):
    """Of a Dask frame's partitions; the scheduler itself gives up sooner here."""

    def allow(failures, dask_scheduler=None):
        dask_scheduler.allowed_failures = failures

    client.run_on_scheduler(allow, 0)

    @dask.delayed(pure=False)
    def die_once(number):
        flag = tmp_path / f"died-{number}"
        if number == 2 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    @dask.delayed(pure=False)
    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        tasks = [die_once(number) for number in range(4)]
        assert sorted(compute_tasks(client, tasks)) == [0, 1, 2, 3]
        with pytest.raises(KilledWorker):
            list(compute_tasks(client, [die()]))
    finally:
        client.run_on_scheduler(allow, SETTINGS["distributed.scheduler.allowed-failures"])


def test_half_of_the_workers_are_lost_for_good(cluster, client, folder, tmp_path):
    """Comes last: as with spot machines, nannies are lost too."""
    deadline = time.monotonic() + 120
    while {nanny.worker_address for nanny in cluster.workers.values()} != set(pids(client)):
        assert time.monotonic() < deadline, "nannies do not know their workers"
        time.sleep(0.1)
    processes = pids(client)

    def lose():
        for nanny in list(cluster.workers.values())[: WORKERS // 2]:
            nanny.close_gracefully()  # it starts no other process
            os.kill(processes[nanny.worker_address], signal.SIGKILL)

    job(folder, tmp_path / "out", double).run(client, report=at_parts({5: lose}))
    assert_whole(tmp_path / "out")
    assert len(pids(client)) == WORKERS // 2
