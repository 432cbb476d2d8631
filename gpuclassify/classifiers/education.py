"""The FineWeb family: educational value as a score from 0 to 5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from gpuclassify.checks import check_optional_texts
from gpuclassify.classifiers.base import REGRESSION, Classifier
from gpuclassify.columns import label_array
from gpuclassify.models.checkpoint import Checkpoint, CheckpointError
from gpuclassify.options import ClassifierOptions
from gpuclassify.partition_map import NewColumns

LOWEST, HIGHEST = 0.0, 5.0
HIGH_QUALITY_FROM = 2.5
QUALITY_LABELS = ("low_quality", "high_quality")


@dataclass(frozen=True, kw_only=True)
class EducationOptions(ClassifierOptions):
    """Settings of the FineWeb family, beside those of `ClassifierOptions`.

    Attributes
    ----------
    int_score_field : str, optional
        Output column (Int64) of the score rounded half to even.
    """

    int_score_field: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_optional_texts(self, ("int_score_field",), "a column name or None")


class EducationClassifier(Classifier):
    """Scores educational value from 0 to 5 with a regression model.

    The score is the model's output clamped to 0..5; the integer score is that, rounded half to
    even; the label is ``high_quality`` from 2.5 on, else ``low_quality``.
    """

    family = "education"
    Options = EducationOptions

    @property
    def labels(self) -> list[str]:
        """``low_quality`` and ``high_quality``."""
        return list(QUALITY_LABELS)

    @property
    def problem_type(self) -> str:
        """Regression."""
        return REGRESSION

    @property
    def output_count(self) -> int:
        """One score a text."""
        return 1

    def output_fields(self) -> list[pa.Field]:
        """The columns as far as they are named: score, integer score, label and decision."""
        return self.named_fields(
            pa.field(self.score_field or "", pa.float32()),
            pa.field(self.options.int_score_field or "", pa.int64()),
            pa.field(self.label_field or "", pa.string()),
        )

    def columns(self, outputs: np.ndarray) -> NewColumns:
        """Columns for the model's raw outputs, float32 (texts, 1)."""
        scores = np.clip(outputs[:, 0], LOWEST, HIGHEST)
        is_high = scores >= HIGH_QUALITY_FROM
        ids = is_high.astype(np.int64)
        labels = np.asarray(QUALITY_LABELS, dtype=object)[ids]
        keep = self._is_wanted(labels, scores)
        if self.options.min_score is not None:
            keep &= scores >= np.float32(self.options.min_score)
        return self.decided(
            {
                self.score_field: pa.array(scores, pa.float32()),
                self.options.int_score_field: pa.array(np.rint(scores).astype(np.int64)),
                self.label_field: label_array(ids, QUALITY_LABELS),
            },
            keep,
        )

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Raise unless the checkpoint has a single regression output."""
        if len(checkpoint.labels) != 1:
            raise CheckpointError(
                f"{checkpoint.identity.name} has {len(checkpoint.labels)} outputs, and "
                f"{type(self).__qualname__} takes a regression model with one: "
                "use DistributedDataClassifier for other models"
            )
        super().check_checkpoint(checkpoint)

    def expected_labels(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """The two quality labels, whatever the checkpoint calls its output."""
        return QUALITY_LABELS

    def check(self, frame: Any) -> None:
        """Raise unless the frame's columns exist and the filters have a meaning."""
        for name in ("confidence_field", "min_confidence"):
            if getattr(self.options, name) is not None:
                raise ValueError(
                    f"{name} has no meaning for {type(self).__qualname__}, whose output is a score "
                    "and no probability: use score_field and min_score"
                )
        super().check(frame)

    def check_filters(self) -> None:
        """Raise ValueError unless the filters fit a score from 0 to 5 and the two labels."""
        minimum = self.options.min_score
        if isinstance(minimum, tuple):
            raise ValueError(
                f"min_score={dict(minimum)} names labels, and there is one score: pass a number"
            )
        if minimum is not None and minimum > HIGHEST:
            raise ValueError(f"min_score={minimum} keeps nothing: scores run from 0 to 5")
        self.check_labels(*(self.options.filter_by or ()))


def _columns(stem: str) -> dict[str, str]:
    return {
        "score_field": f"{stem}-score-float",
        "int_score_field": f"{stem}-score-int",
        "label_field": f"{stem}-score-label",
    }


class FineWebEduClassifier(EducationClassifier):
    """Educational value of web pages, trained on annotations by Llama 3 70B.

    Parameters
    ----------
    model : str, default "HuggingFaceFW/fineweb-edu-classifier"
    score_field : str, default "fineweb-edu-score-float"
    int_score_field : str, default "fineweb-edu-score-int"
    label_field : str, default "fineweb-edu-score-label"
    max_seq_length : int, default 512
    **options
        See `gpuclassify.classifiers.education.EducationOptions`.

    Examples
    --------
    >>> classifier = FineWebEduClassifier(min_score=3.0)
    >>> ddf = ddf.pipe(classifier)  # doctest: +SKIP
    """

    purpose = "educational value from 0 to 5"
    licence = "Apache-2.0"
    defaults = {
        "model": "HuggingFaceFW/fineweb-edu-classifier",
        **_columns("fineweb-edu"),
        "max_seq_length": 512,
    }


class FineWebMixtralEduClassifier(EducationClassifier):
    """Educational value of web pages, trained on annotations by Mixtral 8x22B-Instruct.

    Parameters
    ----------
    model : str, default "nvidia/nemocurator-fineweb-mixtral-edu-classifier"
    score_field : str, default "fineweb-mixtral-edu-score-float"
    int_score_field : str, default "fineweb-mixtral-edu-score-int"
    label_field : str, default "fineweb-mixtral-edu-score-label"
    max_seq_length : int, default 512
    **options
        See `gpuclassify.classifiers.education.EducationOptions`.
    """

    purpose = "educational value from 0 to 5 (Mixtral annotations)"
    licence = "NVIDIA Open Model License"
    defaults = {
        "model": "nvidia/nemocurator-fineweb-mixtral-edu-classifier",
        **_columns("fineweb-mixtral-edu"),
        "max_seq_length": 512,
    }


class FineWebNemotronEduClassifier(EducationClassifier):
    """Educational value of web pages, trained on annotations by Nemotron-4-340B-Instruct.

    Parameters
    ----------
    model : str, default "nvidia/nemocurator-fineweb-nemotron-4-edu-classifier"
    score_field : str, default "fineweb-nemotron-edu-score-float"
    int_score_field : str, default "fineweb-nemotron-edu-score-int"
    label_field : str, default "fineweb-nemotron-edu-score-label"
    max_seq_length : int, default 512
    **options
        See `gpuclassify.classifiers.education.EducationOptions`.
    """

    purpose = "educational value from 0 to 5 (Nemotron annotations)"
    licence = "NVIDIA Open Model License"
    defaults = {
        "model": "nvidia/nemocurator-fineweb-nemotron-4-edu-classifier",
        **_columns("fineweb-nemotron-edu"),
        "max_seq_length": 512,
    }
