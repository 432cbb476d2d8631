"""How bands are chosen, against datasketch, and what they catch, against simulated signatures."""

import numpy as np
import pytest
from datasketch.lsh import _optimal_param

from gpuclassify.dedup.bands import catch_probability, choose_bands, curve
from gpuclassify.dedup.minhash import fold


@pytest.mark.parametrize("hashes", [16, 112, 260])
@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.75, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("weight", [0.5, 0.8, 0.95])
def test_bands_are_those_that_datasketch_chooses(threshold, hashes, weight):
    chosen = choose_bands(threshold, hashes, false_negative_weight=weight)
    assert chosen == _optimal_param(threshold, hashes, 1 - weight, weight)


@pytest.mark.parametrize("threshold", np.linspace(0.5, 0.95, 10))
def test_most_pairs_at_the_threshold_are_caught(threshold):
    bands, rows = choose_bands(threshold)
    assert bands * rows <= 260
    assert 0.89 <= catch_probability(threshold, bands, rows) <= 0.97
    assert catch_probability(threshold - 0.3, bands, rows) < 0.2


def test_ends_of_the_range():
    assert choose_bands(1, 260) == (1, 260)
    assert choose_bands(0.5, 1) == (1, 1)


@pytest.mark.parametrize("threshold", [0, -0.1, 1.1, float("nan")])
def test_a_threshold_that_is_no_similarity_is_refused(threshold):
    with pytest.raises(ValueError, match="suits no bands: pass one above 0, and 1 at most"):
        choose_bands(threshold)


@pytest.mark.parametrize("similarity", [0.5, 0.7, 0.8, 0.9])
@pytest.mark.parametrize(("bands", "rows"), [(20, 13), (14, 8)])
def test_pairs_share_a_key_as_often_as_the_formula_says(similarity, bands, rows):
    pairs = 20_000
    draw = np.random.default_rng(bands)
    one = draw.integers(0, 2**32, (pairs, bands * rows), dtype=np.uint32)
    other = draw.integers(0, 2**32, one.shape, dtype=np.uint32)
    other = np.where(draw.random(one.shape) < similarity, one, other)
    found = (fold(one, bands, rows) == fold(other, bands, rows)).any(axis=1).mean()
    expected = catch_probability(similarity, bands, rows)
    assert abs(found - expected) < 4 * np.sqrt(expected * (1 - expected) / pairs) + 1e-9


def test_the_curve_in_words():
    assert curve(20, 13) == (
        "find by Jaccard similarity 0.5: 0%, 0.6: 3%, 0.7: 18%, 0.8: 68%, 0.9: 100% of pairs; "
        "half at 0.77"
    )
    assert catch_probability(0.765, 20, 13) < 0.5 < catch_probability(0.775, 20, 13)
