"""EncoderRunner: a network that gives every text, or every window of it, a row of numbers."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuclassify import hub
from gpuclassify.frames.texts import DeviceTexts, Texts
from gpuclassify.mapping.read_share import ReadShare
from gpuclassify.mapping.runners import NetworkRunner, NonFiniteOutputError, Outputs, TokenLengths
from gpuclassify.models.known_shapes import known_shapes
from gpuclassify.models.tensors import check_headers
from gpuclassify.tokenizing.placement import NotEligibleError, gpu_tokenizer, refused
from gpuclassify.workers.run_context import RunStats

if TYPE_CHECKING:
    from gpuclassify.inference.loaded_model import LoadedModel
    from gpuclassify.tokenizing.prefetch import Source, TokenStream
    from gpuclassify.tokenizing.text_tokenizer import TextTokenizer
    from gpuclassify.tokenizing.token_batch import TokenBatch


logger = logging.getLogger(__name__)

_FLOAT32_ONLY: set[Hashable] = set()  # keys of models that do not run in their precision
_TEXTS_AT_A_TIME = 256  # whose encodings are alive together, to count tokens


class EncoderRunner(NetworkRunner):
    """Runs a network that gives every text, or every window of it, a row of numbers."""

    def run(self, texts: Texts, stats: RunStats, name_text: Callable[[int], str]) -> Outputs:
        """Outputs of distinct texts; see `Runner.run`."""
        from gpuclassify.inference.batching import longest_first
        from gpuclassify.tokenizing.prefetch import TokenStream

        order = np.arange(len(texts))
        if self.options.sort_by_length:  # longest first, because blocks are sorted apart
            order = longest_first(texts.char_counts)
        device, dtype = self.device_and_dtype()
        with self.lease(device, dtype) as model:
            stream = TokenStream(self._source(model, texts.take(order)), stats)
            values = self._run_finite(model, stream, order, stats, name_text)
            special = self._text_tokenizer(model).special_tokens
        inverse = np.argsort(order)
        read = ReadShare(stream.window_counts[inverse], stream.seen_share[inverse])
        if not self._scores_windows:
            return Outputs(values, order, read)
        how = self.options.window_aggregation
        return Outputs(values, order, read, stream.counts, stream.lengths - special, how)

    def token_lengths(self, texts: list[str]) -> TokenLengths:
        """How long texts are for this model; see `Runner.token_lengths`."""
        from gpuclassify.models.loading import longest_input
        from gpuclassify.tokenizing.text_tokenizer import TextTokenizer
        from gpuclassify.tokenizing.windows import all_windows, first_windows

        options, tokenizer = self.options, self.model.new_tokenizer()
        limit = options.max_seq_length or longest_input(self.model.checkpoint, tokenizer)
        cut = {"overlap": options.overlap_of(limit), "end_chars": options.chars_of_ends}
        encode = TextTokenizer(tokenizer, limit, **cut).encode
        pick = all_windows if self._scores_windows else first_windows
        whole, windows, counts = [], [], []
        for start in range(0, len(texts), _TEXTS_AT_A_TIME):
            block = texts[start : start + _TEXTS_AT_A_TIME]
            encoded = encode([self.model.prompt + text for text in block])
            found = pick(encoded)
            whole.append(np.array([text.whole_length for text in encoded], dtype=np.int64))
            windows.append(found.tokens.lengths)
            counts.append(found.counts)
        return TokenLengths(_joined(whole), _joined(windows), _joined(counts), limit)

    @contextlib.contextmanager
    def lease(self, device: Any, dtype: Any) -> Iterator[LoadedModel]:
        """The model in memory; see `Runner.lease`.

        In float32 if it does not run in `dtype`, unless that was asked for.
        """
        import torch

        from gpuclassify.inference.loaded_model import PrecisionError

        key, is_asked_for = self._key(device, dtype), self.options.dtype is not None
        if key in _FLOAT32_ONLY and not is_asked_for:
            dtype = torch.float32
        with contextlib.ExitStack() as kept:
            try:
                model = kept.enter_context(self._lease(device, dtype))
            except PrecisionError as err:
                if is_asked_for:
                    raise
                _FLOAT32_ONLY.add(key)
                logger.warning("%s runs in float32: %s", self.options.model, err)
                model = kept.enter_context(self._lease(device, torch.float32))
            yield model

    def _lease(self, device: Any, dtype: Any) -> contextlib.AbstractContextManager[LoadedModel]:
        from gpuclassify.inference.loaded_model import load_model

        checkpoint, cache_dir = self.model.checkpoint, self.options.cache_dir
        own = self.own_module

        def load() -> LoadedModel:
            model = load_model(
                checkpoint,
                hub.download(checkpoint.identity, cache_dir=cache_dir),
                device,
                dtype,
                tokenizer_directory=hub.download(self.model.tokenizer_home, cache_dir=cache_dir),
                new_tokenizer=None if own is None else own.new_tokenizer,
                build=None if own is None else own.build,
                has_weights=own is not None and own.has_weights,
                unpacks=self.options.unpack_inference_batch,
            )
            self.model.check_directories()  # unchanged while they were read
            return model

        return self.lease_loaded(self._key(device, dtype), load, device, dtype)

    def check_weights(self) -> None:
        """Raise CheckpointError if the headers of the weights do not fit the network.

        Where torch alone knows the network, they are compared when it is loaded: it takes seconds
        to import. A module of one's own is made of it already.
        """
        checkpoint, cache_dir = self.model.checkpoint, self.options.cache_dir
        if self.own_module is None:
            check_headers(checkpoint, known_shapes(checkpoint), cache_dir)
            return
        if self.own_module.has_weights:
            return
        from gpuclassify.models.loading import check_own_module, check_tensors

        check_tensors(checkpoint, cache_dir, self.own_module.build)
        check_own_module(checkpoint, self.own_module.build, self.options.unpack_inference_batch)

    def _key(self, device: Any, dtype: Any) -> tuple[Hashable, ...]:
        """By which the model in memory, and what was measured of it, is known."""
        own = () if self.own_module is None else tuple(map(repr, self.own_module.definition()))
        return (self.resident_key, str(device), str(dtype), *own)

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
        prompted = [self.model.prompt + text for text in texts.to_list()]
        return HostSource(on_host, prompted, self._scores_windows, current_store())

    def _text_tokenizer(self, model: LoadedModel) -> TextTokenizer:
        options = self.options
        length = options.max_seq_length or model.max_tokens
        return model.text_tokenizer(
            length,
            options.overlap_of(length),
            counts_rest=options.seen_field is not None,
            end_chars=options.chars_of_ends,
        )

    @property
    def _scores_windows(self) -> bool:
        return self.options.has_windows and self.options.window_aggregation != "first"

    def _run_finite(
        self,
        model: LoadedModel,
        stream: TokenStream,
        order: np.ndarray,
        stats: RunStats,
        name_text: Callable[[int], str],
    ) -> np.ndarray:
        """Outputs of every window, all of them finite."""
        from gpuclassify.inference import engine

        key = self._key(model.device, model.dtype)
        outputs = engine.run(model, key, stream, self.batch_settings(), stats)[stream.places]
        failed = np.flatnonzero(~np.isfinite(outputs).all(axis=1))
        owners = order[stream.text_of[failed]]
        for place in np.argsort(owners, kind="stable"):  # an error names the first row of its kind
            window, name = int(failed[place]), functools.partial(name_text, int(owners[place]))
            outputs[window] = self._rescue(model, stream.take(window), name)
            stats.rescued_texts += 1
        return outputs

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
            with self.lease(model.device, torch.float32) as exact:
                outputs = run_alone(exact, tokens, side)
        if not np.isfinite(outputs).all():
            raise NonFiniteOutputError(
                f"{self.options.model} gives {outputs.tolist()} for {name_text()}, also alone "
                "and in float32: check the weights, or remove the row"
            )
        return outputs


def _joined(blocks: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *blocks])
