"""What a job needs of a worker's memory, and where a part becomes too large for a column."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from gpuclassify.text_mapper import TextMapper

if TYPE_CHECKING:
    import torch

# cudf counts a column's rows, a list column's elements and, with 32-bit offsets, the bytes of a
# column of strings as int32.
COLUMN_LIMIT = 2**31 - 1
NEAR_LIMIT = 0.5  # of it: what is estimated from a sample may be larger
# Of a token's width, alive together in a layer: input, residual, three projections, result.
STATES_A_LAYER = 6
# What configurations call the width of the states, and that of the feed-forward network.
WIDTHS = ("hidden_size", "dim", "n_embd")
INNER_WIDTHS = ("intermediate_size", "hidden_dim", "n_inner", "ffn_dim")


def batch_bytes(sizes: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> int | None:
    """About what the largest batch takes beside the weights; None for a network of other sizes.

    The tokens that a batch holds at most, with the states of one layer, and for attention that
    materialises its scores what `gpuclassify.inference` allows for them. A GPU with less free
    memory gets smaller batches.

    Parameters
    ----------
    sizes : mapping
        The configuration of the network.
    device : torch.device
    dtype : torch.dtype
    """
    from gpuclassify.inference.batch_memory import GPU_MAX_TOKENS, GPU_SCORE_BYTES
    from gpuclassify.inference.memory import CPU_MAX_TOKENS, CPU_SCORE_BYTES

    width = _first(sizes, WIDTHS)
    if width is None:
        return None
    numbers = STATES_A_LAYER * width + 2 * (_first(sizes, INNER_WIDTHS) or 4 * width)
    is_gpu = device.type == "cuda"
    tokens = GPU_MAX_TOKENS if is_gpu else CPU_MAX_TOKENS
    scores = GPU_SCORE_BYTES if is_gpu else CPU_SCORE_BYTES
    has_scores = bool(sizes.get("relative_attention"))
    return tokens * numbers * dtype.itemsize + (scores if has_scores else 0)


def list_columns(mapper: TextMapper) -> list[tuple[str, int]]:
    """Output columns of lists of numbers, and how many numbers a row of each has."""
    checkpoint = mapper.model.checkpoint
    count = checkpoint.output_count
    if checkpoint.sentence is not None:
        count = _first(checkpoint.sizes, WIDTHS) or 0
    return [
        (field.name, count)
        for field in mapper.schema()
        if count and pa.types.is_list(field.type) and pa.types.is_floating(field.type.value_type)
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


def _first(sizes: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((int(sizes[name]) for name in names if sizes.get(name) is not None), None)
