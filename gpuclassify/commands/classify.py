"""Commands ``gpuclassify classify``, ``report`` and ``verify``."""

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
    echo,
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
    from gpuclassify.jobs.job import Job
    from gpuclassify.jobs.ledger.manifest import Manifest
    from gpuclassify.jobs.recipe import Recipe


@click.command(
    cls=JobCommand,
    options=lambda: [*job_options(), *run_options()],
)
@click.argument("paths", nargs=-1, metavar="INPUT... OUTPUT")
@click.pass_context
def classify(context: click.Context, paths: tuple[str, ...], **options: Any) -> None:
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
        settings = read_settings(options, **split_paths(paths, options))
        if settings is None:
            return
    run_job(context, settings.job, vars(settings), options)


@click.command()
@click.argument("output")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def report(output: str, as_json: bool) -> None:
    """Rewrite the report of a job, finished or not, in its OUTPUT.

    OUTPUT is the directory or URL that the job writes to, and the report is the page
    OUTPUT/_report/report.html. Documents are not read again.
    """
    from gpuclassify.classifiers.spans.columns import SpanReport
    from gpuclassify.corpus.decontamination.report import ContaminationReport
    from gpuclassify.corpus.dedup.report import DeduplicationReport
    from gpuclassify.corpus.scores.job import ScoringReport
    from gpuclassify.jobs.input.annotations import job_folders
    from gpuclassify.jobs.report.report import write_report
    from gpuclassify.jobs.stores.opening import open_store

    parts = (DeduplicationReport(), SpanReport(), ContaminationReport(), ScoringReport())
    with wrong_call_exits():
        reports = [write_report(folder, parts) for folder in job_folders(open_store(output))]
    if as_json:
        click.echo("\n".join(map(json.dumps, reports)))
        return
    for job in reports:
        echo(
            f"{job['parts_done']:,} of {job['parts']:,} parts, {job['rows_read']:,} rows read, "
            f"{job['rows_written']:,} rows written\nReport: {job['output']}/_report/report.html"
        )


@click.command()
@click.argument("output")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def verify(context: click.Context, output: str, as_json: bool) -> None:
    """Check that the OUTPUT of a job is complete, and that its files are unchanged.

    Files are read, several at a time, and compared with the digests that the job recorded. If a
    store reports the MD5 of its objects, that is compared instead. Nothing is changed.

    Exit codes: 0 complete and unchanged, 1 something is missing, damaged or not the job's, 2 OUTPUT
    is no output of a job.
    """
    from gpuclassify.jobs.input.annotations import job_folders
    from gpuclassify.jobs.ledger.manifest import DamagedMetadataError, manifest_of
    from gpuclassify.jobs.stores.opening import open_store

    with wrong_call_exits():
        try:
            manifests = [*map(manifest_of, job_folders(open_store(output)))]
        except DamagedMetadataError as err:
            raise click.ClickException(str(err)) from err
    results = [_is_sound(manifest, as_json) for manifest in manifests]
    context.exit(0 if all(results) else FAILED)


def _is_sound(manifest: Manifest, as_json: bool) -> bool:
    """Check a job's output, print the result, and return whether it is complete and unchanged."""
    output = str(manifest.directory)
    manifest.check()
    recorded, damage = manifest.examine()
    is_sound = manifest.is_complete()
    done = manifest.done(recorded.keys() - damage.keys())
    if as_json:
        result = {"output": output, "is_sound": is_sound, "parts": manifest.count}
        result |= {"parts_done": done, **manifest.checked.as_dict(), "damage": damage}
        click.echo(json.dumps(result))
    else:
        echo("\n".join(f"{name}: {reason}" for name, reason in damage.items()), nl=bool(damage))
        echo(f"{done:,} of {manifest.count:,} parts are done and unchanged: {manifest.checked}")
        if not is_sound:
            echo(
                "The output is not complete: run the command that wrote it again, which redoes "
                f"what is missing or damaged.\n{manifest.options.command}".rstrip()
            )
    return is_sound


def run_job(
    context: click.Context,
    make: Callable[[], Recipe],
    cluster: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> NoReturn:
    """Run a job, print its summary, and exit with 0, or with 3 if input was quarantined.

    `cluster` has the cluster settings of `JobSettings` by name, such as ``workers``. `arguments`
    has the values of the command's options by name, with all options of `run_options`.
    """
    options = {name: arguments[name] for name in ("restart", "verify", "accept_changed_code")}
    recipes: list[Recipe] = []

    def prepare() -> Job:
        recipes.append(make())
        return recipes[0].prepare(**options, command=command_line(context))

    summary = run_on_cluster(prepare, cluster, arguments["restart"])
    if arguments["as_json"]:
        click.echo(json.dumps(summary.as_dict()))
    else:
        print_summary(summary, open_console(), recipes[0].numbers(summary))
        seconds = time.perf_counter() - context.obj["began"]
        echo(f"The command took {seconds:.1f} s, start-up included")
    context.exit(LEFT_OUT if summary.left_out else 0)
