"""Documents whose duplicates are known, and the ways to find them that must find these."""

import functools
import random
import re
import string

import dask
import pandas as pd
import pytest
import regex

from gpuclassify import ExactDuplicates, FuzzyDuplicates

WORDS = [
    f"{a}{b}"
    for a in ("ba", "ke", "li", "mo", "nu", "pra")
    for b in ("den", "fo", "gar", "ling", "rus", "st")
]


def make_text(words, count):
    """`count` random words."""
    return " ".join(words.choice(WORDS) + str(words.randrange(100)) for _ in range(count))


def edit(words, text, share):
    """The text with about this share of its words replaced."""
    return " ".join(
        words.choice(WORDS) + "x" if words.random() < share else word for word in text.split()
    )


# Two passes of few hashes, so that a test takes little time; they find all that is planted.
FUZZY = {"bands": 10, "rows": 5, "bands_per_pass": 5}
FINDERS = {
    "exact": ExactDuplicates,
    "fuzzy": functools.partial(FuzzyDuplicates, **FUZZY),
    "unverified": functools.partial(FuzzyDuplicates, verify=False, **FUZZY),
}
WAYS = pytest.mark.parametrize("way", FINDERS.values(), ids=FINDERS)


def expected(corpus, is_exact, keep_by="quality"):
    """Groups of the ids of each text's copies, and the one of the highest quality among them."""
    texts = corpus[corpus["text"].fillna("") != ""]
    groups = texts.groupby("text" if is_exact else "truth")
    found = []
    for _, rows in groups:
        if len(rows) > 1:
            best = rows.sort_values([keep_by, "id"], ascending=[False, True])["id"].iloc[0]
            found += [(i, rows["id"].min(), i == best) for i in rows["id"]]
    return pd.DataFrame(found, columns=["id", "group", "keep"]).sort_values("id", ignore_index=True)


def plain(found):
    """The ids, groups and decisions in the order of ids, with plain strings."""
    frame = found.compute() if dask.is_dask_collection(found) else found
    shown = frame[["id", "group", "keep"]].sort_values("id", ignore_index=True)
    return shown.astype({"id": "str", "group": "str"})


def make_corpus():
    """300 documents: 60 texts with two copies each, one exact and one slightly edited, and others.

    ``truth`` is the number of the text that a document comes from.
    """
    words = random.Random(7)
    rows = []
    for number in range(60):
        text = make_text(words, 150)
        rows += [(number, text), (number, text), (number, edit(words, text, 0.01))]
    rows += [(60 + number, make_text(words, 120)) for number in range(100)]
    rows += [(-1, None)] * 10 + [(-2, "")] * 10
    words.shuffle(rows)
    frame = pd.DataFrame(rows, columns=["truth", "text"])
    frame["id"] = [f"doc-{words.randrange(10**9):09}" for _ in range(len(frame))]
    frame["quality"] = [words.random() for _ in range(len(frame))]
    frame["source"] = [words.choice(["web", "books", None]) for _ in range(len(frame))]
    return frame


SCRIPTS = ("Han", "Hiragana", "Katakana", "Thai", "Lao", "Khmer", "Myanmar", "Tibetan", "Yi")
SCRIPTS += ("Tai_Le", "New_Tai_Lue", "Tai_Tham", "Tai_Viet", "Ahom", "Javanese", "Balinese")
SCRIPTS += ("Batak", "Buginese", "Bopomofo", "Tangut", "Khitan_Small_Script", "Nushu")
ALONE = "".join(rf"\p{{Script={script}}}" for script in SCRIPTS) + r"\p{Emoji_Presentation}"
GAP = r"\s\x1c-\x1f" + re.escape(string.punctuation)
TOKEN = regex.compile(f"[{ALONE}]|[^{GAP}{ALONE}]+")


def ngrams_of(text, n):
    """A text's token n-grams, or one of all its tokens if they are fewer."""
    tokens = TOKEN.findall(text)
    if not tokens:
        return {text}
    size = min(n, len(tokens))
    return {tuple(tokens[first : first + size]) for first in range(len(tokens) - size + 1)}
