"""ModelMapper: tokenizes a text column, runs a model, and makes columns of its outputs."""

from __future__ import annotations

import contextlib
import functools
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gpuclassify import hub
from gpuclassify.checkpoint_map import CheckpointMap
from gpuclassify.columns import arrow_array
from gpuclassify.coverage import NOTHING_READ, Reading, coverage_columns, coverage_fields
from gpuclassify.frames import backend_of
from gpuclassify.frames.texts import DeviceTexts, HostTexts, Texts
from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.partition_map import NewColumns
from gpuclassify.tokenizing.placement import NotEligibleError, gpu_tokenizer, is_for_gpu, refused
from gpuclassify.workers.run_stats import publish

if TYPE_CHECKING:
    from gpuclassify.inference.engine import BatchSettings
    from gpuclassify.inference.loaded_model import LoadedModel
    from gpuclassify.tokenizing.prefetch import Source, TokenStream
    from gpuclassify.tokenizing.text_tokenizer import TextTokenizer
    from gpuclassify.tokenizing.token_batch import TokenBatch
    from gpuclassify.workers.run_stats import RunStats


class NonFiniteOutputError(ArithmeticError):
    """The model gives NaN or infinity for a text, also alone and in float32."""


class ModelMapper(CheckpointMap):
    """Runs one model over a text column.

    Weights are loaded on workers, once a process.
    """

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

    def check_tokenizer(self) -> None:
        """Raise NotEligibleError if the GPU is to tokenize, and cannot as far as one can see."""
        self._refuse_other_texts()
        super().check_tokenizer()

    def _refuse_other_texts(self) -> None:
        if self.options.tokenizer == "gpu" and self.changes_texts:
            reason = "it is given other texts than those of the column: tokenize on the host"
            raise refused(self.options, reason)

    @property
    def changes_texts(self) -> bool:
        """Whether the model is given other texts than those of the column."""
        return any(
            getattr(type(self), name) is not getattr(ModelMapper, name)
            for name in ("model_texts", "_infer")
        )

    def read_texts(self, frame: Any) -> Any:
        """The text column: a list of its strings, or `DeviceTexts` if the GPU is to tokenize."""
        self._refuse_other_texts()
        if is_for_gpu(self.options, frame) and not self.changes_texts:
            return backend_of(frame).device_texts(frame, self.text_field, self.max_chars)
        return super().read_texts(frame)

    def compute(self, texts: Any, name_row: Callable[[int], str]) -> NewColumns:
        """The new columns for `texts`: each distinct text is run once."""
        from gpuclassify.workers.run_stats import RunStats

        texts = HostTexts(texts) if isinstance(texts, list) else texts
        distinct, positions = texts.fold(self.options.max_chars)
        null_rows = int((positions < 0).sum())
        stats = RunStats(rows=len(texts), null_rows=null_rows)
        stats.folded_rows = len(texts) - null_rows - len(distinct)
        new, reading = self.empty_columns(), NOTHING_READ
        if len(distinct):
            outputs, reading = self._infer(
                distinct, stats, lambda i: name_row(int((positions == i).argmax()))
            )
            new = self._as_new_columns(self.columns(outputs), len(distinct))
        publish(stats)
        new = unfold(new, positions)
        if coverage_fields(self.options):
            coverage = coverage_columns(self.options, texts.to_list(), positions, reading)
            new = replace(new, arrays={**new.arrays, **coverage})
        return new

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
        self, texts: Any, stats: RunStats, name_text: Callable[[int], str]
    ) -> tuple[np.ndarray, Reading]:
        """Activated outputs, one row a text, and what was read of the texts."""
        from gpuclassify.tokenizing.prefetch import TokenStream
        from gpuclassify.tokenizing.windows import aggregate

        order = self._reading_order(texts)
        inverse = np.argsort(order)
        device, dtype = self._device_and_dtype()
        with self._lease(device, dtype) as model:
            feed = TokenStream(self._source(model, texts.take(order)), stats)
            outputs = self._run(model, feed, order, stats, name_text)
        values = self.activate(outputs)
        if self._scores_windows:
            how = self.options.window_aggregation
            values = aggregate(values, feed.counts, feed.lengths, how)
        return values[inverse], Reading(feed.window_counts[inverse], feed.seen_share[inverse])

    def _source(self, model: LoadedModel, texts: Texts) -> Source:
        """The texts with what tokenizes them."""
        from gpuclassify.tokenizing.prefetch import DeviceSource, HostSource
        from gpuclassify.tokenizing.token_cache import current_store

        on_host = self._text_tokenizer(model)
        if isinstance(texts, DeviceTexts):
            try:
                return DeviceSource(texts, gpu_tokenizer(on_host), on_host)
            except NotEligibleError as err:
                if self.options.tokenizer == "gpu":
                    raise refused(self.options, err) from err
        own = self.model_texts(texts.to_list())
        return HostSource(on_host, own, self._scores_windows, current_store())

    def _reading_order(self, texts: Texts) -> np.ndarray:
        """Where each text to be read stands; longest first, because blocks are sorted apart."""
        from gpuclassify.inference.batching import longest_first

        if not self.options.sort_by_length:
            return np.arange(len(texts))
        return longest_first(texts.char_counts)

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
        feed: TokenStream,
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
        from gpuclassify.inference.loaded_model import load_model
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
