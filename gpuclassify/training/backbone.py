"""The model that embeds for a head, and what the head's files keep of it."""

from __future__ import annotations

import os
from typing import Any

from gpuclassify.classifiers.embedder import Embedder, sentence_model
from gpuclassify.models.embedding_head import Backbone
from gpuclassify.settings.options import StrPath
from gpuclassify.training.pooler import pooler_embedder

# Settings of an embedder that a head's own files do not keep, and that its classifier needs too.
_READING = ("max_chars", "long_text", "end_chars", "window_overlap", "window_aggregation")


def embedder_of(backbone: StrPath | Embedder, kind: str) -> Embedder:
    """What embeds for a head: a model by its name, or an embedder with settings of its own.

    Raises
    ------
    TypeError, ValueError
        It is neither, it reads several columns, or it is not what a pooler reads.
    """
    if not isinstance(backbone, (str, os.PathLike, Embedder)):
        raise TypeError(f"backbone={backbone!r}: pass a Hub name, a directory, or an Embedder")
    if not isinstance(backbone, Embedder):
        backbone = os.fspath(backbone)
    elif backbone.options.text_template is not None:
        raise ValueError(
            f"text_template={backbone.options.text_template!r} reads several columns, and training "
            "reads one: make a column of the filled template, and name it as text_field="
        )
    if kind == "pooler":
        return pooler_embedder(backbone)
    return backbone if isinstance(backbone, Embedder) else Embedder(model=backbone)


def backbone_of(embedder: Embedder) -> Backbone:
    """What a head's own files keep of its embedder."""
    identity, sentence = embedder.model.identity, sentence_model(embedder.model.checkpoint)
    return Backbone(
        model=identity.name,
        revision=None if identity.is_directory else identity.revision,
        pooling=sentence.pooling,
        normalize=sentence.is_normalized,
        prompt=embedder.model.prompt,
        max_seq_length=embedder.options.max_seq_length,
    )


def reading_of(embedder: Embedder) -> dict[str, Any]:
    """How the embedder reads long texts, where that is not the default."""
    options = {name: getattr(embedder.options, name) for name in _READING}
    return {k: v for k, v in options.items() if v != getattr(Embedder.Options, k)}
