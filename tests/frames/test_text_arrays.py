"""A text column as an Arrow array and as digests, on both backends."""

import hashlib

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from gpuclassify.frames import backend_of

TEXTS = ["one", None, "", "naïve 🦄 text", "a\0b", "one", "\ufffd", "x" * 3000]


def frame_of(frames, texts=TEXTS, dtype="str"):
    return frames.plain(pd.DataFrame({"text": pd.Series(texts, dtype=dtype)}))


def md5_numbers(data):
    digest = hashlib.md5(data).digest()
    return [int.from_bytes(half, "big", signed=True) for half in (digest[:8], digest[8:])]


def test_an_array_has_the_texts_and_nulls_of_the_column(frames):
    frame = frame_of(frames)
    array = backend_of(frame).text_array(frame, "text")
    assert isinstance(array, pa.LargeStringArray)
    assert array.to_pylist() == TEXTS
    part = frame.iloc[1:4]
    assert backend_of(frame).text_array(part, "text").to_pylist() == TEXTS[1:4]


def test_digests_are_the_md5_of_utf8_as_signed_numbers(frames):
    frame = frame_of(frames)
    digests, has_text = backend_of(frame).text_digests(frame, "text")
    assert (digests.dtype, digests.shape) == (np.int64, (len(TEXTS), 2))
    assert has_text.tolist() == [bool(text) for text in TEXTS]
    expected = [md5_numbers(text.encode()) for text in TEXTS if text]
    assert digests[has_text].tolist() == expected
    assert (np.array(expected) < 0).any()
    part = frame.iloc[3:6]
    assert backend_of(frame).text_digests(part, "text")[0].tolist() == digests[3:6].tolist()


@pytest.mark.parametrize("dtype", ["float64", "object", "str"])
def test_a_partition_without_any_text(frames, dtype):
    if dtype == "float64":
        frame = frames.plain(pd.DataFrame({"text": [np.nan] * 3}))
    else:
        frame = frame_of(frames, [None] * 3, dtype)
    backend = backend_of(frame)
    assert backend.text_array(frame, "text").to_pylist() == [None] * 3
    assert backend.text_digests(frame, "text")[1].tolist() == [False] * 3
    empty = frame.iloc[:0]
    assert backend.text_array(empty, "text").to_pylist() == []
    assert backend.text_digests(empty, "text")[0].shape == (0, 2)


@pytest.mark.parametrize(
    "dtype",
    ["object", "string[python]", pd.ArrowDtype(pa.string()), pd.ArrowDtype(pa.string_view())],
    ids=str,
)
def test_every_dtype_of_strings_gives_the_same(dtype):
    frame = pd.DataFrame({"text": pd.Series(TEXTS, dtype=dtype)})
    plain = pd.DataFrame({"text": pd.Series(TEXTS, dtype="str")})
    backend = backend_of(frame)
    assert backend.text_array(frame, "text").to_pylist() == TEXTS
    for found, wanted in zip(
        backend.text_digests(frame, "text"), backend.text_digests(plain, "text"), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


def test_lone_surrogates_are_replaced_in_arrays_and_told_apart_in_digests():
    frame = pd.DataFrame({"text": pd.Series(["a\ud800", "a\udfff", "a\ufffd"], dtype=object)})
    backend = backend_of(frame)
    assert backend.text_array(frame, "text").to_pylist() == ["a\ufffd"] * 3
    digests, has_text = backend.text_digests(frame, "text")
    assert has_text.all()
    assert len(np.unique(digests, axis=0)) == 3


def test_numbers_among_texts_are_refused_by_row():
    frame = pd.DataFrame({"text": ["a", 1.5]}, dtype=object)
    for verb in (backend_of(frame).text_array, backend_of(frame).text_digests):
        with pytest.raises(TypeError, match=r"row 1 .* holds a float, not a string"):
            verb(frame, "text")
