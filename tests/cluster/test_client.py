"""`get_client` with real clusters."""

import contextlib
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dask import config
from distributed import Client, LocalCluster
from distributed.core import Status

from gpuclassify.cluster import get_client
from gpuclassify.cluster.client import _start_gpu
from gpuclassify.cluster.local import PatientNanny, start
from gpuclassify.cluster.preload import WORKER_TTL_SECONDS
from gpuclassify.workers.machine import usable_cores
from gpuclassify.workers.nvml import Gpu, GpuSurvey, survey_gpus
from tests.processes import local_client, search_path

pytestmark = pytest.mark.slow

has_no_gpu = pytest.mark.skipif(survey_gpus().has_gpu, reason="is about machines without a GPU")


@pytest.fixture(scope="module")
def client():
    with get_client("cpu", n_workers=1) as client:
        yield client


def run_script(tmp_path: Path, body: str) -> subprocess.CompletedProcess:
    path = tmp_path / "script.py"
    path.write_text(body)
    # Dask warns when a slow disk takes a second for a directory.
    quiet = {"PYTHONWARNINGS": "ignore:Creating scratch directories"}
    environment = {**os.environ, **quiet, "PYTHONPATH": search_path()}
    return subprocess.run(
        [sys.executable, path], env=environment, capture_output=True, text=True, timeout=300
    )


def test_a_cpu_worker_has_one_dask_thread_and_all_cores_for_torch(client):
    assert list(client.nthreads().values()) == [1]
    assert client.submit(torch.get_num_threads, pure=False).result() == usable_cores()


@pytest.mark.skipif(sys.platform != "linux", reason="the allocator is glibc's")
def test_a_cpu_worker_keeps_freed_memory(client):
    size_bytes, warm_up, times = 16 << 20, 20, 10

    def faults_of_refilling():  # in here, so that it travels by value
        def fill():
            torch.empty(size_bytes // 4).fill_(1.0)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

        counts = [fill() for _ in range(warm_up + times)]
        return counts[-1] - counts[warm_up - 1]

    pages = times * size_bytes // resource.getpagesize()
    assert client.submit(faults_of_refilling, pure=False).result(timeout=240) < pages / 10


def test_a_worker_that_joins_later_is_set_up_too_and_all_end_with_the_client():
    with get_client("cpu", n_workers=2) as client:
        assert isinstance(client, Client)
        assert client.dashboard_link.startswith("http://")
        threads = max(1, usable_cores() // 2)
        before = set(client.nthreads())
        client.cluster.scale(3)
        client.wait_for_workers(3)
        (late,) = set(client.nthreads()) - before
        found = client.run(torch.get_num_threads)
        assert found[late] == threads
        assert set(found.values()) == {threads}
        for_tokens = client.run(os.getenv, "RAYON_NUM_THREADS")
        assert set(for_tokens.values()) == {str(threads)}
        cluster, address = client.cluster, client.scheduler.address
    assert client.status == "closed"
    assert cluster.status == Status.closed
    host, port = address.removeprefix("tls://").split(":")
    with pytest.raises(OSError), socket.create_connection((host, int(port)), timeout=1):
        pass
    client.close()
    assert cluster.status == Status.closed


@pytest.fixture(scope="module")
def open_client():
    """A client of a cluster that takes any connection."""
    with local_client(protocol="tcp://") as client:
        yield client


@pytest.mark.parametrize("kind", ["address", "bare", "scheduler_file"])
def test_a_cluster_that_was_only_connected_to_stays_open(open_client, tmp_path, kind):
    client = open_client
    file, address = tmp_path / "scheduler.json", client.scheduler.address
    where = {
        "address": {"address": address},
        "bare": {"address": address.removeprefix("tcp://")},
        "scheduler_file": {"scheduler_file": file, "timeout": 120},
    }[kind]
    # As a scheduler writes it before a worker is there; a busy worker's metrics are no JSON.
    written = json.dumps({**client.scheduler_info(), "workers": {}})
    later = threading.Timer(0.5, file.write_text, [written])
    later.start()
    with get_client(**where, set_as_default=False) as second:
        assert second.scheduler.address == address
        assert second.submit(sum, [1, 2], pure=False).result() == 3
    later.join()
    assert second.status == "closed"
    assert client.cluster.status == Status.running
    assert client.submit(sum, [3, 4], pure=False).result() == 7


def test_a_file_that_is_there_and_no_scheduler_file_is_told_in_seconds(tmp_path):
    (tmp_path / "data.jsonl").write_text("[1]\n")
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"data\.jsonl is no scheduler file with"):
        get_client(scheduler_file=tmp_path / "data.jsonl", timeout=60)
    assert time.monotonic() - started < 20
    with pytest.raises(FileNotFoundError, match=r"no scheduler file .*absent.json after 0.2 sec"):
        get_client(scheduler_file=tmp_path / "absent.json", timeout="200ms")


@pytest.fixture
def answering():
    """Starts a server that answers each connection with these bytes; returns its address."""
    sockets = []

    def serve(answer):
        def accept():
            while True:
                try:
                    sockets.append(listener.accept()[0])
                except OSError:  # closed
                    return
                sockets[-1].sendall(answer)

        listener = socket.create_server(("127.0.0.1", 0))
        sockets.append(listener)
        port = listener.getsockname()[1]
        if answer is None:
            listener.close()
        else:
            threading.Thread(target=accept, daemon=True).start()
        return f"tcp://127.0.0.1:{port}"

    yield serve
    for opened in sockets:
        with contextlib.suppress(OSError):
            opened.shutdown(socket.SHUT_RDWR)
        opened.close()


@pytest.mark.parametrize(
    "answer",
    [None, b"", b"SSH-2.0-OpenSSH_9.6p1 Debian-4\r\n", bytes(8), (1).to_bytes(8, "little") * 3],
    ids=["nobody", "silence", "exabytes", "nothing", "no message"],
)
def test_what_is_no_scheduler_is_told_whatever_it_answers(answering, answer):
    address = answering(answer)
    with pytest.raises(OSError, match=f"no Dask scheduler answers at {address}; check"):
        get_client(address=address, timeout=2)


@pytest.mark.skipif(sys.platform == "win32", reason="has no masks of signals")
def test_workers_never_hear_of_an_interrupt():
    look = (signal.pthread_sigmask, signal.SIG_BLOCK, [])
    before = signal.getsignal(signal.SIGINT)
    with get_client("cpu", n_workers=1, threads_per_worker=1) as client:
        (blocked,) = client.run(*look).values()
        assert signal.SIGINT in blocked
        pid = client.submit(os.getpid, pure=False).result(timeout=120)
        os.kill(pid, signal.SIGINT)
        assert client.submit(os.getpid, pure=False).result(timeout=120) == pid
        (nanny,) = client.cluster.workers.values()
        os.kill(pid, signal.SIGKILL)
        while client.submit(os.getpid, pure=False).result(timeout=120) == pid:
            pass
        assert nanny.pid != pid
        (blocked,) = client.run(*look).values()
        assert signal.SIGINT in blocked  # of the process that took its place, too
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@has_no_gpu
def test_auto_starts_a_cpu_cluster_without_a_gpu(caplog):
    with caplog.at_level(logging.WARNING, "gpuclassify"), get_client(processes=False) as client:
        assert type(client.cluster) is LocalCluster
        assert len(client.nthreads()) == 1  # of one process, in which models take turns
    assert not [record for record in caplog.records if record.name.startswith("gpuclassify")]


@has_no_gpu
def test_gpu_without_a_gpu_is_one_error_with_the_cure():
    with pytest.raises(RuntimeError) as caught:
        get_client("gpu")
    message = str(caught.value)
    for cure in ("pip install 'gpuclassify[gpu]'", "nvidia-smi", "cluster_type='cpu'"):
        assert cure in message


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        *(
            ({"cluster_type": "cpu", name: 1}, TypeError, f"no option '{name}'.*'{nearest}'")
            for name, nearest in {
                "n_worker": "n_workers", "memory_limits": "memory_limit",
                "rmm_pool": "rmm_pool_size", "local_dir": "local_directory",
            }.items()
        ),
        ({"cluster_type": "cpu", "asynchronous": True}, TypeError, "no option 'asynchronous'"),
        ({"address": "tcp://127.0.0.1:1", "memory_limit": 1}, TypeError, "Client .*'memory_limit'"),
        ({"address": "http://10.0.0.1:8786"}, ValueError, "unknown address scheme 'http'"),
        ({"scheduler_file": "/"}, ValueError, "/ is no scheduler file"),
        ({"cluster_type": "tpu"}, ValueError, "is not one of 'auto', 'gpu', 'cpu', 'slurm', 'coil"),
        ({"cluster_type": "tcp://10.0.0.1:8786"}, ValueError, "is an address: pass it as address="),
        ({"cluster_type": "cpu", "address": "tcp://a:1"}, ValueError, "one or the other"),
        ({"n_workers": 2, "scheduler_file": "x.json"}, ValueError, "one or the other"),
        ({"address": "tcp://a:1", "scheduler_file": "x.json"}, ValueError, "give one of them"),
        ({"n_workers": 0}, ValueError, "n_workers=0"),
        ({"threads_per_worker": 0}, ValueError, "threads_per_worker=0"),
        ({"backend": "cudf", "rmm_maximum_pool_size": 0.9}, ValueError, r"above 0\.95"),
        ({"rmm_async": True, "rmm_pool_size": "8GB"}, ValueError, "replaces the pool"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused_before_anything_starts(arguments, error, message):
    with pytest.raises(error, match=message):
        get_client(**arguments)


def test_gpu_workers_count_gpus_as_nvml_does(monkeypatch):
    """With a cluster in place of dask-cuda's that takes what both have, and no GPU."""
    name = "CUDA_DEVICE_ORDER"

    class Cluster(LocalCluster):
        def __init__(self, **given):
            names = ("n_workers", "threads_per_worker", "worker_class", "dashboard_address")
            super().__init__(**{name: given[name] for name in names})

    monkeypatch.setitem(sys.modules, "dask_cuda", SimpleNamespace(LocalCUDACluster=Cluster))
    survey = GpuSurvey((Gpu(1, "GPU-a", "H200", 150_000_000_000),))
    workers = {"n_workers": 1, "threads_per_worker": None}
    memory = {"backend": "pandas", "torch_memory_fraction": None}
    with _start_gpu(survey, workers, memory, {}) as client:
        assert list(client.nthreads().values()) == [2]
        assert set(client.run(lambda: os.environ.get(name)).values()) == {"PCI_BUS_ID"}
    assert name not in os.environ
    assert name not in config.get("distributed.nanny.environ")


def test_a_script_prints_nothing_and_leaves_no_process(tmp_path):
    """Neither clusters that are closed nor one that ends with the script.

    A heartbeat is nearly always under way where one follows the other at once.
    """
    done = run_script(
        tmp_path,
        "from pathlib import Path\n"
        "import distributed.scheduler\n"
        "from gpuclassify.cluster import get_client\n"
        "if __name__ == '__main__':\n"
        "    distributed.scheduler.heartbeat_interval = lambda workers: 0.001\n"
        "    pids = []\n"
        "    for is_last in (False, True):\n"
        "        client = get_client('cpu', n_workers=1)\n"
        "        assert client.submit(sum, [1, 2]).result() == 3\n"
        "        pids += [worker.pid for worker in client.cluster.workers.values()]\n"
        "        if not is_last:\n"
        "            client.close()\n"
        "    Path(__file__).with_suffix('.pids').write_text(' '.join(map(str, pids)))\n",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    pids = (tmp_path / "script.pids").read_text().split()
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_a_nanny_waits_for_a_process_that_takes_its_time_to_die():
    options = {"n_workers": 1, "threads_per_worker": 1, "worker_class": PatientNanny}
    with start(LocalCluster, options, []) as client:
        (nanny,) = client.cluster.workers.values()
        pid = nanny.pid
        client.sync(nanny.close, timeout=1e-6)  # no time at all: Dask's own raises
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_local_workers_are_given_up_late_and_tasks_are_blamed_early(client):
    scheduler = client.cluster.scheduler
    assert scheduler.worker_ttl == WORKER_TTL_SECONDS
    assert scheduler.allowed_failures == config.get("distributed.scheduler.allowed-failures")


def test_no_process_asks_for_the_gil_as_it_ends():
    asked = {"distributed.admin.system-monitor.gil.enabled": True}
    with config.set(asked), get_client("cpu", n_workers=1) as client:
        on_workers = client.run(lambda dask_worker: dask_worker.monitor.monitor_gil_contention)
        services = [client.cluster.scheduler, *client.cluster.workers.values()]
        here = [service.monitor.monitor_gil_contention for service in services]
    assert len(here) == 2
    assert not any([*here, *on_workers.values()])


def test_coiled_that_is_not_reached_is_named():
    nobody = {"coiled.server": "http://127.0.0.1:1", "coiled.token": "x"}
    with config.set(nobody), pytest.raises(ConnectionError, match=r"Coiled is not reached: .*:1 "):
        get_client("coiled")


def test_a_script_without_the_guard_is_told_about_it(tmp_path):
    script = "from gpuclassify.cluster import get_client\nget_client('cpu', n_workers=1)\n"
    done = run_script(tmp_path, script)
    assert done.returncode != 0
    assert "get_client() runs again in a worker" in done.stderr
    starts = "RuntimeError: LocalCluster did not start"
    (told,) = [line for line in done.stderr.splitlines() if line.startswith(starts)]
    assert 'if __name__ == "__main__":' in told


GPU_SCRIPT = """
import os
import torch
from gpuclassify.cluster import get_client

def has_torch(share):
    import torch
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    kept = torch.empty(int(0.3 * total_bytes), dtype=torch.uint8, device="cuda")
    try:
        torch.empty(int((share - 0.3) * total_bytes), dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return kept.numel() == 0
    return True

def gpu_order():
    return os.environ.get("CUDA_DEVICE_ORDER")

def rmm_kind():
    import rmm
    return type(rmm.mr.get_current_device_resource()).__name__

if __name__ == "__main__":
    with get_client("gpu", **{settings}) as client:
        assert set(client.nthreads().values()) == {{{threads}}}
        assert set(client.run(rmm_kind).values()) == {{{kind!r}}}, client.run(rmm_kind)
        assert client.submit(has_torch, {share} - 0.05).result()
        assert not client.submit(has_torch, {share} + 0.05).result()
        assert set(client.run(gpu_order).values()) == {{"PCI_BUS_ID"}}
    assert not torch.cuda.is_initialized()
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("settings", "threads", "kind", "share"),
    [
        ({}, 2, "CudaMemoryResource", 0.9),
        ({"backend": "cudf"}, 1, "PoolMemoryResource", 0.45),
        ({"backend": "cudf", "rmm_async": True}, 1, "LimitingResourceAdaptor", 0.45),
    ],
)
def test_gpu_workers_share_the_device_with_rmm_for_cudf_frames(
    tmp_path, settings, threads, kind, share
):
    script = GPU_SCRIPT.format(settings=settings, threads=threads, kind=kind, share=share)
    done = run_script(tmp_path, script)
    assert done.returncode == 0, done.stderr


PROGRAM = """
from gpuclassify.cluster import get_client
if __name__ == "__main__":
    with get_client("cpu", n_workers=1) as client:
        print(client.submit(sum, [1, 2]).result())
"""
NO_SEMAPHORES = """
import _multiprocessing, os
class SemLock(_multiprocessing.SemLock):
    def __new__(cls, *_):
        raise OSError(38, os.strerror(38))
_multiprocessing.SemLock = SemLock
"""


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("", "<stdin> is no file: it was read from standard input"),
        (
            NO_SEMAPHORES,
            "([Errno 38] Function not implemented). Mount /dev/shm",
        ),
    ],
)
def test_a_program_that_can_have_no_workers_is_told_why(tmp_path, start, words):
    script = tmp_path / "script.py"
    script.write_text(start + PROGRAM)
    command = [sys.executable, *([str(script)] if start else ["-"])]
    environment = os.environ | {"PYTHONPATH": search_path()}
    with script.open() as file:
        done = subprocess.run(
            command, stdin=file, env=environment, capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 1
    assert words in done.stderr.splitlines()[-1]
