"""Run several mappers in one pass over a dataset: `classify`, and its `Chain`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpuclassify.frames import Frame, LazyFrame
from gpuclassify.mapping.partition_map import PartitionMap, is_dask_frame
from gpuclassify.mapping.shared_layers import shared_layers
from gpuclassify.settings.checks import check_count, with_plain_values
from gpuclassify.settings.code_digest import value_digest
from gpuclassify.tokenizing.prefetch import shared_tokens


@with_plain_values
def classify(dataset: Any, mappers: Sequence[PartitionMap], *, limit: int | None = None) -> Any:
    """Run several mappers over a dataset in one pass.

    ``classify(ddf, [a, b])`` means ``b(a(ddf))``: rows that `a` drops are never scored by `b`.
    Each partition is one task. Mappers with equal tokenizers share a text's tokens, if they cut it
    at the same token or not at all. Models stay loaded together if they fit in memory, else they
    take turns.

    Parameters
    ----------
    dataset : dask.dataframe.DataFrame, pandas.DataFrame, cudf.DataFrame, str or list of str
        Frame with the text columns, or texts; None is null.
    mappers : sequence of PartitionMap
        Classifiers and embedders, in the order in which they run.
    limit : int, optional
        Maximum number of rows to classify, from the first one. Only the first partition of a Dask
        frame is read. Default: all.

    Returns
    -------
    same type as `dataset`
        Lazy for Dask input, computed for other frames; a pandas frame for texts.

    Raises
    ------
    TypeError
        `mappers` is not a sequence of mappers, or `limit` is not an integer.
    ValueError
        There is no mapper, two of them write the same column, or `limit` is below 1.

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
    mappers = joined(mappers).mappers
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
        dataset = _first_rows(dataset, limit)
    return Chain(mappers)(dataset)


def _first_rows(dataset: Any, limit: int) -> Any:
    if hasattr(type(dataset), "mapped_by"):  # a dataset with a frame, such as Curator's
        return dataset.mapped_by(lambda frame: _first_rows(frame, limit))
    if isinstance(dataset, (list, tuple)):
        return dataset[:limit]
    if hasattr(dataset, "head"):  # a frame; a str is a single text
        return dataset.head(limit, **({"compute": False} if is_dask_frame(dataset) else {}))
    return dataset


def joined(mappers: Iterable[Any]) -> Chain:
    """Return one chain of the mappers; a chain among them is replaced by its members."""
    return Chain(tuple(_flat(mappers)))


def _flat(mappers: Iterable[Any]) -> Iterator[Any]:
    for mapper in mappers:
        if isinstance(mapper, Chain):
            yield from _flat(mapper.mappers)
        else:
            yield mapper


@dataclass(frozen=True)
class Chain(PartitionMap):
    """Mapper that runs other mappers in order, each on the frame that the previous one returned."""

    mappers: tuple[PartitionMap, ...]

    @property
    def __name__(self) -> str:
        """Names of the mappers joined by ``+``, shown on Dask's dashboard."""
        return "+".join(mapper.__name__ for mapper in self.mappers) or "Chain"

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return "Chain", value_digest(self.mappers)

    @property
    def members(self) -> tuple[PartitionMap, ...]:
        """Mappers in run order."""
        return self.mappers

    def check(self, frame: Frame) -> None:
        """Raise an error unless the mappers can run in order, and write distinct columns."""
        counts = Counter(name for mapper in self.mappers for name in mapper.schema().names)
        if repeated := sorted(name for name, count in counts.items() if count > 1):
            names = [m.__name__ for m in self.mappers if set(m.schema().names) & set(repeated)]
            raise ValueError(
                f"{' and '.join(names)} both write {repeated}: give each mapper output names of "
                "its own, such as label_field="
            )
        for index, mapper in enumerate(self.mappers):
            mapper.check(frame)
            mapper.check_after(self.mappers[:index])
            frame = mapper.meta(frame)

    def meta(self, frame: Frame) -> Frame:
        """Return an empty frame with the columns and dtypes that the chain returns for `frame`."""
        for mapper in self.mappers:
            frame = mapper.meta(frame)
        return frame

    def meta_dtypes(self, frame: Frame) -> tuple[Any, ...]:
        """Return each mapper's `meta_dtypes`, for the frame that it gets in the chain."""
        known = []
        for mapper in self.mappers:
            known.append(mapper.meta_dtypes(frame))
            frame = mapper.meta(frame)
        return tuple(known)

    def map_lazily(self, dataset: LazyFrame) -> Any:
        """Return a Dask frame that runs the mappers on each partition of `dataset`."""
        if not self.moves_frames:
            return super().map_lazily(dataset)
        for mapper in self.mappers:
            dataset = mapper.map_lazily(dataset)
        return dataset

    def narrowed(self, columns: Iterable[str]) -> Chain | None:
        """Return a chain of the mappers that drop rows or that `columns` need; None without any."""
        asked = set(columns)
        needed: list[PartitionMap] = []
        for mapper in reversed(self.mappers):
            if mapper.drops_rows or asked.intersection(mapper.schema().names):
                asked.update(mapper.read_fields)
                needed.insert(0, mapper)
        return Chain(tuple(needed)) if needed else None

    def after(self, earlier: PartitionMap) -> Chain:
        """Return one chain that runs `earlier`, then this chain, in one task per partition."""
        return joined([earlier, self])

    def map_frame(self, frame: Frame, meta_dtypes: object = None) -> Any:
        """Run all mappers in order on a pandas or cudf frame, and return the result."""
        known: Any = self.meta_dtypes(frame) if meta_dtypes is None else meta_dtypes
        with shared_tokens(), shared_layers(self.mappers):
            for mapper, dtypes in zip(self.mappers, known, strict=True):
                frame = mapper.map_frame(frame, dtypes)
        return frame
