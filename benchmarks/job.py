"""Where a whole job spends its time: files read, classified and written."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dask
import dask.dataframe as dd
import pandas as pd
from dask.callbacks import Callback

from benchmarks.recipes import classifier_of
from gpuclassify.workers.run_context import add_up, collected_stats

PLAN, READ, CLASSIFY, WRITE = "plan", "read", "classify", "write"


class Timeline(Callback):
    """Seconds of each phase of tasks that run one after the other.

    A phase lasts until the next begins: reading with the task that reads Parquet, the others where
    a partition passes `mark`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = dict.fromkeys((PLAN, READ, CLASSIFY, WRITE), 0.0)
        self._phase, self._since = PLAN, time.perf_counter()

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        now = time.perf_counter()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def mark(self, partition: pd.DataFrame, phase: str) -> pd.DataFrame:
        """The partition as it is; a phase begins behind it."""
        self.enter(phase)
        return partition

    def _pretask(self, key: Any, *_: Any) -> None:
        if "read_parquet" in str(key):
            self.enter(READ)


def measure_job(
    texts: Sequence[str], partitions: int, directory: str, device: str, **options: Any
) -> dict[str, Any]:
    """Times and counts of a job: `dask.dataframe.read_parquet`, classify, `to_parquet`.

    Parameters
    ----------
    texts : sequence of str
        What the files hold.
    partitions : int
        How many files.
    directory, device : str
    options
        Of the classifier.

    Returns
    -------
    dict
        ``wall_seconds``; ``seconds`` and ``shares`` of it that were spent planning, reading,
        waiting for tokens, in the model, writing, and in the rest; ``tokenize_seconds``, which
        pass while the model works; and counts of tokens and batches.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "texts"), Path(folder, "classified")
        dd.from_pandas(pd.DataFrame({"text": list(texts)}), partitions).to_parquet(source)
        classifier = classifier_of(directory, device, **options)
        timeline = Timeline()
        with collected_stats() as runs, timeline, dask.config.set(scheduler="synchronous"):
            frame = dd.read_parquet(source)
            frame = frame.map_partitions(timeline.mark, CLASSIFY, meta=frame._meta)
            frame = classifier(frame)
            frame = frame.map_partitions(timeline.mark, WRITE, meta=frame._meta)
            frame.to_parquet(target)
            timeline.enter(PLAN)
    return _findings(timeline.seconds, [stats.as_dict() for stats in runs])


def _findings(phases: dict[str, float], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    totals: dict[str, Any] = {}
    for run in runs:
        add_up(totals, run)
    wall = sum(phases.values())
    seconds = {
        "plan": phases[PLAN],
        "read": phases[READ],
        "wait_for_tokens": totals["wait_tokens_seconds"],
        "model": totals["model_seconds"],
        "write": phases[WRITE],
    }
    seconds["rest"] = wall - sum(seconds.values())
    return {
        "wall_seconds": wall,
        "seconds": seconds,
        "shares": {name: value / wall for name, value in seconds.items()},
        "tokenize_seconds": totals["tokenize_seconds"],
        "wait_device_seconds": totals["wait_device_seconds"],
        "tokens": totals["tokens"],
        "padded_tokens": totals["padded_tokens"],
        "padding": totals["padded_tokens"] / totals["tokens"],
        "batches": totals["batches"],
        "out_of_memory": totals["out_of_memory"],
    }
