"""The command ``gpuclassify mix``."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuclassify.commands.classify import run_job
from gpuclassify.commands.client import open_client, runs_here
from gpuclassify.commands.console import (
    open_console,
    quiet_dask,
    start_progress,
    wrong_call_exits,
)
from gpuclassify.commands.options import (
    JobCommand,
    file_options,
    options_of,
    settings_from_options,
    split_paths,
)
from gpuclassify.commands.settings import JobSettings

if TYPE_CHECKING:
    from rich.console import Console

    from gpuclassify.corpus.scores.mix import Mix, MixSettings

ID = "Column of ids. Default: a row is known by its file and place there."
PLAN = ("by", "tokens", "max_epochs", "token_field", "seed")


def _options() -> list[click.Option]:
    from gpuclassify.corpus.scores.mix import Mix
    from gpuclassify.corpus.scores.mix_copies import MixCopies

    attributes: dict[str, Any] = {
        "by": {"flags": ["--by"], "required": True},
        "tokens": {"required": True, "metavar": "NUMBER", "type": float, "flags": ["--tokens"]},
    }
    return [
        *options_of(Mix.plan, "Options", *PLAN, **attributes),
        *options_of(MixCopies, "Options", "id_field", "copies_field", id_field={"help": ID}),
        *file_options(),
    ]


@click.command(cls=JobCommand, options=_options)
@click.argument("paths", nargs=-1, metavar="INPUT... OUTPUT")
@click.option(
    "--weights",
    metavar="FILE",
    help="YAML list of entries such as {topic: News, weight: 0.2}: shares of the mixture. "
    "Default: all as they are.",
)
@click.option("--page", metavar="FILE", help="Write a page of HTML, with bars.")
@click.option("--plan", "is_plan", is_flag=True, help="Print the table, and write no copies.")
@click.pass_context
def mix(
    context: click.Context,
    paths: tuple[str, ...],
    weights: str | None,
    page: str | None,
    is_plan: bool,
    **options: Any,
) -> None:
    """Plan a mixture of so many tokens of INPUT, and write into OUTPUT how often each row is in it.

    Cells are the values of the --by columns. A table tells for each of them what there is, what is
    asked, how often rows are repeated, and what is missing. OUTPUT is an annotation set;
    `select --copies copies --annotations OUTPUT` writes the mixture. Texts are not read.

    \b
    gpuclassify mix 'crawl/*.parquet' notes/mix --annotations notes/topic \\
        --annotations notes/tokens --by topic --tokens 6e12 --weights mix.yaml

    Exit codes: 0 done, 1 failed, 2 wrong call, 3 done, with something left out in quarantine, 130
    interrupted, 143 terminated.
    """
    from gpuclassify.corpus.scores.job import PlanMix
    from gpuclassify.corpus.scores.mix import MixSettings
    from gpuclassify.corpus.scores.saved import write_file
    from gpuclassify.jobs.pipeline import OPTIONS

    quiet_dask()
    with wrong_call_exits():
        values = {**settings_from_options(options), **split_paths(paths, options)}
        settings = JobSettings(**values, annotate=True)
        planned = {name: options[name] for name in PLAN if options[name] not in (None, ())}
        mixture = MixSettings(**planned, weights=_entries(weights) if weights else None)
    if is_plan:
        found = _planned(settings, mixture)
        if page:
            write_file(page, found.html().encode())
        if options["as_json"]:
            click.echo(found.as_json())
        else:
            _print(found, open_console())
        return

    def make() -> PlanMix:
        names = {name: options[name] for name in ("id_field", "copies_field") if options[name]}
        columns = [*mixture.read_fields, *filter(None, [options["id_field"]])]
        others = {name: getattr(settings, name) for name in OPTIONS}
        stages = [settings.reader(columns), settings.writer()]
        return PlanMix(stages, mixture, page=page, **names, **others)

    run_job(context, make, vars(settings), options)


def _planned(settings: JobSettings, mixture: MixSettings) -> Mix:
    """Count tokens on the cluster that a job would run on, and plan the mix; writes nothing."""
    from gpuclassify.jobs.execution import compute_tasks
    from gpuclassify.jobs.input.sources import as_source

    cluster = vars(settings)
    with start_progress("Looking for the input's parts") as progress:
        with wrong_call_exits():
            reader = settings.reader(mixture.read_fields)
            source = as_source(reader, settings.on_error)
            mixture.check(source.meta)
            client = None
            if not runs_here(source, (), cluster):
                client = open_client(cluster, progress, source.count)
        progress.waiting("Counting tokens")
        with client or contextlib.nullcontext(), wrong_call_exits():
            frame = source.frame(settings.on_error, settings.backend)
            return mixture.find(frame, functools.partial(compute_tasks, client))


def _print(mix: Mix, console: Console) -> None:
    console.print(str(mix), highlight=False, markup=False, soft_wrap=True)


def _entries(path: str) -> list[dict[str, Any]]:
    """Read the entries of a YAML file; ValueError if it holds no list of them."""
    import yaml  # type: ignore[import-untyped]

    try:
        entries = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError, yaml.YAMLError) as err:
        raise ValueError(f"--weights {path} is no YAML: {err}") from err
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        raise ValueError(f"--weights {path}: write a list such as - {{topic: News, weight: 0.2}}")
    return entries
