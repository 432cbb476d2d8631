"""The command ``gpuclassify train``."""

from __future__ import annotations

import json
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
    TRAINING,
    JobCommand,
    given_settings,
    options_of,
    setting_options,
)
from gpuclassify.commands.settings import CLUSTER, JobSettings

if TYPE_CHECKING:
    from gpuclassify.training.trained_head import Head

NAMES = (
    *("label_field", "backbone", "text_field", "kind", "task", "group", "embeddings", "balanced"),
    *("hidden_size", "epochs", "learning_rate", "seed"),
)


def _options() -> list[click.Option]:
    from gpuclassify.training.trained_head import Head

    metavars = {"backbone": "NAME", "group": "COLUMN", "embeddings": "DIRECTORY"}
    own = {name: {"metavar": metavar} for name, metavar in metavars.items()}
    fitted = options_of(Head.fit, TRAINING, *NAMES, has_defaults=True, **own)
    return [*fitted, *setting_options(CLUSTER)]


@click.command(
    cls=JobCommand, options=_options, short_help="Train a classifier's head on annotated texts."
)
@click.argument("paths", nargs=-1, required=True, metavar="ANNOTATED... DIRECTORY")
@click.option("--json", "as_json", is_flag=True, help="Print the evaluation as JSON.")
def train(paths: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Train a head on ANNOTATED files (Parquet or JSON lines), and save it in DIRECTORY.

    A tenth of the texts is held out. How the head does on them is printed, and shown by
    DIRECTORY/evaluation.html; if they are fewer than 400, such heads are judged by
    cross-validation over all texts instead. `gpuclassify classify --classifier heads
    --heads NAME=DIRECTORY` runs the head; a pooler is run by `--classifier fineweb-edu
    --model DIRECTORY`.

    \b
    gpuclassify train 'annotated/*.jsonl' heads/quality --label-field quality \\
        --backbone intfloat/e5-base-v2 --group url_host

    Exit codes: 0 done, 1 failed, 2 wrong call, 130 interrupted, 143 terminated.
    """
    quiet_dask()
    *inputs, directory = paths
    head = _train(inputs, directory, given)
    if as_json:
        click.echo(json.dumps(head.evaluation.as_dict()))
        return
    data = head.record["data"]
    held_out = data["test"]
    lines = [
        f"{data['train']:,} texts trained on, {data['validation']:,} to choose by, {held_out:,} "
        "held out",
    ]
    if left_out := data["null_texts"] + data["null_labels"]:
        lines.append(f"{left_out:,} rows without a text or a label left out")
    if head.evaluation.folds:
        lines.append(f"{held_out:,} are too few to judge by: figures are by cross-validation")
    lines += [str(head.evaluation), f"Page: {directory}/evaluation.html"]
    open_console().print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _train(inputs: list[str], directory: str, given: dict[str, Any]) -> Head:
    from gpuclassify.jobs.input.readers import read_files
    from gpuclassify.jobs.storage import open_directory
    from gpuclassify.training.trained_head import Head, check_directory

    with start_progress("Looking for the input's parts") as progress:
        with wrong_call_exits():
            if not inputs:
                raise ValueError("name the annotated files, and then the head's directory")
            open_directory(directory).refuse_file()
            check_directory(directory, given["kind"])
            cluster = vars(JobSettings(input=[], **given_settings(given)))
            wanted = {given[name] for name in ("text_field", "label_field", "group")} - {None}
            annotated = read_files(inputs, fields=sorted(wanted))
            client = open_client(cluster, progress, annotated.npartitions)
        with client:
            progress.waiting("Embedding, and then training")
            with wrong_call_exits():
                head = Head.fit(annotated, **{name: given[name] for name in NAMES})
                head.save(directory)
    return head
