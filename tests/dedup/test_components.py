"""Components against networkx, however edges are ordered and spread over partitions."""

import gc
import time

import dask
import dask.dataframe as dd
import networkx as nx
import numpy as np
import pandas as pd
import pytest
from distributed import Client, LocalCluster

from gpuclassify.dedup.components import bucket_edges, forest, join_forests, star_rounds

STRIDE = 1 << 40  # documents of several partitions


def edges_of(first, second):
    document, root = np.maximum(first, second), np.minimum(first, second)
    return pd.DataFrame({"document": document, "root": root}).astype(np.int64)


def random_edges(seed, nodes=2000, edges=1500):
    ends = np.random.default_rng(seed).integers(nodes, size=(2, edges))
    ends = ends // 100 * STRIDE + ends % 100
    return edges_of(*ends)


def line(nodes=10_000):
    order = np.random.default_rng(5).permutation(nodes)
    return edges_of(order[1:], order[:-1])


GRAPHS = {
    "random": random_edges(0),
    "dense": random_edges(1, edges=8000),
    "line": line(),
    "sorted line": edges_of(np.arange(1, 3000), np.arange(2999)),
    "stars": edges_of(np.arange(5000), np.arange(5000) // 700 * 700),
    "star of a large centre": edges_of(np.full(3000, 3000), np.arange(3000)),
    "repeated": pd.concat([edges_of(np.array([7, 9, 7]), np.array([3, 7, 3]))] * 300),
    "loops only": edges_of(np.arange(5), np.arange(5)),
    "empty": random_edges(0, edges=0),
}


def expected(edges):
    graph = nx.Graph(list(edges.itertuples(index=False, name=None)))
    rows = [
        (document, smallest)
        for component in nx.connected_components(graph)
        for smallest in [min(component)]
        for document in component - {smallest}
    ]
    return pd.DataFrame(sorted(rows), columns=["document", "root"], dtype=np.int64)


def split(edges, partitions, seed=3):
    """Parts of shuffled edges, of which some may be empty."""
    rng = np.random.default_rng(seed)
    places = rng.integers(partitions, size=len(edges))
    edges = edges.iloc[order := rng.permutation(len(edges))]
    return [edges[places[order] == part] for part in range(partitions)]


@pytest.fixture(params=GRAPHS)
def edges(request):
    return GRAPHS[request.param]


def test_forest_is_the_smallest_of_each_component(edges):
    pd.testing.assert_frame_equal(forest(edges), expected(edges))


def test_forest_of_a_forest_is_that_forest(edges):
    once = forest(edges)
    pd.testing.assert_frame_equal(forest(once), once)


@pytest.mark.parametrize(("parts", "fan_in"), [(1, 8), (9, 8), (20, 2)])
def test_joined_forests_are_the_forest_of_all(edges, parts, fan_in):
    forests = [dask.delayed(forest)(part) for part in split(edges, parts)]
    joined = join_forests(forests, fan_in).compute(scheduler="sync")
    pd.testing.assert_frame_equal(joined, expected(edges))


def as_dask(edges, partitions):
    return dd.from_map(lambda part: part, split(edges, partitions), meta=edges.iloc[:0])


def by_document(frame):
    return frame.sort_values("document", ignore_index=True)


def test_star_rounds_are_the_forest(edges):
    found = star_rounds(as_dask(edges, 3)).compute()
    pd.testing.assert_frame_equal(by_document(found), expected(edges))


@pytest.mark.parametrize("partitions", [1, 7, 20])
def test_star_rounds_of_any_partitions(partitions):
    edges = GRAPHS["random"]
    found = star_rounds(as_dask(edges, partitions)).compute()
    pd.testing.assert_frame_equal(by_document(found), expected(edges))


def test_star_rounds_on_a_cluster_keep_the_last_round_only():
    edges = GRAPHS["random"]
    cluster = LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
    )
    with cluster, Client(cluster) as client:
        found = star_rounds(as_dask(edges, 7))
        for _ in range(100):  # the scheduler learns of released frames a little later
            gc.collect()
            if held_keys(client) <= 7:
                break
            time.sleep(0.1)
        assert held_keys(client) == 7
        pd.testing.assert_frame_equal(by_document(found.compute()), expected(edges))


def held_keys(client):
    return len({key for keys in client.has_what().values() for key in keys})


def test_partitions_of_star_rounds_are_sorted_and_share_no_document():
    found = star_rounds(as_dask(GRAPHS["random"], 7))
    for part in found.partitions:
        assert part.compute()["document"].is_monotonic_increasing
    assert not found["document"].compute().duplicated().any()


def test_bucket_edges_link_documents_with_a_key_in_common():
    rng = np.random.default_rng(11)
    keys = pd.DataFrame(
        {"key": rng.integers(-(2**63), 2**63 - 1, 900)[rng.integers(900, size=1500)],
         "document": rng.integers(1000, size=1500)}
    )  # fmt: skip
    pairs = keys.merge(keys, on="key")
    linked = edges_of(pairs["document_x"].to_numpy(), pairs["document_y"].to_numpy())
    pd.testing.assert_frame_equal(bucket_edges(keys), expected(linked))
    shuffled = keys.sample(frac=1, random_state=1)
    pd.testing.assert_frame_equal(bucket_edges(shuffled), bucket_edges(keys))


def test_bucket_edges_of_a_giant_key_and_of_nothing():
    keys = pd.DataFrame({"key": np.zeros(100_000, np.int64), "document": np.arange(100_000) + 5})
    found = bucket_edges(keys)
    assert (len(found), set(found["root"])) == (99_999, {5})
    assert bucket_edges(keys.iloc[:0]).empty


def test_what_no_worker_can_join_is_refused_with_the_cure(monkeypatch):
    monkeypatch.setattr("gpuclassify.dedup.components.BYTES_TO_JOIN", 1 << 50)
    parts = [dask.delayed(forest(pd.DataFrame({"document": [n + 1], "root": [0]}))) for n in (0, 1)]
    with pytest.raises(MemoryError, match=r"of 2 documents takes 2.00 PiB.*components='rounds'"):
        join_forests(parts).compute(scheduler="sync")
