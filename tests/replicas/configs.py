"""The published classifiers' labels and the texts of their ``config.json``."""

import json
from collections.abc import Sequence
from typing import Any

from gpuclassify.classifiers import FAMILIES as FAMILY_CLASSES

PROMPTS = "prompt-task-complexity"
FAMILY_LABELS: dict[str, tuple[str, ...]] = {
    name: FAMILY_CLASSES[name].published_labels
    for name in ("domain", "multilingual-domain", "quality", "content-type", PROMPTS)
}
EDUCATION = ("fineweb-edu", "fineweb-mixtral-edu", "fineweb-nemotron-edu")
FAMILIES = ("domain", "multilingual-domain", "quality", "content-type", *EDUCATION, PROMPTS)
# Head, outputs, weights of the outputs and divisor; the order of the heads is the file's.
PROMPT_HEADS: dict[str, tuple[int, list[int], int]] = {
    "task_type": (12, [], 1),
    "creativity_scope": (3, [2, 1, 0], 2),
    "reasoning": (2, [0, 1], 1),
    "contextual_knowledge": (2, [0, 1], 1),
    "number_of_few_shots": (6, [0, 1, 2, 3, 4, 5], 1),
    "domain_knowledge": (4, [3, 1, 2, 0], 3),
    "no_label_reason": (1, [0], 1),
    "constraint_ct": (2, [1, 0], 1),
}


def category_config(labels: Sequence[str], base_model: str = "backbone") -> str:
    """The text of config.json of a DeBERTa classifier with one linear head.

    Parameters
    ----------
    labels : sequence of str
        Labels in id order.
    base_model : str
        Hub name, or a directory relative to the checkpoint, of the backbone's configuration.

    Returns
    -------
    str
        JSON with sorted keys and no final newline, byte for byte as published.
    """
    config = {
        "base_model": base_model,
        "config_path": None,
        "fc_dropout": 0.2,
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
        "model_type": "deberta-v2",
        "pretrained": True,
    }
    return json.dumps(config, indent=2, sort_keys=True)


def prompt_config(labels: Sequence[str], base_model: str = "backbone") -> str:
    """The text of config.json of the prompt task and complexity classifier.

    Parameters
    ----------
    labels : sequence of str
        Task types in id order.
    base_model : str
        As in `category_config`.

    Returns
    -------
    str
        JSON whose keys stand in the heads' order, which is what orders the heads.
    """
    sizes = {name: size for name, (size, _, _) in PROMPT_HEADS.items()}
    sizes["task_type"] = len(labels)
    scored = {name: head for name, head in PROMPT_HEADS.items() if name != "task_type"}
    config = {
        "base_model": base_model,
        "target_sizes": sizes,
        "task_type_map": {str(number): label for number, label in enumerate(labels)},
        "weights_map": {name: weights for name, (_, weights, _) in scored.items()},
        "divisor_map": {name: divisor for name, (_, _, divisor) in scored.items()},
    }
    return json.dumps(config, indent=2)


def education_config(
    *,
    vocab_size: int = 30522,
    hidden_size: int = 768,
    num_layers: int = 12,
    num_heads: int = 12,
    initializer_range: float = 0.02,
    max_positions: int = 512,
    label: str = "LABEL_0",
) -> str:
    """The text of config.json of a FineWeb education scorer; the defaults give the published one.

    Parameters
    ----------
    vocab_size, hidden_size, num_layers, num_heads, max_positions : int
        Sizes of the BERT model; the feed-forward layers are four times as wide as the others.
    initializer_range : float
        Standard deviation of fresh weights.
    label : str
        Name of the only output.

    Returns
    -------
    str
        JSON with sorted keys and a final newline.
    """
    config = {
        "_name_or_path": "Snowflake/snowflake-arctic-embed-m",
        "architectures": ["BertForSequenceClassification"],
        "attention_probs_dropout_prob": 0.1,
        "classifier_dropout": 0.0,
        "gradient_checkpointing": False,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "hidden_size": hidden_size,
        "id2label": {"0": label},
        "initializer_range": initializer_range,
        "intermediate_size": 4 * hidden_size,
        "label2id": {label: 0},
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": max_positions,
        "model_type": "bert",
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "problem_type": "regression",
        "torch_dtype": "float32",
        "transformers_version": "4.40.1",
        "type_vocab_size": 2,
        "use_cache": True,
        "vocab_size": vocab_size,
    }
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def backbone_config(
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    initializer_range: float,
    max_positions: int,
) -> dict[str, Any]:
    """The configuration of the DeBERTa backbone that a category classifier stands on."""
    return {
        "attention_probs_dropout_prob": 0.1,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": hidden_size,
        "initializer_range": initializer_range,
        "intermediate_size": 4 * hidden_size,
        "layer_norm_eps": 1e-7,
        "max_position_embeddings": max_positions,
        "max_relative_positions": -1,
        "model_type": "deberta-v2",
        "norm_rel_ebd": "layer_norm",
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "pos_att_type": ["p2c", "c2p"],
        # 256 as published would leave the logarithmic buckets to texts of over 128 tokens.
        "position_buckets": 32,
        "position_biased_input": False,
        "relative_attention": True,
        "share_att_key": True,
        "type_vocab_size": 0,
        "vocab_size": vocab_size,
    }


def checked_labels(labels: Sequence[str]) -> tuple[str, ...]:
    """The labels as a tuple; ValueError if there are none or one is repeated."""
    if not labels:
        raise ValueError("a classifier needs at least one label, got none")
    repeated = sorted({label for label in labels if list(labels).count(label) > 1})
    if repeated:
        raise ValueError(f"labels {repeated} occur more than once: every label needs its own id")
    return tuple(labels)
