"""Command ``gpuclassify thresholds``: find thresholds of a score from labelled rows."""

from __future__ import annotations

import json
from typing import Any

import click

from gpuclassify.commands.console import open_console, quiet_dask, wrong_call_exits
from gpuclassify.commands.options import (
    JobCommand,
    options_of,
    reader_from_options,
    reading_options,
)

COLUMNS = ("score", "label", "by", "weight")
TARGETS = ("precision", "recall", "keep_share")
OTHERS = ("positive", "cautious", "min_labels", "small_groups", "calibration")


def _options() -> list[click.Option]:
    from gpuclassify.corpus.scores.thresholds import Thresholds

    attributes: dict[str, Any] = {name: {"metavar": "COLUMN"} for name in COLUMNS}
    attributes |= {name: {"metavar": "SHARE", "type": float} for name in TARGETS}
    attributes["positive"] = {
        "metavar": "LABEL",
        "multiple": True,
        "type": str,
        "help": "A label that is sought, such as High, or a number as JSON; repeatable. Default: "
        "the column holds true and false, or 1 and 0.",
    }
    fit = Thresholds.fit
    return [
        *options_of(fit, "Options", *COLUMNS[:2], has_defaults=True, **attributes),
        *options_of(fit, "Options", *COLUMNS[2:], *TARGETS, *OTHERS, **attributes),
        *reading_options(),
    ]


@click.command(cls=JobCommand, options=_options)
@click.argument("inputs", nargs=-1, required=True, metavar="LABELLED...")
@click.argument("output")
@click.option("--page", metavar="FILE", help="Write a page of HTML, with bars.")
@click.option("--json", "as_json", is_flag=True, help="Print the thresholds as JSON.")
def thresholds(
    inputs: tuple[str, ...], output: str, page: str | None, as_json: bool, **options: Any
) -> None:
    """Find thresholds of a score from LABELLED files (Parquet or JSON lines), and save them.

    A threshold is the smallest score of rows to keep; each group (--by) has its own. OUTPUT is a
    file of JSON, for `select --thresholds OUTPUT`. Pass exactly one target: --precision, --recall
    or --keep-share. Only scores, labels, groups and weights are read.

    \b
    gpuclassify thresholds labelled.jsonl thresholds.json --score edu_score --label is_good \\
        --by language --precision 0.9

    Exit codes: 0 done, 1 failed, 2 wrong call, 130 interrupted, 143 terminated.
    """
    from gpuclassify.corpus.scores.saved import write_file
    from gpuclassify.corpus.scores.thresholds import Thresholds

    quiet_dask()
    with wrong_call_exits(), open_console(stderr=True).status("Reading labels"):
        settings = {name: options[name] for name in (*COLUMNS, *TARGETS, *OTHERS)}
        settings["positive"] = [*map(_value, options["positive"])] or None
        settings = {name: value for name, value in settings.items() if value is not None}
        labelled = reader_from_options(inputs, options)
        found = Thresholds.fit(labelled, **settings, on_error=options["on_error"])
        found.save(output)
        if page:
            write_file(page, found.html().encode())
    if as_json:
        click.echo(found.as_json())
        return
    lines = [str(found), f"Thresholds: {output}", *([f"Page: {page}"] if page else [])]
    open_console().print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
