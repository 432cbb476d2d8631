"""Score buckets of equal weight: find their edges, add bucket numbers, keep the best share.

This is the recipe of Nemotron-CC: the scores of several classifiers are each divided into 20
buckets of equal weight, and a document's bucket is the largest of these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Literal

import dask
import numpy as np
import pyarrow as pa

from gpuclassify.corpus.scores.saved import Saved
from gpuclassify.corpus.statistics.quantiles import (
    Compute,
    ScoreColumns,
    compute_here,
    group_value,
    weighted_quantiles,
)
from gpuclassify.frames import Frame, LazyFrame, backend_of
from gpuclassify.mapping.columns import check_are_new
from gpuclassify.mapping.partition_map import RowWiseMap
from gpuclassify.settings.checks import check_count, check_number, label_tuple, with_plain_values
from gpuclassify.settings.declared import Declared, declared, setting
from gpuclassify.settings.signatures import short

Combine = Literal["max", "min"]  # how a row's buckets of several scores are combined
UNKNOWN = -1
MOST_BUCKETS = 1_000
SETTINGS = ("combine", "bucket_field", "overwrite")  # settings of `ScoreBuckets` except edges


@dataclass(frozen=True)
class ScoreEdges(Saved):
    """Edges of score buckets: the scores that divide rows into buckets of equal weight.

    Attributes
    ----------
    n : int
        Number of buckets, from 0 for the lowest scores to n - 1.
    edges : dict of str to dict to list of float
        Lowest score of each bucket except the first (n - 1 numbers), by score column, then by value
        of `by`, such as ``"de"``, and None for null. Without `by`, the only inner key is None.
    by : str, optional
        Column of groups.
    weight : str, optional
        Column with the weight of each row, or "bytes" for the bytes of the text; None if each row
        has the weight 1.
    """

    n: int
    edges: Mapping[str, Mapping[Any, Sequence[float]]]
    by: str | None = None
    weight: str | None = None

    what: ClassVar[str] = "edges of buckets"

    def check_saved(self) -> None:
        """Raise ValueError unless `n` is 2 to 1,000, and each group has `n` - 1 ascending edges."""
        check_buckets(self.n)
        rows = [row for groups in self.edges.values() for row in groups.values()]
        if any(len(row) != self.n - 1 or sorted(row) != [*row] for row in rows):
            raise ValueError(f"{self.n} buckets have {self.n - 1} ascending edges in each group")


@with_plain_values
def score_edges(
    dataset: Frame | LazyFrame,
    scores: str | Sequence[str],
    *,
    n: int = 20,
    weight: str | None = None,
    by: str | None = None,
    text_field: str = "text",
) -> ScoreEdges:
    """Find the edges that divide each score column into `n` buckets of equal weight.

    Edge k is ``numpy.quantile(scores, k / n, weights=weights, method="inverted_cdf")``: the
    smallest score at which the cumulated weight reaches k / n of the total. It is exact, and does
    not depend on partitions. Null and NaN are ignored. Columns of float32 are read in two passes,
    others in four, and very many groups in more. Write or persist a lazy frame of scores first,
    because each pass would run its models.

    Parameters
    ----------
    dataset : dask.dataframe.DataFrame, pandas.DataFrame or cudf.DataFrame
    scores : str or sequence of str
        Columns of numbers.
    n : int
        Number of buckets, 2 to 1,000.
    weight : str, optional
        Column of whole numbers, or ``"bytes"`` for the bytes of the text in UTF-8. Default: each
        row has the weight 1.
    by : str, optional
        Column, such as the language; each of its values has its own edges.
    text_field : str
        Column of text, for ``weight="bytes"``.

    Returns
    -------
    ScoreEdges

    Raises
    ------
    TypeError, ValueError
        A column is missing or of another type, `n` is out of range, a weight is negative, a column
        has no score with a weight above 0, or there are more than 1,000 groups.

    Examples
    --------
    >>> edges = score_edges(ddf, ["edu_score", "hq_score"], weight="bytes")  # doctest: +SKIP
    >>> ddf = add_buckets(ddf, edges)  # doctest: +SKIP
    """
    check_buckets(n)
    return find_edges(dataset, score_columns(scores, weight, by, text_field), n)


def score_columns(
    scores: str | Sequence[str], weight: str | None, by: str | None, text_field: str
) -> ScoreColumns:
    """Make `ScoreColumns` from arguments that name columns; repeated `scores` count once."""
    names = label_tuple("scores", scores, keep_order=True)
    if names is None:
        raise ValueError("scores=None: name a column of scores, or several")
    return ScoreColumns(tuple(dict.fromkeys(names)), weight, by, text_field)


def check_buckets(n: int) -> None:
    """Raise an error unless `n`, the number of score buckets, is an integer from 2 to 1,000."""
    check_count("n", n)
    if not 2 <= n <= MOST_BUCKETS:
        raise ValueError(f"n={n!r} buckets: pass 2 to {MOST_BUCKETS:,}")


def find_edges(
    dataset: Frame | LazyFrame, columns: ScoreColumns, n: int, compute: Compute = compute_here
) -> ScoreEdges:
    """Find the scores that divide each column, per group, into `n` buckets of equal weight."""

    def ranks(total: int) -> list[int]:
        return [max(1, -(-total * k // n)) for k in range(1, n)]

    edges = weighted_quantiles(dataset, columns, ranks, compute)
    _refuse_empty(edges)
    by_value = {
        name: {group_value(key): own for key, own in groups.items()}
        for name, groups in edges.items()
    }
    return ScoreEdges(n, by_value, columns.by, columns.weight)


def add_buckets(
    dataset: Frame | LazyFrame,
    edges: ScoreEdges | str | Path,
    *,
    combine: Combine = "max",
    bucket_field: str = "bucket",
    overwrite: bool = False,
) -> Any:
    """Add an integer column with the bucket of each score, and a combined bucket, to a dataset.

    Calls ``ScoreBuckets(edges, ...)(dataset)`` with these arguments: `edges` are the result of
    `score_edges` or its file, `combine` is the function that combines a row's buckets, and
    `bucket_field` is the column of the combined bucket. With `overwrite`, existing columns are
    replaced. Returns a frame of the dataset's type.
    """
    mapper = ScoreBuckets(edges, combine=combine, bucket_field=bucket_field, overwrite=overwrite)
    return mapper(dataset)


def _as_edges(edges: Any) -> ScoreEdges:
    return edges if isinstance(edges, ScoreEdges) else ScoreEdges.load(edges)


@declared
class ScoreBuckets(Declared, RowWiseMap):
    """Mapper that adds integer columns ``<score>_bucket`` per score, and a combined bucket.

    A score's bucket is ``numpy.digitize(score, edges)``: a score that equals an edge is in the
    upper bucket. The bucket of null and NaN, and of groups without edges, is -1. The combined
    bucket ignores -1, unless all buckets of the row are -1.

    Parameters
    ----------
    edges : ScoreEdges, str or Path
        Result of `score_edges`, or the file that it was saved to.
    combine : {"max", "min"}
        Function that combines the buckets of a row.
    bucket_field : str
        Column of the combined bucket.
    overwrite : bool
        Replace columns that the dataset already has.
    """

    edges: Any = setting(kw_only=False, convert=_as_edges, is_hashed=False)
    combine: Combine = "max"
    bucket_field: str = setting(default="bucket", what='a column name such as "bucket"', least=1)
    overwrite: bool = setting(default=False, changes_results=False)

    def check_together(self) -> None:
        """Raise ValueError if `bucket_field` is also the column of a single score's bucket."""
        *bucket_columns, combined = self.schema().names
        if combined in bucket_columns:
            raise ValueError(
                f"bucket_field={combined!r} is the bucket of one score: choose another"
            )

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return ("ScoreBuckets", *self.describe().values(), self.overwrite)

    @property
    def columns(self) -> ScoreColumns:
        """Names of the score columns and of the column of groups, as one object."""
        return ScoreColumns(tuple(self.edges.edges), by=self.edges.by)

    def with_edges(self, edges: ScoreEdges) -> ScoreBuckets:
        """Return a mapper with the same settings, but these edges."""
        return replace(self, edges=edges)

    @property
    def read_fields(self) -> tuple[str, ...]:
        """Names of the columns that the mapper reads: score columns, and the column of groups."""
        return tuple(self.columns.needed)

    def schema(self) -> pa.Schema:
        """Return the int64 fields of a bucket column per score, and of the combined bucket."""
        names = [*(f"{name}_bucket" for name in self.edges.edges), self.bucket_field]
        return pa.schema([pa.field(name, pa.int64()) for name in names])

    def identity(self) -> dict[str, Any]:
        """Return settings that change results and, for people, facts about the edges, by name."""
        edges, scores = self.edges, ", ".join(self.edges.edges)
        about = {"scores": scores, "n": edges.n, "weight": edges.weight, "by": edges.by}
        return {**about, **super().identity(), "edges": edges.digest()}

    def code(self, show: Callable[[Any], str] = short) -> str:
        """Return the constructor call as Python code, with edges shortened; `show` is not used."""
        return super().code(short)

    def check(self, frame: Frame) -> None:
        """Raise an error unless `frame` has the columns to read, and new ones can be added."""
        self.columns.check(frame)
        names, columns = self.schema().names, [*map(str, frame.columns)]
        check_are_new(names, columns, self.read_fields, self.overwrite)

    def meta(self, frame: Frame) -> Any:
        """Return `frame` without rows, but with the new bucket columns, for Dask's meta."""
        return self.map_frame(frame.iloc[:0])

    def map_frame(self, frame: Frame, meta_dtypes: Any = None) -> Any:
        """Return a pandas or cudf frame with the bucket columns; `meta_dtypes` is not used."""
        codes, groups = self.columns.groups(frame)
        buckets = np.full((len(self.edges.edges), len(frame)), UNKNOWN, np.int64)
        for column, (name, edges) in zip(buckets, self.edges.edges.items(), strict=True):
            values = self.columns.values(frame, name).astype(np.float64)
            for code, group in enumerate(groups):
                if (own := edges.get(group_value(group))) is not None:
                    rows = (codes == code) & ~np.isnan(values)
                    column[rows] = np.digitize(values[rows], own)
        if self.combine == "max":
            combined = buckets.max(0, initial=UNKNOWN)
        else:  # minimum of the known buckets
            most = np.iinfo(np.int64).max
            least = np.where(buckets == UNKNOWN, most, buckets).min(0, initial=most)
            combined = np.where(least == most, UNKNOWN, least)
        arrays = [pa.array(column) for column in (*buckets, combined)]
        schema = self.schema()
        new = dict(zip(schema.names, arrays, strict=True))
        return backend_of(frame).with_columns(frame, new, schema, None)


@with_plain_values
def keep_top(
    dataset: Any,
    score: str,
    *,
    share: float,
    weight: str | None = None,
    by: str | None = None,
    text_field: str = "text",
) -> Any:
    """Return the rows with the highest scores that together have a `share` of the total weight.

    The threshold is the highest score for which the rows with at least this score have at least
    that share. It is exact, and all rows with this score stay. Rows without a score are dropped. A
    dataset without rows, such as an empty shard, is returned as it is. Columns of float32 are read
    in two passes, others in four.

    Parameters
    ----------
    dataset : dask.dataframe.DataFrame, pandas.DataFrame or cudf.DataFrame
    score : str
        Column of numbers.
    share : float
        Share of the weight to keep, in (0, 1].
    weight : str, optional
        Column of whole numbers, or ``"bytes"`` for the bytes of the text in UTF-8. Default: each
        row has the weight 1.
    by : str, optional
        Column, such as the language: the share of each of its groups stays.
    text_field : str
        Column of text, for ``weight="bytes"``.

    Returns
    -------
    same type as `dataset`
        Lazy for Dask input; order, index and partitions are unchanged.

    Raises
    ------
    TypeError, ValueError
        A column is missing or of another type, a weight is negative, no score has a weight above 0,
        there are more than 1,000 groups, or `share` is out of range.
    """
    check_number("share", share, "a share such as 0.1")
    if not 0 < share <= 1:
        raise ValueError(f"share={share!r} must be above 0 and at most 1, such as 0.1")
    part = Fraction(str(share))

    def rank(total: int) -> list[int]:
        return [total + 1 - -(-total * part.numerator // part.denominator)]

    columns = ScoreColumns((score,), weight, by, text_field)
    edges = weighted_quantiles(dataset, columns, rank)
    if not edges[score] and len(dataset):
        _refuse_empty(edges)
    thresholds = {group: values[0] for group, values in edges[score].items()}
    keep = functools.partial(_above, columns=columns, thresholds=thresholds)
    if dask.is_dask_collection(dataset):
        return dataset.map_partitions(keep, meta=dataset._meta, token="keep_top")
    return keep(dataset)


def _above(frame: Frame, columns: ScoreColumns, thresholds: Mapping[str, float]) -> Any:
    codes, groups = columns.groups(frame)
    least = np.array([thresholds.get(group, np.nan) for group in groups])[codes]
    is_kept = columns.values(frame, *columns.names).astype(np.float64) >= least
    return backend_of(frame).take_rows(frame, is_kept)


def _refuse_empty(edges: Mapping[str, Mapping[str, Any]]) -> None:
    empty = [name for name, groups in edges.items() if not groups]
    if empty:
        raise ValueError(
            f"{empty} have no scores with a weight above 0: give rows with scores, and weights"
        )
