"""Make Dask frames from plain frames or delayed partitions, and reduce partitions in a tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import dask

from gpuclassify.frames import Frame, LazyFrame, backend_of

if TYPE_CHECKING:
    import dask.dataframe as dd
    from dask.delayed import Delayed


def as_dask(frame: Frame | LazyFrame) -> dd.DataFrame:
    """Return a pandas, cudf or Dask frame as a Dask frame; raise TypeError for any other object.

    A pandas or cudf frame becomes the only partition, with plain types in place of Arrow's views.
    """
    import dask.dataframe as dd

    if isinstance(frame, dd.DataFrame):
        backend_of(frame._meta)
        # Simplified now, because selecting columns or filtering later could change the user's
        # partitions.
        simple = frame.simplify()
        return simple if simple.npartitions == frame.npartitions else frame
    plain = backend_of(frame).without_views(frame)
    return from_parts([dask.delayed(plain)], plain.iloc[:0])


def from_parts(
    parts: list[Delayed], meta: Frame, divisions: Sequence[object] | None = None
) -> dd.DataFrame:
    """Return a Dask frame of delayed partitions, like ``dd.from_delayed``; no dtype is changed."""
    import dask.dataframe as dd

    with dask.config.set({"dataframe.convert-string": False}):  # conversion changes object columns
        return dd.from_delayed(parts, meta=meta, divisions=divisions, verify_meta=False)


def reduce_tree(
    join: Callable[[list[Any]], Any], parts: Sequence[Delayed], fan_in: int = 8
) -> Delayed:
    """Combine delayed objects, at least one, in a tree of tasks, and return the delayed result.

    ``join(objects)`` combines a list of up to `fan_in` neighbouring objects, in the order of
    `parts`, into one object of the same kind.
    """
    call = dask.delayed(join, pure=True)
    while len(parts) > 1:
        starts = range(0, len(parts), fan_in)
        parts = [call(list(parts[start : start + fan_in])) for start in starts]
    return parts[0]
