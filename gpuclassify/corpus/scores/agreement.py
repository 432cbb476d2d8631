"""Measure the agreement of people and models that labelled the same rows, with intervals."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gpuclassify.corpus.scores.saved import write_file
from gpuclassify.corpus.statistics.agreement import (
    chance_corrected,
    confusion,
    grades_of,
    rank_correlation,
)
from gpuclassify.corpus.statistics.intervals import Figures, bootstrap
from gpuclassify.corpus.statistics.quantiles import ALL, ScoreColumns
from gpuclassify.frames import Frame, LazyFrame, to_pandas
from gpuclassify.jobs.input.left_out import left_out_logged
from gpuclassify.jobs.input.readers import FileReader, frame_of, read_columns
from gpuclassify.jobs.ledger.quarantine import OnError
from gpuclassify.mapping.partition_map import is_dask_frame
from gpuclassify.pages import html_table, text_columns, visible
from gpuclassify.pages.sections import Section, Table, Text, sections_page
from gpuclassify.settings.checks import label_tuple, with_plain_values

FIGURES = {
    "same": "the same",
    "kappa": "Cohen's kappa",
    "alpha": "Krippendorff's alpha",
    "spearman": "Spearman's correlation",
    "difference": "mean absolute difference",
}
MOST_DIFFERING, MOST_SHOWN, MOST_LABELS = 1_000, 20, 40  # rows kept; rows and labels of a page
TEXT_CHARS = 300  # characters of a text shown on a page
_COLUMNS = ("", "between", "rows", "value", "95% interval")
_INTERVALS = (
    "Intervals by the bootstrap over rows; none where a figure is not defined, or no draw changes "
    "it."
)


@dataclass(frozen=True)
class Agreement:
    """Agreement of columns of labels or scores: statistics of all rows, and rows that differ.

    Attributes
    ----------
    between : tuple of str
        Columns that are compared.
    kind : {"labels", "grades", "scores"}
        Type of the values: labels, grades (whole numbers that differ by less than 20), or other
        numbers.
    rows : int
        Rows with a value in at least two of the columns.
    figures : pandas.DataFrame
        A row for each statistic. Columns are ``group`` (a value of the column `by` as text, None
        for all rows), ``figure`` (its name, such as "kappa"), ``between`` (the names of two
        columns, or of all, joined by ", "), ``rows`` (number of rows that it describes), ``value``,
        and the ends of its 95% interval, ``low`` and ``high``. The last three are NaN if undefined,
        such as for the correlation with a constant.
    confusion : dict of (str, str) to pandas.DataFrame
        By pair of columns: the number of rows, or the sum of their weights, by value of the first
        column (index) and of the second one (columns). The values are texts. Empty for scores.
    differing : pandas.DataFrame
        The rows whose values differ most, largest difference first, at most 1,000. Columns are
        those compared, the group, the weight and the text.
    """

    between: tuple[str, ...]
    kind: str
    rows: int
    figures: pd.DataFrame
    confusion: dict[tuple[str, str], pd.DataFrame]
    differing: pd.DataFrame

    def __repr__(self) -> str:
        least = "at least " * (len(self.differing) == MOST_DIFFERING)
        count = f"{least}{len(self.differing):,} of {self.rows:,} rows differ"
        return "\n".join([*text_columns([_COLUMNS, *self.lines()]), count])

    def _repr_html_(self) -> str:
        lines = self.lines()
        rows = ((f"{name}: {pair}", f"{value} {ends}") for name, pair, _, value, ends in lines)
        return html_table("Agreement", rows)

    def lines(self) -> Iterator[tuple[str, ...]]:
        """Yield the lines of a table as tuples of texts, one for each statistic, without a header.

        They are the statistic's name and group, columns, number of rows, value ("–" if undefined)
        and interval ("" if undefined).
        """
        for row in _records(self.figures):
            value, low, group = row["value"], row["low"], row["group"]
            yield (
                visible(FIGURES[row["figure"]] + ("" if group is None else f", {group}")),
                visible(row["between"]),
                f"{row['rows']:,}",
                "–" if value is None else f"{value:.3f}",
                "" if low is None else f"{low:.3f} to {row['high']:.3f}",
            )

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes as JSON values by name, with at most 20 rows that differ most.

        ``figures`` and ``differing`` are lists of a dict per row, where None stands for NaN.
        ``confusion`` is a list of dicts with ``between``, ``labels`` and ``counts``, a matrix.
        """
        return {
            "between": [*self.between],
            "kind": self.kind,
            "rows": self.rows,
            "figures": _records(self.figures),
            "confusion": [
                {"between": [*pair], "labels": [*counts.columns], "counts": counts.values.tolist()}
                for pair, counts in self.confusion.items()
            ],
            "differing": _records(self.differing.head(MOST_SHOWN)),
        }

    def save(self, path: str | Path) -> None:
        """Write an HTML page with statistics, confusion matrices and rows that differ, to a file.

        The page has at most 20 rows and 40 labels, and loads nothing from a network. An earlier
        file is replaced.
        """
        figures = Table(_COLUMNS, [*self.lines()], is_cross=True)
        sections = [Section("Figures", [figures, Text(_INTERVALS)])]
        for (one, other), counts in self.confusion.items():
            shown = counts.iloc[:MOST_LABELS, :MOST_LABELS]
            rows = [
                (label, *map("{:,.0f}".format, numbers))
                for label, numbers in zip(shown.index, shown.to_numpy(), strict=True)
            ]
            notes = [Text("Rows, or the sum of their weights, by what each column says.")]
            if len(shown) < len(counts):
                notes.append(Text(f"The first {len(shown)} values."))
            table = Table((f"{one} ↓ {other} →", *shown.columns), rows, is_cross=True)
            sections.append(Section(f"{one} and {other}", [table, *notes]))
        differing = _records(self.differing.head(MOST_SHOWN))
        texts = [["–" if v is None else str(v)[:TEXT_CHARS] for v in r.values()] for r in differing]
        sections.append(Section("Rows that differ most", [Table([*self.differing.columns], texts)]))
        under = [
            f"{self.kind.capitalize()} of {', '.join(self.between)}",
            f"{self.rows:,} rows with two values or more",
        ]
        page = sections_page("Agreement", under, sections)
        write_file(path, page.encode("utf-8", "replace"))


@with_plain_values
def agreement(
    dataset: Frame | LazyFrame | FileReader,
    between: Sequence[str],
    *,
    by: str | None = None,
    weight: str | None = None,
    text_field: str | None = "text",
    on_error: OnError = "raise",
) -> Agreement:
    """Measure the agreement of people or models that labelled or scored the same rows.

    Figures of a pair of columns are, for labels, the share of equal rows and Cohen's kappa, and for
    numbers Spearman's correlation and the mean absolute difference. Grades (whole numbers that
    differ by less than 20) get all four, with quadratic weights in the kappa. The figure of all
    columns is Krippendorff's alpha, nominal for labels and interval for numbers. Each figure has a
    95% interval from a bootstrap over rows, unless all draws are equal. Figures of a pair are of
    rows with a value in both columns, and alpha is of rows with a value in at least two. The order
    of rows does not matter.

    Parameters
    ----------
    dataset : pandas.DataFrame, dask.dataframe.DataFrame, cudf.DataFrame or FileReader
        Labelled rows. All of them are loaded into memory.
    between : sequence of str
        Two columns or more, all of labels or all of numbers; null is ignored.
    by : str, optional
        Column, such as the language; figures are also computed for each of its values.
    weight : str, optional
        Column of numbers above 0, such as the weights of `sample`: figures then estimate those of
        the whole dataset. Intervals assume independent rows, and are a little wide for strata.
    text_field : str or None
        Column of text that `Agreement.save` shows with rows that differ, if it exists; None reads
        no text.
    on_error : {"raise", "quarantine"}
        Raise for the first file, line or row of a reader that cannot be read, or leave it out and
        count it in Python's log. Rows that annotations list as left out never raise.

    Returns
    -------
    Agreement
        Its ``print`` is a table, and ``save("page.html")`` writes a page.

    Raises
    ------
    TypeError, ValueError
        Fewer than two columns are named, a column is missing or of another type, only some columns
        hold numbers, a weight is null or not above 0, or no row has two values.

    Examples
    --------
    >>> found = agreement(rows, ["human", "llm", "head"], weight="weight")  # doctest: +SKIP
    >>> print(found)  # doctest: +SKIP
    """
    names = tuple(dict.fromkeys(label_tuple("between", between, keep_order=True) or ()))
    if len(names) < 2:
        raise ValueError(f"between={[*names]}: name two columns or more")
    needed = [*names, *(name for name in (by, weight) if name is not None)]
    with left_out_logged():
        if text_field is None:
            dataset = read_columns(dataset, needed, on_error)
        elif isinstance(dataset, FileReader):  # the text is optional
            dataset = frame_of(dataset, on_error)
        frame = _columns_of(dataset, needed, text_field)
    labels, values = _values(frame, names)
    weights = _weights(frame, weight)
    groups, group_names = ScoreColumns((), by=by).groups(frame)
    compared = (~np.isnan(values)).sum(axis=1) > 1
    if not compared.any():
        raise ValueError(f"no row has values in two of {[*names]}: name other columns")
    order = np.lexsort([weights, *values.T])  # makes intervals independent of the order
    order = order[compared[order]]
    is_grades = labels is None and grades_of(values[~np.isnan(values)]) is not None
    kind = "labels" if labels is not None else "grades" if is_grades else "scores"
    parts: list[tuple[str | None, np.ndarray]] = [(None, order)]
    if by is not None:
        keys = sorted(range(len(group_names)), key=lambda code: group_names[code])
        parts += [(_plain(group_names[code]), order[groups[order] == code]) for code in keys]
    figures = [
        (group, *figure)
        for group, rows in parts
        if len(rows)
        for figure in _figures(values[rows], weights[rows], names, kind)
    ]
    kinds = dict.fromkeys(("group", "figure", "between"), object)
    kinds |= {"rows": np.int64, **dict.fromkeys(("value", "low", "high"), np.float64)}
    return Agreement(
        names,
        kind,
        int(compared.sum()),
        pd.DataFrame(figures, columns=[*kinds], dtype=object).astype(kinds),
        _confusions(values, weights, names, labels) if kind != "scores" else {},
        _differing(frame, values, weights, kind),
    )


def _columns_of(dataset: Any, needed: list[str], text_field: str | None) -> pd.DataFrame:
    """Load the columns `needed`, which must exist, and `text_field` if it exists, as pandas."""
    empty = dataset._meta if is_dask_frame(dataset) else dataset.iloc[:0]
    for name in needed:
        ScoreColumns((), by=name).check(empty)
    names = dict.fromkeys([*needed, *[text_field] * (text_field in dataset.columns)])
    frame = dataset[[*names]]
    return to_pandas(frame.compute() if is_dask_frame(frame) else frame)


def _values(frame: pd.DataFrame, names: Sequence[str]) -> tuple[list[str] | None, np.ndarray]:
    """Return the sorted labels of all columns, and values, float64 (rows, columns), NaN for null.

    Values are label indices, or numbers if all columns hold numbers; the labels are then None.
    """
    numeric = [name for name in names if frame[name].dtype.kind in "fiu"]
    if len(numeric) == len(names):
        columns = [ScoreColumns((name,)).values(frame, name) for name in names]
        return None, np.stack(columns, axis=1).astype(np.float64)
    if filled := [name for name in numeric if frame[name].notna().any()]:
        others = [name for name in names if name not in numeric]
        raise TypeError(
            f"the column {filled[0]!r} holds numbers, and {others[0]!r} does not: compare labels "
            "with labels, or numbers with numbers"
        )
    pairs = [ScoreColumns((), by=name).groups(frame) for name in names]
    known = sorted({key for _, keys in pairs for key in keys} - {ALL})
    index = {key: float(number) for number, key in enumerate(known)} | {ALL: np.nan}
    columns = [np.array([index[key] for key in keys] or [np.nan])[codes] for codes, keys in pairs]
    return [_plain(key) for key in known], np.stack(columns, axis=1)


def _plain(key: str) -> str:
    return key if key == ALL else str(json.loads(key))  # a key is JSON, and ALL is null


def _weights(frame: pd.DataFrame, name: str | None) -> np.ndarray:
    if name is None:
        return np.ones(len(frame))
    if frame[name].dtype.kind not in "fiu":
        raise TypeError(f"weight={name!r} holds {frame[name].dtype}: name a column of numbers")
    weights = ScoreColumns((name,)).values(frame, name).astype(np.float64)
    wrong = weights[~((weights > 0) & np.isfinite(weights))]
    if len(wrong):
        found = "null" if np.isnan(wrong[0]) else f"{wrong[0]:g}"
        raise ValueError(f"weight={name!r} has {found}: weights are above 0, and finite")
    return weights


def _figures(
    values: np.ndarray, weights: np.ndarray, names: Sequence[str], kind: str
) -> Iterator[tuple[Any, ...]]:
    """Yield tuples: key of `FIGURES`, columns, number of rows, value, and ends of its interval.

    `values` are from `_values`. Value and ends are NaN if undefined.
    """
    calls: list[tuple[str, np.ndarray, Figures]] = []
    for one, other in itertools.combinations(range(len(names)), 2):
        both = ~np.isnan(values[:, [one, other]]).any(axis=1)
        pair = f"{names[one]}, {names[other]}"
        if both.any():
            a, b = values[both][:, [one, other]].T
            calls.append((pair, both, _pair_figures(a, b, weights[both], kind)))
    several = (~np.isnan(values)).sum(axis=1) > 1
    everyone = _alpha(values[several], weights[several], kind)
    calls.append((", ".join(names), several, everyone))
    for between, taken, figures in calls:
        rows = np.arange(taken.sum())
        summary = figures(rows)
        ends = bootstrap(figures, summary, rows)
        for figure, value in summary.items():
            low, high = ends[figure] or (np.nan, np.nan)
            yield figure, between, len(rows), np.nan if value is None else value, low, high


def _pair_figures(a: np.ndarray, b: np.ndarray, weights: np.ndarray, kind: str) -> Figures:
    """Return a function from row indices to statistics of the columns `a` and `b`, for `bootstrap`.

    The columns have no NaN. They are label indices if `kind` is "labels", else numbers. A statistic
    is None if undefined.
    """
    # scikit-learn takes milliseconds per call, and the bootstrap calls a thousand times. scipy's
    # correlation takes no weights.
    codes = [np.unique(column, return_inverse=True)[1] for column in (a, b)]
    labels = [column.astype(np.int64) for column in (a, b)] if kind == "labels" else []
    count = int(max(a.max(), b.max())) + 1 if labels else 0

    def figures(rows: np.ndarray) -> dict[str, float | None]:
        shares = weights[rows] / weights[rows].sum()
        x, y = a[rows], b[rows]
        same = float(shares[x == y].sum())
        if labels:
            p, q = (np.bincount(column[rows], shares, count) for column in labels)
            return {"same": same, "kappa": chance_corrected(1 - same, 1 - float(p @ q))}
        of_scores = {
            "spearman": rank_correlation(codes[0][rows], codes[1][rows], shares),
            "difference": float(shares @ np.abs(x - y)),
        }
        if kind == "scores":
            return of_scores
        by_chance = shares @ x**2 + shares @ y**2 - 2 * (shares @ x) * (shares @ y)
        return {
            "same": same,
            "kappa": chance_corrected(shares @ (x - y) ** 2, by_chance),
        } | of_scores

    return figures


def _alpha(values: np.ndarray, weights: np.ndarray, kind: str) -> Figures:
    """Return a function from row indices to ``{"alpha": alpha}``, Krippendorff's, for `bootstrap`.

    Each row of `values` has at least two that are not NaN. Alpha is None if undefined.
    """
    is_given = ~np.isnan(values)
    counts = is_given.sum(axis=1)
    # One-hot labels let both kinds share one formula: the squared distance of different labels is
    # 2, and sums of vectors and of their squares give the distances of all pairs.
    if kind == "labels":
        codes = np.unique(values[is_given], return_inverse=True)[1]
        sums = np.zeros((len(values), codes.max() + 1))
        np.add.at(sums, (np.nonzero(is_given)[0], codes), 1)
        squares = counts.astype(np.float64)
    else:
        centred = np.where(is_given, values - values[is_given].mean(), 0)
        sums, squares = centred.sum(axis=1, keepdims=True), (centred**2).sum(axis=1)
    distances = (counts * squares - (sums**2).sum(axis=1)) / (counts - 1)
    shares = weights / weights.mean()

    def figures(rows: np.ndarray) -> dict[str, float | None]:
        times = np.bincount(rows, minlength=len(values)) * shares
        total = times @ counts
        by_chance = (total * (times @ squares) - ((times @ sums) ** 2).sum()) / (total - 1)
        return {"alpha": chance_corrected(times @ distances / total, by_chance / total)}

    return figures


def _confusions(
    values: np.ndarray, weights: np.ndarray, names: Sequence[str], labels: list[str] | None
) -> dict[tuple[str, str], pd.DataFrame]:
    known = np.unique(values[~np.isnan(values)]) if labels is None else np.arange(len(labels))
    names_of = labels or [f"{grade:.0f}" for grade in known]
    tables = {}
    for one, other in itertools.combinations(range(len(names)), 2):
        both = ~np.isnan(values[:, [one, other]]).any(axis=1)
        if both.any():
            codes, others = np.searchsorted(known, values[both][:, [one, other]].T)
            counts = confusion(codes, others, len(known), weights[both])
            tables[names[one], names[other]] = pd.DataFrame(counts, names_of, names_of)
    return tables


def _differing(
    frame: pd.DataFrame, values: np.ndarray, weights: np.ndarray, kind: str
) -> pd.DataFrame:
    """Return the rows of `frame` whose `values` differ, largest difference first, at most 1,000.

    A difference is the number of distinct labels minus 1, or the range of the numbers. Ties are
    sorted by weight and content, so that the order of rows does not matter.
    """
    ordered = np.sort(values, axis=1)  # null last
    if kind == "labels":
        spread = (np.diff(ordered, axis=1) > 0).sum(axis=1)
    else:
        spread = np.nan_to_num(np.nanmax(ordered, axis=1, initial=-np.inf) - ordered[:, 0])
    rows = np.flatnonzero(spread > 0)
    content = frame.iloc[rows].map(str).to_numpy().T
    order = np.lexsort([*content, -weights[rows], -spread[rows]])
    return frame.iloc[rows[order[:MOST_DIFFERING]]]


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    plain = frame.astype(object)
    rows: list[Any] = plain.where(plain.notna(), None).to_dict("records")
    return json.loads(json.dumps(rows, default=str))  # dates and decimals become texts
