"""ModelMapper: tokenizes a text column, runs a model, and makes columns of its outputs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from gpuclassify import hub
from gpuclassify.arrow import COLUMN_TYPES, arrow_array, check_column_types
from gpuclassify.coverage import NOTHING_READ, Reading, coverage_columns, coverage_fields
from gpuclassify.events import publish
from gpuclassify.hub import Identity
from gpuclassify.models.checkpoint import (
    Checkpoint,
    CheckpointError,
    find_tokenizer,
    position_limit,
    read_checkpoint,
)
from gpuclassify.models.tensors import check_tensors
from gpuclassify.options import ModelOptions, modern_spellings, parse_options, signature_of
from gpuclassify.own_code import code_digest
from gpuclassify.partition_map import NewColumns, TextMap

if TYPE_CHECKING:
    from torch import nn

    from gpuclassify.inference.engine import BatchSettings
    from gpuclassify.inference.feeding import Feed
    from gpuclassify.inference.loaded import LoadedModel
    from gpuclassify.inference.stats import RunStats
    from gpuclassify.inference.tokens import TextTokenizer, TokenBatch

logger = logging.getLogger(__name__)

# Attributes that are no settings, and those of them that are looked up again elsewhere.
_LOOKED_UP = frozenset({"identity", "_is_out_of_reach"})
_KNOWN = _LOOKED_UP | {"options", "_known_checkpoint"}
_LONGEST_SHOWN = 80  # characters
_COMMIT = re.compile("[0-9a-f]{40}")


class NonFiniteOutputError(ArithmeticError):
    """The model gives NaN or infinity for a text, also alone and in float32."""


class ModelMapper(TextMap):
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
    # Output columns that a subclass declares: name to one of COLUMN_TYPES.
    new_columns: ClassVar[Mapping[str, str]] = {}
    _is_out_of_reach = False  # asked once here, and again on each worker

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_column_types(cls.__qualname__, cls.new_columns)
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
        defaults = dict(self.defaults)
        if given.get("long_text") == "windows":
            defaults.pop("max_chars", None)  # windows are there to read the whole text
        self.options: Any = parse_options(owner, self.Options, defaults, given)
        self._known_checkpoint: Checkpoint | None = None
        if token is not None:
            for name in self.repositories:
                hub.remember_token(name, token)

    # What a mapper is, for Dask, pickle and people.

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _LOOKED_UP}

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return (*self._definition(), self._pinned())

    def _definition(self) -> tuple[Any, ...]:
        """What tells this mapper from another of any class, whatever the model says."""
        owner = type(self)
        own = sorted((name, value) for name, value in vars(self).items() if name not in _KNOWN)
        return (owner.__module__, owner.__qualname__, code_digest(owner), self.options, own)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._definition() == other._definition()

    def __hash__(self) -> int:
        return hash((type(self), self.options))

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{field.name}={_short(getattr(self.options, field.name))}"
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
    def repositories(self) -> list[str]:
        """Every model repository or directory that this mapper may read."""
        return [name for name in (self.options.model, self.options.base_model) if name]

    @property
    def max_chars(self) -> int | None:
        """Characters that are taken of a text: all, if a column has to tell how many there were."""
        return None if coverage_fields(self.options) else self.options.max_chars

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
            checkpoint = self.read_checkpoint()
            self.check_checkpoint(checkpoint)
            self._known_checkpoint = checkpoint
        return self._known_checkpoint

    def read_checkpoint(self) -> Checkpoint:
        """Read what the checkpoint declares; no weights."""
        base_model, cache_dir = self.options.base_model, self.options.cache_dir
        is_own = self._build is not None
        checkpoint = read_checkpoint(
            self.identity,
            base_model=base_model,
            problem_type=getattr(self.options, "problem_type", None),
            has_own_module=is_own,
            cache_dir=cache_dir,
        )
        if is_own and self.new_columns:  # which need not be labels, whatever the file names
            checkpoint = replace(checkpoint, labels=())
        return find_tokenizer(checkpoint, base_model, cache_dir)

    def build_module(self, config: dict[str, Any]) -> nn.Module:
        """Make a torch module of one's own; override it to run another network than transformers'.

        Parameters
        ----------
        config : dict
            The checkpoint's ``config.json``; empty if it has none.

        Returns
        -------
        nn.Module
            With random weights: those in ``model.safetensors`` are loaded into it by name. Its
            ``forward(input_ids, attention_mask)`` takes int64 (rows, width) tensors, the mask with
            1 for a token and 0 for padding, and returns (rows, outputs).
        """
        raise NotImplementedError(f"{type(self).__qualname__} runs transformers' own modules")

    @property
    def _build(self) -> Callable[[dict[str, Any]], nn.Module] | None:
        is_own = type(self).build_module is not ModelMapper.build_module
        return self.build_module if is_own else None

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
            self.check_weights()
        hub.share_tokens_with_workers(self.repositories)

    def check_weights(self) -> None:
        """Raise CheckpointError if the headers of the weights do not fit the network."""
        check_tensors(self.checkpoint, self.options.cache_dir, self._build)
        if self._build is not None:
            from gpuclassify.models.loading import check_own_module

            check_own_module(self.checkpoint, self._build, self.options.unpack_inference_batch)

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

    # What comes out.

    def schema(self) -> pa.Schema:
        """The new columns: the model's, and what was read of each text as far as asked for."""
        return pa.schema([*self.output_fields(), *coverage_fields(self.options)])

    def output_fields(self) -> list[pa.Field]:
        """The columns made of the model's outputs; those in `new_columns` unless overridden."""
        return [pa.field(name, COLUMN_TYPES[kind]) for name, kind in self.new_columns.items()]

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """What can be averaged over the windows of a text, float32 as `outputs`."""
        return outputs

    @abstractmethod
    def columns(self, outputs: np.ndarray) -> NewColumns | Mapping[str, Any]:
        """Columns for activated outputs, float32 (texts, outputs), one value a text.

        An array or list for each name in `new_columns` will do.
        """

    def empty_columns(self) -> NewColumns:
        """The columns of no text at all."""
        return NewColumns({field.name: pa.array([], field.type) for field in self.output_fields()})

    # On a worker.

    def setup(self) -> None:
        """Download the model once for this machine and load it into this process.

        The first partition of a worker does the same; call it to have that done before.
        """
        device, dtype = self._device_and_dtype()
        with self._lease(device, dtype):
            pass

    def teardown(self) -> None:
        """Give the memory of this mapper's model back, here and on the workers of a Dask client."""
        self._evict()
        distributed = sys.modules.get("distributed")
        with contextlib.suppress(ValueError):  # no client
            if distributed is not None:
                distributed.get_client().run(self._evict)

    def _evict(self) -> None:
        from gpuclassify.inference.residency import MODELS

        if self._known_checkpoint is not None:  # else nothing was loaded
            MODELS.evict(self._is_own_model)

    def _is_own_model(self, key: Any) -> bool:
        return key[0] == self.checkpoint

    def compute(self, texts: list[str | None], name_row: Callable[[int], str]) -> NewColumns:
        """The new columns for `texts`: each distinct text is run once."""
        from gpuclassify.inference.stats import RunStats
        from gpuclassify.inference.tokens import fold

        most = self.options.max_chars
        distinct, positions = fold([text if text is None else text[:most] for text in texts])
        null_rows = int((positions < 0).sum())
        stats = RunStats(rows=len(texts), null_rows=null_rows)
        stats.folded_rows = len(texts) - null_rows - len(distinct)
        new, reading = self.empty_columns(), NOTHING_READ
        if distinct:
            outputs, reading = self._infer(
                distinct, stats, lambda i: name_row(int((positions == i).argmax()))
            )
            new = self._as_new_columns(self.columns(outputs), len(distinct))
        publish(stats)
        new = unfold(new, positions)
        coverage = coverage_columns(self.options, texts, positions, reading)
        return replace(new, arrays={**new.arrays, **coverage})

    def _as_new_columns(self, made: NewColumns | Mapping[str, Any], count: int) -> NewColumns:
        """What `columns` gave, if it is what was announced."""
        owner = type(self).__qualname__
        new = made if isinstance(made, NewColumns) else NewColumns(dict(made))
        declared = {field.name: field for field in self.output_fields()}
        if isinstance(made, NewColumns):
            declared.pop(new.keep_field or "", None)
        if sorted(new.arrays) != sorted(declared):
            raise ValueError(
                f"{owner}.columns() gave {sorted(new.arrays)}, and new_columns declares "
                f"{sorted(declared)}: they must be the same"
            )
        arrays = {
            name: arrow_array(new.arrays[name], field, count, f"{owner}.columns()")
            for name, field in declared.items()
        }
        return replace(new, arrays=arrays)

    def model_texts(self, texts: list[str]) -> list[str]:
        """What the model is given for each text."""
        return texts

    def _infer(
        self, texts: list[str], stats: RunStats, name_text: Callable[[int], str]
    ) -> tuple[np.ndarray, Reading]:
        """Activated outputs, one row a text, and what was read of the texts."""
        from gpuclassify.inference.feeding import Feed
        from gpuclassify.inference.windows import aggregate

        order = self._reading_order(texts)
        inverse = np.argsort(order)
        texts = self.model_texts([texts[place] for place in order])
        device, dtype = self._device_and_dtype()
        with self._lease(device, dtype) as model:
            feed = Feed(self._text_tokenizer(model), texts, self._scores_windows, stats)
            outputs = self._run(model, feed, order, stats, name_text)
        values = self.activate(outputs)
        if self._scores_windows:
            how = self.options.window_aggregation
            values = aggregate(values, feed.counts, feed.lengths, how)
        return values[inverse], Reading(feed.window_counts[inverse], feed.seen_share[inverse])

    def _reading_order(self, texts: list[str]) -> np.ndarray:
        """Where each text to be read stands; longest first, because blocks are sorted apart."""
        from gpuclassify.inference.batching import longest_first

        if not self.options.sort_by_length:
            return np.arange(len(texts))
        return longest_first(np.fromiter(map(len, texts), dtype=np.int64, count=len(texts)))

    def _text_tokenizer(self, model: LoadedModel) -> TextTokenizer:
        options = self.options
        return model.text_tokenizer(
            options.max_seq_length, options.has_windows, options.window_overlap
        )

    @property
    def _scores_windows(self) -> bool:
        return self.options.has_windows and self.options.window_aggregation != "first"

    def _run(
        self,
        model: LoadedModel,
        feed: Feed,
        order: np.ndarray,
        stats: RunStats,
        name_text: Callable[[int], str],
    ) -> np.ndarray:
        """Outputs of every window, all of them finite."""
        from gpuclassify.inference import engine

        key = self._key(model.device, model.dtype)
        outputs = engine.run(model, key, feed, self._batch_settings(), stats)[feed.places]
        failed = np.flatnonzero(~np.isfinite(outputs).all(axis=1))
        owners = order[feed.text_of[failed]]
        for place in np.argsort(owners, kind="stable"):  # an error names the first row of its kind
            window, name = int(failed[place]), functools.partial(name_text, int(owners[place]))
            outputs[window] = self._rescue(model, feed.take(window), name)
            stats.rescued_texts += 1
        return outputs

    def _device_and_dtype(self) -> tuple[Any, Any]:
        from gpuclassify.models.precision import pick_device, pick_dtype

        device = pick_device(self.options.device)
        return device, pick_dtype(self.options, device)

    def _rescue(
        self, model: LoadedModel, tokens: TokenBatch, name_text: Callable[[], str]
    ) -> np.ndarray:
        """Outputs of one text, recomputed alone in float32."""
        import torch

        from gpuclassify.inference.engine import run_alone

        side = model.padding_side(self.options.padding_side)
        if model.dtype == torch.float32:
            outputs = run_alone(model, tokens, side)
        else:
            with self._lease(model.device, torch.float32) as exact:
                outputs = run_alone(exact, tokens, side)
        if not np.isfinite(outputs).all():
            raise NonFiniteOutputError(
                f"{self.options.model} gives {outputs.tolist()} for {name_text()}, also alone "
                "and in float32: check the weights, or remove the row"
            )
        return outputs

    def _lease(self, device: Any, dtype: Any) -> Any:
        from gpuclassify.inference.loaded import load_model
        from gpuclassify.inference.memory import free_bytes
        from gpuclassify.inference.residency import MODELS

        def load() -> LoadedModel:
            cache_dir = self.options.cache_dir
            directory = hub.download(self.checkpoint.identity, cache_dir=cache_dir)
            home = self.checkpoint.tokenizer or self.checkpoint.identity
            return load_model(
                self.checkpoint,
                directory,
                device,
                dtype,
                tokenizer_directory=hub.download(home, cache_dir=cache_dir),
                build=self._build,
                unpacks=self.options.unpack_inference_batch,
            )

        def needed_bytes() -> int:
            shapes = hub.read_tensor_shapes(
                self.checkpoint.identity, cache_dir=self.options.cache_dir
            )
            return sum(int(np.prod(shape)) for shape in shapes.values()) * dtype.itemsize

        return MODELS.lease(
            self._key(device, dtype), load, needed_bytes, functools.partial(free_bytes, device)
        )

    def _key(self, device: Any, dtype: Any) -> tuple[Any, ...]:
        return (self.checkpoint, str(device), str(dtype), *self._own_code())

    def _own_code(self) -> tuple[Any, ...]:
        """What tells a module of one's own: its code, and all that building it may look at."""
        if self._build is None:
            return ()
        return tuple(map(repr, self._definition()))

    def _batch_settings(self) -> BatchSettings:
        from gpuclassify.inference.engine import BatchSettings

        return BatchSettings(
            loader=self.options.loader,
            sort_by_length=self.options.sort_by_length,
            batch_size=self.options.batch_size,
            padding_side=self.options.padding_side,
            engine=self.options.engine,
        )


def _short(value: Any) -> str:
    shown = repr(value)
    if len(shown) <= _LONGEST_SHOWN:
        return shown
    return f"<{len(shown):,} characters: {shown[:_LONGEST_SHOWN]}...>"


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


__all__ = ["CheckpointError", "ModelMapper", "NonFiniteOutputError"]
