"""Batches from CrossFit's SortedSeqLoader. CrossFit sorts and slices; gpuclassify sizes batches.

CrossFit 0.0.9 was written for an older RAPIDS. Its loader itself is sound with torch tensors, so
three adjustments inside CrossFit's namespace let it load on today's stack:

1. ``crossfit.backend.torch`` imports cuvs and cuml. A bare package with its path replaces it.
2. The loader imports two modules that use removed parts of cudf. It gets stand-ins instead.
3. ``crossarray`` replaces numpy's namespace for the whole process while a loader is built, which
   other threads would see. Torch tensors do not need that, so it does nothing here.

The planning of batches is replaced as well: CrossFit sorts longest first but sizes a batch by its
last, shortest row, so that a batch can take many times the memory that CrossFit allows.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from gpuclassify._version import installed_versions
from gpuclassify.inference.batching import PaddedBatch, StagedTokens, cut_batches, pad
from gpuclassify.inference.memory import BatchLimits
from gpuclassify.settings.checks import install

SUPPORTED_VERSION = "0.0.9"
_importing = threading.Lock()


def crossfit_batches(
    tokens: StagedTokens,
    pad_id: int,
    side: str,
    current_limits: Callable[[], BatchLimits],
    type_pad_id: int = 0,
) -> Iterator[PaddedBatch]:
    """Yield padded batches of tokenized texts, longest first, from CrossFit's SortedSeqLoader.

    The loader needs one padded rectangle of all texts, so memory grows with the number of texts
    times the longest text. Batches are padded on `side`, "left" or "right".
    ``current_limits()`` is called before each batch. Raises ImportError at the first one if
    CrossFit is missing, or another release than `SUPPORTED_VERSION`.
    """
    whole = pad(tokens, np.arange(len(tokens)), pad_id, side, type_pad_id)
    tensors = {"input_ids": whole.ids, "attention_mask": whole.mask}
    if whole.type_ids is not None:
        tensors["token_type_ids"] = whole.type_ids
    loader = _loader_class()(tensors, whole.width, side, current_limits)
    del whole, tensors  # keep only the loader's sorted copy
    order, start = loader.sorted_indices.cpu().numpy(), 0
    for batch in loader:
        rows = order[start : start + len(batch["input_ids"])]
        start += len(rows)
        inputs = (batch["input_ids"], batch["attention_mask"], batch.get("token_type_ids"))
        yield PaddedBatch(rows, tokens.lengths[rows], *inputs)


@functools.cache
def _loader_class() -> type:
    base = import_loader().SortedSeqLoader

    class BudgetLoader(base):  # type: ignore[misc, valid-type]
        """SortedSeqLoader with batches within ``current_limits()``, without columns of padding."""

        def __init__(
            self, data: object, width: int, side: str, current_limits: Callable[[], BatchLimits]
        ) -> None:
            self._current_limits = current_limits
            # Lengths are counted where the mask is not 0, so 0 is the "padding id" here.
            tokenizer = SimpleNamespace(pad_token_id=0, padding_side=side)
            model = SimpleNamespace(load_tokenizer=lambda: tokenizer, max_seq_length=lambda: width)
            super().__init__(data, model, sort_key="attention_mask")

        def _find_optimal_splits(self) -> list[int]:
            self._lengths = self.tensor_dict["seq_length"].cpu().numpy()
            self._ranges = cut_batches(self._lengths, self._current_limits)
            return []

        def __next__(self) -> dict[str, Any]:
            self.splits += [stop for _, stop in itertools.islice(self._ranges, 1)]
            first = self.splits[self.current_idx - 1] if self.current_idx else 0
            batch = super().__next__()
            # Drop the columns that are padding in every row. The longest row is `first`.
            used = int(self._lengths[first])
            kept = slice(used) if self.padding_side == "right" else slice(-used, None)
            return {name: tensor[:, kept] for name, tensor in batch.items()}

    return BudgetLoader


def import_loader() -> ModuleType:
    """Import ``crossfit.backend.torch.loader`` with the changes that the module docstring lists.

    Raises ImportError if CrossFit is missing, or is another release than `SUPPORTED_VERSION`.
    """
    version = installed_versions("crossfit").get("crossfit")
    if version is None:
        raise ModuleNotFoundError(
            'loader="crossfit" needs CrossFit (Python 3.11 or 3.12): '
            f'{install("crossfit")}, or use loader="sorted"'
        )
    if version != SUPPORTED_VERSION:
        raise ImportError(
            f'loader="crossfit" works with crossfit {SUPPORTED_VERSION}, found {version}: '
            f'pip install crossfit=={SUPPORTED_VERSION}, or use loader="sorted"'
        )
    with _importing:
        folder = Path(str(importlib.util.find_spec("crossfit").origin)).parent  # type: ignore[union-attr]
        bare: Any = sys.modules.setdefault("crossfit.backend.torch", ModuleType("bare"))
        bare.__path__ = [str(folder / "backend" / "torch")]
        stand_ins: dict[str, Any] = {
            # The original reads widths from the GPU.
            "crossfit.op.tokenize": SimpleNamespace(clip_tokens=lambda token_o, **_: token_o),
            "crossfit.backend.torch.model": SimpleNamespace(Model=object),
        }
        missing = {name: part for name, part in stand_ins.items() if name not in sys.modules}
        sys.modules.update(missing)
        try:
            with _quiet_root_logger(folder):
                loader = importlib.import_module("crossfit.backend.torch.loader")
        finally:
            for name in missing:
                del sys.modules[name]
        crossarray = type(loader.crossarray)
        crossarray.__enter__ = crossarray.__exit__ = lambda *_: None
        importlib.import_module("crossfit.backend.torch.array")
        return loader


@contextlib.contextmanager
def _quiet_root_logger(folder: Path) -> Iterator[None]:
    """Drop log records that modules in `folder` send to the root logger during a ``with`` block."""
    # Without a handler, such a record would also configure logging for the whole process.
    root, handler = logging.getLogger(), logging.NullHandler()

    def is_foreign(record: logging.LogRecord) -> bool:
        return not Path(record.pathname).is_relative_to(folder)

    root.addHandler(handler)
    root.addFilter(is_foreign)
    try:
        yield
    finally:
        root.removeFilter(is_foreign)
        root.removeHandler(handler)
