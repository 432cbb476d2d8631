"""`agreement`: coefficients by scikit-learn, scipy and brute force, weighted, with intervals."""

import itertools
import json

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from scipy.stats import spearmanr
from sklearn.metrics import cohen_kappa_score, confusion_matrix

from gpuclassify import Agreement, agreement
from gpuclassify.commands.cli import main
from gpuclassify.corpus.scores.agreement import _alpha, _pair_figures
from gpuclassify.corpus.statistics.intervals import bootstrap

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")
RATERS = ["human", "llm", "head"]


def make_labels(rows=240, seed=0):
    """Labels of three raters, some null, grades and scores alike, and whole weights."""
    rng = np.random.default_rng(seed)
    truth = rng.choice(4, rows, p=[0.5, 0.3, 0.15, 0.05])
    frame = pd.DataFrame({"text": [f"text <{row}>" for row in range(rows)]})
    for number, name in enumerate(RATERS):
        grade = np.where(rng.random(rows) < 0.2 + number / 10, rng.integers(0, 4, rows), truth)
        is_null = rng.random(rows) < 0.05
        frame[name] = pd.Series(np.array(["x", "y", "z", "u"])[grade]).mask(is_null)
        frame[f"{name}_grade"] = pd.array(grade, "Int64")
        frame.loc[is_null, f"{name}_grade"] = pd.NA
        frame[f"{name}_score"] = (grade + rng.normal(0, 0.3, rows)).round(1)
        frame.loc[is_null, f"{name}_score"] = np.nan
    frame["language"] = rng.choice(["de", "en"], rows)
    frame["weight"] = rng.integers(1, 6, rows)
    return frame


FRAME = make_labels()
COLUMNS = {
    "labels": RATERS,
    "grades": [f"{name}_grade" for name in RATERS],
    "scores": [f"{name}_score" for name in RATERS],
}

DISTANCES = {"labels": lambda a, b: float(a != b)}


@pytest.fixture
def few_draws(monkeypatch):
    monkeypatch.setattr("gpuclassify.corpus.statistics.intervals.RESAMPLES", 60)


def value(found, figure, between, group=None):
    rows = found.figures.query("figure == @figure and between == @between")
    rows = rows[[each == group for each in rows["group"]]]
    return rows["value"].item()


def brute_alpha(values, weights, distance):
    """Krippendorff's alpha by its definition, over all pairs of values, with weights of rows."""
    pairs = [(list(row[~np.isnan(row)]), w) for row, w in zip(values, weights, strict=True)]
    pairs = [(row, w) for row, w in pairs if len(row) > 1]
    mean = np.mean([w for _, w in pairs])
    single = [(v, w / mean) for row, w in pairs for v in row]
    total = sum(w for _, w in single)
    observed = sum(
        w / mean * sum(distance(a, b) for a, b in itertools.permutations(row, 2)) / (len(row) - 1)
        for row, w in pairs
    )
    expected = sum(p * q * distance(a, b) for a, p in single for b, q in single)
    return 1 - observed / (expected / (total - 1))


@pytest.mark.parametrize("weight", [None, "weight"])
@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.usefixtures("few_draws")
def test_figures_are_those_of_sklearn_scipy_and_brute_force(kind, weight):
    names = COLUMNS[kind]
    found = agreement(FRAME, names, by="language", weight=weight)
    assert isinstance(found, Agreement)
    assert found.kind == kind
    for group in (None, "de", "en"):
        rows = FRAME if group is None else FRAME[FRAME["language"] == group]
        weights = rows[weight] if weight else pd.Series(1, rows.index)
        for one, other in itertools.combinations(names, 2):
            both = rows[[one, other]].dropna()
            a, b = both[one].astype("O").tolist(), both[other].astype("O").tolist()
            w = weights[both.index].to_numpy()
            pair = f"{one}, {other}"
            if kind != "scores":
                power = "quadratic" if kind == "grades" else None
                kappa = cohen_kappa_score(a, b, sample_weight=w, weights=power)
                assert value(found, "kappa", pair, group) == pytest.approx(kappa)
                same = np.average(np.array(a) == np.array(b), weights=w)
                assert value(found, "same", pair, group) == pytest.approx(same)
            if kind != "labels":
                rho = spearmanr(np.repeat(a, w), np.repeat(b, w)).statistic
                assert value(found, "spearman", pair, group) == pytest.approx(rho)
                difference = np.average(np.abs(np.subtract(a, b)), weights=w)
                assert value(found, "difference", pair, group) == pytest.approx(difference)
        codes = rows[names].replace({"x": 0, "y": 1, "z": 2, "u": 3}).astype("Float64")
        values = codes.to_numpy(dtype=float, na_value=np.nan)
        distance = DISTANCES.get(kind, lambda a, b: (a - b) ** 2)
        alpha = brute_alpha(values, weights, distance)
        assert value(found, "alpha", ", ".join(names), group) == pytest.approx(alpha)


@pytest.mark.parametrize(("name", "kind", "alpha"), [("n", "labels", 0.691), ("i", "s", 0.811)])
def test_alpha_of_the_published_example(name, kind, alpha):
    """Three observers and fifteen units, as in Wikipedia's article, which cites Krippendorff."""
    a = [None] * 5 + [3, 4, 1, 2, 1, 1, 3, 3, None, 3]
    b = [1, None, 2, 1, 3, 3, 4, 3] + [None] * 7
    c = [None, None, 2, 1, 3, 4, 4, None, 2, 1, 1, 3, 3, None, 4]
    frame = pd.DataFrame({"a": a, "b": b, "c": c}, dtype="Int64")
    frame = frame.astype("str").where(frame.notna()) if kind == "labels" else frame
    found = agreement(frame, ["a", "b", "c"])
    assert value(found, "alpha", "a, b, c") == pytest.approx(alpha, abs=5e-4)


@pytest.mark.usefixtures("few_draws")
def test_confusion_counts_rows_or_their_weights():
    for kind in ("labels", "grades"):
        names = COLUMNS[kind]
        found = agreement(FRAME, names, weight="weight")
        for (one, other), counts in found.confusion.items():
            both = FRAME[[one, other, "weight"]].dropna()
            a, b = (both[name].astype(str) for name in (one, other))
            truth = confusion_matrix(a, b, labels=[*counts], sample_weight=both["weight"])
            np.testing.assert_array_equal(counts, truth)
            assert [*counts] == [*counts.index] == sorted(counts)
    assert agreement(FRAME, COLUMNS["scores"]).confusion == {}


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.usefixtures("few_draws")
def test_order_and_partitions_do_not_matter(kind):
    whole = agreement(FRAME, COLUMNS[kind], by="language", weight="weight")
    shuffled = FRAME.sample(frac=1, random_state=1)
    parts = [dd.from_pandas(shuffled, npartitions=n, sort=False) for n in (1, 7, 100)]
    for frame in (shuffled, *parts):
        other = agreement(frame, COLUMNS[kind], by="language", weight="weight")
        pd.testing.assert_frame_equal(other.figures, whole.figures, rtol=0, atol=1e-12)
        assert other.differing["text"].tolist() == whole.differing["text"].tolist()
        assert other.rows == whole.rows


@pytest.mark.usefixtures("few_draws")
def test_the_rows_that_differ_most_come_first():
    found = agreement(FRAME, RATERS).differing
    labels = found[RATERS].nunique(axis=1)
    assert labels.is_monotonic_decreasing and labels.min() == 2
    assert len(found) == (FRAME[RATERS].nunique(axis=1) > 1).sum()
    scores = FRAME[COLUMNS["scores"]]
    spread = agreement(FRAME, COLUMNS["scores"]).differing[COLUMNS["scores"]]
    spread = spread.max(axis=1) - spread.min(axis=1)
    assert spread.is_monotonic_decreasing
    assert spread.iloc[0] == (scores.max(axis=1) - scores.min(axis=1)).max()


ENDS = {
    "one class": (["a"] * 6, ["a"] * 6, {"same": 1.0, "kappa": None, "alpha": None}),
    "perfect": (["a", "b"] * 3, ["a", "b"] * 3, {"same": 1.0, "kappa": 1.0, "alpha": 1.0}),
    "reverse": (["a", "b"] * 3, ["b", "a"] * 3, {"same": 0.0, "kappa": -1.0}),
    "ties": ([1.5] * 6, [2.5, 1.5] * 3, {"spearman": None, "difference": 0.5}),
    "one row": (["a", None], ["b", "b"], {"same": 0.0, "kappa": 0.0}),
}


@pytest.mark.parametrize(("one", "other", "figures"), ENDS.values(), ids=ENDS)
def test_ends_of_the_world_have_figures_or_dashes(one, other, figures):
    found = agreement(pd.DataFrame({"one": one, "other": other}), ["one", "other"])
    for name, known in figures.items():
        shown = value(found, name, "one, other")
        assert np.isnan(shown) if known is None else shown == pytest.approx(known)
    assert "nan" not in str(found)
    json.dumps(found.as_dict(), allow_nan=False)


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.usefixtures("few_draws")
def test_one_group_has_the_figures_of_all(kind):
    figures = agreement(FRAME.assign(one="x"), COLUMNS[kind], by="one", weight="weight").figures
    every, group = (figures[figures["group"].isna() == is_all] for is_all in (True, False))
    values = ["figure", "between", "rows", "value", "low", "high"]
    pd.testing.assert_frame_equal(*(part[values].reset_index(drop=True) for part in (every, group)))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [*COLUMNS, "weighted"])
def test_intervals_cover_as_often_as_they_claim(kind, monkeypatch):
    """Of 1,500 samples of 200 rows, whose shares of hits have a standard error of 0.006."""
    monkeypatch.setattr("gpuclassify.corpus.statistics.intervals.RESAMPLES", 250)

    def make(rng, rows):
        if kind in ("scores", "grades"):
            truth = rng.gamma(2, 1, rows)
            values = np.stack([truth + rng.normal(0, 1, rows) for _ in "ab"], axis=1)
            return values if kind == "scores" else values.round().clip(0, 5)
        truth = rng.choice(3, rows, p=[0.6, 0.3, 0.1])
        seen = [np.where(rng.random(rows) < 0.3, rng.integers(0, 3, rows), truth) for _ in "ab"]
        return np.stack(seen, axis=1).astype(float)

    def figures_of(values, weights):
        given, rows = kind.replace("weighted", "labels"), np.arange(len(values))
        calls = _pair_figures(*values.T, weights, given), _alpha(values, weights, given)
        return [(figures, figures(rows), rows) for figures in calls]

    def drawn(rng):
        if kind != "weighted":
            return make(rng, 200), np.ones(200)
        values = make(rng, 800)  # of which the commonest label is drawn less often
        chance = np.where(values[:, 0] == 0, 0.4, 1.0)
        taken = np.flatnonzero(rng.random(800) < chance)[:200]
        return values[taken], 1 / chance[taken]

    corpus = figures_of(make(np.random.default_rng(1), 1_000_000), np.ones(1_000_000))
    truth = {name: known for _, summary, _ in corpus for name, known in summary.items()}
    hits = dict.fromkeys(truth, 0)
    for seed in range(1_500):
        for call in figures_of(*drawn(np.random.default_rng([2, seed]))):
            for name, (low, high) in bootstrap(*call).items():
                hits[name] += low <= truth[name] <= high
    assert all(0.93 <= count / 1_500 <= 0.97 for count in hits.values()), hits


WRONG = {
    "one column": ({"between": ["human"]}, ValueError, "two columns or more"),
    "unknown": ({"between": ["human", "lmm"]}, ValueError, "Did you mean 'llm'"),
    "mixed": ({"between": ["human", "llm_score"]}, TypeError, "labels with labels"),
    "text": ({"between": "human"}, ValueError, "two columns or more"),
    "weight of text": ({"weight": "text"}, TypeError, "name a column of numbers"),
    "negative": ({"weight": "llm_score"}, ValueError, "weights are above 0"),
    "infinite": ({"weight": "infinite"}, ValueError, "has inf: weights are above 0, and finite"),
}


@pytest.mark.parametrize(("settings", "kind", "message"), WRONG.values(), ids=WRONG)
def test_wrong_calls_say_what_to_pass(settings, kind, message):
    with pytest.raises(kind, match=message):
        agreement(FRAME.assign(infinite=np.inf), **{"between": ["human", "llm"], **settings})


@pytest.mark.usefixtures("few_draws")
def test_dates_in_rows_that_differ_are_texts_in_json():
    found = agreement(FRAME.assign(day=pd.Timestamp("2026-01-02")), ["human", "llm"], by="day")
    assert found.differing["day"].iloc[0] == pd.Timestamp("2026-01-02")
    assert found.as_dict()["differing"][0]["day"].startswith("2026-01-02")


def test_all_null_is_refused():
    with pytest.raises(ValueError, match="no row has values in two"):
        agreement(FRAME.assign(human=None), ["human", "llm"])


@pytest.mark.usefixtures("few_draws")
def test_the_command_prints_a_table_and_writes_a_page(tmp_path):
    FRAME.to_json(tmp_path / "labelled.jsonl", orient="records", lines=True)
    words = [
        "agreement",
        str(tmp_path / "labelled.jsonl"),
        "--between",
        "human",
        "--between",
        "llm",
    ]
    page = tmp_path / "page.html"
    result = CliRunner().invoke(main, [*words, "--by", "language", "--page", str(page)])
    assert result.exit_code == 0, result.output
    assert "Cohen's kappa, de" in result.stdout and "95% interval" in result.stdout
    html = page.read_text()
    assert "Krippendorff" in html and "text &lt;" in html and "<script" not in html
    plain = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)
    assert plain["kind"] == "labels" and len(plain["differing"]) == 20
    wrong = CliRunner().invoke(main, [*words, "--weight", "text"])
    assert wrong.exit_code == 2 and "--weight 'text' holds" in wrong.output
