"""One sbatch file that runs a job on nodes of its own: scheduler, workers and the command."""

from __future__ import annotations

import re
import shlex
from dataclasses import astuple, dataclass

from gpuclassify.cluster.security import FILES, certificate_files

# Tokens of the Hub, and settings of variables that hold one.
SECRET = re.compile(r"\bhf_[A-Za-z0-9]{16,}|\b(HF_TOKEN|HUGGING_FACE_HUB_TOKEN)\s*=\s*\S")
MEMORY = re.compile(r"[0-9]+([KMGT]B?)?", re.IGNORECASE)  # as sbatch(1) reads --mem
YAML_END = "END_OF_SETTINGS"
# sbatch(1), --time: minutes, minutes:seconds, hours:minutes:seconds, days-hours,
# days-hours:minutes and days-hours:minutes:seconds.
WITHOUT_DAYS = re.compile(
    r"(?:(?:(?P<hours>\d+):)?(?P<minutes>\d+):(?P<seconds>\d+)|(?P<only>\d+))"
)
WITH_DAYS = re.compile(r"(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?")
UNLIMITED = ("infinite", "unlimited")
SECONDS = {"days": 86_400, "hours": 3_600, "minutes": 60, "only": 60, "seconds": 1}

HEADER = """\
#!/usr/bin/env bash
# A Slurm job that runs `gpuclassify classify` on {nodes}: a Dask scheduler on the first of
# them, {workers}, and the command itself.
# Written by `gpuclassify slurm-script` to be read and edited. Submit it with sbatch.
#
# Paths mean the folder that sbatch is called in. All nodes must share it, the input and the output.
# Nothing secret belongs in here: sbatch hands HF_TOKEN on from your environment, and a login to the
# Hub (`hf auth login`) holds on every node that shares your home.
"""

RESTARTS = """\

# After preemption or the loss of a node the job waits in the queue again and goes on in its log.
# Slurm lets it wait two minutes at least.
#SBATCH --requeue
#SBATCH --open-mode=append
# This script (B:) gets USR1 so many seconds before the time limit; see `requeue` below.
#SBATCH --signal=B:USR1@{requeue_before_seconds}
"""

SETTINGS = """\

PYTHON={python}
MOST_RESTARTS={most_restarts} # so that a job that gets nowhere ends some day
"""

DASK = """\

# Nodes that all read their packages at once from a shared file system answer late.
export DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT=120s DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP=120s
# Dask alone would give torch a single thread in each worker.
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK RAYON_NUM_THREADS=$SLURM_CPUS_PER_TASK
"""

ALLOCATOR = """\
# Freed memory stays with the worker: mapping it anew for every operation of a model is slow.
export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=2147483647
"""

FUNCTIONS = """\
# The workers of a node share its memory; the scheduler and the command need little.
MEMORY_LIMIT=auto
if [ -n "${SLURM_MEM_PER_NODE:-}" ]; then
    MEMORY_LIMIT=$((SLURM_MEM_PER_NODE / SLURM_NTASKS_PER_NODE))MiB
fi
# How workers and the command find the scheduler; a name of its own after every restart.
rm -rf "$PWD/.gpuclassify-$SLURM_JOB_ID-"* # of runs that Slurm gave no time to finish
SHARED=$PWD/.gpuclassify-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
SCHEDULER_FILE=$SHARED.json

requeue() { # The time limit is near. What is written stays, so the next run goes on from there.
    trap '' USR1 TERM # Slurm sends TERM to a job that it puts back into the queue
    if [ "${SLURM_RESTART_COUNT:-0}" -ge "$MOST_RESTARTS" ]; then
        echo "restarted $MOST_RESTARTS times; submit this file again to go on" >&2
    elif scontrol requeue "$SLURM_JOB_ID"; then
        echo "the time limit is near: the job waits in the queue again" >&2
        exit 0
    else
        echo "Slurm does not requeue this job; submit this file again to go on" >&2
    fi
    exit 1
}

finish() { # However the script ends: the scheduler ends, and workers leave with it.
    trap '' USR1 TERM
    kill $COMMAND $SCHEDULER 2>/dev/null
    wait
    rm -rf "$SHARED".*
}
trap requeue USR1
trap finish EXIT
"""

TLS = """\

# Every connection has TLS: who can connect to the scheduler runs code as you, and reads tokens.
{certificates}
export DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION=true
export DASK_DISTRIBUTED__COMM__TLS__CA_FILE=$TLS/{authority}
for ROLE in SCHEDULER WORKER CLIENT; do
    export "DASK_DISTRIBUTED__COMM__TLS__${{ROLE}}__CERT=$TLS/{certificate}"
    export "DASK_DISTRIBUTED__COMM__TLS__${{ROLE}}__KEY=$TLS/{key}"
done
"""
MADE_HERE = """\
# The certificate is made for this run, in a folder that nobody else may read.
TLS=$SHARED.tls
"$PYTHON" -m gpuclassify.cluster.security "$TLS" || exit 1"""

SCHEDULER = """\

# The dashboard has no TLS, and listens on this node alone: ssh -L 8787:127.0.0.1:8787 NODE
export DASK_LOGGING__DISTRIBUTED=info # with the dashboard's port
"$PYTHON" -m dask scheduler --port 0 --scheduler-file "$SCHEDULER_FILE" \\
    --protocol {protocol}:// --dashboard-address 127.0.0.1:8787{interface} &
SCHEDULER=$!
until [ -s "$SCHEDULER_FILE" ]; do
    if ! kill -0 $SCHEDULER 2>/dev/null; then
        echo "the scheduler did not start" >&2
        exit 1
    fi
    sleep 0.2
done
export DASK_LOGGING__DISTRIBUTED=warning
"""

COMMAND = """\

# The same command continues what an earlier run left. Its exit code is the job's: 0 done, 1 failed,
# 2 wrong call, 3 done with something left out in quarantine. It runs in the background, because a
# shell hears signals only while it waits.
"$PYTHON" -m gpuclassify classify {arguments} \\
    --scheduler "$SCHEDULER_FILE"{redirect} &
{settings}COMMAND=$!
"""

WORKERS = """\

# {comment}
# Without --name: workers of one name are refused. If all of them end, so does the command.
(
    trap : TERM # so as to wait for srun, whose own end Slurm sees to
    srun {binding}--cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 \\
        "$PYTHON" -m dask {worker} --scheduler-file "$SCHEDULER_FILE" \\
        --nthreads 1 --memory-limit "$MEMORY_LIMIT" --death-timeout 900 \\
        --dashboard-address 127.0.0.1:0{options}
    kill $COMMAND 2>/dev/null && echo "all workers have ended; the log says why" >&2
) &

wait $COMMAND
"""


def parse_walltime(walltime: str) -> int | None:
    """Seconds of a time limit as Slurm writes it; None is no limit.

    Raises
    ------
    ValueError
        It is in none of Slurm's forms, or is no time at all.
    """
    text = str(walltime).strip().lower()
    if text in UNLIMITED:
        return None
    match = WITHOUT_DAYS.fullmatch(text) or WITH_DAYS.fullmatch(text)
    seconds = 0
    if match:
        parts = match.groupdict(default="0")
        seconds = sum(int(number) * SECONDS[unit] for unit, number in parts.items())
    if seconds <= 0:
        raise ValueError(
            f'walltime={walltime!r} is no time limit of Slurm\'s: give minutes ("30"), '
            '"hours:minutes:seconds" or "days-hours:minutes:seconds"'
        )
    return seconds


@dataclass(frozen=True)
class ScriptSettings:
    """What the file says.

    Attributes
    ----------
    arguments : tuple of str
        Of ``gpuclassify classify``.
    config : str
        Settings of a job as YAML, to be written into the file.
    nodes, cpus_per_task : int
        Nodes, and CPUs of each worker.
    gpus_per_node : int
        Each GPU gets a worker of its own; 0 means CPU workers.
    workers_per_node : int, optional
        CPU workers of a node. Default: 1.
    memory : str, optional
        Of each node, as sbatch reads it: ``"64G"``. Default: the cluster's.
    walltime : str
        Time limit in Slurm's forms.
    partition, account : str, optional
    job_extra : tuple of str
        More options of sbatch.
    prologue : tuple of str
        Shell lines that set up the environment.
    python : str
        The interpreter on the nodes, after the prologue.
    interface : str, optional
        Network interface of the scheduler and the workers, such as ``"ib0"``. Default: all.
    tls : bool
        Whether connections are encrypted; the command tells if the scheduler is open.
    certificates : str, optional
        Directory for that, as of `gpuclassify.cluster.security.make_security`. Default: the job
        makes a certificate of its own, which needs the package cryptography.
    worker_options : str
        More options of ``dask worker`` or, with GPUs, ``dask cuda worker``.
    requeue_before_seconds : int
        How long before the time limit the job goes back to the queue.
    most_restarts : int

    Raises
    ------
    ValueError
        A number, the memory or the time limit is out of range, something secret would be
        written, or certificates are for connections without TLS.
    FileNotFoundError
        A directory has no certificates.
    """

    arguments: tuple[str, ...] = ()
    config: str = ""
    nodes: int = 1
    cpus_per_task: int = 8
    gpus_per_node: int = 0
    workers_per_node: int | None = None
    memory: str | None = None
    walltime: str = "01:00:00"
    partition: str | None = None
    account: str | None = None
    job_extra: tuple[str, ...] = ()
    prologue: tuple[str, ...] = ()
    python: str = "python"
    interface: str | None = None
    tls: bool = True
    certificates: str | None = None
    worker_options: str = ""
    requeue_before_seconds: int = 120
    most_restarts: int = 100

    def __post_init__(self) -> None:
        for name in ("nodes", "cpus_per_task", "requeue_before_seconds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more")
        if self.gpus_per_node and self.workers_per_node not in (None, self.gpus_per_node):
            raise ValueError(
                f"workers_per_node={self.workers_per_node} with gpus_per_node="
                f"{self.gpus_per_node}: each GPU has one worker; leave workers_per_node out"
            )
        if self.memory is not None and not MEMORY.fullmatch(self.memory):
            raise ValueError(
                f"memory={self.memory!r} is no size of Slurm's: pass megabytes, or a number with "
                'K, M, G or T, such as "64G"'
            )
        if self.certificates is not None:
            if not self.tls:
                raise ValueError("certificates= have no use with tls=False: leave one of them out")
            certificate_files(self.certificates)
        limit = parse_walltime(self.walltime)
        if limit is not None and limit <= self.requeue_before_seconds:
            raise ValueError(
                f"walltime={self.walltime!r} leaves no time to work: the job goes back to the "
                f"queue {self.requeue_before_seconds} seconds before its end"
            )
        if SECRET.search(str(astuple(self))):
            raise ValueError(
                "there is a token in the settings, and others may read a job's file: set HF_TOKEN "
                "where you call sbatch, or log in to the Hub with hf auth login"
            )

    @property
    def tasks_per_node(self) -> int:
        """Workers of a node."""
        return self.gpus_per_node or self.workers_per_node or 1


def sbatch_script(settings: ScriptSettings) -> str:
    """The text of the file.

    Examples
    --------
    >>> text = sbatch_script(ScriptSettings(("in/", "out/"), gpus_per_node=4))
    >>> "#SBATCH --gpus-per-task=1" in text
    True
    """
    interface = f" --interface {shlex.quote(settings.interface)}" if settings.interface else ""
    prologue = "".join(f"{line}\n" for line in settings.prologue)
    parts = [
        _header(settings),
        RESTARTS.format(requeue_before_seconds=settings.requeue_before_seconds),
        SETTINGS.format(python=shlex.quote(settings.python), most_restarts=settings.most_restarts),
        f"\n# The environment; srun hands it on to the workers.\n{prologue}" if prologue else "",
        DASK,
        "" if settings.gpus_per_node else ALLOCATOR,
        FUNCTIONS,
        _tls(settings),
        SCHEDULER.format(protocol="tls" if settings.tls else "tcp", interface=interface),
        _command(settings),
        _workers(settings, interface),
    ]
    return "".join(parts)


def _header(settings: ScriptSettings) -> str:
    nodes = "1 node" if settings.nodes == 1 else f"{settings.nodes} nodes"
    total = settings.nodes * settings.tasks_per_node
    count = "1 worker" if total == 1 else f"{total} workers"
    workers = f"{count}, each with a GPU of its own" if settings.gpus_per_node else count
    directives = {
        "job-name": "gpuclassify",
        "output": "gpuclassify-%j.log",
        "nodes": settings.nodes,
        "ntasks-per-node": settings.tasks_per_node,
        "gpus-per-task": 1 if settings.gpus_per_node else None,
        "cpus-per-task": settings.cpus_per_task,
        "mem": settings.memory,
        "time": settings.walltime,
        "partition": settings.partition,
        "account": settings.account,
    }
    lines = [f"--{name}={value}" for name, value in directives.items() if value is not None]
    text = HEADER.format(nodes=nodes, workers=workers)
    return text + "".join(f"#SBATCH {line}\n" for line in [*lines, *settings.job_extra])


def _tls(settings: ScriptSettings) -> str:
    if not settings.tls:
        return ""
    (authority, certificate, key), made = FILES[0], MADE_HERE
    if settings.certificates is not None:
        files = certificate_files(settings.certificates)
        authority, certificate, key = (path.name for path in files)
        made = f"TLS={shlex.quote(str(files[0].parent.resolve()))}"
    return TLS.format(certificates=made, authority=authority, certificate=certificate, key=key)


def _command(settings: ScriptSettings) -> str:
    arguments = [shlex.quote(argument) for argument in settings.arguments]
    if not settings.config:
        return COMMAND.format(arguments=" ".join(arguments), redirect="", settings="")
    return COMMAND.format(
        arguments=" ".join(["--config", "/dev/stdin", *arguments]),
        redirect=f" <<'{YAML_END}'",
        settings=f"{settings.config.rstrip()}\n{YAML_END}\n",
    )


def _workers(settings: ScriptSettings, interface: str) -> str:
    extra = f" \\\n        {settings.worker_options}" if settings.worker_options else ""
    comment, binding, worker = "One worker in each task.", "", "worker"
    if settings.gpus_per_node:
        comment = (
            "Each task sees one GPU, and has one worker. For frames of cudf add a pool here, "
            "such as\n# --rmm-pool-size 0.3 --rmm-maximum-pool-size 0.5; without one, torch may "
            "take all."
        )
        binding, worker = "--gpus-per-task=1 ", "cuda worker"
    return WORKERS.format(
        comment=comment, binding=binding, worker=worker, options=interface + extra
    )
