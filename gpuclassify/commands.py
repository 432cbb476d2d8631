"""The commands of jobs: ``gpuclassify classify`` and ``gpuclassify report``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click

from gpuclassify.console import (
    LEFT_OUT,
    open_console,
    print_summary,
    quiet_dask,
    wrong_call_exits,
)
from gpuclassify.options import DTYPES, LOADERS

if TYPE_CHECKING:
    from gpuclassify.jobs.job import Job
    from gpuclassify.jobs.settings import JobSettings

# Options that mean one classifier, and may begin with its name where there are several.
OWN = (
    "model", "base_model", "revision", "label_field", "score_field", "confidence_field",
    "filter_by", "min_score", "min_confidence", "keep_field",
)  # fmt: skip
# Options that all classifiers take.
SHARED = (
    "cache_dir", "text_field", "max_chars", "max_seq_length", "batch_size", "dtype", "device",
    "loader", "overwrite",
)  # fmt: skip
LISTS, NUMBERS = ("filter_by",), ("min_score", "min_confidence")
JOB = (
    "fields", "format", "compression", "part_size", "backend", "on_error", "cluster", "workers",
    "scheduler",
)  # fmt: skip


@click.command()
@click.argument("paths", nargs=-1, metavar="INPUT... OUTPUT")
@click.option(
    "--classifier", "classifiers", multiple=True, metavar="FAMILY",
    help="See `gpuclassify models`; repeatable. Options that mean one of several begin with its "
    "name: --filter-by domain:Games.",
)  # fmt: skip
@click.option("--model", multiple=True, help="Hub name or directory. Default: the published model.")
@click.option("--base-model", multiple=True, help="Where the backbone's sizes are.")
@click.option("--revision", multiple=True, help="Branch, tag or commit of the model.")
@click.option("--cache-dir", help="Where downloads are kept.")
@click.option("--text-field", help="Column of the text. Default: text.")
@click.option("--label-field", multiple=True, help="Output column of the label.")
@click.option("--score-field", multiple=True, help="Output column of the scores.")
@click.option("--confidence-field", multiple=True, help="Output column of the label's probability.")
@click.option("--filter-by", multiple=True, help="Keep rows with this label; repeatable.")
@click.option("--min-score", multiple=True, help="Keep rows that score so much: [LABEL=]NUMBER.")
@click.option("--min-confidence", multiple=True, help="Keep rows whose label is this probable.")
@click.option("--keep-field", multiple=True, help="Write the decision to this column instead.")
@click.option(
    "--set", "others", multiple=True, metavar="NAME=VALUE",
    help="Any other argument of the classifier; VALUE is JSON, or a text. Repeatable.",
)  # fmt: skip
@click.option("--field", "fields", multiple=True, help="Read only these columns; repeatable.")
@click.option("--format", type=click.Choice(["parquet", "jsonl"]), help="Default: parquet.")
@click.option("--compression", help="zstd, snappy, gzip, lz4, none; of JSON lines gzip or zstd.")
@click.option("--max-chars", type=int, help="Characters of a text that the model sees.")
@click.option("--max-seq-length", type=int, help="Tokens of a text that the model sees.")
@click.option("--batch-size", type=int, help="Most rows of a batch. Default: automatic.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Default: the fastest that does well.")
@click.option("--device", help="auto, cpu, mps, cuda or cuda:N. Default: auto.")
@click.option("--loader", type=click.Choice(LOADERS), help="Default: sorted.")
@click.option("--overwrite", is_flag=True, default=None, help="Replace columns that exist.")
@click.option("--backend", type=click.Choice(["pandas", "cudf"]), help="Default: pandas.")
@click.option("--cluster", help="auto, gpu, cpu, or another kind that get_client starts.")
@click.option("--scheduler", help="Address or scheduler file of a running Dask cluster.")
@click.option("--workers", type=int, help="Workers of a local cluster.")
@click.option("--part-size", help='Input of one task, such as "16MB". Default: automatic.')
@click.option(
    "--on-error", type=click.Choice(["raise", "quarantine"]),
    help="What broken files, lines and rows do. Default: raise.",
)  # fmt: skip
@click.option(
    "--restart/--resume", default=False,
    help="Start over and remove what earlier runs wrote, or continue, which is the default.",
)  # fmt: skip
@click.option("--config", metavar="FILE", help="Read settings from a YAML file; options win.")
@click.option("--dump-config", metavar="FILE", help="Write the settings to a YAML file, and stop.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.pass_context
def classify(context: click.Context, paths: tuple[str, ...], **given: Any) -> None:
    """Classify INPUT files (Parquet or JSON lines) into the directory OUTPUT.

    INPUT may be a file, a directory, a glob or an fsspec URL. The same command continues a job
    that was interrupted. The Hub token comes from HF_TOKEN or your Hub login, never from the
    command line, where other users could read it.

    Exit codes: 0 done, 1 failed, 2 wrong call, 3 done, with something left out in quarantine, 130
    interrupted.
    """
    quiet_dask()
    with wrong_call_exits():
        settings = _settings(paths, given)
        if given["dump_config"]:
            from gpuclassify.jobs.settings import dump_settings

            dump_settings(settings, given["dump_config"])
            return
        job = settings.pipeline().prepare(restart=given["restart"])
        client = _client(settings)
    summary = _run(job, client)
    if given["as_json"]:
        click.echo(json.dumps(summary.as_dict()))
    else:
        console = open_console()
        print_summary(summary, console)
        console.print(f"Report: {summary.output}/_report/report.html", soft_wrap=True)
    context.exit(LEFT_OUT if summary.left_out else 0)


@click.command()
@click.argument("output")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def report(output: str, as_json: bool) -> None:
    """Write the report of a job, finished or not, into its OUTPUT anew."""
    from gpuclassify.jobs.report import write_report
    from gpuclassify.jobs.storage import open_directory

    with wrong_call_exits():
        made = write_report(open_directory(output))
    if as_json:
        click.echo(json.dumps(made))
        return
    click.echo(
        f"{made['parts_done']:,} of {made['parts']:,} parts, {made['rows_in']:,} rows read, "
        f"{made['rows_out']:,} kept\nReport: {made['output']}/_report/report.html"
    )


def _run(job: Job, client: Any) -> Any:
    from gpuclassify.jobs.progress import JobProgress

    title = job.work.chain.__name__
    with client, JobProgress(title, open_console(stderr=True), client) as progress:
        return job.run(client, progress.parts)


def _settings(paths: tuple[str, ...], given: Mapping[str, Any]) -> JobSettings:
    """The config file's settings, with those of the command line in their place."""
    from gpuclassify.jobs.settings import JobSettings, load_settings

    values = load_settings(given["config"]) if given["config"] else {}
    if paths:
        *inputs, output = paths
        if not inputs and not values.get("input"):
            raise ValueError(f"got one path, {output!r}: name the input, and then the output")
        values = {**values, "output": output, **({"input": inputs} if inputs else {})}
    for name in JOB:
        if given[name] is not None and given[name] != ():
            values[name] = list(given[name]) if name == "fields" else given[name]
    if given["classifiers"]:
        values["classifiers"] = [{"classifier": name} for name in given["classifiers"]]
    classifiers = [dict(settings) for settings in values.get("classifiers") or []]
    values["classifiers"] = _with_arguments(classifiers, given)
    return JobSettings.of(values)


def _with_arguments(
    classifiers: list[dict[str, Any]], given: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Add the options of the command line to what they mean."""
    names = [settings.get("classifier") for settings in classifiers]
    for settings in classifiers:
        family = settings.get("classifier")
        settings.update({name: given[name] for name in SHARED if given[name] is not None})
        for option in OWN:
            own = _own(option, given[option], family, names)
            if own:
                settings[option] = _value(option, own, family)
        settings.update(_others(_own("set", given["others"], family, names)))
    return classifiers


def _own(option: str, values: Iterable[str], family: Any, names: list[Any]) -> list[str]:
    """Those of an option's values that mean the classifier `family`, without its name."""
    own = []
    for value in values:
        owner, colon, rest = value.partition(":")
        if colon and owner in names:
            own += [rest] if owner == family else []
        elif len(names) == 1:
            own.append(value)
        else:
            shown = option.replace("_", "-")
            raise ValueError(
                f"--{shown} {value!r} could mean any of {', '.join(map(str, names))}: say which, "
                f"as in --{shown} {names[0]}:{value}"
            )
    return own


def _value(option: str, values: list[str], family: Any) -> Any:
    if option in LISTS:
        return _labels(values, family)
    if option == "min_score" and all("=" in value for value in values):
        pairs = (value.rpartition("=") for value in values)
        return {label: _number("--min-score", number) for label, _, number in pairs}
    shown = f"--{option.replace('_', '-')}"
    if len(values) > 1:
        raise ValueError(f"{shown} is given {len(values)} times")
    return _number(shown, values[0]) if option in NUMBERS else values[0]


def _labels(texts: list[str], family: Any) -> list[Any]:
    """The labels to keep: those of the guard are true and false."""
    decisions = {"true": True, "false": False}
    if family == "instruction-data-guard" and {text.lower() for text in texts} <= set(decisions):
        return [decisions[text.lower()] for text in texts]
    return texts


def _others(settings: Iterable[str]) -> dict[str, Any]:
    """Arguments that have no option of their own, from NAME=VALUE."""
    given = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting!r}: pass NAME=VALUE, such as truncated_field=is_cut")
        try:
            given[name.replace("-", "_")] = json.loads(text)
        except ValueError:
            given[name.replace("-", "_")] = text
    return given


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError as err:
        hint = ", or LABEL=NUMBER" if option == "--min-score" else ""
        raise ValueError(f"{option} {text!r}: pass a number{hint}") from err


def _client(settings: JobSettings) -> Any:
    from pathlib import Path

    from gpuclassify.cluster import get_client

    if settings.scheduler is None:
        return get_client(settings.cluster, n_workers=settings.workers)
    if settings.workers is not None or settings.cluster != "auto":
        raise ValueError(
            "--scheduler connects to a cluster that is running; --workers and --cluster start a "
            "new one: give one or the other"
        )
    if Path(settings.scheduler).exists():
        return get_client(scheduler_file=settings.scheduler)
    if ":" not in settings.scheduler:
        raise FileNotFoundError(
            f"--scheduler {settings.scheduler!r} is neither an address, such as "
            "tcp://host:8786, nor a file that is there"
        )
    return get_client(address=settings.scheduler)
