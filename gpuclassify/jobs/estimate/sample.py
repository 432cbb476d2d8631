"""A random sample of an input's rows, and what it says about the whole input."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import dask
import numpy as np
import pyarrow as pa

from gpuclassify.jobs.files import (
    BrokenContentError,
    UnreadableInputError,
    compression,
    decompressed,
    reading,
)
from gpuclassify.jobs.input.jsonl import parse_good
from gpuclassify.jobs.input.parquet import read_footers
from gpuclassify.jobs.input.parts import InputParts, InputSchema, Part, read_table, unreadable
from gpuclassify.jobs.input.schema import to_pandas, with_folder_values
from gpuclassify.jobs.quarantine import FILE, LINE, Problem, counts_by_kind

# How many stretches to read, and bytes of JSON lines in each: enough that they show how parts
# differ, few enough to be read in seconds. More of them only where few rows are found.
ATTEMPTS = ((32, 256 << 10), (128, 1 << 20), (512, 4 << 20))
FEWEST_ROWS = 100
MOST_PARTITIONS = 8  # of a Dask frame: nobody knows what computing one takes
FEWEST_STRETCHES, MOST_BYTES = 4, 1 << 30  # row groups of Parquet are read whole
BEGINNING_BYTES = 1 << 20  # of a compressed file, which can only be read from its beginning
STEP_BYTES = 16 << 10
SPREAD = 2.0  # standard errors to either side: about 95%


@dataclass(frozen=True)
class Estimate:
    """A number with its range.

    Attributes
    ----------
    value : float
    low, high : float, optional
        Where the true number lies, about 95 times of 100; equal if it is known, None if the sample
        is from a single place and says nothing about it.
    """

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Sample:
    """Rows from all over an input, in draws of which each stands for a share of it.

    Attributes
    ----------
    frame : pandas.DataFrame or cudf.DataFrame
        The rows, numbered from 0.
    weights : ndarray of float64, shape (rows,)
        How many rows of the input each row stands for.
    draw_of : ndarray of int64, shape (rows,)
        The draw that each row is from.
    shares : ndarray of float64, shape (draws,)
        Of the input, what each draw stands for; a draw may have no rows. They add up to 1.
    rows_read : int
        From which those of the frame were drawn.
    left_out : dict of str to int
        Files, lines and rows that cannot be read, by kind.
    largest_share : float
        Of the input, what its largest part has.
    is_of_files : bool
        Else parts are partitions of a Dask frame, whose sizes are known only of those drawn.
    """

    frame: Any
    weights: np.ndarray
    draw_of: np.ndarray
    shares: np.ndarray
    rows_read: int
    left_out: dict[str, int]
    largest_share: float
    is_of_files: bool

    @property
    def rows(self) -> Estimate:
        """Rows of the input."""
        found = self._total(np.ones(len(self.frame)), self.rows_read)
        if found.low == found.high is not None:  # known, but for floating point
            return Estimate(*[float(round(found.value))] * 3)
        return found

    def total(self, values: np.ndarray) -> Estimate:
        """The sum over the whole input of a number of each row, ndarray (rows,)."""
        return self._total(values, len(values))

    def largest_part(self, values: np.ndarray) -> float:
        """The sum over the largest part of a number of each row, ndarray (rows,)."""
        whole = self._wholes(values).max() if not self.is_of_files else self.weights @ values
        return float(whole * self.largest_share)

    def _wholes(self, values: np.ndarray) -> np.ndarray:
        """What the whole input's sum would be by each draw alone, float64 (draws,)."""
        sums = np.bincount(self.draw_of, self.weights * values, minlength=len(self.shares))
        return sums / self.shares

    def _total(self, values: np.ndarray, rows_known: int) -> Estimate:
        """The sum, and a range that shrinks with the share of the rows that is known.

        Draws have probabilities proportional to size, so that the mean of their sums by size is
        unbiased (Hansen and Hurwitz; Cochran, "Sampling Techniques", 1977, chapter 9A).
        """
        wholes, value = self._wholes(values), float(self.weights @ values)
        unknown = max(0.0, 1 - rows_known / self.weights.sum())
        if unknown < 1e-9:
            return Estimate(value, value, value)
        if len(wholes) == 1:
            return Estimate(value, None, None)
        if np.ptp(wholes) <= 1e-9 * wholes.max():  # rows of Parquet files, by which they are drawn
            return Estimate(value, value, value)
        squares = self.shares @ (wholes - value) ** 2
        error = SPREAD * float(np.sqrt(unknown * squares / (len(wholes) - 1)))
        return Estimate(value, max(0.0, value - error), value + error)


class _Picked(NamedTuple):
    """Rows at random of one stretch of the input: row groups, a byte range or a partition.

    They stand for so many rows and such a share of the input, and are worth so many draws.
    """

    frame: Any
    rows: float
    share: float
    draws: int


def sample_files(
    source: InputParts,
    rows: int,
    seed: int,
    on_error: str,
    *,
    attempts: Iterable[tuple[int, int]] = ATTEMPTS,
    beginning_bytes: int = BEGINNING_BYTES,
) -> Sample:
    """Draw rows from the parts of files.

    Parameters
    ----------
    source : InputParts
    rows : int
        About how many.
    seed : int
        The same one draws the same rows.
    on_error : {"raise", "quarantine"}
    attempts : iterable of (int, int)
        How many stretches to read, and bytes of one of JSON lines; the next are tried where few
        rows are found.
    beginning_bytes : int
        Stored bytes to read of a compressed file.

    Raises
    ------
    UnreadableInputError
        There are no rows, or, unless `on_error` is "quarantine", some cannot be read.
    """
    is_parquet = any(part.row_groups is not None for part in source.parts)
    for count, stretch_bytes in attempts:
        rng = np.random.default_rng(seed)
        sizes, cut, mean_bytes = (
            _row_groups(source) if is_parquet else _byte_ranges(source, stretch_bytes)
        )
        count = min(count, max(FEWEST_STRETCHES, int(MOST_BYTES // mean_bytes)))
        picks: list[_Picked] = []
        problems: list[Problem] = []
        rows_read = 0
        for part, size, share in _choose(sizes, cut, count, rng):
            table, found, fraction = _read(part, size, source.schema, on_error, beginning_bytes)
            own, _ = _pick(to_pandas(table), math.ceil(rows * share), int(rng.integers(2**31)))
            stands_for = len(table) / fraction * sum(sizes) / size * share
            # Several draws of a file's beginning would hide that nothing is known of its rest.
            draws = round(count * share) if fraction == 1 else 1
            picks.append(_Picked(own, stands_for, share, draws))
            problems += found
            rows_read += len(table)
        if sum(len(pick.frame) for pick in picks) >= min(rows, FEWEST_ROWS):
            break
    left_out = counts_by_kind(problems)
    if broken := sum(part.problem is not None for part in source.parts):
        left_out[FILE] = left_out.get(FILE, 0) + broken
    return _sample(picks, max(sizes, default=0) / (sum(sizes) or 1), rows_read, left_out, True)


def sample_partitions(frame: Any, rows: int, seed: int) -> Sample:
    """Draw rows from some partitions of a Dask frame, each of which is computed.

    Raises
    ------
    UnreadableInputError
        There are no rows.
    """
    rng, sizes = np.random.default_rng(seed), [1.0] * frame.npartitions
    chosen = _choose(sizes, lambda number: [(number, 1.0)], MOST_PARTITIONS, rng)
    parts = frame.partitions[[number for number, _, _ in chosen]].to_delayed()
    pick = dask.delayed(_pick)
    tasks = [
        pick(part, math.ceil(rows * share), int(rng.integers(2**31)))
        for part, (_, _, share) in zip(parts, chosen, strict=True)
    ]
    picked = dask.compute(*tasks)
    picks = [
        _Picked(own, count * len(sizes) * share, share, round(MOST_PARTITIONS * share))
        for (own, count), (_, _, share) in zip(picked, chosen, strict=True)
    ]
    return _sample(picks, 1 / len(sizes), sum(count for _, count in picked), {}, False)


def _choose(
    sizes: Sequence[float],
    cut: Callable[[int], list[tuple[Any, float]]],
    count: int,
    rng: np.random.Generator,
) -> list[tuple[Any, float, float]]:
    """Stretches from all over the input, with their sizes and the shares that they stand for.

    One is drawn in each of `count` equal strata with a probability proportional to its size; a
    large one may be drawn more often. All are taken where there are no more than `count`.

    Parameters
    ----------
    sizes : sequence of float
        Of all parts.
    cut : callable
        Stretches of the part with a number, and their sizes, which add up to the part's.
    count : int
    rng : numpy.random.Generator
    """
    numbers, total = [number for number, size in enumerate(sizes) if size > 0], sum(sizes)
    every = ((item, size) for number in numbers for item, size in cut(number) if size > 0)
    few = list(itertools.islice(every, count + 1))
    if len(few) <= count:
        return [(item, size, size / total) for item, size in few]
    ends = np.cumsum([sizes[number] for number in numbers])
    chosen: Counter[tuple[int, int]] = Counter()
    for point in (np.arange(count) + rng.random(count)) * (total / count):
        place = min(int(np.searchsorted(ends, point, "right")), len(numbers) - 1)
        inner = ends[place] - sizes[numbers[place]]
        inner_ends = inner + np.cumsum([size for _, size in cut(numbers[place])])
        index = min(int(np.searchsorted(inner_ends, point, "right")), len(inner_ends) - 1)
        chosen[numbers[place], index] += 1
    return [(*cut(part)[index], times / count) for (part, index), times in chosen.items()]


def _row_groups(source: InputParts) -> tuple[list[float], Callable[[int], Any], float]:
    """Rows of the parts of Parquet files, what cuts one into row groups, and bytes of a group."""
    footers = read_footers(source.files, source.schema.storage_options)
    rows = {f.path: end.group_rows for f, end in zip(source.files, footers, strict=True)}

    def cut(number: int) -> list[tuple[Part, float]]:
        path, groups = source.parts[number].path, source.parts[number].row_groups or ()
        return [(Part(path, row_groups=(group,)), float(rows[path][group])) for group in groups]

    sizes = [sum(size for _, size in cut(number)) for number in range(len(source.parts))]
    group_bytes = [own for end in footers for own in end.group_bytes]
    return sizes, cut, max(1.0, sum(group_bytes) / max(1, len(group_bytes)))


def _byte_ranges(
    source: InputParts, most_bytes: int
) -> tuple[list[float], Callable[[int], Any], float]:
    """Stored bytes of the parts of JSON lines, what cuts one into ranges, and bytes of a range.

    Where the size of a file is unknown, all parts count alike and are read whole.
    """
    stored = {file.path: file.size_bytes for file in source.files}
    is_sized = None not in stored.values()

    def size(part: Part) -> float:
        length = stored[part.path] if part.length is None else part.length
        return 0.0 if part.problem is not None else float(length or 0) if is_sized else 1.0

    def cut(number: int) -> list[tuple[Part, float]]:
        part = source.parts[number]
        if part.length is None or not is_sized:
            return [(part, sizes[number])]
        ranges = range(0, part.length, -(-part.length // -(-part.length // most_bytes)))
        return [
            (replace(part, start=part.start + low, length=length), float(length))
            for low in ranges
            for length in [min(ranges.step, part.length - low)]
        ]

    sizes = [size(part) for part in source.parts]
    return sizes, cut, float(most_bytes)


def _read(
    part: Part, size: float, schema: InputSchema, on_error: str, beginning_bytes: int
) -> tuple[pa.Table, list[Problem], float]:
    """Rows of a part, what cannot be read, and which fraction of the part that is.

    Of a large compressed file only the beginning is read: nothing else can be read alone.
    """
    codec = compression(part.path)
    if codec is None or size <= beginning_bytes:
        return *read_table(part, schema, on_error), 1.0
    table, problems, fraction = schema.arrow.empty_table(), [], 1.0
    lines, place = bytearray(), 0
    try:
        with (
            reading(part.path, schema.storage_options) as file,
            decompressed(file, codec) as stream,
        ):
            while more := stream.read(STEP_BYTES):
                # Stored bytes are read ahead: when more are asked for, those before are used up.
                if file.tell() > place >= beginning_bytes and b"\n" in lines:
                    fraction = place / size
                    del lines[lines.rfind(b"\n") + 1 :]
                    break
                place = file.tell()
                lines += more
        table, bad = parse_good(bytes(lines), 0, schema.arrow, schema.is_projected)
        table = with_folder_values(table, schema.folder_fields, part.path)
        problems = [Problem(LINE, str(part), line.reason, offset=line.offset) for line in bad]
    except BrokenContentError as err:
        problems, fraction = [Problem(FILE, str(part), str(err))], 1.0
    if problems and on_error == "raise":
        raise unreadable(part, problems[0])
    return table, problems, fraction


def _pick(frame: Any, most: int, seed: int) -> tuple[Any, int]:
    """At most so many rows, at random, and how many there are."""
    order = np.random.default_rng(seed).permutation(len(frame))
    return frame.iloc[order[:most]], len(frame)


def _sample(
    picks: list[_Picked],
    largest_share: float,
    rows_read: int,
    left_out: dict[str, int],
    is_of_files: bool,
) -> Sample:
    from dask.dataframe.dispatch import concat

    frames = [pick.frame for pick in picks if len(pick.frame)]
    if not frames:
        counts = "; ".join(f"{kind}s left out: {count}" for kind, count in left_out.items())
        raise UnreadableInputError(
            f"the input has no rows to plan with{f' ({counts})' if counts else ''}: "
            "look at its files"
        )
    weights, draw_of = [], []
    shares: list[float] = []
    for pick in picks:
        count = len(pick.frame)
        draws = max(1, min(pick.draws, count))
        own = np.arange(count) * draws // max(1, count)
        weights.append(np.full(count, pick.rows / max(1, count)))
        draw_of.append(len(shares) + own)
        part = np.bincount(own, minlength=draws) / count if count else np.ones(1)
        shares += (pick.share * part).tolist()
    return Sample(
        concat(frames).reset_index(drop=True),
        np.concatenate(weights),
        np.concatenate(draw_of),
        np.array(shares),
        rows_read,
        left_out,
        largest_share,
        is_of_files,
    )
