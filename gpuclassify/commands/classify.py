"""The commands of jobs: ``gpuclassify classify`` and ``gpuclassify report``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuclassify.commands.console import (
    LEFT_OUT,
    open_console,
    print_summary,
    quiet_dask,
    wrong_call_exits,
)
from gpuclassify.commands.options import JobCommand, job_options, read_settings

if TYPE_CHECKING:
    from gpuclassify.jobs.job import Job
    from gpuclassify.jobs.settings import JobSettings


@click.command(cls=JobCommand, short_help="Classify files into a directory, or go on with it.")
@click.argument("paths", nargs=-1, metavar="INPUT... OUTPUT")
@job_options
@click.option(
    "--restart/--resume", default=False,
    help="Start over and remove what earlier runs wrote, or continue, which is the default.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.pass_context
def classify(context: click.Context, paths: tuple[str, ...], **given: Any) -> None:
    """Classify INPUT files (Parquet or JSON lines) into the directory OUTPUT.

    INPUT may be a file, a directory, a glob or an fsspec URL; OUTPUT a directory, such a URL, or
    with --staging a repository, hf://datasets/OWNER/NAME. The same command continues a job that
    was interrupted. The Hub token comes from HF_TOKEN or your Hub login, never from the
    command line, where other users could read it.

    \b
    gpuclassify classify 'crawl/*.jsonl' out/ --classifier quality --filter-by High

    Exit codes: 0 done, 1 failed, 2 wrong call, 3 done, with something left out in quarantine, 130
    interrupted.
    """
    quiet_dask()
    with wrong_call_exits():
        settings = read_settings(given, **_paths(paths, given["config"]))
        if settings is None:
            return
        _refuse_file(settings.output)
        job = settings.pipeline().prepare(restart=given["restart"])
        client = _client(settings)
    summary = _run(job, client, given["restart"])
    if given["as_json"]:
        click.echo(json.dumps(summary.as_dict()))
    else:
        console = open_console()
        print_summary(summary, console)
        console.print(f"Report: {summary.output}/_report/report.html", soft_wrap=True)
        if summary.commit_url:
            console.print(f"Uploaded: {summary.commit_url}", soft_wrap=True)
    context.exit(LEFT_OUT if summary.left_out else 0)


@click.command(short_help="Write the report of a job anew.")
@click.argument("output")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def report(output: str, as_json: bool) -> None:
    """Write the report of a job, finished or not, into its OUTPUT anew."""
    from gpuclassify.jobs.report.report import write_report
    from gpuclassify.jobs.storage import open_directory

    with wrong_call_exits():
        _refuse_file(output)
        made = write_report(open_directory(output))
    if as_json:
        click.echo(json.dumps(made))
        return
    click.echo(
        f"{made['parts_done']:,} of {made['parts']:,} parts, {made['rows_in']:,} rows read, "
        f"{made['rows_out']:,} kept\nReport: {made['output']}/_report/report.html"
    )


def _paths(paths: tuple[str, ...], config: str | None) -> dict[str, Any]:
    """Input and output; with a config file that names the input, the output alone will do."""
    *inputs, output = paths or (None,)
    if output is not None and not inputs and config is None:
        raise ValueError(f"got one path, {output!r}: name the input, and then the output")
    return {"input": inputs, "output": output}


def _refuse_file(output: str | None) -> None:
    """Raise NotADirectoryError if a file is where the output or a directory above it belongs."""
    path = Path((output or "").removeprefix("file://"))
    for place in (path, *path.parents):
        if place.is_file():
            raise NotADirectoryError(f"{place} is a file: name a directory for the output")


def _run(job: Job, client: Any, restart: bool) -> Any:
    from gpuclassify.jobs.report.progress import JobProgress

    title = job.spec.chain.__name__
    try:
        with client, JobProgress(title, open_console(stderr=True), client) as progress:
            return job.run(client, progress.parts)
    except KeyboardInterrupt as interrupt:
        if restart:
            interrupt.add_note("Leave --restart out, or it starts over again.")
        raise


def _client(settings: JobSettings) -> Any:
    from gpuclassify.cluster import get_client
    from gpuclassify.cluster.client import NoSchedulerError

    options, scheduler = settings.cluster_options or {}, settings.scheduler
    if "n_workers" in options and settings.workers is not None:
        raise ValueError(
            f"workers={settings.workers} and the cluster option n_workers={options['n_workers']!r} "
            "mean the same: give one of them"
        )
    if scheduler is None:
        if settings.workers is not None:
            options = {**options, "n_workers": settings.workers}
        return get_client(settings.cluster, **options)
    if settings.workers is not None or settings.cluster != "auto":
        raise ValueError(
            "--scheduler connects to a cluster that is running; --workers and --cluster start a "
            "new one: give one or the other"
        )
    is_file = Path(scheduler).exists()
    if not is_file and ":" not in scheduler:
        raise FileNotFoundError(
            f"--scheduler {scheduler!r} is neither an address, such as "
            "tcp://host:8786, nor a file that is there"
        )
    where: dict[str, Any] = {"scheduler_file" if is_file else "address": scheduler}
    try:
        return get_client(**where, **options)
    except NoSchedulerError as err:
        cure = "leave --scheduler out, which starts a cluster here"
        raise NoSchedulerError(err.address, cure) from err
