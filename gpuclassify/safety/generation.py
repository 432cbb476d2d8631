"""Prompts that begin alike to a decoder's greedy answers, in input order."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from gpuclassify.inference.batching import cut_batches, longest_first
from gpuclassify.inference.budgets import find_budget
from gpuclassify.inference.crossfit import crossfit_batches
from gpuclassify.inference.device_use import watched
from gpuclassify.inference.engine import BatchSettings, holding
from gpuclassify.inference.memory import FOUND_LIMITS, BatchLimits, halve_on_oom
from gpuclassify.inference.to_device import stage
from gpuclassify.safety.decoding import AnswerTask, BatchDecoding
from gpuclassify.safety.shared_prefix import ATTENTION, Prefix, RowState
from gpuclassify.safety.speculation import MOST_DRAFTED, SeenAnswers
from gpuclassify.tokenizing.token_batch import TokenBatch, flat_batch
from gpuclassify.workers.run_stats import RunStats

# Rows that leave the prefix early share a multiple of this with it, so that few lengths differ.
_SHARED_STEP = 64


def common_prefix(rows: Sequence[np.ndarray]) -> np.ndarray:
    """The tokens with which all rows begin, int32."""
    if not rows:
        return np.zeros(0, dtype=np.int32)
    length = min(_shared_length(rows[0], row) for row in rows)
    return rows[0][:length].astype(np.int32)


def answer(
    task: AnswerTask,
    key: Hashable,
    prompts: TokenBatch,
    settings: BatchSettings,
    stats: RunStats,
) -> list[str | None]:
    """The answer to every prompt up to where it was decided, in input order.

    Greedy decoding: each token is the likeliest, the one with the lowest id among equals. Special
    tokens are no part of the text.

    Parameters
    ----------
    task : AnswerTask
    key : hashable
        By which limits that were found for the model are remembered.
    prompts : TokenBatch
        Whole prompts, prefix included.
    settings : BatchSettings
        Of which the padding side has no meaning here.
    stats : RunStats
        Counts of this run are added to it.

    Returns
    -------
    list of str or None
        None for a prompt at which logits were not finite.

    Raises
    ------
    DocumentTooLargeError
        One prompt alone does not fit on the device.
    """
    answers: list[str | None] = [None] * len(prompts)
    if not answers:
        return answers
    with watched(task.decoder.device, stats), holding(task.decoder.device, stats):
        task.decoder.use(task.adapter)
        memory = task.decoder.attached(("answers", task.adapter), _Memory)
        shared = _shared_lengths(prompts, task.prefix)
        for length in np.unique(shared).tolist():
            rows = np.flatnonzero(shared == length)
            prefix = memory.prefix_of(task).crop(length) if length else None
            run = BatchDecoding(task, prefix, memory.seen, stats)
            own = [prompts.ids[prompts.offsets[r] + length : prompts.offsets[r + 1]] for r in rows]
            for row, text in zip(rows, _answer_group(run, key, own, settings), strict=True):
                answers[row] = text
    stats.tokens += int(prompts.offsets[-1])
    stats.prefix_tokens += int(shared.sum())
    return answers


class _Memory:
    """What stays with a decoder for one of its adapters: answers, and the latest prefix."""

    def __init__(self) -> None:
        self.seen = SeenAnswers()
        self._ids = np.zeros(0, dtype=np.int32)
        self._prefix: Prefix | None = None

    def prefix_of(self, task: AnswerTask) -> Prefix:
        """The state of the task's prefix, run now if it is another than before."""
        if self._prefix is None or not np.array_equal(self._ids, task.prefix):
            self._prefix = None  # frees memory that the new one may need
            ids = torch.tensor(task.prefix[None], dtype=torch.int64, device=task.decoder.device)
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            state = RowState()
            task.decoder.forward(ids, position_ids=positions, attention=ATTENTION, state=state)
            self._prefix, self._ids = Prefix(state.layers), task.prefix
        return self._prefix


def _shared_length(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


def _shared_lengths(prompts: TokenBatch, prefix: np.ndarray) -> np.ndarray:
    """How much of the prefix each prompt uses, int64 (prompts,); its last token is its own."""
    rows = itertools.pairwise(prompts.offsets)
    shared = np.array(
        [_shared_length(prompts.ids[start : stop - 1], prefix) for start, stop in rows]
    )
    return np.where(shared < len(prefix), shared - shared % _SHARED_STEP, shared)


def _answer_group(
    run: BatchDecoding, key: Hashable, prompts: list[np.ndarray], settings: BatchSettings
) -> list[str | None]:
    """Answers to prompts that use the same prefix, of which only their own tokens are given."""
    room = min(MOST_DRAFTED, run.task.max_new_tokens)
    lengths = np.array([len(prompt) + room for prompt in prompts])
    answers: list[str | None] = [None] * len(prompts)

    widest = int(lengths.max())
    limits = FOUND_LIMITS.for_run(
        key, lambda: find_budget(run.task.decoder.device, run.probe, widest)
    )

    def current_limits() -> BatchLimits:
        return replace(limits.current(), max_rows=settings.batch_size)

    def step(rows: np.ndarray, start: int, stop: int) -> list[str | None]:
        return run.answer_batch([prompts[row] for row in rows[start:stop]])

    def remember(width: int, count: int) -> None:
        run.stats.out_of_memory += 1
        limits.lower(count, width)

    for rows in _row_batches(lengths, settings, current_limits):
        parts = halve_on_oom(
            functools.partial(step, rows),
            0,
            len(rows),
            functools.partial(remember, int(lengths[rows].max())),
        )
        for row, text in zip(rows, itertools.chain.from_iterable(parts), strict=True):
            answers[row] = text
    return answers


def _row_batches(
    lengths: np.ndarray, settings: BatchSettings, current_limits: Callable[[], BatchLimits]
) -> Iterator[np.ndarray]:
    """Which rows make a batch, by either loader; int64 (rows,)."""
    if settings.loader == "crossfit":
        # It sorts, slices and clips a batch of tokens, of which only the rows are of use here.
        blank = flat_batch([np.zeros(length, dtype=np.int32) for length in lengths])
        for batch in crossfit_batches(
            stage(blank, torch.device("cpu")), 0, "right", current_limits
        ):
            yield batch.rows
        return
    order = longest_first(lengths) if settings.sort_by_length else np.arange(len(lengths))
    for start, stop in cut_batches(lengths[order], current_limits):
        yield order[start:stop]
