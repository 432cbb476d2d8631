import gzip
import json

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpuclassify.jobs import planning
from gpuclassify.jobs.files import UnreadableInputError, find_files
from gpuclassify.jobs.planning import plan_source
from gpuclassify.jobs.readers import read_files


def write_json(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def records():
    return [{"id": i, "text": f"text {i} " + "ü" * (i % 40)} for i in range(500)]


@pytest.mark.parametrize("part_bytes", [100, 1_000, 10_000_000])
def test_byte_ranges_hold_every_line_once_and_in_order(tmp_path, records, part_bytes):
    path = write_json(tmp_path / "a.jsonl", records)
    ddf = read_files([path], part_bytes=part_bytes)
    read = ddf.compute()
    assert read["id"].tolist() == [record["id"] for record in records]
    assert read["text"].tolist() == [record["text"] for record in records]
    assert (ddf.npartitions > 100) == (part_bytes == 100)


def test_a_line_longer_than_the_part_is_read_whole(tmp_path):
    texts = ["a" * 5_000, "b", "c" * 3_000]
    path = write_json(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    assert read_files([path], part_bytes=64).compute()["text"].tolist() == texts


@pytest.mark.parametrize("part_bytes", [1, 20_000, None])
def test_row_groups_are_parts_finer_than_a_file(tmp_path, records, part_bytes):
    path = tmp_path / "a.parquet"
    pd.DataFrame(records).to_parquet(path, row_group_size=100)
    ddf = read_files([str(path)], part_bytes=part_bytes)
    assert ddf.compute()["id"].tolist() == list(range(500))
    if part_bytes == 1:
        assert ddf.npartitions == 5


def test_meta_is_the_dtype_of_every_part(tmp_path):
    rows = [{"text": None, "n": None, "ok": None, "tags": None, "x": None}] * 50
    rows += [{"text": "t", "n": 3, "ok": True, "tags": ["a"], "x": 1.5}] * 50
    path = write_json(tmp_path / "a.jsonl", rows)
    ddf = read_files([path], part_bytes=400)
    for part in ddf.to_delayed():
        pd.testing.assert_series_equal(part.compute().dtypes, ddf.dtypes)
    assert pd.api.types.is_string_dtype(ddf.dtypes["text"])
    assert ddf.dtypes["n"] == pd.Int64Dtype()
    assert ddf.dtypes["ok"] == pd.BooleanDtype()


def test_strings_that_look_like_dates_stay_as_they_are(tmp_path):
    record = {"text": "2024-01-01", "when": "2024-01-01T00:00:00Z", "at": {"all": ["2024-01-02"]}}
    path = write_json(tmp_path / "a.jsonl", [record])
    ddf = read_files([path])
    row = ddf.compute().iloc[0]
    assert (row["text"], row["when"]) == ("2024-01-01", "2024-01-01T00:00:00Z")
    assert list(row["at"]["all"]) == ["2024-01-02"]
    assert pd.api.types.is_string_dtype(ddf.dtypes["when"])


@pytest.mark.parametrize("late", [{"extra": 1}, {"meta": {"a": 1, "extra": 2}}])
def test_a_field_that_comes_after_the_sample_is_refused_and_not_lost(tmp_path, monkeypatch, late):
    monkeypatch.setattr(planning, "SAMPLE_BYTES", 1_000)
    records = [{"text": "x" * 100, "meta": {"a": 1}} for _ in range(50)]
    path = write_json(tmp_path / "a.jsonl", [*records, {"text": "last", "extra": None}])
    assert len(read_files([path]).compute()) == 51  # a null is no loss
    path = write_json(tmp_path / "a.jsonl", [*records, {"text": "last", **late}])
    with pytest.raises(UnreadableInputError, match=rf"{next(iter(late))} has fields.*--field"):
        read_files([path]).compute(scheduler="sync")
    assert len(read_files([path], fields=["text"]).compute()) == 51


def test_a_column_that_one_file_lacks_is_null_there(tmp_path):
    pq.write_table(pa.table({"text": ["a"], "id": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["b"]}), tmp_path / "b.parquet")
    assert read_files([str(tmp_path)]).compute()["id"].isna().tolist() == [False, True]


def test_dictionary_encoded_text_is_text(tmp_path):
    values = pa.array(["a", None, "a"]).dictionary_encode()
    pq.write_table(pa.table({"text": values}), tmp_path / "a.parquet")
    ddf = read_files([str(tmp_path / "a.parquet")])
    assert pd.api.types.is_string_dtype(ddf.dtypes["text"])
    assert ddf.compute()["text"].isna().tolist() == [False, True, False]


def test_a_file_without_row_groups_has_no_rows(tmp_path):
    path = tmp_path / "a.parquet"
    pq.ParquetWriter(path, pa.schema([("text", pa.string())])).close()
    assert len(read_files([str(path)]).compute()) == 0


def test_a_name_with_brackets_is_a_name_where_such_a_file_is(tmp_path, records):
    path = write_json(tmp_path / "a[1].jsonl", records)
    assert len(read_files([path]).compute()) == 500


def test_a_compressed_line_longer_than_the_sample_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "SAMPLE_BYTES", 100)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in ("a" * 5_000, "b"))
    assert read_files([str(tmp_path / "a.jsonl.gz")]).compute()["text"].str.len().tolist() == [
        5_000,
        1,
    ]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl.gz", b"no gzip"),
        ("b.jsonl.gz", gzip.compress(bytes(range(256)) * 40)[:-20]),
        ("c.jsonl", '{"text": "ü"}\n'.encode("latin-1")),
    ],
)
def test_broken_bytes_name_the_file(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UnreadableInputError, match=f"{name}.* cannot be read"):
        read_files([str(tmp_path / name)]).compute(scheduler="sync")


def test_integers_keep_all_their_digits_beside_nulls(tmp_path):
    big = 2**62 + 1
    path = write_json(tmp_path / "a.jsonl", [{"text": "a", "id": big}, {"text": "b", "id": None}])
    assert read_files([path]).compute()["id"][0] == big


def test_compressed_files_globs_and_directories(tmp_path, records):
    folder = tmp_path / "in"
    folder.mkdir()
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(record) + "\n" for record in records[:250])
    write_json(folder / "b.jsonl", records[250:])
    (folder / "_SUCCESS").write_text("")
    for source in (str(folder), f"{folder}/*.jsonl*"):
        assert read_files([source]).compute()["id"].tolist() == list(range(500))


def test_zstandard_is_read_without_another_package(tmp_path, records):
    plain = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    path = str(tmp_path / "a.jsonl.zst")
    with pa.OSFile(path, "wb") as sink, pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(plain)
    assert len(read_files([path]).compute()) == 500


def test_fields_project_the_columns(tmp_path, records):
    path = write_json(tmp_path / "a.jsonl", records)
    assert list(read_files([path], fields=["text"]).columns) == ["text"]
    with pytest.raises(
        UnreadableInputError, match=r"no column 'txt'.*Did you mean 'text'.*id, text"
    ):
        read_files([path], fields=["txt"])


def test_urls_are_read(records):
    frame = pd.DataFrame(records)
    frame.to_parquet("memory://in/a.parquet")
    assert len(read_files(["memory://in/*.parquet"]).compute()) == 500


def test_errors_name_file_and_cure(tmp_path, records):
    with pytest.raises(UnreadableInputError, match=r"no such input: .*nothing\.parquet"):
        read_files([str(tmp_path / "nothing.parquet")])
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UnreadableInputError, match=r"notes\.txt.*wanted names ending in \.parquet"):
        read_files([str(tmp_path)])
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(UnreadableInputError, match=r"bad\.parquet cannot be read"):
        read_files([str(tmp_path / "bad.parquet")])
    write_json(tmp_path / "good.jsonl", records)
    with pytest.raises(UnreadableInputError, match="several formats"):
        read_files([str(tmp_path / "good.jsonl"), str(tmp_path / "bad.parquet")])


def test_a_broken_line_names_file_and_place_when_its_part_is_read(tmp_path, records, monkeypatch):
    monkeypatch.setattr(planning, "SAMPLE_BYTES", 1_000)
    path = tmp_path / "a.jsonl"
    write_json(path, records)
    with path.open("a") as file:
        file.write('{"text": "no end\n')
    ddf = read_files([str(path)], part_bytes=5_000)
    with pytest.raises(UnreadableInputError, match=r"a\.jsonl, from byte \d+ cannot be read"):
        ddf.compute(scheduler="sync")


def test_inputs_that_do_not_fit_together_are_refused(tmp_path):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": [[1]]}), tmp_path / "b.parquet")
    with pytest.raises(UnreadableInputError, match="do not fit together"):
        read_files([str(tmp_path)])


def test_a_file_named_twice_is_read_once_and_parts_are_deterministic(tmp_path, records):
    path = write_json(tmp_path / "a.jsonl", records)
    inputs = [path, f"{tmp_path}/*.jsonl"]
    assert [file.path for file in find_files(inputs, {})] == [path]
    assert plan_source(inputs, part_bytes=1_000) == plan_source(inputs, part_bytes=1_000)
