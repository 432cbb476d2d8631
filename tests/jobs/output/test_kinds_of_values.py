"""Values that a format has no type for: objects without fields, infinities, years beyond 9999."""

import json
import math

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpuclassify import FileReader, JsonlReader, JsonlWriter, ParquetReader, ParquetWriter, Pipeline
from gpuclassify.jobs.stores.store import UnreadableInputError

STORED = {"__dummy_field_in_empty_struct": None}


def run(reader, writer, stage=lambda frame: frame, **options):
    return Pipeline([reader, stage, writer], **options).run()


def rows_of(folder):
    rows = []
    for path in sorted(folder.glob("part-*")):
        if path.suffix == ".parquet":
            rows += pq.read_table(path).to_pylist()
        else:
            rows += map(json.loads, path.read_text().splitlines())
    return rows


@pytest.mark.parametrize(
    ("metas", "stored"),
    [
        ([{}, {}, None], [STORED, STORED, None]),
        ([{"a": 1, "b": {}}] * 2, [{"a": 1, "b": STORED}] * 2),
        ([[{}, None], [], None], [[STORED, None], [], None]),
    ],
)
def test_objects_without_fields_come_out_of_both_formats_as_they_went_in(tmp_path, metas, stored):
    rows = [{"text": "a", "meta": meta} for meta in metas]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(FileReader(tmp_path / "a.jsonl"), JsonlWriter(f"{tmp_path}/lines"))
    assert rows_of(tmp_path / "lines") == rows
    run(FileReader(tmp_path / "a.jsonl"), ParquetWriter(f"{tmp_path}/table"))
    assert [row["meta"] for row in rows_of(tmp_path / "table")] == stored
    assert duckdb.sql(f"select meta from '{tmp_path}/table/*.parquet'").fetchall() == [
        (meta,) for meta in stored
    ]
    assert len(pd.read_parquet(next((tmp_path / "table").glob("*.parquet")))) == len(rows)
    run(ParquetReader(tmp_path / "table"), JsonlWriter(f"{tmp_path}/back"))
    assert rows_of(tmp_path / "back") == rows


@pytest.mark.parametrize("fields", [None, ["text", "meta"]])
def test_fields_of_an_object_that_has_none_in_the_samples_are_not_lost(tmp_path, fields):
    lines = ['{"text": "a", "meta": {}}'] * 100
    lines[40] = '{"text": "a", "meta": {"late": 1}}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    reader = JsonlReader(tmp_path / "a.jsonl", fields=fields)
    vars(reader).update(samples=1, sample_bytes=100)
    with pytest.raises(UnreadableInputError, match=r"line \d+, from byte 1040 .*meta has fields"):
        run(reader, ParquetWriter(f"{tmp_path}/out"))
    summary = run(reader, ParquetWriter(f"{tmp_path}/out"), on_error="quarantine")
    assert (summary.rows_out, summary.left_out) == (99, {"line": 1})


@pytest.mark.parametrize(
    ("kind", "writer"),
    [
        (pa.month_day_nano_interval(), ParquetWriter),
        (pa.struct([("a", pa.int8()), ("a", pa.int8())]), JsonlWriter),
        ("nested", ParquetWriter),
    ],
)
def test_what_a_format_cannot_hold_is_refused_before_a_stage_runs(tmp_path, kind, writer):
    if kind == "nested":  # deeper than readers of Parquet go
        kind = pa.string()
        for _ in range(60):
            kind = pa.list_(kind)
    dtype = pd.ArrowDtype(kind)

    def stage(frame):
        assert not len(frame), "a stage ran"
        return frame.assign(odd=pd.array([], dtype))

    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(TypeError, match=r"column 'odd' is .*cannot hold.*fields=.*or write"):
        run(FileReader(tmp_path / "a.jsonl"), writer(f"{tmp_path}/out"), stage)


INFINITIES = '{"n": 1.5, "l": [NaN, -Infinity]}\n{"n": Infinity, "l": []}\n'


@pytest.mark.parametrize(
    ("non_finite", "wanted"),
    [
        ("null", '{"n": 1.5, "l": [null, null]}\n{"n": null, "l": []}\n'),
        ("literal", INFINITIES),
        ("string", '{"n": 1.5, "l": ["NaN", "-Infinity"]}\n{"n": "Infinity", "l": []}\n'),
    ],
)
def test_infinities_in_json_lines_are_what_was_asked_for(tmp_path, non_finite, wanted):
    (tmp_path / "a.jsonl").write_text(INFINITIES)
    out = JsonlWriter(f"{tmp_path}/out", non_finite=non_finite)
    run(FileReader(tmp_path / "a.jsonl"), out)
    [path] = (tmp_path / "out").glob("part-*")
    assert path.read_text() == wanted
    if non_finite != "null":  # the readers that the docstring names
        assert math.isinf(pd.read_json(path, lines=True)["n"][1])
        typed = f"select n from read_json('{path}', columns={{n: 'DOUBLE'}})"
        assert duckdb.sql(typed).fetchall() == [(1.5,), (math.inf,)]
    if non_finite == "literal":
        assert FileReader(path).find_parts().schema.arrow.field("n").type == pa.float64()
        assert "inf" in str(duckdb.sql(f"select n from '{path}'").fetchall())


def test_what_becomes_of_infinities_is_part_of_what_a_job_is(tmp_path):
    (tmp_path / "a.jsonl").write_text(INFINITIES)
    run(FileReader(tmp_path / "a.jsonl"), JsonlWriter(f"{tmp_path}/out"))
    with pytest.raises(ValueError, match="non_finite"):
        run(FileReader(tmp_path / "a.jsonl"), JsonlWriter(f"{tmp_path}/out", non_finite="literal"))
    with pytest.raises(ValueError, match=r"non_finite='string' is of JSON lines"):
        ParquetWriter(f"{tmp_path}/out", non_finite="string")


def test_times_beyond_pythons_years_are_text_in_json_lines(tmp_path):
    kind = pa.list_(pa.timestamp("us"))
    times = pa.array([[0, 253402300800 * 10**6], None], kind)
    days = pa.array([0, 10**7], pa.date32())
    pq.write_table(pa.table({"times": times, "day": days}), tmp_path / "a.parquet")
    run(FileReader(tmp_path / "a.parquet"), JsonlWriter(f"{tmp_path}/out"))
    assert rows_of(tmp_path / "out") == [
        {"times": ["1970-01-01 00:00:00", "10000-01-01 00:00:00.000000"], "day": "1970-01-01"},
        {"times": None, "day": "29349-01-26"},
    ]


def test_integers_that_lose_digits_are_logged_once_with_their_column(tmp_path, caplog):
    lines = [f'{{"id": {2**53 + 1}, "sub": {{"n": {10**30}}}, "ok": {2**62}}}', '{"id": 0.5}'] * 9
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    frame = FileReader(tmp_path / "a.jsonl").find_parts().schema.meta()
    assert frame["id"].dtype == np.float64
    assert [record.args for record in caplog.records] == [
        ("column 'id'", 2**53 + 1),
        ("column 'sub' 'n'", 10**30),
    ]


def test_lists_of_lists_of_objects_with_nulls_stay_whole(tmp_path):
    """pyarrow 26 makes broken ones of those that it casts to the type that they have."""
    odd = [[[{"x": None}] * 3, [{"x": None}, None]], [], [[{"x": None}]]]
    pq.write_table(pa.table({"odd": odd}), tmp_path / "odd.parquet")
    read = pq.read_table(tmp_path / "odd.parquet")["odd"]

    def stage(frame):
        return frame.assign(odd=pd.Series(read[: len(frame)], dtype=pd.ArrowDtype(read.type)))

    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 3)
    run(FileReader(tmp_path / "a.jsonl"), ParquetWriter(f"{tmp_path}/out"), stage)
    assert [row["odd"] for row in rows_of(tmp_path / "out")] == odd
