"""Checkpoints that are an adapter on a larger model: what they declare, without weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from gpuclassify import hub
from gpuclassify.hub import Identity
from gpuclassify.models.checkpoint import Checkpoint, CheckpointError
from gpuclassify.models.tensors import compare_shapes
from gpuclassify.safety.template import SafetyTemplate

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTED_DECODER = "adapted_decoder"
ARCHITECTURE = "llama"
BASE_MODEL = "meta-llama/LlamaGuard-7b"
DEFENSIVE = "nvidia/Aegis-AI-Content-Safety-LlamaGuard-Defensive-1.0"
# Of prompt or text. The base model states 2,048, which is less than the prompt that it was given.
MAX_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class AdaptedCheckpoint(Checkpoint):
    """A decoder with a LoRA adapter; `backbone_json` is the decoder's configuration.

    Attributes
    ----------
    base : Identity
        The decoder, which mappers with other adapters share.
    adapter : Identity
    adapter_json : str
        The adapter's configuration.
    prompt : SafetyTemplate, optional
        In what the documents are put.
    """

    base: Identity
    adapter: Identity
    adapter_json: str
    prompt: SafetyTemplate | None = None


def read_adapted(
    identity: Identity, base: Identity, adapter: Identity, cache_dir: str | None = None
) -> AdaptedCheckpoint:
    """Describe a model that runs `base` with `adapter`.

    Parameters
    ----------
    identity : Identity
        The model itself: the adapter, or what reads its states.
    base, adapter : Identity
    cache_dir : str, optional

    Raises
    ------
    CheckpointError
        The base model is no Llama decoder, or the adapter is none.
    """
    sizes = read_required_json(base, "config.json", "is no saved model", cache_dir)
    if sizes.get("model_type") != ARCHITECTURE:
        raise CheckpointError(
            f"the base model {base.name} has model_type {sizes.get('model_type')!r}, and adapters "
            f"here are for {ARCHITECTURE!r} decoders: pass base_model= with the adapter's own base"
        )
    config = read_required_json(adapter, ADAPTER_CONFIG, "is no adapter", cache_dir)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"the adapter {adapter.name} has peft_type {config.get('peft_type')!r}, and only "
            "'LORA' is known: name a LoRA adapter"
        )
    return AdaptedCheckpoint(
        identity=identity,
        layout=ADAPTED_DECODER,
        labels=(),
        problem_type="single_label_classification",
        config_json="{}",
        backbone_json=json.dumps(sizes),
        base=base,
        adapter=adapter,
        adapter_json=json.dumps(config),
    )


def read_required_json(
    identity: Identity, filename: str, otherwise: str, cache_dir: str | None
) -> dict[str, Any]:
    """A JSON file that the model must have; CheckpointError says what it is otherwise."""
    content = hub.read_json(identity, filename, cache_dir=cache_dir)
    if content is None:
        files = ", ".join(hub.list_files(identity, cache_dir=cache_dir)[:8]) or "no files"
        raise CheckpointError(
            f"{identity.name} {otherwise}: it has no {filename}, but {files}. Pass the directory "
            "or Hub name of what was meant."
        )
    return content


def check_adapted_tensors(checkpoint: AdaptedCheckpoint, cache_dir: str | None = None) -> None:
    """Compare the headers of base and adapter with what both configurations need.

    Raises
    ------
    CheckpointError
        Names the tensors that are missing, unknown or of another shape, as when the adapter is for
        another base model.
    ModuleNotFoundError
        peft is not installed.
    """
    from gpuclassify.safety.lora_weights import adapter_names, adapter_shapes, decoder_shapes

    base, adapter = checkpoint.base, checkpoint.adapter
    found = hub.read_tensor_shapes(base, cache_dir=cache_dir)
    expected = decoder_shapes(checkpoint.sizes)
    # Older saves carry buffers that the network no longer has: unknown names are no fault.
    known = {name: shape for name, shape in found.items() if name in expected}
    compare_shapes(base.name, known, expected)
    found = hub.read_tensor_shapes(adapter, ADAPTER_WEIGHTS, cache_dir=cache_dir)
    found = {name: found[name] for name in adapter_names(found)}
    expected = adapter_shapes(json.loads(checkpoint.adapter_json), checkpoint.sizes)
    compare_shapes(f"{adapter.name} for {base.name}", found, expected)
