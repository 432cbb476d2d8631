"""Command ``gpuclassify train``: train a head on annotated files."""

from __future__ import annotations

import json
from collections.abc import Iterable
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
    options_of,
    reader_from_options,
    reading_options,
    setting_options,
    settings_from_options,
)
from gpuclassify.commands.settings import CLUSTER, JobSettings

if TYPE_CHECKING:
    from gpuclassify.corpus.training.trained_head import TrainedHead

NAMES = (
    *("label_field", "backbone", "text_field", "kind", "task", "group", "embeddings", "balanced"),
    *("hidden_size", "epochs", "learning_rate", "seed", "class_weight", "validation"),
)
OTHERS = ("backbone", "embeddings", "validation")  # not in the record of the head's training


def _options() -> list[click.Option]:
    from gpuclassify.corpus.training.trained_head import TrainedHead

    metavars = {"backbone": "NAME", "group": "COLUMN", "embeddings": "DIRECTORY"}
    attributes: dict[str, Any] = {name: {"metavar": metavar} for name, metavar in metavars.items()}
    many = {"class_weight": "balanced|LABEL=NUMBER", "validation": "PATH"}
    attributes |= {name: {"multiple": True, "metavar": metavar} for name, metavar in many.items()}
    fitted = options_of(TrainedHead.fit, TRAINING, *NAMES, has_defaults=True, **attributes)
    return [*fitted, *reading_options(), *setting_options(CLUSTER)]


@click.command(cls=JobCommand, options=_options)
@click.argument("paths", nargs=-1, required=True, metavar="ANNOTATED... DIRECTORY")
@click.option("--json", "as_json", is_flag=True, help="Print the evaluation as JSON.")
def train(paths: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Train a head on ANNOTATED files (Parquet or JSON lines), and save it in DIRECTORY.

    A head is layers that turn the embeddings of a model (--backbone) into labels or a score. A
    tenth of the texts is held out to evaluate it. The result is printed, and written to
    DIRECTORY/evaluation.html. If fewer than 400 texts are held out, cross-validation over all texts
    is used instead. Run the head with `gpuclassify classify --classifier heads --heads
    NAME=DIRECTORY`, and one of --kind pooler with `--classifier fineweb-edu --model DIRECTORY`.

    \b
    gpuclassify train 'annotated/*.jsonl' heads/quality --label-field quality \\
        --backbone intfloat/e5-base-v2 --group url_host

    Exit codes: 0 done, 1 failed, 2 wrong call, 130 interrupted, 143 terminated.
    """
    quiet_dask()
    *inputs, directory = paths
    head = _train(inputs, directory, options)
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
        lines.append(
            f"{held_out:,} texts are too few for an evaluation: figures are by cross-validation"
        )
    lines += [str(head.evaluation), f"Page: {directory}/evaluation.html"]
    open_console().print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _train(inputs: list[str], directory: str, options: dict[str, Any]) -> TrainedHead:
    from gpuclassify.corpus.training.labels import LabelColumns
    from gpuclassify.corpus.training.trained_head import (
        TrainedHead,
        check_directory,
        fit_settings,
    )
    from gpuclassify.jobs.input.left_out import left_out_logged
    from gpuclassify.jobs.input.readers import read_columns
    from gpuclassify.jobs.stores.opening import open_store

    with start_progress("Looking for the input's parts") as progress:
        with wrong_call_exits():
            if not inputs:
                raise ValueError("name the annotated files, and then the head's directory")
            open_store(directory).refuse_file()
            check_directory(directory, options["kind"])
            settings = {name: options[name] for name in NAMES}
            settings["class_weight"] = _class_weight(options["class_weight"])
            fit_settings(**{name: settings[name] for name in NAMES if name not in OTHERS})
            columns = LabelColumns(*(options[n] for n in ("text_field", "label_field", "group")))

            def read(paths: Iterable[str], *names: str | None) -> Any:
                passed = dict(options)
                reader = reader_from_options(paths, passed)
                return read_columns(reader, names, passed["on_error"])

            annotated = read(inputs, columns.text, columns.label, columns.group)
            columns.check(annotated._meta)
            if paths := options["validation"]:
                settings["validation"] = read(paths, columns.text, columns.label)
            else:
                settings["validation"] = None
            cluster = vars(JobSettings(input=[], **settings_from_options(options)))
            client = open_client(cluster, progress, annotated.npartitions)
        with client, left_out_logged():
            progress.waiting("Embedding, and then training")
            with wrong_call_exits():
                head = TrainedHead.fit(annotated, **settings)
                head.save(directory)
    return head


def _class_weight(values: tuple[str, ...]) -> str | dict[str, float] | None:
    if values in ((), ("balanced",)):
        return "balanced" if values else None
    try:
        return {
            label: float(number)
            for label, _, number in (weight.rpartition("=") for weight in values)
        }
    except ValueError as err:
        raise ValueError(
            f"--class-weight {' '.join(values)}: pass balanced, or LABEL=NUMBER for each label"
        ) from err
