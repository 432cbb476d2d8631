"""Functions for pandas frames, which `gpuclassify.frames.backend_of` selects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pandas.api.types import is_object_dtype

from gpuclassify.frames import cast_views, is_text, name_row, plain_type
from gpuclassify.frames.hashing import md5_digests

MOST_NUMBERS = None  # no maximum for a list column: Arrow splits it into chunks
# UTF-8 cannot encode lone surrogates, which occur in object columns only.
_SURROGATE = re.compile("[\ud800-\udfff]")


def check_text_column(frame: pd.DataFrame, column: str) -> None:
    """Raise TypeError unless the dtype of `column` can hold strings, or all its values are null.

    Without rows, such as in the meta frame of Dask, only the dtype counts.
    """
    dtype = frame[column].dtype
    if not (_holds_text(dtype) or (len(frame) and frame[column].isna().all())):
        raise TypeError(
            f"column {column!r} holds {dtype}, not strings: "
            f'convert it with df[{column!r}].astype("str"), or name another column'
        )


def check_new_columns(schema: pa.Schema) -> None:
    """Accept all new columns (`schema`) of a mapper, because pandas has a type for each."""


def string_dtype(frame: pd.DataFrame, column: str) -> Any:
    """Return the dtype for new strings: the string dtype of `column`, else pandas' ``str``."""
    dtype = frame[column].dtype
    return dtype if _is_arrow_text(dtype) else pd.Series([], dtype="str").dtype


def texts(frame: pd.DataFrame, column: str, max_chars: int | None) -> list[str | None]:
    """Return the strings of `column`, cut to `max_chars` characters if set; None where null.

    Lone surrogates become U+FFFD. Raises TypeError if a value is neither a string nor null.
    """
    series = frame[column]
    if not _is_arrow_text(series.dtype):
        return _object_texts(series, max_chars)
    values = pa.array(series.array, from_pandas=True)
    if pa.types.is_string_view(values.type):
        values = values.cast(pa.large_string())  # Arrow cannot slice views
    if max_chars is not None:
        values = pc.utf8_slice_codeunits(values, 0, max_chars)
    return values.to_pylist()


def text_array(frame: pd.DataFrame, column: str) -> pa.LargeStringArray:
    """Return the strings of `column` as an Arrow array; null where null.

    Lone surrogates become U+FFFD. Raises TypeError if a value is neither a string nor null.
    """
    series = frame[column]
    if not _is_arrow_text(series.dtype):
        return pa.array(_object_texts(series, None), pa.large_string())
    values = pa.array(series.array, from_pandas=True).cast(pa.large_string())
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def text_digests(frame: pd.DataFrame, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the MD5 of each text's UTF-8 bytes, and a mask of rows with a non-empty text.

    The 16 bytes are two big-endian numbers, int64 (rows, 2), without meaning for null. The mask is
    bool (rows,). Lone surrogates are encoded, too, so that only equal texts have equal digests.
    """
    if _is_arrow_text(frame[column].dtype):
        encoded = text_array(frame, column).cast(pa.large_binary())
    else:
        strings = _object_strings(frame[column])
        encoded = pa.array(
            [text if text is None else text.encode("utf-8", "surrogatepass") for text in strings],
            pa.large_binary(),
        )
    has_text = pc.fill_null(pc.greater(pc.binary_length(encoded), 0), False)
    digests = md5_digests(value or b"" for value in encoded.to_pylist())
    return digests, has_text.to_numpy(zero_copy_only=False)


def list_array(frame: pd.DataFrame, column: str) -> pa.Array:
    """Return the values of `column`, usually lists, as an Arrow array; null where null."""
    series = frame[column]
    try:
        try:
            values = pa.array(series.array, from_pandas=True)
        except OverflowError:  # integers of more than 64 bits
            values = pa.array(series.array, pa.decimal128(38, 0), from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as err:
        raise TypeError(
            f"column {column!r} holds values of different kinds ({err}): convert all to one"
        ) from err
    if not isinstance(values, pa.ChunkedArray):
        return values
    try:
        return values.combine_chunks()
    except pa.ArrowInvalid:  # more numbers than 32-bit offsets can address
        return values.cast(pa.large_list(values.type.value_field)).combine_chunks()


def with_columns(
    frame: pd.DataFrame, columns: Mapping[str, pa.Array], schema: pa.Schema, string_dtype: object
) -> pd.DataFrame:
    """Return a shallow copy of `frame` with Arrow arrays, by name, as new or replaced columns.

    They are assigned by position. `schema` has their Arrow types; strings get `string_dtype`.
    """
    result = frame.copy(deep=False)
    for name, array in columns.items():
        result[name] = _pandas_array(array, schema.field(name), string_dtype)
    return result


def take_rows(frame: pd.DataFrame, keep: np.ndarray) -> pd.DataFrame:
    """Return the rows of `frame` where the bool array `keep` is true."""
    return with_views(without_views(frame)[keep], frame)


def without_views(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with plain types in place of Arrow's views, which pandas mostly refuses."""
    return _converted(frame, {name: plain_type(kind) for name, kind in _views(frame).items()})


def with_views(plain: pd.DataFrame, frame: pd.DataFrame) -> pd.DataFrame:
    """Undo `without_views`: cast columns of `plain` to the view types that they have in `frame`."""
    views = _views(frame)
    return _converted(plain, {name: views[name] for name in plain.columns if name in views})


def _views(frame: pd.DataFrame) -> dict[Any, pa.DataType]:
    dtypes = frame.dtypes.items()
    kinds = {name: d.pyarrow_dtype for name, d in dtypes if isinstance(d, pd.ArrowDtype)}
    return {name: kind for name, kind in kinds.items() if "_view" in str(kind)}


def _converted(frame: pd.DataFrame, kinds: Mapping[Any, pa.DataType]) -> pd.DataFrame:
    columns = {name: _as_arrow(frame[name], kind) for name, kind in kinds.items()}
    return frame.assign(**columns) if columns else frame


def _as_arrow(series: pd.Series, kind: pa.DataType) -> Any:
    return pd.arrays.ArrowExtensionArray(cast_views(pa.array(series.array, from_pandas=True), kind))


def _holds_text(dtype: Any) -> bool:
    if isinstance(dtype, pd.CategoricalDtype):
        dtype = dtype.categories.dtype
    if isinstance(dtype, pd.ArrowDtype):
        kind = plain_type(dtype.pyarrow_dtype)
        return is_text(kind) or pa.types.is_null(kind)
    return _is_arrow_text(dtype) or is_object_dtype(dtype)


def _is_arrow_text(dtype: Any) -> bool:
    is_arrow = isinstance(dtype, pd.ArrowDtype)
    return is_text(dtype.pyarrow_dtype) if is_arrow else isinstance(dtype, pd.StringDtype)


def _object_texts(series: pd.Series, max_chars: int | None) -> list[str | None]:
    cut = (text if text is None else text[:max_chars] for text in _object_strings(series))
    return [
        text if text is None or text.isascii() else _SURROGATE.sub("\ufffd", text) for text in cut
    ]


def _object_strings(series: pd.Series) -> list[str | None]:
    is_null = series.isna().to_numpy()
    strings = [None if null else x for x, null in zip(series.array, is_null, strict=True)]
    for row, value in enumerate(strings):
        if not (value is None or isinstance(value, str)):
            raise TypeError(
                f"{name_row(series, row)} of column {series.name!r} holds a "
                f"{type(value).__name__}, not a string: convert the column, or make the value null"
            )
    return strings


def _pandas_array(array: pa.Array, field: pa.Field, string_dtype: object) -> Any:
    if pa.types.is_floating(field.type):
        return array.to_numpy(zero_copy_only=False)  # null becomes NaN
    if pa.types.is_integer(field.type):
        return _from_arrow(pd.Int64Dtype(), array)
    if pa.types.is_boolean(field.type):
        if field.nullable:
            return _from_arrow(pd.BooleanDtype(), array)
        return array.to_numpy(zero_copy_only=False)
    if pa.types.is_string(field.type):
        if isinstance(array, pa.DictionaryArray):
            array = array.dictionary_decode()
        if isinstance(string_dtype, pd.ArrowDtype):
            array = array.cast(string_dtype.pyarrow_dtype)
        return _from_arrow(string_dtype, array)
    return pd.arrays.ArrowExtensionArray(array)


def _from_arrow(dtype: Any, array: pa.Array) -> Any:
    return dtype.__from_arrow__(array)
