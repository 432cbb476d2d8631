"""Columns as Arrow arrays: what mappers make and both dataframe backends take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

SCORES = pa.list_(pa.float32())
# What a column may be declared as.
COLUMN_TYPES = {
    "str": pa.string(),
    "float32": pa.float32(),
    "int64": pa.int64(),
    "bool": pa.bool_(),
    "list<float32>": SCORES,
}


def arrow_array(values: Any, field: pa.Field) -> pa.Array:
    """Values of one column, an array or list, as Arrow values of the field's type."""
    if isinstance(values, pa.Array):
        return values.cast(field.type)
    if pa.types.is_list(field.type):
        return list_array(np.asarray(values, dtype=np.float32))
    return pa.array(values).cast(field.type)


def list_array(values: np.ndarray) -> pa.Array:
    """An Arrow list<float32> array from float32 (texts, classes)."""
    offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(offsets, pa.array(values.ravel(), pa.float32()))
