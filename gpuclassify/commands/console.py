"""What commands share: exit codes, errors without tracebacks, and what they print."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from rich.console import Console

    from gpuclassify.jobs.report.progress import JobProgress
    from gpuclassify.jobs.report.summary import JobSummary

# In a message: calls that it shows, which stay as they are, or an argument outside of them, with
# True or False, a word, a single pair, the beginning of another value that is no collection, or
# nothing.
ARGUMENT = re.compile(
    r"\w\((?:[^()]|\([^()]*\))*\)"
    r"|(?<![\w.])([a-z]\w*)="
    r"(?:(True|False)\b|\"([\w-]+)\"|\{\"(\w+)\": \"(\w+)\"\}|(?=[^\s.:;,)\[{])()|(?![\[{]))"
)
OTHER_NAMES = {"part_bytes": "part_size", "address": "scheduler"}  # of options and arguments
FAILED, LEFT_OUT = 1, 3
END_SECONDS = 15  # after which nothing that hangs holds up the end of an interrupted command
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
    """Errors of the library's checks leave with exit code 2, as click's own do.

    Where the call is right, and what is in the files is not, the work has failed.
    """
    try:
        yield
    except WRONG_CALL as error:
        from gpuclassify.jobs.files import BrokenInputError

        if click.get_current_context().obj["debug"] or isinstance(error, BrokenInputError):
            raise
        context, message = click.get_current_context(), error_text(error)
        if not context.params.get("config"):  # a file, which has settings by names of arguments
            message = with_options(message, context.command)
        raise click.UsageError(message) from error


def with_options(message: str, command: click.Command) -> str:
    """The message with the command's options in place of the library's arguments."""
    options = {own.name: own for own in command.params if isinstance(own, click.Option)}

    def option(found: re.Match[str]) -> str:
        name, flag, word, key, value, begun = found.groups()
        own = options.get(OTHER_NAMES.get(name, name))
        if own is None or own.is_flag != bool(flag):
            return found[0]
        names = own.secondary_opts if flag == "False" else own.opts
        if not names:
            return found[0]
        given = f"{key}={value}" if key else word
        return max(names, key=len) + (f" {given}" if given else " " * (begun is not None))

    return ARGUMENT.sub(option, message)


@contextlib.contextmanager
def ends_when_told() -> Iterator[None]:
    """The first SIGINT or SIGTERM raises KeyboardInterrupt; a second one ends the process at once.

    So does `END_SECONDS` after the first one, whatever holds the end up: a thread hears signals as
    they come, where Python's handlers wait for the main thread to come back from a library.
    """
    usual: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL}
    usual[signal.SIGINT] = signal.default_int_handler
    numbers = [number for number, handler in usual.items() if signal.getsignal(number) is handler]
    if threading.current_thread() is not threading.main_thread() or not numbers:
        yield
        return

    def first(number: int, frame: Any) -> None:
        for each in numbers:
            signal.signal(each, lambda *_: None)  # the thread ends the process
        raise KeyboardInterrupt(number)

    hearing, heard = socket.socketpair()
    heard.setblocking(False)
    before = signal.set_wakeup_fd(heard.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_end_when_told, args=(hearing, numbers), daemon=True).start()
    for each in numbers:
        signal.signal(each, first)
    try:
        yield
    finally:
        for each in numbers:
            signal.signal(each, usual[each])
        signal.set_wakeup_fd(before)
        heard.close()


def _end_when_told(hearing: socket.socket, numbers: Collection[int]) -> None:
    """End the process at the second of these signals, or a while after the first one."""
    with hearing, contextlib.suppress(TimeoutError):
        told = 0
        while byte := hearing.recv(1):  # empty when the command has ended
            if byte[0] in numbers:
                if told:
                    end_at_once(told, "\nInterrupted twice: ended at once.")
                told = byte[0]
                hearing.settimeout(END_SECONDS)
        return
    end_at_once(told, f"\nInterrupted: ended after {END_SECONDS} seconds.")


def end_at_once(number: int, message: str) -> NoReturn:
    """End the processes that this one has started, and this one, as a signal's number says.

    Python's own end waits for threads that nobody ends, and aborts with those of C++ libraries.
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
    """Say after an interrupt what not to repeat."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if restart:
            interrupt.add_note("Leave --restart out, or it starts over again.")
        raise


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
    """Short tables of labels, what filters dropped, rows of all runs, and the speed of this one."""
    from gpuclassify.workers.run_context import waiting_for_host

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
        f"{summary.rows_in:,} rows read, {summary.rows_out:,} kept, padding {padding:.1%}, "
        f"{int(totals.get('truncated_texts', 0)):,} texts truncated",
    ]
    if summary.resumed_parts:
        lines.append(
            f"{summary.resumed_parts:,} of {summary.parts:,} parts were there already, "
            f"with {summary.resumed_rows:,} rows, and are as they were written: {summary.checked}"
        )
    if summary.parts > summary.resumed_parts:
        lines.append(
            f"This run: {summary.run_rows:,} rows in {summary.elapsed_seconds:.1f} s of working "
            f"time, {summary.rows_per_second:,.1f} rows/s, "
            f"{summary.tokens_per_second:,.0f} tokens/s"
        )
    if held_up := waiting_for_host(totals):
        lines.append(held_up)
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

    from gpuclassify.jobs.report.summary import most_frequent

    table = Table(escape(name), "rows", "share")
    for label, count in most_frequent(counts).items():
        table.add_row(escape(label), f"{count:,}", f"{count / max(1, rows):.1%}")
    console.print(table)
