"""What fits into a batch, and the one policy for what to do when it did not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch

from gpuclassify.workers.device_errors import is_out_of_memory, release_memory

# On a core, batches of 512 to 2,048 tokens are alike; beyond, activations leave the caches. Smaller
# ones leave less to wait for at a partition's end, when cores have no batch any more.
CPU_MAX_TOKENS = 1_024
CPU_ENOUGH_TOKENS = 512
CPU_SCORE_BYTES = 64 * 2**20
PEAK_ATTEMPTS = 3
LIVE_SCORE_COPIES = 4  # scores, two relative terms and their softmax are alive together

Result = TypeVar("Result")


@dataclass(frozen=True)
class ScoreRule:
    """How large the attention scores are that a model materialises.

    Attributes
    ----------
    heads : int
    min_span : int
        Relative-position terms are at least this wide: scores have
        ``rows * heads * width * max(width, min_span)`` elements.
    item_bytes : int
    """

    heads: int
    min_span: int
    item_bytes: int

    def size_bytes(self, rows: int, width: int) -> int:
        """Bytes of all live copies for a batch of `rows` texts padded to `width` tokens."""
        elements = rows * self.heads * width * max(width, self.min_span)
        return elements * self.item_bytes * LIVE_SCORE_COPIES


@dataclass(frozen=True)
class BatchLimits:
    """What one batch may hold. At least one row always fits.

    Attributes
    ----------
    max_tokens : int
        Rows times the padded width; of packed batches, which have no padding, the real tokens.
    max_rows : int, optional
    score_rule : ScoreRule, optional
        For models that materialise attention scores.
    max_score_bytes : int
    is_equal_length : bool
        Never pad: only texts of equal length share a batch.
    enough_tokens : int
        From this size on a larger batch is no faster, so that one is ended rather than padded.
    is_packed : bool
        Batches are packed.
    planned_bytes : int, optional
        What torch should hold at most while such a batch runs, model included, where that was
        measured. A single row that is larger than `max_tokens` may take more.
    """

    max_tokens: int
    max_rows: int | None = None
    score_rule: ScoreRule | None = None
    max_score_bytes: int = CPU_SCORE_BYTES
    is_equal_length: bool = False
    enough_tokens: int = CPU_ENOUGH_TOKENS
    is_packed: bool = False
    planned_bytes: int | None = None

    def rows(self, width: int) -> int:
        """How many rows of `width` tokens fit, at least 1."""
        rows = self.max_tokens // width
        if self.score_rule is not None:
            rows = min(rows, self.max_score_bytes // self.score_rule.size_bytes(1, width))
        if self.max_rows is not None:
            rows = min(rows, self.max_rows)
        return max(1, rows)

    def below(self, rows: int, width: int) -> BatchLimits:
        """Limits that allow half of a batch that ran out of memory."""
        score_bytes = self.max_score_bytes
        if self.score_rule is not None:
            score_bytes = min(score_bytes, self.score_rule.size_bytes(rows, width) // 2)
        return replace(
            self,
            max_tokens=max(1, min(self.max_tokens, rows * width // 2)),
            max_score_bytes=max(1, score_bytes),
        )


class Budget(Protocol):
    """Limits that depend on how much memory is free."""

    def limits(self) -> BatchLimits:
        """For the memory that is free now."""

    def correct(self, rows: int, width: int) -> None:
        """Learn that a batch within these limits ran out of memory."""


class RunLimits:
    """Limits of one run.

    Free memory is asked for before the first batch, when all that the run holds beside its batches
    is there, and after an out-of-memory.
    """

    def __init__(self, memory: LimitMemory, key: Hashable, budget: BatchLimits | Budget) -> None:
        self._memory = memory
        self._key = key
        self._budget = budget
        self._limits: BatchLimits | None = None

    def current(self) -> BatchLimits:
        """What the next batch may hold; cheap enough to ask before each."""
        if self._limits is None:
            budget = self._budget
            self._limits = budget if isinstance(budget, BatchLimits) else budget.limits()
        return self._memory.capped(self._key, self._limits)

    def lower(self, rows: int, width: int) -> None:
        """Remember that a batch of this size ran out of memory, in this run and in later ones."""
        self._memory.lower(self._key, rows, width)
        self._limits = None


class LimitMemory:
    """What was found for each model of this process, and what ran out of memory since.

    Safe for threads.
    """

    def __init__(self) -> None:
        self._budgets: dict[Hashable, BatchLimits | Budget] = {}
        self._failures: dict[Hashable, set[tuple[int, int]]] = {}
        self._lock = threading.Lock()

    def for_run(self, key: Hashable, find: Callable[[], BatchLimits | Budget]) -> RunLimits:
        """Limits of `key` for a run that begins now; ``find()`` gives its budget the first time.

        Limits in place of a budget are the same in every run.
        """
        with self._lock:
            known = self._budgets.get(key)
        if known is None:
            known = find()
            with self._lock:
                known = self._budgets.setdefault(key, known)
        return RunLimits(self, key, known)

    def lower(self, key: Hashable, rows: int, width: int) -> None:
        """Remember that a batch of this size ran out of memory: none as large comes again."""
        with self._lock:
            self._failures.setdefault(key, set()).add((rows, width))
            budget = self._budgets.get(key)
        if budget is not None and not isinstance(budget, BatchLimits):
            budget.correct(rows, width)

    def capped(self, key: Hashable, limits: BatchLimits) -> BatchLimits:
        """The limits, below all that ran out of memory."""
        with self._lock:
            failures = list(self._failures.get(key, ()))
        for rows, width in failures:
            limits = limits.below(rows, width)
        return limits

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._budgets.clear()
            self._failures.clear()


FOUND_LIMITS = LimitMemory()


class DocumentTooLargeError(MemoryError):
    """A single text does not fit on the device."""


def halve_on_oom(
    step: Callable[[int, int], Result],
    start: int,
    stop: int,
    on_out_of_memory: Callable[[int], None],
) -> list[Result]:
    """Outputs of ``step(start, stop)`` in row order, halving what exhausts memory.

    What was too many for one part is not tried again on the next.

    Parameters
    ----------
    step : callable
        Runs the rows from start to stop.
    start, stop : int
        The rows.
    on_out_of_memory : callable
        Called with how many rows were too many, after `step` has released what it held.

    Raises
    ------
    DocumentTooLargeError
        A single row exhausts memory.
    """
    outputs: list[Result] = []
    most_rows = stop - start
    while start < stop:
        end = min(start + most_rows, stop)
        try:
            outputs.append(step(start, end))
            start = end
            continue
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error)
        # Outside the handler: the exception's traceback would keep the failed batch alive.
        release_memory()
        rows = end - start
        if rows == 1:
            raise DocumentTooLargeError(
                "one text alone does not fit into memory: lower max_seq_length, or use a device "
                f"with more memory ({reason})"
            )
        on_out_of_memory(rows)
        most_rows = rows // 2
    return outputs


class CudaMemory:
    """What a GPU and torch's allocator on it say of its memory."""

    def __init__(self, device: torch.device) -> None:
        # Some of torch's functions refuse a device without a number.
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)

    @property
    def name(self) -> str:
        """The GPU's name."""
        return torch.cuda.get_device_name(self.device)

    @property
    def total_bytes(self) -> int:
        """All of the GPU's memory."""
        return torch.cuda.get_device_properties(self.device).total_memory

    @property
    def is_counted(self) -> bool:
        """Whether torch's allocator counts its memory: RMM in its place does not."""
        return torch.cuda.get_allocator_backend() != "pluggable"

    def held_bytes(self) -> int:
        """Bytes of all tensors that there are."""
        return torch.cuda.memory_allocated(self.device) if self.is_counted else 0

    def most_held_bytes(self) -> int:
        """The most that `held_bytes` has been since `forget_peak`."""
        return torch.cuda.max_memory_allocated(self.device)

    def forget_peak(self) -> None:
        """Let `most_held_bytes` begin anew."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def free_bytes(self) -> int:
        """Bytes that torch may still take.

        What no process or library has taken, and what torch's allocator keeps without using it; at
        most what the process's share leaves.
        """
        free, total = torch.cuda.mem_get_info(self.device)
        if not self.is_counted:
            return free
        used = torch.cuda.memory_allocated(self.device)
        kept = torch.cuda.memory_reserved(self.device) - used
        try:
            share = torch.cuda.get_per_process_memory_fraction(self.device)
        except RuntimeError:  # not every allocator knows
            share = 1.0
        return max(0, min(free + kept, int(share * total) - used))

    def peak_bytes(self, action: Callable[[], Any]) -> int:
        """Bytes that ``action()`` had taken at most, beyond what was taken before.

        It runs again, up to twice, if another thread has taken or given back memory meanwhile.
        """
        for _ in range(PEAK_ATTEMPTS):
            torch.cuda.synchronize(self.device)
            self.forget_peak()
            before = torch.cuda.memory_allocated(self.device)
            action()
            torch.cuda.synchronize(self.device)
            peak = self.most_held_bytes() - before
            if torch.cuda.memory_allocated(self.device) == before:
                break
        self.forget_peak()  # what a trial takes is no batch's peak
        return peak


def free_bytes(device: torch.device) -> int:
    """Bytes that a model may still take on `device`."""
    if device.type == "cuda":
        return CudaMemory(device).free_bytes()
    import psutil

    return psutil.virtual_memory().available


def cpu_limits(score_rule: ScoreRule | None = None) -> BatchLimits:
    """Limits on a CPU, where the caches decide and not the memory."""
    return BatchLimits(CPU_MAX_TOKENS, score_rule=score_rule, max_score_bytes=CPU_SCORE_BYTES)
