"""What a checkpoint declares: layout, labels, kind of problem, sizes. Reads no weights.

Nothing here imports torch, so that a client reads a checkpoint in milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuclassify import hub
from gpuclassify.hub import Identity
from gpuclassify.models.gte import gte_problems, gte_sizes, is_published_gte
from gpuclassify.settings.checks import nearest
from gpuclassify.settings.options import REGRESSION, SINGLE_LABEL

LINEAR_HEAD = "linear_head"
POOLED_HEADS = "pooled_heads"
SEQUENCE_CLASSIFICATION = "sequence_classification"
OWN_MODULE = "own_module"
EMBEDDING = "embedding"

# Architectures whose learned positions begin after the padding id.
_OFFSET_POSITIONS = {
    "camembert",
    "data2vec-text",
    "longformer",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
}
_TOKENIZER_FILES = {
    "spm.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
}
_ROTARY_KEYS = ("rope_theta", "rope_parameters", "global_rope_theta", "rope_scaling")

# Published classifiers name a base model and carry no sizes: these are the ones that the base
# models' repositories state. Another base model is read from the Hub or from a directory.
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


class CheckpointError(ValueError):
    """A checkpoint lacks something, or does not fit what is asked of it."""


@dataclass(frozen=True)
class SentenceModel:
    """How token states become a text's embedding.

    Attributes
    ----------
    pooling : {"mean", "cls", "last"}
    is_normalized : bool
        Embeddings have length 1.
    max_tokens : int, optional
        The longest input that the model's authors want. ``None``: the tokenizer says.
    prompts : tuple of (str, str)
        Name and text of each prompt.
    default_prompt : str, optional
        Name of the prompt that is put before a text unless another is asked for.
    pools_prompt : bool
        The prompt's tokens are part of the mean.
    """

    pooling: str = "mean"
    is_normalized: bool = False
    max_tokens: int | None = None
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str | None = None
    pools_prompt: bool = True

    def prompt(self, name: str | None = None) -> str:
        """The prompt called `name`, or the default one; empty if there is none.

        Raises
        ------
        ValueError
            No prompt has this name.
        """
        name = name or self.default_prompt
        prompts = dict(self.prompts)
        if name is None:
            return ""
        if name not in prompts:
            known = ", ".join(map(repr, prompts)) or "none"
            raise ValueError(
                f"the model has no prompt {name!r}.{nearest(name, prompts)} Its prompts are "
                f"{known}; prompt= takes any text"
            )
        return prompts[name]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint pinned and described; small, immutable and equal for equal models.

    Attributes
    ----------
    identity : Identity
    layout : str
        "linear_head", a backbone under ``model.`` with one linear layer ``fc`` on the first token;
        "pooled_heads", one under ``backbone.`` with several on the mean of all tokens;
        "sequence_classification", transformers' own classes; "own_module", a module that the mapper
        builds; "embedding", a backbone alone whose tokens are pooled.
    labels : tuple of str
        In id order; of the first head if there are several. None for a module of one's own whose
        configuration names none.
    problem_type : str
        "single_label_classification", "multi_label_classification", "regression" or "embedding".
    config_json : str
        The model's ``config.json``.
    backbone_json : str, optional
        The backbone's, for layouts whose own configuration has no sizes.
    heads : tuple of (str, int)
        Name and outputs of each head in order, for the layout with several.
    tokenizer : Identity, optional
        Where the tokenizer is, if not beside the weights.
    sentence : SentenceModel, optional
        How tokens become an embedding, for the layout "embedding".
    """

    identity: Identity
    layout: str
    labels: tuple[str, ...]
    problem_type: str
    config_json: str
    backbone_json: str | None = None
    heads: tuple[tuple[str, int], ...] = ()
    tokenizer: Identity | None = None
    sentence: SentenceModel | None = None

    @property
    def output_count(self) -> int:
        """Outputs of the network for one text; 0 if it has to be run to know."""
        return sum(size for _, size in self.heads) or len(self.labels)

    @property
    def config(self) -> dict[str, Any]:
        """The model's ``config.json``, parsed."""
        return json.loads(self.config_json)

    @property
    def sizes(self) -> dict[str, Any]:
        """The configuration that holds the network's sizes, as transformers takes it.

        Raises
        ------
        CheckpointError
            It asks for what transformers' classes of the architecture do not do.
        """
        sizes = json.loads(self.backbone_json or self.config_json)
        if not is_published_gte(sizes):
            return sizes
        if problems := gte_problems(sizes):
            raise CheckpointError(
                f"{self.identity.name} has {', '.join(problems)}, which transformers' GteModel "
                "does not do: run it with the code in its repository"
            )
        return gte_sizes(sizes)


def read_checkpoint(
    identity: Identity,
    *,
    base_model: str | None = None,
    problem_type: str | None = None,
    has_own_module: bool = False,
    cache_dir: str | None = None,
) -> Checkpoint:
    """Describe the checkpoint at `identity` by its ``config.json``.

    Parameters
    ----------
    identity : Identity
    base_model : str, optional
        Whose configuration gives the backbone's sizes, instead of what the checkpoint names.
    problem_type : str, optional
        Overrides what the checkpoint says.
    has_own_module : bool
        The mapper builds the network itself, so the configuration may hold anything.
    cache_dir : str, optional

    Raises
    ------
    CheckpointError
        No ``config.json``, no usable label map, or no way to the backbone's sizes.
    """
    config = hub.read_json(identity, "config.json", cache_dir=cache_dir)
    if has_own_module:
        return _own_module(config or {}, identity, problem_type)
    if config is None:
        files = some_of(hub.list_files(identity, cache_dir=cache_dir)) or "no files"
        raise CheckpointError(
            f"{identity.name} has no config.json; it has {files}. "
            "Pass the directory or Hub name of a saved model."
        )
    if "target_sizes" in config:
        return _several_heads(config, identity, base_model, cache_dir)
    if "base_model" in config and "fc_dropout" in config:
        backbone = _backbone_of(config, identity, base_model, cache_dir)
        labels, kind = labels_in_order(config, identity.name), problem_type or SINGLE_LABEL
        contents = json.dumps(config), json.dumps(backbone)
        return Checkpoint(identity, LINEAR_HEAD, labels, kind, *contents)
    if base_model is not None:
        raise CheckpointError(
            f"{identity.name} carries its own sizes, so base_model={base_model!r} has no meaning: "
            "leave it out"
        )
    return _sequence_classifier(config, identity, problem_type)


def labels_in_order(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Labels by id from ``id2label`` or ``label2id``.

    Raises
    ------
    CheckpointError
        Neither is there, ids are not 0 to n - 1, or a label stands twice.
    """
    by_label, by_number = config.get("label2id"), config.get("id2label")
    if not by_number and not by_label:
        raise CheckpointError(f"config.json of {name} has no id2label: add the labels by id")
    pairs = [(i, label) for i, label in by_number.items()] if isinstance(by_number, dict) else []
    if not by_number and isinstance(by_label, dict):
        pairs = [(i, label) for label, i in by_label.items()]
    if not pairs or not all(str(i).isdigit() and isinstance(label, str) for i, label in pairs):
        raise CheckpointError(
            f"id2label of {name} is {by_number or by_label!r}: it must map whole numbers to labels"
        )
    by_id = {int(i): label for i, label in pairs}
    if sorted(by_id) != list(range(len(by_id))):
        raise CheckpointError(
            f"id2label of {name} has ids {sorted(by_id)}: they must run from 0 to {len(by_id) - 1}"
        )
    labels = tuple(by_id[i] for i in range(len(by_id)))
    if len(set(labels)) < len(labels):
        raise CheckpointError(f"id2label of {name} names a label twice: {list(labels)}")
    return labels


def position_limit(sizes: Mapping[str, Any]) -> tuple[int | None, bool]:
    """Most tokens that the network has positions for, and whether more are impossible.

    Returns
    -------
    limit : int or None
        None when positions are relative, without a table.
    is_hard : bool
        Learned positions end at the limit; rotary ones only lose quality beyond.
    """
    limit = sizes.get("max_position_embeddings") or sizes.get("n_positions")
    if limit is None or sizes.get("position_biased_input") is False:
        return None, False
    if any(key in sizes for key in _ROTARY_KEYS):
        return int(limit), False
    if sizes.get("model_type") in _OFFSET_POSITIONS:
        limit -= sizes.get("pad_token_id", 1) + 1
    return int(limit), True


def _sequence_classifier(
    config: dict[str, Any], identity: Identity, problem_type: str | None
) -> Checkpoint:
    if "model_type" not in config:
        raise CheckpointError(
            f"config.json of {identity.name} names neither a model_type nor a base_model, so its "
            "architecture is unknown: save the model with transformers' save_pretrained"
        )
    if config.get("id2label") or config.get("label2id"):
        labels = labels_in_order(config, identity.name)
    else:  # transformers leaves its default of two labels out of the file
        labels = tuple(f"LABEL_{i}" for i in range(int(config.get("num_labels", 2))))
    usual = REGRESSION if len(labels) == 1 else SINGLE_LABEL
    declared = problem_type or config.get("problem_type") or usual
    return Checkpoint(identity, SEQUENCE_CLASSIFICATION, labels, declared, json.dumps(config))


def find_tokenizer(
    checkpoint: Checkpoint, base_model: str | None = None, cache_dir: str | None = None
) -> Checkpoint:
    """The checkpoint with its base model as `tokenizer`, if none lies beside the weights.

    Saving a torch module saves no tokenizer, so one is looked for where that may have been done.

    Raises
    ------
    CheckpointError
        There is none, and no base model to take one from.
    """
    if checkpoint.layout not in (LINEAR_HEAD, OWN_MODULE):
        return checkpoint
    identity = checkpoint.identity
    files = hub.list_files(identity, cache_dir=cache_dir)
    if _TOKENIZER_FILES & set(files):
        return checkpoint
    base = base_model or checkpoint.config.get("base_model") or ""
    if "/" not in base:  # none, or just a folder within the checkpoint
        raise CheckpointError(
            f"{identity.name} has no tokenizer among its files {some_of(files)}, and names no base "
            "model to take one from: save it beside the model with tokenizer.save_pretrained, or "
            "pass base_model="
        )
    return replace(checkpoint, tokenizer=hub.resolve(base, cache_dir=cache_dir))


def _own_module(config: dict[str, Any], identity: Identity, problem_type: str | None) -> Checkpoint:
    has_labels = config.get("id2label") or config.get("label2id")
    labels = labels_in_order(config, identity.name) if has_labels else ()
    kind = problem_type or config.get("problem_type") or SINGLE_LABEL
    if kind == REGRESSION and not labels:
        labels = ("LABEL_0",)  # as transformers calls the one output of such a model
    return Checkpoint(identity, OWN_MODULE, labels, kind, json.dumps(config))


def _several_heads(
    config: dict[str, Any], identity: Identity, base_model: str | None, cache_dir: str | None
) -> Checkpoint:
    # The order of the heads is the order of the keys in the file.
    heads = tuple((str(name), int(size)) for name, size in config["target_sizes"].items())
    labels = labels_in_order({"id2label": config.get("task_type_map")}, identity.name)
    if len(labels) != heads[0][1]:
        raise CheckpointError(
            f"task_type_map of {identity.name} has {len(labels)} labels, and its first head "
            f"{heads[0][1]} outputs: they must be as many"
        )
    backbone = _backbone_of(config, identity, base_model, cache_dir)
    contents = json.dumps(config), json.dumps(backbone)
    return Checkpoint(identity, POOLED_HEADS, labels, SINGLE_LABEL, *contents, heads)


def _backbone_of(
    config: Mapping[str, Any], identity: Identity, base_model: str | None, cache_dir: str | None
) -> dict[str, Any]:
    """The sizes of `base_model`, or of the base model that the checkpoint itself names."""
    inside = identity if base_model is None else None
    return read_backbone(base_model or config["base_model"], inside, cache_dir)


def read_backbone(
    base_model: str, identity: Identity | None = None, cache_dir: str | None = None
) -> dict[str, Any]:
    """Sizes from a folder of the checkpoint, the table of known backbones, a directory or the Hub.

    Never a default: a wrong size would go unnoticed where shapes do not tell, as with heads.

    Raises
    ------
    CheckpointError
        The base model has no ``config.json``.
    """
    if identity is not None and "/" not in base_model:
        inside = hub.read_json(identity, f"{base_model}/config.json", cache_dir=cache_dir)
        if inside is not None:
            return inside
    known = KNOWN_BACKBONES.get(base_model.lower())
    is_local = hub.is_directory_name(base_model) or Path(base_model).is_dir()
    if known is not None and not is_local:
        return dict(known)
    try:
        home = hub.resolve(base_model, cache_dir=cache_dir)
        backbone = hub.read_json(home, "config.json", cache_dir=cache_dir)
    except (hub.HubUnreachableError, hub.ModelNotFoundError, hub.ModelAccessError) as err:
        err.add_note(
            f"{base_model} is the backbone that the model is built on, and its config.json, which "
            "alone is read, gives its sizes: base_model= takes a directory with that file, or "
            "another name"
        )
        raise
    if backbone is None:
        of = "" if identity is None else f" of {identity.name}"
        raise CheckpointError(
            f"the base model {base_model}{of} has no config.json, so the backbone's sizes are "
            "unknown: pass base_model= with a directory or Hub name that has one"
        )
    return backbone


def state_width(sizes: Mapping[str, Any]) -> int | None:
    """Numbers of a token's state, by the configuration of a network; None if it has other names."""
    return first_size(sizes, ("hidden_size", "dim", "n_embd"))


def first_size(sizes: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """The first of these sizes that a configuration has."""
    return next((int(sizes[name]) for name in names if sizes.get(name) is not None), None)


def some_of(names: Sequence[str], most: int = 8) -> str:
    """The first of the names in words, and how many more there are."""
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
