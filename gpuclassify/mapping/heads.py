"""Heads convert a model's outputs to columns, apply filters, and check that a model matches.

Columns are Arrow arrays, which both dataframe backends accept. Heads of labels and scores are in
`label_heads.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.frames import Texts, is_text
from gpuclassify.mapping.pinned_model import PinnedModel
from gpuclassify.mapping.runners import Outputs
from gpuclassify.mapping.stage_counts import TextOutcomes
from gpuclassify.models.checkpoint import Checkpoint
from gpuclassify.pages.sections import ReportPart

FLOAT32 = pa.float32()
SCORES = pa.list_(FLOAT32)
MOST_NUMBERS = np.iinfo(np.int32).max  # numbers in the lists of one Arrow array

# Values of new columns by name: arrays of numpy or Arrow, or lists, one value per text.
Columns = Mapping[str, Any]


class Head(ABC):
    """Base class of heads, which convert a model's outputs to new columns, and filter rows by them.

    All heads of a mapper get the same outputs. `owner` is the mapper's class name, for messages,
    `options` are the mapper's settings, and `model` describes the model. `outputs` is the slice of
    the model's output dimensions that the head reads.
    """

    label_field: str | None = None  # name of the label column
    # Column that says whether a row passes the filters; if None, other rows are dropped.
    keep_field: str | None = None
    report_parts: ClassVar[tuple[ReportPart, ...]] = ()  # additions to the report of a job

    def __init__(
        self, owner: str, options: Any, model: PinnedModel, outputs: slice = slice(None)
    ) -> None:
        self.owner = owner
        self.options = options
        self.model = model
        self.outputs = outputs

    @property
    def labels(self) -> list[Any]:
        """Labels that a row can get, or names of a regression's outputs; empty by default."""
        return []

    @abstractmethod
    def fields(self) -> list[pa.Field]:
        """Return the Arrow fields (names and types) of the new columns, in column order."""

    @property
    def list_size(self) -> int:
        """Length of the lists of floats in this head's columns; 0 if it is unknown."""
        return self.model.checkpoint.output_count

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError unless the head can convert the model's outputs; no check here."""
        return

    def check_settings(self) -> None:
        """Raise ValueError unless the settings fit this head and the model; no check here."""
        return

    def check_labels(self, *names: Any) -> None:
        """Raise ValueError if one of `names` is not a possible label of a row; no check here."""
        return

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """Convert raw outputs, such as logits, to numbers that can be averaged. Default: unchanged.

        `outputs` has one row per text, or per window (token sequence) of a long text.
        """
        return outputs

    def values(self, outputs: Outputs) -> np.ndarray:
        """Return activated outputs, one row per text, to pass to `columns` and `passes`.

        They are float32 (texts, outputs), aggregated over the windows (token sequences) of a long
        text. A subclass may return any other object that its methods read and whose length is the
        number of texts.
        """
        return outputs.by_text(self.activate, self.outputs)

    @abstractmethod
    def columns(self, values: np.ndarray) -> Columns:
        """Return the new columns by name, with one value per text, from the result of `values`."""

    def arrays(self, values: np.ndarray) -> dict[str, pa.Array]:
        """Return the new columns as Arrow arrays by name; strings may be dictionary-encoded."""
        made, giver = self.columns(values), f"{self.owner}.columns()"
        fields = {field.name: field for field in self.fields()}
        if sorted(made) != sorted(fields):
            raise ValueError(
                f"{giver} gave {sorted(made)}, and new_columns declares {sorted(fields)}: they "
                "must be the same"
            )
        return {
            name: arrow_array(made[name], field, len(values), giver)
            for name, field in fields.items()
        }

    def passes(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """Map the name of each filter in use to the mask of texts that pass it, bool (texts,).

        Empty by default. `values` are the result of the method `values`. Names are reasons to drop
        a text, in `stage_counts.REASONS` or in `reasons` of one of the head's `report_parts`.
        """
        return {}

    # Methods for the report of a job.

    def counts(self, texts: Texts) -> dict[str, Any]:
        """Return counts by name to add to a job's report; empty by default.

        `texts` has the text of each row of a partition, None for null.
        """
        return {}

    def outcomes(
        self,
        values: Any,
        texts: Texts,
        passed: Mapping[str, np.ndarray] | None,
        labels: pa.Array | None,
    ) -> TextOutcomes:
        """Collect each text's passed filters, label and certainty, for a job's report.

        `texts` are the distinct texts, and `values` the result of the method `values` for them.
        `passed` has the masks that `passes` returns, for all heads together; None without filters.
        `labels` is the column of labels; None if there is none.
        """
        return TextOutcomes(texts, passed, labels, self.certainties(values))

    def certainties(self, values: np.ndarray) -> np.ndarray | None:
        """Return a finite number per text, (texts,), to sort a report's examples. Default: None."""
        return None


def labelling_head(heads: Sequence[Head]) -> Head:
    """Return the first head with a label column, or the first head if none has one."""
    return next((head for head in heads if head.label_field is not None), heads[0])


def named_fields(*columns: tuple[str | None, pa.DataType]) -> list[pa.Field]:
    """Return Arrow fields of the (name, type) pairs, without those whose name is None."""
    return [pa.field(name, kind) for name, kind in columns if name is not None]


def named_columns(*columns: tuple[str | None, Any]) -> dict[str, Any]:
    """Return a dict of the (name, values) pairs, without those whose name is None."""
    return {name: values for name, values in columns if name is not None}


def arrow_array(
    values: pa.Array | pa.ChunkedArray | np.ndarray | list[Any],
    field: pa.Field,
    count: int,
    giver: str,
) -> pa.Array:
    """Convert a new column's values to an Arrow array of the field's type.

    Dictionary-encoded strings stay encoded, and chunked arrays chunked. Raises ValueError unless
    there are `count` values that can be converted; `giver` names their source in the message.
    """
    if len(values) != count:
        raise ValueError(
            f"{giver} gave {len(values)} values for {field.name!r}, and there are {count} texts: "
            "it must give one a text"
        )
    try:
        if isinstance(values, (pa.Array, pa.ChunkedArray)):
            array = values
        elif pa.types.is_list(field.type) and not pa.types.is_string(field.type.value_type):
            kind = field.type.value_type
            array = list_array(np.asarray(values, dtype=kind.to_pandas_dtype()), kind)
        else:
            array = pa.array(values, type=field.type if isinstance(values, list) else None)
        is_coded = pa.types.is_dictionary(array.type)
        if not _keeps_kind(array.type.value_type if is_coded else array.type, field.type):
            raise TypeError(f"they are {array.type}")
        if is_coded and pa.types.is_string(field.type):
            return array.cast(pa.dictionary(array.type.index_type, field.type))
        return array.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError) as err:
        shape = getattr(values, "shape", (len(values),))
        raise ValueError(
            f"{giver} gave values of shape {tuple(shape)} for {field.name!r} that are no "
            f"{field.type}: {err}"
        ) from err


def _keeps_kind(kind: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_boolean(wanted):
        return pa.types.is_boolean(kind) or pa.types.is_null(kind)
    if pa.types.is_string(wanted):
        return is_text(kind) or pa.types.is_null(kind)
    return not (pa.types.is_boolean(kind) or is_text(kind))


def list_array(values: np.ndarray, kind: pa.DataType = FLOAT32) -> pa.Array | pa.ChunkedArray:
    """Convert a 2-D array to an Arrow array with one list per row, with elements of type `kind`.

    The array is chunked if the numbers exceed the 32-bit offsets of one array.
    """
    rows = max(1, MOST_NUMBERS // max(1, values.shape[1]))
    if len(values) > rows:
        pieces = [list_array(values[at : at + rows], kind) for at in range(0, len(values), rows)]
        return pa.chunked_array(pieces)
    offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(offsets, pa.array(values.ravel(), kind))


def take(array: pa.Array | pa.ChunkedArray, indices: pa.Array) -> Any:
    """Return the elements of an array at `indices`; null for a null index.

    The result is chunked if its lists could exceed the 32-bit offsets of one array; pyarrow's
    ``take`` would then return wrong offsets, without an error.
    """
    kind, rows = array.type, max(len(array), len(indices))
    if pa.types.is_list(kind):
        widest = pc.max(pc.list_value_length(array)).as_py() or 1
        rows = max(1, MOST_NUMBERS // widest)
    is_small = max(len(array), len(indices)) <= rows
    whole = array if is_small else array.cast(pa.large_list(kind.value_field))  # offsets of 64 bits
    if isinstance(whole, pa.ChunkedArray):
        whole = whole.combine_chunks()
    if is_small:
        return whole.take(indices)
    step = max(1, rows // 16)  # Arrow allocates 8 bytes for each number taken
    pieces = [whole.take(indices[at : at + step]) for at in range(0, len(indices), step)]
    return pa.chunked_array([piece.cast(kind) for piece in pieces], kind)
