"""Stages that a job runs on each part: classifiers, embedders, callables, changes of backend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from gpuclassify.frames import Frame, LazyFrame, backend_of, import_cudf
from gpuclassify.jobs.ledger.records import FUNCTION
from gpuclassify.mapping.chain import Chain
from gpuclassify.mapping.partition_map import CODE, PartitionMap
from gpuclassify.settings.checks import BACKENDS, check_choice, check_ordered
from gpuclassify.settings.code_digest import value_digest
from gpuclassify.settings.declared import Declared


@dataclass(frozen=True)
class Function(PartitionMap):
    """Stage that calls a user's function, which gets and returns a pandas or cuDF frame."""

    function: Callable[[Frame], Frame]

    @property
    def __name__(self) -> str:
        """Name of the callable, on Dask's dashboard and in messages."""
        return getattr(self.function, "__qualname__", type(self.function).__qualname__)

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        # Dask identifies importable functions by name alone, although their code may change, and
        # others by the name and lines of their file, which may change while their code does not.
        return (self.__name__, value_digest(self.function))

    def digest(self) -> dict[str, Any]:
        """Return ``{"code": {"function": digest}}``, with a digest of the function's code."""
        return {CODE: {FUNCTION: value_digest(self.function)}}

    @property
    def is_slow(self) -> bool:
        """Whether the stage may be slow: always True, because a callable may run a model."""
        return True

    def check(self, frame: Frame) -> None:
        """Raise ValueError unless the function accepts `frame` without rows, as a part may be."""
        try:
            self.meta(frame)
        except Exception as err:
            raise ValueError(
                f"stage {self.__name__} fails for a frame without rows, which a part may be: {err}"
            ) from err

    def meta(self, frame: Frame) -> Frame:
        """Call the function on `frame` without rows, and return its result without rows."""
        return self.map_frame(frame.iloc[:0]).iloc[:0]

    def map_frame(self, frame: Frame, meta_dtypes: object = None) -> Frame:
        """Call the function; raise TypeError unless it returns a frame of the same library."""
        result = self.function(frame)
        if type(result) is not type(frame):
            raise TypeError(
                f"stage {self.__name__} got a {type(frame).__qualname__} and returned a "
                f"{type(result).__qualname__}: it must return a frame of the same kind"
            )
        return result


@dataclass(frozen=True)
class ToBackend(PartitionMap):
    """Stage that moves each part to another dataframe library, on the worker.

    Attributes
    ----------
    name : {"pandas", "cudf"}
        The library that later stages get.
    """

    name: str

    def __post_init__(self) -> None:
        check_choice("backend", self.name, BACKENDS)

    @property
    def __name__(self) -> str:
        """Name of the stage, on Dask's dashboard and in messages."""
        return f"ToBackend({self.name!r})"

    def check(self, frame: Frame) -> None:
        """Accept every frame, because every frame can be moved."""

    def meta(self, frame: Frame) -> Frame:
        """Return the frame without rows, not moved, because the client may lack cudf."""
        return frame.iloc[:0]

    @property
    def moves_frames(self) -> bool:
        """Whether frames change their library: always True."""
        return True

    def map_lazily(self, dataset: Any) -> LazyFrame:
        """Return a Dask frame moved to the library `name`, or the same one if it is there."""
        if self._is_there(dataset._meta):
            return dataset
        if self.name == "cudf":
            import_cudf()  # explains a missing cudf
        return dataset.to_backend(self.name)

    def map_frame(self, frame: Any, meta_dtypes: object = None) -> Frame:
        """Return the same rows in a frame of the library `name`, or `frame` if it is one."""
        if self._is_there(frame):
            return frame
        if self.name == "pandas":
            return frame.to_pandas()
        return import_cudf().from_pandas(frame)

    def _is_there(self, frame: Frame) -> bool:
        return backend_of(frame).__name__.endswith(f".{self.name}")


def as_chain(stages: Iterable[object]) -> Chain:
    """Join stages into one mapper, which runs them in order.

    Functions from a frame to a frame become `Function` stages. Raises TypeError for objects other
    than mappers and functions, and if `stages` is a set.
    """
    check_ordered("stages", stages)
    return Chain(tuple(_iterate_mappers(stages)))


def describe(stage: PartitionMap) -> dict[str, Any]:
    """Return a stage's settings and digests as JSON values by name, without secrets."""
    return {"stage": stage.__name__, **stage.describe(), **stage.digest()}


def describe_settings(
    heading: str, settings: Declared, mappers: Iterable[PartitionMap] = ()
) -> dict[str, dict[str, Any]]:
    """Describe a recipe's settings that change results; a run with other ones is another job.

    Returns dicts of JSON values by heading: under `heading` the plain settings, under the name of
    each setting that is a function its description, and under the ``__name__`` of each of
    `mappers`, which are prepared, its description. Settings that are mappers are left out.
    """
    described: dict[str, dict[str, Any]] = {heading: {}}
    for name, value in settings.identity().items():
        if isinstance(value, PartitionMap):
            continue
        if callable(value):
            described[name] = describe(Function(value))
        else:
            described[heading][name] = [*value] if isinstance(value, tuple) else value
    for mapper in mappers:
        mapper.prepare()
        described[mapper.__name__] = describe(mapper)
    return described


def shown(stage: Any) -> str:
    """Return a stage or setting as Python code for people; a Dask frame is abbreviated."""
    import dask

    if dask.is_dask_collection(stage):
        return f"<Dask frame of {stage.npartitions} partitions>"
    if isinstance(stage, (PartitionMap, Declared)):
        return stage.code()
    return getattr(stage, "__qualname__", None) or repr(stage)


def import_lines(things: Iterable[object]) -> str:
    """Return the import statements that code with these classes, functions and instances needs.

    Definitions of a script or inside a function cannot be imported, and have no line.
    """
    import dask

    names: dict[str, set[str]] = {}
    things = [*things]
    for thing in [*things]:
        if isinstance(thing, Declared) and not isinstance(thing, PartitionMap):
            things += thing.settings().values()
    stages = [thing for thing in things if isinstance(thing, PartitionMap)]
    things += [mapper for stage in stages for mapper in stage.text_mappers()]
    for thing in things:
        if dask.is_dask_collection(thing):  # no import makes it
            continue
        named = thing if hasattr(thing, "__qualname__") else type(thing)
        # Methods of built-in types, such as `str.lower`, have no module.
        name, home = named.__qualname__, getattr(named, "__module__", "builtins")
        package = home.partition(".")[0]
        if getattr(sys.modules.get(package), name, None) is named:
            home = package
        if home not in ("__main__", "builtins") and "<" not in name:
            names.setdefault(home, set()).add(name)
    lines = [f"from {home} import {', '.join(sorted(names[home]))}" for home in sorted(names)]
    return "\n".join(lines)


def _iterate_mappers(stages: Iterable[object]) -> Iterator[PartitionMap]:
    for stage in stages:
        if isinstance(stage, Chain):
            yield from _iterate_mappers(stage.mappers)
        elif isinstance(stage, PartitionMap):
            yield stage
        elif isinstance(stage, type):
            raise TypeError(
                f"a job got the class {stage.__qualname__} as a stage: write "
                f"{stage.__qualname__}(), with the options that it needs"
            )
        elif callable(stage):
            yield Function(stage)
        else:
            raise TypeError(
                f"a job got a {type(stage).__qualname__} as a stage: pass classifiers, "
                "embedders, or callables from a plain frame to a plain frame"
            )
