"""The command ``gpuclassify dedup``."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from gpuclassify.checks import nearest
from gpuclassify.commands.client import open_client
from gpuclassify.commands.console import (
    LEFT_OUT,
    interrupt_hint,
    open_console,
    print_places,
    quiet_dask,
    start_progress,
    wrong_call_exits,
)
from gpuclassify.commands.options import (
    DUPLICATES,
    JobCommand,
    file_options,
    grouped_option,
    named_values,
    read_file_options,
    refuse_file,
    restart_option,
    split_paths,
)

if TYPE_CHECKING:
    from rich.console import Console

    from gpuclassify.dedup.duplicates import Duplicates
    from gpuclassify.jobs.deduplicate import DedupJob, DedupSummary

METHODS = ("exact", "fuzzy", "semantic")
# Options that are settings of the same name.
SETTINGS = (
    "text_field",
    "id_field",
    "keep_by",
    "by",
    "source_field",
    "threshold",
    "max_removed_share",
    "max_group_size",
)
MOST_GROUPS, MOST_CHARS = 5, 60  # of the largest groups, and of their texts


def duplicates_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say what duplicates are."""
    column: dict[str, Any] = {"metavar": "COLUMN"}
    options: dict[str, dict[str, Any]] = {
        "--method": {"type": click.Choice(METHODS), "required": True, "help": "Equal texts, texts "
                     "that share most of their words, or texts that mean the same."},
        "--text-field": column | {"help": "Column of the text. Default: text."},
        "--id-field": column | {"help": "Column that tells documents apart. Default: positions."},
        "--keep-by": column | {"multiple": True, "help": "Column whose largest value stays, or "
                               "length, that of the text; repeatable."},
        "--by": column | {"help": "Look for duplicates only among documents of one value."},
        "--source-field": column | {"help": "Tell the share removed by value. Default: --by."},
        "--threshold": {"type": float, "help": "Similarity of duplicates, 0 to 1."},
        "--against": {"metavar": "PATH", "multiple": True, "help": "Files of an earlier corpus, "
                      "whose documents stay; repeatable."},
        "--max-removed-share": {"type": float, "help": "Refuse to remove more, 0 to 1."},
        "--max-group-size": {"type": int, "help": "Refuse larger groups."},
        "--set": {"metavar": "NAME=VALUE", "multiple": True, "help": "Any other setting of the "
                  "method; VALUE is JSON, or a text. Repeatable."},
    }  # fmt: skip
    for flag, attributes in reversed(options.items()):
        names = [flag, "others"] if flag == "--set" else [flag]
        command = grouped_option(*names, group=DUPLICATES, **attributes)(command)
    return command


@click.command(cls=JobCommand, short_help="Remove duplicates from files, or go on with it.")
@click.argument("paths", nargs=-1, metavar="INPUT... OUTPUT")
@duplicates_options
@file_options
@restart_option
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.pass_context
def dedup(context: click.Context, paths: tuple[str, ...], **given: Any) -> None:
    """Write the documents of INPUT (Parquet or JSON lines) without duplicates into OUTPUT.

    Paths are those of `classify`. The same command continues a job that was interrupted, with
    another cluster as well. Documents that have duplicates are listed in OUTPUT/_dedup/duplicates.

    \b
    gpuclassify dedup 'crawl/*.jsonl' clean/ --method fuzzy --id-field url --keep-by length

    Exit codes: 0 done, 1 failed, 2 wrong call, 3 done, with something left out in quarantine, 130
    interrupted.
    """
    quiet_dask()
    summary = _run(paths, given)
    if given["as_json"]:
        click.echo(json.dumps(summary.as_dict()))
    else:
        _print_summary(summary, open_console())
    context.exit(LEFT_OUT if summary.removal.left_out else 0)


def _job(paths: tuple[str, ...], given: Mapping[str, Any], files: Mapping[str, Any]) -> DedupJob:
    from gpuclassify.jobs.deduplicate import Deduplicate
    from gpuclassify.jobs.settings import make_reader, make_writer

    inputs, output = split_paths(paths, None).values()
    if output is None:
        raise ValueError("name the input, and then the output: INPUT... OUTPUT")
    refuse_file(output)
    duplicates = _duplicates(given)
    options = {name: files[name] for name in ("types", "part_size")}
    read = files["fields"]
    if read is not None:
        read = [*duplicates.input_fields, *read]
    earlier = make_reader(list(given["against"]), **options) if given["against"] else None
    return Deduplicate(
        make_reader(inputs, fields=read, **options),
        duplicates,
        make_writer(
            output,
            files["format"],
            **{name: files[name] for name in ("compression", "staging", "partition_by")},
        ),
        against=earlier,
        backend=files["backend"],
        on_error=files["on_error"],
    ).prepare(restart=given["restart"])


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


def _run(paths: tuple[str, ...], given: Mapping[str, Any]) -> DedupSummary:
    """Run the job, on a cluster if anything is left to do."""
    restart = given["restart"]
    with start_progress("Looking for the input's parts") as progress:
        with wrong_call_exits():
            files = read_file_options(given)
            job = _job(paths, given, files)
            client = open_client(files, progress) if job.removal.needs_workers() else None
        progress.watch(type(job.duplicates).__name__, client)
        with interrupt_hint(restart), client or contextlib.nullcontext():
            return job.run(client, progress.step)


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
