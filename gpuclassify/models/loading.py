"""From a described checkpoint and its directory to a model that is ready to run."""

from __future__ import annotations

import contextlib
import json
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from gpuclassify.models.checkpoint import (
    EMBEDDING,
    OWN_MODULE,
    POOLED_HEADS,
    SEQUENCE_CLASSIFICATION,
    Checkpoint,
    CheckpointError,
    position_limit,
)
from gpuclassify.models.networks import (
    FirstTokenHead,
    PooledEmbedding,
    PooledHeads,
    refuse_wrong_outputs,
)
from gpuclassify.models.tensors import (
    LEGACY_BUFFERS,
    LOADED_BY_TRANSFORMERS,
    check_digest,
    check_headers,
    compare_shapes,
    needed_tensors,
    refuse_wrong_tensors,
)

Build = Callable[[dict[str, Any]], nn.Module]

_UNLIMITED = 100_000  # tokenizers state "no limit" as a number with 31 digits
_DEFAULT_TOKENS = 512

# transformers' loading and building switch process-wide state (default dtype, progress bars).
building_lock = threading.Lock()


def load_module(
    checkpoint: Checkpoint,
    directory: Path,
    dtype: torch.dtype,
    build: Build | None = None,
    has_weights: bool = False,
) -> nn.Module:
    """The checkpoint's module with the weights in `directory`, on the CPU, as `dtype`.

    For the layout "own_module", `build` makes it from the parsed ``config.json``; it `has_weights`
    if it comes with them, wherever it has them from.

    Raises
    ------
    CheckpointError
        Tensors are missing, unknown or of another shape, or not those that were saved.
    """
    if not has_weights:
        check_digest(checkpoint, directory)
    with building_lock, quiet_transformers():
        if build is not None and has_weights:
            module = build(checkpoint.config).to(dtype)
        elif checkpoint.layout in LOADED_BY_TRANSFORMERS:
            module = _load_by_transformers(checkpoint, directory, dtype)
        else:
            module = _load_strictly(checkpoint, directory, dtype, build)
    return module.eval().requires_grad_(False)


def load_tokenizer(checkpoint: Checkpoint, directory: Path) -> Any:
    """A fresh tokenizer of the checkpoint.

    Raises
    ------
    CheckpointError
        The directory has none that loads.
    """
    from transformers import AutoTokenizer

    most = None if checkpoint.sentence is None else checkpoint.sentence.max_tokens
    try:
        with building_lock, quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(
                directory,
                local_files_only=True,
                trust_remote_code=False,
                **({} if most is None else {"model_max_length": most}),
            )
        own_files = set(tokenizer.vocab_files_names.values())  # none if it works on bytes
        files = own_files | {"tokenizer.json", "tokenizer.model"}
        if own_files and not any((directory / name).exists() for name in files):
            # Without any, transformers makes a tokenizer to which every word is unknown.
            raise FileNotFoundError(f"none of {sorted(files)} is there")
    except (OSError, ValueError, KeyError, ImportError) as err:
        present = sorted(path.name for path in directory.iterdir())
        raise CheckpointError(
            f"no tokenizer of {checkpoint.identity.name} loads from its files {present}: save it "
            "beside the model with tokenizer.save_pretrained"
        ) from err
    return tokenizer


def longest_input(checkpoint: Checkpoint, tokenizer: Any, config: Any = None) -> int:
    """Most tokens of a text, special ones included, unless the user asks for another length.

    `config` is that of a module of one's own, of which the checkpoint need not tell sizes.
    """
    sizes = checkpoint.sizes
    if checkpoint.layout == OWN_MODULE:
        sizes = {} if config is None else config.to_dict()
    limits = [position_limit(sizes)[0]]
    if tokenizer.model_max_length < _UNLIMITED:
        limits.append(int(tokenizer.model_max_length))
    return min((limit for limit in limits if limit), default=_DEFAULT_TOKENS)


def check_tensors(
    checkpoint: Checkpoint, cache_dir: str | None = None, build: Build | None = None
) -> None:
    """Compare the safetensors headers with what the architecture needs, before any work starts.

    CheckpointError names the tensors that are missing, unknown or of another shape.
    """
    module = _build_without_memory(checkpoint, build)
    check_headers(checkpoint, _shapes(module.state_dict()), cache_dir, _tied_names(module))


def expected_shapes(
    checkpoint: Checkpoint, build: Build | None = None
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that the architecture needs, found without memory."""
    return _shapes(_build_without_memory(checkpoint, build).state_dict())


def _build_without_memory(checkpoint: Checkpoint, build: Build | None) -> nn.Module:
    with building_lock, torch.device("meta"):
        return _build(checkpoint, build)


def _tied_names(module: nn.Module) -> list[list[str]]:
    """All names of each tensor; safetensors keeps a tensor once, under one of its names."""
    names = defaultdict(list)
    for name, tensor in module.state_dict(keep_vars=True).items():
        names[id(tensor)].append(name)
    return list(names.values())


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def check_own_module(checkpoint: Checkpoint, build: Build, unpacks: bool) -> None:
    """Run a module of one's own on a device without memory, before any work starts.

    Raises
    ------
    CheckpointError
        Its forward takes other arguments, or gives another number of outputs than there are labels.
    """
    with building_lock, torch.device("meta"), torch.inference_mode():
        module = build(checkpoint.config).eval()
        ids = torch.zeros(2, 4, dtype=torch.long)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        try:
            outputs = module(**inputs) if unpacks else module(inputs)
        except (NotImplementedError, RuntimeError):  # what it does needs values, not just shapes
            return
        except TypeError as err:
            taken = "one dict" if not unpacks else "input_ids and attention_mask"
            raise CheckpointError(
                f"{type(module).__name__}.forward does not take {taken} ({err}): change it, "
                f"or pass unpack_inference_batch={not unpacks}"
            ) from err
    refuse_wrong_outputs(module, outputs, 2, checkpoint.output_count)


def _build(checkpoint: Checkpoint, build: Build | None) -> nn.Module:
    if build is not None:
        return build(checkpoint.config)
    if checkpoint.layout != SEQUENCE_CLASSIFICATION:
        backbone = random_backbone(checkpoint.sizes, checkpoint.identity.name)
        if checkpoint.layout == EMBEDDING:
            return backbone
        if checkpoint.layout == POOLED_HEADS:
            return PooledHeads(backbone, [size for _, size in checkpoint.heads])
        return FirstTokenHead(backbone, checkpoint.output_count)
    from transformers import AutoModelForSequenceClassification

    config = _config(checkpoint.sizes, checkpoint.identity.name)
    try:
        return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    except ValueError as err:
        raise CheckpointError(
            f"{checkpoint.identity.name} is a {checkpoint.sizes['model_type']} model, for which "
            "transformers has no sequence classification class"
        ) from err


def random_backbone(sizes: dict[str, Any], owner: str) -> nn.Module:
    """A transformers encoder of these sizes with random float32 weights.

    Raises
    ------
    CheckpointError
        transformers does not know the architecture; `owner` is the model that has it.
    """
    from transformers import AutoModel

    return AutoModel.from_config(_config(sizes, owner), dtype=torch.float32)


def _config(sizes: dict[str, Any], owner: str) -> Any:
    from transformers import CONFIG_MAPPING

    try:
        config_type = CONFIG_MAPPING[sizes["model_type"]]
    except KeyError as err:
        raise CheckpointError(
            f"{owner} has model_type {sizes.get('model_type')!r}, which this "
            "version of transformers does not know: upgrade transformers, or convert the model"
        ) from err
    return config_type.from_dict(sizes)


def _load_strictly(
    checkpoint: Checkpoint, directory: Path, dtype: torch.dtype, build: Build | None
) -> nn.Module:
    module = _build(checkpoint, build)
    tensors = _read_tensors(directory, dtype)
    for names in _tied_names(module):
        held = next((tensors[name] for name in names if name in tensors), None)
        tensors |= {} if held is None else dict.fromkeys(set(names) - tensors.keys(), held)
    expected = module.state_dict()
    compare_shapes(checkpoint.identity.name, _shapes(tensors), _shapes(expected))
    module.load_state_dict(tensors, assign=True)
    return module.to(dtype)


def _load_by_transformers(checkpoint: Checkpoint, directory: Path, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModel, AutoModelForSequenceClassification

    sentence = checkpoint.sentence
    loader = AutoModelForSequenceClassification if sentence is None else AutoModel
    module, report = loader.from_pretrained(
        directory,
        config=_config(checkpoint.sizes, checkpoint.identity.name),
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        ignore_mismatched_sizes=True,  # reported below with all their names, instead of the first
        output_loading_info=True,
    )
    refuse_wrong_tensors(
        checkpoint.identity.name,
        needed_tensors(checkpoint, report["missing_keys"]),
        [f"{name} {tuple(a)} instead of {tuple(b)}" for name, a, b in report["mismatched_keys"]],
        [],  # transformers itself ignores what it does not know
    )
    module.config.use_cache = False  # which decoders fill to generate text
    return module if sentence is None else PooledEmbedding(module, sentence.pooling)


def _read_tensors(directory: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    tensors = {}
    for name in names:
        with safe_open(directory / name, framework="pt") as file:
            names_here = set(file.keys()) - LEGACY_BUFFERS
            tensors.update({key: file.get_tensor(key).to(dtype) for key in names_here})
    return tensors


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without progress bars, load reports and libraries' notes to each other: no worker's log is
    a place for them.
    """
    from transformers.utils import logging as transformers_logging

    had_bars = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
