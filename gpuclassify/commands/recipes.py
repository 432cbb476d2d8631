"""Commands that run recipes: ``gpuclassify dedup``, ``decontaminate`` and ``buckets``."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import click

from gpuclassify.commands.classify import run_job
from gpuclassify.commands.console import quiet_dask, wrong_call_exits
from gpuclassify.commands.options import (
    BUCKETS,
    DUPLICATES,
    TEST_ITEMS,
    GroupedOption,
    JobCommand,
    annotate_option,
    config_options,
    file_options,
    named_values,
    option_of,
    other_settings,
    read_recipe,
    setting_options,
    split_paths,
)
from gpuclassify.commands.settings import REPORT, JobSettings
from gpuclassify.settings.checks import check_choice, check_names, setting_names

if TYPE_CHECKING:
    from gpuclassify.jobs.recipe import Recipe

EXIT_CODES = """Exit codes: 0 done, 1 failed, 2 wrong call, 3 done, with something left out in
quarantine, 130 interrupted, 143 terminated."""
PACKAGE = "gpuclassify.corpus"
METHODS = ("exact", "fuzzy", "semantic")
# Function that makes a recipe from the job's settings and the passed settings of the recipe. Its
# docstring is the help of the command, and describes what the command does.
MakeRecipe = Callable[[JobSettings, dict[str, Any]], "Recipe"]


def recipe_command(
    group: str,
    *kinds: str,
    without: Iterable[str] = (),
    also: Collection[str] = (),
    more: Callable[[], Iterable[click.Option]] = tuple,
) -> Callable[[MakeRecipe], click.Command]:
    """Return a decorator that turns a function into a command that runs a recipe.

    A recipe declares a kind of job, such as a deduplication. The function makes it from the
    settings, and its docstring is the command's help. Settings of the classes `kinds`
    (``module:Class``) become options under the heading `group`, except for `without`. `more` makes
    further options, which replace options of the same name. `also` names job settings that a
    settings file may have, although they have no option.
    """

    def recipe_options() -> dict[str, click.Option]:
        own: dict[str, click.Option] = {}
        for kind in kinds:
            module, _, name = kind.partition(":")
            own |= declared_options(getattr(importlib.import_module(module), name), group)
        own |= {str(option.name): option for option in more()}
        return {name: option for name, option in own.items() if name not in without}

    def options() -> list[click.Option]:
        own = recipe_options()
        others = [*setting_options(REPORT), annotate_option(), *file_options(), *config_options()]
        return [*own.values(), *(option for option in others if option.name not in own)]

    def decorate(make: MakeRecipe) -> click.Command:
        def run(context: click.Context, paths: tuple[str, ...], **options: Any) -> None:
            quiet_dask()
            with wrong_call_exits():
                own = {name: options[name] for name in recipe_options()}
                read = read_recipe(options, own, also, **split_paths(paths, options))
            if read is not None:
                job = functools.partial(make, *read)
                run_job(context, job, vars(read[0]), options)

        command = click.command(
            make.__name__,
            cls=JobCommand,
            options=options,
            help=f"{inspect.getdoc(make)}\n\n{EXIT_CODES}",
        )
        argument = click.argument("paths", nargs=-1, metavar="INPUT... OUTPUT")
        return command(argument(click.pass_context(run)))

    return decorate


def declared_options(kind: Any, group: str) -> dict[str, click.Option]:
    """Make a command-line option for each setting of the class `kind`; return them by setting.

    Settings whose values are Python objects get no option. Neither do settings that a recipe
    inherits, because all jobs have options for them.
    """
    bases = [base for base in kind.__mro__[1:] if hasattr(base, "take_steps")]
    inherited = {declared.name for base in bases for declared in fields(base)}
    return {
        declared.name: option_of(kind, declared.name, group)
        for declared in fields(kind)
        if declared.init and declared.name not in inherited and "is_object" not in declared.metadata
    }


def _dedup_options() -> list[click.Option]:
    return [
        GroupedOption(
            ["--method"], group=DUPLICATES, type=click.Choice(METHODS),
            help="Equal texts, texts that share most of their words, or texts that mean the "
            "same. Required."),
        GroupedOption(
            ["--threshold"], group=DUPLICATES, type=float,
            help="Similarity of duplicates, 0 to 1."),
        GroupedOption(
            ["--against"], group=DUPLICATES, metavar="PATH", multiple=True,
            help="Files of an earlier corpus, whose documents are kept; repeatable."),
        other_settings(DUPLICATES, "setting of the method"),
    ]  # fmt: skip


@recipe_command(DUPLICATES, f"{PACKAGE}.dedup.duplicates:TextDuplicates", more=_dedup_options)
def dedup(settings: JobSettings, own: dict[str, Any]) -> Recipe:
    """Write the documents of INPUT (Parquet or JSON lines) without duplicates into OUTPUT.

    INPUT may be a file, a directory, a glob or an fsspec URL. The same command continues an
    interrupted job, also on another cluster. Documents that have duplicates are listed in
    OUTPUT/_dedup/duplicates. With --annotate, columns that mark them are written, and no text.

    \b
    gpuclassify dedup 'crawl/*.jsonl' clean/ --method fuzzy --id-field url --keep-by length
    """
    from gpuclassify.corpus.dedup.groups import LENGTH
    from gpuclassify.corpus.dedup.job import Deduplicate
    from gpuclassify.jobs.input.readers import first_rows

    if (method := own.pop("method", None)) is None:
        raise ValueError("name how duplicates are found: --method exact, fuzzy or semantic")
    check_choice("method", method, METHODS)  # a settings file may name anything
    against = own.pop("against", ())
    against = [against] if isinstance(against, str) else [*against]
    own |= named_values("--set", "seed=7", own.pop("others", ()))
    module = importlib.import_module(f"{PACKAGE}.dedup.{method}")
    kind = getattr(module, f"{method.title()}Duplicates")
    check_names(f"--method {method} has", "setting", own, setting_names(kind))
    duplicates = kind(**own)
    read = settings.fields and [*duplicates.input_fields, *settings.fields]
    if read and LENGTH in duplicates.keep_by:  # a column, or else the length of the text
        read += {LENGTH} & {*first_rows(settings.reader(), 1, settings.on_error).columns}
    return Deduplicate(
        settings.reader(read),
        duplicates,
        settings.writer(),
        against=replace(settings, input=against).reader() if against else None,
        backend=settings.backend,
        on_error=settings.on_error,
    )


def _decontaminate_options() -> list[click.Option]:
    return [
        GroupedOption(
            ["--against"], group=TEST_ITEMS, metavar="PATH", multiple=True,
            help="Files of test items, each a benchmark, or the folder of an index; repeatable. "
            "Required."),
        GroupedOption(
            ["--keep-contaminated"], group=TEST_ITEMS, is_flag=True,
            help="Write contaminated documents too."),
    ]  # fmt: skip


@recipe_command(
    TEST_ITEMS,
    f"{PACKAGE}.decontamination.mapper:Decontaminate",
    f"{PACKAGE}.decontamination.job:DecontaminateFiles",
    without=("filter_by", "index_dir"),
    more=_decontaminate_options,
)
def decontaminate(settings: JobSettings, own: dict[str, Any]) -> Recipe:
    """Write the documents of INPUT (Parquet or JSON lines) without test items into OUTPUT.

    Test items are texts of benchmarks (--against), such as questions, that models must not be
    trained on. INPUT may be a file, a directory, a glob or an fsspec URL. The same command
    continues an interrupted job, also on another cluster. The report lists the items found, the
    number of documents, and the worst passages. The index of the items stays in
    OUTPUT/_decontamination/index, for the next corpus.

    \b
    gpuclassify decontaminate 'crawl/*.parquet' clean/ --against 'evals/*.jsonl' \\
        --against-field question --against-field answer
    """
    from gpuclassify.corpus.decontamination.job import DecontaminateFiles
    from gpuclassify.corpus.decontamination.mapper import Decontaminate

    if "against" not in own:
        raise ValueError("name the files of test items: --against FILE")
    sample = {name: own.pop(name) for name in ("sample_rows", "max_share") if name in own}
    keeps_all = own.pop("keep_contaminated", False)
    if own.get("cut"):
        own.setdefault("kept_text_field", own.get("text_field", "text"))
    elif not keeps_all and not settings.annotate:
        own["filter_by"] = False
    mapper = Decontaminate(**own)
    reader = settings.reader(settings.fields_read([mapper]))
    stages = [reader, mapper, settings.writer()]
    return DecontaminateFiles(stages, **sample, **settings.pass_options())


def _bucket_options() -> list[click.Option]:
    return [
        GroupedOption(
            ["--edges"], group=BUCKETS, metavar="FILE",
            help="Edges of an earlier job, from its OUTPUT/_buckets/edges.json, in place of "
            "--score, --n, --weight and --by."),
    ]  # fmt: skip


@recipe_command(
    BUCKETS,
    f"{PACKAGE}.scores.job:AssignBuckets",
    also=("classifiers",),
    more=_bucket_options,
)
def buckets(settings: JobSettings, own: dict[str, Any]) -> Recipe:
    """Write the documents of INPUT (Parquet or JSON lines) with the buckets of their scores.

    INPUT may be a file, a directory, a glob or an fsspec URL. Scores are columns of numbers
    (--score), of INPUT or of --annotations. They are read first, to find the edges between buckets
    of equal weight, which are saved in OUTPUT/_buckets/edges.json. Then documents are written, with
    a bucket column for each score and one for the row. The same command continues an interrupted
    job. With --annotate, only the buckets are written, and no text. To classify first, name
    classifiers in a --config FILE.

    \b
    gpuclassify buckets classified/ buckets/ --score edu --score hq --partition-by bucket
    """
    from gpuclassify.corpus.scores.buckets import ScoreBuckets
    from gpuclassify.corpus.scores.job import AssignBuckets
    from gpuclassify.jobs.pipeline import Pipeline

    if not {"scores", "edges"} & own.keys():
        raise ValueError("name the columns of scores: --score COLUMN, or --edges FILE")
    if own.get("weight") == "none":
        own["weight"] = None
    mappers: list[Any] = settings.mappers()
    if "edges" in own:
        settings_of_edges = setting_names(ScoreBuckets)
        check_names("buckets of --edges have", "setting", own, settings_of_edges)
        mappers.append(ScoreBuckets(**own))
        read = settings.fields_read(mappers, mappers[-1].columns.needed)
        stages = [settings.reader(read), *mappers, settings.writer()]
        return Pipeline(stages, **settings.pass_options())
    recipe = AssignBuckets([], **own, **settings.pass_options())
    reader = settings.reader(settings.fields_read(mappers, recipe.columns.needed))
    return replace(recipe, stages=[reader, *mappers, settings.writer()])
