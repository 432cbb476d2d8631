"""Samples of JSON lines from all over the files, and the columns that they have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from gpuclassify.hub.dataset_files import LINE_BYTES
from gpuclassify.jobs.files import BrokenContentError, compression, decompressed, reading
from gpuclassify.jobs.input.jsonl import exact_integers, line_schemas, parse_good, read_range
from gpuclassify.jobs.input.parts import Part
from gpuclassify.jobs.input.schema import common_schema, json_schema
from gpuclassify.jobs.quarantine import FILE, LINE, Problem


@dataclass(frozen=True)
class SampledLines:
    """Whole lines of a piece of a file, and where in the (decompressed) file they begin."""

    piece: Part
    offset: int
    lines: bytes


def read_samples(
    pieces: Sequence[Part], most: int, sample_bytes: int, storage_options: dict[str, Any]
) -> Iterator[SampledLines | tuple[Part, Problem]]:
    """Up to `most` samples that hold something, or why a piece cannot be read.

    The pieces are all files, cut into about as many as samples are wanted.
    """
    last, steps = len(pieces) - 1, max(1, most - 1)
    spread = [round(step * last / steps) for step in range(most)] if pieces else []
    count = 0
    for number in dict.fromkeys([*spread, *range(len(pieces))]):  # all others in case of blanks
        piece = pieces[number]
        try:
            offset, lines = _read(piece, count, sample_bytes, storage_options)
        except BrokenContentError as err:
            yield piece, Problem(FILE, str(piece), str(err))
            continue
        if lines.strip():
            yield SampledLines(piece, offset, lines)
            count += 1
        if count == most:
            return


def sampled_schema(samples: Sequence[SampledLines]) -> pa.Schema:
    """The columns of all lines, as far as samples show them."""
    counts: Counter[pa.Schema] = Counter()
    for sample in samples:
        for found, count in line_schemas(sample.lines).items():
            counts[json_schema(found)] += count
    return exact_integers(common_schema(counts), [sample.lines for sample in samples])


def sample_problems(
    samples: Sequence[SampledLines], schema: pa.Schema, is_projected: bool
) -> Iterator[tuple[Part, Problem]]:
    """The lines that cannot be read as `schema`."""
    for sample in samples:
        for line in parse_good(sample.lines, sample.offset, schema, is_projected)[1]:
            yield sample.piece, Problem(LINE, str(sample.piece), line.reason, line.offset)


def _read(
    piece: Part, turn: int, sample_bytes: int, storage_options: dict[str, Any]
) -> tuple[int, bytes]:
    """Lines of a piece's beginning, middle or end in turn; of what is compressed, the beginning."""
    with reading(piece.path, storage_options, piece.file_bytes, LINE_BYTES) as file:
        codec = compression(piece.path)
        if codec is None:
            spare_bytes = max(0, (piece.length or 0) - sample_bytes)
            return read_range(file, piece.start + spare_bytes * (turn % 3) // 2, sample_bytes)
        with decompressed(file, codec) as stream:
            lines = stream.read(sample_bytes)
            while b"\n" not in lines and (more := stream.read(sample_bytes)):
                lines += more
    return 0, lines[: lines.rfind(b"\n") + 1] or lines
