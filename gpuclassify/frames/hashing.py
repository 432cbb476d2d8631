"""Hashes and random numbers of rows, equal in every process, version and dataframe library."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from gpuclassify.frames import Frame, to_pandas

_LARGEST = (1 << 64) - 1  # largest 64-bit integer, and the mask of 64 bits


def mix64(values: Any) -> Any:
    """Hash a uint64 number or array to uint64 by SplitMix64's finalizer; numba can compile it.

    Source: Steele, Lea and Flood (2014), with the constants of Stafford's mix 13.
    """
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def row_keys(seed: str, rows: np.ndarray) -> np.ndarray:
    """Return a random uint64 for each row number in `rows`, reproducible by `seed` (a text)."""
    start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big")
    return mix64(np.uint64(start) + rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def id_keys(seed: str, frame: Frame, id_field: str) -> np.ndarray:
    """Return a random number for each row, uint64 (rows,), reproducible by `seed` and the row's id.

    Equal ids give equal numbers in all string dtypes, and in all integer dtypes; a column of
    objects may hold both. Raises ValueError for a row without an id.
    """
    ids = to_pandas(frame[[id_field]])[id_field]
    if ids.isna().any():
        raise ValueError(f"the column {id_field!r} has rows without an id: fill it first")
    if ids.dtype.kind in "iu":
        numbers = ids.to_numpy(dtype=np.int64 if ids.dtype.kind == "i" else np.uint64)
    else:
        values = ids.astype(object).to_numpy()
        is_integer = np.zeros(len(values), bool)
        if ids.dtype == object and pd.api.types.infer_dtype(values) != "string":
            is_integer[:] = [_is_integer(value) for value in values]
        numbers = np.empty(len(values), np.uint64)
        integers = [int(value) & _LARGEST for value in values[is_integer]]
        numbers[is_integer] = np.array(integers, np.uint64)
        numbers[~is_integer] = pd.util.hash_array(values[~is_integer], categorize=False)
    return row_keys(seed, numbers)


def _is_integer(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return False
    return -(1 << 63) <= int(value) <= _LARGEST


def uniform(keys: np.ndarray) -> np.ndarray:
    """Convert random uint64 to uniform float64 numbers above 0 and at most 1, monotonically."""
    return ((keys >> np.uint64(11)) + 0.5) * 2.0**-53


def md5_digests(values: Iterable[Any]) -> np.ndarray:
    """Return the MD5 of each bytes object (not None) as two big-endian int64, (values, 2)."""
    digests = (hashlib.md5(value, usedforsecurity=False).digest() for value in values)
    return unpack_digests(b"".join(digests))


def unpack_digests(digests: bytes) -> np.ndarray:
    """Convert concatenated 16-byte digests to pairs of big-endian numbers, int64 (digests, 2)."""
    return np.frombuffer(digests, ">i8").reshape(-1, 2).astype(np.int64)
