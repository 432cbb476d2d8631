"""Classifier of prompts by task type and complexity: one backbone with eight heads."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from gpuclassify.mapping.heads import Columns, Head
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.models.activations import softmax
from gpuclassify.models.checkpoint import Checkpoint, CheckpointError
from gpuclassify.settings.options import ModelOptions

TASK = "task_type"
TASK_TYPES = (
    "Brainstorming", "Chatbot", "Classification", "Closed QA", "Code Generation", "Extraction",
    "Open QA", "Other", "Rewrite", "Summarization", "Text Generation", "Unknown",
)  # fmt: skip
FEW_SHOTS = "number_of_few_shots"
DIMENSIONS = (
    "creativity_scope",
    "reasoning",
    "contextual_knowledge",
    FEW_SHOTS,
    "domain_knowledge",
    "no_label_reason",
    "constraint_ct",
)
# Published weights of the score, applied to rounded dimensions.
COMPLEXITY_WEIGHTS = {
    "creativity_scope": 0.35,
    "reasoning": 0.25,
    "constraint_ct": 0.15,
    "domain_knowledge": 0.15,
    "contextual_knowledge": 0.05,
    FEW_SHOTS: 0.05,
}
COMPLEXITY, PROBABILITY = "prompt_complexity_score", "task_type_prob"
FIRST_TASK, SECOND_TASK = "task_type_1", "task_type_2"
NO_SECOND_TASK, SECOND_TASK_FROM = "NA", 0.1
FEW_SHOTS_FROM = 0.05


class PromptHead(Head):
    """Head that converts a model's outputs to eleven columns about prompts.

    The model has eight output layers, called heads in its files: one for the task type, and one for
    each dimension of complexity.
    """

    label_field = FIRST_TASK

    @property
    def labels(self) -> list[str]:
        """Task types, in the order of the model's outputs."""
        return list(self.model.checkpoint.labels)

    def fields(self) -> list[pa.Field]:
        """Return Arrow fields of the eleven columns, in their published order."""
        text, number = pa.string(), pa.float32()
        columns = [(COMPLEXITY, number), (FIRST_TASK, text), (SECOND_TASK, text)]
        columns += [(PROBABILITY, number), *((name, number) for name in DIMENSIONS)]
        return [pa.field(name, kind) for name, kind in columns]

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """Convert logits, (texts, outputs), to probabilities by a softmax for each output head."""
        return np.concatenate([softmax(part) for part in self._by_head(outputs).values()], axis=1)

    def columns(self, values: np.ndarray) -> Columns:
        """Return the eleven columns by name, from probabilities of all heads, (texts, outputs)."""
        probabilities = self._by_head(values)
        config = self.model.checkpoint.config
        weights, divisors = config["weights_map"], config["divisor_map"]
        dimensions = {
            name: weighted(probabilities[name], weights[name], divisors[name])
            for name in DIMENSIONS
        }
        few_shots = dimensions[FEW_SHOTS]
        dimensions[FEW_SHOTS] = np.where(few_shots >= FEW_SHOTS_FROM, few_shots, 0.0)
        weighted_dimensions = [w * dimensions[name] for name, w in COMPLEXITY_WEIGHTS.items()]
        complexity = np.sum(weighted_dimensions, axis=0).round(5)
        first, second, probability = top_tasks(probabilities[TASK], self.labels)
        texts = {FIRST_TASK: first.tolist(), SECOND_TASK: second.tolist()}
        numbers = {COMPLEXITY: complexity, PROBABILITY: probability, **dimensions}
        return texts | {name: number.astype(np.float32) for name, number in numbers.items()}

    def certainties(self, values: np.ndarray) -> np.ndarray:
        """Return the probability of each text's most probable task type, (texts,)."""
        return self._by_head(values)[TASK].max(axis=1)

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError unless the model has the eight output heads."""
        if not checkpoint.heads:
            raise CheckpointError(
                f"{checkpoint.identity.name} has one head, and {self.owner} takes a "
                f"model with the heads {', '.join((TASK, *DIMENSIONS))}: use "
                "DistributedDataClassifier for other models"
            )
        names = [name for name, _ in checkpoint.heads]
        missing = [name for name in (TASK, *DIMENSIONS) if name not in names]
        if missing:
            raise CheckpointError(
                f"{checkpoint.identity.name} has no heads {missing}; it has {names}"
            )
        config = checkpoint.config
        for name, size in checkpoint.heads[1:]:
            weights = config.get("weights_map", {}).get(name, ())
            if len(weights) != size or name not in config.get("divisor_map", {}):
                raise CheckpointError(
                    f"config.json of {checkpoint.identity.name} needs {size} weights in "
                    f"weights_map and a divisor in divisor_map for {name!r}"
                )

    def _by_head(self, outputs: np.ndarray) -> dict[str, np.ndarray]:
        sizes = [size for _, size in self.model.checkpoint.heads]
        parts = np.split(outputs, np.cumsum(sizes)[:-1], axis=1)
        return {
            name: part for (name, _), part in zip(self.model.checkpoint.heads, parts, strict=True)
        }


class PromptTaskComplexityClassifier(TextMapper[ModelOptions]):
    """Classifier of English prompts by task type and by seven dimensions of complexity.

    Adds, in this order, ``prompt_complexity_score``, ``task_type_1``,
    ``task_type_2``, ``task_type_prob``, ``creativity_scope``, ``reasoning``,
    ``contextual_knowledge``, ``number_of_few_shots``, ``domain_knowledge``,
    ``no_label_reason`` and ``constraint_ct``: strings and float32. The two task
    types are the most probable of twelve, and ``task_type_prob`` is the
    probability of the first one. ``task_type_2`` is ``NA`` where its
    probability, rounded to three decimals, is below 0.1. Dimensions are rounded
    to four decimals, and the score is computed from those, as published. There
    is no filter: compare the columns instead.

    Examples
    --------
    >>> ddf = PromptTaskComplexityClassifier()(ddf)  # doctest: +SKIP
    >>> ddf = ddf[ddf["prompt_complexity_score"] > 0.4]  # doctest: +SKIP
    """

    head_type = PromptHead
    family = "prompts"
    purpose = "task type and complexity of English prompts"
    licence = "NVIDIA Open Model License"
    published_labels = TASK_TYPES
    defaults = {
        "model": "nvidia/prompt-task-and-complexity-classifier",
        "max_seq_length": 512,
    }


def weighted(probabilities: np.ndarray, weights: list[float], divisor: float) -> np.ndarray:
    """Return one dimension of complexity, float64 (texts,), from probabilities of its classes."""
    scores = probabilities @ np.asarray(weights, dtype=np.float64)
    return (scores / divisor).round(4)


def top_tasks(
    probabilities: np.ndarray, labels: list[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the two most probable task types, and the first one's probability, each (texts,).

    Probabilities are rounded to 3 decimals, and a second task type below 0.1 is "NA".
    """
    order = np.argsort(-probabilities, axis=1, kind="stable")[:, :2]
    rounded = np.take_along_axis(probabilities, order, axis=1).astype(np.float64).round(3)
    tasks = np.asarray(labels, dtype=object)[order]
    second = np.where(rounded[:, 1] < SECOND_TASK_FROM, NO_SECOND_TASK, tasks[:, 1])
    return tasks[:, 0], second, rounded[:, 0]
