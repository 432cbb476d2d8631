"""Tensors of the architectures of the published classifiers, told without building a network.

Nothing here imports torch, which takes seconds of a client that plans. The names and shapes are
those that transformers gives its `BertModel` and `DebertaV2Model`, and GTE's published ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpuclassify.models.checkpoint import (
    EMBEDDING,
    LINEAR_HEAD,
    POOLED_HEADS,
    SEQUENCE_CLASSIFICATION,
    Checkpoint,
)
from gpuclassify.models.gte import gte_shapes, is_published_gte
from gpuclassify.models.tensors import Shapes

_DEBERTA, _BERT = "deberta-v2", "bert"
_ATTENTION = {
    _DEBERTA: ("query_proj", "key_proj", "value_proj"),
    _BERT: ("query", "key", "value"),
}
# Settings with which DeBERTa has the tensors below and no others: those of DeBERTa-v3.
_DEBERTA_V3 = {
    "relative_attention": True,
    "share_att_key": True,
    "position_biased_input": False,
    "type_vocab_size": 0,
    "norm_rel_ebd": "layer_norm",
}

_Shape = tuple[int, ...]


def known_shapes(checkpoint: Checkpoint) -> Shapes | None:
    """Names and shapes of the tensors that a checkpoint must have, or None if only torch tells.

    Parameters
    ----------
    checkpoint : Checkpoint

    Returns
    -------
    dict of str to tuple of int, optional
        None for other architectures than BERT, DeBERTa-v3 and GTE as it was published, and for
        unusual settings of these.
    """
    sizes = checkpoint.sizes
    if checkpoint.layout not in (LINEAR_HEAD, POOLED_HEADS, SEQUENCE_CLASSIFICATION, EMBEDDING):
        return None
    if is_published_gte(checkpoint.config):
        return _published_gte(checkpoint)
    try:
        backbone = dict(_backbone(sizes))
    except KeyError:  # a size that the configuration leaves to transformers' default
        return None
    if not backbone:
        return None
    prefix, rest = _around(checkpoint)
    return {f"{prefix}{name}": shape for name, shape in backbone.items()} | rest


def _around(checkpoint: Checkpoint) -> tuple[str, dict[str, _Shape]]:
    """What the backbone's names begin with, and the tensors that follow it."""
    width, outputs = checkpoint.sizes["hidden_size"], checkpoint.output_count
    is_bert = checkpoint.sizes["model_type"] == _BERT
    if checkpoint.layout == LINEAR_HEAD:
        return "model.", _bert_pooler("model.", width, is_bert) | _linear("fc", outputs, width)
    if checkpoint.layout == POOLED_HEADS:
        heads = _bert_pooler("backbone.", width, is_bert)
        for number, (_, size) in enumerate(checkpoint.heads):
            heads |= _linear(f"head_{number}.fc", size, width)
        return "backbone.", heads
    if checkpoint.layout == EMBEDDING:
        return "", _bert_pooler("", width, is_bert)
    prefix = "bert." if is_bert else "deberta."
    pooler = _bert_pooler(prefix, width, is_bert) or _linear("pooler.dense", width, width)
    return prefix, pooler | _linear("classifier", outputs, width)


def _published_gte(checkpoint: Checkpoint) -> Shapes:
    backbone, width = dict(gte_shapes(checkpoint.sizes)), checkpoint.sizes["hidden_size"]
    if checkpoint.layout == EMBEDDING:
        return backbone
    named = {f"new.{name}": shape for name, shape in backbone.items()}
    pooler = _linear("new.pooler.dense", width, width)
    return named | pooler | _linear("classifier", checkpoint.output_count, width)


def _backbone(sizes: dict[str, Any]) -> Iterator[tuple[str, _Shape]]:
    """The embeddings and the layers of an encoder; nothing of an architecture not known here."""
    kind = str(sizes.get("model_type"))
    is_v3 = kind == _DEBERTA and all(sizes.get(k) == v for k, v in _DEBERTA_V3.items())
    width, inner = sizes["hidden_size"], sizes["intermediate_size"]
    are_widths_equal = all(
        sizes.get(name, width) == width for name in ("embedding_size", "pooler_hidden_size")
    )
    has_more = sizes.get("conv_kernel_size") or sizes.get("add_cross_attention")
    if not are_widths_equal or has_more or not (is_v3 or kind == _BERT):
        return
    yield "embeddings.word_embeddings.weight", (sizes["vocab_size"], width)
    yield from _norm("embeddings.LayerNorm", width)
    if is_v3:
        buckets = sizes.get("position_buckets", -1)
        reach = buckets if buckets > 0 else sizes["max_relative_positions"]
        reach = reach if reach > 0 else sizes["max_position_embeddings"]
        yield "encoder.rel_embeddings.weight", (2 * reach, width)
        yield from _norm("encoder.LayerNorm", width)
    else:
        positions = sizes["max_position_embeddings"]
        yield "embeddings.position_embeddings.weight", (positions, width)
        yield "embeddings.token_type_embeddings.weight", (sizes["type_vocab_size"], width)
    for number in range(sizes["num_hidden_layers"]):
        layer = f"encoder.layer.{number}"
        for name in _ATTENTION[kind]:
            yield from _linear(f"{layer}.attention.self.{name}", width, width).items()
        yield from _linear(f"{layer}.attention.output.dense", width, width).items()
        yield from _norm(f"{layer}.attention.output.LayerNorm", width)
        yield from _linear(f"{layer}.intermediate.dense", inner, width).items()
        yield from _linear(f"{layer}.output.dense", width, inner).items()
        yield from _norm(f"{layer}.output.LayerNorm", width)


def _bert_pooler(prefix: str, width: int, is_bert: bool) -> dict[str, _Shape]:
    return _linear(f"{prefix}pooler.dense", width, width) if is_bert else {}


def _linear(name: str, outputs: int, inputs: int) -> dict[str, _Shape]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> Iterator[tuple[str, _Shape]]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)
