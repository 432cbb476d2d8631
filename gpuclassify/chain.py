"""Several mappers in one pass: one read of each partition, and each text tokenized once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpuclassify.partition_map import PartitionMap, TextMap


def classify(dataset: Any, mappers: Sequence[PartitionMap]) -> Any:
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

    Returns
    -------
    same type as `dataset`
        Lazy for Dask input, computed for a plain frame.

    Raises
    ------
    TypeError
        No sequence of mappers.
    ValueError
        None at all, or two of them write the same column.

    Examples
    --------
    >>> quality, domain = QualityClassifier(filter_by="High"), DomainClassifier()  # doctest: +SKIP
    >>> ddf = classify(ddf, [quality, domain])  # doctest: +SKIP
    """
    if isinstance(mappers, PartitionMap):
        raise TypeError(
            f"classify() takes a list of mappers, got one {type(mappers).__qualname__}: "
            "pass it in a list, or call it with the dataset"
        )
    mappers = tuple(_flat(mappers))
    for mapper in mappers:
        if not isinstance(mapper, PartitionMap):
            raise TypeError(
                f"classify() got a {type(mapper).__qualname__} among the mappers: "
                "pass classifiers or embedders, such as DomainClassifier()"
            )
    if not mappers:
        raise ValueError("classify() got no mapper: pass at least one, such as DomainClassifier()")
    return Chain(mappers)(dataset)


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
        return "+".join(mapper.__name__ for mapper in self.mappers)

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        return ("Chain", self.mappers)

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

    def announced(self, frame: Any) -> tuple[Any, ...]:
        """What each mapper must know of the meta that it sees."""
        known = []
        for mapper in self.mappers:
            known.append(mapper.announced(frame))
            frame = mapper.meta(frame)
        return tuple(known)

    def map_frame(self, frame: Any, announced: Any = None) -> Any:
        """Run every mapper over one plain frame, with shared tokens."""
        from gpuclassify.tokenizing.token_cache import shared_tokens

        known = self.announced(frame) if announced is None else announced
        with shared_tokens():
            for mapper, own in zip(self.mappers, known, strict=True):
                frame = mapper.map_frame(frame, own)
        return frame

    def _refuse_collisions(self) -> None:
        writers = [mapper for mapper in self.mappers if isinstance(mapper, TextMap)]
        counts = Counter(name for mapper in writers for name in mapper.schema().names)
        repeated = sorted(name for name, count in counts.items() if count > 1)
        if repeated:
            names = [m.__name__ for m in writers if set(m.schema().names) & set(repeated)]
            raise ValueError(
                f"{' and '.join(names)} both write {repeated}: give each mapper output names of "
                "its own, such as label_field="
            )
