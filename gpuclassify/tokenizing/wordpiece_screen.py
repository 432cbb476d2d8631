"""Which texts libcudf tokenizes as the Hugging Face tokenizer of BERT does, by their characters.

The rules of both were compared for each character of `SAFE`. In all of them a character becomes at
most one, and the same one; whether it is a word of its own, parts two words or is dropped agrees.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpuclassify.tokenizing.wordpiece_rules import LONGEST_WORD_CHARS

# Code points, first and last of each range.
SAFE = (
    (0x0000, 0x06FF),  # Latin, combining marks, Greek, Cyrillic, Armenian, Hebrew, Arabic
    (0x0900, 0x097F),  # Devanagari
    (0x0E00, 0x0E7F),  # Thai
    (0x1E00, 0x2BFF),  # more Latin and Greek, punctuation, currencies, mathematics, symbols
    (0x3000, 0x302D),  # CJK punctuation
    (0x3030, 0x30FF),  # Hiragana and Katakana
    (0x3400, 0x4DBF),  # CJK ideographs
    (0x4E00, 0x9FFF),
    (0xFE00, 0xFE0F),  # which form an emoji has
    (0xFEFF, 0xFFEF),  # byte order mark, full and half width forms
    (0xFFFD, 0xFFFD),  # what a broken encoding left
    (0x1F000, 0x1FAFF),  # emoji
)
# Characters that end a word, or are one. Others do so too: a longer run than there is does no harm.
BREAKS = (
    (0x0009, 0x000A),
    (0x000D, 0x000D),
    (0x0020, 0x002F),
    (0x003A, 0x0040),
    (0x005B, 0x0060),
    (0x007B, 0x007E),
    (0x00A0, 0x00A0),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
)


def find_doubtful(codes: Tensor, chars: Tensor, special: Sequence[str]) -> Tensor:
    """Which texts may get other ids from libcudf than from the tokenizer.

    Parameters
    ----------
    codes : Tensor of int32, shape (all characters,)
        Each character's UTF-8 bytes as one number, as ``Series.str.code_points`` gives them.
    chars : Tensor of int64, shape (texts,)
        Characters of each text.
    special : sequence of str
        Tokens that a text must not contain.

    Returns
    -------
    Tensor of bool, shape (texts,)
        True also for some texts whose ids would be right.
    """
    found = [torch.nonzero(~_is_in(codes, SAFE)), _long_words(codes)]
    found += [_spelt(codes, token) for token in special]
    rows = torch.searchsorted(chars.cumsum(0), torch.cat(found).flatten(), right=True)
    is_doubtful = torch.zeros(len(chars), dtype=torch.bool, device=codes.device)
    is_doubtful[rows] = True
    return is_doubtful


def _is_in(codes: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Which characters are in one of the ranges of code points.

    Packed UTF-8 keeps the order of code points. Four bytes make a negative number, and are in order
    among themselves.
    """
    bounds = sorted((pack(chr(first)), pack(chr(last)) + 1) for first, last in ranges)
    edges = torch.tensor(bounds, dtype=torch.int32, device=codes.device).flatten()
    return torch.bucketize(codes, edges, right=True, out_int32=True) % 2 == 1


def _long_words(codes: Tensor) -> Tensor:
    """Where more than `LONGEST_WORD_CHARS` characters without a break begin, (found, 1).

    One text's end and the next one's beginning may count as one word: that does no harm.
    """
    breaks = _is_in(codes, BREAKS).cumsum(0, dtype=torch.int32)
    before = torch.nn.functional.pad(breaks, (1, 0))  # breaks before each character
    window = LONGEST_WORD_CHARS + 1
    return torch.nonzero(before[window:] == before[:-window])


def _spelt(codes: Tensor, token: str) -> Tensor:
    """Where `token` begins, (found, 1)."""
    starts = torch.nonzero(codes == pack(token[0]))
    for distance, char in enumerate(token[1:], 1):
        ahead = starts + distance
        is_there = ahead < len(codes)
        is_there &= codes[ahead.clamp(max=len(codes) - 1)] == pack(char)
        starts = starts[is_there].unsqueeze(1)
    return starts


def pack(char: str) -> int:
    """A character's UTF-8 bytes as a signed number of 32 bits."""
    number = int.from_bytes(char.encode(), "big")
    return number - (1 << 32) if number >= 1 << 31 else number


def probe_texts() -> list[str]:
    """Texts that hold every safe character, within a word and alone."""
    chars = [chr(code) for first, last in SAFE for code in range(first, last + 1)]
    groups = [chars[start : start + 32] for start in range(0, len(chars), 32)]
    return [" ".join(f"a{char}b {char}" for char in group) for group in groups]
