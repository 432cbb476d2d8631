"""Jobs of dask-jobqueue that are tried before they are submitted, and replaced when they end."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from dask_jobqueue import SLURMCluster
from dask_jobqueue.slurm import SLURMJob
from distributed import Status
from tornado.ioloop import PeriodicCallback

logger = logging.getLogger(__name__)

# Rounds in which all jobs end without a worker: a path or a package is wrong on the nodes.
MOST_FAILED_ROUNDS = 3
LOG_LINES = 15


class ClosingJob(SLURMJob):
    """A job whose status says when it is closed, as Dask expects of every job in the end."""

    async def close(self) -> None:
        """Cancel the job."""
        await super().close()
        self.status = Status.closed


class ClosingCluster(SLURMCluster):
    """dask-jobqueue's cluster of such jobs, whose temporary certificates go when it closes."""

    job_cls = ClosingJob

    async def _close(self) -> None:
        await super()._close()
        for name in ("ca_file", "cert", "key"):
            if file := getattr(self, f"_job_{name}", None):
                file.close()


class JobKeeper:
    """Keeps the number of a cluster's jobs: those that have ended are submitted anew.

    dask-jobqueue itself looks at no job after it was submitted. Here squeue is asked which jobs
    still wait or run, because that tells of every end: a worker that left before its walltime,
    preemption, a failed node, scancel, and a job that died before its worker came up.

    Parameters
    ----------
    cluster : dask_jobqueue.SLURMCluster
        Without jobs.
    look_every_seconds : float
        Time between two calls of squeue.
    """

    def __init__(self, cluster: SLURMCluster, look_every_seconds: float) -> None:
        self.cluster = cluster
        self.watch = PeriodicCallback(self.replace_ended, look_every_seconds * 1000)
        self.numbers = itertools.count()
        self.failed_rounds = 0
        self.refusal = ""

    def submit(self, jobs: int) -> None:
        """Submit jobs, after a dry run of their script, and watch them until the cluster closes.

        Raises
        ------
        RuntimeError
            sbatch is missing or refuses the job; in its own words.
        """
        script = self.cluster.job_script()
        refusal = _dry_run(script)
        if refusal:
            raise RuntimeError(f"Slurm refuses this job: {refusal}\n\nThe job was:\n{script}")
        for _ in range(jobs):
            self._add_job()
        try:
            self.cluster.sync(self._settle)
        except RuntimeError as err:
            raise RuntimeError(f"Slurm refused a job: {_sbatch_message(err)}") from err
        self.cluster.loop.add_callback(self.watch.start)

    async def replace_ended(self) -> None:
        """Submit a job for each one that has ended."""
        if self.cluster.status != Status.running:
            self.watch.stop()
            return
        known = dict(self.cluster.workers)  # before squeue answers: jobs submitted since have not
        try:
            live = await _live_jobs()
        except (OSError, RuntimeError) as err:
            logger.warning("cannot ask Slurm for its jobs, trying again: %s", err)
            return
        if self.cluster.status != Status.running:
            return
        workers = self.cluster.workers
        ended = {
            name: job.job_id
            for name, job in known.items()
            if job.job_id not in live and workers.get(name) is job
        }
        if ended and await self._must_give_up(ended.values()):
            await self.cluster.close()
            return
        for name, job_id in ended.items():
            if job_id:
                logger.warning("Slurm job %s has ended; submitting another one", job_id)
            if self.cluster.worker_spec.pop(name, None) is not None:
                self._add_job()
        try:
            # Workers that Dask's own watch dropped are missing, too.
            await self._settle()
        except RuntimeError as err:
            self.refusal = _sbatch_message(err)
            logger.warning("Slurm refuses a new job for now, trying again: %s", self.refusal)

    def _add_job(self) -> None:
        """Want a job under a name that none had before: the scheduler may know one that ended."""
        wanted = self.cluster.worker_spec
        names = (f"{self.cluster.name}-{number}" for number in self.numbers)
        wanted[next(name for name in names if name not in wanted)] = self.cluster.new_spec

    async def _settle(self) -> None:
        """Close and submit jobs until they are those that are wanted."""
        await self.cluster

    async def _must_give_up(self, ended: Iterable[str | None]) -> bool:
        """Tell whether jobs end again and again without a worker, and say why."""
        if self.cluster.scheduler.workers:
            self.failed_rounds = 0
            return False
        self.failed_rounds += 1
        if self.failed_rounds <= MOST_FAILED_ROUNDS:
            return False
        job_ids = [job_id for job_id in ended if job_id]
        logger.error(
            "Slurm jobs ended %d times without a worker, so the cluster is closed. %s",
            self.failed_rounds,
            await _end_of_log(job_ids[-1]) if job_ids else f"Slurm refuses them: {self.refusal}",
        )
        return True


def _dry_run(script: str) -> str:
    """What sbatch says against a script; empty if nothing."""
    try:
        done = subprocess.run(
            ["sbatch", "--test-only"], input=script, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as err:
        raise RuntimeError(
            "sbatch is not here: call get_client('slurm') on a machine that submits jobs, such as "
            "a login node, with Slurm's commands on PATH"
        ) from err
    return done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else ""


def _sbatch_message(error: BaseException) -> str:
    """sbatch's message within dask-jobqueue's error."""
    return str(error).rpartition("stderr:\n")[2].strip() or str(error)


async def _live_jobs() -> set[str]:
    """Ids of this user's jobs that wait or run."""
    return set((await _output("squeue", "-h", f"--user={os.getuid()}", "--format=%A")).split())


async def _output(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    if process.returncode:
        raise RuntimeError(err.decode(errors="replace").strip())
    return out.decode(errors="replace")


async def _end_of_log(job_id: str) -> str:
    """The end of a job's log, where this machine can read it."""
    try:
        shown = await _output("scontrol", "show", "job", job_id)
        (path,) = (line.strip() for line in shown.splitlines() if "StdErr=" in line)
        log = Path(path.partition("=")[2])
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    except (OSError, RuntimeError, ValueError):
        return f"See the log of job {job_id}, slurm-{job_id}.out if nothing else is set."
    return "\n".join([f"{log} ends with:", *lines])
