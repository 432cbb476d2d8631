"""Command ``gpuclassify mix``: plan a mixture for a budget of tokens."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuclassify.commands.client import open_client, runs_here
from gpuclassify.commands.console import open_console, quiet_dask, start_progress, wrong_call_exits
from gpuclassify.commands.options import (
    READING,
    JobCommand,
    options_of,
    setting_options,
    settings_from_options,
    split_paths,
)
from gpuclassify.commands.settings import CLUSTER, FILES, JobSettings

if TYPE_CHECKING:
    from gpuclassify.corpus.scores.mix import Mix, MixSettings

PLAN = ("by", "tokens", "max_epochs", "token_field")


def _options() -> list[click.Option]:
    from gpuclassify.corpus.scores.mix import Mix

    attributes: dict[str, Any] = {
        "by": {"flags": ["--by"], "required": True},
        "tokens": {"required": True, "metavar": "NUMBER", "type": float, "flags": ["--tokens"]},
    }
    reading = (*READING[1:], "on_error", "backend")
    return [
        *options_of(Mix.plan, "Options", *PLAN, **attributes),
        *(option for option in setting_options(FILES, CLUSTER) if option.group == CLUSTER
          or option.name in reading),
    ]  # fmt: skip


@click.command(cls=JobCommand, options=_options)
@click.argument("paths", nargs=-1, metavar="INPUT... OUTPUT")
@click.option(
    "--weights",
    metavar="FILE",
    help="YAML list of entries such as {topic: News, weight: 0.2}: shares of the mixture. "
    "Default: all as they are.",
)
@click.option("--page", metavar="FILE", help="Write a page of HTML, with pictures.")
@click.option("--json", "as_json", is_flag=True, help="Print the mix as JSON.")
def mix(
    paths: tuple[str, ...], weights: str | None, page: str | None, as_json: bool, **options: Any
) -> None:
    """Plan a mixture of INPUT for a budget of tokens, and save it.

    Cells are the combined values of the --by columns. A table shows rows and tokens of each cell,
    the tokens asked, the epochs, and the tokens missing. OUTPUT is a file of JSON with the same
    numbers, for `Mix.load`. Texts are not read.

    \b
    gpuclassify mix 'crawl/*.parquet' mix.json --annotations notes/topic \\
        --annotations notes/tokens --by topic --tokens 6e12 --weights mix.yaml

    Exit codes: 0 done, 1 failed, 2 wrong call, 130 interrupted, 143 terminated.
    """
    from gpuclassify.corpus.scores.mix import MixSettings
    from gpuclassify.corpus.scores.saved import write_file

    quiet_dask()
    with wrong_call_exits():
        files = split_paths(paths, options)
        settings = JobSettings(input=files["input"], **settings_from_options(options))
        planned = {name: options[name] for name in PLAN if options[name] not in (None, ())}
        mixture = MixSettings(**planned, weights=_entries(weights) if weights else None)
    found = _planned(settings, mixture)
    with wrong_call_exits():
        found.save(files["output"])
        if page:
            write_file(page, found.html().encode())
    if as_json:
        click.echo(found.as_json())
        return
    lines = [str(found), f"Mix: {files['output']}", *([f"Page: {page}"] if page else [])]
    open_console().print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _planned(settings: JobSettings, mixture: MixSettings) -> Mix:
    """Count tokens on the cluster, and plan the mix."""
    from gpuclassify.jobs.execution import compute_tasks
    from gpuclassify.jobs.input.sources import as_source
    from gpuclassify.jobs.stages import as_chain

    cluster = vars(settings)
    with start_progress("Looking for the input's parts") as progress:
        with wrong_call_exits():
            source = as_source(settings.reader(mixture.read_fields), settings.on_error)
            mixture.check(source.meta)
            client = None
            if not runs_here(source, as_chain([]), cluster):
                client = open_client(cluster, progress, source.count)
        progress.waiting("Counting tokens")
        with client or contextlib.nullcontext(), wrong_call_exits():
            frame = source.frame(settings.on_error, settings.backend)
            return mixture.find(frame, functools.partial(compute_tasks, client))


def _entries(path: str) -> list[dict[str, Any]]:
    """Read the entries of a YAML file. Raises ValueError if it is not a list of them."""
    import yaml  # type: ignore[import-untyped]

    try:
        entries = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError, yaml.YAMLError) as err:
        raise ValueError(f"--weights {path} is no YAML: {err}") from err
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"--weights {path}: write a list such as - {{topic: News, weight: 0.2}}")
    return entries
