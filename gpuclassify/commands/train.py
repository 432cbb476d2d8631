"""The command ``gpuclassify train``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, get_args

import click

from gpuclassify.commands.client import open_client
from gpuclassify.commands.console import (
    open_console,
    quiet_dask,
    start_progress,
    wrong_call_exits,
)
from gpuclassify.commands.options import (
    COLUMN,
    TRAINING,
    JobCommand,
    cluster_options,
    option_table,
    read_file_options,
)
from gpuclassify.training import Kind, TaskName

if TYPE_CHECKING:
    from gpuclassify.training.trained_head import Head

KINDS, TASKS = get_args(Kind), get_args(TaskName)


@click.command(cls=JobCommand, short_help="Train a classifier's head on annotated texts.")
@click.argument("paths", nargs=-1, required=True, metavar="ANNOTATED... DIRECTORY")
@option_table(TRAINING, {
    "--label-field": COLUMN | {"required": True, "help": "Column of the labels."},
    "--backbone": {"metavar": "NAME", "required": True, "help": "Hub name or directory of the "
                   "model whose embeddings are read; its weights stay as they are."},
    "--text-field": COLUMN | {"default": "text", "help": "Column of the text. Default: text."},
    "--kind": {"type": click.Choice(KINDS), "default": "linear", "help": "A linear layer; two "
               "layers; or a BERT's pooler and a linear layer, as FineWeb-Edu has it. Default: "
               "linear."},
    "--task": {"type": click.Choice(TASKS), "default": "classes", "help": "One of several "
               "labels, any number of them, or a number. Default: classes."},
    "--group": COLUMN | {"help": "Rows of one value stay together when some are held out."},
    "--embeddings": {"metavar": "DIRECTORY", "help": "Keep embeddings here, and take them from "
                     "here when the same texts are trained on again."},
    "--balanced": {"is_flag": True, "help": "Labels count alike, however many rows they have."},
    "--hidden-size": {"type": int, "default": 256, "help": "Width between two layers. Default: "
                      "256."},
    "--epochs": {"type": int, "help": "At most, of kinds mlp and pooler."},
    "--learning-rate": {"type": float, "help": "Of kinds mlp and pooler."},
    "--seed": {"type": int, "default": 0, "help": "Of what is held out, and of training."},
})  # fmt: skip
@cluster_options
@click.option("--json", "as_json", is_flag=True, help="Print the evaluation as JSON.")
def train(paths: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Train a head on ANNOTATED files (Parquet or JSON lines), and save it in DIRECTORY.

    A tenth of the texts is held out; how the head does on them is printed, and shown by
    DIRECTORY/evaluation.html. `gpuclassify classify --classifier heads --heads NAME=DIRECTORY`
    runs the head; a pooler is run by `--classifier fineweb-edu --model DIRECTORY`.

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
            cluster = read_file_options(given)
            wanted = {given[name] for name in ("text_field", "label_field", "group")} - {None}
            annotated = read_files(inputs, fields=sorted(wanted))
            client = open_client(cluster, progress, annotated.npartitions)
        with client:
            progress.waiting("Embedding, and then training")
            with wrong_call_exits():
                settings = {name: given[name] for name in given if name not in cluster}
                head = Head.fit(annotated, **settings)
                head.save(directory)
    return head
