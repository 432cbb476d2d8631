"""Deberta: a backbone with one linear layer, in the layout of published category classifiers."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import nn

from gpuclassify import hub
from gpuclassify.hub.saving import saving
from gpuclassify.models.checkpoint import (
    KNOWN_BACKBONES,
    LINEAR_HEAD,
    CheckpointError,
    OwnModule,
    labels_in_order,
    read_backbone,
    read_checkpoint,
)
from gpuclassify.models.loading import load_module, random_backbone
from gpuclassify.models.networks import FirstTokenHead

_CARD = "README.md"
INSIDE = "backbone"  # folder for a private backbone's configuration in a checkpoint


class Deberta(FirstTokenHead, PyTorchModelHubMixin):
    """A backbone with a linear classification layer on the first token's hidden state.

    It has the layout of ``nvidia/domain-classifier``, ``nvidia/multilingual-domain-classifier``,
    ``nvidia/quality-classifier-deberta`` and ``nvidia/content-type-classifier-deberta``: tensors
    ``model.*``, ``fc.weight`` and ``fc.bias``, without pooler or activation. ``save_pretrained``
    writes a checkpoint that ``DistributedDataClassifier`` and the four models' own classes read.

    Parameters
    ----------
    config : mapping
        ``base_model`` (Hub name or directory that gives the backbone's sizes), ``id2label``, and
        ``fc_dropout``, the probability while training (default 0).
    backbone : nn.Module, optional
        A transformers encoder. Default: one of the base model's sizes with random weights.

    Raises
    ------
    CheckpointError
        If `config` has no ``base_model`` or no labels, repeats a label, or has other ids than 0 to
        n - 1.

    Examples
    --------
    >>> from transformers import AutoModel  # doctest: +SKIP
    >>> config = {"base_model": "microsoft/deberta-v3-base", "id2label": {0: "ham", 1: "spam"}}
    >>> backbone = AutoModel.from_pretrained(config["base_model"])  # doctest: +SKIP
    >>> model = Deberta(config, backbone)  # train it, then:  # doctest: +SKIP
    >>> model.save_pretrained("spam-classifier")  # doctest: +SKIP
    """

    def __init__(self, config: Mapping[str, Any], backbone: nn.Module | None = None) -> None:
        labels = labels_in_order(config, "config")
        if len(set(labels)) < len(labels):
            raise CheckpointError(f"id2label of config names a label twice: {list(labels)}")
        if "base_model" not in config:
            raise CheckpointError("config has no base_model: name the backbone's Hub name")
        base_model = str(config["base_model"])
        if backbone is None:
            backbone = random_backbone(read_backbone(base_model), base_model)
        super().__init__(backbone, len(labels), float(config.get("fc_dropout", 0.0)))
        # The keys of the published files, with their spelling of numbers.
        self.config: dict[str, Any] = {
            "base_model": base_model,
            "config_path": None,
            "fc_dropout": self.dropout.p,
            "id2label": {str(number): label for number, label in enumerate(labels)},
            "label2id": {label: number for number, label in enumerate(labels)},
            "model_type": backbone.config.model_type,  # type: ignore[union-attr]
            "pretrained": True,
        }

    def save_pretrained(self, save_directory: str | Path, **settings: Any) -> str | None:
        """Save to a directory like `huggingface_hub.PyTorchModelHubMixin`, but atomically.

        The new files replace those of an earlier save at once. An existing model card (README.md)
        and files with other names stay. `settings` go to the mixin's method, whose result is
        returned: the URL of the commit if the model is pushed to the Hub, else None. The default of
        its ``repo_id`` is the directory's name.
        """
        directory = Path(save_directory)
        settings.setdefault("repo_id", directory.name)
        with saving(directory) as folder:
            with contextlib.suppress(FileNotFoundError):
                shutil.copy2(directory / _CARD, folder)  # the mixin keeps an existing card
            return super().save_pretrained(folder, **settings)

    def _save_pretrained(self, save_directory: Path) -> None:
        """Write the weights and ``config.json``, in the format of the published classifiers."""
        super()._save_pretrained(save_directory)
        config = dict(self.config)
        base_model = config["base_model"]
        # The configuration of a backbone that is neither on the Hub nor well known is saved, too.
        is_elsewhere = "/" in base_model and not hub.is_directory_name(base_model)
        if not is_elsewhere and base_model.lower() not in KNOWN_BACKBONES:
            config["base_model"] = INSIDE
            self.model.config.save_pretrained(save_directory / INSIDE)  # type: ignore[union-attr, operator]
        text = json.dumps(config, indent=2, sort_keys=True)
        (save_directory / "config.json").write_text(text, encoding="utf-8")

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        revision: str | None,
        cache_dir: str | Path | None,
        token: str | bool | None,
        **_: object,
    ) -> Deberta:
        """Load a trainable float32 model on the CPU, in evaluation mode."""
        if isinstance(token, str):
            hub.remember_token(model_id, token)
        folder = None if cache_dir is None else str(cache_dir)
        identity = hub.resolve(model_id, revision, cache_dir=folder)
        checkpoint = read_checkpoint(identity, cache_dir=folder)
        if checkpoint.layout != LINEAR_HEAD:
            raise CheckpointError(
                f"{model_id} is no backbone with one linear layer: its config.json needs "
                "base_model, fc_dropout and id2label"
            )
        directory = hub.download(identity, cache_dir=folder)

        def build(config: dict[str, Any]) -> Deberta:
            return cls(config, random_backbone(checkpoint.sizes, model_id))

        module: Any = load_module(checkpoint, directory, torch.float32, OwnModule(build))
        return module.requires_grad_(True)
