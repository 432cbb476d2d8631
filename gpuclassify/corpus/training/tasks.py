"""Tasks that a head can learn: one of several classes, several labels per text, or a number."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from gpuclassify.corpus.statistics.agreement import grades_of
from gpuclassify.models.activations import sigmoid, softmax
from gpuclassify.settings.checks import check_names
from gpuclassify.settings.options import MULTI_LABEL, REGRESSION, SINGLE_LABEL, ProblemType

if TYPE_CHECKING:
    import torch

Layer = tuple[np.ndarray, np.ndarray]
LEAST_EXAMPLES = 3  # examples per label: one for each part
BINS = 10  # strata of a number that is not a grade
_SHOWN = 5


class Task(ABC):
    """Base class of tasks, which convert labels to numbers and fit a linear model to them.

    In methods, `targets` are labels as numbers, and `outputs` the names of the head's outputs,
    except in `losses` and `scores`, where `outputs` are logits (rows, outputs).
    """

    name: ClassVar[str]
    problem_type: ClassVar[ProblemType]

    def __init__(self, label_field: str) -> None:
        self.label_field = label_field

    @abstractmethod
    def read(self, labels: pd.Series) -> list[Any]:
        """Convert the column of labels, without nulls, to a list of plain values.

        Raises TypeError or ValueError for values that the task cannot learn.
        """

    @abstractmethod
    def outputs(self, labels: Sequence[Any]) -> tuple[str, ...]:
        """Return the names of the outputs of a head that learns these labels, one per logit."""

    @abstractmethod
    def targets(self, labels: Sequence[Any], outputs: tuple[str, ...]) -> np.ndarray:
        """Convert labels to an array of numbers to train on, with a row per label.

        Raises ValueError if a label is not in `outputs`.
        """

    @abstractmethod
    def check(self, targets: np.ndarray, outputs: tuple[str, ...]) -> None:
        """Raise ValueError if there is nothing to learn, such as if all labels are the same."""

    def examples(self, targets: np.ndarray, outputs: tuple[str, ...]) -> dict[str, int]:
        """Count the rows of each label, by name, to check that every part has some.

        With several labels per text, the rows without each label are counted, too, by "not " and
        the label. Empty for a regression.
        """
        return {}

    @abstractmethod
    def strata(self, targets: np.ndarray, known: np.ndarray | None = None) -> np.ndarray:
        """Return the stratum of each row for a stratified split, int64 (rows,) from 0.

        Strata are made from the targets `known`; by default, from `targets` themselves.
        """

    def strata_names(self, targets: np.ndarray, outputs: tuple[str, ...]) -> list[str]:
        """Return the name of each stratum: the labels, and "" for rows without a label.

        A row's weight in training is the value of ``class_weight`` for its stratum's name.
        """
        return [*outputs, ""]  # the last stratum has no label

    @abstractmethod
    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the loss of each row, float32 (rows,), from logits."""

    @abstractmethod
    def fit_linear(
        self, vectors: np.ndarray, targets: np.ndarray, weights: np.ndarray, penalty: float
    ) -> Layer:
        """Fit a linear model; return its weight (outputs, dimensions) and bias (outputs,).

        `vectors` are embeddings (rows, dimensions), and `weights` are of the rows. `penalty` is the
        strength of the penalty on the squared weights, relative to the sum of the losses over rows.
        """

    def scores(self, outputs: np.ndarray) -> np.ndarray:
        """Convert logits to scores, such as probabilities, of the same shape."""
        return outputs


class Classes(Task):
    """Task of giving each text one of several labels."""

    name = "classes"
    problem_type = SINGLE_LABEL

    def read(self, labels: pd.Series) -> list[str]:
        """Convert labels (texts, whole numbers or booleans) to texts, such as "3" or "True"."""
        return [_class_name(value, self.label_field) for value in labels.tolist()]

    def outputs(self, labels: Sequence[str]) -> tuple[str, ...]:
        """Return the distinct labels, sorted as numbers if all are whole numbers, else as texts."""
        return _in_order(set(labels))

    def targets(self, labels: Sequence[str], outputs: tuple[str, ...]) -> np.ndarray:
        """Return the index of each row's label in `outputs`, int64 (rows,)."""
        return np.array(_indices(labels, outputs, self.label_field), dtype=np.int64)

    def check(self, targets: np.ndarray, outputs: tuple[str, ...]) -> None:
        """Raise ValueError if all rows have the same label."""
        if len(outputs) == 1:
            raise ValueError(
                f"all rows of {self.label_field!r} have the label {outputs[0]!r}: a classifier "
                "needs two labels or more"
            )

    def examples(self, targets: np.ndarray, outputs: tuple[str, ...]) -> dict[str, int]:
        """Return the number of rows of each label, by label."""
        counts = np.bincount(targets, minlength=len(outputs)).tolist()
        return dict(zip(outputs, counts, strict=True))

    def strata(self, targets: np.ndarray, known: np.ndarray | None = None) -> np.ndarray:
        """Return the index of each row's label as its stratum; `known` is not used."""
        return targets

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the cross-entropy of each row, float32 (rows,)."""
        from torch.nn import functional as F

        return F.cross_entropy(outputs, targets, reduction="none")

    def fit_linear(
        self, vectors: np.ndarray, targets: np.ndarray, weights: np.ndarray, penalty: float
    ) -> Layer:
        """Fit a LogisticRegression; return its weight and bias, with a row for each label.

        If there are two labels, the output of the first one is always 0.
        """
        weight, bias = _logistic(vectors, targets, weights, penalty)
        if len(weight) == 1:
            weight, bias = np.vstack([0 * weight, weight]), np.append(0.0, bias)
        return weight, bias

    def scores(self, outputs: np.ndarray) -> np.ndarray:
        """Return the softmax of logits, probabilities that add up to 1 in each row."""
        return softmax(outputs)


class MultiLabel(Task):
    """Task of giving each text any number of labels."""

    name = "multilabel"
    problem_type = MULTI_LABEL

    def read(self, labels: pd.Series) -> list[list[str]]:
        """Convert lists of labels (texts, whole numbers or booleans) to lists of texts."""
        rows = labels.tolist()
        for row in rows:
            if isinstance(row, str) or not isinstance(row, Iterable):
                raise TypeError(
                    f"column {self.label_field!r} holds {row!r}, not lists of labels: pass lists, "
                    'or task="classes" for one label a text. (Dask makes strings of lists in an '
                    "object column: give it Arrow's type, "
                    "pandas.ArrowDtype(pyarrow.list_(pyarrow.string())))"
                )
        return [[_class_name(value, self.label_field) for value in row] for row in rows]

    def outputs(self, labels: Sequence[Sequence[str]]) -> tuple[str, ...]:
        """Return the distinct labels, sorted as numbers if all are whole numbers, else as texts."""
        return _in_order({label for row in labels for label in row})

    def targets(self, labels: Sequence[Sequence[str]], outputs: tuple[str, ...]) -> np.ndarray:
        """Return multi-hot labels, float32 (rows, labels)."""
        targets = np.zeros((len(labels), len(outputs)), dtype=np.float32)
        for target, row in zip(targets, labels, strict=True):
            target[_indices(row, outputs, self.label_field)] = 1
        return targets

    def check(self, targets: np.ndarray, outputs: tuple[str, ...]) -> None:
        """Raise ValueError if no row has a label."""
        if not outputs:
            raise ValueError(f"no row of {self.label_field!r} has a label: a head needs one")

    def examples(self, targets: np.ndarray, outputs: tuple[str, ...]) -> dict[str, int]:
        """Count the rows with each label and, under "not " and the label, the rows without it."""
        counts = targets.sum(axis=0).astype(int).tolist()
        without = {f"not {name}": len(targets) - n for name, n in zip(outputs, counts, strict=True)}
        return dict(zip(outputs, counts, strict=True)) | without

    def strata(self, targets: np.ndarray, known: np.ndarray | None = None) -> np.ndarray:
        """Return the index of each row's rarest label; rows without a label get the next index.

        Labels are counted in `known`; by default, in `targets`.
        """
        counted = targets if known is None else known
        rarest_first = np.argsort(counted.sum(axis=0), kind="stable")
        rarest = rarest_first[targets[:, rarest_first].argmax(axis=1)]
        return np.where(targets.any(axis=1), rarest, targets.shape[1])

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the binary cross-entropy of each row, averaged over labels, float32 (rows,)."""
        from torch.nn import functional as F

        return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(dim=1)

    def fit_linear(
        self, vectors: np.ndarray, targets: np.ndarray, weights: np.ndarray, penalty: float
    ) -> Layer:
        """Fit a LogisticRegression for each label; return their stacked weights and biases."""
        layers = [_logistic(vectors, column, weights, penalty) for column in targets.T]
        return np.vstack([weight for weight, _ in layers]), np.hstack([bias for _, bias in layers])

    def scores(self, outputs: np.ndarray) -> np.ndarray:
        """Return the sigmoid of logits: an independent probability for each label."""
        return sigmoid(outputs)


class Regression(Task):
    """Task of giving each text a number."""

    name = "regression"
    problem_type = REGRESSION

    def read(self, labels: pd.Series) -> list[float]:
        """Convert a column of finite numbers or booleans to a list of floats."""
        try:
            numbers = pd.to_numeric(labels).to_numpy(dtype=np.float64)
            if pd.api.types.is_string_dtype(labels.dtype):
                raise TypeError("they are texts")
        except (TypeError, ValueError) as err:
            raise TypeError(
                f"column {self.label_field!r} holds {labels.dtype}, not numbers ({err}): convert "
                'it, or pass task="classes" for labels'
            ) from err
        if not np.isfinite(numbers).all():
            raise ValueError(f"column {self.label_field!r} holds infinity: make such labels null")
        return numbers.tolist()

    def outputs(self, labels: Sequence[float]) -> tuple[str, ...]:
        """Return the name of the label column, as the name of the only output."""
        return (self.label_field,)

    def targets(self, labels: Sequence[float], outputs: tuple[str, ...]) -> np.ndarray:
        """Return the numbers to learn, float32 (rows,)."""
        return np.array(labels, dtype=np.float32)

    def check(self, targets: np.ndarray, outputs: tuple[str, ...]) -> None:
        """Raise ValueError if all rows have the same number."""
        if np.ptp(targets) == 0:
            raise ValueError(
                f"all rows of {self.label_field!r} hold {targets[0]:g}: there is nothing to learn"
            )

    def strata(self, targets: np.ndarray, known: np.ndarray | None = None) -> np.ndarray:
        """Return the index of each row's stratum for a stratified split, int64 (rows,) from 0.

        If the numbers `known` (default: `targets`) are grades (whole numbers that differ by less
        than 20), each distinct one is a stratum, and other numbers belong to the nearest one.
        Otherwise there are ten strata, of ascending numbers, with about equal shares of `known`.
        """
        known = targets if known is None else known
        if grades_of(known) is not None:
            return np.abs(targets[:, None] - np.unique(known)).argmin(axis=1)
        return np.digitize(targets, np.quantile(known, np.arange(1, BINS) / BINS))

    def strata_names(self, targets: np.ndarray, outputs: tuple[str, ...]) -> list[str]:
        """Return the name of each stratum: grades as texts, or ten times "" for other numbers."""
        return [f"{grade:g}" for grade in np.unique(targets)] if grades_of(targets) else [""] * BINS

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the squared error of each row, float32 (rows,)."""
        return (outputs[:, 0] - targets) ** 2

    def fit_linear(
        self, vectors: np.ndarray, targets: np.ndarray, weights: np.ndarray, penalty: float
    ) -> Layer:
        """Fit a ridge regression with ``alpha=penalty``; return its weight and bias."""
        from sklearn.linear_model import Ridge

        fitted = Ridge(alpha=penalty).fit(vectors, targets, weights)
        return fitted.coef_.reshape(1, -1), np.array([fitted.intercept_])


def row_weights(
    strata: np.ndarray, names: Sequence[str], trained: int, settings: Mapping[str, Any]
) -> np.ndarray:
    """Return the training weight of each row, by stratum, float32 (rows,).

    `strata` are indices in `names`. With ``settings["balanced"]``, all strata in the first
    `trained` rows have the same total weight there, as by scikit-learn's "balanced". Otherwise
    weights are the values of ``settings["class_weight"]`` by name, 1 for others.
    """
    weights = settings["class_weight"] or {}
    check_names("class_weight is by label, and there is", "label", weights, names)
    by_stratum = np.array([weights.get(name, 1) for name in names])
    if settings["balanced"]:
        counts = np.bincount(strata[:trained], minlength=len(names))
        by_stratum = trained / (np.count_nonzero(counts) * np.maximum(counts, 1))
    return by_stratum[strata].astype(np.float32)


def refuse_rare(task: Task, targets: np.ndarray, outputs: tuple[str, ...]) -> None:
    """Raise ValueError unless every label has at least three examples, one for each part.

    If a text may have several labels, each label also needs at least three rows without it.
    """
    counts = task.examples(targets, outputs)
    rare = [f"{label!r} ({count})" for label, count in counts.items() if count < LEAST_EXAMPLES]
    if rare:
        raise ValueError(
            f"too few examples in {task.label_field!r} of {', '.join(rare)}: each needs "
            f"{LEAST_EXAMPLES}, one to train, one to validate and one to test. Annotate more, "
            "merge labels, or drop these rows"
        )


def refuse_untrained(task: Task, targets: np.ndarray, outputs: tuple[str, ...]) -> None:
    """Raise ValueError unless every label has an example in the train part's `targets`.

    For several labels per text, a row without each label is needed, too.
    """
    if missing := untrained(task, targets, outputs):
        raise ValueError(
            f"the groups with {', '.join(map(repr, missing))} are all in the validation and test "
            "parts, because groups stay whole: annotate more groups with it, try another seed=, "
            "or leave group= out"
        )


def untrained(task: Task, targets: np.ndarray, outputs: tuple[str, ...]) -> list[str]:
    """Return the labels without an example in the train part's `targets`.

    For several labels per text, "not " and a label is returned if all rows have it.
    """
    return [label for label, count in task.examples(targets, outputs).items() if not count]


TASKS: dict[str, type[Task]] = {task.name: task for task in (Classes, MultiLabel, Regression)}


def _logistic(
    vectors: np.ndarray, targets: np.ndarray, weights: np.ndarray, penalty: float
) -> Layer:
    from sklearn.linear_model import LogisticRegression

    fitted = LogisticRegression(C=1 / penalty, max_iter=1_000).fit(vectors, targets, weights)
    return fitted.coef_, fitted.intercept_


def _class_name(value: object, label_field: str) -> str:
    if isinstance(value, str):
        return str(value)  # also converts numpy.str_
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value))  # as Dask converts a column of objects
    if isinstance(value, (int, np.integer)) or (
        isinstance(value, (float, np.floating)) and float(value).is_integer()
    ):
        return str(int(value))
    cure = 'pass task="regression" for numbers' if isinstance(value, float) else "convert them"
    raise TypeError(
        f"column {label_field!r} holds {value!r}: classes are texts, whole numbers or booleans; "
        f"{cure}"
    )


def _in_order(labels: set[str]) -> tuple[str, ...]:
    if all(re.fullmatch(r"-?\d+", label) for label in labels):
        return tuple(sorted(labels, key=lambda label: (int(label), label)))  # "1" and "01"
    return tuple(sorted(labels))


def _indices(labels: Iterable[str], outputs: tuple[str, ...], label_field: str) -> list[int]:
    indices = {label: index for index, label in enumerate(outputs)}
    labels = list(labels)
    if unknown := sorted(set(labels) - set(outputs)):
        raise ValueError(
            f"column {label_field!r} holds {unknown[:_SHOWN]}, which the head does not know; its "
            f"labels are {', '.join(outputs)}: drop these rows, or train on them"
        )
    return [indices[label] for label in labels]
