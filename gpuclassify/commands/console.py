"""Shared parts of commands: exit codes, errors without tracebacks, and printing."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from gpuclassify.pages import counted_kinds, visible, visible_json

if TYPE_CHECKING:
    import pyarrow as pa
    from rich.console import Console
    from rich.text import Text

    from gpuclassify.jobs.report.progress import JobProgress
    from gpuclassify.jobs.report.summary import ColumnLabels, JobSummary

# Matches in a message: whole calls, which stay unchanged; or an argument outside of calls, with
# True or False, a word, a list or dict, the beginning of any other value, or no value.
ARGUMENT = re.compile(
    r"\w\((?:[^()]|\([^()]*\))*\)"
    r"|(?<![^\s(])([a-z]\w*)="
    r"(?:(True|False)\b|\"([\w-]+)\"|(\{[^{}]*\}|\[[^\[\]]*\])"
    r"|(?=[^\s.:;,)\[{])()|(?![\[{]))"
)
LACKED = re.compile(r" \(([a-z]\w*)=[^\s()]*\)")
OTHER_NAMES = {"part_bytes": "part_size", "address": "scheduler"}  # arguments and their options
OF_ANNOTATE = ("redo_changed",)  # options of `annotate` that errors of other commands advise
FAILED, LEFT_OUT = 1, 3  # exit codes
MOST_LABELS = 30  # labels in a table
END_SECONDS = 15  # seconds until an interrupted command ends, even if something hangs
# Exceptions that the library raises before any work, for wrong settings and inputs.
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
    """Convert errors of the library's checks in the block to click's usage errors (exit code 2).

    These are the types in `WRONG_CALL`, but not errors of broken input files. Messages name options
    instead of arguments, unless --config was passed. With --debug, no error is converted.
    """
    try:
        yield
    except WRONG_CALL as error:
        from gpuclassify.jobs.input.files import BrokenInputError

        if click.get_current_context().obj["debug"] or isinstance(error, BrokenInputError):
            raise
        context, message = click.get_current_context(), error_text(error)
        if not context.params.get("config"):  # a settings file uses the names of arguments
            message = with_options(message, context.command)
        raise click.UsageError(message) from error


def with_options(message: str, command: click.Command) -> str:
    """Replace the library's arguments in a message with the options of the running command.

    For example, ``text_field=`` becomes ``--text-field``. Advice in parentheses to pass a setting
    that has no option, such as " (redo_changed=True)", is removed or replaced.
    """
    from gpuclassify.commands.settings import JobSettings, families, setting_names

    options = {option.name: option for option in command.params if isinstance(option, click.Option)}
    settings = setting_names(JobSettings)
    others: Collection[str] = ()  # settings of classifiers that have no option, for --set
    if "classifiers" in options and "others" in options:
        others = {name for family in families().values() for name in setting_names(family.Options)}

    def replace(argument: re.Match[str]) -> str:
        name, flag, word, collection, begun = argument.groups()
        option = options.get(OTHER_NAMES.get(name, name))
        if option is None and name in others:
            value = word or (flag or "").lower()
            return f"--set {name}={value}" if value or begun is not None else argument[0]
        has_value = bool(word or collection) or begun is not None
        if option is None or (has_value if option.is_flag else flag):
            return argument[0]
        names = option.secondary_opts if flag == "False" else option.opts
        if not names:
            return argument[0]
        shown = max(names, key=len)
        if collection:
            values = _values(collection)
            return argument[0] if values is None else " ".join([f"{shown} {v}" for v in values])
        return shown + (f" {word}" if word else " " * (begun is not None))

    def drop(argument: re.Match[str]) -> str:
        name = OTHER_NAMES.get(argument[1], argument[1])
        if name not in settings or name in options:
            return argument[0]
        if name in OF_ANNOTATE:
            return f" (`gpuclassify annotate --{name.replace('_', '-')}`)"
        return ""

    # An option that the command lacks, such as " (redo_changed=True)".
    return ARGUMENT.sub(replace, LACKED.sub(drop, message))


def _values(text: str) -> list[str] | None:
    """Parse a list or dict in a message to option values ("NAME=VALUE"); None for others."""
    try:
        parsed = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    pairs = parsed.items() if isinstance(parsed, dict) else ()
    items: list[Any] = [
        f"{name}={value}" if isinstance(name, str) and type(value) in (str, int, float) else None
        for name, value in pairs
    ]
    items += parsed if isinstance(parsed, list) else []
    return items if items and all(isinstance(item, str) for item in items) else None


@contextlib.contextmanager
def end_on_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first SIGINT or SIGTERM; end the process at a second one.

    The process also ends `END_SECONDS` after the first signal. A separate thread receives the
    signals at once, so that this works even if a library blocks the main thread, which has to be
    free for Python's signal handlers to run. It does nothing outside the main thread, or for
    signals with a handler of the caller's.
    """
    usual: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL}
    usual[signal.SIGINT] = signal.default_int_handler
    numbers = [number for number, handler in usual.items() if signal.getsignal(number) is handler]
    if threading.current_thread() is not threading.main_thread() or not numbers:
        yield
        return

    def first(number: int, frame: object) -> None:
        for handled in numbers:
            signal.signal(handled, lambda *_: None)  # the thread ends the process
        raise KeyboardInterrupt(number)

    reader, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    before = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_watch_signals, args=(reader, numbers), daemon=True).start()
    for number in numbers:
        signal.signal(number, first)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, usual[number])
        signal.set_wakeup_fd(before)
        wakeup.close()


def _watch_signals(reader: socket.socket, numbers: Collection[int]) -> None:
    """End the process at the second signal of `numbers`, or `END_SECONDS` after the first one.

    Python writes the number of each signal to `reader`, and the command's end closes it.
    """
    with reader, contextlib.suppress(TimeoutError):
        first_number = 0
        while byte := reader.recv(1):  # empty when the command has ended
            if byte[0] in numbers:
                if first_number:
                    end_at_once(first_number, "\nInterrupted twice: ended at once.")
                first_number = byte[0]
                reader.settimeout(END_SECONDS)
        return
    end_at_once(first_number, f"\nInterrupted: ended after {END_SECONDS} seconds.")


def end_at_once(number: int, message: str) -> NoReturn:
    """Kill the children of multiprocessing, print the message, and exit without Python's cleanup.

    The message goes to stderr. The exit code is 128 plus `number`, the signal's number. Python's
    normal exit would wait for threads that never end, and abort with threads of C++ libraries.
    """
    import multiprocessing

    try:
        for process in multiprocessing.active_children():
            process.kill()
        os.write(2, f"{message}\n".encode())
    finally:
        os._exit(128 + number)


@contextlib.contextmanager
def interrupt_hint(restart: bool) -> Iterator[None]:
    """If `restart`, add a note to a KeyboardInterrupt in the block: leave out --restart."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if restart:
            interrupt.add_note("To continue, leave out --restart.")
        raise


def error_text(error: BaseException) -> str:
    """Return an error's message and its notes, a line each; without a message, its type's name."""
    return "\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", [])])


def quiet_dask() -> None:
    """Hide Dask's log messages below the level critical, or below info with --debug.

    Call it before distributed is imported, which reads the configuration set here.
    """
    import dask

    # The command reports failed tasks, and cancelled tasks do not matter. Tornado logs an error if
    # distributed cannot cancel a call that was interrupted as it began.
    level = "info" if click.get_current_context().obj["debug"] else "critical"
    os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", level)
    # After a second Ctrl-C, Python would warn about its cleanup.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
    levels = dict.fromkeys(["distributed", "tornado.application"], level)
    dask.config.set({"logging": dask.config.get("logging", {}) | levels})


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text like ``click.echo``, with control characters escaped for the terminal."""
    click.echo(visible(text), file=sys.stderr if err else sys.stdout, nl=nl)


def echo_rows(table: pa.Table) -> None:
    """Print the rows of an Arrow table as JSON lines."""
    from gpuclassify.jobs.ledger.encoding import Encoding

    lines = Encoding("jsonl", None).encode(table).decode()
    click.echo(visible_json(lines), nl=False)


def open_console(stderr: bool = False) -> Console:
    """Return a rich console on stdout, or on stderr, for output that people read.

    It escapes control characters in strings, but not in a ``rich.text.Text``.
    """
    from rich.console import Console

    class Visible(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(visible(text), **options)

    return Visible(stderr=stderr)


def start_progress(what: str) -> JobProgress:
    """Return a context manager that shows the progress of a job as a status line on stderr."""
    from gpuclassify.jobs.report.progress import JobProgress

    progress = JobProgress("", open_console(stderr=True))
    progress.waiting(what)
    return progress


def print_summary(summary: Any, console: Console, numbers: Sequence[str] = ()) -> None:
    """Print the `JobSummary` of a job: its results, its warnings, and the paths of its output.

    `numbers` are lines with the results; without them, labels, drops and totals are printed.
    """
    lines = [*(numbers or _job_lines(summary, console)), *summary.warnings]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    print_paths(summary, console)


def _job_lines(summary: JobSummary, console: Console) -> list[str]:
    """Print a table per label column; return lines on drops, totals and speed, and advice."""
    from gpuclassify.jobs.report.summary import column_labels
    from gpuclassify.workers.run_context import advice

    columns = column_labels(summary.columns, summary.labelled, summary.stages)
    for name, column in columns.items():
        if column.rows:
            _print_labels(name, column, console)
    totals = summary.totals
    tokens = totals.get("tokens", 0)
    tokens_run = tokens - totals.get("prefix_tokens", 0)
    padded = totals.get("padded_tokens", 0)
    padding = f"padding {padded / tokens_run - 1:.1%}, " if tokens_run else ""
    lines = [
        *summary.drops,
        f"{summary.rows_read:,} rows read, {summary.rows_written:,} rows written, {padding}"
        f"{int(totals.get('truncated_texts', 0)):,} texts truncated",
    ]
    if summary.resumed_parts:
        lines.append(
            f"{summary.resumed_parts:,} of {summary.parts:,} parts were done already, "
            f"with {summary.resumed_rows:,} rows, and are unchanged: {summary.checked}"
        )
    if summary.parts > summary.resumed_parts:
        lines.append(
            f"This run: {summary.run_rows:,} rows in {summary.elapsed_seconds:.1f} s of working "
            f"time, {summary.rows_per_second:,.1f} rows/s"
            + (f", {summary.tokens_per_second:,.0f} tokens/s" if tokens else "")
        )
    return [*lines, *advice(totals)]


def print_paths(summary: Any, console: Console) -> None:
    """Print the paths of a job's report and quarantine, and the URL of its upload, if any."""
    lines = [f"Report: {summary.output}/_report/report.html"]
    if summary.left_out:
        left_out = counted_kinds(summary.left_out)
        lines.insert(0, f"Left out: {left_out}; see {summary.output}/_quarantine")
    if summary.commit_url:
        lines.append(f"Uploaded: {summary.commit_url}")
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _print_labels(name: str, column: ColumnLabels, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    more = len(column.rows) - MOST_LABELS
    has_drops, has_spans = column.has_drops, bool(column.occurrences)
    titles = ["spans"] * has_spans + ["rows labelled", "share"] + ["rows written"] * has_drops
    table = Table(escape(name), *titles)
    notes = [f"shares are of {column.labelled:,} rows labelled"]
    notes += [f"{more:,} more labels are in the report"] * (more > 0)
    table.caption = "; ".join(notes)
    for label, labelled, written in column.rows[:MOST_LABELS]:
        spans = [f"{column.occurrences.get(label, 0):,}"] * has_spans
        numbers = [f"{labelled:,}", column.share(labelled), *[f"{written:,}"] * has_drops]
        table.add_row(escape(label), *spans, *numbers)
    console.print(table)
