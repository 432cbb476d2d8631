"""The command ``gpuclassify preview``: what classifiers say of a few texts."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from gpuclassify.commands.console import open_console, quiet_dask, wrong_call_exits
from gpuclassify.commands.options import LocalCommand, job_options, read_settings

if TYPE_CHECKING:
    import pandas as pd

    from gpuclassify.commands.settings import JobSettings
    from gpuclassify.mapping.chain import Chain
    from gpuclassify.mapping.text_mapper import TextMapper

STANDARD_INPUT = "-"
ROWS_READ = 20
MOST_COLUMNS = 4  # beside the text, in a table that a terminal has room for
TEXT_CHARS = 300  # of a text in the prompt that is shown


@click.command(
    cls=LocalCommand, options=job_options, short_help="Show what classifiers say of a few texts."
)
@click.argument("inputs", nargs=-1, metavar="INPUT...")
@click.option("--json", "as_json", is_flag=True, help="Print whole texts and all columns as JSON.")
def preview(inputs: tuple[str, ...], as_json: bool, **given: Any) -> None:
    """Print the first texts of INPUT with their labels; writes nothing, and starts no cluster.

    INPUT is that of `classify`, or - for standard input: JSON lines, or lines of which each is a
    text. Options are those of `classify`; OUTPUT is left out. Filters drop rows here too.

    \b
    gpuclassify preview 'crawl/*.jsonl' -n 5 --classifier quality
    echo 'Stocks rose on Friday.' | gpuclassify preview - --classifier domain
    """
    from gpuclassify.jobs.input.readers import first_rows
    from gpuclassify.jobs.output.encoding import Encoding, arrow_table
    from gpuclassify.jobs.stages import as_chain

    quiet_dask()
    with wrong_call_exits():
        if STANDARD_INPUT in inputs and len(inputs) > 1:
            raise ValueError("'-' is standard input, and stands alone: leave out the other inputs")
        settings = read_settings(given, input=list(inputs))
        if settings is None:
            return
        mappers = _with_confidence(settings)
        chain = as_chain(mappers)
        with open_console(stderr=True).status("Classifying"):
            most = settings.limit or ROWS_READ
            if settings.input == [STANDARD_INPUT]:
                frame = first_texts(sys.stdin.buffer, most, chain.main_text_fields)
            else:
                frame = first_rows(settings.input, most)
            found = chain(frame)
    if as_json:
        click.echo(Encoding("jsonl", None).encode(arrow_table(found)), nl=False)
    else:
        _print_prompts(mappers, frame)
        _print_table(found, chain, mappers, len(frame))


def first_texts(stream: BinaryIO, most: int, columns: Sequence[str]) -> pd.DataFrame:
    """The first rows of a stream of JSON lines, or of plain lines, each of which is a text.

    Lines are JSON if the first one begins as an object does; plain ones become all of `columns`.
    """
    import pyarrow as pa

    from gpuclassify.jobs.files import BrokenInputError
    from gpuclassify.jobs.input.parts import Limit, first_lines
    from gpuclassify.jobs.input.readers import table_of
    from gpuclassify.jobs.input.schema import to_pandas

    lines, _ = first_lines(stream, Limit(most))
    if lines.lstrip().startswith(b"{"):
        return to_pandas(table_of(lines, "standard input"))
    try:
        texts = [line.decode().rstrip("\r") for line in lines.split(b"\n") if line.strip()]
    except UnicodeDecodeError as err:
        raise BrokenInputError(
            f"standard input is not UTF-8 ({err}): convert it, such as with `iconv -f LATIN1 -t "
            "UTF-8`"
        ) from err
    return to_pandas(pa.table(dict.fromkeys(columns, pa.array(texts, pa.string()))))


def _with_confidence(settings: JobSettings) -> list[TextMapper]:
    """The classifiers, with a column of the confidence for each that can give one."""
    classifiers = []
    for given, mapper in zip(settings.classifiers, settings.mappers(), strict=True):
        if None in _confidence(mapper).values():
            label = mapper.options.label_field or next(iter(_confidence(mapper)))
            given = {**given, "confidence_field": f"{label}_confidence"}
        classifiers.append(given)
    return replace(settings, classifiers=classifiers).mappers()


def _confidence(mapper: TextMapper) -> dict[str, Any]:
    """The columns of confidences by those of labels, where the mapper can give both."""
    from gpuclassify.mapping.heads import CategoryHead

    return {
        head.label_field: head.options.confidence_field
        for head in mapper.heads
        if isinstance(head, CategoryHead) and head.label_field is not None
    }


def _print_prompts(mappers: list[TextMapper], frame: pd.DataFrame) -> None:
    """What language models are given of the first text."""
    from gpuclassify.questions.prompt_classifier import PromptClassifier

    for mapper in mappers:
        if isinstance(mapper, PromptClassifier):
            prompt = mapper.first_prompt(frame, TEXT_CHARS) or ""
            lines = [f"The first prompt of {mapper.options.model}:", *prompt.split("\n")]
            click.echo("\n    ".join(map(_escaped, lines)) + "\n")


def _print_table(found: pd.DataFrame, chain: Chain, mappers: list[TextMapper], rows: int) -> None:
    """One line a text, which gets the room that labels, confidences and numbers leave."""
    import pyarrow as pa
    from rich.table import Table
    from rich.text import Text

    from gpuclassify.mapping.heads import LABELS

    console, schema = open_console(), chain.schema()
    cells = {str(name): list(_cells(found[name], console.width)) for name in found}
    beside = set()  # confidences, which go after their labels
    for mapper in mappers:
        for label, confidence in _confidence(mapper).items():
            pairs = zip(cells[label], cells[confidence], strict=True)
            cells[label] = [one if one == other else f"{one} {other}" for one, other in pairs]
            beside.add(confidence)
    is_shown = [not pa.types.is_nested(kind) or kind == LABELS for kind in schema.types]
    if not any(is_shown):  # scores by name are all that there is
        is_shown = [pa.types.is_struct(kind) for kind in schema.types]
    new = list(itertools.compress(schema.names, is_shown))
    new = [name for name in new if name not in beside][:MOST_COLUMNS]
    most_width = console.width * 2 // 3 // max(1, len(new)) - 3  # of columns with their borders
    table = Table(expand=True)
    for name in chain.text_fields:
        table.add_column(Text(_escaped(name)), ratio=1, no_wrap=True)
    for name in new:
        table.add_column(Text(_escaped(name)), overflow="fold", max_width=most_width)
    columns = [cells[name] for name in (*chain.text_fields, *new)]
    for row in zip(*columns, strict=True):
        table.add_row(*map(Text, row))
    console.print(table)
    lines = [f"{rows:,} rows read, {len(found):,} shown"]
    if left := [name for name in schema.names if name not in {*new, *beside}]:
        lines.append(f"Not shown: {', '.join(left)}; --json prints all")
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _cells(values: pd.Series[Any], most_chars: int) -> Iterator[str]:
    """Each value on one line, of a text what a terminal this wide can show."""
    for value, is_null in zip(values, values.isna(), strict=True):
        if is_null:
            yield "null"
        else:
            value = value if isinstance(value, (str, float)) else _listed(value)
            shown = f"{value:.3f}" if isinstance(value, float) else value[:most_chars]
            yield _escaped(shown)


def _listed(value: Any) -> str:
    """A list of labels without brackets, scores behind their names, any other value as a text."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {score:.3f}" for name, score in value.items())
    return ", ".join(map(str, value)) if hasattr(value, "__len__") else str(value)


def _escaped(text: str) -> str:
    """The text on one line, without what would control the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
