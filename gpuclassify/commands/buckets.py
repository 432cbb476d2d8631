"""The command ``gpuclassify buckets``."""

from __future__ import annotations

from typing import Any

import click

from gpuclassify.commands.classify import run_job
from gpuclassify.commands.console import quiet_dask, wrong_call_exits
from gpuclassify.commands.options import (
    BUCKETS,
    GroupedOption,
    JobCommand,
    annotate_option,
    file_options,
    options_of,
    settings_from_options,
    split_paths,
)
from gpuclassify.commands.settings import BUCKETS as SETTINGS
from gpuclassify.commands.settings import BUCKETS_OF_EDGES, EDGES, JobSettings

ROWS = "none"  # as a weight: all rows count the same


def _options() -> list[click.Option]:
    from gpuclassify.corpus.scores.buckets import ScoreBuckets, score_edges

    of_weight = "Buckets have equal sums of this column; bytes is those of the text, none counts "
    cut: dict[str, Any] = {
        "scores": {"metavar": "COLUMN"},
        "weight": {"metavar": "COLUMN", "help": f"{of_weight}rows. Default: bytes."},
    }
    return [
        *options_of(score_edges, BUCKETS, "scores", "n", "weight", "by", "text_field", **cut),
        *options_of(ScoreBuckets, BUCKETS, *BUCKETS_OF_EDGES),
        GroupedOption(
            ["--edges"], group=BUCKETS, metavar="FILE",
            help="Edges of an earlier job, from its OUTPUT/_buckets/edges.json, in place of "
            "--score, --n, --weight and --by."),
        annotate_option(), *file_options(),
    ]  # fmt: skip


@click.command(cls=JobCommand, options=_options)
@click.argument("paths", nargs=-1, metavar="INPUT... OUTPUT")
@click.pass_context
def buckets(context: click.Context, paths: tuple[str, ...], **options: Any) -> None:
    """Write the documents of INPUT (Parquet or JSON lines) with the buckets of their scores.

    Paths are those of `classify`. The scores are read first, to find the edges between buckets of
    equal weight, which are saved in OUTPUT/_buckets/edges.json. Then documents are written, with
    a bucket column for each score and one for the row. The same command continues an interrupted
    job. With --annotate, the buckets are written beside INPUT, and no text; scores may be those of
    --annotations. To classify and then cut, pass `classify` a --config FILE with buckets:.

    \b
    gpuclassify buckets classified/ buckets/ --score edu --score hq --partition-by bucket

    Exit codes: 0 done, 1 failed, 2 wrong call, 3 done, with something left out in quarantine, 130
    interrupted, 143 terminated.
    """
    quiet_dask()
    with wrong_call_exits():
        chosen = {
            name: options[name] for name in (EDGES, *SETTINGS) if options[name] not in (None, ())
        }
        if chosen.get("weight") == ROWS:
            chosen["weight"] = None
        if not {"scores", EDGES} & {*chosen}:
            raise ValueError("name the columns of scores: --score COLUMN, or --edges FILE")
        values = {
            **settings_from_options(options),
            **split_paths(paths, options),
            "buckets": chosen,
        }
        settings = JobSettings.of(values)
    run_job(context, settings.job, vars(settings), options)
