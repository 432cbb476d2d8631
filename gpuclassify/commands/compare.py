"""Command ``gpuclassify compare``: compare a classifier in two settings."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import click

from gpuclassify.commands.console import echo, open_console, quiet_dask, wrong_call_exits
from gpuclassify.commands.options import (
    LocalCommand,
    job_options,
    named_values,
    read_settings,
)

ROWS_READ, SCORES = 2_000, "scores"
CHANGED = 1  # exit code


class CompareCommand(LocalCommand):
    """Click command that exits like ``diff``: with 1 for differences, and with 2 for errors."""

    failed = 2


@click.command(cls=CompareCommand, options=job_options)
@click.argument("inputs", nargs=-1, metavar="INPUT...")
@click.option(
    "--with", "changes", metavar="NAME=VALUE", multiple=True,
    help="Argument of the second classifier, such as dtype=bfloat16; VALUE is JSON, or a text. "
    "Repeatable.",
)  # fmt: skip
@click.option(
    "--most-changed", type=click.FloatRange(0, 1), metavar="SHARE",
    help="End with 1 if more than this share of the rows gets another label, or is kept by one "
    "alone.",
)  # fmt: skip
@click.option("--page", metavar="FILE", help="Write a page of HTML with the rows that moved.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def compare(context: click.Context, inputs: tuple[str, ...], **options: Any) -> None:
    """Run a classifier in two settings over the first texts of INPUT, and show the changes.

    Prints the speed of both, the shares of rows whose label or filter decision changes, the
    differences of scores, and the rows that changed. The options of `gpuclassify classify` define
    the first setting; --with changes them for the second. Starts no cluster. Reads --limit rows, by
    default 2,000.

    \b
    gpuclassify compare 'crawl/*.jsonl' --classifier quality --with dtype=bfloat16

    Exit codes: 0 compared, 1 more rows changed than --most-changed, 2 failed, or wrong call.
    """
    from gpuclassify.corpus.scores.comparison import compare as run
    from gpuclassify.jobs.input.left_out import left_out_logged
    from gpuclassify.jobs.input.readers import first_rows
    from gpuclassify.mapping.label_heads import CategoryHead

    quiet_dask()
    with wrong_call_exits():
        settings = read_settings(options, input=list(inputs))
        if settings is None:
            return
        if len(settings.classifiers) != 1:
            names = ", ".join(str(values["classifier"]) for values in settings.classifiers)
            raise ValueError(f"compare takes one --classifier, got {names}: leave out the others")
        changes = named_values("--with", "autocast=false", options["changes"])
        if not changes:
            raise click.UsageError(
                "pass the argument that differs in the second classifier, such as --with "
                "dtype=bfloat16 or --with model=NAME"
            )
        (arguments,) = settings.classifiers
        first = settings.mappers()[0]
        if isinstance(first.heads[0], CategoryHead) and first.options.score_field is None:
            arguments = {**arguments, "score_field": SCORES}
        first, second = (
            replace(settings, classifiers=[values]).mappers()[0]
            for values in (arguments, arguments | changes)
        )
        with open_console(stderr=True).status("Classifying twice"):
            reader = settings.reader(settings.fields_read([first, second]))
            with left_out_logged():
                frame = first_rows(reader, settings.limit or ROWS_READ, settings.on_error)
            comparison = run(frame, first, second, limit=None)
    echo(json.dumps(comparison.as_dict()) if options["as_json"] else str(comparison))
    if options["page"]:
        comparison.save(options["page"])
    if options["most_changed"] is not None and comparison.changed > options["most_changed"]:
        echo(
            f"{comparison.changed:.2%} of the rows change, more than the "
            f"{options['most_changed']:.2%} of --most-changed",
            err=True,
        )
        context.exit(CHANGED)
