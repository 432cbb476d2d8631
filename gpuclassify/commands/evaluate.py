"""The command ``gpuclassify evaluate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuclassify.commands.client import open_client
from gpuclassify.commands.console import (
    open_console,
    quiet_dask,
    start_progress,
    wrong_call_exits,
)
from gpuclassify.commands.options import JobCommand, given_settings, options_of, setting_options
from gpuclassify.commands.settings import CLUSTER, JobSettings

if TYPE_CHECKING:
    from gpuclassify.training.evaluation import Evaluation

NAMES = ("label_field", "text_field", "group", "embeddings")


def _options() -> list[click.Option]:
    from gpuclassify.training.trained_head import Head

    metavars = {"group": "COLUMN", "embeddings": "DIRECTORY", "backbone": "NAME"}
    own: dict[str, Any] = {name: {"metavar": metavar} for name, metavar in metavars.items()}
    return [
        *options_of(Head.evaluate, "Options", *NAMES, **own),
        *options_of(Head.load, "Options", "backbone", **own),
        *setting_options(CLUSTER),
    ]


@click.command(
    cls=JobCommand, options=_options, short_help="Judge a trained head by other annotated texts."
)
@click.argument("directory")
@click.argument("inputs", nargs=-1, required=True, metavar="ANNOTATED...")
@click.option("--page", metavar="FILE", help="Write a page of HTML, with pictures.")
@click.option("--json", "as_json", is_flag=True, help="Print the evaluation as JSON.")
def evaluate(
    directory: str, inputs: tuple[str, ...], page: str | None, as_json: bool, **given: Any
) -> None:
    """Judge the head in DIRECTORY by ANNOTATED files (Parquet or JSON lines).

    DIRECTORY is what `gpuclassify train` wrote. The texts must be others than those that it was
    trained on. Figures are printed with their 95% intervals, and with what is reached without
    reading a text.

    \b
    gpuclassify evaluate heads/quality 'fresh/*.jsonl' --page fresh.html

    Exit codes: 0 done, 1 failed, 2 wrong call, 130 interrupted, 143 terminated.
    """
    quiet_dask()
    found = _evaluated(directory, inputs, page, given)
    if page:
        found.save(page)
    if as_json:
        click.echo(json.dumps(found.as_dict()))
        return
    lines = [str(found), *([f"Page: {page}"] if page else [])]
    open_console().print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _evaluated(
    directory: str, inputs: tuple[str, ...], page: str | None, given: dict[str, Any]
) -> Evaluation:
    from gpuclassify.jobs.input.readers import read_files
    from gpuclassify.training.trained_head import Head

    with start_progress("Looking for the input's parts") as progress:
        with wrong_call_exits():
            if page and not Path(page).absolute().parent.is_dir():
                raise FileNotFoundError(f"--page {page}: make its directory first")
            head = Head.load(directory, backbone=given["backbone"])
            named = {name: given[name] for name in NAMES}
            columns = {name: named[name] or head.record["settings"][name] for name in NAMES[:2]}
            wanted = {*columns.values(), named["group"]} - {None}
            cluster = vars(JobSettings(input=[], **given_settings(given)))
            annotated = read_files(inputs, fields=sorted(wanted))
            client = open_client(cluster, progress, annotated.npartitions)
        with client:
            progress.waiting("Embedding")
            with wrong_call_exits():
                return head.evaluate(annotated, **named)
