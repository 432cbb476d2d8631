"""What fits into a batch, and the one policy for what to do when it did not."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Batches of 512 to 2,048 padded tokens are fastest on CPUs; beyond, activations leave the caches.
CPU_MAX_TOKENS = 2_048
CPU_ENOUGH_TOKENS = 512
# On a GPU more tokens than this fill the device no better, while padding grows.
GPU_MAX_TOKENS = 65_536
GPU_PROBE_TOKENS = 4_096
GPU_ENOUGH_TOKENS = 16_384
GPU_UNMEASURED_TOKENS = 16_384  # where torch's memory cannot be measured
GPU_SHARE = 0.8  # of the free memory; the rest is for fragmentation and for cuDF beside the model
CPU_SCORE_BYTES = 64 * 2**20
GPU_SCORE_BYTES = 2 * 2**30
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
    """

    max_tokens: int
    max_rows: int | None = None
    score_rule: ScoreRule | None = None
    max_score_bytes: int = CPU_SCORE_BYTES
    is_equal_length: bool = False
    enough_tokens: int = CPU_ENOUGH_TOKENS
    is_packed: bool = False

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


class LimitMemory:
    """The limits that were found for each model of this process. Safe for threads."""

    def __init__(self) -> None:
        self._limits: dict[Hashable, BatchLimits] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, find: Callable[[], BatchLimits]) -> BatchLimits:
        """The limits of `key`; ``find()`` gives them the first time."""
        with self._lock:
            known = self._limits.get(key)
        if known is None:
            known = find()
            with self._lock:
                known = self._limits.setdefault(key, known)
        return known

    def lower(self, key: Hashable, rows: int, width: int) -> None:
        """Remember that a batch of this size ran out of memory."""
        with self._lock:
            self._limits[key] = self._limits[key].below(rows, width)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._limits.clear()


FOUND_LIMITS = LimitMemory()


class DocumentTooLargeError(MemoryError):
    """A single text does not fit on the device."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out, in any of the ways that allocators say it.

    torch raises ``torch.OutOfMemoryError`` from its own allocator; with RMM as its allocator the
    C++ exception arrives as a RuntimeError that names ``std::bad_alloc``.
    """
    if isinstance(error, MemoryError):
        return not isinstance(error, DocumentTooLargeError)
    if not isinstance(error, RuntimeError):
        return False
    if type(error).__name__ == "OutOfMemoryError":
        return True
    message = str(error).lower()
    return any(
        sign in message
        for sign in (
            "out of memory",
            "out_of_memory",
            "bad_alloc",
            "not enough memory",
            "can't allocate memory",
        )
    )


def run_halving(
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
        Told how many rows were too many, after `step` has released what it held.

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


def release_memory() -> None:
    """Give cached memory of the device back."""
    import torch

    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """Bytes that a model may still take on `device`."""
    import torch

    if device.type != "cuda":
        import psutil

        return psutil.virtual_memory().available
    free, total = torch.cuda.mem_get_info(device)
    if not _has_statistics():
        return free
    allocated = torch.cuda.memory_allocated(device)
    cached = torch.cuda.memory_reserved(device) - allocated
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - allocated
    return max(0, min(free + cached, allowed))


def find_limits(
    device: torch.device,
    score_rule: ScoreRule | None,
    widest: int,
    probe: Callable[[int, int], Any],
) -> BatchLimits:
    """Limits for a model on `device`: known ones on a CPU, measured ones on a GPU.

    Parameters
    ----------
    device : torch.device
    score_rule : ScoreRule, optional
    widest : int
        Most tokens that a text can have.
    probe : callable
        ``probe(rows, width)`` runs one batch of that size.
    """
    if device.type != "cuda":
        return BatchLimits(CPU_MAX_TOKENS, score_rule=score_rule, max_score_bytes=CPU_SCORE_BYTES)
    max_tokens = GPU_UNMEASURED_TOKENS
    if _has_statistics():
        bytes_per_token = _bytes_per_token(device, widest, probe)
        usable_bytes = int(free_bytes(device) * GPU_SHARE)
        max_tokens = max(1, min(usable_bytes // bytes_per_token, GPU_MAX_TOKENS))
        logger.info("%s: %d bytes a token measured", device, bytes_per_token)
    limits = BatchLimits(
        max_tokens,
        score_rule=score_rule,
        max_score_bytes=min(GPU_SCORE_BYTES, int(free_bytes(device) * GPU_SHARE)),
        enough_tokens=GPU_ENOUGH_TOKENS,
    )
    logger.info("%s: limits %s", device, limits)
    return limits


def _has_statistics() -> bool:
    """Whether torch's allocator counts its memory: RMM in its place does not."""
    import torch

    return torch.cuda.get_allocator_backend() != "pluggable"


def _bytes_per_token(device: torch.device, widest: int, probe: Callable[[int, int], Any]) -> int:
    """Bytes that one token of a batch takes, measured on a batch as wide as texts can be."""
    import torch

    width = min(widest, GPU_PROBE_TOKENS)

    def peak_bytes(rows: int) -> int:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        probe(rows, width)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    probe(1, 1)  # kernels and workspaces are loaded by the first run
    rows = GPU_PROBE_TOKENS // width
    # What does not fit is halved here too; a single row that does not is no reason to give up,
    # because texts may be shorter.
    while True:
        try:
            return max(1, peak_bytes(rows) // (rows * width))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or rows * width == 1:
                raise
        release_memory()
        if rows > 1:
            rows //= 2
        else:
            width //= 2
