"""The command line: ``gpuclassify classify | models | doctor | demo``.

Exit codes: 0 done, 1 the work failed, 2 the call was wrong and no work was started, 130 it was
interrupted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

import gpuclassify
from gpuclassify.options import DTYPES, LOADERS

if TYPE_CHECKING:
    from rich.console import Console

    from gpuclassify.jobs.run import JobSummary

FAILED = 1
# What the library raises for wrong settings and inputs, at the call.
WRONG_CALL = (
    ValueError,
    TypeError,
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    PermissionError,
)


class Commands(click.Group):
    """A group whose commands print errors of the library without a traceback."""

    def invoke(self, context: click.Context) -> Any:
        """Run the command; a message and an exit code instead of a traceback."""
        try:
            return super().invoke(context)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            context.exit(130)
        except Exception as error:
            if context.obj["debug"]:
                raise
            click.echo(f"Error: {error or type(error).__name__}", err=True)
            context.exit(FAILED)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(gpuclassify.__version__, prog_name="gpuclassify")
@click.option("--debug", is_flag=True, help="Log details, and show tracebacks.")
@click.pass_context
def main(context: click.Context, debug: bool) -> None:
    """Run text classifiers over Parquet and JSONL files of any size."""
    context.obj = {"debug": debug}
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logger = logging.getLogger("gpuclassify")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if debug else logging.WARNING)


@main.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.argument("output")
@click.option(
    "--classifier", "family", required=True, metavar="FAMILY", help="See `gpuclassify models`."
)
@click.option("--model", help="Hub name or directory. Default: the family's published model.")
@click.option("--base-model", help="Hub name or directory with the backbone's sizes.")
@click.option("--revision", help="Branch, tag or commit of the model.")
@click.option("--cache-dir", help="Where downloads are kept.")
@click.option("--text-field", default="text", show_default=True, help="Column of the text.")
@click.option("--label-field", help="Output column of the label.")
@click.option("--score-field", help="Output column of the scores.")
@click.option("--confidence-field", help="Output column of the label's probability.")
@click.option("--filter-by", multiple=True, help="Keep rows with this label; repeatable.")
@click.option("--min-score", help="Keep rows that score this much: NUMBER, or LABEL=NUMBER.")
@click.option("--min-confidence", type=float, help="Keep rows whose label is this probable.")
@click.option("--keep-field", help="Write the decision to this column; drop nothing.")
@click.option(
    "--set",
    "others",
    multiple=True,
    metavar="NAME=VALUE",
    help="Any other argument of the classifier; VALUE is JSON, or a text. Repeatable.",
)
@click.option("--field", "fields", multiple=True, help="Read only these columns; repeatable.")
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["parquet", "jsonl"]),
    default="parquet",
    show_default=True,
)
@click.option("--max-chars", type=int, help="Characters of a text that the model sees.")
@click.option("--max-seq-length", type=int, help="Tokens of a text that the model sees.")
@click.option("--batch-size", type=int, help="Most rows of a batch. Default: automatic.")
@click.option(
    "--dtype", type=click.Choice(DTYPES), help="Default: the fastest the device does well."
)
@click.option("--device", default="auto", show_default=True)
@click.option("--loader", type=click.Choice(LOADERS), default="sorted", show_default=True)
@click.option(
    "--cluster", type=click.Choice(["auto", "gpu", "cpu"]), default="auto", show_default=True
)
@click.option("--scheduler", help="Address or scheduler file of a running Dask cluster.")
@click.option("--workers", "n_workers", type=int, help="Workers of a local cluster.")
@click.option("--part-size", help='Input of one task, such as "16MB". Default: automatic.')
@click.option("--overwrite", is_flag=True, help="Replace part files and columns that exist.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def classify(inputs: tuple[str, ...], output: str, **settings: Any) -> None:
    """Classify INPUT files (Parquet or JSON lines) into the directory OUTPUT.

    INPUT may be a file, a directory, a glob or an fsspec URL. The Hub token comes from HF_TOKEN or
    your Hub login, never from the command line, where other users could read it.
    """
    with wrong_call_exits():
        classifier = _classifier(settings)
        part_bytes = _part_bytes(settings["part_size"])
    summary = _run_job(inputs, output, classifier, part_bytes, settings)
    if settings["as_json"]:
        click.echo(json.dumps(summary.as_dict()))
    else:
        print_summary(summary, _console())


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def models(as_json: bool) -> None:
    """List the classifiers, their models, licences and output columns."""
    rows = [_describe(name, family) for name, family in _families().items()]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        columns = ", ".join(f"{name} ({kind})" for name, kind in row["columns"].items())
        access = ", needs access to a gated model" if row["is_gated"] else ""
        click.echo(f"{row['family']}: {row['purpose']}")
        click.echo(f"    model    {row['model']}")
        click.echo(f"    licence  {row['licence']}{access}")
        click.echo(f"    columns  {columns or 'as the model has it'}")


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Examine Python, torch, CUDA, RAPIDS and GPUs, and say what does not fit."""
    from gpuclassify.doctor import examine

    report = examine()
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=2))
    else:
        from rich.markup import escape
        from rich.table import Table

        colours = {"ok": "green", "warning": "yellow", "missing": "dim", "problem": "red"}
        table = Table("what", "status", "found", "what to do")
        for check in report.checks:
            status = f"[{colours[check.status]}]{check.status}[/]"
            table.add_row(check.name, status, escape(check.found), escape(check.cure))
        _console().print(table)
    context.exit(FAILED if report.has_problems else 0)


@main.command()
@click.option("--directory", default="demo-output", show_default=True, help="Where files go.")
@click.option("--documents", type=int, help="Most documents to use. Default: all that are found.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def demo(directory: str, documents: int | None, as_json: bool) -> None:
    """Train a small classifier on docstrings, and run the main job on those it has not seen."""
    from gpuclassify.demo import run_demo

    quiet_dask()
    console = _console(stderr=as_json)
    result = run_demo(directory, console, max_documents=documents)
    if as_json:
        click.echo(json.dumps(result.as_dict()))
        return
    print_summary(result.job, console)
    console.print(
        f"Held-out accuracy {result.accuracy:.1%} over {result.areas} areas "
        f"(always the most frequent one: {result.majority_share:.1%}). "
        f"Labelled documents are in {result.output}.",
        highlight=False,
        soft_wrap=True,
    )


def print_summary(summary: JobSummary, console: Console) -> None:
    """A short table: rows, speed, labels."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("label", "rows", "share")
    for label, count in summary.labels.items():
        share = count / max(1, summary.rows_out)
        table.add_row(escape(label), f"{count:,}", f"{share:.1%}")
    if summary.labels:
        console.print(table)
    totals = summary.totals
    tokens = totals.get("tokens", 0)
    tokens_run = tokens - totals.get("prefix_tokens", 0)
    padding = totals.get("padded_tokens", 0) / tokens_run - 1 if tokens_run else 0.0
    console.print(
        f"{summary.rows_in:,} rows in, {summary.rows_out:,} rows out, "
        f"{summary.elapsed_seconds:.1f} s, {summary.rows_per_second:,.1f} rows/s, "
        f"{tokens / max(1e-9, summary.elapsed_seconds):,.0f} tokens/s, "
        f"padding {padding:.1%}, {int(totals.get('truncated_texts', 0)):,} texts truncated",
        highlight=False,
        soft_wrap=True,
    )


def quiet_dask() -> None:
    """Keep Dask's own log lines off the terminal, unless asked for with --debug.

    Dask reads this when distributed is imported, here and in the workers that are started.
    """
    import os

    import dask

    # Failed tasks are told by the command itself, cancelled ones are no news.
    level = "info" if click.get_current_context().obj["debug"] else "critical"
    os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", level)
    dask.config.set({"logging.distributed": level})


@contextlib.contextmanager
def wrong_call_exits() -> Iterator[None]:
    """Errors of the library's checks leave with exit code 2, as click's own do."""
    try:
        yield
    except WRONG_CALL as error:
        if click.get_current_context().obj["debug"]:
            raise
        raise click.UsageError(str(error)) from error


def _classifier(settings: dict[str, Any]) -> Any:
    from gpuclassify.checks import nearest

    family, families = settings["family"], _families()
    if family not in families:
        raise ValueError(
            f"no classifier {family!r}.{nearest(family, families)} Known: {', '.join(families)}."
        )
    names = {
        "model", "base_model", "revision", "cache_dir", "text_field", "label_field", "score_field",
        "confidence_field", "min_confidence", "keep_field", "max_chars", "max_seq_length",
        "batch_size", "dtype", "device", "loader", "overwrite",
    }  # fmt: skip
    given = {name: settings[name] for name in names if settings[name] is not None}
    if settings["filter_by"]:
        given["filter_by"] = _labels(settings["filter_by"], families[family])
    if settings["min_score"] is not None:
        given["min_score"] = _min_score(settings["min_score"])
    return families[family](**given, **_others(settings["others"]))


def _families() -> dict[str, Any]:
    from gpuclassify.classifiers import FAMILIES
    from gpuclassify.embedder import Embedder

    return {**FAMILIES, "embedder": Embedder}


def _labels(texts: tuple[str, ...], family: Any) -> Any:
    """The labels to keep: those of the guard are true and false."""
    from gpuclassify.classifiers import InstructionDataGuardClassifier

    decisions = {"true": True, "false": False}
    if family is InstructionDataGuardClassifier and {t.lower() for t in texts} <= set(decisions):
        return [decisions[text.lower()] for text in texts]
    return texts


def _others(settings: tuple[str, ...]) -> dict[str, Any]:
    """Arguments that have no option of their own, from NAME=VALUE."""
    given = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting!r}: pass NAME=VALUE, such as truncated_field=is_cut")
        try:
            given[name.replace("-", "_")] = json.loads(text)
        except ValueError:
            given[name.replace("-", "_")] = text
    return given


def _part_bytes(text: str | None) -> int | None:
    from dask.utils import parse_bytes

    if text is None:
        return None
    try:
        return max(1, parse_bytes(text))
    except ValueError as err:
        raise ValueError(f'--part-size {text!r} is no size: pass bytes, or such as "16MB"') from err


def _min_score(text: str) -> float | dict[str, float]:
    label, equals, number = text.rpartition("=")
    try:
        return {label: float(number)} if equals else float(number)
    except ValueError as err:
        raise ValueError(f"--min-score {text!r}: pass a number, or LABEL=NUMBER") from err


def _run_job(
    inputs: tuple[str, ...],
    output: str,
    classifier: Any,
    part_bytes: int | None,
    settings: dict[str, Any],
) -> JobSummary:
    from gpuclassify.jobs.progress import JobProgress
    from gpuclassify.jobs.run import plan_job, run_job

    quiet_dask()
    with wrong_call_exits():
        plan = plan_job(
            inputs,
            output,
            classifier,
            fields=list(settings["fields"]) or None,
            file_format=settings["file_format"],
            part_bytes=part_bytes,
            overwrite=settings["overwrite"],
        )
        client = _client(settings)
    title = type(classifier).__name__
    with client, JobProgress(title, _console(stderr=True)) as progress:
        return run_job(plan, client, progress.parts)


def _client(settings: dict[str, Any]) -> Any:
    from pathlib import Path

    from gpuclassify.cluster import get_client

    scheduler = settings["scheduler"]
    if scheduler is None:
        return get_client(settings["cluster"], n_workers=settings["n_workers"])
    if settings["n_workers"] is not None or settings["cluster"] != "auto":
        raise ValueError(
            "--scheduler connects to a cluster that is running; --workers and --cluster start a "
            "new one: give one or the other"
        )
    if Path(scheduler).exists():
        return get_client(scheduler_file=scheduler)
    if ":" not in scheduler:
        raise FileNotFoundError(
            f"--scheduler {scheduler!r} is neither an address, such as tcp://host:8786, nor a file "
            "that is there"
        )
    return get_client(address=scheduler)


def _describe(name: str, family: Any) -> dict[str, Any]:
    columns = {}
    if "model" in family.defaults:
        columns = {field.name: str(field.type) for field in family().schema()}
    return {
        "family": name,
        "class": family.__qualname__,
        "purpose": family.purpose,
        "model": family.defaults.get("model", "--model"),
        "licence": family.licence,
        "is_gated": family.is_gated,
        "columns": columns,
    }


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr)


if __name__ == "__main__":
    sys.exit(main())
