"""Command ``gpuclassify slurm-script``: print an sbatch file that runs a job on nodes."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import click
from jinja2 import Environment, PackageLoader, StrictUndefined

from gpuclassify.cluster.security import FILES, certificate_files
from gpuclassify.cluster.sizing import CORES_PER_WORKER, one_for_each_gpu, parse_walltime
from gpuclassify.commands.classify import classify
from gpuclassify.commands.console import wrong_call_exits
from gpuclassify.commands.options import read_settings, split_paths
from gpuclassify.settings.checks import check_count, check_text

# Settings of a job that the sbatch file sets itself, with the reason or the option to use instead.
ELSEWHERE = {
    "cluster": "the file starts a cluster",
    "workers": "use --nodes, --gpus-per-node and --workers-per-node",
    "scheduler": "the file starts a scheduler",
}
# Matches Hub tokens, and variables that are set to a secret, but not to another variable.
SECRET = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|"
    r"\b[A-Z0-9_]*(TOKEN|PASSWORD|PASSWD|SECRET|ACCESS_KEY|API_KEY)\s*=\s*[\"']?[^\s\"'$]"
)
LINE_BREAK = re.compile(r"[\n\r\0]")
MAY_BE_0 = ("gpus_per_node", "most_restarts", "worker_options")  # options that may be 0 or empty

OPTIONS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("--config", {"metavar": "FILE"}, "Settings of the job, written into the file."),
    ("--nodes", {"default": 1}, "Nodes. Default: 1."),
    ("--gpus-per-node", {"default": 0}, "GPUs of a node, each with a worker. Default: none, CPUs."),
    ("--workers-per-node", {"type": int}, "CPU workers of a node. Default: 1."),
    ("--cpus-per-task", {"default": CORES_PER_WORKER},
     f"CPUs of a worker. Default: {CORES_PER_WORKER}."),
    ("--memory", {}, "Memory of each node, such as \"64G\". Default: the cluster's."),
    ("--walltime", {"default": "01:00:00"}, "Time limit. Default: 01:00:00."),
    ("--partition", {}, "Default: the cluster's."),
    ("--account", {}, "Account to charge. Default: the cluster's."),
    ("--job-extra", {"multiple": True}, "Any option of sbatch; repeatable."),
    ("--prologue", {"multiple": True}, 'Shell line, such as "module load cuda"; repeatable.'),
    ("--python", {}, "Interpreter on the nodes. Default: the one here; in a container python3."),
    ("--container", {"metavar": "IMAGE"}, "Apptainer image to run in, such as gpuclassify.sif."),
    ("--interface", {}, "Network interface of the nodes, such as ib0. Default: all."),
    ("--tls/--no-tls", {"default": True}, "Encrypt all connections, which is the default."),
    ("--certificates", {"metavar": "DIRECTORY"},
     "With ca.pem, cert.pem and key.pem. Default: the job makes them."),
    ("--worker-options", {"default": ""}, "More options of dask (cuda) worker."),
    ("--requeue-before", {"default": 120},
     "Seconds before the time limit at which the job goes back to the queue. Default: 120."),
    ("--most-restarts", {"default": 100}, "Restarts after which the job gives up. Default: 100."),
)  # fmt: skip


def sbatch_script(arguments: tuple[str, ...], config: str, options: dict[str, Any]) -> str:
    """Return the text of a script for Slurm's sbatch that runs a job.

    `arguments` are the words after ``gpuclassify classify``, `config` is the content of the job's
    YAML file or "", and `options` has the values of `OPTIONS` by parameter name, such as
    ``gpus_per_node``, without ``config``. Raises ValueError if an option is invalid, or if any
    argument holds a token or password.
    """
    for name, value in options.items():
        if type(value) is int:
            check_count(name, value, int(name not in MAY_BE_0), may_be_none=True)
        elif type(value) is str and name not in MAY_BE_0:
            check_text(name, value, "a text: leave it out for the default")
        if any(map(LINE_BREAK.search, value if isinstance(value, tuple) else (str(value),))):
            raise ValueError(
                f"{name}={value!r} has a line break, and the file would run the next line as a "
                "command: pass a single line, or repeat the option if it is repeatable"
            )
    gpus, workers = options["gpus_per_node"], options["workers_per_node"]
    one_for_each_gpu("gpus_per_node", gpus, workers_per_node=workers)
    certificates, walltime = options["certificates"], options["walltime"]
    if certificates is not None and not options["tls"]:
        raise ValueError("certificates= has no effect with tls=False: leave out one of them")
    files = certificate_files(certificates) if certificates else [*map(Path, FILES[0])]
    limit = parse_walltime(walltime)
    if limit is not None and limit <= options["requeue_before"]:
        raise ValueError(
            f"walltime={walltime!r} leaves no time to work: the job goes back to the queue "
            f"{options['requeue_before']} seconds before its end"
        )
    if SECRET.search(str((arguments, config, options))):
        raise ValueError(
            "the settings contain a token or password, but others may read a job's file: set its "
            "variable, such as HF_TOKEN, where you call sbatch, or log in to the Hub with hf auth "
            "login"
        )
    end = "END_OF_SETTINGS"
    while end in config:  # a line equal to this marker would turn the rest into commands
        end += "_"
    environment = Environment(
        loader=PackageLoader("gpuclassify", "commands"),
        # Every value is quoted for the shell, except for those marked as safe.
        finalize=lambda value: value if hasattr(value, "__html__") else shlex.quote(str(value)),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("slurm_script.sh.j2").render(
        options
        | {"python": options["python"] or ("python3" if options["container"] else sys.executable)},
        arguments=arguments,
        config=config.rstrip(),
        end=end,
        tasks=workers or gpus or 1,
        certificates=certificates and files[0].parent.resolve(),
        tls_files=[path.name for path in files],
        worker_options=shlex.split(options["worker_options"]),
    )


@click.command(
    "slurm-script", params=[click.Option([flag], help=text, **more) for flag, more, text in OPTIONS]
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

    The job continues automatically after preemption and at its time limit, or if you submit the
    file again. Tokens are never written: set HF_TOKEN where you call sbatch. Passwords
    and signatures in URLs are refused.
    """
    from gpuclassify.jobs.execution import may_use_gpu
    from gpuclassify.jobs.stores.names import URL, redacted

    with wrong_call_exits():
        path = options.pop("config")
        text = sbatch_script(
            arguments, Path(path).read_text(encoding="utf-8") if path else "", options
        )
        for url in (*arguments, *URL.findall(text)):
            if redacted(url) != url:
                raise ValueError(
                    f"the URL of {redacted(url)} has a password, or a query, which may be a "
                    "signature, but others may read a job's file: put credentials in the "
                    "environment of sbatch (AWS_ACCESS_KEY_ID, FSSPEC_SFTP_PASSWORD, ...), or in "
                    "fsspec's configuration on the nodes, such as ~/.config/fsspec/conf.json"
                )
        job = _read_job(context, arguments, path)
        if options["gpus_per_node"] and not may_use_gpu(job.mappers(), job.backend):
            raise ValueError(
                f"no stage of the job can use the GPUs of gpus_per_node={options['gpus_per_node']}:"
                " leave it out, or start several CPU workers a node (workers_per_node=8)"
            )
    click.echo(text, nl=False)


def _read_job(context: click.Context, arguments: tuple[str, ...], config: str | None) -> Any:
    """Return the job's `JobSettings` from the arguments of `classify` and the YAML file `config`.

    Wrong arguments, and settings that a Slurm job cannot have, fail here instead of in the queue.
    """
    words = [*(["--config", config] if config else []), *arguments]
    job_context = classify.make_context(
        f"{context.command_path} --", words, obj=context.obj,
        help_option_names=context.help_option_names,
    )  # fmt: skip
    with job_context as job, wrong_call_exits():
        options = job.params | {"dump_config": None}
        if options["config"] != config:
            raise ValueError("pass --config before the --: its content is written into the file")
        if options["restart"]:
            raise ValueError(
                "--restart would start over whenever Slurm restarts the job: leave it out"
            )
        settings = read_settings(options, **split_paths(options.pop("paths"), options))
    for name, cure in ELSEWHERE.items():
        if (value := getattr(settings, name)) not in (None, "auto"):
            raise ValueError(f"leave out the job's setting {name}={value!r}: {cure}")
    return settings
