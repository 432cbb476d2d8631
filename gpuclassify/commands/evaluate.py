"""Command ``gpuclassify evaluate``: evaluate a trained head on annotated files."""

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
from gpuclassify.commands.options import (
    JobCommand,
    options_of,
    reader_from_options,
    reading_options,
    setting_options,
    settings_from_options,
)
from gpuclassify.commands.settings import CLUSTER, JobSettings
from gpuclassify.settings.paths import is_directory

if TYPE_CHECKING:
    from gpuclassify.corpus.training.evaluation import Evaluation

NAMES = ("label_field", "text_field", "group", "embeddings")


def _options() -> list[click.Option]:
    from gpuclassify.corpus.training.trained_head import TrainedHead

    metavars = {"group": "COLUMN", "embeddings": "DIRECTORY", "backbone": "NAME"}
    attributes: dict[str, Any] = {name: {"metavar": metavar} for name, metavar in metavars.items()}
    return [
        *options_of(TrainedHead.evaluate, "Options", *NAMES, **attributes),
        *options_of(TrainedHead.load, "Options", "backbone", **attributes),
        *reading_options(),
        *setting_options(CLUSTER),
    ]


@click.command(cls=JobCommand, options=_options)
@click.argument("directory")
@click.argument("inputs", nargs=-1, required=True, metavar="ANNOTATED...")
@click.option("--page", metavar="FILE", help="Write a page of HTML, with pictures.")
@click.option("--json", "as_json", is_flag=True, help="Print the evaluation as JSON.")
def evaluate(
    directory: str, inputs: tuple[str, ...], page: str | None, as_json: bool, **options: Any
) -> None:
    """Evaluate the head in DIRECTORY on ANNOTATED files (Parquet or JSON lines).

    A head is layers that turn the embeddings of a model into labels or a score; `gpuclassify train`
    wrote it into DIRECTORY. Use texts that the head was not trained on. Prints figures with their
    95% intervals, next to a baseline that reads no text.

    \b
    gpuclassify evaluate heads/quality 'fresh/*.jsonl' --page fresh.html

    Exit codes: 0 done, 1 failed, 2 wrong call, 130 interrupted, 143 terminated.
    """
    quiet_dask()
    evaluation = _evaluated(directory, inputs, page, options)
    if page:
        evaluation.save(page)
    if as_json:
        click.echo(json.dumps(evaluation.as_dict()))
        return
    lines = [str(evaluation), *([f"Page: {page}"] if page else [])]
    open_console().print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _evaluated(
    directory: str, inputs: tuple[str, ...], page: str | None, options: dict[str, Any]
) -> Evaluation:
    from gpuclassify.corpus.training.trained_head import TrainedHead
    from gpuclassify.jobs.input.left_out import left_out_logged
    from gpuclassify.jobs.input.readers import read_columns

    with start_progress("Looking for the input's parts") as progress:
        with wrong_call_exits():
            if page and not is_directory(Path(page).absolute().parent):
                raise FileNotFoundError(f"--page {page}: make its directory first")
            head = TrainedHead.load(directory, backbone=options["backbone"])
            named = {name: options[name] for name in NAMES}
            columns = {name: named[name] or head.record["settings"][name] for name in NAMES[:2]}
            reader = reader_from_options(inputs, options)
            wanted = (*columns.values(), named["group"])
            annotated = read_columns(reader, wanted, options["on_error"])
            cluster = vars(JobSettings(input=[], **settings_from_options(options)))
            client = open_client(cluster, progress, annotated.npartitions)
        with client, left_out_logged():
            progress.waiting("Embedding")
            with wrong_call_exits():
                return head.evaluate(annotated, **named)
