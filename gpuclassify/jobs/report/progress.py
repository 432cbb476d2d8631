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

from gpuclassify.jobs.report.summary import JobSummary, column_labels
from gpuclassify.pages import counted_kinds, readable_time, short_number, visible

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger(__name__)

MOST_GPUS_SHOWN = 8
SHOW_EVERY_SECONDS = 1.0
# Number and share of the parts after which the time left is shown. An earlier estimate would
# mislead, because the longest texts of a part come first. Speeds are shown after the first part.
ENOUGH_PARTS, ENOUGH_SHARE = 3, 0.2
MOST_LABELS_SHOWN, MOST_CHARS_SHOWN = 3, 300


class JobProgress:
    """Display of a job's progress: fraction done, rows and tokens per second, time left, busy GPUs.

    A context manager that shows progress during its block.

    Parameters
    ----------
    title : str
        Text before the progress.
    console : rich.console.Console, optional
        A terminal or notebook gets a live line. Another console gets a line of text every
        `log_every_seconds` and at the end. Default: this process's terminal or notebook, or
        Python's log at level INFO if there is none.
    client : distributed.Client, optional
        Client of the workers whose GPUs are shown.
    log_every_seconds : float
        Seconds between lines of text.
    look_every_seconds : float
        Minimum seconds between requests for the use of GPUs.
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
        self._gpus, self._looked = "", 0.0  # text on the use of GPUs, and the time of the request
        self._line = self._printed = ""
        self._job: tuple[int, int, JobSummary] | None = None
        self._share = 0.0  # share of the work that is shown; never decreases during a job
        # Whether the line of the first part, and that of the first problem, were printed.
        self._has_rows = self._has_problem = False
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
        """Replace title and progress by a text, such as "Loading the model"."""
        self._title = what
        if self._bar is None:
            self._write(what)
        else:
            self._bar.update(self._task, description=what, total=None, status="")

    def watch(self, title: str, client: Client | None, at_first: str = "waiting for rows") -> None:
        """Set the title, and the client whose workers' GPUs are shown, from the next update on.

        `at_first` is the text shown until the first rows are done.
        """
        self._title, self._client, self._at_first = title, client, at_first

    def share(self, done: float, status: str = "") -> None:
        """Show the fraction of the work that is `done`, 0 to 1, followed by the text `status`."""
        self._line = f"{self._title}: {done:.0%} {status}"
        if self._bar is not None:
            self._bar.update(
                self._task, description=self._title, completed=done, total=1.0, status=status
            )

    def parts(self, done: int, total: int, summary: JobSummary) -> None:
        """Show that `done` of the input's `total` parts are done, and the counts in `summary`.

        Pass this method to `gpuclassify.jobs.pipeline.Pipeline.run` as `report`.
        """
        if self._job is None or summary is not self._job[2]:
            self._share = 0.0
        self._job = (done, total, summary)
        self._show_parts()
        if summary.first_problem and not self._has_problem:
            self._has_problem = True
            self._write(f"Left out: {visible(summary.first_problem[:MOST_CHARS_SHOWN], '')}")
        if done < total and summary.run_rows and not self._has_rows:
            self._has_rows = True
            self._print()

    def step(self, title: str, done: int, total: int, summary: JobSummary) -> None:
        """Show progress of a step, such as "embeddings": `done` of `total` parts are done."""
        if title != self._title and self._line != self._printed:
            self._print()
        self._title = title
        self.parts(done, total, summary)

    def _show_parts(self) -> None:
        if self._job is None:
            return
        done, total, summary = self._job
        begun, begun_rows = summary.running.totals()
        work = done + summary.running.surplus + begun  # unit: parts of average size
        self._share = min(1.0, max(self._share, work / max(1, total)))
        status = f"{done}/{total} parts"
        if summary.resumed_parts:
            status += f" ({summary.resumed_parts:,} were there already)"
        rows = summary.rows_read + begun_rows
        if rows or done < total:
            status += f", {rows:,} rows read"
        new = done - summary.resumed_parts
        gained = work - summary.resumed_parts - summary.running.start.work
        is_enough = gained >= ENOUGH_SHARE * (total - summary.resumed_parts)
        if new or (begun and is_enough):
            status += self._speed(summary, begun_rows, is_over=done == total)
            if done < total and gained > 0 and (new >= ENOUGH_PARTS or is_enough):
                status += self._time_left((total - work) / gained, summary, begun_rows)
        elif done < total and not begun:
            status += f", {self._at_first}"
        if summary.left_out:
            status += f", left out: {counted_kinds(summary.left_out)}"
        if labels := _label_shares(summary):
            status += f", {labels}"
        if summary.running.joining:
            status += f", {summary.running.joining}"
        self.share(self._share, status)

    def _speed(self, summary: JobSummary, begun_rows: int, is_over: bool) -> str:
        """Return rows and tokens per second of this run as text, such as ", 5.0 rows/s"."""
        rows, text = summary.run_rows + begun_rows, ""
        seconds = summary.running.elapsed_seconds if begun_rows else summary.elapsed_seconds
        start = summary.running.start
        # Until the end, speeds are those after the model was loaded.
        if not is_over and rows > start.rows and seconds > start.seconds:
            rows, seconds = rows - start.rows, seconds - start.seconds
        if rows and seconds:
            text += f", {short_number(rows / seconds)} rows/s"
            tokens = summary.totals.get("tokens", 0) - summary.resumed_tokens
            if tokens and summary.run_rows:
                speed = tokens / summary.run_rows * rows / seconds
                text += f", {short_number(speed)} tokens/s"
        return f"{text}, {seconds:.1f} s of working time" if is_over else text

    def _time_left(self, left: float, summary: JobSummary, begun_rows: int) -> str:
        """Return the time left and use of a cluster's GPUs, as in ", 1:30 left, GPU 95% busy".

        `left` is the ratio of work left to work done in this run.
        """
        if self._client is not None and time.monotonic() - self._looked > self._look_every:
            self._looked = time.monotonic()
            workers = self._client.scheduler_info(n_workers=-1).get("workers", {}).values()
            self._gpus = format_gpus([w["metrics"].get("gpu_utilization") for w in workers])
        seconds = summary.running.elapsed_seconds if begun_rows else summary.elapsed_seconds
        seconds = max(0.0, seconds - summary.running.start.seconds)
        return f", {readable_time(seconds * left)} left{self._gpus}"

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


def _label_shares(summary: JobSummary) -> str:
    """Return the most frequent labels with percentages of rows, for a status line, or ""."""
    columns = column_labels(summary.columns, summary.labelled, summary.stages)
    labels = next((labels for labels in columns.values() if labels.labelled), None)
    if labels is None:
        return ""
    shown = [f"{name} {labels.share(count)}" for name, count, _ in labels.rows[:MOST_LABELS_SHOWN]]
    more = len(labels.rows) - MOST_LABELS_SHOWN
    return visible(", ".join([*shown, *[f"{more:,} more labels"] * (more > 0)]), "")


def format_gpus(shares: list[float | None]) -> str:
    """Return a text such as ", GPU 95% 90% busy" for a status line, or "" if no use is known.

    `shares` has the use of each GPU in percent, 0 to 100, and None if unknown.
    """
    known = [share for share in shares if share is not None]
    if not known:
        return ""
    if len(known) > MOST_GPUS_SHOWN:
        mean = sum(known) / len(known)
        return f", {len(known)} GPUs {mean:.0f}% busy, one {min(known):.0f}%"
    return f", GPU {' '.join(f'{share:.0f}%' for share in known)} busy"
