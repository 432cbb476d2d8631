"""Exact weighted quantiles by radix selection: 16 bits of the float per pass over the data.

The bits of a float, with its sign bit inverted, are ordered like the numbers. A pass sums the
weights of all numbers by the next 16 bits. That fixes the prefix of each quantile, and the next
pass reads the numbers with this prefix. Weights are whole numbers, so sums are exact and quantiles
do not depend on partitions or their order. A pass that would need too many sums takes fewer bits.
"""

from __future__ import annotations

import contextlib
import functools
import json
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import dask
import numpy as np
import pandas as pd
import pyarrow.compute as pc

from gpuclassify.frames import Frame, LazyFrame, backend_of, to_pandas
from gpuclassify.frames.lazy import as_dask, reduce_tree
from gpuclassify.settings.checks import nearest, plain_value

MOST_BITS = 16  # bits per pass
MOST_SUMS = 1 << 21  # sums per pass over all columns and groups, 16 bytes each
MOST_WEIGHT = 1 << 62  # largest weight of a group, so that int64 sums do not overflow
MOST_GROUPS = 1_000
BYTES = "bytes"  # weight that stands for the text's length in UTF-8
ALL = "null"  # group of rows without a value, and of all rows if there are no groups

# Function from the total weight to the cumulative weights of the quantiles, each at least 1.
Ranks = Callable[[int], Sequence[int]]
Compute = Callable[[list[Any]], Iterable[Any]]  # runs delayed tasks, and returns their results
Key = tuple[str, str]  # column, and group as `group_key` returns it


@dataclass(frozen=True)
class ScoreColumns:
    """Names of a frame's score columns, and of its columns of row weights and groups.

    Scores of float32 or float16 are read and sorted as float32, others as float64.
    """

    names: tuple[str, ...]
    weight: str | None = None  # column of whole numbers, or BYTES of the text; None counts rows
    by: str | None = None  # column of groups, which are ranked separately
    text_field: str = "text"

    @property
    def needed(self) -> tuple[str, ...]:
        """Distinct names of all columns to read: scores, weights or their text, and groups."""
        weight = self.text_field if self.weight == BYTES else self.weight
        names = [*self.names, weight, self.by]
        return tuple(dict.fromkeys(name for name in names if name is not None))

    def check(self, frame: Frame) -> None:
        """Raise ValueError unless a frame has each column once, and TypeError for a wrong type."""
        require_columns(frame, self.needed)
        for name in self.names:
            if frame[name].dtype.kind not in "fiu":
                raise TypeError(
                    f"column {name!r} holds {frame[name].dtype}, not numbers: name a column of "
                    "scores"
                )
        self.groups(frame)  # raises for types that make no groups
        if self.weight == BYTES:
            backend_of(frame).check_text_column(frame, self.text_field)
        elif self.weight is not None and frame[self.weight].dtype.kind not in "iu":
            raise TypeError(
                f"weight={self.weight!r} holds {frame[self.weight].dtype}: weights are whole "
                "numbers, such as tokens, so that sums are exact. Round them, or take "
                f'weight="{BYTES}"'
            )

    def values(self, frame: Frame, name: str) -> np.ndarray:
        """Return a score column as float32 or float64 (rows,). Null becomes NaN, and -0.0 0.0."""
        plain = to_pandas(frame[[name]])[name]
        is_single = plain.dtype.kind == "f" and plain.dtype.itemsize <= 4
        kind = np.float32 if is_single else np.float64
        return plain.to_numpy(dtype=kind, na_value=np.nan) + kind(0)

    def weights(self, frame: Frame) -> np.ndarray:
        """Return the weight of each row, int64 (rows,); 0 for null, and 1 if `weight` is None."""
        if self.weight is None:
            return np.ones(len(frame), np.int64)
        if self.weight == BYTES:
            sizes = pc.binary_length(backend_of(frame).text_array(frame, self.text_field))
            return pc.fill_null(sizes, 0).to_numpy().astype(np.int64)
        plain = to_pandas(frame[[self.weight]])[self.weight]
        weights = plain.to_numpy(dtype=np.int64, na_value=0)
        if (weights < 0).any():
            raise ValueError(f"weight={self.weight!r} has {weights.min()}: weights are 0 or more")
        return weights

    def groups(self, frame: Frame) -> tuple[np.ndarray, list[str]]:
        """Return the index of each row's group, int64 (rows,), and each group's value as JSON.

        Rows with null are in the group "null", and without a column of groups all rows are.
        """
        if self.by is None:
            return np.zeros(len(frame), np.int64), [ALL]
        column = to_pandas(frame[[self.by]])[self.by]
        try:
            codes, values = pd.factorize(column, use_na_sentinel=False)
        except (TypeError, NotImplementedError) as err:  # values of objects, or of Arrow types
            raise TypeError(
                f"by={self.by!r} makes no groups ({err}): name a column of texts or whole numbers, "
                "such as the language"
            ) from err
        keys = [group_key(value) for value in values]  # equal for NaN and null
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        return np.array([numbers[key] for key in keys], np.int64)[codes], [*numbers]


def cells_of(frame: Frame, by: Iterable[str]) -> tuple[np.ndarray, list[str]]:
    """Return the index of each row's cell, int64 (rows,), and each cell's values as a JSON list.

    A cell is a combination of values of the columns `by`.
    """
    codes, cells = np.zeros(len(frame), np.int64), [""]
    for name in by:
        more, groups = ScoreColumns((), by=name).groups(frame)
        codes, known = pd.factorize(codes * len(groups) + more)
        pairs = (divmod(number, len(groups)) for number in known.tolist())
        cells = [f"{cells[first]}, {groups[last]}" for first, last in pairs]
    return codes, [f"[{cell.removeprefix(', ')}]" for cell in cells]


def require_columns(frame: Frame, names: Iterable[str]) -> None:
    """Raise ValueError unless the frame has each of the columns once."""
    columns = list(map(str, frame.columns))
    for name in names:
        if (count := columns.count(name)) != 1:
            raise ValueError(
                f"{count or 'no'} column {name!r}; columns are {columns}."
                f"{nearest(name, set(columns) - {name})}"
            )


def group_key(value: Any) -> str:
    """Return a group's value as JSON, so that 1, "1" and null are distinct.

    1.0 becomes 1, because pandas converts whole numbers to floats in a column with null. A tuple of
    values becomes a list. Values that JSON lacks, such as dates, become texts.
    """
    if isinstance(value, tuple):
        return f"[{', '.join(map(group_key, value))}]"
    if pd.isna(value):
        return ALL
    plain = plain_value(value)
    is_whole = isinstance(plain, float) and plain.is_integer()
    return json.dumps(int(plain) if is_whole else plain, default=str)


def group_value(key: str) -> Any:
    """Return the value of a group from its JSON: a text, number, True, False, None, or a tuple.

    Raises ValueError if `group_key` does not return `key` for the value.
    """
    with contextlib.suppress(ValueError, RecursionError, TypeError):
        value = json.loads(key)
        value = tuple(value) if isinstance(value, list) else value
        hash(value)  # raises for lists and objects
        if group_key(value) == key:
            return value
    raise ValueError(f"{reprlib.repr(key)} is no value of a group as JSON")


def compute_here(tasks: list[Any]) -> Iterable[Any]:
    """Compute delayed tasks by the current Dask scheduler, and return their results in order."""
    return dask.compute(*tasks)


def weighted_quantiles(
    dataset: Frame | LazyFrame,
    columns: ScoreColumns,
    ranks: Ranks,
    compute: Compute = compute_here,
    most_sums: int = MOST_SUMS,
) -> dict[str, dict[str, list[float]]]:
    """Find the smallest scores whose cumulative weights reach `ranks`, for each column and group.

    `ranks` is a function from the total weight of a group's scores in a column to these cumulative
    weights, whole numbers of at least 1. For ``ranks = ceil(share * total)`` the scores are
    ``numpy.quantile(scores, shares, weights=weights, method="inverted_cdf")``, without numpy's
    rounding errors. Null and NaN are ignored. The dataset is read twice for columns of float32, and
    four times for others, or more often if a pass would need more than `most_sums` sums of weights.

    Returns a dict by column of dicts by group (its value as JSON), each with a list of the scores,
    in the order of the ranks. Groups without ranks or of weight 0 are absent.
    """
    frame = as_dask(dataset)
    columns.check(frame._meta)
    frame = frame[list(columns.needed)]
    bits = {
        name: columns.values(frame._meta.iloc[:0], name).dtype.itemsize * 8
        for name in columns.names
    }
    searches: dict[Key, _Search] = {}
    known = 0
    while known < max(bits.values()):
        names = tuple(name for name in columns.names if bits[name] > known)
        begins = {key: np.unique(searches[key].digits) for key in searches if key[0] in names}
        width = min(MOST_BITS, *(bits[name] - known for name in names))
        sums_of, wanted_columns = dask.delayed(part_sums, pure=True), replace(columns, names=names)
        options = {"begins": begins, "known": known, "width": width, "most_sums": most_sums}
        parts = [sums_of(part, wanted_columns, **options) for part in frame.to_delayed()]
        (sums,) = compute([reduce_tree(functools.partial(add_sums, most_sums=most_sums), parts)])
        if not known:
            for key, weighed in sums.by_key.items():
                total = int(weighed.weights.sum())
                wanted = np.array(ranks(total) if total else [], np.int64)
                searches[key] = _Search(np.zeros(len(wanted), np.uint64), wanted)
        for key, weighed in sums.by_key.items():
            searches[key].descend(weighed, sums.width)
        known += sums.width
    result: dict[str, dict[str, list[float]]] = {name: {} for name in columns.names}
    for (name, group), search in searches.items():
        if len(search.ranks):
            result[name][group] = number_of(search.digits, bits[name]).tolist()
    return result


class _Weights(NamedTuple):
    """Sums of weights, int64 (n,), for each prefix of the scores' bits, uint64 (n,), ascending."""

    digits: np.ndarray
    weights: np.ndarray


class _Pass(NamedTuple):
    """Sums of weights by column, group of rows, and prefix of the scores' bits.

    Each pass over the data makes the prefixes `width` bits longer.
    """

    width: int
    by_key: dict[Key, _Weights]

    def narrowed(self, width: int) -> _Pass:
        """Return the sums for shorter prefixes: `width` bits longer than in the pass before."""
        if width == self.width:
            return self
        left_out = np.uint64(self.width - width)
        by_key = {
            key: _summed(group_sums.digits >> left_out, group_sums.weights)
            for key, group_sums in self.by_key.items()
        }
        return _Pass(width, by_key)

    def bounded(self, most_sums: int) -> _Pass:
        sums = self
        while sums.width > 1 and sums.size() > most_sums:
            sums = sums.narrowed(sums.width - 1)
        return sums

    def size(self) -> int:
        return sum(len(group_sums.digits) for group_sums in self.by_key.values())


@dataclass
class _Search:
    """State of the search for all quantiles of one column and group."""

    digits: np.ndarray  # uint64 (ranks,): known prefix of each quantile
    ranks: np.ndarray  # int64 (ranks,): its rank among the numbers with this prefix

    def descend(self, sums: _Weights, width: int) -> None:
        """Extend the known prefix of each quantile by `width` bits, in place."""
        reached = np.concatenate([[0], np.cumsum(sums.weights)])
        begins = sums.digits >> np.uint64(width)
        before = reached[np.searchsorted(begins, self.digits)]  # weight of lower prefixes
        indices = np.searchsorted(reached[1:], before + self.ranks)
        self.ranks = self.ranks + before - reached[indices]
        self.digits = sums.digits[indices]


def part_sums(
    frame: Frame,
    columns: ScoreColumns,
    *,
    begins: Mapping[Key, np.ndarray],
    known: int,
    width: int,
    most_sums: int,
) -> _Pass:
    """Sum one partition's weights for each prefix of the scores' bits, by column and group.

    Prefixes have `known` + `width` bits, or fewer to avoid more than `most_sums` sums. Unless
    `known` is 0, only scores whose first `known` bits are in `begins` are summed.
    """
    weights = columns.weights(frame)
    codes, groups = columns.groups(frame)
    refuse_many(groups)
    sums = {}
    for name in columns.names:
        values = columns.values(frame, name)
        bits = values.dtype.itemsize * 8
        digits = ordered_bits(values) >> np.uint64(bits - known - width)
        is_number = ~np.isnan(values)
        for code, group in enumerate(groups):
            rows = is_number & (codes == code)
            if known:
                rows &= np.isin(digits >> np.uint64(width), begins[name, group])
            sums[name, group] = _summed(digits[rows], weights[rows])
    return _Pass(width, sums).bounded(most_sums)


def add_sums(parts: Sequence[_Pass], most_sums: int) -> _Pass:
    """Add partitions' sums of weights by column, group of rows, and prefix of the scores' bits.

    Prefixes are cut to the shortest length among the parts, and further if there are more than
    `most_sums` sums.
    """
    width = min(part.width for part in parts)
    pieces: dict[Key, list[_Weights]] = {}
    for part in parts:
        for key, sums in part.narrowed(width).by_key.items():
            pieces.setdefault(key, []).append(sums)
    refuse_many({group for _, group in pieces})
    by_key = {
        key: _summed(*(np.concatenate(arrays) for arrays in zip(*same_key, strict=True)))
        for key, same_key in pieces.items()
    }
    return _Pass(width, by_key).bounded(most_sums)


def refuse_many(groups: Collection[str], most: int = MOST_GROUPS) -> None:
    """Raise ValueError if there are more than `most` groups."""
    if len(groups) > most:
        raise ValueError(
            f"by= makes more than {most:,} groups, such as {min(groups)}: name columns of few "
            "values, such as the language"
        )


def _summed(digits: np.ndarray, weights: np.ndarray) -> _Weights:
    if weights.sum(dtype=np.float64) > MOST_WEIGHT:
        raise ValueError(
            "the weights of a group add up to more than 2**62: divide them, or weigh by another "
            "column"
        )
    known, indices = np.unique(digits, return_inverse=True)
    sums = np.zeros(len(known), np.int64)
    np.add.at(sums, indices, weights)
    return _Weights(known, sums)


def ordered_bits(values: np.ndarray) -> np.ndarray:
    """Convert floats of 32 or 64 bits to whole numbers, uint64, with the same order."""
    size = values.dtype.itemsize
    bits = values.view(f"u{size}")
    sign = bits.dtype.type(1 << (size * 8 - 1))
    return np.where(bits & sign, ~bits, bits | sign).astype(np.uint64)


def number_of(ordered: np.ndarray, bits: int) -> np.ndarray:
    """Convert results of `ordered_bits` back to floats of 32 or 64 `bits`."""
    kind = np.dtype(f"u{bits // 8}")
    sign = kind.type(1 << (bits - 1))
    keys = ordered.astype(kind)
    return np.where(keys & sign, keys ^ sign, ~keys).astype(kind).view(f"f{bits // 8}")
