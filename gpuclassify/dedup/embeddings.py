"""Embeddings: read as vectors of length 1, carried through shuffles as bytes, and sampled."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.frames import backend_of, name_row, unpack_digests

SAMPLE = ["number", "embedding"]  # columns that a sample has


def unit_vectors(frame: Any, column: str) -> tuple[np.ndarray, np.ndarray]:
    """The embeddings in a column, at length 1.

    Parameters
    ----------
    frame : pandas.DataFrame or cudf.DataFrame
    column : str
        Of lists of numbers, equally long: Arrow lists of any kind, or objects that Arrow reads as
        such (lists, arrays). Null and all zeros have no direction, and no vector.

    Returns
    -------
    vectors : numpy.ndarray
        float32 (rows with a direction, width).
    has_direction : numpy.ndarray
        bool (rows,).

    Raises
    ------
    TypeError
        The column does not hold lists of numbers.
    ValueError
        Lists differ in length or are empty, or a number is not finite in float32.
    """
    lists = backend_of(frame).list_array(frame, column)
    if not _holds_numbers(lists.type):
        raise TypeError(
            f"column {column!r} holds {lists.type}, not lists of numbers: name the column of "
            "embeddings as embedding_field=. (Dask makes strings of lists in an object column: "
            "give it Arrow's type, pandas.ArrowDtype(pyarrow.list_(pyarrow.float32())))"
        )
    is_given = lists.is_valid().to_numpy(zero_copy_only=False)
    if not is_given.any():
        return np.zeros((0, 0), np.float32), is_given
    given = lists.drop_null()
    rows = np.flatnonzero(is_given)
    widths = pc.list_value_length(given).to_numpy()
    is_other = (widths != widths[0]) | (widths == 0)
    if is_other.any():
        at = int(is_other.argmax())
        raise ValueError(
            f"{name_row(frame, int(rows[at]))} of column {column!r} holds {widths[at]} numbers "
            f"and {name_row(frame, int(rows[0]))} {widths[0]}: all must be of one model"
        )
    numbers = given.flatten().to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        vectors = numbers.astype(np.float32).reshape(len(rows), -1)
    is_finite = np.isfinite(vectors).all(axis=1)
    if not is_finite.all():
        raise ValueError(
            f"{name_row(frame, int(rows[is_finite.argmin()]))} of column {column!r} holds a number "
            "that is not finite: make that embedding null, or compute it anew in float32"
        )
    largest = np.abs(vectors).max(axis=1)
    is_given[rows] = largest > 0
    # Divided twice, because squares of very large and very small numbers are no float32.
    vectors = vectors[largest > 0] / largest[largest > 0, None]
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), is_given


def vector_digests(vectors: np.ndarray) -> np.ndarray:
    """The MD5 of each vector's bytes, int64 (vectors, 2)."""
    digests = (hashlib.md5(vector, usedforsecurity=False).digest() for vector in vectors)
    return unpack_digests(b"".join(digests))


def pack(vectors: np.ndarray) -> pd.api.extensions.ExtensionArray:
    """Vectors as a column of bytes.

    Of the types that hold a vector a row, this is the one that every shuffle of Dask returns as
    it was: "p2p" fails on Arrow's lists.

    Parameters
    ----------
    vectors : numpy.ndarray
        float32 (rows, width).
    """
    rows, width = vectors.shape
    ends = np.arange(rows + 1, dtype=np.int64) * width * vectors.itemsize
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(np.ascontiguousarray(vectors))]
    values = pa.LargeBinaryArray.from_buffers(pa.large_binary(), rows, buffers)
    return pd.arrays.ArrowExtensionArray(values)


def unpack(packed: pd.Series) -> np.ndarray:
    """The vectors that `pack` made a column of, float32 (rows, width).

    Raises
    ------
    ValueError
        They differ in width.
    """
    check_widths(packed)
    data = bytearray().join(packed.to_list())
    return np.frombuffer(data, np.float32).reshape(len(packed), -1 if data else 0)


def check_widths(packed: pd.Series) -> None:
    """Raise ValueError unless all vectors that `pack` made a column of are equally wide."""
    widths = pc.unique(pc.binary_length(pa.array(packed.array))).to_pylist()
    if len(widths) > 1:
        raise ValueError(
            f"embeddings have {widths[0] // 4} numbers in one partition and {widths[1] // 4} in "
            "another: all must be of one model"
        )


def take_sample(parts: Sequence[pd.DataFrame], size: int) -> pd.DataFrame:
    """The rows with the `size` smallest different numbers: the same for any order and partitioning.

    Raises
    ------
    ValueError
        Embeddings differ in width.
    """
    together = pd.concat(parts, ignore_index=True)
    check_widths(together["embedding"])
    return together.drop_duplicates("number").nsmallest(size, "number")


def estimate_documents(numbers: np.ndarray, size: int) -> int:
    """How many different numbers there are, of which these are the `size` smallest.

    The k-th smallest of n even numbers from 0 to 1 is about k / n (Bar-Yossef et al., "Counting
    Distinct Elements in a Data Stream", 2002); (k - 1) makes it unbiased. Off by 1 / sqrt(k).
    """
    if len(numbers) < size:
        return len(numbers)
    return int((size - 1) / ((float(numbers[-1]) + 2.0**63) / 2.0**64))


def _holds_numbers(kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
        return types.is_floating(kind) or types.is_integer(kind) or types.is_null(kind)
    return types.is_null(kind)  # of a partition that holds nothing
