"""Commands ``gpuclassify annotate`` and ``select``: write annotations, select rows by them."""

from __future__ import annotations

from typing import Any

import click

from gpuclassify.commands.classify import run_job
from gpuclassify.commands.console import quiet_dask, wrong_call_exits
from gpuclassify.commands.options import (
    JobCommand,
    file_options,
    job_options,
    read_settings,
    run_options,
    setting_options,
    settings_from_options,
    split_paths,
)
from gpuclassify.commands.settings import NOTES, REPORT, SELECTION, JobSettings
from gpuclassify.settings.options import ROWS


def _annotate_options() -> list[click.Option]:
    notes = [option for option in setting_options(NOTES) if option.name == "redo_changed"]
    return [*job_options(), *notes, *run_options()]


@click.command(cls=JobCommand, options=_annotate_options)
@click.argument("paths", nargs=-1, metavar="INPUT... OUTPUT")
@click.pass_context
def annotate(context: click.Context, paths: tuple[str, ...], **options: Any) -> None:
    """Classify INPUT files, and write the new columns of every row into the directory OUTPUT.

    INPUT may be a file, a directory, a glob or an fsspec URL. No text is written and no row
    dropped: a filter's decision becomes a column. `select --annotations OUTPUT` adds the columns to
    the rows of INPUT again. The same command continues an interrupted job, and annotates new files.

    \b
    gpuclassify annotate 'crawl/*.parquet' notes/quality/ --classifier quality

    Exit codes: 0 done, 1 failed, 2 wrong call, 3 done, with something left out in quarantine, 130
    interrupted, 143 terminated.
    """
    quiet_dask()
    options["annotate"] = True
    with wrong_call_exits():
        settings = read_settings(options, **split_paths(paths, options))
        if settings is None:
            return
    run_job(context, settings.job, vars(settings), options)


def _select_options() -> list[click.Option]:
    rows = [o for o in setting_options(ROWS) if o.name in ("limit", "cluster_file")]
    return [*setting_options(SELECTION, REPORT), *rows, *file_options()]


@click.command(cls=JobCommand, options=_select_options)
@click.argument("paths", nargs=-1, metavar="INPUT... OUTPUT")
@click.pass_context
def select(context: click.Context, paths: tuple[str, ...], **options: Any) -> None:
    """Write the rows of INPUT that meet a condition, or all, into OUTPUT, with their annotations.

    INPUT may be a file, a directory, a glob or an fsspec URL. Annotations are columns that
    `annotate` wrote for the same INPUT; --annotations adds them to its rows. A row is selected by
    the condition (--where) and by --thresholds. Without these, all rows are written, such as with
    --format jsonl to convert files to JSON lines. If the selection needs only annotations, the text
    of Parquet row groups without a selected row is not read. The same command continues an
    interrupted job.

    \b
    gpuclassify select 'crawl/*.parquet' final/ --annotations notes/quality \\
        --where "quality_pred != 'Low'"

    Exit codes: 0 done, 1 failed, 2 wrong call, 3 done, with something left out in quarantine, 130
    interrupted, 143 terminated.
    """
    quiet_dask()
    with wrong_call_exits():
        values = {**settings_from_options(options), **split_paths(paths, options)}
        settings = JobSettings.of(values, needs_stages=False)
    run_job(context, settings.job, vars(settings), options)
