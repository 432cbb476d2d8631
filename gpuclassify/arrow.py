"""Columns as Arrow arrays: what mappers make and both dataframe backends take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from gpuclassify.checks import nearest

FLOAT32 = pa.float32()
SCORES = pa.list_(FLOAT32)
# What a column may be declared as.
COLUMN_TYPES = {
    "str": pa.string(),
    "float32": FLOAT32,
    "int64": pa.int64(),
    "bool": pa.bool_(),
    "list<float32>": SCORES,
    "list<float16>": pa.list_(pa.float16()),  # pandas only
}


def check_column_types(owner: str, columns: Mapping[str, str]) -> None:
    """Raise TypeError unless every declared column is of a kind in COLUMN_TYPES."""
    for name, kind in columns.items():
        if kind not in COLUMN_TYPES:
            raise TypeError(
                f"{owner} declares {name!r} as {kind!r}, which is no kind of column: kinds are "
                f"{', '.join(COLUMN_TYPES)}.{nearest(str(kind), COLUMN_TYPES)}"
            )


def arrow_array(values: Any, field: pa.Field) -> pa.Array:
    """Values of one column, an array or list, as Arrow values of the field's type."""
    if isinstance(values, pa.Array):
        return values.cast(field.type)
    if pa.types.is_list(field.type):
        kind = field.type.value_type
        return list_array(np.asarray(values, dtype=kind.to_pandas_dtype()), kind)
    return pa.array(values).cast(field.type)


def list_array(values: np.ndarray, kind: pa.DataType = FLOAT32) -> pa.Array:
    """An Arrow array of lists of `kind` from numbers of that precision, (texts, numbers).

    Raises
    ------
    OverflowError
        More numbers than 32-bit offsets can count.
    """
    if values.size > np.iinfo(np.int32).max:
        raise OverflowError(
            f"{len(values)} texts with {values.shape[1]} numbers each are more than a list column "
            "of one partition can hold: use more partitions"
        )
    offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(offsets, pa.array(values.ravel(), kind))
