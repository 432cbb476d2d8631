"""Conversion of classification heads on embeddings, trained elsewhere, to this package's format.

Pickles are read by ``torch.load(weights_only=True)``, which runs none of their code.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpuclassify.models.checkpoint import CheckpointError, some_of
from gpuclassify.models.head_network import Backbone, HeadNetwork
from gpuclassify.settings.checks import check_ordered
from gpuclassify.settings.options import REGRESSION, SINGLE_LABEL, ProblemType, StrPath

if TYPE_CHECKING:
    import torch

PICKLES = (".pt", ".pth", ".ckpt", ".bin")
WEIGHT_NAMES, BIAS_NAMES = ("weight", "coef_", "coef"), ("bias", "intercept_", "intercept")
STATE_KEYS = ("state_dict", "model_state_dict", "model")

Layer = tuple[np.ndarray, np.ndarray]  # weight (outputs, inputs) and bias (outputs,)


class PublishedLayout(NamedTuple):
    """Known format of published classification heads: layer names, and settings that files lack."""

    name: str
    layers: tuple[str, ...]
    hidden_activation: str | None
    output_activation: str | None
    backbone: Backbone

    def fits(self, layers: Mapping[str, Layer]) -> bool:
        """Tell whether a file's layers have this format's names, 768 inputs and one output."""
        weights = [weight for weight, _ in layers.values()]
        is_wide = bool(weights) and weights[0].shape[1] == 768 and len(weights[-1]) == 1
        return tuple(layers) == self.layers and is_wide


PUBLISHED = (
    # JQL-AI/JQL-Annotation-Pipeline, src/utils/regression_head.py and embedder.py: a
    # LightningModule of two linear layers with a ReLU, on the normalized state of the first token.
    PublishedLayout(
        "JQL",
        ("layer1", "layer2"),
        "relu",
        None,
        Backbone("Snowflake/snowflake-arctic-embed-m-v2.0", None, "cls", True, "", 8192),
    ),
    # epfml/fineweb2-hq, src/fineweb2_hq/mlp.py and xlmr_embeddings.py: 768-256-1 with ReLU, dropout
    # and a final sigmoid, on the mean of the first 512 tokens.
    PublishedLayout(
        "FineWeb2-HQ",
        ("classifier.0", "classifier.3"),
        "relu",
        "sigmoid",
        Backbone("FacebookAI/xlm-roberta-base", None, "mean", False, "", 512),
    ),
)


def convert_head(
    source: StrPath,
    directory: StrPath,
    *,
    labels: Sequence[str] = (),
    problem_type: ProblemType | None = None,
    hidden_activation: str | None = None,
    output_activation: str | None = None,
    backbone: Mapping[str, Any] | None = None,
) -> tuple[HeadNetwork, str | None]:
    """Convert a file with a classification head to a directory that `HeadClassifier` reads.

    `source` is a safetensors, npz or torch file with dense layers. Returns the head, and the name
    of the published format that the file has ("JQL" or "FineWeb2-HQ"), or None. Activations and
    settings of `backbone` that are not passed come from that format. `backbone` has settings of the
    embedding model by name, as in `Backbone`. A head in `directory` is replaced, and another model
    refused.

    `labels` name the outputs in order; without labels, the single output is called "score".
    `problem_type` defaults to a single label for several labels, and else to a regression. Two
    labels may name the single output of a single-label classifier, the second label's logit; the
    first label's is 0. `output_activation` applies to regressions only; "none" means none.
    """
    path = Path(os.fspath(source)).expanduser()
    layers = _find_layers(path, _read_tensors(path))
    published = next((layout for layout in PUBLISHED if layout.fits(layers)), None)
    if published is not None:
        hidden_activation = hidden_activation or published.hidden_activation
        output_activation = output_activation or published.output_activation
    if len(layers) > 1 and hidden_activation is None:
        raise ValueError(
            f"{path} has {len(layers)} layers ({', '.join(layers)}), and no file says what stands "
            "between them: pass hidden_activation=, relu or tanh"
        )
    check_ordered("labels", labels)
    labels = tuple(labels) or ("score",)
    kind = problem_type or (SINGLE_LABEL if len(labels) > 1 else REGRESSION)
    if kind == SINGLE_LABEL and len(labels) == 2:
        last, (weight, bias) = list(layers.items())[-1]
        if len(weight) == 1:  # the first class gets a constant logit of 0
            layers[last] = np.vstack([np.zeros_like(weight), weight]), np.append(0, bias)
    settings = dict(backbone or {})
    if published is not None:
        made_on: Backbone | None = replace(published.backbone, **settings)
    elif settings and "model" not in settings:
        raise ValueError(f"{' and '.join(settings)} say how a model embeds: name it (model=)")
    else:
        made_on = Backbone(**settings) if settings else None
    has_end = kind == REGRESSION and output_activation != "none"
    head = HeadNetwork(
        layers=tuple(layers.values()),
        problem_type=kind,
        labels=labels,
        hidden_activation=hidden_activation,
        output_activation=output_activation if has_end else None,
        backbone=made_on,
    )
    head.save(directory)
    return head, None if published is None else published.name


def _read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Read the tensors of a head's file by name, in the order of its layers."""
    kind = path.suffix.lower()
    if kind in PICKLES:
        return _read_pickle(path)
    if kind not in _READERS:
        raise CheckpointError(
            f"{path} is none of .safetensors, .npz, {', '.join(PICKLES)}. Of a scikit-learn model "
            "save np.savez('head.npz', coef_=model.coef_, intercept_=model.intercept_)"
        )
    try:
        return _READERS[kind](path)
    except OSError:
        raise
    except Exception as err:  # readers raise various errors for other formats
        raise CheckpointError(f"{path} is no {kind} file of numbers: {err}") from err


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    from safetensors.torch import load_file  # numpy has no bfloat16

    by_name = load_file(path)

    # safetensors keeps no order, so names are sorted, "layers.10" after "layers.9".
    def natural(name: str) -> list[Any]:
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]

    return {name: _as_numpy(by_name[name]) for name in sorted(by_name, key=natural)}


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    with path.open("rb") as file, np.lib.npyio.NpzFile(file, allow_pickle=False) as arrays:
        return {name: array.astype(np.float64) for name, array in arrays.items()}


_READERS = {".safetensors": _read_safetensors, ".npz": _read_npz}


class _Omitted:
    """Stand-in for functions and classes that a pickle names; a call gives an empty dictionary."""

    def __new__(cls, *_: object) -> Any:
        return OrderedDict()


def _read_pickle(path: Path) -> dict[str, np.ndarray]:
    """Read a head's tensors from a pickle by name, without running its code; {} if there are none.

    Objects of other classes, which Lightning's checkpoints hold, become empty dictionaries.
    """
    import torch
    from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

    names: list[str] = []
    try:
        if zipfile.is_zipfile(path):
            names = get_unsafe_globals_in_checkpoint(path)
        with safe_globals([(_Omitted, name) for name in names]):
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as err:  # torch raises various errors for other formats
        holds = f"holds objects of {some_of(names)}, and " if names else ""
        raise CheckpointError(
            f"{path} {holds}cannot be read as tensors alone. If it is a checkpoint of torch that "
            'you trust, save its tensors: torch.save(torch.load(FILE, weights_only=False)["state_'
            'dict"], "head.pt")'
        ) from err
    candidates = [loaded]
    if isinstance(loaded, dict):
        candidates += [loaded.get(key) for key in STATE_KEYS]
    for candidate in candidates:
        tensors = candidate.items() if isinstance(candidate, dict) else ()
        arrays = {str(k): _as_numpy(v) for k, v in tensors if isinstance(v, torch.Tensor)}
        if arrays:
            return arrays
    return {}


def _find_layers(path: Path, tensors: Mapping[str, np.ndarray]) -> dict[str, Layer]:
    """Return a head's linear layers by name, in the order of `tensors`; a missing bias is zeros."""
    weights: dict[str, np.ndarray] = {}
    biases: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if kind in WEIGHT_NAMES and tensor.ndim in (1, 2):
            weights[layer] = np.atleast_2d(tensor)
        elif kind in BIAS_NAMES and tensor.ndim < 2:
            biases[layer] = np.atleast_1d(tensor)
    pairs = [(weights[layer], biases.get(layer)) for layer in weights]
    is_linear = all(bias is None or len(bias) == len(weight) for weight, bias in pairs)
    is_whole = biases.keys() <= weights.keys() and len(weights) + len(biases) == len(tensors)
    if not weights or not is_linear or not is_whole:
        described = ", ".join(f"{name} {tensor.shape}" for name, tensor in tensors.items())
        raise CheckpointError(
            f"{path} holds no head of linear layers; its tensors are {described or 'none'}. A "
            "head has a weight (outputs, inputs) and a bias (outputs,) for each layer, and no "
            "more"
        )
    zeros = {layer: np.zeros(len(weight), np.float32) for layer, weight in weights.items()}
    return {layer: (weight, (zeros | biases)[layer]) for layer, weight in weights.items()}


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to_dense().float().numpy()
