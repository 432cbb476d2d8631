import base64
import json

import dask.dataframe as dd
import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpuclassify import DomainClassifier, JsonlWriter, ParquetWriter, Pipeline, to_parquet
from gpuclassify.jobs.ledger.encoding import Encoding, arrow_table
from tests.replicas import sample_texts

LISTS = pd.ArrowDtype(pa.list_(pa.float32()))


@pytest.fixture
def frame():
    own = pa.struct([("a", pa.int64())]), pa.map_(pa.string(), pa.int64())
    columns = {
        "text": pd.array(["one", None, "drei\n"], dtype="str"),
        "probabilities": pd.array([[0.25, 0.75], None, [1.0, 0.0]], dtype=LISTS),
        "struct": pd.array([{"a": 1}, None, None], dtype=pd.ArrowDtype(own[0])),
        "map": pd.array([[("a", 1)], None, None], dtype=pd.ArrowDtype(own[1])),
    }
    return pd.DataFrame(columns, index=[7, 7, 9])


@pytest.fixture
def written(frame, tmp_path):
    path = str(tmp_path / "out")
    to_parquet(dd.from_pandas(frame, npartitions=1, sort=False), path)
    return path


def as_lists(values):
    return [None if value is None or value is pd.NA else list(value) for value in values]


EXPECTED = [[0.25, 0.75], None, [1.0, 0.0]]


def test_every_reader_reads_scores_text_and_index_without_an_option(written):
    read = pd.read_parquet(written)
    for frame in (read, dd.read_parquet(written).compute()):
        assert as_lists(frame["probabilities"]) == EXPECTED
    assert read["probabilities"][9].dtype == np.float32
    assert list(read.index) == [7, 7, 9]
    assert pd.api.types.is_string_dtype(read["text"].dtype)
    assert read["text"].isna().tolist() == [False, True, False]
    assert read["struct"].tolist() == [{"a": 1}, None, None]
    assert read["map"].tolist() == [[("a", 1)], None, None]
    table = pq.read_table(written)
    assert table.schema.field("probabilities").type == pa.list_(pa.float32())
    assert table["probabilities"].to_pylist() == EXPECTED
    rows = duckdb.sql(f"select probabilities, typeof(probabilities) from '{written}/*.parquet'")
    assert [(row and list(row), kind) for row, kind in rows.fetchall()] == [
        (row, "FLOAT[]") for row in EXPECTED
    ]


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


def test_lazy_writing_writes_when_computed(frame, tmp_path):
    lazy = to_parquet(frame, str(tmp_path / "out"), compute=False)
    assert list((tmp_path / "out").iterdir()) == []
    assert len(lazy.compute()) == 1


def test_bytes_are_base64_in_json_lines():
    blobs = [b"\xff\x00", b"", None, b"x"]
    lines = Encoding("jsonl", None).encode(arrow_table(pd.DataFrame({"blob": blobs})))
    read = [json.loads(line)["blob"] for line in lines.splitlines()]
    assert [None if blob is None else base64.b64decode(blob) for blob in read] == blobs


@pytest.mark.parametrize("is_lazy", [True, False], ids=["dask", "pandas"])
@pytest.mark.parametrize(
    ("names", "index"),
    [([1, "1"], None), ([("a", 1), "('a', '1')"], None), ([1.5, "1.5"], None), (["1", "b"], 1)],
    ids=str,
)
def test_names_that_are_equal_as_text_are_refused_at_the_call(tmp_path, names, index, is_lazy):
    frame = pd.DataFrame({"text": ["a", "b"], names[0]: [1, 2], names[1]: [3, 4]})
    frame.index = pd.Index([7, 9], name=index)
    dataset = dd.from_pandas(frame, npartitions=1) if is_lazy else frame
    with pytest.raises(ValueError, match="have one name as text"):
        to_parquet(dataset, tmp_path / "parquet", compute=False)
    for writer in (ParquetWriter, JsonlWriter) if is_lazy else ():
        if index is None or writer is ParquetWriter:  # JSON lines have no index
            with pytest.raises(ValueError, match=r"columns .* and .* have one name as text"):
                Pipeline([dataset, writer(tmp_path / "out")]).run()
    assert list(tmp_path.iterdir()) == []
