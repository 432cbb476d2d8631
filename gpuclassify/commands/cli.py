"""Command line ``gpuclassify``; larger commands are in files of `gpuclassify.commands`.

Exit codes: 0 done, 1 the work failed or the input cannot be read, 2 the call was wrong and no work
was started, 3 done, with something left out in quarantine, 130 interrupted, 143 terminated
(SIGTERM). ``compare`` has those of ``diff``.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import logging
import signal
import sys
import time
import warnings
from typing import Any

import click

from gpuclassify._version import __version__
from gpuclassify.commands.console import (
    FAILED,
    echo,
    end_at_once,
    end_on_signals,
    error_text,
    open_console,
    with_options,
)
from gpuclassify.pages import visible

# Module and summary of each command. Only the command that runs is imported.
COMMANDS = {
    "agreement": ("sample", "Show how far people and models agree on labels."),
    "annotate": ("annotate", "Write new columns beside the input, and no text."),
    "buckets": ("recipes", "Cut scores into buckets, or continue an earlier run."),
    "classify": ("classify", "Classify files into a directory, or continue an earlier run."),
    "clusters": ("clusters", "Fit clusters to embeddings, and save their centroids."),
    "compare": ("compare", "Compare a classifier in two settings."),
    "convert": ("convert", "Convert a .pt, .ckpt, .npz or .safetensors file to a head."),
    "decontaminate": ("recipes", "Find and remove test items, or continue an earlier run."),
    "dedup": ("recipes", "Remove duplicates from files, or continue an earlier run."),
    "evaluate": ("evaluate", "Evaluate a trained head on other annotated texts."),
    "mix": ("mix", "Plan a mixture of a token budget, and write how often each row is in it."),
    "models": ("models", "List the classifiers, or the labels of one."),
    "plan": ("plan", "Forecast the work of `classify`."),
    "preview": ("preview", "Show a few texts with their labels."),
    "show": ("show", "Show a few random texts with their annotations."),
    "select": ("annotate", "Write the rows that meet a condition."),
    "report": ("classify", "Rewrite the report of a job."),
    "sample": ("sample", "Draw rows of each stratum for people to label."),
    "slurm-script": ("slurm_script", "Write a file for sbatch that runs a job."),
    "thresholds": ("thresholds", "Find the score to keep rows from, for each group."),
    "train": ("train", "Train a classifier's head on annotated texts."),
    "verify": ("classify", "Check that a job's output is complete and unchanged."),
}
COLLECTED_SELDOM = (100_000, 20, 100)  # thresholds of the garbage collector


class Visible(logging.Formatter):
    """Log formatter that escapes control characters, so that a terminal does not interpret them.

    It also replaces arguments of the library in messages, such as ``text_field=``, with the options
    of the running command, such as ``--text-field``.
    """

    context: click.Context | None = None  # names the running command

    def format(self, record: logging.LogRecord) -> str:
        """Format a log record as text, with control characters escaped."""
        text = super().format(record)
        if self.context is not None:
            command = main.get_command(self.context, str(self.context.invoked_subcommand)) or main
            text = with_options(text, command)
        return visible(text)


class Once(logging.Filter):
    """Log filter that shows each warning or error once: several readers may log the same one."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for a warning or error whose message was logged before, else True."""
        message = record.getMessage()
        if record.levelno < logging.WARNING:
            return True
        is_new = message not in self._seen
        self._seen.add(message)
        return is_new


class Commands(click.Group):
    """Click group of all commands, which imports a command only when it is used."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names of all commands, sorted."""
        return sorted([*self.commands, *COMMANDS])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Import the command with this name, and return it; return None for an unknown name."""
        if name not in COMMANDS:
            return super().get_command(context, name)
        module = importlib.import_module(f"gpuclassify.commands.{COMMANDS[name][0]}")
        command: click.Command = getattr(module, name.replace("-", "_"))
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands with their one-line descriptions into the help."""
        helps = {name: command.short_help or "" for name, command in self.commands.items()}
        helps |= {name: line for name, (_, line) in COMMANDS.items()}
        with formatter.section("Commands"):
            formatter.write_dl(sorted(helps.items()))

    def invoke(self, context: click.Context) -> Any:
        """Run the command; if it fails, print a message without a traceback, and exit with a code.

        With --debug, unexpected errors are raised with their traceback.
        """
        try:
            with end_on_signals():
                return super().invoke(context)
        except click.ClickException as error:
            vars(error)["message"] = visible(error.message)
            raise
        except (click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click exits quietly when a reader such as `head` closes the pipe
        except KeyboardInterrupt as interrupt:
            number = interrupt.args[0] if interrupt.args else 0  # signal, from `end_on_signals`
            interrupt.args = ("Terminated." if number == signal.SIGTERM else "Interrupted.",)
            if number:
                end_at_once(number, error_text(interrupt))
            echo(error_text(interrupt), err=True)
            context.exit(128 + signal.SIGINT)
        except Exception as error:
            if context.obj["debug"]:
                raise
            command = self.get_command(context, str(context.invoked_subcommand))
            message = with_options(error_text(error), command or self)
            echo(f"Error: {message}", err=True)
            context.exit(getattr(command, "failed", FAILED))


@click.group("gpuclassify", cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gpuclassify")
@click.option("--debug", is_flag=True, help="Log details, and show tracebacks.")
@click.pass_context
def main(context: click.Context, debug: bool) -> None:
    """Run text classifiers over Parquet and JSONL files of any size."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a label may have characters that the encoding lacks
            stream.reconfigure(errors="replace")
    # Imported modules are never garbage, but looking through their objects for garbage takes a
    # fifth of the time of a short command.
    context.call_on_close(functools.partial(gc.set_threshold, *gc.get_threshold()))
    gc.set_threshold(*COLLECTED_SELDOM)
    atexit.register(gc.freeze)
    context.obj = {"debug": debug, "began": time.perf_counter()}
    handler = logging.StreamHandler()
    formatter = Visible("%(asctime)s %(name)s %(levelname)s %(message)s")
    formatter.context = context
    handler.setFormatter(formatter)
    handler.addFilter(Once())
    logger = logging.getLogger("gpuclassify")
    context.call_on_close(functools.partial(logger.removeHandler, handler))
    context.call_on_close(functools.partial(logger.setLevel, logger.level))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if debug else logging.WARNING)
    context.with_resource(warnings.catch_warnings())

    def show(message: Warning | str, *_: object, **__: object) -> None:
        command = main.get_command(context, str(context.invoked_subcommand)) or main
        # A progress bar replaces stderr while it is shown, to make room for lines.
        sys.stderr.write(visible(f"Warning: {with_options(str(message), command)}\n"))

    warnings.showwarning = show


@main.command(short_help="Check the installation and GPUs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Check Python, torch, CUDA, RAPIDS and GPUs, and name fixes for problems."""
    from gpuclassify.commands.doctor import examine

    report = examine()
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=2))
    else:
        from rich.markup import escape
        from rich.table import Table

        colours = {"ok": "green", "warning": "yellow", "missing": "dim", "problem": "red"}
        table = Table.grid(padding=(0, 1))
        for check in report.checks:
            status = f"[{colours[check.status]}]{check.status}[/]"
            table.add_row(status, f"[bold]{escape(check.name)}[/]: {escape(check.found)}")
            if check.cure:
                table.add_row("", f"to do: {escape(check.cure)}")
        open_console().print(table)  # rich draws 80 columns in a pipe
    context.exit(FAILED if report.has_problems else 0)


if __name__ == "__main__":
    sys.exit(main())
