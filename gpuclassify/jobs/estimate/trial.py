"""A trial of a job: the stages run over slices of a sample, here and in this process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from gpuclassify.jobs.estimate.result import TimePlan
from gpuclassify.jobs.estimate.sample import Estimate, Sample
from gpuclassify.jobs.quarantine import isolate_bad_rows
from gpuclassify.mapping.chain import Chain
from gpuclassify.mapping.text_mapper import TextMapper

FIRST_ROWS = 4  # of the warm-up, and of the slice that says how large the others may be
SLICES = 4


def time_stages(
    sample: Sample,
    tokens: np.ndarray,
    chain: Chain,
    meta_dtypes: Any,
    seconds: float,
    seed: int,
    on_error: str,
) -> tuple[TimePlan, int]:
    """How long the stages will take, and how many rows of the trial could not be scored.

    Parameters
    ----------
    sample : Sample
    tokens : ndarray of float64, shape (rows,)
        Of each row of the sample, by all mappers.
    chain : Chain
    meta_dtypes : object
        What the chain must know of the input's meta.
    seconds : float
        About how long to run.
    seed : int
    on_error : {"raise", "quarantine"}
    """
    import torch

    failed: set[Any] = set()

    def run(rows: Any) -> None:
        if on_error == "raise":
            chain.map_frame(rows, meta_dtypes)
            return
        from gpuclassify.jobs.task import row_errors

        parts = isolate_bad_rows(
            lambda start, stop: chain.map_frame(rows.iloc[start:stop], meta_dtypes),
            0,
            len(rows),
            row_errors(),
        )
        failed.update(rows.index[row] for row, found in parts if isinstance(found, Exception))

    load_seconds, slices = time_slices(chain.mappers, sample.frame, run, seconds, seed)
    work = tokens if tokens.any() else np.ones(len(tokens))
    spent, done = sum(own for _, own in slices), sum(work[rows].sum() for rows, _ in slices)
    rates = [work[rows].sum() / own for rows, own in slices]
    total, rate, low, high = sample.total(work), float(done / spent), None, None
    if total.low is not None and total.high is not None and len(rates) > 1 and min(rates):
        low, high = float(total.low / max(rates)), float(total.high / min(rates))
    plan = TimePlan(
        seconds=Estimate(total.value / rate if rate else 0.0, low, high),
        load_seconds=load_seconds,
        rows_timed=sum(len(rows) for rows, _ in slices),
        units_per_second=rate,
        unit="tokens" if tokens.any() else "rows",
        threads=torch.get_num_threads(),
    )
    return plan, len(failed)


def time_slices(
    mappers: Iterable[Any], frame: Any, run: Callable[[Any], Any], seconds: float, seed: int
) -> tuple[float, list[tuple[np.ndarray, float]]]:
    """Time `run` over slices of random rows; models that it loads are dropped at its end.

    Returns
    -------
    (float, list of (ndarray of int64, float))
        Seconds for loading the mappers' models and a first run, and for each slice its rows and
        its seconds. What has begun when `seconds` are over is finished.
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
            if isinstance(mapper, TextMapper):
                mapper.setup()
        time_rows(first)
        load_seconds = time.perf_counter() - began
        spent = time_rows(first)
        slices = [(first, spent)]
        # Slices of as many rows as fill the time, as far as there are so many.
        most = max(FIRST_ROWS, int(FIRST_ROWS * seconds / SLICES / spent))
        count = max(1, min(most, len(order) // SLICES))
        for start in range(0, min(len(order), SLICES * count), count):
            if spent < seconds:
                rows = order[start : start + count]
                slices.append((rows, time_rows(rows)))
                spent += slices[-1][1]
    return load_seconds, slices[1:] or slices


@contextlib.contextmanager
def _without_new_models() -> Iterator[None]:
    """Evict what the block loads: it may be the client's process, whose GPU a worker needs."""
    from gpuclassify.inference.residency import MODELS

    before = set(MODELS.keys())
    try:
        yield
    finally:
        MODELS.evict(lambda key: key not in before)
