"""Heads: outputs to columns, with their schema and filters, and the check that a model fits.

Of columns that a mapper declares; of one label a text, of several, and of a regression.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from gpuclassify.mapping.columns import (
    COLUMN_TYPES,
    FLOAT32,
    LABELS,
    SCORES,
    arrow_array,
    label_array,
    labels_array,
    scores_array,
)
from gpuclassify.mapping.pinned_model import PinnedModel
from gpuclassify.models.activations import sigmoid, softmax
from gpuclassify.models.checkpoint import Checkpoint, CheckpointError, some_of
from gpuclassify.settings.checks import nearest
from gpuclassify.settings.options import MULTI_LABEL, REGRESSION, SINGLE_LABEL, THRESHOLD

_MOST_LABELS = 60  # that a message names

# Values of new columns by name: arrays of numpy or Arrow, or lists, one value a text.
Columns = Mapping[str, Any]


class Head(ABC):
    """Makes columns of a model's outputs. Several heads can read the outputs of one runner.

    `owner` names the mapper in messages, `model` says what the outputs mean, and `outputs` are
    those of the runner that the head reads.
    """

    label_field: str | None = None  # name of the label column
    filters: bool = False  # whether the settings filter rows
    keep_field: str | None = None  # of the filters' decision, if rows are not to be dropped

    def __init__(
        self, owner: str, options: Any, model: PinnedModel, outputs: slice = slice(None)
    ) -> None:
        self.owner = owner
        self.options = options
        self.model = model
        self.outputs = outputs

    @property
    def labels(self) -> list[Any]:
        """Every label that a row can get; empty for a head that gives none."""
        return []

    @abstractmethod
    def fields(self) -> list[pa.Field]:
        """The columns in order; the types are those in `gpuclassify.frames`."""

    @property
    def list_size(self) -> int:
        """Numbers that a row has in columns of lists, 0 if that is not known."""
        return self.model.checkpoint.output_count

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError unless a model of this description gives what the head reads."""
        return

    def check_settings(self) -> None:
        """Raise ValueError unless the settings fit the head and the model's labels."""
        return

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """What can be averaged over the windows of a text, float32 as `outputs`."""
        return outputs

    @abstractmethod
    def columns(self, values: np.ndarray) -> Columns:
        """Columns for activated outputs, float32 (texts, outputs)."""

    def arrays(self, values: np.ndarray) -> dict[str, pa.Array]:
        """What `columns` makes as Arrow arrays, if they are the columns of `fields`."""
        made, giver = self.columns(values), f"{self.owner}.columns()"
        fields = {field.name: field for field in self.fields()}
        if sorted(made) != sorted(fields):
            raise ValueError(
                f"{giver} gave {sorted(made)}, and new_columns declares {sorted(fields)}: they "
                "must be the same"
            )
        return {
            name: arrow_array(made[name], field, len(values), giver)
            for name, field in fields.items()
        }

    def passes(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Which texts pass each filter that is set, bool (texts,), by what `columns` gets.

        The names are among `gpuclassify.mapping.stage_counts.REASONS`.
        """
        return {}

    def certainties(self, values: np.ndarray) -> np.ndarray | None:
        """What examples are ordered by, a finite number for each text; None without such."""
        return None


class OwnColumns(Head):
    """Columns that a mapper declares and computes itself."""

    def __init__(
        self,
        *parts: Any,
        declared: Mapping[str, str],
        compute: Callable[[np.ndarray], Columns] | None,
    ) -> None:
        super().__init__(*parts)
        if compute is None:
            raise TypeError(
                f"{self.owner} declares new_columns and has no columns(outputs): write it"
            )
        self._declared = declared
        self._compute = compute

    def fields(self) -> list[pa.Field]:
        """The declared columns."""
        return [pa.field(name, COLUMN_TYPES[kind]) for name, kind in self._declared.items()]

    def check_settings(self) -> None:
        """Raise ValueError if the settings filter by labels or scores, which are not known here."""
        for name in self.options.filter_names:
            if getattr(self.options, name) is not None:
                raise ValueError(
                    f"{name} has no meaning for {self.owner}, which declares columns "
                    "of its own: compare those columns instead"
                )

    def columns(self, values: np.ndarray) -> Columns:
        """What the mapper makes of the outputs."""
        return self._compute(values)


def named_fields(*columns: tuple[str | None, pa.DataType]) -> list[pa.Field]:
    """The fields of those columns that have a name."""
    return [pa.field(name, kind) for name, kind in columns if name is not None]


def named_columns(*columns: tuple[str | None, Any]) -> dict[str, Any]:
    """The values of those columns that have a name."""
    return {name: values for name, values in columns if name is not None}


class LabelHead(Head):
    """Gives each text a label, and filters rows by it."""

    def __init__(self, *parts: Any, **given: Any) -> None:
        super().__init__(*parts, **given)
        self.label_field = self.options.label_field
        self.keep_field = self.options.keep_field
        self.filters = self.options.filters

    @property
    def labels(self) -> list[Any]:
        """The labels in id order: as given, or from the checkpoint's ``config.json``."""
        return list(self.options.labels or self.model.checkpoint.labels)

    def check_settings(self) -> None:
        """Raise ValueError unless the labels to filter by exist."""
        self._check_labels(*(self.options.filter_by or ()))

    @property
    def scores_type(self) -> pa.DataType:
        """Of a column with a number for each label: a list in id order, or a struct by name."""
        if self.options.score_format == "list":
            return SCORES
        return pa.struct([(label, FLOAT32) for label in self.labels])

    def _check_labels(self, *names: str) -> None:
        for name in names:
            if name not in self.labels:
                raise ValueError(
                    f"no label {name!r} in {self.owner}.{nearest(name, self.labels)} "
                    f"Labels are {some_of(self.labels, _MOST_LABELS)}."
                )

    def check_minimums(self, are_several: bool) -> None:
        """Raise ValueError unless `min_score` names labels of several scores, or none of one."""
        minimum = self.options.min_score
        if isinstance(minimum, tuple):
            if not are_several:
                raise ValueError(
                    f"min_score={dict(minimum)} names labels, and there is one score: pass a number"
                )
            self._check_labels(*dict(minimum))
        elif minimum is not None and are_several:
            raise ValueError(
                f"min_score={minimum} names no label, and this model scores {len(self.labels)}: "
                f"pass a minimum by label, such as min_score={{{self.labels[0]!r}: {minimum}}}"
            )

    def check_classifier(
        self, checkpoint: Checkpoint, problem_type: str, labels: tuple[str, ...]
    ) -> None:
        """Raise CheckpointError unless it is of this kind, with `labels` where any are given."""
        name, given = checkpoint.identity.name, self.options.labels
        if not checkpoint.labels:
            raise CheckpointError(
                f"config.json of {name} has no id2label: add the labels by id, "
                f"or declare new_columns in {self.owner} and write columns()"
            )
        if checkpoint.heads:
            raise CheckpointError(
                f"{name} has several heads ({', '.join(head for head, _ in checkpoint.heads)}): it "
                "is no checkpoint of a single classifier; PromptTaskComplexityClassifier reads it"
            )
        if checkpoint.problem_type != problem_type:
            raise CheckpointError(
                f"{self.owner} takes a {problem_type} model, and {name} is a "
                f"{checkpoint.problem_type} model: use DistributedDataClassifier, or pass "
                "problem_type= if config.json is wrong"
            )
        if given is not None and given != labels:
            raise CheckpointError(
                f"labels={list(given)} are not those of {name}, which are {list(labels)}: pass "
                "them in this order, or leave labels out"
            )

    def passes_label(self, labels: np.ndarray) -> dict[str, np.ndarray]:
        """Which of `labels` (texts,) pass `filter_by`, if it is set; see `passes`."""
        if self.options.filter_by is None:
            return {}
        return {"label": np.isin(labels, np.asarray(self.options.filter_by, dtype=object))}

    def passes_score(self, scores: np.ndarray) -> dict[str, np.ndarray]:
        """Which texts reach `min_score`, if it is set; see `passes`.

        `scores` are float32 (texts,), or (texts, labels) for minimums by label.
        """
        minimum = self.options.min_score
        if minimum is None:
            return {}
        if scores.ndim == 1:
            return {"score": scores >= np.float32(minimum)}
        places = [self.labels.index(label) for label, _ in minimum]
        least = np.array([number for _, number in minimum], dtype=np.float32)
        return {"score": np.all(scores[:, places] >= least, axis=1)}


class CategoryHead(LabelHead):
    """The most probable of several labels, by softmax; ties go to the lowest id."""

    problem_type: ClassVar[str] = SINGLE_LABEL

    def fields(self) -> list[pa.Field]:
        """Label, scores and confidence, as far as they have names."""
        return named_fields(
            (self.label_field, pa.string()),
            (self.options.score_field, self.scores_type),
            (self.options.confidence_field, pa.float32()),
        )

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """Probabilities for logits, float32 (texts, labels)."""
        return softmax(outputs)

    def columns(self, values: np.ndarray) -> Columns:
        """Columns for probabilities, float32 (texts, labels)."""
        return named_columns(
            (self.label_field, label_array(values.argmax(axis=1), self.labels)),
            (self.options.score_field, scores_array(values, self.scores_type)),
            (self.options.confidence_field, values.max(axis=1)),
        )

    def passes(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Which texts have a wanted label, confidence and score."""
        labels = np.asarray(self.labels, dtype=object)[values.argmax(axis=1)]
        passed = self.passes_label(labels)
        if self.options.min_confidence is not None:
            minimum = np.float32(self.options.min_confidence)
            passed["confidence"] = values.max(axis=1) >= minimum
        return passed | self.passes_score(values)

    def certainties(self, values: np.ndarray) -> np.ndarray:
        """The probability of each text's label."""
        return values.max(axis=1)

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError unless the checkpoint is of this kind and has the labels given."""
        self.check_classifier(checkpoint, self.problem_type, checkpoint.labels)

    def check_settings(self) -> None:
        """Raise ValueError unless the filters fit the model's labels, and the format a column."""
        super().check_settings()
        self.check_minimums(are_several=True)
        if self.options.labels_field is not None and self.problem_type != MULTI_LABEL:
            raise ValueError(
                f"labels_field={self.options.labels_field!r} would hold several labels of a text, "
                f"and {self.options.model} gives one: use label_field, or pass "
                f'problem_type="{MULTI_LABEL}" if that is wrong'
            )
        if self.options.score_format != "list" and self.options.score_field is None:
            raise ValueError(
                f"score_format={self.options.score_format!r} has no column to shape: pass "
                'score_field= with it, such as score_field="scores"'
            )


class MultiLabelHead(CategoryHead):
    """As `CategoryHead`, with a probability of its own for each label."""

    problem_type = MULTI_LABEL

    def fields(self) -> list[pa.Field]:
        """Those of `CategoryHead`, and all labels of each text."""
        return [*super().fields(), *named_fields((self.options.labels_field, LABELS))]

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """Probabilities for logits, float32 (texts, labels)."""
        return sigmoid(outputs)

    def columns(self, values: np.ndarray) -> Columns:
        """Columns for probabilities, float32 (texts, labels)."""
        all_labels = labels_array(self._are_given(values), self.labels)
        return {**super().columns(values), **named_columns((self.options.labels_field, all_labels))}

    def passes(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """As of `CategoryHead`; with `labels_field`, which texts have any of the wanted labels."""
        passed = super().passes(values)
        if self.options.labels_field is not None and self.options.filter_by is not None:
            wanted = [label in self.options.filter_by for label in self.labels]
            passed["label"] = np.any(self._are_given(values)[:, wanted], axis=1)
        return passed

    def check_settings(self) -> None:
        """As of `CategoryHead`; raise ValueError for a threshold of a label that does not exist."""
        super().check_settings()
        if isinstance(self.options.thresholds, tuple):
            self._check_labels(*dict(self.options.thresholds))

    def _are_given(self, values: np.ndarray) -> np.ndarray:
        """Which probabilities reach their labels' thresholds, bool (texts, labels)."""
        given = self.options.thresholds
        by_label = dict(given) if isinstance(given, tuple) else {}
        default = THRESHOLD if given is None or by_label else given
        least = [by_label.get(label, default) for label in self.labels]
        return values >= np.array(least, dtype=np.float32)


class RegressionHead(LabelHead):
    """The model's raw outputs: a number, or a list of them; no label."""

    def __init__(self, *parts: Any, **given: Any) -> None:
        super().__init__(*parts, **given)
        self.label_field = None  # a number is no label

    @property
    def score_field(self) -> str:
        """Name of the score column."""
        return self.options.score_field or "score"

    def fields(self) -> list[pa.Field]:
        """The score: float32, or a list or struct of several."""
        kind = FLOAT32 if len(self.labels) == 1 else self.scores_type
        return [pa.field(self.score_field, kind)]

    def columns(self, values: np.ndarray) -> Columns:
        """The column of outputs, float32 (texts, outputs)."""
        is_one = len(self.labels) == 1
        scores = values[:, 0] if is_one else scores_array(values, self.scores_type)
        return {self.score_field: scores}

    def passes(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Which texts score enough."""
        return self.passes_score(values[:, 0] if len(self.labels) == 1 else values)

    def certainties(self, values: np.ndarray) -> np.ndarray | None:
        """The score, if there is one."""
        return values[:, 0] if len(self.labels) == 1 else None

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError unless the checkpoint is a regression model."""
        self.check_classifier(checkpoint, REGRESSION, checkpoint.labels)

    def check_settings(self) -> None:
        """Raise ValueError for settings of labels, and for minimums that fit no output."""
        options = self.options
        labels = (("label_field", "preds"), ("labels_field", None), ("confidence_field", None))
        for name, default in labels:
            if getattr(options, name) not in (None, default):
                raise ValueError(f"a regression model gives no label: leave {name} out")
        for name in ("filter_by", "min_confidence"):
            if getattr(options, name) is not None:
                raise ValueError(f"a regression model gives no label: use min_score, not {name}")
        if len(self.labels) == 1 and options.score_format != "list":
            raise ValueError(
                f"score_format={options.score_format!r} has no meaning for one score, which is a "
                "number: leave score_format out"
            )
        self.check_minimums(are_several=len(self.labels) > 1)


# By the problem that a checkpoint says it was trained for.
HEADS: dict[str, type[LabelHead]] = {
    SINGLE_LABEL: CategoryHead,
    MULTI_LABEL: MultiLabelHead,
    REGRESSION: RegressionHead,
}
