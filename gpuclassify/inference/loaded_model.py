"""A model in memory, ready to run padded batches."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from gpuclassify.inference.batching import PaddedBatch, StagedTokens, pad, stage
from gpuclassify.inference.linear import arrange_weights
from gpuclassify.inference.memory import ScoreRule
from gpuclassify.inference.packed.disentangled import DisentangledEncoder, fast_encoder
from gpuclassify.inference.packed.fused_attention import speed_up_deberta
from gpuclassify.inference.packed.packed_layers import (
    NotPackableError,
    PackedLayers,
    find_packed_layers,
)
from gpuclassify.models.checkpoint import (
    FIRST_TOKEN_LEVELS,
    LINEAR_HEAD,
    SEQUENCE_CLASSIFICATION,
    Checkpoint,
    CheckpointError,
    OwnModule,
)
from gpuclassify.models.loading import (
    load_module,
    load_tokenizer,
    longest_input,
)
from gpuclassify.models.networks import refuse_wrong_outputs
from gpuclassify.tokenizing.text_tokenizer import TextTokenizer, flat_batch
from gpuclassify.workers.device_errors import (
    is_broken_device,
    is_out_of_memory,
    with_memory_released,
)

logger = logging.getLogger(__name__)

# Words in the names of settings that say how far attention or a convolution reaches.
_REACHES = ("window", "chunk", "block_size", "local_attention", "stride")
_WITHOUT_REACH = 16
_BEYOND_REACH = (23, 7)
_SHORT = 5
# Kinds of rotary positions whose frequencies follow from the longest row of a batch.
_SCALED_BY_LENGTH = {"dynamic", "longrope"}
# In parts of the outputs' size.
_TOLERANCE = 1e-4
_HALF_PRECISION_TOLERANCE = 0.1


class PrecisionError(CheckpointError):
    """A model cannot be run in a precision."""


@dataclass
class LoadedModel:
    """A module on its device with what is needed to feed it."""

    module: nn.Module  # in evaluation mode
    device: torch.device
    dtype: torch.dtype  # of weights and activations
    new_tokenizer: Callable[[], Any]  # gives a fresh Hugging Face tokenizer
    # For its declarations, and the special tokens around a probe; it tokenizes no text.
    tokenizer: Any
    pad_id: int
    max_tokens: int  # special tokens included, unless the user asks for another length
    accepts_positions: bool  # `position_ids` restore the positions of texts padded on the left
    score_rule: ScoreRule | None  # how large the attention scores are that it materialises
    output_size: int  # outputs of a text; 0 if the module has to be run to know
    needs_single_rows: bool  # it has no padding id to find the last token of a row by
    counted_id: int | None = None  # the token that every row of a batch must have equally often
    unpacks: bool = True  # the module takes tensors as keyword arguments, rather than in one dict
    # Weights stay float32 and torch casts what each operation reads, as a module of one's own needs
    # it that mixes precisions.
    is_autocast: bool = False
    identity: str | None = None  # by which what was measured is kept for later processes
    _tokenizers: dict[tuple[Any, ...], TextTokenizer] = field(default_factory=dict)
    _padding_safety: dict[str, bool] = field(default_factory=dict)
    _packed_layers: PackedLayers | DisentangledEncoder | NotPackableError | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def text_tokenizer(self, max_tokens: int | None = None, **cut: Any) -> TextTokenizer:
        """The `TextTokenizer` that cuts so, at the model's own limit if no other is given."""
        length = max_tokens or self.max_tokens
        key = (length, *sorted(cut.items()))
        with self._lock:
            if key not in self._tokenizers:
                self._tokenizers[key] = TextTokenizer(self.new_tokenizer(), length, **cut)
            return self._tokenizers[key]

    def padding_side(self, wanted: str | None) -> str:
        """The side to pad: what the user wants, else the tokenizer's."""
        return wanted or self.tokenizer.padding_side

    @property
    def type_pad_id(self) -> int:
        """Segment id of padding."""
        return getattr(self.tokenizer, "pad_token_type_id", 0)

    def forward(self, batch: PaddedBatch, side: str) -> torch.Tensor:
        """Outputs of one batch, float32 (rows, outputs), on the device."""
        inputs = {"input_ids": batch.ids, "attention_mask": batch.mask}
        if batch.type_ids is not None:
            inputs["token_type_ids"] = batch.type_ids
        if side == "left" and self.accepts_positions and not batch.is_full:
            inputs["position_ids"] = (batch.mask.cumsum(1) - 1).clamp(min=0)
        layout: Any = contextlib.nullcontext()
        if batch.is_packed:
            layout = self.packed_layers().running(batch.lengths, batch.width, self.device)
        elif encoder := fast_encoder(self.module):
            layout = encoder.running(batch.lengths, batch.width, self.device, side)
        module = _fresh_copy(self.module) if self.adapts_to_length else self.module
        with layout:
            return self._outputs(module, inputs)

    @torch.inference_mode()
    def check_precision(self) -> None:
        """Raise PrecisionError if it fails on a short text, as some do in half precision."""
        batch = pad(self.probe([8]), np.zeros(1, dtype=np.int64), self.pad_id)
        try:
            with_memory_released(lambda: self.forward(batch, "right"))
        except (RuntimeError, TypeError) as err:
            if is_out_of_memory(err) or is_broken_device(err):
                raise
            raise PrecisionError(
                f"{type(self.module).__name__} does not run in {self.dtype} on {self.device} "
                f'({err}): pass dtype="float32"'
            ) from err

    def _outputs(self, module: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(self.device.type, self.dtype, enabled=self.is_autocast):
            outputs = module(**inputs) if self.unpacks else module(inputs)
        rows = len(inputs["input_ids"])
        return refuse_wrong_outputs(module, outputs, rows, self.output_size).float()

    @functools.cached_property
    def adapts_to_length(self) -> bool:
        """Whether a batch's length changes how the module runs; measured once.

        BigBird reads all of a text in full after it has met a short one, and some rotary positions
        stretch with the longest row. Of such a module each batch runs a copy of its own, and has
        texts of equal length only, so that every text is the first that the module reads. It is a
        CheckpointError if the module gives the same text other outputs each time.
        """
        is_own = self.identity is None or _config_of(self.module) is None
        if is_own or fast_encoder(self.module) is not None:
            return False
        return with_memory_released(self._measure_adapting)

    def is_padding_safe(self, side: str) -> bool:
        """Whether padding leaves this model's outputs as they are; measured once a side.

        Some architectures let padding leak into real tokens (through convolutions, or positions
        counted from the row's end). Their texts are then batched by equal length only.
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
        """The module's layers, or NotPackableError with why they need padding; measured once."""
        if self._packed_layers is None:
            try:
                found = self._packed_layers = with_memory_released(self._measure_packing)
                part = ", its last layer first tokens" if found.is_first_enough else ""
                name = type(self.module).__name__
                logger.info("%s runs without padding, by %s%s", name, found.attention, part)
            except NotPackableError as err:
                self._packed_layers = err
                logger.info("%s runs with padding: %s", type(self.module).__name__, err)
        if isinstance(self._packed_layers, NotPackableError):
            raise NotPackableError(*self._packed_layers.args)
        return self._packed_layers

    @property
    def is_packable(self) -> bool:
        """Whether layers can be run without padding and outputs stay as they are."""
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
        """Texts of about these lengths, of random tokens between the tokenizer's special ones."""
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
        if not _SCALED_BY_LENGTH.isdisjoint(positions):  # they mean else beside a longer row
            return True
        tokens = self.probe(_probe_lengths(config, self.max_tokens))
        first, other = _fresh_copy(self.module), _fresh_copy(self.module)

        def run(module: nn.Module, row: int) -> torch.Tensor:
            batch = pad(tokens, np.array([row]), self.pad_id)
            return self._outputs(module, {"input_ids": batch.ids, "attention_mask": batch.mask})

        if not self.are_close(run(first, 0), run(other, 0)):
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
        together, *alone = (
            self.forward(pad(tokens, rows, self.pad_id, side), side)
            for rows in (numbers, *numbers[:, None])
        )
        return self.are_close(together, torch.cat(alone))

    def are_close(self, found: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether outputs, (texts, outputs), differ by no more than rounding makes them."""
        tolerance = _TOLERANCE if self.dtype == torch.float32 else _HALF_PRECISION_TOLERANCE
        return bool((found - expected).abs().max() <= tolerance * (1 + expected.abs().max()))


def load_model(
    checkpoint: Checkpoint,
    directory: Path,
    device: torch.device,
    dtype: torch.dtype,
    own: OwnModule | None = None,
    *,
    tokenizer_directory: Path | None = None,
    unpacks: bool = True,
) -> LoadedModel:
    """Load the checkpoint in `directory` in the precision `dtype` onto `device`.

    The tokenizer is in `directory` unless there is a `tokenizer_directory`. A module of one's own
    `unpacks` tensors as keyword arguments, or takes them in one dict.

    CheckpointError if tensors are missing, unknown or of another shape, or there is no tokenizer;
    PrecisionError if the model does not run in this precision, which modules of one's own are not
    tried for.
    """
    new_tokenizer = None if own is None else own.new_tokenizer
    if new_tokenizer is None:
        home = tokenizer_directory or directory
        new_tokenizer = functools.partial(load_tokenizer, checkpoint, home)
    tokenizer = new_tokenizer()
    is_autocast = own is not None and dtype != torch.float32
    weights_dtype = torch.float32 if is_autocast else dtype
    module = load_module(checkpoint, directory, weights_dtype, own).to(device)
    speed_up_deberta(module, own is None and checkpoint.layout in (LINEAR_HEAD, FIRST_TOKEN_LEVELS))
    if device.type == "cpu" and own is None:  # other modules may change their weights
        arrange_weights(module)
    is_fast = fast_encoder(module) is not None and not is_autocast
    backbone = _backbone(module)
    config: Any = getattr(backbone, "config", None)
    # The id that the model itself takes for padding, where it has one.
    pad_ids = (getattr(config, "pad_token_id", None), tokenizer.pad_token_id, 0)
    has_last_token = checkpoint.layout == SEQUENCE_CLASSIFICATION
    is_counted = has_last_token and config.is_encoder_decoder
    end_id = getattr(config, "eos_token_id", None)
    model = LoadedModel(
        module=module,
        device=device,
        dtype=dtype,
        new_tokenizer=new_tokenizer,
        tokenizer=tokenizer,
        pad_id=int(next(number for number in pad_ids if number is not None)),
        max_tokens=longest_input(checkpoint, tokenizer, config),
        accepts_positions=_accepts_positions(module, backbone),
        score_rule=None if is_fast else _score_rule(config, dtype),
        output_size=checkpoint.output_count,
        # Decoders find a row's last token by the padding id.
        needs_single_rows=has_last_token and pad_ids[0] is None,
        # Heads of encoders with a decoder read the last of these, and refuse unequal counts.
        counted_id=end_id if is_counted and isinstance(end_id, int) else None,
        unpacks=unpacks,
        is_autocast=is_autocast,
        # What tells the model from all others that are not modules of one's own.
        identity=f"{checkpoint.identity} {checkpoint.layout}" if own is None else None,
    )
    if own is None and dtype != torch.float32:
        model.check_precision()
    return model


def _backbone(module: nn.Module) -> nn.Module:
    """The transformers model within a module, or the module itself if there is none."""
    return next((part for part in module.modules() if isinstance(part, PreTrainedModel)), module)


def _accepts_positions(module: nn.Module, backbone: nn.Module) -> bool:
    """Whether positions may be passed: not to models that derive them from the padding id."""
    if any(hasattr(part, "create_position_ids_from_input_ids") for part in module.modules()):
        return False
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        return False
    taken = inspect.signature(module.forward).parameters.values()
    return any(p.name == "position_ids" or p.kind is p.VAR_KEYWORD for p in taken)


def _score_rule(config: Any, dtype: torch.dtype) -> ScoreRule | None:
    """Relative attention as in DeBERTa materialises its scores; fused attention does not."""
    if not getattr(config, "relative_attention", False):
        return None
    buckets = getattr(config, "position_buckets", -1)
    span = buckets if buckets > 0 else config.max_position_embeddings
    return ScoreRule(config.num_attention_heads, 2 * span, dtype.itemsize)


def _config_of(module: nn.Module) -> Any:
    """The configuration of the transformers model within a module; None if there is none."""
    backbone = _backbone(module)
    return backbone.config if isinstance(backbone, PreTrainedModel) else None


def _probe_lengths(config: Any, most: int) -> list[int]:
    """Lengths of texts that go beyond every local reach that a text of `most` tokens exceeds.

    Two long ones and a short one.
    """
    reaches = [
        value
        for name, value in _settings(config)
        if isinstance(value, int) and 0 < value < most and any(word in name for word in _REACHES)
    ]
    farthest = max(reaches, default=_WITHOUT_REACH)
    return [min(farthest + more, most) for more in _BEYOND_REACH] + [min(_SHORT, most)]


def _fresh_copy(module: nn.Module) -> Any:
    """The module, to be changed by running it; weights and buffers are shared."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def _makeup_of(module: nn.Module) -> Any:
    """Equal as long as running a module changes neither its parts nor its configuration."""
    return [(type(part), getattr(part, "config", None)) for part in module.modules()]


def _settings(config: Any) -> Iterator[tuple[str, Any]]:
    """Name and value of every setting, of those within others too."""
    pending = [] if config is None else list(config.to_dict().items())
    for name, value in pending:
        if isinstance(value, dict):
            pending.extend(value.items())
        elif isinstance(value, list | tuple):
            pending.extend((name, item) for item in value)
        else:
            yield str(name), value
