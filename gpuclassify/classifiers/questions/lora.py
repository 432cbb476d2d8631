"""Decoders with an optional LoRA adapter: settings, pinned model, and checks of both.

Neither torch nor peft is imported before tensors are needed, so that a client reads a checkpoint
within milliseconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gpuclassify import hub
from gpuclassify.classifiers.questions.prompt_tokens import Prompt
from gpuclassify.hub import Identity
from gpuclassify.hub.files import WEIGHTS
from gpuclassify.mapping.pinned_model import PinnedModel
from gpuclassify.models.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_is_lora
from gpuclassify.models.checkpoint import (
    Checkpoint,
    CheckpointError,
    network_sizes,
    read_required_json,
)
from gpuclassify.models.tensors import Shapes, compare_shapes, shapes_of, unused_tensors
from gpuclassify.settings.checks import check_text
from gpuclassify.settings.declared import declared, setting
from gpuclassify.settings.options import MODEL, Dtype, LabelOptions, ModelOptions
from gpuclassify.settings.paths import exists

Value = TypeVar("Value")

BASE_MODEL = "meta-llama/LlamaGuard-7b"
GENERATION_CONFIG = "generation_config.json"
DEFENSIVE = "nvidia/Aegis-AI-Content-Safety-LlamaGuard-Defensive-1.0"
# Maximum tokens of a prompt or text. The base model states 2,048, less than its training prompt.
MAX_TOKENS = 4096


@declared
class LoraOptions(LabelOptions, ModelOptions):
    """Settings of mappers with an adapter on a decoder, besides `LabelOptions` and `ModelOptions`.

    Attributes
    ----------
    base_model : str
        Decoder, which is gated: ask for access on its page, and pass `token`.
    base_revision : str
        Branch, tag or commit of `base_model` on the Hub.
    """

    base_revision: str | None = None
    dtype: Dtype | None = setting(default=None, group=MODEL)  # 8-bit products are for encoders

    def check_together(self) -> None:
        """Raise TypeError or ValueError if settings contradict each other, or lack `base_model`."""
        super().check_together()
        check_text("base_model", self.base_model, "the Hub name or directory of the decoder")


@dataclass(frozen=True, kw_only=True)
class LoraCheckpoint(Checkpoint):
    """Description of a decoder (`backbone_json`) with an optional LoRA adapter."""

    base: Identity  # decoder, shared by mappers with other adapters
    adapter: Identity | None
    prompts: tuple[Prompt, ...] = ()  # prompts with placeholders for columns
    max_tokens: int = 0  # maximum tokens of a prompt or window; 0 if nothing has set it


class LoraModel(PinnedModel):
    """Pinned decoder, `base_model`, with a LoRA adapter, `model`.

    In subclasses, `model` may name a guard on the decoder's hidden states, or the decoder itself.
    """

    checkpoint: LoraCheckpoint

    @property
    def repositories(self) -> list[str]:
        """Hub names or directories in the settings `model` and `base_model`."""
        return list(dict.fromkeys([self.options.model, self.options.base_model]))

    @property
    def identities(self) -> list[Identity]:
        """Distinct pinned repositories or directories of decoder, adapter (if any), and `model`."""
        checkpoint = self.checkpoint
        named = [checkpoint.base, checkpoint.identity, checkpoint.adapter]
        return list(dict.fromkeys(one for one in named if one is not None))

    @property
    def tokenizer_home(self) -> Identity:
        """Pinned repository or directory of the decoder, which has the tokenizer."""
        return self.checkpoint.base

    @property
    def weights_files(self) -> dict[Identity, str]:
        """Name of the safetensors file with weights, by repository or directory of `identities`."""
        checkpoint = self.checkpoint
        files = {checkpoint.base: WEIGHTS}
        if checkpoint.adapter is not None:
            files[checkpoint.adapter] = ADAPTER_WEIGHTS
        files.setdefault(checkpoint.identity, WEIGHTS)
        return files

    def read(self) -> LoraCheckpoint:
        """Read the configurations of decoder and adapter, without weights."""
        cache_dir = self.options.cache_dir
        base = self.resolve_base()
        config = read_required_json(base, "config.json", "is no saved model", cache_dir)
        sizes = decoder_sizes(config, base.name)
        adapter, adapter_json = self.resolve_adapter(), ""
        if adapter is not None:
            config = read_required_json(adapter, ADAPTER_CONFIG, "is no adapter", cache_dir)
            check_is_lora(config, adapter.name)
            adapter_json = json.dumps(config)
        return LoraCheckpoint(
            identity=self.identity,
            layout="lora_decoder",
            labels=(),
            problem_type="single_label_classification",
            config_json="{}",
            backbone_json=json.dumps(sizes),
            base=base,
            adapter=adapter,
            adapter_json=adapter_json,
        )

    def resolve_base(self) -> Identity:
        """Return the decoder, pinned to a commit, or to a digest of its directory."""
        options = self.options
        return hub.resolve(options.base_model, options.base_revision, cache_dir=options.cache_dir)

    def resolve_adapter(self) -> Identity | None:
        """Return the pinned LoRA adapter, which `model` names by default; None for no adapter."""
        return self.identity


# How the names of a text decoder's tensors begin in a model that also reads images or sound, and in
# the decoder alone. The order of the words differs between releases of transformers.
_WITHIN = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
# Settings that such a model states for its decoder.
_STATED_OUTSIDE = ("eos_token_id", "quantization_config", "tie_word_embeddings")


def decoder_sizes(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the configuration of the decoder in a model, from the model's ``config.json``.

    For a model that also reads images or sound, it is the configuration of its text decoder. Raises
    CheckpointError, which calls the model `name`, if `check_is_decoder` does.
    """
    inner = config.get("text_config")
    if isinstance(inner, dict) and ("vision_config" in config or "audio_config" in config):
        stated = {key: config[key] for key in _STATED_OUTSIDE if key in config}
        config = {**inner, **stated}
        config.pop("architectures", None)
    sizes = network_sizes(config, name)
    check_is_decoder(sizes, name)
    return sizes


def decoder_tensors(tensors: Mapping[str, Value]) -> dict[str, Value]:
    """Select the tensors or shapes of a model's text decoder, named as in a decoder alone."""
    renamed = {
        inside + name.removeprefix(within): value
        for name, value in tensors.items()
        for within, inside in _WITHIN.items()
        if name.startswith(within)
    }
    if not renamed:
        return dict(tensors)
    return {name: value for name, value in tensors.items() if name == "lm_head.weight"} | renamed


def check_is_decoder(sizes: Mapping[str, Any], name: str) -> None:
    """Raise CheckpointError unless a parsed ``config.json`` describes a decoder that can be asked.

    Such a decoder is a causal language model that reads only text. Its layers have full or sliding
    attention, and its rotary positions are not dynamic.
    """
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


def end_ids(sizes: Mapping[str, Any], directory: Path, tokenizer: Any) -> frozenset[int]:
    """Return the ids of all tokens that end an answer of the decoder in a directory.

    The decoder's ``config.json`` (`sizes`), ``generation_config.json`` and the tokenizer each
    declare none, one or several. Raises CheckpointError if they are no integers.
    """
    from gpuclassify.models.loading import network_config

    path = directory / GENERATION_CONFIG
    generation = hub.read_json_file(path) if exists(path) else {}
    for file, content in (("config.json", sizes), (GENERATION_CONFIG, generation)):
        ids = _several(content.get("eos_token_id"))
        if not all(isinstance(one, int) for one in ids):
            raise CheckpointError(
                f"{file} of {directory} has eos_token_id {ids!r}: ids are integers"
            )
    config = network_config(dict(sizes), str(directory))  # may have an id by default
    declared = (config.eos_token_id, generation.get("eos_token_id"), tokenizer.eos_token_id)
    return frozenset().union(*map(_several, declared))


def _several(ids: Any) -> list[Any]:
    if ids is None:
        return []
    return ids if isinstance(ids, list) else [ids]


def most_positions(sizes: Mapping[str, Any]) -> int | None:
    """Return the maximum tokens of texts with the same "longrope" positions; None for other models.

    All tokens of a longer text, also the first ones, get other positions.
    """
    kind, rope = _rope(sizes)
    name = "original_max_position_embeddings"
    return (rope.get(name) or sizes.get(name)) if kind == "longrope" else None


def _rope(sizes: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    rope = sizes.get("rope_parameters") or sizes.get("rope_scaling") or {}
    return rope.get("rope_type") or rope.get("type"), rope


def check_lora_tensors(checkpoint: LoraCheckpoint, cache_dir: str | None = None) -> None:
    """Raise CheckpointError if tensors in weight files do not fit the decoder or its adapter."""
    from gpuclassify.models.loading import check_adapter

    base, adapter = checkpoint.base, checkpoint.adapter
    shapes = decoder_tensors(hub.read_tensor_shapes(base, cache_dir=cache_dir))
    network = decoder_without_memory(checkpoint.sizes, base.name)
    expected = decoder_shapes(checkpoint.sizes)
    passed_over = network._keys_to_ignore_on_load_unexpected or ()
    unused = unused_tensors(shapes.keys() - expected.keys())
    wrong = {name for name in unused if not any(re.search(one, name) for one in passed_over)}
    known = {name: shape for name, shape in shapes.items() if name in expected or name in wrong}
    compare_shapes(base.name, known, expected)
    if adapter is None:
        return
    check_adapter(checkpoint, adapter, network, cache_dir)


def decoder_shapes(sizes: Mapping[str, Any]) -> Shapes:
    """Return shapes of a decoder's tensors by name, without an output layer tied to embeddings."""
    decoder = decoder_without_memory(sizes)
    shapes = dict(shapes_of(decoder.state_dict()))
    if decoder.config.tie_word_embeddings:  # files lack the last layer
        head = decoder.get_output_embeddings()
        name = next(name for name, module in decoder.named_modules() if module is head)
        del shapes[f"{name}.weight"]
    return shapes


def decoder_without_memory(sizes: Mapping[str, Any], owner: str = "the decoder") -> Any:
    """Build a decoder with this ``config.json`` on torch's meta device, which needs no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    from gpuclassify.models.loading import network_config, new_network

    with torch.device("meta"):
        return new_network(AutoModelForCausalLM, network_config(dict(sizes), owner), owner)
