"""What a job needs of a worker's memory, and where a part becomes too large for a column."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from gpuclassify.text_mapper import TextMapper

# cudf counts a column's rows, a list column's elements and, with 32-bit offsets, the bytes of a
# column of strings as int32.
COLUMN_LIMIT = 2**31 - 1
NEAR_LIMIT = 0.5  # of it: what is estimated from a sample may be larger


def list_columns(mapper: TextMapper) -> list[tuple[str, int]]:
    """Output columns of lists of numbers, and how many numbers a row of each has."""
    return [
        (field.name, head.list_size)
        for head in mapper.heads
        for field in head.fields()
        if pa.types.is_list(field.type) and pa.types.is_floating(field.type.value_type)
    ]


def limit_warnings(
    text_bytes: float,
    rows: float,
    lists: Iterable[tuple[str, int]],
    *,
    is_of_files: bool,
    limit: int = COLUMN_LIMIT,
) -> Iterator[str]:
    """Sentences about columns of the largest part that come near what a column of cudf can hold.

    Parameters
    ----------
    text_bytes, rows : float
        Of the largest part.
    lists : iterable of (str, int)
        See `list_columns`.
    is_of_files : bool
        Else parts are partitions of a Dask frame.
    limit : int
        Most elements of a column, or bytes of one of strings.
    """
    cure = (
        "make parts smaller with --part-size 256MB (part_bytes=); where one row group or one "
        "compressed file is larger than that, write the input in smaller ones"
    )
    if not is_of_files:
        cure = "repartition the frame, such as with ddf.repartition(partition_size='256MB')"
    sizes = [("its text", text_bytes, "bytes")]
    sizes += [(f"its column {name!r}", rows * count, "numbers") for name, count in lists]
    for what, size, unit in sizes:
        if size > NEAR_LIMIT * limit:
            yield (
                f"the largest part is too large or near to it: {what} has about {size:,.0f} "
                f"{unit}, and a column of cudf holds at most {limit:,}: {cure}"
            )
