"""Columns that mark duplicates in an annotation set, instead of removing them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from gpuclassify.corpus.dedup.corpus import ROW_BITS
from gpuclassify.frames import Frame, backend_of
from gpuclassify.mapping.columns import check_are_new
from gpuclassify.mapping.partition_map import RowWiseMap

IS_DUPLICATE, GROUP, SIMILARITY = "is_duplicate", "duplicate_group", "duplicate_similarity"


@dataclass(frozen=True)
class DuplicateMarks(RowWiseMap):
    """Stage of a job that adds columns about duplicates, instead of removing rows.

    The job calls `mark` on a partition before its stages run, so that `map_frame` changes nothing.
    """

    has_similarity: bool

    def schema(self) -> pa.Schema:
        """Return names and types of the columns that mark duplicates."""
        columns = [pa.field(IS_DUPLICATE, pa.bool_(), nullable=False)]
        columns.append(pa.field(GROUP, pa.int64(), metadata={b"role": b"count"}))
        if self.has_similarity:
            columns.append(pa.field(SIMILARITY, pa.float32()))
        return pa.schema(columns)

    def check(self, frame: Frame) -> None:
        """Raise ValueError if the frame has a column with the name of an output column already."""
        check_are_new(self.schema().names, list(frame.columns), (), overwrite=False)

    def meta(self, frame: Frame) -> Frame:
        """Return an empty frame with the input columns, and the columns that mark duplicates."""
        empty = pd.DataFrame({GROUP: [], SIMILARITY: [], IS_DUPLICATE: []})
        return self.mark(frame.iloc[:0], 0, empty)

    def map_frame(self, frame: Frame, meta_dtypes: object = None) -> Any:
        """Return the frame unchanged, because `mark` has added the columns."""
        return frame

    def mark(self, frame: Frame, partition: int, marked: pd.DataFrame) -> Any:
        """Return a partition with the columns that mark duplicates.

        `marked` is the result of `marks` for this partition, with document numbers as the index. In
        other rows ``is_duplicate`` is false, and group and similarity are null.
        """
        rows = marked.index.to_numpy().astype(np.int64) - (partition << ROW_BITS)
        is_duplicate, group = np.zeros(len(frame), bool), np.full(len(frame), -1, np.int64)
        similarity = np.full(len(frame), np.nan, np.float32)
        is_duplicate[rows], group[rows] = marked[IS_DUPLICATE], marked[GROUP]
        similarity[rows] = marked[SIMILARITY]
        columns = {
            IS_DUPLICATE: pa.array(is_duplicate),
            GROUP: pa.array(group, mask=group < 0),
            SIMILARITY: pa.array(similarity, from_pandas=True),
        }
        columns = {name: columns[name] for name in self.schema().names}
        return backend_of(frame).with_columns(frame, columns, self.schema(), None)


def marks(decisions: pd.DataFrame) -> pd.DataFrame:
    """Return the columns that mark documents in groups of two or more, with ``document`` numbers.

    ``is_duplicate`` is true if the document would be removed, ``duplicate_group`` is the smallest
    document number of the group, and ``duplicate_similarity`` is NaN if not measured. Documents of
    an earlier corpus are left out.
    """
    rows = decisions[(decisions["size"] > 1) & ~decisions["is_earlier"].astype(bool)]
    group = rows.groupby("group", dropna=False)["document"].transform("min")
    return pd.DataFrame(
        {
            "document": rows["document"].array,
            IS_DUPLICATE: ~rows["keep"].to_numpy(bool),
            GROUP: group.to_numpy(np.int64),
            SIMILARITY: rows["similarity"].to_numpy(np.float32),
        }
    )
