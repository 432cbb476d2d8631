"""LoRA adapters as peft saves them: read from one directory, and checked before they are used."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file

from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.models.tensors import Shapes, compare_shapes
from gpuclassify.safety.lora_checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS


def import_peft() -> ModuleType:
    """The peft library.

    Raises
    ------
    ModuleNotFoundError
        It is not installed; the message says how to.
    """
    try:
        import peft
    except ModuleNotFoundError as err:
        raise ModuleNotFoundError(
            f"adapters need {err.name}, which is not here: pip install 'gpuclassify[safety]'",
            name=err.name,
        ) from err
    return peft


def decoder_shapes(sizes: Mapping[str, Any]) -> Shapes:
    """Names and shapes of the tensors of a decoder, found without memory.

    Parameters
    ----------
    sizes : mapping
        Its ``config.json``.
    """
    decoder = _blank_decoder(sizes)
    shapes = _shapes(decoder.state_dict())
    if decoder.config.tie_word_embeddings:  # then no file has the last layer
        del shapes["lm_head.weight"]
    return shapes


def adapter_shapes(settings: dict[str, Any], sizes: Mapping[str, Any]) -> Shapes:
    """Names and shapes of the tensors of an adapter for a decoder, found without memory.

    Parameters
    ----------
    settings : dict
        The adapter's ``adapter_config.json``.
    sizes : mapping
        The decoder's ``config.json``.

    Raises
    ------
    CheckpointError
        The decoder has no layers of the names that the adapter is for.
    ModuleNotFoundError
        peft is not installed.
    """
    peft = import_peft()
    decoder = _blank_decoder(sizes)
    try:
        with torch.device("meta"):
            adapted = peft.PeftModel(decoder, lora_config(settings))
    except ValueError as err:
        raise CheckpointError(f"the adapter does not fit the model: {err}") from err
    # The embeddings that peft adds to a saved adapter of the last layer are the model's own.
    return _shapes(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))


def adapter_names(names: Iterable[str]) -> set[str]:
    """The names of the adapter's own tensors.

    With an adapted last layer, peft saves that layer of the base model beside them.
    """
    return {name for name in names if ".base_layer." not in name}


def lora_config(settings: dict[str, Any]) -> Any:
    """The ``peft.LoraConfig`` of an ``adapter_config.json``, for inference."""
    # Some ways to initialise an adapter would change the weights below it.
    fixed = {"inference_mode": True, "init_lora_weights": False}
    return import_peft().LoraConfig.from_peft_type(**settings | fixed)


def read_adapter(
    directory: Path, model_config: Any, device: torch.device
) -> tuple[Any, dict[str, torch.Tensor]]:
    """The LoRA adapter in `directory` for a decoder of the configuration `model_config`.

    The base model that the adapter names is never looked for: it can be a path of whoever
    trained it.

    Returns
    -------
    config : peft.LoraConfig
    tensors : dict of str to Tensor
        By the names that peft saves them under, on `device`, as precise as they were saved.

    Raises
    ------
    CheckpointError
        A file is missing, it is no LoRA adapter, or its tensors do not fit the model.
    ModuleNotFoundError
        peft is not installed.
    """
    settings = _read_settings(directory)
    expected = adapter_shapes(settings, model_config.to_dict())
    saved = load_file(directory / ADAPTER_WEIGHTS, device=str(device))
    tensors = {name: saved[name] for name in adapter_names(saved)}
    compare_shapes(str(directory), _shapes(tensors), expected)
    return lora_config(settings), tensors


def _read_settings(directory: Path) -> dict[str, Any]:
    missing = [n for n in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not (directory / n).exists()]
    if missing:
        raise CheckpointError(
            f"the adapter in {directory} has no {' and no '.join(missing)}: save it with peft's "
            "save_pretrained"
        )
    settings = json.loads((directory / ADAPTER_CONFIG).read_text())
    if settings.get("peft_type") != "LORA":
        raise CheckpointError(
            f"the adapter in {directory} has peft_type {settings.get('peft_type')!r}, and only "
            "'LORA' is known: name a LoRA adapter"
        )
    return settings


def _blank_decoder(sizes: Mapping[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig.from_dict(dict(sizes)))


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
