"""Calibration: scores turned to probabilities of a label, and how far these can be relied on."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from gpuclassify.corpus.statistics.intervals import effective_rows, wilson_interval

Calibration = Literal["isotonic", "sigmoid"]
FOLDS, BINS = 5, 10  # folds to estimate reliability, and bins of its picture


class Labelled(NamedTuple):
    """Rows with a score and a label, of descending score; equal rows are beside each other."""

    scores: np.ndarray  # float (rows,)
    is_positive: np.ndarray  # bool (rows,)
    weights: np.ndarray | None = None  # float64 (rows,), above 0; None where all count alike

    @classmethod
    def of(
        cls, scores: np.ndarray, is_positive: np.ndarray, weights: np.ndarray | None = None
    ) -> Labelled:
        """Return sorted rows, so that results do not depend on the order of the input."""
        keys = (is_positive, -scores) if weights is None else (weights, is_positive, -scores)
        return cls(scores, is_positive, weights).take(np.lexsort(keys))

    def take(self, rows: Any) -> Labelled:
        """Return some rows."""
        weights = None if self.weights is None else self.weights[rows]
        return Labelled(self.scores[rows], self.is_positive[rows], weights)

    def weight(self) -> np.ndarray:
        """Return each row's weight, float64 (rows,)."""
        return np.ones(len(self.scores)) if self.weights is None else self.weights


def fit_calibration(kind: str, rows: Labelled) -> dict[str, Any]:
    """Fit the probability of the label as a function of the score, as JSON values.

    Isotonic regression, which the data alone bend, or the sigmoid of J. Platt (1999).
    """
    scores, weights = rows.scores.astype(np.float64), rows.weight()
    if kind == "isotonic":
        from sklearn.isotonic import IsotonicRegression

        model = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
        model.fit(scores, rows.is_positive, sample_weight=weights)
        points = (model.X_thresholds_, model.y_thresholds_)
        return {"scores": points[0].tolist(), "probabilities": points[1].tolist()}
    from sklearn.linear_model import LogisticRegression

    middle, spread = scores.mean(), scores.std() or 1.0
    with_label = float(weights[rows.is_positive].sum())
    # Platt's targets are no 0 and 1, so that groups which a score parts have a finite slope.
    targets = np.where(
        rows.is_positive,
        (with_label + 1) / (with_label + 2),
        1 / (weights.sum() - with_label + 2),
    )
    standard = np.tile((scores - middle) / spread, 2)[:, None]
    classes = np.repeat([True, False], len(scores))
    shares = np.concatenate([weights * targets, weights * (1 - targets)])
    model = LogisticRegression(C=np.inf, tol=1e-8).fit(standard, classes, sample_weight=shares)
    slope = float(model.coef_[0, 0]) / spread
    return {"slope": slope, "intercept": float(model.intercept_[0]) - slope * middle}


def check_calibration(calibration: dict[str, Any]) -> None:
    """Raise ValueError unless these are values that `fit_calibration` gives."""
    lists = [values for values in calibration.values() if isinstance(values, list)]
    is_sigmoid = {*calibration} == {"slope", "intercept"} and not lists
    is_isotonic = (
        {*calibration} == {"scores", "probabilities"}
        and len(lists) == 2
        and len(lists[0]) == len(lists[1]) > 0
        and sorted(calibration["scores"]) == calibration["scores"]
    )
    if not (is_isotonic or is_sigmoid):
        raise ValueError(
            "a calibration has a slope and an intercept, or ascending scores and as many "
            "probabilities"
        )


def calibrated(calibration: dict[str, Any], scores: np.ndarray) -> np.ndarray:
    """Return the probabilities of scores, float64 (rows,); NaN of NaN."""
    scores = scores.astype(np.float64)
    if "slope" in calibration:
        with np.errstate(over="ignore"):
            return 1 / (1 + np.exp(-(calibration["slope"] * scores + calibration["intercept"])))
    return np.interp(scores, calibration["scores"], calibration["probabilities"])


def reliability(kind: str, rows: Labelled) -> list[list[float]]:
    """Compare probabilities with shares of rows that have the label, in bins of equally many rows.

    Each row gets the probability of a calibration of the other rows, those of `FOLDS` - 1 of as
    many parts. A bin has mean probability, share, both ends of its interval, and rows.
    """
    part = np.arange(len(rows.scores)) % FOLDS
    predicted = np.zeros(len(part))
    for number in range(FOLDS):
        judged = part == number
        if judged.any() and not judged.all():
            fitted = fit_calibration(kind, rows.take(~judged))
            predicted[judged] = calibrated(fitted, rows.scores[judged])
    bins, weights = [], rows.weight()
    for places in np.array_split(np.argsort(predicted, kind="stable"), BINS):
        if len(places):
            some = weights[places]
            mean, share = (
                float(np.average(values[places], weights=some))
                for values in (predicted, rows.is_positive)
            )
            squares = np.square(some)
            of_part = squares[rows.is_positive[places]].sum()
            trials = effective_rows(share, some.sum(), squares.sum(), of_part)
            ends = wilson_interval(share, trials)
            bins.append([mean, share, *map(float, ends), len(places)])
    return bins
