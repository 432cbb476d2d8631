"""Parts: no group in two of them, equal shares of each stratum, the same ones for a seed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuclassify.training.split import PARTS, split


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), min_size=1, max_size=120),
    st.integers(0, 3),
)
def test_every_row_is_in_one_part_and_every_group_too(rows, seed):
    strata, groups = np.array(rows).T
    if len(set(groups)) < 3:
        with pytest.raises(ValueError, match=r"group\(s\), and train, validation and test"):
            split(strata, groups, seed)
        return
    parts = split(strata, groups, seed)
    assert tuple(parts) == PARTS
    assert sorted(np.concatenate(list(parts.values()))) == list(range(len(rows)))
    assert all(len(part) for part in parts.values())
    found = [set(groups[part]) for part in parts.values()]
    assert not (found[0] & found[1] or found[0] & found[2] or found[1] & found[2])


def test_strata_are_shared_out_evenly_where_groups_are_rows():
    strata = np.repeat([0, 1, 2], [900, 90, 10])
    parts = split(strata, np.arange(1_000))
    for name, share in (("train", 0.8), ("validation", 0.1), ("test", 0.1)):
        counts = np.bincount(strata[parts[name]], minlength=3)
        assert counts.tolist() == [round(900 * share), round(90 * share), round(10 * share)]


@pytest.mark.parametrize("rows", [3, 4, 7])
def test_a_stratum_of_three_is_in_the_train_part(rows):
    strata = np.append(np.zeros(500, dtype=int), np.ones(rows, dtype=int))
    for seed in range(20):
        assert strata[split(strata, np.arange(len(strata)), seed)["train"]].any()


def test_large_groups_train():
    groups = np.append(np.zeros(1_000, dtype=int), np.arange(1, 51))
    assert 0 in groups[split(np.zeros(1_050, dtype=int), groups)["train"]]


def test_a_seed_gives_the_same_parts_and_another_seed_others():
    strata, groups = np.arange(300) % 4, np.arange(300) // 2
    first, again, other = (split(strata, groups, seed)["test"].tolist() for seed in (1, 1, 2))
    assert first == again
    assert first != other
