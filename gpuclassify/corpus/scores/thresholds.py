"""Choose the minimum score to keep, for each group of rows, from labelled rows."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Self

import dask
import numpy as np

from gpuclassify.corpus.scores.calibration import (
    Calibration,
    Labelled,
    check_calibration,
    fit_calibration,
    reliability,
)
from gpuclassify.corpus.scores.saved import Saved
from gpuclassify.corpus.statistics.intervals import effective_rows, wilson_interval
from gpuclassify.corpus.statistics.quantiles import (
    ScoreColumns,
    group_key,
    group_value,
    refuse_many,
    require_columns,
)
from gpuclassify.frames import Frame, LazyFrame, to_pandas
from gpuclassify.frames.lazy import as_dask, reduce_tree
from gpuclassify.jobs.input.left_out import left_out_logged
from gpuclassify.jobs.input.readers import FileReader, read_columns
from gpuclassify.jobs.ledger.quarantine import OnError
from gpuclassify.pages import text_columns, visible
from gpuclassify.settings.checks import (
    check_choice,
    check_number,
    check_values,
    with_plain_values,
)

logger = logging.getLogger(__name__)

SmallGroups = Literal["refuse", "pool"]
TARGETS = ("precision", "recall", "keep_share")
POOLED = "all others"  # name of the pooled group in tables
_BLOCK = 1 << 18  # scores processed at a time
MOST_NAMED = 10  # groups or labels listed in an error
# Unsorted rows by group, the number of incomplete rows, and some labels as text.
PartRows = tuple[dict[str, Labelled], int, list[str]]
_COLUMNS = ("group", "rows", "with label", "threshold", "95% interval", "precision", "recall",
            "kept")  # fmt: skip
_AT_LOWER_END = " at the lower end of its interval"
_RELIABILITY = (
    "Each line is a tenth of the rows: the probability of the label as other rows tell it (pale), "
    "and the share of rows that have it (strong). Probabilities are reliable if both are alike."
)


@dataclass(frozen=True)
class GroupThreshold:
    """Threshold of one group of rows, such as the rows of a language, with its figures.

    Attributes
    ----------
    rows, positives : int
        Labelled rows with a score and a weight above 0, and the rows among them with a positive
        label.
    threshold : float, optional
        Minimum score to keep; None if no score reaches the target.
    interval : list of float or None
        95% confidence interval of the threshold that all rows of the dataset would give, not only
        the labelled ones. An end is None if there are too few labels to determine it.
    figures : dict of str to [float, float, float]
        ``precision``, ``recall`` and ``keep_share`` at the threshold: value, and low and high end
        of its 95% interval. Empty without a threshold.
    best_precision : float
        Highest precision at any threshold. With ``cautious=True``, the lower end of the target's
        95% interval must reach the asked value. Then this is the highest lower end at any
        threshold, of the precision or the recall, whichever is the target.
    calibration : dict, optional
        Probability of a positive label by score: ``scores`` and ``probabilities``, lists of the
        points of a piecewise linear function, or ``slope`` and ``intercept`` of a sigmoid. None if
        no calibration was asked for.
    reliability : list of [float, float, float, float, int]
        At most ten bins of rows, by ascending probability: mean probability, predicted from other
        rows, share of rows with a positive label, both ends of its 95% interval, and number of
        rows. Empty without a calibration.
    """

    rows: int
    positives: int
    threshold: float | None
    interval: list[float | None]
    figures: dict[str, list[float]]
    best_precision: float
    calibration: dict[str, float | list[float]] | None = None
    reliability: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class Thresholds(Saved):
    """Thresholds of a score, one for each group of rows.

    Attributes
    ----------
    score, label : str
        Columns of the score and of the label.
    target : {"precision", "recall", "keep_share"}
        Figure that thresholds must reach; ``keep_share`` is the share of rows kept.
    value : float
        Minimum of the target.
    groups : dict to GroupThreshold
        Threshold by value of `by`, such as ``"de"``, and None for null. Without `by`, the only key
        is None.
    by : str, optional
        Column of groups.
    positive : list, optional
        Positive labels; None for labels that are true or false.
    weight : str, optional
        Column with the weight of each row.
    cautious : bool
        Whether thresholds are the conservative ends of their intervals.
    pooled : GroupThreshold, optional
        Threshold of all rows, for groups with too few labels or none.
    few : dict to [int, int]
        Groups with too few labels: labelled rows, and those with a positive label.
    left_out : int
        Rows without a score, a label or a weight above 0.
    """

    what: ClassVar[str] = "thresholds"

    score: str
    label: str
    target: str
    value: float
    groups: Mapping[Any, GroupThreshold]
    by: str | None = None
    positive: list[Any] | None = None
    weight: str | None = None
    cautious: bool = False
    pooled: GroupThreshold | None = None
    few: Mapping[Any, list[int]] = field(default_factory=dict)
    left_out: int = 0

    @classmethod
    @with_plain_values
    def fit(
        cls,
        labelled: Frame | LazyFrame | FileReader,
        *,
        score: str,
        label: str,
        by: str | None = None,
        precision: float | None = None,
        recall: float | None = None,
        keep_share: float | None = None,
        positive: str | Sequence[Any] | None = None,
        weight: str | None = None,
        cautious: bool = False,
        min_labels: int = 100,
        small_groups: SmallGroups = "refuse",
        calibration: Calibration | None = None,
        on_error: OnError = "raise",
    ) -> Self:
        """Find the threshold of each group from labelled rows, in one pass.

        Rows with a score of at least the threshold are kept. The threshold is the lowest score at
        which kept rows have at least the asked `precision`, or the highest score at which they have
        at least the asked `recall` or `keep_share`. It is exact, and does not depend on partitions
        or the order of rows. If only some groups reach the target, the others get the threshold
        None, and a warning is logged. Only the columns named here are read, and held in this
        process: some ten bytes per row.

        Parameters
        ----------
        labelled : dask.dataframe.DataFrame, pandas.DataFrame, cudf.DataFrame or FileReader
            From a reader, only the columns named here are read. If these are annotations, the text
            of the input is not read.
        score : str
            Column of numbers; rows with a high score should have a positive label.
        label : str
            Column of labels, by people or a larger model: true or false, or see `positive`.
        by : str, optional
            Column, such as the language; each of its values gets a threshold.
        precision : float, optional
            Minimum share of kept rows with a positive label. Give this, `recall` or `keep_share`.
        recall : float, optional
            Minimum share of rows with a positive label that are kept.
        keep_share : float, optional
            Minimum share of rows that are kept.
        positive : str or list, optional
            Positive labels, such as ``"High"``, or grades ``[3, 4, 5]``. Default: the column holds
            true and false, or 1 and 0.
        weight : str, optional
            Column of numbers: the rows that a labelled row represents, if rows were not drawn with
            equal probability. Default: all rows count 1.
        cautious : bool
            Take the conservative end of each interval, the higher one for a precision and the lower
            one for a recall, so that the target is met with 97.5% confidence instead of about 50%.
            Not for `keep_share`.
        min_labels : int
            Minimum labelled rows of a group, with at least one positive and one other label.
        small_groups : {"refuse", "pool"}
            Refuse groups with too few labels, or give them, and groups without labels, the
            threshold of all rows, with a note.
        calibration : {"isotonic", "sigmoid"}, optional
            Also fit the probability of a positive label by score, and measure its reliability.
        on_error : {"raise", "quarantine"}
            Raise for the first file, line or row of a reader that cannot be read, or leave it out
            and count it in Python's log. Rows that annotations list as left out never raise.

        Returns
        -------
        Thresholds

        Raises
        ------
        TypeError, ValueError
            An argument is invalid, a column is missing or of another type, no row has both a score
            and a label, all labels or none are positive, a group has too few and is not pooled, or
            no group reaches the target.

        Examples
        --------
        >>> thresholds = Thresholds.fit(
        ...     labelled, score="edu_score", label="is_good", by="language", precision=0.9
        ... )  # doctest: +SKIP
        >>> ddf = ApplyThresholds(thresholds)(ddf)  # doctest: +SKIP
        """
        targets = {"precision": precision, "recall": recall, "keep_share": keep_share}
        target, value = _only(targets)
        check_values(cls.fit.__wrapped__, {  # type: ignore[attr-defined]
            "score": score, "label": label, "by": by, "weight": weight, "cautious": cautious,
            "min_labels": min_labels, "small_groups": small_groups, "calibration": calibration,
        })  # fmt: skip
        if cautious and target == "keep_share":
            raise ValueError("cautious=True: a share of rows has no careful end; leave it out")
        sought: list[Any] | None = None
        if positive is not None:
            is_one = isinstance(positive, str) or not isinstance(positive, Iterable)
            sought = [positive] if is_one else [*positive]
        columns = _LabelColumns(ScoreColumns((score,), by=by), label, sought, weight)
        with left_out_logged():
            names = (score, label, by, weight)
            groups, left_out = columns.read(read_columns(labelled, names, on_error))
        fit = functools.partial(
            _fit_group, target=target, value=value, cautious=cautious, calibration=calibration
        )
        few = {
            group_value(group): [len(rows.scores), int(rows.is_positive.sum())]
            for group, rows in groups.items()
            if len(rows.scores) < min_labels or not 0 < rows.is_positive.sum() < len(rows.scores)
        }
        if few and by is None:
            ((rows, positives),) = few.values()
            raise ValueError(
                f"too few labels: {rows:,} rows, {positives:,} with the label, and "
                f"{min_labels} are needed (min_labels=), some with the label and some without: "
                "label more rows"
            )
        if few and small_groups == "refuse":
            raise ValueError(
                f"too few labels in {_counts(few)}: a group needs {min_labels} (min_labels=), some "
                "with the label and some without. Label more, or pool such groups "
                '(small_groups="pool")'
            )
        is_pooled = small_groups == "pool" and by is not None
        pooled = fit(Labelled.of(*_concatenated(groups.values()))) if is_pooled else None
        values = ((group_value(group), rows) for group, rows in groups.items())
        fitted = {value: fit(rows) for value, rows in values if value not in few}
        all_fitted = [*fitted.values(), *([pooled] if pooled else [])]
        if all(group.threshold is None for group in all_fitted):
            unreached = _unreached(target, value, cautious, all_fitted)
            raise ValueError(f"{unreached}. Ask for less, or label more")
        if empty := {name: group for name, group in fitted.items() if group.threshold is None}:
            unreached = _unreached(target, value, cautious, empty.values())
            logger.warning("no row is kept of %s: %s", [*empty], unreached)
        return cls(
            score, label, target, float(value), fitted, by, sought, weight, cautious, pooled, few,
            left_out,
        )  # fmt: skip

    def check_saved(self) -> None:
        """Raise ValueError for an unknown target, a bad calibration, or a list of wrong length."""
        check_choice("target", self.target, TARGETS)
        for value, counts in self.few.items():
            if len(counts) != 2:
                raise ValueError(f"{value!r} is no group with two counts")
        for name, group in self.of_groups().items():
            lengths = [len(group.interval), *map(len, group.figures.values())]
            if lengths[0] != 2 or {*lengths[1:]} - {3}:
                raise ValueError(f"{name} is no group with an interval and figures")
            if any(len(row) != 5 for row in group.reliability):
                raise ValueError(f"the reliability of {name!r} has no five numbers for each bin")
            if group.calibration is not None:
                check_calibration(group.calibration)

    def of_groups(self) -> dict[str, GroupThreshold]:
        """Return the threshold of each group by the group's value as JSON.

        Without a column of groups, the only key is "null". The threshold of pooled groups (those
        with too few labels), if any, is last, with the key "all others".
        """
        pooled = {POOLED: self.pooled} if self.pooled else {}
        return {group_key(value): group for value, group in self.groups.items()} | pooled

    def of_group(self, value: Any) -> GroupThreshold | None:
        """Return the `GroupThreshold` for rows with this value in the column `by`.

        A value that is not in `groups` gets the pooled one, or None if groups were not pooled.
        """
        return self.groups.get(group_value(group_key(value)), self.pooled)

    def table(self) -> list[tuple[str, ...]]:
        """Return the lines of a table as tuples of texts: a header, and a line for each group."""
        groups = self.of_groups() if self.by is not None else {"all": self.of_group(None)}
        return [_COLUMNS, *(_line(name, group) for name, group in groups.items() if group)]

    def notes(self) -> list[str]:
        """Return sentences to show below the table, such as about groups with too few labels."""
        notes = [f"Rows are kept from the threshold on, for {self.target} {self.value:g} or more"
                 f"{_AT_LOWER_END * self.cautious}."]  # fmt: skip
        if self.few:
            notes.append(
                f"Too few labels, so that the threshold of all holds: {_counts(self.few)}."
            )
        for name, group in self.of_groups().items():
            if group.threshold is None:
                unreached = _unreached(self.target, self.value, self.cautious, [group])
                notes.append(f"No row of {name} is kept: {unreached}.")
        if self.left_out:
            notes.append(f"{self.left_out:,} rows without a score, label or weight took no part.")
        return notes

    def html(self) -> str:
        """Render an HTML page with the table of groups and reliability; it loads no other files."""
        from gpuclassify.pages.sections import Bars, Block, Section, Table, Text, sections_page

        header, *lines = self.table()
        table = Table(header, lines, is_cross=True)
        sections = [Section("By group", [table, *map(Text, self.notes())])]
        for name, group in self.of_groups().items():
            if bins := group.reliability:
                rows = [
                    (f"{mean:.3f}", f"{share:.3f}", f"{low:.3f} to {high:.3f}", f"{count:,.0f}")
                    for mean, share, low, high, count in bins
                ]
                names = ("probability", "share with the label", "95% interval", "rows")
                bars = [(f"{mean:.3f}", (mean, share), f"{share:.3f}") for mean, share, *_ in bins]
                table = Table(names, rows, is_cross=True)
                blocks: list[Block] = [table, Bars(names[:2], bars), Text(_RELIABILITY)]
                sections.append(Section(f"Reliability: {name}", blocks))
        under = [f"{self.score}: {self.target} {self.value:g}"]
        return sections_page("Thresholds", under, sections)

    def __repr__(self) -> str:
        notes = (visible(note, "") for note in self.notes())
        return "\n".join([*text_columns(self.table()), *notes])


@dataclass(frozen=True)
class _LabelColumns:
    """Names of the columns of scores, groups, labels and weights, and the positive labels."""

    scores: ScoreColumns
    label: str
    positive: list[Any] | None
    weight: str | None

    def read(self, labelled: Frame | LazyFrame) -> tuple[dict[str, Labelled], int]:
        """Return labelled rows by group, and the number of rows left out.

        Rows without a label, a finite score or a weight above 0 are left out. A group's key is its
        value as JSON, and its rows are sorted by descending score.
        """
        frame = as_dask(labelled)
        names = [*filter(None, [self.label, self.weight])]
        require_columns(frame._meta, names)
        self.scores.check(frame._meta)
        self.part(frame._meta.iloc[:0])
        part = dask.delayed(self.part, pure=True)
        wanted = frame[[*dict.fromkeys([*self.scores.needed, *names])]]
        parts = [part(partition) for partition in wanted.to_delayed()]
        (found,) = dask.compute(reduce_tree(_joined, parts))
        unsorted, left_out, labels = found
        groups = {group: Labelled.of(*unsorted.pop(group)) for group in sorted(unsorted)}
        if not groups:
            raise ValueError(
                f"none of {left_out:,} rows has a score and a label: give labelled rows"
            )
        positives = sum(int(rows.is_positive.sum()) for rows in groups.values())
        count = sum(len(rows.scores) for rows in groups.values())
        if positives in (0, count):
            raise ValueError(
                f"{positives:,} of {count:,} labels are those sought, which tells nothing about a "
                f"threshold; there are labels such as {labels}: name those sought (positive=), or "
                "label other rows"
            )
        return groups, left_out

    def part(self, frame: Frame) -> PartRows:
        """Read the labelled rows of one partition."""
        codes, groups = self.scores.groups(frame)
        refuse_many(groups)
        scores = self.scores.values(frame, *self.scores.names)
        column = to_pandas(frame[[self.label]])[self.label]
        is_used = column.notna().to_numpy(bool) & np.isfinite(scores)
        if self.positive is not None:
            is_positive = column.isin(self.positive).to_numpy(bool)
        else:
            self._refuse_others(column)
            is_positive = column.fillna(False).to_numpy(dtype=bool)
        weights = None
        if self.weight is not None:
            weights = self._weights(frame)
            is_used &= weights > 0
        rows = Labelled(scores, is_positive, weights)
        masks = ((group, is_used & (codes == code)) for code, group in enumerate(groups))
        by_group = {group: rows.take(mask) for group, mask in masks if mask.any()}
        labels = sorted({*map(str, column.dropna().unique())})[:MOST_NAMED]
        return by_group, int((~is_used).sum()), labels

    def _refuse_others(self, column: Any) -> None:
        """Raise TypeError if there are labels other than true, false, 1, 0 and null."""
        known = column.dropna()
        others = known[~known.isin([0, 1])].unique()[:MOST_NAMED].tolist()
        if others or (column.dtype.kind in "OU" and column.dtype != object):
            raise TypeError(
                f"label={self.label!r} holds {others or column.dtype}, not true and false: name "
                'the labels that are sought, such as positive="High"'
            )

    def _weights(self, frame: Frame) -> np.ndarray:
        column = to_pandas(frame[[self.weight]])[self.weight]
        if column.dtype.kind not in "fiu":
            raise TypeError(f"weight={self.weight!r} holds {column.dtype}: weights are numbers")
        weights = column.to_numpy(dtype=np.float64, na_value=0.0)
        if (weights < 0).any() or np.isinf(weights).any():
            raise ValueError(f"weight={self.weight!r} has numbers below 0, or infinite ones")
        return np.nan_to_num(weights)


class _Sums(NamedTuple):
    """Sums of weights, and of their squares, from the highest score down to each distinct score."""

    weights: np.ndarray
    squares: np.ndarray

    @classmethod
    def of(cls, weights: np.ndarray | None, mask: np.ndarray | None, last: np.ndarray) -> _Sums:
        """Sum weights of rows, sorted by descending score, up to and with each index in `last`."""
        if weights is None:
            counts = last + 1 if mask is None else np.cumsum(mask)[last]
            return cls(counts, counts)
        masked = weights if mask is None else np.where(mask, weights, 0.0)
        return cls(np.cumsum(masked)[last], np.cumsum(masked**2)[last])


def _fit_group(
    rows: Labelled, target: str, value: float, cautious: bool, calibration: str | None
) -> GroupThreshold:
    """Find a group's minimum score to keep so that `target`, such as "precision", reaches `value`.

    It is the lowest such score for "precision", else the highest; None if there is none. `rows` are
    sorted as by `Labelled.of`. With `cautious`, the lower end of the target's 95% interval must
    reach `value`. The ends of the threshold's interval are found in the same way, from the ends of
    the target's interval.
    """
    # Last row of each distinct score, because rows with equal scores are kept together.
    last = np.flatnonzero(np.append(rows.scores[1:] != rows.scores[:-1], True))
    scores = rows.scores[last]  # descending
    kept, right = _Sums.of(rows.weights, None, last), _Sums.of(rows.weights, rows.is_positive, last)

    def share(name: str, indices: Any) -> tuple[Any, Any]:
        """Return the share `name`, such as "precision", at some thresholds, and its effective rows.

        `indices`, a number or slice, are of the distinct scores, in descending order.
        """
        part = kept if name == "keep_share" else right
        whole, at = (kept, indices) if name == "precision" else (part, -1)
        known = part.weights[indices] / whole.weights[at]
        if rows.weights is None:
            return known, whole.weights[at]
        squares = whole.squares[at], part.squares[indices]
        return known, effective_rows(known, whole.weights[at], *squares)

    # Whether target, lower end and upper end reach the value, for each score as threshold.
    reached, best = np.zeros((3, len(last)), dtype=bool), [0.0, 0.0, 0.0]
    for start in range(0, len(last), _BLOCK):  # blocks limit memory for millions of scores
        block = slice(start, start + _BLOCK)
        shares, trials = share(target, block)
        for row, values in enumerate((shares, *wilson_interval(shares, trials))):
            reached[row, block] = values >= value
            best[row] = max(best[row], values.max())
    # The lowest threshold with enough precision has the highest recall.
    exact, careful, other = map(_last if target == "precision" else _first, reached)
    ends = [other, careful] if target == "precision" else [careful, other]
    threshold = careful if cautious else exact
    figures = {}
    for name in TARGETS if threshold is not None else ():
        at_threshold, trials = share(name, threshold)
        ends_of_share = wilson_interval(at_threshold, trials)
        figures[name] = [float(at_threshold), *map(float, ends_of_share)]
    return GroupThreshold(
        len(rows.scores),
        int(rows.is_positive.sum()),
        None if threshold is None else float(scores[threshold]),
        [None if end is None else float(scores[end]) for end in ends],
        figures,
        float(best[1] if cautious else (right.weights / kept.weights).max()),
        fit_calibration(calibration, rows) if calibration else None,
        reliability(calibration, rows) if calibration else [],
    )


def _first(mask: np.ndarray) -> int | None:
    return int(mask.argmax()) if mask.any() else None


def _last(mask: np.ndarray) -> int | None:
    return len(mask) - 1 - int(mask[::-1].argmax()) if mask.any() else None


def _joined(parts: Sequence[PartRows]) -> PartRows:
    by_group: dict[str, list[Labelled]] = {}
    for groups, _, _ in parts:
        for group, rows in groups.items():
            by_group.setdefault(group, []).append(rows)
    refuse_many(by_group)
    joined = {group: _concatenated(pieces) for group, pieces in by_group.items()}
    labels = sorted({label for *_, known in parts for label in known})[:MOST_NAMED]
    return joined, sum(count for _, count, _ in parts), labels


def _concatenated(parts: Iterable[Labelled]) -> Labelled:
    scores, is_positive, weights = zip(*parts, strict=True)
    return Labelled(
        np.concatenate(scores),
        np.concatenate(is_positive),
        None if weights[0] is None else np.concatenate(weights),
    )


def _only(targets: Mapping[str, float | None]) -> tuple[str, float]:
    """Return the name and value of the only target that is not None, such as ("precision", 0.9)."""
    asked = {name: value for name, value in targets.items() if value is not None}
    if len(asked) != 1:
        raise ValueError(
            f"{' and '.join(asked) or 'no target'} asked for: pass one of precision=, recall= and "
            "keep_share=, such as precision=0.9"
        )
    ((name, value),) = asked.items()
    check_number(name, value, "a share such as 0.9")
    if not 0 < value <= 1:
        raise ValueError(f"{name}={value!r} must be above 0 and at most 1, such as 0.9")
    return name, value


def _unreached(target: str, value: float, cautious: bool, groups: Iterable[GroupThreshold]) -> str:
    """Format a message that no threshold of `groups` reaches `value`, with the best value."""
    best = math.floor(1_000 * max(group.best_precision for group in groups)) / 1_000
    which = "lower end" if cautious else target
    return (
        f"no threshold has a {target} of {value:g}{_AT_LOWER_END * cautious}; the best {which} is "
        f"{best:g}"
    )


def _counts(few: Mapping[Any, Sequence[int]]) -> str:
    """Format up to ten groups with their numbers of labelled and positive rows, smallest first."""
    counts = ((group_key(value), pair) for value, pair in few.items())
    ordered = sorted(counts, key=lambda pair: (pair[1][0], pair[0]))
    shown = ", ".join(
        f"{group} ({rows:,} labelled, {positives:,} with the label)"
        for group, (rows, positives) in ordered[:MOST_NAMED]
    )
    more = len(ordered) - MOST_NAMED
    return shown + (f" and {more:,} more groups" if more > 0 else "")


def _line(group: str, fitted: GroupThreshold) -> tuple[str, ...]:
    def number(value: float | None) -> str:
        return "–" if value is None else f"{value:.4g}"

    figures = (
        "{:.3f} ({:.3f} to {:.3f})".format(*fitted.figures[name]) if name in fitted.figures else "–"
        for name in TARGETS
    )
    shown = group_value(group) if group.startswith('"') else group
    ends = " to ".join(map(number, fitted.interval))
    counts = (f"{fitted.rows:,}", f"{fitted.positives:,}")
    return (shown, *counts, number(fitted.threshold), ends, *figures)
