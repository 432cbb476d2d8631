"""Workers in Slurm jobs: what the options of `get_client` mean there, and starting them."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuclassify.cluster.check_options import check_options, check_whole
from gpuclassify.cluster.sizing import CORES_PER_WORKER, gpu_cluster_options
from gpuclassify.cluster.slurm_script import parse_walltime
from gpuclassify.pages.tables import html_table

if TYPE_CHECKING:
    from distributed import Client

MEMORY_OPTIONS = (
    "backend", "rmm_pool_size", "rmm_maximum_pool_size", "rmm_async", "torch_memory_fraction",
    "enable_cudf_spill",
)  # fmt: skip
# Options of `dask cuda worker`, by the names that LocalCUDACluster gives them. dask-cuda need not
# be installed where jobs are submitted, so that the names are here and a test compares them.
CUDA_FLAGS = {
    name: "--" + name.replace("_", "-")
    for name in (
        "rmm_pool_size", "rmm_maximum_pool_size", "rmm_async", "rmm_release_threshold",
        "rmm_managed_memory", "rmm_log_directory", "rmm_track_allocations",
        "device_memory_limit", "enable_cudf_spill", "cudf_spill_stats", "pre_import",
        "worker_class", "enable_tcp_over_ucx", "enable_infiniband", "enable_nvlink",
        "enable_rdmacm",
    )
} | {"rmm_allocator_external_lib_list": "--set-rmm-allocator-for-libs"}  # fmt: skip
# Of the walltime, and at most: time for a worker to hand over what it holds.
LEAVE_BEFORE_SHARE, LEAVE_BEFORE_MOST_SECONDS = 0.2, 300.0
STAGGER_SHARE = 0.2  # of that time, so that workers that started together do not leave together
LOOK_EVERY_SECONDS = 30.0  # squeue is a load on a controller that everybody shares


@dataclass(frozen=True)
class SlurmPlan:
    """What is submitted.

    Attributes
    ----------
    arguments : dict
        Of ``dask_jobqueue.SLURMCluster``.
    jobs : int
        How many; each has the same workers.
    cores_per_worker : int
        CPUs for torch and tokenizing in each worker.
    torch_fraction : float or None
        Share of its GPU that torch may take; None sets no bound.
    """

    arguments: dict[str, Any] = field(repr=False)
    jobs: int
    cores_per_worker: int
    torch_fraction: float | None

    def _repr_html_(self) -> str:
        shown = {**vars(self), **self.arguments}
        return html_table("SlurmPlan", [(k, str(v)) for k, v in shown.items() if k != "arguments"])


def start_slurm(options: dict[str, Any]) -> Client:
    """Submit Slurm jobs with workers, and return a client of the scheduler, which runs here.

    The scheduler must be reachable from the nodes: see `interface`. Connections are encrypted. The
    client owns the cluster: closing it cancels the jobs. Jobs that end are replaced.

    Parameters
    ----------
    options : dict
        See `plan_slurm`; also ``look_every_seconds``, the time between two looks at squeue
        (default 30).

    Returns
    -------
    distributed.Client
        As soon as the jobs are submitted; they may wait in the queue. ``wait_for_workers`` waits.

    Raises
    ------
    TypeError
        An option does not exist; the error names the nearest one.
    ValueError
        Options exclude each other or are out of range.
    RuntimeError
        dask-jobqueue is not installed, sbatch is missing, or Slurm refuses the job.
    """
    try:
        from gpuclassify.cluster.slurm_cluster import ClosingCluster, JobKeeper
    except ModuleNotFoundError as err:
        if err.name != "dask_jobqueue":
            raise
        raise RuntimeError(
            "cluster_type='slurm' needs dask-jobqueue: pip install 'gpuclassify[slurm]'"
        ) from err
    from gpuclassify.cluster.local import own, unbroken
    from gpuclassify.cluster.security import warn_if_open

    options = dict(options)
    look_every_seconds = options.pop("look_every_seconds", None) or LOOK_EVERY_SECONDS
    check_slurm_options(options)
    plan = plan_slurm(**options)
    cluster = ClosingCluster(**plan.arguments)
    try:
        keeper = JobKeeper(cluster, look_every_seconds)
        warn_if_open(
            (comm.listen_address for comm in cluster.scheduler.listeners),
            "Leave security= and protocol= out, which makes a certificate if cryptography is here "
            "(pip install 'gpuclassify[tls]'), or pass certificates",
        )
        unbroken(partial(keeper.submit, plan.jobs), cluster)
    except BaseException:
        unbroken(cluster.close, cluster)
        raise

    def set_up_workers(client: Client) -> None:
        from gpuclassify.cluster.plugins import TorchMemoryFraction
        from gpuclassify.cluster.prepare import set_up

        set_up(client, plan.cores_per_worker)
        if plan.torch_fraction is not None:
            client.register_plugin(TorchMemoryFraction(plan.torch_fraction))

    return own(cluster, set_up_workers)


def plan_slurm(
    *,
    n_workers: int | None = None,
    gpus_per_job: int | None = None,
    threads_per_worker: int = 1,
    cores: int | None = None,
    processes: int | None = None,
    memory: str | int | None = None,
    partition: str | None = None,
    walltime: str | None = None,
    leave_before: str | float | None = None,
    job_extra: Iterable[str] = (),
    prologue: Iterable[str] = (),
    **options: Any,
) -> SlurmPlan:
    """Translate options into those of ``dask_jobqueue.SLURMCluster``.

    Parameters
    ----------
    n_workers : int, optional
        Workers of all jobs together: one for each GPU with `gpus_per_job`. Default: one job's.
    gpus_per_job : int, optional
        GPUs of a job, each with a worker of dask-cuda. None or 0: plain workers, without GPUs.
    threads_per_worker : int
        Tasks that a worker runs at a time.
    cores : int, optional
        CPUs of a job. Default: 8 for each of its workers.
    processes : int, optional
        Workers of a job without GPUs. Default: 1.
    memory : str or int
        Of a job: ``"64GB"`` or bytes. Workers share it evenly.
    partition, account : str, optional
        As for ``sbatch``.
    walltime : str, optional
        In Slurm's forms: ``"30"`` minutes, ``"04:00:00"``, ``"1-12"`` days and hours. Default:
        dask-jobqueue's, half an hour.
    leave_before : str or float, optional
        Time before the walltime's end at which workers leave and hand over their results, in
        seconds or such as ``"2m"``; each at another moment, up to a fifth of it earlier or later.
        Default: a fifth of the walltime, at most 5 minutes.
    job_extra : iterable of str
        More options of ``sbatch``: ``["--constraint=a100", "--exclusive"]``.
    prologue : iterable of str
        Lines of shell before the worker: ``["module load cuda", "source env/bin/activate"]``.
    **options
        Of ``dask_jobqueue.SLURMCluster`` (`python`, `interface`, `log_directory`, ...), of
        `get_client` for memory of GPUs, and of ``dask cuda worker`` by LocalCUDACluster's names.
        Without `security` (False for none) and `protocol`, connections have TLS with a certificate
        of their own, which workers read from files in `shared_temp_directory`, by default the
        current one, that nobody else may read. Dashboards listen on this machine and the nodes
        alone.

    Raises
    ------
    ValueError
        Options exclude each other or are out of range.
    """
    from dask import config

    from gpuclassify.cluster.local import LOOPBACK, dashboard_address
    from gpuclassify.cluster.security import make_security

    section = f"jobqueue.{options.get('config_name') or 'slurm'}."
    gpus = check_whole("gpus_per_job", gpus_per_job or 0, 0)
    jobs, workers = _count_jobs(n_workers, gpus, processes)
    cores = cores or config.get(section + "cores", None) or CORES_PER_WORKER * workers
    cores = check_whole("cores", cores, workers)
    memory = memory or config.get(section + "memory", None)
    if memory is None:
        raise ValueError('memory= is missing: of a job, all its workers together, as in "64GB"')
    walltime = walltime or config.get(section + "walltime", None)
    memory_options = {name: options.pop(name) for name in MEMORY_OPTIONS if name in options}
    cuda_options = {name: options.pop(name) for name in CUDA_FLAGS if name in options}
    flags, numbering, torch_fraction = ["--dashboard-address", f"{LOOPBACK}:0"], [], None
    if gpus:
        # Slurm and dask-cuda count GPUs by bus; CUDA by speed, unless it is told otherwise.
        numbering = ["export CUDA_DEVICE_ORDER=PCI_BUS_ID"]
        settings, torch_fraction = gpu_cluster_options(cuda_options, **memory_options)
        flags += cuda_arguments(settings)
    for given in (job_extra, prologue):
        if isinstance(given, str):
            raise ValueError(f"got the text {given!r}, where a list is wanted: [{given!r}]")
    lines = {
        "job_extra_directives": [*([f"--gres=gpu:{gpus}"] if gpus else []), *job_extra],
        "job_script_prologue": [*numbering, *_leaving(walltime, leave_before), *prologue],
        "worker_extra_args": flags,
    }
    for name, ours in lines.items():  # beside what the call or the user's configuration has there
        configured = config.get(section + name.replace("_", "-"), None)
        lines[name] = [*ours, *(options.pop(name, None) or configured or [])]
    if options.get("protocol") is None and "security" not in options:
        with contextlib.suppress(ImportError):  # of cryptography: the scheduler is told to be open
            options["security"] = make_security(True)
    if options.get("security") is not None:
        folder = config.get(section + "shared-temp-directory", None) or str(Path.cwd())
        options.setdefault("shared_temp_directory", folder)
    scheduler_options = {"dashboard_address": dashboard_address()}
    scheduler_options |= config.get(section + "scheduler-options", None) or {}
    scheduler_options |= options.pop("scheduler_options", {})
    arguments = {
        "cores": check_whole("threads_per_worker", threads_per_worker) * workers,
        "job_cpu": cores,
        "processes": workers,
        "memory": memory,
        "queue": partition,
        "walltime": walltime,
        "scheduler_options": scheduler_options,
        **({"worker_command": "dask_cuda.cli"} if gpus else {}),
        **lines,
    }
    return SlurmPlan(arguments | options, jobs, cores // workers, torch_fraction)


def check_slurm_options(options: Mapping[str, Any]) -> None:
    """Refuse names that neither `plan_slurm` nor dask-jobqueue has.

    Raises
    ------
    TypeError
        With the nearest existing names.
    """
    from dask_jobqueue import SLURMCluster
    from dask_jobqueue.core import Job, JobQueueCluster
    from dask_jobqueue.slurm import SLURMJob

    known = {*MEMORY_OPTIONS, *(CUDA_FLAGS if options.get("gpus_per_job") else ())}
    targets = [SLURMCluster, SLURMJob, Job, JobQueueCluster, plan_slurm]
    check_options([name for name in options if name not in known], targets)


def _count_jobs(n_workers: int | None, gpus: int, processes: int | None) -> tuple[int, int]:
    """Jobs, and workers of each."""
    if gpus and processes not in (None, gpus):
        raise ValueError(
            f"processes={processes} with gpus_per_job={gpus}: each GPU has one worker; leave "
            "processes out"
        )
    workers = gpus or check_whole("processes", 1 if processes is None else processes)
    n_workers = workers if n_workers is None else check_whole("n_workers", n_workers)
    jobs, rest = divmod(n_workers, workers)
    if rest:
        raise ValueError(
            f"n_workers={n_workers} do not fill jobs of {workers} workers each; give a multiple "
            f"of {workers}, or another {'gpus_per_job' if gpus else 'processes'}"
        )
    return jobs, workers


def cuda_arguments(settings: Mapping[str, Any]) -> list[str]:
    """The command line of ``dask cuda worker`` for settings by LocalCUDACluster's names.

    Values that are None or False are left out; lists are joined by commas.
    """
    arguments = []
    for name, value in settings.items():
        if value is None or value is False:
            continue
        arguments.append(CUDA_FLAGS[name])
        if value is not True:
            text = ",".join(value) if isinstance(value, list | tuple) else str(value)
            arguments.append(shlex.quote(text))
    return arguments


def _leaving(walltime: str | None, leave_before: str | float | None) -> list[str]:
    """Shell lines that make workers leave in time; they hold for dask-cuda's workers too."""
    from dask.utils import parse_timedelta

    limit = parse_walltime(walltime) if walltime else None
    if limit is None:
        return []
    if leave_before is None:
        before = min(LEAVE_BEFORE_SHARE * limit, LEAVE_BEFORE_MOST_SECONDS)
    else:
        before = float(parse_timedelta(leave_before))
    stagger = STAGGER_SHARE * before
    if not 0 < before + stagger < limit:
        raise ValueError(
            f"leave_before={leave_before!r} with walltime={walltime!r} leaves no time to work: "
            "give more than zero and less than five sixths of the walltime"
        )
    variable = "export DASK_DISTRIBUTED__WORKER__LIFETIME__"
    return [f"{variable}DURATION={limit - before:.0f}s", f"{variable}STAGGER={stagger:.0f}s"]
