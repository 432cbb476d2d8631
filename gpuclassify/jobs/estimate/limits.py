"""Where a part becomes too large for a column of cudf."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from gpuclassify.jobs.estimate.effort import read_network
from gpuclassify.jobs.sources import FileSource, FrameSource
from gpuclassify.text_mapper import TextMapper

# cudf counts a column's rows, a list column's elements and, with 32-bit offsets, the bytes of a
# column of strings as int32.
COLUMN_LIMIT = 2**31 - 1
NEAR_LIMIT = 0.5  # of it: what is reckoned from a sample may be larger


def list_columns(mapper: TextMapper) -> list[tuple[str, int]]:
    """Output columns of lists of numbers, and how many numbers a row of each has."""
    columns = [field.name for field in mapper.schema() if _is_numbers(field.type)]
    count = mapper.model.checkpoint.output_count
    if mapper.model.checkpoint.sentence is not None:
        network = read_network(mapper.model.checkpoint)
        count = 0 if network is None else network.width
    return [(name, count) for name in columns if count]


def _is_numbers(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) and pa.types.is_floating(kind.value_type)


def limit_warnings(
    source: FileSource | FrameSource,
    text_bytes: float,
    rows: float,
    lists: Iterable[tuple[str, int]],
) -> Iterator[str]:
    """Sentences about columns of the largest part that come near what a column of cudf can hold.

    Parameters
    ----------
    source : FileSource or FrameSource
    text_bytes : float
        Of the largest part.
    rows : float
        Of the largest part.
    lists : iterable of (str, int)
        Columns of lists, and how many numbers a row of each has.
    """
    cure = "repartition the frame, such as with ddf.repartition(partition_size='256MB')"
    if isinstance(source, FileSource):
        cure = (
            "make parts smaller with --part-size 256MB (part_bytes=); where one row group or one "
            "compressed file is larger than that, write the input in smaller ones"
        )
    sizes = [("its text", text_bytes, "bytes")]
    sizes += [(f"its column {name!r}", rows * count, "numbers") for name, count in lists]
    for what, size, unit in sizes:
        if size > NEAR_LIMIT * COLUMN_LIMIT:
            yield (
                f"the largest part is too large or near to it: {what} has about {size:,.0f} "
                f"{unit}, and a column of cudf holds at most {COLUMN_LIMIT:,} (2^31 - 1): {cure}"
            )
