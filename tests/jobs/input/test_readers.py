import gzip
import json
import time
from pathlib import Path

import dask.dataframe as dd
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpuclassify.jobs.input.files import find_files
from gpuclassify.jobs.input.parts import read_part
from gpuclassify.jobs.input.readers import FileReader, JsonlReader, ParquetReader, read_files
from gpuclassify.jobs.output.writers import JsonlWriter, ParquetWriter
from gpuclassify.jobs.pipeline import Pipeline
from gpuclassify.jobs.stores.store import UnreadableInputError


def write_json(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def find_sampled(path, samples=1, sample_bytes=400, **options):
    """The parts of a file, with the columns that so few lines have."""
    reader = FileReader(path, **options)
    vars(reader).update(samples=samples, sample_bytes=sample_bytes)
    return reader.find_parts()


def read_sampled(path, **options):
    """All rows of a file, with the columns that so few lines have."""
    found = find_sampled(path, **options)
    return pd.concat([read_part(part, found.schema) for part in found.parts])


@pytest.fixture
def records():
    return [{"id": i, "text": f"text {i} " + "ü" * (i % 40)} for i in range(500)]


@pytest.mark.parametrize("part_bytes", [64, 1_000, 10_000_000])
def test_byte_ranges_hold_every_line_once_and_in_order(tmp_path, records, part_bytes):
    records = [*records[:200], {"id": 200, "text": "a" * 5_000}, {"id": 201, "text": "b"}]
    path = write_json(tmp_path / "a[1].jsonl", records)  # a name where such a file is
    ddf = read_files([path], part_bytes=part_bytes)
    assert ddf.compute().to_dict("records") == records
    assert (ddf.npartitions > 100) == (part_bytes == 64)


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


@pytest.mark.parametrize("late", [{"extra": 1}, {"meta": {"a": 1, "extra": 2}}])
def test_a_field_that_comes_after_the_sample_is_refused_and_not_lost(tmp_path, late):
    records = [{"text": "x" * 100, "meta": {"a": 1}} for _ in range(50)]
    path = write_json(tmp_path / "a.jsonl", [*records, {"text": "last", "extra": None}])
    assert len(read_sampled(path)) == 51  # a null is no loss
    path = write_json(tmp_path / "a.jsonl", [*records, {"text": "last", **late}])
    with pytest.raises(UnreadableInputError, match=rf"{next(iter(late))} has fields.*fields="):
        read_sampled(path)
    assert len(read_sampled(path, fields=["text"])) == 51


def test_a_file_without_the_text_beside_others_is_named_or_left_out(tmp_path, domain):
    pq.write_table(pa.table({"text": ["a"], "id": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"txt": ["b"], "id": [2]}), tmp_path / "b.parquet")
    stages = [ParquetReader(str(tmp_path)), domain(), ParquetWriter(str(tmp_path.parent / "out"))]
    with pytest.raises(UnreadableInputError, match=r"b\.parquet .*has no column 'text', which is"):
        Pipeline(stages).prepare()
    summary = Pipeline(stages, on_error="quarantine").run()
    assert (summary.rows_read, summary.left_out) == (1, {"file": 1})


def test_a_column_that_one_file_lacks_is_null_there_and_one_may_have_no_row_groups(tmp_path):
    pq.write_table(pa.table({"text": ["a"], "id": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["b"]}), tmp_path / "b.parquet")
    pq.ParquetWriter(tmp_path / "c.parquet", pa.schema([("text", pa.string())])).close()
    assert read_files([str(tmp_path)]).compute()["id"].isna().tolist() == [False, True]
    assert len(read_files([str(tmp_path / "c.parquet")]).compute()) == 0


def test_a_compressed_line_longer_than_the_sample_is_read(tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in ("a" * 5_000, "b"))
    found = read_sampled(str(tmp_path / "a.jsonl.gz"), sample_bytes=100)
    assert found["text"].str.len().tolist() == [5_000, 1]


def test_compressed_files_globs_and_directories(tmp_path, records):
    folder = tmp_path / "in"
    folder.mkdir()
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(record) + "\n" for record in records[:250])
    write_json(folder / "b.jsonl", records[250:])
    (folder / "_SUCCESS").write_text("")
    for source in (str(folder), f"{folder}/*.jsonl*"):
        assert read_files([source]).compute()["id"].tolist() == list(range(500))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "no input is given"),
        (["nothing.parquet"], r"no such input: .*nothing\.parquet"),
        (["notes"], r"notes\.txt.*wanted names ending in \.parquet"),
        (["notes/notes.txt"], r"notes\.txt is no file to read: wanted names"),
        (["bad.parquet"], r"bad\.parquet cannot be read"),
        (["formats"], r"text is int64 in .*b\.parquet, and string in .*a\.jsonl: read them"),
        (["unlike"], "do not fit together"),
        (["k=%FF"], r"k=%FF/ .* not valid UTF-8 .*: rename them"),
    ],
)
def test_errors_name_file_and_cure(tmp_path, inputs, message):
    for folder in ("notes", "unlike", "formats", "k=%FF"):
        (tmp_path / folder).mkdir()
    (tmp_path / "notes/notes.txt").write_text("x")
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    write_json(tmp_path / "k=%FF/a.jsonl", [{"text": "a"}])
    write_json(tmp_path / "formats/a.jsonl", [{"text": "a"}])
    pq.write_table(pa.table({"text": [1]}), tmp_path / "formats/b.parquet")
    for name, text in (("a", "a"), ("b", [1])):
        pq.write_table(pa.table({"text": [text]}), tmp_path / f"unlike/{name}.parquet")
    with pytest.raises(UnreadableInputError, match=message):
        read_files([str(tmp_path / path) for path in inputs])


@pytest.fixture
def hive(tmp_path):
    """Folders as pandas writes them, with what needs escapes, a null and integers."""
    langs = ["de", "e n/ü", None, "x%=y"]
    frame = pd.DataFrame({"id": range(4), "lang": langs, "day": [10, 2, 3, 10], "text": "a"})
    frame.to_parquet(tmp_path / "rows", partition_cols=["lang", "day"])
    for path in sorted((tmp_path / "rows").rglob("*.parquet")):
        lines = tmp_path / "lines" / path.parent.relative_to(tmp_path / "rows")
        lines.mkdir(parents=True)
        pd.read_parquet(path).to_json(lines / "a.jsonl", orient="records", lines=True)
    return tmp_path


def pyarrow_rows(folder):
    table = pq.read_table(folder)
    rows = sorted(table.to_pylist(), key=lambda row: row["id"])
    return {name: [row[name] for row in rows] for name in table.column_names}


def rows_of(frame):
    frame = frame.sort_values("id").astype(object)
    return frame.where(frame.notna(), None).to_dict("list")


@pytest.mark.parametrize("kind", ["rows", "lines"])
def test_columns_that_names_of_folders_tell_are_those_of_pyarrow(hive, kind):
    known = pyarrow_rows(hive / "rows")
    ddf = read_files(hive / kind, part_bytes=1)
    assert rows_of(ddf.compute()) == known
    assert list(ddf.columns) == list(known)  # with those of folders behind
    for part in ddf.to_delayed():
        pd.testing.assert_series_equal(part.compute().dtypes, ddf.dtypes)
    assert pd.api.types.is_string_dtype(ddf.dtypes["lang"])
    assert ddf.dtypes["day"] == pd.Int64Dtype()


@pytest.mark.parametrize("kind", ["rows", "lines"])
def test_columns_of_folders_can_be_chosen_and_come_out_of_a_job(hive, kind):
    known = pyarrow_rows(hive / "rows")
    ddf = read_files(hive / kind, fields=["lang", "id"])
    assert rows_of(ddf.compute()) == {name: known[name] for name in ("lang", "id")}
    assert list(read_files(hive / kind, fields="text").columns) == ["text"]
    Pipeline([FileReader(hive / kind), lambda frame: frame, ParquetWriter(f"{hive}/out")]).run()
    assert rows_of(pd.concat(map(pd.read_parquet, (hive / "out").glob("*.parquet")))) == known


def test_folders_tell_the_same_however_the_files_are_named_as_in_dask(tmp_path):
    root = tmp_path / "run=5" / "in"
    pd.DataFrame({"text": ["a", "b"], "lang": ["de", "en"]}).to_parquet(
        root, partition_cols=["lang"]
    )
    files = sorted(map(str, root.rglob("*.parquet")))
    for inputs in (str(root), f"{root}/*/*.parquet", files):
        assert list(read_files(inputs).columns) == list(dd.read_parquet(inputs).columns)
    assert read_files(root / "lang=de").compute()["lang"].tolist() == ["de"]


@pytest.mark.parametrize(
    "folders",
    [
        ["k=01", "k=-2"],
        ["k=1", "k=+3"],
        ["k=1", "k=a"],
        ["k=2147483647", "k=5"],
        ["k=2147483648", "k=5"],
        ["k=1.5"],
        ["k=", "k=a"],
        ["k=5", "k=__HIVE_DEFAULT_PARTITION__"],
        ["k%20x=a", "k x=b"],
        ["k=a/k=b"],
        ["k=a/j=1", "j=2/k=c", "k=d", "plain"],
    ],
)
def test_names_of_folders_are_understood_as_pyarrow_does(tmp_path, folders):
    for number, folder in enumerate(folders):
        (tmp_path / folder).mkdir(parents=True)
        pq.write_table(pa.table({"id": [number]}), tmp_path / folder / "a.parquet")
    assert rows_of(read_files(tmp_path).compute()) == pyarrow_rows(tmp_path)


def test_a_type_can_be_given_to_a_column_of_folders(tmp_path):
    (tmp_path / "day=01").mkdir()
    write_json(tmp_path / "day=01" / "a.jsonl", [{"text": "a"}])
    source = JsonlReader(tmp_path, types={"day": "string"}).find_parts()
    assert read_part(source.parts[0], source.schema)["day"].tolist() == ["01"]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_column_that_files_hold_is_theirs_and_one_that_some_hold_is_refused(tmp_path, kind):
    def write(folder, records):
        (tmp_path / folder).mkdir()
        if kind == "jsonl":
            write_json(tmp_path / folder / "a.jsonl", records)
        else:
            pd.DataFrame(records).to_parquet(tmp_path / folder / "a.parquet")

    write("lang=de", [{"text": "a", "lang": "fr"}, {"text": "b", "lang": None}])
    held = read_files(tmp_path).compute()["lang"]
    assert held[0] == "fr"
    assert held.isna().tolist() == [False, True]
    write("lang=en", [{"text": "c"}])
    for on_error in ("raise", "quarantine") if kind == "jsonl" else ("raise",):
        with pytest.raises(UnreadableInputError, match=r"lang=en/a.*give lang, which other"):
            FileReader(tmp_path).find_parts(on_error)
    assert len(read_files(tmp_path, fields=["text"]).compute()) == 3


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_wide_files_cost_what_their_columns_cost(tmp_path, kind):
    """Eight times as many columns in far less than 64 times the time, and all values."""

    def seconds(columns):
        frame = pd.DataFrame({f"c{n}": range(n, n + 51) for n in range(columns)})
        path = tmp_path / f"{columns}.{kind}"
        if kind == "parquet":
            frame.to_parquet(path)
        else:
            frame.to_json(path, orient="records", lines=True)
        began = time.process_time()
        found = FileReader(path).find_parts()
        read = [read_part(part, found.schema) for part in found.parts]
        spent = time.process_time() - began
        assert pd.concat(read, ignore_index=True).astype("int64").equals(frame)
        return spent

    def best(columns):
        return min(seconds(columns) for _ in range(3))

    seconds(10)
    assert best(2_000) < 40 * best(250)  # there are more samples, too


def test_samples_are_from_all_files(tmp_path):
    for number in range(20):
        price = 3 if number < 17 else 3.5
        write_json(tmp_path / f"{number:02}.jsonl", [{"text": "a", "price": price}])
    assert read_files(tmp_path).compute()["price"].tolist() == [3] * 17 + [3.5] * 3


@pytest.mark.parametrize("at", [0, 1_000, 1_999])
def test_samples_are_from_beginning_middle_and_end(tmp_path, at):
    prices = [{"price": 3.5 if abs(number - at) < 20 else 3} for number in range(2_000)]
    path = write_json(tmp_path / "a.jsonl", prices)
    assert read_sampled(path, samples=3)["price"].sum() > 6_000


def test_files_of_blanks_do_not_use_up_the_samples(tmp_path):
    for number in range(100):
        (tmp_path / f"{number:03}.jsonl").write_text("\n")
    write_json(tmp_path / "050.jsonl", [{"text": "a"}])
    assert read_files(tmp_path).compute()["text"].tolist() == ["a"]


def test_a_type_that_changes_beyond_the_samples_names_column_file_and_cures(tmp_path):
    records = [{"text": "a", "price": 3} for _ in range(100)]
    path = write_json(tmp_path / "a.jsonl", [*records, {"text": "a", "price": 3.5}])
    message = r"a\.jsonl, line 101, from .*column price \(int64.*3\.5; .*fields=.*on_error="
    with pytest.raises(UnreadableInputError, match=message):
        read_sampled(path)
    assert len(read_sampled(path, fields=["text"])) == 101
    reader = JsonlReader(path, types={"price": "double", "late": "string"})
    Pipeline([reader, lambda frame: frame, ParquetWriter(f"{tmp_path}/out")]).run()
    [written] = (tmp_path / "out").glob("*.parquet")
    assert pq.read_table(written)["price"].to_pylist() == [3.0] * 100 + [3.5]
    assert pq.read_schema(written).names == ["text", "price", "late"]
    with pytest.raises(ValueError, match=r"types=\{'price': 'dubl'\}: Arrow has no such type"):
        JsonlReader(path, types={"price": "dubl"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": []}\r{"text": ""}', "changed from array to string.*fields="),
        (b'[{"text": "a"}, {"text": "b"}]', r"one object a line.*jq -c '\.\[\]'"),
        (b'[\n{"text": "a"}\n]', r"one object a line.*jq -c '\.\[\]'"),
        (b'{\n"text": "a"\n}', "one object a line.*jq -c . FILE"),
        ('{"text": "café"}\n'.encode("latin-1"), "byte 13 of the line is not UTF-8.*iconv"),
        ('{"text": "a"}\n'.encode("utf-16"), "byte 0 of the line is not UTF-8.*iconv"),
    ],
)
def test_files_that_are_no_lines_of_json_are_told_with_their_cure(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UnreadableInputError, match=message):
        read_files(tmp_path)


def test_inputs_and_fields_are_named_in_several_ways_and_read_once(tmp_path, records):
    path = write_json(tmp_path / "a.jsonl", records)
    assert JsonlReader(path, fields="text").fields == ("text",)
    assert JsonlReader(Path(path)).paths == JsonlReader([Path(path)]).paths == [path]
    twice = [path, f"{tmp_path}/*.jsonl"]
    for inputs in (path, Path(path), [Path(path)], f"{tmp_path}/*.jsonl", twice):
        assert list(read_files(inputs, fields="text").columns) == ["text"]
    assert [file.path for file in find_files(twice, {})] == [path]
    reader = FileReader(twice, part_bytes=1_000)
    assert reader.find_parts() == reader.find_parts()
    with pytest.raises(UnreadableInputError, match=r"no column 'txt'.*Did you mean 'text'.*id, te"):
        read_files([path], fields=["txt"])


@pytest.mark.parametrize("name", ["co::lon", "a b::c", "x/co::lon"])
def test_names_that_look_like_urls_are_refused_with_the_cure(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir(parents=True)
    write_json(tmp_path / name / "a.jsonl", [{"text": "a"}])
    for inputs in (name, "."):
        with pytest.raises(UnreadableInputError, match=r'"://" and "::".*rename the file'):
            read_files(inputs)


@pytest.mark.parametrize("write", ["dask", "pandas"])
def test_an_index_that_has_no_name_is_no_column(tmp_path, write):
    frame = pd.DataFrame({"text": ["a", "b", "c", "d"]}, index=[3, 5, 7, 9])
    if write == "dask":
        dd.from_pandas(frame, npartitions=2).to_parquet(tmp_path / "in")
    else:
        (tmp_path / "in").mkdir()
        frame.to_parquet(tmp_path / "in" / "a.parquet")
    (name,) = {*pq.read_schema(next((tmp_path / "in").glob("*.parquet"))).names} - {"text"}

    assert read_files(tmp_path / "in").compute()["text"].tolist() == list("abcd")
    assert [*read_files(tmp_path / "in").columns] == ["text"]
    assert read_files(tmp_path / "in", fields=[name]).compute()[name].tolist() == [3, 5, 7, 9]
    Pipeline([ParquetReader(tmp_path / "in"), JsonlWriter(tmp_path / "out")]).run()
    lines = [pd.read_json(file, lines=True) for file in sorted((tmp_path / "out").glob("*.jsonl"))]
    assert pd.concat(lines).to_dict("list") == {"text": list("abcd")}
