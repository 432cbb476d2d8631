"""What commands share: exit codes, errors without tracebacks, and what they print."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from gpuclassify.jobs.report.progress import JobProgress
    from gpuclassify.jobs.report.summary import JobSummary

# In a message; not one of a constructor that it shows, nor a collection of values.
ARGUMENT = re.compile(r"(?<![\w(.])([a-z]\w*)=(?![\[{])(?:(True\b)|((?=[^\s.:;,)])))?")
FAILED, LEFT_OUT, INTERRUPTED = 1, 3, 130
# What the library raises for wrong settings and inputs, at the call.
WRONG_CALL = (
    ValueError,
    TypeError,
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    PermissionError,
)


@contextlib.contextmanager
def wrong_call_exits() -> Iterator[None]:
    """Errors of the library's checks leave with exit code 2, as click's own do."""
    try:
        yield
    except WRONG_CALL as error:
        if click.get_current_context().obj["debug"]:
            raise
        raise click.UsageError(_with_options(error_text(error))) from error


def _with_options(message: str) -> str:
    """The message with the command's options in place of the library's arguments."""
    context = click.get_current_context()
    if context.params.get("config"):  # a file, which has settings by the names of arguments
        return message
    options = {own.name: own for own in context.command.params if isinstance(own, click.Option)}

    def option(argument: re.Match[str]) -> str:
        own, is_true, has_value = options.get(argument[1]), argument[2], argument[3] is not None
        if own is None or own.is_flag != bool(is_true):
            return argument[0]
        return max(own.opts, key=len) + " " * has_value

    return ARGUMENT.sub(option, message)


@contextlib.contextmanager
def ends_at_second_interrupt() -> Iterator[None]:
    """The first Ctrl-C ends the command in order, a second one at once.

    Closing a cluster takes seconds. Interrupted in the middle of that, it waits for ever for what
    is half closed already.
    """

    def first(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, _end_at_once)
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is first:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def interrupt_hint(restart: bool) -> Iterator[None]:
    """Say after Ctrl-C what not to repeat."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if restart:
            interrupt.add_note("Leave --restart out, or it starts over again.")
        raise


def _end_at_once(number: int, frame: Any) -> None:
    """End the processes that this one has started, and this one, without any clearing up."""
    import multiprocessing

    try:
        for process in multiprocessing.active_children():
            process.kill()
        os.write(2, b"\nInterrupted twice: ended at once.\n")
    finally:
        os._exit(INTERRUPTED)


def error_text(error: BaseException) -> str:
    """An error's message, with the notes that were added to it."""
    return "\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", [])])


def quiet_dask() -> None:
    """Keep Dask's own log lines off the terminal, unless asked for with --debug.

    Dask reads this when distributed is imported, here and in the workers that are started.
    """
    import dask

    # The command itself reports failed tasks, and cancelled ones are no news. An interrupt that
    # meets a call as it begins makes distributed's cancelling of it fail, which tornado logs.
    level = "info" if click.get_current_context().obj["debug"] else "critical"
    os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", level)
    # Python clears up what a second Ctrl-C leaves behind, and would warn about it.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
    levels = dict.fromkeys(["distributed", "tornado.application"], level)
    dask.config.set({"logging": dask.config.get("logging", {}) | levels})


def open_console(stderr: bool = False) -> Console:
    """Where people read."""
    from rich.console import Console

    return Console(stderr=stderr)


def start_progress(what: str) -> JobProgress:
    """A status line on stderr that says at once what is waited for; a context manager."""
    from gpuclassify.jobs.report.progress import JobProgress

    progress = JobProgress("", open_console(stderr=True))
    progress.waiting(what)
    return progress


def print_summary(summary: JobSummary, console: Console) -> None:
    """Short tables of labels, what filters dropped, and a line of rows and speed."""
    columns = summary.columns or {"label": summary.labels}
    for name, counts in columns.items():
        if counts:
            _print_labels(name, counts, summary.rows_out, console)
    totals = summary.totals
    tokens = totals.get("tokens", 0)
    tokens_run = tokens - totals.get("prefix_tokens", 0)
    padding = totals.get("padded_tokens", 0) / tokens_run - 1 if tokens_run else 0.0
    lines = [
        *_drops(summary),
        f"{summary.rows_in:,} rows in, {summary.rows_out:,} rows out, "
        f"{summary.elapsed_seconds:.1f} s, {summary.rows_per_second:,.1f} rows/s, "
        f"{summary.tokens_per_second:,.0f} tokens/s, "
        f"padding {padding:.1%}, {int(totals.get('truncated_texts', 0)):,} texts truncated",
    ]
    if summary.resumed_parts:
        lines.append(
            f"{summary.resumed_parts:,} of {summary.parts:,} parts were there already, "
            f"with {summary.resumed_rows:,} rows, and are as they were written: {summary.checked}"
        )
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    print_places(summary, console)


def _drops(summary: JobSummary) -> list[str]:
    """A line for each classifier that has filters."""
    lines = []
    for name, stage in summary.stages.items():
        for kind, words in (("dropped", "dropped"), ("would_drop", "would drop")):
            if counts := stage[kind]:
                reasons = ", ".join(f"{reason} {count:,}" for reason, count in counts.items())
                total = sum(counts.values())
                lines.append(f"{name}: {words} {total:,} of {stage['read']:,} rows ({reasons})")
    return lines


def print_places(summary: JobSummary, console: Console, *places: str) -> None:
    """What was left out, and where the report and other results are."""
    lines = [*places, f"Report: {summary.output}/_report/report.html"]
    if summary.left_out:
        counted = ", ".join(f"{count:,} {kind}s" for kind, count in summary.left_out.items())
        lines.insert(0, f"Left out: {counted}; see {summary.output}/_quarantine")
    if summary.commit_url:
        lines.append(f"Uploaded: {summary.commit_url}")
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _print_labels(name: str, counts: dict[str, int], rows: int, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    from gpuclassify.jobs.report.counts import most_frequent

    table = Table(escape(name), "rows", "share")
    for label, count in most_frequent(counts).items():
        table.add_row(escape(label), f"{count:,}", f"{count / max(1, rows):.1%}")
    console.print(table)
