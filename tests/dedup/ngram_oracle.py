"""Token n-grams as sets of tuples, in plain Python."""

import re
import string

import regex

SCRIPTS = ("Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar")
ALONE = "".join(rf"\p{{Script={script}}}" for script in SCRIPTS)
GAP = r"\s\x1c-\x1f" + re.escape(string.punctuation)
TOKEN = regex.compile(f"[{ALONE}]|[^{GAP}{ALONE}]+")


def ngrams_of(text, n):
    """The text's n-grams, or one of all its tokens if they are fewer."""
    tokens = TOKEN.findall(text)
    if not tokens:
        return {text}
    size = min(n, len(tokens))
    return {tuple(tokens[first : first + size]) for first in range(len(tokens) - size + 1)}
