"""A decoder, maybe with a LoRA adapter: settings, the pinned model, and whether both fit.

Nothing here loads torch or peft before tensors are needed, so that a client reads a checkpoint in
milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from gpuclassify import hub
from gpuclassify.hub import Identity
from gpuclassify.hub.files import WEIGHTS
from gpuclassify.mapping.pinned_model import PinnedModel
from gpuclassify.models.checkpoint import Checkpoint, CheckpointError, read_required_json
from gpuclassify.models.tensors import Shapes, compare_shapes, shapes_of
from gpuclassify.questions.prompt_tokens import Prompt
from gpuclassify.settings.checks import check_text, install
from gpuclassify.settings.options import LabelOptions, ModelOptions

if TYPE_CHECKING:
    import torch

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE_MODEL = "meta-llama/LlamaGuard-7b"
DEFENSIVE = "nvidia/Aegis-AI-Content-Safety-LlamaGuard-Defensive-1.0"
# Of prompt or text. The base model states 2,048, which is less than the prompt that it was given.
MAX_TOKENS = 4096

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class LoraOptions(LabelOptions, ModelOptions):
    """Settings of mappers with an adapter on a decoder, beside those of `LabelOptions`.

    Attributes
    ----------
    base_model : str
        The decoder, which is gated: ask for access on its page, and pass `token`.
    base_revision : str
        Branch, tag or commit of `base_model` on the Hub.
    """

    base_revision: str | None = None

    def check(self) -> None:
        """See `ModelOptions.check`."""
        super().check()
        check_text("base_model", self.base_model, "the Hub name or directory of the decoder")


@dataclass(frozen=True, kw_only=True)
class LoraCheckpoint(Checkpoint):
    """A decoder, maybe with a LoRA adapter; `backbone_json` is the decoder's configuration."""

    base: Identity  # the decoder, which mappers with other adapters share
    adapter: Identity | None
    adapter_json: str  # its configuration
    prompts: tuple[Prompt, ...] = ()  # that documents are put in
    max_tokens: int = 0  # of a prompt


class LoraModel(PinnedModel):
    """A decoder with a low-rank adapter, which is the model itself unless others are named."""

    checkpoint: LoraCheckpoint

    @property
    def repositories(self) -> list[str]:
        """The model, and the decoder that it stands on."""
        return list(dict.fromkeys([self.options.model, self.options.base_model]))

    @property
    def identities(self) -> list[Identity]:
        """The decoder, the model and its adapter."""
        checkpoint = self.checkpoint
        named = [checkpoint.base, checkpoint.identity, checkpoint.adapter]
        return list(dict.fromkeys(one for one in named if one is not None))

    @property
    def tokenizer_home(self) -> Identity:
        """The decoder's directory."""
        return self.checkpoint.base

    @property
    def weights_files(self) -> dict[Identity, str]:
        """Decoder and adapter, and what stands on them."""
        checkpoint = self.checkpoint
        files = {checkpoint.base: WEIGHTS}
        if checkpoint.adapter is not None:
            files[checkpoint.adapter] = ADAPTER_WEIGHTS
        files.setdefault(checkpoint.identity, WEIGHTS)
        return files

    def read(self) -> LoraCheckpoint:
        """Read what model, adapter and decoder declare; no weights."""
        cache_dir = self.options.cache_dir
        base = self.resolve_base()
        sizes = read_required_json(base, "config.json", "is no saved model", cache_dir)
        check_is_decoder(sizes, base.name)
        adapter, config = self.resolve_adapter(), {}
        if adapter is not None:
            config = read_required_json(adapter, ADAPTER_CONFIG, "is no adapter", cache_dir)
            _check_is_lora(config, adapter.name)
        return LoraCheckpoint(
            identity=self.identity,
            layout="lora_decoder",
            labels=(),
            problem_type="single_label_classification",
            config_json="{}",
            backbone_json=json.dumps(sizes),
            base=base,
            adapter=adapter,
            adapter_json=json.dumps(config),
        )

    def resolve_base(self) -> Identity:
        """The decoder pinned to a revision."""
        options = self.options
        return hub.resolve(options.base_model, options.base_revision, cache_dir=options.cache_dir)

    def resolve_adapter(self) -> Identity | None:
        """The adapter pinned to a revision."""
        return self.identity


def check_is_decoder(sizes: Mapping[str, Any], name: str) -> None:
    """Raise CheckpointError unless ``config.json`` is that of a decoder of texts alone."""
    architectures = sizes.get("architectures") or ["CausalLM"]
    cure = "pass a model that AutoModelForCausalLM loads, such as Qwen/Qwen2.5-0.5B-Instruct"
    if others := [key for key in ("vision_config", "audio_config") if key in sizes]:
        kind = others[0].partition("_")[0]
        raise CheckpointError(
            f"{name} has a {others[0]}: it reads {kind} as well. For texts, {cure}"
        )
    if not architectures[0].endswith(("CausalLM", "LMHeadModel")):
        raise CheckpointError(
            f"{name} has model_type {sizes.get('model_type')!r} and is a {architectures[0]}, which "
            f"writes no texts: {cure}"
        )
    kinds = set(sizes.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds or sizes.get("attention_chunk_size"):
        raise CheckpointError(
            f"{name} has {', '.join(sorted(kinds)) or 'chunked_attention'} layers: pass a decoder "
            "whose layers have full or sliding attention"
        )
    if _rope(sizes)[0] == "dynamic":
        raise CheckpointError(
            f"{name} has dynamic rotary positions, by which a text depends on the longest of its "
            f"batch: {cure}"
        )


def most_positions(sizes: Mapping[str, Any]) -> int | None:
    """How long a text may be before the network changes the positions of all its tokens."""
    kind, rope = _rope(sizes)
    name = "original_max_position_embeddings"
    return (rope.get(name) or sizes.get(name)) if kind == "longrope" else None


def _rope(sizes: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    rope = sizes.get("rope_parameters") or sizes.get("rope_scaling") or {}
    return rope.get("rope_type") or rope.get("type"), rope


def _check_is_lora(settings: Mapping[str, Any], name: str) -> None:
    peft_type = settings.get("peft_type")
    if peft_type != "LORA":
        raise CheckpointError(
            f"the adapter {name} has peft_type {peft_type!r}, and only 'LORA' is known: "
            "name a LoRA adapter"
        )


def check_lora_tensors(checkpoint: LoraCheckpoint, cache_dir: str | None = None) -> None:
    """Compare the headers of base and adapter with what both configurations need.

    CheckpointError names the tensors that are missing, unknown or of another shape, as when the
    adapter is for another base model.
    """
    base, adapter = checkpoint.base, checkpoint.adapter
    found = hub.read_tensor_shapes(base, cache_dir=cache_dir)
    expected = decoder_shapes(checkpoint.sizes)
    # Older saves carry buffers that the network no longer has: unknown names are no fault.
    known = {name: shape for name, shape in found.items() if name in expected}
    compare_shapes(base.name, known, expected)
    if adapter is None:
        return
    found = _without_base(hub.read_tensor_shapes(adapter, ADAPTER_WEIGHTS, cache_dir=cache_dir))
    expected = adapter_shapes(json.loads(checkpoint.adapter_json), checkpoint.sizes)
    compare_shapes(f"{adapter.name} for {base.name}", found, expected)


def decoder_shapes(sizes: Mapping[str, Any]) -> Shapes:
    """Names and shapes of the tensors of a decoder with this ``config.json``."""
    decoder = decoder_without_memory(sizes)
    shapes = dict(shapes_of(decoder.state_dict()))
    if decoder.config.tie_word_embeddings:  # then no file has the last layer
        del shapes["lm_head.weight"]
    return shapes


def adapter_shapes(settings: Mapping[str, Any], sizes: Mapping[str, Any]) -> Shapes:
    """Names and shapes of the tensors of an adapter for a decoder."""
    import torch

    peft = import_peft()
    decoder = decoder_without_memory(sizes)
    try:
        with torch.device("meta"):
            adapted = peft.PeftModel(decoder, _lora_config(settings))
    except ValueError as err:
        raise CheckpointError(f"the adapter does not fit the model: {err}") from err
    # The embeddings that peft adds to a saved adapter of the last layer are the model's own.
    return shapes_of(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))


def load_adapter(
    directory: Path, sizes: Mapping[str, Any], device: torch.device
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Configuration and tensors of the adapter in `directory` for a decoder of these `sizes`.

    Tensors have the names that peft saves them under, and their saved precision. The base model
    that the adapter names is never looked for: it can be a path of whoever trained it.
    """
    from safetensors.torch import load_file

    missing = [n for n in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not (directory / n).exists()]
    if missing:
        raise CheckpointError(
            f"the adapter in {directory} has no {' and no '.join(missing)}: save it with peft's "
            "save_pretrained"
        )
    settings = json.loads((directory / ADAPTER_CONFIG).read_text())
    _check_is_lora(settings, str(directory))
    expected = adapter_shapes(settings, sizes)
    tensors = _without_base(load_file(directory / ADAPTER_WEIGHTS, device=str(device)))
    compare_shapes(str(directory), shapes_of(tensors), expected)
    return _lora_config(settings), tensors


def import_peft() -> ModuleType:
    """The peft library; ModuleNotFoundError says how to install it."""
    try:
        import peft
    except ModuleNotFoundError as err:
        raise ModuleNotFoundError(
            f"adapters need {err.name}, which is not here: {install('safety')}",
            name=err.name,
        ) from err
    return peft


def _lora_config(settings: Mapping[str, Any]) -> Any:
    # Some ways to initialise an adapter would change the weights below it.
    fixed = {"inference_mode": True, "init_lora_weights": False}
    return import_peft().LoraConfig.from_peft_type(**{**settings, **fixed})


def decoder_without_memory(sizes: Mapping[str, Any]) -> Any:
    """The decoder of a ``config.json`` on the meta device; CheckpointError if there is none."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    model_type = sizes.get("model_type")
    try:
        config = CONFIG_MAPPING[model_type].from_dict(dict(sizes))
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (KeyError, ValueError, TypeError) as err:
        raise CheckpointError(
            f"transformers makes no decoder of a config.json with model_type {model_type!r}: {err}"
        ) from err


def _without_base(tensors: Mapping[str, Value]) -> dict[str, Value]:
    """The adapter's own tensors: with an adapted last layer, peft saves the base's beside them."""
    return {name: value for name, value in tensors.items() if ".base_layer." not in name}
