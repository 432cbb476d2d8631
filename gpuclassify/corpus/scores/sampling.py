"""Draw stratified samples by hash, with weights.

A row's random number is a hash of the seed and its id, or its file and its position in the file. A
stratum's sample has the rows with the smallest numbers, so that it does not depend on partitions
and order, and a new row replaces at most one other. To prefer rows near a score, their numbers are
divided by their nearness, which is priority sampling: N. Duffield, C. Lund and M. Thorup, Journal
of the ACM 54 (2007), 32.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import dask
import numpy as np
import pandas as pd
import pyarrow as pa

from gpuclassify.corpus.statistics.quantiles import ScoreColumns, cells_of, refuse_many
from gpuclassify.frames import Frame, LazyFrame, to_pandas
from gpuclassify.frames.hashing import id_keys, row_keys, uniform
from gpuclassify.frames.lazy import as_dask, reduce_tree
from gpuclassify.jobs.input import schema as schemas
from gpuclassify.jobs.input.annotation_reader import ROW_POSITION, AnnotationReader
from gpuclassify.jobs.input.left_out import left_out_logged, report_left_out
from gpuclassify.jobs.input.parts import InputSchema, Part, read_chosen, read_table
from gpuclassify.jobs.input.readers import FileReader
from gpuclassify.jobs.ledger.quarantine import ON_ERROR, OnError
from gpuclassify.jobs.stores.hub import share_tokens
from gpuclassify.jobs.stores.names import redacted
from gpuclassify.settings.checks import (
    check_choice,
    check_count,
    check_number,
    check_text,
    label_tuple,
    with_plain_values,
)

if TYPE_CHECKING:
    from dask.delayed import Delayed

    from gpuclassify.mapping.select import Select

logger = logging.getLogger(__name__)

MOST_STRATA = 10_000
WIDTH_SHARE = 0.1  # default width, relative to the score
# Columns of candidates. AT is a row's position in its file (the row number in Parquet, or else the
# byte offset of its line), or the key of a frame's row.
STRATUM, ORDER, KEY, PART, AT = "stratum", "order", "key", "part", "at"


class Candidates(NamedTuple):
    """Rows of some partitions that may be in the sample, and their number of rows per stratum.

    ``rows`` has at most n + 1 rows of each stratum, and ``counts`` is of all rows. Rows without a
    finite score are in neither, but counted in ``unscored``.
    """

    rows: pd.DataFrame
    counts: pd.Series  # rows by stratum
    unscored: int = 0  # rows without a finite score


@dataclass(frozen=True)
class Draw:
    """Settings of a stratified sample, explained by `sample`.

    None in place of `near` makes all rows equally likely. Without `id_field`, rows are identified
    by file and position. `select` is a condition that rows of files must meet.
    """

    n: int
    by: tuple[str, ...]
    near: str | None
    score: float
    width: float
    id_field: str | None
    seed: int
    select: Select | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the columns that decide which rows are drawn: strata, score, id, condition."""
        condition = self.select.read_fields if self.select else ()
        names = [*self.by, self.near, self.id_field, *condition]
        return tuple(dict.fromkeys(filter(None, names)))

    def check(self, frame: Frame, weight_field: str) -> None:
        """Raise an error unless `frame` has the columns to draw by, and lacks `weight_field`."""
        for name in (*self.by, self.id_field):
            ScoreColumns(tuple(filter(None, [self.near])), by=name).check(frame)
        if weight_field in map(str, frame.columns):
            raise ValueError(
                f"the dataset has a column {weight_field!r} already: name that of the sample's "
                "weights (weight_field=)"
            )

    def keys(self, frame: Frame) -> np.ndarray:
        """Return the hash of the seed and each row's id, uint64 (rows,); `id_field` must be set."""
        return id_keys(str(self.seed), frame, str(self.id_field))

    def sizes(self, frame: Frame) -> np.ndarray:
        """Return the relative probability to draw each row, float64 (rows,), from 0 to 1.

        It is 1 everywhere if `near` is None; else it is NaN for rows without a score.
        """
        if self.near is None:
            return np.ones(len(frame))
        values = ScoreColumns((self.near,)).values(frame, self.near).astype(np.float64)
        return 1 / (1 + np.abs(values - self.score) / self.width)

    def candidates(self, frame: Frame, keys: np.ndarray, part: int, at: np.ndarray) -> Candidates:
        """Return up to `n` + 1 rows of each stratum in a frame, with the smallest random numbers.

        `keys` are hashes of the rows' ids, uint64 (rows,). `part` is the index of the partition,
        and `at` each row's identity in it.
        """
        codes, names = cells_of(frame, self.by)
        refuse_many(names, MOST_STRATA)
        with np.errstate(divide="ignore"):  # rows whose size is 0 are left out
            order = uniform(keys) / self.sizes(frame)
        is_scored = np.isfinite(order)
        columns = {STRATUM: codes, ORDER: order, KEY: keys, PART: part, AT: at}
        rows = _first(pd.DataFrame(columns)[is_scored], self.n + 1)
        rows[STRATUM] = np.array(names, dtype=object)[rows[STRATUM]]
        counts = pd.Series(np.bincount(codes[is_scored], minlength=len(names)), names)
        return Candidates(rows, counts[counts > 0], int((~is_scored).sum()))

    def join(self, parts: Sequence[Candidates]) -> Candidates:
        """Join candidates of several partitions, keeping up to `n` + 1 rows of each stratum."""
        counts = pd.concat([part.counts for part in parts]).groupby(level=0).sum()
        refuse_many(counts.index, MOST_STRATA)
        rows = _first(pd.concat([part.rows for part in parts]), self.n + 1)
        return Candidates(rows, counts, sum(part.unscored for part in parts))

    def compute(self, source: _Files | _Partitions) -> Candidates:
        """Find the rows of each partition of `source` that may be in the sample, and join them."""
        (candidates,) = dask.compute(reduce_tree(self.join, source.candidates(self)))
        return candidates

    def weigh(self, candidates: Candidates, weight_field: str) -> pd.DataFrame:
        """Return up to `n` rows of each stratum, with weights in the column `weight_field`.

        A weight is one over the row's probability to be drawn. Rows are sorted by partition and
        their identity in it.
        """
        rows, counts = candidates.rows, candidates.counts
        strata = rows.groupby(STRATUM, sort=False)
        rank, totals = strata.cumcount(), rows[STRATUM].map(counts)
        weights: pd.Series
        if self.near is None:
            weights = totals / np.minimum(totals, self.n)
        else:  # priority sampling: the first row left out determines the probabilities
            ends = rows[rank == self.n].set_index(STRATUM)[ORDER]
            sizes = uniform(rows[KEY].to_numpy()) / rows[ORDER]
            weights = (1 / (sizes * rows[STRATUM].map(ends))).fillna(1.0).clip(lower=1.0)
        rows = rows.assign(**{weight_field: weights.astype(np.float64)})
        return rows[rank < self.n].sort_values([PART, AT], ignore_index=True)


@with_plain_values
def sample(
    dataset: Frame | LazyFrame | FileReader,
    n: int = 200,
    *,
    by: str | Sequence[str] | None = None,
    near: str | None = None,
    score: float = 0.0,
    width: float | None = None,
    id_field: str | None = None,
    weight_field: str = "weight",
    seed: int = 0,
    on_error: OnError = "raise",
) -> pd.DataFrame:
    """Draw a stratified sample, with weights that describe the whole dataset.

    Rows are selected by a hash of the seed and their ids (or files and positions), so partitions
    and their order do not matter; new rows may replace others. A finer sample, with more columns in
    `by` or a larger `n`, contains all rows of a coarser one. The dataset is read once without its
    texts. Then all columns are read, but only from row groups, ranges of lines or partitions that
    have drawn rows.

    Parameters
    ----------
    dataset : pandas.DataFrame, dask.dataframe.DataFrame, cudf.DataFrame or FileReader
        Rows to draw from. A reader's may have ``annotations=``.
    n : int
        Rows per stratum; all rows of smaller strata.
    by : str or sequence of str, optional
        Columns, such as the label and the source. A stratum is the rows with the same values in
        these columns; null is a value.
    near : str, optional
        Column of numbers: rows near `score` are more likely. Rows without a finite number are left
        out, and counted in Python's log.
    score : float
        Number in the column `near`, such as a threshold in question.
    width : float, optional
        Distance from `score` at which a row is half as likely as at `score`. Default: a tenth of
        `score`. Required with `near` if `score` is 0.
    id_field : str, optional
        Column of unique ids, required for a frame. Default: a row is identified by its file, and
        its row number (Parquet) or the byte offset of its line.
    weight_field : str
        New column: the number of rows of the dataset that each row represents, which is one over
        its probability to be drawn.
    seed : int
        Seed of the hash.
    on_error : {"raise", "quarantine"}
        Raise for the first file, line or row of a reader that cannot be read, or leave it out. If a
        drawn row turns out to be unreadable, the sample has one row less, and the other weights
        still describe the readable rows. What is left out is counted in Python's log. Rows that
        annotations list as left out never raise.

    Returns
    -------
    pandas.DataFrame
        All columns of the rows, in random order, so that any first rows are a sample, too.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid, a column is missing or of another type, `weight_field` exists
        already, a row has no id, two drawn rows have the same id, there are more than 10,000
        strata, or no rows.

    Examples
    --------
    >>> rows = sample(ddf, 50, by=["label", "source"], id_field="id")  # doctest: +SKIP
    >>> numpy.average(rows["score"], weights=rows["weight"])  # doctest: +SKIP
    """
    check_choice("on_error", on_error, ON_ERROR)
    check_count("n", n)
    check_count("seed", seed, 0)
    check_text("weight_field", weight_field, "a column name")
    check_number("score", score)
    if width is not None:
        check_number("width", width)
        if not 0 < width < np.inf:
            raise ValueError(f"width={width!r} must be above 0, and finite")
        if near is None:
            raise ValueError(f"width={width!r} has no score to be near to: name its column (near=)")
    width = abs(score) * WIDTH_SHARE if width is None else width
    if near is not None and not width > 0:
        raise ValueError(
            f"score={score} has no default width: name the score to be near to (score=), or pass "
            "the distance from it at which a row is half as likely (width=)"
        )
    columns = label_tuple("by", by, keep_order=True) or ()
    draw = Draw(n, columns, near, float(score), float(width), id_field, seed)
    source: _Files | _Partitions
    with left_out_logged():
        if isinstance(dataset, FileReader):
            source = _Files(dataset, on_error)
        else:
            source = _Partitions(dataset, draw)
        draw.check(source.meta, weight_field)
        candidates = draw.compute(source)
        if candidates.unscored:
            logger.warning("%d rows have no %s, and are left out", candidates.unscored, near)
        if candidates.rows.empty:
            words = f" with a {near}" * bool(near)
            raise ValueError(f"the dataset has no rows to draw from{words}")
        drawn, frame = source.rows(draw, draw.weigh(candidates, weight_field))
    if len(frame) != len(drawn) or drawn[KEY].duplicated().any():
        raise ValueError(f"two rows have the same id_field={id_field!r}: name a column of ids")
    frame[weight_field] = drawn[weight_field].to_numpy()
    order = np.argsort(row_keys("order", drawn[KEY].to_numpy()), kind="stable")
    return frame.iloc[order].reset_index(drop=True)


def draw_rows(
    reader: FileReader,
    n: int,
    seed: int,
    select: Select | None = None,
    on_error: OnError = "raise",
) -> pd.DataFrame:
    """Draw up to `n` rows of files at random; return them in the order of the files.

    They have all columns, and no weights. `select` is a condition that all drawn rows meet; None
    draws the same rows as `sample` with this `seed` and without strata.
    """
    draw = Draw(n, (), None, 0.0, 1.0, None, seed, select)
    with left_out_logged():
        source = _Files(reader, on_error)
        if select is not None:
            select.check(source.meta)
        return source.rows(draw, draw.weigh(draw.compute(source), "weight"))[1]


def _first(rows: pd.DataFrame, count: int) -> pd.DataFrame:
    """Return the first `count` rows of each stratum, sorted by their random numbers (``order``)."""
    ordered = rows.sort_values([STRATUM, ORDER, KEY], ignore_index=True)
    return ordered.groupby(STRATUM, sort=False).head(count).reset_index(drop=True)


class _Files:
    """Rows of files to draw from, identified by file (or range) and position in the file."""

    def __init__(self, reader: FileReader, on_error: OnError) -> None:
        self.source, self.on_error = reader.find_parts(on_error), on_error
        self.schema, self.meta = self.source.schema, self.source.schema.meta()
        self.pieces = [piece for part in self.source.parts for piece in part.pieces]
        share_tokens(reader.paths)

    def candidates(self, draw: Draw) -> list[Delayed]:
        names = {file.path: redacted(file.real) for file in self.source.files}
        known = replace(self.schema.projected(self._fields(draw)), has_positions=True)
        call, first, tasks = dask.delayed(_candidates_of_part, pure=True), 0, []
        for part in self.source.parts:
            files = [names[piece.path] for piece in part.pieces]
            tasks.append(call(part, known, draw, first, files, self.on_error))
            first += len(part.pieces)
        return tasks

    def rows(self, draw: Draw, drawn: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Read the rows that `drawn` lists; return the readable rows of `drawn`, and the rows read.

        `drawn` must be sorted by file and position. Both results have this order.
        """
        call, fields = dask.delayed(_rows_at, pure=True), self._fields(draw)
        by_piece = {n: drawn[AT][drawn[PART] == n].tolist() for n in drawn[PART].unique().tolist()}
        tasks = [
            call(self.pieces[n], self.schema, fields, numbers, self.on_error)
            for n, numbers in by_piece.items()
        ]
        tables, is_read = [self.schema.arrow.empty_table()], [np.zeros(0, dtype=bool)]
        for table, mask in dask.compute(*tasks):
            tables.append(table)
            is_read.append(mask)
        drawn = drawn[np.concatenate(is_read)].reset_index(drop=True)
        return drawn, schemas.to_pandas(pa.concat_tables(tables))

    def _fields(self, draw: Draw) -> tuple[str, ...]:
        # At least one column is read, to count rows.
        return draw.fields or tuple([*self.schema.annotation_fields, *self.schema.arrow.names][:1])


@dataclass(frozen=True)
class _RowFilter:
    """Filter that keeps the rows at some positions while a file is read."""

    read_fields: tuple[str, ...]
    numbers: list[int]

    def choose(self, columns: pa.Table) -> np.ndarray:
        return np.isin(columns[ROW_POSITION].to_numpy(), self.numbers)


def _rows_at(
    part: Part, schema: InputSchema, fields: tuple[str, ...], numbers: list[int], on_error: OnError
) -> tuple[pa.Table, np.ndarray]:
    """Read the rows at the ascending positions `numbers` in the file `part`, with all columns.

    `fields` are read first, to find the rows. Returns the rows, and a mask of `numbers`, False for
    unreadable rows.
    """
    rows, schema = _RowFilter(fields, numbers), replace(schema, has_positions=True)
    annotations = AnnotationReader(part, schema)
    table, problems, _ = read_chosen(part, schema, on_error, annotations, rows)
    report_left_out(part, problems)
    is_read = np.isin(numbers, table[ROW_POSITION].to_numpy())
    return table.drop_columns([ROW_POSITION]), is_read


def _candidates_of_part(
    part: Part, schema: InputSchema, draw: Draw, first: int, names: list[str], on_error: OnError
) -> Candidates:
    """Read the files of `part`, and return the rows that may be in the sample.

    `first` is the index of the part's first file (or range of a file) among the files of all parts.
    `names`, of the part's files, are hashed with positions if there is no column of ids.
    """
    annotations, found = AnnotationReader(part, schema), []
    for number, (piece, name) in enumerate(zip(part.pieces, names, strict=True), first):
        table, problems, _ = read_table(piece, schema, on_error, annotations=annotations)
        report_left_out(piece, problems)
        if draw.select is not None:
            table = table.filter(pa.array(draw.select.choose(table)))
        rows = table[ROW_POSITION].to_numpy()
        frame = schemas.to_pandas(table.drop_columns([ROW_POSITION]))
        has_ids = draw.id_field is not None
        keys = draw.keys(frame) if has_ids else row_keys(f"{draw.seed} {name}", rows)
        found.append(draw.candidates(frame, keys, number, rows))
    return draw.join(found)


class _Partitions:
    """Rows of a frame to draw from, identified by Dask partition and hash of the id."""

    def __init__(self, dataset: Frame | LazyFrame, draw: Draw) -> None:
        if draw.id_field is None:
            raise ValueError(
                "id_field=None: rows of a frame have no file and position to identify them by; "
                "name a column of ids, or pass FileReader(paths)"
            )
        self.frame = as_dask(dataset)
        self.meta = self.frame._meta

    def candidates(self, draw: Draw) -> list[Delayed]:
        call = dask.delayed(_candidates_of_partition, pure=True)
        parts = self.frame[list(draw.fields)].to_delayed()
        self.count = len(parts)
        return [call(part, draw, number) for number, part in enumerate(parts)]

    def rows(self, draw: Draw, drawn: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Compute the rows that `drawn` lists; return `drawn`, and these rows in its order.

        If ids are not unique, more rows are returned, in any order.
        """
        call, parts = dask.delayed(_rows_with, pure=True), self.frame.to_delayed()
        keys = drawn[KEY].to_numpy()
        # Dask joins small files if few columns are read, so the numbers of partitions may differ.
        numbers = set(drawn[PART]) if len(parts) == self.count else range(len(parts))
        frames = dask.compute(*(call(parts[number], draw, keys) for number in numbers))
        frame = pd.concat(frames, ignore_index=True)
        if len(frame) != len(keys):
            return drawn, frame  # two rows have the same id
        return drawn, frame.iloc[np.argsort(draw.keys(frame))[np.argsort(np.argsort(keys))]]


def _candidates_of_partition(frame: Frame, draw: Draw, number: int) -> Candidates:
    return draw.candidates(frame, keys := draw.keys(frame), number, keys)


def _rows_with(frame: Frame, draw: Draw, keys: np.ndarray) -> pd.DataFrame:
    return to_pandas(frame.iloc[np.flatnonzero(np.isin(draw.keys(frame), keys))])
