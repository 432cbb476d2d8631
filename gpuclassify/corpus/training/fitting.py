"""Fit the layers of a head to the train part, and select the best by the validation part.

The layers may also be the pooler and classifier of a BERT, as in FineWeb-Edu. All other layers are
frozen, so that training only reads the state of ``[CLS]``, which is computed once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuclassify import hub
from gpuclassify.classifiers.embedder import Embedder, sentence_model
from gpuclassify.corpus.statistics.agreement import grades_of
from gpuclassify.corpus.training.tasks import Layer, Task
from gpuclassify.hub.files import WEIGHTS
from gpuclassify.models.checkpoint import CheckpointError
from gpuclassify.models.head_network import HeadNetwork

if TYPE_CHECKING:
    from torch import nn
    from transformers import BertForSequenceClassification

logger = logging.getLogger(__name__)

PENALTIES = (1.0, 10.0, 100.0, 1_000.0, 10_000.0)  # L2 penalties tried for a linear head
# Training uses one thread for fewer rows, because several would mostly wait for each other.
ROWS_FOR_THREADS = 20_000
_LEAST = 1e-6  # features with a smaller deviation are not scaled
_POOLER = ("bert.pooler.dense", "classifier")  # trained layers of a pooler head


@dataclass(frozen=True)
class Examples:
    """Embeddings, targets and weights of rows for training or validation.

    ``vectors`` is float32 (rows, dimensions), ``weights`` float32 (rows,), and ``targets`` a result
    of `Task.targets`.
    """

    vectors: np.ndarray
    targets: np.ndarray
    weights: np.ndarray

    def take(self, rows: np.ndarray) -> Examples:
        """Return the rows with these indices."""
        return Examples(self.vectors[rows], self.targets[rows], self.weights[rows])


@dataclass(frozen=True)
class Recipe:
    """Settings for training a network by AdamW, with a learning rate that falls linearly to 0."""

    epochs: int  # maximum
    patience: int  # epochs without improvement before training stops
    learning_rate: float
    batch_size: int
    weight_decay: float = 0.0


# The pooler's settings are FineWeb-Edu's: huggingface/cosmopedia, classification/train_edu_bert.py.
RECIPES = {
    "mlp": Recipe(50, patience=5, learning_rate=1e-3, batch_size=64, weight_decay=0.01),
    "pooler": Recipe(20, patience=20, learning_rate=3e-4, batch_size=256),
}


@dataclass(frozen=True)
class Fit:
    """Training of a head's layers on examples, with the `settings` of `TrainedHead.fit`.

    `outputs` are the names of the head's outputs. The `validation` examples select the penalty or
    the epoch. Training fills `record`: ``penalty`` and ``losses`` (by penalty) for a linear head,
    else ``epochs`` (number run) and ``best_epoch``, from 1.
    """

    task: Task
    outputs: tuple[str, ...]
    train: Examples
    validation: Examples
    settings: Mapping[str, Any]
    record: dict[str, Any] = field(default_factory=dict)

    def layers(self, embedder: Embedder) -> list[Layer]:
        """Train the head; return (weight, bias) of each layer, for the best penalty or epoch.

        `embedder` is used only for ``kind="pooler"``. torch's random state and number of threads
        are restored. Raises ArithmeticError if training diverges in the first epoch.
        """
        import torch
        from threadpoolctl import threadpool_limits

        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            if len(self.train.vectors) < ROWS_FOR_THREADS:
                stack.callback(torch.set_num_threads, torch.get_num_threads())
                stack.enter_context(threadpool_limits(1))
                torch.set_num_threads(1)
            if self.settings["kind"] == "linear":
                return self._linear()
            torch.manual_seed(self.settings["seed"])
            return self._mlp() if self.settings["kind"] == "mlp" else self._pooler(embedder)

    def _linear(self) -> list[Layer]:
        """Fit scikit-learn's linear model, with the penalty that minimizes the validation loss."""
        mean, deviation = _spread(self.train.vectors)
        vectors = (self.train.vectors - mean) / deviation
        losses, layers = {}, {}
        for penalty in PENALTIES:
            layer = self.task.fit_linear(vectors, self.train.targets, self.train.weights, penalty)
            weight, bias = layers[penalty] = _unstretched(layer, mean, deviation)
            outputs = (self.validation.vectors @ weight.T + bias).astype(np.float32)
            losses[penalty] = self._loss(outputs)
        best = min(PENALTIES, key=losses.__getitem__)
        self.record["losses"] = {f"{penalty:g}": loss for penalty, loss in losses.items()}
        self.record["penalty"] = best
        return [layers[best]]

    def _mlp(self) -> list[Layer]:
        from torch import nn

        mean, deviation = _spread(self.train.vectors)
        width, hidden = self.train.vectors.shape[1], self.settings["hidden_size"]
        network = nn.Sequential(
            nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, len(self.outputs))
        )
        train, validation = (
            replace(part, vectors=((part.vectors - mean) / deviation).astype(np.float32))
            for part in (self.train, self.validation)
        )
        replace(self, train=train, validation=validation)._train(network)
        first, last = _layers_of(network)
        return [_unstretched(first, mean, deviation), last]

    def _pooler(self, embedder: Embedder) -> list[Layer]:
        """Train a copy of the embedding model's pooler, and a classifier."""
        from sklearn.metrics import f1_score
        from torch import nn

        is_number = self.task.name == "regression"
        grades = grades_of(self.train.targets) if is_number else None

        def macro_f1(scores: np.ndarray, targets: np.ndarray) -> float:
            rounded = np.clip(np.rint(scores[:, 0]), *(grades or (0, 0)))
            return float(f1_score(np.rint(targets), rounded, average="macro"))

        model = _classifier(embedder, self.task.problem_type, self.outputs)
        network = nn.Sequential(model.bert.pooler.dense, nn.Tanh(), model.classifier)
        self._train(network, None if grades is None else macro_f1)
        return _layers_of(network)

    def _train(
        self,
        network: nn.Sequential,
        quality: Callable[[np.ndarray, np.ndarray], float] | None = None,
    ) -> None:
        """Train a network in place, and restore the weights of its best epoch.

        That epoch has the highest `quality` of outputs and targets on the validation part, or the
        least loss if `quality` is None.
        """
        import torch

        names = ("epochs", "learning_rate")
        changes = {name: self.settings[name] for name in names if self.settings[name] is not None}
        recipe = replace(RECIPES[self.settings["kind"]], **changes)
        arrays = (self.train.vectors, self.train.targets, self.train.weights)
        vectors, targets, weights = map(torch.from_numpy, arrays)
        optimizer = torch.optim.AdamW(
            network.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
        )
        steps = recipe.epochs * -(-len(vectors) // recipe.batch_size)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        best, state = float("-inf"), {}
        for epoch in range(1, recipe.epochs + 1):
            for rows in torch.randperm(len(vectors)).split(recipe.batch_size):
                losses = self.task.losses(network(vectors[rows]), targets[rows])
                optimizer.zero_grad()
                (losses * weights[rows]).mean().backward()
                optimizer.step()
                schedule.step()
            reached = self._reached(network, quality)
            logger.info("epoch %d: %.5f on the validation part", epoch, reached)
            if reached > best:
                best, self.record["best_epoch"] = reached, epoch
                state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
            self.record["epochs"] = epoch
            if not state:
                raise ArithmeticError(
                    f"training diverged with learning_rate={recipe.learning_rate:g}: pass a "
                    "smaller one"
                )
            if epoch - self.record["best_epoch"] >= recipe.patience:
                break
        network.load_state_dict(state)

    def _reached(
        self, network: nn.Module, quality: Callable[[np.ndarray, np.ndarray], float] | None
    ) -> float:
        """Return the quality of outputs for the validation part, higher for better ones.

        It is the negative loss if `quality` is None, or if not all outputs are finite.
        """
        import torch

        with torch.inference_mode():
            outputs = network(torch.from_numpy(self.validation.vectors)).numpy()
        if quality is not None and np.isfinite(outputs).all():
            return quality(outputs, self.validation.targets)
        return -self._loss(outputs)

    def _loss(self, outputs: np.ndarray) -> float:
        import torch

        targets = torch.from_numpy(self.validation.targets)
        losses = self.task.losses(torch.from_numpy(outputs), targets)
        return float(np.average(losses.numpy(), weights=self.validation.weights))


def _layers_of(network: nn.Sequential) -> list[Layer]:
    return [
        (layer.weight.detach().numpy(), layer.bias.detach().numpy())  # type: ignore[operator]
        for layer in network
        if hasattr(layer, "weight")
    ]


def _spread(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and deviation of each dimension, with 1 for a deviation that is almost 0."""
    deviation = vectors.std(axis=0, dtype=np.float64)
    return vectors.mean(axis=0, dtype=np.float64), np.where(deviation > _LEAST, deviation, 1)


def _unstretched(layer: Layer, mean: np.ndarray, deviation: np.ndarray) -> Layer:
    """Convert a layer that reads standardized embeddings to one that reads the original ones."""
    weight, bias = (part.astype(np.float64) for part in layer)
    weight = weight / deviation
    return weight.astype(np.float32), (bias - weight @ mean).astype(np.float32)


def pooler_embedder(backbone: Embedder | str) -> Embedder:
    """Return an embedder whose embedding is the state of ``[CLS]``, the input of a BERT's pooler.

    An `Embedder` as `backbone` is checked, and returned unchanged. For the name of a model, the
    embedder reads as many tokens as the model can.
    """
    settings: dict[str, Any] = {"pooling": "cls", "normalize": False, "prompt": ""}
    embedder = backbone if isinstance(backbone, Embedder) else Embedder(model=backbone, **settings)
    checkpoint = embedder.model.checkpoint
    sizes, sentence = checkpoint.sizes, sentence_model(checkpoint)
    if sizes.get("model_type") != "bert":
        raise CheckpointError(
            f"{checkpoint.identity.name} is a {sizes.get('model_type')} model, and "
            'kind="pooler" trains the pooler of a BERT: take kind="mlp"'
        )
    if not isinstance(backbone, Embedder):
        length = sizes["max_position_embeddings"]
        return Embedder(model=backbone, max_seq_length=length, **settings)
    if sentence.pooling != "cls" or sentence.is_normalized or embedder.model.prompt:
        raise ValueError(
            'a pooler reads the state of [CLS] as it is: pass Embedder(pooling="cls", '
            'normalize=False, prompt="", ...), or the name of the model alone'
        )
    return embedder


def save_classifier(network: HeadNetwork, embedder: Embedder, folder: Path) -> None:
    """Write a pooler head and its model as one BertForSequenceClassification with the tokenizer."""
    import torch

    from gpuclassify.models.transformers_state import quiet_transformers

    model = _classifier(embedder, network.problem_type, network.labels)
    tensors = {
        f"{layer}.{kind}": torch.from_numpy(values)
        for layer, pair in zip(_POOLER, network.layers, strict=True)
        for kind, values in zip(("weight", "bias"), pair, strict=True)
    }
    unknown = model.load_state_dict(tensors, strict=False).unexpected_keys
    assert not unknown, unknown
    with quiet_transformers():
        model.save_pretrained(folder)
    tokenizer = embedder.model.new_tokenizer()
    tokenizer.model_max_length = embedder.options.max_seq_length or tokenizer.model_max_length
    tokenizer.save_pretrained(folder)


def read_layers(folder: Path) -> list[Layer]:
    """Read pooler and classifier from the directory of a saved BertForSequenceClassification."""
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS, "np") as tensors:
        return [
            (tensors.get_tensor(f"{layer}.weight"), tensors.get_tensor(f"{layer}.bias"))
            for layer in _POOLER
        ]


def _classifier(
    embedder: Embedder, problem_type: str, labels: Sequence[str]
) -> BertForSequenceClassification:
    """Load the embedding model as a BertForSequenceClassification in float32, without dropout.

    Pooler and classifier get random weights if the model has none of that shape.
    """
    import torch
    from transformers import BertForSequenceClassification

    from gpuclassify.models.transformers_state import building_lock, quiet_transformers

    directory = hub.download(embedder.model.identity, cache_dir=embedder.options.cache_dir)
    with building_lock, quiet_transformers():
        return BertForSequenceClassification.from_pretrained(
            directory,
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            dtype=torch.float32,
            problem_type=problem_type,
            id2label=dict(enumerate(labels)),
            label2id={label: index for index, label in enumerate(labels)},
            hidden_dropout_prob=0.0,
            classifier_dropout=0.0,
        )
