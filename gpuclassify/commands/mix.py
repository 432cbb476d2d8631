"""The command ``gpuclassify mix``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from gpuclassify.commands.classify import run_job
from gpuclassify.commands.console import open_console, quiet_dask, wrong_call_exits
from gpuclassify.commands.options import (
    JobCommand,
    file_options,
    options_of,
    settings_from_options,
    split_paths,
)
from gpuclassify.commands.settings import JobSettings

ID = "Column of ids. Default: a row is known by its file and place there."
PLAN = ("by", "tokens", "max_epochs", "token_field", "seed")


def _options() -> list[click.Option]:
    from gpuclassify.scores.mix import Mix
    from gpuclassify.scores.mix_copies import MixCopies

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
@click.option("--page", metavar="FILE", help="Write a page of HTML, with pictures.")
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
    from gpuclassify.hub.saving import replace_file
    from gpuclassify.jobs.input.sources import as_source
    from gpuclassify.jobs.pipeline import Pipeline
    from gpuclassify.scores.mix import Mix
    from gpuclassify.scores.mix_copies import MixCopies

    quiet_dask()
    with wrong_call_exits(), open_console(stderr=True).status("Counting tokens"):
        values = {**settings_from_options(options), **split_paths(paths, options)}
        settings = JobSettings(**values, annotate=True)
        planned = {name: options[name] for name in PLAN if options[name] not in (None, ())}
        columns = [*planned["by"], planned.get("token_field", "tokens")]
        rows = as_source(settings.reader(columns), "raise").frame("raise", "pandas")
        found = Mix.plan(rows, **planned, weights=_entries(weights) if weights else None)
        copies = {name: options[name] for name in ("id_field", "copies_field") if options[name]}
        stage = MixCopies(found, **copies)
        reader = settings.reader([*found.by, *filter(None, [stage.id_field])])
        if page:
            replace_file(Path(page), found.html().encode())
    if not options["as_json"]:
        open_console().print(str(found), highlight=False, markup=False, soft_wrap=True)
    if not is_plan:
        pipeline = Pipeline([reader, stage, settings.writer()])
        run_job(context, lambda: pipeline, dataclasses.asdict(settings), options)


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
