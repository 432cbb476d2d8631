"""Evaluate a trained head: figures with intervals, an HTML page, and a model card."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuclassify.corpus.statistics.agreement import (
    confusion,
    correlation,
    grades_of,
    rank_correlation,
)
from gpuclassify.corpus.statistics.intervals import Figures, bootstrap
from gpuclassify.corpus.training.tasks import Task
from gpuclassify.pages import LINE_WIDTH, markdown, text_columns, visible
from gpuclassify.settings.checks import install
from gpuclassify.settings.options import StrPath

if TYPE_CHECKING:
    from jinja2 import Template

CURVE_POINTS = 101
BINS = 24  # bins of a histogram of scores
PROBABLE = 0.5  # minimum probability of a predicted label, with several labels per text
MOST_LABELS, MOST_CURVES = 40, 12  # labels in a table, and labels with curves
ENOUGH_ROWS = 400  # rows that make the interval of any accuracy at most 0.1 wide
LEAST_OF_A_CURVE = 10  # minimum rows with the label, and without it, for a curve
FIGURES = {
    "accuracy": "accuracy",
    "macro_f1": "macro-F1",
    "auc": "area under ROC",
    "f1_at_threshold": "F1",
    "pearson": "Pearson's correlation",
    "spearman": "Spearman's correlation",
    "mean_absolute_error": "mean absolute error",
    "root_mean_squared_error": "root mean squared error",
}
_COLUMNS = ("value", "95% interval", "baseline")
_BASELINES = {
    "classes": "the commonest label for every text",
    "multilabel": "the commonest set of labels for every text",
    "regression": "the mean for every text",
}
_WHAT = {
    "linear": "A linear layer",
    "mlp": "Two layers with a ReLU between them",
    "pooler": "A BERT's pooler and a linear layer",
}
_CARD = """\
---
library_name: gpuclassify
pipeline_tag: text-classification
---
# {name}

{what} on embeddings of {backbone}, whose own weights are as they were. Labels: {labels}.

```python
{usage}
```

## Evaluation

{evaluated}. `evaluation.html` has pictures.

{figures}

{notes}

## Training

{training}
"""


@dataclass(frozen=True)
class Evaluation:
    """Figures that compare a head's scores of annotated texts with their labels.

    Attributes
    ----------
    task : {"classes", "multilabel", "regression"}
    rows : int
        Number of evaluated rows.
    summary : dict of str to float
        ``accuracy`` (with several labels per text: share of rows with all labels right),
        ``macro_f1``, and ``auc``, the area under the ROC curve, averaged over labels that some rows
        have, and some lack. A regression has the first two only if labels are grades (whole numbers
        that differ by less than 20), to which scores are rounded. It also has ``pearson``,
        ``spearman``, ``mean_absolute_error``, ``root_mean_squared_error``, and ``f1_at_threshold``
        and ``auc`` of labels from `threshold` on. None if undefined, such as a correlation with a
        constant.
    labels : dict of str to dict of str to float
        By label ``count`` (annotated rows), ``precision``, ``recall``, ``f1`` and, unless it is a
        grade, ``auc``. Empty for numbers that are not grades.
    intervals : dict of str to [float, float]
        95% confidence interval of each figure of `summary`: Wilson's for the accuracy, by the
        bootstrap over groups of rows for others. None if undefined, or if all draws are equal.
        Intervals of a cross-validation ignore that its heads share rows, and are a little too
        narrow.
    baseline : dict of str to float
        Figures of constant predictions: ``accuracy`` of the most common label (or set of labels, or
        grade), ``mean_absolute_error`` and ``root_mean_squared_error`` of the mean, both of the
        evaluated rows.
    folds : int, optional
        Number of heads of a cross-validation; each row was scored by a head not trained on it.
    confusion : list of list of int, optional
        Rows by annotated and by predicted label, both in the order of `labels`. None for several
        labels per text, and for numbers that are not grades.
    curves : dict of str to list
        At most 101 points ``[threshold, precision, recall, kept]`` by label (for a regression:
        labels from `threshold` on, such as "3 or more"), with ascending thresholds. ``kept`` is the
        share of rows that score at least the threshold.
    undrawn : list of str
        Labels without a curve, because fewer than ten rows have or lack them.
    threshold : float, optional
        Lowest positive label of a regression: the middle of the labels' range, rounded up for
        grades, such as 3 for 0 to 5. The range of grades includes those of the training.
    spread : list of [float, list of int], optional
        Histogram of the scores of a regression for each grade (or lower edge of a tenth of the
        labels' range), in 24 equal bins from `lowest` to `highest`.
    lowest, highest : float
        Range of the scores of a regression.
    about : dict of str to dict
        Tables about the head and the evaluated rows, for people.
    """

    task: str
    rows: int
    summary: dict[str, float | None]
    intervals: dict[str, list[float] | None] = field(default_factory=dict)
    baseline: dict[str, float] = field(default_factory=dict)
    folds: int | None = None
    labels: dict[str, dict[str, float | None]] = field(default_factory=dict)
    confusion: list[list[int]] | None = None
    curves: dict[str, list[list[float]]] = field(default_factory=dict)
    undrawn: list[str] = field(default_factory=list)
    threshold: float | None = None
    spread: list[list[Any]] | None = None
    lowest: float = 0.0
    highest: float = 1.0
    about: dict[str, dict[str, Any]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return all attributes as JSON values; ``Evaluation(**values)`` makes an equal object."""
        return asdict(self)

    @property
    def evaluated(self) -> str:
        """Phrase with the number of evaluated texts, and whether they were cross-validated."""
        if self.folds is None:
            return f"{self.rows:,} annotated texts"
        return (
            f"{self.rows:,} annotated texts, by {self.folds}-fold cross-validation: each was "
            f"judged by one of {self.folds} heads that had not seen it, trained as the saved one"
        )

    @property
    def caution(self) -> str | None:
        """Sentence with advice if fewer than 400 rows were evaluated, else None."""
        if self.rows >= ENOUGH_ROWS:
            return None
        too_few = f"{self.rows:,} annotated texts are few"
        more = f"Annotate {ENOUGH_ROWS - self.rows:,} more"
        for name in ("accuracy", "spearman"):
            if ends := self.intervals.get(name):
                width = ends[1] - ends[0]
                return (
                    f"{too_few}: the {FIGURES[name]} may be anywhere from {_between(ends)}, an "
                    f"interval {width:.2f} wide. {more}, and it is about "
                    f"{width * (self.rows / ENOUGH_ROWS) ** 0.5:.2f} wide."
                )
        return f"{too_few} to judge by. {more}."

    def html(self) -> str:
        """Render an HTML page: one file without script, font or picture from elsewhere."""
        most = sorted(self.labels, key=lambda label: -(self.labels[label]["count"] or 0))
        rows = zip(self.labels, self.confusion or [], strict=False)
        return _template().render(
            evaluation=self.as_dict(),
            evaluated=self.evaluated,
            tiles=self._figures(),
            notes=self._notes(),
            least=LEAST_OF_A_CURVE,
            labels=[label for label in self.labels if label in most[:MOST_LABELS]],
            confusion={label: dict(zip(self.labels, row, strict=True)) for label, row in rows},
            has_areas=any("auc" in figures for figures in self.labels.values()),
            curves=dict(list(self.curves.items())[:MOST_CURVES]),
        )

    def card(self, name: str, record: Mapping[str, Any]) -> str:
        """Render the head's model card (README.md) as Markdown.

        `name` is the name of the head's directory, and `record` is `TrainedHead.record`.
        """
        settings = record["settings"]
        arguments = [f"{key}={value!r}" for key, value in record["reading"].items()]
        if settings["kind"] != "pooler":
            runner = "HeadClassifier"
            arguments.insert(0, f"heads={{{settings['label_field']!r}: {name!r}}}")
        else:
            is_number = settings["task"] == "regression"
            runner = "FineWebEduClassifier" if is_number else "DistributedDataClassifier"
            arguments.insert(0, f"model={name!r}")
        call = ", ".join(arguments)
        return _CARD.format(
            name=markdown(name),
            what=_WHAT[settings["kind"]],
            usage=f"from gpuclassify import {runner}\n\nddf = {runner}({call})(ddf)",
            labels=", ".join(map(markdown, record["labels"])),
            backbone=markdown(record["backbone"]["model"]),
            evaluated=self.evaluated + ("" if self.folds else ", which took no part in training"),
            figures=_table(self._figures(), ("figure", *_COLUMNS)),
            notes="\n\n".join(map(markdown, self._notes())),
            training=_table(
                [(k, v) for part in self.about.values() for k, v in part.items() if v is not None]
            ),
        )

    def _figures(self) -> list[tuple[str, str, str, str]]:
        """Return the rows of a table of figures, as texts: name, value, interval and baseline."""
        return [
            (
                self._figure_name(name),
                _shown(value),
                _between(self.intervals.get(name)),
                _shown(self.baseline[name]) if name in self.baseline else "",
            )
            for name, value in self.summary.items()
        ]

    def _figure_name(self, name: str) -> str:
        is_of_some = self.threshold is not None and name in ("auc", "f1_at_threshold")
        return FIGURES[name] + (f", {self.threshold:.3g} or more" if is_of_some else "")

    def _notes(self) -> list[str]:
        grades = self.task == "regression" and "accuracy" in self.baseline
        by_grade = ", for the accuracy the commonest grade" if grades else ""
        notes = [f"Baseline: {_BASELINES[self.task]}{by_grade}."]
        return notes + ([f"Caution: {self.caution}"] if self.caution else [])

    def save(self, path: StrPath) -> None:
        """Write the evaluation as an HTML page to a file."""
        Path(path).write_text(self.html(), encoding="utf-8")

    def __repr__(self) -> str:
        shown = text_columns([("", *_COLUMNS), *self._figures()])
        lines = (visible(line, "") for line in (f"{self.evaluated}.", *self._notes()))
        first, *notes = (fill(line, LINE_WIDTH) for line in lines)
        return "\n".join([first, *shown, *notes])

    def _repr_html_(self) -> str:
        return (
            '<iframe title="Evaluation" style="width: 100%; height: 640px; border: 0" '
            f'srcdoc="{escape(self.html())}"></iframe>'
        )


def evaluate(
    task: Task,
    outputs: np.ndarray,
    targets: np.ndarray,
    labels: Sequence[str],
    *,
    groups: np.ndarray | None = None,
    folds: int | None = None,
    bounds: tuple[int, int] | None = None,
    about: Mapping[str, Mapping[str, Any]] | None = None,
) -> Evaluation:
    """Compare the outputs of a head (a small network on embeddings) with annotated labels.

    `outputs` are float32 (rows, outputs), before softmax or sigmoid, and `targets` are a result of
    ``task.targets``. Rows with equal `groups` are not independent; with None, all rows are
    independent. `folds` is the number of heads of a cross-validation, or None. `bounds` are the
    lowest and highest grade that a regression was trained on, or None if its labels were not
    grades. `about` are tables to show, by title.
    """
    require_libraries("evaluating a head")
    scores = task.scores(outputs)
    if task.name == "regression":
        numbers = targets.astype(np.float64)
        details, figures = _evaluate_regression(scores[:, 0].astype(np.float64), numbers, bounds)
    elif task.name == "classes":
        details, figures = _evaluate_classes(scores, targets, labels)
    else:
        details, figures = _evaluate_multilabel(scores, targets, labels)
    rows = np.arange(len(targets))
    summary = figures(rows)
    return Evaluation(
        task.name,
        len(rows),
        summary,
        bootstrap(figures, summary, rows if groups is None else groups),
        folds=folds,
        about={name: dict(values) for name, values in (about or {}).items()},
        **details,
    )


def require_libraries(action: str) -> None:
    """Raise ModuleNotFoundError if scikit-learn or scipy, which `action` needs, is missing."""
    for module in ("scipy", "sklearn"):
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(f"{action} needs {module}: {install('train')}", name=module)


def _evaluate_classes(
    scores: np.ndarray, targets: np.ndarray, labels: Sequence[str]
) -> tuple[dict[str, Any], Figures]:
    has_label = targets[:, None] == np.arange(len(labels))
    details, decisions = _evaluate_decisions(targets, scores.argmax(axis=1), labels)
    for name, area in zip(labels, _areas(scores, has_label), strict=True):
        details["labels"][name]["auc"] = area
    return details | _curves(scores, has_label, labels), lambda rows: {
        **decisions(rows),
        "auc": _mean(_areas(scores[rows], has_label[rows])),
    }


def _evaluate_multilabel(
    scores: np.ndarray, targets: np.ndarray, labels: Sequence[str]
) -> tuple[dict[str, Any], Figures]:
    from sklearn.metrics import precision_recall_fscore_support

    has_label, is_decided = targets > 0, scores >= PROBABLE
    is_right = (has_label == is_decided).all(axis=1)
    # One column at a time, because scikit-learn reads a single column as two classes.
    columns = zip(labels, has_label.T, is_decided.T, _areas(scores, has_label), strict=True)
    table = {}
    for name, annotated, decided, area in columns:
        figures_of_label = precision_recall_fscore_support(
            annotated, decided, labels=[True], zero_division=0.0
        )
        table[name] = _label_figures(*(values[0] for values in figures_of_label)) | {"auc": area}
    commonest = np.unique(has_label, axis=0, return_counts=True)[1].max()

    def figures(rows: np.ndarray) -> dict[str, float | None]:
        annotated, decided = has_label[rows], is_decided[rows]
        total = annotated.sum(axis=0) + decided.sum(axis=0)
        return {
            "accuracy": float(is_right[rows].mean()),
            "macro_f1": _mean(2 * (annotated & decided).sum(axis=0) / np.maximum(total, 1)),
            "auc": _mean(_areas(scores[rows], annotated)),
        }

    baseline = {"accuracy": float(commonest / len(targets))}
    return {"labels": table, "baseline": baseline} | _curves(scores, has_label, labels), figures


def _evaluate_regression(
    scores: np.ndarray, numbers: np.ndarray, bounds: tuple[int, int] | None
) -> tuple[dict[str, Any], Figures]:
    details: dict[str, Any] = {"labels": {}, "baseline": {}}
    decisions: Figures = lambda rows: {}  # noqa: E731
    grades = grades_of(numbers)
    if bounds is None or grades is None:
        rounded, threshold = scores, float(numbers.min() + numbers.max()) / 2
    else:
        low, high = min(bounds[0], grades[0]), max(bounds[1], grades[1])
        rounded, threshold = np.clip(np.rint(scores), low, high), math.ceil((low + high) / 2)
        names = [str(grade) for grade in range(low, high + 1)]
        annotated, decided = ((values - low).astype(np.int64) for values in (numbers, rounded))
        details, decisions = _evaluate_decisions(annotated, decided, names)
    is_high, scores_high = numbers >= threshold, rounded >= threshold
    details["baseline"] |= _errors(numbers - numbers.mean())
    codes = [np.unique(values, return_inverse=True)[1] for values in (scores, numbers)]

    def figures(rows: np.ndarray) -> dict[str, float | None]:
        total = is_high[rows].sum() + scores_high[rows].sum()
        weights = np.ones(len(rows))
        return {
            **decisions(rows),
            "pearson": correlation(scores[rows], numbers[rows], weights),
            "spearman": rank_correlation(codes[0][rows], codes[1][rows], weights),
            **_errors(scores[rows] - numbers[rows]),
            "f1_at_threshold": float(2 * (is_high & scores_high)[rows].sum() / total)
            if total
            else None,
            "auc": _areas(scores[rows, None], is_high[rows, None])[0],
        }

    tenths = np.linspace(numbers.min(), numbers.max(), 10, endpoint=False)
    edges = tenths if rounded is scores else np.unique(numbers)
    details |= _curves(scores[:, None], is_high[:, None], [f"{threshold:g} or more"])
    return details | {"threshold": threshold} | _spread(scores, numbers, edges), figures


def _evaluate_decisions(
    targets: np.ndarray, decided: np.ndarray, labels: Sequence[str]
) -> tuple[dict[str, Any], Figures]:
    """Compare annotated and predicted labels: tables, and a function that computes figures.

    `targets` (annotated) and `decided` (predicted) are indices in `labels`, int64 (rows,). Tables
    are attributes of `Evaluation` by name. The function is for `bootstrap`.
    """
    from sklearn.metrics import precision_recall_fscore_support

    positions, is_right = np.arange(len(labels)), targets == decided
    of_labels = precision_recall_fscore_support(
        targets, decided, labels=positions, average=None, zero_division=0.0
    )

    def figures(rows: np.ndarray) -> dict[str, float | None]:
        right, total = (
            np.bincount(values, minlength=len(labels))
            for values in (
                targets[rows[is_right[rows]]],
                np.concatenate([targets[rows], decided[rows]]),
            )
        )
        occurs = total > 0
        return {
            "accuracy": float(is_right[rows].mean()),
            "macro_f1": float((2 * right[occurs] / total[occurs]).mean()),
        }

    table = zip(labels, *of_labels, strict=True)
    details = {
        "labels": {name: _label_figures(*values) for name, *values in table},
        "baseline": {"accuracy": float(np.bincount(targets).max() / len(targets))},
        "confusion": confusion(targets, decided, len(labels)).tolist(),
    }
    return details, figures


def _label_figures(precision: float, recall: float, f1: float, count: int) -> dict[str, Any]:
    figures = {"precision": float(precision), "recall": float(recall), "f1": float(f1)}
    return {"count": int(count), **figures}


def _curves(scores: np.ndarray, has_label: np.ndarray, labels: Sequence[str]) -> dict[str, Any]:
    """Compute a precision-recall curve for each label that at least ten rows have, and ten lack.

    `scores` and `has_label` are (rows, labels). Returns `curves` and `undrawn` of `Evaluation`.
    """
    from sklearn.metrics import precision_recall_curve

    curves: dict[str, list[list[float]]] = {}
    for name, column, is_positive in zip(labels, scores.T, has_label.T, strict=True):
        if min(is_positive.sum(), (~is_positive).sum()) >= LEAST_OF_A_CURVE:
            precision, recall, thresholds = precision_recall_curve(is_positive, column)
            kept = 1 - np.searchsorted(np.sort(column), thresholds) / len(column)
            points = np.stack([thresholds, precision[:-1], recall[:-1], kept], axis=1)
            indices = np.linspace(0, len(points) - 1, min(CURVE_POINTS, len(points)))
            curves[name] = points[indices.round().astype(int)].tolist()
    return {"curves": curves, "undrawn": [name for name in labels if name not in curves]}


def _areas(scores: np.ndarray, has_label: np.ndarray) -> list[float | None]:
    """Compute the area under each label's ROC curve by Mann and Whitney's U statistic.

    None for a label of all rows, or of no row. scikit-learn's function is too slow for a bootstrap.
    """
    from scipy.stats import rankdata

    counts = has_label.sum(axis=0)
    pairs = counts * (len(scores) - counts)
    above = (rankdata(scores, axis=0) * has_label).sum(axis=0) - counts * (counts + 1) / 2
    return [float(wins / n) if n else None for wins, n in zip(above, pairs, strict=True)]


def _errors(errors: np.ndarray) -> dict[str, float]:
    return {
        "mean_absolute_error": float(np.abs(errors).mean()),
        "root_mean_squared_error": float(np.sqrt((errors**2).mean())),
    }


def _spread(scores: np.ndarray, numbers: np.ndarray, edges: np.ndarray) -> dict[str, Any]:
    """Return a histogram of `scores` for each bin of `numbers`, the rows' annotated values.

    Bins of `numbers` begin at `edges`. Returns `spread`, `lowest` and `highest` of `Evaluation`.
    """
    bins = np.searchsorted(edges, numbers, side="right") - 1
    lowest, highest = float(scores.min()), float(scores.max())
    highest = highest if highest > lowest else lowest + 1
    counts = [
        np.histogram(scores[bins == number], BINS, (lowest, highest))[0].tolist()
        for number in range(len(edges))
    ]
    spread = [list(pair) for pair in zip(edges.tolist(), counts, strict=True)]
    return {"spread": spread, "lowest": lowest, "highest": highest}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


@functools.cache
def _template() -> Template:
    from gpuclassify.pages import page_template

    return page_template("gpuclassify", "corpus/training", "evaluation.html.j2", figure=_shown)


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _between(ends: Sequence[float] | None) -> str:
    return "" if ends is None else f"{ends[0]:.3f} to {ends[1]:.3f}"


def _table(rows: Sequence[Sequence[Any]], head: Sequence[str] = ("", "")) -> str:
    return "\n".join(
        "| " + " | ".join(markdown(str(cell)) for cell in row) + " |"
        for row in (head, ["---"] * len(head), *rows)
    )
