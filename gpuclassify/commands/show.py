"""Command ``gpuclassify show``: print random texts with their annotations, or their provenance."""

from __future__ import annotations

import json
from typing import Any

import click

from gpuclassify.commands.console import echo_rows, open_console, wrong_call_exits
from gpuclassify.commands.options import JobCommand, reader_from_options, reading_options
from gpuclassify.pages import visible, visible_json

TEXT_CHARS = 300  # maximum characters of a text


def _options() -> list[click.Option]:
    options = reading_options(has_fields=True)
    return [option for option in options if option.name != "annotations"]


@click.command(cls=JobCommand, options=_options)
@click.argument("sets", nargs=-1, metavar="ANNOTATIONS...")
@click.option(
    "--input",
    "inputs",
    metavar="PATH",
    multiple=True,
    help="Input files of the sets; repeatable.",
)
@click.option(
    "--provenance",
    is_flag=True,
    help="Print where columns and rows of sets, or of other outputs of jobs, come from.",
)
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    metavar="ROWS",
    help="Number of rows to draw.",
)
@click.option("--where", metavar="CONDITION", help="Show only rows that meet a condition.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Choose other rows with another seed.",
)
@click.option(
    "--text-field", metavar="COLUMN", default="text", show_default=True, help="Column of the text."
)
@click.option("--json", "as_json", is_flag=True, help="Print whole texts and all columns as JSON.")
def show(
    sets: tuple[str, ...],
    inputs: tuple[str, ...],
    provenance: bool,
    limit: int,
    where: str | None,
    seed: int,
    text_field: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Print random texts with their ANNOTATIONS; writes nothing, and starts no cluster.

    ANNOTATIONS are directories that `gpuclassify annotate` wrote, and --input the files that it
    read. The same seed draws the same rows. Only the row groups of the printed texts are read from
    the input. With --provenance, prints instead where the columns and rows of a job's output come
    from.

    \b
    gpuclassify show notes/quality notes/domain --input 'crawl/*.parquet' \\
        --where "quality_pred == 'Low'"
    gpuclassify show --provenance final/
    """
    if not sets or not (inputs or provenance):
        missing = "option '--input'" if sets else "argument 'ANNOTATIONS...'"
        raise click.UsageError(f"Missing {missing}.")
    if provenance:
        for directory in sets:
            _show_provenance(directory, as_json)
        return
    from gpuclassify.corpus.scores.sampling import draw_rows
    from gpuclassify.jobs.ledger.encoding import arrow_table
    from gpuclassify.mapping.select import Select

    with wrong_call_exits(), open_console(stderr=True).status("Reading annotations"):
        select = Select(where) if where else None
        needed = [text_field, *(select.read_fields if select else ())]
        options["annotations"] = sets
        reader = reader_from_options(inputs, options, needed)
        frame = draw_rows(reader, limit, seed, select, options["on_error"])
    table = arrow_table(frame, keep_index=False)
    if as_json:
        echo_rows(table)
        return
    for row in table.to_pylist():
        text = row.pop(text_field, None)
        values = "  ".join(f"{name}={value}" for name, value in row.items())
        shown = "null" if text is None else " ".join(str(text).split())[:TEXT_CHARS]
        click.echo(f"{visible(values, '')}\n    {visible(shown, '')}\n")
    click.echo(f"{len(table):,} rows shown")


def _show_provenance(directory: str, as_json: bool) -> None:
    """Print how the job output in `directory` was made, such as its models and their versions."""
    from gpuclassify.jobs.input.annotations import AnnotationSet
    from gpuclassify.jobs.ledger.manifest import read_job
    from gpuclassify.jobs.report.report import read_provenance
    from gpuclassify.jobs.stores.opening import open_store

    with wrong_call_exits():
        store = open_store(directory)
        known = read_provenance(store)
        if read_job(store)["identity"]["output"].get("annotations"):
            opened = AnnotationSet.open(directory, {})
            opened.read_records()
            known = opened.provenance
    if as_json:
        click.echo(visible_json(json.dumps({"output": directory, **known.as_dict()})))
        return
    lines = known.lines() if known else ["no model, set or condition is known"]
    for line in (f"{directory}:", *lines):
        click.echo(visible(line, ""))
