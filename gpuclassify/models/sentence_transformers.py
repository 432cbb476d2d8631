"""Descriptions of models from files of sentence-transformers and model2vec, without torch.

The files are ``modules.json`` (order of modules), ``config.json`` in the pooling module's folder,
``sentence_bert_config.json`` (tokenizing) and ``config_sentence_transformers.json`` (prompts).
Settings that this package would run differently are refused by name.
"""

from __future__ import annotations

import itertools
import json
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpuclassify import hub
from gpuclassify.hub import Identity
from gpuclassify.hub.files import WEIGHTS
from gpuclassify.models.checkpoint import (
    EMBEDDING,
    SEQUENCE_CLASSIFICATION,
    STATIC,
    Checkpoint,
    CheckpointError,
    SentenceModel,
    is_model2vec,
    some_of,
)
from gpuclassify.settings.options import REGRESSION

_POOLING_NAMES = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
# Flags of older releases, one per mode.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_SENTENCE, _PAIRS = "SentenceTransformer", "CrossEncoder"  # types of models
# Modules that may follow each module, by type of model; None is the start.
_FOLLOWS: dict[str, dict[str | None, set[str]]] = {
    _PAIRS: {None: {"Transformer"}, "Transformer": set()},
    _SENTENCE: {
        None: {"Transformer", "StaticEmbedding"},
        "Transformer": {"Pooling"},
        "Normalize": set(),
        **{kind: {"Dense", "Normalize"} for kind in ("Pooling", "StaticEmbedding", "Dense")},
    },
}
# Orders of modules that this package runs, for messages.
_RUNS = {
    _PAIRS: "one Transformer",
    _SENTENCE: "Transformer, then Pooling, or StaticEmbedding, then Dense, then Normalize",
}
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")  # classes of torch.nn
_TOKENS_READ = 512  # model2vec's default maximum of tokens
_MODULES = "modules.json"
_SETTINGS = "config_sentence_transformers.json"
# The first existing file counts; newer releases write the first name for every architecture.
_TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Settings of the Transformer module that are read here, or do not change embeddings of `encode`:
# they affect speed, or `encode_query` and `encode_document` only.
_HARMLESS = {"max_seq_length", "do_lower_case", "unpad_inputs"}
_HARMLESS |= {"query_length", "document_length", "query_expansion"}
_HARMLESS_ARGUMENTS = {"add_pooling_layer", "attn_implementation", "dtype", "torch_dtype"}
_HARMLESS_ARGUMENTS |= {"trust_remote_code"}
# Other settings and their only allowed value, by type of model.
_PLAIN = {
    model_type: {
        "transformer_task": task,
        "module_output_name": output,
        "modality_config": {"text": {"method": "forward", "method_output_name": method_output}},
    }
    for model_type, task, output, method_output in (
        (_SENTENCE, "feature-extraction", "token_embeddings", "last_hidden_state"),
        (_PAIRS, "sequence-classification", "scores", "logits"),
    )
}
_ELSEWHERE = "use sentence-transformers for this model"


def read_embedding_checkpoint(
    identity: Identity,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    truncate_dim: int | None = None,
    cache_dir: str | None = None,
) -> Checkpoint:
    """Return a description of the embedding model at `identity`, read from its files.

    `pooling` ("mean", "cls" or "last"), `normalize` and `truncate_dim` (dimensions kept) override
    the files unless they are None. Without files of sentence-transformers, its defaults hold.
    Raises CheckpointError for modules and settings that would give other embeddings here than in
    sentence-transformers.
    """
    files = _Files(identity, cache_dir)
    modules = files.modules()
    folders = dict(modules)
    # Older models of model2vec have no modules.json.
    if "StaticEmbedding" in folders or (not folders and files.are_from_model2vec):
        layout, (config, sentence) = STATIC, files.table(folders.get("StaticEmbedding", ""))
        if pooling not in (None, "mean"):
            raise CheckpointError(f"{identity.name} averages vectors: leave pooling= out")
    else:
        layout, config = EMBEDDING, files.sizes()
        pooling_config = files.pooling_config(folders)
        sentence = SentenceModel(
            pooling=pooling or _pooling(pooling_config, config, identity.name),
            max_tokens=files.transformer_settings().get("max_seq_length"),
            pools_prompt=pooling_config.get("include_prompt", True),
        )
    if not sentence.is_model2vec:
        sentence = replace(sentence, is_normalized="Normalize" in folders)
    prompts, default_prompt, dimensions = files.prompts()
    dense = tuple(folder for kind, folder in modules if kind == "Dense")
    sentence = replace(
        sentence,
        is_normalized=sentence.is_normalized if normalize is None else bool(normalize),
        prompts=prompts,
        default_prompt=default_prompt,
        dense=dense,
        width=[None, *map(files.dense_width, dense)][-1],
        truncate_dim=truncate_dim or dimensions,
        normalizes_cut=bool(normalize),
    )
    return Checkpoint(identity, layout, (), EMBEDDING, json.dumps(config), sentence=sentence)


def as_cross_encoder(
    checkpoint: Checkpoint, has_activation: bool = True, cache_dir: str | None = None
) -> Checkpoint:
    """Return a description of a classifier of text pairs with settings of CrossEncoder added.

    CrossEncoder is a class of sentence-transformers. Its settings are, if the files have them, the
    default prompt, the maximum number of tokens and, with `has_activation`, whether the output of a
    regression with one label gets a sigmoid. Raises CheckpointError for settings that would give
    other scores here than there.
    """
    files = _Files(checkpoint.identity, cache_dir, _PAIRS)
    saved: dict[str, Any] = {}
    if checkpoint.layout == SEQUENCE_CLASSIFICATION and files.have_model_type:
        files.modules()
        saved, (prompts, default_prompt, _) = files.settings(), files.prompts()
        checkpoint = replace(
            checkpoint,
            prompt=SentenceModel(prompts=prompts, default_prompt=default_prompt).prompt(),
            max_tokens=files.transformer_settings().get("max_seq_length"),
        )
    is_one = checkpoint.problem_type == REGRESSION and len(checkpoint.labels) == 1
    if not (has_activation and is_one):
        return checkpoint
    return replace(checkpoint, is_probability=_has_sigmoid(checkpoint, saved))


def _has_sigmoid(checkpoint: Checkpoint, saved: Mapping[str, Any]) -> bool:
    """Tell whether CrossEncoder would apply a sigmoid to the model's single output."""
    config = checkpoint.config
    settings = (saved, config.get("sentence_transformers") or {})
    named = [found["activation_fn"] for found in settings if found.get("activation_fn")]
    name = (*named, config.get("sbert_ce_default_activation_function"))[0]
    if name is None:  # CrossEncoder's default
        return not config.get("problem_type")
    library, _, kind = str(name).rpartition(".")
    if kind not in ("Identity", "Sigmoid") or not f"{library}.".startswith("torch.nn."):
        raise CheckpointError(
            f"{checkpoint.identity.name} has activation {name}, which is neither torch.nn.Identity "
            f'nor torch.nn.Sigmoid: pass problem_type="{REGRESSION}" for the output as it is, or '
            "save the model with one of the two as activation_fn"
        )
    return kind == "Sigmoid"


@dataclass(frozen=True)
class _Files:
    """Reader of a model's files in the format of sentence-transformers; each may be missing."""

    identity: Identity
    cache_dir: str | None
    model_type: str = _SENTENCE  # or `_PAIRS`

    @property
    def have_model_type(self) -> bool:
        """Whether sentence-transformers saved the files, for a model of class `self.model_type`."""
        if _MODULES not in hub.list_files(self.identity, cache_dir=self.cache_dir):
            return False
        return self.settings().get("model_type", _SENTENCE) == self.model_type

    def settings(self) -> dict[str, Any]:
        return self._read(_SETTINGS) or {}

    def sizes(self) -> dict[str, Any]:
        """Read ``config.json``; raise CheckpointError unless it is an encoder's or a decoder's."""
        config, name = self._read("config.json"), self.identity.name
        if self._read("adapter_config.json") is not None:
            raise CheckpointError(
                f"{name} is an adapter of another model: merge the two and save the result"
            )
        if config is None or "model_type" not in config or "base_model" in config:
            raise CheckpointError(
                f"{name} has no config.json with a network's model_type and sizes: pass a model "
                "that transformers or sentence-transformers saved"
            )
        if config.get("is_encoder_decoder"):
            raise CheckpointError(
                f"{name} is an encoder with a decoder ({config['model_type']}): an Embedder takes "
                "a model that has one of the two"
            )
        return config

    @property
    def are_from_model2vec(self) -> bool:
        return is_model2vec(self._read("config.json") or {})

    def table(self, folder: str) -> tuple[dict[str, Any], SentenceModel]:
        """Return the size of a static model's table of token vectors, and the model's settings.

        The size is a dict with the keys ``model_type``, ``vocab_size`` (number of tokens) and
        ``hidden_size`` (length of a vector). `folder` has the weights.
        """
        name, weights = self.identity.name, f"{folder}/{WEIGHTS}".lstrip("/")
        shapes = hub.read_tensor_shapes(self.identity, weights, cache_dir=self.cache_dir)
        is_model2vec = "embeddings" in shapes  # sentence-transformers has "embedding.weight"
        table = shapes.get("embeddings" if is_model2vec else "embedding.weight", ())
        if len(table) != 2:
            raise CheckpointError(
                f"{weights} of {name} has the tensors {some_of(sorted(shapes))}: a static embedder "
                "has embeddings (tokens, numbers), or embedding.weight. Save the model again"
            )
        rows = shapes.get("mapping", table)[0]
        sizes = {"model_type": STATIC, "vocab_size": rows, "hidden_size": table[1]}
        config = (self._read("config.json") or {}) if is_model2vec else {"max_length": None}
        return sizes, SentenceModel(
            is_normalized=bool(config.get("normalize")),
            max_tokens=self._size(config, "max_length", _TOKENS_READ),
            folder=folder,
            is_model2vec=is_model2vec,
        )

    def dense_width(self, folder: str) -> int:
        """Check the files of the dense layer in `folder`, and return its number of outputs."""
        settings = {"activation_function": "torch.nn.Tanh"}
        settings |= self._read(f"{folder}/config.json") or {}
        library, _, activation = settings["activation_function"].rpartition(".")
        read = {settings.get(f"module_{end}_name") for end in ("input", "output")}
        is_plain = read <= {"sentence_embedding", None} and not settings.get("use_residual")
        if not (is_plain and activation in ACTIVATIONS and library.startswith("torch.nn")):
            raise CheckpointError(
                f"{folder} of {self.identity.name} has the settings {settings}, and this package "
                f"runs dense layers with {', '.join(ACTIVATIONS)} alone: {_ELSEWHERE}"
            )
        weights = f"{folder}/{WEIGHTS}"
        shapes = hub.read_tensor_shapes(self.identity, weights, cache_dir=self.cache_dir)
        linear = shapes.get("linear.weight", ())
        if len(linear) != 2 or not shapes.keys() <= {"linear.weight", "linear.bias"}:
            raise CheckpointError(
                f"{weights} of {self.identity.name} has the tensors {some_of(sorted(shapes))}: a "
                "dense layer has linear.weight (outputs, inputs), and may have linear.bias"
            )
        return linear[0]

    def modules(self) -> list[tuple[str, str]]:
        """Check ``modules.json``; return the kind, such as "Pooling", and folder of each module.

        The folder "" is the model's own. Without the file, the list is empty.
        """
        name = self.identity.name
        text = hub.read_text(self.identity, _MODULES, cache_dir=self.cache_dir)
        if text is None:
            return []
        try:
            entries = hub.parse_json(text, f"{_MODULES} of {name}")
            modules = [(str(entry["type"]), str(entry["path"])) for entry in entries]
        except (TypeError, KeyError) as err:
            raise CheckpointError(
                f"{_MODULES} of {name} is no list of modules with a path and a type ({err!r}): "
                "save the model again with sentence-transformers"
            ) from err
        folder_of_module = [
            (kind.rpartition(".")[2], "" if at == "." else at) for kind, at in modules
        ]
        kinds = [None, *(kind for kind, _ in folder_of_module)]
        follows = _FOLLOWS[self.model_type]
        for index, (previous, kind) in enumerate(itertools.pairwise(kinds)):
            full = modules[index][0]
            if not full.startswith("sentence_transformers.") or kind not in follows[previous]:
                raise CheckpointError(
                    f"{_MODULES} of {name} has {full} in place {index}, and this package runs "
                    f"{_RUNS[self.model_type]}: {_ELSEWHERE}"
                )
        if kinds[-1] == "Transformer" and self.model_type == _SENTENCE:
            raise CheckpointError(
                f"{_MODULES} of {name} has no Pooling: add one, or remove the file"
            )
        folders = dict(folder_of_module)
        if folders.get("Transformer"):
            raise CheckpointError(
                f"{_MODULES} of {name} has its Transformer in the folder "
                f"{folders['Transformer']!r}: move its files to the top of the model and set its "
                'path to ""'
            )
        settings = self._read(f"{folders.get('Normalize')}/config.json") or {}
        if {*settings.values()} - {"sentence_embedding", None}:
            raise CheckpointError(
                f"{folders['Normalize']} of {name} has the settings {settings}, and this package "
                f"normalises 'sentence_embedding' alone: {_ELSEWHERE}"
            )
        return folder_of_module

    def pooling_config(self, modules: Mapping[str, str]) -> dict[str, Any]:
        """Read the pooling module's settings; {} if `modules`, folders by kind, is empty."""
        if not modules:
            return {}
        filename = f"{modules['Pooling']}/config.json"
        config = self._read(filename)
        if config is None:
            raise CheckpointError(
                f"{_MODULES} of {self.identity.name} names {modules['Pooling']!r}, and {filename} "
                "is not there: save the model again with sentence-transformers, or copy the folder"
            )
        return config

    def transformer_settings(self) -> dict[str, Any]:
        """Read and check the Transformer module's settings; {} if there are none."""
        name = self.identity.name
        present = hub.list_files(self.identity, cache_dir=self.cache_dir)
        filename = next((file for file in _TRANSFORMER_FILES if file in present), None)
        settings = (self._read(filename) or {}) if filename else {}
        for key, value in settings.items():
            if not _is_plain(key, value, self.model_type):
                raise CheckpointError(
                    f"{filename} of {name} sets {key!r} to {value!r}, which this package does not "
                    f"do: {_ELSEWHERE}"
                )
        if settings.get("do_lower_case") and not self._are_lower_cased(present):
            raise CheckpointError(
                f"{filename} of {name} asks for lower-case texts, and its tokenizer does not make "
                "them so: load the model by sentence-transformers and save it, which writes the "
                "step into tokenizer.json"
            )
        self._size(settings, "max_seq_length")
        return settings

    def _are_lower_cased(self, present: Collection[str]) -> bool:
        """Tell whether the tokenizer lower-cases texts; `present` are the model's files."""
        if "tokenizer.json" in present:
            return _lowers((self._read("tokenizer.json") or {}).get("normalizer"))
        config = self._read("tokenizer_config.json") or {}
        # `do_lower_case` affects WordPiece vocabularies only.
        return "vocab.txt" in present and config.get("do_lower_case") is True

    def prompts(self) -> tuple[tuple[tuple[str, str], ...], str | None, int | None]:
        """Return the prompts as (name, text), the default prompt's name, and `truncate_dim`.

        The last two are None if not set.
        """
        config, name = self.settings(), self.identity.name
        kind = config.get("model_type", _SENTENCE)
        if kind != self.model_type:
            raise CheckpointError(
                f"{name} is a {kind} by its {_SETTINGS}: an Embedder takes a SentenceTransformer"
            )
        prompts = {key: text or "" for key, text in (config.get("prompts") or {}).items()}
        if not all(isinstance(text, str) for text in prompts.values()):
            raise CheckpointError(f"{_SETTINGS} of {name} has prompts that are no texts")
        default = config.get("default_prompt_name")
        if default is not None and default not in prompts:
            raise CheckpointError(
                f"{_SETTINGS} of {name} names the default prompt {default!r}, and its prompts are "
                f"{sorted(prompts)}: correct the file"
            )
        return tuple(prompts.items()), default, self._size(config, "truncate_dim")

    def _size(
        self, settings: Mapping[str, Any], key: str, default: int | None = None
    ) -> int | None:
        """Return the setting `key`, or else `default`; it must be None or an int above 0."""
        value = settings.get(key, default)
        if value is not None and (type(value) is not int or value < 1):
            raise CheckpointError(
                f"{self.identity.name} sets {key!r} to {reprlib.repr(value)}: it must be a whole "
                "number of at least 1, or null. Correct its file"
            )
        return value

    def _read(self, filename: str) -> dict[str, Any] | None:
        return hub.read_json(self.identity, filename, cache_dir=self.cache_dir)


def _pooling(pooling_config: Mapping[str, Any], config: Mapping[str, Any], name: str) -> str:
    if not pooling_config:
        architectures = config.get("architectures") or [""]
        is_causal = architectures[0].endswith("ForCausalLM") and config.get("is_causal", True)
        return "last" if is_causal else "mean"
    modes = pooling_config.get("pooling_mode")
    if modes is None:
        flags = [mode for flag, mode in _POOLING_FLAGS.items() if pooling_config.get(flag)]
        modes = flags or ["mean"]
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) > 1 or modes[0] not in _POOLING_NAMES:
        raise CheckpointError(
            f"{name} pools by {' and '.join(modes)}, and this package by one of "
            f"{', '.join(_POOLING_NAMES)}: use sentence-transformers, or pass pooling="
        )
    return _POOLING_NAMES[modes[0]]


def _lowers(normalizer: Mapping[str, Any] | None) -> bool:
    normalizer = normalizer or {}
    kind = normalizer.get("type")
    if kind == "Sequence":
        return any(map(_lowers, normalizer["normalizers"]))
    return kind == "Lowercase" or (kind == "BertNormalizer" and bool(normalizer.get("lowercase")))


def _is_plain(name: str, value: Any, model_type: str) -> bool:
    """Tell whether this package supports the `value` of a setting of the Transformer module."""
    if name in _HARMLESS or value is None or value == _PLAIN[model_type].get(name):
        return True
    is_arguments = name.endswith(("_args", "_kwargs")) and isinstance(value, dict)
    return is_arguments and set(value) <= _HARMLESS_ARGUMENTS
