"""Validation of a LoRA adapter's ``adapter_config.json``, without torch.

The library peft allocates whatever sizes the settings state, so these are bounded. It also matches
some settings as regular expressions, which can take hours if they come from a stranger, so these
are replaced by the names that they match.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gpuclassify.hub import CheckpointError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Fields of peft's LoraConfig without effect on a trained adapter.
LORA_WITHOUT_EFFECT = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
    *("revision", "inference_mode", "lora_dropout", "megatron_core", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
    "runtime_config",
}
# Fields that peft applies to a loaded adapter.
LORA_APPLIED = {
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias"),
    *("target_modules", "exclude_modules", "target_parameters", "layers_to_transform", "bias"),
    *("layers_pattern", "layer_replication", "modules_to_save", "trainable_token_indices"),
    *("fan_in_fan_out", "ensure_weight_tying", "use_bdlora", "kasa_config", "init_lora_weights"),
}
# Fields that are refused, with reason and cure.
_PLAIN = "train a plain LoRA adapter, or take the plain one if its publisher has both"
_MERGED = "merge it by peft's merge_and_unload, and pass the saved model"
LORA_REFUSED = {
    "alora_invocation_tokens": f"it would work from these tokens on alone: {_PLAIN}",
    "arrow_config": f"it chooses among several adapters: {_PLAIN}",
    "megatron_config": f"it is for layers of Megatron: {_PLAIN}",
    "monteclora_config": f"it has tensors of its training: {_MERGED}",
    "use_qalora": f"it is for weights that GPTQ quantised: {_PLAIN}",
}
# Values of init_lora_weights that leave the base model's weights unchanged.
_PLAIN_STARTS = {"true", "false", "gaussian", "eva", "orthogonal", "mica"}
# Last layer of transformers' heads for texts; peft saves it whole, under the head's name.
LAST_LAYER = re.compile(
    r"(^|\.)(score|classifier|classification_head|logits_proj|sequence_summary\.summary|final_layer)"
    r"(\.(out_proj|linear_out))?\.weight$"
)
_MOST_NAMES, _MOST_PARTS, _MOST_LAYERS = 5_000, 100, 1_000
_MOST_RANK, _MOST_ALPHA = 65_536, 1_000_000
_MOST_VALUES = 200  # distinct ranks; peft tries them one after another for every module
_NAME = re.compile(r"[\w.-]+")
_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 < value <= _MOST_RANK


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _MOST_ALPHA


def _is_pattern_of(fits: Callable[[Any], bool], value: Any) -> bool:
    if not isinstance(value, dict) or len(value) > _MOST_NAMES:
        return False
    return len({*value.values()}) <= _MOST_VALUES and all(map(fits, value.values()))


def _are_texts(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return len(texts) <= _MOST_NAMES and all(isinstance(text, str) for text in texts)


def _are_names(value: Any) -> bool:
    names = [value] if isinstance(value, str) else list(value)
    return len(names) <= _MOST_PARTS and all(_NAME.fullmatch(name) for name in names)


def _are_numbers(value: Any) -> bool:
    numbers = value if isinstance(value, list) else [value]
    return len(numbers) <= _MOST_LAYERS and all(type(number) is int for number in numbers)


def _are_layers(value: Any) -> bool:
    pairs = [(start, end) for start, end in value if _are_numbers([start, end])]
    is_ordered = len(pairs) == len(value) and all(0 <= start <= end for start, end in pairs)
    return is_ordered and sum(end - start for start, end in pairs) <= _MOST_LAYERS


_NAMES = f"at most {_MOST_PARTS} plain names"
# Allowed values of a setting, in words and as a check.
_BOUNDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "r": (f"a whole number from 1 to {_MOST_RANK:,}", _is_rank),
    "lora_alpha": (f"a number up to {_MOST_ALPHA:,}", _is_alpha),
    "rank_pattern": (
        f"at most {_MOST_NAMES:,} names, with up to {_MOST_VALUES} different ranks",
        lambda value: _is_pattern_of(_is_rank, value),
    ),
    "alpha_pattern": (
        f"at most {_MOST_NAMES:,} names, with up to {_MOST_VALUES} different numbers",
        lambda value: _is_pattern_of(_is_alpha, value),
    ),
    "target_modules": (f"a regular expression, or up to {_MOST_NAMES:,} names", _are_texts),
    "exclude_modules": (f"a regular expression, or up to {_MOST_NAMES:,} names", _are_texts),
    "modules_to_save": (_NAMES, _are_names),
    "layers_pattern": (_NAMES, _are_names),
    "target_parameters": (_NAMES, _are_names),
    "trainable_token_indices": (
        f"token ids, or {_NAMES} with token ids each",
        lambda value: not isinstance(value, dict) or _are_names(value),
    ),
    "layers_to_transform": (f"at most {_MOST_LAYERS:,} numbers of layers", _are_numbers),
    "layer_replication": (
        f"pairs of a first layer and the layer after the last, at most {_MOST_LAYERS:,} in all",
        _are_layers,
    ),
}


def check_is_lora(settings: Mapping[str, Any], name: str) -> None:
    """Raise CheckpointError unless an adapter is a LoRA adapter with supported settings only.

    `settings` is the parsed ``adapter_config.json``. `name` is the adapter's name, for messages.
    """
    peft_type = settings.get("peft_type")
    if peft_type != "LORA":
        raise CheckpointError(
            f"the adapter {name} has peft_type {peft_type!r}, and only 'LORA' is known: "
            "name a LoRA adapter"
        )
    for field, value in settings.items():
        values = value.values() if isinstance(value, dict) else [value]
        if field not in LORA_WITHOUT_EFFECT | LORA_APPLIED and any(values):
            unknown = "it is not known here: upgrade gpuclassify, or remove it if it has no effect"
            raise CheckpointError(
                f"the adapter {name} has {field}={value!r}, which is not applied, because "
                f"{LORA_REFUSED.get(field, unknown)}"
            )
    start = settings.get("init_lora_weights", True)
    if str(start).lower() not in _PLAIN_STARTS:
        raise CheckpointError(
            f"the adapter {name} has init_lora_weights={start!r}, which changed the base model's "
            "weights before training, so it does not fit them: save it anew where it was trained, "
            "by save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    for field, (allowed, fits) in _BOUNDS.items():
        value = settings.get(field)
        try:
            is_within = value is None or fits(value)
        except (TypeError, ValueError):  # a value of another type
            is_within = False
        if not is_within:
            raise CheckpointError(
                f"the adapter {name} has {field}={reprlib.repr(value)}, which must be {allowed}: "
                f"{_PLAIN}"
            )


def without_expressions(settings: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a LoRA adapter's settings with regular expressions replaced by the names they match.

    `names` are the names of the network's modules and parameters. The keys of ``rank_pattern`` and
    ``alpha_pattern`` become expressions that match the names literally. Raises CheckpointError for
    an expression that cannot be matched in linear time.
    """
    replicated = sum(end - start for start, end in settings.get("layer_replication") or ())
    known = {*names}
    for template in {_LAYER_NUMBER.sub(".{}", name, count=1) for name in known if replicated}:
        known |= {template.replace("{}", str(layer), 1) for layer in range(replicated)}
    import pyarrow as pa  # imported here, so that commands without adapters start faster
    import pyarrow.compute as pc

    texts, plain = pa.array(sorted(known), pa.string()), dict(settings)

    def matches(expression: str, field: str) -> list[str]:
        try:
            return texts.filter(pc.match_substring_regex(texts, expression)).to_pylist()
        except pa.ArrowInvalid as err:
            raise CheckpointError(
                f"the adapter's {field} has the regular expression {reprlib.repr(expression)}, "
                f"which cannot be matched in linear time ({err}): write the modules' names"
            ) from err

    for field in ("target_modules", "exclude_modules"):
        value = settings.get(field)
        if isinstance(value, str) and value.lower() != "all-linear":
            plain[field] = matches(rf"^(?:{value})$", field)
    for field in ("rank_pattern", "alpha_pattern"):
        by_name: dict[str, Any] = {}
        for key, value in (settings.get(field) or {}).items():  # the first match wins
            for name in matches(rf"^(.*\.)?({key})$", field):
                by_name.setdefault(name, value)
        by_value: dict[Any, list[str]] = {}
        for name, value in by_name.items():
            by_value.setdefault(value, []).append(re.escape(name))
        # peft allows any prefix that ends with a dot before a key.
        plain[field] = {rf"(?<!\.)(?:{'|'.join(keys)})": v for v, keys in by_value.items()}
    return plain
