"""Trial runs of loaded models on random texts, to find out how their batches may be run."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from gpuclassify.inference.batching import PaddedBatch, StagedTokens, pad, stage
from gpuclassify.inference.device import exclusive_device
from gpuclassify.inference.packed.disentangled import DisentangledEncoder, fast_encoder
from gpuclassify.inference.packed.packed_layers import (
    NotPackableError,
    PackedLayers,
    find_packed_layers,
)
from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.tokenizing.text_tokenizer import TextTokenizer, flat_batch
from gpuclassify.workers.device_errors import (
    is_broken_device,
    is_out_of_memory,
    with_memory_released,
)

logger = logging.getLogger(__name__)

# Parts of the names of settings that hold the reach of local attention or convolutions, in tokens.
_REACHES = ("window", "chunk", "block_size", "local_attention", "stride")
_WITHOUT_REACH = 16
_BEYOND_REACH = (23, 7)
_SHORT = 5
_TRIED_TOKENS = 128  # length of the longer text whose outputs must be finite
# Rotary position types whose frequencies depend on the longest row of a batch.
_SCALED_BY_LENGTH = {"dynamic", "longrope"}
# Tolerances relative to the largest output.
_TOLERANCE = 1e-4
_HALF_PRECISION_TOLERANCE = 0.1


class PrecisionError(CheckpointError):
    """Error raised when a model fails, or has NaN or infinite outputs, in the wanted precision."""


class ProbedModel(ABC):
    """Base class of a loaded model, with trial runs that find out how its batches may be run.

    Texts of unequal lengths are padded to one batch, or packed (concatenated without padding), only
    if a model's outputs for random texts do not change by it, up to rounding.
    """

    module: nn.Module
    device: torch.device
    dtype: torch.dtype
    tokenizer: Any
    pad_id: int
    max_tokens: int
    needs_single_rows: bool
    is_autocast: bool
    identity: str | None
    _padding_safety: dict[str, bool]
    _packed_layers: PackedLayers | DisentangledEncoder | NotPackableError | None

    @abstractmethod
    def forward(self, batch: PaddedBatch, side: str) -> torch.Tensor:
        """Compute the outputs of one batch padded on `side`, float32 (rows, outputs).

        A token classifier's are (tokens, outputs), row after row without padding.
        """

    @abstractmethod
    def outputs(self, module: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Call a network with tensors by name; return its outputs, float32 (rows, outputs).

        A token classifier's are (rows, tokens, outputs).
        """

    def check_precision(self) -> None:
        """Raise PrecisionError if the model fails on a short text, as some do in half precision."""
        batch = pad(self.probe([8]), np.zeros(1, dtype=np.int64), self.pad_id)
        with self.telling_failures(), exclusive_device(self.device, self.dtype):
            with_memory_released(lambda: self.forward(batch, "right"))

    @contextlib.contextmanager
    def telling_failures(self) -> Iterator[None]:
        """Turn errors in the block into PrecisionError, which advises another precision.

        Out-of-memory errors and errors of a broken device are raised unchanged.
        """
        try:
            yield
        except Exception as err:  # compilers of kernels raise errors of any type
            if is_out_of_memory(err) or is_broken_device(err):
                raise
            wider = "bfloat16" if self.dtype.itemsize == 1 else "float32"
            raise PrecisionError(
                f"{type(self.module).__name__} does not run in {self.dtype} on {self.device} "
                f'({err}): pass dtype="{wider}"'
            ) from err

    def check_range(self) -> None:
        """Raise PrecisionError if outputs of random texts are not finite in this precision.

        The texts run once. A float32 model, or one without `identity`, is not checked.
        """
        if self._overflows:
            raise PrecisionError(f"outputs of random texts are not finite in {self.dtype}")

    @functools.cached_property
    def _overflows(self) -> bool:
        if self.dtype == torch.float32 or self.identity is None:
            return False
        tokens = self.probe([_SHORT, _TRIED_TOKENS])
        for row in range(len(tokens)):
            batch = pad(tokens, np.array([row]), self.pad_id)
            with exclusive_device(self.device, self.dtype):
                outputs = with_memory_released(functools.partial(self.forward, batch, "right"))
            if not outputs.isfinite().all():  # float16 overflows above 65,504
                return True
        return False

    @functools.cached_property
    def adapts_to_length(self) -> bool:
        """Whether the network changes itself when it runs a batch; measured once.

        BigBird switches to full attention for good after a short text, and some rotary positions
        stretch with the longest row. False, without a measurement, for a user's own module, a
        network without a transformers model, and a `DisentangledEncoder`. Raises CheckpointError if
        a measured network is not deterministic.
        """
        is_own = self.identity is None or _config_of(self.module) is None
        if is_own or fast_encoder(self.module) is not None:
            return False
        return with_memory_released(self._measure_adapting)

    def is_padding_safe(self, side: str) -> bool:
        """Tell whether padding on `side`, "left" or "right", leaves outputs unchanged.

        Measured once per side. Some architectures let padding leak into real tokens, through
        convolutions or positions counted from the row's end. False if it `adapts_to_length`.
        """
        if self.adapts_to_length:
            return False
        if side not in self._padding_safety:
            measure = functools.partial(self._measure_padding, side)
            self._padding_safety[side] = with_memory_released(measure)
            if not self._padding_safety[side]:
                logger.info("padding changes outputs: only texts of equal length share a batch")
        return self._padding_safety[side]

    def packed_layers(self) -> PackedLayers | DisentangledEncoder:
        """Return the network's layers, ready to run texts concatenated without padding.

        Raises NotPackableError if they cannot. The first call may make a trial run to find out.
        """
        if self._packed_layers is None:
            try:
                layers = self._packed_layers = with_memory_released(self._measure_packing)
                part = ", its last layer first tokens" if layers.is_first_enough else ""
                name = type(self.module).__name__
                logger.info("%s runs without padding, by %s%s", name, layers.attention, part)
            except NotPackableError as err:
                self._packed_layers = err
                logger.info("%s runs with padding: %s", type(self.module).__name__, err)
        if isinstance(self._packed_layers, NotPackableError):
            raise NotPackableError(*self._packed_layers.args)
        return self._packed_layers

    @property
    def is_packable(self) -> bool:
        """Whether `packed_layers` returns layers; the first use may make a trial run."""
        with contextlib.suppress(NotPackableError):
            return self.packed_layers() is not None
        return False

    @torch.inference_mode()
    def _measure_packing(self) -> PackedLayers | DisentangledEncoder:
        if self.needs_single_rows:
            raise NotPackableError("it has no padding id to find the end of a text by")
        encoder = fast_encoder(self.module)
        if encoder is not None and not self.is_autocast:
            return encoder
        if self.adapts_to_length:
            raise NotPackableError("it runs texts of other lengths in other ways")
        tokens = self.probe(_probe_lengths(_config_of(self.module), self.max_tokens))

        def forward(rows: slice) -> torch.Tensor:
            numbers = np.arange(len(tokens))[rows]
            return self.forward(pad(tokens, numbers, self.pad_id), "right")

        return find_packed_layers(self.module, self.device, self.dtype, tokens.lengths, forward)

    def probe(self, lengths: Iterable[int]) -> StagedTokens:
        """Return random tokenized texts on the device, for trial runs.

        `lengths` are numbers of tokens before special tokens are added and the text is truncated to
        `max_tokens`. Equal lengths give the same texts each time.
        """
        special = set(self.tokenizer.all_special_ids)
        usable = [i for i in range(min(len(self.tokenizer), 1_000)) if i not in special] or [0]
        draw = np.random.default_rng(0).choice
        cut = TextTokenizer(self.tokenizer, self.max_tokens).cut_ids
        texts = [cut(draw(usable, length).tolist()) for length in lengths]
        types = [text.type_ids[0] for text in texts if text.type_ids is not None]
        return stage(flat_batch([text.windows[0] for text in texts], types), self.device)

    @torch.inference_mode()
    def _measure_adapting(self) -> bool:
        config = _config_of(self.module)
        positions = [value for name, value in _settings(config) if name in ("rope_type", "type")]
        if not _SCALED_BY_LENGTH.isdisjoint(positions):
            return True
        tokens = self.probe(_probe_lengths(config, self.max_tokens))
        first, other = fresh_copy(self.module), fresh_copy(self.module)

        def run(module: nn.Module, row: int) -> torch.Tensor:
            batch = pad(tokens, np.array([row]), self.pad_id)
            return self.outputs(module, {"input_ids": batch.ids, "attention_mask": batch.mask})

        outputs = run(first, 0)
        # Outputs that overflow tell nothing; their rows are computed again in float32.
        if outputs.isfinite().all() and not self.are_close(outputs, run(other, 0)):
            raise CheckpointError(
                f"{type(self.module).__name__} gives the same text other outputs each time, as "
                "models do that draw random numbers: give config.json a seed if the architecture "
                "takes one (Reformer's is hash_seed), or use another model"
            )
        run(first, len(tokens) - 1)
        return _makeup_of(first) != _makeup_of(self.module)

    @torch.inference_mode()
    def _measure_padding(self, side: str) -> bool:
        tokens = self.probe(_probe_lengths(_config_of(self.module), self.max_tokens))
        numbers = np.arange(len(tokens))
        together, *single = (
            self.forward(pad(tokens, rows, self.pad_id, side), side)
            for rows in (numbers, *numbers[:, None])
        )
        return self.are_close(together, torch.cat(single))

    def are_close(self, outputs: torch.Tensor, expected: torch.Tensor) -> bool:
        """Tell whether a trial run's outputs are `expected` up to rounding; False if one is NaN."""
        tolerance = _TOLERANCE if self.dtype == torch.float32 else _HALF_PRECISION_TOLERANCE
        largest = tolerance * (1 + expected.abs().max())
        return bool(largest.isfinite() and (outputs - expected).abs().max() <= largest)


def backbone_of(module: nn.Module) -> nn.Module:
    """Return a network's outermost transformers model, head included, or else the network."""
    return next((part for part in module.modules() if isinstance(part, PreTrainedModel)), module)


def _config_of(module: nn.Module) -> Any:
    backbone = backbone_of(module)
    return backbone.config if isinstance(backbone, PreTrainedModel) else None


def _probe_lengths(config: PretrainedConfig | None, most: int) -> list[int]:
    reaches = [
        value
        for name, value in _settings(config)
        if isinstance(value, int) and 0 < value < most and any(word in name for word in _REACHES)
    ]
    # Two texts are longer than the reach of local attention or convolutions, so that leaks between
    # tokens show. The third is short, so that it is padded.
    farthest = max(reaches, default=_WITHOUT_REACH)
    return [min(farthest + more, most) for more in _BEYOND_REACH] + [min(_SHORT, most)]


def fresh_copy(module: nn.Module) -> Any:
    """Copy a network that changes itself when run; the copy shares its weights and buffers."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def _makeup_of(module: nn.Module) -> Any:
    return [(type(part), getattr(part, "config", None)) for part in module.modules()]


def _settings(config: PretrainedConfig | None) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each setting, also of settings within dicts and lists."""
    pending = [] if config is None else list(config.to_dict().items())
    for name, value in pending:
        if isinstance(value, dict):
            pending.extend(value.items())
        elif isinstance(value, list | tuple):
            pending.extend((name, item) for item in value)
        else:
            yield str(name), value
