"""The commands of jobs: ``gpuclassify classify``, ``report`` and ``verify``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import click

from gpuclassify.commands.client import run_on_cluster
from gpuclassify.commands.console import (
    FAILED,
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
    run_options,
    split_paths,
)

if TYPE_CHECKING:
    from rich.console import Console

    from gpuclassify.jobs.job import Job, Runnable


@click.command(
    cls=JobCommand,
    options=lambda: [*job_options(), *run_options()],
    short_help="Classify files into a directory, or go on with it.",
)
@click.argument("paths", nargs=-1, metavar="INPUT... OUTPUT")
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
    interrupted, 143 terminated.
    """
    quiet_dask()
    with wrong_call_exits():
        settings = read_settings(given, **split_paths(paths, given))
        if settings is None:
            return
    run_job(context, settings.job, vars(settings), given)


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


@click.command(short_help="Check that a job's output is as it was written.")
@click.argument("output")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
@click.pass_context
def verify(context: click.Context, output: str, as_json: bool) -> None:
    """Check that the OUTPUT of a job is complete, and each of its files as it was written.

    Files are read, several at a time, and compared with the digests that the job noted; a store
    that tells the MD5 of its objects is asked for it instead. Nothing is changed.

    Exit codes: 0 all holds, 1 something is missing, damaged or not the job's, 2 OUTPUT is no job's.
    """
    from gpuclassify.jobs.output.manifest import DamagedMetadataError, manifest_of
    from gpuclassify.jobs.storage import open_directory

    with wrong_call_exits():
        try:
            manifest = manifest_of(open_directory(output))
        except DamagedMetadataError as err:
            raise click.ClickException(str(err)) from err
    manifest.check()
    recorded, damage = manifest.examine()
    is_sound = manifest.is_complete()
    done = len(recorded) - len(damage)
    if as_json:
        found = {"output": output, "is_sound": is_sound, "parts": manifest.count}
        found |= {"parts_done": done, **manifest.checked.as_dict(), "damage": damage}
        click.echo(json.dumps(found))
    else:
        click.echo(
            "\n".join(f"{name}: {reason}" for name, reason in damage.items()), nl=bool(damage)
        )
        click.echo(
            f"{done:,} of {manifest.count:,} parts are done and as they were written: "
            f"{manifest.checked}"
        )
        if not is_sound:
            click.echo(
                "The output is not complete: the command that wrote it does what is missing or "
                f"damaged.\n{manifest.command}".rstrip()
            )
    context.exit(0 if is_sound else FAILED)


def run_job(
    context: click.Context,
    make: Callable[[], Runnable[Any]],
    cluster: Mapping[str, Any],
    given: Mapping[str, Any],
    show: Callable[[Any, Console], None] = print_summary,
) -> NoReturn:
    """Run the job of a command as its `run_options` say, and end with its exit code."""
    options = {name: given[name] for name in ("restart", "verify")}

    def prepare() -> Job:
        return make().prepare(**options, command=command_line(context))

    summary = run_on_cluster(prepare, cluster, given["restart"])
    if given["as_json"]:
        click.echo(json.dumps(summary.as_dict()))
    else:
        show(summary, open_console())
        seconds = time.perf_counter() - context.obj["began"]
        click.echo(f"The command took {seconds:.1f} s, start-up included")
    context.exit(LEFT_OUT if summary.left_out else 0)
