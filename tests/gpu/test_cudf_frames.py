"""Classifiers on cudf frames: nulls beside NaN, files, other backends, spilling."""

import importlib

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpuclassify import DomainClassifier, FineWebEduClassifier
from gpuclassify.frames import backend_of
from tests.oracle import assert_close, stacked
from tests.replicas import sample_texts

pytestmark = pytest.mark.gpu

TEXTS = [*sample_texts(20, seed=3, max_words=40), None, ""]
SCORES = pa.list_(pa.float32())


@pytest.fixture(scope="module")
def cudf():
    return importlib.import_module("cudf")


@pytest.fixture
def domain(checkpoint):
    return DomainClassifier(model=checkpoint("domain"), autocast=False, score_field="scores")


@pytest.fixture
def frame():
    text = pd.Series(TEXTS, dtype="str")
    index = pd.Index(np.arange(len(TEXTS)) // 2, name="n")
    return pd.DataFrame({"text": text, "id": range(len(TEXTS))}).set_index(index)


def with_score(cudf, values):
    frame = cudf.DataFrame({"text": ["a", "b", "c"]})
    schema = pa.schema([("score", pa.float32())])
    return backend_of(frame).with_columns(frame, {"score": values}, schema, None).score


def test_nan_and_null_are_two_things(cudf):
    values = pa.array(np.array([0.5, np.nan, 1], dtype=np.float32), mask=np.array([0, 0, 1], bool))
    score = with_score(cudf, values)
    assert score.dtype == np.float32
    assert score.to_arrow().null_count == 1
    assert np.isnan(score.to_arrow()[1].as_py())


def test_new_columns_share_nothing_with_arrow(cudf):
    values = np.array([1, 2, 3], dtype=np.float32)
    score = with_score(cudf, pa.array(values))
    values[:] = 0
    assert score.to_arrow().to_pylist() == [1, 2, 3]


def test_integers_and_decisions_have_a_null_mask(cudf, checkpoint, frame):
    model = checkpoint("fineweb-edu")
    classifier = FineWebEduClassifier(model=model, autocast=False, min_score=0, keep_field="kept")
    result = classifier(cudf.from_pandas(frame))
    assert result["fineweb-edu-score-int"].dtype == np.int64
    assert result["fineweb-edu-score-int"].isnull().to_numpy().sum() == 1
    assert result["fineweb-edu-score-float"].dtype == np.float32
    assert result["fineweb-edu-score-float"].to_arrow().null_count == 1
    assert result.kept.dtype == np.bool_
    assert not result.kept.isnull().any()


@pytest.mark.parametrize("npartitions", [1, 3])
def test_list_columns_are_written_to_parquet_with_their_schema(
    domain, cudf, frame, tmp_path, npartitions
):
    lazy = dd.from_pandas(cudf.from_pandas(frame), npartitions=npartitions, sort=False)
    lazy = lazy[(lazy.id < 5) | (lazy.id > 17)]  # of three partitions the second is empty
    result = domain(lazy)
    result.to_parquet(tmp_path / "out")
    table = pq.read_table(tmp_path / "out")
    written = table.schema.field("scores").type  # whose elements cudf calls otherwise
    assert pa.types.is_list(written) and written.value_type == SCORES.value_type
    expected = result.compute(scheduler="sync")
    assert table["scores"].to_pylist() == expected.scores.to_arrow().to_pylist()
    assert table["text"].to_pylist() == expected.text.to_arrow().to_pylist()
    again = dd.read_parquet(tmp_path / "out")
    assert again.compute().domain_pred.isna().sum() == 1


def test_backends_are_changed_before_and_after(domain, cudf, frame):
    lazy = dd.from_pandas(frame, npartitions=3, sort=False)
    there = domain(lazy.to_backend("cudf"))
    assert isinstance(there._meta, cudf.DataFrame)
    back = there.to_backend("pandas").compute(scheduler="sync")
    expected = domain(lazy).compute(scheduler="sync")
    assert isinstance(back, pd.DataFrame)
    assert list(back.columns) == list(expected.columns)
    assert list(back.index) == list(expected.index)
    assert back.domain_pred.fillna("").tolist() == expected.domain_pred.fillna("").tolist()
    is_text = expected.text.notna().to_numpy()
    assert_close(stacked(back.scores[is_text]), stacked(expected.scores[is_text]))
    assert back.scores[~is_text].isna().all()


def test_meta_is_true_also_for_empty_and_all_null_partitions(domain, cudf, frame):
    lazy = dd.from_pandas(cudf.from_pandas(frame), npartitions=4, sort=False)
    lazy = lazy[(lazy.id < 3) | (lazy.id == TEXTS.index(None))]
    result = domain(lazy)
    assert result.dtypes["scores"] == cudf.ListDtype("float32")
    parts = dask.compute(*result.to_delayed(), scheduler="sync")
    assert 0 in map(len, parts)
    for part in parts:
        assert dict(part.dtypes) == dict(result._meta.dtypes)


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="dask-cudf 26.10 nests them deeper")
def test_a_merge_announces_list_columns_as_they_are(domain, cudf, frame):
    """Once this passes, the README needs to warn of it no more."""
    lazy = dd.from_pandas(cudf.from_pandas(frame), npartitions=2, sort=False)
    merged = domain(lazy).merge(lazy[["id"]], on="id")
    assert merged.dtypes["scores"] == cudf.ListDtype("float32")


def test_a_spilled_text_column_is_read_and_extended(run_python):
    """In a process of its own, because spilling is an option of the process."""
    run_python(
        """
import cudf
cudf.set_option("spill", True)
import pyarrow as pa
from cudf.core.buffer.spill_manager import get_global_manager
from gpuclassify.frames import cudf as backend
frame = cudf.DataFrame({"text": ["one", None, "three"] * 1000, "id": range(3000)})
assert get_global_manager().spill_to_device_limit(0) > 0
assert backend.texts(frame, "text", None) == ["one", None, "three"] * 1000
assert get_global_manager().spill_to_device_limit(0) > 0
assert backend.texts(frame, "text", 2) == ["on", None, "th"] * 1000
labels = pa.array(["x", None, "y"] * 1000)
schema = pa.schema([("label", pa.string())])
for array in (labels, labels.dictionary_encode()):
    get_global_manager().spill_to_device_limit(0)
    result = backend.with_columns(frame, {"label": array}, schema, None)
    get_global_manager().spill_to_device_limit(0)
    assert result.label.to_arrow().to_pylist() == labels.to_pylist()
    assert result.id.to_arrow().to_pylist() == list(range(3000))
"""
    )
