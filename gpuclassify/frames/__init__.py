"""Dataframe libraries (pandas and cudf) behind a few functions; read `pandas.py` first.

Each backend module has the same functions: `check_text_column`, `check_new_columns`,
`string_dtype`, `texts`, `text_array`, `text_digests`, `list_array`, `with_columns`, `take_rows`,
`without_views` and `with_views`; cudf's also has `text_minhashes`. Mappers pass new columns to a
backend as Arrow arrays; the Arrow field determines the column's dtype on each backend:

====================  ==============================  ==============================
Arrow field           pandas                          cudf
====================  ==============================  ==============================
string                the text column's string dtype  str
float32               float32, null as NaN            float32 with a null mask
float64               float64, null as NaN            float64 with a null mask
list<float32>         ArrowDtype(list<float32>)       ListDtype(float32)
list<string>          ArrowDtype(list<string>)        ListDtype(str)
list<float16>         ArrowDtype(list<halffloat>)     refused
struct of float32     ArrowDtype(struct)              StructDtype of float32
list of struct        ArrowDtype(list of struct)      ListDtype(StructDtype)
int64                 Int64                           int64 with a null mask
bool                  boolean                         bool with a null mask
bool, not nullable    bool                            bool
====================  ==============================  ==============================

The array may also be a DictionaryArray with values of the field's type; both backends decode it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from gpuclassify.settings.checks import BACKENDS, install

Change = Callable[[pa.DataType], pa.DataType]  # returns another Arrow type for a type


class Frame(Protocol):
    """Interface that DataFrames of pandas and cudf share, as opposed to Dask's (`LazyFrame`)."""

    @property
    def columns(self) -> Any:
        """Index of the columns' names."""

    @property
    def dtypes(self) -> Any:
        """Series of the columns' dtypes, indexed by column name."""

    @property
    def index(self) -> Any:
        """Index with the rows' labels."""

    @property
    def iloc(self) -> Any:
        """Indexer that selects rows by position."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: object) -> Any: ...


class LazyFrame(Protocol):
    """Interface of a Dask DataFrame, with partitions of pandas or cudf."""

    _meta: Frame

    @property
    def columns(self) -> Any:
        """Index of the columns' names."""

    @property
    def npartitions(self) -> int:
        """Number of partitions."""

    @property
    def divisions(self) -> tuple[Any, ...]:
        """Index labels at the partitions' bounds; each is None if they are unknown."""

    def __getitem__(self, key: object) -> Any: ...

    def map_partitions(self, func: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        """Apply `func` to each partition lazily, as Dask's method of this name does."""


def cut_text(text: Any, max_chars: int | None) -> Any:
    """Truncate a text, or each of a tuple of texts, to `max_chars` characters (None: no cut)."""
    return text[:max_chars] if isinstance(text, str) else tuple(part[:max_chars] for part in text)


def char_count(text: Any) -> int:
    """Return the number of characters of a text (not None), or the sum for a pair of texts."""
    return len(text) if isinstance(text, str) else sum(map(len, text))


class Texts(list[Any]):
    """List of texts, such as a column's: strings, or pairs of strings as tuples; None for null."""

    def fold(self, max_chars: int | None) -> tuple[Texts, np.ndarray]:
        """Return the distinct texts in order of appearance, and each row's int64 index in them.

        Texts are cut to `max_chars` characters first, unless it is None. The index of null is -1.
        """
        cut = self if max_chars is None else [text and cut_text(text, max_chars) for text in self]
        distinct = dict.fromkeys(cut)
        distinct.pop(None, None)
        index_of = {text: index for index, text in enumerate(distinct)} | {None: -1}
        indices = np.fromiter(map(index_of.__getitem__, cut), dtype=np.int64, count=len(self))
        return Texts(distinct), indices

    def take(self, indices: np.ndarray) -> Texts:
        """Return the texts at `indices` (int64, not negative), in the order of the indices."""
        return Texts(self[index] for index in indices)

    @property
    def char_counts(self) -> np.ndarray:
        """Number of characters of each text, or of both of a pair, int64 (texts,); 0 for null."""
        return np.fromiter((char_count(text or "") for text in self), np.int64, count=len(self))


def backend_of(frame: object) -> ModuleType:
    """Return the module for a DataFrame, `frames.pandas` or `frames.cudf`; else raise TypeError."""
    for kind in type(frame).__mro__:
        library = kind.__module__.partition(".")[0]
        if kind.__name__ == "DataFrame" and library in BACKENDS:
            return importlib.import_module(f"gpuclassify.frames.{library}")
    name = f"{type(frame).__module__}.{type(frame).__qualname__}".removeprefix("builtins.")
    raise TypeError(
        f"got a {name}: pass a DataFrame of Dask (on pandas or cudf), pandas or cudf, or a text or "
        "list of texts"
        + (". A column alone becomes one with .to_frame()" if hasattr(frame, "to_frame") else "")
    )


def frame_of_texts(texts: str | Iterable[str | None], columns: Iterable[str]) -> Any:
    """Return a pandas frame with the text, or a row per text, in each of the `columns`."""
    import pandas as pd

    values = [texts] if isinstance(texts, str) else list(texts)
    for index, value in enumerate(values):
        if not (value is None or isinstance(value, str)):
            raise TypeError(
                f"text {index} of the list is a {type(value).__name__}: pass texts (str, or None "
                "for null), or a DataFrame"
            )
    return pd.DataFrame(dict.fromkeys(columns, pd.Series(values, dtype=object)))


def import_cudf() -> Any:
    """Import and return cudf; without it, raise an error that says how to install it."""
    try:
        return importlib.import_module("cudf")
    except ModuleNotFoundError as err:
        if err.name != "cudf":
            raise
        raise ModuleNotFoundError(
            "without a GPU use backend='pandas'. Frames of cudf need GPU and cudf on every worker: "
            f"{install('gpu')}, of gpu-cu12 for a driver of CUDA 12"
        ) from err


def is_text(kind: pa.DataType) -> bool:
    """Tell whether an Arrow type is a string type (string, large_string or string_view)."""
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(is_kind(kind) for is_kind in kinds)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return an Arrow type with plain types in place of dictionaries, views and extensions.

    They are replaced at any depth: string_view by string, a dictionary by its value type, and an
    extension by its storage type.
    """
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return pa.string() if is_text(kind) else pa.binary()
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, plain_type(field.type)) for field in kind.fields])
    return map_nested(kind, plain_type)


def cast_views(values: Any, kind: pa.DataType) -> Any:
    """Return an Arrow array cast to a type that differs only in views and dictionaries.

    Casts that Arrow 26 lacks or gets wrong, such as from list views, go through Python values, and
    their result is a ChunkedArray.
    """
    if "list_view" not in str(values.type):
        with contextlib.suppress(pa.ArrowNotImplementedError):
            return values.cast(kind)
    return pa.chunked_array([pa.array(values.to_pylist(), kind)])


def map_nested(kind: pa.DataType, change: Change) -> pa.DataType:
    """Return a nested Arrow type (list, map, struct) with ``change(type)`` applied to its elements.

    It is not applied deeper. List views become lists, and other types are returned unchanged.
    """
    new = kind
    if pa.types.is_list(kind) or pa.types.is_list_view(kind):
        new = pa.list_(change(kind.value_type))
    elif pa.types.is_large_list(kind) or pa.types.is_large_list_view(kind):
        new = pa.large_list(change(kind.value_type))
    elif pa.types.is_fixed_size_list(kind):
        new = pa.list_(change(kind.value_type), kind.list_size)
    elif pa.types.is_map(kind):
        new = pa.map_(change(kind.key_type), change(kind.item_type))
    elif pa.types.is_struct(kind):
        new = pa.struct([field.with_type(change(field.type)) for field in kind.fields])
    return kind if new == kind else new


def to_pandas(frame: Frame) -> Any:
    """Return a frame as a pandas frame, with plain types in place of Arrow's views (string_view).

    A cudf frame is copied to the host, with nullable dtypes for columns that have one.
    """
    if not hasattr(frame, "to_pandas"):
        return backend_of(frame).without_views(frame)
    try:
        return frame.to_pandas(nullable=True)
    # Times, categories, lists and structs have no nullable dtype, but can hold null anyway.
    except NotImplementedError:
        if len(frame.columns) == 1:
            return frame.to_pandas()
        import pandas as pd

        return pd.concat([to_pandas(frame[[name]]) for name in frame.columns], axis=1)


def name_row(frame: Any, row: int) -> str:
    """Return the name of the row at position `row` for an error message, with its index label."""
    label = frame.index[row]
    value = label.item() if hasattr(label, "item") else label  # 6 rather than np.int64(6)
    return f"row {row} (index label {value!r})"
