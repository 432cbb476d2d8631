"""Heads: outputs to columns, with their schema and filters, and the check that a model fits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from gpuclassify.mapping.columns import COLUMN_TYPES, arrow_array
from gpuclassify.mapping.pinned_model import PinnedModel
from gpuclassify.models.checkpoint import Checkpoint

# Values of new columns by name: arrays of numpy or Arrow, or lists, one value a text.
Columns = Mapping[str, Any]


class Head(ABC):
    """Makes columns of a model's outputs. Several heads can read the outputs of one runner.

    Parameters
    ----------
    owner : str
        Name of the mapper, for messages.
    options : ModelOptions
    model : PinnedModel
        Says what the outputs mean.
    outputs : slice
        Which of the runner's outputs the head reads. Default: all.
    """

    label_field: str | None = None  # name of the label column
    filters: bool = False  # whether the settings filter rows
    keep_field: str | None = None  # of the filters' decision, if rows are not to be dropped

    def __init__(
        self, owner: str, options: Any, model: PinnedModel, outputs: slice = slice(None)
    ) -> None:
        self.owner = owner
        self.options = options
        self.model = model
        self.outputs = outputs

    @property
    def labels(self) -> list[Any]:
        """Every label that a row can get; empty for a head that gives none."""
        return []

    @abstractmethod
    def fields(self) -> list[pa.Field]:
        """The columns in order; the types are those in `gpuclassify.frames`."""

    @property
    def list_size(self) -> int:
        """Numbers that a row has in columns of lists, 0 if that is not known."""
        return self.model.checkpoint.output_count

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raise CheckpointError unless a model of this description gives what the head reads."""
        return

    def check_settings(self) -> None:
        """Raise ValueError unless the settings fit the head and the model's labels."""
        return

    def activate(self, outputs: np.ndarray) -> np.ndarray:
        """What can be averaged over the windows of a text, float32 as `outputs`."""
        return outputs

    @abstractmethod
    def columns(self, values: np.ndarray) -> Columns:
        """Columns for activated outputs, float32 (texts, outputs)."""

    def arrays(self, values: np.ndarray) -> dict[str, pa.Array]:
        """What `columns` makes as Arrow arrays, if they are the columns of `fields`."""
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
        """Which texts pass each filter that is set, bool (texts,), by what `columns` gets.

        The names are among `gpuclassify.mapping.stage_counts.REASONS`.
        """
        return {}

    def certainties(self, values: np.ndarray) -> np.ndarray | None:
        """What examples are ordered by, a finite number for each text; None without such."""
        return None


class OwnColumns(Head):
    """Columns that a mapper declares and computes itself."""

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
        """The declared columns."""
        return [pa.field(name, COLUMN_TYPES[kind]) for name, kind in self._declared.items()]

    def check_settings(self) -> None:
        """Raise ValueError if the settings filter by labels or scores, which are not known here."""
        for name in self.options.filter_names:
            if getattr(self.options, name) is not None:
                raise ValueError(
                    f"{name} has no meaning for {self.owner}, which declares columns "
                    "of its own: compare those columns instead"
                )

    def columns(self, values: np.ndarray) -> Columns:
        """What the mapper makes of the outputs."""
        return self._compute(values)


def named_fields(*columns: tuple[str | None, pa.DataType]) -> list[pa.Field]:
    """The fields of those columns that have a name."""
    return [pa.field(name, kind) for name, kind in columns if name is not None]


def named_columns(*columns: tuple[str | None, Any]) -> dict[str, Any]:
    """The values of those columns that have a name."""
    return {name: values for name, values in columns if name is not None}
