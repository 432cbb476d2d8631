"""The command ``gpuclassify dedup``."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from gpuclassify.commands.classify import run_job
from gpuclassify.commands.console import print_places, quiet_dask, wrong_call_exits
from gpuclassify.commands.options import (
    DUPLICATES,
    GroupedOption,
    JobCommand,
    annotate_option,
    file_options,
    named_values,
    option_of,
    options_of,
    other_settings,
    settings_from_options,
    split_paths,
)
from gpuclassify.commands.settings import JobSettings
from gpuclassify.settings.checks import check_names, setting_names

if TYPE_CHECKING:
    from rich.console import Console

    from gpuclassify.corpus.dedup.job import Deduplicate, DedupSummary

METHODS = ("exact", "fuzzy", "semantic")
# Options with the names of the settings that they set.
SETTINGS = (
    *("threshold", "normalize", "text_field", "id_field", "keep_by", "by", "source_field"),
    *("max_removed_share", "max_group_size"),
)


def _options() -> list[click.Option]:
    from gpuclassify.corpus.dedup.duplicates import Duplicates, TextDuplicates

    return [
        GroupedOption(
            ["--method"], group=DUPLICATES, type=click.Choice(METHODS), required=True,
            help="Equal texts, texts that share most of their words, or texts that mean the "
            "same."),
        *options_of(Duplicates, DUPLICATES, *SETTINGS[2:]),
        option_of(TextDuplicates, "normalize", DUPLICATES),
        GroupedOption(
            ["--threshold"], group=DUPLICATES, type=float,
            help="Similarity of duplicates, 0 to 1."),
        GroupedOption(
            ["--against"], group=DUPLICATES, metavar="PATH", multiple=True,
            help="Files of an earlier corpus, whose documents are kept; repeatable."),
        other_settings(DUPLICATES, "setting of the method"),
        annotate_option(), *file_options(),
    ]  # fmt: skip


@click.command(
    cls=JobCommand,
    options=_options,
)
@click.argument("paths", nargs=-1, metavar="INPUT... OUTPUT")
@click.pass_context
def dedup(context: click.Context, paths: tuple[str, ...], **options: Any) -> None:
    """Write the documents of INPUT (Parquet or JSON lines) without duplicates into OUTPUT.

    Paths are those of `classify`. The same command continues an interrupted job, also on another
    cluster. Documents that have duplicates are listed in OUTPUT/_dedup/duplicates. With --annotate,
    columns that mark them are written beside INPUT, and no text.

    \b
    gpuclassify dedup 'crawl/*.jsonl' clean/ --method fuzzy --id-field url --keep-by length

    Exit codes: 0 done, 1 failed, 2 wrong call, 3 done, with something left out in quarantine, 130
    interrupted, 143 terminated.
    """
    quiet_dask()
    with wrong_call_exits():
        files = JobSettings(input=[], **settings_from_options(options))
    make = functools.partial(_make_job, paths, options, files)
    run_job(context, make, vars(files), options, _print_summary)


def _make_job(
    paths: tuple[str, ...], options: Mapping[str, Any], files: JobSettings
) -> Deduplicate:
    from gpuclassify.corpus.dedup.job import Deduplicate

    settings, method = replace(files, **split_paths(paths, options)), options["method"]
    of_method = importlib.import_module(f"gpuclassify.corpus.dedup.{method}")
    kind = getattr(of_method, f"{method.title()}Duplicates")
    values = {name: options[name] for name in SETTINGS if options[name] not in (None, ())}
    values |= named_values("--set", "seed=7", options["others"])
    check_names(f"--method {method} has", "setting", values, setting_names(kind))
    duplicates = kind(**values)
    read = settings.fields and [*duplicates.input_fields, *settings.fields]
    earlier = None
    if options["against"]:
        earlier = replace(settings, input=list(options["against"])).reader()
    return Deduplicate(
        settings.reader(read),
        duplicates,
        settings.writer(),
        against=earlier,
        backend=settings.backend,
        on_error=settings.on_error,
    )


def _print_summary(summary: DedupSummary, console: Console) -> None:
    duplicates, removal = summary.duplicates, summary.removal
    done = "marked" if removal.rows_out == duplicates.documents else "removed"
    lines = [
        f"{duplicates.documents:,} documents, {duplicates.removed:,} duplicates {done} "
        f"({duplicates.removed_share:.1%}), {removal.rows_out:,} kept",
        f"{duplicates.groups:,} groups of {duplicates.in_groups:,} documents",
    ]
    if duplicates.compared:
        lines[1] += (
            f"; {duplicates.compared:,} candidates compared, {duplicates.rejected:,} rejected"
        )
    lines += [f"    {line}" for line in duplicates.shown]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    print_places(removal, console, f"Duplicates: {removal.output}/_dedup/duplicates")
