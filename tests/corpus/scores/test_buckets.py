"""Edges equal numpy's weighted quantiles, whatever the partitions; buckets and top shares."""

import json

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuclassify import ScoreEdges, add_buckets, keep_top, score_edges
from gpuclassify.corpus.statistics.quantiles import ScoreColumns, weighted_quantiles

ROWS = 5_000
SHARES = np.arange(1, 20) / 20
N = 20


def scores_of(kind, rows=ROWS, seed=0):
    random = np.random.default_rng(seed)
    values = {
        "probabilities": random.beta(0.3, 0.2, rows),
        "signed": random.normal(0, 3, rows),
        "ties": random.integers(0, 6, rows) / 5,
        "one value": np.full(rows, 0.25),
    }
    return values[kind].astype(np.float32)


@pytest.fixture(scope="module")
def corpus():
    random = np.random.default_rng(3)
    frame = pd.DataFrame({"a": scores_of("probabilities"), "b": scores_of("signed")})
    frame["text"] = pd.Series(["wort 天気 " * n for n in random.integers(0, 9, ROWS)], dtype="str")
    frame["tokens"] = random.integers(0, 900, ROWS)
    frame["language"] = random.choice(["de", "fr", None], ROWS, p=[0.7, 0.2, 0.1])
    frame.loc[frame.index % 17 == 0, "a"] = np.nan
    frame.loc[frame.index % 23 == 0, "text"] = None
    return frame


def expected(scores, weights):
    """By numpy alone."""
    there = ~np.isnan(scores)
    return np.quantile(
        scores[there], SHARES, weights=weights[there].astype(np.float64), method="inverted_cdf"
    ).tolist()


@pytest.mark.parametrize(
    ("partitions", "weight"),
    [(1, None), (7, "bytes"), (7, "tokens"), pytest.param(1_000, "bytes", marks=pytest.mark.slow)],
)
def test_edges_are_numpys_quantiles_whatever_the_partitions(corpus, partitions, weight):
    weights = {
        None: np.ones(ROWS),
        "bytes": corpus["text"].map(lambda t: len(t.encode()), na_action="ignore").fillna(0),
        "tokens": corpus["tokens"],
    }[weight]

    found = score_edges(dd.from_pandas(corpus, npartitions=partitions), ["a", "b"], weight=weight)

    for name in ("a", "b"):
        assert found.edges[name][None] == expected(corpus[name].to_numpy(), np.asarray(weights))


@pytest.mark.parametrize("kind", ["probabilities", "signed", "ties", "one value"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "Float32", "float[pyarrow]", "float16"])
def test_edges_of_every_type_of_column(kind, dtype):
    scores = pd.Series(scores_of(kind)).astype(dtype)
    found = score_edges(pd.DataFrame({"s": scores}), "s").edges["s"][None]
    assert found == expected(scores.to_numpy(dtype=np.float64), np.ones(ROWS))


def test_groups_have_edges_of_their_own_and_others_no_bucket(corpus):
    found = score_edges(dd.from_pandas(corpus, npartitions=5), "b", by="language").edges["b"]
    assert {*found} == {"de", "fr", None}
    for key in ("de", "fr", None):
        own = corpus["language"].isna() if key is None else corpus["language"] == key
        rows = corpus.loc[own, "b"].to_numpy()
        assert found[key] == expected(rows, np.ones(len(rows)))
    edges = score_edges(corpus[corpus["language"] == "de"], "b", by="language")
    result = add_buckets(corpus, edges)
    assert ((result["bucket"] == -1) == (corpus["language"] != "de")).all()


@pytest.mark.parametrize(("dtype", "passes"), [("float32", 2), ("float64", 4)])
def test_a_dataset_is_read_twice_for_float32_and_four_times_for_float64(corpus, dtype, passes):
    read = []

    def part(number):
        read.append(number)
        return corpus[number::3].astype({"a": dtype})

    score_edges(dd.from_map(part, range(3), meta=part(0)[:0]), "a", n=1_000, by="language")
    assert sorted(read[1:]) == sorted([0, 1, 2] * passes)


def test_frames_of_either_library_have_the_same_edges_buckets_and_top(corpus, frames):
    kinds = corpus.astype({"language": "category"})
    lazy = frames.lazy(kinds, npartitions=4)
    settings = {"weight": "bytes", "by": "language"}
    edges = score_edges(corpus, ["a", "b"], **settings)
    assert score_edges(lazy, ["a", "b"], **settings) == edges
    assert score_edges(frames.plain(kinds), ["a", "b"], **settings) == edges
    expected, new = add_buckets(corpus, edges), ["a_bucket", "b_bucket", "bucket"]
    for dataset in (lazy, frames.plain(kinds)):
        found = frames.to_pandas(add_buckets(dataset, edges))
        assert found[new].to_numpy().tolist() == expected[new].to_numpy().tolist()
        top = frames.to_pandas(keep_top(dataset, "b", share=0.1, **settings))
        assert top.index.tolist() == keep_top(corpus, "b", share=0.1, **settings).index.tolist()


@pytest.mark.parametrize("most_sums", [1 << 21, 500, 1])
def test_more_edges_than_fit_take_more_passes_and_are_the_same(corpus, most_sums):
    frame, sizes = corpus.assign(c=corpus["b"].astype(np.float64) / 3), []

    def compute(tasks):
        found = dask.compute(*tasks)
        sizes.extend(sums.size() for sums in found)
        return found

    found = weighted_quantiles(
        dd.from_pandas(frame, npartitions=9),
        ScoreColumns(("b", "c")),
        lambda total: [-(-total * k // N) for k in range(1, N)],
        compute,
        most_sums,
    )
    for name in ("b", "c"):
        assert found[name]["null"] == expected(frame[name].to_numpy(), np.ones(ROWS))
    assert max(sizes) <= max(most_sums, 4 * N)


@given(
    st.lists(
        st.tuples(st.floats(width=32, allow_nan=False), st.integers(0, 5)), min_size=1, max_size=40
    ),
    st.integers(2, 7),
)
@settings(max_examples=30, deadline=None)
def test_an_edge_is_the_first_score_whose_cumulated_weight_reaches_its_share(rows, n):
    if not sum(weight for _, weight in rows):
        return
    frame = pd.DataFrame(rows, columns=["s", "w"]).astype({"s": np.float32, "w": np.int64})
    found = score_edges(frame, "s", n=n, weight="w").edges["s"][None]
    ordered = sorted(rows)
    total = sum(weight for _, weight in rows)
    for k, edge in enumerate(found, 1):
        reached = 0
        for score, weight in ordered:
            reached += weight
            if reached * n >= total * k:
                assert edge == score
                break


@pytest.mark.parametrize("combine", ["max", "min"])
def test_buckets_are_numpys_and_the_combined_one_leaves_out_what_is_not_known(corpus, combine):
    edges = score_edges(corpus, ["a", "b"])
    frame = corpus.assign(b=corpus["b"].where(corpus.index % 34 != 0))
    result = add_buckets(frame, edges, combine=combine)
    expected_buckets = {
        name: np.where(
            frame[name].isna(), -1, np.digitize(frame[name].fillna(0), edges.edges[name][None])
        )
        for name in ("a", "b")
    }
    a, b = expected_buckets["a"], expected_buckets["b"]
    both = np.maximum(a, b) if combine == "max" else np.minimum(a, b)
    known = np.where(a < 0, b, np.where(b < 0, a, both))
    assert result["a_bucket"].tolist() == a.tolist()
    assert result["b_bucket"].tolist() == b.tolist()
    assert result["bucket"].tolist() == known.tolist()
    assert (known == -1).any()
    assert set(range(-1, N)) == set(known)
    pd.testing.assert_frame_equal(result[frame.columns], frame)


def test_groups_of_whole_numbers_are_the_same_beside_null():
    whole = pd.DataFrame({"s": [0.1, 0.9], "site": [7, 7]})
    with_null = pd.DataFrame({"s": [0.1, 0.9, 0.9], "site": [7, 7, None]})  # of floats
    edges = score_edges(whole, "s", n=2, by="site")
    found = add_buckets(with_null, edges)["bucket"].tolist()
    assert found == [*np.digitize([0.1, 0.9], edges.edges["s"][7]), -1]
    assert list(score_edges(with_null, "s", n=2, by="site").edges["s"]) == [7, None]


@pytest.mark.parametrize("partitions", [1, 9])
@pytest.mark.parametrize(("share", "weight"), [(0.1, None), (0.25, "tokens"), (1.0, None)])
def test_the_top_share_is_the_smallest_that_reaches_it(corpus, partitions, share, weight):
    lazy = dd.from_pandas(corpus, npartitions=partitions)
    kept = keep_top(lazy, "b", share=share, weight=weight).compute()
    weights = corpus[weight] if weight else pd.Series(1, corpus.index)
    total = weights.sum()
    own = weights[kept.index]
    assert own.sum() >= share * total
    lowest = kept["b"].min()
    assert own[kept["b"] > lowest].sum() < share * total or share == 1
    pd.testing.assert_frame_equal(kept, lazy[lazy["b"] >= lowest].compute())


def test_each_group_keeps_its_own_top(corpus):
    kept = keep_top(corpus, "b", share=0.1, by="language")
    for value in ("de", "fr"):
        own = corpus.loc[corpus["language"] == value, "b"]
        expected_rows = own.nlargest(-(-len(own) // 10)).index
        assert set(kept.index[kept["language"] == value]) == set(expected_rows)
    assert keep_top(corpus, "a", share=1)["a"].notna().all()  # without a score is not the top
    infinite = pd.DataFrame({"a": [np.inf, 1.0], "tokens": [0, 1], "language": ["de", "fr"]})
    kept = keep_top(infinite, "a", share=1, weight="tokens", by="language")
    assert kept["language"].tolist() == ["fr"]  # "de" has no weight, and no threshold


@pytest.mark.parametrize("by", [None, "language"])
@pytest.mark.parametrize("weight", [None, "tokens", "bytes"])
def test_an_empty_shard_keeps_its_columns_and_types(corpus, frames, by, weight):
    empty = corpus.iloc[:0]
    for own in (frames.plain(empty), frames.lazy(empty, npartitions=1)):
        kept = keep_top(own, "a", share=0.5, by=by, weight=weight)
        assert (kept.dtypes == own.dtypes).all()
        pd.testing.assert_frame_equal(frames.to_pandas(kept), frames.to_pandas(own))
    with pytest.raises(ValueError, match=r"\['a'\] have no scores with a weight above 0"):
        keep_top(corpus.assign(a=np.nan), "a", share=0.5, by=by, weight=weight)


def test_changed_edges_are_refused_and_files_without_a_digest_load(corpus, tmp_path):
    edges, path = score_edges(corpus, ["a", "b"], n=3, by="language"), tmp_path / "edges.json"
    edges.save(path)
    assert ScoreEdges.load(path) == edges
    pd.testing.assert_frame_equal(add_buckets(corpus, path), add_buckets(corpus, edges))
    content = path.read_text()
    digits = [place for place, letter in enumerate(content) if letter.isdigit()]
    for place in digits:
        other = str(9 - int(content[place]))
        path.write_text(content[:place] + other + content[place + 1 :])
        if json.loads(path.read_text()) == json.loads(content):
            continue  # beyond what a number keeps
        with pytest.raises(ValueError, match=f"{path} holds no edges of buckets"):
            ScoreEdges.load(path)
    path.write_text(json.dumps({k: v for k, v in json.loads(content).items() if k != "digest"}))
    assert ScoreEdges.load(path) == edges


def test_mistakes_are_named(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"no column 'aa'; columns are .* Did you mean 'a'"):
        score_edges(corpus, "aa")
    for twice in ("a", "tokens", "language"):
        doubled = pd.concat([corpus, corpus[[twice]]], axis=1)
        with pytest.raises(ValueError, match=f"2 column '{twice}'; columns are"):
            score_edges(doubled, "a", weight="tokens", by="language")
    with pytest.raises(TypeError, match=r"'text' holds .*, not numbers"):
        score_edges(corpus, "text")
    with pytest.raises(TypeError, match="weights are whole numbers"):
        score_edges(corpus, "a", weight="b")
    with pytest.raises(ValueError, match="weights are 0 or more"):
        score_edges(corpus.assign(tokens=-1), "a", weight="tokens")
    with pytest.raises(ValueError, match=r"add up to more than 2\*\*62"):
        score_edges(corpus.assign(tokens=1 << 60), "a", weight="tokens")
    with pytest.raises(TypeError, match=r"by='lists' makes no groups \(unhashable type: 'list'\)"):
        score_edges(corpus.assign(lists=[[1]] * ROWS), "a", by="lists")
    lists = pd.Series([[1]] * ROWS, dtype=pd.ArrowDtype(pa.list_(pa.int64())))
    with pytest.raises(TypeError, match="by='lists' makes no groups"):
        ScoreColumns(("a",), by="lists").check(corpus.assign(lists=lists)[:0])
    with pytest.raises(ValueError, match=r"\['a'\] have no scores"):
        score_edges(corpus.assign(a=np.nan), ["a", "b"])
    with pytest.raises(ValueError, match="have no scores"):
        score_edges(corpus.iloc[:0], "a")
    for n in (1, 1_001):
        with pytest.raises(ValueError, match=f"n={n} buckets: pass 2 to 1,000"):
            score_edges(corpus, "a", n=n)
    with pytest.raises(ValueError, match="more than 1,000 groups, such as 0: name columns of few"):
        score_edges(corpus.assign(row=range(ROWS)), "a", by="row")
    many = dd.from_pandas(corpus.assign(row=np.arange(ROWS) // 4), npartitions=4)
    with pytest.raises(ValueError, match="more than 1,000 groups"):
        score_edges(many, "a", by="row")
    with pytest.raises(ValueError, match=r"share=1\.5 must be above 0"):
        keep_top(corpus, "a", share=1.5)
    edges = score_edges(corpus, "a")
    with pytest.raises(ValueError, match="no column 'a'"):
        add_buckets(corpus.drop(columns="a"), edges)
    with pytest.raises(ValueError, match=r"already has \['bucket'\]"):
        add_buckets(corpus.assign(bucket=1), edges)
    with pytest.raises(ValueError, match="combine='mean' is not one of 'max', 'min'"):
        add_buckets(corpus, edges, combine="mean")
    wrong = ([0.1], [0.2, 0.1], [float("nan"), 0.1], ["a", "b"], [[0.1], [0.2]], 0.1)
    files = [json.dumps({"n": 3, "edges": {"a": {"null": edges}}}) for edges in wrong]
    for content in ("[1]", "{}", "x", *files):
        (tmp_path / "edges.json").write_text(content)
        with pytest.raises(ValueError, match="holds no edges of buckets"):
            ScoreEdges.load(tmp_path / "edges.json")
