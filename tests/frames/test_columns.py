"""The verbs of both backends: texts out, columns in, rows taken, whatever the index is."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from gpuclassify import ExactDuplicates, FuzzyDuplicates, Select
from gpuclassify.frames import backend_of, name_row, to_pandas
from gpuclassify.mapping.heads import list_array

TEXTS = ["one", None, "", "naïve 🦄 text", "five"]
COUNT = len(TEXTS)
NULLS = np.array([False, True, False, False, True])
ARRAYS = {
    "label": pa.array(["x", None, "y", "x", None]),
    "category": pa.DictionaryArray.from_arrays(
        pa.array([1, None, 0, 1, None], pa.int8()), pa.array(["y", "x"])
    ),
    "score": pa.array(np.array([0.5, 0, np.nan, 1, 0], dtype=np.float32), mask=NULLS),
    "scores": list_array(np.arange(10, dtype=np.float32).reshape(5, 2)).take(
        pa.array([0, None, 2, 3, None])
    ),
    "named": pa.StructArray.from_arrays(
        [pa.array(np.arange(5, dtype=np.float32)), pa.array(np.ones(5, dtype=np.float32))],
        names=["High", "a/b c"],
    ).take(pa.array([0, None, 2, 3, None])),
    "number": pa.array([1, None, 3, 4, None]),
    "maybe": pa.array([True, None, False, True, None]),
    "kept": pa.array([True, False, True, False, False]),
}
SCHEMA = pa.schema(
    [
        ("label", pa.string()),
        ("category", pa.string()),
        ("score", pa.float32()),
        ("scores", pa.list_(pa.float32())),
        ("named", pa.struct([("High", pa.float32()), ("a/b c", pa.float32())])),
        ("number", pa.int64()),
        ("maybe", pa.bool_()),
        pa.field("kept", pa.bool_(), nullable=False),
    ]
)
INDEXES = {
    "range": pd.RangeIndex(COUNT),
    "duplicated": pd.Index([1, 1, 0, 1, 0], name="number"),
    "strings": pd.Index(["b", "a", "b", "c", "a"], name="key"),
    "with NaN": pd.Index([0.5, np.nan, 0.5, np.nan, 1.0]),
    "dates": pd.date_range("2024-01-01", periods=COUNT, name="when"),
    "several levels": pd.MultiIndex.from_arrays([[1, 1, 2, 2, 1], list("aabba")], names=["n", "l"]),
}


def frame_of(frames, index="range", texts=TEXTS, **columns):
    return frames.plain(
        pd.DataFrame({"text": pd.Series(texts, dtype="str"), **columns}).set_axis(INDEXES[index])
    )


def with_columns(frame, arrays=ARRAYS):
    backend = backend_of(frame)
    return backend.with_columns(frame, arrays, SCHEMA, backend.string_dtype(frame, "text"))


def assert_values(found, rows=slice(None)):
    """`found`, a pandas frame of the new columns, has the values of ARRAYS."""
    for name, array in ARRAYS.items():
        expected = array.to_pylist()[rows]
        values = found[name].to_list()
        is_null = [value is None for value in expected]
        if name != "score":  # whose NaN counts as missing in pandas
            assert [np.ndim(value) == 0 and pd.isna(value) for value in values] == is_null, name
        for value, wanted in zip(values, expected, strict=True):
            if wanted is not None:
                np.testing.assert_array_equal(value, wanted, err_msg=name)


@pytest.mark.parametrize("index", INDEXES)
def test_new_columns_have_their_values_and_the_frames_index(frames, index):
    frame = frame_of(frames, index, id=range(COUNT))
    result = with_columns(frame)
    assert list(result.columns) == ["text", "id", *SCHEMA.names]
    found = frames.to_pandas(result)
    assert_values(found)
    pd.testing.assert_index_equal(found.index, frames.to_pandas(frame).index)
    pd.testing.assert_frame_equal(found[["text", "id"]], frames.to_pandas(frame))
    assert list(frame.columns) == ["text", "id"]


def test_categories_become_the_same_column_as_their_texts(frames):
    found = frames.to_pandas(with_columns(frame_of(frames)))
    pd.testing.assert_series_equal(found.label, found.category, check_names=False)
    chunks = pa.chunked_array([ARRAYS["category"][:2], ARRAYS["category"][2:]])
    again = frames.to_pandas(with_columns(frame_of(frames), {"category": chunks}))
    pd.testing.assert_series_equal(again.category, found.category)


@pytest.mark.parametrize("dtype", ["string[python]", pd.ArrowDtype(pa.large_string())])
def test_categories_become_the_text_columns_dtype(dtype):
    frame = pd.DataFrame({"text": pd.Series(TEXTS, dtype=dtype)})
    assert with_columns(frame).category.dtype == frame.text.dtype
    assert with_columns(frame).category.dropna().tolist() == ["x", "y", "x"]


def test_columns_that_are_there_are_replaced_in_place(frames):
    frame = frame_of(frames, "duplicated", label=range(COUNT), id=range(COUNT), number="old")
    result = with_columns(frame)
    rest = [name for name in SCHEMA.names if name not in ("label", "number")]
    assert list(result.columns) == ["text", "label", "id", "number", *rest]
    assert_values(frames.to_pandas(result))


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("rows", [[0, 3], [], range(COUNT)])
def test_taken_rows_are_whole(frames, index, rows):
    frame = with_columns(frame_of(frames, index, id=range(COUNT)))
    keep = np.isin(np.arange(COUNT), rows)
    taken = backend_of(frame).take_rows(frame, keep)
    assert dict(taken.dtypes) == dict(frame.dtypes)
    found = frames.to_pandas(taken)
    assert_values(found, rows=slice(0, 4, 3) if len(rows) == 2 else slice(len(rows)))
    expected = frames.to_pandas(frame).index.take(list(rows))
    pd.testing.assert_index_equal(found.index, expected, exact=False)
    assert found.id.tolist() == list(rows)


@pytest.mark.parametrize("arrays", ["none", "nulls"])
def test_a_frame_without_rows_or_values_has_the_same_dtypes(frames, arrays):
    expected = dict(with_columns(frame_of(frames, "duplicated")).dtypes)
    if arrays == "none":
        frame = frame_of(frames, "duplicated").iloc[:0]
        made = {field.name: pa.array([], field.type) for field in SCHEMA}
    else:
        frame = frame_of(frames, "duplicated", [None] * COUNT)
        made = {name: array.take(pa.nulls(COUNT, pa.int64())) for name, array in ARRAYS.items()}
        made["kept"] = pa.array([False] * COUNT)
    result = with_columns(frame, made)
    assert dict(result.dtypes) == expected
    assert frames.to_pandas(result).index.name == "number"


@pytest.mark.parametrize(
    ("max_chars", "expected"), [(None, TEXTS), (3, ["one", None, "", "naï", "fiv"])]
)
def test_texts_come_out_as_they_are_and_nulls_as_none(frames, max_chars, expected):
    frame = frame_of(frames, "several levels")
    assert backend_of(frame).texts(frame, "text", max_chars) == expected
    sliced = frame.iloc[1:4]
    assert backend_of(sliced).texts(sliced, "text", max_chars) == expected[1:4]
    assert backend_of(frame).texts(frame.iloc[:0], "text", max_chars) == []


@pytest.mark.parametrize("dtype", ["float64", "object", "str"])
def test_a_partition_without_any_text_is_text_too(frames, dtype):
    frame = frames.plain(pd.DataFrame({"text": pd.Series([None] * 3, dtype=dtype)}))
    assert backend_of(frame).texts(frame, "text", 5) == [None] * 3


ARROW = pd.ArrowDtype
CODES = pa.dictionary(pa.int8(), pa.string())


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (["a", None, "b"], "category"),
        (["a", None, "b"], ARROW(CODES)),
        (["a", None, "b"], ARROW(pa.string_view())),
        ([None] * 3, "category"),
        ([None] * 3, ARROW(pa.null())),
        ([None] * 3, "float64"),
        ([None] * 3, "Int64"),
    ],
)
def test_texts_are_read_however_they_are_stored(values, dtype):
    """Classified, filtered and deduplicated, with every column as it was."""
    if isinstance(dtype, pd.ArrowDtype):
        column = pd.arrays.ArrowExtensionArray(pa.array(values).cast(dtype.pyarrow_dtype))
    else:
        column = pd.array(values, dtype)
    frame = pd.DataFrame({"text": column, "id": ["1", "2", "3"], "n": column})
    backend = backend_of(frame)
    backend.check_text_column(frame, "text")
    assert backend.texts(frame, "text", None) == values
    assert backend.text_array(frame, "text").to_pylist() == values
    with_labels = backend.with_columns(
        frame, {"label": ARRAYS["label"][:3]}, SCHEMA, backend.string_dtype(frame, "text")
    )
    kept = backend.take_rows(with_labels, np.array([True, False, True]))
    assert dict(kept.dtypes) == dict(with_labels.dtypes)
    assert kept.drop(columns="label").dtypes.equals(frame.dtypes)
    assert kept["label"].tolist() == ["x", "y"]
    assert plain_values(kept["n"]) == [values[0], values[2]]
    for duplicates in (ExactDuplicates(id_field="id"), ExactDuplicates(id_field="id", by="n")):
        twice = pd.concat([frame, frame.assign(id=["4", "5", "6"])], ignore_index=True)
        left = duplicates.remove(twice)
        assert left.dtypes.equals(frame.dtypes)
        assert left["id"].tolist() == [*"123", *("5" if values[0] else "456")]


VIEW, CODES = pa.string_view(), pa.array([0, None, 1], pa.int8())
VIEWS = {
    str(column.type): column
    for column in (
        pa.array(["a", None, "b"], VIEW),
        pa.array([b"a", None, b"b"], pa.binary_view()),
        pa.array([["a"], None, ["b", None]], pa.list_(VIEW)),
        pa.array([["a", "b"], None, ["c", None]], pa.list_(VIEW, 2)),
        pa.array([[1], None, [2, None]], pa.list_view(pa.int64())),
        pa.array([["a"], None, ["b", None]], pa.large_list_view(VIEW)),
        pa.array([[["a"]], None, [None, []]], pa.list_view(pa.list_view(VIEW))),
        pa.array([{"a": "x"}, None, {"a": None}], pa.struct([("a", VIEW)])),
        pa.array([{"a": ["x"]}, None, {"a": None}], pa.struct([("a", pa.list_view(VIEW))])),
        pa.array([[("a", b"x")], None, []], pa.map_(VIEW, pa.binary_view())),
        pa.DictionaryArray.from_arrays(CODES, pa.array(["a", "b"], VIEW)),
        pa.DictionaryArray.from_arrays(CODES, pa.array([b"a", b"b"], pa.binary_view())),
    )
}


@pytest.mark.parametrize("kind", VIEWS)
def test_views_beside_the_text_are_taken_and_stay_views(kind):
    own = VIEWS[kind].to_pylist()
    column = pd.arrays.ArrowExtensionArray(pa.chunked_array([VIEWS[kind]]))
    frame = pd.DataFrame({"text": ["t", "t", "u"], "id": ["1", "2", "3"], "n": column})
    assert pa.array(Select("id != '2'")(frame)["n"].array).to_pylist() == [own[0], own[2]]
    left = ExactDuplicates(id_field="id").remove(frame)
    assert left["n"].dtype == frame["n"].dtype
    assert pa.array(left["n"].array).to_pylist() == [own[0], own[2]]


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("finder", [ExactDuplicates, FuzzyDuplicates])
def test_views_are_ids_and_lists_are_refused(finder, kind):
    values = pa.chunked_array([VIEWS[kind].slice(0, 1), VIEWS[kind].slice(2, 1)])
    column = pd.arrays.ArrowExtensionArray(values)
    frame = pd.DataFrame({"text": ["t", "t"], "n": column})
    if pa.types.is_nested(values.type):
        with pytest.raises(TypeError, match=r"column 'n' holds .*: ids"):
            finder(id_field="n")(frame)
    else:
        found = finder(id_field="n")(frame)
        assert pa.array(found["n"].array).to_pylist() == values.to_pylist()


@pytest.mark.parametrize("values", [pd.Categorical([1, 2]), pd.array([1], ARROW(pa.int8()))])
def test_what_is_no_text_is_refused(values):
    frame = pd.DataFrame({"text": values})
    with pytest.raises(TypeError, match="not strings: convert it"):
        backend_of(frame).check_text_column(frame, "text")


def test_numbers_in_a_partition_are_refused(frames):
    frame = frames.plain(pd.DataFrame({"text": [1.5, 2.5]}))
    with pytest.raises(TypeError, match=r"not a string|not strings"):
        backend_of(frame).texts(frame, "text", None)


@pytest.mark.parametrize(
    ("index", "shown"), [("range", "3"), ("duplicated", "1"), ("strings", "'c'")]
)
def test_messages_name_a_row_by_its_label(frames, index, shown):
    assert name_row(frame_of(frames, index), 3) == f"row 3 (index label {shown})"


@pytest.mark.parametrize("index", ["range", "duplicated", "with NaN"])
def test_every_type_comes_to_pandas_with_its_nulls(frames, index):
    columns = {
        "number": pd.Series([1, None, 3, 4, None], dtype="Int64"),
        "when": pd.to_datetime(pd.Series(["2024-01-01", None, "2025-02-03", None, "2026-03-04"])),
        "kind": pd.Series(["x", None, "y", "x", None], dtype="category"),
        "tags": pd.Series([["a"], None, [], ["b", "c"], None]),
    }
    expected = {name: plain_values(column) for name, column in columns.items()}
    for names in (["when"], ["number", "when", "kind"], ["tags"], list(columns)):
        frame = frame_of(frames, index, **columns)[names]
        found = to_pandas(frame)
        pd.testing.assert_index_equal(found.index, INDEXES[index])
        for name in names:
            assert plain_values(found[name]) == expected[name]


def plain_values(column):
    """Python's own values; null is None."""
    return [
        value if isinstance(value, list) or not pd.isna(value) else None
        for value in column.tolist()
    ]
