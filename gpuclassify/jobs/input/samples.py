"""Samples of JSON lines from all over the files, and the columns that they have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from gpuclassify.hub.dataset_files import LINE_BYTES
from gpuclassify.jobs.files import BrokenContentError, compression, reading
from gpuclassify.jobs.input.jsonl import exact_integers, line_schemas, parse_good, read_range
from gpuclassify.jobs.input.parts import Part
from gpuclassify.jobs.input.schema import common_schema, json_schema
from gpuclassify.jobs.quarantine import FILE, LINE, Problem

# Few enough for stores that answer slowly, and a multiple of three: the last is from a file's end.
SAMPLES, SAMPLE_BYTES = 30, 512 << 10


@dataclass(frozen=True)
class SampledLines:
    """Whole lines of a piece of a file, and where in the (decompressed) file they begin."""

    piece: Part
    offset: int
    lines: bytes


def piece_bytes(total_bytes: int) -> int:
    """Into pieces of which size to cut files of this total size for `read_samples`."""
    return max(SAMPLE_BYTES, -(-total_bytes // SAMPLES))


def read_samples(
    pieces: Sequence[Part], storage_options: dict[str, Any]
) -> Iterator[SampledLines | tuple[Part, Problem]]:
    """Up to `SAMPLES` samples that hold something, or why a piece cannot be read.

    The pieces are all files, cut as `piece_bytes` says.
    """
    last, steps = len(pieces) - 1, max(1, SAMPLES - 1)
    spread = [round(step * last / steps) for step in range(SAMPLES)] if pieces else []
    count = 0
    for number in dict.fromkeys([*spread, *range(len(pieces))]):  # all others in case of blanks
        piece = pieces[number]
        try:
            offset, lines = _read(piece, count, storage_options)
        except BrokenContentError as err:
            yield piece, Problem(FILE, str(piece), str(err))
            continue
        if lines.strip():
            yield SampledLines(piece, offset, lines)
            count += 1
        if count == SAMPLES:
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


def _read(piece: Part, turn: int, storage_options: dict[str, Any]) -> tuple[int, bytes]:
    """Lines of a piece's beginning, middle or end in turn; of what is compressed, the beginning."""
    with reading(piece.path, storage_options, piece.file_bytes, LINE_BYTES) as file:
        codec = compression(piece.path)
        if codec is None:
            spare_bytes = max(0, (piece.length or 0) - SAMPLE_BYTES)
            return read_range(file, piece.start + spare_bytes * (turn % 3) // 2, SAMPLE_BYTES)
        with pa.input_stream(file, compression=codec) as stream:
            lines = stream.read(SAMPLE_BYTES)
            while b"\n" not in lines and (more := stream.read(SAMPLE_BYTES)):
                lines += more
    return 0, lines[: lines.rfind(b"\n") + 1] or lines
