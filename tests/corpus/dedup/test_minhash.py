"""MinHash signatures against libcudf's published vectors, mmh3 and plain numpy; band keys."""

import tracemalloc

import mmh3
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuclassify.corpus.dedup.minhash import BLOCK, band_keys, fold, hash_functions, signatures

ROW = 2**32
HARD = ["", None, "é", "a\0b", "\ufffd" * 30, "🦄" * 40, "naïve 🦄 text 漢字かな " * 9, "short"]


def expected(text, a, b, seed, width):
    """One signature by the formula, from a set of Python strings."""
    if not text:
        return np.zeros(len(a), np.uint32)
    windows = {text[start : start + width] for start in range(max(len(text) - width + 1, 1))}
    hashes = [max(mmh3.hash(window.encode(), seed, signed=False), 1) for window in windows]
    products = np.array(hashes, np.uint64)[:, None] * a.astype(np.uint64) + b.astype(np.uint64)
    return (products % ROW).min(axis=0)


def test_libcudfs_own_vectors():
    """``MinHashTest.Permuted`` of cpp/tests/text/minhash_tests.cpp."""
    texts = [
        "doc 1",
        "this is doc 2",
        "doc 3",
        "d",
        "The quick brown fox jumpéd over the lazy brown dog.",
        "line six",
        "line seven",
        "line eight",
        "line nine",
        "line ten",
    ]
    numbers = np.arange(10, 13, dtype=np.uint32)
    found = signatures(pa.array(texts), numbers, numbers, seed=0, width=4)
    assert found.tolist() == [
        [1392101586, 394869177, 811528444],
        [211415830, 187088503, 130291444],
        [2098117052, 394869177, 799753544],
        [2264583304, 2920538364, 3576493424],
        [253327882, 41747273, 302030804],
        [2109809594, 1017470651, 326988172],
        [1303819864, 850676747, 147107852],
        [736021564, 720812292, 1405158760],
        [902780242, 134064807, 1613944636],
        [547084870, 1748895564, 656501844],
    ]


def test_hash_functions_are_drawn_as_nemo_curator_draws_them():
    """GPUMinHash.generate_seeds: pairs from one RandomState, in 32 bits."""
    draw, limit = np.random.RandomState(42), np.uint32((1 << 31) - 1)
    pairs = [
        (draw.randint(1, limit, dtype=np.uint32), draw.randint(0, limit, dtype=np.uint32))
        for _ in range(260)
    ]
    a, b = hash_functions(260, 42)
    assert a.dtype == b.dtype == np.uint32
    assert np.column_stack([a, b]).tolist() == np.array(pairs).tolist()


@given(
    st.lists(st.none() | st.text(max_size=80), max_size=8),
    st.integers(1, 30),
    st.integers(0, ROW - 1),
)
def test_any_text_has_the_signature_of_the_formula(texts, width, seed):
    a, b = hash_functions(5, seed)
    found = signatures(pa.array(texts, pa.string()), a, b, seed=seed, width=width)
    assert found.dtype == np.uint32
    assert found.tolist() == [expected(text, a, b, seed, width).tolist() for text in texts]


@pytest.mark.parametrize("width", [1, 5, 24])
@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("alphabet", ["abc", "abc’", "é🦄漢a"])
def test_texts_about_as_long_as_a_block_of_windows_lose_none(width, blocks, alphabet):
    draw = np.random.RandomState(width + blocks)
    edge = blocks * BLOCK + width
    texts = ["".join(draw.choice(list(alphabet), edge + more)) for more in range(-3, 4)]
    texts += ["’" + texts[-1], texts[-1] + "’"]
    a, b = hash_functions(64, 1)
    found = signatures(pa.array(texts), a, b, seed=7, width=width)
    assert found.tolist() == [expected(text, a, b, 7, width).tolist() for text in texts]


def test_a_windows_hash_of_zero_counts_as_one():
    # The only seed by which "abcd" hashes to 0: MurmurHash3_x86_32, backwards.
    seed = 0x7A95F11B
    assert mmh3.hash("abcd", seed, signed=False) == 0
    one, zero = np.ones(1, np.uint32), np.zeros(1, np.uint32)
    assert signatures(pa.array(["abcd"]), one, zero, seed=seed, width=4).tolist() == [[1]]


@pytest.mark.parametrize(
    "texts",
    [
        pa.array(HARD, pa.string()),
        pa.array(HARD, pa.string_view()),
        pa.array(["other", *HARD, "other"], pa.large_string())[1:-1],
        pa.chunked_array([HARD[:3], HARD[3:], []], pa.string()),
        pa.array(HARD).dictionary_encode(),
    ],
    ids=["string", "string_view", "slice", "chunks", "dictionary"],
)
def test_every_arrow_array_of_strings_will_do(texts):
    a, b = hash_functions(6, 3)
    found = signatures(texts, a, b, seed=3, width=5)
    assert found.tolist() == [expected(text, a, b, 3, 5).tolist() for text in HARD]


@pytest.mark.parametrize("jaccard", [0.3, 0.5, 0.8, 0.95])
def test_the_share_of_equal_numbers_estimates_the_jaccard_similarity(jaccard):
    hashes, pairs, windows, width = 260, 400, 500, 24
    shared = round(2 * windows * jaccard / (1 + jaccard))
    draw = np.random.RandomState(round(100 * jaccard))
    length, apart = windows + width - 1, windows - shared
    texts = ["".join(map(chr, draw.randint(97, 123, length + apart))) for _ in range(pairs)]
    a, b = hash_functions(hashes, 42)
    one, other = (
        signatures(pa.array([text[start:][:length] for text in texts]), a, b, seed=1, width=width)
        for start in (0, apart)
    )
    estimates = (one == other).mean(axis=1)
    true = shared / (2 * windows - shared)
    deviation = np.sqrt(true * (1 - true) / hashes)
    assert abs(estimates.mean() - true) < 4 * deviation / np.sqrt(pairs)
    assert estimates.std() == pytest.approx(deviation, rel=0.15)


def splitmix_finaliser(x):
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def test_keys_are_those_of_splitmix64():
    # The first numbers of the published generator that starts at 0.
    weyl = 0x9E3779B97F4A7C15
    assert splitmix_finaliser(weyl) == 0xE220A8397B1DCDAF
    assert splitmix_finaliser(2 * weyl % 2**64) == 0x6E789E6AA1B965F4
    numbers = np.random.RandomState(0).randint(0, ROW, (9, 12), dtype=np.uint32)
    expected = np.empty((9, 4), np.uint64)
    for text, band in np.ndindex(9, 4):
        key = splitmix_finaliser(band + 1)
        for number in numbers[text, 3 * band : 3 * band + 3].tolist():
            key = splitmix_finaliser((key + number) % 2**64)
        expected[text, band] = key
    found = fold(numbers, bands=4, rows=3)
    assert found.dtype == np.int64
    assert found.view(np.uint64).tolist() == expected.tolist()


def test_keys_do_not_depend_on_company_and_take_little_memory():
    draw = np.random.RandomState(5)
    texts = ["".join(map(chr, draw.randint(97, 123, 60))) for _ in range(5000)]
    frame = pd.DataFrame({"text": pd.array(texts, "str")})
    options = {"ngram_chars": 8, "bands": 20, "rows": 13, "seed": 42}
    band_keys(frame[:1], "text", **options)  # compiles
    tracemalloc.start()
    keys, _ = band_keys(frame, "text", **options)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < keys.nbytes + 4_000_000
    for start in (0, 1023, 1024, 4999):
        assert (band_keys(frame[start : start + 1], "text", **options)[0] == keys[start]).all()
    assert len(np.unique(keys)) == keys.size


def test_a_frames_keys_are_those_of_its_texts(frames):
    texts = [*HARD, "漢字 and more " * 30_000]  # libcudf has a kernel of its own from 256 KiB on
    frame = frames.plain(pd.DataFrame({"text": pd.Series(texts, dtype="str")}))
    options = {"ngram_chars": 5, "bands": 2, "rows": 3, "seed": 42}
    three_rows = 18  # numbers that are made at a time on a GPU
    keys, has_text = band_keys(frame, "text", **options, device_numbers=three_rows)
    assert has_text.tolist() == [bool(text) for text in texts]
    a, b = hash_functions(6, 42)
    wanted = np.array([expected(text, a, b, int(a[0]), 5) for text in texts], np.uint32)
    assert keys.tolist() == fold(wanted, bands=2, rows=3).tolist()
    keys, has_text = band_keys(frame.iloc[:0], "text", **options)
    assert (keys.shape, has_text.shape) == ((0, 2), (0,))
