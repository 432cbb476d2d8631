"""From a described checkpoint and its directory to a model that is ready to run."""

from __future__ import annotations

import contextlib
import json
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from gpuclassify.models.checkpoint import (
    EMBEDDING,
    POOLED_HEADS,
    SEQUENCE_CLASSIFICATION,
    Checkpoint,
    CheckpointError,
)
from gpuclassify.models.deberta import Deberta
from gpuclassify.models.disentangled import speed_up_deberta
from gpuclassify.models.heads import PooledHeads
from gpuclassify.models.pooling import PooledEmbedding
from gpuclassify.models.tensors import (
    LEGACY_BUFFERS,
    LOADED_BY_TRANSFORMERS,
    compare_shapes,
    needed_tensors,
    refuse_wrong_tensors,
)

Build = Callable[[dict[str, Any]], nn.Module]

# transformers' loading and building switch process-wide state (default dtype, progress bars).
building_lock = threading.Lock()


def load_module(
    checkpoint: Checkpoint,
    directory: Path,
    dtype: torch.dtype,
    build: Build | None = None,
    is_reference: bool = False,
) -> nn.Module:
    """The checkpoint's module with the weights in `directory`, on the CPU, as `dtype`.

    Parameters
    ----------
    checkpoint : Checkpoint
    directory : Path
    dtype : torch.dtype
    build : callable, optional
        Makes the module from the parsed ``config.json``, for the layout "own_module".
    is_reference : bool
        Keep every forward as transformers has it.

    Raises
    ------
    CheckpointError
        Tensors are missing, unknown or of another shape.
    """
    with building_lock, quiet_transformers():
        if checkpoint.layout in LOADED_BY_TRANSFORMERS:
            module = _load_by_transformers(checkpoint, directory, dtype)
        else:
            module = _load_strictly(checkpoint, directory, dtype, build)
        module = module.eval().requires_grad_(False)
        if not is_reference:
            speed_up_deberta(module)
    return module


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
        if not _has_vocabulary(tokenizer, directory):
            raise FileNotFoundError(f"none of {sorted(_vocabulary_files(tokenizer))} is there")
    except (OSError, ValueError, KeyError, ImportError) as err:
        files = sorted(path.name for path in directory.iterdir())
        raise CheckpointError(
            f"no tokenizer of {checkpoint.identity.name} loads from its files {files}: save it "
            "beside the model with tokenizer.save_pretrained"
        ) from err
    return tokenizer


def _has_vocabulary(tokenizer: Any, directory: Path) -> bool:
    """Without any file transformers makes a tokenizer to which every word is unknown."""
    if not tokenizer.vocab_files_names:  # works on bytes or characters
        return True
    return any((directory / name).exists() for name in _vocabulary_files(tokenizer))


def _vocabulary_files(tokenizer: Any) -> set[str]:
    return {*tokenizer.vocab_files_names.values(), "tokenizer.json", "tokenizer.model"}


def expected_shapes(
    checkpoint: Checkpoint, build: Build | None = None
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that the architecture needs, found without memory."""
    with building_lock, torch.device("meta"):
        module = _build(checkpoint, build)
    return _shapes(module.state_dict())


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


def refuse_wrong_outputs(module: nn.Module, outputs: Any, rows: int, count: int) -> torch.Tensor:
    """The outputs as (rows, outputs); a module may give one number a row.

    Parameters
    ----------
    module : nn.Module
        For messages.
    outputs : Tensor, or an output of transformers with logits
    rows : int
        Texts that went in.
    count : int
        Outputs that a text must have; 0 for any number.

    Raises
    ------
    CheckpointError
        Any other shape.
    """
    found = getattr(outputs, "logits", outputs)
    if not isinstance(found, torch.Tensor):
        raise CheckpointError(
            f"{type(module).__name__}.forward gives a {type(outputs).__qualname__}: "
            "it must return a tensor (texts, outputs)"
        )
    if found.shape == (rows,):
        found = found[:, None]
    if found.ndim != 2 or len(found) != rows:
        raise CheckpointError(
            f"{type(module).__name__}.forward gives a tensor of shape {tuple(found.shape)} "
            f"for {rows} texts: it must return (texts, outputs)"
        )
    if count and found.shape[1] != count:
        raise CheckpointError(
            f"{type(module).__name__} gives {found.shape[1]} outputs a text, and config.json "
            f"names {count} labels: they must be as many"
        )
    return found


def _build(checkpoint: Checkpoint, build: Build | None) -> nn.Module:
    if build is not None:
        return build(checkpoint.config)
    from transformers import AutoModel, AutoModelForSequenceClassification

    config = _config(checkpoint)
    if checkpoint.layout != SEQUENCE_CLASSIFICATION:
        backbone = AutoModel.from_config(config, dtype=torch.float32)
        if checkpoint.layout == EMBEDDING:
            return backbone
        if checkpoint.layout == POOLED_HEADS:
            return PooledHeads(backbone, [size for _, size in checkpoint.heads])
        return Deberta(checkpoint.config, backbone)
    try:
        return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    except ValueError as err:
        raise CheckpointError(
            f"{checkpoint.identity.name} is a {checkpoint.sizes['model_type']} model, for which "
            "transformers has no sequence classification class"
        ) from err


def _config(checkpoint: Checkpoint) -> Any:
    from transformers import CONFIG_MAPPING

    sizes = checkpoint.sizes
    try:
        config_type = CONFIG_MAPPING[sizes["model_type"]]
    except KeyError as err:
        raise CheckpointError(
            f"{checkpoint.identity.name} has model_type {sizes.get('model_type')!r}, which this "
            "version of transformers does not know: upgrade transformers, or convert the model"
        ) from err
    return config_type.from_dict(sizes)


def _load_strictly(
    checkpoint: Checkpoint, directory: Path, dtype: torch.dtype, build: Build | None
) -> nn.Module:
    module = _build(checkpoint, build)
    tensors = _read_tensors(directory, dtype)
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
        config=_config(checkpoint),
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
