"""What a checkpoint's sentence-transformers files say: pooling, length, prompts. No torch.

They are ``modules.json`` (what runs after what), ``config.json`` in the pooling module's folder,
``sentence_bert_config.json`` (how texts are tokenized) and ``config_sentence_transformers.json``
(prompts). What this package would run differently is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuclassify import hub
from gpuclassify.checks import nearest
from gpuclassify.hub import Identity
from gpuclassify.models.checkpoint import EMBEDDING, Checkpoint, CheckpointError

POOLINGS = ("mean", "cls", "last")
_POOLING_NAMES = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
# How older releases spell them: one flag a mode.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_EMBEDDING_FEATURE = "sentence_embedding"
_MODULES = "modules.json"
_PROMPTS = "config_sentence_transformers.json"
# The first that is there counts; newer releases write the first name whatever the architecture.
_TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Settings of the Transformer module: those that are read, and those that change no embedding of
# `encode` (some speed the module up, some apply to `encode_query` and `encode_document` only).
_HARMLESS = {
    "max_seq_length",
    "do_lower_case",
    "unpad_inputs",
    "query_length",
    "document_length",
    "query_expansion",
}
_HARMLESS_ARGUMENTS = {
    "add_pooling_layer",
    "attn_implementation",
    "dtype",
    "torch_dtype",
    "trust_remote_code",
}
_PLAIN = {
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
}


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


def read_embedding_checkpoint(
    identity: Identity,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    cache_dir: str | None = None,
) -> Checkpoint:
    """Describe the model at `identity` as one that embeds texts.

    Parameters
    ----------
    identity : Identity
    pooling : {"mean", "cls", "last"}, optional
        Instead of what the model's files say.
    normalize : bool, optional
        Instead of what the model's files say.
    cache_dir : str, optional

    Returns
    -------
    Checkpoint
        Without sentence-transformers files, a model pools as that library does then: the last
        token of a causal language model, the mean of any other, not normalised.

    Raises
    ------
    CheckpointError
        No ``config.json`` with the network's sizes, or modules or settings that would give other
        embeddings than those of sentence-transformers.
    """
    reader = _Reader(identity, cache_dir)
    config = _sizes(reader)
    modules = reader.modules()
    _check_modules(modules, identity.name)
    pooling_config = reader.pooling_config(modules[1]) if modules else {}
    reader.check_normalization(modules[2:])
    transformer = reader.transformer_settings()
    prompts, default_prompt = reader.prompts()
    sentence = SentenceModel(
        pooling=pooling or _pooling(pooling_config, config, identity.name),
        is_normalized=len(modules) == 3 if normalize is None else normalize,
        max_tokens=transformer.get("max_seq_length"),
        prompts=prompts,
        default_prompt=default_prompt,
        pools_prompt=pooling_config.get("include_prompt", True),
    )
    return Checkpoint(identity, EMBEDDING, (), EMBEDDING, json.dumps(config), sentence=sentence)


@dataclass(frozen=True)
class _Reader:
    """The files of one model, as far as it has them."""

    identity: Identity
    cache_dir: str | None

    def read(self, filename: str) -> dict[str, Any] | None:
        return hub.read_json(self.identity, filename, cache_dir=self.cache_dir)

    def modules(self) -> list[dict[str, Any]]:
        """The modules in order; none if the model is not one of sentence-transformers."""
        text = hub.read_text(self.identity, _MODULES, cache_dir=self.cache_dir)
        if text is None:
            return []
        try:
            modules = json.loads(text)
            return [{"path": entry["path"], "type": entry["type"]} for entry in modules]
        except (ValueError, TypeError, KeyError) as err:
            raise CheckpointError(
                f"{_MODULES} of {self.identity.name} is no list of modules with a path and a type "
                f"({err!r}): save the model again with sentence-transformers"
            ) from err

    def pooling_config(self, module: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of the pooling module."""
        filename = f"{module['path']}/config.json"
        config = self.read(filename)
        if config is None:
            raise CheckpointError(
                f"{_MODULES} of {self.identity.name} names {module['path']!r}, and {filename} is "
                "not there: save the model again with sentence-transformers, or copy the folder too"
            )
        return config

    def check_normalization(self, modules: list[dict[str, Any]]) -> None:
        """Refuse a module that normalises anything else than the text's embedding."""
        for module in modules:
            config = self.read(f"{module['path']}/config.json") or {}
            if {*config.values()} - {_EMBEDDING_FEATURE, None}:
                raise CheckpointError(
                    f"{module['path']} of {self.identity.name} has the settings {config}, and this "
                    f"package normalises {_EMBEDDING_FEATURE!r} alone: use sentence-transformers "
                    "for this model"
                )

    def transformer_settings(self) -> dict[str, Any]:
        """How texts are tokenized, checked."""
        files = hub.list_files(self.identity, cache_dir=self.cache_dir)
        filename = next((name for name in _TRANSFORMER_FILES if name in files), None)
        settings = (self.read(filename) or {}) if filename else {}
        for name, value in settings.items():
            if not _is_plain(name, value):
                raise CheckpointError(
                    f"{filename} of {self.identity.name} sets {name!r} to {value!r}, which this "
                    "package does not do: use sentence-transformers for this model"
                )
        if settings.get("do_lower_case") and not self._is_uncased():
            raise CheckpointError(
                f"{filename} of {self.identity.name} asks for lower-case texts, and its "
                "tokenizer_config.json does not: set do_lower_case in both, or lower the column"
            )
        return settings

    def prompts(self) -> tuple[tuple[tuple[str, str], ...], str | None]:
        """Name and text of each prompt, and the default one's name."""
        config = self.read(_PROMPTS) or {}
        name = self.identity.name
        kind = config.get("model_type", "SentenceTransformer")
        if kind != "SentenceTransformer":
            raise CheckpointError(
                f"{name} is a {kind} by its {_PROMPTS}: an Embedder takes a SentenceTransformer"
            )
        if config.get("truncate_dim") is not None:
            raise CheckpointError(
                f"{_PROMPTS} of {name} cuts embeddings to {config['truncate_dim']} dimensions, "
                "which this package does not do: use sentence-transformers for this model"
            )
        prompts = {key: text or "" for key, text in (config.get("prompts") or {}).items()}
        default = config.get("default_prompt_name")
        if default is not None and default not in prompts:
            raise CheckpointError(
                f"{_PROMPTS} of {name} names the default prompt {default!r}, and its prompts are "
                f"{sorted(prompts)}: correct the file"
            )
        return tuple(prompts.items()), default

    def _is_uncased(self) -> bool:
        return (self.read("tokenizer_config.json") or {}).get("do_lower_case") is True


def _sizes(reader: _Reader) -> dict[str, Any]:
    """The network's ``config.json``."""
    config, name = reader.read("config.json"), reader.identity.name
    if reader.read("adapter_config.json") is not None:
        raise CheckpointError(
            f"{name} is an adapter of another model: merge the two and save the result"
        )
    if config is None or "model_type" not in config or "base_model" in config:
        raise CheckpointError(
            f"{name} has no config.json with a network's model_type and sizes: pass a model that "
            "transformers or sentence-transformers saved"
        )
    if config.get("is_encoder_decoder"):
        raise CheckpointError(
            f"{name} is an encoder with a decoder ({config['model_type']}): an Embedder takes a "
            "model that has one of the two"
        )
    return config


def _check_modules(modules: list[dict[str, Any]], name: str) -> None:
    """Refuse other modules than Transformer, Pooling and Normalize in this order."""
    kinds = [_kind(module["type"]) for module in modules]
    expected = ["Transformer", "Pooling", "Normalize"]
    for place, kind in enumerate(kinds):
        if kind not in expected[place : place + 1]:
            raise CheckpointError(
                f"{_MODULES} of {name} has {modules[place]['type']} in place {place}, and this "
                f"package runs {', then '.join(expected)}: use sentence-transformers for this model"
            )
    if len(kinds) == 1:
        raise CheckpointError(f"{_MODULES} of {name} has no Pooling: add one, or remove the file")
    if modules and modules[0]["path"]:
        raise CheckpointError(
            f"{_MODULES} of {name} has its Transformer in the folder {modules[0]['path']!r}: move "
            'its files to the top of the model and set its path to ""'
        )


def _kind(module_type: str) -> str:
    """The class's name, or the whole path of a class that sentence-transformers lacks."""
    package, _, _ = module_type.partition(".")
    is_known = package == "sentence_transformers"
    return module_type.rpartition(".")[2] if is_known else module_type


def _pooling(pooling_config: Mapping[str, Any], config: Mapping[str, Any], name: str) -> str:
    if not pooling_config:
        return "last" if _is_causal(config) else "mean"
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


def _is_causal(config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures") or [""]
    return architectures[0].endswith("ForCausalLM") and config.get("is_causal", True)


def _is_plain(name: str, value: Any) -> bool:
    """Whether a setting of the Transformer module is one that changes nothing."""
    if name in _HARMLESS or value is None or value == _PLAIN.get(name):
        return True
    is_arguments = name.endswith(("_args", "_kwargs")) and isinstance(value, dict)
    return is_arguments and set(value) <= _HARMLESS_ARGUMENTS
