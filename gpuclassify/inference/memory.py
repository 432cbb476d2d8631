"""Sizes of batches planned from free memory, and recovery from out-of-memory errors.

On a CUDA GPU, the memory of a few small batches is measured, larger batches are planned for the
free memory, and the measurement is saved in the user's cache. On other devices, and if torch does
not count the GPU's memory, the limits are constants.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from gpuclassify._version import __version__
from gpuclassify.hub.saving import replace_file
from gpuclassify.models.checkpoint import first_size, state_width
from gpuclassify.settings.checks import check_settings
from gpuclassify.workers.device_errors import free_host_bytes, is_out_of_memory, release_memory

# A core is equally fast with 512 to 2,048 tokens per batch. More tokens do not fit into its caches.
# Small batches shorten the wait for the last core at the end of a partition.
CPU_MAX_TOKENS = 1_024
CPU_ENOUGH_TOKENS = 512
CPU_WIDTH = 768  # hidden size for these limits; narrower models get more tokens
CPU_MOST_TIMES = 16  # largest factor for narrow models: each batch costs milliseconds
CPU_SCORE_BYTES = 64 * 2**20
# Batches of more tokens than this do not use a GPU better, and have more padding.
GPU_MAX_TOKENS = 65_536
GPU_ENOUGH_TOKENS = 16_384
GPU_SCORE_BYTES = 2 * 2**30
GPU_SHARE = 0.8  # planned fraction of free memory; the rest is for fragmentation and for cuDF
# Limits if torch does not count its memory, as with RMM as its allocator.
GPU_UNMEASURED_TOKENS = 16_384
GPU_UNMEASURED_SCORE_BYTES = 2**29
# Tokens of a probe batch: enough to make the allocator's rounding, about 1 MB per tensor, small.
PROBE_TOKENS = 8_192
PROBE_RATIO = 4  # ratio of the tokens of the larger to the smaller probe batch
# Largest `BatchMemory.safety_percent`. Out-of-memory errors beyond it have other causes.
MOST_SAFETY_PERCENT = 800
PEAK_ATTEMPTS = 3  # maximum runs of an action to measure its peak memory
LIVE_SCORE_COPIES = 4  # scores, two relative terms and their softmax exist at once
# Hidden states that exist at once in a layer: input, residual, three projections, result.
LAYER_STATES = 6
# Names that configurations use for the width of the feed-forward network.
INNER_WIDTHS = ("intermediate_size", "hidden_dim", "n_inner", "ffn_dim")

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class DocumentTooLargeError(MemoryError):
    """Error raised if a single text, alone in its batch, does not fit into memory."""


# Limits of a batch.


@dataclass(frozen=True)
class ScoreRule:
    """Size of the attention scores that a model without fused attention keeps in memory."""

    heads: int  # number of attention heads
    min_span: int  # number of relative positions, the least width of a row of scores
    item_bytes: int  # bytes of one score

    def size_bytes(self, rows: int, width: int) -> int:
        """Return the bytes of one layer's attention scores for `rows` texts of `width` tokens each.

        Copies of the scores that exist at the same time, such as the softmax, are included.
        """
        elements = rows * self.heads * width * max(width, self.min_span)
        return elements * self.item_bytes * LIVE_SCORE_COPIES


@dataclass(frozen=True)
class BatchLimits:
    """Limits on tokens, rows and attention scores of one batch; a single row is always allowed."""

    max_tokens: int  # rows times the padded width; for packed batches, the tokens without padding
    max_rows: int | None = None  # None for no limit
    score_rule: ScoreRule | None = None  # None if attention scores are not kept in memory
    max_score_bytes: int = CPU_SCORE_BYTES  # limit of ``score_rule.size_bytes``
    is_equal_length: bool = False  # only texts of equal length share a batch, without padding
    # A batch of this size is as fast per token as a larger batch, so it is closed before a text
    # that would need much padding.
    enough_tokens: int = CPU_ENOUGH_TOKENS
    is_packed: bool = False  # whether the model's layers run on the tokens without padding
    # Planned peak of torch's memory while such a batch runs, model included; None if not measured.
    # A single row of more than `max_tokens` tokens may take more.
    planned_bytes: int | None = None

    def rows(self, width: int) -> int:
        """Return the maximum number of rows padded to `width` tokens in a batch, at least 1."""
        rows = self.max_tokens // width
        if self.score_rule is not None:
            rows = min(rows, self.max_score_bytes // self.score_rule.size_bytes(1, width))
        if self.max_rows is not None:
            rows = min(rows, self.max_rows)
        return max(1, rows)

    def below(self, rows: int, width: int) -> BatchLimits:
        """Return lower limits, after `rows` rows padded to `width` tokens ran out of memory.

        They allow at most half as many tokens and bytes of attention scores as that batch had, but
        at least 1 of each.
        """
        score_bytes = self.max_score_bytes
        if self.score_rule is not None:
            score_bytes = min(score_bytes, self.score_rule.size_bytes(rows, width) // 2)
        return replace(
            self,
            max_tokens=max(1, min(self.max_tokens, rows * width // 2)),
            max_score_bytes=max(1, score_bytes),
        )


def plan_limits(
    batch_memory: BatchMemory, free_bytes: int, score_rule: ScoreRule | None = None
) -> BatchLimits:
    """Plan limits for a GPU that keep every batch of several rows within free memory.

    Such batches take at most the fraction `GPU_SHARE` of `free_bytes`, and have at most
    `GPU_MAX_TOKENS` tokens. `score_rule` is None if attention scores are not kept in memory.
    """
    usable_bytes = _usable_bytes(free_bytes)
    return _gpu_limits(
        max(1, min(batch_memory.most_tokens(usable_bytes), GPU_MAX_TOKENS)),
        min(usable_bytes, GPU_SCORE_BYTES),
        score_rule,
    )


def _usable_bytes(free_bytes: int) -> int:
    return int(max(0, free_bytes) * GPU_SHARE)


def _gpu_limits(max_tokens: int, score_bytes: int, score_rule: ScoreRule | None) -> BatchLimits:
    return BatchLimits(
        max_tokens,
        score_rule=score_rule,
        max_score_bytes=score_bytes,
        enough_tokens=GPU_ENOUGH_TOKENS,
    )


def cpu_limits(width: int | None, score_rule: ScoreRule | None = None) -> BatchLimits:
    """Return a batch's limits on a CPU, for a hidden size of `width` (None: `CPU_WIDTH`)."""
    times = min(CPU_MOST_TIMES, max(1, CPU_WIDTH // (width or CPU_WIDTH)))
    return BatchLimits(
        times * CPU_MAX_TOKENS, score_rule=score_rule, enough_tokens=times * CPU_ENOUGH_TOKENS
    )


# Memory of a batch.


def largest_batch_bytes(
    sizes: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> int | None:
    """Estimate the memory of a model's largest batch, in bytes, without the weights.

    `sizes` is the configuration, as in ``config.json``; None is returned if it has no hidden size.
    Free memory is not considered: on a GPU that has less than the estimate, batches are smaller.
    """
    width = state_width(sizes)
    if width is None:
        return None
    numbers = LAYER_STATES * width + 2 * (first_size(sizes, INNER_WIDTHS) or 4 * width)
    is_gpu = device.type == "cuda"
    tokens = GPU_MAX_TOKENS if is_gpu else cpu_limits(width).max_tokens
    scores = GPU_SCORE_BYTES if is_gpu else CPU_SCORE_BYTES
    has_scores = bool(sizes.get("relative_attention"))
    # States are in bfloat16 beside 8-bit products.
    return tokens * numbers * max(2, dtype.itemsize) + has_scores * scores


@dataclass(frozen=True)
class BatchMemory:
    """Measured memory of a model's batches, as a linear function of their numbers of tokens.

    The memory of the weights is not included. Raises ValueError for numbers out of range.
    """

    fixed_bytes: int = field(metadata={"least": 0})  # bytes that any batch takes
    token_bytes: int  # bytes per token that the layers run, padding included
    # Percentage of the measured bytes that is planned; raised if a planned batch does not fit.
    safety_percent: int = field(default=100, metadata={"least": 100})

    def __post_init__(self) -> None:
        check_settings(self)

    def size_bytes(self, tokens: int) -> int:
        """Return the number of bytes planned for a batch of `tokens` tokens."""
        return (self.fixed_bytes + self.token_bytes * tokens) * self.safety_percent // 100

    def most_tokens(self, usable_bytes: int) -> int:
        """Return the largest number of tokens planned to fit `usable_bytes`; 0 if none fits."""
        measured_bytes = usable_bytes * 100 // self.safety_percent
        return max(0, (measured_bytes - self.fixed_bytes) // self.token_bytes)

    def corrected(self, tokens: int, free_bytes: int) -> BatchMemory:
        """Return this measurement, raised if needed, after a batch of `tokens` tokens did not fit.

        `free_bytes` is the free memory after the failure. `safety_percent` is raised, to at most
        `MOST_SAFETY_PERCENT`, so that half as many tokens are planned to fill `GPU_SHARE` of it.
        This object itself is returned if the failed batch was planned to take more than
        `free_bytes`: then something else took memory meanwhile.
        """
        if self.size_bytes(tokens) > free_bytes:
            return self
        half_bytes = max(1, self.fixed_bytes + self.token_bytes * (tokens // 2))
        needed_percent = -(-_usable_bytes(free_bytes) * 100 // half_bytes)
        safety_percent = min(max(needed_percent, self.safety_percent), MOST_SAFETY_PERCENT)
        return replace(self, safety_percent=safety_percent)


def measure_batch_memory(
    probe: Callable[[int, int], Any],
    widest: int,
    peak_bytes: Callable[[Callable[[], Any]], int],
) -> BatchMemory:
    """Measure the memory of a model's batches, to plan larger batches from it.

    ``probe(rows, width)`` runs a batch of `rows` texts of `width` tokens; ``peak_bytes(action)``
    runs ``action()`` and returns its peak memory in bytes. Batches of two sizes are run, as wide as
    the longest texts (`widest` tokens) if possible, because narrower ones take at most as many
    bytes per token. Raises an out-of-memory error only if a single token does not fit.
    """
    width = min(widest, PROBE_TOKENS)
    rows = PROBE_TOKENS // width
    # A probe that does not fit is halved. A single row is shortened, because texts may be shorter.
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
    # The first run loads kernels, and makes workspaces and tables that stay in memory.
    probe(small_rows, small_width)
    small_bytes = peak_bytes(functools.partial(probe, small_rows, small_width))
    large_bytes = peak_bytes(functools.partial(probe, rows, width))
    small_tokens = small_rows * small_width
    if small_tokens == rows * width:
        return BatchMemory(0, max(1, -(-large_bytes // small_tokens)))
    grown_bytes = large_bytes - small_bytes
    token_bytes = max(1, -(-grown_bytes // (rows * width - small_tokens)))
    return BatchMemory(max(0, small_bytes - token_bytes * small_tokens), token_bytes)


# Limits cached in this process.


class Budget:
    """Batch limits of one model in this process, lowered after out-of-memory errors. Thread-safe.

    `known` is either constant limits, or the measured memory of batches, from which limits are
    planned for the free memory of the GPU `memory`, with the `score_rule`. ``save(batch_memory)``
    is called with each correction of the measured memory.
    """

    def __init__(
        self,
        known: BatchLimits | BatchMemory,
        memory: CudaMemory | None = None,
        score_rule: ScoreRule | None = None,
        save: Callable[[BatchMemory], Any] = lambda batch_memory: None,
    ) -> None:
        self.known = known
        self._memory: Any = memory  # not used if `known` is constant limits
        self._score_rule = score_rule
        self._save = save
        self._failures: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    def limits(self) -> BatchLimits:
        """Return the constant limits, or limits planned for the current free memory.

        They may allow batches that ran out of memory before: pass them to `capped`.
        """
        known = self.known
        if isinstance(known, BatchLimits):
            return known
        limits = plan_limits(known, self._memory.free_bytes(), self._score_rule)
        batch_bytes = known.size_bytes(limits.max_tokens)
        return replace(limits, planned_bytes=self._memory.held_bytes() + batch_bytes)

    def capped(self, limits: BatchLimits) -> BatchLimits:
        """Return `limits`, lowered to at most half of each batch that `lower` has recorded."""
        with self._lock:
            failures = list(self._failures)
        for rows, width in failures:
            limits = limits.below(rows, width)
        return limits

    def lower(self, rows: int, width: int) -> None:
        """Record that a batch of `rows` texts padded to `width` tokens ran out of memory."""
        with self._lock:
            self._failures.add((rows, width))
            if isinstance(self.known, BatchLimits):
                return
            free_bytes = self._memory.free_bytes()
            corrected = self.known.corrected(rows * width, free_bytes)
            if corrected == self.known:
                return
            self.known = corrected
        logger.info("%d tokens did not fit into %d bytes: %s", rows * width, free_bytes, corrected)
        self._save(corrected)


BUDGETS: dict[Hashable, Budget] = {}  # budgets of this process, by the key in `RunLimits`


class RunLimits:
    """Batch limits of a model during one run over the texts of a partition.

    The model's `Budget` is cached in this process under `key`; the constructor calls ``find()`` to
    make it, unless it is cached. Free memory is read before the first batch, when everything else
    is already allocated, and again after an out-of-memory error.
    """

    def __init__(self, key: Hashable, find: Callable[[], Budget]) -> None:
        self._budget = BUDGETS.get(key) or BUDGETS.setdefault(key, find())
        self._limits: BatchLimits | None = None

    def current(self) -> BatchLimits:
        """Return the limits of the next batch; cheap enough to call before every batch."""
        if self._limits is None:
            self._limits = self._budget.limits()
        return self._budget.capped(self._limits)

    def lower(self, rows: int, width: int) -> None:
        """Record in the `Budget` that a batch of `rows` texts padded to `width` did not fit."""
        self._budget.lower(rows, width)
        self._limits = None


def halve_on_oom(
    step: Callable[[int, int], Result],
    start: int,
    stop: int,
    on_out_of_memory: Callable[[int], None],
) -> list[Result]:
    """Run a batch's rows from `start` to `stop`, in smaller parts if memory runs out.

    ``step(first, end)`` runs the rows from `first` up to `end`, without `end`. Returns the parts'
    results in row order. If a part of several rows does not fit, ``on_out_of_memory(rows)`` is
    called with its number of rows, and at most half as many run at once from then on. Raises
    DocumentTooLargeError if a single row does not fit.
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
        # Released outside of the handler: the exception's traceback keeps the failed batch alive.
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


# Memory of a device.


class CudaMemory:
    """Memory of a CUDA GPU, which is torch's current one if `device` has no index."""

    def __init__(self, device: torch.device) -> None:
        # Some of torch's functions refuse a device without a number.
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)

    @property
    def name(self) -> str:
        """The GPU's product name, such as "NVIDIA H100 80GB HBM3"."""
        return torch.cuda.get_device_name(self.device)

    @property
    def total_bytes(self) -> int:
        """Number of bytes of the GPU's whole memory."""
        return torch.cuda.get_device_properties(self.device).total_memory

    @property
    def is_counted(self) -> bool:
        """Whether torch counts the memory it allocates. It does not with RMM as its allocator."""
        return torch.cuda.get_allocator_backend() != "pluggable"

    def held_bytes(self) -> int:
        """Return the bytes of this process's torch tensors on the GPU; 0 unless `is_counted`."""
        return torch.cuda.memory_allocated(self.device) if self.is_counted else 0

    def most_held_bytes(self) -> int:
        """Return the peak bytes of this process's torch tensors on the GPU since `forget_peak`."""
        return torch.cuda.max_memory_allocated(self.device)

    def forget_peak(self) -> None:
        """Reset the peak that `most_held_bytes` returns to the bytes that are held now."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def free_bytes(self) -> int:
        """Return the bytes that torch can still allocate, also from its cache or RMM's pool."""
        free, total = torch.cuda.mem_get_info(self.device)
        if not self.is_counted:
            kept, left = _rmm_free_bytes(self.device.index)
            return free + kept if left is None else max(0, min(free + kept, left))
        used = torch.cuda.memory_allocated(self.device)
        kept = torch.cuda.memory_reserved(self.device) - used
        try:
            share = torch.cuda.get_per_process_memory_fraction(self.device)
        except RuntimeError:  # not every allocator has a share
            share = 1.0
        return max(0, min(free + kept, int(share * total) - used))

    def peak_bytes(self, action: Callable[[], Any]) -> int:
        """Run ``action()``, and return its peak memory in bytes, above the memory held before.

        The action is run up to three times, until torch holds as much memory after it as before:
        otherwise, another thread has allocated or freed memory. Torch's peak statistics are reset.
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
        self.forget_peak()  # the peak of a trial is not reported as a batch's
        return peak


def _rmm_free_bytes(number: int) -> tuple[int, int | None]:
    """Return the unused bytes in a GPU's RMM pool, and those left of RMM's limit (None: no limit).

    Only adaptors around a pool report its use; without one, as on a cluster that `get_client` did
    not start, the pool counts as fully used.
    """
    if "rmm" not in sys.modules:  # another allocator than RMM's
        return 0, None
    from rmm import mr

    resource: Any = mr.get_per_device_resource(number)
    used, size, left = None, 0, None
    while resource is not None:
        if hasattr(resource, "get_allocated_bytes"):
            used = resource.get_allocated_bytes()
        elif hasattr(resource, "allocation_counts"):
            used = resource.allocation_counts.current_bytes
        if hasattr(resource, "get_allocation_limit"):
            left = resource.get_allocation_limit() - resource.get_allocated_bytes()
        if hasattr(resource, "pool_size"):
            size = resource.pool_size()
        resource = resource.get_upstream() if hasattr(resource, "get_upstream") else None
    return (0 if used is None else max(0, size - used)), left


def free_bytes(device: torch.device) -> int:
    """Return the number of bytes of GPU or host memory that a model can still allocate."""
    return CudaMemory(device).free_bytes() if device.type == "cuda" else free_host_bytes()


# Measurements saved for later processes.


def find_budget(
    device: torch.device,
    probe: Callable[[int, int], Any],
    widest: int,
    *,
    model: str | None = None,
    precision: str = "",
    path: str = "padded",
    width: int | None = None,
    score_rule: ScoreRule | None = None,
    memory: CudaMemory | None = None,
    folder: Path | None = None,
) -> Budget:
    """Return the budget of a model: measured or saved memory on CUDA, else constant limits.

    ``probe(rows, width)`` runs a batch in the same way as later batches; the longest texts have
    `widest` tokens. A measurement is saved in `folder` (default: `default_folder`) under its
    `budget_key`, but not if `model` is None. If torch does not count the memory of the GPU, limits
    are constants. `width`, for limits on a CPU, is the hidden size if known. `score_rule` is None
    if attention scores are not kept in memory.
    """
    if device.type != "cuda":
        return Budget(cpu_limits(width, score_rule))
    memory = memory or CudaMemory(device)
    if not memory.is_counted:
        return Budget(_gpu_limits(GPU_UNMEASURED_TOKENS, GPU_UNMEASURED_SCORE_BYTES, score_rule))
    if model is None:
        measured = measure_batch_memory(probe, widest, memory.peak_bytes)
        return Budget(measured, memory, score_rule)
    key = budget_key(model, precision, path, widest, memory.name, memory.total_bytes)
    file = BudgetFile(key, folder)
    batch_memory = file.load()
    if batch_memory is None:
        started = time.perf_counter()
        batch_memory = measure_batch_memory(probe, widest, memory.peak_bytes)
        elapsed_seconds = time.perf_counter() - started
        logger.info("%s on %s: %s, in %.1f s", model, device, batch_memory, elapsed_seconds)
        file.save(batch_memory)
    return Budget(batch_memory, memory, score_rule, file.save)


def budget_key(
    model: str, precision: str, path: str, widest: int, device_name: str, total_bytes: int
) -> dict[str, str | int]:
    """Return the key of a saved measurement: everything that the memory of batches depends on.

    `model` is a name and revision, `precision` a dtype, `path` how layers run, such as "packed",
    and `widest` the number of tokens of the longest texts.
    """
    return {
        "model": model,
        "precision": precision,
        "path": path,
        "widest_tokens": widest,
        **machine(device_name, total_bytes),
    }


def machine(device_name: str, total_bytes: int) -> dict[str, str | int]:
    """Return the part of a measurement's key that describes a GPU and the libraries."""
    import transformers

    return {
        "device": device_name,
        "device_bytes": total_bytes,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or torch.version.hip or "",
        "transformers": transformers.__version__,
        "gpuclassify": __version__,
    }


def default_folder() -> Path:
    """Return the folder of saved measurements: ``gpuclassify/budgets`` in the user's cache.

    The cache is XDG_CACHE_HOME if set, else ~/Library/Caches on macOS and ~/.cache elsewhere.
    """
    root = "~/Library/Caches" if platform.system() == "Darwin" else "~/.cache"
    root = os.environ.get("XDG_CACHE_HOME") or root
    return Path(root).expanduser() / "gpuclassify" / "budgets"


class MeasurementFile:
    """Small JSON file that saves a measurement of a model on a device for later processes.

    A file that cannot be read, or has another `key`, counts as missing. Any number of processes may
    use the same `folder` (default: `default_folder`).
    """

    def __init__(self, key: dict[str, str | int], folder: Path | None = None) -> None:
        self.key = key
        self._folder = folder

    @property
    def path(self) -> Path:
        """Path of the file. Equal keys have equal paths."""
        canonical = json.dumps(self.key, sort_keys=True, separators=(",", ":"))
        name = f"{hashlib.sha256(canonical.encode()).hexdigest()}.json"
        return (self._folder or default_folder()) / name

    def read(self, build: Callable[[dict[str, Any]], Result]) -> Result | None:
        """Return ``build(content)`` for the file's JSON object, which also has the item "key".

        Returns None if there is no readable file of this key, or if `build` raises an OSError,
        RuntimeError, LookupError, TypeError or ValueError.
        """
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["key"] != self.key:
                raise ValueError("the file describes another model or device")
            return build(content)
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError, LookupError, TypeError, ValueError) as err:
            logger.debug("no saved measurement, measuring again: %s", err)
            return None

    def write(self, **content: object) -> None:
        """Save JSON values by name, together with the key; replace the file atomically.

        OSError and RuntimeError are only logged.
        """
        try:
            replace_file(self.path, json.dumps({"key": self.key, **content}, indent=1).encode())
        except (OSError, RuntimeError) as err:
            logger.debug("the measurement was not saved: %s", err)


class BudgetFile(MeasurementFile):
    """File that saves the measured memory of a model's batches under a `budget_key`."""

    def load(self) -> BatchMemory | None:
        """Return the saved measurement; None if there is no valid one of this key."""
        return self.read(lambda content: BatchMemory(**content["batch_memory"]))

    def save(self, batch_memory: BatchMemory) -> None:
        """Save the larger of each number in `batch_memory` and in the saved measurement, if any."""
        known = self.load()
        if known is not None:
            pairs = zip(asdict(known).items(), asdict(batch_memory).values(), strict=True)
            batch_memory = BatchMemory(**{name: max(a, b) for (name, a), b in pairs})
        if batch_memory != known:
            self.write(batch_memory=asdict(batch_memory))
