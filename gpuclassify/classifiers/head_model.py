"""The models of HeadClassifier: heads, and what embeds for all of them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from gpuclassify import hub
from gpuclassify.classifiers.embedder import EmbeddingModel, EmbeddingOptions
from gpuclassify.classifiers.head_options import HeadOptions
from gpuclassify.hub import Identity
from gpuclassify.hub.files import WEIGHTS
from gpuclassify.mapping.pinned_model import PIN, PinnedModel, is_pinned
from gpuclassify.models.checkpoint import Checkpoint, CheckpointError, state_width
from gpuclassify.models.trained_head import CONVERT, Backbone, TrainedHeadCheckpoint, read_head
from gpuclassify.settings.options import setting_names


class PinnedHead(PinnedModel):
    """One head, of a directory or the Hub."""

    @property
    def checkpoint(self) -> TrainedHeadCheckpoint:
        """What the head declares, read once."""
        return cast(TrainedHeadCheckpoint, super().checkpoint)

    def read(self) -> TrainedHeadCheckpoint:
        """Read what the head declares; no weights."""
        name = self.options.model
        if Path(name).is_file():
            raise CheckpointError(f"{name} is a file, and a head is a directory: {CONVERT}")
        return read_head(self.identity, cache_dir=self.options.cache_dir)

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError if the head is of another kind than `problem_type` says."""
        given, kind = self.options.problem_type, checkpoint.problem_type
        if given not in (None, kind):
            raise CheckpointError(
                f"{self.options.model} is a {kind} head, and by the settings a {given} one: pass "
                f"problem_type={{NAME: {kind!r}}}, NAME being what heads= calls it"
            )


class HeadsModel(PinnedModel):
    """A model that embeds, and the heads on its embeddings."""

    def __init__(self, options: HeadOptions, **parts: Any) -> None:
        super().__init__(options, **parts)
        self.heads = {name: PinnedHead(own) for name, own in options.by_head}

    @functools.cached_property
    def backbone(self) -> EmbeddingModel:
        """The model that embeds, with the settings that were given or that the heads agree on."""
        heads = {name: head.checkpoint for name, head in self.heads.items()}
        return EmbeddingModel(backbone_options(self.options, heads))

    @property
    def repositories(self) -> list[str]:
        """The backbone and the heads, as far as they are named."""
        is_known = "backbone" in vars(self)
        backbone = self.backbone.options.model if is_known else self.options.backbone
        heads = [name for head in self.heads.values() for name in head.repositories]
        return [*([backbone] if backbone else []), *heads]

    @property
    def unpinned(self) -> str:
        """What to pass so that the settings alone tell every revision; empty if they do."""
        backbone, revision = self.options.backbone, self.options.revision
        if backbone is None or not is_pinned(backbone, revision):
            return f"backbone= and {PIN}"
        open_heads = [head.options.model for head in self.heads.values() if head.unpinned]
        return f"{open_heads[0]}@COMMIT, a commit of 40 hex digits, in heads=" if open_heads else ""

    @property
    def identity(self) -> Identity:
        """The backbone's."""
        return self.backbone.identity

    @property
    def identities(self) -> list[Identity]:
        """The backbone's, then the heads'."""
        return [*super().identities, *(head.identity for head in self.heads.values())]

    @property
    def prompt(self) -> str:
        """What stands before every text that the backbone reads."""
        return self.backbone.prompt

    @property
    def weights_files(self) -> dict[Identity, str]:
        """The weights of the backbone and of the heads."""
        heads = {head.identity: WEIGHTS for head in self.heads.values()}
        return super().weights_files | heads

    def read(self) -> Checkpoint:
        """Read what the backbone declares; no weights."""
        return self.backbone.checkpoint

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError unless all heads read embeddings of the backbone's width."""
        backbone, width = checkpoint.identity, state_width(checkpoint.sizes)
        for name, head in self.heads.items():
            if width is not None:  # else the first embedding tells
                check_width(name, head.checkpoint, width, backbone.name)
            if head.checkpoint.backbone is not None:
                _warn_of_other_model(name, head.checkpoint.backbone.model, backbone)

    def describe(self) -> dict[str, Any]:
        """The backbone's settings, and the commits or digests of backbone and heads."""
        options = self.backbone.options
        return {
            **super().describe(),
            "backbone": {own.name: getattr(options, own.name) for own in fields(Backbone)},
            "heads": {
                name: {"model": head.identity.name, "revision": head.identity.revision}
                for name, head in self.heads.items()
            },
        }

    def key(self) -> Any:
        """What tells the backbone and the heads from all others, or as much as is known."""
        heads = () if self._is_out_of_reach else self.heads.values()
        return (super().key(), *(head.key() for head in heads))


def backbone_options(
    given: HeadOptions, heads: Mapping[str, TrainedHeadCheckpoint]
) -> EmbeddingOptions:
    """The backbone's settings: those given, else those that the heads were trained with.

    Raises
    ------
    CheckpointError
        No backbone is known, or heads were trained with different ones.
    """
    settings = {name: getattr(given, name) for name in setting_names(EmbeddingOptions)}
    settings["model"] = given.backbone
    known = {name: head.backbone for name, head in heads.items() if head.backbone is not None}
    models = {backbone.model for backbone in known.values()}
    for own in fields(Backbone):
        name = own.name
        if settings[name] is not None or (name == "prompt" and given.prompt_name is not None):
            continue
        if name == "revision" and models != {settings["model"]}:
            continue  # it is not that of another place
        settings[name] = _agreed(name, known)
    if settings["model"] is None:
        raise CheckpointError(
            f"the heads {', '.join(heads)} do not say what model embeds for them: pass backbone="
        )
    return EmbeddingOptions(**settings)


def _agreed(setting: str, backbones: Mapping[str, Backbone]) -> Any:
    """The value that all heads have for a setting of their backbone; None if none is known."""
    found = {name: getattr(backbone, setting) for name, backbone in backbones.items()}
    if setting == "revision":  # which need not be known
        found = {name: value for name, value in found.items() if value is not None}
    if not found:
        return None
    (first, value), *others = found.items()
    for name, other in others:
        if other != value:
            argument = "backbone" if setting == "model" else setting
            raise CheckpointError(
                f"the heads {first!r} and {name!r} were trained on other embeddings: {setting} is "
                f"{value!r} of one and {other!r} of the other. Run them in two HeadClassifiers, or "
                f"pass {argument}= for both"
            )
    return value


def check_width(name: str, head: TrainedHeadCheckpoint, width: int, backbone: str) -> None:
    """Raise CheckpointError unless the head reads embeddings of `width` numbers."""
    if head.widths[0] != width:
        raise CheckpointError(
            f"head {name!r} ({head.identity.name}) reads embeddings of {head.widths[0]} numbers, "
            f"and those of {backbone} have {width}: pass the backbone= that it was trained on"
        )


def _warn_of_other_model(name: str, trained_on: str, backbone: Identity) -> None:
    """Warn if a head was trained on another model of the Hub; a directory may be a copy of it."""
    if trained_on == backbone.name or backbone.is_directory or hub.is_directory_name(trained_on):
        return
    message = f"head {name!r} was trained on embeddings of {trained_on}, not of {backbone.name}"
    warnings.warn(message, UserWarning, stacklevel=2)
