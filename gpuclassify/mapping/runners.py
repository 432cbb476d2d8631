"""Runners compute outputs for texts on a worker; most models use `EncoderRunner`.

A row passes through six lists on its way to the model, and its outputs return::

    rows of a partition
        | Texts.fold: equal texts once, no null       ^ heads.take, in TextMapper.compute
    distinct texts
        | Texts.take: longest first                   ^ Outputs.by_text: one row a text
    sorted texts                                      ^ windows_back, in EncoderRunner.run
        | TokenStream: one window each, or several    |
    windows
        | TokenStream: equal windows once             ^ TokenStream.positions
    distinct windows
        | cut_batches: a part of a block of texts     ^ positions, in engine.run
    rows of a batch
"""

from __future__ import annotations

import contextlib
import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuclassify import hub
from gpuclassify.frames import Texts
from gpuclassify.mapping.pinned_model import PinnedModel
from gpuclassify.models.checkpoint import STATIC, OwnModule
from gpuclassify.workers.run_context import RunStats

if TYPE_CHECKING:
    import torch

    from gpuclassify.inference.loaded_model import LoadedModel
    from gpuclassify.mapping.token_lengths import TokenLengths
    from gpuclassify.tokenizing.prefetch import TokenSource, TokenStream
    from gpuclassify.tokenizing.text_tokenizer import TextTokenizer, TokenBatch

logger = logging.getLogger(__name__)

# Wider dtype of models with non-finite outputs in the default dtype, by `model_key` in the latter.
_WIDER_DTYPES: dict[Hashable, torch.dtype] = {}


class NonFiniteOutputError(ArithmeticError):
    """Error for a text with NaN or infinite outputs, even if it runs alone and in float32."""


@dataclass(frozen=True)
class Outputs:
    """Model outputs for some texts, in the order of the texts, with counts of their windows.

    A window is a sequence of tokens that the model reads at once; long texts may have several.
    """

    # float32 (windows, outputs), or an object or record per window, (windows,). Windows are sorted
    # by text.
    values: np.ndarray
    text_windows: np.ndarray  # windows of each text, int64 (texts,), whether run or not
    # Share of each text's tokens that was read, float32 (texts,): below 1 if it was cut. It is only
    # exact with `seen_field`, because tokens after a cut are not counted otherwise.
    seen_share: np.ndarray
    # Windows run of each text, int64 (texts,); None for one per text.
    counts: np.ndarray | None = None
    # Tokens of the text in each window, without special tokens, int64 (windows,), if known.
    lengths: np.ndarray | None = None
    aggregation: str = "mean"  # aggregation of windows: see `text_tokenizer.aggregate`

    def by_text(
        self, activate: Callable[[np.ndarray], np.ndarray], outputs: slice = slice(None)
    ) -> np.ndarray:
        """Return one row of activated outputs per text, float32 (texts, outputs).

        `activate` converts raw outputs, such as logits, to numbers that can be averaged over
        windows. `outputs` selects the output columns.
        """
        values = activate(self.values[..., outputs])
        if self.counts is not None and self.lengths is not None:
            from gpuclassify.tokenizing.text_tokenizer import aggregate

            values = aggregate(values, self.counts, self.lengths, self.aggregation)
        return values


class Runner(ABC):
    """Base class of runners, which compute a model's outputs for texts on a worker.

    `options` are the mapper's settings, and `model` describes the model. Its network is the
    checkpoint's or, if it is not None, `own_module`, a torch module of the user.
    """

    def __init__(self, options: Any, model: PinnedModel, own_module: OwnModule | None) -> None:
        self.options = options
        self.model = model
        self.own_module = own_module

    @abstractmethod
    def run(self, texts: Texts, stats: RunStats, name_text: Callable[[int], str]) -> Outputs:
        """Compute the model's outputs for distinct texts: at least one, and none of them null.

        Counts and times of the run are added to `stats`. `name_text` returns the name of a text for
        messages, from its index in `texts`. Raises NonFiniteOutputError if outputs of a text are
        NaN or infinite.
        """

    @abstractmethod
    def token_lengths(self, texts: list[str]) -> TokenLengths:
        """Count tokens of texts and of their windows as in a run, without loading the weights."""

    @abstractmethod
    def lease(
        self, device: torch.device, dtype: torch.dtype
    ) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that yields the model, and keeps it in memory within the block.

        It is loaded on the device in this dtype, or a wider one, unless it is cached.
        """

    @abstractmethod
    def device_and_dtype(self) -> tuple[Any, Any]:
        """Return the device and dtype of the model in this process, as the settings select them."""

    @abstractmethod
    def batch_bytes(self) -> int | None:
        """Estimate the memory of the model's largest batch in bytes; None if it is unknown."""

    @property
    def libraries(self) -> tuple[str, ...]:
        """Names of the packages whose versions may change outputs; empty by default."""
        return ()

    def check_weights(self) -> None:
        """Raise CheckpointError if tensors in weight files do not fit the model; no check here."""
        return

    def check_tokenizer(self) -> None:
        """Raise CheckpointError if the tokenizer does not match the model; no check here."""
        return

    @property
    def is_slow(self) -> bool:
        """Whether the model may take minutes per megabyte of text; False by default."""
        return False

    @property
    def takes_gpu(self) -> bool:
        """Whether the model runs on a GPU if there is one; False by default."""
        return False

    @property
    def encoder(self) -> EncoderRunner | None:
        """Runner whose network can run together with other mappers' networks; None by default."""
        return None

    @property
    def resident_key(self) -> Hashable:
        """First element of the model's keys in `MODELS`, this process's cache of loaded models."""
        return self.model.checkpoint

    @property
    def is_loaded(self) -> bool:
        """Whether this process has the model in memory, in any dtype and on any device."""
        from gpuclassify.inference.residency import MODELS

        model_key, keys = self.resident_key, MODELS.keys()
        return any(key[0] == model_key for key in keys)  # type: ignore[index]

    def evict(self) -> None:
        """Remove the model from this process's cache, to free its memory, unless it is in use."""
        from gpuclassify.inference.residency import MODELS

        if self.model.is_described:  # an undescribed model was never loaded
            model_key = self.resident_key
            MODELS.evict(lambda key: key[0] == model_key)  # type: ignore[index]


class NetworkRunner(Runner):
    """Base class of runners that tokenize texts and run a torch network over the token ids."""

    @property
    def is_slow(self) -> bool:
        """Always True, because a network may take minutes per megabyte of text."""
        return True

    @property
    def takes_gpu(self) -> bool:
        """Whether the setting `device` allows a GPU: "auto" or a CUDA device."""
        return self.options.device.startswith(("auto", "cuda"))

    @property
    def libraries(self) -> tuple[str, ...]:
        """Names of the packages that tokenize texts and run the network."""
        adapters = ("peft",) if self.model.has_adapter else ()
        return ("tokenizers", "torch", "transformers", *adapters)

    def lease_loaded(
        self,
        key: tuple[Hashable, ...],
        load: Callable[[], Any],
        device: torch.device,
        dtype: torch.dtype,
    ) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that yields the result of `load`, cached under `key`.

        Before `load` is called, models that are not in use are freed, least recently used first,
        until the device has memory for the model's weights in `dtype`.
        """
        from gpuclassify.inference.memory import free_bytes
        from gpuclassify.inference.residency import MODELS

        def needed() -> int:
            return sum(self.model.weights_bytes(dtype).values())

        return MODELS.lease(key, load, needed, functools.partial(free_bytes, device))

    def batch_bytes(self) -> int | None:
        """Estimate the memory of the network's largest batch in bytes; None if it is unknown."""
        from gpuclassify.inference.memory import largest_batch_bytes

        return largest_batch_bytes(self.model.checkpoint.sizes, *self.device_and_dtype())

    def device_and_dtype(self) -> tuple[Any, Any]:
        """Return the torch device and dtype of the model in this process, by the settings."""
        from gpuclassify.inference.device import pick_device, pick_dtype

        device = pick_device(self.options.device)
        config = {} if self.own_module is not None else self.model.checkpoint.sizes
        return device, pick_dtype(self.options, device, config.get("model_type"))

    def check_tokenizer(self) -> None:
        """Raise CheckpointError if a local tokenizer has token ids that the model lacks."""
        self.model.check_tokenizer()


class EncoderRunner(NetworkRunner):
    """Runner of a network with one row of numbers per text, or per window of a long text."""

    @property
    def encoder(self) -> EncoderRunner | None:
        """The runner itself if other networks may share its leading layers, else None."""
        has_layers = self.own_module is None and self.model.checkpoint.layout != STATIC
        return self if type(self) is EncoderRunner and has_layers else None

    def run(self, texts: Texts, stats: RunStats, name_text: Callable[[int], str]) -> Outputs:
        """Compute the network's outputs for distinct texts.

        Windows (token sequences) with NaN or infinite outputs are run again, alone and in float32.
        """
        from gpuclassify.inference.batching import longest_first
        from gpuclassify.tokenizing.prefetch import TokenSource, current_store

        order = np.arange(len(texts))
        if self.options.sort_by_length:  # longest first, because blocks are sorted separately
            order = longest_first(texts.char_counts)
        device, dtype = self.device_and_dtype()
        with self.lease(device, dtype) as model:
            tokenizer, prompted = self.text_tokenizer(model), self.model.prompted(texts.take(order))
            source = TokenSource(tokenizer, prompted, self.scores_windows, current_store.get())
            stream, outputs = current_run_windows.get()(self, model, source, stats)
            # Restore the order of the texts, and of their windows.
            texts_back = np.argsort(order)
            windows_back = np.argsort(order[stream.text_of], kind="stable")
            values = outputs[stream.positions[windows_back]]
            for row in np.flatnonzero(~self._are_finite(values)):
                window = int(windows_back[row])
                text = int(order[stream.text_of[window]])
                name = functools.partial(name_text, text)
                values[row] = self._rescue(model, stream.take(window), name)
                stats.rescued.add(text)
            lengths = stream.lengths[windows_back] - self.text_tokenizer(model).special_tokens
        return Outputs(
            values,
            stream.window_counts[texts_back],
            stream.seen_share[texts_back],
            stream.counts[texts_back] if self.scores_windows else None,
            lengths,
            self.options.window_aggregation,
        )

    def _are_finite(self, values: np.ndarray) -> np.ndarray:
        return np.isfinite(values).all(axis=1)

    def token_lengths(self, texts: list[str]) -> TokenLengths:
        """Count the tokens of texts and of their windows as in a run, without loading weights."""
        from gpuclassify.mapping.token_lengths import count_tokens

        return count_tokens(self.options, self.model, texts, self.scores_windows)

    @contextlib.contextmanager
    def lease(self, device: torch.device, dtype: torch.dtype) -> Iterator[LoadedModel]:
        """Return a context manager that yields the model, and keeps it in memory within the block.

        If the user has not set a dtype, and outputs for random texts are not finite in `dtype`, a
        wider one is used, logged, and remembered in this process.
        """
        import torch

        from gpuclassify.inference.device import half_with_range
        from gpuclassify.inference.probing import PrecisionError

        key, is_asked_for = self.model_key(device, dtype), self.options.dtype is not None
        if not is_asked_for:
            dtype = _WIDER_DTYPES.get(key, dtype)
        with contextlib.ExitStack() as kept:
            while True:
                try:
                    model = kept.enter_context(self._lease(device, dtype))
                    if not is_asked_for:
                        model.check_range()
                    break
                except PrecisionError as err:
                    if is_asked_for:
                        raise
                    kept.pop_all().close()  # release the model for eviction
                    wider = half_with_range() if dtype == torch.float16 else torch.float32
                    dtype = torch.float32 if wider == dtype else wider
                    _WIDER_DTYPES[key] = dtype
                    name = str(dtype).removeprefix("torch.")
                    # Log the text, since a kept record of the error would keep the model.
                    logger.warning("%s runs in %s: %s", self.options.model, name, str(err))
            yield model

    def _lease(
        self, device: torch.device, dtype: torch.dtype
    ) -> contextlib.AbstractContextManager[LoadedModel]:
        from gpuclassify.inference.loaded_model import load_model

        checkpoint, cache_dir = self.model.checkpoint, self.options.cache_dir

        def load() -> LoadedModel:
            model = load_model(
                checkpoint,
                hub.download(checkpoint.base or checkpoint.identity, cache_dir=cache_dir),
                device,
                dtype,
                self.own_module,
                tokenizer_directory=hub.download(self.model.tokenizer_home, cache_dir=cache_dir),
                adapter_directory=hub.download(checkpoint.identity, cache_dir=cache_dir),
                unpacks=self.options.unpack_inference_batch,
            )
            self.model.check_directories()  # raises if they have changed during loading
            return model

        return self.lease_loaded(self.model_key(device, dtype), load, device, dtype)

    def check_weights(self) -> None:
        """Raise CheckpointError if tensors in the weight files do not fit the network."""
        self.model.check_weights(self.own_module)

    def model_key(self, device: torch.device, dtype: torch.dtype) -> tuple[Hashable, ...]:
        """Return the model's key in `MODELS`, with device, dtype and the code of an own module."""
        definition = (
            () if self.own_module is None else tuple(map(repr, self.own_module.definition()))
        )
        return (self.resident_key, str(device), str(dtype), *definition)

    def run_key(self, model: LoadedModel) -> tuple[Hashable, ...]:
        """Return the key under which limits of batches and outputs of models are cached."""
        return self.model_key(model.device, model.dtype), self.options.engine

    def text_tokenizer(self, model: LoadedModel) -> TextTokenizer:
        """Return the model's tokenizer, which cuts texts to windows as the settings say."""
        options = self.options
        length = options.max_seq_length or model.max_tokens
        how = {"counts_rest": options.seen_field is not None, "pairing": self.model.pairing}
        return model.text_tokenizer(length, **how, **options.cut_of(length))

    @property
    def scores_windows(self) -> bool:
        """Whether all windows of a long text are run, instead of only the first."""
        return self.options.has_windows and self.options.window_aggregation != "first"

    def _rescue(
        self, model: LoadedModel, tokens: TokenBatch, name_text: Callable[[], str]
    ) -> np.ndarray:
        """Return outputs of the only window in `tokens`, run alone and in float32, (outputs,)."""
        import torch

        from gpuclassify.inference.engine import run_alone

        side = model.padding_side(self.options.padding_side)
        if model.dtype == torch.float32:
            outputs = run_alone(model, tokens, side)
        else:
            with self.lease(model.device, torch.float32) as exact:
                outputs = run_alone(exact, tokens, side)
        if not np.isfinite(outputs).all():
            raise NonFiniteOutputError(
                f"{self.options.model} gives {outputs.tolist()} for {name_text()}, also alone "
                "and in float32: check the weights, or remove the row"
            )
        return outputs


def run_windows(
    runner: EncoderRunner, model: LoadedModel, source: TokenSource, stats: RunStats
) -> tuple[TokenStream, np.ndarray]:
    """Tokenize texts, and compute the outputs of distinct windows, float32 (windows, outputs).

    Returns the stream of windows (token sequences), which maps them back to the texts, and the
    outputs; for a token classifier, these are an object array with an array per window.
    """
    from gpuclassify.inference import engine
    from gpuclassify.tokenizing.prefetch import TokenStream

    stream = TokenStream(source, stats)
    return stream, engine.run(model, runner.run_key(model), stream, runner.options, stats)


# Function to call as `run_windows` in this thread; replaced in `mapping/shared_layers.py`.
current_run_windows: ContextVar[Callable[..., tuple[TokenStream, np.ndarray]]] = ContextVar(
    "current_run_windows", default=run_windows
)
