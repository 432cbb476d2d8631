"""Dask workers in Slurm jobs, by dask-jobqueue: a dry run first, and new jobs for ended ones."""

from __future__ import annotations

import itertools
import logging
import os
import shlex
import subprocess
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dask import config
from dask.utils import parse_timedelta
from dask_jobqueue import SLURMCluster
from dask_jobqueue.core import Job, JobQueueCluster
from dask_jobqueue.slurm import SLURMJob
from distributed import Client, Status
from tornado.ioloop import PeriodicCallback

from gpuclassify.cluster.local import (
    LOOPBACK,
    NO_GIL_MONITOR,
    dashboard_address,
    owning_client,
    unbroken,
)
from gpuclassify.cluster.preload import TorchMemoryFraction, set_up
from gpuclassify.cluster.security import make_security, warn_if_open
from gpuclassify.cluster.sizing import (
    CORES_PER_WORKER,
    check_options,
    gpu_cluster_options,
    one_for_each_gpu,
    parse_walltime,
    tasks_per_worker,
)
from gpuclassify.settings.checks import check_count

logger = logging.getLogger(__name__)

MEMORY_OPTIONS = (
    "backend", "rmm_pool_size", "rmm_maximum_pool_size", "rmm_async", "torch_memory_fraction",
    "enable_cudf_spill",
)  # fmt: skip
# Options of `dask cuda worker` by their names in LocalCUDACluster. They are listed here, and
# compared in a test, because dask-cuda need not be installed on the submitting machine.
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
# Share of the walltime, and the maximum seconds, reserved for handing over a worker's data.
LEAVE_BEFORE_SHARE, LEAVE_BEFORE_MOST_SECONDS = 0.2, 300.0
STAGGER_SHARE = 0.2  # random share of that time, so that workers do not leave all at once
LOOK_EVERY_SECONDS = 30.0  # interval of squeue, to limit the load of the shared controller
# Maximum rounds in which all jobs end without a worker, because nodes lack a path or a package.
MOST_FAILED_ROUNDS = 3
LOG_LINES = 15


class SlurmPlan(NamedTuple):
    """Number and arguments of the Slurm jobs that make up a Dask cluster; all jobs are equal."""

    arguments: dict[str, Any]  # arguments of ``dask_jobqueue.SLURMCluster``
    jobs: int  # number of jobs to submit
    cores_per_worker: int  # number of threads for torch and tokenizing
    torch_fraction: float | None  # torch's share of a worker's GPU; None for no limit


def start_slurm(options: Mapping[str, Any]) -> Client:
    """Submit Slurm jobs with Dask workers; return a client of the scheduler, which runs here.

    `options` are those of `plan_slurm`, and ``look_every_seconds``, the seconds between
    replacements of ended jobs (default: 30). The jobs may still be queued. Closing the client
    closes the cluster and cancels its jobs.
    """
    options = dict(options)
    look_every_seconds = options.pop("look_every_seconds", None) or LOOK_EVERY_SECONDS
    plan = plan_slurm(**options)
    with config.set(NO_GIL_MONITOR):
        cluster = KeptCluster(look_every_seconds, **plan.arguments)
    try:
        warn_if_open(
            (comm.listen_address for comm in cluster.scheduler.listeners),
            "Leave security= and protocol= out, which makes a certificate, or pass certificates",
        )
        unbroken(partial(cluster.submit, plan.jobs), cluster)
    except BaseException:
        unbroken(cluster.close, cluster)
        raise

    def set_up_workers(client: Client) -> None:
        set_up(client, plan.cores_per_worker)
        if plan.torch_fraction is not None:
            client.register_plugin(TorchMemoryFraction(plan.torch_fraction))

    return owning_client(cluster, set_up_workers)


def plan_slurm(
    *,
    n_workers: int | None = None,
    gpus_per_job: int | None = None,
    threads_per_worker: int | None = None,
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
    """Convert options of `get_client` for Slurm to options of ``dask_jobqueue.SLURMCluster``.

    Parameters
    ----------
    n_workers : int, optional
        Total number of workers; one per GPU with `gpus_per_job`. Default: the workers of one job.
    gpus_per_job : int, optional
        GPUs of a job, each with a worker of dask-cuda. None or 0: CPU workers.
    threads_per_worker : int, optional
        Tasks that a worker runs at a time. Default: as for `get_client`.
    cores : int, optional
        CPUs of a job. Default: dask-jobqueue's configuration, else 8 for each of its workers.
    processes : int, optional
        Workers of a job without GPUs. Default: 1.
    memory : str or int
        Memory of a job: ``"64GB"`` or bytes. Workers share it evenly. Required, unless
        dask-jobqueue's configuration has it.
    partition, account : str, optional
        Options of ``sbatch``.
    walltime : str, optional
        Time limit in Slurm's forms: ``"30"`` minutes, ``"04:00:00"``, ``"1-12"`` days and hours.
        Default: dask-jobqueue's, half an hour.
    leave_before : str or float, optional
        Time before the end of the walltime at which workers leave and hand over their results, in
        seconds or such as ``"2m"``; randomly up to a fifth of it earlier or later. Default: a fifth
        of the walltime, at most 5 minutes.
    job_extra : iterable of str
        More options of ``sbatch``: ``["--constraint=a100", "--exclusive"]``.
    prologue : iterable of str
        Lines of shell before the worker: ``["module load cuda", "source env/bin/activate"]``.
    **options
        Options of ``dask_jobqueue.SLURMCluster`` (`python`, `interface`, `log_directory`, ...), of
        `get_client` for memory of GPUs, and of ``dask cuda worker`` with LocalCUDACluster's names.
        By default, connections use TLS with a new certificate, which workers read from private
        files in `shared_temp_directory` (default: the current directory); `security` (False for no
        TLS) and `protocol` change this. Dashboards listen only on this machine and the nodes.

    Raises
    ------
    TypeError, ValueError
        An option does not exist, is out of range, or excludes another one.
    """
    known = {*MEMORY_OPTIONS, *(CUDA_FLAGS if gpus_per_job else ())}
    targets = [SLURMCluster, SLURMJob, Job, JobQueueCluster, plan_slurm]
    check_options([name for name in options if name not in known], targets)
    section = f"jobqueue.{options.get('config_name') or 'slurm'}."
    gpus = gpus_per_job or 0
    check_count("gpus_per_job", gpus, 0)
    jobs, workers = _count_jobs(n_workers, gpus, processes)
    cores = cores or config.get(section + "cores", None) or CORES_PER_WORKER * workers
    check_count("cores", cores, workers)
    memory = memory or config.get(section + "memory", None)
    if memory is None:
        raise ValueError('memory= is missing: pass the memory of one job, such as "64GB"')
    walltime = walltime or config.get(section + "walltime", None)
    tasks = tasks_per_worker(threads_per_worker, gpus > 0, options.get("backend", "pandas"))
    memory_options = {name: options.pop(name) for name in MEMORY_OPTIONS if name in options}
    cuda_options = {name: options.pop(name) for name in CUDA_FLAGS if name in options}
    flags, numbering, torch_fraction = ["--dashboard-address", f"{LOOPBACK}:0"], [], None
    if gpus:
        # Slurm and dask-cuda number GPUs by bus; CUDA by speed, unless configured otherwise.
        numbering = ["export CUDA_DEVICE_ORDER=PCI_BUS_ID"]
        settings, torch_fraction = gpu_cluster_options(cuda_options, **memory_options)
        flags += cuda_arguments(settings)
    for option in (job_extra, prologue):
        if isinstance(option, str):
            raise ValueError(f"got the text {option!r}, but a list is needed: [{option!r}]")
    lines = {
        "job_extra_directives": [*([f"--gres=gpu:{gpus}"] if gpus else []), *job_extra],
        "job_script_prologue": [*numbering, *_leaving(walltime, leave_before), *prologue],
        "worker_extra_args": flags,
    }
    for name, ours in lines.items():  # the user's configuration may add more lines
        configured = config.get(section + name.replace("_", "-"), None)
        lines[name] = [*ours, *(options.pop(name, None) or configured or [])]
    if options.get("protocol") is None and "security" not in options:
        options["security"] = make_security(True)
    if options.get("security") is not None:
        folder = config.get(section + "shared-temp-directory", None) or str(Path.cwd())
        options.setdefault("shared_temp_directory", folder)
    scheduler_options = {"dashboard_address": dashboard_address()}
    scheduler_options |= config.get(section + "scheduler-options", None) or {}
    scheduler_options |= options.pop("scheduler_options", {})
    arguments = {
        "cores": tasks * workers,
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


def _count_jobs(n_workers: int | None, gpus: int, processes: int | None) -> tuple[int, int]:
    """Return the number of Slurm jobs for `n_workers` in total, and the number of workers in each.

    A job has a worker for each of its `gpus` or, if they are 0, `processes` workers.
    """
    one_for_each_gpu("gpus_per_job", gpus, processes=processes)
    check_count("processes", processes, may_be_none=True)
    check_count("n_workers", n_workers, may_be_none=True)
    workers = gpus or processes or 1
    n_workers = n_workers or workers
    jobs, rest = divmod(n_workers, workers)
    if rest:
        raise ValueError(
            f"n_workers={n_workers} do not fill jobs of {workers} workers each; give a multiple "
            f"of {workers}, or another {'gpus_per_job' if gpus else 'processes'}"
        )
    return jobs, workers


def cuda_arguments(settings: Mapping[str, Any]) -> list[str]:
    """Convert LocalCUDACluster's arguments to shell-quoted options of ``dask cuda worker``."""
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
    """Return shell lines that make workers leave before their job ends; [] without a time limit."""
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


class ClosingJob(SLURMJob):
    """Slurm job of dask-jobqueue whose `status` becomes "closed" on cancelling, as Dask expects."""

    async def close(self) -> None:
        """Cancel the Slurm job, and set its `status` to "closed"."""
        await super().close()
        self.status = Status.closed


class KeptCluster(SLURMCluster):
    """Dask cluster of Slurm jobs, by dask-jobqueue, that submits a new job for each that has ended.

    dask-jobqueue does not watch submitted jobs. This class asks squeue, which shows every end, also
    by preemption or before the worker started.
    """

    job_cls = ClosingJob

    def __init__(self, look_every_seconds: float = LOOK_EVERY_SECONDS, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.watch = PeriodicCallback(self.replace_ended, look_every_seconds * 1000)
        self.numbers = itertools.count()
        self.failed_rounds = 0
        self.refusal = ""

    def submit(self, jobs: int) -> None:
        """Submit this number of Slurm jobs after a dry run, and replace ended jobs from then on.

        Raises RuntimeError if sbatch is missing, or Slurm refuses a job.
        """
        _try_out(self.job_script())
        for _ in range(jobs):
            self._add_job()
        try:
            self.sync(self._settle)
        except RuntimeError as err:
            raise RuntimeError(f"Slurm refused a job: {_message(err)}") from err
        self.loop.add_callback(self.watch.start)

    async def replace_ended(self) -> None:
        """Submit a new job for each ended one; close the cluster if jobs keep failing."""
        if self.status != Status.running:
            self.watch.stop()
            return
        known = dict(self.workers)  # read first, because squeue lacks later jobs
        try:
            queue = await _output("squeue", "-h", f"--user={os.getuid()}", "--format=%A")
        except (OSError, RuntimeError) as err:
            logger.warning("cannot ask Slurm for its jobs, trying again: %s", _message(err))
            return
        if self.status != Status.running:
            return
        live = set(queue.split())  # this user's queued and running jobs
        ended = {
            name: job.job_id
            for name, job in known.items()
            if job.job_id not in live and self.workers.get(name) is job
        }
        if ended and await self._must_give_up([job_id for job_id in ended.values() if job_id]):
            await self.close()
            return
        for name, job_id in ended.items():
            if job_id:
                logger.warning("Slurm job %s has ended; submitting another one", job_id)
            if self.worker_spec.pop(name, None) is not None:
                self._add_job()
        try:
            # Workers that Dask dropped are missing, too.
            await self._settle()
        except RuntimeError as err:
            self.refusal = _message(err)
            logger.warning("Slurm refuses a new job for now, trying again: %s", self.refusal)

    def _add_job(self) -> None:
        """Add a Slurm job to ``worker_spec``; the method `_settle` submits it."""
        # The scheduler may still know workers of old names.
        names = (f"{self.name}-{number}" for number in self.numbers)
        self.worker_spec[next(one for one in names if one not in self.worker_spec)] = self.new_spec

    async def _settle(self) -> None:
        """Let Dask close and submit Slurm jobs until they match ``worker_spec``."""
        await self

    async def _must_give_up(self, ended: list[str]) -> bool:
        """Return True, and log the reason, if Slurm jobs keep ending while there is no worker.

        `ended` has the ids of jobs that ended in this round; it is empty if Slurm refused all of
        them.
        """
        self.failed_rounds = 0 if self.scheduler.workers else self.failed_rounds + 1
        if self.failed_rounds <= MOST_FAILED_ROUNDS:
            return False
        logger.error(
            "Slurm jobs ended %d times without a worker, so the cluster is closed. %s",
            self.failed_rounds,
            await _end_of_log(ended[-1]) if ended else f"Slurm refuses them: {self.refusal}",
        )
        return True

    async def _close(self) -> None:
        await super()._close()
        for name in ("ca_file", "cert", "key"):  # temporary certificates
            if file := getattr(self, f"_job_{name}", None):
                file.close()


def _try_out(script: str) -> None:
    """Pass a script to ``sbatch --test-only``; raise RuntimeError if Slurm refuses the job."""
    try:
        done = subprocess.run(
            ["sbatch", "--test-only"], input=script, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as err:
        raise RuntimeError(
            "sbatch is not here: call get_client('slurm') on a machine that submits jobs, such as "
            "a login node, with Slurm's commands on PATH"
        ) from err
    if done.returncode:
        refusal = done.stderr.strip() or f"exit code {done.returncode}"
        raise RuntimeError(f"Slurm refuses this job: {refusal}\n\nThe job was:\n{script}")


async def _output(*command: str) -> str:
    return str(await SLURMJob._call(command))  # raises RuntimeError if it fails


def _message(error: BaseException) -> str:
    """Return the error message of a Slurm command, without dask-jobqueue's text around it."""
    return str(error).rpartition("stderr:\n")[2].strip() or str(error)


async def _end_of_log(job_id: str) -> str:
    """Return the last lines of a Slurm job's log; if it cannot be read here, its likely name."""
    try:
        shown = await _output("scontrol", "show", "job", job_id)
        (path,) = (line.strip() for line in shown.splitlines() if "StdErr=" in line)
        log = Path(path.partition("=")[2])
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    except (OSError, RuntimeError, ValueError):
        return f"See the log of job {job_id}, slurm-{job_id}.out if nothing else is set."
    return "\n".join([f"{log} ends with:", *lines])
