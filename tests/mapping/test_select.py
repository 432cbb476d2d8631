"""Select: conditions give the rows that `DataFrame.query` gives, and nothing in them is run."""

import datetime
import decimal
import pickle

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from gpuclassify import Select
from gpuclassify.jobs.input.schema import to_pandas
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
        ("a > " + "9" * 38, "an integer of more than 37 digits"),
        ("a > " + "9" * 5_000, "is no condition"),
        ("a > 0x" + "f" * 9_000, "an integer of more than 37 digits"),
        ("a == '\\ud800'", "which UTF-8 has no bytes for"),
        ("a" + ".b" * 4_000, "is no condition"),
        ("-" * 3_000 + "a > 3", "is no condition"),
        ("'\\" + "\\'" * 4_900, "is no condition"),
        ("a" + " + a" * 2_000 + " > 3", "nested more than"),
        ("`a b`.c > 3", "it has '`a b`.c'"),
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
        ("count > 9223372036854775807 + 1", ValueError, "which is too large: integers have 64"),
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


MOST = 2**63 - 1
WHOLE = {
    "u32": pa.array([1, 2**32 - 1, None], pa.uint32()),
    "u64": pa.array([0, 2**64 - 1, None], pa.uint64()),
    "i8": pa.array([-128, 127, None], pa.int8()),
    "i64": pa.array([MOST, 2**53 + 1, None], pa.int64()),
    "f32": pa.array([2.0**24, 0.1, None], pa.float32()),
    "f64": pa.array([2.0**63, 2.0**53, None], pa.float64()),
    "money": pa.array(
        [decimal.Decimal("0.10"), decimal.Decimal("-0.20"), None], pa.decimal64(9, 2)
    ),
}


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("u32 - 2 < 0", [0]),
        ("-u32 < -4294967294", [1]),
        ("i8 + i8 == 254 or i8 * i8 == 16384", [0, 1]),
        ("-i8 == 128", [0]),
        ("u64 - 1 < 0", [0]),
        ("u64 + u64 == 36893488147419103230", [1]),
        ("u64 > 0", [1]),
        ("u64 == 18446744073709551615", [1]),
        ("u64 < 99999999999999999999", [0, 1]),
        ("u64 in [-1, 18446744073709551615]", [1]),
        ("u64 > i64", [1]),
        ("u64 == 18446744073709551616.0", []),
        ("i64 > -99999999999999999999", [0, 1]),
        ("i64 >= -9223372036854775808", [0, 1]),
        ("i64 == 9007199254740992.0", []),
        ("i64 > 9007199254740992.0", [0, 1]),
        ("i64 < 9223372036854775808.0", [0, 1]),
        ("9223372036854775808.0 > i64", [0, 1]),
        ("i64 < f64", [0]),
        ("f32 == 16777217", []),
        ("f32 == 16777217.0 or f32 == 0.1", [0, 1]),
        ("f32 < 1e39", [0, 1]),
        ("i64 / 1 > 0", [0, 1]),
        ("money == 0.1", [0]),
        ("money * 10 == 1 and money + money < 0.21", [0]),
        ("money < 0 and money > -u64", [1]),
    ],
)
def test_numbers_are_exact(where, rows):
    table = pa.table(WHOLE)
    for frame in (table.to_pandas(types_mapper=pd.ArrowDtype), to_pandas(table)):
        assert Select(where)(frame).index.tolist() == rows


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (
            "i64 + 1 > 0",
            "'i64 \\+ 1', which is too large in row 3, where i64 is 9223372036854775807:",
        ),
        ("i64 * i64 > 0", "in row 3"),
        ("-(-i64 - 2) > 0", "'-i64 - 2', which is too large in row 3"),
        ("u64 * u64 > 0", "in row 4, where u64 is 18446744073709551615:"),
    ],
)
def test_a_result_that_is_too_large_names_its_row(where, message):
    rows = {name: [None, values[2], 0, values[0], values[1]] for name, values in WHOLE.items()}
    table = pa.table({name: pa.array(rows[name], WHOLE[name].type) for name in ("i64", "u64")})
    with pytest.raises(OverflowError, match=message):
        Select(where)(to_pandas(table))


DAY, HOUR = datetime.datetime(2024, 3, 1), datetime.timedelta(hours=1)  # in UTC
TIMES = {
    "berlin": pa.array([DAY, DAY - HOUR, None], pa.timestamp("us", "Europe/Berlin")),
    "offset": pa.array([DAY, DAY - 2 * HOUR, None], pa.timestamp("ns", "+02:00")),
    "plain": pa.array([DAY, datetime.datetime(2500, 1, 1), None], pa.timestamp("s")),
    "nanos": pa.array([DAY, DAY + datetime.timedelta(microseconds=1), None], pa.timestamp("ns")),
    "date": pa.array([DAY.date(), datetime.date(2500, 1, 1), None], pa.date32()),
    "clock": pa.array([datetime.time(12, 30), datetime.time(23, 59, 59), None], pa.time32("s")),
    "length": pa.array([10**12, 1, None], pa.duration("s")),
    "short": pa.array([10**12, 1, None], pa.duration("ns")),
}  # fmt: skip


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("berlin == '2024-03-01'", [1]),
        ("berlin > '2024-03-01'", [0]),
        ("berlin == '2024-03-01T00:00:00Z'", [0]),
        ("berlin >= '2024-03-01 00:30:00+01:00'", [0]),
        ("offset == '2024-03-01'", [1]),
        ("berlin == offset", [0]),
        ("plain > '2024-03-01 00:00:00.5'", [1]),
        ("plain == '2500-01-01'", [1]),
        ("nanos < '2500-01-01'", [0, 1]),
        ("plain == nanos", [0]),
        ("plain > nanos", [1]),
        ("date == plain and date == '2024-03-01'", [0]),
        ("date > nanos", [1]),
        ("clock == '12:30'", [0]),
        ("clock > '12:30:00.5'", [1]),
        ("'12:00' < clock < '13:00'", [0]),
        ("length > short", [0, 1]),
    ],
)
def test_times_are_compared_in_the_zone_of_their_column(where, rows):
    table = pa.table(TIMES)
    for frame in (table.to_pandas(types_mapper=pd.ArrowDtype), table.to_pandas()):
        assert Select(where)(frame).index.tolist() == rows


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("plain == '2024-03-01T00:00:00Z'", "a time with what is none: .* expected no zone offset"),
        ("berlin == '2024-10-27 02:30'", "ambiguous in timezone 'Europe/Berlin'"),
        ("berlin == '2024-03-31 02:30'", "doesn't exist in timezone 'Europe/Berlin'"),
        ("clock == '25:00'", "'clock', which is time32.*a time with what is none"),
        ("clock == plain", "compare time of day with time of day"),
        ("berlin == plain", "'berlin' has a zone and 'plain' has none: convert one of them"),
        ("date <= berlin", "'berlin' has a zone and 'date' has none: convert one of them"),
        ("length == '1s'", "compare duration with duration"),
        ("length == 1", "compare duration with duration"),
        ("date == '2024-03-01 12:30'", "a time with what is none"),
    ],
)
def test_times_that_cannot_be_compared_are_refused_by_name(where, message):
    with pytest.raises(TypeError, match=message):
        Select(where)(pa.table(TIMES).to_pandas(types_mapper=pd.ArrowDtype))


def test_names_are_read_as_they_are_written():
    names = ["µ", "μ", "ª", "a", "Ⅳ", "IV", "_quoted_0_", "_quoted0", "_quoted_0", "a b", "ﬁ", "fi"]
    frame = pd.DataFrame({name: np.arange(len(names)) == n for n, name in enumerate(names)})
    for row, name in enumerate(names):
        words = [f"`{name}`", *([name] if name.isidentifier() else [])]
        for word in words:
            for where in (
                word,
                f"((`a b` and not `a b`) or\n{word})",
                f"'ﬁ' == 'µ' or {word} == True",
            ):
                assert Select(where)(frame).index.tolist() == [row], where
                assert name in Select(where).read_fields


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
            "hash": pd.Series([2**64 - 1, None, -5], dtype=object),
        }
    )
    for where, rows in [
        ("c == 'x'", [0]),
        ("half > 1", [1]),
        ("date == '2024-01-02' and half == 0.5", [0]),
        ("none == 3", []),
        ("none is None and c != 'x'", [1]),
        ("hash > 18446744073709551614 or hash == -5", [0, 2]),
        ("none == none or none < c or none > date", []),
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
