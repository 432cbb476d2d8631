"""Commands ``gpuclassify sample`` and ``agreement``: draw rows for people, compare labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuclassify.commands.console import open_console, quiet_dask, wrong_call_exits
from gpuclassify.commands.options import (
    JobCommand,
    options_of,
    reader_from_options,
    reading_options,
    split_paths,
)

if TYPE_CHECKING:
    import pandas as pd

FORMATS = (".jsonl", ".json")  # suffixes of JSON lines, and of a JSON array


def _sample_options() -> list[click.Option]:
    from gpuclassify.corpus.scores.sampling import sample as draw

    flags: dict[str, dict[str, Any]] = {
        "n": {"flags": ["-n"], "metavar": "ROWS"},
        "width": {
            "metavar": "DISTANCE",
            "help": "Distance from the score of --near at which a row is half as likely as at "
            "that score. Default: a tenth of it.",
        },
        "id_field": {"help": "Column of unique ids. Default: file and row number identify a row."},
    }
    names = ("n", "by", "width", "id_field", "weight_field", "seed")
    options = options_of(draw, "Options", *names, has_defaults=True, **flags)
    return [*options, *reading_options(has_fields=True)]


@click.command(cls=JobCommand, options=_sample_options)
@click.argument("paths", nargs=-1, metavar="INPUT... OUTPUT")
@click.option(
    "--near", metavar="COLUMN:SCORE",
    help="Draw more of the rows whose number in a column is near a score, such as "
    "edu_score:2.5. Rows without a number are left out.",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace the file OUTPUT.")
def sample(
    paths: tuple[str, ...],
    near: str | None,
    overwrite: bool,
    **options: Any,
) -> None:
    """Draw rows of each stratum of INPUT, and write them into the file OUTPUT for people to label.

    OUTPUT ends with .jsonl, for JSON lines, or .json, for an array of the same objects, the format
    that Label Studio uploads. Each row has a weight, the number of rows of INPUT that it
    represents. The same seed draws the same rows. Strata may be columns of --annotations. Only the
    texts of drawn rows are read. Starts no cluster.

    \b
    gpuclassify sample 'crawl/*.parquet' look.jsonl -n 50 --annotations notes/quality \\
        --by quality_pred --by source

    Exit codes: 0 done, 1 failed, 2 wrong call.
    """
    from gpuclassify.corpus.scores.sampling import sample as draw
    from gpuclassify.settings.paths import exists

    quiet_dask()
    with wrong_call_exits(), open_console(stderr=True).status("Drawing rows"):
        files = split_paths(paths, options)
        path = Path(files["output"])
        if path.suffix not in FORMATS:
            raise ValueError(f"{path} ends with none of {', '.join(FORMATS)}: name the file so")
        if exists(path) and not overwrite:
            raise FileExistsError(f"{path} is there already: name another file, or --overwrite it")
        column, score = _near(near)
        options["by"] = options["by"] or None
        needed = [*(options["by"] or ()), column, options["id_field"]]
        reader = reader_from_options(files["input"], options, needed)
        frame = draw(reader, near=column, score=score, **options)
        _write(frame, path)
    weight = frame[options["weight_field"]].sum()
    message = f"{len(frame):,} rows, which stand for {weight:,.0f}: {path}"
    open_console().print(message, highlight=False, markup=False, soft_wrap=True)


def _near(text: str | None) -> tuple[str | None, float]:
    if text is None:
        return None, 0.0
    column, _, number = text.rpartition(":")
    try:
        return column or None, float(number if column else "")
    except ValueError as err:
        raise ValueError(
            f"--near {text} is no column and a score: such as --near edu_score:2.5"
        ) from err


def _write(frame: pd.DataFrame, path: Path) -> None:
    from gpuclassify.corpus.scores.saved import write_file
    from gpuclassify.jobs.ledger.encoding import Encoding, arrow_table

    content = Encoding("jsonl", None).encode(arrow_table(frame, keep_index=False))
    if path.suffix == ".json":
        content = b"[\n" + b",\n".join(content.splitlines()) + b"\n]\n"
    write_file(path, content)


def _agreement_options() -> list[click.Option]:
    from gpuclassify.corpus.scores.agreement import agreement as compare

    columns: dict[str, dict[str, Any]] = {
        "between": {"metavar": "COLUMN"},
        "weight": {
            "metavar": "COLUMN",
            "help": "Column of numbers above 0, such as the weights of `gpuclassify sample`: "
            "figures then estimate those of the whole dataset.",
        },
    }
    names = ("between", "by", "weight", "text_field")
    return [
        *options_of(compare, "Options", *names, has_defaults=True, **columns),
        *reading_options(has_fields=True),
    ]


@click.command(cls=JobCommand, options=_agreement_options)
@click.argument("inputs", nargs=-1, required=True, metavar="LABELLED...")
@click.option("--page", metavar="FILE", help="Write a page of HTML with the rows that differ most.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def agreement(
    inputs: tuple[str, ...],
    page: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure the agreement of columns of LABELLED files (Parquet or JSON lines).

    Columns are by people or models. Prints Cohen's and Krippendorff's coefficients of labels, and
    Spearman's correlation of scores, with 95% intervals, for all rows and for each group.

    \b
    gpuclassify agreement labelled.jsonl --between human --between llm --by language \\
        --weight weight --page agreement.html

    Exit codes: 0 done, 1 failed, 2 wrong call.
    """
    from gpuclassify.corpus.scores.agreement import agreement as compare

    quiet_dask()
    with wrong_call_exits(), open_console(stderr=True).status("Comparing labels"):
        needed = [*options["between"], options["by"], options["weight"]]
        reader = reader_from_options(inputs, options, needed)
        options["text_field"] = options["text_field"] if page else None
        result = compare(reader, **options)
        if page:
            result.save(page)
    if as_json:
        click.echo(json.dumps(result.as_dict()))
        return
    lines = [str(result), *([f"Page: {page}"] if page else [])]
    open_console().print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
