"""Configurations of the backbones that published classifiers name but do not describe.

Their ``config.json`` carries labels and no sizes; these are the sizes that the base models' own
repositories state. Another base model is read from the Hub or from a directory.
"""

from __future__ import annotations

from typing import Any

_DEBERTA_V3_BASE: dict[str, Any] = {
    "model_type": "deberta-v2",
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-7,
    "max_position_embeddings": 512,
    "max_relative_positions": -1,
    "norm_rel_ebd": "layer_norm",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "position_buckets": 256,
    "relative_attention": True,
    "share_att_key": True,
    "type_vocab_size": 0,
    "vocab_size": 128100,
}

# Keys are lower-case: repositories spell the same base model with different capitals.
KNOWN_BACKBONES: dict[str, dict[str, Any]] = {
    "microsoft/deberta-v3-base": _DEBERTA_V3_BASE,
    "microsoft/mdeberta-v3-base": {**_DEBERTA_V3_BASE, "vocab_size": 251000},
}
