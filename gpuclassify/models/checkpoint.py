"""Descriptions of model checkpoints: layout, labels, problem type and sizes, not the weights.

Nothing here imports torch, so that a client reads a description in milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpuclassify import hub
from gpuclassify.hub import CheckpointError as CheckpointError
from gpuclassify.hub import Identity
from gpuclassify.models.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    LAST_LAYER,
    check_is_lora,
)
from gpuclassify.settings.checks import nearest
from gpuclassify.settings.options import REGRESSION, SINGLE_LABEL

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import nn
    from transformers import PreTrainedTokenizerBase

# Layouts of checkpoints: the network's parts, and the names of their tensors.
LINEAR_HEAD = "linear_head"  # a backbone ``model.`` and a linear layer ``fc`` on the first token
POOLED_HEADS = "pooled_heads"  # ``backbone.`` and several linear layers on the mean of all tokens
SEQUENCE_CLASSIFICATION = "sequence_classification"  # transformers' classes for texts
TOKEN_CLASSIFICATION = "token_classification"  # transformers' classes for tokens
OWN_MODULE = "own_module"  # a module that the mapper builds
EMBEDDING = "embedding"  # a backbone alone, whose token states are pooled
STATIC = "static"  # one vector per token, averaged over a text
# ``deberta.``, ``pooler.``, and the layers ``regressor`` and ``binary_classifier``.
SCORE_AND_PROBABILITY = "score_and_probability"
FIRST_TOKEN_LEVELS = "first_token_levels"  # ``deberta.`` and several ``heads.``, a level from each
FIRST_TOKEN_LAYOUTS = (LINEAR_HEAD, FIRST_TOKEN_LEVELS, SCORE_AND_PROBABILITY)
CELADON, CELADON_AXES = (
    "MultiHeadDebertaForSequenceClassification",  # a class in the repository
    ("race_origin", "gender_sex", "religion", "ability", "violence"),
)

# Architectures whose learned positions begin after the padding id.
_OFFSET_POSITIONS = {
    *("camembert", "data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke"),
    *("markuplm", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"),
    "xmod",
}
# Architectures without positions: their recurrent layers encode the order of tokens.
_WITHOUT_POSITIONS = {"jamba", "zamba"}
TOKENIZER_FILES = {
    "spm.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
}
# Names of architectures whose heads do not label whole texts.
_OTHER_HEADS = re.compile(
    r"((Token|Image|Audio|AudioFrame|Video)Classification|MultipleChoice|QuestionAnswering|LM|LMHeadModel"
    r"|PreTraining|Prediction|Generation)$"
)
_TOKEN_HEAD = re.compile("ForTokenClassification$")
_COUNTS_OF_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")
_USUAL_COUNT = 1_000  # layers or labels that are accepted without reading the weights' headers
_ROTARY_KEYS = ("rope_theta", "rope_parameters", "global_rope_theta", "rope_scaling")

# Defaults of the configuration class that GTE was published with; transformers' `GteConfig` has
# others.
_GTE_DEFAULTS: dict[str, Any] = {
    "vocab_size": 30528,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 2048,
    "type_vocab_size": 1,
    "rope_theta": 10_000.0,
}
# Settings of the published code that `GteModel` supports with these values only.
_GTE_PLAIN = {
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "pack_qkv": True,
}
# Settings that only the published code reads.
_GTE_DROPPED = {"auto_map", "rope_scaling", "rope_theta", *_GTE_PLAIN}

# Sizes of base models, because published classifiers name a base model and carry no sizes. Sizes of
# other base models are read from the Hub or from a directory.
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


@contextlib.contextmanager
def checking_values(owner: object) -> Iterator[None]:
    """Convert errors such as TypeError, from wrong values in a model's files, to CheckpointError.

    The files can hold any JSON value anywhere, and most are not checked before use in the block.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as err:
        raise CheckpointError(
            f"a file of {owner} holds a value of another kind than a model has there "
            f"({type(err).__name__}: {err}): take the files from whoever made the model"
        ) from err


@dataclass(frozen=True)
class SentenceModel:
    """Settings of an embedding model: pooling, prompts, and steps after pooling."""

    pooling: str = "mean"  # or "cls", or "last"
    is_normalized: bool = False  # embeddings have length 1
    max_tokens: int | None = None  # the authors' limit; None: the tokenizer's
    prompts: tuple[tuple[str, str], ...] = ()  # name and text of each prompt
    default_prompt: str | None = None  # name of the prompt that is used unless another is given
    pools_prompt: bool = True  # the prompt's tokens are part of the mean
    folder: str = ""  # folder of a static model's files
    # A static model2vec model also cuts texts by characters, and leaves unknown tokens out.
    is_model2vec: bool = False
    dense: tuple[str, ...] = ()  # folders of the dense layers
    width: int | None = None  # number of outputs of the last dense layer
    truncate_dim: int | None = None  # number of dimensions kept, after normalization
    normalizes_cut: bool = False  # truncated embeddings are normalized again

    def prompt(self, name: str | None = None) -> str:
        """Return the text of the prompt `name`; if None, of the default prompt, or else "".

        Raises ValueError for an unknown name.
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
    """Description of a model at a pinned revision: architecture, labels and sizes, but no weights.

    Small, immutable and equal for equal models, so that it can be sent to workers and hashed.
    """

    identity: Identity
    layout: str  # one of the layouts above
    # Labels in id order, of the first head if there are several. Empty for a custom module whose
    # configuration names none.
    labels: tuple[str, ...]
    problem_type: str  # a `ProblemType`, "token_classification" or "embedding"
    # The model's ``config.json``. For a LoRA adapter it is the base model's, with the number of
    # labels of the adapter; for the layout `STATIC`, the size of the table of token vectors.
    config_json: str
    backbone_json: str | None = None  # the backbone's ``config.json``, if the model's has no sizes
    # Name and number of outputs of each head, for `POOLED_HEADS`.
    heads: tuple[tuple[str, int], ...] = ()
    tokenizer: Identity | None = None  # the tokenizer's model; None: this model
    sentence: SentenceModel | None = None  # layouts `EMBEDDING` and `STATIC` only
    base: Identity | None = None  # the base model, if this model is a LoRA adapter
    adapter_json: str = ""  # the adapter's configuration
    is_probability: bool = False  # the only output becomes a probability by a sigmoid
    prompt: str = ""  # prefix of the first text of a pair
    max_tokens: int | None = None  # maximum tokens of a pair; None: the tokenizer's

    @property
    def output_count(self) -> int:
        """Number of outputs per text, or per token if tokens are classified; 0 without labels."""
        return sum(size for _, size in self.heads) or len(self.labels)

    @property
    def embedding_width(self) -> int | None:
        """Number of dimensions of an embedding, after truncation; None if it is unknown."""
        sentence = self.sentence or SentenceModel()
        width = sentence.width or state_width(self.sizes)
        return width and min(width, sentence.truncate_dim or width)

    @property
    def config(self) -> dict[str, Any]:
        """Parsed `config_json`, as a new dict."""
        return json.loads(self.config_json)

    @property
    def sizes(self) -> dict[str, Any]:
        """The network's configuration, in transformers' format unless the user builds the network.

        It is the backbone's if the model's ``config.json`` names one in place of sizes. Raises
        CheckpointError if transformers' classes do not support a setting.
        """
        sizes = json.loads(self.backbone_json or self.config_json)
        return sizes if self.layout == OWN_MODULE else network_sizes(sizes, self.identity.name)


@dataclass(frozen=True)
class OwnModule:
    """Functions that build a user's own network, and optionally its tokenizer.

    They replace the network that ``config.json`` describes, and the tokenizer in the model's files.
    """

    # Builds the module, with random weights, from the parsed ``config.json``.
    build: Callable[[dict[str, Any]], nn.Module]
    # Returns a key that identifies the module: its code, and everything that `build` may read.
    definition: Callable[[], tuple[Any, ...]] = tuple
    has_weights: bool = False  # `build` loads the weights, too: no weight file is read or checked
    new_tokenizer: Callable[[], Any] | None = None  # replaces the checkpoint's tokenizer


def read_checkpoint(
    identity: Identity,
    *,
    base_model: str | None = None,
    problem_type: str | None = None,
    has_own_module: bool = False,
    cache_dir: str | None = None,
) -> Checkpoint:
    """Return a description of the text classifier at `identity`, read from its ``config.json``.

    `base_model` overrides the base model named by a checkpoint that has no sizes itself, and
    `problem_type` the checkpoint's, unless its layout has one. With `has_own_module`, the user
    builds the network, so ``config.json`` may hold anything or be missing. Raises CheckpointError
    for models that are no text classifiers.
    """
    if has_own_module:
        config = hub.read_json(identity, "config.json", cache_dir=cache_dir) or {}
        has_labels = config.get("id2label") or config.get("label2id")
        labels = labels_in_order(config, identity.name) if has_labels else ()
        kind = problem_type or config.get("problem_type") or SINGLE_LABEL
        if kind == REGRESSION and not labels:
            labels = ("LABEL_0",)  # transformers' name for the only output
        return Checkpoint(identity, OWN_MODULE, labels, kind, json.dumps(config))
    if hub.read_json(identity, "config.json", cache_dir=cache_dir) is None:
        adapter = hub.read_json(identity, ADAPTER_CONFIG, cache_dir=cache_dir)
        if adapter is not None:
            return _adapted_classifier(adapter, identity, base_model, problem_type, cache_dir)
    config = read_required_json(identity, "config.json", "is no saved model", cache_dir)
    if "target_sizes" in config:
        return _with_base_model(config, identity, POOLED_HEADS, base_model, cache_dir)
    if "base_model" in config and "fc_dropout" in config:
        checkpoint = _with_base_model(config, identity, LINEAR_HEAD, base_model, cache_dir)
        return replace(checkpoint, problem_type=problem_type or SINGLE_LABEL)
    if base_model is not None and has_tokenizer(identity, cache_dir):
        raise CheckpointError(
            f"{identity.name} has its own sizes and tokenizer, so base_model={base_model!r} has no "
            "meaning: leave it out"
        )
    return _sequence_classifier(config, identity, problem_type)


def read_required_json(
    identity: Identity, filename: str, otherwise: str, cache_dir: str | None
) -> dict[str, Any]:
    """Read a JSON file that the model at `identity` must have, such as ``config.json``, as a dict.

    If it is missing, the CheckpointError says `otherwise`, such as "is no saved model". Static
    embedding models and implausible sizes are refused, too.
    """
    content = hub.read_json(identity, filename, cache_dir=cache_dir)
    is_static = content is not None and is_model2vec(content)
    if content is None:
        modules = hub.read_text(identity, "modules.json", cache_dir=cache_dir) or ""
        is_static = "StaticEmbedding" in modules
    if is_static:
        raise CheckpointError(
            f"{identity.name} is a static embedder, which has no labels and writes no answers: "
            "Embedder(model=...) embeds with it, and `gpuclassify train --backbone` trains a "
            "classifier on it"
        )
    if content is None:
        files = some_of(hub.list_files(identity, cache_dir=cache_dir)) or "no files"
        raise CheckpointError(
            f"{identity.name} {otherwise}: it has no {filename}; it has {files}. Pass the "
            "directory or Hub name of what was meant."
        )
    check_sizes(content, identity, cache_dir)
    return content


def is_model2vec(config: Mapping[str, Any]) -> bool:
    """Tell whether a ``config.json`` was saved by model2vec, so the model is a static embedder."""
    return config.get("model_type") == "model2vec" or "embedding_dtype" in config


def check_sizes(sizes: Mapping[str, Any], identity: Identity, cache_dir: str | None) -> None:
    """Raise CheckpointError if a configuration states more layers or labels than weights can have.

    The network is built before it is compared with the weights, and a wrong number could take all
    memory. Numbers up to 1,000 pass unchecked.
    """
    stated = {name: sizes.get(name) for name in (*_COUNTS_OF_LAYERS, "num_labels")}
    for name, count in stated.items():
        if not isinstance(count, int) or count <= _USUAL_COUNT:
            continue
        shapes = hub.read_tensor_shapes(identity, cache_dir=cache_dir)
        most = len(shapes)
        if name == "num_labels":
            most = max((size for shape in shapes.values() for size in shape), default=0)
        if count > most:
            raise CheckpointError(
                f"config.json of {identity.name} states {name}={count:,}, and the weights have "
                f"{most:,} at most: save the model again, or correct the file"
            )


def labels_in_order(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return a classifier's labels, ordered by id, from ``id2label`` or else ``label2id``.

    Labels may be equal. Raises CheckpointError unless the ids are 0 to n - 1, for n > 0 labels.
    """
    by_label, by_number = config.get("label2id"), config.get("id2label")
    if not by_number and not by_label:
        raise CheckpointError(f"config.json of {name} has no id2label: add the labels by id")
    pairs = [*by_number.items()] if isinstance(by_number, dict) else []
    if not by_number and isinstance(by_label, dict):
        pairs = [(i, label) for label, i in by_label.items()]
    if not pairs or not all(re.fullmatch("[0-9]+", str(i)) for i, _ in pairs):
        raise CheckpointError(
            f"id2label of {name} is {by_number or by_label!r}: it must map whole numbers to labels"
        )
    by_id = {int(i): str(label) for i, label in pairs}
    if sorted(by_id) != list(range(len(pairs))):
        raise CheckpointError(
            f"id2label of {name} has ids {sorted(int(i) for i, _ in pairs)}: they must run from 0 "
            f"to {len(pairs) - 1}"
        )
    return tuple(by_id[i] for i in range(len(by_id)))


def position_limit(sizes: Mapping[str, Any]) -> tuple[int | None, bool]:
    """Return the maximum number of tokens by a network's configuration, or None, and a flag.

    The flag is True if longer texts fail, as with a table of learned positions. It is False if the
    model only loses quality beyond the number, as with rotary positions, or if there is none.
    """
    kind = sizes.get("model_type")
    if kind == "mpt":  # its attention biases are a table of fixed length
        return int(sizes.get("max_seq_len", 2_048)), True
    names = ("max_position_embeddings", "n_positions")
    limit = first_size(sizes, names if "relative_attention_num_buckets" not in sizes else names[:1])
    if limit is None or sizes.get("position_biased_input") is False:
        return None, False
    if kind in _WITHOUT_POSITIONS or any(key in sizes for key in _ROTARY_KEYS):
        return int(limit), False
    if kind in _OFFSET_POSITIONS:
        limit -= sizes.get("pad_token_id", 1) + 1
    if kind == "big_bird" and sizes.get("attention_type", "block_sparse") == "block_sparse":
        # Long texts are padded to whole blocks, and padding needs positions, too.
        block = sizes.get("block_size", 64)
        unpadded = (5 + 2 * sizes.get("num_random_blocks", 3)) * block
        limit = max(limit // block * block, min(limit, unpadded))
    return int(limit), True


def check_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | PreTrainedTokenizerBase) -> None:
    """Raise CheckpointError if the model's ``vocab_size`` is too small for a tokenizer's token ids.

    Nothing is checked without a ``vocab_size``, or for a network that the user builds.
    """
    rows = None if checkpoint.layout == OWN_MODULE else checkpoint.sizes.get("vocab_size")
    ids = tokenizer.get_vocab()
    token = max(ids, key=ids.__getitem__, default="")
    if rows is not None and ids and ids[token] >= rows:
        raise CheckpointError(
            f"the tokenizer of {checkpoint.identity.name} has ids up to {ids[token]}, and the "
            f"model an embedding of {rows} rows, too few for {token!r}: copy the tokenizer that "
            "the model was trained with, or call model.resize_token_embeddings and save both"
        )


def _sequence_classifier(
    config: dict[str, Any], identity: Identity, problem_type: str | None
) -> Checkpoint:
    if "model_type" not in config:
        raise CheckpointError(
            f"config.json of {identity.name} names neither a model_type nor a base_model, so its "
            "architecture is unknown: save the model with transformers' save_pretrained"
        )
    if CELADON in (config.get("architectures") or ()):
        content = json.dumps(config)
        return Checkpoint(identity, FIRST_TOKEN_LEVELS, CELADON_AXES, REGRESSION, content)
    architectures = config.get("architectures") or [""]
    if all(map(_OTHER_HEADS.search, map(str, architectures))):
        raise CheckpointError(
            f"{identity.name} is a {architectures[0]}, whose head labels no whole texts: pass a "
            "ForSequenceClassification. SpanClassifier runs a ForTokenClassification, "
            "PromptClassifier asks decoders, Embedder takes any network"
        )
    labels = _labels_or_default(config, identity.name)
    usual = REGRESSION if len(labels) == 1 else SINGLE_LABEL
    declared = problem_type or config.get("problem_type") or usual
    return Checkpoint(identity, SEQUENCE_CLASSIFICATION, labels, declared, json.dumps(config))


def read_token_classifier(identity: Identity, *, cache_dir: str | None = None) -> Checkpoint:
    """Return a description of the token classifier at `identity`, saved by transformers.

    Raises CheckpointError for models that declare another head.
    """
    config = read_required_json(identity, "config.json", "is no saved model", cache_dir)
    architectures = [str(name) for name in config.get("architectures") or ()]
    # The layouts `POOLED_HEADS` and `LINEAR_HEAD` label whole texts.
    labels_texts = not {"target_sizes", "fc_dropout"}.isdisjoint(config)
    if (
        labels_texts
        or "model_type" not in config
        or not all(map(_TOKEN_HEAD.search, architectures))
    ):
        raise CheckpointError(
            f"{identity.name} is {some_of(architectures) or 'of no architecture that is named'}, "
            "whose head labels no tokens: pass a ForTokenClassification that transformers saved. "
            "DistributedDataClassifier labels whole texts"
        )
    labels = _labels_or_default(config, identity.name)
    return Checkpoint(
        identity, TOKEN_CLASSIFICATION, labels, TOKEN_CLASSIFICATION, json.dumps(config)
    )


def _labels_or_default(config: dict[str, Any], name: str) -> tuple[str, ...]:
    if config.get("id2label") or config.get("label2id"):
        return labels_in_order(config, name)
    # transformers does not save its default of two labels.
    return tuple(f"LABEL_{i}" for i in range(int(config.get("num_labels", 2))))


def _adapted_classifier(
    adapter: dict[str, Any],
    identity: Identity,
    base_model: str | None,
    problem_type: str | None,
    cache_dir: str | None,
) -> Checkpoint:
    """Describe a classifier that is a LoRA adapter at `identity` on a base model.

    Labels are the base model's if their number fits, else "LABEL_0" and so on.
    """
    check_is_lora(adapter, identity.name)
    shapes = hub.read_tensor_shapes(identity, ADAPTER_WEIGHTS, cache_dir=cache_dir)
    outputs = {s[0] for name, s in shapes.items() if len(s) == 2 and LAST_LAYER.search(name)}
    if adapter.get("task_type") != "SEQ_CLS" or len(outputs) != 1:
        raise CheckpointError(
            f"the adapter {identity.name} has task_type {adapter.get('task_type')!r} and "
            f"{len(outputs)} last layers: a classifier's has 'SEQ_CLS' and one such as "
            "classifier.weight or score.weight. PromptClassifier takes a decoder's as adapter="
        )
    (count,) = outputs
    name = base_model or adapter.get("base_model_name_or_path") or ""
    has_revision = base_model is None and not hub.is_directory_name(name)
    revision = adapter.get("revision") if has_revision else None
    config = read_backbone(name, cache_dir=cache_dir, revision=revision)
    if len(config.get("id2label") or ()) != count:
        config |= {"id2label": None, "label2id": None, "num_labels": count}
    whole = _sequence_classifier(config | {"architectures": None}, identity, problem_type)
    base = hub.resolve(name, revision, cache_dir=cache_dir)
    return replace(whole, base=base, adapter_json=json.dumps(adapter))


def has_tokenizer(identity: Identity, cache_dir: str | None = None) -> bool:
    """Return whether a repository or directory has files of a tokenizer."""
    return not TOKENIZER_FILES.isdisjoint(hub.list_files(identity, cache_dir=cache_dir))


def find_tokenizer(
    checkpoint: Checkpoint, base_model: str | None = None, cache_dir: str | None = None
) -> Checkpoint:
    """Return the checkpoint, with `tokenizer` set to its base model if it has no tokenizer itself.

    Layouts that should have a tokenizer are returned unchanged, unless `base_model` is passed. It
    overrides the one in ``config.json``. Raises CheckpointError if there is no base model either.
    """
    names_base = checkpoint.layout in (LINEAR_HEAD, OWN_MODULE) or checkpoint.base is not None
    if not (names_base or base_model is not None):
        return checkpoint
    identity = checkpoint.identity
    if has_tokenizer(identity, cache_dir):
        return checkpoint
    if checkpoint.base is not None:
        return replace(checkpoint, tokenizer=checkpoint.base)
    named = checkpoint.config.get("base_model")
    base = base_model or (named if isinstance(named, str) else "")
    if "/" not in base and base_model is None:
        files = hub.list_files(identity, cache_dir=cache_dir)
        if not base or any(file.startswith(f"{base}/") for file in files):  # the backbone's folder
            raise CheckpointError(
                f"{identity.name} has no tokenizer among its files {some_of(files)}, and names no "
                "base model to take one from: save it beside the model with "
                "tokenizer.save_pretrained, or pass base_model="
            )
    return replace(checkpoint, tokenizer=hub.resolve(base, cache_dir=cache_dir))


def _with_base_model(
    config: dict[str, Any],
    identity: Identity,
    layout: str,
    base_model: str | None,
    cache_dir: str | None,
) -> Checkpoint:
    """Return a description of a model whose ``config.json`` names a base model instead of sizes."""
    # Heads are in the order of the keys in the file.
    sizes = {str(name): int(size) for name, size in config.get("target_sizes", {}).items()}
    by_id = {"id2label": config.get("task_type_map")} if layout == POOLED_HEADS else config
    labels = labels_in_order(by_id, identity.name)
    if (first := next(iter(sizes.values()), len(labels))) != len(labels):
        raise CheckpointError(
            f"task_type_map of {identity.name} has {len(labels)} labels, and its first head "
            f"{first} outputs: they must be as many"
        )
    home = identity if base_model is None else None
    backbone = read_backbone(base_model or config["base_model"], home, cache_dir)
    check_sizes(backbone, identity, cache_dir)
    contents, heads = (json.dumps(config), json.dumps(backbone)), tuple(sizes.items())
    return Checkpoint(identity, layout, labels, SINGLE_LABEL, *contents, heads)


def read_backbone(
    base_model: str,
    identity: Identity | None = None,
    cache_dir: str | None = None,
    revision: str | None = None,
) -> dict[str, Any]:
    """Return the parsed ``config.json`` of the backbone called `base_model`, which has its sizes.

    It is looked for in a folder of the model `identity`, then among `KNOWN_BACKBONES`, then as a
    directory or on the Hub. There are no default sizes, because tensor shapes do not reveal every
    wrong size, such as the number of attention heads.
    """
    if identity is not None and "/" not in base_model:
        own = hub.read_json(identity, f"{base_model}/config.json", cache_dir=cache_dir)
        if own is not None:
            return own
    known = KNOWN_BACKBONES.get(base_model.lower())
    if known is not None and not hub.is_directory_name(base_model):
        return dict(known)
    try:
        home = hub.resolve(base_model, revision, cache_dir=cache_dir)
        backbone = hub.read_json(home, "config.json", cache_dir=cache_dir)
    except (hub.HubUnreachableError, hub.ModelNotFoundError, hub.ModelAccessError) as err:
        err.add_note(
            f"{base_model} is the backbone that the model is built on, and its config.json gives "
            "the sizes: base_model= takes a directory with that file, or another name"
        )
        raise
    if backbone is None:
        owner = "" if identity is None else f" of {identity.name}"
        raise CheckpointError(
            f"the base model {base_model}{owner} has no config.json, so the backbone's sizes are "
            "unknown: pass base_model= with a directory or Hub name that has one"
        )
    return backbone


def network_sizes(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Convert a network's ``config.json`` to a configuration that transformers can build.

    Raises CheckpointError if transformers does not support a setting, or weights are quantized.
    """
    dropped = ("attn_implementation", "quantization_config")  # the latter is null here
    sizes = {key: value for key, value in config.items() if not key.endswith(dropped)}
    quantized = config.get("quantization_config") or config.get("compression_config")
    position, is_gte, wrong = sizes.get("position_embedding_type"), is_published_gte(sizes), ""
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        wrong = (
            f"is quantized by {method or 'a method without a name'}, which this package does not "
            "run: pass the model that it was made of, or save what model.dequantize() makes of it"
        )
    elif str(position).startswith("relative_key"):
        wrong = (
            f"has position_embedding_type={position!r}, which transformers 5 no longer has: run it "
            "with transformers 4, or take another model"
        )
    elif is_gte and (problems := _gte_problems(sizes)):
        wrong = (
            f"has {', '.join(problems)}, which transformers' GteModel does not do: run it with the "
            "code in its repository"
        )
    if wrong:
        raise CheckpointError(f"{name} {wrong}")
    return gte_sizes(sizes) if is_gte else sizes


# GTE encoders (``model_type`` "new", in Snowflake's copy "gte") were published with modelling code,
# `Alibaba-NLP/new-impl`. transformers' `GteModel` renames their tensors while loading, but does not
# read their configurations. Written from the published code, not tested on the published weights.


def is_published_gte(config: Mapping[str, Any]) -> bool:
    """Tell whether a configuration has the format of published GTE models, not of `GteConfig`."""
    return config.get("model_type") in ("new", "gte") and "rope_parameters" not in config


def _gte_problems(config: Mapping[str, Any]) -> list[str]:
    """List settings of a published GTE configuration that transformers does not support."""
    problems = [
        f"{name}={config[name]!r}"
        for name, value in _GTE_PLAIN.items()
        if config.get(name, value) != value
    ]
    scaling = config.get("rope_scaling") or {"type": "ntk"}
    if scaling.get("type", scaling.get("rope_type")) != "ntk" or scaling.get("mixed_b") is not None:
        problems.append(f"rope_scaling={scaling}")
    return problems


def gte_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a published GTE configuration to the format of transformers' `GteConfig`.

    The published NTK scaling by f multiplies the base of the frequencies by f, and divides the
    frequencies by f^(2 / d) for a head of width d. That equals linear scaling with another base.
    """
    whole = _GTE_DEFAULTS | dict(config)
    factor = float((whole.get("rope_scaling") or {}).get("factor", 1.0))
    width = whole["hidden_size"] // whole["num_attention_heads"]
    rope = {
        "rope_type": "linear",
        "rope_theta": whole["rope_theta"] * factor,
        "factor": factor ** (2 / width),
    }
    kept = {name: value for name, value in whole.items() if name not in _GTE_DROPPED}
    return kept | {"model_type": "gte", "rope_parameters": rope}


# Helpers.


def state_width(sizes: Mapping[str, Any]) -> int | None:
    """Return the hidden size (width of a token's state) in a configuration; None if not found."""
    return first_size(sizes, ("hidden_size", "dim", "n_embd"))


def first_size(sizes: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """Return the value, an int, of the first of `names` that a configuration sets, else None."""
    return next((int(sizes[name]) for name in names if sizes.get(name) is not None), None)


def some_of(names: Sequence[str], most: int = 8) -> str:
    """Join the first `most` names for a message, followed by the number of further names."""
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
