"""List columns carry the numbers they are given, in the precision that the field declares."""

import numpy as np
import pyarrow as pa
import pytest

from gpuclassify.arrow import COLUMN_TYPES, arrow_array, list_array

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
