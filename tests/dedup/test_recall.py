"""What fuzzy deduplication finds, beside the Jaccard similarity of the very sets of n-grams."""

import random

import numpy as np
import pandas as pd
import pytest

from gpuclassify import FuzzyDuplicates
from gpuclassify.dedup.bands import catch_probability
from tests.dedup.known import edit, make_text

PAIRS, WIDTH = 1_200, 24


def character_set(text):
    return {text[first : first + WIDTH] for first in range(len(text) - WIDTH + 1)}


@pytest.fixture(scope="module")
def pairs():
    """Pairs of texts in one frame, next to each other, and the similarity of each pair."""
    words = random.Random(3)
    texts = []
    for number in range(PAIRS):
        text = make_text(words, 150)
        texts += [text, edit(words, text, 0.12 * number / PAIRS)]
    sets = list(map(character_set, texts))
    similar = [len(a & b) / len(a | b) for a, b in zip(sets[::2], sets[1::2], strict=True)]
    return pd.DataFrame({"id": range(2 * PAIRS), "text": texts}), np.array(similar)


@pytest.mark.parametrize(("bands", "rows"), [(20, 13), (14, 8), (26, 10)])
def test_so_many_pairs_are_found_as_the_formula_says(bands, rows, pairs):
    frame, similarity = pairs
    duplicates = FuzzyDuplicates(
        id_field="id", bands=bands, rows=rows, verify=False, char_ngrams=WIDTH
    )
    groups = duplicates(frame).set_index("id")["group"]
    found = groups.reindex(range(0, 2 * PAIRS, 2)).notna().to_numpy()
    assert (groups.reindex(range(1, 2 * PAIRS, 2)).notna().to_numpy() == found).all()
    expected = catch_probability(similarity, bands, rows)
    for low in np.arange(0.4, 1.0, 0.1):
        inside = (similarity >= low) & (similarity < low + 0.1)
        spread = np.sqrt((expected[inside] * (1 - expected[inside])).sum())
        assert inside.sum() > 50
        assert abs(found[inside].sum() - expected[inside].sum()) <= 3.5 * spread + 0.5


def test_what_is_removed_is_as_similar_as_it_says(pairs):
    frame, _ = pairs
    found = FuzzyDuplicates(id_field="id", bands=40, rows=5, min_similarity=0.7)(frame)
    texts = frame.set_index("id")["text"].map(
        lambda text: {tuple(text.split()[n : n + 3]) for n in range(len(text.split()) - 2)}
    )
    gone = found[~found["keep"]].set_index("id")["similarity"]
    assert len(gone) > 500
    for document, similarity in gone.items():
        a, b = texts[document], texts[document ^ 1]
        assert similarity == np.float32(len(a & b) / len(a | b)) >= 0.7
    pairs_of_words = zip(texts.iloc[::2], texts.iloc[1::2], strict=True)
    alike = sum(len(a & b) >= 0.7 * len(a | b) for a, b in pairs_of_words)
    assert len(gone) >= 0.99 * alike


def test_recall_in_words_is_as_the_guide_tells():
    """By the similarity that decides: an edit changes more 24-grams of characters than of words."""
    random_ = random.Random(5)
    # Words as long as those of running English: 4.7 letters.
    lengths = [1] * 3 + [2] * 17 + [3] * 21 + [4] * 16 + [5] * 11 + [6] * 9 + [7] * 8 + [8] * 6
    lengths += [9] * 4 + [10] * 3 + [11, 12]
    known = [
        "".join(random_.choices("abcdefghijklmnopqrstuvwxyz", k=random_.choice(lengths)))
        for _ in range(5_000)
    ]
    texts = []
    for number in range(PAIRS):
        words = random_.choices(known, k=300)
        share = 0.05 * number / PAIRS
        changed = [random_.choice(known) if random_.random() < share else word for word in words]
        texts += [" ".join(words), " ".join(changed)]
    grams = [{*zip(words, words[1:], words[2:], strict=False)} for words in map(str.split, texts)]
    alike = [len(a & b) / len(a | b) for a, b in zip(grams[::2], grams[1::2], strict=True)]
    similarity = np.array(alike)
    frame = pd.DataFrame({"id": range(2 * PAIRS), "text": texts})

    def recall(low, high, **settings):
        found = FuzzyDuplicates(id_field="id", **settings)(frame)
        is_found = np.isin(np.arange(PAIRS), found["id"] // 2)
        inside = (similarity >= low) & (similarity < high)
        assert inside.sum() > 60
        return is_found[inside].mean()

    assert 0.45 < recall(0.80, 0.82) < 0.75
    assert recall(0.90, 1.01) > 0.99
    assert recall(0.80, 1.01, threshold=0.7, min_similarity=0.8) > 0.98
