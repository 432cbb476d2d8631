"""The command ``gpuclassify decontaminate``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from gpuclassify.commands.classify import run_job
from gpuclassify.commands.console import print_places, quiet_dask, wrong_call_exits
from gpuclassify.commands.options import (
    TEST_ITEMS,
    GroupedOption,
    JobCommand,
    file_options,
    options_of,
    setting_options,
    settings_from_options,
    split_paths,
)
from gpuclassify.commands.settings import REPORT, JobSettings

if TYPE_CHECKING:
    from rich.console import Console

    from gpuclassify.corpus.decontamination.job import DecontaminateFiles
    from gpuclassify.jobs.report.summary import JobSummary

# Options with the names of the settings that they set.
SETTINGS = (
    *("against_field", "join_fields", "against_id", "ngram", "min_words", "threshold"),
    *("max_items", "ignore", "text_field", "label_field", "score_field", "item_field"),
    *("items_field", "passages_field", "cut", "cut_margin", "kept_text_field", "keep_field"),
    "overwrite",
)
SAMPLE = ("sample_rows", "max_share")


def _options() -> list[click.Option]:
    from gpuclassify.corpus.decontamination.job import DecontaminateFiles
    from gpuclassify.corpus.decontamination.mapper import Decontaminate

    return [
        GroupedOption(
            ["--against"], group=TEST_ITEMS, metavar="PATH", multiple=True, required=True,
            help="Files of test items, each a benchmark, or the folder of an index; repeatable."),
        *options_of(Decontaminate, TEST_ITEMS, *SETTINGS),
        GroupedOption(
            ["--keep-contaminated"], group=TEST_ITEMS, is_flag=True,
            help="Write contaminated documents too."),
        *options_of(DecontaminateFiles, TEST_ITEMS, *SAMPLE),
        *setting_options(REPORT),
        *file_options(),
    ]  # fmt: skip


@click.command(cls=JobCommand, options=_options)
@click.argument("paths", nargs=-1, metavar="INPUT... OUTPUT")
@click.pass_context
def decontaminate(context: click.Context, paths: tuple[str, ...], **options: Any) -> None:
    """Write the documents of INPUT (Parquet or JSON lines) that hold no test items into OUTPUT.

    Paths are those of `classify`. The same command continues an interrupted job, also on another
    cluster. The report says which items were found, in how many documents, and shows the worst
    passages; the index of the items stays in OUTPUT/_decontamination/index, for the next corpus.

    \b
    gpuclassify decontaminate 'crawl/*.parquet' clean/ --against 'evals/*.jsonl' \\
        --against-field question --against-field answer

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
) -> DecontaminateFiles:
    from gpuclassify.corpus.decontamination.job import DecontaminateFiles
    from gpuclassify.corpus.decontamination.mapper import Decontaminate
    from gpuclassify.jobs.pipeline import OPTIONS

    settings = replace(files, **split_paths(paths, options))
    values = {
        name: options[name]
        for name in SETTINGS
        if options[name] not in (None, ()) and options[name] is not False
    }
    if options["cut"]:
        values.setdefault("kept_text_field", values.get("text_field", "text"))
    elif not options["keep_contaminated"]:
        values["filter_by"] = False
    mapper = Decontaminate(against=list(options["against"]), **values)
    sample = {name: options[name] for name in SAMPLE if options[name] is not None}
    return DecontaminateFiles(
        [settings.reader(settings.fields_read([mapper])), mapper, settings.writer()],
        **sample,
        **{name: getattr(settings, name) for name in OPTIONS},
    )


def _print_summary(summary: JobSummary, console: Console) -> None:
    counts = next(iter(summary.stages.values()))["contamination"]
    documents, rows = counts["documents"][""], summary.rows_in
    lines = [
        f"{rows:,} documents, {documents:,} contaminated ({documents / max(1, rows):.2%}), "
        f"{summary.rows_out:,} written",
        *(f"    {name}: {len(ids):,} items found" for name, ids in sorted(counts["items"].items())),
    ]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    print_places(summary, console)
