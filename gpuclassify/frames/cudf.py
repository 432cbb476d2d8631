"""The cudf backend. Importing this module imports cudf: `frames.backend_of` does so on demand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cudf
import numpy as np
import pyarrow as pa
import pylibcudf


def check_text_column(frame: cudf.DataFrame, column: str) -> None:
    """Raise TypeError unless `column` holds strings."""
    dtype = frame[column].dtype
    if not cudf.api.types.is_string_dtype(dtype):
        raise TypeError(
            f"column {column!r} holds {dtype}, not strings: "
            f'convert it with df[{column!r}].astype("str"), or name another column as text_field='
        )


def check_new_columns(schema: pa.Schema) -> None:
    """Raise TypeError if a new column is of a type that libcudf lacks."""
    for field in schema:
        if pa.types.is_list(field.type) and pa.types.is_float16(field.type.value_type):
            raise TypeError(
                f"column {field.name!r} would hold float16, which cudf has no type for: ask for "
                "float32, or pass a pandas frame"
            )


def string_dtype(frame: cudf.DataFrame, column: str) -> None:
    """None: cudf has one string type, and libcudf columns carry it."""
    return


def texts(frame: cudf.DataFrame, column: str, max_chars: int | None) -> list[str | None]:
    """The strings of `column`, cut to `max_chars` characters on the GPU; None where null.

    Goes through Arrow, which reads safely also when cudf may spill the column.
    """
    series = frame[column]
    if not len(series):
        return []
    if not cudf.api.types.is_string_dtype(series.dtype):
        return _all_null(series, column)
    if max_chars is not None:
        series = series.str.slice(0, max_chars)
    return series.to_arrow().to_pylist()


def with_columns(
    frame: cudf.DataFrame, columns: Mapping[str, pa.Array], schema: pa.Schema, string_dtype: None
) -> cudf.DataFrame:
    """`frame` with the Arrow arrays `columns` as new (or replaced) columns.

    Every column is built with the frame's own index object, so that nothing is aligned. Columns go
    through libcudf, because the Series constructor would turn NaN into null.
    """
    result = frame.copy(deep=False)
    for name, array in columns.items():
        column = pylibcudf.Column.from_arrow(_one_chunk(array))
        result[name] = cudf.Series.from_pylibcudf(column, {"name": name, "index": frame.index})
    return result


def take_rows(frame: cudf.DataFrame, keep: np.ndarray) -> cudf.DataFrame:
    """The rows of `frame` where the bool array `keep` is true."""
    return frame.take(np.flatnonzero(keep))


def _all_null(series: Any, column: str) -> list[str | None]:
    """A partition without any string may have been read as another type."""
    if series.isnull().all():
        return [None] * len(series)
    raise TypeError(f"column {column!r} holds {series.dtype} in this partition, not strings")


def _one_chunk(array: pa.Array | pa.ChunkedArray) -> pa.Array:
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
