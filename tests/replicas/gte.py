"""GTE checkpoints with the names and settings of the published ones."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpuclassify.models.gte import gte_shapes, gte_sizes
from tests.replicas.configs import checked_labels
from tests.replicas.texts import documents_of
from tests.replicas.tokenizers import trained_tokenizer, write_tokenizer
from tests.replicas.writing import empty_directory, save_tensors, seeded, write_json

_CODE = "Alibaba-NLP/new-impl"
_MODULES = ("Transformer", "Pooling", "Normalize")


def write_gte(
    directory: str | Path,
    labels: Sequence[str] | None = None,
    *,
    seed: int = 0,
    initializer_range: float = 0.3,
    texts: Sequence[str] | None = None,
    **config_overrides: Any,
) -> Path:
    """Write a small random GTE encoder as its authors publish it, with code of their own to run it.

    Parameters
    ----------
    directory : path
        Where to write; created if missing.
    labels : sequence of str, optional
        Labels in id order of a classifier like WebOrganizer's, on gte-base-en-v1.5. Without any, an
        embedding model like arctic-embed-m-v2.0, on gte-multilingual-base.
    seed : int
        Seed of the weights. The same arguments give the same bytes.
    initializer_range : float
        Standard deviation of the weights.
    texts : sequence of str, optional
        Documents to train the tokenizer on.
    **config_overrides
        Settings of ``config.json``, such as ``rope_scaling``.

    Returns
    -------
    Path
        The directory. Its weights are float32 in ``model.safetensors``.

    Raises
    ------
    ValueError
        If the labels or texts cannot be used.
    FileExistsError
        If the directory is not empty.
    """
    name = "xlm-roberta" if labels is None else "bert"
    tokenizer = trained_tokenizer(name, documents_of(texts))
    path = empty_directory(directory)
    config = {
        "vocab_size": tokenizer.get_vocab_size(),
        "pad_token_id": tokenizer.token_to_id("<pad>" if labels is None else "[PAD]"),
        **(_embedder_config() if labels is None else _classifier_config(checked_labels(labels))),
        **config_overrides,
    }
    tensors = seeded(lambda: _tensors(config, initializer_range), seed)
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
