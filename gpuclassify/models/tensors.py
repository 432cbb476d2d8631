"""Comparison of a file's tensors with the tensors that a network needs.

Nothing here imports torch, which takes seconds. Names and shapes of tensors follow transformers'
`BertModel` and `DebertaV2Model`, and GTE's published code.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpuclassify import hub
from gpuclassify.hub.saving import CONFIG, WEIGHTS, WEIGHTS_DIGEST, WEIGHTS_NAME, file_sha256
from gpuclassify.models.checkpoint import (
    EMBEDDING,
    LINEAR_HEAD,
    POOLED_HEADS,
    SEQUENCE_CLASSIFICATION,
    TOKEN_CLASSIFICATION,
    Checkpoint,
    CheckpointError,
    is_published_gte,
    some_of,
)

# Layouts whose weights transformers itself loads: it renames tensors of older checkpoints.
LOADED_BY_TRANSFORMERS = (SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION, EMBEDDING)
# Constant buffers that old versions of transformers saved.
LEGACY_BUFFERS = frozenset({"model.embeddings.position_ids", "backbone.embeddings.position_ids"})

# Tensors of a checkpoint that do not affect its outputs: saved constants, parts of a loss, unread
# poolers, and pretraining heads.
_UNUSED = re.compile(
    r"(^|\.)(position_ids|token_type_ids|inv_freq|masked_bias|attn\.bias|attention\.bias|version"
    r"|pooler\..*|loss\w*\..*)$"
    r"|^(cls|lm_head|lm_loss|lm_predictions|mask_predictions|predictions|sop_classifier|pred_layer"
    r"|generator_\w+|discriminator_predictions|vocab_\w+|final_logits_bias|decoder\.(bias|weight))\b"
)

Shapes = Mapping[str, tuple[int, ...]]  # shapes of tensors by name

_DEBERTA, _BERT, _GTE = "deberta-v2", "bert", "gte"
# Prefix of the encoder's tensors in a classifier.
_PREFIXES = {_DEBERTA: "deberta.", _BERT: "bert.", _GTE: "new."}
_ATTENTION = {
    _DEBERTA: ("query_proj", "key_proj", "value_proj"),
    _BERT: ("query", "key", "value"),
}
# Settings of DeBERTa-v3, with which DeBERTa has exactly the tensors below.
_DEBERTA_V3 = {
    "relative_attention": True,
    "share_att_key": True,
    "position_biased_input": False,
    "type_vocab_size": 0,
    "norm_rel_ebd": "layer_norm",
}

_Shape = tuple[int, ...]


def shapes_of(tensors: Mapping[str, Any]) -> Shapes:
    """Return the shapes of torch tensors or numpy arrays by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def needed_tensors(checkpoint: Checkpoint, names: Iterable[str]) -> set[str]:
    """Return the `names` of a network's tensors that a checkpoint's weight file must have.

    It may lack an embedding model's pooler, for example. For a LoRA adapter, it is the base model's
    file, which may lack layers that the adapter replaces.
    """
    if checkpoint.base is not None:
        parts = json.loads(checkpoint.adapter_json).get("modules_to_save") or ()
        return {name for name in names if not any(f".{part}." in f".{name}" for part in parts)}
    if checkpoint.layout != EMBEDDING:
        return set(names)
    return {name for name in names if not name.startswith(("pooler.", "embeddings.position_ids"))}


def unused_tensors(unknown: Iterable[str], parts: Collection[str] | None = None) -> set[str]:
    """Return the `unknown` tensor names of a file that show that it is of another architecture.

    Harmless names, such as old buffers and heads of pre-training, are left out. If `parts` are
    passed, only names that begin with one of these submodules are returned.
    """
    names = [name for name in unknown if parts is None or name.partition(".")[0] in parts]
    return {name for name in names if not _UNUSED.search(name)}


def check_headers(
    checkpoint: Checkpoint,
    expected: Shapes | None,
    cache_dir: str | None = None,
    ties: Iterable[Collection[str]] = (),
) -> None:
    """Compare the tensors in a checkpoint's safetensors headers with the network's `expected` ones.

    Raises CheckpointError for missing, unknown and misshaped tensors, except those that are
    harmless or that transformers may rename. For a LoRA adapter, the headers are the base model's.
    If `expected` is None, they are only read. Each element of `ties` lists the names of one shared
    tensor, which a file may store under any of them.
    """
    home = checkpoint.base or checkpoint.identity
    shapes = hub.read_tensor_shapes(home, cache_dir=cache_dir)
    if expected is None:
        return
    tied = {name for names in ties if shapes.keys() & names for name in names}
    missing = needed_tensors(checkpoint, set(expected) - set(shapes) - tied)
    unknown = set(shapes) - set(expected) - LEGACY_BUFFERS
    if checkpoint.layout in LOADED_BY_TRANSFORMERS and unknown:
        is_whole = checkpoint.layout != EMBEDDING
        parts = None if is_whole else {name.partition(".")[0] for name in expected}
        # transformers renames tensors of older checkpoints while loading, so if there are unknown
        # names, only the loading itself can find missing tensors.
        missing, unknown = set(), set() if missing else unused_tensors(unknown, parts)
    compared = {name: expected[name] for name in needed_tensors(checkpoint, expected)}
    refuse_wrong_tensors(home.name, missing, misshaped(shapes, compared), unknown)


def check_digest(checkpoint: Checkpoint, directory: Path) -> None:
    """Compare the SHA-256 of the weights in `directory` with the digest in `checkpoint.config`.

    Nothing is done if that has no digest of ``model.safetensors``. Raises CheckpointError if the
    digests differ, or instead ModelChangedError if the model is a local one whose files have
    changed since `checkpoint` was made.
    """
    saved = checkpoint.config.get(WEIGHTS_DIGEST)
    if saved is None or checkpoint.config.get(WEIGHTS_NAME) != WEIGHTS:
        return
    if (digest := file_sha256(directory / WEIGHTS)) != saved:
        if checkpoint.identity.is_directory:
            hub.download(checkpoint.identity)  # raises ModelChangedError if the directory changed
        raise CheckpointError(
            f"{directory / WEIGHTS} is not the file that was saved with its {CONFIG}: its SHA-256 "
            f"begins with {digest[:12]}, not {saved[:12]}. It was damaged, or copied without the "
            f"other: copy both anew, or train or convert again. If you changed the weights on "
            f"purpose, remove {WEIGHTS_DIGEST} from {CONFIG}"
        )


def compare_shapes(owner: str, shapes: Shapes, expected: Shapes) -> None:
    """Raise CheckpointError unless the tensors of `owner` have the expected names and shapes."""
    refuse_wrong_tensors(
        owner,
        expected.keys() - shapes.keys(),
        misshaped(shapes, expected),
        shapes.keys() - expected.keys(),
    )


def misshaped(shapes: Shapes, expected: Shapes) -> list[str]:
    """Describe each tensor whose shape is not the expected one, if it is in both mappings."""
    return [
        f"{name} {tuple(shapes[name])} instead of {tuple(expected[name])}"
        for name in sorted(shapes.keys() & expected.keys())
        if tuple(shapes[name]) != tuple(expected[name])
    ]


def refuse_wrong_tensors(
    owner: str, missing: Collection[str], misshaped: Collection[str], unknown: Collection[str]
) -> None:
    """Raise CheckpointError if any of the three collections has an element; the error lists some.

    `missing` and `unknown` are tensor names, and `misshaped` are texts on tensors and their shapes.
    """
    problems = [
        f"{len(names)} tensors {problem}: {some_of(sorted(names))}"
        for names, problem in (
            (missing, "are missing"),
            (misshaped, "have another shape"),
            (unknown, "are no part of the architecture"),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"the weights of {owner} do not fit its configuration; {'; '.join(problems)}. "
            "Save the model again, or name the right base_model."
        )


# Tensors of known architectures.


def known_shapes(checkpoint: Checkpoint) -> Shapes | None:
    """Compute the shapes, by name, of a network's tensors from the checkpoint's configuration.

    Returns None unless backbone and head are of a known kind, such as BERT or DeBERTa-v3, and the
    configuration states all sizes.
    """
    if checkpoint.layout not in (LINEAR_HEAD, POOLED_HEADS, *LOADED_BY_TRANSFORMERS):
        return None
    is_gte = is_published_gte(checkpoint.config) and checkpoint.backbone_json is None
    backbone_shapes = gte_shapes if is_gte else _backbone_shapes
    try:
        backbone = dict(backbone_shapes(checkpoint.sizes))
    except KeyError:  # the configuration leaves a size to transformers' default
        return None
    if not backbone:
        return None
    prefix, head = _head_shapes(checkpoint)
    return {f"{prefix}{name}": shape for name, shape in backbone.items()} | head


def _head_shapes(checkpoint: Checkpoint) -> tuple[str, dict[str, _Shape]]:
    """Return the prefix of the backbone's tensor names, and shapes of head and pooler by name."""
    width, kind = checkpoint.sizes["hidden_size"], checkpoint.sizes["model_type"]
    prefix, layers = _PREFIXES[kind], {"classifier": checkpoint.output_count}
    if checkpoint.layout == LINEAR_HEAD:
        prefix, layers = "model.", {"fc": checkpoint.output_count}
    elif checkpoint.layout == POOLED_HEADS:
        sizes = [size for _, size in checkpoint.heads]
        prefix, layers = "backbone.", {f"head_{n}.fc": size for n, size in enumerate(sizes)}
    elif checkpoint.layout == EMBEDDING:
        prefix, layers = "", {}
    elif kind == _DEBERTA and checkpoint.layout == SEQUENCE_CLASSIFICATION:
        layers["pooler.dense"] = width
    is_by_token = checkpoint.layout == TOKEN_CLASSIFICATION
    if not is_by_token and (kind == _BERT or (kind == _GTE and layers)):
        layers[f"{prefix}pooler.dense"] = width
    shapes = (_weight_and_bias(name, outputs, width) for name, outputs in layers.items())
    return prefix, dict(itertools.chain.from_iterable(shapes))


def _backbone_shapes(sizes: dict[str, Any]) -> Iterator[tuple[str, _Shape]]:
    """Yield names and shapes of a BERT or DeBERTa-v3 encoder's tensors; nothing for others."""
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
    yield from _weight_and_bias("embeddings.LayerNorm", width)
    if is_v3:
        buckets = sizes.get("position_buckets", -1)
        reach = buckets if buckets > 0 else sizes["max_relative_positions"]
        reach = reach if reach > 0 else sizes["max_position_embeddings"]
        yield "encoder.rel_embeddings.weight", (2 * reach, width)
        yield from _weight_and_bias("encoder.LayerNorm", width)
    else:
        positions = sizes["max_position_embeddings"]
        yield "embeddings.position_embeddings.weight", (positions, width)
        yield "embeddings.token_type_embeddings.weight", (sizes["type_vocab_size"], width)
    for number in range(sizes["num_hidden_layers"]):
        layer = f"encoder.layer.{number}"
        for name in _ATTENTION[kind]:
            yield from _weight_and_bias(f"{layer}.attention.self.{name}", width, width)
        yield from _weight_and_bias(f"{layer}.attention.output.dense", width, width)
        yield from _weight_and_bias(f"{layer}.attention.output.LayerNorm", width)
        yield from _weight_and_bias(f"{layer}.intermediate.dense", inner, width)
        yield from _weight_and_bias(f"{layer}.output.dense", width, inner)
        yield from _weight_and_bias(f"{layer}.output.LayerNorm", width)


def gte_shapes(sizes: Mapping[str, Any]) -> Iterator[tuple[str, _Shape]]:
    """Yield names and shapes of a GTE encoder's tensors, as published, by sizes of `gte_sizes`."""
    width, inner = sizes["hidden_size"], sizes["intermediate_size"]
    yield "embeddings.word_embeddings.weight", (sizes["vocab_size"], width)
    if kinds := sizes["type_vocab_size"]:
        yield "embeddings.token_type_embeddings.weight", (kinds, width)
    yield from _weight_and_bias("embeddings.LayerNorm", width)
    for number in range(sizes["num_hidden_layers"]):
        layer = f"encoder.layer.{number}"
        yield from _weight_and_bias(f"{layer}.attention.qkv_proj", 3 * width, width)
        yield from _weight_and_bias(f"{layer}.attention.o_proj", width, width)
        yield f"{layer}.mlp.up_gate_proj.weight", (2 * inner, width)
        yield from _weight_and_bias(f"{layer}.mlp.down_proj", width, inner)
        yield from _weight_and_bias(f"{layer}.attn_ln", width)
        yield from _weight_and_bias(f"{layer}.mlp_ln", width)


def _weight_and_bias(name: str, *shape: int) -> Iterator[tuple[str, _Shape]]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]
