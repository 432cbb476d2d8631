"""Command ``gpuclassify plan``: forecast the work of a job, before you pay for a cluster."""

from __future__ import annotations

import json
from typing import Any

import click

from gpuclassify.commands.console import echo, open_console, quiet_dask, wrong_call_exits
from gpuclassify.commands.options import LocalCommand, job_options, read_settings


@click.command(cls=LocalCommand, options=job_options)
@click.argument("inputs", nargs=-1, metavar="INPUT...")
@click.option(
    "--sample-rows", type=click.IntRange(min=1), default=1_000, show_default=True,
    help="About how many rows to draw, from places all over the input.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True,
    help="Choose other rows with another seed.",
)  # fmt: skip
@click.option(
    "--time/--no-time", "is_timed", default=True,
    help="Run the models over some of the sample for about 20 seconds, which is the default, or "
    "load no model, which needs no weights and shows no time.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(inputs: tuple[str, ...], **options: Any) -> None:
    """Forecast the work of `classify` from a sample of INPUT; writes nothing.

    Shows rows and bytes; for each classifier, the lengths of texts in tokens, the share of texts
    that are cut, and the tokens to read; the memory of a worker, and the number of parts, each of
    which is read by one task. The time is for one process on this machine, because no cluster is
    started. Its lower end is for an idle machine, its upper end for the machine's present load.
    Takes the options of `gpuclassify classify`, but no OUTPUT; cluster options have no effect.

    \b
    gpuclassify plan 'crawl/*.jsonl' --classifier quality --filter-by High
    """
    from gpuclassify.hub import HubUnreachableError, ModelNotFoundError

    quiet_dask()
    with wrong_call_exits(), open_console(stderr=True).status("Reading a sample"):
        settings = read_settings(options, input=list(inputs))
        if settings is None:
            return
        trial = {} if options["is_timed"] else {"trial_seconds": None}
        try:
            made = settings.job().plan(
                sample_rows=options["sample_rows"], seed=options["seed"], **trial
            )
        except (HubUnreachableError, ModelNotFoundError) as error:
            if options["is_timed"]:
                error.add_note("With --no-time, config.json and the tokenizer are enough.")
            raise
        except Exception as error:
            sign = f"no such input: {''.join(inputs[-1:])}"
            if len(inputs) > 1 and str(error).startswith(sign):
                error.add_note("`plan` takes inputs only: leave out OUTPUT.")
            raise
    if options["as_json"]:
        click.echo(json.dumps(made.as_dict()))
    else:
        echo(str(made))
