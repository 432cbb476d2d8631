"""PartitionMap: a function of one frame, mapped lazily over the partitions of a dataset.

TextMap is one that computes new columns from a text column.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from gpuclassify.checks import nearest
from gpuclassify.frames import backend_of, name_row
from gpuclassify.workers.retire import on_sound_device


@dataclass(frozen=True)
class NewColumns:
    """What a mapper computed for the rows of one frame.

    Attributes
    ----------
    arrays : dict of str to pyarrow.Array
        One array of ``len(frame)`` values a new column, of the types that the schema announces.
    keep : ndarray of bool, optional
        The filters' decision. ``None`` keeps all.
    keep_field : str, optional
        Write the decision to this column instead of dropping rows.
    """

    arrays: dict[str, pa.Array]
    keep: np.ndarray | None = None
    keep_field: str | None = None


class PartitionMap(ABC):
    """A frame to frame function that adds columns and may drop rows, and does nothing else.

    A lazy Dask frame gives a lazy Dask frame of the same backend, a plain pandas or cudf frame is
    mapped at once. Rows, order, index, divisions, partitions and the other columns are unchanged.

    Subclasses are immutable, small to pickle and hold no model, lock or open file: Dask ships them
    to workers and may run any partition again.
    """

    @property
    def __name__(self) -> str:
        """Names the tasks on Dask's dashboard; without it an address would be part of the key."""
        return type(self).__qualname__

    @abstractmethod
    def check(self, frame: Any) -> None:
        """Raise unless `frame` (a plain frame, possibly empty) has the columns that are needed."""

    def check_library(self, frame: Any) -> None:
        """Raise unless frames of this library will do.

        Apart from `check`, because a job may move its parts to another library than that of the
        frame which it checks in the client.
        """
        return

    @abstractmethod
    def prepare(self) -> None:
        """Look up in the client what workers will need; called once a dataset is given."""

    @abstractmethod
    def meta(self, frame: Any) -> Any:
        """The empty frame that announces the result's columns and dtypes.

        Parameters
        ----------
        frame : pandas.DataFrame or cudf.DataFrame
            Frame of the input's columns; its rows are ignored.
        """

    @abstractmethod
    def announced(self, frame: Any) -> Any:
        """What `map_frame` must know of the dataset's meta: one partition may look different."""

    @abstractmethod
    def map_frame(self, frame: Any, announced: Any = None) -> Any:
        """Map one plain frame, as a worker does with each partition.

        Parameters
        ----------
        frame : pandas.DataFrame or cudf.DataFrame
            One partition.
        announced : optional
            What `announced` gave for the meta; default: for the frame itself.
        """

    def __call__(self, dataset: Any) -> Any:
        """Map over `dataset`.

        Parameters
        ----------
        dataset : dask.dataframe.DataFrame, pandas.DataFrame or cudf.DataFrame
            Frame with the text column.

        Returns
        -------
        same type as `dataset`
            Lazy for Dask input, computed for a plain frame.

        Raises
        ------
        TypeError
            Not a frame, or the text column does not hold strings.
        ValueError
            The text column is missing, or an output column is there already.
        """
        if _is_dask_frame(dataset):
            return self._map_lazily(dataset)
        backend_of(dataset)  # refuses what is no frame
        self.check(dataset)
        self.check_library(dataset)
        self.prepare()
        return self.map_frame(dataset)

    def _map_lazily(self, dataset: Any) -> Any:
        meta = dataset._meta
        backend_of(meta)
        self.check(meta)
        self.check_library(meta)
        self.prepare()
        return dataset.map_partitions(
            map_partition,
            self,
            announced=self.announced(meta),
            meta=self.meta(meta),
            token=self.__name__,
        )


class TextMap(PartitionMap):
    """Computes new columns from one text column."""

    @property
    @abstractmethod
    def text_field(self) -> str:
        """Name of the column that is read."""

    @property
    @abstractmethod
    def is_overwriting(self) -> bool:
        """Whether columns that the dataset already has are replaced."""

    @abstractmethod
    def schema(self) -> pa.Schema:
        """The new columns in order; types as in `gpuclassify.frames`."""

    def read_texts(self, frame: Any) -> Any:
        """The text column for `compute`: its strings, None where null, cut to `max_chars`."""
        return backend_of(frame).texts(frame, self.text_field, self.max_chars)

    @abstractmethod
    def compute(self, texts: Any, name_row: Any) -> NewColumns:
        """The new columns for what `read_texts` gave; ``name_row(i)`` names row i in errors."""

    @property
    @abstractmethod
    def max_chars(self) -> int | None:
        """Characters of a text that are read; None for all."""

    def check(self, frame: Any) -> None:
        """Raise unless `frame` (a plain frame, possibly empty) has the columns that are needed."""
        self._check_text_column(frame)
        self._check_new_columns(frame)

    def announced(self, frame: Any) -> Any:
        """The dtype of new string columns; a partition without strings may suggest another."""
        return backend_of(frame).string_dtype(frame, self.text_field)

    def map_frame(self, frame: Any, announced: Any = None) -> Any:
        """Map one plain frame, as a worker does with each partition."""
        backend = backend_of(frame)
        string_dtype = self.announced(frame) if announced is None else announced
        new = self.compute(self.read_texts(frame), functools.partial(name_row, frame))
        arrays = new.arrays
        if new.keep is not None and new.keep_field is not None:
            arrays = {**arrays, new.keep_field: pa.array(new.keep)}
        schema = self.schema()
        arrays = {name: arrays[name] for name in schema.names}  # in the order that meta announced
        result = backend.with_columns(frame, arrays, schema, string_dtype)
        if new.keep is None or new.keep_field is not None:
            return result
        return backend.take_rows(result, new.keep)

    def meta(self, frame: Any) -> Any:
        """The empty frame that announces the result's columns and dtypes."""
        backend = backend_of(frame)
        empty = {field.name: pa.array([], field.type) for field in self.schema()}
        return backend.with_columns(frame.iloc[:0], empty, self.schema(), self.announced(frame))

    def _check_text_column(self, frame: Any) -> None:
        columns = list(frame.columns)
        count = columns.count(self.text_field)
        if count == 0:
            raise ValueError(
                f"no text column {self.text_field!r}; columns are {columns}."
                f"{nearest(self.text_field, map(str, columns))} Pass text_field= to name yours."
            )
        if count > 1:
            raise ValueError(f"{count} columns are called {self.text_field!r}: rename all but one")
        backend_of(frame).check_text_column(frame, self.text_field)

    def _check_new_columns(self, frame: Any) -> None:
        names = self.schema().names
        if self.text_field in names:
            raise ValueError(
                f"output column {self.text_field!r} is the text column, which stays as it is: "
                "choose another output name"
            )
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"output columns need different names; given twice: {repeated}")
        taken = [name for name in names if name in frame.columns]
        if taken and not self.is_overwriting:
            raise ValueError(
                f"the dataset already has {taken}: choose other output names, "
                "or pass overwrite=True to replace them"
            )
        backend_of(frame).check_new_columns(self.schema())


@on_sound_device
def map_partition(frame: Any, mapper: PartitionMap, announced: Any) -> Any:
    """The task that Dask runs on each partition."""
    return mapper.map_frame(frame, announced)


def _is_dask_frame(dataset: Any) -> bool:
    import dask

    if not dask.is_dask_collection(dataset):
        return False
    if getattr(getattr(dataset, "_meta", None), "ndim", None) == 2:
        return True
    cure = ".to_frame()" if hasattr(dataset, "to_frame") else ".to_dataframe()"
    raise TypeError(
        f"got a Dask {type(dataset).__name__}: pass a Dask DataFrame (see {cure} of the collection)"
    )
