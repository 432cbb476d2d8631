"""n-grams against sets of tuples in plain Python, and matches against brute force over these."""

import time
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuclassify.corpus.dedup.matching import character, match_groups, ngram_sets
from tests.corpus.dedup.known import ngrams_of

# Of these categories, and but for one mark, the blocks that count and the scripts are the same.
CHARACTERS = st.characters(
    codec="utf-8", categories=["Lo", "Lu", "Ll", "Nd", "Pd", "Zs", "Cc"], exclude_characters="〆"
)


def sets_of(texts, n=3):
    return ngram_sets(pa.array(texts, pa.large_string()), n)


@pytest.mark.parametrize("lead", range(0xC0, 0x100))
def test_bytes_that_are_no_utf8_become_no_character_beyond_unicode(lead):
    """Tables of characters are read without a check of bounds."""
    for rest in (b"", b"\xbf", b"\xbf\xbf\xbf", b"\xff\xff\xff"):
        data = np.frombuffer(bytes([lead]) + rest, np.uint8)
        code, _ = character(data, 0)
        assert 0 <= code <= 0x10FFFF


def hashes_of(sets):
    return [sets.hashes[first:end] for first, end in pairwise(sets.offsets.tolist())]


def assert_same_sets(texts, n):
    """Hashes stand for n-grams one to one, over all texts."""
    found = hashes_of(sets_of(texts, n))
    expected = [ngrams_of(text, n) for text in texts]
    for hashes, ngrams in zip(found, expected, strict=True):
        assert len(hashes) == len(ngrams)
        assert (np.diff(hashes) > 0).all()
    for hashes, ngrams in zip(found, expected, strict=True):
        for others, other_ngrams in zip(found, expected, strict=True):
            assert len(np.intersect1d(hashes, others)) == len(ngrams & other_ngrams)


TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "The quick brown fox jumps; over the lazy dog!",
    "the the the the the the",
    "one",
    "one two",
    "two one",
    "onetwo",
    "",
    " ",
    "!?",
    "?!",
    "\t\n",
    "jumpéd naïve Straße",
    "word\u3000word\u00a0word\u2029word\x1cword\u200bword",
    "東京都は日本の首都",
    "東京 都は日本の首都",
    "a東b京c",
    "ภาษาไทย ลาวລາວ ខ្មែរ မြန်မာ",
    "한국어 문장 하나 한국어",
    "𠀀𠀁🦄𠀂 🦄🦄 𠀀𠀁🦄",
    "བོད་སྐད། ꆈꌠꁱꂷ ᥖᥭᥰ ᦑᦺ ᨲᩫ᩠ᩅ ꪼꪕ 𑜒𑜑𑜪 ꦗꦮ ᬩᬮᬶ ᯅᯖᯂ᯲ ᨅᨔ ㄅㄆㄇ 𗀀𗀁 𘬀𘬁 𛅰𛅱",
    "🦄🚀🚀 🚀🦄 a🚀b ⭐⌛✅",
    "nul\0byte nul",
    "\ufffd \U0010ffff",
]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 50])
def test_sets_are_those_of_plain_python(n):
    assert_same_sets(TEXTS, n)


@given(
    st.lists(st.text(st.sampled_from("ab .,é東ไ🦄\u3000\n") | CHARACTERS), max_size=8),
    st.integers(1, 4),
)
def test_sets_of_random_texts(texts, n):
    assert_same_sets(texts, n)


@pytest.mark.parametrize(
    "alphabet", ["ཀཁགངཅཆ", "ꀀꀁꀂꀃꀄ", "ᨠᨡᨢᨣᨤ", "ꦏꦐꦑꦒꦓ", "😀😁😂🤣😃", "ᦀᦁᦂᦃᦄ"]
)
def test_texts_without_spaces_are_near_duplicates_by_their_characters(alphabet):
    letters = np.random.default_rng(1).choice([*alphabet], size=400)
    changed = [*letters[:200], alphabet[0] * 2, *letters[202:]]
    kept, similarity, _ = match(["".join(letters), "".join(changed)], threshold=0.5)
    assert kept.tolist() == [0, 0] and similarity[1] > 0.9


def characters_of(text, n):
    """A text's n-grams of characters, or the text itself if it has fewer."""
    return {text[first : first + n] for first in range(max(len(text) - n, 0) + 1)}


@pytest.mark.parametrize("n", [1, 2, 5, 24])
def test_sets_of_characters_are_those_of_plain_python(n):
    texts = [*filter(None, TEXTS), "abcd" * 1000, "東京" * 13, "é" * 24, "e" * 24]
    sets = ngram_sets(pa.array(texts, pa.large_string()), n, by_characters=True)
    found, expected = hashes_of(sets), [characters_of(text, n) for text in texts]
    assert [*map(len, found)] == [*map(len, expected)]
    for hashes, ngrams in zip(found, expected, strict=True):
        for others, other_ngrams in zip(found, expected, strict=True):
            assert len(np.intersect1d(hashes, others)) == len(ngrams & other_ngrams)


# Of libcudf's tests and documentation of `jaccard_index`, for five characters.
LIBCUDF = [
    ("the quick brown fox", "the slowest brown cat", 0.103448279),
    ("jumped over the lazy dog.", "crawled under the jumping fox", 0.0697674453),
    ("brown fox", "brown cat", 0.25),
    ("jumps over dog", "jumps on fox", 0.2),
    ("the brown dog", "the black cat", 0.058824),
    ("jumped about", "jumped around", 0.307692),
]


@pytest.mark.parametrize(("text", "other", "similarity"), LIBCUDF)
def test_similarity_by_characters_is_libcudfs(text, other, similarity):
    sets = ngram_sets(pa.array([text, other], pa.large_string()), 5, by_characters=True)
    found = match_groups(
        sets, np.array([0, 2]), np.zeros(2, bool), threshold=0.01, measure="jaccard"
    )
    assert found.similarity[1] == pytest.approx(similarity, rel=1e-5)


def test_slices_and_empty_texts():
    texts = pa.array(TEXTS, pa.large_string())
    whole, part = (hashes_of(ngram_sets(each, 3)) for each in (texts, texts[5:9]))
    assert all(map(np.array_equal, whole[5:9], part))
    assert sets_of([]).offsets.tolist() == [0]
    assert sets_of(["", ""]).offsets.tolist() == [0, 1, 2]


def test_texts_of_a_megabyte():
    words = np.random.default_rng(0).integers(1000, size=300_000)
    texts = [" ".join(map(str, words)), "same " * 200_000, "東" * 350_000, "x" * 1_000_000]
    found = [len(hashes) for hashes in hashes_of(sets_of(texts, 3))]
    assert found == [len(ngrams_of(text, 3)) for text in texts]


def match(texts, starts=None, is_fixed=None, threshold=0.8, measure="jaccard"):
    starts = np.array(starts or [0, len(texts)])
    is_fixed = np.zeros(len(texts), bool) if is_fixed is None else np.array(is_fixed)
    return match_groups(sets_of(texts), starts, is_fixed, threshold=threshold, measure=measure)


def similarity_of(text, other, measure):
    some, others = ngrams_of(text, 3), ngrams_of(other, 3)
    return len(some & others) / len(some if measure == "containment" else some | others)


def edited(rng, words, share):
    return np.where(rng.random(len(words)) < share, rng.integers(10**6, size=len(words)), words)


def near_duplicates(clusters, copies, share=0.01, shared_words=0, words=120, seed=0):
    """Texts of clusters one by one, each with the same beginning and of words of its own."""
    rng = np.random.default_rng(seed)
    start = rng.integers(10**6, size=shared_words)
    originals = rng.integers(10**6, size=(clusters, words))
    return [
        " ".join(map(str, [*start, *edited(rng, original, share)]))
        for _ in range(copies)
        for original in originals
    ]


@pytest.mark.parametrize("measure", ["jaccard", "containment"])
@pytest.mark.parametrize("threshold", [0.3, 0.6, 0.8, 1.0])
def test_matches_hold_by_brute_force(measure, threshold):
    rng = np.random.default_rng(1)
    texts = near_duplicates(40, 6, share=0.04, shared_words=60)
    starts = [0, 0, 1, 3, *sorted(rng.integers(3, len(texts), size=30)), len(texts)]
    is_fixed = rng.random(len(texts)) < 0.1
    found = match(texts, starts, is_fixed, threshold, measure)
    first = np.repeat(starts[:-1], np.diff(starts))
    for row, kept in enumerate(found.kept):
        if kept == row:
            assert found.similarity[row] == 1
            at_first = similarity_of(texts[row], texts[first[row]], measure)
            assert row == first[row] or is_fixed[row] or at_first < threshold
        else:
            assert not is_fixed[row]
            assert first[row] <= kept < row
            assert found.kept[kept] == kept
            share = similarity_of(texts[row], texts[kept], measure)
            assert share >= threshold
            assert found.similarity[row] == np.float32(share)
    candidates = (~is_fixed & (first != np.arange(len(texts)))).sum()
    assert candidates <= found.compared.sum() <= 2 * candidates
    assert (found.compared > 0).sum() == candidates


def test_a_chain_breaks():
    words = list("abcdefghijklmnopqrstuvwxyz0123456789")
    chain = [" ".join(words[first : first + 24]) for first in range(0, 6, 2)]
    assert similarity_of(chain[0], chain[1], "jaccard") == similarity_of(*chain[1:], "jaccard")
    found = match(chain, threshold=similarity_of(chain[0], chain[1], "jaccard"))
    assert found.kept.tolist() == [0, 0, 2]
    assert found.compared.tolist() == [0, 1, 1]


def test_containment_is_of_the_document_that_would_go():
    texts = ["a b c d e f g h i j k l", "a b c d e f"]
    assert match(texts, measure="containment").kept.tolist() == [0, 0]
    assert match(texts, measure="jaccard").kept.tolist() == [0, 1]
    assert match(texts[::-1], measure="containment").kept.tolist() == [0, 1]
    long = " ".join(map(str, range(5000)))
    found = match([long, "17 18 19 20", "4000 4001 4002 1"], measure="containment", threshold=0.6)
    assert found.kept.tolist() == [0, 0, 2]


def test_fixed_documents_stay_and_others_go_for_them():
    texts = near_duplicates(2, 3, share=0)
    found = match(texts, is_fixed=[True, True, True, False, False, False])
    assert found.kept.tolist() == [0, 1, 2, 1, 0, 1]
    assert found.compared.sum() == 5


def test_sketches_find_the_second_cluster_of_a_false_merger():
    """Half of each text but the first is the same, and each of 300 clusters has ten texts."""
    texts = near_duplicates(300, 10, shared_words=120)
    found = match(["a text of its own", *texts]).kept[1:] - 1
    cluster = np.arange(len(texts)) % 300
    assert (cluster[found] == cluster).all()
    similar = [
        similarity_of(text, texts[row % 300], "jaccard") >= 0.8 for row, text in enumerate(texts)
    ]
    assert (found != np.arange(len(texts))).sum() >= 0.999 * (sum(similar) - 300)


def test_equal_texts_find_each_other_among_many_that_share_nearly_all():
    """Each differs from every other in one of thirteen words: too much, and no sketch tells."""
    common = "one two three four five six seven eight nine ten eleven twelve"
    texts = [f"{common} {number}" for number in range(200)]
    found = match([*texts, *reversed(texts)], threshold=0.95)
    assert found.kept.tolist() == [*range(200), *reversed(range(200))]


@pytest.mark.parametrize("share", [0, 1], ids=["equal", "unlike"])
def test_a_large_group_takes_as_long_as_making_its_n_grams(share):
    """Within noise. Comparing all 450 million pairs would take far more."""
    texts = near_duplicates(1, 30_000, share, words=40)
    sets_of(texts[:100])
    started = time.process_time()
    sets = sets_of(texts)
    making = time.process_time() - started
    starts, is_fixed = np.array([0, len(texts)]), np.zeros(len(texts), bool)
    match_groups(sets, starts, is_fixed, threshold=0.8, measure="jaccard")
    started = time.process_time()
    found = match_groups(sets, starts, is_fixed, threshold=0.8, measure="jaccard")
    matching = time.process_time() - started

    assert (found.compared[1:] == 1).all()
    assert (found.kept != np.arange(len(texts))).sum() == (0 if share else len(texts) - 1)
    assert matching < 10 * making
