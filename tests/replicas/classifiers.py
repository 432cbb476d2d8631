"""Classifiers in published layouts: NVIDIA's and FineWeb's, transformers' architectures, GTE."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuclassify.classifiers import FAMILIES as FAMILY_CLASSES
from gpuclassify.models.checkpoint import gte_sizes
from gpuclassify.models.tensors import gte_shapes
from tests.replicas.texts import documents_of
from tests.replicas.tokenizers import KINDS, trained_tokenizer, write_tokenizer
from tests.replicas.writing import (
    empty_directory,
    fit_head,
    save_model,
    save_tensors,
    seeded,
    token_ids,
    write_json,
)

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
    """config.json of a DeBERTa classifier with one linear head, byte for byte as published."""
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
    """config.json of the prompt classifier; the order of its keys is that of the heads."""
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


def write_checkpoint(
    directory: str | Path,
    family: str = "domain",
    *,
    labels: Sequence[str] | None = None,
    seed: int = 0,
    hidden_size: int = 32,
    initializer_range: float = 0.3,
) -> Path:
    """Write a small random checkpoint with the layout of a published classifier, one of `FAMILIES`.

    The four categories are DeBERTa with one linear head, the prompt classifier with eight; their
    backbone's configuration lies in the folder ``backbone``. The FineWeb scorers are BERT with one
    regression output. The same arguments give the same bytes; weights are float32, and
    `initializer_range` suits the default size: divide it by two for four times the size.
    """
    is_education = family in EDUCATION
    labels = tuple(FAMILY_LABELS.get(family, ("LABEL_0",)) if labels is None else labels)
    documents = documents_of(None)
    path = empty_directory(directory)
    name = "bert" if is_education else "deberta-v2"
    tokenizer = trained_tokenizer(name, documents)
    published = 1024 if family in ("quality", "content-type") else 512
    write_tokenizer(path, name, tokenizer, published, "right")
    sizes: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": initializer_range,
        "max_position_embeddings": 512,
        "hidden_act": "gelu",
    }
    ids = token_ids(tokenizer, documents, sizes["max_position_embeddings"])
    write = {PROMPTS: _write_prompts}.get(
        family, _write_education if is_education else _write_category
    )
    # Families of one layout differ, or a test could not tell one from another.
    write(path, labels, sizes, ids, seed * len(FAMILIES) + FAMILIES.index(family))
    return path


def write_celadon(directory: str | Path) -> Path:
    """Write a small random copy of ``PleIAs/celadon``: a DeBERTa whose five heads tell 0 to 3."""
    documents, path = documents_of(None), empty_directory(directory)
    tokenizer = trained_tokenizer("deberta-v2", documents)
    write_tokenizer(path, "deberta-v2", tokenizer, 512, "right")
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 512, **_SIZES}
    heads = {f"heads.{number}": 4 for number in range(5)}
    tensors, config = _deberta("deberta", heads, sizes, token_ids(tokenizer, documents, 512), 0)
    save_tensors(tensors, path / "model.safetensors")
    config["architectures"] = ["MultiHeadDebertaForSequenceClassification"]
    write_json(path / "config.json", config)
    return path


def write_eurofilter(directory: str | Path) -> Path:
    """Write a small random copy of ``utter-project/EuroFilter-v1``: two layers on a pooler."""
    import torch

    documents, path = documents_of(None), empty_directory(directory)
    tokenizer = trained_tokenizer("deberta-v2", documents)
    write_tokenizer(path, "deberta-v2", tokenizer, 512, "right")
    sizes = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 512, **_SIZES}
    tensors, config = _deberta("deberta", {}, sizes, token_ids(tokenizer, documents, 512), 0)
    width, generator = sizes["hidden_size"], torch.Generator().manual_seed(0)
    for name, outputs in {"pooler.dense": width, "regressor": 1, "binary_classifier": 1}.items():
        weight = torch.randn(outputs, width, generator=generator) * width**-0.5
        tensors |= {f"{name}.weight": weight, f"{name}.bias": torch.full((outputs,), 0.1)}
    save_tensors(tensors, path / "model.safetensors")
    config["architectures"] = ["CustomDebertaModel"]  # a class of the repository
    config["auto_map"] = {"AutoModel": "modeling_custom.CustomDebertaModel"}
    write_json(path / "config.json", config)
    return path


def _write_category(
    path: Path, labels: tuple[str, ...], sizes: dict[str, Any], ids: list[Any], seed: int
) -> None:
    tensors, config = _deberta("model", {"fc": len(labels)}, sizes, ids, seed)
    _save_beside_backbone(path, tensors, category_config(labels), config)


def _write_prompts(
    path: Path, labels: tuple[str, ...], sizes: dict[str, Any], ids: list[Any], seed: int
) -> None:
    outputs = [len(labels), *(size for size, _, _ in list(PROMPT_HEADS.values())[1:])]
    heads = {f"head_{number}.fc": size for number, size in enumerate(outputs)}
    tensors, config = _deberta("backbone", heads, sizes, ids, seed)
    _save_beside_backbone(path, tensors, prompt_config(labels), config)


def _deberta(
    prefix: str, outputs: dict[str, int], sizes: dict[str, Any], ids: list[Any], seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors of a DeBERTa with linear heads, by name with their outputs, and its configuration.

    Those of the prompt classifier read the mean of all tokens, the others the first.
    """
    import torch
    from transformers import DebertaV2Config, DebertaV2Model

    config = sizes | {
        "attention_probs_dropout_prob": 0.1,
        "hidden_dropout_prob": 0.1,
        "layer_norm_eps": 1e-7,
        "max_relative_positions": -1,
        "model_type": "deberta-v2",
        "norm_rel_ebd": "layer_norm",
        "pos_att_type": ["p2c", "c2p"],
        # 256 as published would leave the logarithmic buckets to texts of over 128 tokens.
        "position_buckets": 32,
        "position_biased_input": False,
        "relative_attention": True,
        "share_att_key": True,
        "type_vocab_size": 0,
    }
    backbone, *heads = seeded(
        lambda: (
            DebertaV2Model(DebertaV2Config(**config)).float().eval(),
            *(torch.nn.Linear(sizes["hidden_size"], size).float() for size in outputs.values()),
        ),
        seed,
    )
    tensors = {f"{prefix}.{name}": tensor for name, tensor in backbone.state_dict().items()}
    with torch.no_grad():
        states = [backbone(row).last_hidden_state[0] for row in ids]
    read = [own.mean(0) if prefix == "backbone" else own[0] for own in states]
    for place, head in zip(outputs, heads, strict=True):
        fit_head(head, head, read)
        tensors |= {f"{place}.{name}": tensor for name, tensor in head.state_dict().items()}
    return tensors, config


def _save_beside_backbone(
    path: Path, tensors: dict[str, Any], config: str, backbone: dict[str, Any]
) -> None:
    save_tensors(tensors, path / "model.safetensors")
    (path / "config.json").write_text(config, encoding="utf-8")
    (path / "backbone").mkdir()
    write_json(path / "backbone" / "config.json", backbone)


def _write_education(
    path: Path, labels: tuple[str, ...], sizes: dict[str, Any], ids: list[Any], seed: int
) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config = sizes | {
        "_name_or_path": "Snowflake/snowflake-arctic-embed-m",
        "architectures": ["BertForSequenceClassification"],
        "attention_probs_dropout_prob": 0.1,
        "classifier_dropout": 0.0,
        "gradient_checkpointing": False,
        "hidden_dropout_prob": 0.0,
        "id2label": {"0": labels[0]},
        "label2id": {labels[0]: 0},
        "layer_norm_eps": 1e-12,
        "model_type": "bert",
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "problem_type": "regression",
        "torch_dtype": "float32",
        "transformers_version": "4.40.1",
        "type_vocab_size": 2,
        "use_cache": True,
    }
    build = BertForSequenceClassification
    model = seeded(lambda: build(BertConfig(**config)).float().eval(), seed)
    fit_head(model.classifier, lambda row: model(row).logits[0], ids, centre=2.5, spread=1.9)
    save_model(model, path)
    write_json(path / "config.json", dict(sorted(config.items())))


@dataclass(frozen=True)
class _Architecture:
    """Which tokenizer a model goes with, and its sizes under its own names."""

    tokenizer: str
    sizes: dict[str, Any]


_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}
_DECODER: dict[str, Any] = _SIZES | {"num_key_value_heads": 2, "head_dim": 8}
_TABLE = {
    "bert": _Architecture("bert", _SIZES),
    "roberta": _Architecture("roberta", _SIZES | {"max_position_embeddings": 514}),
    "xlm-roberta": _Architecture("xlm-roberta", _SIZES | {"max_position_embeddings": 514}),
    "electra": _Architecture("bert", _SIZES | {"embedding_size": 16}),
    "distilbert": _Architecture("bert", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}),
    "modernbert": _Architecture("modernbert", _SIZES | {"max_position_embeddings": 512}),
    "deberta-v2": _Architecture(
        "deberta-v2",
        _SIZES
        | {
            "max_relative_positions": -1,
            "norm_rel_ebd": "layer_norm",
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "position_buckets": 32,
            "relative_attention": True,
            "share_att_key": True,
        },
    ),
    "albert": _Architecture("albert", _SIZES | {"embedding_size": 16}),
    "camembert": _Architecture("xlm-roberta", _SIZES | {"max_position_embeddings": 514}),
    "gpt2": _Architecture("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "llama": _Architecture("llama", _DECODER | {"max_position_embeddings": 512}),
    "mistral": _Architecture("llama", _DECODER | {"max_position_embeddings": 512}),
}
ARCHITECTURES = tuple(_TABLE)
# Their first position is pad_token_id + 1.
_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert")


def write_sequence_classifier(
    directory: str | Path,
    architecture: str = "bert",
    *,
    num_labels: int = 3,
    labels: Sequence[str] | None = None,
    problem_type: str | None = None,
    seed: int = 0,
    padding_side: str = "right",
    initializer_range: float = 0.3,
    texts: Sequence[str] | None = None,
    **config_overrides: Any,
) -> Path:
    """Write a small random model for ``AutoModelForSequenceClassification``.

    `architecture` is one of `ARCHITECTURES`, `config_overrides` are fields of its configuration.
    Logits spread by 1.5 around 0, or around 2.5 for regression. The same arguments give the same
    bytes.
    """
    if labels is None:
        labels = [f"LABEL_{number}" for number in range(num_labels)]
    labels = tuple(labels)
    documents = documents_of(texts)
    path = empty_directory(directory)
    name = _TABLE[architecture].tokenizer
    tokenizer = trained_tokenizer(name, documents)
    config = _model_config(architecture, tokenizer, labels, initializer_range, config_overrides)
    config.problem_type = problem_type
    max_tokens = config.max_position_embeddings
    if architecture in _OFFSET_POSITIONS:
        max_tokens -= config.pad_token_id + 1
    ids = token_ids(tokenizer, documents, max_tokens)
    model, head = _model_and_head(config, seed)
    centre = 2.5 if problem_type == "regression" else 0.0
    fit_head(head, lambda row: model(row).logits[0], ids, centre)
    save_model(model, path)
    write_tokenizer(path, name, tokenizer, max_tokens, padding_side)
    return path


ENTITY_LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


def write_token_classifier(
    directory: str | Path,
    architecture: str = "bert",
    *,
    labels: Sequence[str] = ENTITY_LABELS,
    seed: int = 0,
    padding_side: str = "right",
    outside: float = 1.0,
    texts: Sequence[str] | None = None,
    initializer_range: float = 0.3,
    **config_overrides: Any,
) -> Path:
    """Write a small random model for ``AutoModelForTokenClassification``.

    Its tokens get the first of the labels the more often, the more `outside` is; otherwise as
    `write_sequence_classifier`.
    """
    import torch
    from transformers import AutoModelForTokenClassification

    documents, path = documents_of(texts), empty_directory(directory)
    name, spread = _TABLE[architecture].tokenizer, initializer_range
    tokenizer = trained_tokenizer(name, documents)
    config = _model_config(architecture, tokenizer, tuple(labels), spread, config_overrides)
    max_tokens = config.max_position_embeddings
    if architecture in _OFFSET_POSITIONS:
        max_tokens -= config.pad_token_id + 1
    build = AutoModelForTokenClassification.from_config
    model = seeded(lambda: build(config).float().eval(), seed)
    linear = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    head = [part for part in linear if part.out_features == len(labels)][-1]
    ids = token_ids(tokenizer, documents, max_tokens)
    fit_head(head, lambda row: model(row).logits[0, row.shape[1] // 2], ids)
    if head.bias is not None:
        with torch.no_grad():
            head.bias[0] += outside
    save_model(model, path)
    write_tokenizer(path, name, tokenizer, max_tokens, padding_side)
    return path


def _model_config(
    architecture: str,
    tokenizer: Any,
    labels: tuple[str, ...],
    initializer_range: float,
    overrides: dict[str, Any],
) -> Any:
    from transformers import AutoConfig

    row = _TABLE[architecture]
    special_ids = {
        f"{role}_id": tokenizer.token_to_id(token)
        for role, token in KINDS[row.tokenizer].roles.items()
        if role not in ("mask_token", "unk_token")
    }
    settings = {
        "vocab_size": tokenizer.get_vocab_size(),
        "initializer_range": initializer_range,
        "id2label": dict(enumerate(labels)),
        "label2id": {label: number for number, label in enumerate(labels)},
        "bos_token_id": None,
        "eos_token_id": None,
        **special_ids,
        **row.sizes,
    }
    return AutoConfig.for_model(architecture, **(settings | overrides))


def _model_and_head(config: Any, seed: int) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForSequenceClassification

    model = seeded(
        lambda: AutoModelForSequenceClassification.from_config(config).float().eval(), seed
    )
    linear = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    return model, [part for part in linear if part.out_features == config.num_labels][-1]


_CODE = "Alibaba-NLP/new-impl"
_MODULES = ("Transformer", "Pooling", "Normalize")


def write_gte(
    directory: str | Path,
    labels: Sequence[str] | None = None,
    **config_overrides: Any,
) -> Path:
    """Write a small random GTE encoder as its authors publish it, with code of their own to run it.

    With `labels` a classifier like WebOrganizer's, on gte-base-en-v1.5; without, an embedding
    model like arctic-embed-m-v2.0. `config_overrides` are settings of ``config.json``.
    """
    name = "xlm-roberta" if labels is None else "bert"
    tokenizer = trained_tokenizer(name, documents_of(None))
    path = empty_directory(directory)
    config = {
        "vocab_size": tokenizer.get_vocab_size(),
        "pad_token_id": tokenizer.token_to_id("<pad>" if labels is None else "[PAD]"),
        **(_embedder_config() if labels is None else _classifier_config(tuple(labels))),
        **config_overrides,
    }
    tensors = seeded(lambda: _tensors(config, 0.3), 0)
    save_tensors(tensors, path / "model.safetensors")
    write_json(path / "config.json", config)
    write_tokenizer(path, name, tokenizer, 512, "right")
    if labels is None:
        _write_sentence_files(path)
    return path


def _common(architecture: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "attention_probs_dropout_prob": 0.0,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "layer_norm_eps": 1e-12,
        "layer_norm_type": "layer_norm",
        "logn_attention_clip1": False,
        "logn_attention_scale": False,
        "max_position_embeddings": 8192,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "pack_qkv": True,
        "position_embedding_type": "rope",
        "unpad_inputs": False,
        "use_memory_efficient_attention": False,
    }


def _classifier_config(labels: tuple[str, ...]) -> dict[str, Any]:
    return _common("NewForSequenceClassification") | {
        "model_type": "new",
        "auto_map": {
            "AutoConfig": f"{_CODE}--configuration.NewConfig",
            "AutoModelForSequenceClassification": f"{_CODE}--modeling.NewForSequenceClassification",
        },
        "id2label": dict(enumerate(labels)),
        "label2id": {label: number for number, label in enumerate(labels)},
        "rope_scaling": {"factor": 2.0, "type": "ntk"},
        "rope_theta": 500000,
        "type_vocab_size": 0,
    }


def _embedder_config() -> dict[str, Any]:
    return _common("GteModel") | {
        "model_type": "gte",
        "auto_map": {
            "AutoConfig": "configuration_hf_alibaba_nlp_gte.GteConfig",
            "AutoModel": "modeling_hf_alibaba_nlp_gte.GteModel",
        },
        "rope_scaling": {"factor": 8.0, "type": "ntk"},
        "rope_theta": 20000,
        "type_vocab_size": 1,
    }


def _tensors(config: dict[str, Any], spread: float) -> dict[str, Any]:
    import torch

    shapes = dict(gte_shapes(gte_sizes(config)))
    if "id2label" in config:
        width, labels = config["hidden_size"], len(config["id2label"])
        shapes = {f"new.{name}": shape for name, shape in shapes.items()}
        shapes |= {"new.pooler.dense.weight": (width, width), "new.pooler.dense.bias": (width,)}
        shapes |= {"classifier.weight": (labels, width), "classifier.bias": (labels,)}

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        is_scale = name.endswith(("_ln.weight", "LayerNorm.weight"))
        return torch.randn(shape) * spread + (1.0 if is_scale else 0.0)

    return {name: draw(name, shape) for name, shape in shapes.items()}


def _write_sentence_files(path: Path) -> None:
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": f"{number}_{kind}" if number else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, kind in enumerate(_MODULES)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True}
    write_json(path / "1_Pooling" / "config.json", pooling)
    write_json(path / "sentence_bert_config.json", {"max_seq_length": 512, "do_lower_case": False})
    write_json(path / "config_sentence_transformers.json", {"prompts": {"query": "query: "}})
