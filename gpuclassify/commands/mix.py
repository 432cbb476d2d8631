"""Command ``gpuclassify mix``: plan a mixture for a budget of tokens."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpuclassify.commands.client import open_client, runs_here
from gpuclassify.commands.console import (
    echo,
    open_console,
    quiet_dask,
    start_progress,
    wrong_call_exits,
)
from gpuclassify.commands.options import (
    JobCommand,
    option_of,
    options_of,
    reading_options,
    setting_options,
    settings_from_options,
    split_paths,
)
from gpuclassify.commands.settings import CLUSTER, JobSettings

if TYPE_CHECKING:
    from gpuclassify.corpus.scores.mix import MixSettings

Result = TypeVar("Result")
PLAN = ("by", "tokens", "max_epochs", "token_field")


def _options() -> list[click.Option]:
    from gpuclassify.corpus.scores.mix import Mix

    attributes: dict[str, Any] = {
        "by": {"flags": ["--by"]},
        "tokens": {"metavar": "NUMBER", "type": float, "flags": ["--tokens"]},
    }
    return [
        *options_of(Mix.plan, "Options", *PLAN, **attributes),
        *reading_options(),
        option_of(JobSettings, "backend"),
        *setting_options(CLUSTER),
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
@click.option(
    "--compare",
    is_flag=True,
    help="Compare INPUT, rows that were selected for the mix in the file OUTPUT, with this mix; "
    "write nothing.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the mix as JSON.")
def mix(
    paths: tuple[str, ...],
    weights: str | None,
    page: str | None,
    compare: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Plan a mixture of INPUT for a budget of tokens, and save it.

    A mixture says how often each row is used, so that the tokens used add up to the budget
    (--tokens). Cells are the combined values of the --by columns. A table shows for each cell the
    rows and tokens in INPUT, the tokens that it should have, its epochs (uses of each row), and the
    tokens missing. OUTPUT is a file of JSON with the same numbers, for `Mix.load`. Texts are not
    read. With --compare, a table shows the rows and tokens that `select` wrote of each cell, next
    to what the mix asks.

    \b
    gpuclassify mix 'crawl/*.parquet' mix.json --annotations notes/topic \\
        --annotations notes/tokens --by topic --tokens 6e12 --weights mix.yaml
    gpuclassify mix cells/ mix.json --compare

    Exit codes: 0 done, 1 failed, 2 wrong call, 130 interrupted, 143 terminated.
    """
    from gpuclassify.corpus.scores.mix import Mix, MixSettings
    from gpuclassify.corpus.scores.saved import write_file

    quiet_dask()
    with wrong_call_exits():
        files = split_paths(paths, options)
        settings = JobSettings(input=files["input"], **settings_from_options(options))
        planned = {name: options[name] for name in PLAN if options[name] not in (None, ())}
        if compare:
            _refuse_plan({**planned, "weights": weights, "page": page})
            known = Mix.load(files["output"])
            mixture = known.counting(planned.get("token_field", "tokens"))
        else:
            context = click.get_current_context()
            for option in context.command.get_params(context):
                if option.name in ("by", "tokens") and option.name not in planned:
                    raise click.MissingParameter(ctx=context, param=option)
            mixture = MixSettings(**planned, weights=_entries(weights) if weights else None)
    if compare:
        compared = _counted(
            settings, mixture, lambda frame, run: known.compared(mixture, frame, run)
        )
        echo(json.dumps(compared.as_dict()) if as_json else str(compared))
        return
    found = _counted(settings, mixture, mixture.find)
    with wrong_call_exits():
        found.save(files["output"])
        if page:
            write_file(page, found.html().encode())
    if as_json:
        click.echo(found.as_json())
        return
    lines = [str(found), f"Mix: {files['output']}", *([f"Page: {page}"] if page else [])]
    open_console().print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _refuse_plan(passed: Mapping[str, Any]) -> None:
    named = [name for name, value in passed.items() if value and name != "token_field"]
    if named:
        raise ValueError(
            f"--compare takes the mix as it was planned: leave out --{named[0].replace('_', '-')}"
        )


def _counted(
    settings: JobSettings, mixture: MixSettings, find: Callable[[Any, Any], Result]
) -> Result:
    """Open the input as a Dask frame, and return ``find(frame, compute)``, which counts tokens.

    ``compute(tasks)`` runs delayed tasks on the settings' cluster or, if the input is small, here.
    """
    from gpuclassify.jobs.execution import compute_tasks
    from gpuclassify.jobs.input.left_out import left_out_logged
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
        with client or contextlib.nullcontext(), left_out_logged(), wrong_call_exits():
            frame = source.frame(settings.on_error, settings.backend)
            return find(frame, functools.partial(compute_tasks, client))


def _entries(path: str) -> list[dict[str, Any]]:
    """Read the file of --weights, a YAML list of dicts such as ``{topic: News, weight: 0.2}``."""
    import yaml  # type: ignore[import-untyped]

    example = "a list such as - {topic: News, weight: 0.2}"
    try:
        entries = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as err:
        raise ValueError(
            f"--weights {path}: no such file; write one of YAML with {example}"
        ) from err
    except (ValueError, RecursionError, yaml.YAMLError) as err:
        raise ValueError(f"--weights {path} is no YAML: {err}") from err
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"--weights {path}: write {example}")
    return entries
