"""Make Dask clients with `get_client`, and configure any running cluster with `prepare`."""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuclassify.cluster.sizing import (
    AUTO,
    ImpossibleClusterError,
    Size,
    check_options,
    choose_gpus,
    cpu_cluster_options,
    gpu_cluster_options,
    memory_shares,
    missing_for_gpu,
    names_of,
    refuse_crowd,
    tasks_per_worker,
)
from gpuclassify.settings.checks import check_choice, check_count, install, with_plain_values
from gpuclassify.workers.machine import usable_cores
from gpuclassify.workers.nvml import GpuSurvey, survey_gpus

if TYPE_CHECKING:
    from distributed import Client, Security, WorkerPlugin

logger = logging.getLogger(__name__)

CLUSTER_TYPES = ("auto", "gpu", "cpu", "slurm", "coiled")
# Maximum time for a scheduler to write its file, once the file exists.
WRITING_SECONDS = 2.0


class NoSchedulerError(OSError):
    """Error raised if no Dask scheduler answers at its `address`."""

    def __init__(
        self, address: str, instead: str = "start a cluster here with get_client('auto')"
    ) -> None:
        super().__init__(
            f"no Dask scheduler answers at {address}; check that it runs and that this machine "
            f"reaches its port, or {instead}"
        )
        self.address = address


@with_plain_values
def get_client(
    cluster_type: str = "auto",
    *,
    address: str | None = None,
    scheduler_file: str | Path | None = None,
    n_workers: int | list[int] | None = None,
    threads_per_worker: int | None = None,
    security: object = None,
    backend: str = "pandas",
    rmm_pool_size: Size | None = AUTO,
    rmm_maximum_pool_size: Size | None = AUTO,
    rmm_async: bool = False,
    torch_memory_fraction: float | str | None = AUTO,
    enable_cudf_spill: bool = False,
    **options: Any,
) -> Client:
    """Return a Dask client of a new or a running cluster.

    Nothing is printed. The dashboard is at ``client.dashboard_link``, if bokeh is installed. It
    listens on the scheduler's interface or, because it has no TLS, only on this machine if the
    cluster uses TLS. A cluster that was started here closes with the client; an interrupt during
    start or close kills its workers. A running cluster stays open, and its workers are not changed;
    see `prepare`.

    Parameters
    ----------
    cluster_type : {"auto", "gpu", "cpu", "slurm", "coiled"}
        ``"gpu"`` starts one worker per visible GPU with dask-cuda. ``"cpu"`` starts few worker
        processes with many torch threads each. On both, Dask waits longer for a lost worker to
        come back (``deploy.lost-worker-timeout``, in this process). ``"auto"`` is ``"gpu"`` if a
        GPU is visible and its requirements are installed. If they are not, a warning is logged,
        and by default one CPU worker is started, on which torch may still use the first GPU.
        ``"slurm"`` submits jobs with workers (`gpuclassify.cluster.slurm.plan_slurm` has its
        options). ``"coiled"`` starts machines in the user's cloud account, with the arguments of
        ``coiled.Cluster`` and `private_environ`, environment variables that are hidden from
        Coiled, such as ``HF_TOKEN`` if it is set here.
    address : str, optional
        Address of a running scheduler, for example ``"tcp://10.0.0.1:8786"``.
    scheduler_file : str or Path, optional
        File of a running scheduler. If it is missing, it is waited for as long as for a Dask
        connection; if it is incomplete, for 2 seconds.
    n_workers : int, optional
        Workers to start. Default: one per GPU, or one per 8 CPU cores, and at least two if there is
        memory for them. With Coiled also ``[minimum, maximum]``.
    threads_per_worker : int, optional
        Tasks that a worker runs at a time. Default: two on a GPU with pandas frames, so that one
        part is read and tokenized while another one runs; else, and with Coiled, one.
    security : bool, path, dict or distributed.Security, optional
        TLS for every connection. True makes a certificate for this cluster's processes only; a
        directory has ``ca.pem``, ``cert.pem`` and ``key.pem``; a dict has the fields of
        ``distributed.Security``; False is no TLS. Default: True for Slurm clusters, whose nodes
        reach the scheduler, and for local clusters that listen only on this machine, because its
        other users could connect. With ``host=`` and the like, the default is no TLS and a warning.
    backend : {"pandas", "cudf"}
        GPU workers: library of the frames. cuDF frames share the device with torch.
    rmm_pool_size : "auto", int, float, str or None
        GPU workers: initial size of RMM's growing pool, in bytes, as text (``"8GB"``) or as a share
        of the device. None is no pool. ``"auto"`` is 0.3 for cuDF frames, else None.
    rmm_maximum_pool_size : "auto", int, float, str or None
        GPU workers: maximum size of the pool; ``"auto"`` is 0.5. Dask moves stored frames to the
        host at 0.8 of it.
    rmm_async : bool
        GPU workers: use the driver's asynchronous allocator instead of the pool, up to
        `rmm_maximum_pool_size`.
    torch_memory_fraction : "auto", float or None
        GPU workers: maximum share of the device for torch's allocator; None for no limit.
        ``"auto"`` is 0.45 with RMM's pool or asynchronous allocator, and 0.9 without. With
        ``rmm_allocator_external_lib_list="torch"`` torch takes its memory from RMM instead.
    enable_cudf_spill : bool
        GPU workers: allow cuDF to move frames to the host.
    **options
        Passed to ``dask_cuda.LocalCUDACluster``, ``distributed.LocalCluster``,
        ``dask_jobqueue.SLURMCluster``, ``coiled.Cluster`` or, with an address or a scheduler
        file, ``distributed.Client``, after a check of their names.

    Returns
    -------
    distributed.Client
        Client, also a context manager.

    Raises
    ------
    TypeError
        An option does not exist; the error suggests the nearest one.
    ValueError
        Settings contradict each other, shares of a GPU sum to more than 0.95, or an argument of
        Coiled is a secret.
    RuntimeError
        The machine lacks requirements for ``"gpu"``, ``backend="cudf"`` or the number of workers
        (`ImpossibleClusterError`, before anything is started), or the cluster does not start.
    OSError
        No scheduler answers (`NoSchedulerError`), Coiled is not reached, the scheduler file does
        not appear, or a file of a certificate is missing.

    Examples
    --------
    Workers are new processes that import the script, so that a script needs the guard:

    >>> from gpuclassify.cluster import get_client
    >>> if __name__ == "__main__":  # doctest: +SKIP
    ...     with get_client() as client:
    ...         print(client.dashboard_link)
    """
    from gpuclassify.cluster.security import listens_here_alone, make_security

    if isinstance(cluster_type, str) and "://" in cluster_type:
        raise ValueError(f"cluster_type={cluster_type!r} is an address: pass it as address=")
    check_choice("cluster_type", cluster_type, CLUSTER_TYPES)
    if address is not None or scheduler_file is not None:
        if cluster_type != "auto" or n_workers is not None:
            raise ValueError(
                "address= and scheduler_file= connect to a cluster that is running; "
                "cluster_type= and n_workers= start a new one. Give one or the other."
            )
        return _connect(address, scheduler_file, security, options)
    workers: dict[str, Any] = {"n_workers": n_workers, "threads_per_worker": threads_per_worker}
    memory: dict[str, Any] = {
        "backend": backend,
        "rmm_pool_size": rmm_pool_size,
        "rmm_maximum_pool_size": rmm_maximum_pool_size,
        "rmm_async": rmm_async,
        "torch_memory_fraction": torch_memory_fraction,
        "enable_cudf_spill": enable_cudf_spill,
    }
    if security is not None:
        options["security"] = make_security(security)
    if cluster_type in ("slurm", "coiled"):
        return _start_elsewhere(cluster_type, workers, memory, options)
    check_count("n_workers", n_workers, may_be_none=True)
    check_count("threads_per_worker", threads_per_worker, may_be_none=True)
    gpu_cluster_options(options, **memory)  # mistakes fail on machines without a GPU, too
    if security is None and listens_here_alone(options):
        options["security"] = make_security(True)
    if cluster_type == "cpu":
        _refuse_backend(backend, None)
        return _start_cpu(workers, options)
    return _start_gpu_or_cpu(cluster_type, workers, memory, options)


def _start_elsewhere(
    cluster_type: str, workers: dict[str, Any], memory: dict[str, Any], options: dict[str, Any]
) -> Client:
    """Start a Slurm or Coiled cluster with the arguments that the caller of `get_client` passed.

    Arguments that equal a default are left out, because the defaults are for local clusters.
    """
    signature = inspect.signature(get_client).parameters
    arguments = {name: size for name, size in memory.items() if size != signature[name].default}
    arguments |= {name: count for name, count in workers.items() if count is not None} | options
    if cluster_type == "slurm":
        try:
            from gpuclassify.cluster.slurm import start_slurm
        except ModuleNotFoundError as err:
            if err.name != "dask_jobqueue":
                raise
            raise RuntimeError(
                f"cluster_type='slurm' needs dask-jobqueue: {install('slurm')}"
            ) from err
        return start_slurm(arguments)
    from gpuclassify.cluster.coiled import start_coiled

    if "security" in options:
        raise ValueError("security= is not for Coiled, which makes TLS certificates by itself")
    arguments.pop("backend", None)  # Coiled's arguments do not include it
    threads = tasks_per_worker(arguments.pop("threads_per_worker", None), False, memory["backend"])
    try:
        return start_coiled(arguments, threads_per_worker=threads)
    except OSError as err:
        raise ConnectionError(
            f"Coiled is not reached: {err}. Check the network, and the account with coiled login, "
            "or start a cluster here with get_client('auto')"
        ) from err


def _start_cpu(workers: dict[str, Any], options: dict[str, Any]) -> Client:
    from distributed import LocalCluster, Nanny, Worker

    from gpuclassify.cluster.local import PatientNanny, start
    from gpuclassify.cluster.preload import ProcessSettings

    check_options(options, [LocalCluster, Nanny, Worker], names_of(get_client))
    arguments, torch_threads = cpu_cluster_options(options, **workers)
    if arguments.get("processes") is not False:
        refuse_crowd(arguments["n_workers"])
        arguments.setdefault("worker_class", PatientNanny)
    return start(LocalCluster, arguments, [ProcessSettings(torch_threads)])


def _refuse_backend(backend: str, survey: GpuSurvey | None) -> None:
    """Raise ImpossibleClusterError if `backend` is "cudf", and this machine lacks cudf or a GPU."""
    if backend != "cudf":
        return
    lacks = "cudf is not installed"
    if find_spec("cudf") is not None:
        lacks = (survey or survey_gpus()).absent_because
    if lacks:
        raise ImpossibleClusterError(
            f'backend="cudf" needs a GPU and cudf on the workers, and here {lacks}: leave it out, '
            "which takes pandas frames, connect to a cluster that has GPUs (address=),"
            f" or on a machine with one {install('gpu')}"
        )


def _start_gpu_or_cpu(
    cluster_type: str, workers: dict[str, Any], memory: dict[str, Any], options: dict[str, Any]
) -> Client:
    devices = options.get("CUDA_VISIBLE_DEVICES")
    survey = survey_gpus(
        ",".join(map(str, devices)) if isinstance(devices, list | tuple) else devices
    )
    missing = missing_for_gpu(survey)
    if not missing:
        return _start_gpu(survey, workers, memory, options)
    if cluster_type == "gpu":
        raise ImpossibleClusterError(
            f"cluster_type='gpu' cannot start here: {'; '.join(missing)}. Install the GPU "
            f"packages with {install('gpu')}, of gpu-cu12 for a driver of CUDA 12, and a CUDA "
            "build of torch, check the driver with nvidia-smi, "
            "or use cluster_type='cpu'."
        )
    _refuse_backend(memory["backend"], survey)
    if survey.has_gpu:
        logger.warning(
            "an NVIDIA GPU is here, but no GPU cluster can start: %s. One CPU worker is used; "
            "%s gives one worker per GPU, `gpuclassify doctor` lists what else is missing.",
            "; ".join(missing),
            install("gpu"),
        )
        workers = workers | {"n_workers": workers["n_workers"] or 1}
    return _start_cpu(workers, options)


def _start_gpu(
    survey: GpuSurvey, workers: dict[str, Any], memory: dict[str, Any], options: dict[str, Any]
) -> Client:
    from dask import config
    from dask_cuda import LocalCUDACluster
    from distributed import LocalCluster, Nanny, Worker

    from gpuclassify.cluster.local import PatientNanny, start
    from gpuclassify.cluster.preload import ProcessSettings, TorchMemoryFraction

    targets = [LocalCUDACluster, LocalCluster, Nanny, Worker]
    check_options(options, targets, names_of(get_client))
    gpus = choose_gpus(survey.gpus, workers["n_workers"])
    sizes = [gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None]
    device_bytes = min(sizes) if len(sizes) == len(gpus) else None
    arguments, torch_fraction = gpu_cluster_options(options, **memory, device_bytes=device_bytes)
    arguments |= {
        **(memory_shares(len(gpus)) if "memory_limit" not in arguments else {}),
        "n_workers": len(gpus),
        "threads_per_worker": tasks_per_worker(
            workers["threads_per_worker"], True, memory["backend"]
        ),
        "CUDA_VISIBLE_DEVICES": [gpu.visible_name for gpu in gpus],
    }
    if not options.get("log_spilling"):  # spill logging needs dask-cuda's nannies
        arguments.setdefault("worker_class", PatientNanny)
    plugins: list[WorkerPlugin] = [ProcessSettings(max(1, usable_cores() // len(gpus)))]
    if torch_fraction is not None:
        plugins.append(TorchMemoryFraction(torch_fraction))
    # NVML, and so the survey, numbers GPUs by bus; CUDA by speed, unless configured otherwise.
    with config.set({"distributed.nanny.environ.CUDA_DEVICE_ORDER": "PCI_BUS_ID"}):
        return start(LocalCUDACluster, arguments, plugins)


def _connect(
    address: str | None,
    scheduler_file: str | Path | None,
    security: object,
    options: dict[str, Any],
) -> Client:
    from dask import config
    from dask.utils import parse_timedelta
    from distributed import Client
    from distributed.comm import parse_address
    from distributed.comm.registry import get_backend

    from gpuclassify.cluster.security import make_security, warn_if_open

    check_options(options, [Client], names_of(get_client))
    if address is not None and scheduler_file is not None:
        raise ValueError(
            f"address={address!r} and scheduler_file={str(scheduler_file)!r} both name a "
            "scheduler; give one of them"
        )
    if security is True:
        raise ValueError(
            "security=True makes a new certificate, which a running scheduler does not know; "
            "give the directory or dict of the certificates that it was started with"
        )
    timeout_seconds = parse_timedelta(
        options.get("timeout") or config.get("distributed.comm.timeouts.connect"), "s"
    )
    if scheduler_file is not None:
        address = _read_scheduler_file(Path(scheduler_file), timeout_seconds)
    assert address is not None
    get_backend(parse_address(address)[0])  # raises ValueError for unknown protocols
    security = make_security(security)
    _shake_hands(address, security, timeout_seconds)
    try:
        client = Client(address, security=security, **options)
    except OSError as err:
        raise NoSchedulerError(address) from err
    warn_if_open(
        [client.scheduler.address],
        "Start it with certificates (dask scheduler --protocol tls:// --tls-ca-file ...), and pass "
        "them as security=",
    )
    return client


def _shake_hands(address: str, security: Security | None, timeout_seconds: float) -> None:
    """Raise NoSchedulerError unless a scheduler answers; a client would wait for it forever."""
    from distributed import Security
    from distributed.comm import connect
    from distributed.utils import LoopRunner, wait_for

    arguments = (security or Security()).get_connection_args("client")

    async def shake_hands() -> None:
        connecting = connect(address, timeout=timeout_seconds, **arguments)
        comm = await wait_for(connecting, timeout_seconds)
        await comm.close()

    try:
        LoopRunner().run_sync(shake_hands)
    except TypeError:  # TLS without certificates
        raise
    except Exception as err:  # answers of other protocols may cause any error
        raise NoSchedulerError(address) from err


def _read_scheduler_file(path: Path, timeout_seconds: float) -> str:
    """Wait until a scheduler file exists and is complete; return the scheduler's address."""
    deadline = time.monotonic() + timeout_seconds
    is_there = False
    while True:
        cure = f"dask scheduler --scheduler-file {path}"
        error: Exception = FileNotFoundError(
            f"no scheduler file {path} after {timeout_seconds:g} seconds; start one with {cure}"
        )
        try:
            return str(json.loads(path.read_text())["address"])
        except FileNotFoundError:
            pass
        except (IsADirectoryError, ValueError, KeyError, TypeError):
            error = ValueError(f"{path} is no scheduler file with an 'address', as of {cure}")
            if not is_there:
                is_there, deadline = True, min(deadline, time.monotonic() + WRITING_SECONDS)
        if time.monotonic() >= deadline:
            raise error
        time.sleep(0.05)


def prepare(client: Client, *, threads: int | None = None) -> Client:
    """Configure a running cluster for classifying: its scheduler, and present and future workers.

    It changes only the settings below, and keeps larger timeouts and limits. Timeouts apply to the
    whole process, so that a scheduler in this process shares them with it.

    - scheduler: a worker is removed after 15 minutes without a heartbeat (``worker-ttl``; Dask's
      default is 5), because a task that holds Python's GIL delays the heartbeat;
    - scheduler: a task may lose 10 workers before it fails (``allowed-failures``; Dask's default is
      3), because preemption of spot machines is not the task's fault;
    - scheduler and workers: a silent connection is closed after 120 seconds
      (``comm.timeouts.tcp``; Dask's default is 30). Open connections keep their timeout. The
      timeout of connecting is not changed, because it also delays the loss of a worker's results;
    - workers: threads of torch;
    - workers with a nanny: threads of tokenizing, unless ``RAYON_NUM_THREADS`` is set there; and
      glibc keeps freed memory instead of returning it at once.

    ``distributed.worker.memory`` is not changed, because its limits depend on the machine. Dask
    counts a model as unmanaged memory: workers pause at 80% of their memory limit and are killed at
    95%, so that a limit must leave room for the model.

    Parameters
    ----------
    client : distributed.Client
        Client of any cluster. The package must be installed on the workers; the scheduler needs
        only Dask.
    threads : int, optional
        Threads of torch and of tokenizing in each worker. Default: the cores that a worker may
        use, divided by the number of present workers with the same cores.

    Returns
    -------
    distributed.Client
        The same client.

    Raises
    ------
    ValueError
        There is no worker, so that the share of cores is unknown: pass `threads`. Or `threads` is
        below 1.
    RuntimeError
        The client is asynchronous.

    Examples
    --------
    >>> from gpuclassify.cluster import prepare
    >>> client = prepare(Client("tcp://10.0.0.1:8786"))  # doctest: +SKIP
    """
    if client.asynchronous:
        raise RuntimeError(
            "prepare() waits for the cluster: use a Client without asynchronous=True"
        )
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads} is below 1; leave it out for the cores' share")
    from gpuclassify.cluster.preload import set_up

    set_up(client, threads, 1 if threads is not None else _workers_sharing_cores(client))
    return client


def _workers_sharing_cores(client: Client) -> int:
    """Return the largest number of workers of one host that may use the same set of CPU cores."""

    def cores() -> tuple[str, tuple[int, ...]]:
        import os
        import socket

        affinity = getattr(os, "sched_getaffinity", lambda pid: range(os.cpu_count() or 1))
        return socket.gethostname(), tuple(sorted(affinity(0)))

    cores_by_worker = client.run(cores)
    if not cores_by_worker:
        raise ValueError(
            "no worker is there yet, so that their share of the cores is unknown; wait for them "
            "with client.wait_for_workers(1), or give threads="
        )
    return max(Counter(cores_by_worker.values()).values())
