"""The command ``gpuclassify buckets``."""

from __future__ import annotations

from typing import Any

import click

from gpuclassify.commands.classify import run_job
from gpuclassify.commands.console import quiet_dask, wrong_call_exits
from gpuclassify.commands.options import (
    BUCKETS,
    COLUMN,
    JobCommand,
    file_options,
    option_table,
    read_file_options,
    run_options,
    split_paths,
)
from gpuclassify.scores import COMBINE

ROWS = "none"  # as a weight: rows count alike


@click.command(cls=JobCommand, short_help="Cut scores into buckets, or go on with it.")
@click.argument("paths", nargs=-1, metavar="INPUT... OUTPUT")
@option_table(BUCKETS, {
    "--score scores": COLUMN | {"multiple": True, "help": "Column of numbers to cut; repeatable."},
    "--n": {"type": int, "help": "Number of buckets. Default: 20."},
    "--weight": COLUMN | {"help": "Buckets have equal sums of this column; bytes is those of the "
                          "text, none counts rows. Default: bytes."},
    "--by": COLUMN | {"help": "Cut within each value of this column, such as language."},
    "--text-field": COLUMN | {"help": "Column of the text. Default: text."},
    "--combine": {"type": click.Choice(COMBINE), "help": "Which bucket of its scores is a row's. "
                  "Default: max."},
    "--bucket-field": COLUMN | {"help": "Output column of the row's. Default: bucket."},
    "--overwrite": {"is_flag": True, "default": None, "help": "Replace columns that exist."},
    "--edges": {"metavar": "FILE", "help": "Edges of an earlier job, from its OUTPUT/_buckets/"
                "edges.json, in place of --score, --n, --weight and --by."},
})  # fmt: skip
@file_options
@run_options
@click.pass_context
def buckets(context: click.Context, paths: tuple[str, ...], **given: Any) -> None:
    """Write the documents of INPUT (Parquet or JSON lines) with the buckets of their scores.

    Paths are those of `classify`. The scores are read first, to find the edges between buckets of
    equal weight, which are kept in OUTPUT/_buckets/edges.json; then documents are written, with
    a column for each score and one for the row. The same command continues a job that was
    interrupted. `classify` with buckets: in its --config FILE does it after the classification.

    \b
    gpuclassify buckets classified/ buckets/ --score edu --score hq --partition-by bucket

    Exit codes: 0 done, 1 failed, 2 wrong call, 3 done, with something left out in quarantine, 130
    interrupted, 143 terminated.
    """
    from gpuclassify.commands.settings import BUCKETS as SETTINGS
    from gpuclassify.commands.settings import EDGES, JobSettings

    quiet_dask()
    with wrong_call_exits():
        chosen = {name: given[name] for name in (EDGES, *SETTINGS) if given[name] not in (None, ())}
        if chosen.get("weight") == ROWS:
            chosen["weight"] = None
        if not {"scores", EDGES} & {*chosen}:
            raise ValueError("name the columns of scores: --score COLUMN, or --edges FILE")
        values = {**read_file_options(given), **split_paths(paths, given), "buckets": chosen}
        settings = JobSettings.of(values)
    run_job(context, settings.job, vars(settings), given)
