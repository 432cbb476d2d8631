"""What was measured of models' memory, kept for later processes in the user's cache."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gpuclassify.inference.batch_memory import (
    MOST_SAFETY_PERCENT,
    BatchMemory,
    MeasuredBudget,
    measure_batch_memory,
    unmeasured_limits,
)
from gpuclassify.inference.memory import BatchLimits, CudaMemory, ScoreRule, cpu_limits

logger = logging.getLogger(__name__)

Key = Mapping[str, str | int]


class BudgetStore:
    """What batches take, by key, one small file each that a person can read.

    Files that cannot be read or written, or that hold something else, are as good as none: the
    memory is measured again. Any number of processes may use the same folder: a file appears
    whole, and of those that write it at once one stays.

    Parameters
    ----------
    folder : Path, optional
        Made when it is first needed. Without one, nothing is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def load(self, key: Key) -> BatchMemory | None:
        """What the batches of `key` take, if it is known."""
        path = self._path(key)
        if path is None:
            return None
        try:
            return _parse(path.read_text(encoding="utf-8"), key)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as err:
            logger.debug("%s is of no use, measuring again: %s", path, err)
            return None

    def save(self, key: Key, batch_memory: BatchMemory) -> None:
        """Keep what batches take; where it is known already, the larger of each number."""
        path = self._path(key)
        if path is None:
            return
        known = self.load(key)
        if known is not None:
            pairs = zip(asdict(known).items(), asdict(batch_memory).values(), strict=True)
            batch_memory = BatchMemory(**{name: max(a, b) for (name, a), b in pairs})
        if batch_memory == known:
            return
        try:
            _replace(
                path, json.dumps({"key": dict(key), "batch_memory": asdict(batch_memory)}, indent=1)
            )
        except OSError as err:
            logger.debug("cannot write %s, later processes measure again: %s", path, err)

    def _path(self, key: Key) -> Path | None:
        if self.folder is None:
            return None
        canonical = json.dumps(dict(key), sort_keys=True, separators=(",", ":"))
        return self.folder / f"{hashlib.sha256(canonical.encode()).hexdigest()}.json"


def default_folder() -> Path | None:
    """Where the user's cache is: budgets are kept there, below ``gpuclassify/budgets``.

    In ``XDG_CACHE_HOME`` if that is set, else in ``LOCALAPPDATA`` on Windows, in
    ``~/Library/Caches`` on macOS and in ``~/.cache`` elsewhere. None for a user without a home.
    """
    system = platform.system()
    root = os.environ.get("XDG_CACHE_HOME")
    if not root and system == "Windows":
        root = os.environ.get("LOCALAPPDATA")
    home = "~/Library/Caches" if system == "Darwin" else "~/.cache"
    try:
        return Path(root or home).expanduser() / "gpuclassify" / "budgets"
    except RuntimeError as err:
        logger.debug("no place for budgets: %s", err)
        return None


def budget_key(
    model: str, precision: str, path: str, widest: int, device_name: str, total_bytes: int
) -> dict[str, str | int]:
    """All that the memory of batches depends on.

    Parameters
    ----------
    model : str
        Name and revision, or whatever else tells models apart.
    precision : str
        Of weights and activations.
    path : str
        How layers are run, such as "packed" or "padded".
    widest : int
        Most tokens that a text can have.
    device_name : str
    total_bytes : int
        Of the device's memory.
    """
    import transformers

    from gpuclassify._version import __version__

    return {
        "model": model,
        "precision": precision,
        "path": path,
        "widest_tokens": widest,
        "device": device_name,
        "device_bytes": total_bytes,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or torch.version.hip or "",
        "transformers": transformers.__version__,
        "gpuclassify": __version__,
    }


def find_budget(
    device: torch.device,
    probe: Callable[[int, int], Any],
    widest: int,
    *,
    model: str | None = None,
    precision: str = "",
    path: str = "padded",
    score_rule: ScoreRule | None = None,
    memory: CudaMemory | None = None,
    store: BudgetStore | None = None,
) -> BatchLimits | MeasuredBudget:
    """What batches of a model may hold on `device`: known for a CPU, measured or kept for a GPU.

    Parameters
    ----------
    device : torch.device
    probe : callable
        ``probe(rows, width)`` runs one batch of that size, as the batches to come will be run.
    widest : int
        Most tokens that a text can have.
    model, precision, path : str
        As in `budget_key`. Without a model, what is measured is not kept.
    score_rule : ScoreRule, optional
        For models that materialise attention scores.
    memory : CudaMemory, optional
        The device's; another one stands for a device of one's own.
    store : BudgetStore, optional
        That of the user's cache if none is given.

    Raises
    ------
    RuntimeError or MemoryError
        What the probe raises; see `measure_batch_memory`.
    """
    if device.type != "cuda":
        return cpu_limits(score_rule)
    memory = memory or CudaMemory(device)
    if not memory.is_counted:
        return unmeasured_limits(score_rule)
    measure = functools.partial(measure_batch_memory, probe, widest, memory.peak_bytes)
    if model is None:
        return MeasuredBudget(
            measure(), memory.free_bytes, score_rule, held_bytes=memory.held_bytes
        )
    store = store or BudgetStore(default_folder())
    key = budget_key(model, precision, path, widest, memory.name, memory.total_bytes)
    batch_memory = store.load(key)
    if batch_memory is None:
        started = time.perf_counter()
        batch_memory = measure()
        elapsed_seconds = time.perf_counter() - started
        logger.info("%s on %s: %s, in %.1f s", model, device, batch_memory, elapsed_seconds)
        store.save(key, batch_memory)
    return MeasuredBudget(
        batch_memory,
        memory.free_bytes,
        score_rule,
        save=functools.partial(store.save, key),
        held_bytes=memory.held_bytes,
    )


def _parse(text: str, key: Key) -> BatchMemory:
    """What a file says; ValueError if it is not this key's, or none at all."""
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("key") != dict(key):
        raise ValueError("it is not about this model and device")
    numbers = content.get("batch_memory")
    names = ("fixed_bytes", "token_bytes", "safety_percent")
    if not isinstance(numbers, dict) or set(numbers) != set(names):
        raise ValueError(f"batch memory has the numbers {', '.join(names)}")
    if any(type(number) is not int for number in numbers.values()):
        raise ValueError("its numbers are whole")
    batch_memory = BatchMemory(**numbers)
    is_possible = batch_memory.fixed_bytes >= 0 and batch_memory.token_bytes >= 1
    if not is_possible or not 100 <= batch_memory.safety_percent <= MOST_SAFETY_PERCENT:
        raise ValueError(f"{batch_memory} is not possible")
    return batch_memory


def _replace(path: Path, text: str) -> None:
    """Write a file that no reader sees half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(prefix=".draft-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(draft).replace(path)
    except OSError:
        Path(draft).unlink(missing_ok=True)
        raise
