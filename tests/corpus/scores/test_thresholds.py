"""Thresholds equal a search over sorted scores, and their intervals cover."""

import json
import pickle

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from dask.base import tokenize

from gpuclassify import ApplyThresholds, Thresholds
from gpuclassify.corpus.scores.calibration import Labelled, calibrated, fit_calibration, reliability
from gpuclassify.corpus.scores.thresholds import GroupThreshold, _fit_group
from gpuclassify.jobs.input import schema as schemas

pytest.importorskip("sklearn")
from scipy.stats import binomtest

LANGUAGES = ("de", "en", None)


def labelled(rows=2_000, seed=0, ties=False):
    rng = np.random.default_rng(seed)
    scores = rng.uniform(size=rows).astype(np.float32)
    if ties:
        scores = np.round(scores, 1)
    frame = pd.DataFrame(
        {
            "score": scores,
            "good": rng.uniform(size=rows) < scores,
            "language": pd.Series(rng.choice([0, 1, 2], rows)).map(dict(enumerate(LANGUAGES))),
            "weight": rng.integers(1, 9, rows) / 4,
        }
    )
    frame.loc[rng.choice(rows, rows // 20, replace=False), "score"] = np.nan
    frame["good"] = frame["good"].astype("boolean")
    frame.loc[rng.choice(rows, rows // 20, replace=False), "good"] = None
    return frame


def searched(frame, target, value, weight=None):
    """The threshold by trying each score in turn."""
    known = frame.dropna(subset=["score", "good"])
    weights = np.ones(len(known)) if weight is None else known[weight].to_numpy()
    scores, good = known["score"].to_numpy(), known["good"].to_numpy(dtype=bool)
    reached = []
    for least in np.unique(scores):
        kept = scores >= least
        share = {
            "precision": (weights * (kept & good)).sum() / weights[kept].sum(),
            "recall": (weights * (kept & good)).sum() / weights[good].sum(),
            "keep_share": weights[kept].sum() / weights.sum(),
        }[target]
        if share >= value - 1e-12:
            reached.append(least)
    return min(reached) if target == "precision" else max(reached)


TARGETS = [("precision", 0.7), ("precision", 0.5), ("recall", 0.9), ("recall", 1.0),
           ("keep_share", 0.25), ("keep_share", 1)]  # fmt: skip


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("weight", [None, "weight"])
@pytest.mark.parametrize(("target", "value"), TARGETS)
def test_thresholds_are_those_of_a_search_in_each_group(target, value, weight, ties):
    frame = labelled(ties=ties)
    options = {"score": "score", "label": "good", "by": "language", target: value}
    found = Thresholds.fit(frame, weight=weight, **options)
    assert list(found.groups) == ["de", "en", None]
    for language, each in zip(LANGUAGES, found.groups.values(), strict=True):
        is_one = frame["language"].isna() if language is None else frame["language"] == language
        assert each.threshold == searched(frame[is_one], target, value, weight)
        assert each.interval[0] is None or each.interval[0] <= each.threshold
        assert each.interval[1] is None or each.interval[1] >= each.threshold
        assert each.figures[target][0] >= value - 1e-12
        assert all(low <= share <= high for share, low, high in each.figures.values())
    known = frame.dropna(subset=["score", "good"])
    assert sum(each.rows for each in found.groups.values()) == len(known)
    assert found.left_out == len(frame) - len(known)


def test_precision_and_recall_are_those_of_scikit_learn():
    from sklearn.metrics import precision_score, recall_score

    frame = labelled().dropna(subset=["score", "good"])
    each = Thresholds.fit(frame, score="score", label="good", recall=0.8).groups[None]
    kept, good = frame["score"] >= each.threshold, frame["good"].astype(bool)
    assert each.figures["precision"][0] == pytest.approx(precision_score(good, kept))
    assert each.figures["recall"][0] == pytest.approx(recall_score(good, kept))
    assert each.figures["keep_share"][0] == pytest.approx(kept.mean())


@pytest.mark.parametrize("calibration", ["isotonic", "sigmoid"])
@pytest.mark.parametrize("weight", [None, "weight"])
def test_neither_partitions_nor_order_change_anything(weight, calibration):
    frame = labelled()
    options = {"score": "score", "label": "good", "by": "language", "precision": 0.7}
    options |= {"weight": weight, "calibration": calibration}
    whole = Thresholds.fit(frame, **options)
    shuffled = frame.sample(frac=1, random_state=3)
    for dataset in (
        shuffled,
        *(dd.from_pandas(frame, npartitions=n) for n in (1, 7, 100)),
        dd.from_pandas(shuffled, npartitions=7, sort=False),
    ):
        assert Thresholds.fit(dataset, **options).digest() == whole.digest()


@pytest.mark.parametrize("least", [1, 0.25])
@pytest.mark.parametrize(
    ("target", "value", "true"),
    # Scores are uniform, and the label is as probable as the score is high.
    [("recall", 0.8, np.sqrt(0.2)), ("keep_share", 0.3, 0.7), ("precision", 0.8, 0.6)],
)
def test_intervals_cover_as_often_as_they_claim(target, value, true, least):
    """Of all rows, or of samples that have more of the high scores, by their weights."""
    rng, tries, covered, held = np.random.default_rng(7), 2_000, 0, 0
    for _ in range(tries):
        scores = rng.uniform(size=4_000)
        chance = least + (1 - least) * scores
        taken = np.flatnonzero(rng.uniform(size=4_000) < chance)[:800]
        is_positive = rng.uniform(size=800) < scores[taken]
        weights = None if least == 1 else 1 / chance[taken]
        rows = Labelled.of(scores[taken], is_positive, weights)
        each = _fit_group(rows, target, value, False, None)
        low, high = each.interval
        covered += (low is None or low <= true) and (high is None or true <= high)
        careful = high if target == "precision" else low
        held += careful is None or (careful >= true if target == "precision" else careful <= true)
    assert 0.93 <= covered / tries <= 0.97
    assert held / tries >= 0.96


@pytest.mark.parametrize("kind", ["isotonic", "sigmoid"])
def test_calibration_is_that_of_scikit_learn(kind):
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.frozen import FrozenEstimator

    class Scores(ClassifierMixin, BaseEstimator):
        def __init__(self):
            self.classes_, self.fitted_ = np.array([False, True]), True

        def fit(self, x, y):
            return self

        def decision_function(self, x):
            return x[:, 0]

        def predict(self, x):
            return x[:, 0] > 0

    rng = np.random.default_rng(1)
    scores = rng.normal(size=1_000)
    is_positive = rng.uniform(size=1_000) < 1 / (1 + np.exp(-3 * scores))
    oracle = CalibratedClassifierCV(FrozenEstimator(Scores()), method=kind)
    oracle.fit(scores[:, None], is_positive)
    fitted = fit_calibration(kind, Labelled.of(scores, is_positive))
    probe = np.linspace(-3, 3, 101)
    expected = oracle.predict_proba(probe[:, None])[:, 1]
    assert calibrated(fitted, probe) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kind", ["isotonic", "sigmoid"])
def test_reliability_is_judged_by_other_rows(kind):
    rng = np.random.default_rng(2)
    scores = rng.normal(size=2_000)
    noise = Labelled.of(scores, rng.uniform(size=2_000) < 0.5)
    bins = np.array(reliability(kind, noise))
    assert bins[:, 4].sum() == 2_000 and np.abs(bins[:, 1] - 0.5).max() < 0.15
    sure = Labelled.of(scores, rng.uniform(size=2_000) < 1 / (1 + np.exp(-scores)))
    bins = np.array(reliability(kind, sure))
    assert ((bins[:, 2] <= bins[:, 0]) & (bins[:, 0] <= bins[:, 3])).mean() >= 0.8


def few(frame):
    """With three rows of one language, and some of another which are all good."""
    rare = pd.DataFrame({"score": [0.1, 0.2, 0.3], "good": [True, False, True], "language": "is"})
    sure = pd.DataFrame({"score": np.linspace(0, 1, 200), "good": True, "language": "fo"})
    return pd.concat([frame[frame["language"].notna()], rare, sure])


def test_small_groups_are_refused_or_pooled_and_said():
    frame = few(labelled())
    options = {"score": "score", "label": "good", "by": "language", "precision": 0.7}
    with pytest.raises(ValueError, match=r'"is" \(3 labelled, 2 with.*"fo" \(200 labelled, 200'):
        Thresholds.fit(frame, **options)
    found = Thresholds.fit(frame, small_groups="pool", **options)
    assert found.few == {"fo": [200, 200], "is": [3, 2]}
    assert list(found.groups) == ["de", "en"]
    alone = Thresholds.fit(frame, **{**options, "by": None}).groups[None]
    assert found.pooled == alone and found.of_group("xx") == alone
    assert '"is" (3 labelled' in str(found) and "all others" in str(found)
    assert "all others" in found.html()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {}, "no target asked for"),
        ({}, {"precision": 0.9, "recall": 0.5}, "precision and recall asked for"),
        ({}, {"precision": 1.5}, "precision=1.5 must be above 0"),
        ({}, {"recall": 0.9, "by": "lang"}, "Did you mean 'language'"),
        ({}, {"recall": 0.9, "weight": "wait"}, "no column 'wait'"),
        ({}, {"recall": 0.9, "weight": "language"}, "weights are numbers"),
        ({}, {"recall": 0.9, "calibration": "platt"}, "'platt' is not one of"),
        ({}, {"keep_share": 0.9, "cautious": True}, "no careful end"),
        ({}, {"recall": 0.9, "label": "language"}, 'such as positive="High"'),
        ({}, {"recall": 0.9, "label": "language", "positive": "fr"}, "'de', 'en'"),
        ({"good": True}, {"recall": 0.9}, "1,900 of 1,900 labels are those.*such as .'True'"),
        ({"good": None}, {"recall": 0.9}, "none of 2,000 rows has a score and a label"),
        ({"score": np.nan}, {"recall": 0.9}, "none of 2,000 rows has a score and a label"),
        (
            {},
            {"precision": 1.0, "cautious": True},
            "precision of 1 at the lower end of its interval; "
            r"the best lower end is 0\.[0-9]+\. Ask",
        ),
        ({}, {"recall": 0.9, "min_labels": 5_000}, "5000 are needed .min_labels"),
    ],
)
def test_what_cannot_be_is_refused(change, options, message):
    frame = labelled().assign(**change)
    with pytest.raises((TypeError, ValueError), match=message):
        Thresholds.fit(frame, **{"score": "score", "label": "good", **options})


@pytest.mark.parametrize("group", ["x", None])
def test_one_group_has_the_threshold_of_all(group):
    frame, options = (
        labelled().assign(one=group),
        {"score": "score", "label": "good", "recall": 0.8},
    )
    found = Thresholds.fit(frame, by="one", **options)
    (each,) = found.groups.values()
    assert each == Thresholds.fit(frame, **options).groups[None]
    assert len(ApplyThresholds(found)(frame)) == (frame["score"] >= each.threshold).sum()


def test_one_score_for_all_rows_keeps_all():
    frame = labelled().assign(score=0.5)
    each = Thresholds.fit(frame, score="score", label="good", keep_share=0.1).groups[None]
    assert each.threshold == 0.5 and each.figures["keep_share"][0] == 1.0


def test_a_group_that_never_reaches_the_precision_keeps_no_row(caplog):
    frame = labelled()
    is_german = (frame["language"] == "de").to_numpy()
    coin = np.arange(len(frame)) % 2 == 0
    frame["good"] = frame["good"].mask(is_german, coin).astype("boolean")
    frame.loc[is_german, "score"] = 0.3
    options = {"score": "score", "label": "good", "by": "language", "precision": 0.7}
    found = Thresholds.fit(frame, **options)
    assert found.groups["de"].threshold is None
    german = frame[is_german].dropna()
    best = np.floor(1_000 * german["good"].mean()) / 1_000
    unreached = f"no threshold has a precision of 0.7; the best precision is {best}"
    assert f"no row is kept of ['de']: {unreached}" in caplog.text
    assert f'No row of "de" is kept: {unreached}.' in str(found)
    kept = ApplyThresholds(found)(frame)
    assert set(kept["language"].dropna()) == {"en"}


@pytest.mark.parametrize("positive", ["High", ["High", "Top"], [3, 4], 3])
def test_labels_that_are_sought_are_named(positive):
    frame = labelled().dropna(subset=["good"])
    sought = positive[0] if isinstance(positive, list) else positive
    frame["grade"] = np.where(frame["good"], sought, "Low" if isinstance(sought, str) else 0)
    found = Thresholds.fit(frame, score="score", label="grade", positive=positive, recall=0.8)
    expected = Thresholds.fit(frame, score="score", label="good", recall=0.8)
    assert found.groups == expected.groups


def test_a_cautious_threshold_is_the_careful_end():
    frame = labelled()
    for target, end in (("precision", 1), ("recall", 0)):
        options = {"score": "score", "label": "good", target: 0.7}
        plain = Thresholds.fit(frame, **options).groups[None]
        careful = Thresholds.fit(frame, cautious=True, **options).groups[None]
        assert careful.threshold == plain.interval[end] != plain.threshold


@pytest.mark.parametrize("target", ["precision", "recall"])
def test_a_cautious_target_that_no_lower_end_reaches_names_the_best_one(target):
    frame = labelled(300).dropna(subset=["score", "good"])
    good, scores = frame["good"].to_numpy(bool), frame["score"].to_numpy()
    ends = []
    for least in scores:
        kept = scores >= least
        part = kept if target == "precision" else good
        interval = binomtest(int((kept & good).sum()), int(part.sum())).proportion_ci(
            method="wilson"
        )
        ends.append(interval.low)
    best = np.floor(1_000 * max(ends)) / 1_000
    words = f"no threshold has a {target} of 0.999 at the lower end of its interval; the best lower"
    with pytest.raises(ValueError, match=f"{words} end is {best:g}\\. Ask for less"):
        Thresholds.fit(frame, score="score", label="good", cautious=True, **{target: 0.999})


@pytest.mark.parametrize("calibration", [None, "isotonic", "sigmoid"])
def test_saved_thresholds_come_back_and_changed_ones_do_not(tmp_path, calibration):
    frame, path = few(labelled()), tmp_path / "thresholds.json"
    options = {"score": "score", "label": "good", "by": "language", "precision": 0.7}
    found = Thresholds.fit(frame, small_groups="pool", calibration=calibration, **options)
    found.save(path)
    assert Thresholds.load(path) == found
    values = json.loads(path.read_text())
    values["groups"]['"de"']["threshold"] = 0.1
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="another digest"):
        Thresholds.load(path)
    for content in ("[]", "{}", '{"score": "s"}', "no JSON", '{"groups": 3}'):
        path.write_text(content)
        with pytest.raises(ValueError, match="holds no thresholds"):
            Thresholds.load(path)


def expected_rows(frame, found):
    """Rows that reach their threshold, by pandas."""
    numbers = {group: each.threshold for group, each in found.groups.items()}
    least = frame["language"].map(lambda name: numbers.get(None if pd.isna(name) else name))
    return (frame["score"] >= least.astype(float)).to_numpy(dtype=bool)


@pytest.mark.parametrize("npartitions", [None, 1, 7, 100])
def test_rows_are_kept_by_the_threshold_of_their_group(npartitions):
    frame = labelled().set_index(np.arange(2_000) // 2)
    found = Thresholds.fit(
        frame, score="score", label="good", by="language", recall=0.6, calibration="sigmoid"
    )
    frame.loc[frame.index[:9], "language"] = "xx"  # which no label was of
    dataset = frame if npartitions is None else dd.from_pandas(frame, npartitions=npartitions)
    keep = expected_rows(frame, found)
    kept = ApplyThresholds(found)(dataset)
    marked = ApplyThresholds(found, keep_field="keep", probability_field="p")(dataset)
    if npartitions is not None:
        pd.testing.assert_frame_equal(kept._meta, kept.partitions[0].compute().iloc[:0])
        assert marked.dtypes.to_dict() == marked.partitions[0].compute().dtypes.to_dict()
        kept, marked = kept.compute(), marked.compute()
    columns = [*frame.columns]
    pd.testing.assert_frame_equal(kept, frame[keep], check_dtype=False)
    pd.testing.assert_frame_equal(marked[columns], frame, check_dtype=False)
    assert marked["keep"].dtype == bool and marked["keep"].tolist() == keep.tolist()
    assert marked["p"].dtype == np.float32
    is_unknown = (frame["score"].isna() | (frame["language"] == "xx")).to_numpy(dtype=bool)
    assert marked["p"].isna().tolist() == is_unknown.tolist()


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([2**53, 2**53 + 1, None], pa.int64()),
        ([2**64 - 1, 2**64 - 2, None], pa.uint64()),
        ([0.5, float("nan"), None], pa.float64()),
        ([True, False, None], pa.bool_()),
        (["a", "b", None], pa.string()),
    ],
    ids=lambda value: str(value) if isinstance(value, pa.DataType) else "",
)
def test_a_first_stage_keeps_the_rows_of_a_later_one(values, kind):
    table = pa.table({"group": pa.array(values * 2, kind), "score": [0.1, 0.3, 0.5, 0.6, 0.2, 0.4]})
    keys = [None if each != each else each for each in values]
    least = dict(zip(keys, [0.2, 0.3, 0.45], strict=True))
    groups = {
        key: GroupThreshold(9, 9, number, [None] * 2, {}, 1.0) for key, number in least.items()
    }
    mapper = ApplyThresholds(Thresholds("score", "good", "recall", 0.5, groups, by="group"))
    expected = [
        row
        for row, (key, score) in enumerate(zip(keys * 2, table["score"].to_pylist(), strict=True))
        if score >= least[key]
    ]
    assert np.flatnonzero(mapper.choose(table)).tolist() == expected
    for frame in (schemas.to_pandas(table), table.to_pandas(types_mapper=pd.ArrowDtype)):
        assert mapper(frame).index.tolist() == expected


def test_the_mapper_is_lazy_small_and_known_by_its_thresholds(tmp_path):
    frame = labelled()
    found = Thresholds.fit(frame, score="score", label="good", by="language", recall=0.6)
    found.save(tmp_path / "thresholds.json")
    mapper = ApplyThresholds(tmp_path / "thresholds.json", keep_field="keep")
    again = pickle.loads(pickle.dumps(mapper))
    assert repr(again) == f"ApplyThresholds('{tmp_path}/thresholds.json', keep_field='keep')"
    assert tokenize(again) == tokenize(ApplyThresholds(found, keep_field="keep"))
    assert tokenize(again) != tokenize(ApplyThresholds(found))
    assert mapper.describe()["thresholds"] == found.digest()
    scores = dd.from_pandas(frame, npartitions=3).assign(text="x")
    lazy = ApplyThresholds(found)(scores)[["text"]]  # without the columns that decide
    kept = ApplyThresholds(found)(frame)
    assert lazy.compute().index.tolist() == kept.index.tolist()
    for rows in (frame.iloc[:0], frame.assign(score=np.float32(np.nan))):
        assert len(ApplyThresholds(found)(rows)) == 0
        pd.testing.assert_series_equal(mapper(rows).dtypes, mapper(frame).dtypes)
        assert not mapper(rows)["keep"].any()


def test_columns_that_are_there_or_missing_are_refused():
    frame = labelled()
    found = Thresholds.fit(frame, score="score", label="good", recall=0.6)
    with pytest.raises(ValueError, match="already has"):
        ApplyThresholds(found, keep_field="good")(frame)
    assert "score" in ApplyThresholds(found, keep_field="good", overwrite=True)(frame)
    with pytest.raises(ValueError, match="no column 'score'"):
        ApplyThresholds(found)(frame.drop(columns="score"))
    with pytest.raises(ValueError, match="no calibration"):
        ApplyThresholds(found, probability_field="p")
    with pytest.raises(FileNotFoundError):
        ApplyThresholds("nothing.json")


def test_a_threshold_of_a_float32_is_reached_in_float64_and_back():
    scores = np.linspace(0, 1, 1_001, dtype=np.float32)
    written = pd.DataFrame({"score": [float(str(score)) for score in scores],
                            "good": scores > 0.7})  # fmt: skip
    found = Thresholds.fit(written, score="score", label="good", recall=1.0)
    kept = ApplyThresholds(found)(pd.DataFrame({"score": scores}))
    assert len(kept) == (scores > 0.7).sum()
