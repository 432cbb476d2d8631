"""The Dask boundary: functions of one frame, mapped lazily over a dataset, alone or in a chain."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from gpuclassify.checks import check_count, with_plain_values
from gpuclassify.frames import backend_of, frame_of_texts
from gpuclassify.signatures import Public
from gpuclassify.tokenizing.token_cache import shared_tokens
from gpuclassify.workers.retire import on_sound_device
from gpuclassify.workers.task_errors import message_first


class WrappedFrame:
    """A dataset that holds its frame; a mapper gives another one of its class.

    Attributes
    ----------
    df : dask.dataframe.DataFrame, pandas.DataFrame or cudf.DataFrame
    """

    def __init__(self, df: Any) -> None:
        self.df = df


class PartitionMap(Public):
    """A frame to frame function that adds columns and may drop rows, and does nothing else.

    A lazy Dask frame gives a lazy Dask frame of the same backend, a plain pandas or cudf frame is
    mapped at once. Rows, order, index, divisions, partitions and the other columns are unchanged.

    Subclasses are immutable, small to pickle and hold no model, lock or open file: Dask ships them
    to workers and may run any partition again.
    """

    public_names: ClassVar[tuple[str, ...]] = ("describe", "schema")

    @property
    def __name__(self) -> str:
        """Names the tasks on Dask's dashboard; without it an address would be part of the key."""
        return type(self).__qualname__

    @property
    def text_fields(self) -> tuple[str, ...]:
        """Columns of text that are read."""
        return ()

    @property
    def main_text_fields(self) -> tuple[str, ...]:
        """Those of `text_fields` that a text is a value of, where it is given without a frame."""
        return ()

    @property
    def is_row_wise(self) -> bool:
        """Whether new columns and filters follow from the `text_fields` of each row alone.

        Dask may then leave rows and other columns out before they are mapped.
        """
        return False

    @property
    def drops_rows(self) -> bool:
        """Whether the result may have fewer rows."""
        return True

    @property
    def label_fields(self) -> tuple[str, ...]:
        """New columns whose values a report counts."""
        return ()

    @property
    def number_fields(self) -> tuple[str, ...]:
        """New columns of numbers of which a report shows the spread."""
        return ()

    def schema(self) -> pa.Schema:
        """The new columns in order, as far as they are known without a frame."""
        return pa.schema([])

    def code(self) -> str:
        """What makes the same mapper again, for people."""
        return repr(self)

    def describe(self) -> dict[str, Any]:
        """Its settings for people and for comparing two runs: JSON values, no secret."""
        return {}

    @abstractmethod
    def check(self, frame: Any) -> None:
        """Raise unless `frame` (a plain frame, possibly empty) has the columns that are needed."""

    def check_library(self, frame: Any) -> None:
        """Raise unless frames of this library will do.

        Apart from `check`, because a job may move its parts to another library than that of the
        frame which it checks in the client.
        """
        return

    def prepare(self) -> None:
        """Look up in the client what workers will need; called once a dataset is given."""
        return

    @abstractmethod
    def meta(self, frame: Any) -> Any:
        """The empty frame with the result's columns and dtypes.

        Parameters
        ----------
        frame : pandas.DataFrame or cudf.DataFrame
            Frame of the input's columns; its rows are ignored.
        """

    def meta_dtypes(self, frame: Any) -> Any:
        """What `map_frame` must know of the dtypes in meta: one partition may look different."""
        return None

    def narrowed(self, columns: Iterable[str]) -> PartitionMap:
        """The mapper that does for these columns of the result, and for the same rows."""
        is_needed = self.drops_rows or not set(columns).isdisjoint(self.schema().names)
        return self if is_needed else Chain(())

    @abstractmethod
    def map_frame(self, frame: Any, meta_dtypes: Any = None) -> Any:
        """Map one plain frame, as a worker does with each partition.

        Parameters
        ----------
        frame : pandas.DataFrame or cudf.DataFrame
            One partition.
        meta_dtypes : optional
            What `PartitionMap.meta_dtypes` gave for the meta; default: for the frame itself.
        """

    def __call__(self, dataset: Any) -> Any:
        """Map over `dataset`.

        Parameters
        ----------
        dataset : dask.dataframe.DataFrame, pandas.DataFrame, cudf.DataFrame, str or list of str
            Frame with the text column, also as a `WrappedFrame`; or texts themselves, of which None
            is null.

        Returns
        -------
        same type as `dataset`
            Lazy for Dask input, computed for a plain frame; of texts a pandas frame.

        Raises
        ------
        TypeError
            Not a frame, or the text column does not hold strings.
        ValueError
            The text column is missing, or an output column is there already.
        """
        if isinstance(dataset, WrappedFrame):
            return type(dataset)(self(dataset.df))
        if self.main_text_fields and isinstance(dataset, (str, list, tuple)):
            dataset = frame_of_texts(dataset, self.main_text_fields)
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
        mapped = self.map_partitions(dataset, self.meta(meta))
        if not (self.is_row_wise and meta.columns.is_unique):
            return mapped
        try:
            from gpuclassify.expression import optimizable
        except ImportError:  # a Dask that lacks the private names which it takes
            return mapped
        return optimizable(mapped)

    def map_partitions(self, dataset: Any, meta: Any, columns: list[str] | None = None) -> Any:
        """The lazy frame of `dataset`, which Dask's optimizer cannot see into.

        Parameters
        ----------
        dataset : dask.dataframe.DataFrame
        meta : pandas.DataFrame or cudf.DataFrame
            Empty frame of the result's columns.
        columns : list of str, optional
            Those of the result; default: all.
        """
        return dataset.map_partitions(
            map_partition,
            self,
            self.meta_dtypes(dataset._meta),
            columns,
            meta=meta,
            token=self.__name__,
        )


@message_first
@on_sound_device
def map_partition(
    frame: Any, mapper: PartitionMap, meta_dtypes: Any, columns: list[str] | None = None
) -> Any:
    """The task that Dask runs on each partition."""
    mapped = mapper.map_frame(frame, meta_dtypes)
    return mapped if columns is None else mapped[columns]


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


@with_plain_values
def classify(dataset: Any, mappers: Sequence[PartitionMap], *, limit: int | None = None) -> Any:
    """Run several mappers over a dataset in one pass.

    ``classify(ddf, [a, b])`` means ``b(a(ddf))``: rows that `a` drops are never scored by `b`.
    Each partition is one task. A text is tokenized once for all mappers whose tokenizers give it
    the same tokens: equal tokenizers that cut it alike, or do not have to cut it. Models stay
    loaded side by side where they fit, else they take turns.

    Parameters
    ----------
    dataset : dask.dataframe.DataFrame, pandas.DataFrame or cudf.DataFrame
    mappers : sequence of PartitionMap
        Classifiers and embedders, in the order in which they run.
    limit : int, optional
        Classify only so many of the first rows, to try settings; of a Dask frame those of its first
        partition, so that no other is read. Default: all.

    Returns
    -------
    same type as `dataset`
        Lazy for Dask input, computed for a plain frame.

    Raises
    ------
    TypeError
        No sequence of mappers.
    ValueError
        None at all, two of them write the same column, or `limit` is below 1.

    Examples
    --------
    >>> quality, domain = QualityClassifier(filter_by="High"), DomainClassifier()  # doctest: +SKIP
    >>> ddf = classify(ddf, [quality, domain])  # doctest: +SKIP
    """
    first = next(iter(dataset), None) if isinstance(dataset, (list, tuple)) else dataset
    if isinstance(first, PartitionMap):
        raise TypeError("classify() takes the dataset first: classify(ddf, [DomainClassifier()])")
    if isinstance(mappers, PartitionMap | type):
        name = mappers if isinstance(mappers, type) else type(mappers)
        raise TypeError(
            f"classify() takes a list of mappers, got one {name.__qualname__}: "
            f"pass [{name.__qualname__}()], or call it with the dataset"
        )
    mappers = tuple(_flat(mappers))
    for mapper in mappers:
        if isinstance(mapper, type):
            raise TypeError(
                f"classify() got the class {mapper.__qualname__} among the mappers: write "
                f"{mapper.__qualname__}(), with the options that it needs"
            )
        if not isinstance(mapper, PartitionMap):
            raise TypeError(
                f"classify() got a {type(mapper).__qualname__} among the mappers: "
                "pass classifiers or embedders, such as DomainClassifier()"
            )
    if not mappers:
        raise ValueError("classify() got no mapper: pass at least one, such as DomainClassifier()")
    if limit is not None:
        check_count("limit", limit)
        dataset = dataset[:limit] if isinstance(dataset, (list, tuple)) else _head(dataset, limit)
    return Chain(mappers)(dataset)


def _head(dataset: Any, limit: int) -> Any:
    """The first rows of a frame; a text is one."""
    if isinstance(dataset, str) or not hasattr(dataset, "head"):
        return dataset
    lazily = {"compute": False} if _is_dask_frame(dataset) else {}
    return dataset.head(limit, **lazily)


def _flat(mappers: Iterable[Any]) -> Iterator[Any]:
    for mapper in mappers:
        if isinstance(mapper, Chain):
            yield from _flat(mapper.mappers)
        else:
            yield mapper


@dataclass(frozen=True)
class Chain(PartitionMap):
    """Mappers run one after another on each partition.

    Attributes
    ----------
    mappers : tuple of PartitionMap
    """

    mappers: tuple[PartitionMap, ...]

    @property
    def __name__(self) -> str:
        """The mappers' names, on Dask's dashboard."""
        return "+".join(mapper.__name__ for mapper in self.mappers) or "Chain"

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return ("Chain", self.mappers)

    @property
    def text_fields(self) -> tuple[str, ...]:
        """Columns of text that any mapper reads."""
        return _distinct(mapper.text_fields for mapper in self.mappers)

    @property
    def main_text_fields(self) -> tuple[str, ...]:
        """Those that a text is a value of, where it is given without a frame."""
        return _distinct(mapper.main_text_fields for mapper in self.mappers)

    @property
    def is_row_wise(self) -> bool:
        """Whether every mapper is."""
        return all(mapper.is_row_wise for mapper in self.mappers)

    @property
    def drops_rows(self) -> bool:
        """Whether any mapper does."""
        return any(mapper.drops_rows for mapper in self.mappers)

    @property
    def label_fields(self) -> tuple[str, ...]:
        """New columns whose values a report counts."""
        return _distinct(mapper.label_fields for mapper in self.mappers)

    @property
    def number_fields(self) -> tuple[str, ...]:
        """New columns of numbers of which a report shows the spread."""
        return _distinct(mapper.number_fields for mapper in self.mappers)

    def schema(self) -> pa.Schema:
        """Every mapper's new columns."""
        return pa.schema([field for mapper in self.mappers for field in mapper.schema()])

    def check(self, frame: Any) -> None:
        """Raise unless each mapper finds what it needs in what the ones before it leave."""
        self._refuse_collisions()
        for mapper in self.mappers:
            mapper.check(frame)
            frame = mapper.meta(frame)

    def check_library(self, frame: Any) -> None:
        """Raise unless frames of this library will do for every mapper."""
        for mapper in self.mappers:
            mapper.check_library(frame)

    def prepare(self) -> None:
        """Look up what workers will need for every mapper."""
        for mapper in self.mappers:
            mapper.prepare()

    def meta(self, frame: Any) -> Any:
        """The empty frame with every mapper's columns."""
        for mapper in self.mappers:
            frame = mapper.meta(frame)
        return frame

    def meta_dtypes(self, frame: Any) -> tuple[Any, ...]:
        """What each mapper must know of the meta that it sees."""
        known = []
        for mapper in self.mappers:
            known.append(mapper.meta_dtypes(frame))
            frame = mapper.meta(frame)
        return tuple(known)

    def narrowed(self, columns: Iterable[str]) -> Chain:
        """The mappers that drop rows, write one of the columns, or write what such a one reads."""
        asked = set(columns)
        needed: list[PartitionMap] = []
        for mapper in reversed(self.mappers):
            if mapper.drops_rows or asked.intersection(mapper.schema().names):
                asked.update(mapper.text_fields)
                needed.insert(0, mapper)
        return Chain(tuple(needed))

    def map_frame(self, frame: Any, meta_dtypes: Any = None) -> Any:
        """Run every mapper over one plain frame, with shared tokens."""
        known = self.meta_dtypes(frame) if meta_dtypes is None else meta_dtypes
        with shared_tokens():
            for mapper, own in zip(self.mappers, known, strict=True):
                frame = mapper.map_frame(frame, own)
        return frame

    def _refuse_collisions(self) -> None:
        counts = Counter(name for mapper in self.mappers for name in mapper.schema().names)
        repeated = sorted(name for name, count in counts.items() if count > 1)
        if repeated:
            names = [m.__name__ for m in self.mappers if set(m.schema().names) & set(repeated)]
            raise ValueError(
                f"{' and '.join(names)} both write {repeated}: give each mapper output names of "
                "its own, such as label_field="
            )


def _distinct(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for several in names for name in several))
