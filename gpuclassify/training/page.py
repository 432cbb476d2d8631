"""An evaluation as one HTML file that opens without a network."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from jinja2 import Template

from gpuclassify.pages import page_template

MOST_LABELS, MOST_CURVES = 40, 12  # in a table, and as pictures
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


def page(evaluation: Mapping[str, Any]) -> str:
    """The HTML page of an evaluation.

    Parameters
    ----------
    evaluation : mapping
        As `gpuclassify.training.evaluation.Evaluation.as_dict` gives it. All of its text is
        escaped.
    """
    figures = evaluation["labels"]
    most = sorted(figures, key=lambda label: -figures[label]["count"])[:MOST_LABELS]
    rows = {
        label: dict(zip(figures, row, strict=True))
        for label, row in zip(figures, evaluation["confusion"] or [], strict=False)
    }
    return _template().render(
        found=evaluation,
        names={name: figure_name(name, evaluation["threshold"]) for name in evaluation["summary"]},
        labels=[label for label in figures if label in most],
        confusion=rows,
        has_areas=any("auc" in own for own in figures.values()),
        curves=dict(list(evaluation["curves"].items())[:MOST_CURVES]),
    )


def figure_name(name: str, threshold: float | None) -> str:
    """What people call a figure, and of which labels it is if only of some."""
    is_of_some = threshold is not None and name in ("auc", "f1_at_threshold")
    return FIGURES[name] + (f", {threshold:.3g} or more" if is_of_some else "")


@functools.cache
def _template() -> Template:
    return page_template("gpuclassify", "training", "evaluation.html.j2", figure=shown)


def shown(value: Any) -> str:
    """A figure in three digits, or a dash where it is not defined."""
    return "–" if value is None else f"{value:.3f}"
