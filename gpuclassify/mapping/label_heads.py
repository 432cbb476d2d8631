"""Heads that give each text a label, several labels or numbers, and filter rows by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from gpuclassify.mapping.heads import (
    FLOAT32,
    SCORES,
    Columns,
    Head,
    list_array,
    named_columns,
    named_fields,
)
from gpuclassify.mapping.stage_counts import LABELS
from gpuclassify.models.activations import sigmoid, softmax
from gpuclassify.models.checkpoint import Checkpoint, CheckpointError, some_of
from gpuclassify.settings.checks import nearest, warn_once
from gpuclassify.settings.options import (
    MULTI_LABEL,
    REGRESSION,
    SINGLE_LABEL,
    THRESHOLD,
    ModelOptions,
)

_MOST_LABELS = 60  # labels listed in a message


class LabelHead(Head):
    """Base class of heads (converters of model outputs to columns) with labels or scores."""

    def __init__(self, *parts: Any, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self.label_field = self.options.label_field
        self.keep_field = self.options.keep_field

    @property
    def labels(self) -> list[Any]:
        """Labels in the order of the outputs, from settings or the model's ``config.json``."""
        return list(self.options.labels or self.model.checkpoint.labels)

    def check_settings(self) -> None:
        """Raise ValueError if `filter_by` names a label that the model does not have."""
        self.check_labels(*(self.options.filter_by or ()))

    @property
    def scores_type(self) -> pa.DataType:
        """Arrow type of a column with a score per label: list in output order, or struct."""
        if self.options.score_format == "list":
            return SCORES
        return pa.struct([(label, FLOAT32) for label in self.labels])

    def check_labels(self, *names: Any) -> None:
        """Raise ValueError if one of `names` is not a label of the model."""
        for name in names:
            if name not in self.labels:
                raise ValueError(
                    f"no label {name!r} in {self.owner}.{nearest(str(name), self.labels)} "
                    f"Labels are {some_of(self.labels, _MOST_LABELS)}."
                )

    def check_differ(self, *names: Any) -> None:
        """Raise ValueError if one of the labels `names` belongs to more than one model output."""
        if several := [name for name in names if self.labels.count(name) > 1]:
            raise ValueError(
                f"{several[0]!r} is the label of several outputs of {self.options.model}: pass "
                "labels= with a name for each"
            )

    def check_minimums(self, are_several: bool) -> None:
        """Raise ValueError unless `min_score` and `line_min_score` fit a text's number of scores.

        With several scores (`are_several`), minimums are given by label; with one, they are
        numbers. With several, `line_scores_field` needs a `line_min_score` for exactly one label.
        """
        options = self.options
        for name in ("min_score", "line_min_score"):
            minimum = getattr(options, name)
            if isinstance(minimum, tuple):
                if not are_several:
                    raise ValueError(
                        f"{name}={dict(minimum)} names labels, and there is one score: pass a "
                        "number"
                    )
                self.check_labels(*dict(minimum))
                self.check_differ(*dict(minimum))
            elif minimum is not None and are_several:
                raise ValueError(
                    f"{name}={minimum} names no label, and this model scores {len(self.labels)}: "
                    f"pass a minimum by label, such as {name}={{{self.labels[0]!r}: {minimum}}}"
                )
        column = options.line_scores_field
        if are_several and column is not None and len(options.line_min_score or ()) != 1:
            raise ValueError(
                f"line_scores_field={column!r} has one score a line, and this model scores "
                f"{len(self.labels)}: name one, such as line_min_score={{{self.labels[0]!r}: 0.5}}"
            )

    def check_classifier(
        self, checkpoint: Checkpoint, problem_type: str, labels: tuple[str, ...]
    ) -> None:
        """Raise CheckpointError unless the model is a single classifier of this problem type.

        `labels` are the model's labels in output order. The setting of this name, if set, must be
        equal; only its length must be if the model's labels are placeholders, such as ``LABEL_0``,
        or no distinct strings.
        """
        name, passed = checkpoint.identity.name, self.options.labels
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
                f"{checkpoint.problem_type} model: use DistributedDataClassifier with "
                f"problem_type={checkpoint.problem_type!r}, or pass "
                f"problem_type={problem_type!r} if config.json is wrong"
            )
        if passed in (None, labels):
            return
        unnamed = tuple(f"LABEL_{number}" for number in range(len(labels)))
        values = (checkpoint.config.get("id2label") or {}).values()
        are_names = all(isinstance(one, str) for one in values) and len({*labels}) == len(labels)
        is_open = labels == unnamed or not are_names
        if not (is_open and len(passed) == len(labels)):
            raise CheckpointError(
                f"labels={list(passed)} are not those of {name}, which are {list(labels)}: pass "
                "them in this order, or leave labels out"
            )

    def passes_label(self, labels: np.ndarray) -> dict[str, np.ndarray]:
        """Return ``{"label": mask}`` of texts whose label is in `filter_by`; {} if not set."""
        if self.options.filter_by is None:
            return {}
        return {"label": np.isin(labels, np.asarray(self.options.filter_by, dtype=object))}

    def passes_confidence(self, confidences: np.ndarray) -> dict[str, np.ndarray]:
        """Return ``{"confidence": mask}`` of texts that reach `min_confidence`; {} if not set."""
        minimum = self.options.min_confidence
        return {} if minimum is None else {"confidence": confidences >= np.float32(minimum)}

    def passes_score(self, scores: np.ndarray) -> dict[str, np.ndarray]:
        """Return ``{"score": mask}`` of texts that reach `min_score`; {} if not set."""
        minimum = self.options.min_score
        return {} if minimum is None else {"score": self.reaches(scores, minimum)}

    def reaches(
        self, scores: np.ndarray, minimum: float | tuple[tuple[str, float], ...]
    ) -> np.ndarray:
        """Return the mask of texts or lines whose scores are at least `minimum`, bool (texts,).

        `scores` are (texts,), or (texts, labels) if `minimum` is pairs of label and number; then a
        text must reach the number of each named label.
        """
        if not isinstance(minimum, tuple):
            return scores >= np.float32(minimum)
        indices = [self.labels.index(label) for label, _ in minimum]
        least = np.array([number for _, number in minimum], dtype=np.float32)
        return np.all(scores[:, indices] >= least, axis=1)

    def scores(self, values: np.ndarray) -> np.ndarray:
        """Return the scores that minimums are compared with: `values` unchanged, by default."""
        return values


class CategoryHead(LabelHead):
    """Head for single-label models: softmax probabilities, and the (first) most probable label."""

    problem_type: ClassVar[str] = SINGLE_LABEL

    def fields(self) -> list[pa.Field]:
        """Return the fields of label, scores and confidence, without columns that have no name."""
        return named_fields(
            (self.label_field, pa.string()),
            (self.options.score_field, self.scores_type),
            (self.options.confidence_field, pa.float32()),
        )

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """Convert logits to probabilities by softmax over the labels, float32 (rows, labels)."""
        return softmax(outputs)

    def columns(self, values: np.ndarray) -> Columns:
        """Return the columns in `fields` by name, from probabilities, float32 (texts, labels)."""
        return named_columns(
            (self.label_field, label_array(values.argmax(axis=1), self.labels)),
            (self.options.score_field, scores_array(values, self.scores_type)),
            (self.options.confidence_field, values.max(axis=1)),
        )

    def passes(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Map the filters in use, "label", "confidence" or "score", to masks of texts that pass."""
        labels = np.asarray(self.labels, dtype=object)[values.argmax(axis=1)]
        passed = self.passes_label(labels) | self.passes_confidence(values.max(axis=1))
        return passed | self.passes_score(values)

    def certainties(self, values: np.ndarray) -> np.ndarray:
        """Return the probability of each text's most probable label, float32 (texts,)."""
        return values.max(axis=1)

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError unless the model is a classifier that fits head and settings.

        A single-label model with only one label is refused, because its probability is always 1.
        """
        self.check_classifier(checkpoint, self.problem_type, checkpoint.labels)
        if self.problem_type == SINGLE_LABEL and len(checkpoint.labels) == 1:
            raise CheckpointError(
                f"{checkpoint.identity.name} has one output, which would be certain of every text "
                f'as a {SINGLE_LABEL} model: pass problem_type="{MULTI_LABEL}" for a probability, '
                f'or "{REGRESSION}" for the number'
            )

    def check_settings(self) -> None:
        """Raise ValueError if a setting names an unknown label, or does not fit the model."""
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
        if self.options.score_format != "list":
            self.check_differ(*self.labels)


class MultiLabelHead(CategoryHead):
    """Head for multi-label models: a sigmoid probability per label, independent of other labels.

    It adds to `CategoryHead` an optional list of all labels that reach their thresholds.
    """

    problem_type = MULTI_LABEL

    def fields(self) -> list[pa.Field]:
        """Return the fields of `CategoryHead`, and of the column of all labels if it has a name."""
        return [*super().fields(), *named_fields((self.options.labels_field, LABELS))]

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """Convert logits to probabilities by sigmoid, float32 (rows, labels)."""
        return sigmoid(outputs)

    def columns(self, values: np.ndarray) -> Columns:
        """Return the columns in `fields` by name, from probabilities, float32 (texts, labels)."""
        all_labels = labels_array(self._are_given(values), self.labels)
        return {**super().columns(values), **named_columns((self.options.labels_field, all_labels))}

    def passes(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Map each filter in use to the mask of texts that pass it, bool (texts,).

        With `labels_field`, a text passes "label" if any of its labels that reach their thresholds
        is in `filter_by`.
        """
        passed = super().passes(values)
        if self.options.labels_field is not None and self.options.filter_by is not None:
            wanted = [label in self.options.filter_by for label in self.labels]
            passed["label"] = np.any(self._are_given(values)[:, wanted], axis=1)
        return passed

    def check_settings(self) -> None:
        """Raise ValueError if a setting names an unknown label, or does not fit the model."""
        super().check_settings()
        if isinstance(self.options.thresholds, tuple):
            self.check_labels(*dict(self.options.thresholds))
            self.check_differ(*dict(self.options.thresholds))

    def _are_given(self, values: np.ndarray) -> np.ndarray:
        """Return the mask of labels whose probability reaches their threshold, (texts, labels)."""
        thresholds = self.options.thresholds
        by_label = dict(thresholds) if isinstance(thresholds, tuple) else {}
        default = THRESHOLD if thresholds is None or by_label else thresholds
        least = [by_label.get(label, default) for label in self.labels]
        return values >= np.array(least, dtype=np.float32)


class RegressionHead(LabelHead):
    """Head for regression models: writes a column of the model's numbers, and no label."""

    def __init__(self, *parts: Any, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self.label_field = None  # numbers are not labels

    @property
    def score_field(self) -> str:
        """Name of the score column; "score" unless the settings name it."""
        return self.options.score_field or "score"

    def fields(self) -> list[pa.Field]:
        """Return the field of the score column: float32, or a list or struct of several numbers."""
        kind = FLOAT32 if len(self.labels) == 1 else self.scores_type
        return [pa.field(self.score_field, kind)]

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """Return the outputs unchanged, or their sigmoid if sentence-transformers applies it."""
        return sigmoid(outputs) if self.model.checkpoint.is_probability else outputs

    def columns(self, values: np.ndarray) -> Columns:
        """Return the score column by its name, with one number, list or struct per text."""
        is_one = len(self.labels) == 1
        scores = values[:, 0] if is_one else scores_array(values, self.scores_type)
        return {self.score_field: scores}

    def passes(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Return ``{"score": mask}`` of texts that reach `min_score`; {} if not set."""
        return self.passes_score(self.scores(values))

    def scores(self, values: np.ndarray) -> np.ndarray:
        """Return the numbers that minimums are compared with; (texts,) if there is one output."""
        return values[:, 0] if len(self.labels) == 1 else values

    def certainties(self, values: np.ndarray) -> np.ndarray | None:
        """Return the model's output for each text, (texts,); None if it has several outputs."""
        return values[:, 0] if len(self.labels) == 1 else None

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError unless the model is a regression model that fits the settings."""
        self.check_classifier(checkpoint, REGRESSION, checkpoint.labels)

    def check_settings(self) -> None:
        """Raise ValueError for settings about labels, and for score settings that do not fit.

        The default `label_field`, "preds", is accepted, and no such column is written.
        """
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


# Head by problem type of the checkpoint.
HEADS: dict[str, type[LabelHead]] = {
    SINGLE_LABEL: CategoryHead,
    MULTI_LABEL: MultiLabelHead,
    REGRESSION: RegressionHead,
}


def label_array(ids: np.ndarray, labels: Sequence[str]) -> pa.DictionaryArray:
    """Convert indices into `labels`, (texts,), to a dictionary-encoded array; null for -1."""
    codes = pa.array(ids.astype(np.int32), mask=ids < 0)
    return pa.DictionaryArray.from_arrays(codes, pa.array(labels, pa.string()))


def labels_array(is_given: np.ndarray, labels: Sequence[str]) -> pa.ListArray:
    """Convert a mask of labels, bool (texts, labels), to an array of lists of label names."""
    offsets = np.concatenate([[0], is_given.sum(axis=1).cumsum()]).astype(np.int32)
    names = pa.array(labels, pa.string()).take(pa.array(np.nonzero(is_given)[1]))
    return pa.ListArray.from_arrays(offsets, names)


def scores_array(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Convert scores, (texts, labels), to lists, or to structs if `kind` is a struct type."""
    if not pa.types.is_struct(kind):
        return list_array(values)
    columns = [pa.array(np.ascontiguousarray(column)) for column in values.T]
    return pa.StructArray.from_arrays(columns, fields=list(kind))


def check_published(
    owner: str, options: ModelOptions, labels: list[Any], published: tuple[Any, ...]
) -> None:
    """Warn if a checkpoint's `labels` differ from `published`, the labels of a mapper's class.

    Order is ignored. Raises CheckpointError instead of the warning if the settings are `strict`.
    Nothing is checked if `labels` is empty.
    """
    if not labels or set(labels) == set(published):
        return
    message = (
        f"{options.model} gives {some_of(labels, 2)}, which are not the labels of {owner} "
        f"({some_of(published, 2)}). If they are meant, pass labels=; else take the class of "
        "this model (`gpuclassify models`), or DistributedDataClassifier"
    )
    if options.strict:
        raise CheckpointError(message)
    warn_once(message)
