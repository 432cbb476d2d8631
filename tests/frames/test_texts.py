"""Texts fold in order of appearance, are counted and taken."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuclassify.frames import Texts

ROWS = [None, "b", "", "naïve 🦄 text", "b", None, "naïve 🐎", " "]


@pytest.mark.parametrize("max_chars", [None, 3, 7])
@given(rows=st.lists(st.one_of(st.none(), st.text("ab\u0301🦄", max_size=9)), max_size=12))
def test_distinct_texts_and_the_index_of_each_row_among_them(max_chars, rows):
    for texts in (ROWS, rows):
        distinct, indices = Texts(texts).fold(max_chars)
        cut = [None if text is None else text[:max_chars] for text in texts]
        assert indices.dtype == np.int64
        assert distinct == list(dict.fromkeys(text for text in cut if text is not None))
        assert [None if index < 0 else distinct[index] for index in indices] == cut


def test_texts_are_counted_and_taken():
    texts = Texts(ROWS)
    assert texts.char_counts.dtype == np.int64
    assert texts.char_counts.tolist() == [0, 1, 0, 12, 1, 0, 7, 1]
    assert texts.take(np.array([6, 0, 3])) == [ROWS[6], None, ROWS[3]]
    for none in (Texts([]), Texts([None, None])):
        distinct, indices = none.fold(5)
        assert (len(distinct), indices.tolist()) == (0, [-1] * len(none))
