"""A live line on a terminal, or a line of text every so often in a log."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from gpuclassify.jobs.run import JobSummary

LOG_EVERY_SECONDS = 30.0


class JobProgress:
    """Shows share done, rows per second and time left; a context manager.

    Parameters
    ----------
    title : str
        What is going on.
    console : rich.console.Console
        A terminal gets a live line; anything else gets a line of text every 30 seconds and at the
        end, which is what a log file wants.
    """

    def __init__(self, title: str, console: Console) -> None:
        self._title = title
        self._console = console
        self._last_line = time.monotonic()
        self._bar: Any = None
        if console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[status]}"),
                TimeElapsedColumn(),
                console=console,
            )
            self._task = self._bar.add_task(title, total=None, status="")

    def __enter__(self) -> JobProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def share(self, done: float, status: str = "") -> None:
        """Show that the share `done`, 0 to 1, is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=1.0, status=status)
        elif done >= 1 or time.monotonic() - self._last_line >= LOG_EVERY_SECONDS:
            self._last_line = time.monotonic()
            self._console.print(f"{self._title}: {done:.0%} {status}", highlight=False)

    def parts(self, done: int, total: int, summary: JobSummary) -> None:
        """Show a job's progress; fits `gpuclassify.jobs.run.run_job` as its report."""
        status = f"{done}/{total} parts"
        if done:
            left = summary.elapsed_seconds / done * (total - done)
            status += (
                f", {summary.rows_in:,} rows, {summary.rows_per_second:,.1f} rows/s, "
                f"{readable_time(left)} left"
            )
        self.share(done / total, status)


def readable_time(seconds: float) -> str:
    """Hours, minutes and seconds, such as ``1:02:03`` or ``0:07``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
