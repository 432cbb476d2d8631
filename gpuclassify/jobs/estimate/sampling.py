"""A sample of an input, drawn from parts all over it, and what it says about the whole."""

from __future__ import annotations

import bisect
import functools
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import dask
import numpy as np
import pyarrow as pa

from gpuclassify.jobs.files import BrokenContentError, UnreadableInputError, compression, reading
from gpuclassify.jobs.input.jsonl import parse_good, read_range
from gpuclassify.jobs.input.parquet import read_footers
from gpuclassify.jobs.input.parts import InputParts, InputSchema, Part, read_table, unreadable
from gpuclassify.jobs.input.schema import to_frame, with_folder_values
from gpuclassify.jobs.quarantine import FILE, LINE, Problem, counts_by_kind

# Pieces, and bytes of JSON lines in each: enough that they tell how parts differ, few enough to be
# read in seconds. More of them only where lines are so long, or files so short, that few are found.
ATTEMPTS = ((32, 256 << 10), (128, 1 << 20), (512, 4 << 20))
FEWEST_ROWS = 100
MOST_PARTITIONS = 8  # of a Dask frame: nobody knows what computing one takes
FEWEST_GROUPS = 4  # of Parquet files, which are read whole
MOST_GROUP_BYTES = 1 << 30
BEGINNING_BYTES = 4 << 20  # of a compressed file, which can only be read from its beginning
STEP_BYTES = 16 << 10
SPREAD = 2.0  # standard errors to either side: about 95%


@dataclass(frozen=True)
class Estimate:
    """A number with its range.

    Attributes
    ----------
    value : float
    low, high : float, optional
        Where the true number lies, about 95 times of 100; equal if it is known, None if a single
        piece says nothing about it.
    """

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Piece:
    """What was read of one stretch of the input.

    Attributes
    ----------
    frame : pandas.DataFrame or cudf.DataFrame
        Rows that were drawn of it.
    rows : float
        How many it has: counted, or reckoned from those that were read.
    rows_read : int
    size : float
        How large it is, as the input's size is counted: in bytes, in rows or in partitions.
    problems : tuple of Problem
    """

    frame: Any
    rows: float
    rows_read: int
    size: float
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Sample:
    """Rows from stretches all over an input.

    Attributes
    ----------
    pieces : tuple of Piece
    sizes : tuple of float
        Of all parts of the input, as those of the pieces are counted.
    frame : pandas.DataFrame or cudf.DataFrame
        All rows drawn, numbered from 0.
    broken_parts : int
        Files that planning found to be unreadable; they have no size.
    """

    pieces: tuple[Piece, ...]
    sizes: tuple[float, ...]
    frame: Any
    broken_parts: int = 0

    @property
    def size(self) -> float:
        """Of the whole input."""
        return sum(self.sizes)

    @property
    def left_out(self) -> dict[str, int]:
        """All files known to be unreadable, and files, lines and rows of the pieces that are."""
        problems = (problem for piece in self.pieces for problem in piece.problems)
        counts = counts_by_kind(dict.fromkeys(problems))  # several pieces may be of one file
        if self.broken_parts:
            counts[FILE] = counts.get(FILE, 0) + self.broken_parts
        return counts

    @property
    def weights(self) -> np.ndarray:
        """How many rows of the input each row stands for, float64 (rows,)."""
        scale = self.size / sum(piece.size for piece in self.pieces)
        each = [scale * piece.rows / max(1, len(piece.frame)) for piece in self.pieces]
        return np.repeat(each, [len(piece.frame) for piece in self.pieces])

    @property
    def rows(self) -> Estimate:
        """Rows of the input."""
        read = sum(piece.rows_read for piece in self.pieces)
        return self._total([piece.rows for piece in self.pieces], read)

    def total(self, values: np.ndarray) -> Estimate:
        """What a number of each row, ndarray (rows,), adds up to over the whole input."""
        ends = np.cumsum([len(piece.frame) for piece in self.pieces])
        own = np.split(values, ends[:-1])
        means = [part.mean() if len(part) else 0.0 for part in own]
        sums = [piece.rows * mean for piece, mean in zip(self.pieces, means, strict=True)]
        return self._total(sums, len(values))

    def _total(self, sums: Sequence[float], rows_known: int) -> Estimate:
        """The whole input's sum from those of the pieces.

        The ratio estimator of a sample of clusters (Cochran, "Sampling Techniques", 1977, chapters
        6 and 9A): sums by sizes, with the pieces' deviations from one ratio as the error, which is
        the smaller, the larger the share of the rows that is known.
        """
        sizes = np.array([piece.size for piece in self.pieces])
        ratio = np.sum(sums) / sizes.sum()
        errors = np.asarray(sums) - ratio * sizes
        value = float(self.size * ratio)
        rows = sum(piece.rows for piece in self.pieces) * self.size / sizes.sum()
        unknown = max(0.0, 1 - rows_known / max(1.0, rows))
        if unknown < 1e-9 or not np.abs(errors).max() > 1e-9 * abs(ratio) * sizes.max():
            return Estimate(value, value, value)
        if len(errors) == 1:
            return Estimate(value, None, None)
        variance = unknown * (errors**2).sum() / (len(errors) - 1) / len(errors)
        error = float(SPREAD * self.size / sizes.mean() * np.sqrt(variance))
        return Estimate(value, max(0.0, value - error), value + error)


def sample_files(
    source: InputParts, form: InputSchema, rows: int, seed: int, on_error: str
) -> Sample:
    """Draw rows from planned files.

    Parameters
    ----------
    source : InputParts
    form : InputSchema
        The source's, with storage options.
    rows : int
        About how many.
    seed : int
        The same one draws the same rows.
    on_error : {"raise", "quarantine"}

    Raises
    ------
    UnreadableInputError
        There are no rows, or, unless `on_error` is "quarantine", some cannot be read.
    """
    is_parquet = any(part.row_groups is not None for part in source.parts)
    reader = (_ParquetPieces if is_parquet else _JsonPieces)(source, form, on_error)
    for count, most_bytes in ATTEMPTS:
        rng = np.random.default_rng(seed)
        stretches = _spread(reader.sizes, min(count, reader.most_pieces), rng)
        quota = -(-rows // max(1, len(stretches)))
        pieces = [reader.read(stretch, quota, most_bytes, rng) for stretch in stretches]
        if sum(len(piece.frame) for piece in pieces) >= min(rows, FEWEST_ROWS):
            break
    broken_parts = sum(part.problem is not None for part in source.parts)
    return _sample(pieces, reader.sizes, broken_parts)


def sample_partitions(frame: Any, rows: int, seed: int) -> Sample:
    """Draw rows from some partitions of a Dask frame, each of which is computed.

    Raises
    ------
    UnreadableInputError
        There are no rows.
    """
    rng = np.random.default_rng(seed)
    stretches = _spread([1.0] * frame.npartitions, MOST_PARTITIONS, rng)
    quota = -(-rows // len(stretches))
    parts = frame.partitions[[stretch.part for stretch in stretches]].to_delayed()
    seeds = [int(value) for value in rng.integers(2**31, size=len(stretches))]
    drawn = [dask.delayed(_draw)(part, quota, own) for part, own in zip(parts, seeds, strict=True)]
    pieces = [Piece(rows, float(count), count, 1.0) for rows, count in dask.compute(*drawn)]
    return _sample(pieces, [1.0] * frame.npartitions)


def _sample(pieces: list[Piece], sizes: Sequence[float], broken_parts: int = 0) -> Sample:
    from dask.dataframe.dispatch import concat

    drawn = [piece.frame for piece in pieces if len(piece.frame)]
    frame = concat(drawn).reset_index(drop=True) if drawn else None
    sample = Sample(tuple(pieces), tuple(sizes), frame, broken_parts)
    if not drawn:
        counts = "; ".join(f"{kind}s left out: {n}" for kind, n in sample.left_out.items())
        raise UnreadableInputError(
            f"the input has no rows to plan with{f' ({counts})' if counts else ''}: "
            "look at its files"
        )
    return sample


@dataclass(frozen=True)
class _Stretch:
    """Stretch number `cut` of the `cuts` equal ones of a part."""

    part: int
    cut: int = 0
    cuts: int = 1

    def bounds(self, size: int) -> tuple[int, int]:
        """Where it begins and ends in a part of this size."""
        return size * self.cut // self.cuts, size * (self.cut + 1) // self.cuts


def _spread(sizes: Sequence[float], count: int, rng: np.random.Generator) -> list[_Stretch]:
    """Stretches all over the input: one random part in each of `count` runs of neighbours.

    Fewer parts are cut into about as many stretches.
    """
    numbers = [number for number, size in enumerate(sizes) if size > 0]
    if len(numbers) > count:
        edges = np.linspace(0, len(numbers), count + 1).astype(int)
        picked = [int(rng.integers(low, high)) for low, high in itertools.pairwise(edges)]
        return [_Stretch(numbers[place]) for place in picked]
    most = -(-count // max(1, len(numbers)))
    cuts = {number: min(most, int(sizes[number])) for number in numbers}
    return [
        _Stretch(number, cut, cuts[number]) for number in numbers for cut in range(cuts[number])
    ]


def _draw(frame: Any, quota: int, seed: int) -> tuple[Any, int]:
    """Rows at random, in order, and how many there are."""
    rng = np.random.default_rng(seed)
    if len(frame) <= quota:
        return frame, len(frame)
    return frame.iloc[np.sort(rng.choice(len(frame), quota, replace=False))], len(frame)


def _piece(
    table: pa.Table,
    problems: list[Problem],
    share: float,
    size: float,
    quota: int,
    rng: np.random.Generator,
) -> Piece:
    """The piece of which `table` is the share that was read."""
    drawn, count = _draw(to_frame(table, "pandas"), quota, int(rng.integers(2**31)))
    return Piece(drawn, count / share, count, size, tuple(problems))


class _JsonPieces:
    """Stretches of JSON lines; sizes are bytes as they are stored."""

    most_pieces = ATTEMPTS[-1][0]

    def __init__(self, source: InputParts, form: InputSchema, on_error: str) -> None:
        self._parts, self._form, self._on_error = source.parts, form, on_error
        stored = {file.path: file.size_bytes for file in source.files}
        self._is_sized = all(size is not None for size in stored.values())
        self.sizes = [self._size(part, stored) for part in source.parts]
        self._beginning = functools.lru_cache(1)(self._read_beginning)

    def read(
        self, stretch: _Stretch, quota: int, most_bytes: int, rng: np.random.Generator
    ) -> Piece:
        """Rows of one stretch."""
        part = self._parts[stretch.part]
        size = self.sizes[stretch.part] / stretch.cuts
        if part.length is None:
            table, problems, share = self._of_beginning(part, stretch)
        else:
            begin, end = stretch.bounds(part.length)
            share = min(1.0, most_bytes / max(1, end - begin))
            begin += int(rng.integers(max(0, end - begin - most_bytes) + 1))
            length = min(end - begin, most_bytes)
            own = replace(part, start=part.start + begin, length=length)
            table, problems = read_table(own, self._form, self._on_error)
        return _piece(table, problems, share, size, quota, rng)

    def _size(self, part: Part, stored: dict[str, int | None]) -> float:
        if part.problem is not None:
            return 0.0
        if not self._is_sized:
            return 1.0
        return float(stored[part.path] or 0) if part.length is None else float(part.length)

    def _of_beginning(self, part: Part, stretch: _Stretch) -> tuple[pa.Table, list[Problem], float]:
        """Lines of a file's beginning: a compressed file can only be read from there."""
        form = self._form
        try:
            content, share = self._beginning(part, self.sizes[stretch.part])
        except BrokenContentError as err:
            table, problems = form.arrow.empty_table(), [Problem(FILE, str(part), str(err))]
            share = 1.0
        else:
            begin, end = stretch.bounds(len(content))
            _, lines = read_range(io.BytesIO(content), begin, end - begin)
            table, bad = parse_good(lines, begin, form.arrow, form.is_projected)
            table = with_folder_values(table, form.folder_fields, part.path)
            problems = [Problem(LINE, str(part), line.reason, offset=line.offset) for line in bad]
        if problems and self._on_error == "raise":
            raise unreadable(part, problems[0])
        return table, problems, share

    def _read_beginning(self, part: Part, size: float) -> tuple[bytes, float]:
        """The first lines of a file, and which share of its stored bytes they are."""
        with (
            reading(part.path, self._form.storage_options) as file,
            pa.input_stream(file, compression=compression(part.path)) as stream,
        ):
            lines = stream.read(BEGINNING_BYTES)
            place = file.tell()
            # Stored bytes are read ahead: when more are asked for, those before have been used up.
            while file.tell() == place or b"\n" not in lines:
                more = stream.read(STEP_BYTES)
                if not more:
                    return lines, 1.0
                lines += more
        share = place / size if self._is_sized else 1.0
        return lines[: lines.rfind(b"\n") + 1], share


class _ParquetPieces:
    """Row groups; sizes are rows, which the footers tell exactly."""

    def __init__(self, source: InputParts, form: InputSchema, on_error: str) -> None:
        self._parts, self._form, self._on_error = source.parts, form, on_error
        footers = read_footers(source.files, form.storage_options)
        self._rows = {
            file.path: footer.group_rows for file, footer in zip(source.files, footers, strict=True)
        }
        self.sizes = [float(sum(self._group_rows(part))) for part in source.parts]
        groups = sum(len(part.row_groups or ()) for part in source.parts)
        stored_bytes = sum(sum(footer.group_bytes) for footer in footers)
        self.most_pieces = max(FEWEST_GROUPS, MOST_GROUP_BYTES * groups // max(1, stored_bytes))
        self._group = functools.lru_cache(2)(self._read_group)

    def read(
        self, stretch: _Stretch, quota: int, most_bytes: int, rng: np.random.Generator
    ) -> Piece:
        """Rows of one stretch: all, if few are in it, or those in the row group of one of them."""
        part = self._parts[stretch.part]
        begin, end = stretch.bounds(int(self.sizes[stretch.part]))
        ends = np.cumsum(self._group_rows(part)).tolist()
        places = list(range(bisect.bisect(ends, begin), bisect.bisect(ends, end - 1) + 1))
        if end - begin > quota:
            places = [bisect.bisect(ends, int(rng.integers(begin, end)))]
        tables, problems, count = [], [], 0
        for place in places:
            origin = ends[place - 1] if place else 0
            first, last = max(begin, origin), min(end, ends[place])
            table, found = self._group(part.path, (part.row_groups or ())[place])
            tables.append(table.slice(first - origin, last - first))
            problems += found
            count += last - first
        share = count / (end - begin)
        return _piece(pa.concat_tables(tables), problems, share, end - begin, quota, rng)

    def _read_group(self, path: str, group: int) -> tuple[pa.Table, list[Problem]]:
        return read_table(Part(path, row_groups=(group,)), self._form, self._on_error)

    def _group_rows(self, part: Part) -> list[int]:
        return [self._rows[part.path][group] for group in part.row_groups or ()]
