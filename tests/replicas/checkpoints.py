"""Checkpoints with the layouts of the published classifiers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.replicas.configs import (
    EDUCATION,
    FAMILIES,
    FAMILY_LABELS,
    PROMPT_HEADS,
    PROMPTS,
    backbone_config,
    category_config,
    checked_labels,
    education_config,
    prompt_config,
)
from tests.replicas.texts import documents_of
from tests.replicas.tokenizers import trained_tokenizer, write_tokenizer
from tests.replicas.writing import (
    empty_directory,
    fit_head,
    save_model,
    save_tensors,
    seeded,
    token_ids,
    write_json,
)


def write_checkpoint(
    directory: str | Path,
    family: str = "domain",
    *,
    labels: Sequence[str] | None = None,
    seed: int = 0,
    hidden_size: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    initializer_range: float = 0.3,
    max_positions: int | None = None,
    texts: Sequence[str] | None = None,
) -> Path:
    """Write a small random checkpoint with the layout of a published classifier.

    Parameters
    ----------
    directory : path
        Where to write; created if missing.
    family : str
        One of ``FAMILIES``. The four categories are DeBERTa with one linear head, and the prompt
        classifier is DeBERTa with eight; their backbone's configuration lies in the sub-directory
        ``backbone``. The three FineWeb scorers are BERT with one regression output.
    labels : sequence of str, optional
        Labels in id order in place of the published ones; one name for a FineWeb scorer.
    seed : int
        Seed of the weights. The same arguments give the same bytes.
    hidden_size, num_layers, num_heads : int
        Sizes of the model; `num_heads` divides `hidden_size`.
    initializer_range : float
        Standard deviation of the weights. The default suits the default `hidden_size`;
        divide it by two for four times the size.
    max_positions : int, optional
        Longest input in tokens, special ones included. Published: 1024 for quality and
        content-type, 512 otherwise.
    texts : sequence of str, optional
        Documents to train the tokenizer on and to fit the last layer to.

    Returns
    -------
    Path
        The directory. Its weights are float32 in ``model.safetensors``.

    Raises
    ------
    ValueError
        If the family is unknown, the labels do not suit it or the texts hold no words.
    FileExistsError
        If the directory is not empty.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}: choose one of {', '.join(FAMILIES)}")
    is_education = family in EDUCATION
    labels = checked_labels(FAMILY_LABELS.get(family, ("LABEL_0",)) if labels is None else labels)
    if is_education and len(labels) != 1:
        raise ValueError(f"{family} has one output, got {len(labels)} labels: give one or none")
    documents = documents_of(texts)
    path = empty_directory(directory)
    name = "bert" if is_education else "deberta-v2"
    tokenizer = trained_tokenizer(name, documents)
    published = 1024 if family in ("quality", "content-type") else 512
    write_tokenizer(path, name, tokenizer, max_positions or published, "right")
    sizes: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "initializer_range": initializer_range,
        "max_positions": max_positions or 512,
    }
    ids = token_ids(tokenizer, documents, sizes["max_positions"])
    write = {PROMPTS: _write_prompts}.get(
        family, _write_education if is_education else _write_category
    )
    # Families of one layout differ, or a test could not tell one from another.
    write(path, labels, sizes, ids, seed * len(FAMILIES) + FAMILIES.index(family))
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

    A single head reads the first token, several read the mean of all.
    """
    import torch
    from transformers import DebertaV2Config, DebertaV2Model

    config = backbone_config(**sizes)
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
    read = [own[0] if len(heads) == 1 else own.mean(0) for own in states]
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

    text = education_config(**sizes, label=labels[0])
    config = BertConfig(**json.loads(text))
    model = seeded(lambda: BertForSequenceClassification(config).float().eval(), seed)
    fit_head(model.classifier, lambda row: model(row).logits[0], ids, centre=2.5, spread=1.9)
    save_model(model, path)
    (path / "config.json").write_text(text, encoding="utf-8")
