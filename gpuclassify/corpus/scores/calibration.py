"""Calibrate scores to probabilities of a positive label, and measure how reliable these are."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from gpuclassify.corpus.statistics.intervals import effective_rows, wilson_interval

Calibration = Literal["isotonic", "sigmoid"]
FOLDS, BINS = 5, 10  # folds to estimate reliability, and bins of its result


class Labelled(NamedTuple):
    """Arrays (rows,) of scores, labels (whether positive) and weights (None if all are 1)."""

    scores: np.ndarray  # float
    is_positive: np.ndarray  # bool
    weights: np.ndarray | None = None  # float64, above 0

    @classmethod
    def of(
        cls, scores: np.ndarray, is_positive: np.ndarray, weights: np.ndarray | None = None
    ) -> Labelled:
        """Return rows sorted by descending score; the order of the arrays has no effect."""
        keys = (is_positive, -scores) if weights is None else (weights, is_positive, -scores)
        return cls(scores, is_positive, weights).take(np.lexsort(keys))

    def take(self, rows: Any) -> Labelled:
        """Return the selected rows: `rows` is an array of indices, a slice, or a bool mask."""
        weights = None if self.weights is None else self.weights[rows]
        return Labelled(self.scores[rows], self.is_positive[rows], weights)

    def weight(self) -> np.ndarray:
        """Return each row's weight, float64 (rows,); 1 without weights."""
        return np.ones(len(self.scores)) if self.weights is None else self.weights


def fit_calibration(kind: str, rows: Labelled) -> dict[str, Any]:
    """Fit the probability of a positive label as a function of the score, for `calibrated`.

    `kind` is "isotonic", for isotonic regression, or "sigmoid", for the sigmoid of J. Platt (1999).
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
    # Platt's targets are not 0 and 1, so that the slope is finite if a score separates the labels.
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
    """Raise ValueError unless a calibration from JSON has the form of one of its two kinds."""
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
    """Return the probability of a positive label for each score, float64 (rows,); NaN for NaN."""
    scores = scores.astype(np.float64)
    if "slope" in calibration:
        with np.errstate(over="ignore"):
            return 1 / (1 + np.exp(-(calibration["slope"] * scores + calibration["intercept"])))
    return np.interp(scores, calibration["scores"], calibration["probabilities"])


def reliability(kind: str, rows: Labelled) -> list[list[float]]:
    """Compare calibrated probabilities with the shares of positive labels, in ten bins of rows.

    Returns `GroupThreshold.reliability`. Each of five folds is predicted by a calibration of the
    other folds. `rows` are sorted as by `Labelled.of`. Empty bins are left out.
    """
    folds = np.arange(len(rows.scores)) % FOLDS
    predicted = np.zeros(len(folds))
    for fold in range(FOLDS):
        is_in = folds == fold
        if is_in.any() and not is_in.all():
            fitted = fit_calibration(kind, rows.take(~is_in))
            predicted[is_in] = calibrated(fitted, rows.scores[is_in])
    bins, weights = [], rows.weight()
    for members in np.array_split(np.argsort(predicted, kind="stable"), BINS):
        if len(members):
            bin_weights = weights[members]
            mean, share = (
                float(np.average(values[members], weights=bin_weights))
                for values in (predicted, rows.is_positive)
            )
            squares = np.square(bin_weights)
            of_part = squares[rows.is_positive[members]].sum()
            trials = effective_rows(share, bin_weights.sum(), squares.sum(), of_part)
            ends = wilson_interval(share, trials)
            bins.append([mean, share, *map(float, ends), len(members)])
    return bins
