"""The benchmark of parts leaves each out, and the answers stay."""

import pytest

from benchmarks.parts import PARTS


@pytest.mark.parametrize("model", PARTS)
def test_a_smoke_run_of_parts_leaves_each_out_and_answers_stay(smoke_run, model):
    result, _, printed = smoke_run("parts", "--model", model, "--lengths", "short")

    corpus = result["corpora"]["short"]
    names = ["all parts", *(name for name, _, _ in PARTS[model])]
    assert list(corpus["variants"]) == names
    assert 0 < corpus["largest_difference"] < 1e-4  # some rounding: not all ran the same code
    assert all(name in printed for name in names)
    for found in corpus["variants"].values():
        assert found["time_of_all_parts"]["ratio_of_medians"] > 0
