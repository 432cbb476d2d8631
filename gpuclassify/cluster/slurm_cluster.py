"""dask-jobqueue's cluster, with a dry run before the first job and new jobs for those lost."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dask_jobqueue import SLURMCluster
from dask_jobqueue.slurm import SLURMJob
from distributed.core import Status
from tornado.ioloop import PeriodicCallback

logger = logging.getLogger(__name__)

# Jobs that end at once and again are no bad luck: a path or a package is wrong on the nodes.
MOST_VAIN_ROUNDS = 3
LAST_LINES = 15


class TrackedJob(SLURMJob):
    """A job that says so when it is closed, which Dask asserts of every job in the end."""

    async def close(self) -> None:
        """Cancel the job."""
        await super().close()
        self.status = Status.closed


class ReplacingCluster(SLURMCluster):
    """Workers in Slurm jobs; a job that Slurm lost is submitted anew, under a new name.

    dask-jobqueue itself looks at no job after it was submitted. Here squeue is asked which jobs
    still wait or run, because that tells of every end: a worker that left before its walltime,
    preemption, a failed node, scancel, and a job that died before its worker came up.

    Parameters
    ----------
    look_every_seconds : float
        Time between two calls of squeue.
    **arguments
        Those of ``dask_jobqueue.SLURMCluster``.
    """

    job_cls = TrackedJob

    def __init__(self, *, look_every_seconds: float, **arguments: Any) -> None:
        self._look_every_seconds = look_every_seconds
        self._watch: PeriodicCallback | None = None
        self._vain_rounds = 0
        self._refusal = ""
        super().__init__(**arguments)

    def submit(self, jobs: int) -> None:
        """Submit jobs, after a dry run of their script.

        Raises
        ------
        RuntimeError
            sbatch is missing or refuses the job; in its own words.
        """
        script = self.job_script()
        refusal = _refusal(script)
        if refusal:
            raise RuntimeError(f"Slurm refuses this job: {refusal}\n\nThe job was:\n{script}")
        for _ in range(jobs):
            self.worker_spec.update(self.new_worker_spec())
        try:
            self.sync(self._settle)
        except RuntimeError as err:
            raise RuntimeError(f"Slurm refused a job: {_words(err)}") from err

    def new_worker_spec(self) -> dict[str, Any]:
        """A job under a name that none had before: the scheduler may still know a lost one."""
        self._i += 1
        spec: dict[str, Any] = super().new_worker_spec()
        return spec

    async def _settle(self) -> None:
        await self

    async def _start(self) -> None:
        await super()._start()
        self._watch = PeriodicCallback(self._replace_lost, self._look_every_seconds * 1000)
        self._watch.start()

    async def _close(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        await super()._close()

    async def _replace_lost(self) -> None:
        """Submit a job for each one that is gone."""
        known = dict(self.workers)  # before squeue answers: jobs submitted since are not lost
        try:
            live = await _live_jobs()
        except (OSError, RuntimeError) as err:
            logger.warning("cannot ask Slurm for its jobs, trying again: %s", err)
            return
        if self.status != Status.running:
            return
        lost = {
            name: job.job_id
            for name, job in known.items()
            if job.job_id not in live and self.workers.get(name) is job
        }
        if lost and await self._is_vain(lost.values()):
            await self._close()
            return
        for name in lost:
            self._rename(name)
        try:
            # Submits what is missing, after submissions that are under way; workers that Dask's
            # own watch dropped are missing too.
            await self._correct_state()
        except RuntimeError as err:
            self._refusal = _words(err)
            logger.warning("Slurm refuses a new job for now, trying again: %s", self._refusal)

    def _rename(self, name: str) -> None:
        """Put a new name in the place of a lost job's."""
        job = self.workers.pop(name)
        job.status = Status.closed
        if job.job_id:
            logger.warning("Slurm job %s has ended; submitting another one", job.job_id)
        if self.worker_spec.pop(name, None) is not None:
            self.worker_spec.update(self.new_worker_spec())

    async def _is_vain(self, lost: Iterable[str | None]) -> bool:
        """Tell whether jobs end again and again without a worker, and say why."""
        if self.scheduler.workers:
            self._vain_rounds = 0
            return False
        self._vain_rounds += 1
        if self._vain_rounds <= MOST_VAIN_ROUNDS:
            return False
        ended = [job_id for job_id in lost if job_id]
        logger.error(
            "Slurm jobs ended %d times without a worker, so the cluster is closed. %s",
            self._vain_rounds,
            await _last_words(ended[-1]) if ended else f"Slurm refuses them: {self._refusal}",
        )
        return True


def _refusal(script: str) -> str:
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


def _words(error: BaseException) -> str:
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


async def _last_words(job_id: str) -> str:
    """The end of a job's log, where this machine can read it."""
    try:
        shown = await _output("scontrol", "show", "job", job_id)
        (path,) = (line.strip() for line in shown.splitlines() if "StdErr=" in line)
        log = Path(path.partition("=")[2])
        lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    except (OSError, RuntimeError, ValueError):
        return f"See the log of job {job_id}, slurm-{job_id}.out if nothing else is set."
    return "\n".join([f"{log} ends with:", *lines])
