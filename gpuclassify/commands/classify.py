"""The commands of jobs: ``gpuclassify classify`` and ``gpuclassify report``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

import click

from gpuclassify.commands.client import run_on_cluster
from gpuclassify.commands.console import (
    LEFT_OUT,
    open_console,
    print_summary,
    quiet_dask,
    wrong_call_exits,
)
from gpuclassify.commands.options import (
    JobCommand,
    command_line,
    job_options,
    read_settings,
    restart_option,
    split_paths,
)

if TYPE_CHECKING:
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
        settings = read_settings(given, **split_paths(paths, given))
        if settings is None:
            return
    run_job(context, settings, given["restart"], given["as_json"])


@click.command(short_help="Write the report of a job anew.")
@click.argument("output")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def report(output: str, as_json: bool) -> None:
    """Write the report of a job, finished or not, into its OUTPUT anew."""
    from gpuclassify.jobs.report.report import write_report
    from gpuclassify.jobs.storage import open_directory

    with wrong_call_exits():
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

    def prepare() -> Any:
        return settings.job().prepare(restart=restart, command=command_line(context))

    summary = run_on_cluster(prepare, vars(settings), restart)
    if as_json:
        click.echo(json.dumps(summary.as_dict()))
    else:
        print_summary(summary, open_console())
    context.exit(LEFT_OUT if summary.left_out else 0)
