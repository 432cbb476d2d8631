"""The command ``gpuclassify dedup``."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import click

from gpuclassify.commands.classify import run_job
from gpuclassify.commands.console import print_places, quiet_dask, wrong_call_exits
from gpuclassify.commands.options import (
    COLUMN,
    DUPLICATES,
    JobCommand,
    file_options,
    named_values,
    option_table,
    read_file_options,
    run_options,
    split_paths,
)
from gpuclassify.commands.settings import JobSettings
from gpuclassify.settings.checks import nearest

if TYPE_CHECKING:
    from rich.console import Console

    from gpuclassify.dedup.duplicates import Duplicates
    from gpuclassify.dedup.job import Deduplicate, DedupSummary

METHODS = ("exact", "fuzzy", "semantic")
# Options that are settings of the same name.
SETTINGS = (
    *("text_field", "id_field", "keep_by", "by", "source_field", "threshold"),
    *("max_removed_share", "max_group_size"),
)
MOST_GROUPS, MOST_CHARS = 5, 60  # of the largest groups, and of their texts


@click.command(cls=JobCommand, short_help="Remove duplicates from files, or go on with it.")
@click.argument("paths", nargs=-1, metavar="INPUT... OUTPUT")
@option_table(DUPLICATES, {
    "--method": {"type": click.Choice(METHODS), "required": True, "help": "Equal texts, texts that "
                 "share most of their words, or texts that mean the same."},
    "--text-field": COLUMN | {"help": "Column of the text. Default: text."},
    "--id-field": COLUMN | {"help": "Column that tells documents apart. Default: id, if "
                          "its values do, else positions."},
    "--keep-by": COLUMN | {"multiple": True, "help": "Column whose largest value stays, or "
                           "length, that of the text; repeatable."},
    "--by": COLUMN | {"help": "Look for duplicates only among documents of one value."},
    "--source-field": COLUMN | {"help": "Tell the share removed by value. Default: --by."},
    "--threshold": {"type": float, "help": "Similarity of duplicates, 0 to 1."},
    "--against": {"metavar": "PATH", "multiple": True, "help": "Files of an earlier corpus, whose "
                  "documents stay; repeatable."},
    "--max-removed-share": {"type": float, "help": "Refuse to remove more, 0 to 1."},
    "--max-group-size": {"type": int, "help": "Refuse larger groups."},
    "--set others": {"metavar": "NAME=VALUE", "multiple": True, "help": "Any other setting of the "
                     "method; VALUE is JSON, or a text. Repeatable."},
})  # fmt: skip
@file_options
@run_options
@click.pass_context
def dedup(context: click.Context, paths: tuple[str, ...], **given: Any) -> None:
    """Write the documents of INPUT (Parquet or JSON lines) without duplicates into OUTPUT.

    Paths are those of `classify`. The same command continues a job that was interrupted, with
    another cluster as well. Documents that have duplicates are listed in OUTPUT/_dedup/duplicates.

    \b
    gpuclassify dedup 'crawl/*.jsonl' clean/ --method fuzzy --id-field url --keep-by length

    Exit codes: 0 done, 1 failed, 2 wrong call, 3 done, with something left out in quarantine, 130
    interrupted, 143 terminated.
    """
    quiet_dask()
    with wrong_call_exits():
        files = JobSettings(input=[], **read_file_options(given))
    make = functools.partial(_make_job, paths, given, files)
    run_job(context, make, vars(files), given, _print_summary)


def _make_job(paths: tuple[str, ...], given: Mapping[str, Any], files: JobSettings) -> Deduplicate:
    from gpuclassify.dedup.job import Deduplicate

    settings = replace(files, **split_paths(paths, given))
    duplicates = _duplicates(given)
    read = settings.fields and [*duplicates.input_fields, *settings.fields]
    earlier = None
    if given["against"]:
        earlier = replace(settings, input=list(given["against"])).reader()
    return Deduplicate(
        settings.reader(read),
        duplicates,
        settings.writer(),
        against=earlier,
        backend=settings.backend,
        on_error=settings.on_error,
    )


def _duplicates(given: Mapping[str, Any]) -> Duplicates:
    """The settings that options mean.

    Raises
    ------
    ValueError
        The method has no such setting.
    """
    method = given["method"]
    kind = getattr(
        importlib.import_module(f"gpuclassify.dedup.{method}"), f"{method.title()}Duplicates"
    )
    values = {name: given[name] for name in SETTINGS if given[name] not in (None, ())}
    values |= named_values("--set", "seed=7", given["others"])
    known = [own.name for own in fields(kind)]
    for name in values:
        if name not in known:
            raise ValueError(
                f"--method {method} has no setting {name!r}.{nearest(name, known)} "
                f"Settings are {', '.join(known)}"
            )
    return kind(**values)


def _print_summary(summary: DedupSummary, console: Console) -> None:
    found, removal = summary.duplicates, summary.removal
    lines = [
        f"{found.documents:,} documents, {found.removed:,} duplicates removed "
        f"({found.removed_share:.1%}), {removal.rows_out:,} kept",
        f"{found.groups:,} groups of {found.in_groups:,} documents",
    ]
    if found.compared:
        lines[1] += f"; {found.compared:,} candidates compared, {found.rejected:,} rejected"
    for group in found.largest[:MOST_GROUPS]:
        beginning = " ".join(group.beginning.split())[:MOST_CHARS]
        lines.append(f"    {group.size:,} documents: {beginning}")
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    print_places(removal, console, f"Duplicates: {removal.output}/_dedup/duplicates")
