"""Random rows from all over an input, to estimate the cost of a job."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import dask
import numpy as np

from gpuclassify.jobs.input.part_finder import read_footers
from gpuclassify.jobs.input.parts import InputParts, Limit, Part, read_table
from gpuclassify.jobs.input.schema import is_textless, to_pandas
from gpuclassify.jobs.ledger.quarantine import FILE, counts_by_kind
from gpuclassify.jobs.stores.names import JSONL, PARQUET, compression, file_format, redacted
from gpuclassify.jobs.stores.store import UnreadableInputError
from gpuclassify.pages import counted_kinds

if TYPE_CHECKING:
    from dask.delayed import Delayed

    from gpuclassify.frames import Frame

# Number and size of the byte ranges read from JSON lines. A compressed file is read at its
# beginning, up to four times STRETCH_BYTES of stored bytes.
STRETCHES, STRETCH_BYTES = 64, 128 << 10
MOST_BYTES = 256 << 20  # stored bytes of row groups, which are read whole
MOST_PARTITIONS = 8  # partitions of a Dask frame, which may be expensive to compute


class Piece(NamedTuple):
    """Rows drawn from one piece of an input: a row group, byte range, file or Dask partition."""

    frame: Frame
    rows: float  # number of rows of the whole piece, which may be an estimate
    size: float  # size of the whole piece: rows, bytes, or 1 if unknown


@dataclass
class Sample:
    """Uniform sample of an input's rows, and estimates for the whole input."""

    frame: Frame
    rows: float  # number of rows of the input
    is_exact: bool  # whether `rows` was counted, not estimated
    pieces: int  # number of pieces of the input that were drawn
    left_out: Counter[str]  # unreadable files and lines, by kind
    textless: Counter[str] = field(default_factory=Counter)  # rows of files without any text

    @classmethod
    def of(
        cls, pieces: list[Piece], rows: int, size: float, is_whole: bool, left_out: Counter[str]
    ) -> Sample:
        """Join drawn rows of pieces to a sample of `rows` rows, or fewer if the input is smaller.

        Each piece gives rows in proportion to `Piece.rows`; drawn rows are repeated if they are too
        few. `size` is the size of the whole input, in the unit of `Piece.size`. `is_whole` is
        whether the pieces are the whole input. Raises UnreadableInputError if the pieces have no
        rows.
        """
        from dask.dataframe.dispatch import concat

        ends = np.cumsum([piece.rows for piece in pieces])
        if not len(ends) or not ends[-1]:
            counts = f" (left out: {counted_kinds(left_out)})" if left_out else ""
            raise UnreadableInputError(
                f"the input has no rows to plan with{counts}: look at its files"
            )
        total = float(ends[-1] / sum(piece.size for piece in pieces) * size)
        shares = np.round(ends / ends[-1] * min(rows, math.ceil(total))).astype(int)
        frames = [
            piece.frame.iloc[np.arange(count) % len(piece.frame)]
            for piece, count in zip(pieces, np.diff(shares, prepend=0), strict=True)
            if count
        ]
        is_exact = is_whole or all(piece.rows == piece.size for piece in pieces)
        frame = concat(frames).reset_index(drop=True)
        return cls(frame, round(total) if is_exact else total, is_exact, len(pieces), left_out)


def sample_files(
    source: InputParts,
    rows: int,
    seed: int,
    on_error: str,
    text_fields: Sequence[str] = (),
    stretch_bytes: int = STRETCH_BYTES,
) -> tuple[Sample, float]:
    """Draw up to `rows` rows from all over the files of `source`, used to plan a job.

    Returns the sample, and the fraction of the input in the largest part (slice that one task
    reads). `text_fields` are the columns checked for `Sample.textless`, and `stretch_bytes` is the
    maximum size of byte ranges drawn from JSON lines. If `on_error` is "quarantine", unreadable
    files and lines are left out. Raises UnreadableInputError if no row is read.
    """
    rng, pieces = np.random.default_rng(seed), []
    textless, left_out = Counter[str](), Counter[str]()
    parts = list(_readable(source))
    readable = [pair for part in parts for pair in part]
    sizes, count = [sum(size for _, size in part) for part in parts], STRETCHES
    if any(part.row_groups for part, _ in readable):
        stored = sum(file.size_bytes or 0 for file in source.files)
        count = min(count, max(4, MOST_BYTES * len(readable) // max(1, stored)))
    most = max(1, count // max(1, len(readable)))
    readable = [piece for pair in readable for piece in _cut(*pair, most, stretch_bytes)]
    is_whole = len(readable) <= count
    for part, size in (readable[number] for number in _draw(len(readable), count, rng)):
        limit, share = None, 1.0
        if part.length is not None and part.length > stretch_bytes:
            start = part.start + int(rng.integers(part.length - stretch_bytes))
            share = stretch_bytes / part.length
            part = replace(part, start=start, length=stretch_bytes)
        elif compression(part.path) and part.file_bytes is not None:
            limit = Limit(stored_bytes=4 * stretch_bytes)
        table, problems, read = read_table(part, source.schema, on_error, limit)
        length = len(table) / (share * read)
        pieces.append(Piece(_pick(to_pandas(table), rows, int(rng.integers(2**31))), length, size))
        if is_textless(table, text_fields):
            textless[redacted(part.path)] += round(length)
        is_whole &= share * read == 1
        left_out.update(counts_by_kind(problems))
    if missing := sum(piece.problem is not None for part in source.parts for piece in part.pieces):
        left_out[FILE] += missing
    sample = Sample.of(pieces, rows, sum(sizes), is_whole, left_out)
    sample.textless = textless
    return sample, max(sizes) / sum(sizes)


def _readable(source: InputParts) -> Iterator[list[tuple[Part, float]]]:
    """Yield the readable row groups or line ranges of each part, each with its size.

    Sizes are rows if all files are Parquet, else stored bytes, or 1 if a file's size is unknown.
    """
    is_sized = all(file.size_bytes is not None for file in source.files)
    tables = [file for file in source.files if file_format(file.path) == PARQUET]
    footers = read_footers(tables, source.schema.storage_options)
    rows = {file.path: footer.group_rows for file, footer in zip(tables, footers, strict=True)}
    is_mixed = bool(tables) and any(file_format(file.path) == JSONL for file in source.files)
    for part in source.parts:
        readable: list[tuple[Part, float]] = []
        for piece in part.pieces:
            if piece.row_groups is not None:
                counts = rows[piece.path]
                starts = np.cumsum((0, *counts)).tolist()
                groups = [
                    (replace(piece, row_groups=(n,), rows=(starts[n], starts[n + 1])), n)
                    for n in piece.row_groups
                ]
                share = 1.0  # size of a row
                if is_mixed:
                    share = (piece.file_bytes or 0) / max(1, starts[-1]) if is_sized else 0
                for group, n in groups:
                    size = share * len(range(*piece.bounds(counts[n])))
                    readable.append((group, size if share else 1))
            elif compression(piece.path) and piece.length is not None:
                continue  # the file's last range stands for the whole file
            elif piece.problem is None:
                if compression(piece.path):
                    piece = replace(piece, start=0)
                size = len(range(*piece.bounds(piece.length or piece.file_bytes or 0)))
                readable.append((piece, size if is_sized else 1))
        yield readable


def sample_partitions(partitions: list[Delayed], rows: int, seed: int) -> tuple[Sample, float]:
    """Compute up to eight partitions of a Dask frame, and draw up to `rows` rows from them.

    Returns the sample, and the estimated fraction of the input in the largest partition. Raises
    UnreadableInputError if the computed partitions have no rows.
    """
    rng, count = np.random.default_rng(seed), len(partitions)
    drawn = _draw(count, MOST_PARTITIONS, rng)
    pick, length = dask.delayed(_pick), dask.delayed(len)
    seeds = rng.integers(2**31, size=count).tolist()
    tasks = [(pick(partitions[n], rows, seeds[n]), length(partitions[n])) for n in drawn]
    pieces = [Piece(picked, number, 1) for picked, number in dask.compute(*tasks)]
    sample = Sample.of(pieces, rows, count, len(drawn) == count, Counter())
    return sample, max(piece.rows for piece in pieces) / sample.rows


def _cut(part: Part, size: float, most: int, stretch_bytes: int) -> list[tuple[Part, float]]:
    """Cut a range of JSON lines into up to `most` ranges, so that large parts are drawn more often.

    `size` is the part's size, which is divided as its bytes are. Other parts are not cut.
    """
    if part.length is None:
        return [(part, size)]
    count = min(most, -(-part.length // stretch_bytes)) or 1
    bounds = pairwise(part.length * number // count for number in range(count + 1))
    return [
        (replace(part, start=part.start + start, length=end - start), size / count)
        for start, end in bounds
    ]


def _draw(pieces: int, most: int, rng: np.random.Generator) -> list[int]:
    runs = np.array_split(np.arange(pieces), min(pieces, most)) if pieces else []
    return [int(rng.choice(run)) for run in runs]


def _pick(frame: Frame, most: int, seed: int) -> Frame:
    return frame.iloc[np.random.default_rng(seed).permutation(len(frame))[:most]]
