"""Loading of networks: from a `Checkpoint` and its directory to a torch module with weights."""

from __future__ import annotations

import functools
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from gpuclassify import hub
from gpuclassify.hub import Identity
from gpuclassify.models.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    LORA_APPLIED,
    check_is_lora,
    without_expressions,
)
from gpuclassify.models.checkpoint import (
    EMBEDDING,
    FIRST_TOKEN_LEVELS,
    OWN_MODULE,
    POOLED_HEADS,
    SCORE_AND_PROBABILITY,
    SEQUENCE_CLASSIFICATION,
    STATIC,
    TOKEN_CLASSIFICATION,
    Checkpoint,
    CheckpointError,
    OwnModule,
    position_limit,
)
from gpuclassify.models.networks import (
    FirstTokenHead,
    FirstTokenLevels,
    PooledEmbedding,
    PooledHeads,
    ScoreAndProbability,
    TokenAverage,
    refuse_wrong_outputs,
)
from gpuclassify.models.tensors import (
    LEGACY_BUFFERS,
    LOADED_BY_TRANSFORMERS,
    Shapes,
    check_digest,
    check_headers,
    compare_shapes,
    needed_tensors,
    refuse_wrong_tensors,
    shapes_of,
    unused_tensors,
)
from gpuclassify.models.tokenizer_backend import NO_LIMIT, load_backend
from gpuclassify.models.transformers_state import building_lock, quiet_transformers
from gpuclassify.settings.checks import install
from gpuclassify.settings.paths import exists

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Value = TypeVar("Value")

_UNLIMITED = 100_000  # tokenizers state "no limit" as a number with 31 digits
_DEFAULT_TOKENS = 512  # maximum tokens of a custom module that states no length
_POSITION_TABLES = {"position_embeddings", "embed_positions", "positions_embed", "wpe"}
_OTHER_INPUTS = {"entity_embeddings", "vision_model", "vision_tower", "visual"}


def load_module(
    checkpoint: Checkpoint,
    directory: Path,
    dtype: torch.dtype,
    custom: OwnModule | None = None,
    adapter_directory: Path | None = None,
) -> nn.Module:
    """Build the network of a checkpoint, and load its weights from `directory`, on the CPU.

    The network is in evaluation mode, without gradients. Its weights have the `dtype`, but an
    embedding model's dense layers are float32. A LoRA adapter is read from `adapter_directory` and
    merged into the weights. Raises CheckpointError if tensors are missing, unknown or misshaped,
    unless `custom` loads the weights itself.
    """
    has_weights = custom is not None and custom.has_weights
    if not has_weights:
        check_digest(checkpoint, directory)
    with building_lock, quiet_transformers():
        if has_weights:
            module = _build(checkpoint, custom).to(dtype)
        elif checkpoint.layout == STATIC and checkpoint.sentence is not None:
            folder = directory / checkpoint.sentence.folder
            module = _load_average(folder, dtype, checkpoint.sentence.is_model2vec)
        elif checkpoint.layout in LOADED_BY_TRANSFORMERS:
            module = _load_by_transformers(checkpoint, directory, dtype, adapter_directory)
        else:
            module = _load_strictly(checkpoint, directory, dtype, custom)
        if checkpoint.sentence is not None:
            layers = [_load_dense(directory / folder) for folder in checkpoint.sentence.dense]
            module.dense = nn.Sequential(*layers)
    return module.eval().requires_grad_(False)


def longest_input(
    checkpoint: Checkpoint,
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainedConfig | None = None,
    module: nn.Module | None = None,
) -> int:
    """Return the default maximum number of tokens in a text, special tokens included.

    It is the smallest of the limits by the configuration, the tokenizer (or
    ``checkpoint.max_tokens``) and the tables of learned positions in `module`, or else a default.
    `config` is the configuration of a user's own network; it is not read for others.
    """
    sizes, is_own = checkpoint.sizes, checkpoint.layout == OWN_MODULE
    if is_own:
        sizes = {} if config is None else config.to_dict()
    limits = [position_limit(sizes)[0], None if module is None else _table_limit(module)]
    stated = checkpoint.max_tokens or tokenizer.model_max_length
    if stated < _UNLIMITED:
        limits.append(int(stated))
    usual = sizes.get("max_position_embeddings") or (_DEFAULT_TOKENS if is_own else NO_LIMIT)
    return min((limit for limit in limits if limit), default=usual)


def _table_limit(module: nn.Module) -> int | None:
    """Return the maximum number of tokens by a network's learned positions; None if it has none."""
    limits = []
    for name, part in module.named_modules():
        *path, last = name.split(".")
        table = getattr(part, "weight", None)
        if last in _POSITION_TABLES and table is not None and _OTHER_INPUTS.isdisjoint(path):
            padding = getattr(part, "padding_idx", None)
            first = getattr(part, "offset", 0) if padding is None else padding + 1
            limits.append(len(table) - first)
    return min(limits, default=None)


def check_tensors(
    checkpoint: Checkpoint, cache_dir: str | None = None, custom: OwnModule | None = None
) -> None:
    """Raise CheckpointError if a checkpoint's safetensors headers do not fit its network.

    `custom` is a network that the user builds, in place of the checkpoint's.
    """
    module = build_without_memory(checkpoint, custom)
    check_headers(checkpoint, shapes_of(module.state_dict()), cache_dir, _tied_names(module))


def build_without_memory(checkpoint: Checkpoint, custom: OwnModule | None = None) -> nn.Module:
    """Build a checkpoint's network, or `custom`, on torch's meta device, without weights."""
    with building_lock, torch.device("meta"):
        return _build(checkpoint, custom)


def _tied_names(module: nn.Module) -> list[list[str]]:
    """List the names of each tensor of a network; a tensor shared by layers has several."""
    names = defaultdict(list)
    for name, tensor in module.state_dict(keep_vars=True).items():
        names[id(tensor)].append(name)
    return list(names.values())


def check_own_module(checkpoint: Checkpoint, custom: OwnModule, unpacks: bool) -> None:
    """Run a user's network on torch's meta device, without weights, to find errors before a job.

    With `unpacks`, ``input_ids`` and ``attention_mask`` are keyword arguments, else one dict.
    Raises CheckpointError if the network does not take these, or has another number of outputs than
    labels. A network that cannot run without weights is not checked.
    """
    with building_lock, torch.device("meta"), torch.inference_mode():
        module = custom.build(checkpoint.config).eval()
        ids = torch.zeros(2, 4, dtype=torch.long)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        try:
            outputs = module(**inputs) if unpacks else module(inputs)
        except (NotImplementedError, RuntimeError):  # its forward needs values, not just shapes
            return
        except TypeError as err:
            taken = "one dict" if not unpacks else "input_ids and attention_mask"
            raise CheckpointError(
                f"{type(module).__name__}.forward does not take {taken} ({err}): change it, "
                f"or pass unpack_inference_batch={not unpacks}"
            ) from err
    refuse_wrong_outputs(module, outputs, 2, checkpoint.output_count)


def _build(checkpoint: Checkpoint, custom: OwnModule | None) -> nn.Module:
    if custom is not None:
        return custom.build(checkpoint.config)
    if checkpoint.layout not in (SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION):
        backbone = random_backbone(checkpoint.sizes, checkpoint.identity.name)
        if checkpoint.layout == EMBEDDING:
            return backbone
        if checkpoint.layout == POOLED_HEADS:
            return PooledHeads(backbone, [size for _, size in checkpoint.heads])
        if checkpoint.layout == FIRST_TOKEN_LEVELS:
            return FirstTokenLevels(backbone, checkpoint.output_count)
        if checkpoint.layout == SCORE_AND_PROBABILITY:
            return ScoreAndProbability(backbone)
        return FirstTokenHead(backbone, checkpoint.output_count)
    config = network_config(checkpoint.sizes, checkpoint.identity.name)
    return new_network(_auto_class(checkpoint), config, checkpoint.identity.name)


def _auto_class(checkpoint: Checkpoint) -> Any:
    import transformers

    if checkpoint.sentence is not None:
        return transformers.AutoModel
    if checkpoint.layout == TOKEN_CLASSIFICATION:
        return transformers.AutoModelForTokenClassification
    return transformers.AutoModelForSequenceClassification


def random_backbone(sizes: dict[str, Any], owner: str) -> nn.Module:
    """Build a transformers network of these sizes, without a head, with random float32 weights."""
    from transformers import AutoModel

    return new_network(AutoModel, network_config(sizes, owner), owner)


def new_network(loader: Any, config: PretrainedConfig, owner: str) -> Any:
    """Build a network with random float32 weights by `loader`, a class such as `AutoModel`."""
    if type(config) not in loader._model_mapping:
        kind = loader.__name__.removeprefix("AutoModel").removeprefix("For") or "encoder"
        raise CheckpointError(
            f"{owner} is a {config.model_type} model, for which transformers has no {kind} class"
        )
    try:
        return loader.from_config(config, dtype=torch.float32)
    except Exception as err:  # transformers and torch raise various errors for wrong sizes
        raise CheckpointError(
            f"transformers builds no network by config.json of {owner} "
            f"({type(err).__name__}: {err}): take the file from whoever made the model"
        ) from err


def network_config(sizes: dict[str, Any], owner: str) -> Any:
    """Convert a network's parsed ``config.json`` to a transformers configuration object."""
    from transformers import CONFIG_MAPPING

    try:
        config_type = CONFIG_MAPPING[sizes["model_type"]]
    except (KeyError, TypeError) as err:
        raise CheckpointError(
            f"{owner} has model_type {sizes.get('model_type')!r}, which this "
            "version of transformers does not know: upgrade transformers, or convert the model"
        ) from err
    try:
        return config_type.from_dict(sizes)
    except Exception as err:  # its type checks raise various errors
        raise CheckpointError(
            f"config.json of {owner} is none of a {sizes['model_type']} model ({err}): take the "
            "file from whoever made the model"
        ) from err


def _load_strictly(
    checkpoint: Checkpoint, directory: Path, dtype: torch.dtype, custom: OwnModule | None
) -> nn.Module:
    module = _build(checkpoint, custom)
    slices = read_weights(directory)
    tensors = {name: slices[name][...].to(dtype) for name in slices.keys() - LEGACY_BUFFERS}
    for names in _tied_names(module):  # safetensors stores a shared tensor under one name
        stored = next((tensors[name] for name in names if name in tensors), None)
        tensors |= {} if stored is None else dict.fromkeys(set(names) - tensors.keys(), stored)
    expected = shapes_of(module.state_dict())
    compare_shapes(checkpoint.identity.name, shapes_of(tensors), expected)
    module.load_state_dict(tensors, assign=True)
    return module.to(dtype)


def read_weights(directory: Path) -> dict[str, Any]:
    """Open the safetensors files in a model's directory; return lazy slices of tensors by name.

    Indexing a slice with ``[...]`` reads the tensor. Only files that cannot change are mapped into
    memory: an overwritten file would change the model, and one cut short would end the process.
    """
    slices: dict[str, Any] = {}
    for path, is_fixed in hub.weights_paths(directory).items():
        file = safe_open(path, framework="pt", backend="mmap" if is_fixed else "pread")
        slices |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    return slices


def _load_average(folder: Path, dtype: torch.dtype, is_model2vec: bool) -> TokenAverage:
    tensors = {name: part[...] for name, part in read_weights(folder).items()}
    if not is_model2vec:
        return TokenAverage(tensors["embedding.weight"].to(dtype))
    vectors = tensors["embeddings"]
    if "mapping" in tensors:
        rows = tensors["mapping"].long()
        if rows.min() < 0 or rows.max() >= len(vectors):
            raise CheckpointError(
                f"the mapping of tokens to rows has numbers from {rows.min()} to {rows.max()}, and "
                f"the embeddings have {len(vectors):,} rows: save the model in {folder} again"
            )
        vectors = vectors[rows]
    if "weights" in tensors:
        if len(tensors["weights"]) != len(vectors):
            raise CheckpointError(
                f"the weights are of {len(tensors['weights']):,} tokens, and the embeddings of "
                f"{len(vectors):,}: save the model in {folder} again"
            )
        vectors = vectors.double() * tensors["weights"].reshape(len(vectors), 1)
    backend = load_backend(folder / "tokenizer.json", folder / "tokenizer.json")
    model, tokens = json.loads(backend.to_str())["model"], backend.get_vocab()
    unknown = model.get("unk_id", tokens.get(model.get("unk_token")))
    return TokenAverage(vectors.to(dtype), unknown, int(np.median(list(map(len, tokens)))))


def _load_dense(folder: Path) -> nn.Module:
    """Load a dense layer of sentence-transformers from a folder: float32, with its activation."""
    tensors = {name: part[...].float() for name, part in read_weights(folder).items()}
    weight, bias = tensors["linear.weight"], tensors.get("linear.bias")
    layer = nn.Linear(weight.shape[1], len(weight), bias is not None)
    layer.load_state_dict(
        {name.removeprefix("linear."): tensor for name, tensor in tensors.items()}
    )
    config = hub.read_json_file(folder / "config.json")
    name = config.get("activation_function", "Tanh").rpartition(".")[2]
    return nn.Sequential(layer, getattr(nn, name)())


def _load_by_transformers(
    checkpoint: Checkpoint, directory: Path, dtype: torch.dtype, adapter: Path | None
) -> nn.Module:
    name, sentence = checkpoint.identity.name, checkpoint.sentence
    loader = _auto_class(checkpoint)
    needed = functools.partial(needed_tensors, checkpoint)
    config = network_config(checkpoint.sizes, name)
    loaded_as = dtype if checkpoint.base is None else torch.float32
    module = pretrained(loader, name, directory, loaded_as, config, needed)
    if checkpoint.base is not None and adapter is not None:
        module = _merge_adapter(module, checkpoint, adapter).to(dtype)
    module.config.use_cache = False  # the cache serves text generation only
    return module if sentence is None else PooledEmbedding(module, sentence.pooling)


def pretrained(
    loader: Any,
    owner: str,
    directory: Path,
    dtype: torch.dtype,
    config: PretrainedConfig,
    needed: Callable[[Iterable[str]], Collection[str]] = list,
    select: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Any:
    """Build a network by a transformers class, and load its weights from `directory` as `dtype`.

    `loader` is a class such as `AutoModel`. ``select(tensors)`` gets the files' tensors by name, as
    lazy slices, and returns those to load, with their names in the network. ``needed(names)``
    selects, out of names of the network's tensors, those that must be loaded. Raises
    CheckpointError if these are missing or misshaped, or if the files are of another architecture.
    """
    if exists(directory / ADAPTER_CONFIG):
        raise CheckpointError(
            f"{owner} has an adapter beside its weights ({ADAPTER_CONFIG}): move it to a folder of "
            "its own, and pass that as model= with base_model=, or to PromptClassifier as adapter="
        )
    with torch.device("meta"):
        network = new_network(loader, config, owner)
    module, report = type(network).from_pretrained(
        None,
        config=network.config,
        state_dict=select(read_weights(directory)),
        dtype=dtype,
        ignore_mismatched_sizes=True,  # all are reported below, instead of the first only
        output_loading_info=True,
    )
    is_whole = network.base_model is not network  # a backbone alone ignores tensors of heads
    parts = None if is_whole else {network.base_model_prefix, *dict(network.named_children())}
    shapes = {name: f"{tuple(a)} instead of {tuple(b)}" for name, a, b in report["mismatched_keys"]}
    refuse_wrong_tensors(
        owner,
        needed(report["missing_keys"]),
        [f"{name} {shapes[name]}" for name in sorted(needed(shapes))],
        unused_tensors(report["unexpected_keys"], parts),
    )
    return module


def _merge_adapter(network: PreTrainedModel, checkpoint: Checkpoint, directory: Path) -> nn.Module:
    with torch.device("meta"):
        shell = _build(checkpoint, None)
    config, tensors = load_adapter(directory, shell, network.device)
    adapted = import_peft().PeftModel(network, config, autocast_adapter_dtype=False)
    import_peft().set_peft_model_state_dict(adapted, tensors)
    if config.layer_replication:  # replicated layers share tensors, which merging would write to
        for part in adapted.modules():
            if isinstance(part, import_peft().tuners.tuners_utils.BaseTunerLayer):
                layer = part.get_base_layer()
                layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
    return adapted.merge_and_unload()


def check_adapter(
    checkpoint: Checkpoint,
    adapter: Identity,
    network: PreTrainedModel,
    cache_dir: str | None = None,
) -> None:
    """Raise CheckpointError if a LoRA adapter's safetensors headers do not fit its settings.

    `checkpoint` has the settings. `network`, the base model on torch's meta device, is changed.
    """
    shapes = _without_base(hub.read_tensor_shapes(adapter, ADAPTER_WEIGHTS, cache_dir=cache_dir))
    expected = adapter_shapes(json.loads(checkpoint.adapter_json), network, adapter.name)
    compare_shapes(f"{adapter.name} for {checkpoint.base}", shapes, expected)


def adapter_shapes(
    settings: Mapping[str, Any], network: PreTrainedModel, owner: str = ""
) -> Shapes:
    """Return the tensor shapes, by name, that a LoRA adapter with these settings has.

    `settings` is the parsed ``adapter_config.json``. `network`, the base model on torch's meta
    device, is changed. Raises CheckpointError if the settings do not fit it.
    """
    peft = import_peft()
    try:
        config = _lora_config(settings, network)
        with torch.device("meta"):
            adapted = peft.PeftModel(network, config)
    except Exception as err:  # peft and torch raise various errors for settings that do not fit
        raise CheckpointError(f"the adapter {owner} does not fit the model: {err}") from err
    # peft would add the model's own embeddings to an adapter of the last layer.
    return shapes_of(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))


def load_adapter(
    directory: Path, network: PreTrainedModel, device: torch.device
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Load a LoRA adapter: peft's configuration, and tensors by name on `device`.

    `network`, the base model on torch's meta device, is changed. Raises CheckpointError if files
    are missing, or do not fit the network.
    """
    missing = [n for n in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not exists(directory / n)]
    if missing:
        raise CheckpointError(
            f"the adapter in {directory} has no {' and no '.join(missing)}: save it with peft's "
            "save_pretrained"
        )
    settings = hub.read_json_file(directory / ADAPTER_CONFIG)
    check_is_lora(settings, str(directory))
    config = _lora_config(settings, network)
    expected = adapter_shapes(settings, network, str(directory))
    tensors = _without_base(load_file(directory / ADAPTER_WEIGHTS, device=str(device)))
    compare_shapes(str(directory), shapes_of(tensors), expected)
    return config, tensors


def import_peft() -> ModuleType:
    """Import and return peft; without it, raise an error that says how to install it."""
    try:
        import peft
    except ModuleNotFoundError as err:
        raise ModuleNotFoundError(
            f"adapters need {err.name}, which is not here: {install('safety')}",
            name=err.name,
        ) from err
    return peft


def _lora_config(settings: Mapping[str, Any], network: PreTrainedModel) -> Any:
    """Convert a parsed ``adapter_config.json`` to peft's `LoraConfig` for the base `network`."""
    names = itertools.chain(network.named_modules(), network.named_parameters())
    settings = without_expressions(settings, (name for name, _ in names))
    # Some initializations of an adapter would change the base weights.
    fixed = {"inference_mode": True, "init_lora_weights": False}
    peft = import_peft()
    config = peft.LoraConfig.from_peft_type(**{**settings, **fixed})
    if left := [name for name in LORA_APPLIED - vars(config).keys() if settings.get(name)]:
        raise CheckpointError(f"peft {peft.__version__} does not apply {left}: upgrade peft")
    return config


def _without_base(tensors: Mapping[str, Value]) -> dict[str, Value]:
    # peft may save an adapter and tensors of its base model in one file.
    return {name: value for name, value in tensors.items() if ".base_layer.weight" not in name}
