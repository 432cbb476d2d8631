"""Classifier: labels, scores and filters from a model's outputs; and any checkpoint by its name."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from gpuclassify.checks import nearest
from gpuclassify.classifiers.outputs import sigmoid, softmax
from gpuclassify.columns import SCORES, label_array, list_array
from gpuclassify.model_mapper import ModelMapper
from gpuclassify.models.checkpoint import Checkpoint, CheckpointError
from gpuclassify.options import ClassifierOptions, LabelOptions
from gpuclassify.partition_map import NewColumns

SINGLE_LABEL = "single_label_classification"
MULTI_LABEL = "multi_label_classification"
REGRESSION = "regression"


class LabelMapper(ModelMapper):
    """Gives each text a label, and filters rows by it."""

    Options = LabelOptions

    @property
    @abstractmethod
    def labels(self) -> list[str]:
        """Every label that a row can get."""

    @property
    def label_field(self) -> str | None:
        """Name of the label column."""
        return self.options.label_field

    def named_fields(self, *new: pa.Field) -> list[pa.Field]:
        """Those columns that have a name, with the decision's last."""
        keep = pa.field(self.options.keep_field or "", pa.bool_(), nullable=False)
        return [column for column in (*new, keep) if column.name]

    def decided(self, arrays: Mapping[Any, pa.Array], keep: np.ndarray) -> NewColumns:
        """The columns that have a name, and the decision as rows to keep or as a column."""
        columns = {name: array for name, array in arrays.items() if name is not None}
        if not self.options.filters:
            return NewColumns(columns)
        if self.options.keep_field is None:
            return NewColumns(columns, keep)
        return NewColumns(columns, keep, self.options.keep_field)

    def empty_columns(self) -> NewColumns:
        """The columns of no text, of which none is kept."""
        empty = super().empty_columns().arrays
        keep_field = self.options.keep_field
        return self.decided(
            {name: array for name, array in empty.items() if name != keep_field},
            np.zeros(0, dtype=bool),
        )

    def check_labels(self, *names: str) -> None:
        """Raise ValueError unless all `names` are labels."""
        for name in names:
            if name not in self.labels:
                raise ValueError(
                    f"no label {name!r} in {type(self).__qualname__}."
                    f"{nearest(name, self.labels)} Labels are {', '.join(self.labels)}."
                )

    def is_wanted_label(self, labels: np.ndarray) -> np.ndarray:
        """Which of `labels` (texts,) pass `filter_by`, bool (texts,)."""
        if self.options.filter_by is None:
            return np.ones(len(labels), dtype=bool)
        return np.isin(labels, np.asarray(self.options.filter_by, dtype=object))


class Classifier(LabelMapper):
    """Adds label, score and confidence columns, and filters rows by them.

    A published classifier is a subclass that declares `defaults` and what `gpuclassify models`
    shows of it.
    """

    Options = ClassifierOptions

    @property
    def labels(self) -> list[str]:
        """The labels in id order: as given, or from the checkpoint's ``config.json``."""
        return list(self.options.labels or self.checkpoint.labels)

    @property
    def problem_type(self) -> str:
        """What the model's outputs mean."""
        return SINGLE_LABEL

    @property
    def label_field(self) -> str | None:
        """Name of the label column; there is none among columns of one's own."""
        return None if self.new_columns else super().label_field

    @property
    def score_field(self) -> str | None:
        """Name of the score column."""
        return self.options.score_field

    @property
    def output_count(self) -> int:
        """Scores of one text."""
        return len(self.labels)

    def output_fields(self) -> list[pa.Field]:
        """The columns as far as they are named: label, score, confidence and decision."""
        if self.new_columns:
            return super().output_fields()
        return self.named_fields(
            pa.field(self.label_field or "", pa.string()),
            pa.field(self.score_field or "", SCORES),
            pa.field(self.options.confidence_field or "", pa.float32()),
        )

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """Probabilities for logits, or outputs as they are, float32 (texts, outputs)."""
        if self.new_columns or self.problem_type == REGRESSION:
            return outputs
        return (sigmoid if self.problem_type == MULTI_LABEL else softmax)(outputs)

    def columns(self, probabilities: np.ndarray) -> NewColumns | Mapping[str, Any]:
        """Columns for probabilities, float32 (texts, labels); ties go to the lowest id."""
        ids = probabilities.argmax(axis=1)
        confidence = probabilities[np.arange(len(ids)), ids]
        labels = np.asarray(self.labels, dtype=object)[ids]
        keep = self._is_wanted(labels, confidence) & self._scores_enough(probabilities)
        return self.decided(
            {
                self.label_field: label_array(ids, self.labels),
                self.score_field: list_array(probabilities),
                self.options.confidence_field: pa.array(confidence, pa.float32()),
            },
            keep,
        )

    def empty_columns(self) -> NewColumns:
        """The columns of no text, of which none is kept."""
        return ModelMapper.empty_columns(self) if self.new_columns else super().empty_columns()

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Raise unless the checkpoint is of the declared kind and has the declared labels."""
        if not self.new_columns:
            self._check_kind(checkpoint)
        super().check_checkpoint(checkpoint)

    def _check_kind(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.labels:
            raise CheckpointError(
                f"config.json of {checkpoint.identity.name} has no id2label: add the labels by id, "
                f"or declare new_columns in {type(self).__qualname__} and write columns()"
            )
        if checkpoint.heads:
            raise CheckpointError(
                f"{checkpoint.identity.name} has several heads "
                f"({', '.join(name for name, _ in checkpoint.heads)}): it is no checkpoint of a "
                "single classifier; PromptTaskComplexityClassifier reads it"
            )
        if checkpoint.problem_type != self.expected_problem_type(checkpoint):
            raise CheckpointError(
                f"{type(self).__qualname__} takes a {self.problem_type} model, and "
                f"{checkpoint.identity.name} is a {checkpoint.problem_type} model: use "
                f"DistributedDataClassifier, or pass problem_type= if its config.json is wrong"
            )
        declared, found = self.options.labels, self.expected_labels(checkpoint)
        if declared is not None and declared != found:
            raise CheckpointError(
                f"labels={list(declared)} are not those of {checkpoint.identity.name}, which are "
                f"{list(found)}: pass them in this order, or leave labels out"
            )

    def expected_problem_type(self, checkpoint: Checkpoint) -> str:
        """The kind of problem that fits this class."""
        return self.problem_type

    def expected_labels(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """The labels that rows get with this checkpoint, in id order."""
        return checkpoint.labels

    def check(self, frame: Any) -> None:
        """Raise unless the frame's columns and the labels to filter by exist."""
        super().check(frame)
        if self.new_columns:
            self._refuse_filters()
        elif self.options.labels is not None or self._can_read_checkpoint():
            self.check_filters()

    def _refuse_filters(self) -> None:
        for name in self.options.filter_names:
            if getattr(self.options, name) is not None:
                raise ValueError(
                    f"{name} has no meaning for {type(self).__qualname__}, which declares columns "
                    "of its own: compare those columns instead"
                )

    def check_filters(self) -> None:
        """Raise ValueError unless the filters fit the model's labels."""
        minimum = self.options.min_score
        if minimum is not None and not isinstance(minimum, tuple):
            raise ValueError(
                f"min_score={minimum} names no label, and this model scores {len(self.labels)}: "
                f"pass a minimum by label, such as min_score={{{self.labels[0]!r}: {minimum}}}"
            )
        self.check_labels(*(self.options.filter_by or ()), *(name for name, _ in minimum or ()))

    def _is_wanted(self, labels: np.ndarray, confidence: np.ndarray) -> np.ndarray:
        wanted = self.is_wanted_label(labels)
        if self.options.min_confidence is not None:
            wanted &= confidence >= np.float32(self.options.min_confidence)
        return wanted

    def _scores_enough(self, scores: np.ndarray) -> np.ndarray:
        """Texts whose scores reach every minimum that is set by label, bool (texts,)."""
        enough = np.ones(len(scores), dtype=bool)
        for label, minimum in self.options.min_score or ():
            enough &= scores[:, self.labels.index(label)] >= np.float32(minimum)
        return enough


class DistributedDataClassifier(Classifier):
    """Any text classification checkpoint of the Hub or of a directory.

    Reads the layouts of the published classifiers and every architecture that transformers'
    ``AutoModelForSequenceClassification`` knows. What the outputs mean comes from the checkpoint,
    or from `problem_type`:

    ==========================  =======================================  =========================
    problem_type                label (``label_field``)                  ``score_field``
    ==========================  =======================================  =========================
    single_label_classification the most probable                        softmax, list<float32>
    multi_label_classification  the most probable                        sigmoids, list<float32>
    regression, one output      none                                     the raw output, float32
    regression, more outputs    none                                     raw outputs, list<float32>
    ==========================  =======================================  =========================

    A checkpoint with one output and no `problem_type` is a regression model, as in transformers.

    Parameters
    ----------
    model : str
        Hub name or directory.
    label_field : str, default "preds"
    score_field : str, optional
        Default: none for labels, ``"score"`` for regression.
    **options
        See `gpuclassify.options.ClassifierOptions`. With `labels`, the model is taken for a single
        label one unless `problem_type` says otherwise.

    Examples
    --------
    >>> classifier = DistributedDataClassifier(model="path/to/checkpoint")  # doctest: +SKIP
    >>> ddf.pipe(classifier)  # doctest: +SKIP
    """

    family = "checkpoint"
    purpose = "any text classification checkpoint"
    licence = "the checkpoint's"
    defaults: ClassVar[dict[str, Any]] = {"label_field": "preds"}

    @property
    def problem_type(self) -> str:
        """As given, or as the checkpoint says."""
        if self.options.problem_type is not None:
            return self.options.problem_type
        return SINGLE_LABEL if self.options.labels is not None else self.checkpoint.problem_type

    @property
    def label_field(self) -> str | None:
        """Name of the label column; regression has none."""
        if self.new_columns or self.problem_type == REGRESSION:
            return None
        return self.options.label_field

    @property
    def score_field(self) -> str | None:
        """Name of the score column; regression always has one."""
        if self.problem_type == REGRESSION:
            return self.options.score_field or "score"
        return self.options.score_field

    def output_fields(self) -> list[pa.Field]:
        """The columns; the score of a regression model is a plain number."""
        if not self.new_columns and self.problem_type == REGRESSION and self.output_count == 1:
            return self.named_fields(pa.field(self.score_field, pa.float32()))
        return super().output_fields()

    def columns(self, outputs: np.ndarray) -> NewColumns | Mapping[str, Any]:
        """Columns for probabilities or raw outputs, float32 (texts, outputs)."""
        if self.problem_type != REGRESSION:
            return super().columns(outputs)
        if self.output_count > 1:
            return self.decided(
                {self.score_field: list_array(outputs)}, self._scores_enough(outputs)
            )
        scores = outputs[:, 0]
        minimum = self.options.min_score
        keep = scores >= np.float32(-np.inf if minimum is None else minimum)
        return self.decided({self.score_field: pa.array(scores, pa.float32())}, keep)

    def expected_problem_type(self, checkpoint: Checkpoint) -> str:
        """Any kind, but the one declared if the labels are."""
        return checkpoint.problem_type if self.options.labels is None else self.problem_type

    def check_filters(self) -> None:
        """Raise ValueError unless the filters fit the kind of model."""
        if self.problem_type != REGRESSION:
            super().check_filters()
            return
        options = self.options
        for name, default in (("label_field", "preds"), ("confidence_field", None)):
            if getattr(options, name) not in (None, default):
                raise ValueError(f"a regression model gives no label: leave {name} out")
        for name in ("filter_by", "min_confidence"):
            if getattr(options, name) is not None:
                raise ValueError(f"a regression model gives no label: use min_score, not {name}")
        if self.output_count > 1:
            super().check_filters()
        elif isinstance(options.min_score, tuple):
            raise ValueError(
                f"min_score={dict(options.min_score)} names labels, and this model has one score: "
                "pass a number"
            )
