"""PartitionMap: base class of mappers, and their mapping over the partitions of a Dask frame."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import pyarrow as pa

from gpuclassify._version import installed_versions
from gpuclassify.frames import Frame, LazyFrame, backend_of, frame_of_texts
from gpuclassify.pages.sections import ReportPart
from gpuclassify.settings.code_digest import PACKAGE, lasting, value_digest
from gpuclassify.settings.declared import Declared
from gpuclassify.settings.signatures import Public
from gpuclassify.workers.retire import message_first, retire_on_broken_device

Item = TypeVar("Item")
# Keys of `PartitionMap.digest`.
CODE, FULL_SETTINGS, MODEL_DESCRIPTION = "code", "full settings", "model description"


class PartitionMap(Public):
    """Base class of mappers: functions of a dataframe that add columns and may drop rows.

    A Dask frame is mapped lazily, a pandas or cudf frame at once. The result has the same dataframe
    library, unless `moves_frames`. Order, index, divisions, partitions and other columns are
    unchanged.

    Subclasses are immutable, small to pickle and hold no model, lock or open file: Dask ships them
    to workers and may run any partition again.
    """

    public_names: ClassVar[tuple[str, ...]] = ("describe", "schema")

    @property
    def __name__(self) -> str:
        """Name of this mapper's tasks in Dask's keys and dashboard: the class name, by default."""
        return type(self).__qualname__

    # Description.

    @property
    def members(self) -> tuple[PartitionMap, ...]:
        """Mappers that this one runs, such as the mappers of a chain; empty for a single mapper."""
        return ()

    def text_mappers(self) -> tuple[Any, ...]:
        """Return the mappers that run models (`TextMapper`), among this mapper and its members."""
        return tuple(mapper for member in self.members for mapper in member.text_mappers())

    @property
    def text_fields(self) -> tuple[str, ...]:
        """Names of the text columns that are read."""
        return _distinct(member.text_fields for member in self.members)

    @property
    def main_text_fields(self) -> tuple[str, ...]:
        """Names of the columns that get the texts if the mapper is called with a list of texts."""
        return _distinct(member.main_text_fields for member in self.members)

    @property
    def read_fields(self) -> tuple[str, ...]:
        """Names of all columns that are read, including `text_fields`."""
        return _distinct([self.text_fields, *(member.read_fields for member in self.members)])

    @property
    def is_row_wise(self) -> bool:
        """Whether new columns and filters depend only on a row's own `read_fields`."""
        return bool(self.members) and all(member.is_row_wise for member in self.members)

    @property
    def is_slow(self) -> bool:
        """Whether it may take minutes per megabyte of text, so that jobs use smaller partitions."""
        return any(member.is_slow for member in self.members)

    @property
    def moves_frames(self) -> bool:
        """Whether the result may have another dataframe library, such as cudf for pandas."""
        return any(member.moves_frames for member in self.members)

    @property
    def drops_rows(self) -> bool:
        """Whether the result may have fewer rows: True by default for a mapper without members."""
        return not self.members or any(member.drops_rows for member in self.members)

    def row_filter(self) -> Any:
        """Return this mapper as a `RowFilter` if it only drops rows by their columns, else None."""
        return None

    def keeping(self, field: str) -> PartitionMap | None:
        """Return a copy that drops no row, but writes whether a row passes its filters to a column.

        `field` names this bool column. None if the mapper does not support it, as by default.
        Raises ValueError if it does, but has no filter.
        """
        return None

    def schema(self) -> pa.Schema:
        """Return the Arrow schema of the columns that the mapper adds or overwrites.

        It has only the columns that are known without a frame; by default, those of `members`.
        """
        return pa.schema([field for member in self.members for field in member.schema()])

    @property
    def report_parts(self) -> tuple[ReportPart, ...]:
        """Objects that add sections and numbers about this mapper to a job's HTML report."""
        return _distinct(member.report_parts for member in self.members)

    def describe(self) -> dict[str, Any]:
        """Return the settings by name as JSON values, without secrets, to compare runs.

        Empty by default.
        """
        return {}

    def origin(self) -> dict[str, Any]:
        """Return facts on the origin of the mapper's columns by name, for a dataset card.

        They are the class name as ``kind``, and ``settings``. A mapper with a model adds ``model``,
        ``commit``, ``licence`` and ``citation``.
        """
        return {"kind": self.__name__, "settings": self.describe()}

    @property
    def libraries(self) -> tuple[str, ...]:
        """Names of the packages whose versions may change results; empty by default."""
        return ()

    def digest(self) -> dict[str, Any]:
        """Return digests that differ if the mapper may return other results, by name.

        "full settings" is a digest, and "code" the dict of `code_parts`. Mappers with models add
        "model description".
        """
        state = self.identity() if isinstance(self, Declared) else lasting(type(self), vars(self))
        return {FULL_SETTINGS: value_digest(state), CODE: self.code_parts()}

    def code_parts(self) -> dict[str, str]:
        """Return the class name, a digest of its source, and versions of its libraries, by name.

        Only classes outside this package have a "source". Versions lack labels such as "+cpu".
        """
        owner = type(self)
        parts = {"class": owner.__qualname__}
        if owner.__module__.partition(".")[0] != PACKAGE:
            parts["source"] = value_digest(owner)
        versions = installed_versions(*self.libraries)
        return parts | {name: version.partition("+")[0] for name, version in versions.items()}

    def code(self) -> str:
        """Return the constructor call as Python source code, with long values in full."""
        return repr(self)

    def narrowed(self, columns: Iterable[str]) -> PartitionMap | None:
        """Return a mapper that computes these result `columns` at least, and drops the same rows.

        `columns` may include input columns. None if the mapper adds none and drops no row.
        """
        is_needed = self.drops_rows or not set(columns).isdisjoint(self.schema().names)
        return self if is_needed else None

    def after(self, earlier: PartitionMap) -> PartitionMap | None:
        """Return one mapper that runs `earlier`, then this one; None if that saves nothing."""
        return None

    # `check`, `prepare` and `meta` run in the client, `map_frame` on a worker.

    @abstractmethod
    def check(self, frame: Frame) -> None:
        """Raise an error unless the mapper can run on the frame, which may be empty."""

    def check_after(self, earlier: Sequence[PartitionMap]) -> None:
        """Raise an error unless this mapper can use the columns that `earlier` mappers write."""
        return

    def prepare(self) -> None:
        """Pin models to revisions and check their files, in the client, before any task runs."""
        for member in self.members:
            member.prepare()

    @abstractmethod
    def meta(self, frame: Frame) -> Frame:
        """Return an empty frame with the columns and dtypes of the result, as Dask's meta."""

    def meta_dtypes(self, frame: Frame) -> Any:
        """Return dtypes that `map_frame` needs but cannot derive from one partition, or None.

        `frame` is Dask's meta of the input. An example is the dtype of new string columns.
        """
        return None

    @abstractmethod
    def map_frame(self, frame: Frame, meta_dtypes: object = None) -> Any:
        """Return the result for a pandas or cudf frame, such as one partition on a worker.

        `meta_dtypes` is a result of the method `meta_dtypes`; None computes it for this frame.
        """

    # Integration with Dask.

    def __call__(self, dataset: Any) -> Any:
        """Run the mapper over a dataset: add its columns, and drop rows that its filters refuse.

        Parameters
        ----------
        dataset : dask.dataframe.DataFrame, pandas.DataFrame, cudf.DataFrame, str or list of str
            Frame with the text column, or texts; None is null.

        Returns
        -------
        same type as `dataset`
            Lazy for Dask input, computed for other frames; a pandas frame for texts.

        Raises
        ------
        TypeError
            The dataset is not a frame, or the text column does not hold strings.
        ValueError
            The text column is missing, or an output column exists already and may not be replaced.
        CheckpointError
            The model does not fit the mapper.
        """
        if self.main_text_fields and isinstance(dataset, (str, list, tuple)):
            dataset = frame_of_texts(dataset, self.main_text_fields)
        if hasattr(type(dataset), "mapped_by"):  # a dataset with a frame, such as Curator's
            return dataset.mapped_by(self)
        is_lazy = is_dask_frame(dataset)
        frame = dataset._meta if is_lazy else dataset
        backend_of(frame)  # raises unless it is a frame
        self.check(frame)
        self.prepare()
        return self.map_lazily(dataset) if is_lazy else self.map_frame(dataset)

    def map_lazily(self, dataset: LazyFrame) -> Any:
        """Return a Dask frame that runs the mapper on each partition; `check` must have passed."""
        frame = dataset._meta
        meta, known = self.meta(frame), self.meta_dtypes(frame)
        mapped = dataset.map_partitions(map_partition, self, known, meta=meta, token=self.__name__)
        if not (self.is_row_wise and frame.columns.is_unique):
            return mapped
        try:
            from gpuclassify.mapping.expression import optimizable
        except ImportError:  # this version of Dask lacks a private name
            return mapped
        return optimizable(mapped)


@message_first
@retire_on_broken_device
def map_partition(
    frame: Frame, mapper: PartitionMap, meta_dtypes: object, columns: list[str] | None = None
) -> Any:
    """Run the mapper on one partition in a Dask task, and return its result.

    Only `columns` of the result are returned; None returns all.
    """
    mapped = mapper.map_frame(frame, meta_dtypes)
    return mapped if columns is None else mapped[columns]


class RowWiseMap(PartitionMap):
    """Base class of mappers whose new columns depend only on the same row.

    By default they drop no rows. Mappers with the same class and settings are equal.
    """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), self.read_fields))

    @property
    def is_row_wise(self) -> bool:
        """Always True, because a row's results do not depend on other rows."""
        return True

    @property
    def drops_rows(self) -> bool:
        """Whether the result may have fewer rows; False by default."""
        return False


def is_dask_frame(dataset: object) -> bool:
    """Return whether a dataset is a Dask DataFrame. Raises TypeError for other Dask collections."""
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
