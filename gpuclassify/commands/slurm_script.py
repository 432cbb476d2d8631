"""``gpuclassify slurm-script``: an sbatch file that runs a job and its Dask cluster on nodes."""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any

import click

from gpuclassify.cluster.sizing import CORES_PER_WORKER, one_for_each_gpu, parse_walltime
from gpuclassify.commands.classify import classify
from gpuclassify.commands.console import wrong_call_exits
from gpuclassify.commands.options import GroupedOption, JobCommand, option_of
from gpuclassify.settings.checks import check_settings

# Settings of a job that the file sets, because it starts a cluster and repeats the command.
ELSEWHERE = {
    "cluster": "the file starts a cluster",
    "workers": "use --nodes, --gpus-per-node and --workers-per-node",
    "scheduler": "the file starts a scheduler",
}
# Hub tokens, and variables that are set to a secret rather than to its location.
SECRET = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|"
    r"\b[A-Z0-9_]*(TOKEN|PASSWORD|PASSWD|SECRET|ACCESS_KEY|API_KEY)\s*=\s*[\"']?[^\s\"'$]"
)
YAML_END = "END_OF_SETTINGS"
MORE_THAN_A_LINE = re.compile(r"[\n\r\0]")

HEADER = """\
#!/usr/bin/env bash
# A Slurm job that runs `gpuclassify classify`: a Dask scheduler on the first node, a worker in each
# task, and the command.
# Written by `gpuclassify slurm-script` for you to read and edit. Submit it with sbatch.
#
# Paths are relative to the folder where you call sbatch. All nodes must share it, the input, the
# output, and the environment of PYTHON below: gpuclassify, dask, and all that the models import.
# Write no secrets in here: sbatch passes HF_TOKEN on from your environment, and a Hub login
# (`hf auth login`) works on every node that shares your home.
"""

RESTARTS = """\

# After preemption or the loss of a node the job is requeued and continues its log. Slurm makes it
# wait for at least two minutes.
#SBATCH --requeue
#SBATCH --open-mode=append
# This script (B:) gets USR1 this many seconds before the time limit; see `requeue` below.
#SBATCH --signal=B:USR1@{requeue_before_seconds}
"""

SETTINGS = """\

PYTHON={python}
MOST_RESTARTS={most_restarts} # so that a job that never completes a part ends
"""

DASK = """\

# Nodes respond late if all read their packages at once from a shared file system.
export DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT=120s DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP=120s
# Sets timeouts of the scheduler, and threads and memory of workers with $SLURM_CPUS_PER_TASK.
PRELOAD=gpuclassify.cluster.preload
"""

FUNCTIONS = """\
# The workers of a node share its memory; the scheduler and the command need little.
MEMORY_LIMIT=auto
if [ -n "${SLURM_MEM_PER_NODE:-}" ]; then
    MEMORY_LIMIT=$((SLURM_MEM_PER_NODE / SLURM_NTASKS_PER_NODE))MiB
fi
# How workers and the command find the scheduler; the name is new after every restart.
rm -rf "$PWD/.gpuclassify-$SLURM_JOB_ID-"* # of runs that Slurm killed
SHARED=$PWD/.gpuclassify-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
SCHEDULER_FILE=$SHARED.json

requeue() { # The time limit is near. Written parts stay, so the next run continues from there.
    trap '' USR1 TERM # Slurm sends TERM to a job that it requeues
    if [ "${SLURM_RESTART_COUNT:-0}" -ge "$MOST_RESTARTS" ]; then
        echo "restarted $MOST_RESTARTS times; submit this file again to continue" >&2
    elif scontrol requeue "$SLURM_JOB_ID"; then
        echo "the time limit is near: the job is in the queue again" >&2
        exit 0
    else
        echo "Slurm does not requeue this job; submit this file again to continue" >&2
    fi
    exit 1
}

finish() { # Runs whenever the script ends: stops the scheduler, and workers with it.
    trap '' USR1 TERM
    kill $COMMAND $SCHEDULER 2>/dev/null
    wait
    rm -rf "$SHARED".*
}
trap requeue USR1
trap finish EXIT
"""

TLS = """\

# Every connection uses TLS: who connects to the scheduler can run code as you and read tokens.
{certificates}
export DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION=true
export DASK_DISTRIBUTED__COMM__TLS__CA_FILE=$TLS/{authority}
for ROLE in SCHEDULER WORKER CLIENT; do
    export "DASK_DISTRIBUTED__COMM__TLS__${{ROLE}}__CERT=$TLS/{certificate}"
    export "DASK_DISTRIBUTED__COMM__TLS__${{ROLE}}__KEY=$TLS/{key}"
done
"""
MADE_HERE = """\
# The certificate is made for this run, in a folder that only you may read.
TLS=$SHARED.tls
"$PYTHON" -m gpuclassify.cluster.security "$TLS" || exit 1"""

SCHEDULER = """\

# The dashboard has no TLS, and listens on this node only: ssh -L 8787:127.0.0.1:8787 NODE
export DASK_LOGGING__DISTRIBUTED=info # with the dashboard's port
"$PYTHON" -m dask scheduler --port 0 --scheduler-file "$SCHEDULER_FILE" \\
    --protocol {protocol}:// --dashboard-address 127.0.0.1:8787 --preload "$PRELOAD"{interface} &
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

# The same command continues an earlier run. Its exit code is the job's: 0 done, 1 failed, 2 wrong
# call, 3 done with something left out in quarantine. It runs in the background, because a shell
# handles signals only while it waits.
"$PYTHON" -m gpuclassify classify {arguments} \\
    --scheduler "$SCHEDULER_FILE"{redirect} &
{settings}COMMAND=$!
"""

WORKERS = """\

# {comment}
# Without --name: workers of the same name are refused. If all of them end, so does the command.
(
    trap : TERM # to wait for srun, which Slurm ends
    srun {binding}--cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 \\
        "$PYTHON" -m dask {worker} --scheduler-file "$SCHEDULER_FILE" \\
        --nthreads {threads} --memory-limit "$MEMORY_LIMIT" --death-timeout 900 \\
        --dashboard-address 127.0.0.1:0 --preload "$PRELOAD"{options}
    kill $COMMAND 2>/dev/null && echo "all workers have ended; the log says why" >&2
) &

wait $COMMAND
"""


def _option(default: object, shown: str, *, least: int = 1, **option: Any) -> Any:
    """Make a setting with the arguments of `option_of` for its option."""
    metadata = {"option": {"help": shown, **option}, "least": least}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ScriptSettings:
    """Content of the file: `arguments` of ``gpuclassify classify``, YAML of a job, and the options.

    Raises ValueError if a setting is out of range, contradicts another one, or shows a secret.
    """

    arguments: tuple[str, ...] = ()
    config: str = field(default="", metadata={"least": 0})
    nodes: int = _option(1, "Nodes.")
    gpus_per_node: int = _option(
        0, "GPUs of a node, each with a worker. Default: none, CPUs.", least=0
    )
    workers_per_node: int | None = _option(None, "CPU workers of a node. Default: 1.")
    cpus_per_task: int = _option(CORES_PER_WORKER, "CPUs of a worker.")
    memory: str | None = _option(None, 'Of each node, such as "64G". Default: the cluster\'s.')
    walltime: str = _option("01:00:00", "Time limit.")
    partition: str | None = _option(None, "Default: the cluster's.")
    account: str | None = _option(None, "Account to charge. Default: the cluster's.")
    job_extra: tuple[str, ...] = _option((), "Any option of sbatch; repeatable.")
    prologue: tuple[str, ...] = _option((), 'Shell line, such as "module load cuda"; repeatable.')
    python: str = _option(sys.executable, "Interpreter on the nodes. Default: the one here.")
    interface: str | None = _option(
        None, "Network interface of the nodes, such as ib0. Default: all."
    )
    tls: bool = _option(
        True, "Encrypt all connections, which is the default.", flags=["--tls/--no-tls"]
    )
    certificates: str | None = _option(
        None,
        "With ca.pem, cert.pem and key.pem. Default: the job makes them.",
        metavar="DIRECTORY",
    )
    worker_options: str = _option("", "More options of dask (cuda) worker.", least=0)
    requeue_before_seconds: int = _option(
        120,
        "Seconds before the time limit at which the job goes back to the queue.",
        flags=["--requeue-before"],
    )
    most_restarts: int = _option(100, "Restarts after which the job gives up.", least=0)

    def __post_init__(self) -> None:
        check_settings(self)
        one_for_each_gpu(
            "gpus_per_node", self.gpus_per_node, workers_per_node=self.workers_per_node
        )
        if self.certificates is not None:
            if not self.tls:
                raise ValueError(
                    "certificates= has no effect with tls=False: leave out one of them"
                )
            from gpuclassify.cluster.security import certificate_files

            certificate_files(self.certificates)
        limit = parse_walltime(self.walltime)
        if limit is not None and limit <= self.requeue_before_seconds:
            raise ValueError(
                f"walltime={self.walltime!r} leaves no time to work: the job goes back to the "
                f"queue {self.requeue_before_seconds} seconds before its end"
            )
        if SECRET.search(str(astuple(self))):
            raise ValueError(
                "the settings contain a token or password, but others may read a job's file: "
                "set its variable, such as HF_TOKEN, where you call sbatch, or log in to the Hub "
                "with hf auth login"
            )
        for name, value in vars(self).items():
            if name not in ("arguments", "config") and any(
                map(MORE_THAN_A_LINE.search, _texts(value))
            ):
                raise ValueError(
                    f"{name}={value!r} has a line break, and the file would run the next line as a "
                    "command: pass a single line, or repeat the option if it is repeatable"
                )

    @property
    def tasks_per_node(self) -> int:
        """Number of workers of a node."""
        return self.workers_per_node or self.gpus_per_node or 1


def _texts(value: object) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else (str(value),)


def sbatch_script(settings: ScriptSettings) -> str:
    """Return the text of the file."""
    interface = f" --interface {shlex.quote(settings.interface)}" if settings.interface else ""
    prologue = "".join(f"{line}\n" for line in settings.prologue)
    parts = [
        _header(settings),
        RESTARTS.format(requeue_before_seconds=settings.requeue_before_seconds),
        SETTINGS.format(python=shlex.quote(settings.python), most_restarts=settings.most_restarts),
        f"\n# The environment; srun passes it on to the workers.\n{prologue}" if prologue else "",
        DASK,
        FUNCTIONS,
        _tls(settings),
        SCHEDULER.format(protocol="tls" if settings.tls else "tcp", interface=interface),
        _command(settings),
        _workers(settings, interface),
    ]
    return "".join(parts)


def _header(settings: ScriptSettings) -> str:
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
    return HEADER + "".join(f"#SBATCH {line}\n" for line in [*lines, *settings.job_extra])


def _tls(settings: ScriptSettings) -> str:
    from gpuclassify.cluster.security import FILES, certificate_files

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
    end = YAML_END
    while end in settings.config:  # a line equal to the end would turn the rest into commands
        end += "_"
    return COMMAND.format(
        arguments=" ".join(["--config", "/dev/stdin", *arguments]),
        redirect=f" <<'{end}'",
        settings=f"{settings.config.rstrip()}\n{end}\n",
    )


def _workers(settings: ScriptSettings, interface: str) -> str:
    options = shlex.join(shlex.split(settings.worker_options))
    extra = f" \\\n        {options}" if options else ""
    comment, binding, worker, threads = "One worker in each task.", "", "worker", 1
    if settings.gpus_per_node:
        comment = (
            "Each task sees one GPU, and has one worker, which reads and tokenizes one part while "
            "it\n# runs another. For cudf frames: --nthreads 1, and a pool, such as\n"
            "# --rmm-pool-size 0.3 --rmm-maximum-pool-size 0.5; without one, torch may take all."
        )
        binding, worker, threads = "--gpus-per-task=1 ", "cuda worker", 2
    return WORKERS.format(
        comment=comment,
        binding=binding,
        worker=worker,
        threads=threads,
        options=interface + extra,
    )


def _options() -> list[GroupedOption]:
    of_job = GroupedOption(
        ["--config"], metavar="FILE", help="Settings of the job, written into the file."
    )
    settings = [setting for setting in fields(ScriptSettings) if "option" in setting.metadata]
    return [of_job] + [
        option_of(ScriptSettings, setting.name, has_default=True, **setting.metadata["option"])
        for setting in settings
    ]


@click.command(
    "slurm-script",
    cls=JobCommand,
    options=_options,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- CLASSIFY ARGUMENTS]")
@click.pass_context
def slurm_script(context: click.Context, arguments: tuple[str, ...], **options: Any) -> None:
    """Print a file for sbatch that runs `gpuclassify classify` on nodes of a Slurm cluster.

    Pass the arguments of `classify` after `--`, or in a YAML file:

    \b
    gpuclassify slurm-script --nodes 2 --gpus-per-node 4 --walltime 8:00:00 \\
        -- 'crawl/*.jsonl' out/ --classifier quality > job.sh
    sbatch job.sh

    The job continues automatically after preemption and at its time limit; submitting the file
    again continues it too. Tokens are never written: set HF_TOKEN where you call sbatch. Passwords
    and signatures in URLs are refused.
    """
    from gpuclassify.jobs.execution import may_use_gpu
    from gpuclassify.jobs.stores.names import URL

    with wrong_call_exits():
        path = options.pop("config")
        config = Path(path).read_text(encoding="utf-8") if path else ""
        text = sbatch_script(ScriptSettings(arguments=arguments, config=config, **options))
        _refuse_secrets([*arguments, *URL.findall(text)])
        job = _check_job(context, arguments, path)
        if options["gpus_per_node"] and not may_use_gpu(job.mappers(), job.backend):
            raise ValueError(
                "no stage of the job can use the GPUs of "
                f"gpus_per_node={options['gpus_per_node']}: leave it out, or start several "
                "CPU workers a node (workers_per_node=8)"
            )
    click.echo(text, nl=False)


def _refuse_secrets(urls: Iterable[str]) -> None:
    """Raise ValueError if a URL has a password or what may be a signature."""
    from gpuclassify.jobs.stores.names import redacted

    for url in urls:
        if redacted(url) != url:
            raise ValueError(
                f"the URL of {redacted(url)} has a password, or a query, which may be a signature, "
                "but others may read a job's file: put credentials in the environment of sbatch "
                "(AWS_ACCESS_KEY_ID, FSSPEC_SFTP_PASSWORD, ...), or in fsspec's configuration on "
                "the nodes, such as ~/.config/fsspec/conf.json"
            )


def _check_job(context: click.Context, arguments: tuple[str, ...], config: str | None) -> Any:
    """Return the job's settings; mistakes fail here, not after a night in the queue."""
    from gpuclassify.commands.settings import JobSettings, load_settings

    words = [*(["--config", config] if config else []), *arguments]
    with tempfile.TemporaryDirectory() as folder:
        dumped = str(Path(folder) / "job.yaml")
        words += ["--dump-config", dumped]
        job_context = classify.make_context(
            f"{context.command_path} --", words, obj=context.obj,
            help_option_names=context.help_option_names,
        )  # fmt: skip
        with job_context as job:
            if job.params["config"] != config:
                raise ValueError(
                    "pass --config before the --: its content is written into the file"
                )
            if job.params["restart"]:
                raise ValueError(
                    "--restart would start over whenever Slurm restarts the job: leave it out"
                )
            classify.invoke(job)
        settings = load_settings(dumped)
    for name, cure in ELSEWHERE.items():
        if name in settings:
            raise ValueError(f"leave out the job's setting {name}={settings[name]!r}: {cure}")
    return JobSettings.of(settings)
