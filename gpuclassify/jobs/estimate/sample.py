"""A random sample of an input's rows, and what it says about the whole input."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dask
import numpy as np
import pyarrow as pa

from gpuclassify.jobs.files import BrokenContentError, UnreadableInputError, compression, reading
from gpuclassify.jobs.input.folders import with_values
from gpuclassify.jobs.input.jsonl import parse_good
from gpuclassify.jobs.input.parquet import read_footers
from gpuclassify.jobs.input.parts import Form, Part, Source, read_table, unreadable
from gpuclassify.jobs.input.schema import to_pandas
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
class Draw:
    """Rows drawn from one stretch of the input: row groups, a byte range, a partition.

    Attributes
    ----------
    frame : pandas.DataFrame or cudf.DataFrame
        The rows.
    rows : float
        How many rows the stretch has: counted, or estimated from the part of it that was read.
    size : float
        Of the stretch, in bytes, rows or partitions.
    share : float
        Of the whole input, what the draw stands for. The shares of a sample add up to 1.
    """

    frame: Any
    rows: float
    size: float
    share: float


@dataclass(frozen=True)
class Sample:
    """Rows from all over an input.

    Attributes
    ----------
    draws : tuple of Draw
    frame : pandas.DataFrame or cudf.DataFrame
        The rows of all draws, numbered from 0.
    size : float
        Of the whole input, in the unit of the draws.
    rows_read : int
        Rows of the stretches that were read.
    left_out : dict of str to int
        Files, lines and rows that cannot be read, by kind.
    largest_share : float, optional
        Of the input, what its largest part has. None for a Dask frame, whose partitions are only
        known as far as they were computed.
    """

    draws: tuple[Draw, ...]
    frame: Any
    size: float
    rows_read: int
    left_out: dict[str, int]
    largest_share: float | None

    @property
    def rows(self) -> Estimate:
        """Rows of the input."""
        return self._total([draw.rows for draw in self.draws], self.rows_read)

    @property
    def weights(self) -> np.ndarray:
        """How many rows of the input each row stands for, float64 (rows,)."""
        counts = [len(draw.frame) for draw in self.draws]
        each = [self.size * d.share / d.size * d.rows / max(1, len(d.frame)) for d in self.draws]
        return np.repeat(each, counts)

    def total(self, values: np.ndarray) -> Estimate:
        """The sum over the whole input of a number of each row, ndarray (rows,)."""
        return self._total(self._sums(values), len(values))

    def largest_part(self, values: np.ndarray) -> tuple[float, float]:
        """Rows of the largest part, and its sum of a number of each row, ndarray (rows,)."""
        if self.largest_share is None:
            return max(draw.rows for draw in self.draws), max(self._sums(values))
        share = self.largest_share
        return self.rows.value * share, self.total(values).value * share

    def _sums(self, values: np.ndarray) -> list[float]:
        """The sum over each draw's stretch."""
        ends = np.cumsum([len(draw.frame) for draw in self.draws])
        means = [own.mean() if len(own) else 0.0 for own in np.split(values, ends[:-1])]
        return [float(draw.rows * mean) for draw, mean in zip(self.draws, means, strict=True)]

    def _total(self, sums: Sequence[float], rows_known: int) -> Estimate:
        """The whole input's sum from those of the stretches.

        Stretches are drawn with probabilities proportional to their sizes, so that the mean of
        sum / size is unbiased (Hansen and Hurwitz; Cochran, "Sampling Techniques", 1977, chapter
        9A). Its error shrinks with the share of the rows that is known.
        """
        ratios = np.array([own / draw.size for own, draw in zip(sums, self.draws, strict=True)])
        scale = self.size * np.array([draw.share for draw in self.draws])
        value, rows = float(scale @ ratios), float(scale @ [d.rows / d.size for d in self.draws])
        squares = (ratios - value / self.size) ** 2
        unknown = max(0.0, 1 - rows_known / max(1.0, rows))
        if unknown < 1e-9:
            return Estimate(value, value, value)
        if len(ratios) == 1:
            return Estimate(value, None, None)
        if not squares.max() > (1e-9 * ratios.max()) ** 2:  # as rows of Parquet, whose unit is rows
            return Estimate(value, value, value)
        error = SPREAD * np.sqrt(unknown * self.size * (scale @ squares) / (len(ratios) - 1))
        return Estimate(value, max(0.0, value - float(error)), value + float(error))


def sample_files(
    source: Source,
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
    source : Source
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
        draws: list[Draw] = []
        problems: list[Problem] = []
        rows_read = 0
        for part, size, share in _choose(sizes, cut, count, rng):
            table, found, fraction = _read(part, size, source.form, on_error, beginning_bytes)
            own, _ = _pick(to_pandas(table), math.ceil(rows * share), int(rng.integers(2**31)))
            # Several draws of a file's beginning would hide that nothing is known of its rest.
            most = count if fraction == 1 else 1
            draws += _as_draws(own, len(table) / fraction, size, share, most)
            problems += found
            rows_read += len(table)
        if sum(len(draw.frame) for draw in draws) >= min(rows, FEWEST_ROWS):
            break
    left_out = counts_by_kind(problems)
    if broken := sum(part.problem is not None for part in source.parts):
        left_out[FILE] = left_out.get(FILE, 0) + broken
    return _sample(draws, sizes, rows_read, left_out, is_whole=True)


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
    draws: list[Draw] = []
    rows_read = 0
    for (own, count), (_, size, share) in zip(dask.compute(*tasks), chosen, strict=True):
        draws += _as_draws(own, count, size, share, MOST_PARTITIONS)
        rows_read += count
    return _sample(draws, sizes, rows_read, {}, is_whole=False)


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


def _row_groups(source: Source) -> tuple[list[float], Callable[[int], Any], float]:
    """Rows of the parts of Parquet files, what cuts one into row groups, and bytes of a group."""
    footers = read_footers(source.files, source.form.storage_options)
    rows = {f.path: end.group_rows for f, end in zip(source.files, footers, strict=True)}

    def cut(number: int) -> list[tuple[Part, float]]:
        path, groups = source.parts[number].path, source.parts[number].row_groups or ()
        return [(Part(path, row_groups=(group,)), float(rows[path][group])) for group in groups]

    sizes = [sum(size for _, size in cut(number)) for number in range(len(source.parts))]
    group_bytes = [own for end in footers for own in end.group_bytes]
    return sizes, cut, max(1.0, sum(group_bytes) / max(1, len(group_bytes)))


def _byte_ranges(
    source: Source, most_bytes: int
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
    part: Part, size: float, form: Form, on_error: str, beginning_bytes: int
) -> tuple[pa.Table, list[Problem], float]:
    """Rows of a part, what cannot be read, and which fraction of the part that is.

    Of a large compressed file only the beginning is read: nothing else can be read alone.
    """
    codec = compression(part.path)
    if codec is None or size <= beginning_bytes:
        return *read_table(part, form, on_error), 1.0
    table, problems, fraction = form.schema.empty_table(), [], 1.0
    lines, place = bytearray(), 0
    try:
        with (
            reading(part.path, form.storage_options) as file,
            pa.input_stream(file, compression=codec) as stream,
        ):
            while more := stream.read(STEP_BYTES):
                # Stored bytes are read ahead: when more are asked for, those before are used up.
                if file.tell() > place >= beginning_bytes and b"\n" in lines:
                    fraction = place / size
                    del lines[lines.rfind(b"\n") + 1 :]
                    break
                place = file.tell()
                lines += more
        table, bad = parse_good(bytes(lines), 0, form.schema, form.is_projected)
        table = with_values(table, form.schema, part.path)
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


def _as_draws(picked: Any, rows: float, size: float, share: float, count: int) -> list[Draw]:
    """Random rows of one stretch, as the draws among `count` that its share is worth."""
    draws = max(1, min(round(count * share), len(picked)))
    places = np.array_split(np.arange(len(picked)), draws)
    return [Draw(picked.iloc[own], rows, size, share / draws) for own in places]


def _sample(
    draws: list[Draw],
    sizes: list[float],
    rows_read: int,
    left_out: dict[str, int],
    *,
    is_whole: bool,
) -> Sample:
    from dask.dataframe.dispatch import concat

    frames = [draw.frame for draw in draws if len(draw.frame)]
    if not frames:
        counts = "; ".join(f"{kind}s left out: {count}" for kind, count in left_out.items())
        raise UnreadableInputError(
            f"the input has no rows to plan with{f' ({counts})' if counts else ''}: "
            "look at its files"
        )
    frame, size = concat(frames).reset_index(drop=True), sum(sizes)
    largest_share = max(sizes) / size if is_whole else None
    return Sample(tuple(draws), frame, size, rows_read, left_out, largest_share)
