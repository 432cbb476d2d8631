import base64
import json

import dask.dataframe as dd
import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpuclassify import DomainClassifier, to_parquet
from gpuclassify.jobs.output.encoding import Encoding, arrow_table
from tests.replicas import sample_texts

LISTS = pd.ArrowDtype(pa.list_(pa.float32()))


@pytest.fixture
def frame():
    texts = pd.array(["one", None, "drei\n"], dtype="str")
    probabilities = pd.array([[0.25, 0.75], None, [1.0, 0.0]], dtype=LISTS)
    return pd.DataFrame({"text": texts, "probabilities": probabilities}, index=[7, 7, 9])


@pytest.fixture
def written(frame, tmp_path):
    path = str(tmp_path / "out")
    to_parquet(dd.from_pandas(frame, npartitions=1, sort=False), path)
    return path


def as_lists(values):
    return [None if value is None or value is pd.NA else list(value) for value in values]


EXPECTED = [[0.25, 0.75], None, [1.0, 0.0]]


def test_pandas_reads_scores_text_and_index_without_an_option(written):
    read = pd.read_parquet(written)
    assert as_lists(read["probabilities"]) == EXPECTED
    assert read["probabilities"][9].dtype == np.float32
    assert list(read.index) == [7, 7, 9]
    assert pd.api.types.is_string_dtype(read["text"].dtype)
    assert read["text"].isna().tolist() == [False, True, False]


def test_pandas_reads_structs_and_maps_of_the_users_own(tmp_path):
    struct, table = pa.struct([("a", pa.int64())]), pa.map_(pa.string(), pa.int64())
    own = {
        "struct": pd.array([{"a": 1}, None], dtype=pd.ArrowDtype(struct)),
        "map": pd.array([[("a", 1)], None], dtype=pd.ArrowDtype(table)),
    }
    to_parquet(pd.DataFrame(own), str(tmp_path))
    read = pd.read_parquet(tmp_path)
    assert read["struct"].tolist() == [{"a": 1}, None]
    assert read["map"].tolist() == [[("a", 1)], None]


def test_dask_reads_it_without_an_option(written):
    read = dd.read_parquet(written).compute()
    assert as_lists(read["probabilities"]) == EXPECTED


def test_pyarrow_and_duckdb_read_it_without_an_option(written):
    table = pq.read_table(written)
    assert table.schema.field("probabilities").type == pa.list_(pa.float32())
    assert table["probabilities"].to_pylist() == EXPECTED
    rows = duckdb.sql(f"select probabilities from '{written}/*.parquet'").fetchall()
    assert [None if row is None else list(row) for (row,) in rows] == EXPECTED
    kind = duckdb.sql(f"describe select probabilities from '{written}/*.parquet'").fetchall()[0][1]
    assert kind == "FLOAT[]"


@pytest.mark.gpu
def test_cudf_reads_and_writes_it_without_an_option(written, frame, tmp_path):
    import cudf

    read = cudf.read_parquet(written)
    assert read["probabilities"].to_arrow().to_pylist() == EXPECTED
    to_parquet(cudf.from_pandas(frame), str(tmp_path / "from-gpu"))
    assert as_lists(pd.read_parquet(tmp_path / "from-gpu")["probabilities"]) == EXPECTED


def test_empty_and_all_null_partitions_keep_the_schema(tmp_path, checkpoint):
    texts = pd.Series([None, None, *sample_texts(4), None], dtype="str")
    frame = pd.DataFrame({"text": texts, "number": range(7)})
    ddf = dd.from_pandas(frame, npartitions=3)
    ddf = ddf[ddf.number > 2]
    classified = DomainClassifier(model=checkpoint("domain"), score_field="scores", autocast=False)(
        ddf
    )
    path = tmp_path / "out"
    files = to_parquet(classified, str(path))
    assert len(files) == 3
    assert len({pq.read_schema(file).remove_metadata() for file in files}) == 1
    pd.testing.assert_series_equal(
        dd.read_parquet(path).compute()["domain_pred"].reset_index(drop=True),
        classified.compute()["domain_pred"].reset_index(drop=True),
        check_dtype=False,
    )


def test_earlier_parts_are_refused_or_removed_and_nothing_else_is(frame, tmp_path):
    path = tmp_path / "out"
    to_parquet(pd.concat([frame, frame]), str(path))
    (path / "notes.txt").write_text("mine")
    (path / "part-00009.parquet").write_bytes(b"stale")
    with pytest.raises(FileExistsError, match="2 part files"):
        to_parquet(frame, str(path))
    to_parquet(frame, str(path), overwrite=True)
    assert sorted(file.name for file in path.iterdir()) == ["notes.txt", "part-00000.parquet"]
    assert len(pd.read_parquet(path / "part-00000.parquet")) == 3


def test_a_filter_gives_all_parts_one_schema(tmp_path):
    frame = pd.DataFrame({"text": [*"abcdefgh"], "n": range(8)})
    ddf = dd.from_pandas(frame, npartitions=2)
    kept = ddf[ddf.n.isin([0, 1, 2, 3, 4, 7])]
    files = to_parquet(kept, str(tmp_path / "out"))
    assert len({tuple(pq.read_schema(file).names) for file in files}) == 1
    assert pd.read_parquet(tmp_path / "out").index.tolist() == [0, 1, 2, 3, 4, 7]


def test_a_dataset_is_not_overwritten_by_what_is_read_from_it(frame, tmp_path):
    path = str(tmp_path / "out")
    to_parquet(frame[["text"]], path)
    for source in (path, f"{path}/part-00000.parquet", f"{path}/*.parquet"):
        with pytest.raises(ValueError, match=r"is read from .*would remove it first"):
            to_parquet(dd.read_parquet(source), path, overwrite=True)
    assert len(pd.read_parquet(path)) == 3
    assert len(to_parquet(dd.read_parquet(path), str(tmp_path / "other"), overwrite=True)) == 1


def test_a_file_that_fails_while_written_leaves_nothing(tmp_path):
    path = tmp_path / "out"
    bad = pd.DataFrame({"text": [object()]})
    with pytest.raises(pa.ArrowInvalid):
        to_parquet(bad, str(path))
    assert list(path.iterdir()) == []


def test_output_over_a_file_is_refused(frame, tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(NotADirectoryError, match="is a file"):
        to_parquet(frame, str(tmp_path / "out"))


def test_memory_urls_work(frame):
    files = to_parquet(frame, "memory://bucket/out", overwrite=True)
    assert len(files) == 1
    assert len(pd.read_parquet("memory://bucket/out/part-00000.parquet")) == 3


def test_lazy_writing_writes_when_computed(frame, tmp_path):
    lazy = to_parquet(frame, str(tmp_path / "out"), compute=False)
    assert list((tmp_path / "out").iterdir()) == []
    assert len(lazy.compute()) == 1


def json_lines(frame):
    return Encoding("jsonl", None).encode(arrow_table(frame)).decode()


def test_json_lines_are_json_for_strict_readers_too():
    floats = [np.nan, np.inf, -np.inf, 0.5]
    frame = pd.DataFrame(
        {"text": list("abcd"), "blob": [b"\xff\x00", b"", None, b"x"], "n": floats}
    )
    frame["nested"] = [[1.0, np.inf], [], None, [0.25]]

    def refuse(word):
        raise AssertionError(word)

    rows = [json.loads(line, parse_constant=refuse) for line in json_lines(frame).splitlines()]
    assert [row["n"] for row in rows] == [None, None, None, 0.5]
    assert [row["nested"] for row in rows] == [[1.0, None], [], None, [0.25]]
    blobs = [None if row["blob"] is None else base64.b64decode(row["blob"]) for row in rows]
    assert blobs == frame["blob"].tolist()
