"""Classification head on embeddings: a few dense layers, stored as safetensors, run by numpy.

The directory or Hub repository of a head holds

``config.json``
    ``model_type`` "embedding_head", ``problem_type``, ``id2label``, ``hidden_activation``,
    ``output_activation``, and ``backbone``, the embedding model and its settings, or null. Also
    ``weights_sha256``, the digest of the file that ``transformers_weights`` names, if known.
``model.safetensors``
    ``layers.0.weight`` float32 (outputs, inputs), ``layers.0.bias`` (outputs,), ``layers.1.weight``
    and so on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from gpuclassify import hub
from gpuclassify.hub import Identity
from gpuclassify.hub.identity import matches
from gpuclassify.hub.saving import CONFIG, WEIGHTS, config_text, saving
from gpuclassify.models.activations import relu, sigmoid
from gpuclassify.models.checkpoint import Checkpoint, CheckpointError, labels_in_order, some_of
from gpuclassify.models.tensors import check_digest
from gpuclassify.settings.checks import nearest
from gpuclassify.settings.options import REGRESSION, ProblemType, StrPath

EMBEDDING_HEAD = "embedding_head"
Activation = Callable[[np.ndarray], np.ndarray]
HIDDEN_ACTIVATIONS: dict[str | None, Activation] = {
    None: np.asarray,
    "relu": relu,
    "tanh": np.tanh,
}
OUTPUT_ACTIVATIONS: dict[str | None, Activation] = {None: np.asarray, "sigmoid": sigmoid}
CONVERT = "`gpuclassify convert SOURCE DIRECTORY` makes a head's directory of such a file"


@dataclass(frozen=True)
class Backbone:
    """Embedding model that a classification head was trained on, with its settings.

    For `pooling` and later fields, None means the setting in the model's own files.
    """

    model: str  # Hub name or directory
    revision: str | None = None  # commit on the Hub
    pooling: str | None = None  # "mean", "cls" or "last"
    normalize: bool | None = None  # embeddings have length 1
    prompt: str | None = None  # prefix of every text
    max_seq_length: int | None = None  # tokens of a text that are read
    truncate_dim: int | None = None  # number of dimensions of an embedding that are kept


@dataclass(frozen=True)
class HeadCheckpoint(Checkpoint):
    """Description of a classification head on embeddings at a pinned revision, without weights."""

    widths: tuple[int, ...] = ()  # widths of embeddings, hidden layers and output

    @property
    def backbone(self) -> Backbone | None:
        """Embedding model that the head was trained on; None if its configuration names none."""
        described = self.config.get("backbone")
        return None if described is None else Backbone(**described)


@dataclass(frozen=True, eq=False)
class HeadNetwork:
    """Classification head in memory: dense layers that map embeddings of texts to outputs.

    Raises CheckpointError if its parts do not fit each other, or a weight is not finite.
    """

    # Weights (outputs, inputs) and biases (outputs,) of each dense layer; kept as float32.
    layers: tuple[tuple[np.ndarray, np.ndarray], ...]
    problem_type: ProblemType
    labels: tuple[str, ...]  # a name for each output
    hidden_activation: str | None = None  # "relu" or "tanh", between two layers
    # "sigmoid" for a regression whose score is a probability; outputs of other heads are logits.
    output_activation: str | None = None
    backbone: Backbone | None = None

    def __post_init__(self) -> None:
        layers = tuple(
            (np.ascontiguousarray(weight, np.float32), np.ascontiguousarray(bias, np.float32))
            for weight, bias in self.layers
        )
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "labels", tuple(self.labels))
        tensors = self.tensors()
        _check_config(self.config(), "the head")
        _check_widths({name: tensor.shape for name, tensor in tensors.items()}, self.labels, "it")
        if broken := [name for name, tensor in tensors.items() if not np.isfinite(tensor).all()]:
            raise CheckpointError(f"the head's {some_of(broken)} hold NaN or infinity")

    def apply(self, embeddings: np.ndarray) -> np.ndarray:
        """Compute outputs (texts, outputs), float32 for float32 embeddings (texts, width).

        They are logits or a regression's scores, after `output_activation` if there is one.
        """
        activate, values = HIDDEN_ACTIVATIONS[self.hidden_activation], embeddings
        for number, (weight, bias) in enumerate(self.layers):
            values = (activate(values) if number else values) @ weight.T + bias
        return OUTPUT_ACTIVATIONS[self.output_activation](values)

    def config(self) -> dict[str, Any]:
        """Return the head's ``config.json`` as a dictionary."""
        return {
            "model_type": EMBEDDING_HEAD,
            "problem_type": self.problem_type,
            "id2label": {str(number): label for number, label in enumerate(self.labels)},
            "hidden_activation": self.hidden_activation,
            "output_activation": self.output_activation,
            "backbone": None if self.backbone is None else asdict(self.backbone),
        }

    def tensors(self) -> dict[str, np.ndarray]:
        """Return weights and biases by their names in the file, such as "layers.0.weight"."""
        return {
            f"layers.{number}.{kind}": tensor
            for number, layer in enumerate(self.layers)
            for kind, tensor in zip(("weight", "bias"), layer, strict=True)
        }

    def save(self, directory: StrPath) -> Path:
        """Save the head in a directory, atomically replacing a head that is there.

        The directory is created if missing. A leading ``~`` means the home folder. Returns the
        directory. Raises FileExistsError if it holds another model.
        """
        folder = Path(os.fspath(directory)).expanduser()
        refuse_other_model(folder)
        with saving(folder) as unfinished:
            self.write(unfinished)
        return folder

    def write(self, folder: Path) -> None:
        """Write the head's ``config.json`` and ``model.safetensors`` into an existing folder."""
        from safetensors.numpy import save_file

        config = json.dumps(self.config(), indent=2, ensure_ascii=False)
        (folder / CONFIG).write_text(f"{config}\n", encoding="utf-8")
        save_file(self.tensors(), folder / WEIGHTS, metadata={"format": "np"})


def read_head(identity: Identity, *, cache_dir: str | None = None) -> HeadCheckpoint:
    """Describe the classification head at `identity`, without reading its weights.

    Raises CheckpointError if the model is no such head, or its files do not fit each other.
    """
    name, files = identity.name, hub.list_files(identity, cache_dir=cache_dir)
    if missing := [file for file in (CONFIG, WEIGHTS) if file not in files]:
        pickles = [file for file in files if matches(file, hub.PICKLE_PATTERNS)]
        cure = f", and {some_of(pickles)} is never read in its place: {CONVERT}" if pickles else ""
        raise CheckpointError(
            f"{name} has no {' and no '.join(missing)}, so it is no head on embeddings; its files "
            f"are {some_of(files) or 'none'}{cure}"
        )
    config = hub.read_json(identity, CONFIG, cache_dir=cache_dir) or {}
    _check_config(config, name)
    labels = labels_in_order(config, name)
    widths = _check_widths(hub.read_tensor_shapes(identity, cache_dir=cache_dir), labels, name)
    return HeadCheckpoint(
        identity,
        EMBEDDING_HEAD,
        labels,
        config["problem_type"],
        json.dumps(config),
        widths=widths,
    )


def load_head(checkpoint: HeadCheckpoint, *, cache_dir: str | None = None) -> HeadNetwork:
    """Load the classification head that `checkpoint` describes, with weights, into memory.

    Raises CheckpointError or ModelChangedError if the files are not those that were described.
    """
    from safetensors.numpy import load_file

    config = checkpoint.config
    directory = hub.download(checkpoint.identity, cache_dir=cache_dir)
    check_digest(checkpoint, directory)
    tensors = load_file(directory / WEIGHTS)
    if checkpoint.identity.is_directory:
        hub.download(checkpoint.identity)  # raises if the directory changed meanwhile
    return HeadNetwork(
        layers=tuple(
            (tensors[f"layers.{number}.weight"], tensors[f"layers.{number}.bias"])
            for number in range(len(checkpoint.widths) - 1)
        ),
        problem_type=config["problem_type"],
        labels=checkpoint.labels,
        hidden_activation=config.get("hidden_activation"),
        output_activation=config.get("output_activation"),
        backbone=checkpoint.backbone,
    )


def _check_config(config: Mapping[str, Any], name: str) -> None:
    if config.get("model_type") != EMBEDDING_HEAD:
        raise CheckpointError(
            f"{name} is no head on embeddings: its model_type is {config.get('model_type')!r}, and "
            f"a head's is {EMBEDDING_HEAD!r}. A whole classifier is run by "
            "DistributedDataClassifier(model=...)"
        )
    choices: dict[str, Any] = {
        "problem_type": get_args(ProblemType),
        "hidden_activation": tuple(HIDDEN_ACTIVATIONS),
        "output_activation": tuple(OUTPUT_ACTIVATIONS),
    }
    for key, known in choices.items():
        if (value := config.get(key)) not in known:
            raise CheckpointError(
                f"{key} of {name} is {value!r}.{nearest(str(value), filter(None, known))} It must "
                f"be one of {', '.join(map(repr, known))}"
            )
    if config.get("output_activation") and config["problem_type"] != REGRESSION:
        raise CheckpointError(
            f"{name} has the output_activation {config['output_activation']!r} and is a "
            f"{config['problem_type']} head, whose outputs are logits: set it to null"
        )
    try:
        Backbone(**config["backbone"]) if config.get("backbone") is not None else None
    except TypeError as err:
        raise CheckpointError(
            f"backbone of {name} is {config['backbone']!r}: it must be null, or have the keys "
            f"{', '.join(Backbone.__dataclass_fields__)}"
        ) from err


def _check_widths(
    shapes: Mapping[str, tuple[int, ...]], labels: tuple[str, ...], name: str
) -> tuple[int, ...]:
    """Check the shapes of a head's tensors; return the widths of its layers, such as (768, 256, 3).

    These are the numbers of inputs of each layer, and of outputs of the last one.
    """
    count = max(len(shapes) // 2, 1)
    weights = [shapes.get(f"layers.{number}.weight", ()) for number in range(count)]
    biases = [shapes.get(f"layers.{number}.bias", ()) for number in range(count)]
    described = ", ".join(f"{key} {tuple(shape)}" for key, shape in sorted(shapes.items()))
    if len(shapes) != 2 * count or not all(len(shape) == 2 for shape in weights):
        raise CheckpointError(
            f"the tensors of {name} are {described or 'none'}: a head's are layers.0.weight "
            "(outputs, inputs), layers.0.bias (outputs,), layers.1.weight and so on"
        )
    outputs, inputs = zip(*weights, strict=True)
    if outputs[:-1] != inputs[1:] or biases != [(width,) for width in outputs]:
        raise CheckpointError(f"the layers of {name} do not fit each other: {described}")
    if outputs[-1] != len(labels):
        raise CheckpointError(
            f"{name} has {outputs[-1]} outputs, and its id2label names {len(labels)}: "
            f"{some_of(labels)}"
        )
    return (*inputs, outputs[-1])


def refuse_other_model(folder: Path) -> None:
    """Raise FileExistsError if a directory holds a model other than a head on embeddings."""
    if (text := config_text(folder)) is None:
        return
    try:
        is_head = json.loads(text).get("model_type") == EMBEDDING_HEAD
    except (ValueError, AttributeError, RecursionError):
        is_head = False
    if not is_head:
        raise FileExistsError(f"{folder} holds another model: name a directory for the head")
