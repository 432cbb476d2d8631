"""Tables of an annotation set: each row's new columns, file, position, and reason if left out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.jobs.input.schema import to_pandas
from gpuclassify.jobs.ledger.encoding import FILE, LEFT_OUT, PLACE, arrow_table
from gpuclassify.jobs.ledger.quarantine import LINE, ROW, Problem
from gpuclassify.mapping.stage_counts import LABEL

BOOKKEEPING = pa.schema([(FILE, pa.string()), (PLACE, pa.int64()), (LEFT_OUT, pa.string())])


def annotation_schema(new: Iterable[pa.Field], labels: Collection[str]) -> pa.Schema:
    """Return the schema of an annotation set: bookkeeping columns, then the `new` columns.

    Fields named in `labels` get metadata by which reports find them.
    """
    marked = [f.with_metadata(LABEL if f.name in labels else {}) for f in new]
    schema = pa.schema([*BOOKKEEPING, *marked])
    frame = to_pandas(schema.empty_table())
    return schema.with_metadata(arrow_table(frame, keep_index=False).schema.metadata)


def annotation_table(
    new: pa.Table, positions: pa.Table, problems: Sequence[Problem], schema: pa.Schema
) -> pa.Table:
    """Return a table of `schema` with one row per row of the input, ordered by file and position.

    `new` has the new columns of the rows without `problems`. `positions` has ``_file`` and
    ``_place`` (position in the file) of every row that could be read. Rows with a problem are null
    in the new columns. Their ``_left_out`` is "row", or "line" if the row could not be read. Files
    are in the order of `positions`. Problems without a position add no row.
    """
    problems = [problem for problem in problems if problem.place is not None]
    failed = dict.fromkeys(((problem.file, problem.place) for problem in problems), LINE)
    table = positions
    if failed:
        pairs = [*zip(table[FILE].to_pylist(), table[PLACE].to_pylist(), strict=True)]
        failed |= dict.fromkeys(failed.keys() & {*pairs}, ROW)
        table = table.filter(pa.array([pair not in failed for pair in pairs], pa.bool_()))
    lost = pa.table(
        {
            FILE: pa.array([file for file, _ in failed], pa.string()),
            PLACE: pa.array([place for _, place in failed], pa.int64()),
            LEFT_OUT: pa.array([*failed.values()], pa.string()),
        }
    )
    for name in new.column_names:
        table = table.append_column(name, new[name])
    table = table.append_column(LEFT_OUT, pa.nulls(len(table), pa.string()))
    if problems:
        files = pc.unique(pa.chunked_array([*positions[FILE].chunks, *lost[FILE].chunks]))
        table = pa.concat_tables([table, lost], promote_options="default")
        order = pc.index_in(table[FILE], files).to_numpy()
        table = table.take(np.lexsort((table[PLACE].to_numpy(), order)))
    kinds = [
        table.schema.field(field.name).with_nullable(True).with_metadata(field.metadata)
        for field in schema
    ]
    table = table.select(schema.names).cast(pa.schema(kinds))
    return table.replace_schema_metadata(schema.metadata)


def extents(table: pa.Table) -> dict[str, tuple[int, int, int]]:
    """Return (number of rows, first position, last position) by input file of an annotation table.

    The dict has the files in the order of their first rows in the table, which readers rely on.
    """
    groups = table.select([FILE, PLACE]).group_by(FILE, use_threads=False)
    functions = ("count", "min", "max")
    names = [f"{PLACE}_{function}" for function in functions]
    rows: list[dict[str, Any]] = groups.aggregate([(PLACE, f) for f in functions]).to_pylist()
    by_file = {row[FILE]: (row[names[0]], row[names[1]], row[names[2]]) for row in rows}
    return {name: by_file[name] for name in table[FILE].unique().to_pylist()}
