"""The command line: ``gpuclassify``, whose larger commands have files in `gpuclassify.commands`.

Exit codes: 0 done, 1 the work failed or the input cannot be read, 2 the call was wrong and no work
was started, 3 done, with something left out in quarantine, 130 interrupted, 143 terminated
(SIGTERM).
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
import warnings
from typing import Any

import click

from gpuclassify._version import __version__
from gpuclassify.commands.buckets import buckets
from gpuclassify.commands.classify import classify, report, verify
from gpuclassify.commands.compare import compare
from gpuclassify.commands.console import (
    FAILED,
    end_at_once,
    ends_when_told,
    error_text,
    open_console,
    with_options,
)
from gpuclassify.commands.convert import convert
from gpuclassify.commands.dedup import dedup
from gpuclassify.commands.evaluate import evaluate
from gpuclassify.commands.models import models
from gpuclassify.commands.plan import plan
from gpuclassify.commands.preview import preview
from gpuclassify.commands.slurm_script import slurm_script
from gpuclassify.commands.train import train


class Commands(click.Group):
    """A group whose commands print errors of the library without a traceback."""

    def invoke(self, context: click.Context) -> Any:
        """Run the command; a message and an exit code instead of a traceback."""
        try:
            with ends_when_told():
                return super().invoke(context)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click ends quietly when what reads its output, such as `head`, has seen enough
        except KeyboardInterrupt as interrupt:
            number = interrupt.args[0] if interrupt.args else 0  # that `ends_when_told` heard
            interrupt.args = ("Terminated." if number == signal.SIGTERM else "Interrupted.",)
            if number:
                end_at_once(number, error_text(interrupt))
            click.echo(error_text(interrupt), err=True)
            context.exit(128 + signal.SIGINT)
        except Exception as error:
            if context.obj["debug"]:
                raise
            command = self.get_command(context, str(context.invoked_subcommand))
            message = with_options(error_text(error), command or self)
            click.echo(f"Error: {message}", err=True)
            context.exit(FAILED)


@click.group("gpuclassify", cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gpuclassify")
@click.option("--debug", is_flag=True, help="Log details, and show tracebacks.")
@click.pass_context
def main(context: click.Context, debug: bool) -> None:
    """Run text classifiers over Parquet and JSONL files of any size."""
    context.obj = {"debug": debug, "began": time.perf_counter()}
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logger = logging.getLogger("gpuclassify")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if debug else logging.WARNING)
    context.with_resource(warnings.catch_warnings())

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        command = main.get_command(context, str(context.invoked_subcommand)) or main
        # Where a progress bar is shown, it has put what makes room for lines in stderr's place.
        sys.stderr.write(f"Warning: {with_options(str(message), command)}\n")

    warnings.showwarning = show


JOBS = (buckets, classify, compare, dedup, plan, preview, report, slurm_script, verify)
for command in (*JOBS, convert, evaluate, models, train):
    main.add_command(command)


@main.command(short_help="Examine what is installed, and GPUs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Examine Python, torch, CUDA, RAPIDS and GPUs, and say what does not fit."""
    from gpuclassify.commands.doctor import examine

    report = examine()
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=2))
    else:
        from rich.markup import escape
        from rich.table import Table

        colours = {"ok": "green", "warning": "yellow", "missing": "dim", "problem": "red"}
        table, console = Table("what", "status", "found", "what to do"), open_console()
        if not console.is_terminal:
            console.width = 10_000  # what reads a pipe wants whole commands, each on its line
        for check in report.checks:
            status = f"[{colours[check.status]}]{check.status}[/]"
            table.add_row(check.name, status, escape(check.found), escape(check.cure))
        console.print(table)
    context.exit(FAILED if report.has_problems else 0)


if __name__ == "__main__":
    sys.exit(main())
