"""The layers of a head, fitted to the train part and chosen by the validation part."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuclassify.training.tasks import Layer, Task

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

PENALTIES = (1.0, 10.0, 100.0, 1_000.0, 10_000.0)  # of a linear head, of which one is chosen
_LEAST = 1e-6  # a number that varies less is not stretched


@dataclass(frozen=True)
class Examples:
    """Rows to fit to or to judge by.

    Attributes
    ----------
    vectors : numpy.ndarray
        float32 (rows, numbers of an embedding).
    targets : numpy.ndarray
        As the task gives them.
    weights : numpy.ndarray
        float32 (rows,).
    """

    vectors: np.ndarray
    targets: np.ndarray
    weights: np.ndarray

    def take(self, rows: np.ndarray) -> Examples:
        """Some of them."""
        return Examples(self.vectors[rows], self.targets[rows], self.weights[rows])


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: by AdamW, with a learning rate that falls to 0 in a line.

    Attributes
    ----------
    epochs : int
        At most.
    patience : int
        Epochs without a better one after which training stops.
    learning_rate : float
    batch_size : int
    weight_decay : float
    """

    epochs: int
    patience: int
    learning_rate: float
    batch_size: int
    weight_decay: float = 0.0


# That of the pooler is FineWeb-Edu's: huggingface/cosmopedia, classification/train_edu_bert.py.
RECIPES = {
    "mlp": Recipe(50, patience=5, learning_rate=1e-3, batch_size=64, weight_decay=0.01),
    "pooler": Recipe(20, patience=20, learning_rate=3e-4, batch_size=256),
}


def fit_linear(
    task: Task, train: Examples, validation: Examples, record: dict[str, Any]
) -> list[Layer]:
    """scikit-learn's linear model, with the penalty of least validation loss.

    Parameters
    ----------
    task : Task
    train, validation : Examples
    record : dict
        Gets ``penalty`` and ``losses``, those of the validation part by penalty.
    """
    mean, deviation = _spread(train.vectors)
    vectors = (train.vectors - mean) / deviation
    best: tuple[float, float, list[Layer]] | None = None
    record["losses"] = {}
    for penalty in PENALTIES:
        weight, bias = task.fit_linear(vectors, train.targets, train.weights, penalty)
        layers = [_unstretched((weight, bias), mean, deviation)]
        loss = _mean_loss(task, _outputs(layers[0], validation.vectors), validation)
        record["losses"][f"{penalty:g}"] = loss
        if best is None or loss < best[0]:
            best = (loss, penalty, layers)
    assert best is not None
    record["penalty"] = best[1]
    return best[2]


def fit_mlp(
    task: Task,
    train: Examples,
    validation: Examples,
    record: dict[str, Any],
    outputs: int,
    hidden_size: int,
    recipe: Recipe,
    seed: int,
) -> list[Layer]:
    """Two layers with a ReLU between them, of the epoch of least validation loss."""
    import torch
    from torch import nn

    mean, deviation = _spread(train.vectors)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential(
            nn.Linear(train.vectors.shape[1], hidden_size),
            nn.ReLU(),
            nn.Linear(hidden_size, outputs),
        )
        stretched, judged = (
            replace(part, vectors=((part.vectors - mean) / deviation).astype(np.float32))
            for part in (train, validation)
        )
        train_network(network, task, stretched, judged, recipe, record)
    first, last = layers_of(network)
    return [_unstretched(first, mean, deviation), last]


def train_network(
    network: nn.Sequential,
    task: Task,
    train: Examples,
    validation: Examples,
    recipe: Recipe,
    record: dict[str, Any],
    quality: Callable[[np.ndarray, np.ndarray], float] | None = None,
) -> None:
    """Train a network, and leave it as it was after its best epoch.

    Parameters
    ----------
    network : nn.Sequential
        Embeddings to outputs.
    task : Task
    train, validation : Examples
    recipe : Recipe
    record : dict
        Gets ``epochs``, the number that ran, and ``best_epoch``, from 1.
    quality : callable, optional
        Of the validation part's outputs and targets: the best epoch has most of it. Default: the
        loss, of which it has least.

    Raises
    ------
    ArithmeticError
        Outputs are not finite after the first epoch.
    """
    import torch

    def reached_by(outputs: np.ndarray) -> float:
        if quality is not None and np.isfinite(outputs).all():
            return quality(outputs, validation.targets)
        return -_mean_loss(task, outputs, validation)

    vectors, targets, weights = (
        torch.from_numpy(array) for array in (train.vectors, train.targets, train.weights)
    )
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    steps = recipe.epochs * -(-len(vectors) // recipe.batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    best, state = float("-inf"), {}
    for epoch in range(1, recipe.epochs + 1):
        for rows in torch.randperm(len(vectors)).split(recipe.batch_size):
            losses = task.losses(network(vectors[rows]), targets[rows])
            optimizer.zero_grad()
            (losses * weights[rows]).mean().backward()
            optimizer.step()
            schedule.step()
        reached = reached_by(_run(network, validation.vectors))
        logger.info("epoch %d: %.5f on the validation part", epoch, reached)
        if reached > best:
            best, record["best_epoch"] = reached, epoch
            state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        record["epochs"] = epoch
        if not state:
            raise ArithmeticError(
                f"training diverged with learning_rate={recipe.learning_rate:g}: pass a smaller one"
            )
        if epoch - record["best_epoch"] >= recipe.patience:
            break
    network.load_state_dict(state)


def layers_of(network: nn.Sequential) -> list[Layer]:
    """Weight and bias of each dense layer."""
    return [
        (layer.weight.detach().numpy(), layer.bias.detach().numpy())  # type: ignore[operator]
        for layer in network
        if hasattr(layer, "weight")
    ]


def _run(network: nn.Module, vectors: np.ndarray) -> np.ndarray:
    import torch

    with torch.inference_mode():
        return network(torch.from_numpy(vectors)).numpy()


def _mean_loss(task: Task, outputs: np.ndarray, examples: Examples) -> float:
    import torch

    losses = task.losses(torch.from_numpy(outputs), torch.from_numpy(examples.targets))
    return float(np.average(losses.numpy(), weights=examples.weights))


def _outputs(layer: Layer, vectors: np.ndarray) -> np.ndarray:
    weight, bias = layer
    return (vectors @ weight.T + bias).astype(np.float32)


def _spread(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of each number of the vectors, which are trained on without them."""
    deviation = vectors.std(axis=0, dtype=np.float64)
    return vectors.mean(axis=0, dtype=np.float64), np.where(deviation > _LEAST, deviation, 1)


def _unstretched(layer: Layer, mean: np.ndarray, deviation: np.ndarray) -> Layer:
    """The layer that does with vectors as they are what this one does without their spread."""
    weight, bias = (part.astype(np.float64) for part in layer)
    weight = weight / deviation
    return weight.astype(np.float32), (bias - weight @ mean).astype(np.float32)
