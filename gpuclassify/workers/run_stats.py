"""What a run did, in counts and seconds: collected by a task, and events of a Dask worker."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gpuclassify.workers.current_worker import current_worker

EVENT_TOPIC = "gpuclassify"


@dataclass
class RunStats:
    """What a run did, in counts and seconds.

    Attributes
    ----------
    rows, null_rows, folded_rows : int
        Rows given, rows without text, and rows whose text another row of the partition has too.
    truncated_texts, shared_texts, windows : int
        Distinct texts that were cut to the model's length, those whose tokens another mapper had
        made, and their windows: as many as distinct texts, unless long ones have more.
    gpu_tokenized_texts, host_fallback_texts : int
        With the GPU's tokenizer, distinct texts that it did, and those that it left to the host.
    folded_windows : int
        Windows that were not run, because another one of the partition has the same tokens.
    tokens, padded_tokens : int
        Real tokens, and tokens that the model's layers ran, padding included.
    batches, out_of_memory : int
    rescued_texts : int
        Texts whose outputs were not finite at first and were recomputed alone in float32.
    prefix_tokens : int
        Tokens of prompts that were not run, because a prefix run once stands for them.
    decode_steps : int
        Forward passes that continued answers after a batch's first one.
    tokenize_seconds : float
        On a thread of its own, ahead of the model.
    wait_tokens_seconds, wait_device_seconds : float
        In which this run had nothing to do, because no tokens were ready, or because another thread
        of the process was using the device. On a GPU, which may still be at work on what it was
        given before, the first is an upper bound of how long the device was idle.
    model_seconds : float
    device_sampled_seconds, device_busy_seconds : float, optional
        On a GPU, for how long its use was looked at, and for how long of that it was at work. None
        where the driver does not tell, as for a MIG slice: not knowing is not 0.
    peak_device_bytes, peak_torch_bytes : int, optional
        Most memory of the GPU that was taken, by others too, and most of it that torch held.
    peak_planned_bytes : int, optional
        Most memory that torch should hold by the plan for batches, model included.
    """

    rows: int = 0
    null_rows: int = 0
    folded_rows: int = 0
    truncated_texts: int = 0
    shared_texts: int = 0
    gpu_tokenized_texts: int = 0
    host_fallback_texts: int = 0
    windows: int = 0
    folded_windows: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    batches: int = 0
    out_of_memory: int = 0
    rescued_texts: int = 0
    prefix_tokens: int = 0
    decode_steps: int = 0
    tokenize_seconds: float = 0.0
    wait_tokens_seconds: float = 0.0
    wait_device_seconds: float = 0.0
    model_seconds: float = 0.0
    device_sampled_seconds: float | None = None
    device_busy_seconds: float | None = None
    peak_device_bytes: int | None = None
    peak_torch_bytes: int | None = None
    peak_planned_bytes: int | None = None

    def raise_peak(self, name: str, value: int | None) -> None:
        """Take `value` for the peak `name` if it is known, and above what is known."""
        if value is not None:
            setattr(self, name, max(value, getattr(self, name) or 0))

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers by name, without those that are not known."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def add_up(sums: dict[str, Any], numbers: Mapping[str, Any]) -> None:
    """Add the numbers of one run to the sums of others; of peaks the largest stays.

    Parameters
    ----------
    sums : dict
        Changed in place.
    numbers : mapping
        As `RunStats.as_dict` gives them.
    """
    for name, number in numbers.items():
        known = sums.get(name, 0)
        sums[name] = max(known, number) if name.startswith("peak_") else known + number


_collector: contextvars.ContextVar[list[RunStats] | None] = contextvars.ContextVar(
    "collector", default=None
)


@contextlib.contextmanager
def collected_stats() -> Iterator[list[RunStats]]:
    """The stats of what this thread maps in the block, for a task that reports them itself."""
    runs: list[RunStats] = []
    reset = _collector.set(runs)
    try:
        yield runs
    finally:
        _collector.reset(reset)


def publish(stats: RunStats) -> None:
    """Append the stats to those that `collected_stats` collects, and log them as a Dask event."""
    runs = _collector.get()
    if runs is not None:
        runs.append(stats)
    worker = current_worker()
    if worker is not None:
        worker.log_event(EVENT_TOPIC, stats.as_dict())
