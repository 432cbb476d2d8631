"""libcudf's WordPiece as its source says, character by character and word by word.

`replacements` asks the Hugging Face tokenizer what becomes of each character; that libcudf's own
table says the same is tested where libcudf is installed (test_libcudf_table.py).
"""

import unicodedata

from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from gpuclassify.tokenizing.wordpiece_screen import SAFE

WORD_BYTES = 200
CHARS = [chr(code) for first, last in SAFE for code in range(first, last + 1)]


def replacements(is_lowercase):
    """Every safe character to what the tokenizer makes of it; spaces are where words end."""
    normalizer = BertNormalizer(lowercase=is_lowercase)
    splitter = BertPreTokenizer()
    found = {}
    for char in CHARS:
        normalized = normalizer.normalize_str(f"a{char}b")
        words = [word for word, _ in splitter.pre_tokenize_str(normalized)]
        found[char] = _between(words)
    return found


def _between(words):
    """What stands for X in the words of "aXb"."""
    if len(words) == 1:
        return words[0][1:-1]
    assert (words[0], words[-1]) == ("a", "b")
    return f" {words[1]} " if len(words) == 3 else " "


def is_independent(char):
    """Whether decomposing a text treats the character as decomposing it alone does."""
    parts = unicodedata.normalize("NFD", char)
    return all(
        unicodedata.category(part) == "Mn" or not unicodedata.combining(part) for part in parts
    )


def token_ids(text, replaced, vocabulary):
    """Ids of a text without special tokens, as ``wordpiece_tokenize`` of libcudf finds them."""
    normalized = "".join(replaced[char] for char in text)
    return [
        number for word in normalized.split(" ") if word for number in _pieces(word, vocabulary)
    ]


def _pieces(word, vocabulary):
    unknown = [vocabulary["[UNK]"]]
    if len(word.encode()) >= WORD_BYTES:
        return unknown
    ids, start = [], 0
    while start < len(word):
        mark = "##" if start else ""
        ends = range(len(word), start, -1)
        end = next((end for end in ends if mark + word[start:end] in vocabulary), None)
        if end is None:
            return unknown
        ids.append(vocabulary[mark + word[start:end]])
        start = end
    return ids
