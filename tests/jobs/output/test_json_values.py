"""Values that JSON lines keep unchanged: several kinds, maps, and absent fields."""

import json

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from gpuclassify import FileReader, JsonlReader, JsonlWriter, ParquetReader, ParquetWriter, Pipeline
from gpuclassify.commands.cli import main
from gpuclassify.jobs.input.readers import read_files
from gpuclassify.jobs.input.schema import MOST_FIELDS
from gpuclassify.jobs.stores.store import UnreadableInputError


def run(reader, writer, stage=lambda frame: frame, **options):
    return Pipeline([reader, stage, writer], **options).run()


def lines_of(folder):
    return "".join(path.read_text() for path in sorted(folder.glob("part-*.jsonl")))


CONFLICTS = [
    '{"text": "a", "meta": {"a": 1.10, "b": [1, {"x": null}]}}',
    '{"text": "b", "meta": "x"}',
    '{"text": "c", "meta": [1e400, 123456789012345678901234567890]}',
    '{"text": "d", "meta": null}',
    '{"text": "\u00e9", "meta": "\\ud83d\\n\\u00e9 \u4e2d"}',
    '{"text": "f", "meta": {"a": 1, "a": 2, "": {}}}',
    '{"text": "g", "meta": true}',
    '{"text": "h", "meta": 7}',
]


@pytest.mark.parametrize("part_bytes", [None, 60])
def test_a_column_of_json_holds_any_values_and_gives_them_back(tmp_path, part_bytes):
    content = "".join(line + "\n" for line in CONFLICTS)
    (tmp_path / "a.jsonl").write_text(content)
    reader = JsonlReader(tmp_path / "a.jsonl", types={"meta": "json"}, part_bytes=part_bytes)
    run(reader, JsonlWriter(f"{tmp_path}/lines"))
    assert lines_of(tmp_path / "lines") == content
    run(reader, ParquetWriter(f"{tmp_path}/table"))
    texts = [line.partition('"meta": ')[2][:-1] for line in CONFLICTS]
    texts[3] = None
    files = sorted(map(str, (tmp_path / "table").glob("*.parquet")))
    frame = pd.concat(map(pd.read_parquet, files))
    assert [None if text != text else text for text in frame["meta"]] == texts
    found = duckdb.sql(f"select meta from '{tmp_path}/table/*.parquet'").fetchall()
    assert sorted(map(str, found)) == sorted(str((text,)) for text in texts)
    ddf = read_files(tmp_path / "table")
    assert pd.api.types.is_string_dtype(ddf["meta"].dtype)
    assert ddf.compute().dtypes.equals(ddf.dtypes)


def test_columns_that_parquet_calls_json_are_values_in_lines_and_lists_of_it_are_texts(tmp_path):
    texts = ['{"a": 1.10}', None, "[\n 1,\n2]", '"x"']
    for number, kind in enumerate([pa.json_(), pa.json_(pa.large_string())]):
        column = pa.array(texts, kind.storage_type).cast(kind)
        lists = pa.ListArray.from_arrays(pa.array(range(5), pa.int32()), column)
        table = pa.table({"n": [number] * 4, "meta": column, "lists": lists})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    run(ParquetReader(f"{tmp_path}/*.parquet"), JsonlWriter(f"{tmp_path}/out"))
    values = zip(['{"a": 1.10}', "null", "[  1, 2]", '"x"'], map(json.dumps, texts), strict=True)
    values = [f'"meta": {value}, "lists": [{text}]' for value, text in values]
    wanted = [f'{{"n": {n}, {value}}}\n' for n in range(2) for value in values]
    assert lines_of(tmp_path / "out") == "".join(wanted)


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (['{"id": 1}', '{"id": "x"}'], "id"),
        (['{"meta": {"a": 1}}', '{"meta": {"a": "x"}}'], "meta"),
        (['{"id": [1, "a"]}', '{"id": [2, "b"]}'], "id"),
        (['{"ok": true}', '{"ok": 1}'], "ok"),
    ],
)
def test_values_of_several_kinds_are_refused_with_their_column_and_its_cure(tmp_path, lines, name):
    (tmp_path / "a.jsonl").write_text("".join(line + "\n" for line in lines))
    with pytest.raises(UnreadableInputError, match=rf"its column {name}\b.*'{name}': 'json'"):
        JsonlReader(tmp_path / "a.jsonl").find_parts()
    reader = JsonlReader(tmp_path / "a.jsonl", types={name: "json"})
    run(reader, JsonlWriter(f"{tmp_path}/out"))
    assert lines_of(tmp_path / "out").splitlines() == lines
    words = ["preview", str(tmp_path / "a.jsonl")]
    assert f"{name}" in CliRunner().invoke(main, [*words, "--classifier", "domain"]).output


def test_what_a_stage_makes_of_json_must_be_json(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"meta": {"a": NaN}}\n{"meta": [Infinity]}\n')
    reader = JsonlReader(tmp_path / "a.jsonl", types={"meta": "json"})
    run(reader, JsonlWriter(f"{tmp_path}/out"))
    assert lines_of(tmp_path / "out") == '{"meta": {"a": null}}\n{"meta": [null]}\n'
    with pytest.raises(
        TypeError, match=r"column 'meta' has the type JSON, and .* is not JSON.*another name"
    ):
        run(reader, JsonlWriter(f"{tmp_path}/no"), lambda frame: frame.assign(meta="no JSON"))


def test_objects_with_ever_other_fields_do_not_explode(tmp_path, caplog):
    lines = [f'{{"id": {n}, "meta": {{"k{n}": {n}}}}}\n' for n in range(2 * MOST_FIELDS)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    run(FileReader(tmp_path / "a.jsonl"), JsonlWriter(f"{tmp_path}/out"))
    assert lines_of(tmp_path / "out") == "".join(lines)
    assert "column 'meta' have more than" in caplog.text


ABSENT = '{"meta": {"a": 1}}\n{"meta": {"b": [{"c": null}, {}]}, "n": 1}\n{"meta": null}\n'


def test_fields_that_lines_do_not_have_are_null(tmp_path):
    (tmp_path / "a.jsonl").write_text(ABSENT)
    run(FileReader(tmp_path / "a.jsonl"), JsonlWriter(f"{tmp_path}/out"))
    assert lines_of(tmp_path / "out") == (
        '{"meta": {"a": 1, "b": null}, "n": null}\n'
        '{"meta": {"a": null, "b": [{"c": null}, {"c": null}]}, "n": 1}\n'
        '{"meta": null, "n": null}\n'
    )
    assert read_files(tmp_path / "out").compute().shape == (3, 2)


MAPS = {
    "texts": (pa.map_(pa.string(), pa.int64()), [[("a", 1), ("b", None)], [], None]),
    "numbers": (pa.map_(pa.int32(), pa.string()), [[(1, "a"), (2, None)], [], None]),
    "maps": (
        pa.map_(pa.large_string(), pa.map_(pa.string(), pa.float64())),
        [[("a", [("b", 1.5)]), ("c", None)], None, [("d", [("e", None)])]],
    ),
    "objects": (
        pa.map_(pa.string(), pa.struct([("x", pa.list_(pa.map_(pa.string(), pa.int8())))])),
        [[("a", {"x": [[("b", 1)], None]})], [("c", {"x": None})], None],
    ),
    "codes": (
        pa.list_(pa.map_(pa.dictionary(pa.int8(), pa.string()), pa.string())),
        [[[("a", "b")], None], [], None],
    ),
}


def as_json(value):
    """The JSON value of a Python value, where lists of pairs are maps."""
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        pairs = [(key, as_json(item)) for key, item in value]
        is_text = isinstance(pairs[0][0], str)
        return dict(pairs) if is_text else [{"key": k, "value": v} for k, v in pairs]
    if isinstance(value, list):
        return [as_json(item) for item in value]
    is_object = isinstance(value, dict)
    return {key: as_json(item) for key, item in value.items()} if is_object else value


@pytest.mark.parametrize("kind", MAPS)
def test_maps_are_objects_that_every_reader_takes(tmp_path, kind):
    kind, values = MAPS[kind]
    plain = pa.list_(pa.map_(pa.string(), pa.string())) if "dictionary" in str(kind) else kind
    column = pa.array(values, plain)
    column = column.cast(kind) if plain != kind else column
    pq.write_table(pa.table({"text": ["a"] * 3, "x": column}), tmp_path / "a.parquet")
    run(FileReader(tmp_path / "a.parquet"), JsonlWriter(f"{tmp_path}/out"))
    found = [json.loads(line)["x"] for line in lines_of(tmp_path / "out").splitlines()]
    assert [value or None for value in found] == [as_json(value) or None for value in values]
    assert len(read_files(tmp_path / "out").compute()) == 3
    assert len(pd.read_json(next((tmp_path / "out").glob("part-*")), lines=True)) == 3
    assert duckdb.sql(f"select count(*) from '{tmp_path}/out/*.jsonl'").fetchall() == [(3,)]
