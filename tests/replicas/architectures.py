"""Any small sequence classifier of the architectures that transformers knows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.replicas.configs import checked_labels
from tests.replicas.texts import documents_of
from tests.replicas.tokenizers import KINDS, trained_tokenizer, write_tokenizer
from tests.replicas.writing import (
    empty_directory,
    fit_head,
    save_model,
    seeded,
    token_ids,
)


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
_PROBLEM_TYPES = (None, "single_label_classification", "multi_label_classification", "regression")
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

    Parameters
    ----------
    directory : path
        Where to write; created if missing.
    architecture : str
        One of ``ARCHITECTURES``.
    num_labels : int
        Number of outputs; `labels` decides where it is given.
    labels : sequence of str, optional
        Labels in id order; by default ``LABEL_0``, ``LABEL_1`` ...
    problem_type : str, optional
        ``"single_label_classification"``, ``"multi_label_classification"``,
        ``"regression"``, or None to leave it out of config.json.
    seed : int
        Seed of the weights. The same arguments give the same bytes.
    padding_side : str
        ``"left"`` or ``"right"``, written to the tokenizer's configuration.
    initializer_range : float
        Standard deviation of the weights.
    texts : sequence of str, optional
        Documents to train the tokenizer on and to fit the last layer to.
    **config_overrides
        Fields of the model's configuration class, for example ``num_hidden_layers=3``.

    Returns
    -------
    Path
        The directory. Its weights are float32 in ``model.safetensors``; logits spread by
        1.5 around 0, or around 2.5 for regression.

    Raises
    ------
    ValueError
        If the architecture, padding side, problem type, labels or texts cannot be used.
    FileExistsError
        If the directory is not empty.
    """
    _check_choice("architecture", architecture, ARCHITECTURES)
    _check_choice("padding_side", padding_side, ("left", "right"))
    _check_choice("problem_type", problem_type, _PROBLEM_TYPES)
    if labels is None:
        labels = [f"LABEL_{number}" for number in range(num_labels)]
    labels = checked_labels(labels)
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


def _check_choice(argument: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{argument}={value!r} is not known: choose one of {known}")


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
