"""Rows of an annotation set: new columns, the place of each row, and rows that were left out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.jobs.input.schema import to_pandas
from gpuclassify.jobs.ledger.encoding import FILE, LEFT_OUT, PLACE, arrow_table
from gpuclassify.jobs.ledger.quarantine import Problem
from gpuclassify.mapping.stage_counts import LABEL

BOOKKEEPING = pa.schema([(FILE, pa.string()), (PLACE, pa.int64()), (LEFT_OUT, pa.string())])


def annotation_schema(new: Iterable[pa.Field], labels: Collection[str]) -> pa.Schema:
    """Return the columns of a set with these new ones, as plain readers take them.

    Those that reports count as labels are marked so.
    """
    marked = [f.with_metadata(LABEL if f.name in labels else {}) for f in new]
    schema = pa.schema([*BOOKKEEPING, *marked])
    frame = to_pandas(schema.empty_table())
    return schema.with_metadata(arrow_table(frame, keep_index=False).schema.metadata)


def annotation_table(
    new: pa.Table, places: pa.Table, problems: Sequence[Problem], schema: pa.Schema
) -> pa.Table:
    """Return a row for each row of a part, in its order: those with `problems` are null.

    `new` are the columns of the others, and `places` those of all rows that could be read.
    """
    problems = [problem for problem in problems if problem.place is not None]
    lost = pa.table(
        {
            FILE: pa.array([problem.file for problem in problems], pa.string()),
            PLACE: pa.array([problem.place for problem in problems], pa.int64()),
            LEFT_OUT: pa.array([problem.kind for problem in problems], pa.string()),
        }
    )
    place_files = places[FILE]  # in the order of the part's files
    failed = {(problem.file, problem.place) for problem in problems}
    if failed:
        pairs = zip(places[FILE].to_pylist(), places[PLACE].to_pylist(), strict=True)
        places = places.filter(pa.array([pair not in failed for pair in pairs], pa.bool_()))
    table = places
    for name in new.column_names:
        table = table.append_column(name, new[name])
    table = table.append_column(LEFT_OUT, pa.nulls(len(table), pa.string()))
    if problems:
        files = pc.unique(pa.chunked_array([*place_files.chunks, *lost[FILE].chunks]))
        table = pa.concat_tables([table, lost], promote_options="default")
        order = pc.index_in(table[FILE], files).to_numpy()
        table = table.take(np.lexsort((table[PLACE].to_numpy(), order)))
    kinds = [table.schema.field(name).with_nullable(True) for name in schema.names]
    table = table.select(schema.names).cast(pa.schema(kinds))
    return table.replace_schema_metadata(schema.metadata)


def extents(table: pa.Table) -> dict[str, tuple[int, int, int]]:
    """Return how many rows each file has in a set's table, and their first and last place."""
    counted = table.select([FILE, PLACE]).group_by(FILE, use_threads=False)
    found: list[dict[str, Any]] = counted.aggregate(
        [(PLACE, "count"), (PLACE, "min"), (PLACE, "max")]
    ).to_pylist()
    names = [f"{PLACE}_{what}" for what in ("count", "min", "max")]
    return {row[FILE]: (row[names[0]], row[names[1]], row[names[2]]) for row in found}
