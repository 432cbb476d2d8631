"""Select: conditions give the rows that `DataFrame.query` gives, and nothing in them is run."""

import datetime
import pickle

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from gpuclassify import Select
from gpuclassify.mapping.stage_counts import StageCounts
from gpuclassify.workers.run_context import run_context


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(0)
    rows = 200
    days = pd.date_range("2024-01-01", periods=rows, freq="D")
    return pd.DataFrame(
        {
            "quality": pd.Series(rng.choice(["High", "Low", "Medium"], rows), dtype="str"),
            "score": rng.random(rows).astype(np.float32),
            "count": pd.array(rng.integers(0, 9, rows), dtype="Int64"),
            "fineweb-edu-score-int": pd.array(rng.integers(0, 6, rows), dtype="Int64"),
            "is_duplicate": rng.random(rows) < 0.4,
            "day": days,
            "text": pd.Series([f"it's {row}" for row in range(rows)], dtype="str"),
            "lists": pd.array([[1.0]] * rows, pd.ArrowDtype(pa.list_(pa.float32()))),
        },
        index=rng.integers(0, 50, rows),
    )


CONDITIONS = [
    "quality != 'Low'",
    "quality in ('High', 'Medium') and not is_duplicate",
    "quality not in ['Low'] or score > 0.5",
    "0.25 <= score < 0.5",
    "`fineweb-edu-score-int` >= 3 and count == 2",
    "count * 2 + 1 > `fineweb-edu-score-int` / 2 - -1",
    "is_duplicate == True",
    "day >= '2024-03-01'",
    'text == "it\'s 17"',
    "not (quality == 'Low' or count in [1, 2, 3])",
    "count in [-1, 4]",
]


@pytest.mark.parametrize("where", CONDITIONS)
def test_rows_are_those_of_pandas(frame, where):
    expected = frame.query(where)
    assert 0 < len(expected) < len(frame)
    pd.testing.assert_frame_equal(Select(where)(frame), expected)
    with dask.config.set({"dataframe.convert-string": False}):
        lazy = Select(where)(dd.from_pandas(frame, npartitions=3, sort=False))
    pd.testing.assert_frame_equal(lazy.compute(scheduler="sync"), expected)


def test_a_number_of_the_condition_is_as_exact_as_the_column():
    frame = pd.DataFrame({"score": np.array([0.1, 0.2, 0.3], dtype=np.float32)})
    for where, rows in (("score == 0.1", [0]), ("score > 0.1", [1, 2]), ("score in [0.2]", [1])):
        assert Select(where)(frame).index.tolist() == rows
    assert frame[frame["score"] == 0.1].index.tolist() == [0]


NULLS = pd.DataFrame(
    {
        "label": pd.Series(["a", None, "b", None], dtype="str"),
        "n": pd.array([1, 2, None, None], dtype="Int64"),
        "b": pd.array([True, None, False, None], dtype="boolean"),
    }
)


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("label == 'a'", [0]),
        ("label != 'a'", [2]),
        ("not label == 'a'", [2]),
        ("label in ['a']", [0]),
        ("label not in ['a']", [2]),
        ("label is None", [1, 3]),
        ("label is not None and n is not None", [0]),
        ("label == 'a' or n == 2", [0, 1]),
        ("b", [0]),
        ("not b", [2]),
        ("b or n > 1", [0, 1]),
        ("n + 1 == 3", [1]),
    ],
)
def test_null_is_unknown_as_in_sql(where, rows):
    assert Select(where)(NULLS).index.tolist() == rows


def test_conditions_are_counted_one_after_another():
    with run_context(stages=StageCounts()) as context:
        Select("label != 'b' and n == 1")(NULLS)
    first, second = context.stages.counts.values()
    assert [*context.stages.counts] == ["Select label != 'b'", "Select n == 1"]
    assert (first["read"], first["kept"]) == (4, 1)
    assert first["dropped"] == {"condition": 1, "unknown": 2}
    assert (second["read"], second["kept"], second["dropped"]) == (1, 1, {})


CODE = [
    "__import__('os').system('true')",
    "quality.str.len() > 3",
    "open('/etc/passwd')",
    "(lambda: True)()",
    "[x for x in (1, 2)] == 1",
    "quality[0] == 'H'",
    "@outer > 3",
    "score > f'{1}'",
    "score ** 99999 > 1",
    "count << 9 > 3",
    "(y := 3) > count",
    "quality if count else score",
    "count == 1; import os",
    "count == b'1'",
    "*count",
    "...",
    "count > 1j",
]


@pytest.mark.parametrize("where", CODE)
def test_nothing_that_could_be_code_is_taken(where):
    with pytest.raises(ValueError, match="is no condition"):
        Select(where)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("quality = 'Low'", "is no condition"),
        ("a > 1 & b > 2", "write 'and'"),
        ("a > 1 | b > 2", "write 'or'"),
        ("~a", "write 'not'"),
        ("a == None", "`is None`"),
        ("a is 3", "`is None`"),
        ("a in b", "takes a list"),
        ("a in [b]", "a list holds"),
        ("1 < 2", "names no column"),
        ("(" * 300 + "a" + ")" * 300, "is no condition"),
        ("not " * 500 + "a", "nested more than"),
        ("a == '" + "x" * 20_000 + "'", "more than 10,000"),
    ],
)
def test_what_is_no_condition_is_refused(where, message):
    with pytest.raises(ValueError, match=message):
        Select(where)


def test_a_condition_is_a_text():
    for where in ("", None, 3):
        with pytest.raises(TypeError, match="is not a condition"):
            Select(where)


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ("qualty == 'Low'", ValueError, "Did you mean 'quality'"),
        ("quality > 3", TypeError, r"compares 'quality', which is .*string, with '3'"),
        ("score == 'High'", TypeError, "compare number with number"),
        ("quality", TypeError, "no condition"),
        ("not score", TypeError, "no condition"),
        ("quality + 1 > 2", TypeError, "calculates with 'quality'"),
        ("lists == 1", TypeError, "'lists', which is list.* `is None`"),
        ("lists == lists", TypeError, "'lists', which is list.* `is None`"),
        ("lists in [1]", TypeError, "'lists', which is list.* `is None`"),
        ("day > 'soon'", TypeError, "a time with what is none"),
        ("is_duplicate == 1", TypeError, "compare bool with bool"),
    ],
)
def test_types_and_names_are_checked_before_anything_runs(frame, where, error, message):
    with dask.config.set({"dataframe.convert-string": False}):
        lazy = dd.from_pandas(frame, npartitions=2, sort=False)
    with pytest.raises(error, match=message):
        Select(where)(lazy)


def test_values_of_any_type_can_be_asked_for_null():
    kinds = [pa.list_(pa.float32()), pa.struct({"a": pa.int64()}), pa.binary(), pa.duration("s")]
    values = [[1.0], {"a": 1}, b"a", datetime.timedelta(seconds=1)]
    for kind, value in zip(kinds, values, strict=True):
        frame = pd.DataFrame({"c": pd.array([value, None, value], pd.ArrowDtype(kind))})
        assert Select("c is None")(frame).index.tolist() == [1], kind
        assert Select("c is not None")(frame).index.tolist() == [0, 2], kind


def test_a_select_is_small_and_equal_to_its_like(frame):
    one, other = Select(CONDITIONS[4]), Select(CONDITIONS[4])
    assert one == other and len(pickle.dumps(one)) < 400
    assert pickle.loads(pickle.dumps(one)) == one and eval(repr(one)) == one
    with dask.config.set({"dataframe.convert-string": False}):
        lazy = dd.from_pandas(frame, npartitions=2, sort=False)
    assert one(lazy)._name == other(lazy)._name
    assert one.check(frame.iloc[:0]) is None


def test_types_that_pandas_seldom_has():
    frame = pd.DataFrame(
        {
            "c": pd.Categorical(["x", "y", None]),
            "half": pd.array([0.5, 1.5, None], pd.ArrowDtype(pa.float16())),
            "date": pd.array([datetime.date(2024, 1, 2)] * 3, pd.ArrowDtype(pa.date32())),
            "none": pd.array([None] * 3, pd.ArrowDtype(pa.null())),
        }
    )
    for where, rows in [
        ("c == 'x'", [0]),
        ("half > 1", [1]),
        ("date == '2024-01-02' and half == 0.5", [0]),
        ("none == 3", []),
        ("none is None and c != 'x'", [1]),
    ]:
        assert Select(where)(frame).index.tolist() == rows, where


def test_a_lazy_frame_stays_as_it_is_but_for_rows(frame):
    ordered = frame.reset_index(drop=True)
    with dask.config.set({"dataframe.convert-string": False}):
        ddf = dd.from_pandas(ordered, npartitions=4)
    lazy = Select("score > 2 or count == 3")(ddf)
    assert lazy.divisions == ddf.divisions
    nothing = Select("score > 2")(ddf).compute(scheduler="sync")
    assert nothing.empty
    for computed in (nothing, lazy.compute(scheduler="sync")):
        pd.testing.assert_series_equal(computed.dtypes, ddf._meta.dtypes)
    texts = lazy[["text"]].compute(scheduler="sync")  # of which the condition is not one
    assert texts["text"].tolist() == ordered.query("count == 3")["text"].tolist()


def test_conditions_and_classifiers_are_one_chain(checkpoint):
    from gpuclassify import DomainClassifier, classify

    model = checkpoint("domain")
    frame = pd.DataFrame({"text": ["one", "two", None, "four"], "n": [1, 2, 3, 4]})
    chain = [Select("n != 2"), DomainClassifier(model=model), Select("domain_pred is not None")]
    assert classify(frame, chain)["n"].tolist() == [1, 4]
