"""Backend for cudf frames. It imports cudf, so `frames.backend_of` imports it on demand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cudf
import numpy as np
import pandas as pd
import pyarrow as pa
import pylibcudf

from gpuclassify.frames.hashing import unpack_digests

MOST_NUMBERS = 2**31 - 1  # maximum numbers in a list column: offsets have 32 bits


def check_text_column(frame: cudf.DataFrame, column: str) -> None:
    """Raise TypeError unless `column` holds strings, categories of strings, or only nulls.

    Without rows, such as in the meta frame of Dask, only the dtype counts.
    """
    dtype = frame[column].dtype
    kind = dtype.categories.dtype if isinstance(dtype, cudf.CategoricalDtype) else dtype
    if cudf.api.types.is_string_dtype(kind):
        return
    if not len(frame) or frame[column].null_count < len(frame):
        raise TypeError(
            f"column {column!r} holds {dtype}, not strings: "
            f'convert it with df[{column!r}].astype("str"), or name another column'
        )


def check_new_columns(schema: pa.Schema) -> None:
    """Raise TypeError if new columns (`schema`) have lists of float16, which libcudf lacks."""
    for field in schema:
        if pa.types.is_list(field.type) and pa.types.is_float16(field.type.value_type):
            raise TypeError(
                f"column {field.name!r} would hold float16, which cudf has no type for: ask for "
                "float32, or pass a pandas frame"
            )


def string_dtype(frame: cudf.DataFrame, column: str) -> Any:
    """Return the dtype for new strings: the `StringDtype` of `column`, else None (the default)."""
    dtype = frame[column].dtype
    return dtype if isinstance(dtype, pd.StringDtype) else None


def texts(frame: cudf.DataFrame, column: str, max_chars: int | None) -> list[str | None]:
    """Return the strings of `column`, cut to `max_chars` characters if set; None where null."""
    series = text_series(frame, column, max_chars)
    # Arrow's conversion first copies a column back that cudf has spilled to the host; libcudf's
    # ``Column.to_pylist`` would read freed memory. The conversion costs little more than the
    # copy: 0.23 microseconds were measured for a text of 100 characters.
    return [None] * len(frame) if series is None else series.to_arrow().to_pylist()


def text_series(frame: cudf.DataFrame, column: str, max_chars: int | None) -> cudf.Series | None:
    """Return the strings of `column` as a Series on the GPU, cut to `max_chars` characters.

    Returns None if the column has another dtype and no values, as a partition without strings may
    have. Raises TypeError for values of another dtype.
    """
    series = frame[column]
    if isinstance(series.dtype, cudf.CategoricalDtype):
        series = series.astype(series.dtype.categories.dtype)
    if not cudf.api.types.is_string_dtype(series.dtype):
        if len(series) and not series.isna().all():
            raise TypeError(
                f"column {column!r} holds {series.dtype} in this partition, not strings"
            )
        return None
    return series if max_chars is None else series.str.slice(0, max_chars)


def text_array(frame: cudf.DataFrame, column: str) -> pa.LargeStringArray:
    """Return the strings of `column`, copied to the host, as an Arrow array; null where null."""
    series = text_series(frame, column, None)
    if series is None:
        return pa.nulls(len(frame), pa.large_string())
    values = series.to_arrow().cast(pa.large_string())
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def text_digests(frame: cudf.DataFrame, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the MD5 of each text's UTF-8 bytes, and a mask of rows with a non-empty text.

    Computed on the GPU and copied to the host, in the format of the function for pandas frames.
    """
    series = text_series(frame, column, None)
    if series is None:
        return np.zeros((len(frame), 2), np.int64), np.zeros(len(frame), bool)
    series = series.fillna("")
    hexadecimal = "".join(series.hash_values(method="md5").to_arrow().to_pylist())
    return unpack_digests(bytes.fromhex(hexadecimal)), (series.str.len() > 0).to_numpy()


def text_minhashes(
    frame: cudf.DataFrame, column: str, a: np.ndarray, b: np.ndarray, *, seed: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compute MinHash signatures, which show near-duplicate texts, on the GPU.

    Each window of `width` characters of a text is hashed with `seed`; a shorter text is one window.
    Hash function i multiplies this hash by ``a[i]`` and adds ``b[i]``, modulo 2**32, and number i
    of the signature is the minimum over all windows. `a` and `b` are uint32 (hashes,). Returns the
    signatures, uint32 (rows, hashes), zeros for null and empty texts, and a mask of rows with a
    non-empty text, bool (rows,). From 2**31 numbers (``rows * hashes``), libcudf raises
    OverflowError.
    """
    series = text_series(frame, column, None)
    if series is None or not len(series):
        return np.zeros((len(frame), len(a)), np.uint32), np.zeros(len(frame), bool)
    series = series.fillna("")  # lists without nulls are contiguous
    lists = series.str.minhash(int(seed), a=cudf.Series(a), b=cudf.Series(b), width=width)
    return lists.list.leaves.to_numpy().reshape(-1, len(a)), (series.str.len() > 0).to_numpy()


def list_array(frame: cudf.DataFrame, column: str) -> pa.Array:
    """Return the values of `column`, usually lists, copied to the host, as an Arrow array."""
    values = frame[column].to_arrow()
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def with_columns(
    frame: cudf.DataFrame, columns: Mapping[str, pa.Array], schema: pa.Schema, string_dtype: Any
) -> cudf.DataFrame:
    """Return a shallow copy of `frame` with Arrow arrays, by name, as new or replaced columns.

    They are assigned by position. Strings get `string_dtype`; None is cudf's default.
    """
    result = frame.copy(deep=False)
    # cudf aligns an assigned Series by label, which loses NaN labels and refuses duplicates.
    result.index = cudf.RangeIndex(len(frame))
    for name, array in columns.items():
        if _has_fields(array.type):  # libcudf's columns have no field names
            result[name] = cudf.Series.from_arrow(array)
        else:
            # Converted by libcudf, because the Series constructor would turn NaN into null.
            series = cudf.Series.from_pylibcudf(_device_column(array), {"name": name})
            is_text = string_dtype is not None and isinstance(series.dtype, pd.StringDtype)
            result[name] = series.astype(string_dtype) if is_text else series
    result.index = frame.index
    return result


def take_rows(frame: cudf.DataFrame, keep: np.ndarray) -> cudf.DataFrame:
    """Return the rows of `frame` where the bool array `keep` is true."""
    return frame.take(np.flatnonzero(keep))


def without_views(frame: cudf.DataFrame) -> cudf.DataFrame:
    """Return `frame` itself, because cudf has no view types like Arrow's string_view."""
    return frame


def with_views(plain: cudf.DataFrame, frame: cudf.DataFrame) -> cudf.DataFrame:
    """Return `plain` itself, because cudf has no view types like Arrow's string_view."""
    return plain


def _has_fields(kind: pa.DataType) -> bool:
    return pa.types.is_struct(kind.value_type if pa.types.is_list(kind) else kind)


def _device_column(array: pa.Array | pa.ChunkedArray) -> pylibcudf.Column:
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if not pa.types.is_dictionary(array.type):
        return pylibcudf.Column.from_arrow(array)
    values = pylibcudf.Table([pylibcudf.Column.from_arrow(array.dictionary)])
    # Codes must not be null. A code beyond the values gives null; -1 would give the last value.
    codes = array.indices.cast(pa.int32()).fill_null(len(array.dictionary))
    return pylibcudf.copying.gather(
        values,
        pylibcudf.Column.from_arrow(codes),
        pylibcudf.copying.OutOfBoundsPolicy.NULLIFY,
    ).columns()[0]
