"""Files whose columns differ in the fields of objects, or how values are stored, are one input."""

import base64
import json
from decimal import Decimal

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpuclassify import FileReader, ParquetWriter, Pipeline
from gpuclassify.jobs.input.readers import first_rows, frame_of, read_files
from gpuclassify.jobs.stores.store import UnreadableInputError

TEXT, NUMBER = pa.string(), pa.int64()
URL = pa.struct([("url", TEXT)])
PAGE = pa.struct([("title", TEXT), ("url", TEXT)])
A_URL, A_PAGE = {"url": "u"}, {"title": "t", "url": "v"}
BIG = pa.struct([pa.field("n", NUMBER, nullable=False), ("url", pa.large_string())])
EMPTY = {"__dummy_field_in_empty_struct": None}  # what Parquet has for {}
CODES = pa.dictionary(pa.int8(), TEXT)
NO_NUMBERS = ([None] * 3, pa.float64())  # what pandas writes for a column without values
# Values and types of a column of several files.
COLUMNS = {
    "fields in another order": [([A_PAGE], PAGE), ([A_PAGE], pa.struct([*PAGE][::-1]))],
    "more fields in most": [([A_URL, None], URL), ([A_PAGE], PAGE), ([A_PAGE], PAGE)],
    "other fields": [([A_URL], URL), ([{"n": 1, "url": "w"}, None], BIG)],
    "objects in lists": [([[A_URL, None], []], pa.list_(URL)), ([[A_PAGE]], pa.large_list(PAGE))],
    "objects in lists in objects": [
        ([{"a": [[A_URL, None]]}], pa.struct([("a", pa.list_(pa.list_(URL)))])),
        ([{"b": 1, "a": [[A_PAGE]]}], pa.struct([("b", NUMBER), ("a", pa.list_(pa.list_(PAGE)))])),
    ],
    "objects in maps": [
        ([[("k", A_URL)], None], pa.map_(TEXT, URL)),
        ([[("l", A_PAGE), ("m", None)]], pa.map_(TEXT, PAGE)),
    ],
    "no fields": [([EMPTY, None], pa.struct([(*EMPTY, pa.null())])), ([A_PAGE], PAGE)],
    "codes": [(["a", None], CODES), (["b"], TEXT)],
    "codes of long texts": [(["a"], pa.dictionary(pa.int32(), pa.large_string())), (["b"], TEXT)],
    "codes in objects": [([{"url": "x"}], pa.struct([("url", CODES)])), ([A_PAGE], PAGE)],
    "views": [(["a", None], pa.string_view()), (["b"], TEXT)],
    "nothing but views": [(["a", None], pa.string_view())],
    "views in lists": [([["a"], [None]], pa.list_(pa.string_view())), ([["b"]], pa.list_(TEXT))],
    "views of bytes": [([b"a"], pa.binary_view()), ([b"b"], pa.binary())],
    "a size": [([["a", "b"], None], pa.list_(TEXT, 2)), ([["c"]], pa.list_(TEXT))],
    "two sizes": [([["a", "b"]], pa.list_(TEXT, 2)), ([["c"] * 3], pa.list_(TEXT, 3))],
    "a size of bytes": [([b"ab"], pa.binary(2)), ([b"c"], pa.binary())],
    "a size in objects": [
        ([{"a": [1, 2]}], pa.struct([("a", pa.list_(NUMBER, 2))])),
        ([{"a": [1.5]}], pa.struct([("a", pa.list_(pa.float64()))])),
    ],
    "nulls": [([None], pa.null()), (["a"], TEXT)],
    "nulls for objects": [([None], pa.null()), ([A_PAGE], PAGE)],
    "nulls in objects": [([{"url": None}], pa.struct([("url", pa.null())])), ([A_PAGE], PAGE)],
    "no numbers for texts": [NO_NUMBERS, NO_NUMBERS, (["a", None], TEXT)],
    "no numbers for objects": [NO_NUMBERS, NO_NUMBERS, ([A_PAGE], PAGE)],
    "no numbers for lists": [NO_NUMBERS, ([["a"]], pa.list_(TEXT))],
    "no numbers in objects": [
        ([{"url": None, "n": 1}], pa.struct([("url", pa.float64()), ("n", NUMBER)])),
        ([{"url": ["a"]}], pa.struct([("url", pa.list_(TEXT))])),
    ],
    "no numbers in lists": [
        ([[None], [], None] * 2, pa.list_(pa.float64())),
        ([["a"]], pa.list_(TEXT)),
    ],
    "text of JSON": [(['{"a":1}', None], pa.json_()), (["b"], TEXT)],
}  # fmt: skip


def write(folder, files):
    (folder / "in").mkdir()
    for number, (values, kind) in enumerate(files):
        plain = kind.value_type if pa.types.is_dictionary(kind) else kind
        storage = plain.storage_type if isinstance(plain, pa.BaseExtensionType) else plain
        column = pa.array(values, storage).cast(kind)
        pq.write_table(
            pa.table({"text": ["a"] * len(values), "x": column}), folder / f"in/{number}.parquet"
        )
    return folder / "in"


def without_nulls(value):
    """The value, where a field that is null is as one that is not there."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    is_many = isinstance(value, (list, tuple))
    return [without_nulls(item) for item in value] if is_many else value


@pytest.mark.parametrize("kind", COLUMNS)
def test_every_value_comes_out_as_it_was_in_its_file(tmp_path, kind):
    folder = write(tmp_path, COLUMNS[kind])
    wanted = [without_nulls(value) for values, _ in COLUMNS[kind] for value in values]
    Pipeline([FileReader(folder), lambda frame: frame, ParquetWriter(f"{tmp_path}/out")]).run()
    rows = pa.concat_tables(map(pq.read_table, sorted((tmp_path / "out").glob("*.parquet"))))
    found = [without_nulls(value) for value in rows["x"].to_pylist()]
    assert found == wanted
    ddf = read_files(folder)
    for part in ddf.to_delayed():
        pd.testing.assert_series_equal(part.compute().dtypes, ddf.dtypes)
    few = first_rows(FileReader([str(folder)]), 100)
    assert few["x"].isna().tolist() == [value is None for value in wanted]


@pytest.mark.parametrize(
    "kinds",
    [
        [([1.5, None], pa.float64()), (["a"], TEXT)],
        [([{"url": b"a"}], pa.struct([("url", pa.binary())])), ([A_URL], URL)],
        [([[1]], pa.list_(NUMBER)), ([1], NUMBER)],
        [([1], NUMBER), ([Decimal("1.5")], pa.decimal128(5, 2))],
        [([A_URL], URL), ([[("url", "u")]], pa.map_(TEXT, TEXT))],
    ],
)
def test_values_of_other_kinds_are_refused_with_their_column(tmp_path, kinds):
    folder = write(tmp_path, kinds)
    for read in (
        lambda: FileReader(folder).find_parts(),
        lambda: first_rows(FileReader([str(folder)]), 100),
    ):
        with pytest.raises(UnreadableInputError, match=r"do not fit together: x is "):
            read()
    assert len(read_files(folder, fields=["text"]).compute()) == sum(len(rows) for rows, _ in kinds)


def write_empty(path, columns, has_group):
    """Write a Parquet file without rows, with or without a row group."""
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema(columns)
    with pq.ParquetWriter(path, schema) as writer:
        if has_group:
            writer.write_table(schema.empty_table())


@pytest.mark.parametrize(
    ("values", "kind"), [(["a"], TEXT), ([1, 2], NUMBER), ([A_PAGE], PAGE)], ids=str
)
@pytest.mark.parametrize(
    "other", [pa.float64(), pa.null(), TEXT, URL, pa.list_(TEXT), CODES, None], ids=str
)
@pytest.mark.parametrize(
    ("name", "has_group"), [("0", True), ("2", True), ("0", False), ("folder=x/0", True)]
)
def test_a_file_without_rows_fits_any_other(tmp_path, values, kind, other, name, has_group):
    table = pa.table({"column": pa.array(values, kind), "text": ["t"] * len(values)})
    (tmp_path / "in").mkdir()
    pq.write_table(table, tmp_path / "in/1.parquet")
    alone = read_files(str(tmp_path / "in")).compute()
    columns = {"column": other} if other is not None else {"more": NUMBER, "folder": NUMBER}
    write_empty(tmp_path / f"in/{name}.parquet", columns, has_group)
    both = read_files(str(tmp_path / "in")).compute()
    pd.testing.assert_frame_equal(both[[*alone.columns]], alone)
    assert len(first_rows(FileReader([str(tmp_path / "in")]), 5)) == len(values)

    def adds(frame):
        return frame.assign(new=frame["text"] + "!")

    Pipeline([FileReader(str(tmp_path / "in")), adds, ParquetWriter(str(tmp_path / "out"))]).run()
    written = pq.read_table(tmp_path / "out", partitioning=None)
    assert written["new"].to_pylist() == ["t!"] * len(values)
    assert written["column"].to_pylist() == values


def test_files_without_rows_alone_keep_their_types(tmp_path):
    for number, kind in enumerate((NUMBER, pa.int32(), TEXT)):
        columns = {"column": kind if number < 2 else NUMBER, "text": TEXT}
        write_empty(tmp_path / f"{number}.parquet", columns, has_group=number % 2 == 0)
    frame = read_files(str(tmp_path)).compute()
    assert [*frame.columns] == ["column", "text"] and frame.empty
    assert frame.dtypes["column"] == pd.Int64Dtype()


@pytest.mark.parametrize(
    "values",
    [
        [2001, None],
        [1.5, float("inf")],
        [True, False],
        ["plain", '"quoted"'],
        [{"a": [1, None]}, None],
        [b"\xff", b""],
    ],
    ids=["int", "float", "bool", "text", "struct", "bytes"],
)
def test_a_json_column_of_lines_holds_values_of_parquet_files(tmp_path, values):
    table = pa.table({"id": [1, 2], "year": pa.array(values)})
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"id": 3, "year": "about 2"}\n{"id": 4, "year": [7]}\n')
    frame = frame_of(FileReader(str(tmp_path), types={"year": "json"})).compute()
    assert frame["id"].tolist() == [1, 2, 3, 4]
    found = [None if pd.isna(text) else json.loads(text) for text in frame["year"]]
    known = [base64.b64encode(v).decode() if isinstance(v, bytes) else v for v in values]
    assert found == [None if v == float("inf") else v for v in known] + ["about 2", [7]]
