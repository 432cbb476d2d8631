"""Figures are scikit-learn's and scipy's, whatever the scores; the page holds them."""

import json
import re

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics
from sklearn.dummy import DummyClassifier, DummyRegressor

from gpuclassify.corpus.training.evaluation import ENOUGH_ROWS, Evaluation, evaluate
from gpuclassify.corpus.training.tasks import TASKS

LABELS = ("a", "b", "<i>c</i>")


def logits(seed=0, rows=400, columns=3):
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32) * 2


def judged(task, outputs, targets, labels=LABELS, **options):
    return evaluate(TASKS[task]("label"), outputs, targets, labels, **options)


@pytest.fixture(scope="module")
def classes():
    outputs = logits()
    targets = np.where(np.arange(400) % 3 == 0, outputs.argmax(axis=1), np.arange(400) % 3)
    return outputs, targets, judged("classes", outputs, targets)


def test_figures_of_classes(classes):
    outputs, targets, found = classes
    decided = outputs.argmax(axis=1)
    probabilities = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    assert found.rows == 400
    assert found.summary["accuracy"] == metrics.accuracy_score(targets, decided)
    assert found.summary["macro_f1"] == metrics.f1_score(targets, decided, average="macro")
    assert found.confusion == metrics.confusion_matrix(targets, decided).tolist()
    area = metrics.roc_auc_score(targets, probabilities, multi_class="ovr")
    assert found.summary["auc"] == pytest.approx(area, abs=1e-6)
    report = metrics.classification_report(targets, decided, target_names=LABELS, output_dict=True)
    for label in LABELS:
        assert found.labels[label]["count"] == report[label]["support"]
        assert found.labels[label]["recall"] == pytest.approx(report[label]["recall"])
        assert found.labels[label]["precision"] == pytest.approx(report[label]["precision"])


def test_a_curve_tells_what_a_least_score_keeps(classes):
    outputs, targets, found = classes
    probabilities = TASKS["classes"]("label").scores(outputs)[:, 1]
    points = found.curves["b"]
    assert len(points) == 101
    for threshold, precision, recall, kept in points:
        is_kept = probabilities >= threshold
        assert kept == pytest.approx(is_kept.mean())
        assert precision == pytest.approx((targets[is_kept] == 1).mean())
        assert recall == pytest.approx(is_kept[targets == 1].mean())


def test_figures_of_several_labels():
    outputs = logits(1)
    targets = (outputs + logits(2) > 0.5).astype(np.float32)
    found = judged("multilabel", outputs, targets)
    given = outputs >= 0
    assert found.summary["accuracy"] == metrics.accuracy_score(targets, given)
    assert found.summary["macro_f1"] == pytest.approx(
        metrics.f1_score(targets, given, average="macro")
    )
    assert found.summary["auc"] == pytest.approx(metrics.roc_auc_score(targets, outputs))
    assert found.confusion is None


def test_figures_of_a_lone_label_that_is_given_or_not():
    outputs = logits(1, columns=1)
    targets = (outputs + logits(2, columns=1) > 0.5).astype(np.float32)
    found = judged("multilabel", outputs, targets, ("a",))
    is_own, given = targets[:, 0], outputs[:, 0] >= 0
    assert found.summary["accuracy"] == metrics.accuracy_score(is_own, given)
    assert found.summary["macro_f1"] == pytest.approx(metrics.f1_score(is_own, given))
    assert found.labels["a"] == {
        "count": is_own.sum(),
        "precision": pytest.approx(metrics.precision_score(is_own, given)),
        "recall": pytest.approx(metrics.recall_score(is_own, given)),
        "f1": pytest.approx(metrics.f1_score(is_own, given)),
        "auc": pytest.approx(metrics.roc_auc_score(is_own, outputs[:, 0])),
    }


@pytest.fixture(scope="module")
def graded():
    grades = np.random.default_rng(3).integers(0, 6, 400).astype(np.float32)
    scores = grades[:, None] * 0.8 + logits(4, columns=1) / 2
    return scores, grades, judged("regression", scores, grades, ("edu",), bounds=(0, 5))


def test_figures_of_grades_are_those_of_rounded_scores_as_fineweb_edu_has_them(graded):
    scores, grades, found = graded
    rounded = np.round(scores[:, 0]).clip(0, 5)
    assert found.summary["macro_f1"] == metrics.f1_score(grades, rounded, average="macro")
    assert found.confusion == metrics.confusion_matrix(grades, rounded, labels=range(6)).tolist()
    assert found.threshold == 3
    assert found.summary["f1_at_threshold"] == pytest.approx(
        metrics.f1_score(grades >= 3, rounded >= 3)
    )
    assert found.summary["auc"] == metrics.roc_auc_score(grades >= 3, scores[:, 0])
    assert found.summary["pearson"] == pytest.approx(stats.pearsonr(scores[:, 0], grades)[0])
    assert found.summary["spearman"] == pytest.approx(stats.spearmanr(scores[:, 0], grades)[0])
    assert found.summary["mean_absolute_error"] == pytest.approx(
        metrics.mean_absolute_error(grades, scores[:, 0])
    )
    assert sum(map(sum, (counts for _, counts in found.spread))) == 400


def test_numbers_that_are_no_grades_have_no_confusion():
    numbers = np.linspace(0, 1, 50, dtype=np.float32)
    found = judged("regression", numbers[:, None] ** 2, numbers, ("share",))
    assert found.confusion is None
    assert found.threshold == 0.5
    assert found.summary["spearman"] == pytest.approx(1)
    assert "accuracy" not in found.summary


def test_what_is_not_defined_is_none():
    outputs, targets = logits(5)[:30], np.zeros(30, dtype=np.int64)
    assert judged("classes", outputs, targets).labels["b"]["auc"] is None
    flat = judged("regression", np.ones((9, 1), np.float32), np.arange(9.0, dtype=np.float32), "s")
    assert flat.summary["pearson"] is None
    assert "–" in flat.html()


@pytest.mark.parametrize("library", ["scipy", "sklearn"])
def test_a_missing_library_is_named_with_the_extra_that_brings_it(library, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == library else name)
    with pytest.raises(ModuleNotFoundError, match=rf"needs {library}: .*gpuclassify\[train\]"):
        judged("classes", logits(), np.zeros(400, np.int64))


def test_an_evaluation_is_json_and_comes_back(classes, graded):
    for found in (classes[2], graded[2]):
        assert Evaluation(**json.loads(json.dumps(found.as_dict()))) == found


def test_the_page_escapes_labels_and_needs_no_network(classes, graded, tmp_path):
    found = classes[2]
    found.save(tmp_path / "page.html")
    content = (tmp_path / "page.html").read_text()
    assert "&lt;i&gt;c" in content
    assert "<i>c" not in content
    assert not re.findall(r"(?:src|href)=|url\(|<script", content)
    assert f"{found.summary['accuracy']:.3f}" in content
    assert "0.5" in graded[2].html()
    assert "F1, 3 or more" in graded[2].html()
    assert "<iframe" in found._repr_html_()
    assert re.search(r"accuracy\s+0\.\d{3}", repr(found))


# How surely.


@pytest.mark.parametrize(("right", "rows"), [(0, 9), (25, 28), (28, 28), (700, 1000)])
def test_the_interval_of_an_accuracy_is_wilsons(right, rows):
    expected = stats.binomtest(right, rows).proportion_ci(0.95, method="wilson")
    outputs = np.stack([np.arange(rows) < right, np.arange(rows) >= right], axis=1)
    found = judged("classes", outputs.astype(np.float32), np.zeros(rows, np.int64), ("a", "b"))
    assert found.intervals["accuracy"] == pytest.approx([expected.low, expected.high], abs=1e-6)


@pytest.mark.parametrize("task", TASKS)
def test_other_intervals_are_those_of_figures_of_drawn_groups(classes, graded, task):
    """By scikit-learn and scipy, of rows that are repeated as they are drawn."""
    outputs, targets, _ = graded if task == "regression" else classes
    targets = targets[:, None] == np.arange(3) if task == "multilabel" else targets
    options = {"labels": ("edu",), "bounds": (0, 5)} if task == "regression" else {}
    groups = np.arange(400) // 4
    found = judged(task, outputs, targets, groups=groups, **options)
    scores = TASKS[task]("label").scores(outputs)
    random, drawn = np.random.default_rng(0), []
    for _ in range(1_000):
        times = np.bincount(random.integers(0, 100, 100), minlength=100)[groups]
        rows = np.repeat(np.arange(400), times)
        if task == "regression":
            numbers, annotated = scores[rows, 0], targets[rows]
            drawn.append(
                {
                    "spearman": stats.spearmanr(numbers, annotated)[0],
                    "pearson": stats.pearsonr(numbers, annotated)[0],
                    "auc": metrics.roc_auc_score(annotated >= 3, numbers),
                    "mean_absolute_error": metrics.mean_absolute_error(annotated, numbers),
                }
            )
        else:
            given = scores >= 0.5 if task == "multilabel" else scores.argmax(axis=1)
            f1 = metrics.f1_score(targets[rows], given[rows], average="macro")
            area = metrics.roc_auc_score(targets[rows], scores[rows], multi_class="ovr")
            drawn.append({"macro_f1": f1, "auc": area})
    for name in drawn[0]:
        expected = np.quantile([own[name] for own in drawn], [0.025, 0.975])
        assert found.intervals[name] == pytest.approx(expected, abs=1e-6)


def test_rows_that_are_alike_count_as_one(classes):
    outputs, targets, found = classes
    again = [np.repeat(values, 5, axis=0) for values in (outputs, targets, np.arange(400))]
    alike = judged("classes", *again[:2], groups=again[2])
    assert alike.summary["accuracy"] == pytest.approx(found.summary["accuracy"])
    assert alike.intervals["accuracy"] == pytest.approx(found.intervals["accuracy"], abs=0.005)
    apart = judged("classes", *again[:2])
    assert np.ptp(apart.intervals["accuracy"]) < 0.5 * np.ptp(found.intervals["accuracy"])
    lone = judged("classes", outputs, targets, groups=np.zeros(400))
    assert set(lone.intervals.values()) == {None}


def test_the_baseline_is_scikit_learns_dummy(classes, graded):
    _, targets, found = classes
    nothing = np.zeros((400, 1))
    commonest = DummyClassifier().fit(nothing, targets)
    assert found.baseline == {"accuracy": commonest.score(nothing, targets)}
    _, grades, found = graded
    mean = DummyRegressor().fit(nothing, grades).predict(nothing)
    assert found.baseline == pytest.approx(
        {
            "accuracy": DummyClassifier().fit(nothing, grades).score(nothing, grades),
            "mean_absolute_error": metrics.mean_absolute_error(grades, mean),
            "root_mean_squared_error": metrics.root_mean_squared_error(grades, mean),
        }
    )
    assert "for the accuracy the commonest grade" in found.html()


def test_few_rows_have_a_caution_and_no_curve_of_a_few(classes):
    outputs, targets, found = classes
    assert found.caution is None
    assert not found.undrawn
    widest = stats.binomtest(ENOUGH_ROWS // 2, ENOUGH_ROWS).proportion_ci(method="wilson")
    assert widest.high - widest.low < 0.1  # for which that many are enough
    rows = np.concatenate([np.flatnonzero(targets < 2)[:29], np.flatnonzero(targets == 2)[:1]])
    few = judged("classes", outputs[rows], targets[rows])
    low, high = few.intervals["accuracy"]
    assert f"{low:.3f} to {high:.3f}, an interval {high - low:.2f} wide" in few.caution
    assert "Annotate 370 more" in few.caution
    assert LABELS[2] in few.undrawn
    assert set(few.curves).isdisjoint(few.undrawn)
    assert {*few.curves, *few.undrawn} == set(LABELS)
    assert "Least score: &lt;i&gt;c" not in few.html()
    assert "fewer than 10 texts have the label" in few.html()
