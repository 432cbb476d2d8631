"""How much memory there is, what batches take of it, and what to do when one did not fit.

On a CPU limits are known. On a GPU a few batches are measured, larger ones are planned for the
memory that is free, and what was measured is kept for later processes in the user's cache.
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

# On a core, batches of 512 to 2,048 tokens are alike; beyond, activations leave the caches. Smaller
# ones leave less to wait for at a partition's end, when cores have no batch any more.
CPU_MAX_TOKENS = 1_024
CPU_ENOUGH_TOKENS = 512
CPU_WIDTH = 768  # of models for which that holds; narrower states leave room for more tokens
CPU_MOST_TIMES = 16  # as many: a batch costs milliseconds however little it computes
CPU_SCORE_BYTES = 64 * 2**20
# On a GPU more tokens than this fill the device no better, while padding grows.
GPU_MAX_TOKENS = 65_536
GPU_ENOUGH_TOKENS = 16_384
GPU_SCORE_BYTES = 2 * 2**30
GPU_SHARE = 0.8  # of the free memory; the rest is for fragmentation and for cuDF beside the model
# Where torch's memory is not counted, and free memory is not known either: RMM counts apart.
GPU_UNMEASURED_TOKENS = 16_384
GPU_UNMEASURED_SCORE_BYTES = 2**29
# Large enough that the allocator's rounding, about a megabyte a tensor, is a small part.
PROBE_TOKENS = 8_192
PROBE_RATIO = 4  # of the larger batch to the smaller
# A measurement is not believed to be wrong by more; what runs out beyond has other reasons.
MOST_SAFETY_PERCENT = 800
PEAK_ATTEMPTS = 3
LIVE_SCORE_COPIES = 4  # scores, two relative terms and their softmax are alive together
# Of a token's width, alive together in a layer: input, residual, three projections, result.
STATES_A_LAYER = 6
# What configurations call the width of the feed-forward network.
INNER_WIDTHS = ("intermediate_size", "hidden_dim", "n_inner", "ffn_dim")

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class DocumentTooLargeError(MemoryError):
    """Error raised when a single text does not fit on the device."""


# What a batch may hold.


@dataclass(frozen=True)
class ScoreRule:
    """Size of the attention scores that a model materialises.

    Relative-position terms are at least `min_span` wide: scores have
    ``rows * heads * width * max(width, min_span)`` elements.
    """

    heads: int
    min_span: int
    item_bytes: int

    def size_bytes(self, rows: int, width: int) -> int:
        """Return the bytes of all live copies for `rows` texts padded to `width` tokens."""
        elements = rows * self.heads * width * max(width, self.min_span)
        return elements * self.item_bytes * LIVE_SCORE_COPIES


@dataclass(frozen=True)
class BatchLimits:
    """Limits of one batch. At least one row always fits."""

    max_tokens: int  # rows times the padded width; of packed batches the real tokens
    max_rows: int | None = None
    score_rule: ScoreRule | None = None  # for models that materialise attention scores
    max_score_bytes: int = CPU_SCORE_BYTES
    is_equal_length: bool = False  # never pad: only texts of equal length share a batch
    # From this size on a larger batch is no faster, so that one is ended rather than padded.
    enough_tokens: int = CPU_ENOUGH_TOKENS
    is_packed: bool = False
    # What torch should hold at most while such a batch runs, model included, where that was
    # measured. A single row that is larger than `max_tokens` may take more.
    planned_bytes: int | None = None

    def rows(self, width: int) -> int:
        """Return how many rows of `width` tokens fit, at least 1."""
        rows = self.max_tokens // width
        if self.score_rule is not None:
            rows = min(rows, self.max_score_bytes // self.score_rule.size_bytes(1, width))
        if self.max_rows is not None:
            rows = min(rows, self.max_rows)
        return max(1, rows)

    def below(self, rows: int, width: int) -> BatchLimits:
        """Return limits that allow half of a batch that ran out of memory."""
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
    """Plan limits that keep every batch of several rows within its share of free memory."""
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
    """Return the limits on a CPU: about as many bytes whatever the `width` of a token's state."""
    times = min(CPU_MOST_TIMES, max(1, CPU_WIDTH // (width or CPU_WIDTH)))
    return BatchLimits(
        times * CPU_MAX_TOKENS, score_rule=score_rule, enough_tokens=times * CPU_ENOUGH_TOKENS
    )


# What batches take.


def largest_batch_bytes(
    sizes: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> int | None:
    """Estimate the bytes of the largest batch beside the weights; None if sizes are not known.

    Told without running it: the tokens that a batch holds at most, with the states of one layer,
    and for attention that materialises its scores what is allowed for them. A GPU with less free
    memory gets smaller batches. `sizes` is the configuration of the network.
    """
    width = state_width(sizes)
    if width is None:
        return None
    numbers = STATES_A_LAYER * width + 2 * (first_size(sizes, INNER_WIDTHS) or 4 * width)
    is_gpu = device.type == "cuda"
    tokens = GPU_MAX_TOKENS if is_gpu else cpu_limits(width).max_tokens
    scores = GPU_SCORE_BYTES if is_gpu else CPU_SCORE_BYTES
    has_scores = bool(sizes.get("relative_attention"))
    return tokens * numbers * dtype.itemsize + (scores if has_scores else 0)


@dataclass(frozen=True)
class BatchMemory:
    """Bytes that a batch takes beside the model's weights."""

    fixed_bytes: int = field(metadata={"least": 0})  # whatever the batch
    token_bytes: int  # for each token that its layers run, padding included
    # How much of that is planned; more after a batch ran out of memory that should have fitted.
    safety_percent: int = field(default=100, metadata={"least": 100})

    def __post_init__(self) -> None:
        check_settings(self)

    def size_bytes(self, tokens: int) -> int:
        """Return the bytes planned for a batch of `tokens` tokens."""
        return (self.fixed_bytes + self.token_bytes * tokens) * self.safety_percent // 100

    def most_tokens(self, usable_bytes: int) -> int:
        """Return the tokens of the largest batch for which no more is planned; 0 if none."""
        measured_bytes = usable_bytes * 100 // self.safety_percent
        return max(0, (measured_bytes - self.fixed_bytes) // self.token_bytes)

    def after_failure(self, tokens: int, free_bytes: int) -> BatchMemory:
        """Return the estimate after a batch of `tokens` tokens ran out of memory.

        If more is planned for it than is free now that it was given back, something else has taken
        memory meanwhile, and this is as good as before. Otherwise, with as much free, half of that
        batch will be planned.
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
    """Measure the memory of a model's batches, on batches as wide as its texts can be.

    Two sizes tell what every batch takes from what its tokens take. Narrower batches take less a
    token, if they differ at all. ``probe(rows, width)`` runs one batch of that size; `peak_bytes`
    runs an action and tells how many bytes it had taken at most. Whatever the probe raises is
    raised; that memory ran out, only if one token alone does not fit.
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


# What is remembered in this process.


class Budget:
    """Limits of one model's batches, below what ran out of memory. Safe for threads.

    Limits are the same in every run. What batches were measured to take is planned for the memory
    that the device has free then, and saved when an out-of-memory has corrected it.
    """

    def __init__(
        self,
        known: BatchLimits | BatchMemory,
        memory: CudaMemory | None = None,
        score_rule: ScoreRule | None = None,
        save: Callable[[BatchMemory], Any] = lambda batch_memory: None,
    ) -> None:
        self.known = known
        self._memory: Any = memory  # none is asked where limits are known
        self._score_rule = score_rule
        self._save = save
        self._failures: set[tuple[int, int]] = set()
        self._lock = threading.Lock()

    def limits(self) -> BatchLimits:
        """Return limits for the memory that is free now, whatever failed before."""
        known = self.known
        if isinstance(known, BatchLimits):
            return known
        limits = plan_limits(known, self._memory.free_bytes(), self._score_rule)
        batch_bytes = known.size_bytes(limits.max_tokens)
        return replace(limits, planned_bytes=self._memory.held_bytes() + batch_bytes)

    def capped(self, limits: BatchLimits) -> BatchLimits:
        """Lower the limits below all that ran out of memory."""
        with self._lock:
            failures = list(self._failures)
        for rows, width in failures:
            limits = limits.below(rows, width)
        return limits

    def lower(self, rows: int, width: int) -> None:
        """Record that a batch of this size ran out of memory: none as large is tried again."""
        with self._lock:
            self._failures.add((rows, width))
            if isinstance(self.known, BatchLimits):
                return
            free_bytes = self._memory.free_bytes()
            corrected = self.known.after_failure(rows * width, free_bytes)
            if corrected == self.known:
                return
            self.known = corrected
        logger.info("%d tokens did not fit into %d bytes: %s", rows * width, free_bytes, corrected)
        self._save(corrected)


BUDGETS: dict[Hashable, Budget] = {}  # of the models of this process


class RunLimits:
    """Limits of one run of the model `key`, whose budget ``find()`` gives the first time.

    Free memory is asked for before the first batch, when all that the run holds beside its batches
    is there, and after an out-of-memory.
    """

    def __init__(self, key: Hashable, find: Callable[[], Budget]) -> None:
        self._budget = BUDGETS.get(key) or BUDGETS.setdefault(key, find())
        self._limits: BatchLimits | None = None

    def current(self) -> BatchLimits:
        """Return the limits of the next batch; cheap enough to call before each."""
        if self._limits is None:
            self._limits = self._budget.limits()
        return self._budget.capped(self._limits)

    def lower(self, rows: int, width: int) -> None:
        """Record that a batch of this size ran out of memory, in this run and in later ones."""
        self._budget.lower(rows, width)
        self._limits = None


def halve_on_oom(
    step: Callable[[int, int], Result],
    start: int,
    stop: int,
    on_out_of_memory: Callable[[int], None],
) -> list[Result]:
    """Collect the outputs of ``step(start, stop)`` in row order, halving what exhausts memory.

    What was too many for one part is not tried again on the next. `on_out_of_memory` is called with
    how many rows were too many, after `step` has released what it held. DocumentTooLargeError if a
    single row exhausts memory.
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


# What a device has.


class CudaMemory:
    """Memory of a GPU, as the driver and torch's allocator report it."""

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
        """Return the bytes of all tensors that there are."""
        return torch.cuda.memory_allocated(self.device) if self.is_counted else 0

    def most_held_bytes(self) -> int:
        """Return the most that `held_bytes` has been since `forget_peak`."""
        return torch.cuda.max_memory_allocated(self.device)

    def forget_peak(self) -> None:
        """Reset the peak that `most_held_bytes` returns."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def free_bytes(self) -> int:
        """Return the bytes that torch may still take.

        What no process or library has taken, and what torch's allocator, or RMM's pool in its
        place, keeps without using it; at most what the process's share leaves.
        """
        free, total = torch.cuda.mem_get_info(self.device)
        if not self.is_counted:
            kept, left = _free_of_rmm(self.device.index)
            return free + kept if left is None else max(0, min(free + kept, left))
        used = torch.cuda.memory_allocated(self.device)
        kept = torch.cuda.memory_reserved(self.device) - used
        try:
            share = torch.cuda.get_per_process_memory_fraction(self.device)
        except RuntimeError:  # not every allocator knows
            share = 1.0
        return max(0, min(free + kept, int(share * total) - used))

    def peak_bytes(self, action: Callable[[], Any]) -> int:
        """Measure the bytes that ``action()`` had taken at most, beyond what was taken before.

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


def _free_of_rmm(number: int) -> tuple[int, int | None]:
    """Return the unused bytes that RMM's pool of a device keeps, and what its limit leaves.

    RMM tells the size of a pool, and only adaptors around one tell what is taken of it: without
    any, as where a cluster was not started by `get_client`, the pool counts as full.
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
    """Return the bytes that a model may still take on `device`."""
    return CudaMemory(device).free_bytes() if device.type == "cuda" else free_host_bytes()


# What is kept for later processes.


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
    """Find the limits of a model's batches: known for a CPU, measured or kept for a GPU.

    ``probe(rows, width)`` runs one batch as the batches to come will be run, of texts of up to
    `widest` tokens; `model`, `precision` and `path` are those of `budget_key`; `width` is that of
    a token's state, if known. Without a model, what is measured is not kept. The folder is that of
    the user's cache unless another is named.
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
    """Return all that the memory of batches depends on.

    `model` is a name and revision, or whatever else tells models apart; `precision` that of weights
    and activations; `path` how layers are run, such as "packed" or "padded".
    """
    return {
        "model": model,
        "precision": precision,
        "path": path,
        "widest_tokens": widest,
        **machine(device_name, total_bytes),
    }


def machine(device_name: str, total_bytes: int) -> dict[str, str | int]:
    """Describe a device, and the libraries that its measurements depend on."""
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
    """Return the folder of budgets: ``gpuclassify/budgets`` in the user's cache."""
    root = "~/Library/Caches" if platform.system() == "Darwin" else "~/.cache"
    root = os.environ.get("XDG_CACHE_HOME") or root
    return Path(root).expanduser() / "gpuclassify" / "budgets"


class MeasurementFile:
    """Measurements for `key`, in a small file that a person can read.

    A file that cannot be read or written, or that holds something else, is as good as none, as is
    the cache of a user without a home: it is measured again. Any number of processes may use the
    same folder, which is made when it is first needed.
    """

    def __init__(self, key: dict[str, str | int], folder: Path | None = None) -> None:
        self.key = key
        self._folder = folder

    @property
    def path(self) -> Path:
        """Path of the file, the same for equal keys."""
        canonical = json.dumps(self.key, sort_keys=True, separators=(",", ":"))
        name = f"{hashlib.sha256(canonical.encode()).hexdigest()}.json"
        return (self._folder or default_folder()) / name

    def read(self, build: Callable[[dict[str, Any]], Result]) -> Result | None:
        """Build a result from what is kept; None if nothing is."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content["key"] != self.key:
                raise ValueError("it is about another model or device")
            return build(content)
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError, LookupError, TypeError, ValueError) as err:
            logger.debug("what was measured is not kept, measuring again: %s", err)
            return None

    def write(self, **content: object) -> None:
        """Keep a measurement."""
        try:
            replace_file(self.path, json.dumps({"key": self.key, **content}, indent=1).encode())
        except (OSError, RuntimeError) as err:
            logger.debug("what was measured is not kept, measured again later: %s", err)


class BudgetFile(MeasurementFile):
    """File of the memory that batches of `key` take."""

    def load(self) -> BatchMemory | None:
        """Return the memory that batches take, if it is known."""
        return self.read(lambda content: BatchMemory(**content["batch_memory"]))

    def save(self, batch_memory: BatchMemory) -> None:
        """Keep the memory that batches take; if it is known already, the larger of each number."""
        known = self.load()
        if known is not None:
            pairs = zip(asdict(known).items(), asdict(batch_memory).values(), strict=True)
            batch_memory = BatchMemory(**{name: max(a, b) for (name, a), b in pairs})
        if batch_memory != known:
            self.write(batch_memory=asdict(batch_memory))
