"""The installed libcudf treats every safe character as the Hugging Face tokenizer does.

libcudf's normalizer works character by character from a table that its library holds, so that this
needs no GPU: the table is found by its beginning, and read as ``cpp/src/text/normalize.cuh`` does.
"""

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from gpuclassify.tokenizing.wordpiece_screen import SAFE
from tests.tokenizing.wordpiece_model import replacements

pytestmark = pytest.mark.rapids

REST = 5 << 24  # of characters beyond the table: they stay as they are
TABLE_SIZE = 195_104
CODE_POINT = (1 << 21) - 1
IS_MULTIPLE = 1 << 23
PADDED, PADDED_IF_LOWER, REMOVED, REMOVED_IF_LOWER, REPLACED = range(5)


@pytest.fixture(scope="module")
def table():
    """Metadata of each code point, uint32, from the library's read-only data."""
    import libcudf

    path = Path(libcudf.__file__).parent / "lib64" / "libcudf.so"
    # Nine controls are removed, tab and line feed become a space, then 21 in one of these ways.
    control, space = (
        (REMOVED << 24).to_bytes(4, "little"),
        (REPLACED << 24 | 32).to_bytes(4, "little"),
    )
    start = re.compile(re.escape(control * 9 + space * 2))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        [found] = start.finditer(data)
        return np.frombuffer(data[found.start() : found.start() + 4 * TABLE_SIZE], dtype="<u4")


def made_of(char, table, is_lowercase):
    """What ``data_normalizer_kernel`` writes for one character."""
    code = ord(char)
    metadata = int(table[code]) if code < TABLE_SIZE else REST
    kind = metadata >> 24 & 7
    if kind == REMOVED or (is_lowercase and kind == REMOVED_IF_LOWER):
        return ""
    assert not (is_lowercase and metadata & IS_MULTIPLE), f"U+{code:04X} becomes several"
    new = metadata & CODE_POINT if is_lowercase or kind == REPLACED else code
    made = chr(new or code)
    is_padded = kind == PADDED or (is_lowercase and kind == PADDED_IF_LOWER)
    return f" {made} " if is_padded else made


@pytest.mark.parametrize("is_lowercase", [True, False])
def test_every_safe_character_becomes_what_the_tokenizer_makes_of_it(table, is_lowercase):
    expected = replacements(is_lowercase)
    found = {char: made_of(char, table, is_lowercase) for char in expected}
    assert found == expected


@pytest.mark.parametrize(
    ("char", "made"), [("É", "e"), ("한", None), ("\u0951", ""), ("学", " 学 ")]
)
def test_the_table_is_read_as_libcudf_documents_it(table, char, made):
    if made is None:
        with pytest.raises(AssertionError, match="becomes several"):
            made_of(char, table, True)
    else:
        assert made_of(char, table, True) == made


def test_the_table_holds_all_safe_characters():
    assert max(last for _, last in SAFE) < TABLE_SIZE
