"""Rows drawn from places all over an input, and what they say about the whole of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import dask
import numpy as np

from gpuclassify.jobs.files import UnreadableInputError, compression
from gpuclassify.jobs.input.find_parts import read_footers
from gpuclassify.jobs.input.parts import InputParts, Limit, Part, read_table
from gpuclassify.jobs.input.schema import to_pandas
from gpuclassify.jobs.quarantine import FILE, Problem, counts_by_kind

# How many stretches to read, and bytes of JSON lines in each: enough that they show how parts
# differ, few enough to be read in seconds. More of them only where few rows are found.
ATTEMPTS = ((32, 256 << 10), (128, 1 << 20), (512, 4 << 20))
FEWEST_ROWS = 100
MOST_PARTITIONS = 8  # of a Dask frame: nobody knows what computing one takes
FEWEST_STRETCHES, MOST_BYTES = 4, 256 << 20  # stored, of row groups, which are read whole
MOST_PIECES = 10_000  # to choose stretches from
BEGINNING_BYTES = 1 << 20  # of a compressed file, which can only be read from its beginning
SPREAD = 2.0  # standard errors to either side: about 95%

Piece = tuple[Part, float]  # of a part, and its size


@dataclass(frozen=True)
class Estimate:
    """A number, and the range in which it lies about 95 times of 100.

    The ends are equal if it is known, and None if a sample of one place says nothing about it.
    """

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Sample:
    """Rows in draws, of which each stands for a share of the input."""

    frame: Any  # the rows, numbered from 0
    weights: np.ndarray  # how many rows of the input each row stands for
    draw_of: np.ndarray  # the draw that each row is from
    shares: np.ndarray  # of the input, what each draw stands for; a draw may have no rows
    rows_read: int  # from which those of the frame were drawn
    largest_share: float  # of the input, what its largest part has
    is_of_files: bool  # else sizes of parts are known only of the partitions that were drawn
    left_out: dict[str, int]  # files, lines and rows that cannot be read, by kind

    @property
    def rows(self) -> Estimate:
        """Rows of the input."""
        found = self.total(np.ones(len(self.frame)), self.rows_read)
        is_known = found.low == found.high is not None
        return Estimate(*[float(round(found.value))] * 3) if is_known else found

    def largest_part(self, values: np.ndarray) -> float:
        """The sum over the largest part of a number of each row."""
        whole = self.weights @ values if self.is_of_files else self._wholes(values).max()
        return float(whole * self.largest_share)

    def total(self, values: np.ndarray, rows_known: int | None = None) -> Estimate:
        """The sum over the input of a number of each row; known rows narrow its range.

        Draws have probabilities proportional to size, so that the mean of their sums by size is
        unbiased (Hansen and Hurwitz; Cochran, "Sampling Techniques", 1977, chapter 9A).
        """
        wholes, value = self._wholes(values), float(self.weights @ values)
        known = len(values) if rows_known is None else rows_known
        unknown = max(0.0, 1 - known / self.weights.sum())
        # Draws that agree are of rows of Parquet files, by which they are drawn.
        if unknown < 1e-9 or (len(wholes) > 1 and np.ptp(wholes) <= 1e-9 * wholes.max()):
            return Estimate(value, value, value)
        if len(wholes) == 1:
            return Estimate(value, None, None)
        squares = self.shares @ (wholes - value) ** 2
        error = SPREAD * float(np.sqrt(unknown * squares / (len(wholes) - 1)))
        return Estimate(value, max(0.0, value - error), value + error)

    def _wholes(self, values: np.ndarray) -> np.ndarray:
        """What the whole input's sum would be by each draw alone."""
        sums = np.bincount(self.draw_of, self.weights * values, minlength=len(self.shares))
        return sums / self.shares


def sample_files(
    source: InputParts,
    rows: int,
    seed: int,
    on_error: str,
    *,
    attempts: Iterable[tuple[int, int]] = ATTEMPTS,
    beginning_bytes: int = BEGINNING_BYTES,
) -> Sample:
    """Draw about so many rows from the parts of files; the same seed draws the same ones.

    Of a large compressed file only the beginning is read: nothing else can be read alone.
    """
    is_parquet = any(part.row_groups is not None for part in source.parts)
    stored = sum(file.size_bytes or 0 for file in source.files)
    for count, stretch_bytes in attempts:
        rng = np.random.default_rng(seed)
        step = max(stretch_bytes, stored // MOST_PIECES)
        parts = [*(_row_groups(source) if is_parquet else _byte_ranges(source, step))]
        pieces = [piece for part in parts for piece in part if piece[1]]
        if is_parquet:
            count = min(count, max(FEWEST_STRETCHES, MOST_BYTES * len(pieces) // max(1, stored)))
        total, rows_read = sum(size for _, size in pieces), 0
        stretches: list[_Stretch] = []
        problems: list[Problem] = []
        for number, share in _choose([size for _, size in pieces], count, rng):
            part, size = pieces[number]
            limit, cut = None, 1.0
            if part.length is not None and part.length > stretch_bytes:
                cut, part = stretch_bytes / part.length, replace(part, length=stretch_bytes)
            elif compression(part.path) and part.file_bytes is not None:
                limit = Limit(stored_bytes=beginning_bytes)
            table, found, read = read_table(part, source.schema, on_error, limit)
            own = _pick(to_pandas(table), math.ceil(rows * share), int(rng.integers(2**31)))[0]
            # Several draws of a file's beginning would hide that nothing is known of its rest.
            draws = round(count * share) if read == 1 else 1
            stands_for = len(table) / (read * cut) * total / size * share
            stretches.append(_Stretch(own, stands_for, share, draws))
            problems += found
            rows_read += len(table)
        if sum(len(each.frame) for each in stretches) >= min(rows, FEWEST_ROWS):
            break
    left_out = counts_by_kind(problems)
    if broken := sum(part.problem is not None for part in source.parts):
        left_out[FILE] = left_out.get(FILE, 0) + broken
    largest = max((sum(size for _, size in part) for part in parts), default=0.0)
    return _sample(stretches, rows_read, largest / (total or 1), True, left_out)


def _row_groups(source: InputParts) -> Iterator[list[Piece]]:
    """The row groups of each part, by their rows."""
    footers = read_footers(source.files, source.schema.storage_options)
    rows = {f.path: end.group_rows for f, end in zip(source.files, footers, strict=True)}
    for part in source.parts:
        groups = part.row_groups or ()
        yield [(replace(part, row_groups=(n,)), float(rows[part.path][n])) for n in groups]


def _byte_ranges(source: InputParts, step: int) -> Iterator[list[Piece]]:
    """Ranges of each part of JSON lines, by their stored bytes.

    Where the size of a file is unknown, all parts count alike and are read whole.
    """
    is_sized = all(file.size_bytes is not None for file in source.files)
    for part in source.parts:
        if part.problem is not None:
            yield []
        elif part.length is None or not is_sized:
            yield [(part, float(part.file_bytes or 0) if is_sized else 1.0)]
        else:
            lows = range(0, part.length, step)
            lengths = [(low, min(step, part.length - low)) for low in lows]
            yield [(replace(part, start=part.start + at, length=n), float(n)) for at, n in lengths]


def sample_partitions(frame: Any, rows: int, seed: int) -> Sample:
    """Draw rows from some partitions of a Dask frame, each of which is computed."""
    rng, count = np.random.default_rng(seed), frame.npartitions
    numbers, shares = zip(*_choose([1.0] * count, MOST_PARTITIONS, rng), strict=True)
    picked = dask.compute(
        *(
            dask.delayed(_pick)(part, math.ceil(rows * share), int(rng.integers(2**31)))
            for part, share in zip(frame.partitions[[*numbers]].to_delayed(), shares, strict=True)
        )
    )
    stretches = [
        _Stretch(own, length * count * share, share, round(MOST_PARTITIONS * share))
        for (own, length), share in zip(picked, shares, strict=True)
    ]
    return _sample(stretches, sum(length for _, length in picked), 1 / count, False, {})


def _choose(
    sizes: Sequence[float], count: int, rng: np.random.Generator
) -> list[tuple[int, float]]:
    """Numbers of pieces from all over the input, and the shares of it that they stand for.

    One is drawn in each of `count` equal strata with a probability proportional to its size; a
    large one may be drawn more often. All are taken where there are no more than `count`.
    """
    ends = np.cumsum(sizes)
    if len(sizes) <= count:
        return [(number, size / ends[-1]) for number, size in enumerate(sizes)]
    points = (np.arange(count) + rng.random(count)) * (ends[-1] / count)
    found = np.minimum(np.searchsorted(ends, points, "right"), len(sizes) - 1)
    return [(number, times / count) for number, times in Counter(found.tolist()).items()]


def _pick(frame: Any, most: int, seed: int) -> tuple[Any, int]:
    """At most so many rows, at random, and how many there are."""
    order = np.random.default_rng(seed).permutation(len(frame))
    return frame.iloc[order[:most]], len(frame)


class _Stretch(NamedTuple):
    """Rows at random of a stretch that stands for others, and how often it was drawn."""

    frame: Any
    stands_for: float
    share: float
    draws: int


def _sample(
    stretches: list[_Stretch], rows_read: int, largest: float, is_of_files: bool, left_out: Any
) -> Sample:
    from dask.dataframe.dispatch import concat

    frames, weights, shares = [], [], []
    for frame, stands_for, share, draws in stretches:
        rows = max(1, len(frame))
        for draw in np.array_split(np.arange(len(frame)), max(1, min(draws, len(frame)))):
            frames.append(frame.iloc[draw])
            weights.append(stands_for / rows)
            shares.append(share * len(draw) / rows if len(frame) else share)
    lengths = [len(frame) for frame in frames]
    if not any(lengths):
        counts = "; ".join(f"{kind}s left out: {count}" for kind, count in left_out.items())
        raise UnreadableInputError(
            f"the input has no rows to plan with{f' ({counts})' if counts else ''}: "
            "look at its files"
        )
    return Sample(
        concat([frame for frame in frames if len(frame)]).reset_index(drop=True),
        np.repeat(weights, lengths),
        np.repeat(np.arange(len(lengths)), lengths),
        np.array(shares),
        rows_read,
        largest,
        is_of_files,
        left_out,
    )
