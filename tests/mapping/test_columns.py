"""List columns carry the numbers they are given, in the precision that the field declares."""

import numpy as np
import pyarrow as pa
import pytest

from gpuclassify import DomainClassifier
from gpuclassify.mapping.columns import COLUMN_TYPES, arrow_array, label_array, list_array

NUMBERS = np.array([[0.1, 2.0], [-3.5, 1e-3], [0.0, 7.0]], dtype=np.float32)


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_lists_hold_the_rounded_numbers(kind):
    found = arrow_array(
        NUMBERS, pa.field("x", COLUMN_TYPES[f"list<{kind}>"]), len(NUMBERS), "a test"
    )
    assert found.type == COLUMN_TYPES[f"list<{kind}>"]
    assert found.to_pylist() == NUMBERS.astype(kind).tolist()


def test_more_numbers_than_a_list_column_holds_are_refused():
    with pytest.raises(OverflowError, match=r"4194304 texts with 1024 numbers each.*partitions"):
        list_array(np.broadcast_to(np.float32(0), (2**22, 2**10)))


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


def test_labels_are_handed_on_as_numbers_and_each_labels_text_once(checkpoint):
    assert label_array(np.array([2, 0]), ["a", "b", "c"]).to_pylist() == ["c", "a"]
    classifier = DomainClassifier(model=checkpoint("domain"))
    names = classifier.labels
    scores = np.eye(len(names), dtype=np.float32)[[3, 0, 3]]
    found = classifier.heads[0].columns(scores)["domain_pred"]
    assert found.dictionary.to_pylist() == names
    assert found.to_pylist() == [names[3], names[0], names[3]]
