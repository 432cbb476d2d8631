"""Types that a custom class may declare for its new columns, and checks of column names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from gpuclassify.mapping.heads import FLOAT32, SCORES, Columns, Head
from gpuclassify.settings.checks import nearest

COLUMN_TYPES = {
    "str": pa.string(),
    "float32": FLOAT32,
    "int64": pa.int64(),
    "bool": pa.bool_(),
    "list<float32>": SCORES,
    "list<float16>": pa.list_(pa.float16()),  # pandas only
}


class DeclaredColumns(Head):
    """Head (converter of model outputs to columns) for columns that a user's class declares.

    `declared` maps column names to type names of `COLUMN_TYPES`. `compute` converts outputs, one
    row per text, to the columns' values by name. `parts` are the first arguments of `Head`.
    """

    def __init__(
        self,
        *parts: Any,
        declared: Mapping[str, str],
        compute: Callable[[np.ndarray], Columns] | None,
    ) -> None:
        super().__init__(*parts)
        if compute is None:
            raise TypeError(
                f"{self.owner} declares new_columns and has no columns(outputs): write it"
            )
        self._declared = declared
        self._compute = compute

    def fields(self) -> list[pa.Field]:
        """Return the Arrow fields of the declared columns."""
        return [pa.field(name, COLUMN_TYPES[kind]) for name, kind in self._declared.items()]

    def check_settings(self) -> None:
        """Raise ValueError if a setting about filters, or about the lines of a text, is set."""
        for name in (*self.options.filter_names, *self.options.line_names):
            if getattr(self.options, name) is not None:
                raise ValueError(
                    f"{name} has no meaning for {self.owner}, which declares columns "
                    "of its own: compare those columns instead"
                )

    def columns(self, values: np.ndarray) -> Columns:
        """Return the new columns by name, computed by the user's code from raw outputs."""
        return self._compute(values)


def check_column_types(owner: str, columns: Mapping[str, str]) -> None:
    """Raise TypeError unless each declared column has one of the type names in `COLUMN_TYPES`."""
    for name, kind in columns.items():
        if kind not in COLUMN_TYPES:
            raise TypeError(
                f"{owner} declares {name!r} as {kind!r}, which is no kind of column: kinds are "
                f"{', '.join(COLUMN_TYPES)}.{nearest(str(kind), COLUMN_TYPES)}"
            )


def check_is_there(
    name: str, columns: Sequence[str], setting: str, what: str = "text column"
) -> None:
    """Raise ValueError unless exactly one of a dataset's columns has this name.

    `setting` is the argument that names the column, and `what` describes it, both for the message.
    """
    count = columns.count(name)
    if count == 0:
        raise ValueError(
            f"no {what} {name!r}; columns are {columns}.{nearest(name, map(str, columns))} "
            f"Pass {setting}= to name yours."
        )
    if count > 1:
        raise ValueError(f"{count} columns are called {name!r}: rename all but one")


def check_are_new(
    names: Sequence[str], columns: Sequence[str], texts: Sequence[str], overwrite: bool
) -> None:
    """Raise ValueError unless the new columns `names` can be added to a dataset's `columns`.

    They must be distinct and must not be among `texts`, the names of the columns that are read. An
    existing column is an error, too, unless `overwrite` is True.
    """
    for name in texts:
        if name in names:
            raise ValueError(
                f"output column {name!r} is a column that is read, and stays as it is: "
                "choose another output name"
            )
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"output columns need different names; given twice: {repeated}")
    taken = [name for name in names if name in columns]
    if taken and not overwrite:
        raise ValueError(
            f"the dataset already has {taken}: choose other output names, or pass overwrite=True "
            "to replace them"
        )


def list_sizes(heads: Iterable[Head]) -> dict[str, int]:
    """Map the name of each new column with lists of floats to its list length; 0 if unknown."""
    return {
        field.name: head.list_size
        for head in heads
        for field in head.fields()
        if pa.types.is_list(field.type) and pa.types.is_floating(field.type.value_type)
    }


def check_room(heads: Iterable[Head], rows: int, most_numbers: int) -> None:
    """Raise OverflowError if a list column of `rows` rows would hold over `most_numbers` numbers.

    cudf limits the numbers of all rows together. Lists of unknown length are not checked.
    """
    for name, numbers in list_sizes(heads).items():
        if rows * numbers > most_numbers:
            raise OverflowError(
                f"column {name!r} would hold {numbers:,} numbers in each of {rows:,} rows, "
                f"and one of cudf holds {most_numbers:,} in all: at most "
                f"{most_numbers // numbers:,} rows fit. Make partitions smaller "
                "(ddf.repartition(partition_size='256MB'), part_bytes= of a reader), or use frames "
                "of pandas, which hold any number"
            )
