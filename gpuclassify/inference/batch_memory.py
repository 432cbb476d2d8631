"""How much memory batches take: measured by a few of them, planned for the memory that is free."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpuclassify.inference.memory import (
    CPU_MAX_TOKENS,
    CPU_SCORE_BYTES,
    BatchLimits,
    ScoreRule,
)
from gpuclassify.models.checkpoint import first_size, state_width
from gpuclassify.workers.device_errors import is_out_of_memory, release_memory

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Of a token's width, alive together in a layer: input, residual, three projections, result.
STATES_A_LAYER = 6
# What configurations call the width of the feed-forward network.
INNER_WIDTHS = ("intermediate_size", "hidden_dim", "n_inner", "ffn_dim")
# On a GPU more tokens than this fill the device no better, while padding grows.
GPU_MAX_TOKENS = 65_536
GPU_ENOUGH_TOKENS = 16_384
GPU_SCORE_BYTES = 2 * 2**30
GPU_SHARE = 0.8  # of the free memory; the rest is for fragmentation and for cuDF beside the model
# Where torch's memory is not counted, and free memory is not known either: RMM keeps its own.
GPU_UNMEASURED_TOKENS = 16_384
GPU_UNMEASURED_SCORE_BYTES = 2**29
# Large enough that the allocator's rounding, about a megabyte a tensor, is a small part.
PROBE_TOKENS = 8_192
PROBE_RATIO = 4  # of the larger batch to the smaller
# A measurement is not believed to be wrong by more; what runs out beyond has other reasons.
MOST_SAFETY_PERCENT = 800


def largest_batch_bytes(
    sizes: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> int | None:
    """About what the largest batch takes beside the weights; None for a network of other sizes.

    The tokens that a batch holds at most, with the states of one layer, and for attention that
    materialises its scores what is allowed for them. A GPU with less free memory gets smaller
    batches.

    Parameters
    ----------
    sizes : mapping
        The configuration of the network.
    device : torch.device
    dtype : torch.dtype
    """
    width = state_width(sizes)
    if width is None:
        return None
    numbers = STATES_A_LAYER * width + 2 * (first_size(sizes, INNER_WIDTHS) or 4 * width)
    is_gpu = device.type == "cuda"
    tokens = GPU_MAX_TOKENS if is_gpu else CPU_MAX_TOKENS
    scores = GPU_SCORE_BYTES if is_gpu else CPU_SCORE_BYTES
    has_scores = bool(sizes.get("relative_attention"))
    return tokens * numbers * dtype.itemsize + (scores if has_scores else 0)


@dataclass(frozen=True)
class BatchMemory:
    """Bytes that a batch takes beside the model's weights.

    Attributes
    ----------
    fixed_bytes : int
        Whatever the batch.
    token_bytes : int
        For each token that its layers run, padding included.
    safety_percent : int
        How much of that is planned; more than 100 after a batch ran out of memory that should have
        fitted.
    """

    fixed_bytes: int
    token_bytes: int
    safety_percent: int = 100

    def size_bytes(self, tokens: int) -> int:
        """What is planned for a batch of `tokens` tokens."""
        return (self.fixed_bytes + self.token_bytes * tokens) * self.safety_percent // 100

    def most_tokens(self, usable_bytes: int) -> int:
        """Tokens of the largest batch for which no more is planned; 0 if there is none."""
        measured_bytes = usable_bytes * 100 // self.safety_percent
        return max(0, (measured_bytes - self.fixed_bytes) // self.token_bytes)

    def after_failure(self, tokens: int, free_bytes: int) -> BatchMemory:
        """What to believe after a batch of `tokens` tokens ran out of memory.

        If more is planned for it than there is, something else has taken memory meanwhile, and this
        is as good as before. Otherwise, with as much free, half of that batch will be planned.

        Parameters
        ----------
        tokens : int
        free_bytes : int
            Free memory since what the batch held was given back.
        """
        if self.size_bytes(tokens) > free_bytes:
            return self
        half_bytes = max(1, self.fixed_bytes + self.token_bytes * (tokens // 2))
        needed_percent = -(-_usable_bytes(free_bytes) * 100 // half_bytes)
        safety_percent = min(max(needed_percent, self.safety_percent), MOST_SAFETY_PERCENT)
        return replace(self, safety_percent=safety_percent)


class MeasuredBudget:
    """What the batches of one model may hold, by what they were measured to take. Safe for threads.

    Parameters
    ----------
    batch_memory : BatchMemory
    free_bytes : callable
        Free memory of the device, asked whenever limits are.
    score_rule : ScoreRule, optional
    save : callable
        Called with it when an out-of-memory has corrected it.
    held_bytes : callable
        What torch holds, asked whenever limits are.
    """

    def __init__(
        self,
        batch_memory: BatchMemory,
        free_bytes: Callable[[], int],
        score_rule: ScoreRule | None = None,
        save: Callable[[BatchMemory], Any] = lambda batch_memory: None,
        held_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self.batch_memory = batch_memory
        self._free_bytes = free_bytes
        self._score_rule = score_rule
        self._save = save
        self._held_bytes = held_bytes
        self._lock = threading.Lock()

    def limits(self) -> BatchLimits:
        """For the memory that is free now."""
        batch_memory = self.batch_memory
        limits = plan_limits(batch_memory, self._free_bytes(), self._score_rule)
        batch_bytes = batch_memory.size_bytes(limits.max_tokens)
        return replace(limits, planned_bytes=self._held_bytes() + batch_bytes)

    def correct(self, rows: int, width: int) -> None:
        """Learn that a batch within these limits ran out of memory."""
        free_bytes = self._free_bytes()
        with self._lock:
            corrected = self.batch_memory.after_failure(rows * width, free_bytes)
            if corrected == self.batch_memory:
                return
            self.batch_memory = corrected
        logger.info("%d tokens did not fit into %d bytes: %s", rows * width, free_bytes, corrected)
        self._save(corrected)


def plan_limits(
    batch_memory: BatchMemory, free_bytes: int, score_rule: ScoreRule | None = None
) -> BatchLimits:
    """Limits under which no batch of more than one row takes more than its share of free memory.

    Parameters
    ----------
    batch_memory : BatchMemory
    free_bytes : int
    score_rule : ScoreRule, optional
        For models that materialise attention scores.
    """
    usable_bytes = _usable_bytes(free_bytes)
    return _gpu_limits(
        max(1, min(batch_memory.most_tokens(usable_bytes), GPU_MAX_TOKENS)),
        min(usable_bytes, GPU_SCORE_BYTES),
        score_rule,
    )


def unmeasured_limits(score_rule: ScoreRule | None = None) -> BatchLimits:
    """Limits on a GPU whose memory is not counted."""
    return _gpu_limits(GPU_UNMEASURED_TOKENS, GPU_UNMEASURED_SCORE_BYTES, score_rule)


def measure_batch_memory(
    probe: Callable[[int, int], Any],
    widest: int,
    peak_bytes: Callable[[Callable[[], Any]], int],
) -> BatchMemory:
    """The memory that a model's batches take, measured on batches as wide as its texts can be.

    Two sizes tell what every batch takes from what its tokens take. Narrower batches take less a
    token, if they differ at all.

    Parameters
    ----------
    probe : callable
        ``probe(rows, width)`` runs one batch of that size.
    widest : int
        Most tokens that a text can have.
    peak_bytes : callable
        Runs an action and returns how many bytes it had taken at most.

    Raises
    ------
    RuntimeError or MemoryError
        Whatever the probe raises; that memory ran out, only if one token alone does not fit.
    """
    width = min(widest, PROBE_TOKENS)
    rows = PROBE_TOKENS // width
    # What does not fit is halved here too; a single row that does not is no reason to give up,
    # because texts may be shorter.
    while True:
        try:
            return _measure(probe, rows, width, peak_bytes)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or rows * width == 1:
                raise
        release_memory()
        if rows > 1:
            rows //= 2
        else:
            width //= 2


def _measure(
    probe: Callable[[int, int], Any],
    rows: int,
    width: int,
    peak_bytes: Callable[[Callable[[], Any]], int],
) -> BatchMemory:
    small_rows, small_width = max(1, rows // PROBE_RATIO), width
    if rows < PROBE_RATIO:
        small_width = max(1, rows * width // PROBE_RATIO)
    probe(small_rows, small_width)  # loads kernels, and makes workspaces and tables that stay
    small_bytes = peak_bytes(functools.partial(probe, small_rows, small_width))
    large_bytes = peak_bytes(functools.partial(probe, rows, width))
    small_tokens = small_rows * small_width
    if small_tokens == rows * width:
        return BatchMemory(0, max(1, -(-large_bytes // small_tokens)))
    grown_bytes = large_bytes - small_bytes
    token_bytes = max(1, -(-grown_bytes // (rows * width - small_tokens)))
    return BatchMemory(max(0, small_bytes - token_bytes * small_tokens), token_bytes)


def _usable_bytes(free_bytes: int) -> int:
    return int(max(0, free_bytes) * GPU_SHARE)


def _gpu_limits(max_tokens: int, score_bytes: int, score_rule: ScoreRule | None) -> BatchLimits:
    return BatchLimits(
        max_tokens,
        score_rule=score_rule,
        max_score_bytes=score_bytes,
        enough_tokens=GPU_ENOUGH_TOKENS,
    )
