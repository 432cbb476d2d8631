"""The command of clusters: ``gpuclassify slurm-script``."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from gpuclassify.commands.classify import classify
from gpuclassify.commands.console import wrong_call_exits

# The file has a cluster of its own, and starts the command again to go on.
ELSEWHERE = {
    "cluster": "the file starts its own cluster",
    "workers": "use --nodes, --gpus-per-node and --workers-per-node",
    "scheduler": "the file starts its own scheduler",
}


@click.command("slurm-script", short_help="Write a file for sbatch that runs a job.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- CLASSIFY ARGUMENTS]")
@click.option("--config", metavar="FILE", help="Settings of the job, written into the file.")
@click.option("--nodes", type=int, default=1, show_default=True, help="Nodes.")
@click.option("--gpus-per-node", type=int, default=0, help="Each gets a worker. Default: CPUs.")
@click.option("--workers-per-node", type=int, help="CPU workers of a node. Default: 1.")
@click.option("--cpus-per-task", type=int, default=8, show_default=True, help="CPUs of a worker.")
@click.option("--memory", help='Of each node, such as "64G". Default: the cluster\'s.')
@click.option("--walltime", default="01:00:00", show_default=True, help="Time limit.")
@click.option("--partition", help="Default: the cluster's.")
@click.option("--account", help="Who pays. Default: the cluster's.")
@click.option("--job-extra", multiple=True, help="Any option of sbatch; repeatable.")
@click.option("--prologue", multiple=True, help='Shell line, as "module load cuda"; repeatable.')
@click.option("--python", default=sys.executable, help="On the nodes. Default: the one here.")
@click.option("--interface", help="Network interface of the nodes, such as ib0. Default: all.")
@click.option("--tls/--no-tls", default=True, show_default=True, help="Encrypt all connections.")
@click.option(
    "--certificates", metavar="DIRECTORY",
    help="With ca.pem, cert.pem and key.pem. Default: the job makes its own, on nodes that have "
    "gpuclassify[tls].",
)  # fmt: skip
@click.option("--worker-options", default="", help="More options of dask (cuda) worker.")
@click.option(
    "--requeue-before", "requeue_before_seconds", type=int, default=120, show_default=True,
    help="Seconds before the time limit at which the job goes back to the queue.",
)  # fmt: skip
@click.option(
    "--most-restarts", type=int, default=100, show_default=True, help="Then the job gives up."
)
@click.pass_context
def slurm_script(context: click.Context, arguments: tuple[str, ...], **given: Any) -> None:
    """Print a file for sbatch that runs `gpuclassify classify` on nodes of its own.

    What the command is to do follows after `--`, or is in a YAML file:

    \b
    gpuclassify slurm-script --nodes 2 --gpus-per-node 4 --walltime 8:00:00 \\
        -- 'crawl/*.jsonl' out/ --classifier quality > job.sh
    sbatch job.sh

    The job goes on by itself after preemption and at its time limit; submitting the file again
    continues it too. Tokens are never written: set HF_TOKEN where you call sbatch. Passwords and
    signatures of URLs are refused.
    """
    from gpuclassify.cluster.slurm_script import ScriptSettings, sbatch_script
    from gpuclassify.jobs.stores import URL

    with wrong_call_exits():
        path = given.pop("config")
        config = Path(path).read_text(encoding="utf-8") if path else ""
        text = sbatch_script(ScriptSettings(arguments=arguments, config=config, **given))
        _refuse_secrets([*arguments, *URL.findall(text)])
        _check_job(context, arguments, path)
    click.echo(text, nl=False)


def _refuse_secrets(urls: Iterable[str]) -> None:
    """Raise ValueError if one has a password or what may be a signature."""
    from gpuclassify.jobs.stores import redacted

    for url in urls:
        if redacted(url) != url:
            raise ValueError(
                f"the URL of {redacted(url)} has a password, or a query, which may be a signature, "
                "and others may read a job's file: give credentials in the environment of sbatch "
                "(AWS_ACCESS_KEY_ID, FSSPEC_SFTP_PASSWORD, ...), or in a file of fsspec's own on "
                "the nodes, such as ~/.config/fsspec/conf.json"
            )


def _check_job(context: click.Context, arguments: tuple[str, ...], config: str | None) -> None:
    """Find mistakes of the job here, and not after a night in the queue.

    Raises
    ------
    ValueError, click.UsageError
        The command would refuse its arguments, or starts a cluster itself.
    """
    from gpuclassify.commands.settings import load_settings

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
                raise ValueError("give --config before the --: it is written into the file")
            if job.params["restart"]:
                raise ValueError("--restart would begin anew whenever Slurm restarts the job")
            classify.invoke(job)
        settings = load_settings(dumped)
    for name, cure in ELSEWHERE.items():
        if name in settings:
            raise ValueError(f"leave out the job's setting {name}={settings[name]!r}: {cure}")
