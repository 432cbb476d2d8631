"""Small corpora with known duplicates."""

import random

import pandas as pd
import pytest

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


@pytest.fixture
def corpus():
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
