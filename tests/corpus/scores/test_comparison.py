"""`compare` and ``gpuclassify compare``: what another setting of a classifier changes."""

import json

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from gpuclassify import (
    DistributedDataClassifier,
    Embedder,
    FineWebEduClassifier,
    QualityClassifier,
    compare,
)
from gpuclassify.commands.cli import main
from gpuclassify.corpus.scores import comparison
from tests.replicas import sample_texts

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TEXTS = [*sample_texts(60, max_words=60), None, "a <b> & c"]
FRAME = pd.DataFrame({"id": range(len(TEXTS)), "text": TEXTS}, index=range(100, 100 + len(TEXTS)))


@pytest.fixture(scope="module")
def pair(checkpoint):
    """The first reads all of a text, the second a few tokens."""

    def make(**settings):
        own = {"model": checkpoint("quality"), "score_field": "scores", **settings}
        return QualityClassifier(**own), QualityClassifier(**own, max_seq_length=8)

    return make


def test_shares_and_differences_are_those_of_two_plain_runs(pair):
    first, second = pair()
    one, other = first(FRAME).dropna(), second(FRAME).dropna()
    is_other = one["quality_pred"] != other["quality_pred"]
    differences = np.abs(np.stack(one["scores"]) - np.stack(other["scores"])).max(axis=1)

    found = compare(FRAME, first, second)

    assert 0 < is_other.sum() < len(one) == found.rows
    assert found.changed_labels == found.changed == pytest.approx(is_other.mean())
    assert found.changed_rows is None
    assert found.largest_difference == pytest.approx(differences.max(), abs=1e-6)
    assert found.mean_difference == pytest.approx(differences.mean(), abs=1e-6)
    for label, (rows, share) in found.agreement.items():
        own = is_other[one["quality_pred"] == label]
        assert (rows, share) == (len(own), pytest.approx(1 - own.mean()))
    moved = found.moved
    assert set(moved.index[: is_other.sum()]) == set(one.index[is_other])
    assert (moved["label_a"] != moved["label_b"]).sum() == is_other.sum()
    assert moved["label_a"].tolist() == one["quality_pred"][moved.index].tolist()
    assert min(found.rows_per_second) > 0


def test_filters_count_rows_that_one_alone_keeps(pair):
    first, second = pair(filter_by="High")
    kept = set(first(FRAME).index) ^ set(second(FRAME).index)
    found = compare(FRAME, first, second)
    assert kept
    assert found.changed_rows == pytest.approx(len(kept) / found.rows)
    assert (found.moved["kept_a"] != found.moved["kept_b"]).sum() == len(kept)


def test_equal_settings_change_nothing(pair):
    first, _ = pair(filter_by="High")
    found = compare(dd.from_pandas(FRAME, npartitions=3), first, first, limit=40)
    assert (found.rows, found.changed, found.largest_difference) == (40, 0, 0)
    assert found.moved.empty
    assert {share for _, share in found.agreement.values()} == {1}


def test_numbers_and_embeddings_are_compared_too(checkpoint, sequence_classifier):
    model = checkpoint("fineweb-edu")
    exact, fast = (FineWebEduClassifier(model=model, dtype=d) for d in ("float32", "bfloat16"))
    scores = [each(FRAME)["fineweb-edu-score-float"].dropna() for each in (exact, fast)]
    found = compare(FRAME, exact, fast)
    expected = (scores[0] - scores[1]).abs().max()
    assert 0 < found.largest_difference == pytest.approx(expected, abs=1e-6)
    embedder = Embedder(model=sequence_classifier("bert"))
    assert compare(TEXTS[:5], embedder, embedder).largest_difference == 0


@pytest.mark.parametrize("settings", [{}, {"score_field": None}], ids=["scores", "labels alone"])
def test_scores_are_those_of_labels_and_not_what_else_is_told_of_a_text(checkpoint, settings):
    own = {"model": checkpoint("quality"), "score_field": "scores", **settings}
    lines = {"long_text": "lines", "line_min_score": {"High": 0.3}, "line_scores_field": "lines"}
    more = {"seen_field": "seen", "kept_share_field": "kept", "kept_text_field": "text_kept"}
    texts = [f"{text}\n\n{text[:40]}" for text in TEXTS if text]
    pairs = [
        [QualityClassifier(**own, **lines, **more, max_seq_length=length) for length in (256, 6)],
        [QualityClassifier(**own, seen_field="seen", max_seq_length=n) for n in (256, 6)],
    ]
    for one, other in pairs:
        found = compare(texts, one, other)
        if own["score_field"] is None:
            assert found.largest_difference is None and not found.points
            continue
        scores = [np.stack(each(texts)["scores"]) for each in (one, other)]
        differences = np.abs(scores[0] - scores[1]).max(axis=1)
        assert found.largest_difference == pytest.approx(differences.max(), abs=1e-6)
        assert found.mean_difference == pytest.approx(differences.mean(), abs=1e-6)
        assert found.moved["score_a"].max() < 1


def test_null_numbers_hide_no_other_numbers_of_their_row(pair, monkeypatch):
    first, second = pair()
    expected = compare(TEXTS, first, second)
    numbers = comparison._numbers

    def with_null(array):
        found = numbers(array)
        return found if found is None else np.hstack([found, np.full_like(found[:, :1], np.nan)])

    monkeypatch.setattr(comparison, "_numbers", with_null)
    found = compare(TEXTS, first, second)
    assert found.largest_difference == expected.largest_difference > 0
    assert found.mean_difference == expected.mean_difference
    assert found.points == expected.points


def test_rows_without_text_change_nothing(pair):
    first, filtered = pair()[0], pair(filter_by="High")[0]
    texts, own = [*[None] * 200, *TEXTS], [text for text in TEXTS if text is not None]
    found = compare(texts, first, filtered)
    assert found.rows == len(own)
    assert found.changed_rows == 1 - len(filtered(own)) / len(own) > 0
    assert found.moved["text"].notna().all()


@pytest.mark.parametrize("name", ["text", "body", None], ids=str)
def test_a_column_is_texts_like_any_other(pair, name):
    column = pd.Series(TEXTS, name=name)
    expected = compare(TEXTS, *pair(), limit=50)
    for texts in (column, dd.from_pandas(column, npartitions=3)):
        found = compare(texts, *pair(), limit=50)
        assert found.as_dict()["agreement"] == expected.as_dict()["agreement"]
        np.testing.assert_allclose(found.points, expected.points, atol=1e-6)


def test_what_cannot_be_compared_is_refused(pair, sequence_classifier):
    first, second = pair()
    with pytest.raises(TypeError, match="b is the class QualityClassifier: compare"):
        compare(FRAME, first, QualityClassifier)
    with pytest.raises(ValueError, match="gives labels: compare two classifiers of one kind"):
        compare(FRAME, first, Embedder(model=sequence_classifier("bert")))
    for no_frame in ({"a text"}, 5):
        with pytest.raises(TypeError, match="pass a DataFrame"):
            compare(no_frame, first, second)
    with pytest.raises(ValueError, match="no row has a text"):
        compare([None], first, second)
    with pytest.raises(ValueError, match="limit"):
        compare(FRAME, first, second, limit=0)


def test_other_labels_are_told_as_they_are(sequence_classifier, tmp_path, checkpoint):
    one = DistributedDataClassifier(model=sequence_classifier("bert"))
    other = QualityClassifier(model=checkpoint("quality"), label_field="preds")
    found = compare(FRAME, one, other)
    assert found.changed_labels == 1
    assert found.largest_difference is None
    found.save(tmp_path / "page.html")


@pytest.fixture
def run(checkpoint, tmp_path):
    path = tmp_path / "in.jsonl"
    FRAME.to_json(path, orient="records", lines=True)
    words = ["compare", str(path), "--classifier", "quality", "--model", str(checkpoint("quality"))]
    return lambda *more: CliRunner().invoke(main, [*words, *map(str, more)])


def test_the_command_prints_and_draws(run, pair, tmp_path):
    expected = compare(FRAME, *pair())
    done = run("--with", "max_seq_length=8", "--page", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    assert f"{expected.changed_labels:.2%} of the rows get another one" in done.stdout
    page = (tmp_path / "page.html").read_text()
    assert f"{expected.changed_labels:.2%} of the rows get another one" in page
    assert f"of {len(expected.moved):,} rows." in page
    assert "a &lt;b&gt; &amp; c" in page or "a <b> & c" not in page
    found = json.loads(run("--with", "max_seq_length=8", "--json").stdout)
    assert found["changed_labels"] == expected.changed_labels
    assert found["moved"][0]["label_a"] != found["moved"][0]["label_b"]


def test_the_command_fails_where_more_rows_change_than_may(run):
    done = run("--with", "max_seq_length=8", "--most-changed", 0.005)
    assert (done.exit_code, "of the rows change, more than the 0.50%" in done.stderr) == (1, True)
    assert run("--with", "batch_size=2", "--most-changed", 0.005).exit_code == 0


def test_an_error_of_the_command_is_none_of_changed_rows(run, tmp_path, monkeypatch):
    def fails(*args, **settings):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("gpuclassify.corpus.scores.comparison.compare", fails)
    done = run("--with", "max_seq_length=8", "--most-changed", 0.005)
    assert (done.exit_code, done.stderr.strip()) == (2, "Error: out of memory")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "such as --with dtype=bfloat16 or --with model=NAME"),
        (("--with", "dtype"), "pass NAME=VALUE, such as `autocast=false`"),
        (("--with", "dtyp=bfloat16"), "Did you mean 'dtype'?"),
        (("--classifier", "domain", "--with", "dtype=bfloat16"), "could mean any of"),
    ],
)
def test_a_wrong_call_says_what_to_pass(run, words, told):
    done = run(*words)
    assert done.exit_code == 2
    assert told in done.stderr
