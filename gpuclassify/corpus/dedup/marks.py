"""Columns that mark duplicates, for annotation sets instead of a corpus without duplicates."""

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
    """Stage that declares the columns of marks; `mark` fills them before any stage runs."""

    has_similarity: bool

    def schema(self) -> pa.Schema:
        """Return the columns of marks."""
        columns = [pa.field(IS_DUPLICATE, pa.bool_(), nullable=False)]
        columns.append(pa.field(GROUP, pa.int64(), metadata={b"role": b"count"}))
        if self.has_similarity:
            columns.append(pa.field(SIMILARITY, pa.float32()))
        return pa.schema(columns)

    def check(self, frame: Frame) -> None:
        """Raise ValueError if a column is there already."""
        check_are_new(self.schema().names, list(frame.columns), (), overwrite=False)

    def meta(self, frame: Frame) -> Frame:
        """Return the empty frame with the columns."""
        empty = pd.DataFrame({GROUP: [], SIMILARITY: [], IS_DUPLICATE: []})
        return self.mark(frame.iloc[:0], 0, empty)

    def map_frame(self, frame: Frame, meta_dtypes: object = None) -> Any:
        """Return the frame unchanged, because `mark` has added the marks."""
        return frame

    def mark(self, frame: Frame, partition: int, marked: pd.DataFrame) -> Any:
        """Add the marks of a partition's documents; `marked` is indexed by document number."""
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
    """Return the marks of documents in groups of two or more, with their document numbers."""
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
