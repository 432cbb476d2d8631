"""Compare two settings of a classifier on the same rows: speed, labels, filters and scores."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from gpuclassify.classifiers.spans.spans import SPANS, Spans, as_texts
from gpuclassify.corpus.scores.saved import write_file
from gpuclassify.frames import Frame, LazyFrame, backend_of, name_row
from gpuclassify.mapping.lines import LinesHead
from gpuclassify.mapping.partition_map import is_dask_frame
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.pages import html_table, text_table
from gpuclassify.pages.sections import Section, Table, Text, sections_page
from gpuclassify.settings.checks import check_count

WARM_UP_ROWS = 4
MOST_MOVED, MOST_POINTS, MOST_LABELS = 20, 1_000, 40  # limits of a page
TEXT_CHARS = 200  # characters of a moved row's text


@dataclass(frozen=True)
class Comparison:
    """Differences between the results of two classifiers, a and b, on the same rows.

    Attributes
    ----------
    names : tuple of str
        Constructor calls of the two classifiers.
    rows : int
        Rows with text.
    rows_per_second : tuple of float
        Speed of each classifier in this process, without loading models.
    changed_labels, changed_rows : float or None
        Share of the rows that get different labels, and share of the rows that only one of the
        classifiers keeps. None without labels, or without filters. With several trained heads, the
        label of a row is all of their labels, joined by "; ".
    largest_difference, mean_difference : float or None
        Maximum and mean over rows of the largest difference of a row's scores: probabilities,
        numbers or embeddings. None without scores, or if the classifiers write different numbers
        of scores for a row.
    agreement : dict of str to (int, float)
        By label of the first classifier: number of rows, and the share of them with the same label
        by the second one. For spans, by label of the span: number of spans, and the share that the
        second one finds, too; a row's label is then all of its spans. Empty without labels.
    moved : pandas.DataFrame
        Rows with different labels, filter decisions or scores. Rows with different labels or
        decisions come first, and among equals, rows with larger differences of scores. Columns are
        ``text``, cut to 200 characters, and for each classifier ``label_a`` or ``label_b``,
        ``score_a`` or ``score_b`` (the largest score of a row), and ``kept_a`` or ``kept_b``.
    points : list of (float, float)
        The largest score of a row by each classifier, for at most a thousand rows.
    """

    names: tuple[str, str]
    rows: int
    rows_per_second: tuple[float, float]
    changed_labels: float | None
    changed_rows: float | None
    largest_difference: float | None
    mean_difference: float | None
    agreement: dict[str, tuple[int, float]]
    moved: pd.DataFrame
    points: list[tuple[float, float]]

    @property
    def changed(self) -> float:
        """Larger of two shares of rows: with different labels, and kept by only one classifier."""
        return max(self.changed_labels or 0.0, self.changed_rows or 0.0)

    @property
    def speed_up(self) -> float:
        """Speed of the second classifier divided by the speed of the first one."""
        return self.rows_per_second[1] / self.rows_per_second[0]

    def __repr__(self) -> str:
        return text_table(self._lines())

    def _repr_html_(self) -> str:
        return html_table("Comparison", self._lines())

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes except `points` as JSON values by name; at most 20 `moved` rows."""
        moved = self.moved.head(MOST_MOVED).astype(object)
        plain = {
            figure.name: getattr(self, figure.name)
            for figure in fields(self)
            if figure.name != "points"
        }
        return plain | {"moved": moved.where(moved.notna(), None).to_dict("records")}

    def save(self, path: str | Path) -> None:
        """Write an HTML page with statistics, and the rows whose results differ most, to a file.

        The page has at most 20 rows and 40 labels, and loads nothing from a network. An earlier
        file is replaced.
        """
        figures = [line for line in self._lines() if line[0]]
        sections = [Section("Figures", [Table(("figure", "value"), figures)])]
        labels = sorted(self.agreement.items(), key=lambda item: item[1][1])[:MOST_LABELS]
        if labels:
            rows = [(label, f"{count:,}", f"{share:.1%}") for label, (count, share) in labels]
            table = Table(("label of a", "rows", "the same of b"), rows, is_cross=True)
            sections.append(Section("Labels", [table]))
        moved = self.moved.head(MOST_MOVED).to_dict("records")
        cells = [(str(row["text"]), _outcome(row, "a"), _outcome(row, "b")) for row in moved]
        note = Text(
            "Other labels and decisions first, then the largest differences; "
            f"{len(moved):,} of {len(self.moved):,} rows."
        )
        sections.append(Section("Rows that moved", [Table(("text", "a", "b"), cells), note]))
        page = sections_page("Comparison", [f"{self.rows:,} rows with text"], sections)
        write_file(path, page.encode("utf-8", "replace"))

    def _lines(self) -> Iterator[tuple[str, str]]:
        for side, name, speed in zip("ab", self.names, self.rows_per_second, strict=True):
            yield side, f"{name}: {speed:,.1f} rows/s"
        yield "speed", f"b is {self.speed_up:.2f} times as fast as a, over {self.rows:,} rows"
        if self.changed_labels is not None:
            yield "labels", f"{self.changed_labels:.2%} of the rows get another one"
        if self.changed_rows is not None:
            yield "filters", f"{self.changed_rows:.2%} of the rows are kept by one of them alone"
        if self.largest_difference is not None:
            most, mean = self.largest_difference, self.mean_difference
            yield "scores", f"differ by at most {most:.2g}, by {mean:.2g} on average"
        for label, (rows, share) in sorted(self.agreement.items(), key=lambda item: item[1][1]):
            if share < 1:
                yield "", f"{label}: {share:.1%} of {rows:,} rows keep it"


def _outcome(row: Mapping[Any, Any], side: str) -> str:
    """Format results of classifier "a" or "b" (`side`) for a row, such as "spam 0.93, dropped"."""
    label, score = row[f"label_{side}"], row[f"score_{side}"]
    known = (f"{label}" * bool(pd.notna(label)), f"{score:.4g}" * bool(pd.notna(score)))
    return " ".join(filter(None, known)) + ", dropped" * (not row[f"kept_{side}"])


def compare(
    dataset: Frame | LazyFrame, a: TextMapper, b: TextMapper, *, limit: int | None = 2_000
) -> Comparison:
    """Run two settings of a classifier on the same rows, and report the differences.

    Both run in this process, one after the other; loading models is not timed.

    Parameters
    ----------
    dataset : pandas.DataFrame, dask.dataframe.DataFrame, a column of these, or list of str
        Frame with the text column, or texts.
    a, b : classifiers
        Two classifiers with the same kind of output, such as one in float32 and one in bfloat16, or
        with different models, revisions, heads, prompts or settings for long texts.
    limit : int, optional
        Number of rows, from the first one; None for all. Default: 2,000.

    Returns
    -------
    Comparison
        Its ``print`` is a summary, and ``save("page.html")`` writes a page.

    Raises
    ------
    TypeError
        `a` or `b` is not a classifier, or `dataset` no frame, column or list.
    ValueError
        Only one of both gives labels, no row has text, or `dataset` lacks a column.

    Examples
    --------
    >>> exact = QualityClassifier(dtype="float32")
    >>> fast = QualityClassifier(dtype="bfloat16")
    >>> print(compare(frame, exact, fast))  # doctest: +SKIP
    """
    for name, mapper in (("a", a), ("b", b)):
        if not isinstance(mapper, TextMapper):
            is_class = isinstance(mapper, type)
            got = f"the class {mapper.__qualname__}" if is_class else f"a {type(mapper).__name__}"
            raise TypeError(
                f"{name} is {got}: compare() takes two classifiers, such as QualityClassifier() "
                "and QualityClassifier(dtype='bfloat16')"
            )
    if limit is not None:
        check_count("limit", limit)
    frame = _first_rows(dataset, a, limit)
    ours, theirs = (_Run(mapper, frame) for mapper in (a, b))
    if (ours.labels is None) != (theirs.labels is None):
        with_labels = repr(b if ours.labels is None else a)
        raise ValueError(f"only {with_labels} gives labels: compare two classifiers of one kind")
    has_text = ours.has_text | theirs.has_text
    if not has_text.any():
        raise ValueError("no row has a text: pass others")
    return _compared(frame, ours, theirs, has_text)


def _first_rows(dataset: Any, mapper: TextMapper, limit: int | None) -> pd.DataFrame:
    if getattr(dataset, "ndim", 2) == 1 and hasattr(dataset, "to_frame"):  # a column
        dataset = dataset.to_frame(mapper.text_field)
    if isinstance(dataset, list | tuple):
        return pd.DataFrame({mapper.text_field: pd.Series(dataset[:limit], dtype="str")})
    if is_dask_frame(dataset):
        return dataset.compute() if limit is None else dataset.head(limit, npartitions=-1)
    backend_of(dataset)  # raises unless it is a frame
    return dataset if limit is None else dataset.head(limit)


class _Run:
    """Results of one classifier on a frame: labels, scores, rows kept, texts and seconds taken."""

    def __init__(self, mapper: TextMapper, frame: pd.DataFrame) -> None:
        mapper.check(frame)
        mapper.prepare()
        self.name = repr(mapper)
        name = functools.partial(name_row, frame)
        mapper.compute(mapper.read_texts(frame.head(WARM_UP_ROWS)), name)  # loads the model
        began = time.perf_counter()
        texts = mapper.read_texts(frame)
        arrays, kept = mapper.compute(texts, name)
        self.seconds = time.perf_counter() - began
        self.kept = kept
        label_fields = [head.label_field for head in mapper.heads if head.label_field in arrays]
        columns = [arrays[name].to_pandas().astype(object) for name in label_fields]
        self.labels = columns[0] if columns else None
        spans = [arrays[field.name] for field in mapper.schema() if field.type == SPANS]
        self.spans = Spans.from_arrow(spans) if spans else None
        heads = [head for head in mapper.heads if not isinstance(head, LinesHead)]
        made = [arrays[field.name] for head in heads for field in head.fields()]
        scores = [matrix for array in made if (matrix := _numbers(array)) is not None]
        self.scores = np.hstack(scores) if scores else None
        self.texts = mapper.list_texts(frame, TEXT_CHARS)
        self.has_text = np.array([text is not None for text in self.texts])
        if len(columns) > 1:  # the labels of all heads are a row's label
            rows = ["; ".join(map(str, row)) for row in zip(*columns, strict=True)]
            self.labels = pd.Series(rows, dtype=object).where(self.has_text, None)
        if self.spans is not None:  # all spans of a row are its label
            self.labels = pd.Series(as_texts(self.spans), dtype=object).where(self.has_text, None)
            best = np.full(len(self.texts), np.nan, dtype=np.float32)
            np.fmax.at(best, self.spans.text_of, self.spans.scores)
            self.scores = best[:, None]

    def values(self) -> pd.DataFrame:
        """Return a frame of ``label``, largest ``score`` and ``kept`` (True without filters)."""
        rows = len(self.texts)
        return pd.DataFrame(
            {
                "label": [None] * rows if self.labels is None else self.labels,
                # The maximum ignores null.
                "score": np.nan if self.scores is None else np.fmax.reduce(self.scores, axis=1),
                "kept": True if self.kept is None else self.kept,
            },
            index=range(rows),
        )


def _agreement_of_spans(a: Spans, b: Spans) -> dict[str, tuple[int, float]]:
    """Return, by label, the number of spans in `a`, and the share of them that `b` also has."""
    # A key is the index of a span's text, its start, end and label.
    every, same = Counter(a.keys()), Counter(a.keys()) & Counter(b.keys())
    counts, shared = Counter[str](), Counter[str]()
    for (*_, label), count in every.items():
        counts[label] += count
    for (*_, label), count in same.items():
        shared[label] += count
    return {label: (count, shared[label] / count) for label, count in counts.items()}


def _numbers(array: pa.Array) -> np.ndarray | None:
    """Return a column's scores or embeddings, float32 (rows, numbers), NaN for null.

    None for a column of other values, or of lists of different lengths.
    """
    if pa.types.is_struct(array.type):
        parts = [numbers for part in array.flatten() if (numbers := _numbers(part)) is not None]
        return np.hstack(parts) if parts else None
    if pa.types.is_floating(array.type):
        return array.to_numpy(zero_copy_only=False).astype(np.float32)[:, None]
    if pa.types.is_list(array.type) and pa.types.is_floating(array.type.value_type):
        lengths = array.value_lengths().drop_null().unique().to_pylist()
        if len(lengths) == 1:
            matrix = np.full((len(array), lengths[0]), np.nan, dtype=np.float32)
            matrix[array.is_valid()] = np.stack(array.drop_null().to_numpy(zero_copy_only=False))
            return matrix
    return None


def _compared(frame: pd.DataFrame, a: _Run, b: _Run, has_text: np.ndarray) -> Comparison:
    one, other = a.values(), b.values()
    is_other_label = (one["label"] != other["label"]).to_numpy() & has_text
    is_other_label &= ~(one["label"].isna() & other["label"].isna()).to_numpy()
    is_other_row = (one["kept"] != other["kept"]).to_numpy() & has_text
    differences = None
    if a.scores is not None and b.scores is not None and a.scores.shape == b.scores.shape:
        differences = np.nan_to_num(np.abs(a.scores - b.scores)).max(axis=1)
    agreement: dict[str, tuple[int, float]] = {}
    if a.spans is not None and b.spans is not None:
        agreement = _agreement_of_spans(a.spans, b.spans)
    elif a.labels is not None:
        for label, rows in Counter(one["label"][has_text].dropna()).items():
            is_own = (one["label"] == label).to_numpy()
            agreement[str(label)] = rows, 1 - float(is_other_label[is_own].mean())
    moved = one.add_suffix("_a").join(other.add_suffix("_b"))
    moved.insert(0, "text", a.texts)
    moved.index = frame.index
    size = np.zeros(len(frame)) if differences is None else differences
    order = np.lexsort((-size, ~(is_other_label | is_other_row)))
    shown = [row for row in order if is_other_label[row] or is_other_row[row] or size[row] > 0]
    step = -(-len(frame) // MOST_POINTS)
    points = moved[["score_a", "score_b"]].to_numpy()[has_text][::step]
    rows = int(has_text.sum())
    has_filters = a.kept is not None or b.kept is not None
    return Comparison(
        names=(a.name, b.name),
        rows=rows,
        rows_per_second=(len(frame) / a.seconds, len(frame) / b.seconds),
        changed_labels=None if a.labels is None else float(is_other_label.sum() / rows),
        changed_rows=float(is_other_row.sum() / rows) if has_filters else None,
        largest_difference=None if differences is None else float(differences.max()),
        mean_difference=None if differences is None else float(differences[has_text].mean()),
        agreement=agreement,
        moved=moved.iloc[shown],
        points=[(float(x), float(y)) for x, y in points if np.isfinite([x, y]).all()],
    )
