"""The commands of jobs: ``gpuclassify classify`` and ``gpuclassify report``."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, NoReturn

import click

from gpuclassify.commands.client import open_client, shown_workers
from gpuclassify.commands.console import (
    LEFT_OUT,
    interrupt_hint,
    open_console,
    print_summary,
    quiet_dask,
    start_progress,
    wrong_call_exits,
)
from gpuclassify.commands.options import (
    JobCommand,
    command_line,
    job_options,
    read_settings,
    refuse_file,
    restart_option,
    split_paths,
)

if TYPE_CHECKING:
    from gpuclassify.jobs.report.summary import JobSummary
    from gpuclassify.jobs.settings import JobSettings


@click.command(cls=JobCommand, short_help="Classify files into a directory, or go on with it.")
@click.argument("paths", nargs=-1, metavar="INPUT... OUTPUT")
@job_options
@restart_option
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
        settings = read_settings(given, **split_paths(paths, given["config"]))
        if settings is None:
            return
        refuse_file(settings.output)
    run_job(context, settings, given["restart"], given["as_json"])


@click.command(short_help="Write the report of a job anew.")
@click.argument("output")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def report(output: str, as_json: bool) -> None:
    """Write the report of a job, finished or not, into its OUTPUT anew."""
    from gpuclassify.jobs.report.report import write_report
    from gpuclassify.jobs.storage import open_directory

    with wrong_call_exits():
        refuse_file(output)
        made = write_report(open_directory(output))
    if as_json:
        click.echo(json.dumps(made))
        return
    click.echo(
        f"{made['parts_done']:,} of {made['parts']:,} parts, {made['rows_in']:,} rows read, "
        f"{made['rows_out']:,} kept\nReport: {made['output']}/_report/report.html"
    )


def run_job(
    context: click.Context, settings: JobSettings, restart: bool, as_json: bool
) -> NoReturn:
    """Run the job of a command, print its summary, and end with its exit code."""
    summary = _run(settings, restart, command_line(context))
    if as_json:
        click.echo(json.dumps(summary.as_dict()))
    else:
        print_summary(summary, open_console())
    context.exit(LEFT_OUT if summary.left_out else 0)


def _run(settings: JobSettings, restart: bool, command: str) -> JobSummary:
    """Run the job, on a cluster if anything is left to do."""
    from gpuclassify.jobs.buckets import BucketJob

    with start_progress("Looking for the input's parts") as progress:
        with wrong_call_exits():
            job = settings.job().prepare(restart=restart, command=command)
            last = job.last if isinstance(job, BucketJob) else job
            client = None
            if last.needs_workers():
                client = open_client(vars(settings), progress, last.source.count)
        where = "" if client is None else f" on {shown_workers(client)}"
        progress.watch(last.spec.chain.__name__, client, f"loading the model{where}")
        with interrupt_hint(restart), client or contextlib.nullcontext():
            if isinstance(job, BucketJob):
                return job.run(client, progress.step)
            return job.run(client, progress.parts)
