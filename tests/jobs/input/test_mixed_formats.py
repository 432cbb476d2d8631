"""Parquet files and JSON lines as one input; the oracle is pandas, file by file."""

import datetime
import decimal
import gzip
import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpuclassify import (
    AnnotationWriter,
    Deduplicate,
    ExactDuplicates,
    JsonlReader,
    JsonlWriter,
    ParquetReader,
    ParquetWriter,
    Pipeline,
    Select,
    read_files,
    sample,
)
from gpuclassify.jobs.input.readers import FileReader, first_rows
from gpuclassify.jobs.input.sample import sample_files
from gpuclassify.jobs.stores.store import UnreadableInputError

ROWS = 200


def records(kind, first):
    """Rows of a file: numbers of several widths, nested values, and columns of one format alone."""
    for n in range(first, first + ROWS):
        record = {
            "id": n,
            "text": f"text {n % 150}",
            "small": n % 7,
            "ratio": n / 8 if n % 2 else n,
        }
        record |= {"tags": [f"t{n % 3}"] * (n % 3), "host": {"name": f"h{n % 5}"}}
        record |= {"lines_only": n} if kind == "jsonl" else {"tables_only": f"p{n}"}
        yield record if n % 10 else record | {"small": None, "tags": None}


@pytest.fixture
def corpus(tmp_path):
    """A folder of both formats, and its rows in the order of the files."""
    folder, rows = tmp_path / "in", []
    folder.mkdir()
    for number, name in enumerate(["a.jsonl.gz", "b.parquet", "c.jsonl", "d.parquet"]):
        own = [*records("jsonl" if "jsonl" in name else "parquet", number * ROWS)]
        rows += own
        if "jsonl" in name:
            opener = gzip.open if name.endswith("gz") else open
            with opener(folder / name, "wt") as file:
                file.writelines(json.dumps(record) + "\n" for record in own)
        else:
            table = pa.Table.from_pylist(own)
            small = pa.array([record["small"] for record in own], pa.int8())
            index = table.column_names.index("small")
            pq.write_table(
                table.set_column(index, "small", small), folder / name, row_group_size=64
            )
    return folder, rows


def plain(rows):
    """Rows without null columns, as plain values."""
    records = rows if isinstance(rows, list) else rows.to_dict("records")
    return [
        {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in record.items()
            if isinstance(value, list | dict | np.ndarray) or not pd.isna(value)
        }
        for record in records
    ]


def run(stages, **options):
    return Pipeline(stages, **options).run(report=lambda *_: None)


@pytest.mark.parametrize("part_bytes", [2_000, None])
def test_both_formats_are_one_frame(corpus, part_bytes):
    folder, rows = corpus
    frame = read_files(folder, part_bytes=part_bytes)
    found = frame.compute()
    assert plain(found) == plain(rows)
    assert str(frame.dtypes["small"]) == "Int64" and frame.dtypes["ratio"] == np.float64
    for part in frame.to_delayed()[:: max(1, frame.npartitions // 8)]:
        pd.testing.assert_series_equal(part.compute().dtypes, frame.dtypes)
    assert plain(first_rows(FileReader(folder), 250)) == plain(rows[:250])


@pytest.mark.parametrize("writer", [ParquetWriter, JsonlWriter])
def test_a_job_writes_each_row_once_and_continues(corpus, tmp_path, writer):
    folder, rows = corpus
    stages = [FileReader(folder, part_bytes=9_000), writer(str(tmp_path / "out"), output_bytes=0)]
    run(stages)
    first = read_files(tmp_path / "out").compute()
    assert plain(first.sort_values("id")) == plain(rows)
    lost = sorted((tmp_path / "out").glob("part-*"))[3]
    lost.unlink()
    run(stages)
    assert plain(read_files(tmp_path / "out").compute()) == plain(first)


def test_annotations_select_and_samples_know_both(corpus, tmp_path):
    folder, rows = corpus
    notes = str(tmp_path / "notes")
    run(
        [
            FileReader(folder),
            lambda frame: frame.assign(rank=frame["id"] * 2),
            AnnotationWriter(notes),
        ]
    )
    reader = FileReader(folder, annotations=notes, part_bytes=5_000)
    run([reader, Select("rank >= 300 and rank < 1300"), ParquetWriter(str(tmp_path / "out"))])
    found = read_files(tmp_path / "out").compute()
    assert sorted(found["id"]) == [*range(150, 650)]
    assert (found["rank"] == 2 * found["id"]).all()
    drawn = sample(reader, 300)
    assert drawn["weight"].sum() == pytest.approx(len(rows))
    assert drawn["id"].is_unique and (drawn["rank"] == 2 * drawn["id"]).all()
    estimate, _ = sample_files(FileReader(folder).find_parts(), 100, 0, "raise")
    assert estimate.rows == len(rows)


def test_deduplication_compares_across_formats(corpus, tmp_path):
    folder, rows = corpus
    recipe = Deduplicate(
        FileReader(folder), ExactDuplicates(), ParquetWriter(str(tmp_path / "out"))
    )
    recipe.run(report=lambda *_: None)
    found = read_files(tmp_path / "out").compute()
    assert sorted(found["text"]) == sorted({record["text"] for record in rows})


VALUES = {
    "decimal": (pa.decimal128(9, 2), decimal.Decimal("1.25")),
    "duration": (pa.duration("s"), datetime.timedelta(seconds=3)),
    "map": (pa.map_(pa.string(), pa.int64()), [("a", 1)]),
    "bytes": (pa.binary(), b"\xff"),
    "date": (pa.date32(), datetime.date(2024, 2, 29)),
    "time": (pa.timestamp("ms", "UTC"), datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC)),
    "fixed": (pa.list_(pa.float32(), 2), [1.0, 2.0]),
    "large": (pa.large_list(pa.large_string()), ["a"]),
}


@pytest.mark.parametrize("kind", VALUES)
def test_a_type_that_json_does_not_have_is_null_in_lines(tmp_path, kind):
    arrow, value = VALUES[kind]
    pq.write_table(pa.table({"id": [1], "x": pa.array([value], arrow)}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"id": 2}\n{"id": 3, "x": null}\n')
    run([FileReader(str(tmp_path / "?.*")), ParquetWriter(str(tmp_path / "out"))])
    table = pq.ParquetDataset(tmp_path / "out").read().sort_by("id")
    assert table["x"].to_pylist() == [value, None, None]


def test_types_and_json_are_of_lines(tmp_path):
    texts = ["text", None]
    pq.write_table(pa.table({"id": [1, 2], "meta": texts}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"id": 3, "meta": {"a": [1]}}\n{"id": 4, "meta": "b"}\n')
    with pytest.raises(UnreadableInputError, match=r"meta is string in .*a\.parquet, and struct"):
        read_files(tmp_path)
    assert read_files(tmp_path, fields="id").compute()["id"].tolist() == [1, 2, 3, 4]
    found = read_files(tmp_path, types={"meta": "json"}).compute()["meta"]
    assert found.astype(object).where(found.notna(), None).tolist() == [
        '"text"', None, '{"a": [1]}', '"b"',
    ]  # fmt: skip
    with pytest.raises(UnreadableInputError, match="has Parquet files alone: leave out types="):
        read_files(tmp_path / "a.parquet", types={"meta": "json"})


@pytest.mark.parametrize("reader", [JsonlReader, ParquetReader])
def test_a_reader_of_one_format_names_the_other_file(corpus, reader):
    other = r"b\.parquet" if reader is JsonlReader else r"a\.jsonl\.gz"
    with pytest.raises(UnreadableInputError, match=f"{reader.__name__} got .*{other}: give it"):
        reader(corpus[0]).find_parts()


@pytest.mark.parametrize("on_error", ["raise", "quarantine"])
def test_a_condition_takes_null_for_a_column_that_a_file_lacks(tmp_path, on_error):
    frames = [
        pd.DataFrame({"id": [1, 2], "score": [0.2, 0.9]}),
        pd.DataFrame({"id": [3, 4]}),
        pd.DataFrame({"id": [5], "score": [0.7]}),
    ]
    for number, frame in enumerate(frames):
        frame.to_parquet(tmp_path / f"{number}.parquet")
    whole = pd.concat(frames)
    for where, kept in (
        ("score > 0.5", whole[whole["score"] > 0.5]),
        ("score is None", whole[whole["score"].isna()]),
    ):
        out = tmp_path / f"out {where}"
        reader = FileReader(str(tmp_path / "*.parquet"))
        summary = run([reader, Select(where), ParquetWriter(str(out))], on_error=on_error)
        assert sorted(read_files(out).compute()["id"]) == sorted(kept["id"])
        assert not summary.left_out
    with pytest.raises(ValueError, match="grade"):
        run([reader, Select("grade > 1"), ParquetWriter(str(tmp_path / "none"))])
