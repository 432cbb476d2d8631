"""Route: run one of several mappers on each row, selected by a column such as the language."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from gpuclassify.frames import Frame, backend_of, is_text, name_row
from gpuclassify.mapping.columns import check_are_new, check_is_there, check_room
from gpuclassify.mapping.heads import take
from gpuclassify.mapping.partition_map import CODE, PartitionMap
from gpuclassify.mapping.stage_counts import StageCounts
from gpuclassify.mapping.text_mapper import TextMapper
from gpuclassify.models.checkpoint import some_of
from gpuclassify.settings.code_digest import value_digest
from gpuclassify.settings.declared import Declared
from gpuclassify.workers.run_context import current_run, run_context

_UNKNOWN = "__UNKNOWN_CATEGORIES__"  # Dask's marker of unknown categories
# By type of the keys: test of the column's Arrow type, and the type's name in messages.
_COLUMNS: dict[type, tuple[Any, str]] = {
    str: (is_text, "texts"),
    bool: (pa.types.is_boolean, "booleans"),
    # Integers with nulls may have become floats.
    int: (lambda kind: pa.types.is_integer(kind) or pa.types.is_floating(kind), "integers"),
}


@dataclass(frozen=True)
class Route(Declared, PartitionMap):
    """Mapper that selects a classifier for each row by the value of a column.

    All classifiers write the same columns. Rows without a classifier get nulls, and pass no filter.
    A partition runs each model once, loaded models first; a model without rows is not loaded.

    Parameters
    ----------
    by : str
        Column of texts, integers or booleans, such as a language. An earlier classifier of the
        same `classify` call or job may write it.
    to : dict
        Classifiers or embedders by value of the column. Values are not normalized.
    otherwise : classifier or embedder, optional
        Mapper for all other values, including null. Default: none, so that outputs are null.

    Raises
    ------
    TypeError
        A key is not str, int or bool, keys have several types, or a value is not a mapper.
    ValueError
        `to` is empty.

    Examples
    --------
    >>> german = DistributedDataClassifier(model="quality-de", label_field="q")  # doctest: +SKIP
    >>> french = DistributedDataClassifier(model="quality-fr", label_field="q")  # doctest: +SKIP
    >>> route = Route(by="language", to={"deu_Latn": german, "fra_Latn": french})  # doctest: +SKIP
    >>> ddf = classify(ddf, [LanguageIdentifier(), route])  # doctest: +SKIP
    """

    by: str = field(metadata={"what": "a column name", "least": 1})
    to: Mapping[Any, TextMapper] = field(hash=False)
    otherwise: TextMapper | None = None

    def check_together(self) -> None:
        """Raise TypeError or ValueError unless `to` maps values of one type to mappers."""
        to = self.to
        if not isinstance(to, Mapping):
            raise TypeError(f"to={to!r} is a {type(to).__name__}: pass a dict of value to mapper")
        if not to:
            raise ValueError('to={} names no value: pass at least one, as in {"deu_Latn": mapper}')
        kinds = {type(key): f"{key!r} ({type(key).__name__})" for key in to}
        if len(kinds) > 1 or not kinds.keys() <= _COLUMNS.keys():
            shown = ", ".join(kinds.values())
            raise TypeError(
                f"to= has keys {shown}: pass str, int or bool, as the column holds them"
            )
        for name, mapper in _named(to, self.otherwise):
            if not isinstance(mapper, TextMapper):
                got, cure = f"a {type(mapper).__qualname__}", "pass one classifier or embedder"
                if isinstance(mapper, type):
                    got, cure = f"the class {mapper.__qualname__}", f"write {mapper.__qualname__}()"
                raise TypeError(
                    f"a Route got {got} for {name}: {cure}; for several, one Route after another"
                )

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        to = [(key, self.to[key]) for key in sorted(self.to)]
        return "Route", value_digest((self.by, to, self.otherwise))

    def digest(self) -> dict[str, Any]:
        """Return the digests of all mappers by name, such as "to deu_Latn full settings".

        "code" is a dict of versions and digests of all mappers' code, with such names, too. The
        setting `by` is only in `describe`.
        """
        digests: dict[str, Any] = {CODE: {}}
        for name, mapper in _named(self.to, self.otherwise):
            found = mapper.digest()
            digests[CODE] |= {f"{name} {part}": known for part, known in found.pop(CODE).items()}
            digests |= {f"{name} {part}": known for part, known in found.items()}
        return digests

    @property
    def members(self) -> tuple[TextMapper, ...]:
        """Distinct mappers of `to` and `otherwise`, in order."""
        return tuple(dict.fromkeys(mapper for _, mapper in _named(self.to, self.otherwise)))

    @property
    def read_fields(self) -> tuple[str, ...]:
        """Names of the column `by` and of the columns that the mappers read."""
        return (self.by, *super().read_fields)

    def code(self, show: Callable[[Any], str] = repr) -> str:
        """Return the constructor call as Python code; `show` formats each mapper's settings."""
        to = ", ".join(f"{key!r}: {mapper.code(show)}" for key, mapper in self.to.items())
        rest = "" if self.otherwise is None else f", otherwise={self.otherwise.code(show)}"
        return f"Route(by={self.by!r}, to={{{to}}}{rest})"

    def describe(self) -> dict[str, Any]:
        """Return `by`, and each mapper's repr and model revision (commit or digest), by name.

        Names are such as "to deu_Latn" and "to deu_Latn model_revision". A revision is None if the
        model cannot be reached.
        """
        described: dict[str, Any] = {"by": self.by}
        for name, mapper in _named(self.to, self.otherwise):
            described[name] = repr(mapper)
            described[f"{name} model_revision"] = mapper.describe().get("model_revision")
        return described

    def schema(self) -> pa.Schema:
        """Return the Arrow schema of the new columns, which is the same for all mappers."""
        return self.members[0].schema()

    def meta(self, frame: Frame) -> Frame:
        """Return an empty frame with the columns and dtypes of the result for `frame`."""
        return self.members[0].meta(frame)

    def meta_dtypes(self, frame: Frame) -> Any:
        """Return the dtype of new string columns in Dask's meta, to pass to `map_frame`."""
        return self.members[0].meta_dtypes(frame)

    def check(self, frame: Frame) -> None:
        """Raise an error unless all mappers can read the frame and write the same columns.

        Columns must also be in the same order and of the same types. The frame must have the column
        `by`, with values that can equal the keys of `to`; no mapper may write it.
        """
        check_is_there(self.by, list(frame.columns), "by", "column")
        self._values(frame.iloc[:0])
        check_are_new(self.schema().names, list(frame.columns), (self.by,), overwrite=True)
        first, *others = ([f"{f.name}: {f.type}" for f in m.schema()] for m in self.members)
        for mapper, columns in zip(self.members[1:], others, strict=True):
            if columns != first:  # the order matters, too
                one = [column for column in first if column not in columns] or first
                other = [column for column in columns if column not in first] or columns
                raise ValueError(
                    f"a Route needs mappers of the same columns: {self.members[0]!r} writes "
                    f"{some_of(one)} where {mapper!r} writes {some_of(other)}: make them alike, "
                    "such as with label_field= and score_field="
                )
        for mapper in self.members:
            mapper.check(frame)

    def check_after(self, earlier: Sequence[PartitionMap]) -> None:
        """Raise ValueError if a key of `to` is not a label of the classifier that writes `by`.

        No row would ever have such a key. Mappers before the last one that is not row-wise are not
        checked, because that may change labels.
        """
        for mapper in reversed(earlier):
            for text_mapper in mapper.text_mappers():
                try:
                    _check_labels(text_mapper, self.by, self.to)
                except ValueError as err:
                    raise ValueError(f"to= of the Route by {self.by!r}: {err}") from err
            if not mapper.is_row_wise:  # such a mapper may change labels
                return

    def parts_of(self, frame: Frame) -> Iterable[tuple[TextMapper, Frame]]:
        """Return pairs of each mapper and a frame of the rows that it runs on, which may be empty.

        If the frame lacks the column `by`, each mapper is paired with the whole frame.
        """
        if self.by not in frame.columns:
            return [(mapper, frame) for mapper in self.members]
        take = backend_of(frame).take_rows
        return [(mapper, take(frame, mask)) for mapper, mask in self._masks(frame)]

    def _masks(self, frame: Frame) -> Iterator[tuple[TextMapper, np.ndarray]]:
        coded, numbers = (
            self._values(frame),
            {mapper: number for number, mapper in enumerate(self.members)},
        )
        by_key = {key: numbers[mapper] for key, mapper in self.to.items()}
        rest = -1 if self.otherwise is None else numbers[self.otherwise]
        by_code = [by_key.get(value, rest) for value in coded.dictionary.to_pylist()]
        codes = coded.indices.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
        by_row = np.array([*by_code, rest])[codes]  # the last entry is for null, code -1
        yield from ((mapper, by_row == number) for mapper, number in numbers.items())

    def _values(self, frame: Frame) -> pa.DictionaryArray:
        """Return the column `by`, dictionary-encoded; raise TypeError if its type fits no key."""
        values = backend_of(frame).list_array(frame, self.by)
        coded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
        key, kind = next(iter(self.to)), coded.type.value_type
        can_hold, name = _COLUMNS[type(key)]
        is_known = not pa.types.is_null(kind) and _UNKNOWN not in coded.dictionary.to_pylist()
        if is_known and not can_hold(kind):
            raise TypeError(
                f"column {self.by!r} holds {kind}, and the keys of to= are {name}, such as "
                f"{key!r}, which no row would equal: convert one of the two"
            )
        return coded

    def map_frame(self, frame: Frame, meta_dtypes: object = None) -> Any:
        """Run on each row the mapper for its value of `by`; return the frame with the new columns.

        Rows without a mapper get nulls, and are dropped if the mappers drop rows; in a
        `keep_field`, they get False.
        """
        backend, schema, stages = backend_of(frame), self.schema(), current_run().stages
        string_dtype = self.meta_dtypes(frame) if meta_dtypes is None else meta_dtypes
        has_filters = any(mapper.options.filters for mapper in self.members)
        keep, indices_in_tables = np.full(len(frame), not has_filters), np.full(len(frame), -1)
        tables, counted = [schema.empty_table()], {}
        visits = [visit for visit in self._masks(frame) if visit[1].any()]
        # In a fixed order, models that do not fit into memory together would evict each other.
        visits.sort(key=lambda visit: (not visit[0].runner.is_loaded, visit[0].options.model))
        if backend.MOST_NUMBERS is not None:
            for mapper in self.members:
                check_room(mapper.heads, len(frame), backend.MOST_NUMBERS)
        for mapper, mask in visits:
            rows = np.flatnonzero(mask)
            counts = StageCounts(stages.most_examples) if stages else None
            texts = mapper.read_texts(backend.take_rows(frame[list(mapper.text_fields)], mask))
            with run_context(stages=counts):
                arrays, kept = mapper.compute(texts, functools.partial(_name_row, frame, rows))
            indices_in_tables[rows] = np.arange(len(rows)) + sum(map(len, tables))
            keep[rows] = True if kept is None else kept
            tables.append(pa.table(arrays).cast(schema))
            keys = [str(key) for key, target in self.to.items() if target == mapper]
            counted[f"{self.by}={some_of(keys, 3)}" if keys else "otherwise"] = counts
        if stages is not None:
            stages.add_routed(self, counted, int((indices_in_tables < 0).sum()), has_filters)
        table, indices = (
            pa.concat_tables(tables),
            pa.array(indices_in_tables, mask=indices_in_tables < 0),
        )
        new = {f.name: take(table[f.name], indices) for f in schema}
        # The bool column `keep_field` is never null.
        new |= {f.name: new[f.name].fill_null(False) for f in schema if not f.nullable}
        result = backend.with_columns(frame, new, schema, string_dtype)
        return backend.take_rows(result, keep) if self.drops_rows else result


def _name_row(frame: Frame, rows: np.ndarray, row: int) -> str:
    return name_row(frame, int(rows[row]))


def _check_labels(mapper: TextMapper, column: str, labels: Iterable[Any]) -> None:
    """Raise ValueError if `column` has the mapper's labels, which lack one of `labels`."""
    if mapper.options.plans_without_model or mapper.model.is_readable():
        for head in mapper.heads:
            if head.label_field == column:
                head.check_labels(*labels)


def _named(to: Mapping[Any, TextMapper], otherwise: TextMapper | None) -> list[tuple[str, Any]]:
    """Return (name, mapper) pairs with names for messages, "to KEY" and "otherwise"."""
    rest = [] if otherwise is None else [("otherwise", otherwise)]
    return [*((f"to {key}", mapper) for key, mapper in to.items()), *rest]
