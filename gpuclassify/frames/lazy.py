"""Dask frames: made of plain frames or delayed partitions, and reduced as a tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import dask

from gpuclassify.frames import Frame, LazyFrame, backend_of

if TYPE_CHECKING:
    import dask.dataframe as dd
    from dask.delayed import Delayed


def as_dask(frame: Frame | LazyFrame) -> dd.DataFrame:
    """Return a Dask frame with its partitions as they are, a plain one as a single partition."""
    import dask.dataframe as dd

    if isinstance(frame, dd.DataFrame):
        backend_of(frame._meta)
        # Once and for all: with fewer columns Dask may cut it elsewhere, and a filter may take away
        # partitions, which are the user's.
        simple = frame.simplify()
        return simple if simple.npartitions == frame.npartitions else frame
    plain = backend_of(frame).without_views(frame)
    return from_parts([dask.delayed(plain)], plain.iloc[:0])


def from_parts(
    parts: list[Delayed], meta: Frame, divisions: Sequence[object] | None = None
) -> dd.DataFrame:
    """Build a lazy frame of delayed partitions, in the types that they have."""
    import dask.dataframe as dd

    with dask.config.set({"dataframe.convert-string": False}):  # would change columns of objects
        return dd.from_delayed(parts, meta=meta, divisions=divisions, verify_meta=False)


def reduce_tree(
    join: Callable[[list[Any]], Any], parts: Sequence[Delayed], fan_in: int = 8
) -> Delayed:
    """Return the delayed result of `join` on all parts, in lists of at most `fan_in` at a time."""
    call = dask.delayed(join, pure=True)
    while len(parts) > 1:
        parts = [call(list(parts[at : at + fan_in])) for at in range(0, len(parts), fan_in)]
    return parts[0]
