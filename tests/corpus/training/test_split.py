"""Parts: no group in two of them, equal shares of each stratum, the same ones for a seed."""

import itertools

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuclassify.corpus.training.split import PARTS, SHARES, folds, join_groups, refuse_small, split
from gpuclassify.corpus.training.tasks import _in_order


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


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), min_size=1, max_size=120),
    st.integers(0, 3),
)
def test_every_row_is_tested_once_and_no_group_is_in_two_parts_of_a_fold(rows, seed):
    strata, groups = np.array(rows).T
    found = folds(strata, groups, seed)
    assert sorted(np.concatenate([parts["test"] for parts in found])) == list(range(len(rows)))
    for parts in found:
        assert tuple(parts) == PARTS
        assert sum(map(len, parts.values())) == len(rows)
        assert sum(len(set(groups[part])) for part in parts.values()) == len(set(groups))


def test_folds_have_equal_shares_of_strata():
    strata = np.repeat([0, 1, 2], [200, 80, 20])
    for parts in folds(strata, np.arange(300)):
        assert np.bincount(strata[parts["test"]]).tolist() == [20, 8, 2]
        assert np.bincount(strata[parts["validation"]]).tolist() == [20, 8, 2]


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


@given(st.lists(st.integers(1, 200), min_size=3, max_size=40), st.integers(0, 3))
def test_no_other_group_brings_a_part_nearer_to_its_share(sizes, seed):
    groups = np.repeat(np.arange(len(sizes)), sizes)
    parts = split(np.zeros(len(groups), dtype=int), groups, seed)
    inside = {name: set(groups[rows].tolist()) for name, rows in parts.items()}
    for name in ("validation", "test"):
        missing = SHARES[name] * len(groups) - len(parts[name])
        if len(inside["train"]) > 1:  # which keeps one
            assert all(abs(missing - sizes[g]) > abs(missing) - 1e-3 for g in inside["train"])
        if len(inside[name]) > 1:
            assert all(abs(missing + sizes[g]) > abs(missing) - 1e-3 for g in inside[name])
    if max(sizes) > len(groups) / 5 and sizes.count(max(sizes)) == 1:
        assert sizes.index(max(sizes)) in inside["train"]


@pytest.mark.parametrize("exponent", [1.3, 1.6])
def test_parts_of_uneven_groups_are_a_tenth(exponent):
    random = np.random.default_rng(0)
    for seed in range(5):
        groups = random.zipf(exponent, 4_000) % 300
        strata = random.integers(0, 5, 4_000)
        parts = split(strata, groups, seed)
        held_out = [len(parts[name]) for name in PARTS[1:]]
        assert held_out == pytest.approx([400, 400], abs=1)
        assert np.bincount(groups).argmax() in groups[parts["train"]]
        assert set(strata[parts["train"]]) == set(range(5))


def test_large_groups_train_and_small_parts_are_refused_with_the_figures():
    groups = np.append(np.zeros(1_000, dtype=int), np.arange(1, 51))
    parts = split(np.zeros(1_050, dtype=int), groups)
    assert 0 in groups[parts["train"]]
    figures = r"validation part has \d+ of 1,050 rows \(2\.\d%\).*51 has 1,000 rows\. Name a finer"
    with pytest.raises(ValueError, match=figures):
        refuse_small(parts, groups)
    many = np.append(np.zeros(10_000, dtype=int), np.arange(1, 501))
    refuse_small(split(np.zeros(10_500, dtype=int), many), many)  # few of all, but enough
    refuse_small(split(np.zeros(20, dtype=int), np.arange(20)), np.arange(20))  # few, but a tenth


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 25)), min_size=1, max_size=60))
def test_groups_that_share_a_text_are_one(rows):
    groups, texts = np.array(rows).T
    found, left = join_groups(groups, texts)
    joined = nx.Graph()
    joined.add_edges_from((f"group {group}", f"text {text}") for group, text in rows)
    expected = {}
    for number, nodes in enumerate(nx.connected_components(joined)):
        expected |= dict.fromkeys(nodes, number)
    whole = [expected[f"group {group}"] for group in groups]
    room = max(0.8 * len(rows), np.bincount(groups).max())
    if np.bincount(whole).max() <= room:
        assert (left, partition(found)) == (0, partition(whole))
    else:
        assert np.bincount(found).max() <= room
        assert left == sum(len(set(found[texts == text])) > 1 for text in set(texts))
        assert left > 0
    for group in set(groups):
        assert len(set(found[groups == group])) == 1


def partition(groups):
    return sorted(tuple(np.flatnonzero(np.array(groups) == group)) for group in set(groups))


def test_an_error_page_joins_no_groups_but_copies_do():
    groups, texts = np.arange(600) // 6, np.arange(600)
    texts[::6] = 0  # in every group
    texts[7], texts[13] = texts[1], texts[8]  # of groups 0 and 1, and of 1 and 2
    found, left = join_groups(groups, texts)
    assert left == 1
    assert np.bincount(found).max() == 18


def test_labels_that_are_one_number_have_an_order():
    orders = {_in_order(set(labels)) for labels in itertools.permutations(["1", "01", "2", "001"])}
    assert orders == {("001", "01", "1", "2")}
