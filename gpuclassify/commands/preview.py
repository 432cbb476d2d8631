"""Command ``gpuclassify preview``: print a few texts with their labels."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from gpuclassify.commands.console import echo_rows, open_console, quiet_dask, wrong_call_exits
from gpuclassify.commands.options import LocalCommand, job_options, read_settings
from gpuclassify.pages import visible

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from gpuclassify.commands.settings import JobSettings
    from gpuclassify.jobs.input.readers import FileReader
    from gpuclassify.mapping.chain import Chain
    from gpuclassify.mapping.text_mapper import TextMapper

STANDARD_INPUT = "-"
ROWS_READ = 20
MOST_COLUMNS = 4  # new columns that fit in a terminal
TEXT_CHARS = 300  # maximum characters of the text in a printed prompt
COLOURS = [f"black on {colour}" for colour in ("yellow", "cyan", "green", "magenta", "white")]


@click.command(cls=LocalCommand, options=job_options)
@click.argument("inputs", nargs=-1, metavar="INPUT...")
@click.option("--json", "as_json", is_flag=True, help="Print whole texts and all columns as JSON.")
def preview(inputs: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Print the first texts of INPUT with their labels; writes nothing, and starts no cluster.

    INPUT may be a file, a directory, a glob or an fsspec URL, or - for standard input: JSON lines,
    or one plain text per line. Takes the options of `gpuclassify classify`, but no OUTPUT. Filters
    drop rows here too.

    \b
    gpuclassify preview 'crawl/*.jsonl' -n 5 --classifier quality
    echo 'Stocks rose on Friday.' | gpuclassify preview - --classifier domain
    """
    from gpuclassify.jobs.input.left_out import left_out_logged
    from gpuclassify.jobs.input.readers import first_rows
    from gpuclassify.jobs.ledger.encoding import arrow_table
    from gpuclassify.jobs.stages import as_chain

    quiet_dask()
    with wrong_call_exits():
        if STANDARD_INPUT in inputs and len(inputs) > 1:
            raise ValueError(
                "'-' is standard input and must be the only input: leave out the others"
            )
        settings = read_settings(options, input=list(inputs))
        if settings is None:
            return
        if settings.where:
            raise ValueError(
                "a preview reads the first rows of the input alone: leave out where, or take "
                "`gpuclassify show`"
            )
        most = settings.limit or ROWS_READ
        settings = replace(settings, limit=most)
        mappers, assigned = _with_confidence(settings), settings.cluster_mappers()
        chain = as_chain([*mappers, *assigned])
        fields = settings.fields_read([chain], as_chain(assigned).read_fields)
        reader = settings.reader(fields)
        with open_console(stderr=True).status("Classifying"), left_out_logged():
            if settings.input == [STANDARD_INPUT]:
                texts = chain.main_text_fields
                frame = first_texts(sys.stdin.buffer, most, texts, reader, settings.on_error)
            else:
                frame = first_rows(reader, most, settings.on_error)
            table = arrow_table(chain(frame), keep_index=False)
    if as_json:
        echo_rows(table)
    else:
        _print_prompts(mappers, frame)
        _print_table(table, chain, mappers, settings.fields or (), len(frame))


def first_texts(
    stream: BinaryIO,
    most: int,
    columns: Sequence[str],
    reader: FileReader | None = None,
    on_error: str = "raise",
) -> pd.DataFrame:
    """Read the first `most` rows of a binary stream into a pandas frame.

    If the stream begins with a brace, its lines are JSON objects, which `reader` parses. Else each
    line is a plain text, and is stored in each of the `columns`. Blank lines are skipped.
    """
    import pyarrow as pa

    from gpuclassify.jobs.input.files import BrokenInputError, InputFile
    from gpuclassify.jobs.input.parts import Limit, Lines, Part, first_lines
    from gpuclassify.jobs.input.readers import FileReader, rows_of
    from gpuclassify.jobs.input.schema import to_pandas

    lines, _ = first_lines(stream, Limit(most))
    if lines.lstrip().startswith(b"{"):
        name = "standard input"
        read = [(name, Lines(Part(name), 0, lines))]
        files = [InputFile(name, len(lines), "")]
        return rows_of(reader or FileReader(STANDARD_INPUT), files, read, on_error)
    try:
        texts = [line.decode().rstrip("\r") for line in lines.split(b"\n") if line.strip()]
    except UnicodeDecodeError as err:
        raise BrokenInputError(
            f"standard input is not UTF-8 ({err}): convert it, such as with `iconv -f LATIN1 -t "
            "UTF-8`"
        ) from err
    return to_pandas(pa.table(dict.fromkeys(columns, pa.array(texts, pa.string()))))


def _with_confidence(settings: JobSettings) -> list[TextMapper]:
    """Make the classifiers of the settings, and add confidence columns where labels have none."""
    classifiers = []
    for arguments, mapper in zip(settings.classifiers, settings.mappers(), strict=True):
        if None in _confidence(mapper).values():
            label = mapper.options.label_field or next(iter(_confidence(mapper)))
            arguments = {**arguments, "confidence_field": f"{label}_confidence"}
        classifiers.append(arguments)
    return replace(settings, classifiers=classifiers).mappers()


def _confidence(mapper: TextMapper) -> dict[str, Any]:
    """Return the name of the confidence column, or None, by label column of a classifier."""
    from gpuclassify.mapping.label_heads import CategoryHead

    return {
        head.label_field: head.options.confidence_field
        for head in mapper.heads
        if isinstance(head, CategoryHead) and head.label_field is not None
    }


def _print_prompts(mappers: list[TextMapper], frame: pd.DataFrame) -> None:
    from gpuclassify.classifiers.questions.prompt_classifier import PromptClassifier

    for mapper in mappers:
        if isinstance(mapper, PromptClassifier):
            prompt = mapper.first_prompt(frame, TEXT_CHARS) or ""
            lines = [f"The first prompt of {mapper.options.model}:", *prompt.split("\n")]
            click.echo("\n    ".join(visible(line, "") for line in lines) + "\n")


def _print_table(
    table: pa.Table, chain: Chain, mappers: list[TextMapper], fields: Sequence[str], rows: int
) -> None:
    """Print the texts of the rows in `table`, and the first few columns that `chain` added.

    `rows` is the number of rows before filters. `fields` are names of input columns to show, too.
    """
    import pyarrow as pa
    from rich.table import Table
    from rich.text import Text

    from gpuclassify.classifiers.spans.spans import SPANS
    from gpuclassify.mapping.stage_counts import LABELS

    console, schema = open_console(), chain.schema()
    spans = _spans_by_text(mappers)
    scores = dict(pair for mapper in mappers for pair in _confidence(mapper).items())
    confidences = set(scores.values())  # printed after their labels
    is_shown = [not pa.types.is_nested(kind) or kind in (LABELS, SPANS) for kind in schema.types]
    if not any(is_shown):  # all columns are structs of scores
        is_shown = [pa.types.is_struct(kind) for kind in schema.types]
    names = [*fields, *itertools.compress(schema.names, is_shown)]
    names = [
        name for name in dict.fromkeys(names) if name not in {*confidences, *chain.text_fields}
    ]
    shown = names[: MOST_COLUMNS + len(fields)]
    cells: dict[str, list[Any]] = {
        name: _cells(table[name], console.width)
        for name in {*chain.text_fields, *shown, *confidences}
    }
    for text, columns in spans.items():
        cells[text] = _coloured(table, text, columns, console.width)
        for column in set(columns) & cells.keys():
            cells[column] = _span_cells(table, text, column, console.width)
    for label, confidence in scores.items():
        if label in cells:
            pairs = zip(cells[label], cells[confidence], strict=True)
            cells[label] = [one if one == other else f"{one} {other}" for one, other in pairs]
    most_width = console.width * 2 // 3 // max(1, len(shown)) - 3  # a column's border takes 3
    drawn = Table(expand=True)
    for name in chain.text_fields:
        drawn.add_column(Text(visible(name, "")), ratio=1, no_wrap=True)
    for name in shown:
        drawn.add_column(Text(visible(name, "")), overflow="fold", max_width=most_width)
    for row in zip(*(cells[name] for name in (*chain.text_fields, *shown)), strict=True):
        drawn.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    console.print(drawn)
    lines = [f"{rows:,} rows read, {len(table):,} shown"]
    if left := [name for name in schema.names if name not in {*shown, *confidences}]:
        lines.append(f"Not shown: {', '.join(left)}; --json prints all")
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _spans_by_text(mappers: list[TextMapper]) -> dict[str, list[str]]:
    """Map each text column to the columns of spans that the classifiers `mappers` add for it."""
    from gpuclassify.classifiers.spans.spans import SPANS

    columns: dict[str, list[str]] = {}
    for mapper in mappers:
        names = [field.name for field in mapper.schema() if field.type == SPANS]
        if names:
            columns.setdefault(mapper.main_text_fields[0], []).extend(names)
    return columns


def _coloured(table: pa.Table, text: str, columns: list[str], most_chars: int) -> list[Any]:
    """Return a ``rich.text.Text`` per row of `table`: its text, with spans coloured by label."""
    from rich.text import Text

    rows = table.select([text, *columns]).to_pylist()
    spans = [[s for name in columns for s in row[name] or ()] for row in rows]
    labels = sorted({span["label"] for row in spans for span in row})
    styles = dict(zip(labels, itertools.cycle(COLOURS), strict=False))
    cells = []
    for row, found in zip(rows, spans, strict=True):
        content = (row[text] or "")[:most_chars]
        label_at = {n: s["label"] for s in found for n in range(s["start"], s["end"])}
        cell = Text("" if row[text] is not None else "null")
        for label, part in itertools.groupby(range(len(content)), label_at.get):
            shown = visible("".join(content[index] for index in part), "")
            cell.append(shown, style=styles.get(label or ""))
        cells.append(cell)
    return cells


def _span_cells(table: pa.Table, text: str, column: str, most_chars: int) -> list[str]:
    cells = []
    for row in table.select([text, column]).to_pylist():
        found = [f"{s['label']} {row[text][s['start'] : s['end']]}" for s in row[column] or ()]
        cells.append("null" if row[column] is None else ", ".join(found)[:most_chars])
    return [visible(cell, "") for cell in cells]


def _cells(column: pa.ChunkedArray, most_chars: int) -> list[str]:
    return [visible(_shown(value, column.type)[:most_chars], "") for value in column.to_pylist()]


def _shown(value: Any, kind: pa.DataType) -> str:
    """Format a value of an Arrow type; a struct of scores becomes ``News 0.912, Sports 0.051``."""
    import pyarrow as pa

    types = pa.types
    if value is None:
        return "null"
    if types.is_floating(kind):
        return f"{value:.3f}"
    if types.is_struct(kind) and all(types.is_floating(inner.type) for inner in kind):
        return ", ".join(f"{name} {_shown(value[name], pa.float64())}" for name in value)
    if types.is_list(kind) and not types.is_nested(kind.value_type):
        return ", ".join(_shown(item, kind.value_type) for item in value)
    return (
        json.dumps(value, ensure_ascii=False, default=str) if types.is_nested(kind) else str(value)
    )
