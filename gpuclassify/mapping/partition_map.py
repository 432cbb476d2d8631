"""The Dask boundary: functions of one frame, mapped lazily over a dataset."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import pyarrow as pa

from gpuclassify.frames import Frame, LazyFrame, backend_of, frame_of_texts
from gpuclassify.pages.sections import ReportPart
from gpuclassify.settings.signatures import Public
from gpuclassify.workers.retire import message_first, retire_on_broken_device

Item = TypeVar("Item")


class PartitionMap(Public):
    """Frame to frame function that adds columns and may drop rows, and does nothing else.

    A lazy Dask frame gives a lazy Dask frame of the same backend, a plain pandas or cudf frame is
    mapped at once. Rows, order, index, divisions, partitions and the other columns are unchanged.

    Subclasses are immutable, small to pickle and hold no model, lock or open file: Dask ships them
    to workers and may run any partition again.
    """

    public_names: ClassVar[tuple[str, ...]] = ("describe", "schema")

    @property
    def __name__(self) -> str:
        """Name of the tasks on Dask's dashboard; without it an address would be part of the key."""
        return type(self).__qualname__

    # Description.

    @property
    def members(self) -> tuple[PartitionMap, ...]:
        """Mappers that this one runs, if it is made of several."""
        return ()

    def text_mappers(self) -> tuple[Any, ...]:
        """Return the `TextMapper`s within it; itself, if it is one."""
        return tuple(mapper for member in self.members for mapper in member.text_mappers())

    @property
    def text_fields(self) -> tuple[str, ...]:
        """Columns of text that are read."""
        return _distinct(member.text_fields for member in self.members)

    @property
    def main_text_fields(self) -> tuple[str, ...]:
        """Columns among `text_fields` that get the text where texts are passed without a frame."""
        return _distinct(member.main_text_fields for member in self.members)

    @property
    def read_fields(self) -> tuple[str, ...]:
        """Columns that are read: the `text_fields`, and any others."""
        return _distinct([self.text_fields, *(member.read_fields for member in self.members)])

    @property
    def is_row_wise(self) -> bool:
        """Whether new columns and filters follow from the `read_fields` of each row alone.

        Dask may then leave rows and other columns out before they are mapped.
        """
        return bool(self.members) and all(member.is_row_wise for member in self.members)

    @property
    def moves_frames(self) -> bool:
        """Whether the result may be a frame of another library than `meta` is."""
        return any(member.moves_frames for member in self.members)

    @property
    def drops_rows(self) -> bool:
        """Whether the result may have fewer rows."""
        return not self.members or any(member.drops_rows for member in self.members)

    def row_filter(self) -> Any:
        """Return the `RowFilter` by which the mapper drops rows, None for any other mapper.

        Reading can apply it before any text is read, if the mapper adds no columns.
        """
        return None

    def keeping(self, field: str) -> PartitionMap | None:
        """Return the mapper with a column for its filters' decision in place of dropping rows.

        None if the mapper cannot have one.
        """
        return None

    def schema(self) -> pa.Schema:
        """Return the new columns in order, as far as they are known without a frame."""
        return pa.schema([field for member in self.members for field in member.schema()])

    @property
    def report_parts(self) -> tuple[ReportPart, ...]:
        """Additions to the report of a job."""
        return _distinct(member.report_parts for member in self.members)

    def describe(self) -> dict[str, Any]:
        """Return the settings for people and for comparing two runs: JSON values, no secret."""
        return {}

    def digest(self) -> dict[str, str]:
        """Return a digest that differs for mappers with equal settings, such as other models."""
        from dask.tokenize import tokenize

        return {"code": tokenize(self)}

    def code(self) -> str:
        """Return the call that makes it, however long its settings are."""
        return repr(self)

    def narrowed(self, columns: Iterable[str]) -> PartitionMap | None:
        """Return the mapper that suffices for these columns of the result, and for the same rows.

        None where the input has the columns as they are.
        """
        is_needed = self.drops_rows or not set(columns).isdisjoint(self.schema().names)
        return self if is_needed else None

    def after(self, earlier: PartitionMap) -> PartitionMap | None:
        """Return one mapper that does both, this one last; None where that would save nothing."""
        return None

    # `check`, `prepare` and `meta` run in the client, `map_frame` on a worker.

    @abstractmethod
    def check(self, frame: Frame) -> None:
        """Raise unless `frame` (a plain frame, possibly empty) has the columns that are needed."""

    def check_after(self, earlier: Sequence[PartitionMap]) -> None:
        """Raise unless this mapper can read the output of `earlier` mappers."""
        return

    def prepare(self) -> None:
        """Resolve models in the client, for workers; called once a dataset is passed."""
        for member in self.members:
            member.prepare()

    @abstractmethod
    def meta(self, frame: Frame) -> Frame:
        """Return the empty frame with the result's columns and dtypes, for one of the input's."""

    def meta_dtypes(self, frame: Frame) -> Any:
        """Return the dtypes that `map_frame` cannot derive from a single partition."""
        return None

    @abstractmethod
    def map_frame(self, frame: Frame, meta_dtypes: object = None) -> Any:
        """Map one plain frame, as a worker does with each partition.

        `meta_dtypes` are those of the meta; default: of the frame itself.
        """

    # How it meets Dask.

    def __call__(self, dataset: Any) -> Any:
        """Map over `dataset`.

        Parameters
        ----------
        dataset : dask.dataframe.DataFrame, pandas.DataFrame, cudf.DataFrame, str or list of str
            Frame with the text column; or texts themselves, of which None is null.

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
        if self.main_text_fields and isinstance(dataset, (str, list, tuple)):
            dataset = frame_of_texts(dataset, self.main_text_fields)
        if hasattr(type(dataset), "mapped_by"):  # it holds a frame, as Curator's datasets do
            return dataset.mapped_by(self)
        is_lazy = is_dask_frame(dataset)
        frame = dataset._meta if is_lazy else dataset
        backend_of(frame)  # refuses what is no frame
        self.check(frame)
        self.prepare()
        return self.map_lazily(dataset) if is_lazy else self.map_frame(dataset)

    def map_lazily(self, dataset: LazyFrame) -> Any:
        """Return the lazy frame of a Dask frame that is checked; see `__call__`."""
        frame = dataset._meta
        meta, known = self.meta(frame), self.meta_dtypes(frame)
        mapped = dataset.map_partitions(map_partition, self, known, meta=meta, token=self.__name__)
        if not (self.is_row_wise and frame.columns.is_unique):
            return mapped
        try:
            from gpuclassify.mapping.expression import optimizable
        except ImportError:  # a Dask that lacks the private names which it takes
            return mapped
        return optimizable(mapped)


@message_first
@retire_on_broken_device
def map_partition(
    frame: Frame, mapper: PartitionMap, meta_dtypes: object, columns: list[str] | None = None
) -> Any:
    """Map one partition as a task of Dask, and keep all columns of the result, or some."""
    mapped = mapper.map_frame(frame, meta_dtypes)
    return mapped if columns is None else mapped[columns]


class RowWiseMap(PartitionMap):
    """Base of mappers whose columns follow from each row alone; it drops no row."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), self.read_fields))

    @property
    def is_row_wise(self) -> bool:
        """Always True: a row's results do not depend on other rows."""
        return True

    @property
    def drops_rows(self) -> bool:
        """Whether the result may have fewer rows."""
        return False


def plain_token(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return `parts` normalized for `dask.base.tokenize`.

    Strings are taken literally, so pass full values instead of shortened reprs.
    """
    from dask.base import normalize_token

    return tuple(map(normalize_token, parts))


def is_dask_frame(dataset: object) -> bool:
    """Tell whether `dataset` is a Dask DataFrame; raise TypeError for another Dask collection."""
    import dask

    if not dask.is_dask_collection(dataset):
        return False
    if getattr(getattr(dataset, "_meta", None), "ndim", None) == 2:
        return True
    cure = ".to_frame()" if hasattr(dataset, "to_frame") else ".to_dataframe()"
    raise TypeError(
        f"got a Dask {type(dataset).__name__}: pass a Dask DataFrame (see {cure} of the collection)"
    )


def _distinct(tuples: Iterable[tuple[Item, ...]]) -> tuple[Item, ...]:
    return tuple(dict.fromkeys(item for items in tuples for item in items))
