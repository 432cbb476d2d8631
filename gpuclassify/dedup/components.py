"""Connected components of pairs of duplicates: which documents hang together.

A forest names for each document the smallest one of its component. It is all that is ever kept of
edges: forests of parts, joined, have the forest of the whole.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pandas as pd
import psutil
from dask.utils import format_bytes

from gpuclassify.dedup.corpus import choose_shuffle, reduce_tree

BYTES_TO_JOIN = 160  # for each row while forests are joined: ten times its own bytes
FOREST = pd.DataFrame({"document": [], "root": []}, dtype=np.int64)
_NEIGHBOURS = pd.DataFrame({"document": [], "neighbour": []}, dtype=np.int64)


def bucket_edges(keys: pd.DataFrame) -> pd.DataFrame:
    """The forest of documents that share a key, of all rows with the keys that occur here.

    Parameters
    ----------
    keys : pandas.DataFrame
        Columns `key` and `document`, int64, in any order.

    Returns
    -------
    pandas.DataFrame
        As of `forest`. Linear in the rows: a key links its documents to their smallest only.
    """
    smallest = keys.groupby("key", sort=False)["document"].transform("min")
    return forest(pd.DataFrame({"document": keys["document"], "root": smallest}))


def forest(edges: pd.DataFrame) -> pd.DataFrame:
    """Every document that has a smaller one in its component, with the smallest there.

    Parameters
    ----------
    edges : pandas.DataFrame
        Columns `document` and `root`, int64: both ends of each edge, with root <= document.

    Returns
    -------
    pandas.DataFrame
        Columns `document` and `root`, int64, sorted by document, each document once. The same for
        every order of the edges, and of a forest it is that forest.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    is_edge = (edges["document"] != edges["root"]).to_numpy()
    ends = edges.loc[is_edge, ["document", "root"]].to_numpy().T
    documents, positions = np.unique(ends, return_inverse=True)
    # As bool, equal edges are not added up.
    graph = coo_array((np.ones(ends.shape[1], bool), positions), shape=(len(documents),) * 2)
    count, components = connected_components(graph, directed=False)
    smallest = np.empty(count, np.int64)
    smallest[components[::-1]] = documents[::-1]  # of values for one place, the last one stays
    roots = smallest[components]
    is_larger = documents > roots
    return pd.DataFrame({"document": documents[is_larger], "root": roots[is_larger]})


def with_roots(forest: pd.DataFrame) -> pd.DataFrame:
    """A forest in which roots have rows as well, with themselves as root."""
    roots = np.unique(forest["root"].to_numpy())
    return pd.concat([forest, pd.DataFrame({"document": roots, "root": roots})], ignore_index=True)


def join_forests(parts: list[Any], fan_in: int = 8) -> Any:
    """The forest of several forests, joined as a tree.

    Parameters
    ----------
    parts : list of dask.delayed.Delayed
        At least one; each computes to a frame such as `forest` returns.
    fan_in : int
        How many are joined at a time.

    Returns
    -------
    dask.delayed.Delayed
        One worker holds the result: 16 bytes for each document that is no root, and about five
        times as much while it joins.
    """
    return reduce_tree(_join, parts, fan_in)


def _join(parts: list[pd.DataFrame]) -> pd.DataFrame:
    documents = sum(map(len, parts))
    needed, free = documents * BYTES_TO_JOIN, _free_bytes()
    if needed > free:
        raise MemoryError(
            f"to join the candidates of {documents:,} documents takes {format_bytes(needed)}, and "
            f"{format_bytes(free)} are free here: pass components='rounds', which joins them in "
            "the memory of all workers"
        )
    return forest(pd.concat(parts))


def _free_bytes() -> int:
    """Memory that this process may still take: of the machine, or of the worker that it is."""
    from distributed import get_worker

    free: int = psutil.virtual_memory().available
    with contextlib.suppress(ValueError):  # no worker
        if limit := get_worker().memory_manager.memory_limit:
            free = min(free, limit - psutil.Process().memory_info().rss)
    return free


def star_rounds(edges: Any) -> Any:
    """The forest of edges that no worker can hold alone. Computes when called.

    Alternates the large-star and small-star operations of Kiveris et al., "Connected Components
    in MapReduce and Beyond" (SoCC 2014), with what lies in one partition joined by `forest`. Each
    round shuffles the edges twice and keeps them in the workers' memory until the next is done.
    Every step keeps the components; a round lowers the sum of the edges' ends until all edges
    point at their component's smallest document, so that the rounds end.

    Parameters
    ----------
    edges : dask.dataframe.DataFrame
        Columns `document` and `root`, int64, as `forest` takes them.

    Returns
    -------
    dask.dataframe.DataFrame
        The rows of `forest`, sorted by document within each partition.
    """
    method = choose_shuffle()
    edges = edges.map_partitions(forest, meta=FOREST)
    while True:
        pairs = edges.map_partitions(_both_ways, meta=_NEIGHBOURS)
        pairs = pairs.shuffle("document", shuffle_method=method)
        pairs = pairs.map_partitions(_distinct, meta=_NEIGHBOURS).persist()
        if not pairs.map_partitions(_count_unsettled, meta=(None, np.int64)).sum().compute():
            return pairs.map_partitions(_settled_forest, meta=FOREST)
        edges = pairs.map_partitions(_large_star, meta=FOREST)
        edges = edges.shuffle("document", shuffle_method=method)
        edges = edges.map_partitions(forest, meta=FOREST)  # the small stars of these documents


def _both_ways(edges: pd.DataFrame) -> pd.DataFrame:
    """Each edge as seen from either end."""
    ends = edges[["document", "root"]].to_numpy()
    ends = np.concatenate([ends, ends[:, ::-1]])
    return pd.DataFrame({"document": ends[:, 0], "neighbour": ends[:, 1]})


def _distinct(pairs: pd.DataFrame) -> pd.DataFrame:
    return pairs.drop_duplicates().sort_values(["document", "neighbour"], ignore_index=True)


def _count_unsettled(pairs: pd.DataFrame) -> int:
    """How many documents have a smaller neighbour, and another neighbour beside it."""
    found = pairs.groupby("document")["neighbour"].agg(["min", "size"])
    return int(((found["min"] < found.index) & (found["size"] > 1)).sum())


def _settled_forest(pairs: pd.DataFrame) -> pd.DataFrame:
    is_larger = pairs["document"] > pairs["neighbour"]
    return pairs[is_larger].rename(columns={"neighbour": "root"}).reset_index(drop=True)


def _large_star(pairs: pd.DataFrame) -> pd.DataFrame:
    """Every larger neighbour of a document, linked to the smallest one, or to the document."""
    smallest = pairs.groupby("document")["neighbour"].transform("min")
    edges = pd.DataFrame(
        {"document": pairs["neighbour"], "root": np.minimum(smallest, pairs["document"])}
    )
    return forest(edges[pairs["neighbour"] > pairs["document"]])
