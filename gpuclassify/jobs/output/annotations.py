"""Tables of an annotation set: new columns, each row's file and position, rows left out."""

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
    """Return the schema of an annotation set with these new columns, and metadata for pandas.

    Columns in `labels` are marked, because reports count them.
    """
    marked = [f.with_metadata(LABEL if f.name in labels else {}) for f in new]
    schema = pa.schema([*BOOKKEEPING, *marked])
    frame = to_pandas(schema.empty_table())
    return schema.with_metadata(arrow_table(frame, keep_index=False).schema.metadata)


def annotation_table(
    new: pa.Table, positions: pa.Table, problems: Sequence[Problem], schema: pa.Schema
) -> pa.Table:
    """Return the annotations of all rows of a part, in order; rows with `problems` are null.

    `new` has the new columns of the other rows, and `positions` the file and position of each row
    that could be read. Rows of Parquet files that could not be read are marked as lines.
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
    """Return each input file's number of rows in a table, and its first and last position.

    Files are in the order of their rows, from which readers take the first row of each file. Arrow
    groups texts in an order of its own, even with one thread.
    """
    groups = table.select([FILE, PLACE]).group_by(FILE, use_threads=False)
    functions = ("count", "min", "max")
    names = [f"{PLACE}_{function}" for function in functions]
    rows: list[dict[str, Any]] = groups.aggregate([(PLACE, f) for f in functions]).to_pylist()
    by_file = {row[FILE]: (row[names[0]], row[names[1]], row[names[2]]) for row in rows}
    return {name: by_file[name] for name in table[FILE].unique().to_pylist()}
