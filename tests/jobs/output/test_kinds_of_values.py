"""Values without a type in a format: objects without fields, infinities, years beyond 9999."""

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
    assert (summary.rows_written, summary.left_out) == (99, {"line": 1})


@pytest.mark.parametrize(
    ("kind", "writer"),
    [
        (pa.month_day_nano_interval(), ParquetWriter),
        (pa.struct([("a", pa.int8()), ("a", pa.int8())]), JsonlWriter),
        ("nested", ParquetWriter),
    ],
)
def test_what_a_format_cannot_hold_is_refused_before_a_stage_runs(tmp_path, kind, writer):
    if kind == "nested":  # deeper than Parquet readers support
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


def test_infinities_are_kept_in_parquet_and_null_in_json_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"n": 1.5, "l": [NaN, -Infinity]}\n{"n": Infinity, "l": []}\n'
    )
    run(FileReader(tmp_path / "a.jsonl"), JsonlWriter(f"{tmp_path}/lines"))
    [path] = (tmp_path / "lines").glob("part-*")
    assert path.read_text() == '{"n": 1.5, "l": [null, null]}\n{"n": null, "l": []}\n'
    run(FileReader(tmp_path / "a.jsonl"), ParquetWriter(f"{tmp_path}/parquet"))
    [path] = (tmp_path / "parquet").glob("part-*")
    kept = pq.read_table(path)
    assert kept["n"].to_pylist() == [1.5, math.inf]
    assert str(kept["l"][0].as_py()) == "[nan, -inf]"


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
    """pyarrow 26 corrupts such values in a cast to the same type."""
    odd = [[[{"x": None}] * 3, [{"x": None}, None]], [], [[{"x": None}]]]
    pq.write_table(pa.table({"odd": odd}), tmp_path / "odd.parquet")
    read = pq.read_table(tmp_path / "odd.parquet")["odd"]

    def stage(frame):
        return frame.assign(odd=pd.Series(read[: len(frame)], dtype=pd.ArrowDtype(read.type)))

    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 3)
    run(FileReader(tmp_path / "a.jsonl"), ParquetWriter(f"{tmp_path}/out"), stage)
    assert [row["odd"] for row in rows_of(tmp_path / "out")] == odd
