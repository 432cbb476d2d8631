"""FastTextRunner: texts to labels and probabilities, by a process that a node shares."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from gpuclassify import hub
from gpuclassify.fasttext.host import HostClient, check_library
from gpuclassify.fasttext.model_file import FastTextModel
from gpuclassify.frames import Texts
from gpuclassify.mapping.columns import ReadShare
from gpuclassify.mapping.runners import NonFiniteOutputError, Outputs, Runner, TokenLengths
from gpuclassify.workers.run_context import RunStats, advance

# Texts, and characters of them, that are sent at once: the copies of more would take memory.
BLOCK_TEXTS, BLOCK_CHARS = 4_096, 4_000_000


class FastTextRunner(Runner):
    """Asks the library, in a process that all processes of a node share.

    Outputs are records, one for each text, of two fields: ``label``, int32 (k,), ids of the most
    probable labels, -1 where the library gives fewer; and ``probability``, float32 (k,), as the
    library has them, which adds 1e-5 to each.
    """

    model: FastTextModel

    def run(self, texts: Texts, stats: RunStats, name_text: Callable[[int], str]) -> Outputs:
        """The most probable labels of distinct texts; see `Runner.run`."""
        labels, options = self.model.checkpoint.labels, self.options
        k = len(labels) if options.needs_score else options.top_k or 1
        kinds = [("label", np.int32, (k,)), ("probability", np.float32, (k,))]
        values = np.empty(len(texts), dtype=kinds)
        lines = [text.replace("\n", " ") for text in texts.to_list()]
        started = time.perf_counter()
        blocks = [slice(*bounds) for bounds in _blocks(list(map(len, lines)))]
        with (
            self.lease(*self.device_and_dtype()) as host,
            ThreadPoolExecutor(compute_threads()) as pool,
        ):
            answers = pool.map(lambda block: host.predict(lines[block], k), blocks)
            for block, found in zip(blocks, answers, strict=True):
                values["label"][block], values["probability"][block] = found
                advance(block.stop - block.start)
        stats.batches += len(blocks)
        stats.model_seconds += time.perf_counter() - started
        stats.windows += len(texts)
        failed = (values["label"] >= 0) & ~np.isfinite(values["probability"])
        for place in np.flatnonzero(failed.any(axis=1)):
            raise NonFiniteOutputError(
                f"{options.model} gives {values['probability'][place].tolist()} for "
                f"{name_text(int(place))}: take another model, or remove the row"
            )
        read = ReadShare(np.ones(len(texts), np.int64), np.ones(len(texts), np.float32))
        return Outputs(values, np.arange(len(texts)), read)

    def token_lengths(self, texts: list[str]) -> TokenLengths:
        """Words between white space, all of which the model reads; see `Runner.token_lengths`."""
        words = np.array([len(text.encode().split()) for text in texts], dtype=np.int64)
        return TokenLengths(words, words, np.ones(len(texts), dtype=np.int64), None)

    @contextlib.contextmanager
    def lease(self, device: Any, dtype: Any) -> Iterator[HostClient]:
        """The process that holds the model; see `Runner.lease`."""
        from gpuclassify.inference.residency import MODELS

        def load() -> HostClient:
            path = hub.fetch_file(self.model.file, cache_dir=self.options.cache_dir)
            client = HostClient(path, self.model.checkpoint.identity.revision)
            client.warm_up()
            return client

        with MODELS.lease((self.resident_key, str(device), str(dtype)), load) as client:
            yield client

    def device_and_dtype(self) -> tuple[Any, Any]:
        """The CPU and float32, without torch."""
        return "cpu", np.dtype(np.float32)

    def batch_bytes(self) -> int:
        """A block of texts is small beside everything else."""
        return 0

    def check_weights(self) -> None:
        """Raise ModuleNotFoundError unless fastText is installed."""
        check_library()


def compute_threads() -> int:
    """Cores that one partition may take: those that torch would have, which need not be here."""
    if (torch := sys.modules.get("torch")) is not None:
        return torch.get_num_threads()
    from dask.system import cpu_count

    given, *_ = os.environ.get("OMP_NUM_THREADS", "").split(",")  # one number for each level
    return int(given or cpu_count())


def _blocks(char_counts: list[int]) -> Iterator[tuple[int, int]]:
    """Bounds of runs of texts within `BLOCK_TEXTS` and, but for a single text, `BLOCK_CHARS`."""
    ends = np.cumsum(char_counts)
    start = 0
    while start < len(ends):
        before = ends[start - 1] if start else 0
        fitting = int(np.searchsorted(ends, before + BLOCK_CHARS, side="right"))
        stop = min(max(start + 1, fitting), start + BLOCK_TEXTS)
        yield start, stop
        start = stop
