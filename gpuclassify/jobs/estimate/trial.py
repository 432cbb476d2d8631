"""A trial of a job: the stages run over slices of a sample, here and in this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuclassify.model_mapper import ModelMapper

FIRST_ROWS = 4  # of the warm-up, and of the slice that says how large the others may be
SLICES = 4


@dataclass(frozen=True)
class Trial:
    """What running a part of the sample took.

    Attributes
    ----------
    load_seconds : float
        Fetching and loading the models, and a first run of a few rows.
    rows : int
        That were timed.
    seconds : tuple of float
        Of each slice.
    work : tuple of float
        Of each slice: tokens, or rows where nothing counts tokens.
    """

    load_seconds: float
    rows: int
    seconds: tuple[float, ...]
    work: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Work a second."""
        return sum(self.work) / sum(self.seconds)

    @property
    def rates(self) -> tuple[float, float] | None:
        """The slowest slice's rate and the fastest one's; None of a single slice."""
        if len(self.seconds) < 2:
            return None
        found = [work / seconds for work, seconds in zip(self.work, self.seconds, strict=True)]
        return min(found), max(found)


def run_trial(
    mappers: Iterable[Any],
    frame: Any,
    work: np.ndarray,
    run: Callable[[Any], Any],
    seconds: float,
    seed: int,
) -> Trial:
    """Time the stages over slices of random rows; models that it loads are dropped at its end.

    Parameters
    ----------
    mappers : iterable of PartitionMap
    frame : pandas.DataFrame or cudf.DataFrame
        The sample.
    work : ndarray of float, shape (rows,)
    run : callable
        Maps a slice of the frame.
    seconds : float
        About how long to time; what has begun is finished.
    seed : int
    """
    order = np.random.default_rng(seed).permutation(len(frame))
    first = order[:FIRST_ROWS]

    def time_rows(rows: np.ndarray) -> float:
        began = time.perf_counter()
        run(frame.iloc[rows])
        return time.perf_counter() - began

    with _without_new_models():
        began = time.perf_counter()
        for mapper in mappers:
            if isinstance(mapper, ModelMapper):
                mapper.setup()
        time_rows(first)
        load_seconds = time.perf_counter() - began
        spent = time_rows(first)
        timed = [(first, spent)]
        # Slices of as many rows as fill the time, as far as there are so many.
        most = max(FIRST_ROWS, int(FIRST_ROWS * seconds / SLICES / spent))
        count = max(1, min(most, len(order) // SLICES))
        for start in range(0, min(len(order), SLICES * count), count):
            if spent < seconds:
                rows = order[start : start + count]
                timed.append((rows, time_rows(rows)))
                spent += timed[-1][1]
    used = timed[1:] or timed
    return Trial(
        load_seconds=load_seconds,
        rows=sum(len(rows) for rows, _ in used),
        seconds=tuple(own for _, own in used),
        work=tuple(float(work[rows].sum()) for rows, _ in used),
    )


@contextlib.contextmanager
def _without_new_models() -> Iterator[None]:
    """Evict what the block loads: it may be the client's process, whose GPU a worker needs."""
    from gpuclassify.inference.residency import MODELS

    before = set(MODELS.keys())
    try:
        yield
    finally:
        MODELS.evict(lambda key: key not in before)
