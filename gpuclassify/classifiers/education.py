"""Classifiers of the FineWeb family: educational value as a score from 0 to 5."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from gpuclassify.mapping.heads import Columns, named_columns, named_fields
from gpuclassify.mapping.label_heads import LabelHead, label_array
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.models.checkpoint import Checkpoint, CheckpointError
from gpuclassify.settings.declared import declared
from gpuclassify.settings.options import REGRESSION, ScoreOptions
from gpuclassify.settings.signatures import takes

LOWEST, HIGHEST = 0.0, 5.0
HIGH_QUALITY_FROM = 2.5
QUALITY_LABELS = ("low_quality", "high_quality")


@declared
class EducationOptions(ScoreOptions):
    """Settings of the FineWeb family, in addition to `ScoreOptions`.

    Attributes
    ----------
    int_score_field : str
        Output column (Int64) of the score, rounded half to even.
    """

    int_score_field: str | None = None


class EducationHead(LabelHead):
    """Head that converts the output of a regression model to columns of educational value.

    Scores are clipped to 0 to 5. The label is ``high_quality`` from 2.5 on, else ``low_quality``.
    """

    @property
    def labels(self) -> list[str]:
        """The two labels, ``low_quality`` and ``high_quality``, in this order."""
        return list(QUALITY_LABELS)

    def fields(self) -> list[pa.Field]:
        """Return Arrow fields of the score, integer score and label that the settings name."""
        return named_fields(
            (self.options.score_field, pa.float32()),
            (self.options.int_score_field, pa.int64()),
            (self.label_field, pa.string()),
        )

    def columns(self, values: np.ndarray) -> Columns:
        """Return the columns that the settings name, from model outputs, float32 (texts, 1)."""
        scores, ids = _scores_and_ids(values)
        return named_columns(
            (self.options.score_field, scores),
            (self.options.int_score_field, np.rint(scores).astype(np.int64)),
            (self.label_field, label_array(ids, QUALITY_LABELS)),
        )

    def passes(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Return masks of texts that pass the filters "label" and "score", if these are set."""
        scores, ids = _scores_and_ids(values)
        labels = np.asarray(QUALITY_LABELS, dtype=object)[ids]
        return self.passes_label(labels) | self.passes_score(scores)

    def scores(self, values: np.ndarray) -> np.ndarray:
        """Return scores, float32 (texts,): model outputs, float32 (texts, 1), clipped to 0 to 5."""
        return _scores_and_ids(values)[0]

    def certainties(self, values: np.ndarray) -> np.ndarray:
        """Return each score's distance to 2.5, where the label changes, float32 (texts,)."""
        scores, _ = _scores_and_ids(values)
        return np.abs(scores - np.float32(HIGH_QUALITY_FROM))

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError unless the model is a regression with one output."""
        if len(checkpoint.labels) != 1:
            raise CheckpointError(
                f"{checkpoint.identity.name} has {len(checkpoint.labels)} outputs, and "
                f"{self.owner} takes a regression model with one: "
                "use DistributedDataClassifier for other models"
            )
        self.check_classifier(checkpoint, REGRESSION, QUALITY_LABELS)

    def check_settings(self) -> None:
        """Raise ValueError for unknown labels, minimums by label, or a `min_score` above 5."""
        super().check_settings()
        self.check_minimums(are_several=False)
        minimum = self.options.min_score
        if minimum is not None and minimum > HIGHEST:
            raise ValueError(f"min_score={minimum} keeps nothing: scores run from 0 to 5")


def _scores_and_ids(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scores, clipped to 0 to 5, and the indices of their labels in `QUALITY_LABELS`."""
    scores = np.clip(values[:, 0], LOWEST, HIGHEST)
    return scores, (scores >= HIGH_QUALITY_FROM).astype(np.int64)


def _columns(stem: str) -> dict[str, str]:
    return {
        "score_field": f"{stem}-score-float",
        "int_score_field": f"{stem}-score-int",
        "label_field": f"{stem}-score-label",
    }


class EducationClassifier(TextMapper[EducationOptions]):
    """Base class of the FineWeb family: classifiers of educational value, from 0 to 5."""

    Options = EducationOptions
    head_type = EducationHead
    family = "education"
    published_labels = QUALITY_LABELS

    if TYPE_CHECKING:

        @takes(EducationOptions)
        def __init__(self, **settings: object) -> None: ...


class FineWebEduClassifier(EducationClassifier):
    """Classifier of the educational value of web pages, trained on annotations by Llama 3 70B.

    Writes ``fineweb-edu-score-float`` (0 to 5), ``fineweb-edu-score-int``, which
    is rounded, and ``fineweb-edu-score-label``: "high_quality" for scores from
    2.5 on, else "low_quality".

    Examples
    --------
    >>> classifier = FineWebEduClassifier(min_score=3.0)
    >>> ddf = ddf.pipe(classifier)  # doctest: +SKIP
    """

    purpose = "educational value from 0 to 5"
    licence = "Apache-2.0"
    cite = "arXiv:2406.17557"
    defaults = {
        "model": "HuggingFaceFW/fineweb-edu-classifier",
        **_columns("fineweb-edu"),
        "max_seq_length": 512,
    }


class FineWebMixtralEduClassifier(EducationClassifier):
    """Classifier of educational value, trained on annotations by Mixtral 8x22B-Instruct.

    Writes the columns of `FineWebEduClassifier`, with names that begin with
    ``fineweb-mixtral-edu`` instead of ``fineweb-edu``.
    """

    purpose = "educational value from 0 to 5 (Mixtral annotations)"
    licence = "NVIDIA Open Model License"
    defaults = {
        "model": "nvidia/nemocurator-fineweb-mixtral-edu-classifier",
        **_columns("fineweb-mixtral-edu"),
        "max_seq_length": 512,
    }


class FineWebNemotronEduClassifier(EducationClassifier):
    """Classifier of educational value, trained on annotations by Nemotron-4-340B-Instruct.

    Writes the columns of `FineWebEduClassifier`, with names that begin with
    ``fineweb-nemotron-edu`` instead of ``fineweb-edu``.
    """

    purpose = "educational value from 0 to 5 (Nemotron annotations)"
    licence = "NVIDIA Open Model License"
    defaults = {
        "model": "nvidia/nemocurator-fineweb-nemotron-4-edu-classifier",
        **_columns("fineweb-nemotron-edu"),
        "max_seq_length": 512,
    }
