"""GTE's published configurations and tensors in the words of transformers' own classes. No torch.

The encoders of ``Alibaba-NLP/new-impl`` (``model_type`` "new", in Snowflake's copy "gte") came with
modelling code in their repositories. transformers has since got `GteModel`, which renames their
tensors while loading; their configurations it does not read. Written from the published modelling
code, and not tried on the published weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_Shape = tuple[int, ...]

# What the published configuration class takes for what a file leaves out; `GteConfig` differs.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 30528,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 2048,
    "type_vocab_size": 1,
    "rope_theta": 10_000.0,
}
# What the published code can do and `GteModel` cannot, with the value that each must have.
_PLAIN = {
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "pack_qkv": True,
}
# For the published code alone.
_DROPPED = {"auto_map", "rope_scaling", "rope_theta", *_PLAIN}


def is_published_gte(config: Mapping[str, Any]) -> bool:
    """Whether it is a configuration of the published code, and not of transformers' `GteConfig`."""
    return config.get("model_type") in ("new", "gte") and "rope_parameters" not in config


def gte_problems(config: Mapping[str, Any]) -> list[str]:
    """Settings of a published configuration that transformers' classes cannot follow, in words."""
    found = [
        f"{name}={config[name]!r}"
        for name, value in _PLAIN.items()
        if config.get(name, value) != value
    ]
    scaling = config.get("rope_scaling") or {"type": "ntk"}
    if scaling.get("type", scaling.get("rope_type")) != "ntk" or scaling.get("mixed_b") is not None:
        found.append(f"rope_scaling={scaling}")
    return found


def gte_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """A published configuration as transformers' `GteConfig` takes it.

    The published NTK scaling by f multiplies the base of the frequencies by f, and divides all of
    them by f^(2 / d), d numbers being a head's width: a linear scaling of another base.
    """
    whole = _DEFAULTS | dict(config)
    factor = float((whole.get("rope_scaling") or {}).get("factor", 1.0))
    width = whole["hidden_size"] // whole["num_attention_heads"]
    rope = {
        "rope_type": "linear",
        "rope_theta": whole["rope_theta"] * factor,
        "factor": factor ** (2 / width),
    }
    kept = {name: value for name, value in whole.items() if name not in _DROPPED}
    return kept | {"model_type": "gte", "rope_parameters": rope}


def gte_shapes(sizes: Mapping[str, Any]) -> Iterator[tuple[str, _Shape]]:
    """Names and shapes of the encoder's tensors as published, by the sizes of `gte_sizes`."""
    width, inner = sizes["hidden_size"], sizes["intermediate_size"]
    yield "embeddings.word_embeddings.weight", (sizes["vocab_size"], width)
    if kinds := sizes["type_vocab_size"]:
        yield "embeddings.token_type_embeddings.weight", (kinds, width)
    yield from _with_bias("embeddings.LayerNorm", width)
    for number in range(sizes["num_hidden_layers"]):
        layer = f"encoder.layer.{number}"
        yield from _with_bias(f"{layer}.attention.qkv_proj", 3 * width, width)
        yield from _with_bias(f"{layer}.attention.o_proj", width, width)
        yield f"{layer}.mlp.up_gate_proj.weight", (2 * inner, width)
        yield from _with_bias(f"{layer}.mlp.down_proj", width, inner)
        yield from _with_bias(f"{layer}.attn_ln", width)
        yield from _with_bias(f"{layer}.mlp_ln", width)


def _with_bias(name: str, *shape: int) -> Iterator[tuple[str, _Shape]]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", shape[:1]
