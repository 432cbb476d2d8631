"""Progress of jobs: a live line on a terminal, a widget in a notebook, lines in a log."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from gpuclassify.jobs.report.summary import JobSummary
from gpuclassify.pages import counted_kinds, readable_time, short_number

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)

MOST_GPUS_SHOWN = 8
SHOW_EVERY_SECONDS = 1.0
# Number and share of the parts after which speeds are shown. Earlier speeds would mislead, because
# the longest texts of a part come first.
ENOUGH_PARTS, ENOUGH_SHARE = 3, 0.2


class JobProgress:
    """Display of a job's share done, rows and tokens per second, time left and busy GPUs.

    It is a context manager. Speeds and the time left are shown after three parts or a fifth of the
    work. A console that is a terminal or notebook gets a live line; any other gets a line of text
    every minute and at the end. Each step of a job leaves a line. Default console: this process's
    terminal or notebook, or Python's log at level INFO if there is none. GPUs are shown for the
    workers of `client`.
    """

    def __init__(
        self,
        title: str,
        console: Console | None = None,
        client: Client | None = None,
        *,
        log_every_seconds: float = 60.0,
        look_every_seconds: float = 5.0,
    ) -> None:
        self._title = title
        self._write: Callable[[str], None] = logger.info
        is_asked, console = console is not None, console or Console(stderr=True)
        if is_asked or console.is_terminal or console.is_jupyter:
            self._write = functools.partial(
                console.print, highlight=False, markup=False, soft_wrap=True
            )
        self._client, self._at_first = client, "waiting for rows"
        self._log_every, self._look_every = log_every_seconds, look_every_seconds
        self._gpus, self._looked = "", 0.0  # use of each GPU, from its worker's last report
        self._line = self._printed = ""
        self._job: tuple[int, int, JobSummary] | None = None
        self._share = 0.0  # shown last; it never decreases
        self._is_over = threading.Event()
        self._bar: Progress | None = None
        if console.is_terminal or console.is_jupyter:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[status]}"),
                TimeElapsedColumn(),
                TextColumn("since the start"),
                console=console,
            )
            self._task = self._bar.add_task(title, total=None, status="")
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> JobProgress:
        if self._bar is not None:
            self._bar.start()
        self._ticker.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._ticker.join(timeout=1.0)
        if self._bar is not None:
            self._bar.stop()
        else:
            self._print()

    def waiting(self, what: str) -> None:
        """Show a message, such as "Loading the model", until the share of work done is known."""
        self._title = what
        if self._bar is None:
            self._write(what)
        else:
            self._bar.update(self._task, description=what, total=None, status="")

    def watch(self, title: str, client: Client | None, at_first: str = "waiting for rows") -> None:
        """Show the work with this title from now on, and the GPUs of this client's workers.

        `at_first` is shown until the first rows are done.
        """
        self._title, self._client, self._at_first = title, client, at_first

    def share(self, done: float, status: str = "") -> None:
        """Show the share of the work that is `done`, 0 to 1, with a text behind it."""
        self._line = f"{self._title}: {done:.0%} {status}"
        if self._bar is not None:
            self._bar.update(
                self._task, description=self._title, completed=done, total=1.0, status=status
            )

    def parts(self, done: int, total: int, summary: JobSummary) -> None:
        """Show the parts done; `gpuclassify.jobs.pipeline.Pipeline.run` calls it as its `report`.

        Until the next call, finished rows of unfinished parts are counted, too.
        """
        if self._job is None or summary is not self._job[2]:
            self._share = 0.0
        self._job = (done, total, summary)
        self._show_parts()

    def step(self, title: str, done: int, total: int, summary: JobSummary) -> None:
        """Show the parts done of one of a recipe's steps; the step before keeps its line."""
        if title != self._title and self._line != self._printed:
            self._print()
        self._title = title
        self.parts(done, total, summary)

    def _show_parts(self) -> None:
        if self._job is None:
            return
        done, total, summary = self._job
        begun, begun_rows = summary.running.totals()
        self._share = min(1.0, max(self._share, (done + begun) / max(1, total)))
        status = f"{done}/{total} parts"
        if summary.resumed_parts:
            status += f" ({summary.resumed_parts:,} were there already)"
        rows = summary.rows_read + begun_rows
        if rows or done < total:
            status += f", {rows:,} rows read"
        new = done - summary.resumed_parts
        gained = new + begun - summary.running.start[1]  # since the model is loaded
        is_enough = gained >= ENOUGH_SHARE * (total - summary.resumed_parts)
        if new + begun and (done == total or new >= ENOUGH_PARTS or is_enough):
            status += self._speed(gained, total - done - begun, summary, begun_rows)
        elif done < total and not new + begun:
            status += f", {self._at_first}"
        if summary.left_out:
            status += f", left out: {counted_kinds(summary.left_out)}"
        self.share(self._share, status)

    def _speed(self, gained: float, left: float, summary: JobSummary, begun_rows: int) -> str:
        """Return rows and tokens per second, time left and busy GPUs, for a status line."""
        seconds = summary.running.elapsed_seconds if begun_rows else summary.elapsed_seconds
        if left:
            seconds = max(0.0, seconds - summary.running.start[0])
        rows, text = summary.run_rows + begun_rows, ""
        if rows and seconds:
            text += f", {short_number(rows / seconds)} rows/s"
        if summary.tokens_per_second:
            text += f", {short_number(summary.tokens_per_second)} tokens/s"
        if self._client is not None and time.monotonic() - self._looked > self._look_every:
            self._looked = time.monotonic()
            workers = self._client.scheduler_info(n_workers=-1).get("workers", {}).values()
            self._gpus = format_gpus([w["metrics"].get("gpu_utilization") for w in workers])
        if not left:
            return f"{text}, {seconds:.1f} s of working time"
        return f"{text}, {readable_time(seconds / gained * left)} left{self._gpus}"

    def _tick(self) -> None:
        every = self._log_every if self._bar is None else SHOW_EVERY_SECONDS
        while not self._is_over.wait(every):
            self._show_parts()
            if self._bar is None:
                self._print()

    def _print(self) -> None:
        if self._line:
            self._write(self._line)
            self._printed = self._line


def format_gpus(shares: list[float | None]) -> str:
    """Format the use of GPUs, in percent, for a status line; return "" if none is known."""
    known = [share for share in shares if share is not None]
    if not known:
        return ""
    if len(known) > MOST_GPUS_SHOWN:
        mean = sum(known) / len(known)
        return f", {len(known)} GPUs {mean:.0f}% busy, one {min(known):.0f}%"
    return f", GPU {' '.join(f'{share:.0f}%' for share in known)} busy"
