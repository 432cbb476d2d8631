"""CrossFit's SortedSeqLoader as a loader: it sorts and slices; the batch sizes are ours.

CrossFit 0.0.9 was written for an older RAPIDS. Its loader itself is sound with torch tensors, so
three adjustments inside CrossFit's own namespace let it load on today's stack:

1. ``crossfit.backend.torch`` imports cuvs and cuml on import. A bare package with the same path
   stands in for it, so that its submodules load without them.
2. The loader takes ``clip_tokens`` from ``crossfit.op.tokenize``, which imports parts of cudf that
   are gone, and names a class of ``crossfit.backend.torch.model``, which imports cudf, in an
   annotation. Two small modules stand in for them while the loader is imported. Batches are clipped
   afterwards, by lengths that the host knows: CrossFit's way waits for the GPU in each batch.
3. ``crossarray`` swaps numpy's namespace for the whole process while a loader is built, which other
   threads would see. Torch tensors need no such dispatch, so it does nothing here.

The planning of batches is replaced: CrossFit sorts longest first but sizes a batch by its last,
shortest row, so that its batches can hold many times the memory that it allows.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from gpuclassify.inference.batching import PaddedBatch, StagedTokens, cut_batches, pad
from gpuclassify.inference.memory import BatchLimits

SUPPORTED_VERSION = "0.0.9"
_importing = threading.Lock()


def crossfit_batches(
    tokens: StagedTokens,
    pad_id: int,
    side: str,
    current_limits: Callable[[], BatchLimits],
    type_pad_id: int = 0,
) -> Iterator[PaddedBatch]:
    """Batches of `tokens`, sorted and sliced by CrossFit's SortedSeqLoader.

    The loader wants one rectangle of all rows, so memory grows with rows times the longest row. The
    limits are asked before each batch, so that those lowered by an out-of-memory hold at once.
    """
    loader = _build_loader(tokens, pad_id, side, current_limits, type_pad_id)
    order = loader.sorted_indices.cpu().numpy()
    lengths = tokens.lengths
    start = 0
    for batch in loader:
        rows = order[start : start + len(batch["input_ids"])]
        yield PaddedBatch(
            rows,
            lengths[rows],
            batch["input_ids"],
            batch["attention_mask"],
            batch.get("token_type_ids"),
        )
        start += len(rows)


def _build_loader(
    tokens: StagedTokens,
    pad_id: int,
    side: str,
    current_limits: Callable[[], BatchLimits],
    type_pad_id: int,
) -> Any:
    """A loader over one rectangle of all rows; only its sorted copy outlives this call."""
    whole = pad(tokens, np.arange(len(tokens)), pad_id, side, type_pad_id)
    tensors = {"input_ids": whole.ids, "attention_mask": whole.mask}
    if whole.type_ids is not None:
        tensors["token_type_ids"] = whole.type_ids
    return _loader_class()(tensors, whole.width, side, current_limits)


def keep_padding(token_o: dict[str, Any], **options: Any) -> dict[str, Any]:
    """What stands for CrossFit's ``clip_tokens``, which would ask the GPU for widths."""
    return token_o


@functools.cache
def _loader_class() -> type:
    base = import_loader().SortedSeqLoader

    class BudgetLoader(base):  # type: ignore[misc, valid-type]
        """SortedSeqLoader whose splits keep to our limits."""

        def __init__(
            self,
            data: dict[str, Any],
            width: int,
            side: str,
            current_limits: Callable[[], BatchLimits],
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
            return {name: self._clip(tensor, first) for name, tensor in batch.items()}

        def _clip(self, tensor: Any, first: int) -> Any:
            """Without the columns that are padding in every row from the longest, `first`, on."""
            used = int(self._lengths[first])
            is_right = self.padding_side == "right"
            return tensor[:, :used] if is_right else tensor[:, tensor.shape[1] - used :]

    return BudgetLoader


def import_loader() -> ModuleType:
    """CrossFit's module ``crossfit.backend.torch.loader``, whatever of CrossFit else is broken.

    Raises
    ------
    ModuleNotFoundError
        CrossFit is not installed.
    ImportError
        Another release of it is.
    """
    _check_installed()
    with _importing:
        folder = Path(str(importlib.util.find_spec("crossfit").origin)).parent  # type: ignore[union-attr]
        package = "crossfit.backend.torch"
        if package not in sys.modules:
            sys.modules[package] = _bare_package(package, folder / "backend" / "torch")
        with (
            _stand_ins(
                ("crossfit.op.tokenize", "clip_tokens", keep_padding),
                ("crossfit.backend.torch.model", "Model", object),
            ),
            _quiet_root_logger(folder),
        ):
            loader = importlib.import_module("crossfit.backend.torch.loader")
        crossarray = type(loader.crossarray)
        crossarray.__enter__ = crossarray.__exit__ = lambda *_: None
        importlib.import_module("crossfit.backend.torch.array")
        return loader


@contextlib.contextmanager
def _stand_ins(*modules: tuple[str, str, Any]) -> Iterator[None]:
    """Modules with one attribute each in place of the real ones, for the length of an import."""
    replaced = {name: sys.modules.get(name) for name, _, _ in modules}
    for name, attribute, value in modules:
        module = ModuleType(name)
        setattr(module, attribute, value)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, previous in replaced.items():
            del sys.modules[name]
            if previous is not None:
                sys.modules[name] = previous


@contextlib.contextmanager
def _quiet_root_logger(folder: Path) -> Iterator[None]:
    """Without what modules in `folder` report through the root logger: backends they do without.

    Such a report would also configure logging for the whole process if nobody had, so the handler
    of last resort stands in for a configuration meanwhile.
    """
    root = logging.getLogger()

    def is_foreign(record: logging.LogRecord) -> bool:
        return not Path(record.pathname).is_relative_to(folder)

    placeholder = None if root.handlers else logging.lastResort
    if placeholder is not None:
        root.addHandler(placeholder)
    root.addFilter(is_foreign)
    try:
        yield
    finally:
        root.removeFilter(is_foreign)
        if placeholder is not None:
            root.removeHandler(placeholder)


def _bare_package(name: str, folder: Path) -> ModuleType:
    package = ModuleType(name)
    package.__path__ = [str(folder)]
    package.__spec__ = ModuleSpec(name, None, is_package=True)
    package.__spec__.submodule_search_locations = package.__path__
    return package


def _check_installed() -> None:
    try:
        version = importlib.metadata.version("crossfit")
    except importlib.metadata.PackageNotFoundError as err:
        raise ModuleNotFoundError(
            'loader="crossfit" needs CrossFit (Python 3.11 or 3.12): '
            "pip install 'gpuclassify[crossfit]', or use loader=\"sorted\""
        ) from err
    if version != SUPPORTED_VERSION:
        raise ImportError(
            f'loader="crossfit" works with crossfit {SUPPORTED_VERSION}, found {version}: '
            f'pip install crossfit=={SUPPORTED_VERSION}, or use loader="sorted"'
        )
