"""Runners: texts to outputs on a worker; what all have, and what those of networks share."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuclassify.frames.texts import Texts
from gpuclassify.mapping.pinned_model import PinnedModel
from gpuclassify.mapping.read_share import ReadShare
from gpuclassify.tokenizing.placement import check_library, check_tokenizer, is_for_gpu, refused
from gpuclassify.workers.run_context import RunStats

if TYPE_CHECKING:
    from torch import nn

    from gpuclassify.inference.engine import BatchSettings


class NonFiniteOutputError(ArithmeticError):
    """The model gives NaN or infinity for a text, also alone and in float32."""


@dataclass(frozen=True)
class OwnModule:
    """A torch module that a mapper builds itself.

    Attributes
    ----------
    build : callable
        Makes the module, with random weights, from the parsed ``config.json``.
    definition : callable
        Gives what tells it from other modules: its code, and all that `build` may look at.
    has_weights : bool
        Whether `build` loads the weights as well, so that no file of them is read or checked.
    new_tokenizer : callable, optional
        Gives a fresh tokenizer in place of the checkpoint's.
    """

    build: Callable[[dict[str, Any]], nn.Module]
    definition: Callable[[], tuple[Any, ...]]
    has_weights: bool = False
    new_tokenizer: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Outputs:
    """What a runner computed for some texts.

    Attributes
    ----------
    values : ndarray, shape (windows, outputs) or (windows,)
        float32 numbers, answers as objects, or records; a text's windows stand together.
    order : ndarray of int64, shape (texts,)
        Which text each of those in `values` is.
    read : ReadShare
        What was read of each text, in the order of the texts.
    counts, lengths : ndarray of int64, optional
        Windows of each text (texts,) and the text's own tokens in each window (windows,), without
        special ones, both in the order of `values`; None where every text has one window.
    aggregation : str
        How windows become one row: see `gpuclassify.tokenizing.windows.aggregate`.
    """

    values: np.ndarray
    order: np.ndarray
    read: ReadShare
    counts: np.ndarray | None = None
    lengths: np.ndarray | None = None
    aggregation: str = "mean"

    def by_text(
        self, activate: Callable[[np.ndarray], np.ndarray], outputs: slice = slice(None)
    ) -> np.ndarray:
        """One row a text, in the order of the texts, of activated values of these outputs."""
        values = activate(self.values[..., outputs])
        if self.counts is not None and self.lengths is not None:
            from gpuclassify.tokenizing.windows import aggregate

            values = aggregate(values, self.counts, self.lengths, self.aggregation)
        return values[np.argsort(self.order)]


@dataclass(frozen=True)
class TokenLengths:
    """Tokens of texts, special tokens and prompts included.

    Attributes
    ----------
    whole : ndarray of int64, shape (texts,)
        Of each text before any cut.
    windows : ndarray of int64, shape (windows,)
        Of each window that the model runs; as many as texts, unless long ones have more.
    counts : ndarray of int64, shape (texts,)
        Windows of each text.
    limit : int, optional
        Most tokens of a window.
    """

    whole: np.ndarray
    windows: np.ndarray
    counts: np.ndarray
    limit: int | None


class Runner(ABC):
    """Runs a model over texts, on a worker.

    Parameters
    ----------
    options : TextOptions
    model : PinnedModel
    own_module : OwnModule, optional
        Instead of the network that the checkpoint describes.
    """

    def __init__(self, options: Any, model: PinnedModel, own_module: OwnModule | None) -> None:
        self.options = options
        self.model = model
        self.own_module = own_module

    @abstractmethod
    def run(self, texts: Texts, stats: RunStats, name_text: Callable[[int], str]) -> Outputs:
        """Outputs of distinct texts, all of them finite.

        Parameters
        ----------
        texts : Texts
        stats : RunStats
            Counts of this run are added to it.
        name_text : callable
            What messages call the text at a position.

        Raises
        ------
        NonFiniteOutputError, DocumentTooLargeError
        """

    @abstractmethod
    def token_lengths(self, texts: list[str]) -> TokenLengths:
        """How long texts are for this model, found without its weights."""

    @abstractmethod
    def lease(self, device: Any, dtype: Any) -> contextlib.AbstractContextManager[Any]:
        """The model in memory for the length of a ``with`` block; loaded once a process."""

    @abstractmethod
    def device_and_dtype(self) -> tuple[Any, Any]:
        """Device and dtype that the model runs on and in, in this process; both have a name."""

    @abstractmethod
    def batch_bytes(self) -> int | None:
        """About what the largest batch takes beside the weights; None where that is not known."""

    def check_weights(self) -> None:
        """Raise CheckpointError if the headers of the weights do not fit the model."""
        return

    def check_tokenizer(self) -> None:
        """Raise NotEligibleError if the GPU is to tokenize, and cannot by what the files say."""
        return

    def check_library(self, frame: Any) -> None:
        """Raise TypeError if the GPU is to tokenize a frame that is not on it."""
        return

    def takes_device_texts(self, frame: Any) -> bool:
        """Whether the texts of `frame` stay on the GPU."""
        return False

    @property
    def takes_gpu(self) -> bool:
        """Whether the model runs on a GPU where there is one."""
        return False

    @property
    def resident_key(self) -> Hashable:
        """With what the keys begin by which models in memory are known that this one uses."""
        return self.model.checkpoint

    def evict(self) -> None:
        """Give the memory of the model back, in this process."""
        from gpuclassify.inference.residency import MODELS

        if self.model.is_described:  # else nothing was loaded
            MODELS.evict(self._is_own)

    def _is_own(self, key: Any) -> bool:
        return key[0] == self.resident_key


class NetworkRunner(Runner):
    """Runs a network of torch over the tokens of texts."""

    @property
    def takes_gpu(self) -> bool:
        """Whether the network runs on a GPU where there is one."""
        return self.options.device.startswith(("auto", "cuda"))

    @abstractmethod
    def check_weights(self) -> None:
        """Raise CheckpointError if the headers of the weights do not fit the network."""

    def lease_loaded(
        self, key: tuple[Hashable, ...], load: Callable[[], Any], device: Any, dtype: Any
    ) -> contextlib.AbstractContextManager[Any]:
        """What `load` gives, kept under `key`; others make room for the weights where they must."""
        from gpuclassify.inference.memory import free_bytes
        from gpuclassify.inference.residency import MODELS

        def needed() -> int:
            return sum(self.model.weights_bytes(dtype).values())

        return MODELS.lease(key, load, needed, functools.partial(free_bytes, device))

    def batch_bytes(self) -> int | None:
        """The tokens that a batch holds at most; see `largest_batch_bytes`."""
        from gpuclassify.inference.batch_memory import largest_batch_bytes

        return largest_batch_bytes(self.model.checkpoint.sizes, *self.device_and_dtype())

    def device_and_dtype(self) -> tuple[Any, Any]:
        """The torch device and dtype that the model runs on and in, in this process."""
        from gpuclassify.models.precision import pick_device, pick_dtype

        device = pick_device(self.options.device)
        return device, pick_dtype(self.options, device)

    def check_tokenizer(self) -> None:
        """Raise NotEligibleError if the GPU is to tokenize, and cannot by what the files say."""
        if self.options.tokenizer == "gpu":
            self._refuse_changed_texts()
            check_tokenizer(self.options, self.model.checkpoint)

    def check_library(self, frame: Any) -> None:
        """Raise TypeError if the GPU is to tokenize a frame that is not on it."""
        check_library(self.options, frame)

    def takes_device_texts(self, frame: Any) -> bool:
        """Whether the texts of `frame` stay on the GPU, for a tokenizer that runs there."""
        if self.options.tokenizer == "gpu":
            self._refuse_changed_texts()
        return not self.changes_texts and is_for_gpu(self.options, frame)

    @property
    def changes_texts(self) -> bool:
        """Whether the model is given other texts than those of the column."""
        return self.options.text_template is not None or bool(self.model.prompt)

    def _refuse_changed_texts(self) -> None:
        if self.changes_texts:
            reason = "it is given other texts than those of the column: tokenize on the host"
            raise refused(self.options, reason)

    def batch_settings(self) -> BatchSettings:
        """How batches are to be cut."""
        from gpuclassify.inference.engine import BatchSettings

        options = self.options
        return BatchSettings(
            loader=options.loader,
            sort_by_length=options.sort_by_length,
            batch_size=options.batch_size,
            padding_side=options.padding_side,
            engine=options.engine,
        )
