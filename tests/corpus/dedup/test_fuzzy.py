"""Bands against datasketch, components against networkx, recall against the very n-grams."""

import gc
import random
import time

import dask
import dask.dataframe as dd
import networkx as nx
import numpy as np
import pandas as pd
import pytest
from datasketch.lsh import _optimal_param

from gpuclassify import FuzzyDuplicates
from gpuclassify.corpus.dedup.fuzzy import (
    bucket_edges,
    catch_probability,
    choose_bands,
    forest,
    join_forests,
    star_rounds,
)
from tests.corpus.dedup.known import edit, make_text
from tests.processes import local_client

STRIDE = 1 << 40  # documents of several partitions
PAIRS, WIDTH = 1_200, 24  # of texts, and characters of their n-grams


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


@pytest.mark.parametrize("threshold", [0, -0.1, 1.1, float("nan")])
def test_a_threshold_that_is_no_similarity_is_refused(threshold):
    with pytest.raises(ValueError, match="suits no bands: pass one above 0, and 1 at most"):
        choose_bands(threshold)


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


def as_dask(edges, partitions):
    return dd.from_map(lambda part: part, split(edges, partitions), meta=edges.iloc[:0])


@pytest.mark.parametrize("edges", GRAPHS.values(), ids=GRAPHS)
def test_a_forest_is_the_smallest_of_each_component_however_it_is_made(edges):
    wanted = expected(edges)
    pd.testing.assert_frame_equal(forest(edges), wanted)
    for parts, fan_in in ((1, 8), (9, 8), (20, 2)):
        forests = [dask.delayed(forest)(part) for part in split(edges, parts)]
        joined = join_forests(forests, fan_in).compute(scheduler="sync")
        pd.testing.assert_frame_equal(joined, wanted)
    found = star_rounds(as_dask(edges, 3)).persist()
    assert all(part["document"].is_monotonic_increasing for part in dask.compute(*found.partitions))
    pd.testing.assert_frame_equal(by_document(found.compute()), wanted)


def by_document(frame):
    return frame.sort_values("document", ignore_index=True)


def test_star_rounds_on_a_cluster_keep_the_last_round_only():
    edges = GRAPHS["random"]
    with local_client(2) as client:
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


def test_what_no_worker_can_join_is_refused_with_the_cure():
    parts = [dask.delayed(forest(pd.DataFrame({"document": [n + 1], "root": [0]}))) for n in (0, 1)]
    with pytest.raises(MemoryError, match=r"of 2 documents takes 2.00 PiB.*components='rounds'"):
        join_forests(parts, bytes_to_join=1 << 50).compute(scheduler="sync")


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


CURATOR = {"num_buckets": 50, "hashes_per_bucket": 5, "char_ngrams": WIDTH}  # miss none of these


@pytest.mark.parametrize("script", ["words", "han"])
@pytest.mark.parametrize(
    "options",
    [{"jaccard_threshold": 0.8}, {"false_positive_check": True}, {"compare_by": "characters"}],
    ids="-".join,
)
def test_with_curators_arguments_goes_what_is_as_similar_in_characters(options, script):
    """Jaccard similarity of the character n-grams, by sets of Python."""
    random_ = random.Random(7)
    texts = []
    for number in range(150):
        text = make_text(random_, 300)
        if script == "han":
            text = "".join(chr(0x4E00 + random_.randrange(5000)) for _ in range(1000))
        places = random_.sample(range(0, len(text), 40), number % 15)
        changed = [*text]
        for place in places:
            changed[place] = "X"
        texts += [text, "".join(changed)]
    grams = [{text[at : at + WIDTH] for at in range(len(text) - WIDTH + 1)} for text in texts]
    pairs = zip(grams[::2], grams[1::2], strict=True)
    similarity = np.array([len(a & b) / len(a | b) for a, b in pairs])
    assert ((similarity > 0.65) & (similarity < 0.8)).sum() > 20

    frame = pd.DataFrame({"id": range(len(texts)), "text": texts})
    found = FuzzyDuplicates(id_field="id", **CURATOR, **options)(frame)
    assert sorted(found["group"].unique() // 2) == np.flatnonzero(similarity >= 0.8).tolist()
    gone = found[~found["keep"]]
    assert (gone["similarity"] == similarity[gone["id"] // 2].astype(np.float32)).all()


def test_groups_are_verified_some_at_a_time_as_all_at_once(monkeypatch):
    random_ = random.Random(3)
    texts = [make_text(random_, 50) for _ in range(40)]
    texts += [edit(random_, text, 0.05) for text in texts * 3]
    frame = pd.DataFrame({"id": range(len(texts)), "text": texts})
    fuzzy = FuzzyDuplicates(id_field="id", bands=60, rows=2, min_similarity=0.7)
    at_once = fuzzy(frame)
    assert 20 < at_once["group"].nunique() < 40
    for limit in (1, 1_000, 5_000):
        monkeypatch.setattr("gpuclassify.corpus.dedup.groups.VERIFIED_BYTES", limit)
        pd.testing.assert_frame_equal(fuzzy(frame), at_once)


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

    def recall(found, low, high=1.01):
        inside = (similarity >= low) & (similarity < high)
        assert inside.sum() > 60
        return np.isin(np.arange(PAIRS), found["id"] // 2)[inside].mean()

    by_default = FuzzyDuplicates(id_field="id")(frame)
    assert 0.45 < recall(by_default, 0.80, 0.82) < 0.75
    assert recall(by_default, 0.90) > 0.99
    wider = FuzzyDuplicates(id_field="id", threshold=0.7, min_similarity=0.8)(frame)
    assert recall(wider, 0.80) > 0.98
