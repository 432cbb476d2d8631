"""A network in memory, with its tokenizer, ready to run padded batches of token ids."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpuclassify.inference import linear
from gpuclassify.inference.batching import PaddedBatch
from gpuclassify.inference.device import exclusive_device, to_device
from gpuclassify.inference.memory import ScoreRule
from gpuclassify.inference.packed.disentangled import DisentangledEncoder, fast_encoder
from gpuclassify.inference.packed.fused_attention import speed_up_deberta
from gpuclassify.inference.packed.packed_layers import (
    NotPackableError,
    PackedLayers,
)
from gpuclassify.inference.probing import ProbedModel, backbone_of, fresh_copy
from gpuclassify.models.checkpoint import (
    FIRST_TOKEN_LAYOUTS,
    SEQUENCE_CLASSIFICATION,
    TOKEN_CLASSIFICATION,
    Checkpoint,
    OwnModule,
    state_width,
)
from gpuclassify.models.loading import load_module, longest_input
from gpuclassify.models.networks import TokenAverage, refuse_wrong_outputs
from gpuclassify.models.tokenizer_files import load_tokenizer
from gpuclassify.tokenizing.text_tokenizer import StaticTokenizer, TextTokenizer


@dataclass
class LoadedModel(ProbedModel):
    """A network on its device, with its tokenizer and the limits of its inputs."""

    module: nn.Module  # evaluation mode, on `device`
    device: torch.device
    dtype: torch.dtype  # dtype of weights and states; `linear.FLOAT8`: of products alone
    new_tokenizer: Callable[[], Any]  # returns a new Hugging Face tokenizer
    tokenizer: Any  # read for settings and special tokens; it never tokenizes a text
    pad_id: int  # token id of padding
    max_tokens: int  # longest input, special tokens included; `max_seq_length` may lower it
    accepts_positions: bool  # `position_ids` restore the positions of texts padded on the left
    score_rule: ScoreRule | None  # size of materialised attention scores; None if there are none
    output_size: int  # number of outputs per text or token; 0 if only a run can tell
    needs_single_rows: bool  # without a padding id, a row's last token cannot be found
    counted_id: int | None = None  # token id whose count must be equal in all rows of a batch
    is_by_token: bool = False  # outputs are per token, not per text
    accepts_types: bool = True  # takes segment ids, which separate the texts of a pair
    unpacks: bool = True  # the module takes tensors as keyword arguments, rather than in one dict
    # Weights stay float32, and torch casts the inputs of each operation, because your own module
    # may mix precisions.
    is_autocast: bool = False
    width: int | None = None  # hidden size, if the checkpoint states it
    identity: str | None = None  # key of saved measurements; None: they are not saved
    _tokenizers: dict[tuple[Any, ...], TextTokenizer] = field(default_factory=dict)
    _padding_safety: dict[str, bool] = field(default_factory=dict)
    _packed_layers: PackedLayers | DisentangledEncoder | NotPackableError | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def text_tokenizer(self, max_tokens: int | None = None, **cut: Any) -> TextTokenizer:
        """Return a `TextTokenizer` that cuts texts at `max_tokens` (default: the model's limit).

        `cut` are its other settings, such as `overlap`. Equal arguments return the same object.
        """
        length = max_tokens or self.max_tokens
        key = (length, *sorted(cut.items()))
        with self._lock:
            if key not in self._tokenizers:
                make: Any = TextTokenizer
                if isinstance(self.module, TokenAverage):
                    make = functools.partial(StaticTokenizer, token_chars=self.module.token_chars)
                self._tokenizers[key] = make(self.new_tokenizer(), length, **cut)
            return self._tokenizers[key]

    def padding_side(self, wanted: str | None) -> str:
        """Return the side to pad, "left" or "right": `wanted`, else the tokenizer's side."""
        return wanted or self.tokenizer.padding_side

    @property
    def type_pad_id(self) -> int:
        """Segment id (``token_type_ids``) for padding; 0 if the tokenizer has none."""
        return getattr(self.tokenizer, "pad_token_type_id", 0)

    def forward(self, batch: PaddedBatch, side: str) -> torch.Tensor:
        """Compute the outputs of one batch, float32 (rows, outputs), on the device.

        A token classifier's are logits (tokens, labels), row after row without padding. Raises
        NotPackableError if the batch is packed, and the layers cannot run without padding.
        """
        inputs = {"input_ids": batch.ids, "attention_mask": batch.mask}
        if batch.type_ids is not None and self.accepts_types:
            inputs["token_type_ids"] = batch.type_ids
        if side == "left" and self.accepts_positions and not batch.is_full:
            inputs["position_ids"] = (batch.mask.cumsum(1) - 1).clamp(min=0)
        layout: Any = contextlib.nullcontext()
        if batch.is_packed:
            layout = self.packed_layers().running(batch.lengths, batch.width, self.device)
        elif encoder := fast_encoder(self.module):
            layout = encoder.running(batch.lengths, batch.width, self.device, side)
        module = fresh_copy(self.module) if self.adapts_to_length else self.module
        with layout:
            outputs = self.outputs(module, inputs)
        if not self.is_by_token:
            return outputs
        return outputs.flatten(0, 1)[to_device(batch.token_indices(side), outputs.device)]

    def reduce(self, outputs: torch.Tensor, keeps_all_scores: bool) -> torch.Tensor:
        """Reduce a batch's outputs to the values that are copied to the host, float32.

        A token classifier's logits become the index and the probability of the best label,
        (tokens, 2), or with `keeps_all_scores` the probabilities of all labels, (tokens, labels).
        Outputs per text are returned unchanged.
        """
        if not self.is_by_token:
            return outputs
        scores = outputs.softmax(dim=1)
        if keeps_all_scores:
            return scores
        best = scores.max(dim=1)
        return torch.stack([best.indices.float(), best.values], dim=1)

    def round_products(self) -> None:
        """Replace linear layers by 8-bit ones; raise PrecisionError if texts need padding.

        Padding changes states by rounding errors, which 8 bits would enlarge. PrecisionError is
        also raised if no layer has a suitable size, or a kernel fails.
        """
        with self.telling_failures(), exclusive_device(self.device, self.dtype):
            self.packed_layers()  # compared now, in 16 bits
            linear.round_products(PackedLayers(self.module).layers)

    def outputs(self, module: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Call a network with named input tensors and return its outputs, float32 (rows, outputs).

        `module` is this model's network or a copy. A token classifier's outputs are logits, (rows,
        tokens, labels). Raises CheckpointError if outputs per text have another type or shape.
        """
        with torch.autocast(self.device.type, self.dtype, enabled=self.is_autocast):
            outputs = module(**inputs) if self.unpacks else module(inputs)
        if self.is_by_token:  # these are transformers' own classes
            return outputs.logits.float()
        rows = len(inputs["input_ids"])
        return refuse_wrong_outputs(module, outputs, rows, self.output_size).float()


def load_model(
    checkpoint: Checkpoint,
    directory: Path,
    device: torch.device,
    dtype: torch.dtype,
    own_module: OwnModule | None = None,
    *,
    tokenizer_directory: Path | None = None,
    adapter_directory: Path | None = None,
    unpacks: bool = True,
) -> LoadedModel:
    """Load the checkpoint in `directory` onto `device`, in the precision `dtype`.

    The tokenizer is read from `tokenizer_directory` (default: `directory`), unless `own_module`
    makes one. If the checkpoint is a LoRA adapter, it is read from `adapter_directory` and merged
    into the weights. `own_module` is a user's network in place of the checkpoint's, called with
    keyword arguments or, unless `unpacks`, a single dict. Its weights stay float32; in another
    precision, it runs under torch's autocast.

    Raises CheckpointError if tensors are missing, unknown or misshaped, or there is no tokenizer,
    ModelChangedError if a model in a directory was saved again since it was described, and
    PrecisionError if a network other than a user's own fails on a short text in a precision other
    than float32.
    """
    new_tokenizer = None if own_module is None else own_module.new_tokenizer
    if new_tokenizer is None:
        home = tokenizer_directory or directory
        new_tokenizer = functools.partial(load_tokenizer, checkpoint, home)
    tokenizer = new_tokenizer()
    is_autocast = own_module is not None and dtype != torch.float32
    is_float8 = dtype == linear.FLOAT8
    # Row-wise products of 8-bit numbers have outputs in bfloat16 on every GPU that can do them.
    weights_dtype = torch.bfloat16 if is_float8 else torch.float32 if is_autocast else dtype
    module = load_module(checkpoint, directory, weights_dtype, own_module, adapter_directory).to(
        device
    )
    is_fixed = own_module is None  # other modules may change their weights
    is_for_gpu = is_fixed and device.type == "cuda"
    if is_for_gpu:
        linear.merge_projections(module)
    speed_up_deberta(module, is_fixed and checkpoint.layout in FIRST_TOKEN_LAYOUTS)
    if is_for_gpu:  # after DeBERTa's trial run, which copies layers to the CPU
        with exclusive_device(device, weights_dtype):
            linear.fuse_sums(module)
    if device.type == "cpu" and is_fixed and not is_float8:
        linear.arrange_weights(module)
    is_fast = fast_encoder(module) is not None and not is_autocast
    backbone = backbone_of(module)
    config: Any = getattr(backbone, "config", None)
    # The model's own padding id comes first.
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
        max_tokens=longest_input(checkpoint, tokenizer, config, module),
        accepts_positions=_accepts(module, backbone, "position_ids")
        and not any(hasattr(p, "create_position_ids_from_input_ids") for p in module.modules()),
        accepts_types=getattr(config, "type_vocab_size", None)
        != 1  # a single segment id carries no information
        and (not unpacks or _accepts(module, backbone, "token_type_ids")),
        score_rule=None if is_fast else _score_rule(config, weights_dtype),
        output_size=checkpoint.output_count,
        # Decoders find a row's last token by the padding id.
        needs_single_rows=has_last_token and pad_ids[0] is None,
        # Heads of encoder-decoders read the last end token, and refuse unequal counts of it.
        counted_id=end_id if is_counted and isinstance(end_id, int) else None,
        unpacks=unpacks,
        is_by_token=checkpoint.layout == TOKEN_CLASSIFICATION,
        is_autocast=is_autocast,
        width=state_width(checkpoint.sizes) if own_module is None else None,
        identity=f"{checkpoint.identity} {checkpoint.layout}" if own_module is None else None,
    )
    if is_float8:
        model.round_products()
    if is_fixed and dtype != torch.float32:
        model.check_precision()
    return model


def _accepts(module: nn.Module, backbone: nn.Module, name: str) -> bool:
    """Return whether `backbone` has an input called `name`, and `module` around it passes it on."""
    if name not in inspect.signature(backbone.forward).parameters:
        return False
    taken = inspect.signature(module.forward).parameters.values()
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in taken)


def _score_rule(config: Any, dtype: torch.dtype) -> ScoreRule | None:
    if not getattr(config, "relative_attention", False):  # fused attention keeps no scores
        return None
    buckets = getattr(config, "position_buckets", -1)
    span = buckets if buckets > 0 else config.max_position_embeddings
    return ScoreRule(config.num_attention_heads, 2 * span, dtype.itemsize)
