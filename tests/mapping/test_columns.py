"""Columns of a mapper keep the kind that their fields declare."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from gpuclassify.frames import pandas as pandas_frames
from gpuclassify.mapping import heads
from gpuclassify.mapping.heads import arrow_array, list_array, take


def test_more_numbers_than_one_array_holds_are_chunks_with_the_same_rows(monkeypatch):
    values = np.arange(70, dtype=np.float32).reshape(10, 7)
    whole = list_array(values)
    places = pa.array([9, None, 0, 4, 4, *range(10)])
    want = whole.take(places).to_pylist()
    monkeypatch.setattr(heads, "MOST_NUMBERS", 30)  # four rows, and no fifth
    found = list_array(values)
    assert [len(chunk) for chunk in found.chunks] == [4, 4, 2]
    for array in (whole, found):
        taken = take(array, places)
        assert (taken.type, taken.to_pylist()) == (whole.type, want)
        assert max(map(len, taken.chunks)) <= 4
    assert len(take(found, pa.array([], pa.int64()))) == 0


def test_a_column_of_more_than_two_to_the_31_numbers_is_read():
    """At Arrow's own limit: lists of nulls take no memory."""
    lists = pa.ListArray.from_arrays([0, 2**30], pa.nulls(2**30))
    frame = pd.DataFrame({"x": pd.arrays.ArrowExtensionArray(pa.chunked_array([lists] * 3))})
    read = pandas_frames.list_array(frame, "x")
    assert pc.list_value_length(read).to_pylist() == [2**30] * 3
    assert len(read.flatten()) == 3 * 2**30


TEXT = pa.field("x", pa.string())


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_texts_by_number_stay_numbers_and_texts(kind):
    codes = pa.array([1, None, 0, 1], pa.int8())
    values = pa.DictionaryArray.from_arrays(codes, pa.array(["a", "b"], kind))
    found = arrow_array(values, TEXT, 4, "a test")
    assert found.type == pa.dictionary(pa.int8(), pa.string())
    assert found.to_pylist() == ["b", None, "a", "b"]


def test_numbers_by_number_are_numbers_and_no_text():
    values = pa.array([0.5, 2.0, 0.5], pa.float32()).dictionary_encode()
    found = arrow_array(values, pa.field("x", pa.float32()), 3, "a test")
    assert found.equals(pa.array([0.5, 2.0, 0.5], pa.float32()))
    with pytest.raises(ValueError, match="no string: they are dictionary"):
        arrow_array(values, TEXT, 3, "a test")


@pytest.mark.parametrize("is_coded", [False, True])
@pytest.mark.parametrize("wanted", [pa.float32(), pa.int64(), pa.bool_()])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_texts_of_digits_are_no_numbers(kind, wanted, is_coded):
    values = pa.array(["1", "0"], kind)
    if is_coded:
        values = pa.DictionaryArray.from_arrays(pa.array([0, 1]), values)
    with pytest.raises(ValueError, match=rf"no {wanted}: they are {values.type}".split("<")[0]):
        arrow_array(values, pa.field("x", wanted), 2, "a test")
