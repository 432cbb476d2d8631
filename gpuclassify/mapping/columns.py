"""Columns as Arrow arrays: what mappers make and both dataframe backends take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.settings.checks import nearest
from gpuclassify.settings.options import TextOptions

FLOAT32 = pa.float32()
SCORES = pa.list_(FLOAT32)
LABELS = pa.list_(pa.string())
# What a column may be declared as.
COLUMN_TYPES = {
    "str": pa.string(),
    "float32": FLOAT32,
    "int64": pa.int64(),
    "bool": pa.bool_(),
    "list<float32>": SCORES,
    "list<float16>": pa.list_(pa.float16()),  # pandas only
}
_SHARE_TYPES = {"windows": pa.int64(), "seen": pa.float32(), "truncated": pa.bool_()}


def check_column_types(owner: str, columns: Mapping[str, str]) -> None:
    """Raise TypeError unless every declared column is of a kind in COLUMN_TYPES."""
    for name, kind in columns.items():
        if kind not in COLUMN_TYPES:
            raise TypeError(
                f"{owner} declares {name!r} as {kind!r}, which is no kind of column: kinds are "
                f"{', '.join(COLUMN_TYPES)}.{nearest(str(kind), COLUMN_TYPES)}"
            )


def check_is_there(name: str, columns: Sequence[str], setting: str) -> None:
    """Raise ValueError unless one text column of a dataset has the name that a setting gives."""
    count = columns.count(name)
    if count == 0:
        raise ValueError(
            f"no text column {name!r}; columns are {columns}.{nearest(name, map(str, columns))} "
            f"Pass {setting}= to name yours."
        )
    if count > 1:
        raise ValueError(f"{count} columns are called {name!r}: rename all but one")


def check_are_new(
    names: Sequence[str], columns: Sequence[str], texts: Sequence[str], overwrite: bool
) -> None:
    """Raise ValueError unless the output columns `names` may stand beside a dataset's `columns`.

    They differ, and none is one of `texts`, which stay, or of the others unless `overwrite`.
    """
    for name in texts:
        if name in names:
            raise ValueError(
                f"output column {name!r} is a text column, which stays as it is: choose another "
                "output name"
            )
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"output columns need different names; given twice: {repeated}")
    taken = [name for name in names if name in columns]
    if taken and not overwrite:
        raise ValueError(
            f"the dataset already has {taken}: choose other output names, or pass overwrite=True "
            "to replace them"
        )


def arrow_array(values: Any, field: pa.Field, count: int, giver: str) -> pa.Array:
    """Values of one column as an Arrow array of the field's type; `giver` is named in messages.

    A text column may be a DictionaryArray, and stays one: both backends look its texts up, cudf on
    the GPU.

    Raises
    ------
    ValueError
        Another number of values than `count`, or of a kind that would be changed to fit.
    """
    if len(values) != count:
        raise ValueError(
            f"{giver} gave {len(values)} values for {field.name!r}, and there are {count} texts: "
            "it must give one a text"
        )
    try:
        if isinstance(values, (pa.Array, pa.ChunkedArray)):
            array = values
        elif pa.types.is_list(field.type) and not pa.types.is_string(field.type.value_type):
            kind = field.type.value_type
            array = list_array(np.asarray(values, dtype=kind.to_pandas_dtype()), kind)
        else:
            array = pa.array(values, type=field.type if isinstance(values, list) else None)
        is_coded = pa.types.is_dictionary(array.type)
        if not _keeps_kind(array.type.value_type if is_coded else array.type, field.type):
            raise TypeError(f"they are {array.type}")
        if is_coded and pa.types.is_string(field.type):
            return array.cast(pa.dictionary(array.type.index_type, field.type))
        return array.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError) as err:
        shape = getattr(values, "shape", (len(values),))
        raise ValueError(
            f"{giver} gave values of shape {tuple(shape)} for {field.name!r} that are no "
            f"{field.type}: {err}"
        ) from err


def _keeps_kind(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a cast keeps what values are: no number becomes a text or a decision."""
    if pa.types.is_boolean(wanted):
        return pa.types.is_boolean(found) or pa.types.is_null(found)
    if pa.types.is_string(wanted):
        return _is_text(found) or pa.types.is_null(found)
    return not (pa.types.is_boolean(found) or pa.types.is_string(found))


def _is_text(kind: pa.DataType) -> bool:
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(is_kind(kind) for is_kind in kinds)


def label_array(ids: np.ndarray, labels: Sequence[str]) -> pa.DictionaryArray:
    """The labels with these ids, (texts,): numbers, and each label's text once."""
    codes = pa.array(ids.astype(np.int32))
    return pa.DictionaryArray.from_arrays(codes, pa.array(labels, pa.string()))


def labels_array(is_given: np.ndarray, labels: Sequence[str]) -> pa.ListArray:
    """The labels that each text is given, bool (texts, labels), in id order."""
    offsets = np.concatenate([[0], is_given.sum(axis=1).cumsum()]).astype(np.int32)
    given = pa.array(labels, pa.string()).take(pa.array(np.nonzero(is_given)[1]))
    return pa.ListArray.from_arrays(offsets, given)


def scores_array(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Numbers of all labels, float32 (texts, labels), as lists, or as structs with their names."""
    if not pa.types.is_struct(kind):
        return list_array(values)
    columns = [pa.array(np.ascontiguousarray(column)) for column in values.T]
    return pa.StructArray.from_arrays(columns, fields=list(kind))


def list_array(values: np.ndarray, kind: pa.DataType = FLOAT32) -> pa.Array:
    """An Arrow array of lists of `kind` from numbers of that precision, (texts, numbers)."""
    if values.size > np.iinfo(np.int32).max:
        raise OverflowError(
            f"{len(values)} texts with {values.shape[1]} numbers each are more than a list column "
            "of one partition can hold: use more partitions"
        )
    offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(offsets, pa.array(values.ravel(), kind))


@dataclass(frozen=True)
class ReadShare:
    """What was read of some distinct texts, as far as `max_chars` left them."""

    windows: np.ndarray  # of each text, int64 (texts,)
    # Share of each one's tokens, float32 (texts,): below 1 if it was cut; how far, only with
    # `seen_field`, because the tokens behind a cut are not counted for anything else.
    seen_share: np.ndarray


def read_share_fields(options: TextOptions) -> list[pa.Field]:
    """The columns that are asked for."""
    names = options.read_share_names
    return [pa.field(name, _SHARE_TYPES[what]) for what, name in names.items() if name is not None]


def read_share_columns(
    options: TextOptions, texts: list[str | None], positions: np.ndarray, read: ReadShare
) -> dict[str, pa.Array]:
    """The columns that are asked for, null where the text is.

    `texts` are the rows' whole texts, before `max_chars` cut them, and `positions` where each
    row's text is among those of `read`, int64 (rows,); -1 for null.
    """
    rows = pa.array(positions, mask=positions < 0)
    left = pa.array(_left_share(texts, options.max_chars))
    seen = pc.multiply(pa.array(read.seen_share).take(rows), left)
    windows = pa.array(read.windows).take(rows)
    found = {"windows": windows, "seen": seen, "truncated": pc.less(seen, 1)}
    names = options.read_share_names
    return {name: found[what] for what, name in names.items() if name is not None}


def _left_share(texts: list[str | None], max_chars: int | None) -> np.ndarray:
    """Share of each text's characters that `max_chars` leaves, float32 (rows,)."""
    if max_chars is None:
        return np.ones(len(texts), dtype=np.float32)
    lengths = np.fromiter((len(text or "") for text in texts), dtype=np.int64, count=len(texts))
    lengths = np.maximum(lengths, 1)
    return (np.minimum(lengths, max_chars) / lengths).astype(np.float32)
