"""ModelMapper: tokenizes a text column, runs a model, and makes columns of its outputs."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import logging
import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from gpuclassify import hub
from gpuclassify.hub import Identity
from gpuclassify.models.checkpoint import (
    Checkpoint,
    CheckpointError,
    check_tensors,
    position_limit,
    read_checkpoint,
)
from gpuclassify.options import ModelOptions, modern_spellings, parse_options, signature_of
from gpuclassify.partition_map import NewColumns, PartitionMap

if TYPE_CHECKING:
    from gpuclassify.inference.engine import BatchSettings, RunStats
    from gpuclassify.inference.loaded import LoadedModel
    from gpuclassify.inference.tokens import TokenBatch

logger = logging.getLogger(__name__)

EVENT_TOPIC = "gpuclassify"
_COMMIT = re.compile("[0-9a-f]{40}")


class NonFiniteOutputError(ArithmeticError):
    """The model gives NaN or infinity for a text, also alone and in float32."""


class ModelMapper(PartitionMap):
    """Runs one model over a text column.

    The constructor stores settings and reads nothing. The checkpoint is looked up once, when a
    dataset is given: its configuration and the headers of its weights, so that mistakes show
    before any work starts. Weights are loaded on workers, once a process.
    """

    Options: ClassVar[type[ModelOptions]] = ModelOptions
    defaults: ClassVar[dict[str, Any]] = {}
    family: ClassVar[str] = "checkpoint"
    # What `gpuclassify models` shows of a published model.
    purpose: ClassVar[str] = ""
    licence: ClassVar[str] = ""
    is_gated: ClassVar[bool] = False
    _is_out_of_reach = False  # asked once here, and again on each worker

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" not in vars(cls):
            shown = signature_of(cls.Options, cls.defaults, ["token"])
        else:
            _self, *own = inspect.signature(cls.__init__).parameters.values()
            shown = inspect.Signature(own)
        cls.__signature__ = shown  # type: ignore[attr-defined]

    def __init__(self, **arguments: Any) -> None:
        owner = type(self).__qualname__
        given = modern_spellings(owner, self.family, arguments)
        token = given.pop("token", None)  # before anything could show or keep it
        self.options: Any = parse_options(owner, self.Options, self.defaults, given)
        self._known_checkpoint: Checkpoint | None = None
        if token is not None:
            hub.remember_token(self.options.model, token)
            if self.options.base_model is not None:
                hub.remember_token(self.options.base_model, token)

    # What a mapper is, for Dask, pickle and people.

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "_known_checkpoint": self._known_checkpoint}

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return (type(self).__module__, type(self).__qualname__, self.options, self._pinned())

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.options == other.options

    def __hash__(self) -> int:
        return hash((type(self), self.options))

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{field.name}={getattr(self.options, field.name)!r}"
            for field in fields(self.options)
            if getattr(self.options, field.name) != self.defaults.get(field.name, field.default)
            or field.name == "model"
        )
        return f"{type(self).__qualname__}({shown})"

    @property
    def text_field(self) -> str:
        """Name of the text column."""
        return self.options.text_field

    @property
    def max_chars(self) -> int | None:
        """Characters of a text that the model gets to see."""
        return self.options.max_chars

    @property
    def label_field(self) -> str | None:
        """The column whose values a summary counts, if there is one."""
        return None

    @property
    def is_overwriting(self) -> bool:
        """Whether output columns that are there already are replaced."""
        return self.options.overwrite

    # In the client.

    @functools.cached_property
    def identity(self) -> Identity:
        """The model pinned to a commit or to a digest of its directory, looked up once.

        Raises
        ------
        ModelNotFoundError, ModelAccessError, HubUnreachableError
            See `gpuclassify.hub`.
        """
        if self._known_checkpoint is not None:
            return self._known_checkpoint.identity
        return hub.resolve(
            self.options.model, self.options.revision, cache_dir=self.options.cache_dir
        )

    @property
    def checkpoint(self) -> Checkpoint:
        """The model's description, read once from its ``config.json``."""
        if self._known_checkpoint is None:
            checkpoint = read_checkpoint(
                self.identity,
                base_model=self.options.base_model,
                problem_type=getattr(self.options, "problem_type", None),
                cache_dir=self.options.cache_dir,
            )
            self.check_checkpoint(checkpoint)
            self._known_checkpoint = checkpoint
        return self._known_checkpoint

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError or ValueError if the settings do not fit the checkpoint."""
        limit, is_hard = position_limit(checkpoint.sizes)
        wanted = self.options.max_seq_length
        if is_hard and limit is not None and wanted is not None and wanted > limit:
            raise ValueError(
                f"max_seq_length={wanted}, but {checkpoint.identity.name} has positions for "
                f"{limit} tokens: pass at most {limit}"
            )

    def prepare(self) -> None:
        """Check the checkpoint and give workers the token, before any work starts."""
        if self._can_read_checkpoint():
            identity = self.checkpoint.identity
            if identity.is_directory:  # nothing to fetch; refuses files that changed since
                hub.download(identity, cache_dir=self.options.cache_dir)
            check_tensors(self.checkpoint, self.options.cache_dir)
        hub.share_tokens_with_workers(
            name for name in (self.options.model, self.options.base_model) if name
        )

    def _can_read_checkpoint(self) -> bool:
        """Whether the checkpoint can be read here; a client that gives `labels` need not.

        Such a client must pin the Hub revision itself, because nobody else does it once for all.
        """
        if self._is_out_of_reach:
            return False
        try:
            _ = self.checkpoint
        except (hub.HubUnreachableError, hub.ModelNotFoundError) as err:
            if getattr(self.options, "labels", None) is None:
                raise
            is_directory = hub.is_directory_name(self.options.model)
            if not is_directory and not _COMMIT.fullmatch(self.options.revision or ""):
                raise type(err)(
                    f"{err}\nWith labels= the checkpoint may be out of this machine's reach, but "
                    "its revision must then be a full commit: pass revision= with 40 hex digits"
                ) from err
            logger.warning(
                "%s cannot be read here; its settings are checked in the first partition",
                self.options.model,
            )
            self._is_out_of_reach = True
        return not self._is_out_of_reach

    def _pinned(self) -> Any:
        """What tells this model from every other: its description, or as much as is known."""
        if not self._is_out_of_reach:
            with contextlib.suppress(hub.HubUnreachableError, hub.ModelNotFoundError):
                return self.checkpoint
        return (self.options.model, self.options.revision)

    # On a worker.

    @abstractmethod
    def columns(self, outputs: np.ndarray) -> NewColumns:
        """Columns for the model's outputs, float32 (texts, outputs), one value a text."""

    def compute(self, texts: list[str | None], name_row: Callable[[int], str]) -> NewColumns:
        """The new columns for `texts`: each distinct text is run once."""
        from gpuclassify.inference.engine import RunStats
        from gpuclassify.inference.tokens import fold

        distinct, positions = fold(texts)
        null_rows = int((positions < 0).sum())
        stats = RunStats(rows=len(texts), null_rows=null_rows)
        stats.folded_rows = len(texts) - null_rows - len(distinct)
        if distinct:
            outputs = self._infer(
                distinct, stats, lambda i: name_row(int((positions == i).argmax()))
            )
        else:
            outputs = np.zeros((0, self.output_count), dtype=np.float32)
        publish(stats)
        return unfold(self.columns(outputs), positions)

    @property
    def output_count(self) -> int:
        """Outputs of the model for one text."""
        return self.checkpoint.output_count

    def _infer(
        self, texts: list[str], stats: RunStats, name_text: Callable[[int], str]
    ) -> np.ndarray:
        import time

        from gpuclassify.inference import engine
        from gpuclassify.models.precision import pick_device, pick_dtype

        device = pick_device(self.options.device)
        dtype = pick_dtype(self.options, device)
        with self._lease(device, dtype) as model:
            started = time.perf_counter()
            tokens = model.text_tokenizer(self.options.max_seq_length)(texts)
            stats.tokenize_seconds += time.perf_counter() - started
            stats.truncated_texts += tokens.truncated
            key = self._key(device, dtype)
            outputs = engine.run(model, key, tokens, self._batch_settings(), stats)
            for row in np.flatnonzero(~np.isfinite(outputs).all(axis=1)):
                outputs[row] = self._rescue(model, tokens, int(row), name_text)
                stats.rescued_texts += 1
        return outputs

    def _rescue(
        self, model: LoadedModel, tokens: TokenBatch, row: int, name_text: Callable[[int], str]
    ) -> np.ndarray:
        """Outputs of one text, recomputed alone in float32."""
        import torch

        from gpuclassify.inference.engine import run_alone

        side = model.padding_side(self.options.padding_side)
        if model.dtype == torch.float32:
            outputs = run_alone(model, tokens, row, side)
        else:
            with self._lease(model.device, torch.float32) as exact:
                outputs = run_alone(exact, tokens, row, side)
        if not np.isfinite(outputs).all():
            raise NonFiniteOutputError(
                f"{self.options.model} gives {outputs.tolist()} for {name_text(row)}, also alone "
                "and in float32: check the weights, or remove the row"
            )
        return outputs

    def _lease(self, device: Any, dtype: Any) -> Any:
        from gpuclassify.inference.loaded import load_model
        from gpuclassify.inference.memory import free_bytes
        from gpuclassify.inference.residency import MODELS

        def load() -> LoadedModel:
            directory = hub.download(self.checkpoint.identity, cache_dir=self.options.cache_dir)
            return load_model(self.checkpoint, directory, device, dtype)

        def needed_bytes() -> int:
            shapes = hub.read_tensor_shapes(
                self.checkpoint.identity, cache_dir=self.options.cache_dir
            )
            return sum(int(np.prod(shape)) for shape in shapes.values()) * dtype.itemsize

        return MODELS.lease(
            self._key(device, dtype), load, needed_bytes, functools.partial(free_bytes, device)
        )

    def _key(self, device: Any, dtype: Any) -> tuple[Checkpoint, str, str]:
        return (self.checkpoint, str(device), str(dtype))

    def _batch_settings(self) -> BatchSettings:
        from gpuclassify.inference.engine import BatchSettings

        return BatchSettings(
            loader=self.options.loader,
            sort_by_length=self.options.sort_by_length,
            batch_size=self.options.batch_size,
            padding_side=self.options.padding_side,
        )


def unfold(new: NewColumns, positions: np.ndarray) -> NewColumns:
    """Columns of distinct texts as columns of rows; null rows (position -1) get nulls.

    A decision is never null: null rows pass no filter.
    """
    indices = pa.array(positions, mask=positions < 0)
    arrays = {name: array.take(indices) for name, array in new.arrays.items()}
    if new.keep is None:
        return NewColumns(arrays)
    keep = np.zeros(len(positions), dtype=bool)
    keep[positions >= 0] = new.keep[positions[positions >= 0]]
    return NewColumns(arrays, keep, new.keep_field)


_collector: contextvars.ContextVar[list[RunStats] | None] = contextvars.ContextVar(
    "collector", default=None
)


@contextlib.contextmanager
def collected_stats() -> Iterator[list[RunStats]]:
    """The stats of what this thread maps in the block, for a task that reports them itself."""
    runs: list[RunStats] = []
    reset = _collector.set(runs)
    try:
        yield runs
    finally:
        _collector.reset(reset)


def publish(stats: RunStats) -> None:
    """Hand the run's stats to who collects them, and log them as an event of a Dask worker."""
    runs = _collector.get()
    if runs is not None:
        runs.append(stats)
    distributed = sys.modules.get("distributed")
    if distributed is None:
        return
    try:
        worker = distributed.get_worker()
    except ValueError:  # not in a task
        return
    worker.log_event(EVENT_TOPIC, stats.as_dict())


__all__ = ["CheckpointError", "ModelMapper", "NonFiniteOutputError"]
