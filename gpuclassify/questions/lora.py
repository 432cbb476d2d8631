"""A decoder with a LoRA adapter: settings, the pinned model, and whether both fit each other.

Nothing here loads torch or peft before tensors are needed, so that a client reads a checkpoint in
milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from gpuclassify import hub
from gpuclassify.hub import Identity
from gpuclassify.hub.files import WEIGHTS
from gpuclassify.mapping.pinned_model import PinnedModel
from gpuclassify.models.checkpoint import Checkpoint, CheckpointError
from gpuclassify.models.tensors import Shapes, compare_shapes
from gpuclassify.questions.template import SafetyTemplate
from gpuclassify.settings.checks import check_text
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
    """A decoder with a LoRA adapter; `backbone_json` is the decoder's configuration.

    Attributes
    ----------
    base : Identity
        The decoder, which mappers with other adapters share.
    adapter : Identity
    adapter_json : str
        The adapter's configuration.
    prompt : SafetyTemplate, optional
        The prompt that documents are put in.
    """

    base: Identity
    adapter: Identity
    adapter_json: str
    prompt: SafetyTemplate | None = None


class LoraModel(PinnedModel):
    """A decoder with a low-rank adapter, which is the model itself."""

    @property
    def repositories(self) -> list[str]:
        """The model, and the decoder that it stands on."""
        return list(dict.fromkeys([self.options.model, self.options.base_model]))

    @property
    def checkpoint(self) -> LoraCheckpoint:
        """What model, adapter and decoder declare, read once."""
        return cast(LoraCheckpoint, super().checkpoint)

    @property
    def identities(self) -> list[Identity]:
        """The decoder, the model and its adapter."""
        checkpoint = self.checkpoint
        return list(dict.fromkeys([checkpoint.base, checkpoint.identity, checkpoint.adapter]))

    @property
    def tokenizer_home(self) -> Identity:
        """The decoder's directory."""
        return self.checkpoint.base

    @property
    def weights_files(self) -> dict[Identity, str]:
        """Decoder and adapter, and what stands on them."""
        checkpoint = self.checkpoint
        files = {checkpoint.base: WEIGHTS, checkpoint.adapter: ADAPTER_WEIGHTS}
        files.setdefault(checkpoint.identity, WEIGHTS)
        return files

    def read(self) -> LoraCheckpoint:
        """Read what model, adapter and decoder declare; no weights."""
        options, cache_dir = self.options, self.options.cache_dir
        base = hub.resolve(options.base_model, options.base_revision, cache_dir=cache_dir)
        sizes = read_required_json(base, "config.json", "is no saved model", cache_dir)
        check_is_llama(sizes, base.name)
        adapter = self.resolve_adapter()
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

    def resolve_adapter(self) -> Identity:
        """The adapter pinned to a revision."""
        return self.identity


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


def check_is_llama(sizes: Mapping[str, Any], name: str) -> None:
    """Raise CheckpointError unless ``config.json`` is that of a Llama decoder."""
    model_type = sizes.get("model_type")
    if model_type != "llama":
        raise CheckpointError(
            f"the base model {name} has model_type {model_type!r}, and only 'llama' decoders are "
            "known: pass base_model= with the adapter's own base"
        )


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
    found = _without_base(hub.read_tensor_shapes(adapter, ADAPTER_WEIGHTS, cache_dir=cache_dir))
    expected = adapter_shapes(json.loads(checkpoint.adapter_json), checkpoint.sizes)
    compare_shapes(f"{adapter.name} for {base.name}", found, expected)


def decoder_shapes(sizes: Mapping[str, Any]) -> Shapes:
    """Names and shapes of the tensors of a decoder with this ``config.json``."""
    decoder = _decoder_without_memory(sizes)
    shapes = _shapes(decoder.state_dict())
    if decoder.config.tie_word_embeddings:  # then no file has the last layer
        del shapes["lm_head.weight"]
    return shapes


def adapter_shapes(settings: Mapping[str, Any], sizes: Mapping[str, Any]) -> Shapes:
    """Names and shapes of the tensors of an adapter for a decoder."""
    import torch

    peft = import_peft()
    decoder = _decoder_without_memory(sizes)
    try:
        with torch.device("meta"):
            adapted = peft.PeftModel(decoder, _lora_config(settings))
    except ValueError as err:
        raise CheckpointError(f"the adapter does not fit the model: {err}") from err
    # The embeddings that peft adds to a saved adapter of the last layer are the model's own.
    return _shapes(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))


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
    compare_shapes(str(directory), _shapes(tensors), expected)
    return _lora_config(settings), tensors


def import_peft() -> ModuleType:
    """The peft library; ModuleNotFoundError says how to install it."""
    try:
        import peft
    except ModuleNotFoundError as err:
        raise ModuleNotFoundError(
            f"adapters need {err.name}, which is not here: pip install 'gpuclassify[safety]'",
            name=err.name,
        ) from err
    return peft


def _lora_config(settings: Mapping[str, Any]) -> Any:
    # Some ways to initialise an adapter would change the weights below it.
    fixed = {"inference_mode": True, "init_lora_weights": False}
    return import_peft().LoraConfig.from_peft_type(**{**settings, **fixed})


def _decoder_without_memory(sizes: Mapping[str, Any]) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig.from_dict(dict(sizes)))


def _without_base(tensors: Mapping[str, Value]) -> dict[str, Value]:
    """The adapter's own tensors: with an adapted last layer, peft saves the base's beside them."""
    return {name: value for name, value in tensors.items() if ".base_layer." not in name}


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
